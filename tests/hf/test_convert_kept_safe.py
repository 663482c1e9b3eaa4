"""What would lose a converted model's routing, or break it, without a word."""

import dataclasses

import pytest
import torch
import transformers
from accelerate import cpu_offload
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import resroute as rr
from resroute import UserError
from resroute.experiments import inspect_model
from resroute.hf.convert import convert, unconvert
from resroute.hf.load import from_pretrained
from resroute.residual import ResidualConfig
from resroute.residual.base import policy_of

GATED = rr.WAV(num_blocks=2, gated=True)
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*is deprecated and will be removed in v6:FutureWarning"
)


def fresh(**options):
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "eos_token_id": None,
    }
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **options})).eval()


def opened(model):
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in policy_of(model).parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


@torch.no_grad()
def logits(model, ids):
    return model(ids).logits


@pytest.fixture
def adapted(ids):
    """A converted model with adapters, whose policy is trained with them."""
    options = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["residual_policy"])
    return opened(get_peft_model(convert(fresh(), GATED), options)).eval()


def test_a_policy_that_adapters_train_is_not_taken_out(adapted, ids):
    expected = logits(adapted, ids)
    for model in (adapted, adapted.get_base_model()):
        with pytest.raises(UserError, match="holds adapters of peft; merge them"):
            unconvert(model)
    assert torch.equal(logits(adapted, ids), expected)
    merged = adapted.merge_and_unload()
    with pytest.raises(UserError, match="has gates that have opened"):
        unconvert(merged)


def test_looking_inside_what_adapters_train(adapted, ids):
    policy = policy_of(adapted)
    assert policy.gate.abs().max() > 0
    assert adapted.get_base_model().model.residual_policy.modules_to_save["default"] is policy
    found = inspect_model(adapted, (ids, ids.roll(-1, 1)), name="adapted", by=["block"])
    loss = torch.nn.functional.cross_entropy(
        logits(adapted, ids).flatten(0, 1), ids.roll(-1, 1).flatten()
    )
    assert found.loss == pytest.approx(loss.item(), rel=1e-5)


def test_adapters_do_not_load_onto_the_stock_model(ids, tmp_path):
    fresh().save_pretrained(tmp_path / "stock")
    base = LlamaForCausalLM.from_pretrained(tmp_path / "stock").eval()
    options = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["residual_policy"])
    adapted = opened(get_peft_model(convert(base, GATED), options)).eval()
    # peft looks for the base's vocabulary
    with pytest.warns(UserWarning, match=r"config file in .*\(converted by resroute\)"):
        adapted.save_pretrained(tmp_path / "adapter")
    with pytest.raises(OSError, match="converted by resroute"):
        AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    again = convert(LlamaForCausalLM.from_pretrained(tmp_path / "stock").eval(), GATED)
    loaded = PeftModel.from_pretrained(again, tmp_path / "adapter").eval()
    assert torch.equal(logits(loaded, ids), logits(adapted, ids))
    # a model that is saved converted is found by its own folder
    plain = convert(LlamaForCausalLM.from_pretrained(tmp_path / "stock"), GATED)
    assert unconvert(plain).name_or_path == str(tmp_path / "stock")


def test_layers_that_compute_something_else_are_refused(ids):
    class Scaled(LlamaDecoderLayer):
        def forward(self, hidden_states, *args, **kwargs):
            return 0.5 * super().forward(hidden_states, *args, **kwargs)

    model = fresh()
    model.model.layers[1].__class__ = Scaled
    with pytest.raises(UserError, match=r"Scaled\.forward is that of .*, not of transformers"):
        convert(model, rr.PreNorm())

    class Renamed(LlamaDecoderLayer):
        pass

    model = fresh()
    expected = logits(model, ids)
    model.model.layers[1].__class__ = Renamed
    assert torch.equal(logits(convert(model, GATED), ids), expected)


def test_what_is_not_in_memory_says_so(ids, tmp_path):
    model = cpu_offload(convert(fresh(), GATED))
    with pytest.raises(UserError, match="the residual policy is not in memory"):
        model(ids)
    whole = convert(fresh(), GATED).to("meta")
    assert whole(ids.to("meta")).logits.shape == (2, 12, 97)
    opened(convert(fresh(), GATED)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="cannot be shared among devices, or offloaded"):
        from_pretrained(
            tmp_path,
            device_map={"model": "cpu", "lm_head": "disk"},
            offload_folder=str(tmp_path / "disk"),
        )
    one = from_pretrained(tmp_path, device_map={"": "cpu"})
    assert torch.equal(logits(one, ids), logits(from_pretrained(tmp_path), ids))


