"""Figures of runs: loss curves and depth-weight maps, the same bytes for the same runs."""

import io
import math
import textwrap
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from resroute.analysis.runs import METHODS, DepthWeights, Run, run_labels
from resroute.analysis.table import LOSS_UNIT, floor_text
from resroute.config import UserError
from resroute.core import SIGN_RULES
from resroute.files import write_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

Format = Literal["png", "svg"]

# Okabe and Ito's palette, told apart with any colour vision; grey stands for methods not listed
_PALETTE = ("#000000", "#CC79A7", "#E69F00", "#56B4E9", "#0072B2", "#009E73", "#D55E00")
COLOURS = {method: _PALETTE[i % len(_PALETTE)] for i, method in enumerate(METHODS)}
_MARKERS = {method: "oPXDs^v"[i % 7] for i, method in enumerate(METHODS)}
_UNKNOWN_COLOUR = "#7F7F7F"
# dashed is the floor's
_LINES: tuple[Any, ...] = ("-", (0, (5, 1, 1, 1)), (0, (1, 1)), (0, (8, 1, 1, 1, 1, 1)))

_DETAIL_COLOUR = "#B34700"

_TRAINING = "training, smoothed"
# characters of a line: of a map's title, and of a legend
_TITLE_WIDTH = 40
_LEGEND_WIDTH = 48

_STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 9.5,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#555555",
    "axes.grid": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "figure.constrained_layout.w_pad": 0.08,
    "figure.constrained_layout.h_pad": 0.08,
    # labels come from files: a dollar sign in one is a dollar sign
    "text.parse_math": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "resroute",
}


def loss_figure(runs: list[Run], path: Path) -> None:
    """Write training and validation loss over training tokens.

    Each depth has two panels: the whole run, and the validation loss of each run's last third;
    where runs differ in length, that one goes over the share of the run.

    Args:
        runs: Finished runs; seeds of one method share its line style.
        path: A .png (150 dots per inch) or .svg file.

    Raises:
        UserError: matplotlib is missing, or the suffix is another.
    """
    write_bytes(path, loss_image(runs, _format(path)))


def depth_figure(runs: list[Run], path: Path) -> None:
    """Write the depth-weight maps of the routed runs among `runs`, a panel each.

    Args:
        runs: Finished runs, at least one of them routed; see `routed_runs` for those drawn.
        path: A .png (150 dots per inch) or .svg file.

    Raises:
        UserError: matplotlib is missing, the suffix is another, or no run is routed.
    """
    write_bytes(path, depth_image(runs, _format(path)))


def loss_image(runs: list[Run], kind: Format) -> bytes:
    """The file that `loss_figure` writes."""
    with _style():
        return _render(_loss_figure(runs), kind)


def _loss_figure(runs: list[Run]) -> "Figure":
    from matplotlib.figure import Figure

    depths = sorted({run.num_layers for run in runs})
    by_depth = [[run for run in runs if run.num_layers == depth] for depth in depths]
    # a legend stands below its panel, where it hides no line
    height = sum(4.6 + 0.17 * _legend_rows(here) for here in by_depth)
    figure = Figure(figsize=(5.2, height), layout="constrained")
    ratios = [3, 2] * len(depths)
    panels = figure.subplots(len(ratios), 1, squeeze=False, height_ratios=ratios)[:, 0]
    for row, (depth, here) in enumerate(zip(depths, by_depth, strict=True)):
        whole, end = panels[2 * row], panels[2 * row + 1]
        _draw_losses(whole, here)
        _draw_end(end, here)
        if len(depths) > 1:
            whole.set_title(f"{depth} layers", loc="left")
    return figure


def depth_image(
    runs: list[Run],
    kind: Format,
    *,
    titles: Mapping[Path, str] | None = None,
) -> bytes:
    """The file that `depth_figure` writes; `titles` by run folder replace those of the panels."""
    if titles is None:
        titles = map_titles(runs)
    routed = [(run, run.depth_weights) for run in routed_runs(runs) if run.depth_weights]
    if not routed:
        raise UserError("no depth weights to draw: none of the runs has a routed method")
    with _style():
        from matplotlib.figure import Figure

        num_columns = min(3, len(routed))
        num_rows = math.ceil(len(routed) / num_columns)
        height = min(1.7 + 0.085 * max(len(maps.sites) for _, maps in routed), 6.6)
        figure = Figure(figsize=(0.7 + 4 * num_columns, height * num_rows), layout="constrained")
        panels = figure.subplots(num_rows, num_columns, squeeze=False).ravel()
        for axes in panels[len(routed) :]:
            axes.set_axis_off()
        for axes, (run, maps) in zip(panels, routed, strict=False):
            image = _draw_map(axes, maps)
            axes.set_title(textwrap.fill(_plain(titles[run.path], ""), _TITLE_WIDTH))
        bar = figure.colorbar(
            image, ax=list(panels), shrink=0.7 / num_rows, aspect=24, pad=0.02, anchor=(0, 1)
        )
        ticks = (0, 0.01, 0.05, 0.1, 0.2, 0.4, 0.7, 1)
        bar.set_ticks(ticks, labels=[f"{tick:g}" for tick in ticks])
        bar.set_label("weight (sqrt scale)")
        bar.outline.set_visible(False)
        return _render(figure, kind)


