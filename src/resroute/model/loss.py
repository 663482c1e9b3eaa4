"""Cross-entropy of a linear head without keeping the logits.

The logits of a large vocabulary outweigh all other activations of a step: in float32, with their
gradient, 8 V bytes a token. Here they live for some rows at a time, and their gradient is made in
the forward pass, while they are there (Liger Kernel, Hsu et al. 2024, section 3.2).

R rows (tokens), D width, V vocabulary.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from resroute.ops.derivatives import first_order_only, require_no_tangents

IGNORED = -100

# float32 logits of all rows up to this size are kept: splitting them saves too little to pay
_SMALL_BYTES = 8 * 2**20
# and of one part of the rows
_PART_BYTES = 32 * 2**20


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Mean of `cross_entropy(hidden @ weight.T, targets)` over the targets that count.

    Logits have autocast's dtype where it is on; the softmax is computed in float32 (float64 for
    float64). Where the logits are large it has its gradients in memory from the forward pass on,
    and further derivatives are an error.

    Args:
        hidden: (R, D).
        weight: (V, D).
        targets: (R,) token ids; -100 is not counted.

    Returns:
        Nats, (); NaN where no target counts.
    """
    dtype = _product_dtype(hidden)
    # float16 needs its gradients scaled from the loss on
    if 4 * len(hidden) * len(weight) <= _SMALL_BYTES or dtype == torch.float16:
        return cross_entropy(F.linear(hidden, weight), targets)
    require_no_tangents((hidden, weight))
    loss: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden.to(dtype), weight.to(dtype), targets, torch.is_grad_enabled()
    )
    return loss


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of logits (..., V), computed in float32, or float64 where they are."""
    return F.cross_entropy(widen(logits).flatten(0, -2), targets.flatten(), ignore_index=IGNORED)


def widen(logits: Tensor) -> Tensor:
    """Logits in float32, or float64 where they are."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _product_dtype(x: Tensor) -> torch.dtype:
    """The dtype that a matrix product of x has."""
    kind = x.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return x.dtype
    # which autocast leaves alone
    return x.dtype if x.dtype == torch.float64 else torch.get_autocast_dtype(kind)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, wants: bool) -> Tensor:
        loss, *gradients = _forward(
            hidden,
            weight,
            targets,
            wants_hidden=wants and ctx.needs_input_grad[0],
            wants_weight=wants and ctx.needs_input_grad[1],
        )
        ctx.save_for_backward(*gradients)
        return loss

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *(g if g is None else g * grad.to(g.dtype) for g in ctx.saved_tensors), None, None


def _forward(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, wants_hidden: bool, wants_weight: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The loss, and its gradients by hidden (R, D) and weight (V, D) where they are wanted."""
    counts = targets != IGNORED
    count = counts.sum()
    # without a target that counts the loss is NaN and gradients are zero, as torch has it
    wide = torch.promote_types(hidden.dtype, torch.float32)
    share = counts.to(wide) / count.clamp(min=1)
    grad_hidden = torch.empty_like(hidden) if wants_hidden else None
    grad_weight = torch.zeros_like(weight, dtype=wide) if wants_weight else None
    total = torch.zeros((), dtype=wide, device=hidden.device)
    rows = max(1, _PART_BYTES // (4 * weight.shape[0]))
    for start in range(0, len(targets), rows):
        part = slice(start, start + rows)
        chances = F.linear(hidden[part], weight).to(wide).log_softmax(-1)
        total += F.nll_loss(chances, targets[part], ignore_index=IGNORED, reduction="sum")
        if not (wants_hidden or wants_weight):
            continue
        # d loss / d logits = (softmax - one at the target) / count
        slope = chances.exp_()
        target = targets[part].clamp(min=0).unsqueeze(-1)
        slope.scatter_add_(-1, target, slope.new_full((1, 1), -1.0).expand_as(target))
        slope = slope.mul_(share[part].unsqueeze(-1)).to(hidden.dtype)
        if grad_hidden is not None:
            grad_hidden[part] = slope @ weight
        if grad_weight is not None:
            grad_weight += slope.mT @ hidden[part]
    loss = total / count
    grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
    return loss, grad_hidden, grad_weight
