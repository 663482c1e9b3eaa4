"""Where documents start in a text that is read piece by piece."""

import itertools
import re
from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from resroute.data.tokenizer import END_OF_TEXT, split_at_ends

Separator = Literal["auto", "endoftext", "blank-line", "none"]

Places = npt.NDArray[np.int64]

_TAIL = 64
_BLANK_LINE = re.compile(r"\n\s*\n\s*")


def document_starts(
    before: str, text: str, separator: Separator, *, most: int | None = None
) -> Places:
    """Where documents start in a piece of a text: each first character that is not white space
    after a separator, and the first of all. White space around a separator so stays with the
    document before it, and none is lost.

    Args:
        before: `tail_of` what comes before the piece.
        text: The piece; neither ends inside an `<|endoftext|>` literal.
        separator: "endoftext", or "blank-line": two line ends with at most white space between.
        most: Of blank lines, how many are looked for.
    """
    if separator == "endoftext":
        return starts_of_parts(before, split_at_ends(text))[0]
    whole = before + text
    found = (match.end() - len(before) for match in _BLANK_LINE.finditer(whole))
    starts = list(itertools.islice((start for start in found if start >= 0), most))
    first = len(text) - len(text.lstrip())
    # the first document of all, where the text does not open with blank lines, which have found it
    if not before.strip() and first not in starts[:1]:
        starts.insert(0, first)
    places = np.array(starts, dtype=np.int64)
    return places[places < len(text)]


def starts_of_parts(before: str, parts: Sequence[str]) -> tuple[Places, Places]:
    """`document_starts` by the end of text, of a piece that is split at its literals.

    Args:
        before: See `document_starts`.
        parts: See `split_at_ends`.

    Returns:
        The places in the piece, and which parts they lie in.
    """
    lengths = np.array([len(part) for part in parts])
    num_text = np.array([len(part.lstrip()) for part in parts])
    is_start = num_text > 0
    kept = before.rstrip()
    # the first part may go on with the document before it
    is_start[0] &= not kept or kept.endswith(END_OF_TEXT)
    places = np.cumsum(lengths + len(END_OF_TEXT)) - len(END_OF_TEXT) - num_text
    return places[is_start], np.flatnonzero(is_start)


def tail_of(before: str, text: str) -> str:
    """What `document_starts` needs of the end of `before + text`."""
    short = text[-_TAIL:]
    if short.strip():
        return short
    whole = before + text
    kept = whole.rstrip()
    # of white space, however long, only the line ends count, and of them two
    return kept[-_TAIL:] + "\n" * min(2, whole.count("\n", len(kept)))
