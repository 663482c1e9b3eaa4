import bz2
import gzip
import io
import json
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
from resroute.data import containers, documents
from resroute.data.containers import BLOCK_BYTES, joined, open_text, split_member
from resroute.data.documents import count_rows
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


@pytest.mark.parametrize("text", [b"", b"BZh9 begins like one", b"PAR1 too", b"PK", b"(\xb5/"])
def test_a_text_may_begin_like_an_archive(tmp_path, text) -> None:
    assert read(write(tmp_path, "story.txt", text)) == text


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


def lines(*records: Any) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


STORIES = ["One.\n\nTwo.", "", "Drei \N{EM DASH} \N{GRINNING FACE}", " four\r\n", "five"]
STORIES_TEXT = b"".join(story.encode() + END for story in STORIES if story)


@pytest.mark.parametrize("field", ["text", "story"])
@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstd])
def test_json_lines(tmp_path, field, pack) -> None:
    data = lines(*({"id": 1, field: story} for story in STORIES))
    suffix = {bytes: "", gzip.compress: ".gz", zstd: ".zst"}[pack]
    assert read(write(tmp_path, f"a.JSONL{suffix}", pack(data))) == STORIES_TEXT
    # neither blank lines nor a last line without its end matter
    data = b"\n" + data.replace(b"\n", b"\r\n \n").rstrip()
    assert read(write(tmp_path, f"a.ndjson{suffix}", pack(data))) == STORIES_TEXT


def test_json_lines_in_a_zip(tmp_path) -> None:
    data = lines(*({"text": story, "story": 7} for story in STORIES))
    assert read(write(tmp_path, "a.zip", zipped(("b.jsonl", data)))) == STORIES_TEXT
    assert read(write(tmp_path, "b.zip", zipped(("b.txt", data)))) == data


@pytest.mark.parametrize("block", [1, 3, 64])
def test_json_lines_at_every_block_size(tmp_path, monkeypatch, block) -> None:
    monkeypatch.setattr(containers, "BLOCK_BYTES", block)
    path = write(tmp_path, "a.jsonl", lines(*({"text": story} for story in STORIES)))
    assert read(path) == STORIES_TEXT
    assert read(path, start=2, stop=4) == (STORIES[2].encode() + END + STORIES[3].encode() + END)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{\n", "damaged JSON ("),
        (b"[1]\n", "damaged (not a JSON object); mend or remove the line"),
        (b'{"body": "x"}\n', "has no field text or story; mend or remove the line"),
        (b'{"text": null}\n', "its field text is no text; mend or remove the line"),
        (b'{"story": 5}\n', "its field story is no text; mend or remove the line"),
        (b'{"text": "\xff"}\n', "not UTF-8 at byte 10; mend or remove the line"),
        (b'{"text": "a\\ud800"}\n', "has half a character (a lone surrogate) at place 1 of"),
        (b'{"text": NaN}\n', "damaged JSON (NaN is no number of JSON); mend or remove"),
        (b"[" * 100_000 + b"\n", "damaged JSON (nested too deeply)"),
        (lines({"text": f"a {END_OF_TEXT} b"}), f"has {END_OF_TEXT} inside a document; split it"),
        (lines({"text": "a" * 500}), "is longer than 400 bytes; put one document on a line"),
    ],
)
def test_a_bad_line_is_named(tmp_path, monkeypatch, line, message) -> None:
    if b"a" * 500 in line:
        monkeypatch.setattr(documents, "_LINE_BYTES", 400)
        monkeypatch.setattr(containers, "BLOCK_BYTES", 64)
    path = write(tmp_path, "a.jsonl", lines({"text": "good"}) + b"\n" + line)
    found = refusal(path)
    assert found.startswith(f"{path} line 3: ")
    assert message in found


@pytest.mark.parametrize("column", ["text", "story"])
@pytest.mark.parametrize("kind", ["string", "large_string", "string_view", "dictionary"])
def test_tables(tmp_path, write_table, column, kind) -> None:
    import pyarrow

    texts = pyarrow.array([*STORIES, None, "last"])
    wanted = {"dictionary": pyarrow.dictionary(pyarrow.int32(), pyarrow.string())}
    texts = texts.cast(wanted.get(kind) or getattr(pyarrow, kind)())
    path = write_table(tmp_path / "a.parquet", texts, column=column, other=list(range(7)), rows=3)
    assert read(path) == STORIES_TEXT + b"last" + END
    assert count_rows(path) == 7


def test_a_part_of_a_table(tmp_path, write_table) -> None:
    texts = [f"story {i}" for i in range(1000)]
    path = write_table(tmp_path / "a.parquet", texts, rows=300)
    for start, stop in [
        (0, 1),
        (299, 301),
        (300, 600),
        (0, 600),
        (950, None),
        (5, 5),
        (2000, None),
    ]:
        expected = "".join(text + END_OF_TEXT for text in texts[start:stop]).encode()
        source = open_text(path, start=start, stop=stop)
        assert b"".join(source) == expected, (start, stop)
        assert source.done == source.size


