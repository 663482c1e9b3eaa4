import dataclasses
import json
import re
import sys
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from resroute.config import UserError
from resroute.data import containers, prepare_text, scan
from resroute.data.corpora import Corpus
from resroute.data.describe import Description, describe, render
from resroute.data.ngrams import ngram_baselines
from resroute.data.tokenizer import END_OF_TEXT


def described(folder: Path, data: bytes | str, name: str = "story.txt") -> Description:
    path = folder / name
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    found = describe(path)
    for line in render(found):
        assert len(line) <= 100
        assert line.isprintable()
        assert line == line.rstrip()
    return found


def page(description: Description) -> str:
    return "\n".join(render(description))


# independent account of a text: its documents without the white space around them
def documents(text: str, separator: str) -> list[str]:
    if separator == "endoftext":
        parts = text.split(END_OF_TEXT)
    elif separator == "blank-line":
        parts = re.split(r"\n\s*\n", text)
    else:
        parts = [text]
    return [part.strip() for part in parts if part.strip()]


PIECES = [
    "a", "b", "é", "€", "😀", " ", "\n", "\r", "\r\n", "\n\n", "\ufeff", "\0", END_OF_TEXT,
    "<|endof", "â€™", "Ã©", "</s>", "\u0301",
]  # fmt: skip
BYTES = st.sampled_from([*(piece.encode() for piece in PIECES), b"\xff", b"\xe2\x82", b"\xc3"])


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(BYTES, max_size=5) | st.lists(BYTES, min_size=15, max_size=40),
    st.sampled_from([1, 2, 5, 1 << 18]),
)
def test_counts_equal_an_independent_account(
    tmp_path: Path, pieces: list[bytes], block: int
) -> None:
    data = b"".join(pieces)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(containers, "BLOCK_BYTES", block)
        found = described(tmp_path, data)
    file = found.file
    assert file
    escaped = data.decode("utf-8", "surrogateescape")
    bad = [place for place, c in enumerate(escaped) if "\udc80" <= c <= "\udcff"]
    assert (found.bytes, file.bad_bytes) == (len(data), len(bad))
    first = len(escaped[: bad[0]].encode()) if bad else None
    assert file.first_bad_byte == first
    text = "".join(c for place, c in enumerate(escaped) if place not in set(bad))
    assert file.byte_order_mark == text.startswith("\ufeff")
    text = text.lstrip("\ufeff")
    literals = text.count(END_OF_TEXT)
    assert (found.characters, found.tokens) == (len(text), len(text) - 12 * literals)
    counts = Counter(text.replace(END_OF_TEXT, ""))
    counts[END_OF_TEXT] = literals
    assert dict(found.alphabet) == +counts
    assert [n for _, n in found.alphabet] == sorted((+counts).values(), reverse=True)
    assert file.crlf_line_ends == text.count("\r\n")
    assert file.cr_line_ends == text.count("\r") - text.count("\r\n")
    assert file.nul_bytes == text.count("\0")
    plain = text.replace("\r\n", "\n").replace("\r", "\n")
    lines = plain.replace(END_OF_TEXT, "#").split("\n")
    lines = lines if lines[-1] else lines[:-1]
    longest = max(map(len, lines), default=0)
    assert (found.lines, found.longest_line) == (len(lines), longest)
    if longest:
        assert found.longest_line_number == 1 + [len(line) for line in lines].index(longest)
    assert found.first_lines == tuple(
        [line for line in plain.replace(END_OF_TEXT, "\n").split("\n") if line.strip()][:5]
    )
    assert found.documents.other_marks == +Counter({"</s>": text.count("</s>")})
    check_documents(found, plain)


