"""The report's figures as files, drawn by matplotlib from `views`."""

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from resroute.analysis.figures import (
    DASHES,
    MARKERS,
    PALETTE,
    Format,
    limits,
    plain,
    rendered,
    styled,
)
from resroute.analysis.table import LOSS_UNIT
from resroute.experiments.report.looks import Look
from resroute.experiments.report.views import MOST_BANDS, Chart, Line, Panel, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# of a run, before which its losses fall from log(vocabulary) and would squash what comes after
START = 0.06
# inches
_WIDTH = 5.2
# characters of a legend's line in one column of panels
_LEGEND_WIDTH = 52
# points between series that stand at one place
_DODGE = 5.0


def chart_image(chart: Chart, kind: Format) -> bytes:
    """A chart as a file: panels in one or two columns, one legend below them.

    Curves have a second, smaller panel each, of their last third.

    Raises:
        UserError: matplotlib is missing.
    """
    with styled():
        from matplotlib.figure import Figure

        num_columns = min(2, len(chart.panels))
        num_rows = -(-len(chart.panels) // num_columns)
        heights = [2.9, 1.9] if chart.style == "curves" else [3.2]
        names, ncols = _legend_shape(chart, num_columns)
        wrapped = list(names.values())
        legend_height = 0.19 * sum(
            max(name.count("\n") + 1 for name in wrapped[i : i + ncols])
            for i in range(0, len(wrapped), ncols)
        )
        figure = Figure(
            figsize=(_WIDTH * num_columns, sum(heights) * num_rows + legend_height),
            layout="constrained",
        )
        grid = figure.subplots(
            num_rows * len(heights),
            num_columns,
            squeeze=False,
            height_ratios=heights * num_rows,
        )
        for axes in grid.ravel():
            axes.set_axis_off()
        for i, panel in enumerate(chart.panels):
            row, column = divmod(i, num_columns)
            whole, *end = grid[len(heights) * row : len(heights) * (row + 1), column]
            for axes in (whole, *end):
                axes.set_axis_on()
            _draw_panel(whole, chart, panel, end[0] if end else None)
        _add_legend(figure, names, ncols)
        return rendered(figure, kind)


def differences_image(groups: Sequence[tuple[str, list[Row]]], kind: Format) -> bytes:
    """Final differences with their intervals, a row each, primary ones in bold.

    Filled marks are of differences that a verdict calls better or worse; small dots are of seeds.

    Raises:
        UserError: matplotlib is missing.
    """
    with styled():
        from matplotlib.figure import Figure

        sizes = [len(rows) + 1 for _, rows in groups]
        figure = Figure(
            figsize=(1.5 * _WIDTH, 0.7 + 0.3 * sum(sizes) + 0.3 * len(groups)),
            layout="constrained",
        )
        panels = figure.subplots(
            len(groups), 1, squeeze=False, height_ratios=sizes, sharex=True
        ).ravel()
        for axes, (title, rows) in zip(panels, groups, strict=True):
            _draw_rows(axes, rows)
            if title:
                axes.set_title(plain(title), loc="left")
        panels[-1].set_xlabel(f"difference, {LOSS_UNIT} (left of zero: the first is better)")
        return rendered(figure, kind)


def shown_range(chart: Chart, panel: Panel, start: float, end: float = 1.0) -> tuple[float, float]:
    """Ends of the y axis that shows a panel's means and intervals between two shares of its x."""
    most = max((x for line in panel.lines for x in line.x), default=1.0)
    points = [
        point
        for line in panel.lines
        for point in zip(line.x, line.y, line.low, line.high, strict=True)
        if start * most <= point[0] <= end * most
    ]
    values = [y for _, y, _, _ in points]
    if chart.style == "trend":
        values += [y for line in panel.lines for trace in line.traces for y in trace.y]
    if values:
        # an interval of few seeds may be far wider than all there is to see
        least, top, room = min(values), max(values), max(values) - min(values)
        ends = points if _has_intervals(chart, panel) else []
        limited = [y for point in ends for y in point[2:] if y is not None]
        values += [min(max(y, least - room), top + room) if room else y for y in limited]
    if chart.style == "gap":
        values.append(0.0)
    if panel.floor is not None and chart.style == "curves" and start <= START:
        values.append(panel.floor)
    return limits(values) or ((values[0] - 1, values[0] + 1) if values else (0.0, 1.0))


def _legend_shape(chart: Chart, num_columns: int) -> tuple[dict[str, str], int]:
    """Names of the legend with how they are wrapped, and its number of columns."""
    known = (plain(line.name) for panel in chart.panels for line in panel.lines)
    names = {name: textwrap.fill(name, _LEGEND_WIDTH) for name in known}
    widest = max(len(part) for name in names.values() for part in name.split("\n"))
    room = (_LEGEND_WIDTH + 8) * num_columns
    return names, max(1, min(len(names), room // (widest + 8)))


def _draw_panel(axes: "Axes", chart: Chart, panel: Panel, end: "Axes | None") -> None:
    from matplotlib.ticker import EngFormatter

    if chart.is_log:
        axes.set_xscale("log")
    for i, line in enumerate(panel.lines):
        offset = (i - (len(panel.lines) - 1) / 2) * _DODGE
        _draw_line(axes, chart, panel, line, offset if chart.style == "trend" else 0.0)
    start = START if chart.style != "trend" else 0.0
    axes.set_ylim(*shown_range(chart, panel, start))
    axes.set_ylabel(chart.y_label)
    axes.set_xlabel(chart.x_label)
    if panel.title:
        axes.set_title(plain(panel.title), loc="left")
    if chart.style == "trend":
        _set_places(axes, sorted({x for line in panel.lines for x in line.x}))
        return
    axes.xaxis.set_major_formatter(EngFormatter(sep=" "))
    axes.set_xlim(left=0)
    if chart.style == "gap":
        axes.axhline(0, color="#555555", linewidth=1.0)
    if panel.floor is not None:
        axes.axhline(panel.floor, color="#555555", linewidth=1.1, linestyle="--")
        axes.annotate(
            panel.floor_text,
            (1, panel.floor),
            xycoords=("axes fraction", "data"),
            xytext=(0, 3),
            textcoords="offset points",
            ha="right",
            fontsize=8,
            color="#555555",
        )
    if end is not None:
        axes.set_xlabel("")
        _draw_end(end, chart, panel)


def _draw_end(axes: "Axes", chart: Chart, panel: Panel) -> None:
    from matplotlib.ticker import EngFormatter

    most = max((x for line in panel.lines for x in line.x), default=0.0) or 1.0
    for line in panel.lines:
        _draw_line(axes, chart, panel, line, 0.0)
    axes.set_ylim(*shown_range(chart, panel, 2 / 3))
    axes.set_xlim(most * 0.66, most * 1.01)
    axes.set_title("the last third", loc="left", fontweight="normal", fontsize=9.5)
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    axes.xaxis.set_major_formatter(EngFormatter(sep=" "))


def _has_intervals(chart: Chart, panel: Panel) -> bool:
    return chart.style == "trend" or len(panel.lines) <= MOST_BANDS


def _draw_line(axes: "Axes", chart: Chart, panel: Panel, line: Line, offset: float) -> None:
    from matplotlib.transforms import ScaledTranslation

    figure = axes.get_figure()
    assert figure is not None
    place: Any = axes.transData + ScaledTranslation(offset / 72, 0, figure.dpi_scale_trans)
    colour = PALETTE[line.look.colour]
    if chart.style == "trend" and any(len(runs) > 1 for runs in line.runs):
        for trace in line.traces:
            axes.plot(trace.x, trace.y, ".", color=colour, alpha=0.4, markersize=4, transform=place)
    ends = [
        (x, low, high)
        for x, low, high in zip(line.x, line.low, line.high, strict=True)
        if low is not None and high is not None and _has_intervals(chart, panel)
    ]
    if ends and chart.style == "trend":
        x, low, high = zip(*ends, strict=True)
        axes.vlines(x, low, high, color=colour, linewidth=1.1, alpha=0.8, transform=place)
    elif ends:
        x, low, high = zip(*ends, strict=True)
        axes.fill_between(x, low, high, color=colour, alpha=0.13, linewidth=0)
    drawn = _drawn(line.look, len(line.x))
    axes.plot(line.x, line.y, transform=place, label=plain(line.name), **drawn)
    if line.open_from is not None:
        at = line.x.index(line.open_from)
        axes.plot(line.x[at], line.y[at], "o", color=colour, fillstyle="none", markersize=11)


def _drawn(look: Look, points: int) -> dict[str, Any]:
    return {
        "color": PALETTE[look.colour],
        "linestyle": DASHES[look.dash],
        "linewidth": 1.6,
        "marker": MARKERS[look.marker],
        "markersize": 4.8,
        "markeredgecolor": "white",
        "markeredgewidth": 0.6,
        # a dozen marks tell lines apart as well as a hundred
        "markevery": max(1, points // 12),
    }


def _set_places(axes: "Axes", places: list[float]) -> None:
    """Ticks where there is data, alone."""
    from matplotlib.ticker import EngFormatter, NullLocator

    text = EngFormatter(sep=" ") if places[-1] >= 10_000 else None
    labels = [text(place) if text else f"{place:g}" for place in places]
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(places, labels=labels)
    if axes.get_xscale() == "log":
        axes.set_xlim(places[0] / 1.25, places[-1] * 1.25)
    else:
        margin = 0.12 * (places[-1] - places[0]) or 1.0
        axes.set_xlim(places[0] - margin, places[-1] + margin)


def _add_legend(figure: "Figure", names: dict[str, str], ncols: int) -> None:
    drawn: dict[str, Any] = {}
    for axes in figure.axes:
        for line, name in zip(*axes.get_legend_handles_labels(), strict=True):
            drawn.setdefault(name, line)
    figure.legend(
        [drawn[name] for name in names],
        list(names.values()),
        loc="outside lower left",
        ncols=ncols,
        handlelength=3.2,
        columnspacing=1.4,
    )


def _draw_rows(axes: "Axes", rows: list[Row]) -> None:
    axes.axvline(0, color="#555555", linewidth=1.0)
    labels = []
    for place, row in enumerate(rows):
        loss, colour = row.difference.loss, PALETTE[row.look.colour]
        dots = [value for _, value in row.difference.by_seed]
        if len(dots) > 1:
            axes.plot(dots, [place + 0.22] * len(dots), ".", color=colour, alpha=0.5, markersize=4)
        if loss.low is not None and loss.high is not None:
            axes.hlines(place, loss.low, loss.high, color=colour, linewidth=1.6)
        is_found = row.difference.verdict in ("better", "worse")
        axes.plot(
            loss.mean,
            place,
            marker=MARKERS[row.look.marker],
            color=colour,
            markersize=6.5,
            fillstyle="full" if is_found else "none",
        )
        labels.append(plain(f"{row.name}, {row.setting} (n={loss.n})"))
    axes.set_yticks(range(len(rows)), labels=labels)
    for label, row in zip(axes.get_yticklabels(), rows, strict=True):
        label.set_fontweight("bold" if row.difference.is_primary else "normal")
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
