"""Figures: what all of them share, and depth-weight maps; the same bytes for the same runs."""

import io
import math
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from resroute.analysis.runs import DepthWeights, Run, run_labels
from resroute.config import UserError
from resroute.core import SIGN_RULES
from resroute.files import write_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Format = Literal["png", "svg"]

# of Okabe and Ito, told apart with any colour vision, in the order of `METHODS`
PALETTE = ("#000000", "#CC79A7", "#E69F00", "#56B4E9", "#0072B2", "#009E73", "#D55E00", "#7F7F7F")
"""Colours of lines; the last, grey, is for methods that are not registered."""
MARKERS = "oPXDs^v"
# dashed is the floor's
DASHES: tuple[Any, ...] = ("-", (0, (5, 1, 1, 1)), (0, (1, 1)), (0, (8, 1, 1, 1, 1, 1)))

_DETAIL_COLOUR = "#B34700"

# characters of a line of a map's title
_TITLE_WIDTH = 40

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


def depth_figure(runs: list[Run], path: Path) -> None:
    """Write the depth-weight maps of the routed runs among `runs`, a panel each.

    Args:
        runs: Finished runs, at least one of them routed; of several seeds of one method and depth
            the first given is drawn.
        path: A .png (150 dots per inch) or .svg file.

    Raises:
        UserError: matplotlib is missing, the suffix is another, or no run is routed.
    """
    if path.suffix not in (".png", ".svg"):
        raise UserError(f"{path}: figures are written as .png or .svg; choose one of these endings")
    first: dict[tuple[str, int], tuple[str, DepthWeights]] = {}
    for run, label in zip(runs, run_labels(runs), strict=True):
        if run.depth_weights is not None:
            title = f"{label}, {run.num_layers} layers, seed {run.seed}"
            first.setdefault((label, run.num_layers), (title, run.depth_weights))
    write_bytes(path, depth_image(list(first.values()), "png" if path.suffix == ".png" else "svg"))


def depth_image(maps: Sequence[tuple[str, DepthWeights]], kind: Format) -> bytes:
    """The file of depth-weight maps under their titles, a panel each.

    Raises:
        UserError: matplotlib is missing, or there is no map.
    """
    if not maps:
        raise UserError("no depth weights to draw: none of the runs has a routed method")
    with styled():
        from matplotlib.figure import Figure

        num_columns = min(3, len(maps))
        num_rows = math.ceil(len(maps) / num_columns)
        sites = max(len(weights.sites) for _, weights in maps)
        # the numbers beside the colours need some room, however few sites there are
        height = min(max(1.7 + 0.085 * sites, 3.4), 6.6)
        figure = Figure(figsize=(0.7 + 4 * num_columns, height * num_rows), layout="constrained")
        panels = figure.subplots(num_rows, num_columns, squeeze=False).ravel()
        for axes in panels[len(maps) :]:
            axes.set_axis_off()
        for axes, (title, weights) in zip(panels, maps, strict=False):
            image = _draw_map(axes, weights)
            axes.set_title(textwrap.fill(plain(title, ""), _TITLE_WIDTH))
        bar = figure.colorbar(
            image, ax=list(panels), shrink=0.7 / num_rows, aspect=24, pad=0.02, anchor=(0, 1)
        )
        ticks = (0, 0.01, 0.05, 0.1, 0.2, 0.4, 0.7, 1)
        bar.set_ticks(ticks, labels=[f"{tick:g}" for tick in ticks])
        bar.set_label("weight (sqrt scale)")
        bar.outline.set_visible(False)
        return rendered(figure, kind)


def limits(shown: list[float]) -> tuple[float, float] | None:
    """Ends of an axis that shows these values with a little room; None where they are all one."""
    if not shown or max(shown) <= min(shown):
        return None
    margin = 0.06 * (max(shown) - min(shown))
    return min(shown) - margin, max(shown) + margin


@contextmanager
def styled() -> Iterator[None]:
    """The style of all figures, whatever the user's own is.

    Raises:
        UserError: matplotlib is missing.
    """
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


def rendered(figure: "Figure", kind: Format) -> bytes:
    """The figure as a file's bytes; inside `styled`."""
    buffer = io.BytesIO()
    drop = {"Date": None, "Creator": None, "Format": None, "Type": None}
    metadata = {"Software": None} if kind == "png" else drop
    figure.savefig(buffer, format=kind, dpi=150, facecolor="white", metadata=metadata)
    return buffer.getvalue()


def plain(label: str, empty: str = "unnamed") -> str:
    """A label on one line, such that matplotlib shows it."""
    # matplotlib leaves legend entries with a leading underscore out
    return " ".join(label.split()).lstrip("_") or empty


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
    axes.set_yticks(rows, labels=[plain(maps.sites[i]) for i in rows])
    shown = _thinned(len(maps.sources), most=22)
    axes.set_xticks(shown, labels=[plain(maps.sources[i]) for i in shown], rotation=90)
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
