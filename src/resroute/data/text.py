"""Reading a user's text file in blocks of a fixed size.

Memory does not grow with the file: a file of 10 GB is read as one of 10 kB is.
"""

import codecs
import dataclasses
import hashlib
import itertools
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from resroute.config import UserError
from resroute.data import containers
from resroute.data.containers import ByteSource, open_text
from resroute.data.documents import import_extra
from resroute.data.pool import ordered_map
from resroute.data.starts import Separator as Separator
from resroute.data.starts import document_starts as document_starts
from resroute.data.starts import tail_of as tail_of
from resroute.data.tokenizer import END_OF_TEXT, code_points, split_at_ends

Piece = tuple[str, str]
"""The end of what comes before, and a block of text."""

_HEAD_BYTES = 1 << 16
_LINE_CHARACTERS = 1 << 20
_NUM_CODE_POINTS = 0x110000
_SAMPLE_BYTES = 1 << 12
_ASCII = frozenset(range(128))
# a closing quotation mark whose last byte, 9D, is nothing in Windows-1252
_LOST_BYTE = re.compile("â€(?![^\x00-\x7f])")
_SURROGATE = re.compile(rb"\xed[\xa0-\xbf]")
# the mark of UTF-16 is how one of UTF-32 begins
_WIDE = (
    ("UTF-32", (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)),
    ("UTF-16", (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)),
)
# control bytes that text does not hold; tab, line ends, form feed and escape are left out
_CONTROL = bytes({*range(32), 127} - {9, 10, 11, 12, 13, 27})


@dataclasses.dataclass(kw_only=True)
class Cleaned:
    """How many of each thing `clean=True` changed."""

    byte_order_marks: int = 0
    crlf_line_ends: int = 0
    cr_line_ends: int = 0
    nul_bytes: int = 0
    repaired_lines: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Survey:
    """What one pass over a file finds.

    Attributes:
        bytes: Of the text, unpacked.
        sha256: Of the same bytes.
        symbols: Distinct characters by code point, then `END_OF_TEXT` where it is a token.
        separator: How documents are told apart; never "auto".
        tokens: Length of the text with `symbols` as its tokens.
        cleaned: What was changed on the way.
    """

    bytes: int
    sha256: str
    symbols: tuple[str, ...]
    separator: Separator
    tokens: int
    cleaned: Cleaned


