"""`generate` of transformers on resroute's GPT."""

import pytest
import torch
from transformers import DynamicCache, StaticCache

import resroute as rr
from resroute.hf.gpt import from_gpt

METHODS = {
    "pre-norm": rr.PreNorm(),
    "full": rr.FullAttnRes(),
    "delta": rr.DeltaAttnRes(num_blocks=2),
    "wav": rr.WAV(num_blocks=2),
}


@pytest.fixture
def tokens():
    return torch.randint(0, 23, (3, 8), generator=torch.Generator().manual_seed(6))


@pytest.mark.parametrize("position", ["rope", "learned"])
@pytest.mark.parametrize("name", METHODS)
def test_greedy_text_is_that_of_rr_generate(make_gpt, tokens, name, position):
    ours = make_gpt(METHODS[name], position=position, num_kv_heads=2)
    model = from_gpt(ours)
    expected = rr.generate(ours, tokens, 20, temperature=0)
    for options in ({}, {"use_cache": False}, {"cache_implementation": "static"}):
        found = model.generate(tokens, do_sample=False, max_new_tokens=20, **options)
        assert torch.equal(found, expected), options


def test_caches_grow_by_parts_and_are_handed_back(make_gpt, tokens):
    model = from_gpt(make_gpt())
    every = model(tokens).logits
    for cache in (DynamicCache(), StaticCache(config=model.config, max_cache_len=16)):
        found = []
        for part in (slice(0, 3), slice(3, 4), slice(4, 8)):
            output = model(tokens[:, part], cache=cache)
            assert output.cache is cache
            found.append(output.logits)
        torch.testing.assert_close(torch.cat(found, dim=1), every, rtol=0, atol=1e-5)
        assert int(cache.get_seq_length()) == 8
    by_old_name = model(tokens[:, :3], past_key_values=DynamicCache()).cache
    assert by_old_name.get_seq_length() == 3
    assert model(tokens, use_cache=False).cache is None


def test_samples_have_the_chances_of_the_logits(make_gpt, tokens):
    model = from_gpt(make_gpt())
    torch.manual_seed(0)
    drawn = model.generate(
        tokens[:1], do_sample=True, temperature=0.7, max_new_tokens=1, num_return_sequences=4000
    )
    counts = torch.bincount(drawn[:, -1], minlength=23) / 4000
    chances = (model(tokens[:1]).logits[0, -1] / 0.7).softmax(-1)
    # four standard errors
    bound = 4 * (chances * (1 - chances) / 4000).sqrt() + 1e-3
    assert ((counts - chances).abs() < bound).all()
    first = drawn[:8]
    torch.manual_seed(0)
    again = model.generate(
        tokens[:1], do_sample=True, temperature=0.7, max_new_tokens=1, num_return_sequences=4000
    )
    assert torch.equal(again[:8], first)


def test_beams_find_what_a_search_by_hand_finds(make_gpt, tokens):
    model = from_gpt(make_gpt())
    rows, scores = tokens[:1], torch.zeros(1)
    for _ in range(3):
        steps = model(rows).logits[:, -1].log_softmax(-1)
        scores, best = (scores.unsqueeze(1) + steps).flatten().topk(4)
        rows = torch.cat((rows[best // 23], (best % 23).unsqueeze(1)), dim=1)
    for options in ({}, {"use_cache": False}):
        found = model.generate(
            tokens[:1], num_beams=4, num_return_sequences=4, max_new_tokens=3, do_sample=False,
            **options,
        )  # fmt: skip
        assert torch.equal(found, rows), options


def test_padded_prompts_are_continued_as_they_are_alone(make_gpt, tokens):
    lengths = (8, 5, 1)
    mask = torch.zeros_like(tokens)
    rows = torch.full_like(tokens, 22)
    for row, length in enumerate(lengths):
        rows[row, 8 - length :], mask[row, 8 - length :] = tokens[row, :length], 1
    for position in ("rope", "learned"):
        model = from_gpt(make_gpt(position=position))
        found = model.generate(
            rows, attention_mask=mask, do_sample=False, max_new_tokens=6, pad_token_id=22
        )
        for row, length in enumerate(lengths):
            alone = model.generate(tokens[row : row + 1, :length], max_new_tokens=6)
            assert torch.equal(found[row, 8:], alone[0, length:]), (position, length)


def test_rotary_models_go_past_their_context_and_learned_positions_end(make_gpt, tokens):
    long = tokens.repeat(1, 5)
    assert from_gpt(make_gpt())(long).logits.isfinite().all()
    learned = from_gpt(make_gpt(position="learned"))
    with pytest.raises(ValueError, match="place 40 exceeds the 32 positions"):
        learned(long)
    # one token at a time too
    for cache in ("dynamic", "static"):
        with pytest.raises(ValueError, match="place 33 exceeds the 32 positions"):
            learned.generate(tokens, do_sample=False, max_new_tokens=30, cache_implementation=cache)


def test_texts_end_at_the_end_of_a_document(make_gpt, tokens):
    ours = make_gpt()
    greedy = rr.generate(ours, tokens, 12, temperature=0)
    end = int(greedy[0, 11])
    model = from_gpt(ours, end_of_text=end)
    assert model.generation_config.eos_token_id == end
    assert model.generation_config.pad_token_id == end
    found = model.generate(tokens[:1], attention_mask=torch.ones(1, 8), max_new_tokens=12)
    stop = 8 + greedy[0, 8:].tolist().index(end)
    assert torch.equal(found[0], greedy[0, : stop + 1])
