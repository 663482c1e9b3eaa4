"""What every page of ours is made of: one HTML file that needs nothing but itself."""

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from html import escape
from importlib import resources
from typing import Any

_SHARED = ("base.js", "frame.js", "maps.js")
_HEADED = re.compile(r'<section id="([\w-]+)">\n<h2>(.*)</h2>')


def document(
    title: str, setup: str, sections: Sequence[str], data: Any, room: str, scripts: Sequence[str]
) -> str:
    """A page's HTML.

    Args:
        title: The heading, as text.
        setup: One line below it, as text.
        sections: What `section` made; each gets a link at the top, empty ones are left out.
        data: JSON values for the scripts.
        room: The package that the scripts are files of.
        scripts: Their names, in order. They come after those that all pages share, and draw.
    """
    shared = "".join(_asset("resroute.experiments.page", name) for name in _SHARED)
    code = "\n" + shared + "".join(_asset(room, name) for name in scripts)
    shown = [part for part in sections if part]
    found = (_HEADED.match(part) for part in shown)
    nav = "\n".join(f'<a href="#{m.group(1)}">{m.group(2)}</a>' for m in found if m)
    parts = [
        "<!doctype html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_policy(code)}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title>",
        f"<style>\n{_asset('resroute.experiments.page', 'page.css')}</style>",
        "</head>",
        "<body>",
        "<main>",
        f"<h1>{escape(title)}</h1>",
        f'<p class="soft setup">{escape(setup)}</p>',
        f'<nav aria-label="Sections">\n{nav}\n</nav>',
        *shown,
        "</main>",
        f'<script type="application/json" id="data">{_json(data)}</script>',
        f"<script>{code}</script>",
        "</body>",
        "</html>",
    ]
    return "\n".join(parts) + "\n"


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


def plain_table(name: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of texts that scrolls in itself and can be sorted; the first column is names."""
    first, *rest = map(escape, headings)
    heads = f'<th scope="col" class="text">{first}</th>' + "".join(
        f'<th scope="col">{text}</th>' for text in rest
    )
    lines = [
        f'<tr><td class="text">{escape(row[0])}</td>'
        + "".join(f"<td>{escape(text)}</td>" for text in row[1:])
        + "</tr>"
        for row in rows
    ]
    return scrolling(name, heads, lines)


def scrolling(name: str, heads: str, lines: Sequence[str]) -> str:
    """A table of HTML cells that scrolls in itself and that the script lets readers sort."""
    body = "\n".join(lines)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(name)}">\n'
        f'<table class="sortable">\n<thead><tr>{heads}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody>\n</table>\n</div>"
    )


def _policy(script: str) -> str:
    """A Content-Security-Policy: nothing is loaded, and this script alone runs."""
    digest = base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def _json(data: Any) -> str:
    """JSON that can stand inside HTML."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    # ASCII alone by now: what is left are the signs that open and close tags and entities
    return text.translate({ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&"})


def _asset(room: str, name: str) -> str:
    text = resources.files(room).joinpath(name).read_text(encoding="utf-8")
    assert "</" not in text, f"{name} would end its element"
    return text


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
