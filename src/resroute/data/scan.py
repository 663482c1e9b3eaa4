"""One pass over a text as code points: characters, lines, documents, wrongly decoded places.

Memory does not grow with the text, but for 16 bytes a document up to ten million documents.
"""

import hashlib
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache
from importlib import import_module
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from resroute.data.text import Separator

# stands in a stream of code points for the end of text
END_CODE = 0x110000
MAX_DOCUMENTS = 10_000_000
HEAD_CHARACTERS = 2000
# marks of other corpora, which are plain characters here
OTHER_MARKS = ("<|end_of_text|>", "<|end|>", "</s>", "<eos>", "[EOS]")

Codes = npt.NDArray[np.uint32]

# what bytes from 0x80 on become when they are read as Windows-1252 or Latin-1
_MISREAD = "\x80-\xff" + bytes(
    byte for byte in range(0x80, 0xA0) if byte not in b"\x81\x8d\x8f\x90\x9d"
).decode("cp1252")
_RUN_LENGTH = 64
_RUN = re.compile(f"[{_MISREAD}]{{1,{_RUN_LENGTH}}}")


class Scan:
    """Counts what a text holds, piece by piece.

    Args:
        separator: How documents are told apart; "auto" is the rule of `survey_text`.

    Attributes:
        counts: How often each code point occurs, the end of text last, (0x110001,). Line ends are
            counted as they are in the text.
        characters: Code points so far, the end of text as one.
        crlf: Line ends that are CRLF.
        cr: Line ends that are CR alone. For all that follows, both are one LF.
        lines: Lines, the last one without a line end included.
        longest_line: Characters of the longest line, its end left out.
        longest_line_number: Where it is, from 1; the first of equals.
        head: The first characters of the text.
        other_marks: How often each of `OTHER_MARKS` occurs.
        misread: Places that look wrongly decoded.
    """

    def __init__(self, separator: Separator = "auto") -> None:
        self.counts = np.zeros(END_CODE + 1, np.int64)
        self.characters = self.crlf = self.cr = self.lines = 0
        self.longest_line = self.longest_line_number = 0
        self.head = ""
        self.other_marks = dict.fromkeys(OTHER_MARKS, 0)
        self.misread = Misread()
        self._tail = ""
        self._separator = separator
        self._line_length = 0
        self._held_cr = False
        is_text = text_code_points()
        self._by_mark = _Documents(np.append(is_text, False), mark=END_CODE, num_marks=1)
        self._by_blank_line = _Documents(np.append(is_text, True), mark=ord("\n"), num_marks=2)
        self._by_mark.is_counted_alone = separator == "blank-line"
        self._by_blank_line.is_counted_alone = separator in ("endoftext", "none")

    @property
    def separators(self) -> dict[Separator, int]:
        """How many documents each separator would make, where it makes any."""
        found: dict[Separator, int] = {}
        if self._by_mark.marks:
            found["endoftext"] = self._by_mark.count
        if self._by_blank_line.count > 1:
            found["blank-line"] = self._by_blank_line.count
        return found

    @property
    def separator(self) -> Separator:
        """How documents are told apart; never "auto"."""
        if self._separator != "auto":
            return self._separator
        return next(iter(self.separators), "none")

    @property
    def documents(self) -> "_Documents":
        """Those of `separator`; all of the text is one where nothing separates it."""
        return self._by_blank_line if self.separator == "blank-line" else self._by_mark

    def feed(self, codes: Codes) -> None:
        """Take the next piece of the text."""
        counts = np.bincount(codes)
        self.counts[: len(counts)] += counts
        self.characters += len(codes)
        if self._held_cr:
            codes = np.insert(codes, 0, ord("\r"))
        # a CR at the end of a piece may be the first half of a CRLF
        self._held_cr = bool(len(codes)) and bool(codes[-1] == ord("\r"))
        self._scan(self._with_plain_line_ends(codes[: len(codes) - self._held_cr]))

    def finish(self) -> None:
        """Count what was held back at the end of the text."""
        if self._held_cr:
            self._held_cr = False
            self._scan(self._with_plain_line_ends(np.array([ord("\r")], np.uint32)))
        self.misread.finish()
        for documents in (self._by_mark, self._by_blank_line):
            documents.finish()
        if self._line_length:
            self._end_lines(np.array([self._line_length]))

    def _with_plain_line_ends(self, codes: Codes) -> Codes:
        is_cr = codes == ord("\r")
        if not is_cr.any():
            return codes
        is_crlf = np.append(is_cr[:-1] & (codes[1:] == ord("\n")), False)
        crlf = int(is_crlf.sum())
        self.crlf += crlf
        self.cr += int(is_cr.sum()) - crlf
        plain: Codes = np.where(is_cr, np.uint32(ord("\n")), codes)[~is_crlf]
        return plain

    def _scan(self, codes: Codes) -> None:
        ends = np.flatnonzero(codes == ord("\n"))
        if len(ends):
            lengths = np.diff(ends, prepend=-1) - 1
            lengths[0] += self._line_length
            self._end_lines(lengths)
            self._line_length = len(codes) - 1 - int(ends[-1])
        else:
            self._line_length += len(codes)
        if self._separator == "auto" and self._by_mark.marks:
            self._by_blank_line.is_counted_alone = True
        self._by_mark.feed(codes)
        self._by_blank_line.feed(codes)
        text = np.where(codes == END_CODE, np.uint32(ord("\n")), codes).astype("<u4").tobytes()
        self._scan_text(text.decode("utf-32-le", "surrogatepass"))

    def _scan_text(self, text: str) -> None:
        self.head += text[: HEAD_CHARACTERS - len(self.head)]
        self.misread.feed(text)
        # a mark may have begun in the piece before
        for mark in OTHER_MARKS:
            self.other_marks[mark] += (self._tail[1 - len(mark) :] + text).count(mark)
        self._tail = (self._tail + text)[1 - max(map(len, OTHER_MARKS)) :]

    def _end_lines(self, lengths: npt.NDArray[np.int64]) -> None:
        longest = int(lengths.argmax())
        if lengths[longest] > self.longest_line:
            self.longest_line = int(lengths[longest])
            self.longest_line_number = self.lines + longest + 1
        self.lines += len(lengths)


