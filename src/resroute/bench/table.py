"""The table of a case's comparisons, for a terminal or as plain lines of 80 columns."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from resroute.bench.timing import Comparison

if TYPE_CHECKING:
    from rich.table import Table

HEADINGS = ("what", "backend", "against", "", "ratio", "95 % interval", "median")
_NUMBERS = ("ratio", "95 % interval", "median")


def cells(rows: Sequence[Comparison]) -> list[tuple[str, ...]]:
    """A tuple of texts a comparison, as `HEADINGS` has them."""
    return [
        (
            row.name,
            row.backend,
            row.against,
            row.group,
            f"{row.ratio:.3f}",
            "" if row.interval is None else f"{row.interval[0]:.3f}-{row.interval[1]:.3f}",
            amount(row.measured, row.unit),
        )
        for row in rows
    ]


def amount(value: float, unit: str) -> str:
    """A measurement with its unit, at most nine characters long."""
    if unit == "s":
        return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"
    if unit == "bytes":
        return f"{value / 1e6:,.0f} MB" if value >= 1e7 else f"{value / 1e3:,.0f} kB"
    return f"{value:,.0f} tok/s"


def lines(rows: Sequence[Comparison]) -> list[str]:
    """The table as plain text; columns that say nothing are left out."""
    shown = _columns(rows)
    widths = [max(len(text) for text in column) for column in shown]
    headings = [column[0] for column in shown]
    return [
        "  ".join(
            text.rjust(width) if heading in _NUMBERS else text.ljust(width)
            for text, width, heading in zip(line, widths, headings, strict=True)
        ).rstrip()
        for line in zip(*shown, strict=True)
    ]


def table(rows: Sequence[Comparison]) -> "Table":
    """The table for rich."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    made = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    shown = _columns(rows)
    for heading, *_ in shown:
        is_number = heading in _NUMBERS
        made.add_column(
            heading, justify="right" if is_number else "left", no_wrap=is_number, overflow="fold"
        )
    for line in zip(*(column[1:] for column in shown), strict=True):
        made.add_row(*(Text(text) for text in line))
    return made


def _columns(rows: Sequence[Comparison]) -> list[list[str]]:
    columns = [list(column) for column in zip(HEADINGS, *cells(rows), strict=True)]
    return [column for column in columns if any(column[1:])]
