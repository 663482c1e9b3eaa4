"""resroute's GPT as a model of transformers: values, masks, outputs, saving."""

import copy
import json

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache, StaticCache

import resroute as rr
from resroute.hf import ResrouteConfig, ResrouteForCausalLM, ResrouteModel
from resroute.hf.gpt import from_gpt, gpt_config, hf_config, to_gpt

SHAPES = {
    "plain": {},
    "grouped": {"num_kv_heads": 2, "qk_norm": True, "mlp_ratio": 2.3},
    "one-kv-head": {"num_kv_heads": 1, "mlp": "gelu"},
    "learned": {"position": "learned", "norm_eps": 1e-3},
    "tied": {"tie_embeddings": True, "position": "learned", "mlp": "gelu", "qk_norm": True},
}


@pytest.fixture
def tokens():
    return torch.randint(0, 23, (3, 12), generator=torch.Generator().manual_seed(3))


def padded(tokens, lengths, side):
    """Rows of several lengths with their mask, and where each row's tokens are."""
    width = tokens.shape[1]
    rows, mask, places = torch.zeros_like(tokens), torch.zeros_like(tokens), []
    for row, length in enumerate(lengths):
        place = slice(width - length, width) if side == "left" else slice(0, length)
        rows[row, place], mask[row, place] = tokens[row, :length], 1
        places.append(place)
    return rows, mask, places


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_and_gradients_are_those_of_the_gpt(make_gpt, tokens, shape, attention):
    ours = make_gpt(**SHAPES[shape])
    theirs = from_gpt(ours)
    theirs.set_attn_implementation(attention)
    torch.testing.assert_close(theirs(tokens).logits, ours(tokens)[0], rtol=0, atol=1e-5)
    expected, targets = ours(tokens[:, :-1], tokens[:, 1:], return_logits=True)[1], tokens.clone()
    loss = theirs(tokens, labels=targets).loss
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-6)
    loss.backward()
    expected.backward()
    named = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        key = {"head.weight": "lm_head.weight"}.get(name, f"model.{name}")
        torch.testing.assert_close(named[key].grad, parameter.grad, rtol=1e-4, atol=1e-6, msg=name)
    assert isinstance(theirs.model.policy, rr.Policy)


def test_float64_and_bfloat16(make_gpt, tokens):
    ours = make_gpt()
    theirs = from_gpt(ours)
    exact = copy.deepcopy(theirs).double()(tokens).logits
    torch.testing.assert_close(exact, copy.deepcopy(ours).double()(tokens)[0], rtol=0, atol=1e-12)
    narrow = copy.deepcopy(theirs).bfloat16()
    narrow.model.policy.float()
    # three digits: what bfloat16 has
    assert (narrow(tokens).logits - exact).abs().max() < 0.03 * exact.abs().max()


def test_policies_stay_in_float32_where_a_model_is_loaded_narrow(make_gpt, tokens, tmp_path):
    from_gpt(make_gpt()).save_pretrained(tmp_path)
    narrow = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    kinds = {name: parameter.dtype for name, parameter in narrow.named_parameters()}
    policy = {name for name in kinds if "policy" in name}
    assert len(policy) == 3
    assert {kinds.pop(name) for name in policy} == {torch.float32}
    assert set(kinds.values()) == {torch.bfloat16}
    assert narrow(tokens).logits.dtype == torch.bfloat16


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("position", ["rope", "learned"])
def test_padding_changes_nothing_at_real_places(make_gpt, tokens, position, attention, side):
    model = from_gpt(make_gpt(position=position))
    model.set_attn_implementation(attention)
    lengths = (12, 7, 1)
    rows, mask, places = padded(tokens, lengths, side)
    labels = rows.masked_fill(mask == 0, -100)
    output = model(rows, attention_mask=mask, labels=labels)
    losses = []
    for row, (length, place) in enumerate(zip(lengths, places, strict=True)):
        alone = model(tokens[row : row + 1, :length], labels=tokens[row : row + 1, :length])
        torch.testing.assert_close(output.logits[row, place], alone.logits[0], rtol=0, atol=1e-5)
        if length > 1:
            losses.append((length - 1, alone.loss))
    total = sum(count for count, _ in losses)
    expected = sum(count * loss for count, loss in losses) / total
    # the first token after padding on the left is predicted from a place that is not real
    if side == "right":
        torch.testing.assert_close(output.loss, expected, rtol=0, atol=1e-5)
    output.loss.backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())


