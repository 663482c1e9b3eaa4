"""How fast this machine multiplies matrices."""

import math
import time

import torch

_SECONDS = 0.3


def measured_peak(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large square matrix product in this dtype: the yardstick of utilisation.

    It is what this machine reaches in such a product now, with the threads and precision settings
    of this process, not the number that its vendor gives: utilisation against it is higher than
    against that one. The best of as many products as fit into 0.3 s, after one that is not
    counted. Three matrices of 1,024 rows on CPUs, 8,192 on GPUs, are held meanwhile: there up to
    0.8 GB, which counts as peak memory where that is being recorded. Draws nothing from the global
    generators.
    """
    size = 1024 if device.type == "cpu" else 8192
    # ones or zeros would draw less power, and a GPU then clocks higher than it does at work
    generator = torch.Generator(device).manual_seed(0)
    left, right = (
        torch.randn(size, size, generator=generator, device=device, dtype=dtype) for _ in range(2)
    )
    product = torch.empty_like(left)
    torch.mm(left, right, out=product)
    _wait(device)
    best, spent = math.inf, 0.0
    while spent < _SECONDS:
        began = time.perf_counter()
        torch.mm(left, right, out=product)
        _wait(device)
        taken = time.perf_counter() - began
        best, spent = min(best, taken), spent + taken
    return 2 * size**3 / best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
