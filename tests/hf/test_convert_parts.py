"""Parts of a converted model that are copied, pickled, shared or changed before it."""

import copy
import io
import pickle

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel, Olmo2Config, Olmo2ForCausalLM
from transformers.modeling_outputs import BaseModelOutputWithPast

import resroute as rr
from resroute import UserError
from resroute.hf.convert import convert, unconvert
from resroute.hf.load import from_pretrained

GATED = rr.WAV(num_blocks=2, gated=True)
SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "eos_token_id": None,
    "pad_token_id": 0,
}
# transformers' own, asked by peft
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*is deprecated and will be removed in v6:FutureWarning"
)


def fresh(kind=LlamaForCausalLM, **options):
    torch.manual_seed(0)
    config = (Olmo2Config if kind is Olmo2ForCausalLM else LlamaConfig)(**SIZES, **options)
    model = kind(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return model


def stir(model):
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.base_model.residual_policy.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


@torch.no_grad()
def logits(model, ids):
    return model(ids).logits


def gate_gradient(model, ids):
    model(ids, labels=ids).loss.backward()
    gate = model.model.residual_policy.gate
    found = gate.grad.clone()
    model.zero_grad()
    return found


@pytest.mark.parametrize("part", ["layers.0", "layers.1", "norm", "layers"])
def test_a_copied_part_reads_by_the_policy_of_its_model(part, ids):
    model = stir(convert(fresh(), GATED))
    expected = gate_gradient(model, ids)
    model.model.set_submodule(part, copy.deepcopy(model.model.get_submodule(part)))
    assert torch.equal(gate_gradient(model, ids), expected)
    # no gradient is zero but the first site's, which reads the embedding alone
    assert expected[0] == 0
    assert (expected[1:] != 0).all()


def test_a_part_of_another_model_reads_by_the_policy_of_the_one_it_is_in(ids):
    model, other = stir(convert(fresh(), GATED)), convert(fresh(), GATED)
    expected = logits(model, ids)
    model.model.layers = other.model.layers
    model.model.norm = other.model.norm
    assert torch.equal(logits(model, ids), expected)


def test_norms_that_adapters_train_read_by_the_policy_that_they_train(ids, tmp_path):
    base = stir(convert(fresh(), GATED))
    expected = gate_gradient(base, ids)
    options = LoraConfig(target_modules=["q_proj"], modules_to_save=["norm", "residual_policy"])
    adapted = get_peft_model(copy.deepcopy(base), options)
    adapted(input_ids=ids, labels=ids).loss.backward()
    gates = {n: p.grad for n, p in adapted.named_parameters() if n.endswith("policy.gate")}
    assert not gates
    active = adapted.base_model.model.model.residual_policy.modules_to_save["default"].gate
    torch.testing.assert_close(active.grad, expected)
    assert active.grad[-1].abs() > 1e-5
    trained = [p for p in adapted.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-2)
    for _ in range(3):
        adapted(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    found = logits(adapted.eval(), ids)
    adapted.save_pretrained(tmp_path / "adapters")
    again = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "adapters").eval()
    assert torch.equal(logits(again, ids), found)
    with adapted.disable_adapter():
        assert torch.equal(logits(adapted, ids), logits(base, ids))
    merged = adapted.merge_and_unload()
    expected = logits(merged, ids)
    torch.testing.assert_close(expected, found, rtol=1e-4, atol=1e-4)
    merged.save_pretrained(tmp_path / "merged")
    assert torch.equal(logits(from_pretrained(tmp_path / "merged"), ids), expected)
    with torch.no_grad():
        merged.model.residual_policy.gate.zero_()
    expected = logits(merged, ids)
    assert (expected - found).abs().max() > 1e-3
    assert torch.equal(logits(unconvert(merged), ids), expected)


@pytest.mark.parametrize("part", ["", "model", "model.layers.2", "model.norm"])
def test_pickling_says_what_to_do(part, ids):
    model = stir(convert(fresh(), GATED))
    piece = model.get_submodule(part)
    with pytest.raises(UserError, match=r"cannot be pickled: .*\nsave it by save_pretrained"):
        torch.save(piece, io.BytesIO())
    for protocol in (0, 5):
        with pytest.raises(UserError, match="cannot be pickled"):
            pickle.dumps(piece, protocol)
    for copied in (copy.copy(model), copy.deepcopy(model)):
        assert torch.equal(logits(copied, ids), logits(model, ids))
    with torch.no_grad():
        model.model.residual_policy.gate.zero_()
    back = pickle.loads(pickle.dumps(unconvert(model)))
    assert torch.equal(logits(back, ids), logits(model, ids))


class Adding(LlamaModel):
    """Keeps what layers return, and adds it up."""

    def forward(self, input_ids=None, **kwargs):
        states = [self.embed_tokens(input_ids)]
        angles = self.rotary_emb(states[0], torch.arange(input_ids.shape[1])[None])
        for layer in self.layers:
            states.append(layer(states[-1], position_embeddings=angles, attention_mask=None))
        return BaseModelOutputWithPast(last_hidden_state=self.norm(states[-1] + states[2]))


class Own(LlamaForCausalLM):
    """A class of one's own, with a decoder of transformers."""


def of_one_layer():
    model = fresh()
    model.model.layers = torch.nn.ModuleList([model.model.layers[0]] * 4)
    return model


def pruned():
    model = fresh()
    model.model.layers = model.model.layers[:2]
    return model


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (of_one_layer, "one layer of the model is in it several times"),
        (pruned, "says 4 layers, and the model has 2; set config.num_hidden_layers = 2"),
        (lambda: fresh(Adding), r"Adding\.forward is that of .*, not of transformers"),
    ],
)
def test_what_cannot_be_converted_is_left_as_it_was(make, says, ids):
    model = make()
    with torch.no_grad():
        expected = model(ids, use_cache=False)[0]
    classes = [type(part) for part in model.modules()]
    attributes = [set(part.__dict__) for part in model.modules()]
    with pytest.raises(UserError, match=says):
        convert(model, GATED)
    assert [type(part) for part in model.modules()] == classes
    assert [set(part.__dict__) for part in model.modules()] == attributes
    assert model.config.num_hidden_layers == 4
    assert not hasattr(model.config, "resroute")
    with torch.no_grad():
        assert torch.equal(model(ids, use_cache=False)[0], expected)


