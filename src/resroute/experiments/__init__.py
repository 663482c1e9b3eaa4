"""Comparisons of methods under equal conditions."""

from resroute.experiments.demo import demo as demo
from resroute.experiments.demo import demo_configs as demo_configs
from resroute.experiments.sample import prompt_ids as prompt_ids
from resroute.experiments.sample import sample as sample

__all__ = ["demo", "demo_configs", "prompt_ids", "sample"]
