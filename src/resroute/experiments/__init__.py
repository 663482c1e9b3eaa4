"""Comparisons of methods under equal conditions."""

from resroute.experiments.demo import demo as demo
from resroute.experiments.demo import demo_configs as demo_configs
from resroute.experiments.facts import FactScores as FactScores
from resroute.experiments.facts import lines as fact_lines
from resroute.experiments.facts import score_facts as score_facts
from resroute.experiments.sample import prompt_ids as prompt_ids
from resroute.experiments.sample import sample as sample

__all__ = [
    "FactScores",
    "demo",
    "demo_configs",
    "fact_lines",
    "prompt_ids",
    "sample",
    "score_facts",
]
