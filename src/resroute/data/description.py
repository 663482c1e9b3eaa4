"""What `describe` finds in a text file or a corpus, as values."""

import dataclasses
from typing import Literal

from resroute.data.corpora import Split
from resroute.data.ngrams import NgramBaselines
from resroute.data.text import Separator

RARE = 10

Kind = Literal[
    "control",
    "invisible",
    "odd space",
    "lost in decoding",
    "private use",
    "unassigned",
    "combining",
    "right-to-left",
    "emoji",
    "beyond U+FFFF",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class KindOfCharacter:
    """The characters of one kind in a text; some are of several kinds.

    Attributes:
        kind: "control": category Cc but tab and line ends. "invisible": category Cf, variation
            selectors, Hangul fillers, line and paragraph separators. "odd space": any but U+0020.
            "lost in decoding": U+FFFD. "private use", "unassigned": categories Co, Cn (as
            Python's Unicode tables know them). "combining": categories M, but variation selectors.
            "right-to-left": bidirectional classes R and AL. "emoji": symbols of the emoji blocks.
        count: How many there are in the text.
        characters: Distinct ones, the most frequent first.
    """

    kind: Kind
    count: int
    characters: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lengths:
    """Lengths in characters: extremes, mean, and those at 10, 50 and 90 % of the way by size."""

    shortest: int
    tenth: int
    median: int
    ninetieth: int
    longest: int
    mean: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class DocumentsFound:
    """Documents as `separator` tells them apart, white space around them left out.

    Attributes:
        separator: As `survey_text` chooses it, or the corpus's; never "auto".
        separators: How many documents each separator that occurs would make.
        other_marks: How often the marks of other corpora occur, `</s>` for one. They are plain
            characters here.
        count: Documents with text.
        empty: Ends of text with no text before them.
        examined: The documents at the start of the text, ten million at most, of which the rest
            tells.
        copies: Documents that are equal to an earlier one (by 64-bit hashes).
        lengths: None where there is no document.
    """

    separator: Separator
    separators: dict[Separator, int]
    other_marks: dict[str, int]
    count: int
    empty: int
    examined: int
    copies: int
    lengths: Lengths | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileFindings:
    """What only a file has: its bytes and what is wrong with them.

    Attributes:
        byte_order_mark: Whether any stand at the start; they are counted nowhere else.
        wide_encoding: "UTF-16" or "UTF-32", where the file starts like it.
        bad_bytes: Bytes that are no UTF-8; they are counted nowhere else.
        first_bad_byte: Offset of the first of them.
        crlf_line_ends: Line ends that are CRLF.
        cr_line_ends: Line ends that are CR alone.
        nul_bytes: NUL bytes.
    """

    byte_order_mark: bool
    wide_encoding: str | None
    bad_bytes: int
    first_bad_byte: int | None
    crlf_line_ends: int
    cr_line_ends: int
    nul_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class CorpusFindings:
    """What only a corpus has.

    Attributes:
        source: "text" or "storyworld", and the name of the file.
        split_tokens: Tokens of each split.
        split_documents: Documents of each split.
        floor: Nats per token of the validation split that its generator itself would lose.
        ngrams: What a model must beat; None where it was not asked for.
    """

    source: str
    split_tokens: dict[Split, int]
    split_documents: dict[Split, int]
    floor: float | None
    ngrams: NgramBaselines | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Description:
    """What `describe` finds.

    Attributes:
        name: Of the file or folder.
        bytes: Of the text in UTF-8: the size of a file.
        characters: Unicode code points, those of each literal `<|endoftext|>` included.
        tokens: Where a character is a token, and so is a literal that ends a document.
        lines: Lines, the last one without a line end included.
        longest_line: Characters of the longest line.
        longest_line_number: Where it is, from 1.
        first_lines: The first lines that are not blank, five at most, cut where they are long.
        alphabet: Each distinct character, `<|endoftext|>` among them, and how often it occurs;
            the most frequent first, equals by code point.
        kinds: Characters that deserve a look, by kind.
        misread: Places that look wrongly decoded (`â€™` for an apostrophe).
        misread_rule: Who said so: "ftfy", where it is installed, or a "table" of the usual cases.
        misread_examples: What they look like and how often, the most frequent first.
        documents: Documents.
        file: None for a corpus.
        corpus: None for a file.
    """

    name: str
    bytes: int
    characters: int
    tokens: int
    lines: int
    longest_line: int
    longest_line_number: int
    first_lines: tuple[str, ...]
    alphabet: tuple[tuple[str, int], ...]
    kinds: tuple[KindOfCharacter, ...]
    misread: int
    misread_rule: Literal["ftfy", "table"]
    misread_examples: tuple[tuple[str, int], ...]
    documents: DocumentsFound
    file: FileFindings | None
    corpus: CorpusFindings | None

    @property
    def rare(self) -> tuple[tuple[str, int], ...]:
        """Characters that occur ten times at most, and how often."""
        return tuple((character, count) for character, count in self.alphabet if count <= RARE)
