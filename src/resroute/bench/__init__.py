"""Benchmarks: cases that check what they time, in pairs, with intervals."""

from resroute.bench.cases import CASES as CASES
from resroute.bench.cases import run as run
from resroute.bench.check import WrongResultError as WrongResultError
from resroute.bench.settings import Settings as Settings
from resroute.bench.table import footer as footer
from resroute.bench.table import lines as lines
from resroute.bench.table import table as table
from resroute.bench.timing import Comparison as Comparison
from resroute.bench.timing import Listener as Listener
from resroute.bench.timing import interval as interval

__all__ = [
    "CASES",
    "Comparison",
    "Listener",
    "Settings",
    "WrongResultError",
    "footer",
    "interval",
    "lines",
    "run",
    "table",
]
