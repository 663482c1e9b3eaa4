"""The report's tables as HTML."""

import re
from collections.abc import Sequence
from html import escape

from resroute.experiments.page.html import scrolling
from resroute.experiments.report.data import Links
from resroute.experiments.report.tables import Cell, Heading, Table


def html_table(
    table: Table,
    links: Links,
    *,
    marked: Sequence[bool] = (),
    anchors: Sequence[int] = (),
    has_ids: bool = False,
) -> str:
    """A table that scrolls in itself and that the script lets readers sort.

    Args:
        table: What to show.
        links: Where configurations are: a cell of one run links to its own.
        marked: Rows in bold.
        anchors: Of each row, the place in the table of runs that a cell of several runs links to.
        has_ids: Whether rows are that table's, which links can name.
    """
    heads = "".join(map(_head, table.headings))
    lines = []
    for i, row in enumerate(table.rows):
        name = f' id="run-{i}"' if has_ids else ""
        mark = ' class="marked"' if i < len(marked) and marked[i] else ""
        anchor = anchors[i] if i < len(anchors) else None
        cells = (
            _cell(cell, heading, links, anchor)
            for cell, heading in zip(row, table.headings, strict=True)
        )
        lines.append(f"<tr{name}{mark}>{''.join(cells)}</tr>")
    return scrolling(table.name, heads, lines)


def _head(heading: Heading) -> str:
    unit = f"<span>{escape(heading.unit)}</span>" if heading.unit else ""
    css = "" if heading.is_number else ' class="text"'
    return f'<th scope="col"{css}>{escape(heading.text)}{unit}</th>'


def _cell(cell: Cell, heading: Heading, links: Links, anchor: int | None) -> str:
    text = escape(cell.text)
    names = ", ".join(run.name for run in cell.runs)
    title = f' title="{escape(names)}"' if cell.runs else ""
    if len(cell.runs) == 1:
        href = links.config(cell.runs[0])
        text = f'<a href="{href}"{title}>{text}</a>'
        title = ""
    elif cell.runs and anchor is not None:
        text = f'<a href="#run-{anchor}">{text}</a>'
    if cell.below:
        text += f"<small>{escape(cell.below)}</small>"
    css = [
        *([] if heading.is_number else ["text"]),
        *(["best"] if cell.is_best else []),
    ]
    kind = f' class="{" ".join(css)}"' if css else ""
    return f"<td{kind}{title}{_sort_key(cell)}>{text}</td>"


def _sort_key(cell: Cell) -> str:
    """What a cell is sorted by where that is not its text."""
    if cell.value is None or cell.value == cell.text:
        return ""
    value = cell.value if isinstance(cell.value, str) else f"{cell.value:.12g}"
    if re.fullmatch(r"[\d.]+", cell.text) and float(cell.text) == cell.value:
        return ""
    return f' data-value="{escape(value)}"'
