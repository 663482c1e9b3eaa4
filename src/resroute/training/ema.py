"""An exponential average of a model's weights."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

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
        self.decay = decay
        self.tensors: dict[str, Tensor] = {
            name: parameter.detach().clone() for name, parameter in model.named_parameters()
        }
        self._shares = local_parts(list(self.tensors.values()))

    @torch.no_grad()
    def update(self) -> None:
        """Follow the weights by one step."""
        torch._foreach_lerp_(self._shares, self._weights(), 1 - self.decay)

    def state(self) -> dict[str, Tensor]:
        """All that a model's state has, parameters averaged."""
        return {**self.model.state_dict(), **self.tensors}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model has the averaged weights while the context is open."""
        weights = self._weights()
        kept = [tensor.clone() for tensor in weights]
        with torch.no_grad():
            torch._foreach_copy_(weights, self._shares)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(weights, kept)

    def _weights(self) -> list[Tensor]:
        return local_parts([parameter.detach() for parameter in self.model.parameters()])
