"""Folding a sublayer's RMSNorm into its read."""

from collections.abc import Callable

from torch import Tensor, nn

from resroute.ops import SiteForm, operators, site
from resroute.ops.exact import read_dtype

Norm = Callable[[Tensor], Tensor]


def foldable(norm: Norm) -> nn.RMSNorm | None:
    """The norm as an `nn.RMSNorm` whose gain may be used in its stead, or None.

    A module that someone hooked, subclassed or sharded is called instead.
    """
    if not isinstance(norm, nn.RMSNorm) or type(norm).forward is not nn.RMSNorm.forward:
        return None
    if norm._forward_hooks or norm._forward_pre_hooks or norm.eps is None:
        return None
    plain = type(norm.weight) in (Tensor, nn.Parameter) and len(norm.normalized_shape) == 1
    return norm if plain else None


def normalise(backend: str, hidden: Tensor, norm: Norm) -> Tensor:
    """Apply a norm to a read (..., D), in one pass where the backend can."""
    folded = None if backend == "reference" else foldable(norm)
    if folded is None:
        return norm(hidden)
    form = SiteForm(norm_eps=folded.eps or 0.0)
    dtype = read_dtype(hidden.device.type, hidden.dtype)
    normalised, _ = site(
        operators(backend), form, None, [hidden], gain=folded.weight, read_dtype=dtype
    )
    return normalised