def check_documents(found: Description, text: str) -> None:
    documents_found = found.documents
    kinds = [kind for kind in ("endoftext", "blank-line") if len(documents(text, kind)) > 1]
    separator = "endoftext" if END_OF_TEXT in text else next(iter(kinds), "none")
    assert documents_found.separator == separator
    expected = documents(text, separator)
    assert documents_found.count == documents_found.examined == len(expected)
    assert documents_found.copies == len(expected) - len(set(expected))
    ended = text.split(END_OF_TEXT)[:-1]
    assert documents_found.empty == sum(not part.strip() for part in ended)
    lengths = sorted(map(len, expected))
    if lengths:
        assert documents_found.lengths
        assert dataclasses.astuple(documents_found.lengths) == (
            lengths[0],
            *(lengths[(len(lengths) - 1) * k // 10] for k in (1, 5, 9)),
            lengths[-1],
            pytest.approx(sum(lengths) / len(lengths)),
        )


def test_documents_by_the_mark(tmp_path: Path) -> None:
    stories = ["one", " two two\n", "", "one", "\n", "three"]
    found = described(tmp_path, END_OF_TEXT.join(stories) + END_OF_TEXT).documents
    assert (found.separator, found.count, found.empty, found.copies) == ("endoftext", 4, 2, 1)
    assert found.lengths
    assert (found.lengths.shortest, found.lengths.median, found.lengths.longest) == (3, 3, 7)
    assert found.lengths.mean == 18 / 4
    assert found.separators == {"endoftext": 4}


@pytest.mark.parametrize(
    ("text", "separator", "separators"),
    [
        ("a\n \nb\n\n\nc", "blank-line", {"blank-line": 3}),
        ("a\r\n\r\nb", "blank-line", {"blank-line": 2}),
        ("a\r\rb", "blank-line", {"blank-line": 2}),
        (f"a\n\nb{END_OF_TEXT}c\n\nd", "endoftext", {"endoftext": 2, "blank-line": 3}),
        ("a\nb\n", "none", {}),
    ],
)
def test_separators_that_occur(
    tmp_path: Path, text: str, separator: str, separators: dict[str, int]
) -> None:
    found = described(tmp_path, text).documents
    assert (found.separator, found.separators) == (separator, separators)


def test_documents_past_the_limit_are_counted_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan, "MAX_DOCUMENTS", 3)
    monkeypatch.setattr(containers, "BLOCK_BYTES", 4)
    found = described(tmp_path, "a\n\na\n\nbb\n\na\n\ncccc\n\n")
    assert (found.documents.count, found.documents.examined) == (5, 3)
    assert found.documents.copies == 1
    assert found.documents.lengths
    assert found.documents.lengths.longest == 2
    assert "(lengths and copies of the first 3)" in page(found)


@pytest.mark.parametrize(
    ("text", "kind", "characters", "count"),
    [
        ("a\7b\7\x85\tc\n", "control", ("\7", "\x85"), 3),
        ("a\u200bb\u202e\ufe0f\u2028\u3164", "invisible", ("\u200b", "\u2028"), 5),
        ("a\u00a0b\u3000c d", "odd space", ("\xa0", "\u3000"), 2),
        ("a\ufffdb", "lost in decoding", ("\ufffd",), 1),
        ("\ue000a", "private use", ("\ue000",), 1),
        ("\uffffa\u0378", "unassigned", ("\u0378", "\uffff"), 2),
        ("e\u0301\u0301\u093f", "combining", ("\u0301", "\u093f"), 3),
        ("\u05d0\u0627", "right-to-left", ("\u05d0", "\u0627"), 2),
        ("😀☀⌚ ♥", "emoji", ("⌚", "☀"), 4),
        ("\U00010400😀", "beyond U+FFFF", ("\U00010400", "😀"), 2),
    ],
)
def test_kinds_of_characters(
    tmp_path: Path, text: str, kind: str, characters: tuple[str, ...], count: int
) -> None:
    found = described(tmp_path, text)
    (members,) = [members for members in found.kinds if members.kind == kind]
    assert members.characters[:2] == characters
    assert members.count == count
    assert f"{kind}: " in page(found)


def test_plain_text_has_no_kinds_and_no_findings(tmp_path: Path) -> None:
    found = described(tmp_path, "One day, a cat sat.\n\nThe end: naïve “words” \u2013 done…\n")
    assert found.kinds == ()
    assert found.misread == 0
    assert "nothing that needs mending" in page(found)


def test_rare_characters(tmp_path: Path) -> None:
    found = described(tmp_path, "a" * 11 + "b" * 10 + "é")
    assert found.rare == (("b", 10), ("é", 1))
    assert "3 distinct characters; 2 of them occur 10 times or less" in page(found)


def misread(text: str) -> str:
    """What UTF-8 becomes where it is read as Windows-1252, whose unused bytes are Latin-1's."""
    return "".join(
        bytes([byte]).decode("latin-1" if byte in b"\x81\x8d\x8f\x90\x9d" else "cp1252")
        for byte in text.encode()
    )


@pytest.fixture(params=["ftfy", "table"])
def rule(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Who judges whether a text is wrongly decoded."""
    if request.param == "ftfy":
        pytest.importorskip("ftfy", reason="ftfy is not installed")
    else:
        monkeypatch.setitem(sys.modules, "ftfy.badness", None)
    return str(request.param)


def test_wrongly_decoded_text_is_counted(tmp_path: Path, rule: str) -> None:
    words = [
        "it\u2019s",
        "“so”",
        "café",
        "naïve",
        "£5",
        "90°",
        "\u2013",
        "…",
        "→",
        "✓",
        "😀",
        "привет",
        "ß",
    ]
    found = described(tmp_path, misread(" ".join(words)))
    assert found.misread_rule == rule
    # “so” has two places
    assert found.misread == len(words) + 1
    assert dict(found.misread_examples)["â€™"] == 1
    assert "14 places look wrongly decoded" in page(found)


def test_right_text_does_not_look_wrongly_decoded(tmp_path: Path, rule: str) -> None:
    text = (
        "Voilà l'été « déjà » passé ! Où êtes-vous ? ÇA : À BIENTÔT… "
        "\u2018Ja\u2019, sagte Öger: »Größe«. "
        "¿Qué? ¡Mañana! 20 °C, 5 € \u2013 3 £; São João é irmã. "
        "Ångström, œuvre, Łódź, привет, 你好 😀 ™"
    )
    found = described(tmp_path, text)
    assert (found.misread, found.misread_rule) == (0, rule)


@pytest.mark.parametrize("block", [1, 2, 3, 7])
def test_wrongly_decoded_places_do_not_depend_on_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: str, block: int
) -> None:
    text = misread("“it\u2019s” ça\né") + "é" * 150 + "Ã©" * 70
    whole = described(tmp_path, text)
    monkeypatch.setattr(containers, "BLOCK_BYTES", block)
    found = described(tmp_path, text)
    assert found.misread == whole.misread > 4
    assert found.misread_examples == whole.misread_examples


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "It is empty."),
        (b" \n\t", "There is no text but white space in it."),
        (b"\xef\xbb\xbfab", "A byte-order mark at the start: --clean drops it."),
        (b"a\r\nb\rc\r", "Line ends: 1 CRLF and 2 CR alone; --clean turns them into LF."),
        (b"a\r\nb", "Line ends: 1 CRLF; --clean turns them into LF."),
        (b"abc " * 9 + b"\0", "1 NUL byte: --clean drops NUL bytes."),
        ("naïve €".encode() + b" \xff ", "1 byte is no UTF-8, at offset 11: convert the file with"),
        (b"a\xff\xe9", "2 bytes are no UTF-8, the first at offset 1: convert the file with iconv"),
        ("ab".encode("utf-16"), "It starts like UTF-16: convert it with iconv -f UTF-16 -t UTF-8."),
        ("ab".encode("utf-32"), "It starts like UTF-32: convert it with iconv -f UTF-32 -t UTF-8."),
        (bytes(range(256)), "It looks like no text: over one byte in twenty is a control"),
        (b"a\n\nb\n\na", "1 document is a copy of an earlier one."),
        ((END_OF_TEXT * 2).encode(), "2 documents are empty."),
        (b"a</s>b</s>", "</s> occurs 2 times; only <|endoftext|> ends a document."),
        ("a\ufffdb".encode(), "1 character lost in an earlier decoding (U+FFFD)."),
    ],
)
def test_dirty_files_are_described(tmp_path: Path, data: bytes, message: str) -> None:
    assert message in page(described(tmp_path, data))


def test_a_page_for_a_person(tmp_path: Path) -> None:
    text = f"One day, a cat sat.\n{END_OF_TEXT}\nThe\tcat\u200b sat \u05d0\u05d1.\n{END_OF_TEXT}"
    expected = """\
story.txt: a text file
size        68 bytes, 64 characters, 40 tokens, 4 lines
            longest line: 19 characters, line 1
look at     Characters that the eye may miss: invisible 1 (see below).
documents   2, told apart by the mark <|endoftext|>
            length: 16 to 19 characters, mean 17.5; 10 / 50 / 90 % up to 16 / 16 / 16
alphabet    19 distinct characters and <|endoftext|>; 20 of them occur 10 times or less
            space 6   a 6       t 4       line end 3          . 2       c 2       e 2       s 2
            <|endoftext|> 2     tab 1     , 1       O 1       T 1       d 1       h 1       n 1
            y 1       U+05D0 1  U+05D1 1  U+200B 1
of these    invisible: once, U+200B (zero width space)
            right-to-left: 2 times, U+05D0 (hebrew letter alef), U+05D1 (hebrew letter bet)
begins      One day, a cat sat.
            The\\tcat\\u200b sat \u05d0\u05d1."""
    assert page(described(tmp_path, text)).split("\n") == expected.split("\n")


def test_wide_characters_and_long_names_fit(tmp_path: Path) -> None:
    found = described(tmp_path, "\u6f22\uff21" * 45 + "\n" + "x" * 300, name="\u6f22" * 60 + ".txt")
    lines = render(found)
    assert lines[0].endswith("...")
    begins = [line for line in lines if line.startswith("begins")]
    # twelve columns of label, 42 of two, the dots
    assert begins == ["begins      " + "\u6f22\uff21" * 21 + "..."]


def test_a_large_alphabet_is_cut(tmp_path: Path) -> None:
    codes = [code for code in range(0x21, 0x20000) if not 0xD800 <= code < 0xE000][:70_000]
    found = described(tmp_path, "".join(map(chr, codes)) + "e" * 20)
    assert len(found.alphabet) == 70_000
    assert found.alphabet[0] == ("e", 21)
    assert "... and 69,950 more" in page(found)
    assert "the rarest:" in page(found)
    assert len(render(found)) < 60


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "line.txt"
    path.write_bytes(b"one line of " * (1 << 20))
    tracemalloc.start()
    try:
        found = describe(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (found.lines, found.longest_line) == (1, 12 << 20)
    # the counts of 1.1 million code points take 9 MB
    assert peak < 24 << 20


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"café {i} «é» 😀\n{END_OF_TEXT}\n" for i in range(100)))
    return prepare_text(path, tmp_path / "tales")


def test_a_corpus_is_described_as_its_file_is(tmp_path: Path, corpus: Corpus) -> None:
    seen: list[tuple[int, int]] = []
    found = describe(corpus.path, progress=lambda *done: seen.append(done))
    of_file = describe(tmp_path / "text.txt")
    differing = {"name", "file", "corpus"}
    for field in dataclasses.fields(Description):
        if field.name not in differing:
            assert getattr(found, field.name) == getattr(of_file, field.name), field.name
    assert (found.name, found.file) == ("tales", None)
    assert found.corpus
    assert found.corpus.source == "text text.txt"
    assert found.corpus.split_documents == {"train": 91, "val": 4, "test": 5}
    assert sum(found.corpus.split_tokens.values()) == found.tokens
    assert found.corpus.ngrams == ngram_baselines(corpus)
    assert found.corpus.floor is None
    assert seen == sorted(seen)
    assert seen[-1] == (2 * found.tokens,) * 2
    text = page(found)
    assert "tales: a corpus made from text text.txt" in text
    assert f"6: {found.corpus.ngrams.nats[-1]:.4f}" in text
    tokens = found.corpus.split_tokens
    assert f"            val: {tokens['val']} tokens in 4 documents\n            test: " in text


@pytest.mark.parametrize("separator", ["blank-line", "none"])
def test_a_corpus_keeps_its_separator(tmp_path: Path, separator: str) -> None:
    path = tmp_path / "text.txt"
    path.write_text("a cat\n\n" * 40)
    made = prepare_text(path, tmp_path / "out", separator=separator)  # type: ignore[arg-type]
    found = describe(made.path, max_order=0)
    assert found.documents.separator == separator
    assert found.documents.count == (40 if separator == "blank-line" else 1)
    assert found.corpus
    assert found.corpus.ngrams is None
    assert "n-gram" not in page(found)


def test_storyworld_shows_its_floor(cheap_corpus: Corpus) -> None:
    found = describe(cheap_corpus.path, max_order=2)
    nats = cheap_corpus.document_nats("val")
    assert nats is not None
    assert found.corpus
    assert found.corpus.floor == pytest.approx(
        np.sum(nats) / cheap_corpus.split("val").tokens, rel=1e-12
    )
    text = page(found)
    assert f"The generator itself loses {found.corpus.floor:.4f}" in text
    assert "lines" not in text.split("\n")[1]
    assert max(map(len, render(found))) <= 100


def test_what_cannot_be_described_is_a_user_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="no such file"):
        describe(tmp_path / "none.txt")
    with pytest.raises(UserError, match="is no prepared corpus"):
        describe(tmp_path)
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{\n')
    with pytest.raises(UserError, match=r"a.jsonl line 2: damaged JSON"):
        describe(tmp_path / "a.jsonl")
    with pytest.raises(UserError, match="max_order must be a whole number of at least 0, got -1"):
        describe(tmp_path, max_order=-1)

    def refuse(*args: object) -> None:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "a.txt").write_text("a")
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UserError, match=r"a.txt: cannot be read \(Permission denied\)"):
        describe(tmp_path / "a.txt")


def test_a_description_is_json(tmp_path: Path) -> None:
    found = described(tmp_path, "a\u0301 b")
    assert json.loads(json.dumps(dataclasses.asdict(found)))["alphabet"] == [
        [" ", 1],
        ["a", 1],
        ["b", 1],
        ["\u0301", 1],
    ]


@pytest.mark.parametrize(
    ("name", "places", "separator", "count"),
    [
        ("dirty-crlf-mojibake.txt", 69, "blank-line", 332),
        ("tinystories-cased-2mb.txt", 0, "endoftext", 2317),
        ("text8-first-1mib.txt", 0, "none", 1),
        ("tinyshakespeare.txt", 0, "blank-line", 7222),
    ],
)
def test_real_files(
    real_data: Path, rule: str, name: str, places: int, separator: str, count: int
) -> None:
    found = describe(real_data / name)
    text = (real_data / name).read_bytes().decode()
    assert (found.misread, found.misread_rule) == (places, rule)
    assert (found.documents.separator, found.documents.count) == (separator, count)
    assert found.characters == len(text)
    assert max(map(len, render(found))) <= 100
    # every sequence of the dirty file begins with this letter
    assert found.misread == text.count("â€")
    check_documents(found, text.replace("\r\n", "\n"))
