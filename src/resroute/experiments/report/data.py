"""What the page's script draws, as JSON values."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from resroute.analysis import Run
from resroute.core import SIGN_RULES
from resroute.experiments.report.figures import START
from resroute.experiments.report.looks import Look
from resroute.experiments.report.views import MOST_BANDS, Chart, Line, Map, Row, Trace

# significant digits, more than a screen has pixels
_DIGITS = 6


@dataclass(frozen=True, kw_only=True)
class Links:
    """Where a page in the folder `out` finds the configurations of runs."""

    out: Path

    def config(self, run: Run) -> str:
        """A relative link to the run's config.json, or to the table of runs where it is gone."""
        file = run.path / "config.json"
        if not file.is_file():
            return "runs.csv"
        target = os.path.relpath(file.resolve(), self.out.resolve())
        return quote(os.fsencode(Path(target).as_posix()))


def script_data(
    runs: Sequence[Run],
    charts: Sequence[Chart],
    differences: Sequence[tuple[str, list[Row]]],
    maps: Sequence[tuple[str, list[Map]]],
    links: Links,
) -> dict[str, Any]:
    """Everything that the page's figures show, as JSON values.

    Runs are given by their place in `runs`.
    """
    places = {run.name: place for place, run in enumerate(runs)}
    return {
        "runs": [
            {"name": run.name, "label": run.label, "seed": run.seed, "href": links.config(run)}
            for run in runs
        ],
        "start": START,
        "mostBands": MOST_BANDS,
        "charts": {chart.name: _chart(chart, places) for chart in charts},
        "differences": [
            {"title": title, "rows": [_row(row, places) for row in rows]}
            for title, rows in differences
        ],
        "maps": [
            {"title": title, "maps": [_map(one, places) for one in found]} for title, found in maps
        ],
    }


def _chart(chart: Chart, places: dict[str, int]) -> dict[str, Any]:
    return {
        "x": chart.x_label,
        "y": chart.y_label,
        "style": chart.style,
        "isLog": chart.is_log,
        "first": chart.first,
        "panels": [
            {
                "title": panel.title,
                "floor": panel.floor,
                "floorText": panel.floor_text,
                "lines": [_line(line, places) for line in panel.lines],
            }
            for panel in chart.panels
        ],
    }


def _line(line: Line, places: dict[str, int]) -> dict[str, Any]:
    of_point = [_places(runs, places) for runs in line.runs]
    is_one = all(runs == of_point[0] for runs in of_point)
    return {
        "name": line.name,
        "look": _look(line.look),
        "x": _numbers(line.x),
        "y": _numbers(line.y),
        "low": _numbers(line.low),
        "high": _numbers(line.high),
        # of each point, or once for all
        "runs": of_point[:1] if is_one else of_point,
        "traces": [_trace(trace, places) for trace in line.traces],
        "training": [_trace(trace, places) for trace in line.training],
        "openFrom": line.open_from,
    }


def _trace(trace: Trace, places: dict[str, int]) -> dict[str, Any]:
    return {"run": places[trace.run.name], "x": _numbers(trace.x), "y": _numbers(trace.y)}


def _row(row: Row, places: dict[str, int]) -> dict[str, Any]:
    one = row.difference
    return {
        "name": row.name,
        "setting": row.setting,
        "look": _look(row.look),
        "mean": _number(one.loss.mean),
        "low": _number(one.loss.low),
        "high": _number(one.loss.high),
        "n": one.loss.n,
        "seeds": [[seed, _number(value)] for seed, value in one.by_seed],
        "verdict": one.verdict,
        "isPrimary": one.is_primary,
        "runs": _places((*one.treatment.runs, *one.baseline.runs), places),
    }


def _map(one: Map, places: dict[str, int]) -> dict[str, Any]:
    weights = one.weights
    return {
        "title": one.title,
        "name": one.name,
        "sites": weights.sites,
        "sources": weights.sources,
        "details": [bool(SIGN_RULES.keys() & set(name.split())) for name in weights.sources],
        "weights": [
            [None if weight is None else round(weight, 4) for weight in row]
            for row in weights.weights
        ],
        "runs": _places(one.runs, places),
    }


def _look(look: Look) -> list[int]:
    return [look.colour, look.dash, look.marker]


def _places(runs: Sequence[Run], places: dict[str, int]) -> list[int]:
    return [places[run.name] for run in runs]


def _numbers(values: Sequence[float | None]) -> list[float | None]:
    return [_number(value) for value in values]


def _number(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{_DIGITS}g}")
