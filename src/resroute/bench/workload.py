"""What is timed: training steps of models, with weights that let no term vanish."""

import time
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

from resroute import ops
from resroute.bench.settings import VOCABULARY, Settings
from resroute.bench.timing import seconds
from resroute.model import GPT
from resroute.residual import PreNorm, ResidualConfig
from resroute.training import TrainConfig
from resroute.training.optim import make_optimizer

BATCH = 8


class Step:
    """Forward, backward and an optimizer's step of anything with a loss.

    Args:
        loss: Computes the loss.
        optimizer: Over all parameters.
        device: Where it runs.
        precision: bfloat16 is autocast.
        backend: Of the routing operations, while it runs.
    """

    def __init__(
        self,
        loss: Callable[[], Tensor],
        optimizer: torch.optim.Optimizer,
        *,
        device: torch.device,
        precision: torch.dtype,
        backend: str = "auto",
    ) -> None:
        self._loss = loss
        self.optimizer = optimizer
        self.device = device
        self.precision = precision
        self.backend = backend

    def gradients(self) -> Tensor:
        """Forward and backward; returns the loss."""
        is_half = self.precision == torch.bfloat16
        with ops.backend(self.backend):
            with torch.autocast(self.device.type, torch.bfloat16, enabled=is_half):
                loss = self._loss()
            loss.backward()
        return loss.detach()

    def clear(self) -> None:
        """Drop the gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def run(self) -> None:
        """One whole step."""
        self.gradients()
        self.optimizer.step()
        self.clear()

    def seconds(self) -> float:
        """Wall time of a step."""
        return seconds(self.run, self.device)


class GPTStep(Step):
    """A step of our model on one random batch; equal arguments give equal weights and tokens."""

    def __init__(
        self,
        settings: Settings,
        residual: ResidualConfig,
        backend: str,
        *,
        compiled: bool,
        precision: torch.dtype | None = None,
        batch: int | None = None,
    ) -> None:
        device = settings.torch_device
        self.model = make_model(settings, residual)
        inputs, targets = _windows(settings, batch or settings.batch or BATCH)

        def loss() -> Tensor:
            value: Tensor = self.model(inputs, targets)[1]
            return value

        super().__init__(
            loss,
            make_optimizer(self.model, TrainConfig(model=self.model.config, data="none")),
            device=device,
            precision=precision or settings.torch_precision,
            backend=backend,
        )
        self.tokens, self.targets = inputs, targets
        self.residual = residual
        self.is_compiled = compiled
        if compiled:
            self.model.compile(dynamic=False)

    @property
    def parameters(self) -> int:
        """Their number."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def num_blocks(self) -> int | None:
        """Depth blocks as built; None where the method has no option for them."""
        return built_blocks(self.model)

    def outcome(self) -> dict[str, Tensor]:
        """The loss and every gradient; weights and gradients are left as they were."""
        loss = self.gradients()
        found = {"loss": loss}
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                found[name] = parameter.grad
        self.clear()
        return found


def torch_step(
    settings: Settings, model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]
) -> Step:
    """A step of any model, with the tokens and the optimizer's settings of `GPTStep`.

    Args:
        settings: Batch, context, device and precision.
        model: On the device.
        loss: From tokens and targets (B, T) to the loss.
    """
    inputs, targets = _windows(settings, settings.batch or BATCH)
    usual = TrainConfig(model=settings.model(PreNorm()), data="none")
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=usual.learning_rate,
        betas=(usual.beta1, usual.beta2),
        weight_decay=usual.weight_decay,
        fused=True,
    )
    return Step(
        lambda: loss(inputs, targets),
        optimizer,
        device=settings.torch_device,
        precision=settings.torch_precision,
    )


def make_model(settings: Settings, residual: ResidualConfig) -> GPT:
    """The model of a method with rough weights."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        # `cases.run` says them, once
        warnings.simplefilter("ignore")
        model = GPT(settings.model(residual))
    roughen(model)
    return model.to(settings.torch_device)


def built_blocks(model: GPT) -> int | None:
    """Depth blocks of a model as built; None where its method has no option for them."""
    if not hasattr(model.config.residual, "num_blocks"):
        return None
    found: int = model.policy.num_blocks  # type: ignore[assignment]
    return found


@torch.no_grad()
def roughen(model: GPT) -> None:
    """Give every parameter a value at which all of the method counts.

    At initial values updates are small, queries zero and logits flat: a wrong operation would
    hardly show. Policies draw last, so that models of different methods share all other weights.
    Times do not depend on values.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight.normal_(std=module.in_features**-0.5)
    for name, parameter in model.policy.named_parameters():
        noise = torch.randn_like(parameter)
        parameter.add_(noise * (parameter.shape[-1] ** -0.5 if "query" in name else 0.2))


def random_tokens(rows: int, length: int, device: torch.device) -> Tensor:
    """Token ids (rows, length), always the same."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(VOCABULARY, (rows, length), generator=generator).to(device)


def _windows(settings: Settings, rows: int) -> tuple[Tensor, Tensor]:
    tokens = random_tokens(rows, settings.context + 1, settings.torch_device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def warm(step: Step, count: int = 2) -> float:
    """Run what is compiled or built at first use; seconds that it took."""
    began = time.perf_counter()
    for _ in range(count):
        step.run()
    return time.perf_counter() - began
