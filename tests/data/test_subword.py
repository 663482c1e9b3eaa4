"""Byte-level BPE: any text comes back, tokens know their bytes, files are read strictly."""

import importlib
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import resroute as rr
from resroute.data import END_OF_TEXT, SPLITS, CharTokenizer, SubwordTokenizer, tokenizer_from_dict

TEXT = "the cat sat on the mat, the cat ate the rat. Zoë's café naïve 🐈\n" * 30


@pytest.fixture(scope="module")
def tokenizer():
    return SubwordTokenizer.train(iter([TEXT + END_OF_TEXT, TEXT]), 300, ends=True)


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_any_text_comes_back(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    literals = text.count(END_OF_TEXT)
    assert tokenizer.token_bytes[ids].sum() == len(text.encode()) - 12 * literals
    assert tokenizer.token_characters[ids].sum() == len(text) - 12 * literals


def test_words_are_merged_and_the_end_is_one_token(tokenizer):
    # the text has no more words to merge
    assert tokenizer.vocab_size == 292
    assert tokenizer.end_of_text == 0
    ids = tokenizer.encode(f"the cat{END_OF_TEXT}the mat").tolist()
    assert ids.count(0) == 1
    assert len(ids) < 9
    assert tokenizer.decode(ids) == f"the cat{END_OF_TEXT}the mat"
    assert tokenizer.decode(np.array([*ids, -1])) == f"the cat{END_OF_TEXT}the mat"
    with pytest.raises(rr.UserError, match="token id 292 is outside the vocabulary of 292"):
        tokenizer.decode([292])
    with pytest.raises(rr.UserError, match="half of a character"):
        tokenizer.encode("a\ud800")


def test_a_tokenizer_survives_json(tokenizer, tmp_path):
    data = json.loads(json.dumps(tokenizer.to_dict()))
    again = tokenizer_from_dict(data)
    assert again == tokenizer
    assert hash(again) == hash(tokenizer)
    assert again.encode(TEXT).tolist() == tokenizer.encode(TEXT).tolist()
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(data["content"]))
    assert SubwordTokenizer.from_file(path) == tokenizer
    path.write_text("{}")
    with pytest.raises(
        rr.UserError, match=r"tokenizer\.json: no tokenizer that `tokenizers` reads"
    ):
        SubwordTokenizer.from_file(path)
    with pytest.raises(rr.UserError, match=r"needs the object of a tokenizer\.json"):
        tokenizer_from_dict({"type": "subword"})
    with pytest.raises(rr.UserError, match=r"the file is missing; name .*, or a corpus folder"):
        SubwordTokenizer.from_file(tmp_path / "no.json")
    assert tokenizer_from_dict(CharTokenizer(("a",)).to_dict()) == CharTokenizer(("a",))


def test_a_vocabulary_holds_every_byte():
    says = "needs 257 tokens or more, 256 bytes and one besides, got 256"
    with pytest.raises(rr.UserError, match=says):
        SubwordTokenizer.train(iter(["x"]), 256, ends=False)


def test_tokens_of_other_families_are_measured_by_their_text():
    from tokenizers import Tokenizer, models

    made = Tokenizer(
        models.WordPiece({"un": 0, "##aff": 1, "\u2581the": 2, "<0x0A>": 3, "[UNK]": 4})
    )
    found = SubwordTokenizer(json.loads(made.to_str()))
    assert found.token_bytes.tolist() == [2, 3, 4, 1, 5]
    assert found.token_characters.tolist() == [2, 3, 4, 1, 5]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_corpus_of_subwords_is_the_text_again(tmp_path, processes):
    source = tmp_path / "t.txt"
    text = "".join(f"{TEXT}story {i}\n{END_OF_TEXT}\n" for i in range(60))
    source.write_text(text)
    corpus = rr.prepare_text(source, tmp_path / "c", tokens=300, processes=processes)
    splits = [corpus.tokenizer.decode(corpus.tokens(split)) for split in SPLITS]
    assert "".join(splits) == text
    assert all(split.endswith(f"{END_OF_TEXT}\n") for split in splits)
    assert all(split.startswith("the cat") for split in splits)
    for split, found in zip(SPLITS, splits, strict=True):
        about = corpus.split(split)
        assert about.characters == len(found) - 12 * found.count(END_OF_TEXT)
        assert about.bytes == len(found.encode()) - 12 * found.count(END_OF_TEXT)
        assert about.documents == found.count(END_OF_TEXT)
    # the same tokenizer, given
    again = rr.prepare_text(source, tmp_path / "d", tokens=corpus.tokenizer)
    assert (again.tokens("train") == corpus.tokens("train")).all()
    evaluation = rr.data.evaluation_windows(corpus, context=32, max_windows=4)
    counted = evaluation.targets[evaluation.targets >= 0].numpy()
    text = corpus.tokenizer.decode(counted)
    assert evaluation.tokens == len(counted)
    ends = text.count(END_OF_TEXT)
    assert abs(evaluation.characters - (len(text) - 12 * ends)) <= 4 * evaluation.inputs.shape[0]
    assert evaluation.characters < evaluation.bytes


