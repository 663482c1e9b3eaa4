"""An exponential average of a model's weights."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from resroute.training.distributed import local_parts


class Average:
    """Weights that follow a model's: `average <- decay * average + (1 - decay) * weights`.

    It starts at the initial weights. Buffers are the model's own. Where parameters are sharded,
    each process averages its share.

    Args:
        model: Its parameters are followed.
        decay: From 0 (the weights themselves) to below 1.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = model
        self._follow = get_ema_multi_avg_fn(decay)
        self.tensors: dict[str, Tensor] = {
            name: parameter.detach().clone() for name, parameter in model.named_parameters()
        }
        self._shares = local_parts(list(self.tensors.values()))

    def update(self) -> None:
        """Follow the weights by one step."""
        self._follow(self._shares, self._weights(), None)

    def state(self) -> dict[str, Tensor]:
        """All that a model's state has, parameters averaged."""
        return {**self.model.state_dict(), **self.tensors}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model has the averaged weights while the context is open."""
        weights = self._weights()
        kept = [tensor.clone() for tensor in weights]
        _copy(weights, self._shares)
        try:
            yield
        finally:
            _copy(weights, kept)

    def _weights(self) -> list[Tensor]:
        return local_parts([parameter.detach() for parameter in self.model.parameters()])


@torch.no_grad()
def _copy(targets: list[Tensor], values: list[Tensor]) -> None:
    for target, value in zip(targets, values, strict=True):
        target.copy_(value)
