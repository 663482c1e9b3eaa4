"""Multiplying the coefficients of a method into a model's own weights."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from resroute.config import UserError
from resroute.hf.forms import Form, Sublayer
from resroute.residual import Policy


@dataclass(frozen=True, kw_only=True)
class _Scaling:
    """One tensor of a module's own, and what its values are multiplied by."""

    owner: nn.Module
    name: str
    by: Tensor
    """Broadcast over the tensor."""
    offset: float = 0.0
    """Of a norm that multiplies by this plus its weight."""


@torch.no_grad()
def fold(model: nn.Module, form: Form, policy: Policy[Any]) -> None:
    """Scale every update by its coefficient, in the last norm or the last maps of its sublayer.

    Args:
        model: Converted.
        form: The decoder's.
        policy: Has a coefficient, () or (D,), at every site.

    Raises:
        UserError: Sublayers that end in something else, or in weights that are shared or made anew
            in every call; nothing has changed then.
    """
    decoder: Any = model.base_model
    layers, is_parallel = getattr(decoder, form.layers), form.is_parallel(decoder.config)
    scalings: list[_Scaling] = []
    both = form.attention, form.mlp
    for site in range(policy.num_sites):
        index, place = divmod(site, 1 if is_parallel else 2)
        coefficient = policy.coefficient(site)
        assert coefficient is not None
        for sublayer in both if is_parallel else both[place : place + 1]:
            scalings += _scalings(layers[index], sublayer, coefficient, form.gain_offset)
    _require_own(scalings, model)
    for one in scalings:
        weight = getattr(one.owner, one.name)
        wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
        weight.copy_((wide + one.offset) * one.by - one.offset)


def _scalings(layer: Any, sublayer: Sublayer, by: Tensor, gain_offset: float) -> list[_Scaling]:
    """Tensors of the norms or maps through which all of an update goes, and nothing else."""
    norms = [getattr(layer, name) for name in sublayer.after]
    norms = [norm for norm in norms if not isinstance(norm, nn.Dropout)]
    module = getattr(layer, sublayer.module)
    if norms:
        return [_Scaling(owner=norms[-1], name="weight", by=by, offset=gain_offset)]
    found: list[_Scaling] = []
    for path in sublayer.outputs:
        *parents, name = path.split(".")
        owner = _part(module, parents)
        end = getattr(owner, name, None)
        if type(end) is nn.Parameter:
            # of all experts: (experts, D, hidden)
            found += [_Scaling(owner=owner, name=name, by=by.expand(end.shape[1])[:, None])]
        elif type(end) in (nn.Linear, Conv1D):
            found += _of_map(end, by)
        elif end is not None:
            found = []
            break
    if not found:
        raise UserError(
            f"{type(module).__name__} does not end in linear maps that are known; merge adapters "
            "before resroute.unconvert"
        )
    return found


def _part(module: Any, names: list[str]) -> Any:
    for name in names:
        module = getattr(module, name, None)
    return module


def _of_map(end: Any, by: Tensor) -> list[_Scaling]:
    # a Linear has its weight as (outputs, inputs), a Conv1D the other way round
    rows = by if isinstance(end, Conv1D) else by.expand(end.out_features)[:, None]
    weight = _Scaling(owner=end, name="weight", by=rows)
    return [weight] if end.bias is None else [weight, _Scaling(owner=end, name="bias", by=by)]


def _require_own(scalings: list[_Scaling], model: nn.Module) -> None:
    """Refuse tensors that are used in several places, or computed from others in every call."""
    uses = Counter(_memory(p) for _, p in model.named_parameters(remove_duplicate=False))
    for one in scalings:
        kind = type(one.owner).__name__
        weight = one.owner._parameters.get(one.name)
        if weight is None:
            raise UserError(
                f"{one.name} of a {kind} is no parameter, as with pruning or weight norm; make it "
                "one (torch.nn.utils.prune.remove, remove_weight_norm) before resroute.unconvert"
            )
        if uses[_memory(weight)] > 1:
            raise UserError(
                f"{one.name} of a {kind} is shared in the model, and each place would need its own "
                "coefficient\ngive each a copy of its own before resroute.unconvert"
            )


def _memory(weight: Tensor) -> int:
    # parameters apart may be views of the same memory; those without any are told by themselves
    return weight.data_ptr() or id(weight)