@pytest.mark.parametrize("position", ["rope", "learned"])
@torch.no_grad()
def test_a_mask_may_go_on_behind_the_last_token(make_gpt, tokens, position):
    model = from_gpt(make_gpt(position=position))
    lengths = (12, 7, 3)
    rows, mask, _ = padded(tokens, lengths, "left")
    expected = model(rows, attention_mask=mask).logits
    cache, room = StaticCache(config=model.config, max_cache_len=20), torch.zeros(3, 20).long()
    found = []
    for part in (slice(0, 8), slice(8, 12)):
        room[:, part] = mask[:, part]
        found.append(model(rows[:, part], attention_mask=room, past_key_values=cache).logits)
    for row, length in enumerate(lengths):
        real = slice(12 - length, 12)
        torch.testing.assert_close(
            torch.cat(found, 1)[row, real], expected[row, real], rtol=0, atol=1e-5
        )
    seen = model(rows[:, :8], attention_mask=mask[:, :8], use_cache=True).past_key_values
    with pytest.raises(ValueError, match="each of the 8 tokens in the cache and the 4 new ones"):
        model(rows[:, 8:], attention_mask=mask[:, 8:], past_key_values=seen)


@pytest.mark.parametrize("position", ["rope", "learned"])
def test_positions_may_be_given_and_packed(make_gpt, tokens, position):
    model = from_gpt(make_gpt(position=position))
    apart = [model(tokens[:1, :5]).logits, model(tokens[:1, 5:]).logits]
    places = torch.cat((torch.arange(5), torch.arange(7))).unsqueeze(0)
    packed = model(tokens[:1], position_ids=places, use_cache=False).logits
    torch.testing.assert_close(packed, torch.cat(apart, dim=1), rtol=0, atol=1e-5)
    assert not torch.allclose(packed, model(tokens[:1]).logits, atol=1e-2)


def test_embeddings_may_stand_for_tokens(make_gpt, tokens):
    model = from_gpt(make_gpt())
    embedded = model.get_input_embeddings()(tokens)
    assert torch.equal(model(inputs_embeds=embedded).logits, model(tokens).logits)
    with pytest.raises(ValueError, match="give input_ids or inputs_embeds, one of them"):
        model(tokens, inputs_embeds=embedded)
    with pytest.raises(ValueError, match="one of them"):
        model()


def test_outputs_may_be_tuples(make_gpt, tokens):
    model = from_gpt(make_gpt())
    loss, logits = model(tokens, labels=tokens, use_cache=False, return_dict=False)
    expected = model(tokens, labels=tokens)
    assert torch.equal(loss, expected.loss)
    assert torch.equal(logits, expected.logits)


def test_labels_are_shifted_and_counted(make_gpt, tokens):
    model = from_gpt(make_gpt())
    labels = tokens.clone()
    labels[0, 4:9] = -100
    logits = model(tokens).logits
    losses = nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="none"
    )
    counted = (labels[:, 1:] != -100).sum()
    found = model(tokens, labels=labels).loss
    torch.testing.assert_close(found, losses.sum() / counted)
    by_items = model(tokens, labels=labels, num_items_in_batch=torch.tensor(7)).loss
    torch.testing.assert_close(by_items, losses.sum() / 7)


def test_logits_may_be_kept_of_some_places(make_gpt, tokens):
    model = from_gpt(make_gpt())
    every = model(tokens).logits
    # products of other shapes round in other places
    for kept, expected in (
        (1, every[:, -1:]),
        (5, every[:, -5:]),
        (torch.tensor([0, 7]), every[:, [0, 7]]),
    ):
        found = model(tokens, logits_to_keep=kept).logits
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_hidden_states_are_what_attention_sublayers_read(make_gpt, tokens):
    ours = make_gpt()
    model = from_gpt(ours)
    output = model(tokens, output_hidden_states=True)
    assert torch.equal(output.logits, model(tokens).logits)
    hidden = output.hidden_states
    assert len(hidden) == 4
    torch.testing.assert_close(hidden[0], ours.embedding(tokens))
    read = []
    hooks = [
        layer.attention.norm.register_forward_hook(lambda _, inputs, __: read.append(inputs[0]))
        for layer in ours.layers
    ]
    ours(tokens)
    for hook in hooks:
        hook.remove()
    for found, expected in zip(hidden, read, strict=False):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(model.lm_head(hidden[-1]), output.logits)
    chosen = model(tokens, output_hidden_states=[-1, 1]).hidden_states
    assert [one is None for one in chosen] == [True, False, True, False]