class TextReader:
    """One pass over a UTF-8 text.

    Iterating yields the text in blocks, none of which ends inside an `<|endoftext|>` literal.
    After the pass `bytes`, `sha256` and `cleaned` describe the text, unpacked where it is packed.

    Args:
        source: A file, packed or not (`open_text`), or what it has opened.
        clean: Drop byte-order marks at the start and NUL bytes and turn CRLF and CR into LF;
            otherwise a file that has any of these is refused.
        repair: Mend UTF-8 that was read as Windows-1252 or Latin-1 (`â€™`), by ftfy, line by line;
            lines of over a million characters in parts.
        progress: Called with how far the file on disk is read, in bytes, after each block.

    Raises:
        UserError: The file is missing, not a regular file, unreadable, binary, not UTF-8, or would
            have to be cleaned.
    """

    def __init__(
        self,
        source: Path | ByteSource,
        *,
        clean: bool = False,
        repair: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self._source = open_text(source) if isinstance(source, Path) else source
        self._repair = repairer() if repair else None
        self.cleaned = Cleaned()
        self.bytes = 0
        self._path = self._source.path
        self._clean = clean
        self._progress = progress
        self._hash = hashlib.sha256()

    @property
    def path(self) -> Path:
        """Of the file, for messages."""
        return self._path

    @property
    def sha256(self) -> str:
        """Hash of the bytes read so far."""
        return self._hash.hexdigest()

    def __iter__(self) -> Iterator[str]:
        held = ""
        for text in self._repaired():
            text = held + text
            held = text[_unfinished_literal(text) :]
            if text := text[: len(text) - len(held)]:
                yield text
        if held:
            yield held

    def _repaired(self) -> Iterator[str]:
        if self._repair is None:
            yield from self._with_clean_line_ends()
            return
        held = ""
        for text in self._with_clean_line_ends():
            *lines, held = (held + text).split("\n")
            yield "".join(f"{self._mended(line)}\n" for line in lines)
            if len(held) > _LINE_CHARACTERS:
                # memory has no room for lines of any length
                place = held.rfind(" ") + 1 or len(held)
                yield self._mended(held[:place])
                held = held[place:]
        yield self._mended(held)

    def _mended(self, line: str) -> str:
        assert self._repair is not None
        if line.isascii():
            return line
        mended = self._repair(line)
        self.cleaned.repaired_lines += mended != line
        return mended

    def _with_clean_line_ends(self) -> Iterator[str]:
        held = ""
        for text in self._characters():
            text = held + text
            # a CR at the end of a block may be the first half of a CRLF
            held = "\r" if text.endswith("\r") else ""
            yield self._line_ends(text[: len(text) - len(held)])
        yield self._line_ends(held)

    def _line_ends(self, text: str) -> str:
        first = text.find("\r")
        if first < 0:
            return text
        if not self._clean:
            kind = "CRLF" if text.startswith("\r\n", first) else "CR"
            where, line, _ = self._place_of(b"\r")
            raise UserError(
                f"{where}: line {line} ends in {kind}; --clean turns CRLF and CR into LF"
            )
        crlf = text.count("\r\n")
        self.cleaned.crlf_line_ends += crlf
        self.cleaned.cr_line_ends += text.count("\r") - crlf
        return text.replace("\r\n", "\n").replace("\r", "\n")

    def _place_of(self, sought: bytes) -> tuple[str, int, int]:
        """Words that name the file, or its document, in which bytes come first; line and offset."""
        # looked for when it is needed: to count every line end takes longer than to read
        line, offset = 1, 0
        for where, piece in self._source.pieces():
            if where:
                line, offset = 1, 0
            place = piece.find(sought)
            line += piece.count(b"\n", 0, None if place < 0 else place)
            if place >= 0:
                return where or str(self._path), line, offset + place
            offset += len(piece)
        return str(self._path), line, offset

    def _characters(self) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")()
        is_start = True
        for block in self._raw_blocks():
            pending = len(decoder.getstate()[0])
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                raise self._not_utf8(error, self.bytes - len(block) - pending) from None
            if is_start and text.startswith("\ufeff"):
                if not self._clean:
                    where, _, _ = self._place_of(codecs.BOM_UTF8)
                    raise UserError(f"{where}: starts with a byte-order mark; --clean drops it")
                num_marks = len(text) - len(text.lstrip("\ufeff"))
                self.cleaned.byte_order_marks += num_marks
                text = text[num_marks:]
            is_start = is_start and not text
            if "\0" in text:
                self.cleaned.nul_bytes += text.count("\0")
                text = text.replace("\0", "")
            yield text
            if self._progress:
                self._progress(self._source.done)

    def _raw_blocks(self) -> Iterator[bytes]:
        """Blocks of the text, then an empty one."""
        try:
            blocks = iter(self._source)
            head: list[bytes] = []
            while sum(map(len, head)) < _HEAD_BYTES and (block := next(blocks, b"")):
                head.append(block)
            self._check_head(b"".join(head)[:_HEAD_BYTES])
            for block in itertools.chain(head, blocks):
                if not self._clean and b"\0" in block:
                    where, _, offset = self._place_of(b"\0")
                    raise UserError(
                        f"{where}: holds a NUL byte at offset {offset}; --clean drops NUL bytes"
                    )
                self.bytes += len(block)
                self._hash.update(block)
                yield block
        except OSError as error:
            raise UserError(f"{self._path}: cannot be read ({error.strerror})") from None
        yield b""

    def _check_head(self, head: bytes) -> None:
        if wide := wide_encoding(head):
            raise UserError(f"{self._path}: is {wide}, not UTF-8\n{self._iconv(wide)}")
        num_control = len(head) - len(head.translate(None, delete=_CONTROL))
        # a few stray bytes are a dirty text, one in twenty is no text
        if num_control * 20 > len(head):
            raise UserError(
                f"{self._path}: looks binary ({num_control} control bytes in the first "
                f"{len(head)}); name a plain UTF-8 text file"
            )

    def _not_utf8(self, error: UnicodeDecodeError, start: int) -> UserError:
        offset = start + error.start
        if _SURROGATE.match(error.object, error.start):
            return UserError(
                f"{self._path}: not UTF-8 at byte {offset}: half of a character (a surrogate), as "
                "CESU-8 has it\nconvert it by what wrote it, or remove what is there"
            )
        if error.reason == "unexpected end of data":
            return UserError(
                f"{self._path}: ends in the middle of a UTF-8 character\n"
                f"cut it there: head -c {offset} {shlex.quote(str(self._path))} > whole.txt"
            )
        return UserError(
            f"{self._path}: not UTF-8 at byte {offset} (0x{error.object[error.start]:02x})\n"
            f"{self._iconv('LATIN1')} (or its true encoding)"
        )

    def _iconv(self, encoding: str) -> str:
        return f"convert it: iconv -f {encoding} -t UTF-8 {shlex.quote(str(self._path))} > utf8.txt"


def wide_encoding(head: bytes) -> str | None:
    """UTF-16 or UTF-32, where a text starts with its byte-order mark."""
    return next((name for name, marks in _WIDE if head.startswith(marks)), None)


def repairer() -> Callable[[str], str]:
    """What mends wrongly decoded text.

    Raises:
        UserError: ftfy is not installed.
    """
    fix: Callable[[str], str] = import_extra("ftfy", "mending text").fix_encoding
    # without the byte ftfy takes a space that follows for part of a dagger
    return lambda text: fix(_LOST_BYTE.sub("â€\x9d", text))


def survey_text(
    source: Path | ByteSource,
    *,
    separator: Separator = "auto",
    clean: bool = False,
    repair: bool = False,
    processes: int = 1,
    progress: Callable[[int], None] | None = None,
) -> Survey:
    """Read a file once for its alphabet, length, hash and separator.

    "endoftext": the literal `<|endoftext|>` is one token and ends a document. "blank-line": two
    line ends with at most white space between end a document; the text has no special token.
    "none": the file is one document. "auto": "endoftext" where the literal occurs, else
    "blank-line" where a blank line stands between two documents, else "none".

    Raises:
        UserError: What `TextReader` refuses, a text without content or with only one character,
            or a separator that does not occur.
    """
    reader = TextReader(source, clean=clean, repair=repair, progress=progress)
    path = reader.path
    is_used = np.zeros(_NUM_CODE_POINTS, dtype=np.bool_)
    characters = literals = paragraphs = 0
    for found in ordered_map(_survey_piece, pieces_of(reader), processes=processes):
        characters += found.characters
        literals += found.literals
        paragraphs += found.paragraphs
        is_used[found.codes] = True
    kinds: dict[Separator, bool] = {"endoftext": literals > 0, "blank-line": paragraphs > 1}
    if separator == "auto":
        separator = next((kind for kind, occurs in kinds.items() if occurs), "none")
    elif not kinds.get(separator, True):
        what = END_OF_TEXT if separator == "endoftext" else "blank line between documents"
        raise UserError(f"{path}: has no {what}; use --separator auto or none")
    is_token = separator == "endoftext"
    if literals and not is_token:
        is_used[code_points(END_OF_TEXT)] = True
    symbols = [chr(code) for code in np.flatnonzero(is_used)]
    _check_content(path, reader.bytes, "".join(symbols))
    return Survey(
        bytes=reader.bytes,
        sha256=reader.sha256,
        symbols=(*symbols, END_OF_TEXT) if is_token else tuple(symbols),
        separator=separator,
        tokens=characters - (len(END_OF_TEXT) - 1) * literals * is_token,
        cleaned=reader.cleaned,
    )


@dataclasses.dataclass(frozen=True)
class _PieceSurvey:
    characters: int
    literals: int
    paragraphs: int
    codes: npt.NDArray[np.uint32]


def pieces_of(reader: TextReader) -> Iterator[Piece]:
    """A text in pieces, each after the end of what comes before it.

    They end at line ends, so that words are whole, but where a line is longer than a block.
    """
    before = held = ""
    for block in reader:
        text = held + block
        cut = text.rfind("\n") + 1
        if cut == 0 and len(text) < containers.BLOCK_BYTES:
            held = text
            continue
        text, held = (text[:cut], text[cut:]) if cut else (text, "")
        yield before, text
        before = tail_of(before, text)
    if held:
        yield before, held


def _survey_piece(piece: Piece) -> _PieceSurvey:
    before, text = piece
    parts = split_at_ends(text)
    # what matters is whether the text has more than one
    paragraphs = len(document_starts(before, text, "blank-line", most=2))
    return _PieceSurvey(len(text), len(parts) - 1, paragraphs, _codes_in("".join(parts)))


def _codes_in(text: str) -> npt.NDArray[np.uint32]:
    """Code points that occur in `text`."""
    data = text.encode("utf-8")
    # the characters at its beginning are most of its characters
    common = bytes(_ASCII.intersection(data[:_SAMPLE_BYTES]))
    others = data.translate(None, delete=common).decode("utf-8")
    return np.concatenate([code_points(common.decode("ascii")), np.unique(code_points(others))])


def _check_content(path: Path, size: int, alphabet: str) -> None:
    if size == 0:
        raise UserError(f"{path}: is empty; name a file with text in it")
    if not alphabet.strip():
        raise UserError(f"{path}: holds no text but white space; name a file with text in it")
    if len(alphabet) == 1:
        raise UserError(
            f"{path}: holds only one distinct character, {alphabet!a}; name a file with more"
        )


def _unfinished_literal(text: str) -> int:
    """Where a literal that `text` breaks off begins, else the length of `text`."""
    # the literal has its only < at its start
    place = text.rfind("<", max(0, len(text) - len(END_OF_TEXT) + 1))
    return place if place >= 0 and END_OF_TEXT.startswith(text[place:]) else len(text)
