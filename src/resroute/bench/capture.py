"""The case `capture`: what collecting every number of a model costs while a capture is open."""

from collections.abc import Callable, Iterator

import torch

from resroute import ops
from resroute.bench.check import Truth
from resroute.bench.settings import Settings
from resroute.bench.timing import Comparison, Listener, alternate, seconds
from resroute.bench.workload import GPTStep, warm
from resroute.residual.capture import capture as collecting


def capture(settings: Settings, listener: Listener) -> Iterator[Comparison]:
    """Compare a forward pass, and a training step, in a capture with the same outside of one.

    Outside nothing is left of a capture: the policy's methods are its own again.
    """
    for residual in settings.methods:
        truth = Truth(settings, residual)
        for backend in settings.served():
            checks = {"formula": truth.require_formula(backend)}
            step = GPTStep(settings, residual, backend, compiled=settings.compiles)
            checks["step"] = truth.require_step(step)
            listener.message(f"{residual.label} on {backend}: checked, warming up")
            warm(step)
            works: dict[str, Callable[[], None]] = {
                "forward": lambda step=step: _forward(step),  # type: ignore[misc]
                "step": step.run,
            }
            for group, work in works.items():
                pairs = alternate(
                    lambda work=work, step=step: seconds(work, step.device),  # type: ignore[misc]
                    lambda work=work, step=step: seconds(  # type: ignore[misc]
                        lambda: _captured(step, work), step.device
                    ),
                    pairs=settings.pairs,
                    warmup=1,
                    label=f"{residual.label} on {backend}, {group}",
                    listener=listener,
                )
                yield Comparison(
                    name=residual.label,
                    backend=backend,
                    against="no capture",
                    group=group,
                    unit="s",
                    pairs=tuple(pairs),
                    details={
                        "parameters": step.parameters,
                        "num_blocks": step.num_blocks,
                        "deviation": checks,
                    },
                )


def _captured(step: GPTStep, work: Callable[[], None]) -> None:
    with collecting(step.model) as seen:
        work()
    assert seen.passes == 1


@torch.no_grad()
def _forward(step: GPTStep) -> None:
    is_half = step.precision == torch.bfloat16
    with (
        ops.backend(step.backend),
        torch.autocast(step.device.type, torch.bfloat16, enabled=is_half),
    ):
        step.model(step.tokens)
