"""From a file as it lies on disk, plain or packed, to the bytes of its text.

Nothing is unpacked to disk, and memory does not grow with the file. What a file is, its bytes say:

| kind | what its text is |
| --- | --- |
| plain | its bytes |
| .gz, .bz2, .xz, .zst | what is packed in it |
| .zip | its only file; of several the one that is named, `stories.zip:train.txt` |
| .jsonl, .ndjson (by name; plain or packed) | a document a line, see `documents` |
| .parquet | a document a row, see `documents` |
"""

import codecs
import itertools
import lzma
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Literal

from resroute.config import UserError, suggestion
from resroute.data.documents import damaged, ended, of_lines, of_rows
from resroute.data.unpack import pieces_of, unpack

BLOCK_BYTES = 1 << 18
UNPACKED_LIMIT = 100_000_000_000

Kind = Literal["plain", "gzip", "bzip2", "xz", "zstd", "zip", "parquet", "tar", "7z", "rar"]
Report = Callable[[int], None]
Piece = tuple[str, bytes]

_MAGIC: tuple[tuple[Kind, re.Pattern[bytes]], ...] = (
    ("gzip", re.compile(rb"\x1f\x8b")),
    # after the level stand digits of pi, or of its square root where nothing is packed
    ("bzip2", re.compile(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)")),
    ("xz", re.compile(rb"\xfd7zXZ\0")),
    # a frame, or one to be skipped before it
    ("zstd", re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18")),
    ("zip", re.compile(rb"PK(\x03\x04|\x05\x06|\x07\x08)")),
    ("parquet", re.compile(rb"PAR1")),
    ("tar", re.compile(rb".{257}ustar", re.DOTALL)),
    ("7z", re.compile(rb"7z\xbc\xaf\x27\x1c")),
    ("rar", re.compile(rb"Rar!\x1a\x07")),
)
_HEAD_BYTES = 512
_NAMES: dict[str, Kind] = {
    ".gz": "gzip",
    ".bz2": "bzip2",
    ".xz": "xz",
    ".zst": "zstd",
    ".zstd": "zstd",
    ".zip": "zip",
    ".parquet": "parquet",
    ".tar": "tar",
    ".tgz": "tar",
    ".7z": "7z",
    ".rar": "rar",
}
_REFUSED: tuple[Kind, ...] = ("tar", "7z", "rar")
_LINES = (".jsonl", ".ndjson")
_DAMAGE = (
    EOFError,
    OSError,
    zlib.error,
    lzma.LZMAError,
    zipfile.BadZipFile,
    # of names in an archive
    UnicodeDecodeError,
    # what zipfile says of sizes and features that no sound archive has
    struct.error,
    NotImplementedError,
    OverflowError,
)


class ByteSource:
    """The bytes of a text; each iteration is a pass over it from the start.

    A pass yields blocks of `BLOCK_BYTES`, the last one shorter and none empty.

    Args:
        path: The file, for messages.
        size: Its bytes as it lies on disk.
        read: Starts a pass: pieces of any size, each after the words that name its line or row
            where it is a document, else an empty string. It is given where to report how many bytes
            of the file on disk are behind.

    Attributes:
        path: As given.
        size: As given.
        done: How many bytes of `size` the latest pass has behind it; of a table its share of rows.
    """

    def __init__(self, path: Path, size: int, read: Callable[[Report], Iterator[Piece]]) -> None:
        self.path = path
        self.size = size
        self.done = 0
        self._read = read

    def __iter__(self) -> Iterator[bytes]:
        yield from _in_blocks(piece for _, piece in self.pieces())

    def pieces(self) -> Iterator[Piece]:
        """A pass by pieces of any size, each after the words that name its line or row, if any."""
        self.done = 0
        yield from self._read(self._report)
        self.done = self.size

    def _report(self, done: int) -> None:
        self.done = done


def open_text(
    path: Path, *, start: int = 0, stop: int | None = None, limit: int = UNPACKED_LIMIT
) -> ByteSource:
    """The text of a file, whatever it is packed in, or a part of it.

    The part is counted in documents where the file holds documents (every row, every line that is
    not blank), else in bytes.

    Args:
        path: The file, or `archive.zip:member` for one of several files in an archive.
        start: Where the part begins.
        stop: Where it ends; None is the end of the file.
        limit: The most bytes to unpack; a plain file has no limit.

    Raises:
        UserError: No such file, or a kind that is not read. In a pass: a file that is damaged, cut
            off, encrypted or over the limit, or a document that cannot be used.
    """
    file, member = split_member(path)
    check_is_file(file)
    try:
        size = file.stat().st_size
        kind = _kind_of_file(file)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    if member and kind != "zip":
        raise UserError(f"{path}: {file.name} is no zip archive; leave out :{member}")
    _refuse(path, kind)

    def read(report: Report) -> Iterator[Piece]:
        if kind == "parquet":
            rows = of_rows(path, start, stop, lambda row, rows: report(size * row // max(1, rows)))
            count = _counter(path, limit)
            return ((where, count(text)) for where, text in ended(rows))
        return _stream(path, kind, slice(start, stop), limit, report)

    return ByteSource(path, size, read)


def joined(sources: list[ByteSource]) -> ByteSource:
    """Texts one after the other, as one; there is at least one."""

    def read(report: Report) -> Iterator[Piece]:
        before = 0
        for source in sources:
            for piece in source.pieces():
                report(before + source.done)
                yield piece
            before += source.size

    return ByteSource(sources[0].path, sum(source.size for source in sources), read)


def split_member(path: Path) -> tuple[Path, str]:
    """The file and the member that `archive.zip:member` names; no member is an empty string."""
    text = path.as_posix()
    places = [] if path.exists() else [i for i, letter in enumerate(text) if letter == ":"]
    for place in places:
        if (file := Path(text[:place])).is_file():
            return file, text[place + 1 :]
    return path, ""


def check_is_file(path: Path) -> None:
    """Raise a UserError unless `path` is a regular file."""
    if path.is_file():
        return
    if path.is_dir():
        raise UserError(f"{path}: is a folder; name a text file in it")
    if path.exists():
        raise UserError(f"{path}: is not a regular file; copy the text into one")
    if not path.parent.is_dir():
        raise UserError(f"{path}: there is no folder {path.parent}")
    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        names = []
    raise UserError(f"{path}: no such file{suggestion(path.name, names)}")


def _kind_of_file(path: Path) -> Kind:
    with path.open("rb") as file:
        kind = _kind_of(file.read(_HEAD_BYTES))
        if kind == "parquet":
            # a text may begin like one; only a table also ends like one
            file.seek(-4, 2)
            kind = "parquet" if file.read() == b"PAR1" else "plain"
    named = _NAMES.get(path.suffix.lower(), "plain")
    if kind == "plain" and named != "plain":
        raise UserError(
            f"{path}: is no {named} file by its bytes (cut off, or another file in its place); "
            "get it again, or name it .txt if it is text"
        )
    return kind


def _kind_of(head: bytes) -> Kind:
    if _is_text(head[:_HEAD_BYTES]):
        return "plain"
    return next((kind for kind, magic in _MAGIC if magic.match(head)), "plain")


def _is_text(head: bytes) -> bool:
    """Whether bytes, which may end inside a character, are UTF-8 without NUL.

    Archives never are: behind their first bytes, which a text may begin with, come others.
    """
    try:
        return "\0" not in codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False


def _refuse(path: Path, kind: Kind) -> None:
    if kind in _REFUSED:
        raise UserError(f"{path}: is a {kind} archive; unpack it and name one of the files in it")


def _stream(path: Path, kind: Kind, part: slice, limit: int, report: Report) -> Iterator[Piece]:
    """A pass over a file that is not a table."""
    file, member = split_member(path)
    with _damage(path, kind), file.open("rb") as raw:
        name, pieces = file.name, pieces_of(raw, BLOCK_BYTES)
        if kind != "plain":
            name, pieces = unpack(path, raw, kind, file.stem, member)
            pieces = map(_counter(path, limit), pieces)
        blocks = _in_blocks(_reporting(pieces, raw, report))
        if kind != "plain":
            head = next(blocks, b"")
            _check_packed(path, name, head)
            blocks = itertools.chain([head], blocks)
        if PurePosixPath(name).suffix.lower() in _LINES:
            documents = itertools.islice(of_lines(path, blocks), part.start, part.stop)
            yield from ended(documents)
        else:
            yield from (("", block) for block in _cut(blocks, part))


def _reporting(pieces: Iterator[bytes], raw: BinaryIO, report: Report) -> Iterator[bytes]:
    for piece in pieces:
        report(raw.tell())
        yield piece


def _check_packed(path: Path, name: str, head: bytes) -> None:
    kind = _kind_of(head)
    if kind == "plain" and PurePosixPath(name).suffix.lower() == ".tar":
        kind = "tar"
    _refuse(path, kind)
    if kind != "plain":
        raise UserError(f"{path}: holds another packed file ({kind}); unpack it and name that one")


def _cut(blocks: Iterator[bytes], part: slice) -> Iterator[bytes]:
    """The bytes of `part`; nothing after them is read."""
    place = 0
    for block in blocks:
        yield block[
            max(0, part.start - place) : None if part.stop is None else max(0, part.stop - place)
        ]
        place += len(block)
        if part.stop is not None and place >= part.stop:
            return


def _counter(path: Path, limit: int) -> Callable[[bytes], bytes]:
    """Counts pieces, which it gives back, until they are more than `limit` bytes."""
    unpacked = 0

    def count(piece: bytes) -> bytes:
        nonlocal unpacked
        unpacked += len(piece)
        if unpacked > limit:
            raise UserError(
                f"{path}: unpacks to more than {limit:,} bytes; "
                "if that is right, unpack it yourself and name the text"
            )
        return piece

    return count


def _in_blocks(pieces: Iterator[bytes]) -> Iterator[bytes]:
    held = bytearray()
    for piece in pieces:
        if not held and len(piece) == BLOCK_BYTES:
            yield piece
            continue
        held += piece
        while len(held) >= BLOCK_BYTES:
            yield bytes(held[:BLOCK_BYTES])
            del held[:BLOCK_BYTES]
    if held:
        yield bytes(held)


@contextmanager
def _damage(path: Path, kind: Kind) -> Iterator[None]:
    try:
        yield
    except _DAMAGE as error:
        raise damaged(path, kind, error) from None
