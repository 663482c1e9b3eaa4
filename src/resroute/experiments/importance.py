"""Causal importance: how much the loss grows without a layer, a block, a site or a source.

Depth weights say what a model reads; only leaving it out says what it needs. N windows, T tokens,
V vocabulary.
"""

import math
import re
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from resroute.config import UserError, require_whole
from resroute.core import compute_dtype
from resroute.data import parts_of
from resroute.residual import Policy
from resroute.residual.ablate import without_sites, without_sources
from resroute.residual.base import STREAM, policy_of, site_name
from resroute.residual.capture import Capture, capture
from resroute.residual.trajectory import blocks_of

By = Literal["layer", "block", "site", "source"]
BY: tuple[By, ...] = ("layer", "block", "site", "source")


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """What leaving one item out does."""

    name: str
    """Such as `layer 3`, `block 0`, `3 mlp` or `phase 2`."""
    sites: tuple[int, ...]
    """Whose updates are left out; of a source, the sites that read it (the readout is the last)."""
    change: float
    """Mean over windows of the loss without the item less the loss with it, in nats a token."""
    error: float | None
    """Standard error of the change, windows being paired; None with a single window."""
    mass: float | None
    """Share of all depth weight, over reads and tokens, on the item: a source, or the sources that
    hold this item's updates and no other's. None where no source does."""


@dataclass(frozen=True, kw_only=True)
class Importance:
    """Ablations of one kind; see `importance`."""

    by: By
    loss: float
    """Mean loss of the windows with everything in place, nats a token."""
    windows: int
    tokens: int
    """Targets that count."""
    items: tuple[Ablation, ...]


def importance(
    model: nn.Module,
    windows: tuple[Tensor, Tensor],
    by: By = "layer",
    *,
    num_blocks: int = 4,
    batch: int = 8,
    progress: Callable[[int, int], None] | None = None,
) -> Importance:
    """Measure how much the loss grows without each layer, block, site or source.

    A layer, block or site is left out by writing zero for its updates (`without_sites`), a source
    by taking the softmax over the others (`without_sources`), at every site that has another. The
    model sees the same windows each time, in evaluation mode and without gradients; its mode is
    restored.

    Args:
        model: Maps tokens (B, T) to logits (B, T, V), alone or first in a tuple, or as `.logits`;
            holds one policy.
        windows: Inputs and targets (N, T); targets are already shifted, negative ones not counted.
        by: What is left out; sources need a method that routes.
        num_blocks: Blocks of a method that has none of at least two sites.
        batch: B, windows at once.
        progress: Told how many items are done, and how many there are.

    Raises:
        UserError: Windows that do not fit, or a method without sources where these are asked for.
    """
    inputs, targets = windows
    require_whole("batch", batch, 1)
    require_whole("num_blocks", num_blocks, 1)
    if by not in BY:
        raise UserError(f"by must be one of {', '.join(BY)}, got {by!r}")
    if inputs.dim() != 2 or inputs.shape != targets.shape or not (targets >= 0).any():
        raise UserError(
            f"windows must be inputs and targets of one shape (N, T), with a target that counts, "
            f"got {tuple(inputs.shape)} and {tuple(targets.shape)}"
        )
    policy = policy_of(model)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            with capture(policy) as seen:
                plain = _losses(model, inputs, targets, batch)
            masses = _masses(seen)
            left_out = list(_items(policy, by, num_blocks, masses))
            items = []
            for done, (name, sites, mass, context) in enumerate(left_out):
                if progress is not None:
                    progress(done, len(left_out))
                without = _losses_in(context(), model, windows, batch)
                items.append(_ablation(name, sites, plain, without, mass))
    finally:
        model.train(was_training)
    return Importance(
        by=by,
        loss=statistics.fmean(plain),
        windows=len(plain),
        tokens=int((targets >= 0).sum()),
        items=tuple(items),
    )


Item = tuple[str, tuple[int, ...], float | None, Callable[[], AbstractContextManager[None]]]


