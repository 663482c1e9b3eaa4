"""The block read in plain torch with a hand-written gradient, for any device and dtype.

m queries mix N finished sources in two products that read each source once, without a stack of
them. Saved are the logits alone. R rows (all leading axes), D width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from resroute.ops.exact import exact


@exact
def block_read_forward(
    values: Sequence[Tensor],
    inverse_rms: Sequence[Tensor],
    scales: Sequence[Tensor | None],
    keys: Tensor,
    biases: Tensor | None,
    priors: Sequence[Tensor],
    prior_lses: Sequence[Tensor],
    read_dtype: torch.dtype,
) -> list[Tensor]:
    """Mix finished sources for each query: `[*m reads, *m log-sum-exps, logits (N, m, ..)]`."""
    wide = keys.dtype
    logits = []
    for n, (value, inverse) in enumerate(zip(values, inverse_rms, strict=True)):
        # (m, ..) so that a query's row is contiguous
        logit = (value.to(wide) @ keys.t()).movedim(-1, 0) * inverse
        if biases is not None:
            logit = logit + biases[:, n].reshape(-1, *([1] * inverse.dim()))
        logits.append(logit)
    stacked = torch.stack(logits)  # [N, m, ..]
    lses = list(stacked.logsumexp(0).unbind(0))
    if prior_lses:
        lses = [torch.logaddexp(a, b) for a, b in zip(lses, prior_lses, strict=True)]
    reads = []
    for j, lse in enumerate(lses):
        weights, prior_weight = _weights(stacked[:, j], lse, prior_lses[j] if priors else None)
        mix: Tensor | None = None
        for value, scale, weight in zip(values, scales, weights.unbind(0), strict=True):
            share = (weight if scale is None else weight * scale).unsqueeze(-1)
            wider = value.to(wide)
            mix = share * wider if mix is None else mix.addcmul_(share, wider)
        assert mix is not None, "a block read needs a source"
        if priors:
            mix.addcmul_(prior_weight.unsqueeze(-1), priors[j].to(wide))
        reads.append(mix.to(read_dtype))
    # unbound rows share storage: an operator's results may not
    return [*reads, *(lse.clone() for lse in lses), stacked]


@exact
def block_read_backward(
    grad_reads: Sequence[Tensor | None],
    grad_lses: Sequence[Tensor | None],
    grad_values: Sequence[Tensor | None],
    values: Sequence[Tensor],
    inverse_rms: Sequence[Tensor],
    scales: Sequence[Tensor | None],
    keys: Tensor,
    biases: Tensor | None,
    priors: Sequence[Tensor],
    prior_lses: Sequence[Tensor],
    lses: Sequence[Tensor],
    logits: Tensor,
    wants: Sequence[bool],
) -> list[Tensor]:
    """Gradients `[keys, biases, *values, *scales, *priors, *prior lses]`; unwanted ones empty."""
    wide, width = keys.dtype, keys.shape[-1]
    wants_keys, wants_biases, wants_scales, wants_priors = wants
    stacked_priors = torch.stack(list(prior_lses)) if priors else None
    probabilities, prior_weight = _weights(logits, torch.stack(list(lses)), stacked_priors)
    products = torch.zeros_like(logits)  # <grad read_j, value_n>
    for j, grad in enumerate(grad_reads):
        if grad is not None:
            for n, value in enumerate(values):
                products[n, j] = (grad.to(wide) * value.to(wide)).sum(-1)
    shares = torch.stack(
        [p if s is None else p * s for p, s in zip(probabilities, scales, strict=True)]
    )
    pull = -(shares * products).sum(0)  # [m, ..]
    for j, grad in enumerate(grad_lses):
        if grad is not None:
            pull[j] += grad
    prior_weights = prior_weight.unbind(0) if priors else ()
    grad_priors, prior_products = _prior_backward(grad_reads, priors, prior_weights)
    for j, (weight, product) in enumerate(zip(prior_weights, prior_products, strict=True)):
        pull[j] -= weight * product
    scaled = torch.stack([q if s is None else q * s for q, s in zip(products, scales, strict=True)])
    grad_logits = probabilities * (scaled + pull)
    finished, grad_keys = [], torch.zeros_like(keys) if wants_keys else keys.new_empty(0)
    for n, value in enumerate(values):
        wider = value.to(wide)
        keyed = grad_logits[n] * inverse_rms[n]
        pure = logits[n]
        if biases is not None:
            pure = pure - biases[:, n].reshape(-1, *([1] * inverse_rms[n].dim()))
        # through r(x), whose gradient is -r^3 x / D
        back = (grad_logits[n] * pure).sum(0) * inverse_rms[n].square() / -width
        total = _own(grad_values[n], wider)
        total.addcmul_(back.unsqueeze(-1), wider)
        total.add_(keyed.movedim(0, -1) @ keys)
        for j, grad in enumerate(grad_reads):
            if grad is not None:
                total.addcmul_(shares[n, j].unsqueeze(-1), grad.to(wide))
        finished.append(total.to(value.dtype))
        if wants_keys:
            grad_keys += keyed.reshape(len(keys), -1) @ wider.reshape(-1, width)
    grad_biases = keys.new_empty(0)
    if wants_biases:
        grad_biases = grad_logits.reshape(len(values), len(keys), -1).sum(-1).t().contiguous()
    empty = keys.new_empty(0)
    grad_scales = [
        (probabilities[n] * products[n]).sum(0) if wants_scales and scale is not None else empty
        for n, scale in enumerate(scales)
    ]
    grad_prior_lses = [
        weight * (product + pull[j])
        for j, (weight, product) in enumerate(zip(prior_weights, prior_products, strict=True))
    ]
    if not wants_priors:
        grad_priors = grad_prior_lses = [empty for _ in priors]
    return [
        grad_keys,
        grad_biases,
        *finished,
        *(g.clone() if g is empty else g for g in grad_scales),
        *(g.clone() if g is empty else g for g in grad_priors),
        *(g.clone() if g is empty else g for g in grad_prior_lses),
    ]


def _weights(logits: Tensor, lse: Tensor, prior_lse: Tensor | None) -> tuple[Tensor, Tensor]:
    """Softmax weights of logits (N, ..), and of a prior, from their log-sum-exp.

    It is rounded, so they are divided by their sum: for gradients to cancel it must be one.
    """
    weights = (logits - lse).exp()
    prior = torch.zeros_like(lse) if prior_lse is None else (prior_lse - lse).exp()
    total = weights.sum(0) + prior
    return weights / total, prior / total


def _prior_backward(
    grad_reads: Sequence[Tensor | None], priors: Sequence[Tensor], weights: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of the priors, and by query the product <grad read, prior>."""
    grads, products = [], []
    for grad, prior, weight in zip(grad_reads, priors, weights, strict=bool(priors)):
        if grad is None:
            grads.append(torch.zeros_like(prior))
            products.append(torch.zeros_like(weight))
        else:
            wider = grad.to(weight.dtype)
            grads.append((weight.unsqueeze(-1) * wider).to(prior.dtype))
            products.append((wider * prior.to(weight.dtype)).sum(-1))
    return grads, products


def _own(incoming: Tensor | None, like: Tensor) -> Tensor:
    """A gradient to add to: what is returned must not be an input."""
    return torch.zeros_like(like) if incoming is None else incoming.to(like.dtype, copy=True)
