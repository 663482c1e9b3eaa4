"""Folding a sublayer's RMSNorm into its read."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from resroute.ops import SiteForm, operators, site
from resroute.ops.exact import read_dtype
from resroute.residual.untouched import untouched

Norm = Callable[[Tensor], Tensor]

_NORM_ALONE = SiteForm()


# no gain, or a sharded one, is not used in the norm's stead
_PLAIN = (Tensor, nn.Parameter)


class Folded(NamedTuple):
    """An RMSNorm as an operation takes it."""

    gain: Tensor
    eps: float


def fold(backend: str, norm: Norm, like: Tensor) -> Folded | None:
    """The gain and eps of a norm of reads like a tensor (..., D), or None where it must be called.

    It is called on the reference, where someone hooked, subclassed or sharded it, and where its
    gain is of another size or dtype than operations take.
    """
    if backend == "reference" or not untouched(norm, nn.RMSNorm):
        return None
    assert isinstance(norm, nn.RMSNorm)
    gain, eps, dtype = norm.weight, norm.eps, like.dtype
    if type(gain) not in _PLAIN or gain.shape != like.shape[-1:]:
        return None
    if gain.dtype not in (dtype, torch.float32):
        return None
    if eps is not None:
        return Folded(gain, eps)
    # torch's default; for narrower types it differs between versions
    known = dtype in (torch.float32, torch.float64)
    return Folded(gain, torch.finfo(dtype).eps) if known else None


def normalise(backend: str, hidden: Tensor, norm: Norm) -> Tensor:
    """Apply a norm to a read (..., D), in one pass where the backend can."""
    folded = fold(backend, norm, hidden)
    if folded is None:
        return norm(hidden)
    normalised, _ = site(
        operators(backend),
        _NORM_ALONE,
        None,
        [hidden],
        gain=folded.gain,
        norm_eps=folded.eps,
        read_dtype=read_dtype(hidden.device.type, hidden.dtype),
    )
    return normalised
