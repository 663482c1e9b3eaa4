"""What turns text into token ids and back: the protocol, and characters as tokens."""

import dataclasses
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, Literal, Protocol, get_args

import numpy as np
import numpy.typing as npt

from resroute import config
from resroute.config import UserError

END_OF_TEXT = "<|endoftext|>"

Ids = npt.NDArray[np.int64]
NarrowIds = npt.NDArray[np.unsignedinteger[Any]]

Unknown = Literal["error", "skip", "byte"]
"""What becomes of characters outside the vocabulary: they are refused, left out, or spelled as the
bytes of their UTF-8."""

UNKNOWN: tuple[Unknown, ...] = get_args(Unknown)

_NUM_BYTES = 256


class Tokenizer(Protocol):
    """What a corpus, a checkpoint and a sampler need of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""

    @property
    def end_of_text(self) -> int | None:
        """Id of the token that ends a document, None where the vocabulary has none."""

    @property
    def token_bytes(self) -> Ids:
        """Bytes of UTF-8 that each token stands for, (vocabulary,); the end of text counts one."""

    @property
    def token_characters(self) -> Ids:
        """Characters that begin in each token, (vocabulary,); the end of text counts one."""

    def encode(self, text: str) -> Ids:
        """Ids of `text`, (tokens,); the literal `<|endoftext|>` is one, where it is a token.

        Raises:
            UserError: Text that the vocabulary cannot spell.
        """

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`, (tokens,); negative ones, with which `generate` pads, are left out.

        Raises:
            UserError: An id outside the vocabulary.
        """

    def to_dict(self) -> dict[str, Any]:
        """JSON values from which `tokenizer_from_dict` builds an equal tokenizer."""


