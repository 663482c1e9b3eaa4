"""What is in a text file or a corpus: sizes, characters, documents, and what needs a look.

What `TextReader` would refuse in a text is counted, not refused; a file from which no text can be
read, a damaged archive or a line of .jsonl that is no document, is refused as `open_text` does. A
text is read once, in memory that does not grow with it.
"""

import codecs
import unicodedata
from array import array
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import cast, get_args

import numpy as np

from resroute.config import require_whole
from resroute.data.containers import BLOCK_BYTES, open_text
from resroute.data.corpora import (
    SPLITS,
    Corpus,
    Split,
    Tokens,
    open_corpus,
    require_unchanged,
)
from resroute.data.description import (
    CorpusFindings,
    Description,
    DocumentsFound,
    FileFindings,
    Kind,
    KindOfCharacter,
    Lengths,
)
from resroute.data.description_lines import render
from resroute.data.ngrams import ngram_baselines
from resroute.data.scan import END_CODE, Codes, Scan
from resroute.data.text import wide_encoding
from resroute.data.tokenizer import END_OF_TEXT, CharTokenizer, Tokenizer, code_points

__all__ = ["Description", "describe", "render"]

_NUM_EXAMPLES = 8
_NUM_HEAD_LINES = 5
_HEAD_LINE_CHARACTERS = 200

# default ignorable characters that are not of category Cf
_VARIATION_SELECTORS = {*range(0x180B, 0x180E), 0x180F, *range(0xFE00, 0xFE10)}
_VARIATION_SELECTORS |= {*range(0xE0100, 0xE01F0)}
_FILLERS = {0x034F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x3164, 0xFFA0}
_EMOJI = {0x231A, 0x231B, *range(0x23E9, 0x23FB), 0x2B1B, 0x2B1C, 0x2B50, 0x2B55}
_EMOJI |= {*range(0x2600, 0x27C0), *range(0x1F000, 0x1FB00)}

Progress = Callable[[int, int], None]


def describe(path: Path, *, max_order: int = 6, progress: Progress | None = None) -> Description:
    """Describe a corpus folder or a text file of any size.

    Args:
        path: A prepared corpus, or a file; what is no UTF-8 in it is counted, not refused.
        max_order: Of the n-gram models of a corpus, which take up to a minute where the train
            split has 20 million tokens; 0 leaves them out.
        progress: Called with what has been done so far, and all there is to do: bytes of a file;
            tokens of a corpus, twice as many where n-gram models are made of them.

    Raises:
        UserError: Nothing of that name, no permission, a folder that is no whole corpus, or a
            negative `max_order`.
    """
    require_whole("max_order", max_order, 0)
    if path.is_dir():
        corpus = open_corpus(path)
        require_unchanged(corpus)
        return _describe_corpus(corpus, max_order, progress)
    source = open_text(path)
    reader = _Reader(source)
    scan = Scan()
    for codes in reader:
        scan.feed(codes)
        if progress:
            progress(source.done, source.size)
    scan.finish()
    file = FileFindings(
        byte_order_mark=reader.byte_order_mark,
        wide_encoding=reader.wide_encoding,
        bad_bytes=reader.bad_bytes,
        first_bad_byte=reader.first_bad_byte,
        crlf_line_ends=scan.crlf,
        cr_line_ends=scan.cr,
        nul_bytes=int(scan.counts[0]),
    )
    return _description(path, scan, size=reader.bytes, file=file)


def _decoded(corpus: Corpus, split: Split, report: Callable[[int], None]) -> Iterator[Codes]:
    """The text of a split as code points; `report` is told how many tokens are behind."""
    tokenizer, tokens = corpus.tokenizer, corpus.tokens(split)
    has_end = tokenizer.end_of_text is not None
    # where the literal is no token, its characters or bytes may be
    is_spelled = corpus.meta.separator == "endoftext" and not has_end
    if isinstance(tokenizer, CharTokenizer) and tokenizer.unknown != "byte" and not is_spelled:
        table = np.array([*map(ord, tokenizer.characters), *[END_CODE] * has_end], np.uint32)
        for start in range(0, len(tokens), BLOCK_BYTES):
            report(min(start + BLOCK_BYTES, len(tokens)))
            yield table[tokens[start : start + BLOCK_BYTES]]
        return
    texts = _texts(tokenizer, tokens, report)
    yield from _with_ends(texts) if has_end or is_spelled else map(code_points, texts)


