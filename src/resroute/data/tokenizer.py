"""Characters as tokens, with one optional token for the end of a document."""

import dataclasses
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from resroute import config
from resroute.config import UserError

END_OF_TEXT = "<|endoftext|>"

Ids = npt.NDArray[np.int64]


def code_points(text: str) -> npt.NDArray[np.uint32]:
    """Unicode code points of `text`, (characters,), lone surrogates included."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")


@dataclasses.dataclass(frozen=True)
class CharTokenizer:
    """One token per character; a token's id is its place in `symbols`.

    Attributes:
        symbols: Distinct single characters, after which `END_OF_TEXT` may come as the last one.

    Raises:
        UserError: No character, a repeated symbol, or one that is not a single character.
    """

    symbols: tuple[str, ...]

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
        """Number of tokens, the end of text included."""
        return len(self.symbols)

    @property
    def end_of_text(self) -> int | None:
        """Id of the end-of-text token, None where the vocabulary has none."""
        return self.vocab_size - 1 if self.symbols[-1] == END_OF_TEXT else None

    def encode(self, text: str) -> Ids:
        """Ids of `text`, (tokens,).

        The literal `<|endoftext|>` is one token where the vocabulary has it, else its characters.

        Raises:
            UserError: Characters outside the vocabulary.
        """
        if self.end_of_text is None or END_OF_TEXT not in text:
            return self._look_up(text, text)
        pieces = text.split(END_OF_TEXT)
        places = np.cumsum([len(piece) for piece in pieces[:-1]])
        return np.insert(self._look_up("".join(pieces), text), places, self.end_of_text)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`: whole numbers in an iterable, an array or a tensor, (tokens,).

        Negative ids, with which `generate` pads, are left out.

        Raises:
            UserError: An id outside the vocabulary.
        """
        # one conversion for arrays and tensors, on whatever device they lie
        values = ids.tolist() if hasattr(ids, "tolist") else list(ids)
        array = np.asarray(values)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise ValueError(
                f"decode needs one row of whole numbers, got {array.dtype} of shape "
                f"{array.shape}; decode a batch row by row"
            )
        if array.size and array.max() >= self.vocab_size:
            raise UserError(
                f"token id {array.max()} is outside the vocabulary of {self.vocab_size}; "
                "it was written by another tokenizer"
            )
        return "".join([self.symbols[i] for i in values if i >= 0])

    def to_dict(self) -> dict[str, Any]:
        """JSON values from which `from_dict` builds an equal tokenizer."""
        return {"type": "character", **config.to_dict(self)}

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
    def _table(self) -> Ids:
        characters = self.symbols if self.end_of_text is None else self.symbols[:-1]
        codes = [ord(character) for character in characters]
        # the entry past the highest code answers for every code above it
        table = np.full(max(codes) + 2, -1, dtype=np.int64)
        table[codes] = np.arange(len(codes))
        return table

    def _look_up(self, characters: str, text: str) -> Ids:
        """Ids of `characters`, which are `text` without its end-of-text literals."""
        ids = self._table.take(code_points(characters), mode="clip")
        if ids.size and ids.min() < 0:
            raise self._unknown(text)
        return ids

    def _unknown(self, text: str) -> UserError:
        searched = text
        if self.end_of_text is not None:
            # known characters in place of each literal keep the places
            searched = text.replace(END_OF_TEXT, self.symbols[0] * len(END_OF_TEXT))
        ids = self._table.take(code_points(searched), mode="clip")
        places = np.flatnonzero(ids < 0).tolist()
        unknown = list(dict.fromkeys(text[place] for place in places))
        line = text.count("\n", 0, places[0]) + 1
        column = places[0] - text.rfind("\n", 0, places[0])
        listed = ", ".join(ascii(character) for character in unknown[:5])
        more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
        return UserError(
            f"characters outside the vocabulary: {listed}{more}; the first is at line {line}, "
            f"column {column}\nremove or replace them; the vocabulary has {self.vocab_size} symbols"
        )
