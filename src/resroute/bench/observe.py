"""The case `observe`: what looking at the routing adds to training."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from resroute import ops
from resroute.bench.check import Truth
from resroute.bench.settings import Settings
from resroute.bench.timing import Comparison, Listener, alternate, seconds
from resroute.bench.workload import GPTStep, warm
from resroute.residual.observe import observe as look
from resroute.training import TrainConfig
from resroute.training.learner import OBSERVED_TOKENS

EVERY = TrainConfig.observe_every


def observe(settings: Settings, listener: Listener) -> Iterator[Comparison]:
    """Compare a run that looks at its routing with one that does not.

    A look comes once in `EVERY` steps, as in training, so a pair is the time of a step, and that
    time and the 50th part of a look's. `bytes` counts instead of measuring: what goes in and out of
    every operator, uncompiled.
    """
    for residual in settings.methods:
        truth = Truth(settings, residual)
        for backend in settings.served():
            checks = {"formula": truth.require_formula(backend)}
            step = GPTStep(settings, residual, backend, compiled=settings.compiles)
            checks["step"] = truth.require_step(step)
            listener.message(f"{residual.label} on {backend}: checked, warming up")
            plain = GPTStep(settings, residual, backend, compiled=False)
            counted = bytes_moved(plain.run), bytes_moved(_Look(plain))
            yield _compared(
                step, residual.label, backend, "bytes", [counted], {"deviation": checks}
            )
            warm(step)
            glance = _Look(step)
            pairs = alternate(
                step.seconds,
                lambda glance=glance, step=step: seconds(glance, step.device),  # type: ignore[misc]
                pairs=settings.pairs,
                warmup=1,
                label=f"{residual.label} on {backend}",
                listener=listener,
            )
            yield _compared(step, residual.label, backend, "s", list(pairs), {})


class _Look:
    """One look at the routing of a step's model, as `Learner.observe` takes it."""

    def __init__(self, step: GPTStep) -> None:
        self.step = step
        self.window = step.tokens[:1, :OBSERVED_TOKENS]

    @torch.no_grad()
    def __call__(self) -> None:
        step = self.step
        is_half = step.precision == torch.bfloat16
        step.model.eval()
        with (
            ops.backend(step.backend),
            torch.autocast(step.device.type, torch.bfloat16, enabled=is_half),
        ):
            look(step.model.policy, lambda: step.model(self.window))
        step.model.train()


def _compared(
    step: GPTStep,
    label: str,
    backend: str,
    unit: str,
    found: list[tuple[float, float]],
    details: dict[str, Any],
) -> Comparison:
    looks = [once / taken for taken, once in found]
    return Comparison(
        name=label,
        backend=backend,
        against="not observed",
        group="bytes" if unit == "bytes" else "time",
        unit=unit,
        pairs=tuple((float(taken), taken + once / EVERY) for taken, once in found),
        details={
            "parameters": step.parameters,
            "num_blocks": step.num_blocks,
            "look_over_step": looks,
            **details,
        },
    )


def bytes_moved(work: Any) -> int:
    """Bytes of all tensors that go into and out of the operators that `work` calls."""
    counter = _Counter()
    with counter:
        work()
    return counter.bytes


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        # a view moves nothing
        if not function.is_view:
            tensors = tree_leaves((args, kwargs, result))
            self.bytes += sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor))
        return result
