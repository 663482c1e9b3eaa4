import time

import pytest
import torch

from resroute.training import speed

CPU = torch.device("cpu")


def clock(*durations):
    """A clock by which measurements take so long, one after the other."""
    times = []
    for duration in durations:
        began = times[-1] if times else 0.0
        times += [began, began + duration]
    return iter(times).__next__


def test_the_best_product_of_about_a_third_of_a_second_counts(monkeypatch):
    monkeypatch.setattr(speed.time, "perf_counter", clock(0.125, 0.0625, 0.25))
    assert speed.measured_peak(CPU, torch.float32) == 2 * 1024**3 / 0.0625


def test_one_slow_product_is_enough(monkeypatch):
    monkeypatch.setattr(speed.time, "perf_counter", clock(4.0))
    assert speed.measured_peak(CPU, torch.float32) == 2 * 1024**3 / 4


def test_it_is_of_the_size_of_a_product_here():
    peak = speed.measured_peak(CPU, torch.float32)
    matrix = torch.ones(256, 256)
    matrix @ matrix
    began = time.perf_counter()
    matrix @ matrix
    # a small product, once, on a machine that may be busy
    assert 2 * 256**3 / (time.perf_counter() - began) < 30 * peak
    # no processor of today reaches it in float32
    assert 1e7 < peak < 1e14


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_products_are_of_the_dtype_and_draw_nothing(monkeypatch, dtype):
    seen = []
    product = torch.mm

    def noted(left, right, *, out):
        seen.append((left.dtype, right.dtype, out.dtype, tuple(out.shape)))
        return product(left, right, out=out)

    monkeypatch.setattr(speed.torch, "mm", noted)
    monkeypatch.setattr(speed.time, "perf_counter", clock(1.0))
    before = torch.get_rng_state()
    speed.measured_peak(CPU, dtype)
    assert torch.equal(torch.get_rng_state(), before)
    # one that is not counted, and one that is
    assert seen == [(dtype, dtype, dtype, (1024, 1024))] * 2
