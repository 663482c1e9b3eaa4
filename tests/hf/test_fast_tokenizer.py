"""Tokenizers of corpora as fast ones of transformers."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from resroute.data import END_OF_TEXT, CharTokenizer, SubwordTokenizer
from resroute.hf.tokenizer import fast_tokenizer

CHARACTERS = ("a", "b", " ", "\n", "é", "<", "|", "漢", "😀", "\u0301", "\x00")
LITERAL = tuple(dict.fromkeys("ab \n" + END_OF_TEXT))


def trained(*, ends):
    text = f"the cat sat{END_OF_TEXT} on the mat\n\n  the mat, n't é" * 20
    return SubwordTokenizer.train(iter([text]), 300, ends=ends)


def opened():
    """One that would open each text with a token of its own."""
    content = json.loads(json.dumps(trained(ends=True).to_dict()["content"]))
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": END_OF_TEXT, "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [
            {"Sequence": {"id": "A", "type_id": 0}},
            {"Sequence": {"id": "B", "type_id": 1}},
        ],
        "special_tokens": {END_OF_TEXT: {"id": END_OF_TEXT, "ids": [0], "tokens": [END_OF_TEXT]}},
    }
    content["truncation"] = {
        "max_length": 3, "strategy": "LongestFirst", "stride": 0, "direction": "Right",
    }  # fmt: skip
    return SubwordTokenizer(content)


TOKENIZERS = {
    **{
        f"{name}-{unknown}": CharTokenizer(symbols, unknown)
        for unknown in ("error", "skip", "byte")
        for name, symbols in (
            ("ends", (*CHARACTERS, END_OF_TEXT)),
            ("endless", CHARACTERS),
            ("spells", LITERAL),
        )
    },
    "bpe": trained(ends=True),
    "bpe-endless": trained(ends=False),
    "bpe-opened": opened(),
}
PIECES = [
    *CHARACTERS, END_OF_TEXT, "<|", "|>", "x", "the cat", " ,", ".", " n't", "end", "\r\n",
    "\ufeff", "e\u0301", "ﬁ", "<0x41>", "<unk>", "  ", "\u200d", "ñ",
]  # fmt: skip
texts = st.lists(st.sampled_from(PIECES), max_size=15).map("".join) | st.text(max_size=15)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """Each tokenizer as it comes back from its folder."""
    folder = tmp_path_factory.mktemp("tokenizers")
    for name, tokenizer in TOKENIZERS.items():
        fast_tokenizer(tokenizer, 512).save_pretrained(folder / name)
    return {name: AutoTokenizer.from_pretrained(folder / name) for name in TOKENIZERS}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_ids_and_texts_are_those_of_ours(loaded, name):
    ours, theirs = TOKENIZERS[name], loaded[name]

    @given(texts)
    @settings(max_examples=80, deadline=None)
    def check(text):
        try:
            expected = ours.encode(text).tolist()
        except ValueError:
            with pytest.raises(Exception, match="outside the vocabulary"):
                theirs.encode(text)
            return
        assert theirs.encode(text) == expected
        assert theirs.decode(expected) == ours.decode(expected)

    check()


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_end_of_text_opens_ends_and_fills(loaded, name):
    ours, theirs = TOKENIZERS[name], loaded[name]
    assert len(theirs) == ours.vocab_size
    assert theirs.eos_token_id == theirs.bos_token_id == theirs.pad_token_id == ours.end_of_text
    assert theirs.padding_side == "left"
    assert theirs.model_max_length == 512
    # what a tokenizer.json says of other models' windows
    assert not {"max_length", "stride", "truncation_side"} & theirs.init_kwargs.keys()
    if ours.end_of_text is None:
        with pytest.raises(ValueError, match="does not have a padding token"):
            theirs(["a", "ab"], padding=True)
        return
    batch = theirs(["a b", "a"], padding=True)
    short = theirs.encode("a")
    fill = len(batch["input_ids"][0]) - len(short)
    assert batch["input_ids"][1] == [ours.end_of_text] * fill + short
    assert batch["attention_mask"][1] == [0] * fill + [1] * len(short)
    assert theirs.decode(batch["input_ids"][1], skip_special_tokens=True) == "a"


def test_broken_bytes_decode_to_replacement_characters(loaded):
    ours, theirs = TOKENIZERS["ends-byte"], loaded["ends-byte"]
    first = len(CHARACTERS)
    whole = [0, *(first + value for value in "漢".encode()), 1]
    assert theirs.decode(whole) == ours.decode(whole) == "a漢b"
    assert theirs.decode([0, first + 0xFF, 1]) == ours.decode([0, first + 0xFF, 1]) == "a\ufffdb"


def test_folders_hold_no_code_and_no_paths(tmp_path):
    fast_tokenizer(TOKENIZERS["ends-byte"], 64).save_pretrained(tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["tokenizer.json", "tokenizer_config.json"]
    assert str(tmp_path) not in (tmp_path / "tokenizer_config.json").read_text()