def _texts(tokenizer: Tokenizer, tokens: Tokens, report: Callable[[int], None]) -> Iterator[str]:
    held = 0
    for start in range(0, len(tokens), BLOCK_BYTES):
        stop = min(start + BLOCK_BYTES, len(tokens))
        # a character may go on in the next block, over three tokens at most
        for back in range(4):
            text = tokenizer.decode(tokens[start - held : stop - back])
            if not text.endswith("\ufffd") or stop == len(tokens):
                break
        held = back
        report(stop)
        yield text


def _with_ends(texts: Iterable[str]) -> Iterator[Codes]:
    """Code points of a text; each literal `<|endoftext|>` is one `END_CODE`."""
    held = ""
    for text in texts:
        text = held + text
        # a literal may begin in the last characters, but not inside a whole one
        cut = max(0, len(text) - len(END_OF_TEXT) + 1)
        if (place := text.rfind(END_OF_TEXT)) >= 0:
            cut = max(cut, place + len(END_OF_TEXT))
        held = text[cut:]
        yield _codes(text[:cut])
    yield _codes(held)


def _codes(text: str) -> Codes:
    pieces = text.split(END_OF_TEXT)
    places = np.cumsum([len(piece) for piece in pieces[:-1]], dtype=np.int64)
    return np.insert(code_points("".join(pieces)), places, END_CODE)


