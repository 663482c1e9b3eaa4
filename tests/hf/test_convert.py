"""Residual methods in models of transformers: every supported architecture, tiny and random."""

import copy

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

import resroute as rr
from resroute import UserError
from resroute.hf.convert import convert, unconvert
from resroute.hf.forms import FORMS
from resroute.hf.load import from_pretrained
from resroute.residual import Policy

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
WITHOUT_GROUPS = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
# the configuration's class, and what it needs besides the usual sizes
MODELS = {
    "llama": ("LlamaConfig", SIZES),
    "mistral": ("MistralConfig", SIZES),
    "mixtral": ("MixtralConfig", {**SIZES, "num_local_experts": 4}),
    "qwen2": ("Qwen2Config", SIZES),
    "qwen2_moe": ("Qwen2MoeConfig", {**SIZES, **EXPERTS, "shared_expert_intermediate_size": 16}),
    "qwen3": ("Qwen3Config", {**SIZES, "head_dim": 8}),
    "qwen3_moe": ("Qwen3MoeConfig", {**SIZES, **EXPERTS, "head_dim": 8}),
    "gemma": ("GemmaConfig", {**SIZES, "head_dim": 8}),
    "gemma2": ("Gemma2Config", {**SIZES, "head_dim": 8}),
    "gemma3_text": ("Gemma3TextConfig", {**SIZES, "head_dim": 8}),
    "olmo": ("OlmoConfig", SIZES),
    "olmo2": ("Olmo2Config", SIZES),
    "olmo3": ("Olmo3Config", SIZES),
    "olmoe": ("OlmoeConfig", {**SIZES, "num_experts": 4, "num_experts_per_tok": 2}),
    "phi": ("PhiConfig", SIZES),
    "phi3": ("Phi3Config", {**SIZES, "pad_token_id": 0}),
    "gpt2": ("GPT2Config", {"vocab_size": 97, "n_embd": 32, "n_layer": 4, "n_head": 4}),
    "gpt_neox": ("GPTNeoXConfig", WITHOUT_GROUPS),
    "gpt_neox, sequential": ("GPTNeoXConfig", {**WITHOUT_GROUPS, "use_parallel_residual": False}),
    "smollm3": ("SmolLM3Config", {**SIZES, "pad_token_id": 0}),
    "starcoder2": ("Starcoder2Config", SIZES),
}
PARALLEL = {"phi", "gpt_neox"}
IDS = torch.randint(1, 97, (2, 12), generator=torch.Generator().manual_seed(3))


def make(name, dtype=torch.float32):
    """A model of an architecture, with random weights that let no norm or gain be trivial."""
    torch.manual_seed(0)
    kind, sizes = MODELS[name]
    config = getattr(transformers, kind)(**sizes)
    # no end of text, so that all rows are generated to the end
    config.eos_token_id = None
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
            else:
                # usual ones are small beside the width of a real model
                parameter.mul_(4)
    return model.to(dtype)


def routed(name, **options):
    """A routed method for an architecture: parallel layers have no phase."""
    if name in PARALLEL:
        return rr.WAV(num_blocks=2, bases=("split",), **options)
    return rr.WAV(num_blocks=2, **options)


