"""Comparisons of methods under equal conditions."""

from resroute.experiments.cell import Outcome as Outcome
from resroute.experiments.cell import Task as Task
from resroute.experiments.demo import demo as demo
from resroute.experiments.demo import demo_configs as demo_configs
from resroute.experiments.engines import Engine as Engine
from resroute.experiments.engines import LocalEngine as LocalEngine
from resroute.experiments.estimate import Estimate as Estimate
from resroute.experiments.estimate import Estimator as Estimator
from resroute.experiments.facts import FactScores as FactScores
from resroute.experiments.facts import lines as fact_lines
from resroute.experiments.facts import score_facts as score_facts
from resroute.experiments.importance import Ablation as Ablation
from resroute.experiments.importance import Importance as Importance
from resroute.experiments.importance import importance as importance
from resroute.experiments.inspect import Inspection as Inspection
from resroute.experiments.inspect import inspect_model as inspect_model
from resroute.experiments.inspect import inspect_run as inspect_run
from resroute.experiments.inspect import save_inspection as save_inspection
from resroute.experiments.plan import Plan as Plan
from resroute.experiments.plan import read_plan as read_plan
from resroute.experiments.rates import Rates as Rates
from resroute.experiments.rates import best_rates as best_rates
from resroute.experiments.rates import read_rates as read_rates
from resroute.experiments.ray_engine import RayEngine as RayEngine
from resroute.experiments.report import Report as Report
from resroute.experiments.report import groups_table as groups_table
from resroute.experiments.report import make_report as make_report
from resroute.experiments.report import save_report as save_report
from resroute.experiments.report import terminal_table as terminal_table
from resroute.experiments.report import write_report as write_report
from resroute.experiments.results import runs_of as runs_of
from resroute.experiments.sample import prompt_ids as prompt_ids
from resroute.experiments.sample import sample as sample
from resroute.experiments.suites import SUITES as SUITES
from resroute.experiments.suites import Design as Design
from resroute.experiments.suites import Suite as Suite
from resroute.experiments.suites import make_suite as make_suite
from resroute.experiments.suites import series_label as series_label
from resroute.experiments.sweep import CellState as CellState
from resroute.experiments.sweep import SweepStopped as SweepStopped
from resroute.experiments.sweep import make_plan as make_plan
from resroute.experiments.sweep import plan_tasks as plan_tasks
from resroute.experiments.sweep import states as states
from resroute.experiments.sweep import sweep as sweep

__all__ = [
    "SUITES",
    "Ablation",
    "CellState",
    "Design",
    "Engine",
    "Estimate",
    "Estimator",
    "FactScores",
    "Importance",
    "Inspection",
    "LocalEngine",
    "Outcome",
    "Plan",
    "Rates",
    "RayEngine",
    "Report",
    "Suite",
    "SweepStopped",
    "Task",
    "best_rates",
    "demo",
    "demo_configs",
    "fact_lines",
    "groups_table",
    "importance",
    "inspect_model",
    "inspect_run",
    "make_plan",
    "make_report",
    "make_suite",
    "plan_tasks",
    "prompt_ids",
    "read_plan",
    "read_rates",
    "runs_of",
    "sample",
    "save_inspection",
    "save_report",
    "score_facts",
    "series_label",
    "states",
    "sweep",
    "terminal_table",
    "write_report",
]
