"""The case `scaling`: how a step's time grows with depth, sources and width."""

import dataclasses
import itertools
from collections.abc import Iterator

from resroute.bench.check import Truth
from resroute.bench.settings import Settings
from resroute.bench.step import alternate_steps
from resroute.bench.timing import Comparison, Listener
from resroute.bench.workload import GPTStep
from resroute.residual import ResidualConfig

_BLOCKS = (2, 4, 6, 8, 12)


def scaling(settings: Settings, listener: Listener) -> Iterator[Comparison]:
    """Time each size in turn with the one before it, all else equal.

    Depth: a quarter, half, one and two times the layers, at fixed blocks. Sources: 2 to 12 blocks,
    where the method has them. Width: a quarter, half and one times the width.
    """
    for residual in settings.methods:
        for backend in settings.served():
            for axis, sizes in _axes(settings, residual).items():
                for smaller, larger in itertools.pairwise(sizes):
                    yield _compare(axis, smaller, larger, residual, backend, listener)


def _axes(settings: Settings, residual: ResidualConfig) -> dict[str, list[Settings]]:
    """Settings by what grows."""
    layers, dim = settings.layers, settings.dim
    depths = [n for n in (layers // 4, layers // 2, layers, 2 * layers) if n >= settings.blocks]
    widths = [d for d in (dim // 4, dim // 2, dim) if d >= 8 and d % 2 == 0]
    axes = {
        "layers": [dataclasses.replace(settings, layers=n) for n in depths],
        "width": [dataclasses.replace(settings, dim=d) for d in widths],
    }
    if hasattr(residual, "num_blocks"):
        counts = [n for n in _BLOCKS if n <= layers]
        axes["blocks"] = [dataclasses.replace(settings, blocks=n) for n in counts]
    return axes


def _compare(
    axis: str,
    smaller: Settings,
    larger: Settings,
    residual: ResidualConfig,
    backend: str,
    listener: Listener,
) -> Comparison:
    deviations, steps = [], []
    for settings in (smaller, larger):
        deviations.append(Truth(settings, residual).require_formula(backend))
        steps.append(GPTStep(settings, residual, backend, compiled=settings.compiles))
    field = {"layers": "layers", "width": "dim", "blocks": "blocks"}[axis]
    sizes = getattr(smaller, field), getattr(larger, field)
    label = f"{residual.label} on {backend}, {sizes[1]} {axis} over {sizes[0]}"
    pairs = alternate_steps(steps[0], steps[1], larger, label, listener)
    return Comparison(
        name=residual.label,
        backend=backend,
        group=f"{sizes[1]} {axis}",
        against=f"{sizes[0]} {axis}",
        unit="s",
        pairs=pairs,
        details={"parameters": [step.parameters for step in steps], "deviation": deviations},
    )
