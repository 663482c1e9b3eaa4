"""Prepared corpora on disk: a folder of token files and one `meta.json`, opened memory-mapped.

A folder holds `train.bin`, `val.bin` and `test.bin` (little-endian unsigned integers of the least
width that holds the vocabulary), `val.nats.bin` and `test.nats.bin` (float64) where the probability
of each document is known, and `meta.json`, whose fields are those of `CorpusMeta`.
"""

import dataclasses
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from resroute import config
from resroute.config import UserError
from resroute.data.order import DocumentOrder
from resroute.data.subword import tokenizer_from_dict
from resroute.data.text import Separator
from resroute.data.tokenizer import Tokenizer
from resroute.files import digest, read_json

FORMAT_VERSION = 1
META_FILE = "meta.json"

Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)

Tokens = npt.NDArray[np.unsignedinteger[Any]]
Dtype = Literal["uint8", "uint16", "uint32"]

_CHUNK = 1 << 22


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitMeta:
    """Size and hash of one split's token file.

    Attributes:
        tokens: Their number.
        documents: Their number.
        sha256: Of the token file.
        bytes: Of the text in UTF-8, each end of text counted as one; None in older corpora.
        characters: Likewise.
    """

    tokens: int
    documents: int
    sha256: str
    bytes: int | None = None
    characters: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitsMeta:
    """The three splits, in the order in which they lie in the text."""

    train: SplitMeta
    val: SplitMeta
    test: SplitMeta


@dataclasses.dataclass(frozen=True, kw_only=True)
class CorpusMeta:
    """The content of `meta.json`.

    Attributes:
        format_version: Of the folder's layout.
        name: The folder's name when it was made.
        source: What the tokens were made from and how; its "kind" is "text" or "storyworld".
        separator: How documents are told apart; never "auto".
        tokenizer: `Tokenizer.to_dict()`.
        dtype: Of the token files.
        splits: Sizes and hashes.
        aligned: Whether windows start at documents.
    """

    format_version: int
    name: str
    source: Any
    separator: Separator
    tokenizer: Any
    dtype: Dtype
    splits: SplitsMeta
    aligned: bool


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Corpus:
    """A prepared corpus; `open_corpus` makes one from its folder."""

    path: Path
    tokenizer: Tokenizer
    meta: CorpusMeta

    @property
    def name(self) -> str:
        """The folder's name when the corpus was made."""
        return self.meta.name

    @property
    def aligned(self) -> bool:
        """Whether windows start at documents."""
        return self.meta.aligned

    @cached_property
    def fingerprint(self) -> str:
        """Eight hexadecimal digits that change with the vocabulary or any token."""
        hashes = {split: self.split(split).sha256 for split in SPLITS}
        return config.fingerprint({"tokenizer": self.meta.tokenizer, "splits": hashes})

    def split(self, split: Split) -> SplitMeta:
        """Size and hash of a split."""
        found: SplitMeta = getattr(self.meta.splits, split)
        return found

    def tokens(self, split: Split) -> Tokens:
        """Token ids of a split, (tokens,), memory-mapped and read-only."""
        return self._tokens[split]

    def document_ends(self, split: Split) -> npt.NDArray[np.int64]:
        """Places of a split's end-of-text tokens, (ends,); none where the vocabulary has none."""
        return self._document_ends[split]

    def document_nats(self, split: Split) -> npt.NDArray[np.float64] | None:
        """Each document's -log p in nats, (documents,), where the source knows it."""
        path = self.path / nats_file(split)
        return np.fromfile(path, dtype="<f8") if path.exists() else None

    def document_order(self, seed: int) -> DocumentOrder | None:
        """The order `documents` of the train split; None where no end of text closes documents."""
        if seed not in self._orders:
            ends = self.document_ends("train")
            self._orders[seed] = DocumentOrder(ends, seed) if len(ends) else None
        return self._orders[seed]

    @cached_property
    def _orders(self) -> dict[int, DocumentOrder | None]:
        return {}

    @cached_property
    def longest_document(self) -> int:
        """Tokens of the longest document that an end of text closes in any split, it included."""
        gaps = [np.diff(self.document_ends(split), prepend=-1) for split in SPLITS]
        return max((int(gap.max()) for gap in gaps if gap.size), default=0)

    @cached_property
    def _tokens(self) -> dict[Split, Tokens]:
        return {
            split: np.memmap(self.path / tokens_file(split), dtype=disk_dtype(self.meta), mode="r")
            for split in SPLITS
        }

    @cached_property
    def _document_ends(self) -> dict[Split, npt.NDArray[np.int64]]:
        end = self.tokenizer.end_of_text
        if end is None:
            return {split: np.zeros(0, dtype=np.int64) for split in SPLITS}
        return {
            split: np.concatenate(
                [
                    start + np.flatnonzero(tokens[start : start + _CHUNK] == end)
                    for start in range(0, len(tokens), _CHUNK)
                ]
            )
            for split, tokens in self._tokens.items()
        }