def test_a_dispatched_model_is_not_taken_out(ids):
    model = convert(fresh(), rr.PreNorm())
    model.model.layers[2].forward = model.model.layers[2].forward
    with pytest.raises(UserError, match="before the model is dispatched or prepared"):
        unconvert(model)
    del model.model.layers[2].forward
    assert torch.equal(logits(model, ids), logits(unconvert(model), ids))


def test_early_exit_is_refused_and_breaks_nothing(ids, tmp_path):
    model = opened(convert(fresh(), GATED))
    expected = logits(model, ids)
    with pytest.raises(UserError, match="asked for 2 of 4 layers, as assistant_early_exit"):
        model.generate(ids[:1], max_new_tokens=4, do_sample=False, assistant_early_exit=2)
    assert torch.equal(logits(model, ids), expected)
    model.config.num_hidden_layers = 3
    with pytest.raises(UserError, match="asked for 3 of 4 layers"):
        model.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(from_pretrained(tmp_path), ids), expected)


def test_initial_weights_anew_leave_the_policy(ids):
    model = opened(convert(fresh(), GATED))
    kept = {name: p.clone() for name, p in model.named_parameters() if "residual_policy" in name}
    model.init_weights()
    found = dict(model.named_parameters())
    assert len(kept) == 4
    assert all(torch.equal(found[name], tensor) for name, tensor in kept.items())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unregistered(rr.PreNorm):
    """A method of a user's own."""


@pytest.mark.parametrize(
    ("method", "says"),
    [
        ("wav", "method must be a configuration such as .*, got 'wav'"),
        (None, "got None"),
        (rr.WAV, "got the class WAV"),
        (Unregistered(), "Unregistered is not registered"),
    ],
)
def test_what_is_no_method_says_so_and_leaves_the_model(method, says, ids):
    model = fresh()
    expected = logits(model, ids)
    with pytest.raises(UserError, match=says):
        convert(model, method)
    assert type(model) is LlamaForCausalLM
    assert not hasattr(model.model, "residual_policy")
    assert torch.equal(logits(model, ids), expected)
    assert issubclass(Unregistered, ResidualConfig)


def test_a_part_is_not_taken_out_of_its_model(ids):
    model = convert(fresh(), GATED)
    expected = logits(model, ids)
    with pytest.raises(UserError, match="LlamaModel was converted as a part of a model"):
        unconvert(model.model)
    assert torch.equal(logits(unconvert(model), ids), expected)
    # a decoder by itself
    assert type(unconvert(convert(model.model, GATED))) is transformers.LlamaModel


def test_options_of_transformers_when_loading(ids, tmp_path):
    model = opened(convert(fresh(), GATED))
    model.save_pretrained(tmp_path)
    loaded, info = from_pretrained(tmp_path, output_loading_info=True, use_cache=False)
    assert not info["missing_keys"]
    assert loaded.config.use_cache is False
    assert torch.equal(logits(loaded, ids), logits(model, ids))
    with torch.no_grad():
        states = from_pretrained(tmp_path, output_hidden_states=True)(ids).hidden_states
    assert len(states) == 5
    given = from_pretrained(tmp_path, config=model.config, attn_implementation="eager")
    assert given.config._attn_implementation == "eager"
    torch.testing.assert_close(logits(given, ids), logits(model, ids))
    for folder in (None, 3):
        with pytest.raises(UserError, match=r"no config\.json"):
            from_pretrained(folder)


def test_weights_without_those_of_the_routing_are_refused(tmp_path):
    model = convert(fresh(), GATED)
    model.save_pretrained(tmp_path)
    fresh().save_pretrained(tmp_path / "stock")
    (tmp_path / "stock" / "model.safetensors").replace(tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"no weights of its routing .*residual_policy"):
        from_pretrained(tmp_path)


def test_a_model_that_is_built_of_its_class_has_the_routing(ids):
    model = opened(convert(fresh(), rr.WAV(num_blocks=2), from_scratch=True))
    built = type(model)(model.config).eval()
    built.load_state_dict(model.state_dict())
    assert torch.equal(logits(built, ids), logits(model, ids))


def test_the_policy_is_float32_whatever_the_default():
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = convert(fresh(), GATED)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(p.dtype == torch.float32 for p in policy_of(model).parameters())
