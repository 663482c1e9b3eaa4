"""Sums over tokens that grow with neither tokens nor forward passes."""

import math

import torch
from torch import Tensor

from resroute.core import compute_dtype


class Tally:
    """Sums in float64 by site and name, and how many tokens, or passes, each is of."""

    def __init__(self) -> None:
        self.sums: dict[tuple[int, str], Tensor] = {}
        self.counts: dict[tuple[int, str], int] = {}

    def add(self, site: int, name: str, value: Tensor, count: int) -> None:
        """Add a sum over `count` tokens; one with more leading rows than before extends it."""
        key = site, name
        former = self.sums.get(key)
        if former is not None:
            rows = max(len(former), len(value)) if value.dim() else 0
            value = _extended(former, rows) + _extended(value, rows)
        self.sums[key] = value
        self.counts[key] = self.counts.get(key, 0) + count

    def names(self, site: int) -> list[str]:
        """What a site has sums of, in the order in which they came."""
        return [name for at, name in self.sums if at == site]

    def mean(self, site: int, name: str) -> Tensor | None:
        """A sum over its count, on the CPU; None where there is none."""
        value = self.sums.get((site, name))
        return None if value is None else value.cpu() / self.counts[site, name]

    def root(self, site: int, name: str) -> Tensor | None:
        """The root of a mean of squares."""
        mean = self.mean(site, name)
        return None if mean is None else mean.sqrt()


def total(values: Tensor, dim: int | None = None) -> Tensor:
    """A sum in float64."""
    # which the MPS device does not have
    values = values.cpu() if values.device.type == "mps" else values
    return values.sum(dim, dtype=torch.float64)


def wide(values: Tensor) -> Tensor:
    """Values in the type that sums over the width are taken in."""
    return values.detach().to(compute_dtype(values.dtype))


def number(value: Tensor | None) -> float | None:
    """A JSON number; None for what is not there or not finite."""
    if value is None:
        return None
    # a share of a parameter, where the model is sharded
    value = value.full_tensor() if hasattr(value, "full_tensor") else value
    found = value.detach().item()
    return found if math.isfinite(found) else None


def _extended(value: Tensor, rows: int) -> Tensor:
    missing = rows - len(value) if value.dim() else 0
    return torch.cat((value, value.new_zeros(missing, *value.shape[1:]))) if missing else value
