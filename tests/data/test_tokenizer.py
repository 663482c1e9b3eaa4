import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from resroute.config import UserError
from resroute.data.tokenizer import END_OF_TEXT, CharTokenizer

PLAIN = CharTokenizer(tuple("\n <>abcdefotx|é😀"))
ENDED = CharTokenizer((*PLAIN.symbols, END_OF_TEXT))
# pieces of the literal make near misses and adjoining literals likely
TEXTS = st.lists(st.sampled_from([END_OF_TEXT, "<|endof", "text|>", "<", "é", "😀\n", "ab "]))


@given(TEXTS.map("".join))
def test_decoding_undoes_encoding(text: str) -> None:
    symbols = sorted({*text, "a"})
    for tokenizer in (CharTokenizer(tuple(symbols)), CharTokenizer((*symbols, END_OF_TEXT))):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.text(min_size=1))
def test_every_unicode_text_comes_back(text: str) -> None:
    tokenizer = CharTokenizer(tuple(sorted(set(text))))
    ids = tokenizer.encode(text)
    assert [tokenizer.symbols[i] for i in ids] == list(text)
    assert tokenizer.decode(ids) == text


def test_end_of_text_is_one_token_only_where_the_vocabulary_has_it() -> None:
    text = f"a{END_OF_TEXT}{END_OF_TEXT}b"
    end = ENDED.end_of_text
    assert end == len(PLAIN.symbols) == ENDED.vocab_size - 1
    a, b = PLAIN.symbols.index("a"), PLAIN.symbols.index("b")
    assert ENDED.encode(text).tolist() == [a, end, end, b]
    assert PLAIN.end_of_text is None
    with pytest.raises(UserError, match="'n'"):
        PLAIN.encode(text)
    spelled = CharTokenizer(tuple(sorted(set(text))))
    assert len(spelled.encode(text)) == len(text)


def test_a_literal_made_by_joining_pieces_stays_characters() -> None:
    symbols = tuple(sorted(set(END_OF_TEXT)))
    tokenizer = CharTokenizer((*symbols, END_OF_TEXT))
    text = f"<|endof{END_OF_TEXT}text|>"
    assert tokenizer.encode(text).tolist().count(tokenizer.end_of_text) == 1
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    "ids",
    [[0, -1, 1], (0, 1, -100), np.array([0, 1], np.uint8), torch.tensor([0, 1, -1]), range(2)],
    ids=["list", "tuple", "uint8", "tensor", "range"],
)
def test_decode_takes_any_row_and_leaves_padding_out(ids: object) -> None:
    assert CharTokenizer(("x", "y")).decode(ids) == "xy"  # type: ignore[arg-type]


def test_decode_takes_an_iterator_and_nothing() -> None:
    tokenizer = CharTokenizer(("x", "y"))
    assert tokenizer.decode(iter([1, 0])) == "yx"
    assert tokenizer.decode([]) == ""
    assert tokenizer.encode("").tolist() == []


def test_decode_refuses_foreign_ids_batches_and_fractions() -> None:
    with pytest.raises(UserError, match="token id 9 is outside the vocabulary of 2"):
        CharTokenizer(("x", "y")).decode([0, 9])
    with pytest.raises(ValueError, match="row by row"):
        CharTokenizer(("x", "y")).decode(torch.zeros(2, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="whole numbers"):
        CharTokenizer(("x", "y")).decode([0.5])  # type: ignore[list-item]


def test_unknown_characters_are_named_with_the_place_of_the_first() -> None:
    with pytest.raises(UserError) as caught:
        ENDED.encode(f"ab\n{END_OF_TEXT}|QRQSTUVW")
    assert str(caught.value) == (
        "characters outside the vocabulary: 'Q', 'R', 'S', 'T', 'U' and 2 more; the first is at "
        "line 2, column 15\nremove or replace them; the vocabulary has 17 symbols"
    )


@pytest.mark.parametrize("odd", ["\ud800", "\U0010ffff", "\0"])
def test_odd_characters_are_unknown_rather_than_a_crash(odd: str) -> None:
    with pytest.raises(UserError, match="line 1, column 2"):
        ENDED.encode("a" + odd)


@pytest.mark.parametrize(
    ("symbols", "message"),
    [
        ((), "needs a character"),
        ((END_OF_TEXT,), "needs a character"),
        (("a", "a"), "symbol 1 of a character tokenizer, 'a', is repeated"),
        (("ab",), "symbol 0 of a character tokenizer is 'ab'"),
        (("", "a"), "symbol 0"),
        ((END_OF_TEXT, "a"), "may only come last"),
        (("\ud800",), "symbol 0"),
    ],
)
def test_bad_symbols_are_refused(symbols: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        CharTokenizer(symbols)


def test_json_round_trip() -> None:
    data = json.loads(json.dumps(ENDED.to_dict()))
    assert data == {"type": "character", "symbols": list(ENDED.symbols)}
    assert CharTokenizer.from_dict(data) == ENDED


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"type": "bpe", "symbols": ["a"]}, "needs the type 'character', got 'bpe'"),
        ({"type": "character"}, "'symbols' is missing"),
        ({"type": "character", "symbols": ["a"], "size": 1}, "unknown field 'size'"),
        ({"type": "character", "symbols": "ab"}, "needs a list"),
        ({"type": "character", "symbols": ["a", 1]}, r"symbols\[1\]: needs text"),
        ({"type": "character", "symbols": ["a", "a"]}, "is repeated"),
        ([], r"got \[\]"),
    ],
)
def test_json_is_read_strictly(data: object, message: str) -> None:
    with pytest.raises(UserError, match=f"^meta.json: tokenizer.*{message}"):
        CharTokenizer.from_dict(data, where="meta.json: tokenizer")
