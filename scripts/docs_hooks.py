"""What the site changes in pages that are also read in the repository."""

import re
from typing import Any


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Name files outside of docs/ instead of linking to them: the site does not have them."""
    return re.sub(r"\[([^\]]+)\]\(\.\./([^)]+)\)", r"\1 (`\2` in the repository)", markdown)