def test_pruned_layers_with_their_number_in_the_configuration(ids):
    model = pruned()
    expected = logits(model, ids)
    model.config.num_hidden_layers = 2
    assert torch.equal(logits(convert(model, rr.FullAttnRes(gated=True)), ids), expected)


def test_an_error_on_the_way_leaves_the_model(ids, monkeypatch):
    def fail(stock):
        raise TypeError("no such class")

    model = fresh()
    expected = logits(model, ids)
    monkeypatch.setattr("resroute.hf.routed_model.model_class", fail)
    with pytest.raises(TypeError, match="no such class"):
        convert(model, GATED)
    assert type(model.model.layers[0]).__name__ == "LlamaDecoderLayer"
    assert not hasattr(model.model, "residual_policy")
    assert torch.equal(logits(model, ids), expected)
    monkeypatch.undo()
    assert torch.equal(logits(convert(model, GATED), ids), expected)


def test_a_class_of_ones_own_is_given_to_load_it(ids, tmp_path):
    model = stir(convert(fresh(Own), GATED))
    model.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"for the class Own, .*give the class: .*architecture=Own"):
        from_pretrained(tmp_path)
    loaded = from_pretrained(tmp_path, architecture=Own)
    assert isinstance(loaded, Own)
    assert torch.equal(logits(loaded, ids), logits(model, ids))
    # also another head on the same decoder
    decoder = from_pretrained(tmp_path, architecture=LlamaModel)
    with torch.no_grad():
        expected = model.model(ids).last_hidden_state
        assert torch.equal(decoder(ids).last_hidden_state, expected)
    for wrong in ("Own", torch.nn.Linear):
        with pytest.raises(UserError, match="must be a class of models of transformers, got"):
            from_pretrained(tmp_path, architecture=wrong)
    with pytest.raises(UserError, match=r"Adding\.forward is that of"):
        from_pretrained(tmp_path, architecture=Adding)


def test_dtypes_by_any_of_their_names(tmp_path):
    convert(fresh().bfloat16(), GATED).save_pretrained(tmp_path)
    for options, dtype in [
        ({}, torch.bfloat16),
        ({"dtype": "auto"}, torch.bfloat16),
        ({"torch_dtype": "auto"}, torch.bfloat16),
        ({"dtype": "float16"}, torch.float16),
        ({"torch_dtype": torch.float32}, torch.float32),
    ]:
        loaded = from_pretrained(tmp_path, **options)
        assert loaded.lm_head.weight.dtype == dtype
        assert loaded.model.residual_policy.query.dtype == torch.float32


def test_folders_inside_of_folders(ids, tmp_path):
    model = stir(convert(fresh(), GATED))
    model.save_pretrained(tmp_path / "best")
    for subfolder in ("best", "../" + tmp_path.name + "/best"):
        loaded = from_pretrained(tmp_path, subfolder=subfolder)
        assert torch.equal(logits(loaded, ids), logits(model, ids))
    with pytest.raises(UserError, match=r"other: no config\.json"):
        from_pretrained(tmp_path, subfolder="other")


def test_routing_of_other_sizes_is_refused(tmp_path):
    convert(fresh(), rr.FullAttnRes(gated=True)).save_pretrained(tmp_path)
    for layers, rows in ((2, 5), (6, 13)):
        with pytest.raises(UserError, match=rf"other sizes than the .*9.*, not \({rows}.*load it"):
            from_pretrained(tmp_path, num_hidden_layers=layers, ignore_mismatched_sizes=True)
    with pytest.raises(UserError, match="the configuration that was given: no depth routing"):
        from_pretrained(tmp_path, config=LlamaConfig(**SIZES))
