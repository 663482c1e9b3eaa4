"""Means with intervals, paired differences, correction for many tests, and seeds to plan.

Everything is two-sided; intervals are of 95 %.
"""

import math
import statistics
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from resroute.config import UserError
from resroute.experiments.study import IntervalKind, Summary

LEVEL = 0.95
LEAST_FOR_BOOTSTRAP = 20
"""Values from which on an interval is bootstrapped.

A percentile bootstrap of three values spans little more than the values themselves: under the null
it excludes zero in one case of four, where all three have one sign. A t interval does in one of 20.
"""

_RESAMPLES = 9999
_MOST_SEEDS = 10**6


def summarise(values: Sequence[float]) -> Summary:
    """Mean, standard deviation (n - 1), and the t interval of the mean.

    Raises:
        UserError: No value, or one that is not finite.
    """
    mean, sd = _mean_and_sd(values)
    if sd is None:
        return Summary(n=1, mean=mean, sd=None, low=None, high=None)
    with _installed():
        import scipy.stats

        quantile = float(scipy.stats.t.ppf((1 + LEVEL) / 2, len(values) - 1))
    reach = quantile * sd / math.sqrt(len(values))
    return Summary(n=len(values), mean=mean, sd=sd, low=mean - reach, high=mean + reach)


def summarise_differences(differences: Sequence[float]) -> tuple[Summary, IntervalKind]:
    """As `summarise`; from 20 values on the interval is a bias-corrected bootstrap (BCa).

    The bootstrap draws from a fixed seed: equal values give equal intervals.
    """
    summary = summarise(differences)
    # without spread there is nothing to draw
    if summary.n < LEAST_FOR_BOOTSTRAP or not summary.sd:
        return summary, "paired t"
    import numpy as np
    import scipy.stats

    found = scipy.stats.bootstrap(
        (np.asarray(differences, dtype=np.float64),),
        np.mean,
        confidence_level=LEVEL,
        n_resamples=_RESAMPLES,
        method="BCa",
        random_state=np.random.default_rng(0),
    ).confidence_interval
    low, high = float(found.low), float(found.high)
    return Summary(n=summary.n, mean=summary.mean, sd=summary.sd, low=low, high=high), "bootstrap"


def paired(
    treatment: Mapping[int, float], baseline: Mapping[int, float]
) -> tuple[Summary, float | None, IntervalKind]:
    """Treatment minus baseline over the seeds that both have.

    Args:
        treatment: Values by seed.
        baseline: Values by seed.

    Returns:
        The differences' summary, the p-value of the paired t test (None where one seed is shared),
        and what the interval is.

    Raises:
        UserError: No seed is shared, or a value is not finite.
    """
    seeds = sorted(treatment.keys() & baseline.keys())
    if not seeds:
        raise UserError(
            f"no seed is shared: {sorted(treatment)} and {sorted(baseline)}; run both with equal "
            "seeds"
        )
    ours, theirs = [treatment[seed] for seed in seeds], [baseline[seed] for seed in seeds]
    summary, kind = summarise_differences([a - b for a, b in zip(ours, theirs, strict=True)])
    if summary.sd is None:
        return summary, None, kind
    if summary.sd == 0:
        # the limit of the t test
        return summary, 1.0 if summary.mean == 0 else 0.0, kind
    import scipy.stats

    with warnings.catch_warnings():
        # differences that are equal up to rounding: the p-value is then as good as zero
        warnings.filterwarnings("ignore", message="Precision loss", category=RuntimeWarning)
        return summary, float(scipy.stats.ttest_rel(ours, theirs).pvalue), kind


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected for their number by Holm's step-down method, in the order given."""
    if not p_values:
        return []
    with _installed():
        from statsmodels.stats.multitest import multipletests

    return [float(p) for p in multipletests(list(p_values), method="holm")[1]]


def planned_seeds(sd: float, effect: float, power: float = 0.8, alpha: float = 0.05) -> int:
    """Seeds with which a paired t test finds an effect.

    Args:
        sd: Standard deviation of the paired differences, as a pilot has it.
        effect: The difference that is to be found, in the unit of `sd`.
        power: Probability of finding it.
        alpha: Probability of a find where there is none.

    Returns:
        The least number, at least 2.

    Raises:
        UserError: Numbers out of range, or an effect that takes more than a million seeds.
    """
    _check_plan(sd, power, alpha)
    if not (math.isfinite(effect) and effect != 0):
        raise UserError(f"effect must be a finite number other than 0, got {effect}")
    if sd == 0:
        return 2
    size = abs(effect) / sd
    high = 2
    while _power(size, high, alpha) < power:
        high *= 2
        if high > _MOST_SEEDS:
            raise UserError(
                f"an effect of {effect:g} at a deviation of {sd:g} takes more than a million "
                "seeds; plan for a larger effect"
            )
    low = high // 2
    # power grows with the seeds: not enough at `low`, enough at `high`
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _power(size, middle, alpha) >= power else (middle, high)
    return high


def resolvable(sd: float, n: int, power: float = 0.8, alpha: float = 0.05) -> float:
    """The least effect that a paired t test of n seeds finds; see `planned_seeds`.

    Raises:
        UserError: Numbers out of range, or fewer than two seeds.
    """
    _check_plan(sd, power, alpha)
    if n < 2:
        raise UserError(f"n must be at least 2 seeds, got {n}")
    low, high = 0.0, 1.0
    while _power(high, n, alpha) < power:
        low, high = high, 2 * high
    # to the last bit but a few
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if _power(middle, n, alpha) >= power else (middle, high)
    return high * sd


def _check_plan(sd: float, power: float, alpha: float) -> None:
    if not (math.isfinite(sd) and sd >= 0):
        raise UserError(f"sd must be a finite number of at least 0, got {sd}")
    # as their alpha a test always finds; below it power means nothing
    if not 0 < alpha < power < 1:
        raise UserError(f"needs 0 < alpha < power < 1, got alpha {alpha} and power {power}")


def _power(size: float, n: int, alpha: float) -> float:
    """Power of a paired t test at an effect of `size` standard deviations."""
    with _installed():
        from statsmodels.stats.power import TTestPower

    found = float(TTestPower().power(size, n, alpha))
    # the noncentral t distribution runs out of digits where the power is one
    return 1.0 if math.isnan(found) else found


def _mean_and_sd(values: Sequence[float]) -> tuple[float, float | None]:
    if not values:
        raise UserError("no value to summarise; give at least one")
    for value in values:
        if not math.isfinite(value):
            raise UserError(f"values must be finite numbers, got {value}")
    # exact sums: equal values have no deviation at all
    numbers: list[Any] = list(values)
    mean = float(statistics.mean(numbers))
    return mean, float(statistics.stdev(numbers)) if len(numbers) > 1 else None


@contextmanager
def _installed() -> Iterator[None]:
    try:
        yield
    except ImportError:
        raise UserError(
            "intervals over seeds need scipy and statsmodels: pip install 'resroute[report]'"
        ) from None
