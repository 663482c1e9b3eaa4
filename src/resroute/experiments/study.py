"""What a set of finished runs says: values that tables, figures and pages are made of.

Losses are nats per character of the validation split. Differences are treatment minus baseline:
below zero is better.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from resroute.analysis import Run

Verdict = Literal["better", "worse", "no significant difference", "too few seeds", "interim"]
IntervalKind = Literal["paired t", "bootstrap"]


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """A comparison declared before its runs were made: treatment against baseline at a depth."""

    treatment: str
    """A series, such as `WAV`."""
    baseline: str
    num_layers: int


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What two runs must share for their losses to be compared."""

    corpus: str
    num_layers: int
    width: int
    context: int
    """Width and context are 0 where a run's configuration does not tell."""
    tokens: int
    """Training tokens."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """n values: mean, standard deviation (n - 1), and the 95 % t interval of the mean.

    Deviation and interval are None where n is 1.
    """

    n: int
    mean: float
    sd: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True, kw_only=True)
class Group:
    """Runs that differ in the seed alone."""

    series: str
    """The method as readers see it, with the options that tell it from others of its name."""
    method: str
    setting: Setting
    learning_rate: float
    runs: tuple[Run, ...]
    """By seed."""
    loss: Summary
    parameters: int
    tokens_per_second: float | None
    """Median over runs, None where none tells."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Treatment minus baseline over the seeds that both have, each at its best learning rate."""

    treatment: Group
    baseline: Group
    is_primary: bool
    loss: Summary
    """Of the paired differences, in nats per character."""
    perplexity: Summary
    """Of a token."""
    bits: Summary
    """Per character."""
    by_seed: tuple[tuple[int, float], ...]
    """Seed and difference of the loss."""
    p_value: float | None
    """Two-sided; None where fewer than two seeds are shared."""
    p_holm: float | None
    """Corrected over all exploratory differences of the study; of a primary one over its corpora,
    None with one corpus. An interval is not corrected: an exploratory one that excludes zero is a
    find only where `p_holm` is below 0.05 too."""
    interval: IntervalKind
    verdict: Verdict
    """`interim` where fewer seeds are finished than were planned for the primary contrast."""
    planned: int | None = None
    """Seeds that were planned for the primary contrast, where that is known."""


@dataclass(frozen=True, kw_only=True)
class Gap:
    """A difference over the course of training, with the 95 % interval of each evaluation."""

    treatment: Group
    baseline: Group
    tokens: tuple[int, ...]
    mean: tuple[float, ...]
    low: tuple[float | None, ...]
    high: tuple[float | None, ...]
    open_from: int | None
    """Training tokens from which on the band stays clear of zero; None if it does not."""


@dataclass(frozen=True, kw_only=True)
class EqualCompute:
    """Losses at the training time of the fastest method of a setting, read off the curves.

    A slower method is read before its learning rate has decayed, which overstates the loss that it
    would reach in that time by itself.
    """

    group: Group
    seconds: float
    tokens: float
    """How far this method gets in that time."""
    loss: Summary


@dataclass(frozen=True, kw_only=True)
class Study:
    """Everything that a report shows."""

    groups: tuple[Group, ...]
    """By corpus, sizes, depth, and the order of methods; one per learning rate."""
    best: tuple[Group, ...]
    """Of groups that differ in the learning rate alone, and have the most seeds of them, the one of
    lowest mean loss."""
    differences: tuple[Difference, ...]
    """Primary ones first."""
    gaps: tuple[Gap, ...]
    equal_compute: tuple[EqualCompute, ...]
    notes: tuple[str, ...]
    """Sentences that a reader must know, such as runs that were left out and why."""


def series_of(study: Study) -> Sequence[str]:
    """The study's series, in the order of its groups."""
    return list(dict.fromkeys(group.series for group in study.groups))
