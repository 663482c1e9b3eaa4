"""Matrix products of sublayers in bfloat16, computed where the processor is fast.

R rows (tokens), D width.
"""

import platform
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from resroute.residual.untouched import untouched

# below, a product waits for its weights, which are half as long in bfloat16
_FEWEST_ROWS = 64


def has_matrix_tiles() -> bool:
    """Whether the CPU has AMX."""
    # torch has no public question for AMX in every version that we take
    return bool(getattr(torch.cpu, "_is_amx_tile_supported", bool)())


def narrow_is_slow() -> bool:
    """Whether the CPU multiplies bfloat16 matrices slower than float32 ones.

    Our choice of rule: x86 without AMX, where products in bfloat16 took 1.6 to 2.1 times as long
    (AVX512-BF16, torch 2.13; LOG.md). Other processors are taken at their word.
    """
    return platform.machine().lower() in ("x86_64", "amd64") and not has_matrix_tiles()


NARROW_IS_SLOW = narrow_is_slow()


def project(layer: nn.Linear, x: Tensor) -> Tensor:
    """`layer(x)`; bfloat16 on a CPU that is slow at it goes through float32, rounded once.

    Inputs, outputs and what is kept for the backward pass are bfloat16 as under autocast; float32
    weights are not rounded, so that results are nearer to those in float32.

    Args:
        layer: Called as it is where it is not a plain `nn.Linear` or has hooks.
        x: (..., D).
    """
    if not _goes_wide(layer, x):
        plain: Tensor = layer(x)
        return plain
    y: Tensor = _WideLinear.apply(x.to(torch.bfloat16), layer.weight)  # type: ignore[no-untyped-call]
    return y if layer.bias is None else y + layer.bias.to(y.dtype)


def _goes_wide(layer: nn.Linear, x: Tensor) -> bool:
    if not NARROW_IS_SLOW or x.device.type != "cpu" or not untouched(layer, nn.Linear):
        return False
    if torch.float64 in (x.dtype, layer.weight.dtype):
        return False
    is_autocast = torch.is_autocast_enabled("cpu")
    dtype = torch.get_autocast_dtype("cpu") if is_autocast else x.dtype
    is_wide = layer.weight.dtype == torch.float32
    enough = is_wide or x.numel() >= _FEWEST_ROWS * x.shape[-1]
    return dtype == torch.bfloat16 and enough


class _WideLinear(torch.autograd.Function):
    """A product of bfloat16 rows in float32; its gradients are written out, since a compiled
    backward pass is traced under the autocast of the forward pass and would be narrowed by it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        with torch.autocast("cpu", enabled=False):
            return F.linear(x.float(), weight.float()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad
        grad_x = grad_weight = None
        with torch.autocast("cpu", enabled=False):
            wide = grad.float()
            if needs_x:
                grad_x = (wide @ weight.float()).to(x.dtype)
            if needs_weight:
                rows = x.float().reshape(-1, x.shape[-1])
                grad_weight = wide.reshape(-1, wide.shape[-1]).t() @ rows
                grad_weight = grad_weight.to(weight.dtype)
        return grad_x, grad_weight