def test_hidden_states_of_plain_residuals_are_the_usual_ones(make_gpt, tokens):
    ours = make_gpt(rr.PreNorm())
    hidden = from_gpt(ours)(tokens, output_hidden_states=True).hidden_states
    h = ours.embedding(tokens)
    stream = ours.policy.start(h)
    from resroute.model.attention import rotation

    angles = rotation(0, 12, 4, h)
    for index, layer in enumerate(ours.layers):
        torch.testing.assert_close(hidden[index], stream.total, rtol=0, atol=1e-5)
        stream = layer(stream, ours.policy, 2 * index, angles, None, 0)
        stream = stream._replace(total=ours.policy._read(stream), pending=None)
    torch.testing.assert_close(hidden[-1], ours.norm(stream.total), rtol=0, atol=1e-5)


def test_attention_weights_are_handed_back_where_eager(make_gpt, tokens):
    model = from_gpt(make_gpt(num_kv_heads=2))
    model.set_attn_implementation("eager")
    weights = model(tokens, output_attentions=True).attentions
    assert [tuple(one.shape) for one in weights] == [(3, 4, 12, 12)] * 3
    for one in weights:
        torch.testing.assert_close(one.sum(-1), torch.ones(3, 4, 12))
        assert not one.triu(1).any()


@pytest.mark.parametrize("name", ["pre_norm", "full_attn_res", "wav"])
def test_checkpointing_recomputes_the_same(make_gpt, tokens, name):
    method = {"pre_norm": rr.PreNorm(), "full_attn_res": rr.FullAttnRes()}.get(name)
    kept = from_gpt(make_gpt(method, dropout=0.2)).train()
    saved = copy.deepcopy(kept)
    saved.activation_checkpointing_enable({"use_reentrant": False})
    losses = []
    for model in (kept, saved):
        torch.manual_seed(5)
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        losses.append(loss)
    assert torch.equal(*losses)
    for (key, one), other in zip(kept.named_parameters(), saved.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad), key
    calls = []
    layer = saved.model.layers[0].mlp
    layer.register_forward_pre_hook(lambda *_: calls.append(1))
    saved(tokens, labels=tokens).loss.backward()
    assert len(calls) == 2
    # keys that were computed again would be added again
    cache = DynamicCache()
    with torch.no_grad():
        saved(tokens[:, :3], cache=cache)
    torch.manual_seed(5)
    assert torch.equal(saved(tokens, labels=tokens, cache=cache).loss, losses[0])
    assert cache.get_seq_length() == 3
    with pytest.raises(ValueError, match="reentrant checkpointing would lose the gradients"):
        saved.activation_checkpointing_enable({"use_reentrant": True})


def test_dropout_drops_in_training_alone(make_gpt, tokens):
    model = from_gpt(make_gpt(dropout=0.5))
    assert torch.equal(model(tokens).logits, model(tokens).logits)
    model.train()
    torch.manual_seed(0)
    first = model(tokens).logits
    assert not torch.allclose(first, model(tokens).logits, atol=0.1)
    torch.manual_seed(0)
    assert torch.equal(model(tokens).logits, first)


