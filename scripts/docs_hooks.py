"""What the site changes in pages that are also read in the repository."""

import html
import re
from typing import Any

from latex2mathml.converter import convert


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Name files outside of docs/ instead of linking to them: the site does not have them."""
    return re.sub(r"\[([^\]]+)\]\(\.\./([^)]+)\)", r"\1 (`\2` in the repository)", markdown)


def on_page_content(content: str, **_: Any) -> str:
    """Formulas as MathML, which browsers draw by themselves: no script, no network."""
    return re.sub(
        r'<(span|div) class="arithmatex">\\(?:\(|\[)(.*?)\\(?:\)|\])</\1>',
        _formula,
        content,
        flags=re.DOTALL,
    )


def _formula(found: re.Match[str]) -> str:
    latex = html.unescape(found[2]).strip()
    if found[1] == "span":
        return convert(latex)
    # a phone is narrower than some formulas
    return f'<div style="overflow-x: auto">{convert(latex, display="block")}</div>'
