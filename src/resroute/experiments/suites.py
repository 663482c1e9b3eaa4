"""Suites: functions from what all cells share to the cells of a study.

A cell is one training run. Cells of one corpus and seed see equal batches in equal order and start
from equal weights, whatever their method; they have equal tokens but where tokens are the question.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from resroute.config import UserError, from_defaults, suggestion
from resroute.experiments.rates import Rates
from resroute.experiments.study import Contrast
from resroute.residual import (
    HAARES,
    WAV,
    BlockAttnRes,
    DeltaAttnRes,
    FullAttnRes,
    LayerScale,
    PreNorm,
    ResidualConfig,
    ReZero,
)
from resroute.training import TrainConfig


@dataclass(frozen=True, kw_only=True)
class Design:
    """What the cells of a suite share, and the axes along which they differ."""

    bases: tuple[TrainConfig, ...]
    """One configuration a corpus; method, depth, seed and rate in it are replaced."""
    layers: tuple[int, ...] = (12, 24, 48)
    seeds: int = 3
    """Seeds of every cell: 0, 1, .."""
    primary_seeds: int = 5
    """Seeds of the cells of the primary contrast."""
    blocks: int = 4
    """Depth blocks, where a method has them."""
    methods: tuple[ResidualConfig, ...] = ()
    """Instead of the suite's own."""
    rates: Rates | None = None
    """Learning rates of each method and depth; None takes the base's for all."""
    axis: tuple[float, ...] = ()
    """Values of the suite's axis (rates, widths, multiples of the steps) instead of its own."""


@dataclass(frozen=True, kw_only=True)
class Suite:
    """Cells in the order in which they are run, and what was declared beforehand."""

    name: str
    cells: tuple[TrainConfig, ...]
    baseline: str | None = None
    primary: Contrast | None = None
    primary_seeds: int | None = None
    """Seeds of the primary contrast."""
    rates: str | None = None
    """A sentence on where the learning rates come from."""


def paper(design: Design) -> Suite:
    """The WAV paper's comparison over depth, with seeds, and Delta, Full and HAARES besides.

    The three methods of the primary contrast come first, seed by seed, so that a sweep that is cut
    short has whole comparisons; then the contrast's further seeds; then the other methods.
    """
    n = design.blocks
    first = (PreNorm(), BlockAttnRes(num_blocks=n), WAV(num_blocks=n))
    others = (
        ReZero(),
        LayerScale(),
        HAARES(num_blocks=n),
        DeltaAttnRes(num_blocks=n),
        FullAttnRes(),
    )
    chosen = design.methods or (*first, *others)
    leading = [m for m in chosen if m in first]
    rest = [m for m in chosen if m not in first]
    contrast = [m for m in chosen if m in first[1:]]
    deepest = max(design.layers)
    seeds, more = range(design.seeds), range(design.seeds, design.primary_seeds)
    has_primary = len(contrast) == 2
    return Suite(
        name="paper",
        cells=(
            *_cells(design, leading, design.layers, seeds),
            *(_cells(design, contrast, [deepest], more) if has_primary else ()),
            *_cells(design, rest, design.layers, seeds),
        ),
        baseline=_baseline(PreNorm(), chosen),
        primary=(
            Contrast(treatment=WAV().label, baseline=first[1].label, num_layers=deepest)
            if has_primary
            else None
        ),
        primary_seeds=max(design.seeds, design.primary_seeds) if has_primary else None,
    )


def ablation(design: Design) -> Suite:
    """WAV with one thing changed at a time, at each depth, in groups; controls first.

    Controls have as many sources as WAV (two details) or HAARES (one), in no new direction or in
    one without meaning: a duplicate's bias can still favour sums of blocks. All take WAV's learning
    rate. A group is run seed by seed before the next begins, so that a sweep that is cut short has
    whole comparisons.
    """
    n = design.blocks

    def wav(**options: Any) -> ResidualConfig:
        return WAV(num_blocks=n, **options)

    # both methods where blocks are the question
    blocks = [b for b in (2, 4, 6, 12) if b != n and b <= min(design.layers)]
    groups: list[list[ResidualConfig]] = [
        [
            wav(),
            BlockAttnRes(num_blocks=n),
            wav(bases=("duplicate", "duplicate_2")),
            wav(bases=("random", "random_2")),
        ],
        [wav(learn_bases=True), wav(bases=("phase",)), wav(bases=("split",))],
        [wav(bases=("duplicate",)), wav(bases=("random",)), wav(bases=())],
        [
            *(wav(detail_bias=beta) for beta in (0.0, -1.0, -4.0)),
            *(wav(detail_bias=beta, learn_detail_bias=False) for beta in (0.0, -1.0, -2.0, -4.0)),
            *(wav(rho_max=rho) for rho in (1.0, 4.0, None)),
            wav(matching="off"),
            wav(matching="attached"),
            wav(bias_running=False),
            wav(details_in_readout=True),
        ],
        [make(num_blocks=b) for b in blocks for make in (WAV, BlockAttnRes)],
    ]
    if design.methods:
        groups = [list(design.methods)]
    seeds = range(design.seeds)
    return Suite(
        name="ablation",
        cells=tuple(c for group in groups for c in _cells(design, group, design.layers, seeds)),
        baseline=_baseline(wav(), groups[0]),
    )


