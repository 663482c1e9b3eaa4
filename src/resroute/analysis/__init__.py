"""What finished runs say: tables and figures, as pure functions of their folders."""

from resroute.analysis.figures import depth_figure
from resroute.analysis.runs import METHODS, DepthWeights, Run, find_runs, read_run, unfinished_runs
from resroute.analysis.table import ComparisonRow, comparison_rows, comparison_table

__all__ = [
    "METHODS",
    "ComparisonRow",
    "DepthWeights",
    "Run",
    "comparison_rows",
    "comparison_table",
    "depth_figure",
    "find_runs",
    "read_run",
    "unfinished_runs",
]
