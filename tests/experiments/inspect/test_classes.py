"""Which class each token of a text is in, told by hand."""

import pytest
import torch

from resroute.data import END_OF_TEXT, CharTokenizer, SubwordTokenizer
from resroute.experiments.inspect.classes import CLASSES, token_classes

SHORT = {
    "^": "start of a word", "_": "inside a word", " ": "space", "n": "line break", "9": "digit",
    ",": "punctuation", "$": "end of text", "?": "other",
}  # fmt: skip


def classes_of(tokenizer, rows):
    """One sign a token, row by row."""
    signs = {name: sign for sign, name in SHORT.items()}
    found = token_classes(tokenizer)(torch.tensor(rows))
    return ["".join(signs[CLASSES[i]] for i in row) for row in found.tolist()]


def test_every_class_has_a_sign():
    assert sorted(SHORT.values()) == sorted(CLASSES)


def characters(text, **options):
    symbols = tuple(sorted(set(text.replace(END_OF_TEXT, ""))))
    tokenizer = CharTokenizer((*symbols, END_OF_TEXT), **options)
    return tokenizer, tokenizer.encode(text).tolist()


def test_characters_of_a_text():
    text = f"Zo\u00eb's 2 cats\nran5x,\t'so'\r{END_OF_TEXT}The\u2029 \u6df1\u3044\u0301"
    tokenizer, ids = characters(text)
    # a letter after an apostrophe or a digit starts a word, as one after an end of text does
    expected = "^__,^ 9 ^___n^__9^, ,^_,n$^__  ^_,"
    assert classes_of(tokenizer, [ids]) == [expected]


def test_a_window_starts_a_word_whatever_came_before():
    tokenizer, ids = characters("the cat sat")
    rows = [ids[0:5], ids[1:6], ids[5:10]]
    assert classes_of(tokenizer, rows) == ["^__ ^", "^_ ^_", "^_ ^_"]
    # rows are texts of their own
    assert [classes_of(tokenizer, [row])[0] for row in rows] == ["^__ ^", "^_ ^_", "^_ ^_"]


def test_characters_that_are_spelled_as_bytes():
    tokenizer, _ = characters("the cat", unknown="byte")
    ids = tokenizer.encode("aZ \u00e9e").tolist()
    assert len(ids) == 6
    # a known byte is its character, half of a character is nothing
    assert classes_of(tokenizer, [ids]) == ["^_ ??^"]


def test_a_vocabulary_without_an_end():
    tokenizer = CharTokenizer((" ", "a", "\ufffd"))
    assert classes_of(tokenizer, [[1, 1, 0, 1, 2, 1]]) == ["^_ ^?^"]


@pytest.fixture(scope="module")
def subwords():
    text = "the cat sat on the mat, 12 cats ate the rats; the 2 cats' mat. 12\n\nthe mat\n" * 40
    return SubwordTokenizer.train(iter([text + END_OF_TEXT, text]), 300, ends=True)


def test_subwords(subwords):
    text = f"the cats bat, 12mat\n\u00e9 x{END_OF_TEXT}theo  the"
    ids = subwords.encode(text).tolist()
    pieces = [subwords.decode([i]) for i in ids]
    expected = [
        ("the", "^"), (" cats", "^"), (" ", " "), ("b", "^"), ("at", "_"), (",", ","),
        (" 12", "9"), ("mat", "^"), ("\n", "n"), ("\ufffd", "?"), ("\ufffd", "?"), (" ", " "),
        ("x", "^"), (END_OF_TEXT, "$"), ("the", "^"), ("o", "_"), (" ", " "), (" the", "^"),
    ]  # fmt: skip
    assert pieces == [piece for piece, _ in expected]
    assert classes_of(subwords, [ids]) == ["".join(sign for _, sign in expected)]
    # without its first token the inside of a word starts one
    assert classes_of(subwords, [ids[4:7]]) == ["^,9"]