def open_corpus(path: str | Path) -> Corpus:
    """Open a prepared corpus and check that its files have their sizes and no unknown token.

    Raises:
        UserError: No such corpus, one of another format version, or a damaged one.
    """
    path = Path(path)
    meta = _read_meta(path)
    where = f"{path / META_FILE}: tokenizer"
    tokenizer = tokenizer_from_dict(meta.tokenizer, where=where)
    if meta.aligned and tokenizer.end_of_text is None:
        raise UserError(f"{where}: aligned windows need an end of text; prepare the corpus again")
    corpus = Corpus(path=path, tokenizer=tokenizer, meta=meta)
    for split in SPLITS:
        size = np.dtype(meta.dtype).itemsize * corpus.split(split).tokens
        _check_size(path / tokens_file(split), size)
        if meta.aligned and split != "train":
            _check_size(path / nats_file(split), 8 * corpus.split(split).documents)
            nats = corpus.document_nats(split)
            if nats is None or not ((nats >= 0) & (nats < np.inf)).all():
                raise UserError(
                    f"{path / nats_file(split)}: holds what are no nats; prepare the corpus again"
                )
    for split in SPLITS:
        tokens = corpus.tokens(split)
        highest = max(tokens[i : i + _CHUNK].max() for i in range(0, len(tokens), _CHUNK))
        if highest >= tokenizer.vocab_size:
            raise UserError(
                f"{path / tokens_file(split)}: holds token {highest}, but the vocabulary has "
                f"{tokenizer.vocab_size}; the file is damaged, prepare the corpus again"
            )
    return corpus


def require_unchanged(corpus: Corpus) -> None:
    """Compare the hashes of the token files with those in `meta.json`, a second for one or two GB.

    Raises:
        UserError: A file is not what was written.
    """
    for split in SPLITS:
        file = corpus.path / tokens_file(split)
        if digest(file) != corpus.split(split).sha256:
            raise UserError(
                f"{file}: is not what was written, by its hash; delete the folder and prepare the "
                "corpus again"
            )


def tokens_file(split: Split) -> str:
    """Name of a split's token file."""
    return f"{split}.bin"


def nats_file(split: Split) -> str:
    """Name of the file with a split's nats per document."""
    return f"{split}.nats.bin"


def smallest_dtype(vocab_size: int) -> Dtype:
    """The narrowest unsigned type that holds every id of a vocabulary."""
    if vocab_size <= 1 << 8:
        return "uint8"
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def disk_dtype(meta: CorpusMeta) -> np.dtype[Any]:
    """The token files' type, little endian on every machine."""
    return np.dtype(meta.dtype).newbyteorder("<")


def _read_meta(path: Path) -> CorpusMeta:
    file = path / META_FILE
    if not path.is_dir():
        kind = "is a file, not a folder" if path.exists() else "no such folder"
        raise UserError(f"{path}: {kind}; `resroute data prepare` makes a corpus")
    if not file.exists():
        raise UserError(
            f"{path}: is no prepared corpus, it has no {META_FILE}; "
            "`resroute data prepare` makes one"
        )
    data = read_json(file, "prepare the corpus again")
    version = data.get("format_version")
    if version != FORMAT_VERSION:
        raise UserError(
            f"{file}: has format_version {version!r}, this resroute reads {FORMAT_VERSION}; "
            "prepare the corpus again"
        )
    meta = config.from_dict(CorpusMeta, data, where=str(file))
    if not isinstance(meta.source, dict):
        raise UserError(f"{file}: source: needs an object, got {meta.source!r}")
    if meta.separator == "auto":
        raise UserError(f"{file}: separator: a corpus has one, got 'auto'; prepare it again")
    for split in SPLITS:
        for name, value in dataclasses.asdict(getattr(meta.splits, split)).items():
            if isinstance(value, int) and value < 1:
                raise UserError(
                    f"{file}: splits.{split}.{name}: must be at least 1, got {value}; "
                    "prepare the corpus again"
                )
    return meta


def _check_size(file: Path, size: int) -> None:
    found = file.stat().st_size if file.is_file() else None
    if found != size:
        state = "is missing" if found is None else f"has {found} bytes, {META_FILE} says {size}"
        raise UserError(f"{file}: {state}; prepare the corpus again")