def _items(
    policy: Policy[Any], by: By, num_blocks: int, masses: Mapping[str, float]
) -> Iterator[Item]:
    if by == "source":
        if policy.source_names() == (STREAM,):
            raise UserError(
                f"{type(policy).__name__} reads one sum and has no sources; ask by layer, block "
                "or site"
            )
        for name in policy.source_names():
            readers = range(policy.num_sites + 1)
            sites = tuple(site for site in readers if name in policy.source_names(site))
            yield name, sites, masses.get(name), _leaving_source(policy, name)
        return
    for name, group in _groups(policy, by, num_blocks):
        sites = tuple(group)
        yield name, sites, _mass(policy, group, masses), _leaving_sites(policy, sites)


def _leaving_source(policy: Policy[Any], name: str) -> Callable[[], AbstractContextManager[None]]:
    return lambda: without_sources(policy, [name])


def _leaving_sites(
    policy: Policy[Any], sites: tuple[int, ...]
) -> Callable[[], AbstractContextManager[None]]:
    return lambda: without_sites(policy, sites)


def _groups(policy: Policy[Any], by: By, num_blocks: int) -> list[tuple[str, range]]:
    size = len(policy.kinds)
    if by == "site":
        return [(site_name(policy, s), range(s, s + 1)) for s in range(policy.num_sites)]
    if by == "layer":
        layers = range(policy.num_layers)
        return [(f"layer {i}", range(i * size, (i + 1) * size)) for i in layers]
    return [(f"block {i}", block) for i, block in enumerate(blocks_of(policy, num_blocks))]


def _masses(seen: Capture) -> dict[str, float]:
    """Share of all depth weight on each source, over reads that mix."""
    rows = [site["weights"] for site in seen.result()["sites"]]
    rows = [row for row in rows if row and None not in row.values()]
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: math.fsum(row.get(name, 0.0) for row in rows) / len(rows) for name in names}


def _mass(policy: Policy[Any], sites: range, masses: Mapping[str, float]) -> float | None:
    """Mass of the finished sources that hold updates of these sites alone."""
    blocks: list[range] = getattr(policy, "blocks", [])
    inside = {
        number
        for number, block in enumerate(blocks)
        if block.start >= sites.start and block.stop <= sites.stop
    }
    covered = sum(len(blocks[number]) for number in inside)
    if not masses or covered < len(sites):
        return None
    found = [
        mass
        for name, mass in masses.items()
        if (match := re.search(r" (\d+)$", name)) and int(match[1]) in inside
    ]
    return math.fsum(found)


def _ablation(
    name: str,
    sites: tuple[int, ...],
    plain: list[float],
    without: list[float],
    mass: float | None,
) -> Ablation:
    changes = [b - a for a, b in zip(plain, without, strict=True)]
    # which takes numbers that are not finite, as `statistics` does not
    spread = torch.tensor(changes, dtype=torch.float64).std().item() if len(changes) > 1 else None
    error = None if spread is None else spread / math.sqrt(len(changes))
    return Ablation(
        name=name, sites=sites, change=statistics.fmean(changes), error=error, mass=mass
    )


def _losses_in(
    context: AbstractContextManager[None],
    model: nn.Module,
    windows: tuple[Tensor, Tensor],
    batch: int,
) -> list[float]:
    with context:
        return _losses(model, *windows, batch)


def _losses(model: nn.Module, inputs: Tensor, targets: Tensor, batch: int) -> list[float]:
    """Mean loss of each window that has a target which counts."""
    device = next(model.parameters()).device
    found: list[float] = []
    for part, wanted in parts_of(inputs, targets, batch):
        logits = logits_of(model, part.to(device))
        wanted = wanted.to(device)
        losses = F.cross_entropy(
            logits.to(compute_dtype(logits.dtype)).flatten(0, 1),
            wanted.clamp_min(0).flatten(),
            reduction="none",
        ).view(wanted.shape)
        # not every device has float64
        for row, is_counted in zip(losses.cpu().double(), (wanted >= 0).cpu(), strict=True):
            if is_counted.any():
                found.append(row[is_counted].mean().item())
    return found


def logits_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Logits (B, T, V), of a model that gives them alone, first in a tuple, or as `.logits`."""
    output = model(tokens)
    logits = getattr(output, "logits", None)
    if logits is None:
        logits = output[0] if isinstance(output, tuple) else output
    found: Tensor = logits
    return found