@cache
def text_code_points() -> npt.NDArray[np.bool_]:
    """For every Unicode code point whether it is not white space, (code points,)."""
    is_text = np.ones(END_CODE, dtype=np.bool_)
    # Unicode has no white space outside its first plane
    is_text[[code for code in range(1 << 16) if chr(code).isspace()]] = False
    return is_text


class DocumentStarts:
    """Where documents start in a stream of code points, by the rule of `text.document_starts`.

    Args:
        is_text: For every code whether it is neither white space nor a mark.
        mark: The end of text, or a line end.
        num_marks: How many marks, with nothing but white space between, end a document: one end of
            text, two line ends.
    """

    def __init__(self, is_text: npt.NDArray[np.bool_], *, mark: int, num_marks: int) -> None:
        self._is_text = is_text
        self._mark = mark
        self._carry = np.zeros(num_marks, dtype=np.bool_)

    def find(self, codes: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Places in the next piece of the stream where documents start."""
        text = self._is_text[codes]
        places = np.flatnonzero(text | (codes == self._mark))
        num_marks = len(self._carry)
        kinds = np.concatenate([self._carry, text[places]])
        starts = kinds[num_marks:].copy()
        for back in range(1, num_marks + 1):
            starts &= ~kinds[num_marks - back : len(kinds) - back]
        self._carry = kinds[-num_marks:]
        found: npt.NDArray[np.int64] = places[starts]
        return found


class _Documents:
    """Lengths and hashes of documents, which start where `DocumentStarts` says.

    White space around a document is no part of it.

    Attributes:
        count: Documents so far.
        marks: Ends of text, or line ends, so far.
        lengths: Characters of each of the first `MAX_DOCUMENTS`.
        hashes: 64 bits of each of them: even of ten million the chance that two that differ have
            the same is below three in a million.
        is_counted_alone: Whether lengths and hashes are left out from now on.
    """

    def __init__(self, is_text: npt.NDArray[np.bool_], *, mark: int, num_marks: int) -> None:
        self.count = self.marks = 0
        self.lengths = array("q")
        self.hashes = array("Q")
        self.is_counted_alone = False
        self._starts = DocumentStarts(is_text, mark=mark, num_marks=num_marks)
        self._is_text = is_text
        self._mark = mark
        self._is_closed = True
        # of the document that is open: its hash, and the hash and length up to its last text
        self._hash: Any = None
        self._digest = b""
        self._length = self._pending = 0

    @property
    def empty(self) -> int:
        """Marks with no text before them."""
        return self.marks - (self.count if self._is_closed else self.count - 1)

    def feed(self, codes: Codes) -> None:
        """Take the next piece of the text."""
        starts = self._starts.find(codes)
        self.count += len(starts)
        marks = np.flatnonzero(codes == self._mark)
        self.marks += len(marks)
        texts = np.flatnonzero(self._is_text[codes])
        last_text = int(texts[-1]) if len(texts) else -1
        if len(texts) or len(marks):
            self._is_closed = len(marks) > 0 and int(marks[-1]) > last_text
        if self.is_counted_alone:
            return
        bounds = [*starts.tolist(), len(codes)]
        # where the text ends that lies before each bound
        lasts = np.searchsorted(texts, bounds) - 1
        ends = [int(texts[last]) + 1 if last >= 0 else 0 for last in lasts]
        self._grow(codes[: bounds[0]], ends[0])
        for (start, stop), end in zip(pairwise(bounds), ends[1:], strict=True):
            self.finish()
            self._hash = hashlib.blake2b(digest_size=8)
            self._grow(codes[start:stop], end - start)

    def finish(self) -> None:
        """Close the open document."""
        if self._hash is not None and len(self.lengths) < MAX_DOCUMENTS:
            self.lengths.append(self._length)
            self.hashes.append(int.from_bytes(self._digest, "little"))
        self._hash = None
        self.is_counted_alone |= len(self.lengths) == MAX_DOCUMENTS
        self._length = self._pending = 0

    def _grow(self, codes: Codes, end: int) -> None:
        """Add a piece to the open document, whose last text ends at `end`."""
        if self._hash is None:
            return
        if end > 0:
            self._hash.update(codes[:end].tobytes())
            self._digest = self._hash.digest()
            self._length += self._pending + end
            self._pending = 0
        self._hash.update(codes[end:].tobytes())
        self._pending += len(codes) - end


class Misread:
    """Finds UTF-8 that was read as Windows-1252 or Latin-1: `â€™` for an apostrophe, `Ã©` for é.

    A place is a run of the characters that bytes from 0x80 on become in such a reading, 64 at
    most, in which ftfy, where it is installed, or else a table of the usual sequences finds signs
    of it.

    Attributes:
        rule: Who judges.
        places: How many there are.
        examples: What they are and how often, the first thousand kinds of them.
    """

    def __init__(self) -> None:
        self.rule: Literal["ftfy", "table"]
        self.rule, self._is_misread = _judge()
        self.places = 0
        self.examples: Counter[str] = Counter()
        self._held = ""

    def feed(self, text: str) -> None:
        """Take the next piece of the text."""
        if text.isascii():
            if text:
                self.finish()
            return
        text = self._held + text
        runs = _RUN.findall(text)
        # the last run may go on in the next piece
        is_open = bool(runs) and text.endswith(runs[-1]) and len(runs[-1]) < _RUN_LENGTH
        self._held = runs.pop() if is_open else ""
        self._count(runs)

    def finish(self) -> None:
        """Count what was held back."""
        self._count([self._held] if self._held else [])
        self._held = ""

    def _count(self, runs: Iterable[str]) -> None:
        for run, count in Counter(runs).items():
            if self._is_misread(run):
                self.places += count
                if run in self.examples or len(self.examples) < 1000:
                    self.examples[run] += count


def _judge() -> tuple[Literal["ftfy", "table"], Callable[[str], bool]]:
    try:
        is_bad: Callable[[str], bool] = import_module("ftfy.badness").is_bad
    except ImportError:
        return "table", lambda run: _SEQUENCES.search(run) is not None
    return "ftfy", is_bad


def _misread(first: int, last: int) -> str:
    """A class of what the bytes from `first` to `last` become."""
    readings = {bytes([byte]).decode("cp1252", "ignore") for byte in range(first, last + 1)}
    readings |= {chr(byte) for byte in range(first, last + 1)}
    return "[" + "".join(map(re.escape, sorted(readings))) + "]"


_ANY = _misread(0x80, 0xBF)
_SEQUENCES = re.compile(
    "|".join(
        (
            # U+00A0 to U+00FF: the signs and letters of Latin-1
            f"Â{_misread(0xA0, 0xBF)}|Ã{_ANY}",
            # U+2000 to U+203F: dashes and quotation marks, where the last byte may be lost
            f"â(?:€|{_misread(0x80, 0x80)}){_ANY}?",
            # U+2040 to U+27FF: signs, arrows, symbols
            f"â{_misread(0x81, 0x9F)}{_ANY}",
            # U+0400 to U+047F: Cyrillic, two letters at least
            f"(?:[ÐÑ]{_ANY}){{2}}",
            # U+1F000 to U+1FFFF: emoji
            f"ð(?:Ÿ|{_misread(0x9F, 0x9F)}){_ANY}{{2}}",
            # the byte-order mark and the replacement character
            "ï»¿|ï¿½",
        )
    )
)
