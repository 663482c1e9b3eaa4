"""What is packed in a file, in pieces of any size: .gz, .bz2, .xz, .zst and the members of .zip."""

import bz2
import gzip
import importlib
import lzma
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, BinaryIO

from resroute.config import UserError, suggestion
from resroute.data.documents import import_extra

_READ_BYTES = 1 << 18
# 4 bytes of zstd can stand for 128 KB: what is fed at once makes 8 MB at most
_ZSTD_FEED_BYTES = 1 << 8


def unpack(
    path: Path, raw: BinaryIO, kind: str, stem: str, member: str
) -> tuple[str, Iterator[bytes]]:
    """The name of the file that is packed, and its bytes.

    Args:
        path: The archive, for messages.
        raw: The archive, open at its start.
        kind: "gzip", "bzip2", "xz", "zstd" or "zip".
        stem: The archive's name without its suffix.
        member: The file in a zip archive; empty for its only one.

    Raises:
        UserError: An archive without a file that can be read, or of several files without `member`.
            Damage is what the readers raise.
    """
    if kind == "zip":
        archive = zipfile.ZipFile(raw)
        info = _only_member(path, archive, member)
        return info.filename, pieces_of(archive.open(info))
    if kind == "gzip":
        return stem, pieces_of(gzip.GzipFile(fileobj=raw))
    if kind == "bzip2":
        return stem, _unpack_streams(raw, bz2.BZ2Decompressor, lambda data: data)
    if kind == "xz":
        new = partial(lzma.LZMADecompressor, lzma.FORMAT_XZ)
        return stem, _unpack_streams(raw, new, partial(_without_padding, raw))
    return stem, _unpack_zstd(raw)


def pieces_of(stream: Any, size: int = _READ_BYTES) -> Iterator[bytes]:
    """What is left of a stream."""
    return iter(lambda: stream.read(size), b"")


def _unpack_streams(
    raw: BinaryIO, new: Callable[[], Any], after: Callable[[bytes], bytes]
) -> Iterator[bytes]:
    """Streams of bzip2 or xz, one after the other, of which `after` leaves what begins the next."""
    # the files of the standard library take what they cannot read after a stream for its end
    data = raw.read(_READ_BYTES)
    while data:
        stream = new()
        while not stream.eof:
            if stream.needs_input and not data and not (data := raw.read(_READ_BYTES)):
                raise EOFError("the end of a stream is missing")
            yield stream.decompress(data, _READ_BYTES)
            data = b""
        data = after(stream.unused_data or raw.read(_READ_BYTES))


def _without_padding(raw: BinaryIO, data: bytes) -> bytes:
    # between streams of xz, and after them, words of four zeros may stand
    zeros = 0
    while data and not data.strip(b"\0"):
        zeros += len(data)
        data = raw.read(_READ_BYTES)
    rest = data.lstrip(b"\0")
    if (zeros + len(data) - len(rest)) % 4:
        raise lzma.LZMAError("bytes after a stream are no padding")
    return rest


def _unpack_zstd(raw: BinaryIO) -> Iterator[bytes]:
    try:
        # since Python 3.14
        zstd: Any = importlib.import_module("compression.zstd")
    except ImportError:
        zstd = import_extra("zstandard", "reading .zst")
        pieces = _zstd_frames(raw, zstd)
    else:
        pieces = pieces_of(zstd.ZstdFile(raw))
    try:
        yield from pieces
    except zstd.ZstdError as error:
        raise OSError(str(error)) from None


def _zstd_frames(raw: BinaryIO, zstandard: Any) -> Iterator[bytes]:
    # its own stream reader takes a file that is cut off for a whole one
    frame = None
    while data := raw.read(_ZSTD_FEED_BYTES):
        while data:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            yield frame.decompress(data)
            data, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    if frame:
        raise EOFError("the end of a frame is missing")


def _only_member(path: Path, archive: zipfile.ZipFile, member: str) -> zipfile.ZipInfo:
    infos = [info for info in archive.infolist() if not info.is_dir()]
    for info in infos:
        if _leaves_folder(info.filename):
            raise UserError(
                f"{path}: has a file with an unsafe name, {info.filename!a}; "
                "unpack it with care and name the text"
            )
    infos = [info for info in infos if not _is_system_file(info.filename)]
    names = [info.filename for info in infos]
    shown = [name if name.isprintable() else ascii(name) for name in names]
    chosen = [info for info in infos if not member or info.filename == member]
    if not infos:
        raise UserError(f"{path}: holds no file; name another archive")
    if not chosen:
        raise UserError(f"{path}: the archive has no file {member}{suggestion(member, names)}")
    if len(chosen) > 1:
        listed = ", ".join(shown[:5]) + (", ..." if len(names) > 5 else "")
        raise UserError(
            f"{path}: holds {len(names)} files ({listed}); name one, as in {path}:{shown[0]}"
        )
    info = chosen[0]
    if info.flag_bits & 1:
        raise UserError(f"{path}: {info.filename!a} is encrypted; unpack it and name the text")
    # the other methods have no bound on what they make of a few bytes
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise UserError(
            f"{path}: {info.filename!a} is packed by a method that is not read here "
            f"(number {info.compress_type}); unpack it and name the text"
        )
    return info


def _leaves_folder(name: str) -> bool:
    posix, windows = PurePosixPath(name), PureWindowsPath(name)
    return posix.is_absolute() or bool(windows.anchor) or ".." in (*posix.parts, *windows.parts)


def _is_system_file(name: str) -> bool:
    # what file managers add
    path = PurePosixPath(name)
    return path.parts[:1] == ("__MACOSX",) or path.name in (".DS_Store", "Thumbs.db")