@pytest.mark.parametrize("shard", ["50GB", "3KB"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_saved_models_load_as_they_were(make_gpt, tokens, tmp_path, shard, is_tied):
    model = from_gpt(make_gpt(rr.WAV(num_blocks=2, gated=True), tie_embeddings=is_tied))
    model.save_pretrained(tmp_path, max_shard_size=shard)
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert (files == ["model.safetensors"]) == (shard == "50GB")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is ResrouteForCausalLM
    assert type(AutoConfig.from_pretrained(tmp_path)) is ResrouteConfig
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    assert (loaded.lm_head.weight is loaded.model.embedding.weight) == is_tied
    said = [{**one.config.to_dict(), "_name_or_path": ""} for one in (loaded, model)]
    assert said[0] == said[1]
    base = AutoModel.from_pretrained(tmp_path)
    assert type(base) is ResrouteModel
    assert torch.equal(base(tokens).last_hidden_state, model.model(tokens).last_hidden_state)


def test_a_policy_that_the_file_lacks_starts_as_new(make_gpt, tokens, tmp_path):
    plain = make_gpt(rr.PreNorm())
    from_gpt(plain).save_pretrained(tmp_path / "plain")
    method = rr.config.to_dict(rr.WAV(num_blocks=2, gated=True, learn_bases=True))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", residual=method)
    assert torch.equal(model(tokens).logits, plain(tokens)[0])
    fresh = rr.WAV(num_blocks=2, gated=True, learn_bases=True).build(3, 16).state_dict()
    for name, value in model.model.policy.state_dict().items():
        assert torch.equal(value, fresh[name]), name
    # of a policy that is partly there, what is there stays
    trained = make_gpt(rr.WAV(num_blocks=2, learn_bases=True))
    from_gpt(trained).save_pretrained(tmp_path / "trained")
    partly = AutoModelForCausalLM.from_pretrained(tmp_path / "trained", residual=method)
    for name, value in trained.policy.state_dict().items():
        assert torch.equal(partly.model.policy.state_dict()[name], value), name
    assert not partly.model.policy.gate.any()


def test_new_models_start_by_the_law_of_the_gpt():
    config = rr.GPTConfig(
        vocab_size=200, context=200, num_layers=8, num_heads=4, dim=64, position="learned",
        residual=rr.WAV(num_blocks=2, learn_bases=True, gated=True),
    )  # fmt: skip
    for is_tied in (False, True):
        shape = rr.config.from_dict(
            rr.GPTConfig, {**rr.config.to_dict(config), "tie_embeddings": is_tied}
        )
        ours = dict(rr.GPT(shape).named_parameters())
        theirs = ResrouteForCausalLM(hf_config(shape))
        for name, parameter in theirs.named_parameters():
            expected = ours[
                {"lm_head.weight": "head.weight"}.get(name, name.removeprefix("model."))
            ]
            assert parameter.shape == expected.shape
            assert parameter.std().item() == pytest.approx(expected.std().item(), rel=0.1), name
            assert parameter.mean().item() == pytest.approx(expected.mean().item(), abs=0.03), name


def test_more_tokens_are_given_rows_of_their_own(make_gpt, tokens):
    model = from_gpt(make_gpt())
    before = model(tokens).logits
    model.resize_token_embeddings(30)
    assert model.config.vocab_size == 30
    assert tuple(model.lm_head.weight.shape) == (30, 16)
    torch.testing.assert_close(model(tokens).logits[..., :23], before)
    tied = from_gpt(make_gpt(tie_embeddings=True))
    tied.resize_token_embeddings(26)
    assert tied.lm_head.weight is tied.get_input_embeddings().weight
    assert tuple(tied(tokens).logits.shape) == (3, 12, 26)


def test_gpts_come_back_as_they_went(make_gpt, tokens):
    for shape in SHAPES.values():
        ours = make_gpt(**shape)
        back = to_gpt(from_gpt(ours))
        assert {**vars(back.config), "mlp_ratio": 0} == {**vars(ours.config), "mlp_ratio": 0}
        assert back.config.hidden_dim == ours.config.hidden_dim
        assert torch.equal(back(tokens)[0], ours(tokens)[0])
    for width in range(1, 200):
        # 1 / 49 * 49 is below one
        shape = ResrouteConfig(
            hidden_size=49, num_attention_heads=7, position="learned", intermediate_size=width
        )
        assert gpt_config(shape).hidden_dim == width
    with pytest.raises(rr.UserError, match="needs a ResrouteForCausalLM, got ResrouteModel"):
        to_gpt(from_gpt(ours).model)


def test_what_looks_at_a_running_model_looks_at_this_one(make_gpt, tokens):
    ours = make_gpt()
    model = from_gpt(ours)
    seen = []
    for one in (ours, model):
        with rr.capture(one) as looked:
            one(tokens)
        seen.append(json.dumps(looked.result()))
    assert seen[0] == seen[1]


def test_shapes_that_do_not_fit_are_refused():
    for options, words in (
        ({"hidden_size": 10, "num_attention_heads": 4}, "divisible by num_attention_heads, got 10"),
        ({"num_attention_heads": 8, "num_key_value_heads": 3}, "num_key_value_heads, got 8 and 3"),
        ({"hidden_size": 24, "num_attention_heads": 8}, "an even head width, got 24 / 8"),
        ({"mlp": "relu"}, "mlp must be 'swiglu' or 'gelu', got 'relu'"),
        ({"position": "alibi"}, "position must be 'rope' or 'learned', got 'alibi'"),
        ({"residual": {"num_blocks": 2}}, "residual needs a 'type'"),
        ({"residual": rr.WAV()}, "residual must be a dictionary, .*, got WAV"),
    ):
        with pytest.raises(ValueError, match=words):
            ResrouteConfig(**options)
    model = ResrouteForCausalLM(
        ResrouteConfig(
            vocab_size=5, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
            max_position_embeddings=4, position="learned",
        )
    )  # fmt: skip
    with pytest.raises(ValueError, match="place 6 exceeds the 4 positions"):
        model(torch.zeros(1, 6, dtype=torch.long))


def test_a_model_that_is_spread_is_refused(make_gpt, tokens):
    model = from_gpt(make_gpt())
    model.model.policy.to("meta")
    with pytest.raises(ValueError, match="load the whole model onto one device"):
        model(tokens)
