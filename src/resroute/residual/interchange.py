"""Depth-routing parameters of other implementations of Attention Residuals, to ours and back.

| layout | of a sublayer, below `layers.N.` | of the readout | its blocks count |
| --- | --- | --- | --- |
| `attn-res` | `attn_res.pseudo_query` | none: the plain sum | sublayers |
| `fla` | `attn_res_*`, `mlp_res_*` | `res_*` | sublayers |
| `kimi-k3` | `self_attention_res_*`, `mlp_res_*` | `output_attn_res_*` | layers |

`*` stands for `proj.weight` (1, D), the query, and `norm.weight` (D,), the gain on its keys.
`layouts` says where this is taken from.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from resroute.config import UserError, require_whole
from resroute.residual.attnres import BlockAttnRes, FullAttnRes
from resroute.residual.base import DEFAULT_KINDS, Policy, ResidualConfig
from resroute.residual.layouts import Layout, find_names, layout_of, stacked
from resroute.residual.routed import RoutedPolicy

__all__ = ["block_size", "from_layout", "to_layout"]


def from_layout(
    state: Mapping[str, Tensor],
    layout: str,
    *,
    block_size: int,
    eps: float | None = None,
    scale: float = 1.0,
    prefix: str | None = None,
) -> Policy[Any]:
    """A policy that reads as another implementation's routing does.

    Sublayers, norms and embeddings of the state are left alone: they are yours to carry over.
    Numbers of bfloat16 and float16 become the same in float32.

    With `attn-res` the policy is gated, its gates one, but for the readout's, which is zero: the
    plain sum. They take no gradient, so training keeps to the method. Where its blocks or its stack
    are no whole layers of two, its sites are layers of one sublayer.

    Args:
        state: A model's `state_dict`, or the part of it with these parameters.
        layout: `attn-res`, `fla` or `kimi-k3`.
        block_size: As the other configuration has it. Of `attn-res` `config.block_size`, but 1 in
            its full mode; of `fla` `attnres_block_size`, where 1 is Full AttnRes; of `kimi-k3`
            `attn_res_block_size`.
        eps: Of its norms; None takes its default, 1e-6, or 1e-5 of `kimi-k3`.
        scale: What the logits are multiplied by, such as `dim**-0.5`; it goes into the queries.
        prefix: What stands before `layers.` in names, such as `model.`; None finds it.

    Returns:
        A policy of `FullAttnRes` or `BlockAttnRes`, on the device of the tensors.

    Raises:
        UserError: Another formula; a state without the layout's parameters, or with some that
            belong to another formula; or a size of blocks that the layout does not have.
    """
    form = layout_of(layout)
    _require_scale(scale)
    names = find_names(state, form, prefix)
    queries = stacked(state, form, [name.query for name in names])
    num_sites, dim = len(names) - (form.readout is not None), queries.shape[1]
    config, kinds = _method(form, num_sites, block_size, form.eps if eps is None else eps)
    policy = config.build(num_sites // len(kinds), dim, kinds).to(queries)
    assert isinstance(policy, RoutedPolicy)
    with torch.no_grad():
        # of a readout without parameters there is no row
        policy.query[: len(names)] = _times(queries, scale)
        if policy.key_gain is not None:
            gains = [name.gain for name in names if name.gain is not None]
            policy.key_gain.copy_(stacked(state, form, gains, dim))
        if policy.gate is not None:
            policy.gate[:-1] = 1.0
            policy.gate.requires_grad_(False)
    return policy


def to_layout(
    policy: Policy[Any],
    layout: str,
    *,
    dtype: torch.dtype | None = None,
    scale: float = 1.0,
    prefix: str | None = None,
) -> dict[str, Tensor]:
    """A policy's parameters as another implementation names them.

    What `from_layout` took comes back to the bit where it was of one dtype, given that and its
    prefix (and, but for a rounding in float32, any scale). The other configuration also needs
    `block_size(policy, layout)` and `policy.eps`. For `attn-res`, which has no gains, they are
    multiplied into the queries.

    Args:
        policy: Of `FullAttnRes` or `BlockAttnRes`, or WAV without bases.
        layout: `attn-res`, `fla` or `kimi-k3`.
        dtype: Of the tensors; None keeps the policy's.
        scale: What the logits are multiplied by there; queries are divided by it.
        prefix: What stands before `layers.` in names; None takes that of its model with a head.

    Returns:
        New tensors by name, as safetensors takes them.

    Raises:
        UserError: A method, readout, gate, kind of layer or size of blocks that the layout does not
            have.
    """
    form = layout_of(layout)
    routed = _representable(policy, form)
    # for what it refuses
    block_size(policy, layout)
    _require_scale(scale)
    if dtype is not None and not dtype.is_floating_point:
        raise UserError(f"dtype must be one of floating-point numbers, got {dtype}")
    num_layers = routed.num_sites // len(form.sites)
    names = form.names(form.prefix if prefix is None else prefix, num_layers)
    queries = _times(routed.query.detach(), 1 / scale)
    gains = torch.ones_like(queries) if routed.key_gain is None else routed.key_gain.detach()
    found = {}
    for row, name in enumerate(names):
        query, gain = queries[row], gains[row]
        if name.gain is None:
            query = query * gain
        else:
            query = query.unsqueeze(0)
            found[name.gain] = gain.to(dtype or gain.dtype, copy=True)
        found[name.query] = query.to(dtype or query.dtype, copy=True)
    lost = [name for name, tensor in found.items() if not bool(tensor.isfinite().all())]
    if lost and bool(queries.isfinite().all() and gains.isfinite().all()):
        raise UserError(f"{lost[0]} is beyond {dtype}; take another dtype")
    return found


def block_size(policy: Policy[Any], layout: str) -> int:
    """The size of a policy's blocks in the unit of a layout's configuration.

    Raises:
        UserError: As `to_layout`.
    """
    form = layout_of(layout)
    routed = _representable(policy, form)
    size, unit = len(routed.blocks[0]), len(form.sites)
    if form.counts_layers:
        if size % unit:
            raise UserError(
                f"{layout} has blocks of whole layers, and these are of {size} of {unit} sublayers "
                "(Full AttnRes is not among them)"
            )
        return size // unit
    if unit == 1:
        # what its configuration computes from a number of blocks
        number = routed.num_sites // size
        if routed.num_sites // number != size:
            raise UserError(
                f"{layout} has blocks of n_layers // n_blocks sublayers, and {size} of "
                f"{routed.num_sites} is none of these"
            )
    return size


def _require_scale(scale: float) -> None:
    if not (math.isfinite(scale) and scale):
        raise UserError(f"scale must be a number other than zero, got {scale:g}")


def _times(values: Tensor, factor: float) -> Tensor:
    """Values times a factor, rounded once."""
    if factor == 1:
        return values
    # not every device has float64
    return (values.cpu().double() * factor).to(values)


def _method(
    form: Layout, num_sites: int, block_size: int, eps: float
) -> tuple[ResidualConfig, tuple[str, ...]]:
    """The method that a layout's blocks make, and the kinds of its layers."""
    size = require_whole("block_size", block_size, 1) * (2 if form.counts_layers else 1)
    has_layers = num_sites % 2 == 0 and (size == 1 or size % 2 == 0)
    if len(form.sites) == 2 and not has_layers:
        raise UserError(
            f"block_size of {form.name} must be 1 or even, as it counts sublayers, got {block_size}"
        )
    kinds = DEFAULT_KINDS if has_layers else ("sublayer",)
    options: dict[str, Any] = {"eps": eps}
    if form.readout is None:
        options |= {"gated": True, "key_gain": False}
    if size == 1:
        return FullAttnRes(**options), kinds
    return BlockAttnRes(block_layers=min(size, num_sites) // len(kinds), **options), kinds


def _representable(policy: Policy[Any], form: Layout) -> RoutedPolicy:
    """The policy, where a layout can say what it does."""
    if not isinstance(policy, RoutedPolicy):
        raise UserError(f"{form.name} holds routing, and {type(policy).__name__} has none")
    if policy.additive or policy.bases:
        what = "adds a mix to the plain sum" if policy.additive else "mixes details of blocks too"
        raise UserError(f"{form.name} holds Full and Block AttnRes; this policy {what}")
    if len(form.sites) == 2 and (len(policy.kinds) != 2 or policy.kinds[0] == "mlp"):
        raise UserError(
            f"{form.name} has layers of an attention and an MLP, this policy has {policy.kinds}"
        )
    gates = torch.ones(policy.num_sites + 1) if policy.gate is None else policy.gate.detach()
    if not (gates[:-1] == 1).all():
        raise UserError(f"{form.name} has no gates, and those of this policy are not all one")
    mixes, closed = form.readout is not None, float(gates[-1])
    if closed != float(mixes):
        does = "mixes to read out" if mixes else "reads out the plain sum"
        raise UserError(
            f"{form.name} {does}; this needs a readout whose gate is {int(mixes)}, got {closed:g}"
        )
    return policy