def _describe_corpus(corpus: Corpus, max_order: int, progress: Progress | None) -> Description:
    total = sum(corpus.split(split).tokens for split in SPLITS)

    def report(done: int) -> None:
        if progress:
            progress(before + done, 2 * total if max_order else total)

    scan = Scan(corpus.meta.separator)
    before = 0
    for split in SPLITS:
        for codes in _decoded(corpus, split, report):
            scan.feed(codes)
        before += corpus.split(split).tokens
    scan.finish()
    ngrams = None
    if max_order:
        ngrams = ngram_baselines(
            corpus,
            max_order=max_order,
            progress=lambda done, orders: report(total * done // orders),
        )
    source = corpus.meta.source
    nats = corpus.document_nats("val")
    findings = CorpusFindings(
        source=" ".join(str(source[key]) for key in ("kind", "file") if key in source),
        split_tokens={split: corpus.split(split).tokens for split in SPLITS},
        split_documents={split: corpus.split(split).documents for split in SPLITS},
        floor=None if nats is None else float(nats.sum()) / corpus.split("val").tokens,
        ngrams=ngrams,
    )
    starts = np.array([0, 0x80, 0x800, 0x10000, END_CODE])
    by_width = np.add.reduceat(scan.counts, starts)
    size = int(by_width @ [1, 2, 3, 4, len(END_OF_TEXT)])
    return _description(corpus.path, scan, size=size, corpus=findings)


def _description(
    path: Path,
    scan: Scan,
    *,
    size: int,
    file: FileFindings | None = None,
    corpus: CorpusFindings | None = None,
) -> Description:
    codes = np.flatnonzero(scan.counts)
    codes = codes[np.argsort(-scan.counts[codes], kind="stable")]
    alphabet = [
        (END_OF_TEXT if code == END_CODE else chr(code), count)
        for code, count in zip(codes.tolist(), scan.counts[codes].tolist(), strict=True)
    ]
    head = [line for line in scan.head.split("\n") if line.strip()][:_NUM_HEAD_LINES]
    return Description(
        name=path.name or path.resolve().name,
        bytes=size,
        characters=scan.characters + (len(END_OF_TEXT) - 1) * int(scan.counts[END_CODE]),
        tokens=scan.characters,
        lines=scan.lines,
        longest_line=scan.longest_line,
        longest_line_number=scan.longest_line_number,
        first_lines=tuple(line[:_HEAD_LINE_CHARACTERS] for line in head),
        alphabet=tuple(alphabet),
        kinds=_kinds(alphabet),
        misread=scan.misread.places,
        misread_rule=scan.misread.rule,
        misread_examples=tuple(scan.misread.examples.most_common(_NUM_EXAMPLES)),
        documents=_documents(scan),
        file=file,
        corpus=corpus,
    )


def _documents(scan: Scan) -> DocumentsFound:
    documents = scan.documents
    return DocumentsFound(
        separator=scan.separator,
        separators=scan.separators,
        other_marks={mark: count for mark, count in scan.other_marks.items() if count},
        count=documents.count,
        empty=documents.empty if scan.separator == "endoftext" else 0,
        examined=len(documents.lengths),
        copies=len(documents.hashes) - len(np.unique(np.array(documents.hashes, np.uint64))),
        lengths=_lengths(documents.lengths) if documents.lengths else None,
    )


def _lengths(lengths: "array[int]") -> Lengths:
    values = np.sort(np.frombuffer(lengths, np.int64))
    # the value at each share of the way, no mean of two
    tenth, median, ninetieth = (int(values[(len(values) - 1) * k // 10]) for k in (1, 5, 9))
    return Lengths(
        shortest=int(values[0]),
        tenth=tenth,
        median=median,
        ninetieth=ninetieth,
        longest=int(values[-1]),
        mean=float(values.mean()),
    )


def _kinds(alphabet: Iterable[tuple[str, int]]) -> tuple[KindOfCharacter, ...]:
    found: dict[Kind, list[tuple[str, int]]] = {kind: [] for kind in get_args(Kind)}
    for character, count in alphabet:
        if character != END_OF_TEXT and not " " <= character <= "~":
            for kind in _kinds_of(character):
                found[kind].append((character, count))
    return tuple(
        KindOfCharacter(
            kind=kind,
            count=sum(count for _, count in members),
            characters=tuple(character for character, _ in members),
        )
        for kind, members in found.items()
        if members
    )


def _kinds_of(character: str) -> Iterator[Kind]:
    code = ord(character)
    category = unicodedata.category(character)
    is_invisible = category in ("Cf", "Zl", "Zp") or code in _VARIATION_SELECTORS | _FILLERS
    is_kind = {
        "control": category == "Cc" and character not in "\t\n\r",
        "invisible": is_invisible,
        "odd space": category == "Zs",
        "lost in decoding": character == "\ufffd",
        "private use": category == "Co",
        "unassigned": category == "Cn",
        "combining": category.startswith("M") and not is_invisible,
        "right-to-left": unicodedata.bidirectional(character) in ("R", "AL"),
        "emoji": category in ("So", "Sk") and code in _EMOJI,
        "beyond U+FFFF": code > 0xFFFF,
    }
    return (cast(Kind, kind) for kind, is_it in is_kind.items() if is_it)


class _Reader:
    """Code points of UTF-8 that may be damaged; each literal `<|endoftext|>` is one `END_CODE`.

    After the pass its attributes are those of `FileFindings`, and `bytes` is the size.
    """

    def __init__(self, blocks: Iterable[bytes]) -> None:
        self.bytes = self.bad_bytes = 0
        self.first_bad_byte: int | None = None
        self.byte_order_mark = False
        self.wide_encoding: str | None = None
        self._blocks = blocks

    def __iter__(self) -> Iterator[Codes]:
        return _with_ends(self._texts())

    def _texts(self) -> Iterator[str]:
        # a byte that is no UTF-8 becomes one of 128 surrogates, which UTF-8 cannot hold
        decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        is_start = True
        for block in self._with_end():
            start = self.bytes - len(decoder.getstate()[0])
            if not self.bytes:
                self.wide_encoding = wide_encoding(block)
            self.bytes += len(block)
            text = decoder.decode(block, final=not block)
            codes = code_points(text)
            is_bad = (codes >= 0xDC80) & (codes <= 0xDCFF)
            if is_bad.any():
                if self.first_bad_byte is None:
                    before = text[: int(is_bad.argmax())]
                    self.first_bad_byte = start + len(before.encode("utf-8"))
                self.bad_bytes += int(is_bad.sum())
                text = codes[~is_bad].astype("<u4").tobytes().decode("utf-32-le")
            if is_start and text:
                self.byte_order_mark |= text.startswith("\ufeff")
                text = text.lstrip("\ufeff")
                is_start = not text
            yield text

    def _with_end(self) -> Iterator[bytes]:
        yield from self._blocks
        yield b""