def learning_rate(design: Design) -> Suite:
    """Each method over a grid of learning rates; a fair comparison takes each at its best."""
    rates = design.axis or (1e-3, 2e-3, 4e-3, 8e-3)
    return Suite(
        name="learning_rate",
        cells=tuple(
            _with(cell, learning_rate=rate)
            for cell in _cells(design, _three(design), design.layers, range(design.seeds))
            for rate in rates
        ),
        baseline=_baseline(PreNorm(), _three(design)),
    )


def width(design: Design) -> Suite:
    """The three methods at several widths, heads of equal width: half, once and twice as many."""
    cells = []
    for cell in _cells(design, _three(design), design.layers, range(design.seeds)):
        heads = cell.model.num_heads
        head = cell.model.dim // heads
        # half of three heads is two
        own = sorted({head * count for count in ((heads + 1) // 2, heads, 2 * heads)})
        for value in design.axis or own:
            dim = _whole(value, "width")
            if dim % head:
                raise UserError(f"a width of {dim} is not a multiple of the head width {head}")
            model = dataclasses.replace(cell.model, dim=dim, num_heads=dim // head)
            cells.append(_with(cell, model=model))
    return Suite(name="width", cells=tuple(cells), baseline=_baseline(PreNorm(), _three(design)))


def horizon(design: Design) -> Suite:
    """The three methods for 1, 2, 4 and 8 times the steps, warm-up and schedule in proportion."""
    cells = []
    for cell in _cells(design, _three(design), design.layers, range(design.seeds)):
        for value in design.axis or (1, 2, 4, 8):
            times = _whole(value, "multiple of the steps")
            cells.append(
                _with(
                    cell,
                    steps=cell.steps * times,
                    warmup_steps=cell.warmup_steps * times,
                    evaluate_every=cell.evaluate_every * times,
                )
            )
    return Suite(name="horizon", cells=tuple(cells), baseline=_baseline(PreNorm(), _three(design)))


SUITES: dict[str, Callable[[Design], Suite]] = {
    suite.__name__: suite for suite in (paper, ablation, learning_rate, width, horizon)
}
"""Suites by the name that `resroute sweep` takes."""


def make_suite(name: str, design: Design) -> Suite:
    """The cells of a suite of that name.

    Raises:
        UserError: An unknown suite, a design without corpus, depth or seed, or a cell twice.
    """
    if name not in SUITES:
        raise UserError(
            f"unknown suite {name!r}{suggestion(name, SUITES)}; known: {', '.join(SUITES)}"
        )
    if not (design.bases and design.layers and design.seeds > 0):
        raise UserError("a sweep needs at least one corpus, one depth and one seed")
    suite = SUITES[name](design)
    return dataclasses.replace(
        suite,
        cells=tuple(dict.fromkeys(suite.cells)),
        rates=None if design.rates is None else design.rates.told,
    )


def series_label(config: TrainConfig) -> str:
    """The method of a cell with the options that are not at their default, blocks left out."""
    residual = config.model.residual
    # bases are in the label
    changed = from_defaults(residual)
    shown = [
        f"{name}={value}"
        for name, value in changed.items()
        if name not in ("type", "bases", "num_blocks")
    ]
    return residual.label + (f" ({', '.join(shown)})" if shown else "")


def _baseline(preferred: ResidualConfig, methods: Sequence[ResidualConfig]) -> str | None:
    """What others are compared with: without the preferred method, the first one's series."""
    return preferred.label if preferred in methods else None


def _three(design: Design) -> Sequence[ResidualConfig]:
    n = design.blocks
    return design.methods or (PreNorm(), BlockAttnRes(num_blocks=n), WAV(num_blocks=n))


def _cells(
    design: Design,
    methods: Iterable[ResidualConfig],
    layers: Sequence[int],
    seeds: Iterable[int],
) -> Iterator[TrainConfig]:
    """Seeds outermost, then corpora, depths from the deepest on, and methods innermost."""
    methods = list(methods)
    for seed in seeds:
        for base in design.bases:
            for depth in sorted(layers, reverse=True):
                for method in methods:
                    model = dataclasses.replace(base.model, num_layers=depth, residual=method)
                    cell = _with(base, model=model, seed=seed)
                    if design.rates is not None:
                        rate = design.rates.rate(method, depth, base.data)
                        cell = _with(cell, learning_rate=rate)
                    yield cell


def _with(config: TrainConfig, **changes: Any) -> TrainConfig:
    return dataclasses.replace(config, **changes)


def _whole(value: float, what: str) -> int:
    if value != int(value) or value < 1:
        raise UserError(f"a {what} must be a whole number above 0, got {value:g}")
    return int(value)
