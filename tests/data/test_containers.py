import bz2
import gzip
import io
import lzma
import os
import random
import sys
import tarfile
import tracemalloc
import types
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from resroute.config import UserError
from resroute.data import unpack
from resroute.data.containers import BLOCK_BYTES, joined, open_text, split_member
from resroute.data.tokenizer import END_OF_TEXT

END = END_OF_TEXT.encode()
TEXT = b"".join(b"Line %d of a story, and so on.\n" % i for i in range(10_000))


def zipped(*members: tuple[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, data in members:
            archive.writestr(name, data)
    return file.getvalue()


def zstd(data: bytes) -> bytes:
    result: bytes = pytest.importorskip("zstandard").ZstdCompressor().compress(data)
    return result


def tarred(data: bytes) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        info = tarfile.TarInfo("story.txt")
        info.size = len(data)
        archive.addfile(info, io.BytesIO(data))
    return file.getvalue()


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "story.txt.gz": gzip.compress,
    "story.txt.bz2": bz2.compress,
    "story.txt.xz": lambda data: lzma.compress(data, preset=0),
    "story.txt.zst": zstd,
    "story.zip": lambda data: zipped(("story.txt", data)),
}


def write(folder: Path, name: str, data: bytes) -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def read(path: Path, **options: Any) -> bytes:
    return b"".join(open_text(path, **options))


def outcome(path: Path) -> Any:
    """The text of a file that may be damaged, or `UserError`."""
    try:
        return read(path)
    except UserError as error:
        return UserError if "\n" not in str(error) else error


def refusal(path: Path, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        read(path, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("name", ["story.txt", "story", *PACKERS])
def test_a_text_is_the_same_in_every_container(tmp_path, name) -> None:
    path = write(tmp_path, name, PACKERS.get(name, bytes)(TEXT))
    source = open_text(path)
    assert (source.size, source.done) == (path.stat().st_size, 0)
    for _ in range(2):
        blocks, progress = [], []
        for block in source:
            blocks.append(block)
            progress.append(source.done)
        assert b"".join(blocks) == TEXT
        assert {len(block) for block in blocks[:-1]} == {BLOCK_BYTES}
        assert 0 < len(blocks[-1]) <= BLOCK_BYTES
        assert progress == sorted(progress)
        assert progress[0] > 0
        assert source.done == source.size


@pytest.mark.parametrize("pack", PACKERS.values(), ids=PACKERS)
def test_bytes_say_what_a_file_is(tmp_path, pack) -> None:
    assert read(write(tmp_path, "story.txt", pack(TEXT))) == TEXT
    assert read(write(tmp_path, "empty.txt", pack(b""))) == b""


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"BZh9 begins like one",
        b"PAR1 too",
        b"PK",
        b"(\xb5/",
        b"BZh91AY&SY, and goes on",
        b"PK\x03\x04 caf\xc3\xa9",
        b"PAR1 and PAR1",
        b"x" * 257 + b"ustar is what tar says",
        # cut inside a character where the beginning ends
        b"PK\x03\x04" + b"x" * 507 + "\N{EURO SIGN}".encode(),
    ],
)
def test_a_text_may_begin_like_an_archive(tmp_path, text) -> None:
    assert read(write(tmp_path, "story.txt", text)) == text
    # packed, too
    assert read(write(tmp_path, "story.gz", gzip.compress(text))) == text
    if text.startswith(b"BZh91"):
        assert "is no bzip2 file by its bytes" in refusal(write(tmp_path, "story.bz2", text))


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst", ".zip", ".parquet", ".tar"])
def test_a_page_in_the_place_of_an_archive_is_refused(tmp_path, suffix) -> None:
    path = write(tmp_path, f"story{suffix}", b"<html>404</html>")
    assert "by its bytes (cut off, or another file in its place)" in refusal(path)
    assert "by its bytes" in refusal(write(tmp_path, f"empty{suffix.upper()}", b""))


@pytest.mark.parametrize("name", list(PACKERS)[:-1])
def test_archives_of_several_pieces_are_read_to_the_end(tmp_path, name) -> None:
    pack = PACKERS[name]
    path = write(tmp_path, name, pack(b"one ") + pack(b"") + pack(TEXT))
    assert read(path) == b"one " + TEXT


@pytest.mark.parametrize("size", [1 << 18, 1, 7])
@pytest.mark.parametrize("name", ["story.txt.bz2", "story.txt.xz"])
def test_damage_after_a_stream_is_no_end(tmp_path, monkeypatch, name, size) -> None:
    monkeypatch.setattr(unpack, "_READ_BYTES", size)
    first, second = (PACKERS[name](text) for text in (b"one ", b"two"))
    assert read(write(tmp_path, name, first + second)) == b"one two"
    # the head of the second is damaged, or is none
    for rest in (second[:1] + b"\0" + second[2:], b"garbage", b"g"):
        assert "damaged or cut off (" in refusal(write(tmp_path, name, first + rest))


@pytest.mark.parametrize("size", [1 << 18, 1, 6])
def test_xz_may_have_padding_of_zeros(tmp_path, monkeypatch, size) -> None:
    monkeypatch.setattr(unpack, "_READ_BYTES", size)
    one, two = lzma.compress(b"one "), lzma.compress(b"two")
    path = write(tmp_path, "story.xz", one + bytes(8) + two + bytes(400))
    assert read(path) == b"one two"
    for data in (one + bytes(3), one + bytes(6) + two, bytes(4) + one):
        path.write_bytes(data)
        with pytest.raises(UserError, match=r"damaged or cut off|is no xz file"):
            read(path)


def test_zstd_skips_frames_without_text(tmp_path) -> None:
    skipped = b"\x51\x2a\x4d\x18\x05\0\0\0hello"
    path = write(tmp_path, "story.zst", skipped + zstd(TEXT) + skipped + zstd(b"more"))
    assert read(path) == TEXT + b"more"


@pytest.mark.parametrize("name", PACKERS)
@pytest.mark.parametrize("share", [0.02, 0.5, 0.999])
def test_an_archive_that_is_cut_off_is_refused(tmp_path, name, share) -> None:
    data = PACKERS[name](TEXT)
    path = write(tmp_path, name, data[: int(len(data) * share)])
    message = refusal(path)
    assert message.startswith(f"{path}: damaged or cut off (")
    assert message.endswith("); get the file again")


@pytest.mark.parametrize("name", PACKERS)
def test_damage_is_a_line_or_leaves_the_text(tmp_path, name) -> None:
    rng = random.Random(0)
    data = PACKERS[name](TEXT[:20_000])
    seen: set[Any] = set()
    for _ in range(60):
        broken = bytearray(data)
        for _ in range(rng.randint(1, 3)):
            broken[rng.randrange(8, len(data))] = rng.randrange(256)
        path = write(tmp_path, name, bytes(broken))
        seen.add(outcome(path))
    assert UserError in seen
    if name != "story.txt.zst":
        # all others have checksums
        assert seen <= {UserError, TEXT[:20_000]}


@pytest.mark.parametrize("pack", [bytes, gzip.compress, lambda tar: zipped(("a.tar", tar))])
def test_tar_archives_are_refused(tmp_path, pack) -> None:
    path = write(tmp_path, "stories.bin", pack(tarred(TEXT)))
    assert refusal(path) == (f"{path}: is a tar archive; unpack it and name one of the files in it")


def test_old_tar_archives_are_known_by_name(tmp_path) -> None:
    assert "is a tar archive" in refusal(write(tmp_path, "a.tar.gz", gzip.compress(b"x" * 999)))


@pytest.mark.parametrize("magic", [b"7z\xbc\xaf\x27\x1c", b"Rar!\x1a\x07\x01"])
def test_other_archives_are_refused(tmp_path, magic) -> None:
    assert "archive; unpack it" in refusal(write(tmp_path, "a", magic + bytes(600)))


@pytest.mark.parametrize("pack", PACKERS.values(), ids=PACKERS)
def test_packed_twice_is_refused(tmp_path, pack) -> None:
    path = write(tmp_path, "story.gz", gzip.compress(pack(TEXT)))
    assert "holds another packed file (" in refusal(path)


@pytest.mark.parametrize("name", PACKERS)
def test_unpacking_stops_at_the_limit(tmp_path, name) -> None:
    path = write(tmp_path, name, PACKERS[name](bytes(20_000_000)))
    tracemalloc.start()
    try:
        message = refusal(path, limit=1_000_000)
        assert tracemalloc.get_traced_memory()[1] < 12_000_000
    finally:
        tracemalloc.stop()
    assert "unpacks to more than 1,000,000 bytes" in message
    assert len(read(path, limit=20_000_000)) == 20_000_000


def test_a_plain_file_has_no_limit(tmp_path) -> None:
    assert read(write(tmp_path, "story.txt", TEXT), limit=10) == TEXT


def test_zip_with_one_text_among_other_entries(tmp_path) -> None:
    members = [("folder/", b""), ("folder/a.txt", TEXT), ("__MACOSX/a", b"x"), (".DS_Store", b"x")]
    assert read(write(tmp_path, "a.zip", zipped(*members))) == TEXT


def test_zip_with_several_texts_needs_a_name(tmp_path) -> None:
    path = write(tmp_path, "a.zip", zipped(("b/train.txt", TEXT), ("val.txt", b"val"), ("c", b"c")))
    assert refusal(path) == (
        f"{path}: holds 3 files (b/train.txt, val.txt, c); name one, as in {path}:b/train.txt"
    )
    assert read(Path(f"{path}:b/train.txt")) == TEXT
    assert read(Path(f"{path}:val.txt")) == b"val"
    wrong = Path(f"{path}:vla.txt")
    assert refusal(wrong) == (f"{wrong}: the archive has no file vla.txt (did you mean 'val.txt'?)")


def test_a_member_of_what_is_no_zip(tmp_path) -> None:
    path = write(tmp_path, "a.txt", TEXT)
    assert refusal(Path(f"{path}:b")) == f"{path}:b: a.txt is no zip archive; leave out :b"


def test_a_colon_in_a_name_is_no_member(tmp_path) -> None:
    path = write(tmp_path, "a:b.txt", TEXT)
    assert split_member(path) == (path, "")
    assert split_member(Path(f"{path}:c:d")) == (path, "c:d")
    assert read(path) == TEXT


@pytest.mark.parametrize("name", ["../a.txt", "/a.txt", "b/../../a.txt", "C:\\a.txt", "..\\a.txt"])
def test_zip_names_that_leave_the_folder_are_refused(tmp_path, name) -> None:
    path = write(tmp_path, "a.zip", zipped(("good.txt", TEXT), (name, b"bad")))
    assert "has a file with an unsafe name, " in refusal(path)
    assert "has a file with an unsafe name, " in refusal(Path(f"{path}:good.txt"))


def test_zip_names_stay_on_their_line(tmp_path) -> None:
    path = write(tmp_path, "a.zip", zipped(("a\nb", b"x"), ("c", b"x")))
    assert "holds 2 files ('a\\nb', c)" in refusal(path)


def test_zip_names_that_are_not_the_utf8_they_say_are_a_line(tmp_path) -> None:
    data = zipped(("\xfc.txt", TEXT))
    path = write(tmp_path, "a.zip", data.replace("\xfc.txt".encode(), b"\xff\xff.txt"))
    assert refusal(path).startswith(f"{path}: damaged or cut off (zip: 'utf-8' codec can't decode")


def test_encrypted_zip_is_refused(tmp_path) -> None:
    data = bytearray(zipped(("a.txt", TEXT)))
    # the flags of the entry and of its twin in the directory
    data[6] |= 1
    data[data.index(b"PK\x01\x02") + 8] |= 1
    path = write(tmp_path, "a.zip", bytes(data))
    assert refusal(path) == f"{path}: 'a.txt' is encrypted; unpack it and name the text"


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_zip_methods_without_bounds_are_refused(tmp_path, method) -> None:
    path = write(tmp_path, "a.zip", zipped(("a.txt", TEXT), method=method))
    assert f"packed by a method that is not read here (number {method})" in refusal(path)


def test_zip_without_files_is_refused(tmp_path) -> None:
    assert "holds no file" in refusal(write(tmp_path, "a.zip", zipped(("folder/", b""))))
    assert "holds no file" in refusal(write(tmp_path, "b.zip", zipped()))


@pytest.mark.parametrize("name", ["story.txt", *PACKERS])
@pytest.mark.parametrize(
    ("start", "stop"),
    [(0, 10), (7, 7), (5, None), (BLOCK_BYTES - 1, BLOCK_BYTES + 1), (9**9, None)],
)
def test_a_part_of_a_text(tmp_path, name, start, stop) -> None:
    path = write(tmp_path, name, PACKERS.get(name, bytes)(TEXT))
    source = open_text(path, start=start, stop=stop)
    assert b"".join(source) == TEXT[start:stop]
    assert source.done == source.size


def test_texts_are_joined(tmp_path) -> None:
    sources = [open_text(write(tmp_path, name, p(TEXT))) for name, p in PACKERS.items()]
    source = joined(sources)
    assert source.size == sum(one.size for one in sources)
    progress = []
    data = b""
    for block in source:
        data += block
        progress.append(source.done)
    assert data == TEXT * len(PACKERS)
    assert progress == sorted(progress)
    assert source.done == source.size


@pytest.mark.parametrize("missing", ["zstandard", "pyarrow.parquet"])
def test_a_package_that_is_missing_is_one_line(tmp_path, monkeypatch, write_table, missing) -> None:
    table = write_table(tmp_path / "a.parquet", ["a"])
    packed = write(tmp_path, "a.zst", zstd(b"a"))
    monkeypatch.setitem(sys.modules, missing, None)
    path = packed if missing == "zstandard" else table
    name = missing.partition(".")[0]
    assert refusal(path).endswith(f'needs the package {name}: pip install "resroute[data]"')


def test_zstd_of_the_standard_library_comes_first(tmp_path, monkeypatch) -> None:
    class Reader:
        def __init__(self, raw: Any) -> None:
            self.raw = raw

        def read(self, size: int) -> bytes:
            if self.raw.read(1) == b"!":
                raise OSError("bad frame")
            return self.raw.read(size)

    module = types.SimpleNamespace(ZstdFile=Reader, ZstdError=RuntimeError)
    monkeypatch.setitem(sys.modules, "compression", types.ModuleType("compression"))
    monkeypatch.setitem(sys.modules, "compression.zstd", module)
    assert read(write(tmp_path, "a.zst", b"\x28\xb5\x2f\xfdtext")) == b"\xb5\x2f\xfdtext"


def test_what_is_no_file(tmp_path) -> None:
    write(tmp_path, "story.txt", TEXT)
    assert "is a folder" in refusal(tmp_path)
    assert "there is no folder" in refusal(tmp_path / "no" / "story.txt")
    assert "no such file (did you mean 'story.txt'?)" in refusal(tmp_path / "stroy.txt")
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        assert "is not a regular file" in refusal(tmp_path / "pipe")


def test_a_file_that_cannot_be_read(tmp_path, monkeypatch) -> None:
    path = write(tmp_path, "a.txt", TEXT)

    def fail(*_: object) -> Any:
        raise PermissionError(13, "Permission denied")

    source = open_text(path)
    monkeypatch.setattr(Path, "open", fail)
    with pytest.raises(UserError, match=r"a\.txt: cannot be read \(Permission denied\)"):
        list(source)
    assert refusal(path) == f"{path}: cannot be read (Permission denied)"