def test_unknown_characters_are_refused_left_out_or_spelled(tmp_path):
    known = CharTokenizer(("\n", "a", "b"))
    source = tmp_path / "t.txt"
    source.write_text("abé🐈\n" * 40)
    with pytest.raises(rr.UserError) as caught:
        rr.prepare_text(source, tmp_path / "c", tokens=known)
    assert str(caught.value) == (
        f"{source}: has characters outside the given vocabulary: '\\xe9', '\\U0001f408'\n"
        "--unknown skip leaves them out, --unknown byte spells them as bytes"
    )
    skipped = rr.prepare_text(source, tmp_path / "c", tokens=known, unknown="skip")
    assert skipped.tokenizer.decode(skipped.tokens("val")) == "ab\n" * 2
    assert skipped.meta.source["unknown_characters"] == 80
    assert (skipped.split("val").bytes, skipped.split("val").characters) == (6, 6)
    spelled = rr.prepare_text(source, tmp_path / "d", tokens=known, unknown="byte")
    assert spelled.tokenizer.decode(spelled.tokens("val")) == "abé🐈\n" * 2
    assert spelled.tokenizer.vocab_size == 3 + 256
    assert (spelled.split("val").bytes, spelled.split("val").characters) == (18, 10)
    assert spelled.split("val").tokens == 18


STORY = "a b\n<|endoftext|>\nab\u00e9\n<|endoftext|><|endoftext|>b\n"


def account(corpus):
    """What meta.json counts, after it is checked against the tokens themselves."""
    for split in SPLITS:
        about = corpus.split(split)
        text = corpus.tokenizer.decode(corpus.tokens(split))
        ends = 12 * text.count(END_OF_TEXT) * (corpus.tokenizer.end_of_text is not None)
        assert about.tokens == len(corpus.tokens(split))
        assert about.characters == len(text) - ends
        assert about.bytes == len(text.encode()) - ends
    return "".join(corpus.tokenizer.decode(corpus.tokens(split)) for split in SPLITS)


@pytest.mark.parametrize(
    ("letters", "left", "unknown", "documents"),
    [
        # of the literal all but <, | and > is known
        ("\n abdefnotx", "", 4, 1),
        # it can be spelled: nothing of it is left out
        ("\n abdefnotx<|>", END_OF_TEXT, 1, 101),
    ],
)
def test_an_end_that_is_no_token_is_left_out_as_a_whole_or_spelled(
    tmp_path, letters, left, unknown, documents
):
    source = tmp_path / "t.txt"
    source.write_text(STORY * 50)
    known = CharTokenizer(tuple(sorted(letters)))
    corpus = rr.prepare_text(source, tmp_path / "c", tokens=known, unknown="skip")
    skipped = STORY.replace("\u00e9", "").replace(END_OF_TEXT, left)
    assert account(corpus) == skipped * 50
    assert corpus.meta.source["unknown_characters"] == unknown * 50
    assert [corpus.split(split).documents for split in SPLITS] == [91, 5, 5]
    for split in SPLITS:
        assert corpus.tokenizer.decode(corpus.tokens(split)[:1]) != "\n"
    found = rr.data.describe(corpus.path, max_order=0)
    assert found.documents.count == documents
    page = rr.data.render(found)
    told = "101 in the text, told apart by the mark <|endoftext|>; 1 in the tokens"
    assert any(told in line for line in page) == (documents == 1)


@pytest.mark.parametrize("block", [1 << 18, 7])
def test_an_end_that_is_spelled_as_bytes_parts_documents(tmp_path, monkeypatch, block):
    module = importlib.import_module("resroute.data.describe")
    monkeypatch.setattr(module, "BLOCK_BYTES", block)
    source = tmp_path / "t.txt"
    source.write_text(STORY * 50)
    known = CharTokenizer(tuple("\n ab"))
    corpus = rr.prepare_text(source, tmp_path / "c", tokens=known, unknown="byte")
    assert account(corpus) == STORY * 50
    found = rr.data.describe(corpus.path, max_order=0)
    assert (found.documents.separator, found.documents.count) == ("endoftext", 101)
    assert any("101, told apart by the mark" in line for line in rr.data.render(found))


# 6: the spelled literals have as many tokens too many as characters are left out
@pytest.mark.parametrize("count", [0, 1, 6])
def test_spelled_ends_and_what_is_left_out_do_not_move_the_cuts(tmp_path, count):
    source = tmp_path / "t.txt"
    lost = "\u00e9" * count
    source.write_text(f"a{lost}b{lost}{END_OF_TEXT}" * 20)
    known = CharTokenizer(tuple(sorted({*END_OF_TEXT, *"ab"})))
    corpus = rr.prepare_text(source, tmp_path / "c", tokens=known, unknown="skip")
    assert account(corpus) == f"ab{END_OF_TEXT}" * 20
    for split in SPLITS:
        assert corpus.tokenizer.decode(corpus.tokens(split)[:3]) == "ab<"


def test_a_prompt_loses_an_unknown_end_as_a_whole():
    known = CharTokenizer(tuple("abdefnotx"), unknown="skip")
    assert known.decode(known.encode(f"a{END_OF_TEXT}<b")) == "ab"
    assert known.unknown_in(f"a{END_OF_TEXT}<b") == 2


@pytest.mark.parametrize("unknown", ["skip", "byte"])
def test_subwords_have_no_use_for_unknown_characters(tmp_path, tokenizer, unknown):
    source = tmp_path / "t.txt"
    source.write_text(STORY * 50)
    for tokens in (300, tokenizer):
        with pytest.raises(rr.UserError, match=f"--unknown {unknown} has no use for subwords"):
            rr.prepare_text(source, tmp_path / "c", tokens=tokens, unknown=unknown)


@given(st.text(max_size=30))
def test_bytes_spell_any_text(text):
    tokenizer = CharTokenizer((*"abc \n", END_OF_TEXT), unknown="byte")
    if any("\ud800" <= c <= "\udfff" for c in text):
        with pytest.raises(rr.UserError, match="half of a character"):
            tokenizer.encode(text)
        return
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.token_characters[ids].sum() == len(text)
    assert tokenizer.token_bytes[ids].sum() == len(text.encode())
