"""What `data prepare` and `data describe` make of dirty text, kind by kind, and what they say."""

import json
import re
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

import resroute as rr
from resroute.data import SPLITS, Corpus, containers, prepare_text, text

STORY = "One fine day.\nThe end.\n" * 20


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def decoded(corpus: Corpus) -> str:
    return "".join(corpus.tokenizer.decode(corpus.tokens(split)) for split in SPLITS)


def prepared(run: Any, data: bytes, *options: str) -> tuple[str, Corpus]:
    """What the command prints, and what it makes."""
    Path("tale.txt").write_bytes(data)
    outcome = run("data", "prepare", "tale.txt", *options)
    assert (outcome.code, outcome.err) == (0, "")
    return outcome.out, rr.open_corpus(Path("data/tale"))


def refusal(run: Any, name: str, data: bytes) -> str:
    Path(name).write_bytes(data)
    outcome = run("data", "prepare", name)
    assert (outcome.code, outcome.out) == (2, "")
    assert not Path("data").exists()
    return str(outcome.err.removesuffix("\n"))


def described(run: Any, name: str = "tale.txt") -> str:
    """The page as one line."""
    outcome = run("data", "describe", name)
    assert (outcome.code, outcome.err) == (0, "")
    return " ".join(outcome.out.split())


CLEANED = {
    "byte-order mark": (
        "\ufeff" + STORY,
        "starts with a byte-order mark; --clean drops it",
        "1 byte order marks",
        "A byte-order mark at the start: --clean drops it.",
    ),
    "CRLF": (
        STORY.replace("\n", "\r\n"),
        "line 1 ends in CRLF; --clean turns CRLF and CR into LF",
        "40 crlf line ends",
        "Line ends: 40 CRLF; --clean turns them into LF.",
    ),
    "CR": (
        STORY.replace("y.\n", "y.\r"),
        "line 1 ends in CR; --clean turns CRLF and CR into LF",
        "20 cr line ends",
        "Line ends: 20 CR alone; --clean turns them into LF.",
    ),
    "NUL": (
        STORY.replace("fine", "fi\0ne"),
        "holds a NUL byte at offset 6; --clean drops NUL bytes",
        "20 nul bytes",
        "20 NUL bytes: --clean drops NUL bytes.",
    ),
}


@pytest.mark.parametrize("kind", CLEANED)
def test_what_can_be_cleaned_is_refused_counted_and_cleaned(run: Any, kind: str) -> None:
    dirty, refused, cleaned, found = CLEANED[kind]
    assert refusal(run, "tale.txt", dirty.encode()) == f"resroute: tale.txt: {refused}"
    out, corpus = prepared(run, dirty.encode(), "--clean")
    assert out.splitlines()[-1] == f"  cleaned: {cleaned}"
    assert decoded(corpus) == STORY
    assert found in described(run)


BAD = {
    b"caf\xe9 ": (
        "not UTF-8 at byte 463 (0xe9)\nconvert it: iconv -f LATIN1 -t UTF-8 tale.txt > utf8.txt",
        "1 byte is no UTF-8, at offset 463: convert the file with iconv",
    ),
    # what Java and some databases write for characters past U+FFFF
    b"\xed\xa0\xbd\xed\xb8\x80": (
        "not UTF-8 at byte 460: half of a character (a surrogate), as CESU-8 has it\nconvert it",
        "6 bytes are no UTF-8, the first at offset 460: convert the file with iconv",
    ),
    b"\xc0\xaf": (
        "not UTF-8 at byte 460 (0xc0)\nconvert it: iconv",
        "2 bytes are no UTF-8, the first at offset 460: convert the file with iconv",
    ),
}


@pytest.mark.parametrize("bad", BAD)
def test_what_is_no_utf8_is_refused_with_its_place(run: Any, bad: bytes) -> None:
    refused, found = BAD[bad]
    error = refusal(run, "tale.txt", STORY.encode() + bad + STORY.encode())
    assert error.startswith(f"resroute: tale.txt: {refused}")
    assert error.count("\n") == 1
    assert found in described(run)


def test_half_characters_in_lines_and_rows_are_named(run: Any) -> None:
    lines = [json.dumps({"text": text}) for text in ("good", "a\ud800b")]
    error = refusal(run, "tale.jsonl", "\n".join(lines).encode())
    assert error == (
        "resroute: tale.jsonl line 2: has half a character (a lone surrogate) at place 1 of the "
        "document; mend or remove it"
    )
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    texts = arrow.array([b"good", b"a\xed\xa0\x80b"] * 2, arrow.binary()).view(arrow.string())
    parquet.write_table(arrow.table({"text": texts}), "table.parquet")
    outcome = run("data", "prepare", "table.parquet")
    assert outcome.code == 2
    assert outcome.err == (
        "resroute: table.parquet row 2: not UTF-8 at byte 1; mend or remove the row\n"
    )


