"""The report's tables as values: the page, Markdown and LaTeX show the same cells."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from resroute.analysis import Run
from resroute.analysis.table import LOSS_UNIT, columns, comparison_rows
from resroute.experiments.report.views import difference_name, setting_text
from resroute.experiments.study import Group, Study, Summary

DIGITS = 4
MISSING = "-"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One cell: its text, what it is sorted by, and the runs that it comes from."""

    text: str
    below: str = ""
    """What belongs to it, in small print."""
    value: float | str | None = None
    runs: tuple[Run, ...] = ()
    is_best: bool = False


@dataclass(frozen=True, kw_only=True)
class Heading:
    """A column's name and unit ("" for none)."""

    text: str
    unit: str = ""
    is_number: bool = True


@dataclass(frozen=True, kw_only=True)
class Table:
    """Headings, rows of as many cells, and what the table is called."""

    name: str
    headings: tuple[Heading, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Pivot:
    """Losses of equal corpus, sizes and tokens: series down, depths across, best rates alone."""

    title: str
    depths: tuple[int, ...]
    rows: tuple[tuple[str, tuple[Group | None, ...]], ...]
    best: frozenset[int]
    """`id` of the groups of lowest mean at their depth."""
    seeds: int
    """That most groups with several seeds have."""
    has_rates: bool
    """Whether learning rates were tried of which the groups have the best."""


def runs_table(runs: Sequence[Run], *, has_best: bool = True) -> Table:
    """A row a run, in the order given, with the columns of the terminal's table.

    Args:
        runs: Finished runs.
        has_best: Whether the lowest losses are marked; of several seeds the luckiest is no result.
    """
    rows = comparison_rows(list(runs))
    shown = columns(rows)
    return Table(
        name="Runs",
        headings=tuple(Heading(text=c.heading, unit=c.unit, is_number=c.is_number) for c in shown),
        rows=tuple(
            tuple(
                Cell(
                    text=column.cells[i],
                    value=_number(column.cells[i]) if column.is_number else column.cells[i],
                    runs=() if column.is_number else (run,),
                    is_best=has_best and column.is_loss and row.is_best,
                )
                for column in shown
            )
            for i, (run, row) in enumerate(zip(runs, rows, strict=True))
        ),
    )


def groups_table(study: Study, *, is_short: bool = False) -> Table:
    """A row for runs that differ in the seed alone; the lowest mean of a setting is bold.

    Args:
        study: What to show.
        is_short: Leave out what a terminal has no room for: floor, parameters and speed.
    """
    groups = study.groups
    lowest = _lowest(study.best)
    floors = [group.runs[0].floor for group in groups]
    further: list[tuple[Heading, Callable[[Group], Cell]]] = []
    columns: list[tuple[Heading, Callable[[Group], Cell]]] = [
        (Heading(text="method", is_number=False), lambda g: Cell(text=g.series, value=g.series))
    ]
    for field, heading in (
        ("corpus", Heading(text="corpus", is_number=False)),
        ("num_layers", Heading(text="layers")),
        ("width", Heading(text="width")),
        ("context", Heading(text="context")),
        ("tokens", Heading(text="tokens", unit="millions")),
    ):
        if field == "num_layers" or len({getattr(g.setting, field) for g in groups}) > 1:
            columns.append((heading, _setting_cell(field)))
    columns += [
        (
            Heading(text="mean loss", unit=LOSS_UNIT),
            lambda g: Cell(
                text=f"{g.loss.mean:.{DIGITS}f}",
                value=g.loss.mean,
                runs=g.runs,
                is_best=id(g) in lowest,
            ),
        ),
        (Heading(text="n"), lambda g: Cell(text=str(g.loss.n), value=g.loss.n, runs=g.runs)),
        (Heading(text="deviation", unit="over seeds"), lambda g: _plain(g.loss.sd)),
        (Heading(text="95 % interval", unit="of the mean"), lambda g: _interval(g.loss)),
    ]
    # behind the loss, which a phone then shows
    if len({group.learning_rate for group in groups}) > 1:
        columns.append((Heading(text="learning rate"), lambda g: _plain(g.learning_rate, "g")))
    if any(floor is not None for floor in floors):
        further.append((Heading(text="gap to floor", unit=LOSS_UNIT), _floor_cell))
    further += [
        (Heading(text="params", unit="millions"), lambda g: _plain(g.parameters / 1e6, ".3f")),
        (Heading(text="speed", unit="tokens/s"), lambda g: _plain(g.tokens_per_second, ",.0f")),
    ]
    if not is_short:
        columns += further
    return Table(
        name="Groups",
        headings=tuple(heading for heading, _ in columns),
        rows=tuple(tuple(cell(group) for _, cell in columns) for group in groups),
    )


def differences_table(study: Study) -> Table:
    """A row a comparison: treatment minus baseline in loss, perplexity and bits; verdicts."""
    rows = []
    for one in study.differences:
        runs = (*one.treatment.runs, *one.baseline.runs)
        name = difference_name(one.treatment, one.baseline)
        setting = setting_text(one.treatment.setting, study)
        rows.append(
            (
                Cell(text=name, below=setting, value=f"{name} {setting}"),
                _difference_cell(one.loss, runs),
                Cell(text=str(one.loss.n), value=one.loss.n, runs=runs),
                Cell(text=one.verdict),
                _p_cell(one.p_value),
                Cell(text="declared") if one.is_primary else _p_cell(one.p_holm),
                _difference_cell(one.perplexity, runs),
                _difference_cell(one.bits, runs),
            )
        )
    return Table(
        name="Differences",
        headings=(
            Heading(text="difference", is_number=False),
            Heading(text="loss", unit=LOSS_UNIT),
            Heading(text="n"),
            Heading(text="verdict", is_number=False),
            Heading(text="p"),
            Heading(text="p", unit="corrected"),
            Heading(text="perplexity", unit="of a token"),
            Heading(text="bits", unit="per character"),
        ),
        rows=tuple(rows),
    )


def equal_compute_table(study: Study) -> Table:
    """Losses at equal training time; the lowest of a setting is bold."""
    best: dict[Any, float] = {}
    for one in study.equal_compute:
        at = one.group.setting
        best[at] = min(best.get(at, math.inf), round(one.loss.mean, DIGITS))
    rows = []
    for one in study.equal_compute:
        group, final = one.group, one.group.setting.tokens
        setting = setting_text(group.setting, study)
        rows.append(
            (
                Cell(text=group.series, below=setting, value=f"{group.series} {setting}"),
                Cell(
                    text=f"{one.loss.mean:.{DIGITS}f}",
                    value=one.loss.mean,
                    runs=group.runs,
                    is_best=round(one.loss.mean, DIGITS) == best[group.setting],
                ),
                Cell(text=str(one.loss.n), value=one.loss.n, runs=group.runs),
                _interval(one.loss),
                _plain(one.seconds, ",.0f"),
                Cell(text=f"{one.tokens / 1e6:,.2f}", value=one.tokens),
                Cell(text=f"{100 * one.tokens / final:.0f} %", value=one.tokens / final),
            )
        )
    return Table(
        name="Equal time",
        headings=(
            Heading(text="method", is_number=False),
            Heading(text="mean loss", unit=LOSS_UNIT),
            Heading(text="n"),
            Heading(text="95 % interval", unit="of the mean"),
            Heading(text="time", unit="seconds"),
            Heading(text="tokens", unit="millions"),
            Heading(text="share", unit="of the run"),
        ),
        rows=tuple(rows),
    )


def pivots(study: Study) -> list[Pivot]:
    """One table for each corpus, width, context and number of tokens."""
    families: dict[tuple[Any, ...], list[Group]] = {}
    for group in study.best:
        s = group.setting
        families.setdefault((s.corpus, s.width, s.context, s.tokens), []).append(group)
    lowest = _lowest(study.best)
    found = []
    for groups in families.values():
        depths = sorted({group.setting.num_layers for group in groups})
        cells = {(group.series, group.setting.num_layers): group for group in groups}
        found.append(
            Pivot(
                title=setting_text(groups[0].setting, study, without=["num_layers"])
                or groups[0].setting.corpus,
                depths=tuple(depths),
                rows=tuple(
                    (series, tuple(cells.get((series, depth)) for depth in depths))
                    for series in dict.fromkeys(group.series for group in groups)
                ),
                best=frozenset(lowest),
                seeds=_usual([group.loss.n for group in groups]),
                has_rates=len(study.groups) > len(study.best),
            )
        )
    return found


def signed(value: float, digits: int = DIGITS) -> str:
    """A difference with its sign, minus as in print."""
    text = f"{value:+.{digits}f}"
    return text.replace("-", "\N{MINUS SIGN}")


def _lowest(groups: Sequence[Group]) -> set[int]:
    """`id` of the groups of lowest printed mean in their setting, where there are several."""
    by_setting: dict[Any, list[Group]] = {}
    for group in groups:
        by_setting.setdefault(group.setting, []).append(group)
    found = set()
    for own in by_setting.values():
        least = min(round(group.loss.mean, DIGITS) for group in own)
        if len(own) > 1:
            found |= {id(group) for group in own if round(group.loss.mean, DIGITS) == least}
    return found


def _usual(numbers: Sequence[int]) -> int:
    counts = Counter(n for n in numbers if n > 1)
    return max(counts, key=lambda n: (counts[n], n), default=1)


def _setting_cell(field: str) -> Callable[[Group], Cell]:
    def cell(group: Group) -> Cell:
        value = getattr(group.setting, field)
        if isinstance(value, str):
            return Cell(text=value, value=value)
        text = f"{value / 1e6:,.3g}" if field == "tokens" else f"{value:,}"
        return Cell(text=text, value=value)

    return cell


def _floor_cell(group: Group) -> Cell:
    floor = group.runs[0].floor
    return _plain(None if floor is None else group.loss.mean - floor)


def _plain(value: float | None, form: str = f".{DIGITS}f") -> Cell:
    return Cell(text=MISSING if value is None else f"{value:{form}}", value=value)


def _interval(summary: Summary) -> Cell:
    if summary.low is None or summary.high is None:
        return Cell(text=MISSING)
    text = f"{summary.low:.{DIGITS}f} .. {summary.high:.{DIGITS}f}"
    return Cell(text=text, value=summary.low)


def _difference_cell(summary: Summary, runs: tuple[Run, ...]) -> Cell:
    below = ""
    if summary.low is not None and summary.high is not None:
        below = f"{signed(summary.low)} .. {signed(summary.high)}"
    return Cell(text=signed(summary.mean), below=below, value=summary.mean, runs=runs)


def _p_cell(p: float | None) -> Cell:
    if p is None:
        return Cell(text=MISSING)
    return Cell(text=f"{p:.3f}" if p >= 0.001 else "< 0.001", value=p)


def _number(text: str) -> float | None:
    return None if text == MISSING else float(text.replace(",", ""))
