"""Multiplying the coefficients of a method into a model's own weights."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from resroute.config import UserError
from resroute.hf.forms import Form, Sublayer
from resroute.residual import Policy


@torch.no_grad()
def fold(layers: Any, form: Form, policy: Policy[Any], config: Any) -> None:
    """Scale every update by its coefficient, in the last norm or the last maps of its sublayer.

    Args:
        layers: Of the decoder.
        form: The decoder's.
        policy: Has a coefficient, () or (D,), at every site.
        config: The decoder's.

    Raises:
        UserError: Sublayers that end in something else; nothing has changed then.
    """
    is_parallel = form.is_parallel(config)
    targets: list[tuple[Any, Tensor]] = []
    both = form.attention, form.mlp
    for site in range(policy.num_sites):
        index, place = divmod(site, 1 if is_parallel else 2)
        coefficient = policy.coefficient(site)
        assert coefficient is not None
        for sublayer in both if is_parallel else both[place : place + 1]:
            ends = _ends(layers[index], sublayer)
            targets += [(end, coefficient) for end in ends]
    for end, coefficient in targets:
        _scale(end, coefficient.float(), form)


def _ends(layer: Any, sublayer: Sublayer) -> list[Any]:
    """Norms or maps through which all of an update goes, and nothing else."""
    norms = [getattr(layer, name) for name in sublayer.after]
    norms = [norm for norm in norms if not isinstance(norm, nn.Dropout)]
    module = getattr(layer, sublayer.module)
    found = norms[-1:] or [
        end for name in sublayer.outputs if (end := _part(module, name)) is not None
    ]
    known = (nn.Linear, Conv1D, nn.Parameter)
    if not found or not all(norms or type(end) in known for end in found):
        raise UserError(
            f"{type(module).__name__} does not end in linear maps that are known; merge adapters "
            "before resroute.unconvert"
        )
    return found


def _part(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name, None)
    return module


def _scale(end: Any, by: Tensor, form: Form) -> None:
    """Multiply what comes out of a module by `by`, () or (D,), computed in float32."""
    if isinstance(end, nn.Parameter):
        # of all experts: (experts, D, hidden)
        _multiply(end, by.expand(end.shape[1])[:, None])
    elif isinstance(end, Conv1D):
        _multiply(end.weight, by)
        _multiply(end.bias, by)
    elif isinstance(end, nn.Linear):
        _multiply(end.weight, by.expand(end.weight.shape[0])[:, None])
        if end.bias is not None:
            _multiply(end.bias, by)
    else:
        offset = form.gain_offset
        end.weight.copy_((end.weight.float() + offset) * by - offset)


def _multiply(weight: Tensor, by: Tensor) -> None:
    weight.copy_(weight.float() * by)
