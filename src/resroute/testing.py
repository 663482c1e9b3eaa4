"""Helpers for tests of residual methods: ours, and those of people who write their own."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from resroute.core import inverse_rms
from resroute.residual import Policy

PARITY_EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class Stack:
    """Sublayers `f_s(h) = tanh((h * r(h)) @ weights[s])`, those of the parity cases."""

    embedding: Tensor
    """(..., D)."""
    weights: Tensor
    """(sites, D, D)."""

    def run(self, policy: Policy[Any]) -> tuple[Tensor, Tensor]:
        """Reads (sites, ..., D) and readout (..., D) of a policy over the stack."""
        stream, reads = policy.start(self.embedding), []
        for site, weight in enumerate(self.weights):
            read = policy.read(stream, site)
            reads.append(read)
            normalised = read * inverse_rms(read, PARITY_EPS).unsqueeze(-1).to(read.dtype)
            stream = policy.write(stream, site, torch.tanh(normalised @ weight))
        return torch.stack(reads), policy.finish(stream)


def random_stack(
    num_sites: int, dim: int, *, tokens: int = 5, seed: int = 0, dtype: torch.dtype = torch.float64
) -> Stack:
    """A stack with random embedding and weights, both requiring gradients."""
    generator = torch.Generator().manual_seed(seed)
    embedding = torch.randn(tokens, dim, generator=generator, dtype=torch.float64)
    weights = torch.randn(num_sites, dim, dim, generator=generator, dtype=torch.float64)
    return Stack(
        embedding=embedding.to(dtype).requires_grad_(),
        weights=(weights / dim**0.5).to(dtype).requires_grad_(),
    )


def randomise(policy: Policy[Any], *, seed: int = 0, std: float = 0.5) -> None:
    """Move every parameter off its initial value, so that no gradient vanishes by chance."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in _sorted_parameters(policy):
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(std * noise.to(parameter.dtype))


def _sorted_parameters(policy: Policy[Any]) -> Iterator[tuple[str, Tensor]]:
    yield from sorted(policy.named_parameters())