def test_both_halves_of_a_character_in_a_line_are_one(run: Any) -> None:
    lines = [rf'{{"text": "{i} a\ud83d\ude00"}}' for i in range(100, 130)]
    Path("tale.jsonl").write_text("\n".join(lines))
    assert run("data", "prepare", "tale.jsonl").code == 0
    found = decoded(rr.open_corpus(Path("data/tale")))
    assert found == "".join(f"{i} a\U0001f600<|endoftext|>" for i in range(100, 130))


def test_wrongly_decoded_quotes_are_reported_and_mended(run: Any) -> None:
    right = "\u201cIt\u2019s Zo\u00eb\u2019s,\u201d he said. \u201cNo!\u201d\n"
    # the last byte of a closing quotation mark is nothing in Windows-1252
    wrong = right.encode().replace(b"\x9d", b"").decode("cp1252")
    out, corpus = prepared(run, (wrong * 20).encode())
    assert "cleaned" not in out
    assert decoded(corpus) == wrong * 20
    assert "120 places look wrongly decoded" in described(run)
    assert run("data", "prepare", "tale.txt", "--repair", "--out", "data/mended").out.endswith(
        "  cleaned: 20 repaired lines\n"
    )
    assert decoded(rr.open_corpus(Path("data/mended"))) == right * 20


def test_marks_directions_and_emoji_are_kept(run: Any) -> None:
    line = "e\u0301 \u05e9\u05dc\u05d5\u05dd \u0627\u0644 \U0001f469\u200d\U0001f467 \u202ex\n"
    out, corpus = prepared(run, (line * 30).encode())
    assert out.startswith("data/tale: 15 symbols, separator none\n")
    assert "cleaned" not in out
    assert decoded(corpus) == line * 30
    page = described(run)
    assert "combining: 30 times, U+0301 (combining acute accent)" in page
    assert "right-to-left: 180 times, " in page
    assert "emoji: 60 times, U+1F467 (girl), U+1F469 (woman)" in page
    assert "invisible: 60 times, " in page


def test_seventy_thousand_characters_take_32_bits(run: Any) -> None:
    codes = [code for code in range(0x21, 0x20000) if not 0xD800 <= code < 0xE000]
    letters = "".join(chr(code) for code in codes if not chr(code).isspace())[:70_000]
    out, corpus = prepared(run, (letters * 2).encode())
    assert out.startswith("data/tale: 70000 symbols, separator none\n")
    assert corpus.meta.dtype == "uint32"
    assert corpus.tokens("train")[69_999] == 69_999
    assert decoded(corpus) == letters * 2


@pytest.mark.parametrize("data", [b" ", b" \n\n\t", "\u3000\n\u2028\u00a0".encode(), b"\n" * 999])
def test_white_space_is_no_text(run: Any, data: bytes) -> None:
    assert refusal(run, "tale.txt", data) == (
        "resroute: tale.txt: holds no text but white space; name a file with text in it"
    )
    assert "There is no text but white space in it." in described(run)


@pytest.mark.parametrize(
    ("stories", "says"),
    [
        (["one", "two", " one ", "three", "two\n"], "2 documents are copies of an earlier one"),
        (["one", "two", "three", "four", "one"], "1 document is a copy of an earlier one"),
        (["one", "two", "three", "four", "five"], ""),
    ],
)
def test_copies_of_documents_are_counted(run: Any, stories: list[str], says: str) -> None:
    filler = [f"story {i}" for i in range(60)]
    out, _ = prepared(run, "".join(f"{s}<|endoftext|>\n" for s in [*stories, *filler]).encode())
    last = out.splitlines()[-1]
    assert last == f"  {says}" if says else "copies" not in out and "copy" not in out
    page = described(run)
    assert f"{says}." in page if says else "nothing that needs mending" in page


def test_a_long_line_is_mended_in_parts(
    folder: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "_LINE_CHARACTERS", 1000)
    monkeypatch.setattr(containers, "BLOCK_BYTES", 300)
    line = "Itâ€™s a cafÃ©. Is itâ€\x9d "
    out, corpus = prepared(run, (line * 400).encode(), "--repair", "--out", "data/tale")
    assert decoded(corpus) == "It\u2019s a caf\u00e9. Is it\u201d " * 400
    parts = re.search(r"cleaned: (\d+) repaired lines", out)
    assert parts
    assert 400 * len(line) / 1300 < int(parts[1]) <= 400 * len(line) / 1000


@pytest.mark.parametrize("megabytes", [24, pytest.param(200, marks=pytest.mark.slow)])
def test_memory_does_not_grow_with_a_line(folder: Path, megabytes: int) -> None:
    source = folder / "line.txt"
    piece = "It\u2019s a caf\u00e9, on one line. ".encode() * 30_000
    with source.open("wb") as file:
        while file.tell() < megabytes * 1_000_000:
            file.write(piece)
    tracemalloc.start()
    try:
        corpus = prepare_text(source, folder / "line")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 << 20
    assert sum(corpus.split(split).tokens for split in SPLITS) * len(piece) == (
        source.stat().st_size * len(piece.decode())
    )
