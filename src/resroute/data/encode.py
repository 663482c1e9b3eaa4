"""The second pass over a text: pieces to token ids, written as splits.

Positions in a text are counted in characters, an `<|endoftext|>` that is a token as one, so that
they do not depend on the tokenizer.
"""

import contextlib
import dataclasses
import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from resroute.config import UserError
from resroute.data.copies import CopyCounter, Fragments, fragments
from resroute.data.corpora import Split, SplitMeta, smallest_dtype, tokens_file
from resroute.data.pool import ordered_map
from resroute.data.starts import Separator, document_starts, starts_of_parts
from resroute.data.subword import SubwordTokenizer, tokenizer_from_dict
from resroute.data.text import Piece
from resroute.data.tokenizer import END_OF_TEXT, CharTokenizer, Ids, Tokenizer, split_at_ends

_EXTRA = len(END_OF_TEXT) - 1


@dataclasses.dataclass(frozen=True)
class Encoded:
    """A piece as tokens.

    Attributes:
        ids: (tokens,) in the corpus's type.
        starts: Positions in the piece where documents start, or where it may be cut.
        start_tokens: Places of the same in `ids`.
        length: Positions in the piece.
        bytes: Of UTF-8, an end of text counted as one.
        characters: Likewise.
        unknown: Characters that were left out or spelled as bytes.
        documents: What counts their copies; None where nothing separates them.
    """

    ids: npt.NDArray[np.unsignedinteger[Any]]
    starts: Ids
    start_tokens: Ids
    length: int
    bytes: int
    characters: int
    unknown: int
    documents: Fragments | None


