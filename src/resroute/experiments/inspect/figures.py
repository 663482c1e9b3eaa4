"""The figures of an inspection as files, drawn by matplotlib from `views`."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from resroute.analysis import DepthWeights
from resroute.analysis.figures import (
    DASHES,
    MARKERS,
    PALETTE,
    Format,
    depth_image,
    plain,
    rendered,
    styled,
)
from resroute.experiments.importance import Importance
from resroute.experiments.inspect.inspection import Inspection
from resroute.experiments.inspect.views import bases_of, by_kind, histories, measures

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# inches
_WIDTH = 5.2
# places in `PALETTE` and `MARKERS`; the page's script has the same
_KINDS = {
    "embedding": (0, 0),
    "state": (4, 0),
    "update": (4, 0),
    "running state": (3, 0),
    "running update": (3, 0),
    "phase": (6, 0),
    "running phase": (6, 1),
    "split": (5, 0),
    "running split": (5, 1),
}
_SITES = (4, 6, 5, 2, 1)
_RUNS = (4, 6)
_MEASURES = ("effective sources", "size of updates", "update beside read", "gradient at updates")

Panel = tuple[str, Callable[["Axes"], None]]
"""A title, and what draws below it."""


def images(
    inspections: Sequence[Inspection], labels: Sequence[str], kind: Format
) -> Iterator[tuple[str, bytes]]:
    """Files by the names of their figures, of what these models have.

    Raises:
        UserError: matplotlib is missing.
    """
    pairs = list(zip(inspections, labels, strict=True))
    maps = [(label, _weights(one.tables["all tokens"])) for one, label in pairs if one.tables]
    if maps:
        yield "depth_weights", depth_image(maps, kind)
    for name, panels in (
        ("kinds", _kind_panels(pairs)),
        ("importance", _importance_panels(pairs)),
        ("measures", _measure_panels(pairs)),
        ("training", _training_panels(pairs)),
        ("bases", _bases_panels(pairs)),
    ):
        if panels:
            yield name, _image(panels, kind, is_wide=name == "importance")


Pairs = list[tuple[Inspection, str]]


def _image(panels: Sequence[Panel], kind: Format, *, is_wide: bool) -> bytes:
    """Panels in two columns, or wide ones below each other."""
    with styled():
        from matplotlib.figure import Figure

        num_columns = 1 if is_wide else min(2, len(panels))
        num_rows = -(-len(panels) // num_columns)
        figure = Figure(
            figsize=(2 * _WIDTH if is_wide else _WIDTH * num_columns, 3.0 * num_rows),
            layout="constrained",
        )
        grid = figure.subplots(num_rows, num_columns, squeeze=False).ravel()
        for axes in grid[len(panels) :]:
            axes.set_axis_off()
        for axes, (title, draw) in zip(grid, panels, strict=False):
            draw(axes)
            axes.set_title(plain(title, ""), loc="left")
        _share_legends(figure)
        return rendered(figure, kind)


def _share_legends(figure: "Figure") -> None:
    """One legend a figure, of names that are drawn in any panel."""
    drawn: dict[str, Any] = {}
    for axes in figure.axes:
        for line, name in zip(*axes.get_legend_handles_labels(), strict=True):
            drawn.setdefault(name, line)
    if len(drawn) > 1:
        ncols = max(1, min(len(drawn), int(11 * figure.get_figwidth() / max(map(len, drawn)))))
        figure.legend(
            list(drawn.values()), list(drawn), loc="outside lower left", ncols=min(ncols, 8),
            handlelength=2.6, columnspacing=1.2,
        )  # fmt: skip


def _weights(table: dict[str, Any]) -> DepthWeights:
    return DepthWeights(
        sites=tuple(table["sites"]),
        sources=tuple(table["sources"]),
        weights=tuple(map(tuple, table["weights"])),
    )


def _look(name: str, place: int) -> tuple[str, Any, str]:
    """Colour, dash and mark of a kind of source."""
    colour, dash = _KINDS.get(name, ((2, 1, 7)[place % 3], 1 + place // 3 % 3))
    return PALETTE[colour], DASHES[dash], MARKERS[colour % len(MARKERS)]


def _line(
    axes: "Axes", x: Sequence[float], y: Sequence[float | None], name: str, look: Any
) -> None:
    colour, dash, marker = look
    shown = [float("nan") if value is None else value for value in y]
    axes.plot(
        x, shown, color=colour, linestyle=dash, marker=marker, markersize=3.2, linewidth=1.3,
        markevery=max(1, len(x) // 14), label=plain(name),
    )  # fmt: skip


def _kind_panels(pairs: Pairs) -> list[Panel]:
    """A panel for each model and kind of site: weight on kinds of sources over depth."""
    panels: list[Panel] = []
    top = _top(pairs)
    for one, label in pairs:
        if not one.tables:
            continue
        weights = by_kind(one.tables["all tokens"])
        sites, size = one.seen["sites"], len(one.seen["layer_kinds"])
        for kind in dict.fromkeys(one.seen["layer_kinds"]):
            places = [s["site"] for s in sites if s["kind"] == kind and s["weights"]]

            def draw(
                axes: "Axes", places: Any = places, weights: Any = weights, size: int = size
            ) -> None:
                for i, (name, values) in enumerate(weights.items()):
                    found = [values[place] for place in places]
                    if any(value is not None for value in found):
                        depths = [place / size for place in places]
                        _line(axes, depths, found, name, _look(name, i))
                axes.set_xlabel("layer")
                axes.set_ylabel("weight")
                axes.set_ylim(0, 1.04 * top)

            panels.append((f"{label}, {kind} sites" if len(pairs) > 1 else f"{kind} sites", draw))
    return panels


def _top(pairs: Pairs) -> float:
    """The largest weight on a kind of source, so that all panels have one scale."""
    values = (
        value
        for one, _ in pairs
        if one.tables
        for row in by_kind(one.tables["all tokens"]).values()
        for value in row
    )
    return max((value for value in values if value is not None), default=1.0)


def _measure_panels(pairs: Pairs) -> list[Panel]:
    panels: list[Panel] = []
    for name in _MEASURES:
        having = [
            (one, label, measure)
            for one, label in pairs
            for measure in measures(one)
            if measure.name == name
        ]
        if not having:
            continue

        def draw(axes: "Axes", having: Any = having) -> None:
            values: list[float] = []
            for run, (one, label, measure) in enumerate(having):
                kinds = one.seen["layer_kinds"]
                for i, kind in enumerate(dict.fromkeys(kinds)):
                    sites = [s["site"] for s in one.seen["sites"] if s["kind"] == kind]
                    y = [measure.values[site] for site in sites]
                    values += [value for value in y if value is not None]
                    colour = _SITES[i % len(_SITES)]
                    look = PALETTE[colour], DASHES[run], MARKERS[colour % len(MARKERS)]
                    text = f"{kind}, {label}" if len(pairs) > 1 else kind
                    _line(axes, [site / len(kinds) for site in sites], y, text, look)
            if values and min(values) > 0 and max(values) > 30 * min(values):
                axes.set_yscale("log")
                _plain_numbers(axes)
            axes.set_xlabel("layer")
            axes.set_ylabel(having[0][2].unit)

        panels.append((name, draw))
    return panels


def _training_panels(pairs: Pairs) -> list[Panel]:
    """What is logged of weights; of two models one panel each."""
    panels: list[Panel] = []
    for one, label in pairs:
        for history in histories(one)[:2]:

            def draw(axes: "Axes", history: Any = history) -> None:
                for i, line in enumerate(history.lines):
                    _line(axes, line.x, line.y, line.name, _look(line.name, i))
                axes.set_xlabel("step")
                axes.set_ylabel(history.unit)

            panels.append((f"{label}: {history.name}" if len(pairs) > 1 else history.name, draw))
    return panels


def _importance_panels(pairs: Pairs) -> list[Panel]:
    """A panel for each thing that is left out, bars of two models beside each other."""
    panels: list[Panel] = []
    for by in dict.fromkeys(found.by for one, _ in pairs for found in one.importance):
        having = [
            (run, label, found)
            for run, (one, label) in enumerate(pairs)
            for found in one.importance
            if found.by == by
        ]

        def draw(axes: "Axes", having: Any = having) -> None:
            _bars(axes, having, len(pairs))

        panels.append((f"loss without each {by}", draw))
    return panels


def _bars(axes: "Axes", having: Sequence[tuple[int, str, Importance]], count: int) -> None:
    # of a model near to overflow one item may be all that holds it together
    known = [
        (run, label, [item for item in found.items if math.isfinite(item.change)])
        for run, label, found in having
    ]
    names = list(dict.fromkeys(item.name for _, _, items in known for item in items))
    # as in the map: of finished blocks, then of the running one
    names.sort(key=lambda name: name.startswith("running"))
    wide = 0.8 / len(having)
    for place, (run, label, items) in enumerate(known):
        shift = (place - (len(known) - 1) / 2) * wide
        x = [names.index(item.name) + shift for item in items]
        axes.bar(
            x, [item.change for item in items], 0.92 * wide, color=PALETTE[_RUNS[run]],
            yerr=[item.error or 0.0 for item in items],
            error_kw={"elinewidth": 0.8, "ecolor": "#555555"},
            label=plain(label) if count > 1 else "growth of the loss",
        )  # fmt: skip
    # one or two layers may matter a hundred times as much as the others
    axes.set_yscale("symlog", linthresh=0.02)
    _plain_numbers(axes)
    axes.axhline(0, color="#555555", linewidth=0.8)
    masses = [item.mass for _, _, items in known for item in items if item.mass is not None]
    if masses:
        beside = axes.twinx()
        for place, (_, _, items) in enumerate(known):
            shift = (place - (len(known) - 1) / 2) * wide
            found = {item.name: item.mass for item in items if item.mass is not None}
            beside.plot(
                [names.index(name) + shift for name in found], list(found.values()), "o",
                color="#000000", markerfacecolor="white", markersize=4.5,
                label="share of depth weight",
            )  # fmt: skip
        beside.set_ylabel("share of depth weight")
        beside.set_ylim(0, 1.1 * max(masses))
        beside.spines["right"].set_visible(True)
        beside.grid(visible=False)
    step = 1
    while len(names) > 26 * step:
        step *= 2
    axes.set_xticks(range(0, len(names), step), labels=names[::step], rotation=90, fontsize=8)
    axes.set_xlim(-0.6, len(names) - 0.4)
    axes.set_ylabel("growth of the loss, nats\n(logarithmic beyond 0.02)")
    axes.grid(visible=False, axis="x")


def _plain_numbers(axes: "Axes") -> None:
    """Numbers of a logarithmic axis without powers, which need the parser of formulas."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _bases_panels(pairs: Pairs) -> list[Panel]:
    """Of each model the mean of its blocks, or its first block."""
    panels: list[Panel] = []
    blocks = [(bases_of(one)[0], label) for one, label in pairs if one.bases["blocks"]]
    names = list(dict.fromkeys(held.name for block, _ in blocks for held in block.sets))
    for block, label in blocks:

        def draw(axes: "Axes", block: Any = block) -> None:
            count = range(1, block.size + 1)
            look = PALETTE[0], DASHES[0], MARKERS[0]
            _line(axes, list(count), block.pca, "the best vectors (PCA)", look)
            for held in block.sets:
                i = names.index(held.name)
                colour = (4, 6, 5, 2, 1, 3)[i % 6]
                axes.plot(
                    held.count, held.share, MARKERS[(i + 3) % len(MARKERS)], markersize=7,
                    color=PALETTE[colour], label=held.name,
                )  # fmt: skip
            axes.set_ylim(0, 1.03)
            axes.set_xlabel("vectors")
            axes.set_ylabel("share of the updates' energy")

        panels.append((f"{label}, {block.name}" if len(pairs) > 1 else block.name, draw))
    return panels
