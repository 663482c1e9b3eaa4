"""How large updates and sources are, and how reads spread over sources, while a model runs."""

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from resroute.config import UserError
from resroute.core import compute_dtype
from resroute.residual.base import STREAM, Policy
from resroute.residual.diagnostics import listening_to

Observation = dict[str, Any]
"""What `observe` returns: JSON values."""


def observe(policy: Policy[Any], forward: Callable[[], Any]) -> Observation:
    r"""Sizes of updates and sources, and how reads spread over sources, in one forward pass.

    Reads are what mixes sources: sites and readout, but not the two that Delta takes from the plain
    sum. A gate is not looked at: weights are those of the mix behind it.

    Args:
        policy: Of the model that `forward` runs.
        forward: Runs the model once, without gradients and in eval mode. Each read and write
            leaves a few numbers, no tensor is kept.

    Returns:
        JSON values. Of every method `update_rms`, a list by site: the RMS over tokens and width of
        what the sublayer handed to `write`, before any coefficient of the method. Where reads mix
        sources also

        - `entropy`: $-\sum_i p_i \ln p_i$ of the depth weights in nats, mean over reads and tokens;
        - `effective_sources`: $e^{entropy}$ of each read and token, then their mean;
        - `detail_weight` and `embedding_weight`: the weights on details (0.0 without any) and on
          the embedding, mean over reads and tokens;
        - `source_rms`: by name, `Policy.source_rms` of the stream at the readout.

    Raises:
        UserError: `forward` did not run all of the model.
    """
    updates: dict[int, float] = {}
    reads: dict[int, dict[str, float]] = {}
    sources: dict[str, float] = {}

    def note_read(stream: Any, site: int) -> None:
        names, weights = policy.weights(stream, site)
        if names and names != [STREAM]:
            reads[site] = _spread(names, weights, policy.detail_names)
        if site == policy.num_sites:
            sources.update(policy.source_rms(stream))

    def note_write(stream: Any, site: int, update: Tensor) -> None:
        wide = update.to(compute_dtype(update.dtype))
        updates[site] = wide.square().mean().sqrt().item()

    with listening_to(policy, note_read, note_write):
        forward()
    if len(updates) < policy.num_sites:
        raise UserError(
            f"forward wrote {len(updates)} of the policy's {policy.num_sites} sites; it must run "
            "the model that holds this policy once"
        )
    seen: Observation = {"update_rms": [updates[site] for site in sorted(updates)]}
    if not reads:
        return seen
    rows = list(reads.values())
    means = {name: statistics.fmean(row[name] for row in rows) for name in rows[0]}
    return {**seen, **means, "source_rms": sources}


def _spread(names: list[str], weights: Tensor, detail_names: frozenset[str]) -> dict[str, float]:
    """Of one read with weights (..., S): means over tokens."""
    entropy = -torch.xlogy(weights, weights).sum(-1)
    of_entropy = torch.stack((entropy.mean(), entropy.exp().mean()))
    shares = weights.reshape(-1, len(names)).mean(0)
    # one copy from the device
    mean_entropy, effective, *found = torch.cat((of_entropy, shares)).tolist()
    by_name = dict(zip(names, found, strict=True))
    return {
        "entropy": mean_entropy,
        "effective_sources": effective,
        "detail_weight": sum(by_name[name] for name in names if name in detail_names),
        "embedding_weight": by_name.get("embedding", 0.0),
    }
