"""Documents that repeat an earlier one, counted while a corpus is made."""

import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from resroute.data import containers, copies, describe, prepare_text
from resroute.data.copies import CopyCounter
from resroute.data.encode import encoded
from resroute.data.starts import Separator
from resroute.data.text import TextReader, pieces_of
from resroute.data.tokenizer import END_OF_TEXT, CharTokenizer


def counted(path: Path, separator: Separator) -> int:
    has_literals = separator == "endoftext"
    symbols = {*path.read_text(), *END_OF_TEXT}
    tokenizer = CharTokenizer((*sorted(symbols), *([END_OF_TEXT] if has_literals else [])))
    counter = CopyCounter(has_literals=has_literals)
    for piece in encoded(pieces_of(TextReader(path)), tokenizer, separator, [], processes=1):
        if piece.documents is not None:
            counter.add(piece.documents)
    return counter.finish()


# an independent account
def copies_in(text: str, separator: Separator) -> int:
    parts = text.split(END_OF_TEXT) if separator == "endoftext" else re.split(r"\n\s*\n", text)
    documents = [part.strip() for part in parts if part.strip()]
    return len(documents) - len(set(documents))


PIECES = ["a", "é", " ", "\n", "\n\n", "\n \n", "\u3000", END_OF_TEXT, "ab ab", "<|endof"]


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.sampled_from(PIECES), max_size=40).map("".join),
    st.sampled_from(["endoftext", "blank-line"]),
    st.sampled_from([1, 3, 9, 1 << 18]),
)
def test_copies_equal_an_independent_account(
    tmp_path: Path, text: str, separator: Separator, block: int
) -> None:
    path = tmp_path / "text.txt"
    path.write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(containers, "BLOCK_BYTES", block)
        assert counted(path, separator) == copies_in(text, separator)


def test_a_text_of_one_document_has_no_copies(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("a\n\na\n\n" * 9)
    assert counted(path, "none") == 0
    assert counted(path, "blank-line") == 17


def test_a_corpus_says_what_describe_says(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"Story {i % 40}.\n{END_OF_TEXT}\n" for i in range(100)))
    corpus = prepare_text(path, tmp_path / "tales")
    assert corpus.meta.source["document_copies"] == 60
    assert "compared_documents" not in corpus.meta.source
    assert describe(path).documents.copies == 60
    assert describe(corpus.path, max_order=0).documents.copies == 60
    # what was found is no part of what was asked for
    assert prepare_text(path, tmp_path / "tales").meta == corpus.meta
    path.write_text("".join(f"Story {i}.\n{END_OF_TEXT}\n" for i in range(100)))
    assert "document_copies" not in prepare_text(path, tmp_path / "more").meta.source


def test_documents_past_the_limit_are_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "MAX_DOCUMENTS", 10)
    monkeypatch.setattr("resroute.data.prepare.MAX_DOCUMENTS", 10)
    monkeypatch.setattr(containers, "BLOCK_BYTES", 16)
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{i % 8}a\n\n" for i in range(100)))
    source = prepare_text(path, tmp_path / "tales").meta.source
    assert (source["document_copies"], source["compared_documents"]) == (2, 10)
