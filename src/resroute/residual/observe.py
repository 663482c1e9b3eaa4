"""How large updates and sources are, and how reads spread over sources, while a model runs."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from resroute.config import UserError
from resroute.core import compute_dtype
from resroute.residual.base import STREAM, Policy, by_kind
from resroute.residual.diagnostics import listening_to

Observation = dict[str, Any]
"""What `observe` returns: JSON values."""


class _Read(NamedTuple):
    """One read: means over tokens."""

    entropy: float
    effective_sources: float
    weights: dict[str, float]
    """By source."""


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
        - `kinds`: the weight by kind of source, which is its name without the number of its block
          (`embedding`, `state`, `phase`, `running state`), mean over reads and tokens. A read
          without such a source counts as 0.0, so that the weights of all kinds add up to one;
        - `source_rms`: by name, `Policy.source_rms` of the stream at the readout.

    Raises:
        UserError: `forward` did not run all of the model.
    """
    updates: dict[int, float] = {}
    reads: dict[int, _Read] = {}
    sources: dict[str, float] = {}

    def note_read(stream: Any, site: int) -> None:
        names, weights = policy.weights(stream, site)
        if names and names != [STREAM]:
            reads[site] = _spread(names, weights)
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
    return {**seen, **_means(list(reads.values()), policy.detail_names), "source_rms": sources}


def _spread(names: list[str], weights: Tensor) -> _Read:
    """Of one read with weights (..., S)."""
    entropy = -torch.xlogy(weights, weights).sum(-1)
    of_entropy = torch.stack((entropy.mean(), entropy.exp().mean()))
    shares = weights.reshape(-1, len(names)).mean(0)
    # one copy from the device
    mean_entropy, effective, *found = torch.cat((of_entropy, shares)).tolist()
    return _Read(mean_entropy, effective, dict(zip(names, found, strict=True)))


def _means(reads: Sequence[_Read], detail_names: frozenset[str]) -> Observation:
    """Over reads."""
    on_details = [
        sum(weight for name, weight in read.weights.items() if name in detail_names)
        for read in reads
    ]
    of_kinds = [by_kind(read.weights) for read in reads]
    every_kind = dict.fromkeys(kind for row in of_kinds for kind in row)
    kinds = {kind: statistics.fmean(row.get(kind, 0.0) for row in of_kinds) for kind in every_kind}
    return {
        "entropy": statistics.fmean(read.entropy for read in reads),
        "effective_sources": statistics.fmean(read.effective_sources for read in reads),
        "detail_weight": statistics.fmean(on_details),
        "embedding_weight": kinds.get("embedding", 0.0),
        "kinds": kinds,
    }
