"""Parts of the report's page: tables, sections, drawings inside HTML, and what the page may do."""

import base64
import hashlib
import re
from collections.abc import Sequence
from html import escape
from importlib import resources

from resroute.experiments.report.data import Links
from resroute.experiments.report.tables import Cell, Heading, Table

_SCRIPTS = ("page.js", "charts.js")


def style() -> str:
    """The page's style sheet."""
    return _asset("page.css")


def script() -> str:
    """The page's script."""
    return "\n" + "".join(_asset(name) for name in _SCRIPTS)


def policy(script: str) -> str:
    """A Content-Security-Policy: nothing is loaded, and this script alone runs."""
    digest = base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def section(name: str, heading: str, *parts: str) -> str:
    """A part of the page with a heading, which links can name."""
    body = "\n".join(parts)
    return f'<section id="{name}">\n<h2>{escape(heading)}</h2>\n{body}\n</section>'


def paragraph(text: str, css: str = "soft small") -> str:
    """Text as a paragraph."""
    return f'<p class="{css}">{escape(text)}</p>'


def figure(name: str, heading: str, svg: bytes) -> str:
    """A figure that the script draws anew; until then, or without a script, it is the file."""
    drawing = _inline(svg, name, heading)
    return (
        f'<figure data-figure="{name}" data-title="{escape(heading)}">'
        f'<div class="static" tabindex="0" role="region" aria-label="{escape(heading)}">'
        f"{drawing}</div></figure>\n"
        f'<p class="soft small">As a file: <a href="figures/{name}.png">PNG</a>, '
        f'<a href="figures/{name}.svg">SVG</a></p>'
    )


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
    body = "\n".join(lines)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(table.name)}">\n'
        f'<table class="sortable">\n<thead><tr>{heads}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody>\n</table>\n</div>"
    )


def _asset(name: str) -> str:
    text = resources.files("resroute.experiments.report").joinpath(name).read_text(encoding="utf-8")
    assert "</" not in text, f"{name} would end its element"
    return text


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


def _inline(svg: bytes, prefix: str, name: str) -> str:
    """An SVG document as an element of the page, its ids made the page's own by `prefix`."""
    text = svg.decode("utf-8")
    text = re.sub(r"<!--.*?-->\s*", "", text, flags=re.DOTALL)
    opening = re.search(r'<svg\b[^>]*\bviewBox="([^"]+)"[^>]*>', text)
    assert opening is not None, "matplotlib wrote an SVG without a viewBox"
    width = float(opening.group(1).split()[2])
    body = re.sub(r"<metadata>.*?</metadata>\s*", "", text[opening.end() :], flags=re.DOTALL)
    body = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{prefix}-", body)
    # 1.6 CSS pixels to the point: text a little above its printed size, and no larger
    return (
        f'<svg role="img" aria-label="{escape(name)}" viewBox="{opening.group(1)}" '
        f'style="max-width: {1.6 * width:.0f}px">{body.strip()}'
    )
