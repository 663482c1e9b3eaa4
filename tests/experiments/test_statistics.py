import math
import sys

import numpy as np
import pytest
import scipy.stats

from resroute.config import UserError
from resroute.experiments.statistics import (
    holm,
    paired,
    planned_seeds,
    resolvable,
    summarise,
    summarise_differences,
)
from resroute.experiments.study import Summary

# 0.975 quantile of t with two degrees of freedom, 4.3027: (2p - 1) / sqrt(2p (1 - p))
QUANTILE = 0.95 / math.sqrt(2 * 0.975 * 0.025)


def test_a_summary_by_hand():
    # mean (1 + 2 + 6) / 3; sd sqrt((4 + 1 + 9) / 2)
    found = summarise([1.0, 2.0, 6.0])
    assert (found.n, found.mean) == (3, 3.0)
    assert found.sd == pytest.approx(math.sqrt(7), rel=1e-12)
    reach = QUANTILE * math.sqrt(7) / math.sqrt(3)
    assert (found.low, found.high) == pytest.approx((3 - reach, 3 + reach), rel=1e-12)


def test_one_value_has_no_deviation_and_equal_values_have_none_to_the_bit():
    assert summarise([0.7]) == Summary(n=1, mean=0.7, sd=None, low=None, high=None)
    assert summarise([0.1] * 3) == Summary(n=3, mean=0.1, sd=0.0, low=0.1, high=0.1)


def test_paired_differences_by_hand():
    treatment = {0: 1.0, 1: 2.0, 2: 4.0, 7: 90.0}
    baseline = {2: 4.1, 1: 2.2, 0: 1.5, 3: 50.0}
    summary, p_value, kind = paired(treatment, baseline)
    # differences -0.5, -0.2, -0.1: mean -0.8 / 3, squares about it sum to 0.26 / 3
    sd = math.sqrt(0.13 / 3)
    t = (0.8 / 3) / (sd / math.sqrt(3))
    assert (summary.n, kind) == (3, "paired t")
    assert (summary.mean, summary.sd) == pytest.approx((-0.8 / 3, sd), rel=1e-12)
    # of two degrees of freedom: P(|T| > t) = 1 - t / sqrt(2 + t^2)
    assert p_value == pytest.approx(1 - t / math.sqrt(2 + t * t), rel=1e-9)
    assert p_value == pytest.approx(0.1567, abs=1e-4)
    assert summary.high == pytest.approx(-0.8 / 3 + QUANTILE * sd / math.sqrt(3))


def test_one_shared_seed_gives_a_difference_and_no_test():
    summary, p_value, _ = paired({0: 1.0, 1: 2.0}, {1: 2.5})
    assert (summary.mean, summary.low, p_value) == (-0.5, None, None)


def test_differences_without_spread():
    equal = {seed: 0.7 + seed for seed in range(4)}
    summary, p_value, _ = paired(equal, equal)
    assert (summary.mean, summary.low, summary.high, p_value) == (0.0, 0.0, 0.0, 1.0)
    lower = {seed: value - 0.5 for seed, value in equal.items()}
    assert paired({0: 1.0, 1: 2.0}, {0: 1.5, 1: 2.5})[1] == 0.0
    # equal up to rounding: no warning, and as good as certain
    assert paired({s: v + s * 1e-16 for s, v in lower.items()}, equal)[1] < 1e-9


def test_the_interval_is_a_bootstrap_from_twenty_on():
    skewed = list(np.random.default_rng(1).lognormal(sigma=1.5, size=20))
    few, few_kind = summarise_differences(skewed[:19])
    many, kind = summarise_differences(skewed)
    assert (few_kind, kind) == ("paired t", "bootstrap")
    assert few == summarise(skewed[:19])
    plain = summarise(skewed)
    assert (many.n, many.mean, many.sd) == (plain.n, plain.mean, plain.sd)
    assert many.high - many.mean > 1.2 * (many.mean - many.low)
    assert (many.low, many.high) == pytest.approx((plain.low, plain.high), rel=0.5)
    assert summarise_differences(skewed)[0] == many
    assert summarise_differences([0.25] * 20) == (summarise([0.25] * 20), "paired t")