def map_titles(runs: list[Run]) -> dict[Path, str]:
    """Titles that tell the runs' maps apart, by run folder."""
    return {
        run.path: f"{label}, {run.num_layers} layers, seed {run.seed}"
        for run, label in zip(runs, run_labels(runs), strict=True)
    }


def cuts_losses(runs: list[Run]) -> bool:
    """Whether the loss figure cuts losses off at the top of a panel."""
    for depth in {run.num_layers for run in runs}:
        here = [run for run in runs if run.num_layers == depth]
        limits = _limits(_shown(here))
        if limits is None:
            continue
        drawn = [loss for run in here for loss in smooth(run.losses("train")[1])]
        drawn += [loss for run in here for loss in run.losses("validation")[1]]
        if max(drawn, default=-math.inf) > limits[1]:
            return True
    return False


def routed_runs(runs: list[Run]) -> list[Run]:
    """The runs with depth weights: of several seeds of one method and depth, the first given."""
    first: dict[tuple[str, int], Run] = {}
    for run, label in zip(runs, run_labels(runs), strict=True):
        if run.depth_weights is not None:
            first.setdefault((label, run.num_layers), run)
    return list(first.values())


def smooth(values: list[float]) -> list[float]:
    """Centred mean over about 4 % of the values, over fewer at the two ends."""
    half = len(values) // 50
    return [
        math.fsum(window) / len(window)
        for window in (
            values[i - reach : i + reach + 1]
            for i in range(len(values))
            for reach in [min(half, i, len(values) - 1 - i)]
        )
    ]


def _format(path: Path) -> Format:
    if path.suffix == ".png":
        return "png"
    if path.suffix == ".svg":
        return "svg"
    raise UserError(f"{path}: figures are written as .png or .svg; choose one of these endings")


@contextmanager
def _style() -> Iterator[None]:
    try:
        import matplotlib
    except ImportError:
        raise UserError("figures need matplotlib: pip install 'resroute[report]'") from None
    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        # a label in a script that the font lacks is drawn as boxes, not worth a warning
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def _render(figure: "Figure", kind: Format) -> bytes:
    buffer = io.BytesIO()
    drop = {"Date": None, "Creator": None, "Format": None, "Type": None}
    metadata = {"Software": None} if kind == "png" else drop
    figure.savefig(buffer, format=kind, dpi=150, facecolor="white", metadata=metadata)
    return buffer.getvalue()


def _plain(label: str, empty: str = "unnamed") -> str:
    # matplotlib leaves legend entries with a leading underscore out
    return " ".join(label.split()).lstrip("_") or empty


def _draw_losses(axes: "Axes", runs: list[Run]) -> None:
    from matplotlib.lines import Line2D

    for run in runs:
        tokens, losses = run.losses("train")
        axes.plot(tokens, smooth(losses), color=_colour(run), linewidth=0.8, alpha=0.45)
    legend = _draw_validation(axes, runs)
    legend[_TRAINING] = Line2D([], [], color="#777777", linewidth=0.8)
    floors = {run.floor: floor_text(run) for run in runs if run.floor is not None}
    for floor, text in floors.items():
        legend[text] = axes.axhline(floor, color="#555555", linewidth=1.1, linestyle="--")
    _limit(axes, _shown(runs))
    axes.set_xlim(left=0)
    axes.legend(
        list(legend.values()),
        [_wrapped(label) for label in legend],
        loc="upper left",
        bbox_to_anchor=(-0.06, 0),
        # the labels of the axis are in between
        borderaxespad=2.2,
    )


def _shown(runs: list[Run]) -> list[float]:
    """What the panel of whole runs makes room for."""
    # the first steps fall from log(vocabulary) and would squash everything after them
    shown = [run.floor for run in runs if run.floor is not None]
    for run in runs:
        shown += _since(run, "train", 0.06) + _since(run, "validation", 0.06)
    return shown


