import json
import math

import pytest
import torch

from resroute.bench import Comparison, Listener, interval
from resroute.bench.timing import alternate, seconds


def test_the_interval_by_hand():
    # P(Binomial(30, 1/2) < 10) = 0.0214 and P(.. < 11) = 0.0494
    assert interval([float(n) for n in range(30, 0, -1)]) == (10, 21)
    # 1 - 2 / 2^6 = 0.969; with five values the extremes hold 0.9375 alone
    assert interval([3.0, 1.0, 2.0, 6.0, 5.0, 4.0]) == (1, 6)
    assert interval([1.0, 2.0, 3.0, 4.0, 5.0]) == (1, 5)
    assert interval([7.0]) == (7, 7)


@pytest.mark.parametrize("n", [6, 7, 10, 29, 30, 31, 100])
def test_the_interval_is_the_narrowest_that_covers_the_median(n):
    low, high = interval([float(i) for i in range(1, n + 1)])
    assert low + high == n + 1

    def coverage(k):
        return 1 - 2 * sum(math.comb(n, i) for i in range(int(k))) / 2**n

    assert coverage(low) >= 0.95
    assert coverage(low + 1) < 0.95


def test_pairs_alternate_and_warming_up_is_not_counted():
    calls, numbers = [], iter(range(100))

    class Told(Listener):
        def __init__(self):
            self.told = []

        def begin(self, label, total):
            self.told.append((label, total))

        def advance(self, done):
            self.told.append(done)

    def measure(name):
        calls.append(name)
        return float(next(numbers))

    listener = Told()
    pairs = alternate(
        lambda: measure("A"), lambda: measure("B"),
        pairs=3, warmup=2, label="x", listener=listener,
    )  # fmt: skip
    assert calls == ["A", "B"] * 5
    assert pairs == ((4, 5), (6, 7), (8, 9))
    assert listener.told == [("x", 3), 1, 2, 3]


def test_seconds_are_those_of_the_call(monkeypatch):
    clock = iter([10.0, 12.5])
    monkeypatch.setattr("resroute.bench.timing.time.perf_counter", lambda: next(clock))
    done = []
    assert seconds(lambda: done.append(1), torch.device("cpu")) == 2.5
    assert done == [1]


def comparison(**options):
    pairs = ((2.0, 3.0), (1.0, 4.0), (4.0, 4.0))
    return Comparison(name="WAV", against="PreNorm", unit="s", **{"pairs": pairs, **options})


def test_a_ratio_is_the_median_of_ratios_not_the_ratio_of_medians():
    row = comparison()
    assert row.ratios == [1.5, 4.0, 1.0]
    assert row.ratio == 1.5
    assert (row.baseline, row.measured) == (2.0, 4.0)
    assert row.interval is None
    six = comparison(pairs=tuple((1.0, float(n)) for n in (3, 1, 2, 6, 5, 4)))
    assert (six.ratio, six.interval) == (3.5, (1.0, 6.0))


def test_comparisons_survive_json():
    details = {"parameters": 5, "deviation": {"step": 1e-7}}
    pairs = ((2.0, 3.0), (1.0, 4.0), (4.0, 4.0)) * 2
    row = comparison(backend="lean", group="batch 1", details=details, pairs=pairs)
    text = json.dumps(row.to_json())
    assert Comparison.from_json(json.loads(text)) == row
    assert json.loads(text)["interval"] == [1.0, 4.0]
    assert json.loads(text)["pairs"][:3] == [[2.0, 3.0], [1.0, 4.0], [4.0, 4.0]]