def stir(model):
    """Move the policy's parameters away from where they start."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.base_model.residual_policy.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


@torch.no_grad()
def logits(model, ids=IDS):
    return model(ids).logits


def test_every_supported_architecture_is_tried():
    assert {name.split(",")[0] for name in MODELS} == set(FORMS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_a_method_that_starts_as_the_identity_changes_no_bit(name, dtype):
    model = make(name, dtype)
    expected = logits(model)
    for method in (rr.PreNorm(), rr.LayerScale(init=1.0), routed(name, gated=True)):
        converted = convert(copy.deepcopy(model), method)
        assert torch.equal(logits(converted), expected)
        policy = converted.base_model.residual_policy
        assert policy.num_sites == (4 if name in PARALLEL else 8)
        assert all(p.dtype == torch.float32 for p in policy.parameters())
    # of the last one: closed gates come out again
    back = unconvert(converted)
    assert type(back) is type(model)
    assert torch.equal(logits(back), expected)
    assert {n for n, _ in back.named_modules()} == {n for n, _ in model.named_modules()}


@pytest.mark.parametrize("name", MODELS)
def test_the_stack_is_the_formula(name):
    """Against a walk over the sublayers by hand, by `read` and `write` alone."""
    model = make(name)
    embedding = model.get_input_embeddings()(IDS)
    given = {}
    decoder = model.base_model
    form = FORMS[name.split(",")[0]]
    layers = getattr(decoder, form.layers)
    hooks = [
        layer.register_forward_pre_hook(
            lambda module, args, kwargs: given.setdefault(module, (args, kwargs)), with_kwargs=True
        )
        for layer in layers
    ]
    with torch.no_grad():
        model(IDS, use_cache=False)
    for hook in hooks:
        hook.remove()
    # of the first layer: the embedding with what the model has added to it or multiplied it by
    start = given[layers[0]][0][0].detach()
    assert start.shape == embedding.shape
    converted = stir(convert(copy.deepcopy(model), routed(name), from_scratch=True))
    policy = copy.deepcopy(converted.base_model.residual_policy)

    def sublayer(layer, part, read):
        args, kwargs = given[layer]
        x = getattr(layer, part.before)(read) if part.before else read
        if part is form.attention:
            x = getattr(layer, part.module)(x, **named(layer, args, kwargs))[0]
        else:
            x = getattr(layer, part.module)(x)
        for after in part.after:
            x = getattr(layer, after)(x)
        return x

    with torch.no_grad(), rr.backend("reference"):
        stream = policy.start(start)
        for layer in layers:
            read = policy.read(stream, stream.site)
            update = sublayer(layer, form.attention, read)
            if name in PARALLEL:
                update = update + sublayer(layer, form.mlp, read)
            stream = policy.write(stream, stream.site, update)
            if name not in PARALLEL:
                read = policy.read(stream, stream.site)
                stream = policy.write(stream, stream.site, sublayer(layer, form.mlp, read))
        hidden = getattr(decoder, form.norm)(policy.finish(stream))
        expected = model.get_output_embeddings()(hidden)
    found = logits(converted)
    cap = getattr(model.config, "final_logit_softcapping", None)
    expected = cap * torch.tanh(expected / cap) if cap else expected
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)
    # the routing is no trifle
    assert (found - logits(model)).abs().max() > 1e-3 * expected.abs().max()


def named(layer, args, kwargs):
    """Arguments of a layer as its attention takes them."""
    names = ["cache", "attention_mask", "encoder_hidden_states"] if len(args) > 1 else []
    return {**dict(zip(names, args[1:], strict=False)), **kwargs}


@pytest.mark.parametrize("name", MODELS)
def test_cached_generation_is_uncached_generation(name):
    model = stir(convert(make(name), routed(name), from_scratch=True))
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    cached = model.generate(IDS, **options)
    assert cached.shape == (2, 18)
    assert torch.equal(cached, model.generate(IDS, use_cache=False, **options))
    expected = logits(model, cached)[:, 11:-1].argmax(-1)
    assert torch.equal(cached[:, 12:], expected)


@pytest.mark.parametrize("name", MODELS)
def test_a_step_of_fine_tuning_lowers_the_loss(name):
    model = convert(make(name), routed(name, gated=True)).train()
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    policy = model.base_model.residual_policy
    losses = []
    for _ in range(3):
        loss = model(IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] > losses[1] > losses[2]
    # gates open first, then queries have something to do
    assert (policy.gate != 0).any()
    assert (policy.query != 0).any()


@pytest.mark.parametrize("name", MODELS)
def test_saved_and_loaded(name, tmp_path):
    model = stir(convert(make(name), routed(name), from_scratch=True))
    model.save_pretrained(tmp_path)
    loaded = from_pretrained(tmp_path).eval()
    assert torch.equal(logits(loaded), logits(model))
    assert type(loaded) is type(model)
    assert loaded.config.resroute == model.config.resroute
    with pytest.raises(ValueError, match=r"resroute\.from_pretrained"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("config", [rr.LayerScale(init=1.0), rr.ReZero()], ids=lambda c: c.label)
@pytest.mark.parametrize("name", MODELS)
def test_coefficients_fold_into_the_weights(name, config):
    model = stir(convert(make(name), config, from_scratch=True))
    expected = logits(model)
    back = unconvert(model)
    torch.testing.assert_close(logits(back), expected, rtol=1e-4, atol=1e-5)
    assert not any(isinstance(part, Policy) for part in back.modules())
    assert not hasattr(back.config, "resroute")


@pytest.mark.parametrize("name", MODELS)
def test_hidden_states_are_what_sites_read(name):
    model = stir(convert(make(name), routed(name), from_scratch=True))
    with torch.no_grad():
        found = model(IDS, output_hidden_states=True)
        assert model(IDS).hidden_states is None
    assert len(found.hidden_states) == 5
    assert all(state.shape == (2, 12, 32) for state in found.hidden_states)
    plain = make(name)
    with torch.no_grad():
        states = plain(IDS, output_hidden_states=True).hidden_states
        same = convert(plain, rr.PreNorm())(IDS, output_hidden_states=True).hidden_states
    assert len(same) == len(states)
    assert all(torch.equal(a, b) for a, b in zip(same, states, strict=True))


def test_what_cannot_be_converted_says_why():
    with pytest.raises(UserError, match="changes what a trained model computes; take gated=True"):
        convert(make("llama"), rr.WAV())
    with pytest.raises(UserError, match="changes what a trained model computes"):
        convert(make("llama"), rr.ReZero())
    with pytest.raises(UserError, match="models of type 'bloom' are not supported") as raised:
        convert(
            transformers.BloomForCausalLM(
                transformers.BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4)
            ),
            rr.PreNorm(),
        )
    assert "supported are gemma, gemma2" in str(raised.value)
    crossed = transformers.GPT2Config(
        vocab_size=97, n_embd=32, n_layer=2, n_head=4, add_cross_attention=True, is_decoder=True
    )
    with pytest.raises(UserError, match="gpt2 with add_cross_attention is not supported"):
        convert(transformers.GPT2LMHeadModel(crossed), rr.PreNorm())
    with pytest.raises(UserError, match="Linear is no model of transformers"):
        convert(torch.nn.Linear(2, 2), rr.PreNorm())
    model = convert(make("llama"), rr.PreNorm())
    with pytest.raises(UserError, match="was converted before"):
        convert(model, rr.PreNorm())
    with pytest.raises(UserError, match="phase"):
        convert(make("phi"), rr.WAV(num_blocks=2, gated=True))


def test_what_cannot_be_taken_out_says_why():
    with pytest.raises(UserError, match="LlamaForCausalLM was not converted"):
        unconvert(make("llama"))
    model = convert(make("llama"), rr.BlockAttnRes(num_blocks=2), from_scratch=True)
    with pytest.raises(UserError, match="the routing has no gates"):
        unconvert(model)
    gated = stir(convert(make("llama"), rr.BlockAttnRes(num_blocks=2, gated=True)))
    expected = logits(gated)
    with pytest.raises(UserError, match="has gates that have opened"):
        unconvert(gated)
    # nothing has changed
    assert torch.equal(logits(gated), expected)


def test_folders_that_are_none_say_so(tmp_path):
    with pytest.raises(UserError, match=r"no config\.json"):
        from_pretrained(tmp_path / "none")
    make("llama").save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"config\.json: no depth routing in it"):
        from_pretrained(tmp_path)
    with pytest.raises(UserError, match="upload the folder"):
        convert(make("llama"), rr.PreNorm()).save_pretrained(tmp_path, push_to_hub=True)
