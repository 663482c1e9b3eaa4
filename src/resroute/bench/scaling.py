"""The case `scaling`: how a step's time grows with depth, sources and width."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from resroute.bench.check import Truth
from resroute.bench.settings import Settings, blocks_made, with_blocks
from resroute.bench.step import alternate_steps
from resroute.bench.timing import Comparison, Listener
from resroute.bench.workload import GPTStep
from resroute.residual import ResidualConfig

_BLOCKS = (2, 4, 6, 8, 12)
_FIELDS = {"layers": "layers", "width": "dim", "blocks": "blocks"}

# narrower models have no heads to speak of
_LEAST_WIDTH = 8


def scaling(settings: Settings, listener: Listener) -> Iterator[Comparison]:
    """Time each size in turn with the one before it, all else equal.

    Depth: a quarter, half, one and two times the layers, at fixed blocks. Sources: 2 to 12 blocks,
    where the method has them. Width: a quarter, half and one times the width. Sizes that do not
    make so many blocks are left out, and the listener is told.
    """
    for residual in settings.methods:
        axes, left_out = _axes(settings, residual)
        if left_out:
            listener.message(f"{residual.label}: left out: {'; '.join(left_out)}")
        for backend in settings.served():
            for axis, sizes in axes.items():
                for smaller, larger in itertools.pairwise(sizes):
                    yield _compare(axis, smaller, larger, residual, backend, listener)


def _axes(
    settings: Settings, residual: ResidualConfig
) -> tuple[dict[str, list[Settings]], list[str]]:
    """Settings by what grows, and which sizes are left out, in words."""
    layers, dim = settings.layers, settings.dim
    takes_blocks = with_blocks(residual, 1) is not residual
    depths = [n for n in (layers // 4, layers // 2, layers, 2 * layers) if n]
    widths = [d for d in (dim // 4, dim // 2, dim) if d]
    kept = {
        "layers": depths,
        "width": [d for d in widths if d >= _LEAST_WIDTH and d % 2 == 0],
    }
    left_out = _missing("width", widths, kept["width"], f"odd, or below {_LEAST_WIDTH}")
    asked = settings.num_blocks if takes_blocks else getattr(residual, "num_blocks", None)
    settings = dataclasses.replace(settings, blocks=None)
    if asked is not None:
        made = blocks_made(layers, asked)
        if takes_blocks:
            asked = made
            settings = dataclasses.replace(settings, blocks=made)
            kept["blocks"] = [n for n in _BLOCKS if blocks_made(layers, n) == n]
        kept["layers"] = [n for n in depths if blocks_made(n, asked) == made]
        why = f"they do not make {made} blocks"
        left_out += _missing("layers", depths, kept["layers"], why)
    if takes_blocks:
        why = f"{layers} layers do not make them"
        left_out += _missing("blocks", _BLOCKS, kept["blocks"], why)
    axes = {
        axis: [_resized(settings, axis, size) for size in sizes] for axis, sizes in kept.items()
    }
    return axes, left_out


def _resized(settings: Settings, axis: str, size: int) -> Settings:
    return dataclasses.replace(settings, **{_FIELDS[axis]: size})  # type: ignore[arg-type]


def _missing(axis: str, sizes: Sequence[int], kept: Sequence[int], why: str) -> list[str]:
    """`1, 2 layers (they do not make 4 blocks)`, or nothing where all are kept."""
    missing = [str(size) for size in sizes if size not in kept]
    return [f"{', '.join(missing)} {axis} ({why})"] if missing else []


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
    sizes = getattr(smaller, _FIELDS[axis]), getattr(larger, _FIELDS[axis])
    label = f"{residual.label} on {backend}, {sizes[1]} {axis} over {sizes[0]}"
    pairs = alternate_steps(steps[0], steps[1], larger, label, listener)
    return Comparison(
        name=residual.label,
        backend=backend,
        group=f"{sizes[1]} {axis}",
        against=f"{sizes[0]} {axis}",
        unit="s",
        pairs=pairs,
        details={
            "parameters": [step.parameters for step in steps],
            "num_blocks": [step.num_blocks for step in steps],
            "deviation": deviations,
        },
    )