def test_of_three_values_the_t_interval_keeps_its_level_and_a_percentile_bootstrap_does_not():
    samples = np.random.default_rng(0).normal(size=(3000, 3))
    intervals = [summarise(list(sample)) for sample in samples]
    missed = np.mean([s.low > 0 or s.high < 0 for s in intervals])
    # the standard error of the share is 0.004
    assert missed == pytest.approx(0.05, abs=0.012)
    found = scipy.stats.bootstrap(
        (samples[:500],), np.mean, axis=1, n_resamples=999, method="percentile", rng=0
    ).confidence_interval
    # all three values have one sign in a quarter of samples
    assert np.mean((found.low > 0) | (found.high < 0)) == pytest.approx(0.25, abs=0.06)


def test_holm_by_hand():
    # 3 * 0.01; 2 * 0.03; then 0.04, which may not fall below what came before
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.6]) == pytest.approx([1.0, 1.0])
    assert holm([0.02]) == [0.02]
    assert holm([]) == []


@pytest.mark.parametrize(("size", "seeds"), [(0.2, 199), (0.5, 34), (0.8, 15), (1.0, 10)])
def test_seeds_are_planned_as_in_the_tables(size, seeds):
    # paired t test, two-sided, alpha 0.05, power 0.8 (Cohen's d_z)
    assert planned_seeds(2.0, 2.0 * size) == seeds
    assert planned_seeds(2.0, -2.0 * size) == seeds
    assert resolvable(2.0, seeds) <= 2.0 * size < resolvable(2.0, seeds - 1)


def test_planned_power_is_the_power_that_is_met():
    effect = resolvable(1.0, 5)
    draws = np.random.default_rng(0).normal(effect, 1.0, size=(4000, 5))
    found = scipy.stats.ttest_1samp(draws, 0.0, axis=1).pvalue < 0.05
    assert np.mean(found) == pytest.approx(0.8, abs=0.02)


def test_planning_at_the_ends():
    assert planned_seeds(0.0, 0.01) == 2
    assert planned_seeds(1e-6, 1.0) == 2
    assert resolvable(0.0, 3) == 0.0
    assert planned_seeds(1.0, 1.0, power=0.95) > planned_seeds(1.0, 1.0)
    assert resolvable(1.0, 3, alpha=0.01) > resolvable(1.0, 3)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: summarise([]), "no value"),
        (lambda: summarise([1.0, math.nan]), "finite numbers, got nan"),
        (lambda: paired({0: math.inf, 1: 1.0}, {0: 1.0, 1: 1.0}), "finite"),
        (lambda: paired({0: 1.0}, {1: 1.0}), r"no seed is shared: \[0\] and \[1\]"),
        (lambda: planned_seeds(-1.0, 1.0), "sd must be"),
        (lambda: planned_seeds(math.nan, 1.0), "sd must be"),
        (lambda: planned_seeds(1.0, 0.0), "effect must be"),
        (lambda: planned_seeds(1.0, 1.0, power=1.0), "power 1.0"),
        (lambda: planned_seeds(1.0, 1e-5), "more than a million seeds"),
        (lambda: resolvable(1.0, 1), "at least 2 seeds, got 1"),
    ],
)
def test_what_cannot_be_answered_is_refused(call, says):
    with pytest.raises(UserError, match=says):
        call()


def test_without_scipy_one_value_is_summarised_and_several_name_the_extra(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] in ("scipy", "statsmodels")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "scipy", None)
    monkeypatch.setitem(sys.modules, "statsmodels", None)
    assert summarise([1.0]).mean == 1.0
    with pytest.raises(UserError, match=r"pip install 'resroute\[report\]'"):
        summarise([1.0, 2.0])
    with pytest.raises(UserError, match=r"pip install 'resroute\[report\]'"):
        holm([0.1])
