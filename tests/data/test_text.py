import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resroute.config import UserError
from resroute.data import containers
from resroute.data import text as text_module
from resroute.data.text import (
    Separator,
    TextReader,
    document_starts,
    pieces_of,
    survey_text,
    tail_of,
)
from resroute.data.tokenizer import END_OF_TEXT


def write(folder: Path, data: bytes | str) -> Path:
    path = folder / "story.txt"
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


@pytest.mark.parametrize("block", [1, 2, 3, 5, 7, 1 << 18])
def test_cleaning_is_the_same_at_every_block_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    data = f"\ufeffé\r\n\r\r\nb\0\r\0\n😀{END_OF_TEXT}\rc\r\n<|endof\ufeff<\r".encode()
    path = write(tmp_path, data)
    monkeypatch.setattr(containers, "BLOCK_BYTES", block)
    reader = TextReader(path, clean=True)
    pieces = list(reader)
    assert "".join(pieces) == f"é\n\n\nb\n😀{END_OF_TEXT}\nc\n<|endof\ufeff<\n"
    assert sum(piece.count(END_OF_TEXT) for piece in pieces) == 1
    assert vars(reader.cleaned) == {
        "byte_order_marks": 1,
        "crlf_line_ends": 4,
        "cr_line_ends": 3,
        "nul_bytes": 2,
        "repaired_lines": 0,
    }
    assert reader.bytes == len(data)
    assert reader.sha256 == hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("block", [1, 4, 64])
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\xef\xbb\xbfab", "starts with a byte-order mark; --clean drops it"),
        (b"ab\ncd\nef\r\ngh\r\n", "line 3 ends in CRLF; --clean turns CRLF and CR into LF"),
        (b"ab\ncd\ref\r\n", "line 2 ends in CR; --clean turns CRLF and CR into LF"),
        (b"ab\ncd\r", "line 2 ends in CR;"),
        (b"abcdefghijklmnopqrstuvwxyz\0", "holds a NUL byte at offset 26; --clean drops NUL bytes"),
        (b"caf\xe9 au lait", r"not UTF-8 at byte 3 \(0xe9\)\nconvert it: iconv -f LATIN1 -t UTF-8"),
        ("naïve €".encode() + b" \xff", r"not UTF-8 at byte 11 \(0xff\)"),
        ("ab €".encode()[:-1], r"middle of a UTF-8 character\ncut it there: head -c 3 "),
        ("ab".encode("utf-16"), "is UTF-16, not UTF-8\nconvert it: iconv -f UTF-16 -t UTF-8"),
        ("ab".encode("utf-32"), "is UTF-32, not UTF-8\nconvert it: iconv -f UTF-32 -t UTF-8"),
        (b"\0\0\xfe\xff\0\0\0a", "is UTF-32, not UTF-8\nconvert it: iconv -f UTF-32 -t UTF-8"),
        (bytes(range(256)), "looks binary .27 control bytes in the first 256."),
        (b"", "is empty"),
        (b" \n\t\n", "holds no text but white space"),
        (b"aaaa", "holds only one distinct character, 'a'"),
    ],
)
def test_unfit_files_are_refused_by_name_place_and_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes, message: str, block: int
) -> None:
    monkeypatch.setattr(containers, "BLOCK_BYTES", block)
    path = write(tmp_path, data)
    with pytest.raises(UserError, match=message) as caught:
        survey_text(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert str(caught.value).count("\n") <= 1


@pytest.mark.parametrize("block", [1, 4, 64])
def test_no_mark_is_left_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(containers, "BLOCK_BYTES", block)
    reader = TextReader(write(tmp_path, "\ufeff\ufeff\ufeffa\ufeffb"), clean=True)
    assert "".join(reader) == "a\ufeffb"
    assert reader.cleaned.byte_order_marks == 3


@pytest.mark.parametrize("data", [b"\xef\xbb\xbf", b"\xef\xbb\xbf \r\n"])
def test_nothing_left_after_cleaning_is_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(UserError, match="no text but white space"):
        survey_text(write(tmp_path, data), clean=True)


def test_missing_files_and_folders(tmp_path: Path) -> None:
    write(tmp_path, "ab")
    with pytest.raises(UserError, match=r"stroy.txt: no such file \(did you mean 'story.txt'\?\)"):
        survey_text(tmp_path / "stroy.txt")
    with pytest.raises(UserError, match=f"there is no folder {tmp_path / 'no'}"):
        survey_text(tmp_path / "no" / "story.txt")
    with pytest.raises(UserError, match="is a folder; name a text file in it"):
        survey_text(tmp_path)
    with pytest.raises(UserError, match="is not a regular file"):
        survey_text(Path("/dev/null"))


def test_an_unreadable_file_is_a_user_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise PermissionError(13, "Permission denied")

    path = write(tmp_path, "ab")
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UserError, match=r"story.txt: cannot be read \(Permission denied\)"):
        survey_text(path)


def test_an_error_of_the_progress_callback_is_not_taken_for_one_of_the_file(tmp_path: Path) -> None:
    def fail(done: int) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        survey_text(write(tmp_path, "ab"), progress=fail)


@pytest.mark.parametrize("block", [1, 3, 1 << 18])
@pytest.mark.parametrize(
    ("data", "separator", "tokens", "symbols"),
    [
        (f"ab\n{END_OF_TEXT}\nba", "endoftext", 7, ["\n", "a", "b", END_OF_TEXT]),
        (f"ab\n\n{END_OF_TEXT}\n", "endoftext", 6, ["\n", "a", "b", END_OF_TEXT]),
        ("\n\nab\n \nb\n\n", "blank-line", 10, ["\n", " ", "a", "b"]),
        ("\n\nab\nb\n\n", "none", 8, ["\n", "a", "b"]),
        ("é<|endoftext|", "none", 13, sorted({*"é<|endoftext|"})),
    ],
)
def test_auto_takes_the_separator_that_parts_documents(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    data: str,
    separator: str,
    tokens: int,
    symbols: list[str],
    block: int,
) -> None:
    monkeypatch.setattr(containers, "BLOCK_BYTES", block)
    survey = survey_text(write(tmp_path, data))
    assert (survey.separator, survey.tokens, list(survey.symbols)) == (separator, tokens, symbols)


