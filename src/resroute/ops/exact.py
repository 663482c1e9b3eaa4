"""Keeping autocast out of the routing operations."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from resroute.core import compute_dtype

P = ParamSpec("P")
R = TypeVar("R")

_DEVICES = ("cpu", "cuda", "mps", "xpu")


def exact(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function of tensors in the dtypes that it names, without autocast and gradients."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        device = next((kind for kind in _DEVICES if torch.is_autocast_enabled(kind)), None)
        if device is not None:
            # it would take the products in bfloat16
            with torch.autocast(device, enabled=False):
                return run(*args, **kwargs)
        with torch.no_grad():
            return function(*args, **kwargs)

    return run


def read_dtype(device_type: str, dtype: torch.dtype) -> torch.dtype:
    """The type that a tensor of `dtype` has where matrix products take it: autocast's, or its own.

    bfloat16 has the range of the float32 stream; float16 does not, so it is left to autocast.
    """
    # the meta device has no autocast
    if dtype != torch.float32 or not torch.amp.is_autocast_available(device_type):
        return dtype
    if torch.is_autocast_enabled(device_type):
        cast = torch.get_autocast_dtype(device_type)
        return cast if cast == torch.bfloat16 else dtype
    return dtype


def addable(update: Tensor, dtype: torch.dtype) -> Tensor:
    """An update as every backend takes it on streams of a dtype; nothing is rounded on the way."""
    taken = (dtype, torch.float32, torch.bfloat16)
    return update if update.dtype in taken else update.to(compute_dtype(dtype))
