"""The site operation in plain torch with a hand-written gradient, for any device and dtype.

What is computed, and its gradients, are derived in docs/engine.md. Nothing is saved but the softmax
weights, 1 / rms and logits of each row: the read itself is built again. The functions are flat
(tensors, numbers, lists of them) because they are also registered as custom operators.

R rows (all leading axes), D width, K bases, Z running streams.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from resroute.core import compute_dtype, inverse_rms
from resroute.ops.exact import exact
from resroute.ops.forms import require_target


class _Saved(NamedTuple):
    """Numbers of each row that the forward pass keeps; lists run over the bases."""

    weights: list[Tensor]
    """Softmax weights, the prior's last."""
    inverse: list[Tensor]
    """1 / rms."""
    logits: list[Tensor]
    """Without biases."""
    inverse_norm: list[Tensor]
    """1 / rms of the mix, where a norm follows."""

    @classmethod
    def unpack(cls, saved: Tensor, num_bases: int, has_prior: bool) -> "_Saved":
        columns = list(saved.unbind(0)) if saved.shape != (0,) else []
        ends = [num_bases + has_prior, 2 * num_bases + has_prior, 3 * num_bases + has_prior]
        if not num_bases:
            ends = [0, 0, 0]
        return cls(
            columns[: ends[0]],
            columns[ends[0] : ends[1]],
            columns[ends[1] : ends[2]],
            columns[ends[2] :],
        )


@exact
def site_forward(
    update: Tensor | None,
    streams: Sequence[Tensor],
    prior: Tensor | None,
    lse: Tensor | None,
    key: Tensor | None,
    bias: Tensor | None,
    gain: Tensor | None,
    coefficients: Sequence[float],
    num_bases: int,
    target: int,
    eps: float,
    matching: int,
    rho_max: float,
    norm_eps: float,
    read_dtype: torch.dtype,
) -> list[Tensor]:
    """Add an update to a running stream and read the site: `[read, new stream, saved]`."""
    require_target(target, len(streams), update is not None)
    reference = next(t for t in (*streams, prior) if t is not None)
    wide = compute_dtype(reference.dtype)
    added = reference.new_empty(0)
    if update is not None:
        added = (streams[target].to(wide) + update.to(wide)).to(reference.dtype)
        streams = [*streams[:target], added, *streams[target + 1 :]]
    columns: list[Tensor] = []
    if num_bases:
        assert key is not None
        bases = _bases(streams, coefficients, num_bases, wide)
        inverse = [inverse_rms(basis, eps) for basis in bases]
        pure = [r * (basis @ key) for r, basis in zip(inverse, bases, strict=True)]
        logits = list(pure)
        if bias is not None:
            logits[1:] = [x + b for x, b in zip(pure[1:], bias.unbind(0), strict=True)]
        if lse is not None:
            logits.append(lse)
        weights = list(torch.stack(logits).softmax(0).unbind(0))
        mix = _mix(bases, weights, _scales(inverse, matching, rho_max), prior)
        columns = [*weights, *inverse, *pure]
    else:
        mix = (streams[0] if prior is None else prior).to(wide)
    if gain is None:
        read = mix.to(read_dtype, copy=num_bases == 0)
    else:
        inverse_norm = inverse_rms(mix, norm_eps)
        columns.append(inverse_norm)
        read = (mix * inverse_norm.unsqueeze(-1) * gain.to(wide)).to(read_dtype)
    saved = torch.stack(columns) if columns else reference.new_empty(0, dtype=wide)
    return [read, added, saved]


