"""Subword tokens: byte-level BPE trained on a corpus, or any `tokenizer.json`.

The package `tokenizers` does the work; it is imported when the first such tokenizer is made.
"""

import json
import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from resroute.config import UserError
from resroute.data.tokenizer import END_OF_TEXT, CharTokenizer, Ids, Tokenizer, whole_ids
from resroute.files import parse_object, read_text

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_LEAST_VOCABULARY = 257


class SubwordTokenizer:
    """A tokenizer of the package `tokenizers`.

    Args:
        content: The object in a `tokenizer.json`.
        where: Names the place in error messages.

    Raises:
        UserError: The package is missing, or does not take the object.
    """

    def __init__(self, content: dict[str, Any], *, where: str = "tokenizer") -> None:
        package = _package()
        self._content = content
        try:
            self._tokenizer = package.Tokenizer.from_str(json.dumps(content))
        # the package raises plain Exceptions
        except Exception as error:
            raise UserError(f"{where}: no tokenizer that `tokenizers` reads ({error})") from None
        # windows have their own length
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SubwordTokenizer) and self._content == other._content

    def __hash__(self) -> int:
        return hash(json.dumps(self._content, sort_keys=True))

    @property
    def vocab_size(self) -> int:
        """See `Tokenizer`; one past the highest id."""
        return 1 + max(self._vocabulary.values())

    @property
    def end_of_text(self) -> int | None:
        """Id of `<|endoftext|>`, None where it is no token."""
        return self._vocabulary.get(END_OF_TEXT)

    def encode(self, text: str) -> Ids:
        """See `Tokenizer`; nothing is added that the text does not say."""
        return np.array(self.encode_all([text])[0], dtype=np.int64)

    def encode_all(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text.

        Raises:
            UserError: Half of a character.
        """
        try:
            found = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        except (TypeError, UnicodeEncodeError):
            raise UserError("the text holds half of a character; remove lone surrogates") from None
        return [one.ids for one in found]

    def decode(self, ids: Iterable[int]) -> str:
        """See `Tokenizer`."""
        text: str = self._tokenizer.decode(
            whole_ids(ids, self.vocab_size), skip_special_tokens=False
        )
        return text

    @cached_property
    def token_bytes(self) -> Ids:
        """See `Tokenizer`; exact for byte-level tokens, of others the length of their own text."""
        counts = np.zeros(self.vocab_size, dtype=np.int64)
        for token, spelled in self._spelled.items():
            counts[token] = len(spelled)
        return self._with_end(counts)

    @cached_property
    def token_characters(self) -> Ids:
        """See `Tokenizer`."""
        counts = np.zeros(self.vocab_size, dtype=np.int64)
        for token, spelled in self._spelled.items():
            counts[token] = sum(value & 0xC0 != 0x80 for value in spelled)
        return self._with_end(counts)

    def to_dict(self) -> dict[str, Any]:
        """JSON values from which `from_dict` builds an equal tokenizer."""
        return {"type": "subword", "content": self._content}

    @classmethod
    def from_dict(cls, data: Any, *, where: str = "tokenizer") -> "SubwordTokenizer":
        """Read what `to_dict` gave; `where` names the place in error messages.

        Raises:
            UserError: Something else.
        """
        content = data.get("content") if isinstance(data, dict) else None
        if not isinstance(content, dict):
            raise UserError(f"{where}: needs the object of a tokenizer.json under 'content'")
        return cls(content, where=where)

    @classmethod
    def from_file(cls, path: Path) -> "SubwordTokenizer":
        """Read a `tokenizer.json`.

        Raises:
            UserError: No such file, or something else.
        """
        remedy = "name a tokenizer.json of the package `tokenizers`, or a corpus folder"
        return cls(parse_object(read_text(path, remedy), str(path), remedy), where=str(path))

    @classmethod
    def train(cls, texts: Iterator[str], vocab_size: int, *, ends: bool) -> "SubwordTokenizer":
        """Train byte-level BPE, which spells any text and gives it back.

        Args:
            texts: Pieces of the corpus; words are not looked for across pieces.
            vocab_size: Most tokens: 256 bytes, merges, and the end of text.
            ends: Whether `<|endoftext|>` is a token.

        Raises:
            UserError: Fewer tokens than bytes.
        """
        if vocab_size < _LEAST_VOCABULARY:
            raise UserError(
                f"a byte-level vocabulary needs {_LEAST_VOCABULARY} tokens or more, 256 bytes and "
                f"one besides, got {vocab_size}"
            )
        package = _package()
        from tokenizers import decoders, models, pre_tokenizers, trainers

        tokenizer = package.Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=[END_OF_TEXT] if ends else [],
            show_progress=False,
        )
        pieces = (part for text in texts for part in text.split(END_OF_TEXT)) if ends else texts
        tokenizer.train_from_iterator(pieces, trainer)
        return cls(json.loads(tokenizer.to_str()))

    def gives_back(self, text: str) -> bool:
        """Whether decoding the ids of a text gives the text."""
        return self.decode(self.encode(text).tolist()) == text

    @cached_property
    def _vocabulary(self) -> dict[str, int]:
        found: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        return found

    @cached_property
    def _spelled(self) -> dict[int, bytes]:
        """Bytes of each token."""
        is_byte_level = '"ByteLevel"' in json.dumps(
            [self._content.get("decoder"), self._content.get("pre_tokenizer")]
        )
        values = _byte_values() if is_byte_level else {}
        spelled = {}
        for word, token in self._vocabulary.items():
            if is_byte_level and all(letter in values for letter in word):
                spelled[token] = bytes(values[letter] for letter in word)
            elif match := _BYTE_TOKEN.fullmatch(word):
                spelled[token] = bytes([int(match[1], 16)])
            else:
                spelled[token] = word.removeprefix("##").replace("\u2581", " ").encode()
        return spelled

    def _with_end(self, counts: Ids) -> Ids:
        if self.end_of_text is not None:
            counts[self.end_of_text] = 1
        return counts


def tokenizer_from_dict(data: Any, *, where: str = "tokenizer") -> Tokenizer:
    """The tokenizer whose `to_dict` gave `data`; `where` names the place in error messages.

    Raises:
        UserError: Something else.
    """
    if isinstance(data, dict) and data.get("type") == "subword":
        return SubwordTokenizer.from_dict(data, where=where)
    return CharTokenizer.from_dict(data, where=where)


def vocabulary_difference(theirs: Tokenizer, ours: Tokenizer) -> str:
    """In what two tokenizers differ, in words."""
    if isinstance(theirs, CharTokenizer) and isinstance(ours, CharTokenizer):
        parts = [
            f"{name} {', '.join(ascii(symbol) for symbol in only[:10])}"
            + (f" and {len(only) - 10} more" if len(only) > 10 else "")
            for name, only in (
                ("only there", [s for s in theirs.symbols if s not in ours.symbols]),
                ("only here", [s for s in ours.symbols if s not in theirs.symbols]),
            )
            if only
        ]
        if theirs.unknown != ours.unknown:
            parts.append(f"unknown={theirs.unknown} there, {ours.unknown} here")
        return "; ".join(parts) or "the same characters in another order"
    kinds = [
        "characters" if isinstance(one, CharTokenizer) else "subwords" for one in (theirs, ours)
    ]
    return f"{theirs.vocab_size} {kinds[0]} there, {ours.vocab_size} {kinds[1]} here"


def _package() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise UserError(
            'subword tokens need the package tokenizers: pip install "resroute[data]"'
        ) from None
    return tokenizers


def _byte_values() -> dict[str, int]:
    """The letters with which byte-level tokens spell bytes (GPT-2's table): printable bytes are
    themselves, the others the code points from 256 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in printable]
    letters = {chr(value): value for value in printable}
    return letters | {chr(256 + place): value for place, value in enumerate(others)}
