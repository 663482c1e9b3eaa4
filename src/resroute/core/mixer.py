"""Depth-wise softmax mixing: attention over residual sources instead of over tokens.

S depth sources, D width. `*batch` stands for any leading axes, normally B batch and T tokens.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from resroute.core.rms import compute_dtype


class Source(NamedTuple):
    """A tensor that sites can attend to, with what is computed of it once, when it is finished."""

    value: Float[Tensor, "*batch D"]
    inverse_rms: Float[Tensor, "*batch"]
    """Normalises the key, `1 / rms(value)`."""
    scale: Float[Tensor, "*batch"] | None = None
    """Factor on the value in the mix, not on the key (RMS matching); None is one."""


def depth_weights(
    sources: Sequence[Source],
    query: Float[Tensor, " D"],
    key_gain: Float[Tensor, " D"] | None,
    biases: Sequence[Float[Tensor, ""] | None],
) -> Float[Tensor, "S *batch"]:
    r"""Softmax weights of one site over its sources (Attention Residuals, eq. 2 and 3).

    $$ p = \mathrm{softmax}_i\, l_i, \qquad
       l_i = \langle q,\ g \odot k_i\, r(k_i) \rangle + b_i
           = r(k_i) \langle q \odot g,\ k_i \rangle + b_i $$

    The second form is the one computed: no normalised key is ever built. There is no
    $1/\sqrt{D}$. A zero query without biases gives equal weights, which is how every site starts.

    Args:
        sources: At least one; `value` is both key $k_i$ and, with its scale, value.
        query: Pseudo-query $q$ of the site.
        key_gain: RMSNorm gain $g$ on the keys; None leaves it out.
        biases: $b_i$, one for each source; None is zero.

    Returns:
        Weights that sum to one over S, in float32 (float64 for float64 sources).
    """
    dtype = compute_dtype(sources[0].value.dtype)
    key = query.to(dtype) if key_gain is None else query.to(dtype) * key_gain.to(dtype)
    logits = []
    with _without_autocast(key.device.type):
        for source, bias in zip(sources, biases, strict=True):
            logit = source.inverse_rms * (source.value.to(dtype) @ key)
            logits.append(logit if bias is None else logit + bias.to(dtype))
    return torch.stack(logits).softmax(0)


def _without_autocast(device_type: str) -> AbstractContextManager[object]:
    # it would take the products in bfloat16; the meta device has none
    if not torch.amp.is_autocast_available(device_type):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


def depth_mix(
    sources: Sequence[Source], weights: Float[Tensor, "S *batch"]
) -> Float[Tensor, "*batch D"]:
    r"""Mix sources by their weights, $h = \sum_i p_i\, s_i\, v_i$ (Attention Residuals, eq. 4).

    Values are not normalised; $s_i$ is the source's scale. The result has the dtype of the
    weights: the caller casts it once, at the end.
    """
    mix: Tensor | None = None
    for source, weight in zip(sources, weights.unbind(0), strict=True):
        share = weight if source.scale is None else weight * source.scale
        value = source.value.to(weights.dtype)
        # a fold of fused multiply-adds: no stacked copy of the sources is made or saved
        mix = (
            share.unsqueeze(-1) * value
            if mix is None
            else torch.addcmul(mix, share.unsqueeze(-1), value)
        )
    assert mix is not None, "a mix needs a source"
    return mix