def test_a_table_reports_its_share_of_rows(tmp_path, write_table, monkeypatch) -> None:
    monkeypatch.setattr(documents, "_ROWS", 50)
    monkeypatch.setattr(containers, "BLOCK_BYTES", 100)
    path = write_table(tmp_path / "a.parquet", ["x" * 87] * 1000, rows=200)
    source = open_text(path, start=100, stop=500)
    shares = [source.done / source.size for _ in source]
    assert len(shares) == 400
    assert shares == sorted(shares)
    assert shares[200] == pytest.approx(0.5, abs=0.13)


def test_a_literal_in_a_row_is_refused(tmp_path, write_table) -> None:
    path = write_table(tmp_path / "a.parquet", ["good", END_OF_TEXT, "good"], rows=2)
    assert refusal(path).startswith(f"{path} row 2: has {END_OF_TEXT} inside a document; split it")
    assert refusal(path, start=1).startswith(f"{path} row 2: ")
    assert read(path, start=2) == b"good" + END


def test_rows_outside_the_part_are_not_read(tmp_path, write_table) -> None:
    texts = [f"story {i}" for i in range(100)]
    path = write_table(tmp_path / "a.parquet", texts, rows=50)
    data = path.read_bytes()
    path.write_bytes(data[:4] + bytes(60) + data[64:])
    assert refusal(path).startswith(f"{path}: damaged or cut off (parquet: ")
    assert read(path, start=60) == "".join(text + END_OF_TEXT for text in texts[60:]).encode()


def test_a_large_row_group_is_not_held_in_memory(tmp_path, write_table) -> None:
    import pyarrow

    rng = random.Random(0)
    texts = [rng.randbytes(500).hex() for _ in range(20_000)]
    path = write_table(tmp_path / "a.parquet", texts, rows=20_000)
    assert path.stat().st_size > 10_000_000
    before = pyarrow.total_allocated_bytes()
    held = [pyarrow.total_allocated_bytes() - before for _ in open_text(path)]
    assert max(held) < 5_000_000


def test_a_table_without_text_is_refused(tmp_path, write_table) -> None:
    path = write_table(tmp_path / "a.parquet", ["a"], column="body", words=[1])
    assert (
        refusal(path) == f"{path}: has no column text or story, only body, words; name another file"
    )
    path = write_table(tmp_path / "b.parquet", [[1]])
    assert "its column text is no text (list<" in refusal(path)


def test_a_table_over_the_limit_is_refused(tmp_path, write_table) -> None:
    path = write_table(tmp_path / "a.parquet", ["a" * 1000] * 100)
    assert "unpacks to more than 50,000 bytes" in refusal(path, limit=50_000)


def test_a_table_in_an_archive_is_refused(tmp_path, write_table) -> None:
    data = write_table(tmp_path / "a.parquet", STORIES).read_bytes()
    path = write(tmp_path, "a.parquet.gz", gzip.compress(data))
    assert "holds another packed file (parquet); unpack it and name that one" in refusal(path)


def test_a_table_that_is_cut_off_is_refused(tmp_path, write_table) -> None:
    path = write_table(tmp_path / "a.parquet", STORIES)
    data = path.read_bytes()
    path.write_bytes(data[:-10])
    assert "is no parquet file by its bytes (cut off" in refusal(path)
    # with its middle missing
    path.write_bytes(data[:20] + data[-10:])
    assert refusal(path).startswith(f"{path}: damaged or cut off (parquet: ")


def test_damage_of_a_table_is_a_line(tmp_path, write_table) -> None:
    path = write_table(tmp_path / "a.parquet", [f"story {i}" for i in range(300)], rows=100)
    data, rng = path.read_bytes(), random.Random(0)
    refused = 0
    for _ in range(60):
        broken = bytearray(data)
        broken[rng.randrange(4, len(data) - 8)] = rng.randrange(256)
        path.write_bytes(bytes(broken))
        refused += outcome(path) is UserError
    assert refused > 5


def test_a_file_that_cannot_be_read(tmp_path, monkeypatch) -> None:
    path = write(tmp_path, "a.txt", TEXT)

    def fail(*_: object) -> Any:
        raise PermissionError(13, "Permission denied")

    source = open_text(path)
    monkeypatch.setattr(Path, "open", fail)
    with pytest.raises(UserError, match=r"a\.txt: cannot be read \(Permission denied\)"):
        list(source)
    assert refusal(path) == f"{path}: cannot be read (Permission denied)"
