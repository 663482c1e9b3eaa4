"""The routing operations as differentiable functions of any backend.

R rows (all leading axes, normally B batch and T tokens), D width, N finished sources, m queries.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from resroute.core import Source
from resroute.ops import lean
from resroute.ops.derivatives import first_order_only, require_no_tangents
from resroute.ops.forms import SiteForm
from resroute.ops.registry import Operators


def site(
    operators: Operators,
    form: SiteForm,
    update: Tensor | None,
    streams: Sequence[Tensor],
    *,
    prior: Tensor | None = None,
    lse: Tensor | None = None,
    key: Tensor | None = None,
    bias: Tensor | None = None,
    gain: Tensor | None = None,
    norm_eps: float = 1e-6,
    read_dtype: torch.dtype,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    r"""Add an update to a running stream and read the next site, in one pass.

    With the streams $Z_i$ after the update and bases $B_k = \sum_i A_{ki} Z_i$ (`form`), this is
    the depth-wise softmax of `core.depth_weights` and `core.depth_mix` over the bases, joined by
    a mix of finished sources that was made beforehand, `prior`, whose logit is its `lse`:

    $$ h = p_o\, o + \sum_k p_k\, s_k\, B_k $$

    Args:
        operators: A backend.
        form: The static part.
        update: (..., D) or None.
        streams: (..., D) each, of one dtype, which they keep.
        prior: (..., D), a finished mix; None where there is none.
        lse: (...), its log-sum-exp.
        key: (D,) query times key gain; None where there are no bases.
        bias: (K - 1,) added to the logits of the bases after the first; None is zero.
        gain: (D,) of an RMSNorm that follows the read; None leaves the norm out.
        norm_eps: Of that norm.
        read_dtype: Of the read; everything is computed in float32 (float64 for float64).

    Returns:
        The read (..., D), and the streams with the update in them. Going on with these instead of
        the old ones lets gradients be added in the operator's own pass.
    """
    if not form.coefficients:
        lse = key = bias = None
    operators = _serving(operators, streams[0] if streams else prior)
    tensors = (update, prior, lse, key, bias, gain)
    require_no_tangents((*tensors, *streams))
    if torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (*tensors, *streams)
    ):
        read, *after = _Site.apply(  # type: ignore[no-untyped-call]
            operators, form, norm_eps, read_dtype, *tensors, *streams
        )
        return read, tuple(after)
    read, added, _ = _site_forward(operators, form, norm_eps, read_dtype, *tensors, *streams)
    return read, _with(streams, form.target, added)


def block_read(
    operators: Operators,
    sources: Sequence[Source],
    keys: Tensor,
    biases: Tensor | None = None,
    *,
    priors: Sequence[tuple[Tensor, Tensor]] = (),
    read_dtype: torch.dtype,
) -> tuple[list[tuple[Tensor, Tensor]], list[Source]]:
    r"""Mix finished sources for many queries at once, reading each source once.

    Queries do not depend on the input, so a block's sites can score all finished sources at the
    block's start (Attention Residuals, section on two-phase computation).

    Args:
        operators: A backend.
        sources: N finished sources, values (..., D); gradients of `inverse_rms` are those of a
            function of the value and are taken into account here.
        keys: (m, D) queries times key gains.
        biases: (m, N) added to the logits; None is zero.
        priors: An earlier mix (..., D) and its log-sum-exp (...) for each query, which joins.
        read_dtype: Of the mixes.

    Returns:
        Per query the mix (..., D), normalised, and the log-sum-exp of its logits (...); and the
        sources to go on with (see `site`).
    """
    values = [source.value for source in sources]
    operators = _serving(operators, values[0])
    inverse = [source.inverse_rms.detach() for source in sources]
    scales = [source.scale for source in sources]
    flat = [*values, *scales, keys, biases, *(t for prior in priors for t in prior)]
    require_no_tangents(flat)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in flat):
        shape = (len(values), len(keys), bool(priors))
        out = _BlockRead.apply(  # type: ignore[no-untyped-call]
            operators, shape, read_dtype, inverse, *flat
        )
        m = len(keys)
        mixes = list(zip(out[:m], out[m : 2 * m], strict=True))
        return mixes, [s._replace(value=v) for s, v in zip(sources, out[2 * m :], strict=True)]
    out = operators.block_read_forward(
        [_dense(v) for v in values],
        inverse,
        scales,
        keys,
        biases,
        [_dense(p) for p, _ in priors],
        [lse for _, lse in priors],
        read_dtype,
    )
    return list(zip(out[: len(keys)], out[len(keys) : -1], strict=True)), list(sources)


def _serving(operators: Operators, like: Tensor | None) -> Operators:
    # kernels have nothing to point at where there are no rows
    return lean.OPERATORS if like is not None and like.numel() == 0 else operators


def _dense(x: Tensor) -> Tensor:
    # kernels walk over rows
    return x.contiguous()


def _with(streams: Sequence[Tensor], target: int, added: Tensor) -> tuple[Tensor, ...]:
    return tuple(added if i == target else stream for i, stream in enumerate(streams))


def _site_forward(
    operators: Operators,
    form: SiteForm,
    norm_eps: float,
    read_dtype: torch.dtype,
    update: Tensor | None,
    prior: Tensor | None,
    lse: Tensor | None,
    key: Tensor | None,
    bias: Tensor | None,
    gain: Tensor | None,
    *streams: Tensor,
) -> list[Tensor]:
    return operators.site_forward(
        None if update is None else _dense(update),
        [_dense(stream) for stream in streams],
        None if prior is None else _dense(prior),
        lse,
        key,
        bias,
        gain,
        form.flat,
        len(form.coefficients),
        form.target,
        form.eps,
        form.matching,
        form.rho_max,
        norm_eps,
        read_dtype,
    )


class _Site(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        operators: Operators,
        form: SiteForm,
        norm_eps: float,
        read_dtype: torch.dtype,
        update: Tensor | None,
        prior: Tensor | None,
        lse: Tensor | None,
        key: Tensor | None,
        bias: Tensor | None,
        gain: Tensor | None,
        *streams: Tensor,
    ) -> tuple[Tensor, ...]:
        read, added, saved = _site_forward(
            operators, form, norm_eps, read_dtype, update, prior, lse, key, bias, gain, *streams
        )
        after = _with(streams, form.target, added)
        ctx.save_for_backward(prior, lse, key, bias, gain, saved, *after)
        ctx.set_materialize_grads(False)
        ctx.operators, ctx.form, ctx.norm_eps = operators, form, norm_eps
        ctx.update_dtype = None if update is None else update.dtype
        return (
            read,
            *(s if i == form.target else s.view_as(s) for i, s in enumerate(after)),
        )

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad_read: Tensor | None, *grad_streams: Tensor | None) -> Any:
        prior, lse, key, bias, gain, saved, *streams = ctx.saved_tensors
        form = ctx.form
        needs = ctx.needs_input_grad[4:]
        out = ctx.operators.site_backward(
            None if grad_read is None else _dense(grad_read),
            [None if g is None else _dense(g) for g in grad_streams],
            ctx.update_dtype,
            [_dense(stream) for stream in streams],
            None if prior is None else _dense(prior),
            lse,
            key,
            bias,
            gain,
            saved,
            form.flat,
            len(form.coefficients),
            form.target,
            form.eps,
            form.matching,
            form.rho_max,
            ctx.norm_eps,
            [needs[1], needs[3], needs[4], needs[5]],
        )
        has_read = grad_read is not None
        there = [
            ctx.update_dtype is not None,
            has_read and prior is not None and needs[1],
            has_read and lse is not None,
            has_read and key is not None and needs[3],
            has_read and bias is not None and needs[4],
            has_read and gain is not None and needs[5],
        ]
        grads = [g if is_there else None for g, is_there in zip(out[:6], there, strict=True)]
        return (None, None, None, None, *grads, *out[6:])


class _BlockRead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        operators: Operators,
        shape: tuple[int, int, bool],
        read_dtype: torch.dtype,
        inverse: list[Tensor],
        *flat: Tensor | None,
    ) -> tuple[Tensor, ...]:
        values, scales, keys, biases, priors, prior_lses = _parts(shape, flat)
        values = [_dense(value) for value in values]
        priors = [_dense(prior) for prior in priors]
        out = operators.block_read_forward(
            values, inverse, scales, keys, biases, priors, prior_lses, read_dtype
        )
        m = len(keys)
        lses, logits = out[m : 2 * m], out[2 * m]
        ctx.save_for_backward(*inverse, *flat, *lses, logits)
        ctx.set_materialize_grads(False)
        ctx.operators, ctx.shape = operators, shape
        return (*out[: 2 * m], *(value.view_as(value) for value in values))

    @staticmethod
    @first_order_only
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        sources, m, has_priors = ctx.shape
        saved = list(ctx.saved_tensors)
        inverse, flat = saved[:sources], saved[sources : -(m + 1)]
        values, scales, keys, biases, priors, prior_lses = _parts(ctx.shape, flat)
        needs = _parts(ctx.shape, ctx.needs_input_grad[4:])
        wants = [
            needs[2],
            biases is not None and needs[3],
            any(needs[1]),
            has_priors and any((*needs[4], *needs[5])),
        ]
        out = ctx.operators.block_read_backward(
            [None if g is None else _dense(g) for g in grads[:m]],
            grads[m : 2 * m],
            [None if g is None else _dense(g) for g in grads[2 * m :]],
            [_dense(value) for value in values],
            inverse,
            scales,
            keys,
            biases,
            [_dense(prior) for prior in priors],
            prior_lses,
            saved[-(m + 1) : -1],
            saved[-1],
            wants,
        )
        grad_keys, grad_biases, *rest = out
        grad_values, grad_scales, rest = (
            rest[:sources],
            rest[sources : 2 * sources],
            rest[2 * sources :],
        )
        pairs = zip(rest[:m], rest[m:], strict=True) if has_priors else ()
        return (
            *(None,) * 4,
            *grad_values,
            *(g if need else None for g, need in zip(grad_scales, needs[1], strict=True)),
            grad_keys if wants[0] else None,
            grad_biases if wants[1] else None,
            *(g if wants[3] else None for pair in pairs for g in pair),
        )


def _parts(shape: tuple[int, int, bool], flat: Sequence[Any]) -> tuple[Any, ...]:
    """Values, scales, keys, biases, priors and prior log-sum-exps from their flat list."""
    sources, _, _ = shape
    values, scales = list(flat[:sources]), list(flat[sources : 2 * sources])
    keys, biases, *rest = flat[2 * sources :]
    return values, scales, keys, biases, rest[::2], rest[1::2]
