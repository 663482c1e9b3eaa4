"""What hand-written gradients do not have is refused, instead of left out without a word."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from resroute.config import UserError

_REMEDY = 'use resroute.backend("reference") and a loss of torch\'s own'


def first_order_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse a backward pass whose own graph is asked for.

    torch's `once_differentiable` refuses it only where a gradient that comes in has a graph. Where
    none has, as below a linear loss, it would leave a term out.

    Raises:
        UserError: On `create_graph=True`.
    """
    once = once_differentiable(backward)

    @functools.wraps(backward)
    def guarded(ctx: Any, *grads: Any) -> Any:
        # in a backward pass gradients are enabled where its graph is asked for
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise UserError(f"second derivatives of a fast operation were asked for; {_REMEDY}")
        return once(ctx, *grads)

    return guarded


def require_no_tangents(tensors: Iterable[Tensor | None]) -> None:
    """Refuse forward-mode derivatives, which would be taken for zero.

    Raises:
        UserError: A tensor has a tangent.
    """
    if torch.compiler.is_compiling() or getattr(forward_ad, "_current_level", -1) < 0:
        return
    if any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise UserError(f"forward-mode derivatives of a fast operation were asked for; {_REMEDY}")
