"""Measurements in alternating pairs, and what they say.

Two things that are timed one after the other see the same machine: its clock, its temperature and
what else runs on it. The ratio of a pair is free of what both share; the median of many ratios is
free of single accidents. Only ratios within one run are compared, never seconds between runs.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

COVERAGE = 0.95
LEAST_PAIRS = 6
"""Below this no two of the ratios enclose the median with 95 %."""


class Listener:
    """Told what a benchmark does; override what is of interest."""

    def message(self, text: str) -> None:
        """Something that a reader of the result should know."""

    def begin(self, label: str, total: int) -> None:
        """A comparison of `total` pairs begins."""

    def advance(self, done: int) -> None:
        """So many of its pairs are done."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One thing against another, pair by pair."""

    name: str
    """What is measured."""
    against: str
    """The baseline."""
    backend: str = ""
    group: str = ""
    """Rows that belong together, such as `batch 32`."""
    unit: str
    """Of the pairs: `s`, `tokens/s` or `bytes`."""
    pairs: tuple[tuple[float, float], ...]
    """Baseline first."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Sizes, parameters and what the check found."""

    @property
    def ratios(self) -> list[float]:
        """Of each pair, measured over baseline."""
        return [measured / baseline for baseline, measured in self.pairs]

    @property
    def ratio(self) -> float:
        """Median of the ratios."""
        return statistics.median(self.ratios)

    @property
    def interval(self) -> tuple[float, float] | None:
        """Of the median ratio; None where there are too few pairs for one."""
        return interval(self.ratios) if len(self.pairs) >= LEAST_PAIRS else None

    @property
    def baseline(self) -> float:
        """Median of the baseline, in `unit`."""
        return statistics.median(pair[0] for pair in self.pairs)

    @property
    def measured(self) -> float:
        """Median of what is measured, in `unit`."""
        return statistics.median(pair[1] for pair in self.pairs)

    def to_json(self) -> dict[str, Any]:
        """Every pair, and what is derived of them."""
        return {
            "name": self.name,
            "against": self.against,
            "backend": self.backend,
            "group": self.group,
            "unit": self.unit,
            "ratio": self.ratio,
            "interval": None if self.interval is None else list(self.interval),
            "baseline": self.baseline,
            "measured": self.measured,
            "details": dict(self.details),
            "pairs": [list(pair) for pair in self.pairs],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Comparison":
        """Read what `to_json` wrote."""
        names = ("name", "against", "backend", "group", "unit", "details")
        pairs = tuple((float(a), float(b)) for a, b in data["pairs"])
        return cls(**{name: data[name] for name in names}, pairs=pairs)


def interval(values: list[float]) -> tuple[float, float]:
    r"""A 95 % interval of the median of independent values, from their order alone.

    The k-th smallest and k-th largest of n values enclose the median with probability
    $1 - 2\,P(\mathrm{Binomial}(n, 1/2) < k)$, whatever their law. The largest k that keeps 95 % is
    taken; below `LEAST_PAIRS` values there is none, and the extremes are returned.
    """
    ordered, n = sorted(values), len(values)
    k, below = 1, 1 / 2**n
    while k < (n + 1) // 2:
        # P(Binomial < k + 1)
        below += math.comb(n, k) / 2**n
        if 1 - 2 * below < COVERAGE:
            break
        k += 1
    return ordered[k - 1], ordered[n - k]


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Wall time of one call, all of its kernels included."""
    _synchronise(device)
    began = time.perf_counter()
    work()
    _synchronise(device)
    return time.perf_counter() - began


def alternate(
    baseline: Callable[[], float],
    measured: Callable[[], float],
    *,
    pairs: int,
    warmup: int = 2,
    label: str = "",
    listener: Listener | None = None,
) -> tuple[tuple[float, float], ...]:
    """Measure two things in turn, A B A B.

    Args:
        baseline: Runs A once and returns what it measured.
        measured: The same of B.
        pairs: How often.
        warmup: Pairs beforehand that are not counted.
        label: What the listener is told.
        listener: Told of each pair.
    """
    listener = listener or Listener()
    listener.begin(label, pairs)
    for _ in range(warmup):
        baseline(), measured()
    found = []
    for done in range(1, pairs + 1):
        found.append((baseline(), measured()))
        listener.advance(done)
    return tuple(found)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
