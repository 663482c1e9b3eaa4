import itertools

import pytest
import torch

import resroute as rr
from resroute.data import END_OF_TEXT
from resroute.experiments import prompt_ids, sample


@pytest.fixture
def model():
    torch.manual_seed(0)
    return rr.GPT(rr.tiny(2, vocab_size=5, context=16, residual=rr.PreNorm()))


TOKENIZER = rr.CharTokenizer(("\n", " ", "a", "b", END_OF_TEXT))


def test_opening_of_an_empty_prompt():
    assert prompt_ids(TOKENIZER, "") == [4]
    assert prompt_ids(rr.CharTokenizer(("\n", " ", "a")), "") == [0]
    assert prompt_ids(rr.CharTokenizer((" ", "a")), "") == [0]
    assert prompt_ids(rr.CharTokenizer(("a", "b")), "") == [0]
    assert prompt_ids(TOKENIZER, "ab") == [2, 3]
    with pytest.raises(ValueError, match="'z'"):
        prompt_ids(TOKENIZER, "abz")


def favour(model, order):
    """Make the model continue its last token by the next one of `order`."""
    with torch.no_grad():
        for parameter in model.layers.parameters():
            parameter.zero_()
        model.embedding.weight.copy_(torch.eye(5, model.config.dim))
        model.head.weight.zero_()
        for now, following in itertools.pairwise(order):
            model.head.weight[following, now] = 10.0


def test_a_text_ends_with_its_document(model):
    favour(model, [4, 2, 3, 1, 4])
    assert sample(model, TOKENIZER, temperature=0.0) == ["ab "]
    assert sample(model, TOKENIZER, prompt="a", temperature=0.0, count=2) == ["ab ", "ab "]


def test_stop_texts_are_kept(model):
    favour(model, [4, 2, 3, 1, 4])
    assert sample(model, TOKENIZER, temperature=0.0, stop=["b"]) == ["ab"]
    assert sample(model, TOKENIZER, temperature=0.0, stop=["ab"]) == ["ab"]


def test_text_is_streamed_without_the_prompt(model):
    favour(model, [4, 2, 3, 1, 4])
    pieces = []
    (text,) = sample(model, TOKENIZER, prompt="a", temperature=0.0, on_text=pieces.append)
    assert pieces == ["b", " "]
    assert text == "ab "


def test_seeds(model):
    first = sample(model, TOKENIZER, count=3, max_new_tokens=30, seed=1)
    assert first == sample(model, TOKENIZER, count=3, max_new_tokens=30, seed=1)
    assert first != sample(model, TOKENIZER, count=3, max_new_tokens=30, seed=2)
    with pytest.raises(ValueError, match="count must be at least 1, got 0"):
        sample(model, TOKENIZER, count=0)