@pytest.mark.parametrize("separator", ["blank-line", "none"])
def test_a_literal_that_is_no_separator_is_characters(tmp_path: Path, separator: str) -> None:
    data = f"a\n\n{END_OF_TEXT}"
    survey = survey_text(write(tmp_path, data), separator=separator)  # type: ignore[arg-type]
    assert survey.symbols == tuple(sorted(set(data)))
    assert survey.tokens == len(data)


@pytest.mark.parametrize("separator", ["endoftext", "blank-line"])
def test_a_separator_that_does_not_occur_is_refused(tmp_path: Path, separator: str) -> None:
    with pytest.raises(UserError, match="use --separator auto or none"):
        survey_text(write(tmp_path, "ab\nc\n\n"), separator=separator)  # type: ignore[arg-type]


def test_progress_ends_at_the_size_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(containers, "BLOCK_BYTES", 4)
    # a beginning of this size is looked at first
    monkeypatch.setattr(text_module, "_HEAD_BYTES", 4)
    seen: list[int] = []
    survey_text(write(tmp_path, "abcdefghij"), progress=seen.append)
    assert sorted(set(seen)) == seen[: len(set(seen))] == [4, 8, 10]


# an independent account: a paragraph starts at the first visible character of a run of lines
def paragraphs(text: str) -> list[int]:
    starts, fresh, place = [], True, 0
    for line in text.split("\n"):
        if not line.strip():
            fresh = True
        elif fresh:
            starts.append(place + len(line) - len(line.lstrip()))
            fresh = False
        place += len(line) + 1
    return starts


def starts(text: str, size: int, separator: Separator) -> list[int]:
    """Starts of documents, found piece by piece."""
    found, before = [], ""
    for first in range(0, len(text), size):
        piece = text[first : first + size]
        found += [first + int(p) for p in document_starts(before, piece, separator)]
        before = tail_of(before, piece)
    return found


@given(st.text("ab \n", max_size=30), st.integers(1, 7))
def test_document_starts_do_not_depend_on_the_pieces(text: str, size: int) -> None:
    assert starts(text, size, "blank-line") == paragraphs(text)


def test_a_long_gap_is_remembered_in_short() -> None:
    before = "x"
    for _ in range(50):
        before = tail_of(before, " \n" * 100)
    assert before == "x\n\n"
    assert document_starts(before, "  y", "blank-line").tolist() == [2]
    assert tail_of("", " \n" * 100) == "\n\n"
    assert document_starts("\n\n", "y z", "blank-line").tolist() == [0]
    assert document_starts("", "\n\ny\n\nz", "blank-line").tolist() == [2, 5]


def test_documents_start_after_one_end_of_text() -> None:
    end = END_OF_TEXT
    text = f" ab{end} \n"
    assert document_starts("", text, "endoftext").tolist() == [1]
    before = tail_of("", text)
    assert document_starts(before, "  ", "endoftext").tolist() == []
    before = tail_of(before, "  ")
    more = f"a b{end}{end}c{end} "
    assert document_starts(before, more, "endoftext").tolist() == [0, 3 + 2 * len(end)]
    assert document_starts("", f"{end}{end} a", "endoftext").tolist() == [2 * len(end) + 1]


@given(st.lists(st.sampled_from(["a", " ", "\n", END_OF_TEXT]), max_size=20))
def test_pieces_at_literals_do_not_matter(parts: list[str]) -> None:
    text, found, before, first = "".join(parts), [], "", 0
    for part in parts:
        found += [first + int(p) for p in document_starts(before, part, "endoftext")]
        before, first = tail_of(before, part), first + len(part)
    expected = document_starts("", text, "endoftext").tolist() if text else []
    assert found == expected


@pytest.mark.parametrize("block", [1, 3, 7, 1 << 20])
def test_pieces_end_at_line_ends_and_lose_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(containers, "BLOCK_BYTES", block)
    text = "ab\n\nc\nlonger than a block\nend"
    pieces = list(pieces_of(TextReader(write(tmp_path, text))))
    assert "".join(piece for _, piece in pieces) == text
    if block == 7:
        assert [piece for _, piece in pieces] == [
            "ab\n\nc\n", "longer t", "han a b", "lock\n", "end",
        ]  # fmt: skip
    if block == 1 << 20:
        assert [piece for _, piece in pieces] == ["ab\n\nc\nlonger than a block\n", "end"]


@pytest.mark.parametrize(
    ("name", "separator", "clean"),
    [
        ("tinystories-cased-2mb.txt", "endoftext", False),
        ("text8-first-1mib.txt", "none", False),
        ("dirty-crlf-mojibake.txt", "blank-line", True),
    ],
)
def test_real_files(real_data: Path, name: str, separator: str, clean: bool) -> None:
    path = real_data / name
    text = path.read_bytes().decode()
    survey = survey_text(path, clean=clean)
    assert survey.separator == separator
    assert set(survey.symbols) - {END_OF_TEXT} == set(
        text.replace("\r\n", "\n").replace(END_OF_TEXT, "")
    )
    assert survey.cleaned.crlf_line_ends == text.count("\r\n")
    if clean:
        with pytest.raises(UserError, match="line 1 ends in CRLF"):
            survey_text(path)
