"""Root mean squares and sums over depth, each rounded once.

D width. `*batch` stands for any leading axes, normally B batch and T tokens.
"""

import torch
from jaxtyping import Float
from torch import Tensor


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type that norms, logits and mixes of a tensor are computed in: float32, or float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def inverse_rms(x: Float[Tensor, "*batch D"], eps: float) -> Float[Tensor, "*batch"]:
    r"""Return $r(x) = 1 / \sqrt{\mathrm{mean}(x^2) + \epsilon}$ over the width, per token."""
    wide = x.to(compute_dtype(x.dtype))
    return torch.rsqrt(wide.square().mean(-1) + eps)


def matching_factor(
    state_inverse_rms: Float[Tensor, "*batch"],
    detail_inverse_rms: Float[Tensor, "*batch"],
    rho_max: float | None,
) -> Float[Tensor, "*batch"]:
    r"""Return $\min(\mathrm{rms}(C) / \mathrm{rms}(D), \rho_{max})$, the RMS matching of WAV.

    Gradients flow through it; the caller detaches it where the method says so. That the factor is
    a ratio per token, of the same block's state, and its maximum are from WAV v1's text; the
    value of the maximum is our choice.
    """
    ratio = detail_inverse_rms / state_inverse_rms
    return ratio if rho_max is None else ratio.clamp(max=rho_max)


def accumulate(
    total: Float[Tensor, "*batch D"] | None,
    update: Float[Tensor, "*batch D"],
    coefficient: float | Float[Tensor, ""] | Float[Tensor, " D"] = 1.0,
    *,
    dtype: torch.dtype,
) -> Float[Tensor, "*batch D"]:
    """Return `total + coefficient * update` in `dtype`, rounded once; no total counts as zero.

    With a coefficient of one this is bit for bit the plain sum `total + update`.
    """
    wide = compute_dtype(dtype)
    term = update.to(wide)
    if not isinstance(coefficient, float):
        term = term * coefficient.to(wide)
    elif coefficient != 1.0:
        term = term * coefficient
    return (term if total is None else total.to(wide) + term).to(dtype)
