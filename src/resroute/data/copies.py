"""Counting documents that repeat an earlier one, in a text that is read piece by piece.

Documents are compared by 64 bits of their hash, without the white space around them. Eight bytes
are kept of each, of the first ten million: 80 MB, whatever the text. Even then the chance that two
that differ are taken for equal is below three in a million.
"""

import dataclasses
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np

from resroute.data.starts import Places
from resroute.data.tokenizer import END_OF_TEXT

MAX_DOCUMENTS = 10_000_000

_DIGEST_BYTES = 8


@dataclasses.dataclass(frozen=True)
class Fragments:
    """The documents of a piece, of which the first and the last may go on in others.

    Attributes:
        head: What lies before the first start of a document.
        digests: Of the documents that begin and end in the piece, end to end.
        tail: What lies from the last start on; None where no document starts.
    """

    head: str
    digests: bytes
    tail: str | None


def fragments(text: str, starts: Places, whole: Sequence[str]) -> Fragments:
    """What `CopyCounter` needs of a piece.

    Args:
        text: The piece.
        starts: Where documents start in it.
        whole: All documents that start but the last, without the white space around them.
    """
    if not len(starts):
        return Fragments(text, b"", None)
    digests = [blake2b(one.encode(), digest_size=_DIGEST_BYTES).digest() for one in whole]
    return Fragments(text[: starts[0]], b"".join(digests), text[starts[-1] :])


class CopyCounter:
    """Counts documents that are equal to an earlier one.

    Args:
        has_literals: Whether `<|endoftext|>` ends documents, and is no part of them.
    """

    def __init__(self, *, has_literals: bool) -> None:
        self._has_literals = has_literals
        self._digests = array("Q")
        # of the document that is open: its hash, and the digest up to its last text
        self._hash: Any = None
        self._digest = b""

    def add(self, found: Fragments) -> None:
        """Take the next piece."""
        if len(self._digests) == MAX_DOCUMENTS:
            return
        self._grow(found.head)
        if found.tail is None:
            return
        self._close()
        self._keep(found.digests)
        self._hash = blake2b(digest_size=_DIGEST_BYTES)
        self._grow(found.tail)

    def finish(self) -> int:
        """How many copies are among the first `MAX_DOCUMENTS`; the text ends here."""
        self._close()
        # sorted in its place
        digests = np.frombuffer(self._digests, dtype=np.uint64)
        digests.sort()
        return int(np.count_nonzero(digests[1:] == digests[:-1]))

    def _grow(self, text: str) -> None:
        """Add a piece to the open document."""
        if self._hash is None:
            return
        bare = text.rstrip()
        while self._has_literals and bare.endswith(END_OF_TEXT):
            bare = bare.removesuffix(END_OF_TEXT).rstrip()
        if bare:
            self._hash.update(bare.encode())
            self._digest = self._hash.digest()
        # counts where more of the document follows
        self._hash.update(text[len(bare) :].encode())

    def _close(self) -> None:
        if self._hash is not None:
            self._keep(self._digest)
        self._hash = None

    def _keep(self, digests: bytes) -> None:
        room = MAX_DOCUMENTS - len(self._digests)
        self._digests.frombytes(digests[: _DIGEST_BYTES * room])