def code_points(text: str) -> npt.NDArray[np.uint32]:
    """Unicode code points of `text`, (characters,), lone surrogates included."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")


def split_at_ends(text: str) -> list[str]:
    """Parts of `text` between its `<|endoftext|>` literals; one part where it has none."""
    # to look for one character takes a tenth of the time
    return text.split(END_OF_TEXT) if END_OF_TEXT[0] in text else [text]


def whole_ids(ids: Iterable[int], vocab_size: int) -> list[int]:
    """One row of ids as whole numbers, without negative ones.

    Raises:
        UserError: An id outside the vocabulary.
        ValueError: Not one row of whole numbers.
    """
    # one conversion for arrays and tensors, on whatever device they lie
    values = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(
            f"decode needs one row of whole numbers, got {array.dtype} of shape "
            f"{array.shape}; decode a batch row by row"
        )
    if array.size and array.max() >= vocab_size:
        raise UserError(
            f"token id {array.max()} is outside the vocabulary of {vocab_size}; "
            "it was written by another tokenizer"
        )
    return [i for i in values if i >= 0]


@dataclasses.dataclass(frozen=True)
class CharTokenizer:
    """One token per character; a token's id is its place in `symbols`.

    Attributes:
        symbols: Distinct single characters, after which `END_OF_TEXT` may come as the last one.
        unknown: What becomes of other characters. For "byte" 256 tokens, one a byte, stand between
            the characters and the end of text.

    Raises:
        UserError: No character, a repeated symbol, or one that is not a single character.
    """

    symbols: tuple[str, ...]
    unknown: Unknown = "error"

    def __post_init__(self) -> None:
        if self.symbols in ((), (END_OF_TEXT,)):
            raise UserError(f"a character tokenizer needs a character, got {self.symbols!r}")
        seen = set()
        for place, symbol in enumerate(self.symbols):
            if symbol == END_OF_TEXT and place == len(self.symbols) - 1:
                continue
            if len(symbol) != 1 or "\ud800" <= symbol <= "\udfff":
                raise UserError(
                    f"symbol {place} of a character tokenizer is {symbol!r}; it must be one "
                    f"character ({END_OF_TEXT} may only come last)"
                )
            if symbol in seen:
                raise UserError(f"symbol {place} of a character tokenizer, {symbol!r}, is repeated")
            seen.add(symbol)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, bytes and the end of text included."""
        return len(self.symbols) + (_NUM_BYTES if self.unknown == "byte" else 0)

    @property
    def characters(self) -> tuple[str, ...]:
        """The symbols without the end of text."""
        return self.symbols[:-1] if self.symbols[-1] == END_OF_TEXT else self.symbols

    @property
    def end_of_text(self) -> int | None:
        """Id of the end-of-text token, None where the vocabulary has none."""
        return self.vocab_size - 1 if self.symbols[-1] == END_OF_TEXT else None

    @cached_property
    def splits_at_ends(self) -> bool:
        """Whether a literal `<|endoftext|>` is no text: one token, or left out as a whole."""
        can_spell = self.unknown != "skip" or set(END_OF_TEXT) <= set(self.symbols)
        return self.end_of_text is not None or not can_spell

    @cached_property
    def token_bytes(self) -> Ids:
        """See `Tokenizer`."""
        lengths = [len(symbol.encode()) for symbol in self.characters]
        return np.array([*lengths, *[1] * (self.vocab_size - len(lengths))], dtype=np.int64)

    @cached_property
    def token_characters(self) -> Ids:
        """See `Tokenizer`; a byte that continues a character begins none."""
        counts = [1] * self.vocab_size
        if self.unknown == "byte":
            first = len(self.characters)
            counts[first : first + _NUM_BYTES] = [int(b & 0xC0 != 0x80) for b in range(_NUM_BYTES)]
        return np.array(counts, dtype=np.int64)

    def encode(self, text: str) -> Ids:
        """Ids of `text`, (tokens,).

        The literal `<|endoftext|>` is one token where the vocabulary has it, else its characters;
        where these are not all known, `skip` leaves it out as a whole.

        Raises:
            UserError: Characters outside the vocabulary, where they are an error; lone surrogates,
                where they should be bytes.
        """
        parts = split_at_ends(text) if self.splits_at_ends else [text]
        return self.encode_parts(parts).astype(np.int64)

    def encode_parts(self, parts: Sequence[str]) -> NarrowIds:
        """Ids of texts with an end of text between each two, (tokens,), of an unsigned type.

        Args:
            parts: The texts; more than one only where `splits_at_ends`.

        Raises:
            UserError: See `encode`.
        """
        # some character stands for each end of text until the ids are there
        characters = "\0".join(parts)
        ids = self._codes_to_ids(characters)
        if len(parts) > 1:
            end = self.vocab_size if self.end_of_text is None else self.end_of_text
            ids[np.cumsum([len(part) + 1 for part in parts[:-1]]) - 1] = end
        is_unknown = ids == self.vocab_size
        if not is_unknown.any():
            return ids
        if self.unknown == "error":
            raise self._refusal(END_OF_TEXT.join(parts))
        if self.unknown == "skip":
            known: NarrowIds = ids[~is_unknown]
            return known
        return self._with_bytes(characters, ids, np.flatnonzero(is_unknown))

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`: whole numbers in an iterable, an array or a tensor, (tokens,).

        Negative ids, with which `generate` pads, are left out. Bytes that are no UTF-8 become the
        replacement character.

        Raises:
            UserError: An id outside the vocabulary.
        """
        values = whole_ids(ids, self.vocab_size)
        if self.unknown != "byte":
            return "".join([self.symbols[i] for i in values])
        return b"".join([self._spelled[i] for i in values]).decode("utf-8", "replace")

    def unknown_in(self, text: str) -> int:
        """How many characters of `text` are outside the vocabulary; a literal left out is one."""
        parts = split_at_ends(text) if self.splits_at_ends else [text]
        num_unknown = int((self._codes_to_ids("".join(parts)) == self.vocab_size).sum())
        return num_unknown + (len(parts) - 1 if self.end_of_text is None else 0)

    def to_dict(self) -> dict[str, Any]:
        """JSON values from which `from_dict` builds an equal tokenizer."""
        # what is at its default is left out: vocabularies from before it existed are equal
        return {"type": "character", **config.from_defaults(self)}

    @classmethod
    def from_dict(cls, data: Any, *, where: str = "tokenizer") -> "CharTokenizer":
        """Read what `to_dict` gave, strictly; `where` names the place in error messages.

        Raises:
            UserError: Another type of tokenizer, or a missing, unknown or wrong field.
        """
        if not isinstance(data, dict) or data.get("type") != "character":
            found = data.get("type") if isinstance(data, dict) else data
            raise UserError(f"{where}: needs the type 'character', got {found!r}")
        fields = {name: value for name, value in data.items() if name != "type"}
        try:
            return config.from_dict(cls, fields, where=where)
        except UserError as error:
            message = str(error)
            place = "" if message.startswith(where) else f"{where}: "
            raise UserError(f"{place}{message}") from None

    @cached_property
    def _spelled(self) -> list[bytes]:
        spelled = [symbol.encode() for symbol in self.characters]
        spelled += [bytes([value]) for value in range(_NUM_BYTES)]
        return [*spelled, END_OF_TEXT.encode()]

    @cached_property
    def _table(self) -> NarrowIds:
        """Ids by code point; the size of the vocabulary is the id of what is outside it."""
        codes = [ord(character) for character in self.characters]
        # the entry past the highest code answers for every code above it
        dtype = np.min_scalar_type(self.vocab_size)
        table = np.full(max(*codes, 255) + 2, self.vocab_size, dtype=dtype)
        table[codes] = np.arange(len(codes))
        return table

    @cached_property
    def _byte_table(self) -> bytes:
        return self._table[:256].tobytes()

    def _codes_to_ids(self, text: str) -> NarrowIds:
        if not text.isascii():
            return self._table.take(code_points(text), mode="clip")
        if self._table.itemsize > 1:
            return self._table.take(np.frombuffer(text.encode("ascii"), dtype=np.uint8))
        # half the time of numpy's look-up; an array over a bytearray can be written to
        ids = bytearray(text, "ascii").translate(self._byte_table)
        return np.frombuffer(ids, dtype=np.uint8)

    def _with_bytes(self, characters: str, ids: NarrowIds, places: Ids) -> NarrowIds:
        """`ids` with those at `places`, which are unknown, spelled as bytes."""
        first = len(self.characters)
        rows: list[npt.NDArray[Any]] = []
        last = 0
        for place in places.tolist():
            try:
                spelled = characters[place].encode()
            except UnicodeEncodeError:
                raise UserError(
                    f"{characters[place]!a} is half of a character and has no bytes; remove it"
                ) from None
            rows += [ids[last:place], np.frombuffer(spelled, dtype=np.uint8) + np.int64(first)]
            last = place + 1
        return np.concatenate([*rows, ids[last:]]).astype(ids.dtype)

    def _refusal(self, text: str) -> UserError:
        searched = text
        if self.end_of_text is not None:
            # known characters in place of each literal keep the places
            searched = text.replace(END_OF_TEXT, self.symbols[0] * len(END_OF_TEXT))
        places = np.flatnonzero(self._codes_to_ids(searched) == self.vocab_size).tolist()
        unknown = list(dict.fromkeys(text[place] for place in places))
        line = text.count("\n", 0, places[0]) + 1
        column = places[0] - text.rfind("\n", 0, places[0])
        listed = ", ".join(ascii(character) for character in unknown[:5])
        more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
        return UserError(
            f"characters outside the vocabulary: {listed}{more}; the first is at line {line}, "
            f"column {column}\nremove or replace them; the vocabulary has {self.vocab_size} symbols"
        )