class Encoder:
    """Turns pieces into tokens; made once in each process."""

    def __init__(self, tokenizer: Tokenizer, separator: Separator, goals: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.separator = separator
        self.goals = goals
        self.dtype = np.dtype(smallest_dtype(tokenizer.vocab_size)).newbyteorder("<")
        # the literal is a token where it parts documents
        self.is_token = separator == "endoftext"

    def encode(self, piece: Piece, position: int) -> Encoded:
        """Encode a piece that begins at a position of the text, which counts for "none" alone."""
        before, text = piece
        split = split_at_ends(text)
        parts = split if self.is_token else [text]
        length = len(text) - _EXTRA * (len(parts) - 1)
        documents = None
        if self.separator == "none":
            local = [goal - position for goal in self.goals]
            places = np.array([p for p in local if 0 <= p < length], dtype=np.int64)
            starts = places
        elif self.is_token:
            places, numbers = starts_of_parts(before, parts)
            starts = places - _EXTRA * numbers
            whole = [parts[number].strip() for number in numbers[:-1].tolist()]
            documents = fragments(text, places, whole)
        else:
            places = starts = document_starts(before, text, self.separator)
            bounds = itertools.pairwise(places.tolist())
            documents = fragments(text, places, [text[a:b].rstrip() for a, b in bounds])
        tokenizer = self.tokenizer
        unknown = 0
        if isinstance(tokenizer, CharTokenizer):
            if tokenizer.unknown != "error":
                unknown = tokenizer.unknown_in(text)
            # a given vocabulary has its own mind about the literal
            is_plain = len(parts) == (len(split) if tokenizer.splits_at_ends else 1)
        if isinstance(tokenizer, CharTokenizer) and is_plain and not unknown:
            # a position is a token
            ids, start_tokens = tokenizer.encode_parts(parts), starts
        else:
            ids, start_tokens = self._by_document(text, places)
        if unknown:
            # what is left out is not counted
            num_bytes = int(tokenizer.token_bytes[ids].sum())
            characters = int(tokenizer.token_characters[ids].sum())
        else:
            # the literal counts as one where it is one token
            extra = 0 if tokenizer.end_of_text is None else _EXTRA * (len(split) - 1)
            num_bytes = (len(text) if text.isascii() else len(text.encode())) - extra
            characters = len(text) - extra
        ids = ids.astype(self.dtype, copy=False)
        return Encoded(ids, starts, start_tokens, length, num_bytes, characters, unknown, documents)

    def _by_document(self, text: str, places: Ids) -> tuple[npt.NDArray[Any], Ids]:
        """Ids of a piece, and where among them its documents start."""
        tokenizer = self.tokenizer
        cuts = [0, *places.tolist(), len(text)]
        documents = [text[first:last] for first, last in itertools.pairwise(cuts)]
        rows: list[Any]
        if isinstance(tokenizer, SubwordTokenizer):
            rows = tokenizer.encode_all(documents)
        else:
            rows = [tokenizer.encode(one) for one in documents]
        ends = np.cumsum([len(row) for row in rows], dtype=np.int64)
        return np.concatenate([np.asarray(row, dtype=np.int64) for row in rows]), ends[:-1]


_ENCODER: list[Encoder] = []


def _prepare(tokenizer: dict[str, Any], separator: Separator, goals: Sequence[int]) -> None:
    _ENCODER[:] = [Encoder(tokenizer_from_dict(tokenizer), separator, goals)]


def _encode(work: tuple[Piece, int]) -> Encoded:
    return _ENCODER[0].encode(*work)


def encoded(
    pieces: Iterable[Piece],
    tokenizer: Tokenizer,
    separator: Separator,
    goals: Sequence[int],
    *,
    processes: int,
) -> Iterator[Encoded]:
    """Encode the pieces of a text, in order, by several processes.

    Args:
        pieces: All of the text.
        tokenizer: Of the corpus.
        separator: Of documents; "none" lets the text be cut at the goals alone.
        goals: Positions from which on the next split begins.
        processes: See `ordered_map`.
    """

    def placed() -> Iterator[tuple[Piece, int]]:
        position = 0
        for piece in pieces:
            yield piece, position
            # too far where literals are tokens, but then it is not asked for
            position += len(piece[1])

    return ordered_map(
        _encode,
        placed(),
        processes=processes,
        prepare=_prepare,
        arguments=(tokenizer.to_dict(), separator, tuple(goals)),
    )


class SplitWriter(contextlib.AbstractContextManager["SplitWriter"]):
    """Writes one split's token file and counts and hashes what it writes."""

    def __init__(self, folder: Path, split: Split, tokenizer: Tokenizer) -> None:
        self._dtype = np.dtype(smallest_dtype(tokenizer.vocab_size)).newbyteorder("<")
        self._tokenizer = tokenizer
        self._file = (folder / tokens_file(split)).open("wb")
        self._hash = hashlib.sha256()
        self.tokens = self.documents = self.bytes = self.characters = 0

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def write(
        self,
        ids: npt.NDArray[Any],
        *,
        documents: int,
        size: tuple[int, int] | None = None,
    ) -> None:
        """Add tokens; `size` is their bytes and characters, counted where it is None."""
        found = ids.astype(self._dtype, copy=False)
        self._file.write(found.data)
        self._hash.update(found.data)
        if size is None:
            used = np.bincount(ids, minlength=self._tokenizer.vocab_size)
            size = (
                int(used @ self._tokenizer.token_bytes),
                int(used @ self._tokenizer.token_characters),
            )
        self.tokens += len(ids)
        self.documents += documents
        self.bytes += size[0]
        self.characters += size[1]

    def finish(self) -> SplitMeta:
        """What was written; the file is closed by leaving the context."""
        self._file.flush()
        return SplitMeta(
            tokens=self.tokens,
            documents=self.documents,
            sha256=self._hash.hexdigest(),
            bytes=self.bytes,
            characters=self.characters,
        )


def write_splits(
    pieces: Iterable[Encoded],
    writers: Sequence[SplitWriter],
    goals: Sequence[int],
    *,
    has_documents: bool,
    copies: CopyCounter,
) -> tuple[int, int]:
    """Write a text into splits, each cut at the first start of a document past its goal.

    Args:
        pieces: All of the text.
        writers: Of the splits in the order in which they lie in the text.
        goals: One less than there are writers.
        has_documents: Whether each split must begin with one; else it is cut at its goal.
        copies: Is given the documents.

    Returns:
        How many splits have text, and how many characters were unknown.
    """
    current = position = unknown = 0
    for piece in pieces:
        ids, starts, tokens = piece.ids, piece.starts, piece.start_tokens
        size = (piece.bytes, piece.characters)
        done = 0
        unknown += piece.unknown
        if piece.documents is not None:
            copies.add(piece.documents)
        while current < len(goals):
            # a split has at least one document
            first = int(has_documents and not writers[current].documents)
            place = max(int(np.searchsorted(starts, goals[current] - position)), first)
            if place >= len(starts):
                break
            cut = int(tokens[place]) - done
            head = _sizes(writers[current], ids[:cut])
            writers[current].write(ids[:cut], documents=place, size=head)
            size = (size[0] - head[0], size[1] - head[1])
            ids, starts, tokens = ids[cut:], starts[place:], tokens[place:]
            done += cut
            current += 1
        writers[current].write(ids, documents=len(starts), size=size)
        position += piece.length
    return current + 1, unknown


def _sizes(writer: SplitWriter, ids: npt.NDArray[Any]) -> tuple[int, int]:
    tokenizer = writer._tokenizer
    used = np.bincount(ids, minlength=tokenizer.vocab_size)
    return int(used @ tokenizer.token_bytes), int(used @ tokenizer.token_characters)


def require_room(
    filled: int, splits: Sequence[Split], separator: Separator, characters: int, where: str
) -> None:
    """Refuse a text whose documents leave a split without text.

    Raises:
        UserError: So many splits were filled, and not all.
    """
    if filled == len(splits):
        return
    if separator == "none":
        raise UserError(f"{where}: {characters} characters are too few for three splits; add text")
    raise UserError(
        f"{where}: no document starts late enough to begin {splits[filled]} (separator "
        f"{separator})\nuse --separator none, or a smaller share for "
        f"{' and '.join(splits[:filled])}"
    )