@exact
def site_backward(
    grad_read: Tensor | None,
    grad_streams: Sequence[Tensor | None],
    update_dtype: torch.dtype | None,
    streams: Sequence[Tensor],
    prior: Tensor | None,
    lse: Tensor | None,
    key: Tensor | None,
    bias: Tensor | None,
    gain: Tensor | None,
    saved: Tensor,
    coefficients: Sequence[float],
    num_bases: int,
    target: int,
    eps: float,
    matching: int,
    rho_max: float,
    norm_eps: float,
    wants: Sequence[bool],
) -> list[Tensor]:
    """Gradients `[update, prior, lse, key, bias, gain, *streams]`; those not wanted are empty."""
    require_target(target, len(streams), update_dtype is not None)
    reference = next(t for t in (*streams, prior) if t is not None)
    wide = compute_dtype(reference.dtype)
    wants_prior, wants_key, wants_bias, wants_gain = wants
    grads = [reference.new_empty(0) for _ in range(6)]
    # own copies: what is returned must alias neither an input nor another result
    totals = [
        torch.zeros_like(s, dtype=wide) if g is None else g.to(wide, copy=True)
        for s, g in zip(streams, grad_streams, strict=True)
    ]
    if grad_read is not None:
        row = _Saved.unpack(saved, num_bases, prior is not None)
        scales = _scales(row.inverse, matching, rho_max)
        bases = _bases(streams, coefficients, num_bases, wide)
        if num_bases:
            mix = _mix(bases, row.weights, scales, prior)
        else:
            mix = (streams[0] if prior is None else prior).to(wide)
        grad_mix = grad_read.to(wide)
        if gain is not None:
            grad_mix, grad_gain = _norm_backward(grad_mix, mix, gain.to(wide), row.inverse_norm[0])
            grads[5] = grad_gain if wants_gain else grads[5]
        if num_bases:
            assert key is not None
            delta = (grad_mix * mix).sum(-1)
            products = [(grad_mix * basis).sum(-1) for basis in bases]
            grad_logits = [
                p * ((product if s is None else s * product) - delta)
                for p, product, s in zip(row.weights, products, scales, strict=False)
            ]
            keyed = [dl * r for dl, r in zip(grad_logits, row.inverse, strict=True)]
            turns = _matching_backward(row, products, scales, matching, rho_max)
            for k, basis in enumerate(bases):
                share = _share(row.weights[k], scales[k])
                # through r(x), whose gradient is -r^3 x / D
                back = keyed[k] * row.inverse[k] * row.logits[k] + turns[k] * row.inverse[k] ** 3
                term = torch.addcmul(share.unsqueeze(-1) * grad_mix, keyed[k].unsqueeze(-1), key)
                term.addcmul_((back / -basis.shape[-1]).unsqueeze(-1), basis)
                _spread(totals, term, coefficients[k * len(totals) : (k + 1) * len(totals)])
            if wants_key:
                grads[3] = _grad_key(keyed, bases)
            if wants_bias and bias is not None:
                sums = [dl.sum() for dl in grad_logits[1:]]
                grads[4] = torch.stack(sums) if sums else key.new_empty(0)
            if prior is not None:
                grads[2] = row.weights[-1] * ((grad_mix * prior.to(wide)).sum(-1) - delta)
                if wants_prior:
                    grads[1] = (row.weights[-1].unsqueeze(-1) * grad_mix).to(prior.dtype)
        elif prior is None:
            totals[0] += grad_mix
        elif wants_prior:
            grads[1] = grad_mix.to(prior.dtype, copy=True)
    if update_dtype is not None:
        grads[0] = totals[target].to(update_dtype, copy=True)
    return [*grads, *(t.to(s.dtype) for t, s in zip(totals, streams, strict=True))]


def _bases(
    streams: Sequence[Tensor], coefficients: Sequence[float], num_bases: int, wide: torch.dtype
) -> list[Tensor]:
    bases = []
    for k in range(num_bases):
        row = coefficients[k * len(streams) : (k + 1) * len(streams)]
        basis = None
        for number, stream in zip(row, streams, strict=True):
            if number != 0:
                value = stream.to(wide)
                term = value if number == 1 else value * number
                basis = term if basis is None else basis + term
        assert basis is not None, "a basis of no stream"
        bases.append(basis)
    return bases


def _scales(inverse: Sequence[Tensor], matching: int, rho_max: float) -> list[Tensor | None]:
    """Matching factors of the values: none for the state, `min(rms C / rms D, rho)` for details."""
    if not matching:
        return [None] * len(inverse)
    return [None, *((r / inverse[0]).clamp(max=rho_max) for r in inverse[1:])]


def _share(weight: Tensor, scale: Tensor | None) -> Tensor:
    return weight if scale is None else weight * scale


def _mix(
    bases: Sequence[Tensor],
    weights: Sequence[Tensor],
    scales: Sequence[Tensor | None],
    prior: Tensor | None,
) -> Tensor:
    shares = [_share(p, s).unsqueeze(-1) for p, s in zip(weights, scales, strict=False)]
    mix = shares[0] * bases[0]
    for share, basis in zip(shares[1:], bases[1:], strict=True):
        mix.addcmul_(share, basis)
    if prior is not None:
        mix.addcmul_(weights[-1].unsqueeze(-1), prior.to(mix.dtype))
    return mix


def _norm_backward(
    grad_read: Tensor, mix: Tensor, gain: Tensor, inverse_norm: Tensor
) -> tuple[Tensor, Tensor]:
    normed = mix * inverse_norm.unsqueeze(-1)
    grad_gain = (grad_read * normed).reshape(-1, mix.shape[-1]).sum(0)
    scaled = grad_read * gain
    mean = (scaled * normed).mean(-1, keepdim=True)
    return (scaled - normed * mean) * inverse_norm.unsqueeze(-1), grad_gain


def _matching_backward(
    row: _Saved,
    products: Sequence[Tensor],
    scales: Sequence[Tensor | None],
    matching: int,
    rho_max: float,
) -> list[Tensor]:
    """Gradients at each basis' 1 / rms through the matching factors; zero where detached."""
    turns = [torch.zeros_like(r) for r in row.inverse]
    if matching == 2:
        state = row.inverse[0]
        for k in range(1, len(row.inverse)):
            scale = scales[k]
            assert scale is not None
            grad_scale = torch.where(scale < rho_max, row.weights[k] * products[k], 0.0)
            turns[k] = grad_scale / state
            turns[0] = turns[0] - grad_scale * row.inverse[k] / state**2
    return turns


def _spread(totals: Sequence[Tensor], term: Tensor, coefficients: Sequence[float]) -> None:
    for total, number in zip(totals, coefficients, strict=True):
        if number != 0:
            total.add_(term, alpha=number)


def _grad_key(keyed: Sequence[Tensor], bases: Sequence[Tensor]) -> Tensor:
    rows = [
        factor.reshape(1, -1) @ basis.reshape(-1, basis.shape[-1])
        for factor, basis in zip(keyed, bases, strict=True)
    ]
    return torch.cat(rows).sum(0)
