import gzip
import io
import json
import random
import zipfile
from pathlib import Path
from typing import Any

import pytest

from resroute.config import UserError
from resroute.data import containers, documents
from resroute.data.containers import joined, open_text
from resroute.data.documents import count_rows
from resroute.data.text import survey_text
from resroute.data.tokenizer import END_OF_TEXT

END = END_OF_TEXT.encode()


def zipped(*members: tuple[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members:
            archive.writestr(name, data)
    return file.getvalue()


def zstd(data: bytes) -> bytes:
    result: bytes = pytest.importorskip("zstandard").ZstdCompressor().compress(data)
    return result


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


def test_a_mark_before_the_first_line_is_no_part_of_it(tmp_path) -> None:
    mark = b"\xef\xbb\xbf"
    assert read(write(tmp_path, "a.jsonl", mark + lines({"text": "one"}))) == b"one" + END
    # only there
    path = write(tmp_path, "b.jsonl", lines({"text": "one"}) + mark + lines({"text": "two"}))
    assert refusal(path).startswith(f"{path} line 2: damaged JSON (Unexpected UTF-8 BOM")


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


def test_a_table_with_two_columns_of_one_name_is_refused(tmp_path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = arrow.Table.from_arrays([arrow.array(["a"]), arrow.array(["b"])], ["text", "text"])
    path = tmp_path / "a.parquet"
    parquet.write_table(table, path)
    assert refusal(path) == f"{path}: has several columns text; keep one of them"


DIRT = {
    "\n\nfour\r\n five": "line 3 ends in CRLF; --clean turns CRLF and CR into LF",
    "four\rfive": "line 1 ends in CR; --clean turns CRLF and CR into LF",
    "four \0": "holds a NUL byte at offset 5; --clean drops NUL bytes",
}


@pytest.mark.parametrize("text", DIRT)
def test_what_a_text_may_not_have_is_placed_in_its_line_or_row(tmp_path, write_table, text) -> None:
    texts = ["one\n", "", "three", text, text]
    path = write(tmp_path, "a.jsonl", b"\n" + lines(*({"text": one} for one in texts)))
    table = write_table(tmp_path / "a.parquet", texts, rows=2)
    for source, where in ((path, "line 5"), (table, "row 4")):
        with pytest.raises(UserError) as caught:
            survey_text(joined([open_text(source)]))
        assert str(caught.value) == f"{source} {where}: {DIRT[text]}"


def test_a_mark_in_the_first_document_is_placed(tmp_path) -> None:
    path = write(tmp_path, "a.jsonl", b"\n" + lines({"text": "\ufeffone"}))
    with pytest.raises(UserError, match=r"a.jsonl line 2: starts with a byte-order mark; --clean"):
        survey_text(path)


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