def _legend_rows(runs: list[Run]) -> int:
    """Lines of a panel's legend."""
    labels = {_plain(label) for label in run_labels(runs)}
    floors = {run.floor for run in runs if run.floor is not None}
    return sum(_wrapped(label).count("\n") + 1 for label in labels) + len(floors) + 1


def _wrapped(label: str) -> str:
    return textwrap.fill(label, _LEGEND_WIDTH)


def _draw_end(axes: "Axes", runs: list[Run]) -> None:
    from matplotlib.ticker import PercentFormatter

    is_share = len({run.summary["tokens"] for run in runs}) > 1
    _draw_validation(axes, runs, is_share=is_share)
    _limit(axes, [loss for run in runs for loss in _since(run, "validation", 2 / 3)])
    most = 1 if is_share else max(1, *(run.summary["tokens"] for run in runs))
    axes.set_xlim(most * 0.66, most * 1.01)
    whose = " of each run" if is_share else ""
    title = f"validation, the last third{whose}"
    axes.set_title(title, loc="left", fontweight="normal", fontsize=9.5)
    axes.set_xlabel("share of the run" if is_share else "training tokens")
    if is_share:
        axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))


def _draw_validation(
    axes: "Axes", runs: list[Run], *, is_share: bool = False
) -> "dict[str, Line2D]":
    """Draw validation curves over tokens, or over the share of the run; a line a label."""
    from matplotlib.ticker import EngFormatter

    legend: dict[str, Line2D] = {}
    styles: dict[str, list[str]] = {}
    for run, unique in zip(runs, run_labels(runs), strict=True):
        label = _plain(unique)
        known = styles.setdefault(run.method, [])
        if label not in known:
            known.append(label)
        tokens, losses = run.losses("validation")
        whole = max(1, run.summary["tokens"]) if is_share else 1
        (line,) = axes.plot(
            [at / whole for at in tokens],
            losses,
            color=_colour(run),
            linestyle=_LINES[known.index(label) % len(_LINES)],
            linewidth=1.8,
            marker=_MARKERS.get(run.method, "o"),
            markersize=4.5,
            markeredgecolor="white",
            markeredgewidth=0.6,
        )
        legend.setdefault(label, line)
    axes.xaxis.set_major_formatter(EngFormatter(sep=" "))
    axes.set_ylabel(f"loss, {LOSS_UNIT}")
    return legend


def _colour(run: Run) -> str:
    return COLOURS.get(run.method, _UNKNOWN_COLOUR)


def _since(run: Run, kind: Literal["train", "validation"], share: float) -> list[float]:
    """Losses after the given share of the run's tokens."""
    tokens, losses = run.losses(kind)
    start = share * run.summary["tokens"]
    return [loss for at, loss in zip(tokens, losses, strict=True) if at >= start]


def _limit(axes: "Axes", shown: list[float]) -> None:
    limits = _limits(shown)
    if limits is not None:
        axes.set_ylim(*limits)


def _limits(shown: list[float]) -> tuple[float, float] | None:
    """Ends of an axis that shows these values with a little room; None where they are all one."""
    if not shown or max(shown) <= min(shown):
        return None
    margin = 0.06 * (max(shown) - min(shown))
    return min(shown) - margin, max(shown) + margin


def _draw_map(axes: "Axes", maps: DepthWeights) -> Any:
    import matplotlib
    import numpy as np
    from matplotlib.colors import PowerNorm

    weights = np.array(
        [[math.nan if w is None else w for w in row] for row in maps.weights], dtype=float
    )
    colours = matplotlib.colormaps["viridis"].with_extremes(bad="#E9E9E9")
    # early sites have few sources and late ones many: on a linear scale the late ones are all dark
    image = axes.imshow(
        np.ma.masked_invalid(weights),
        cmap=colours,
        norm=PowerNorm(0.5, vmin=0, vmax=1, clip=True),
        aspect="auto",
        interpolation="none",
    )
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=2, labelsize=7.5)
    rows = _thinned(len(maps.sites), most=26)
    axes.set_yticks(rows, labels=[_plain(maps.sites[i]) for i in rows])
    shown = _thinned(len(maps.sources), most=22)
    axes.set_xticks(shown, labels=[_plain(maps.sources[i]) for i in shown], rotation=90)
    for tick in axes.get_xticklabels():
        if SIGN_RULES.keys() & set(tick.get_text().split()):
            tick.set_color(_DETAIL_COLOUR)
    axes.set_xlabel("source")
    axes.set_ylabel("site")
    return image


def _thinned(count: int, *, most: int) -> list[int]:
    """Evenly spaced positions, few enough to label; the last one is always among them."""
    step = 1
    while count > step * most:
        step *= 2
    return [*range(0, count - 1, step), count - 1]
