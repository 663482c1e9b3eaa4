"""A converted model where people use models: caches, masks, LoRA, Trainer, compile."""

import copy
import subprocess
import sys

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer, TrainingArguments

import resroute as rr
from resroute import UserError
from resroute.hf.convert import convert, unconvert
from resroute.hf.load import from_pretrained

METHOD = rr.WAV(num_blocks=2)
# transformers' own, between its modules and by peft
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*is deprecated and will be removed in v6:FutureWarning"
)
COMPILED = """
import torch, transformers, resroute as rr
torch.manual_seed(0)
config = transformers.Qwen3Config(
    vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=4, head_dim=8,
    num_attention_heads=4, num_key_value_heads=2,
)
model = rr.convert(transformers.Qwen3ForCausalLM(config), rr.WAV(num_blocks=2), from_scratch=True)
torch.nn.init.normal_(model.model.residual_policy.query)
ids = torch.randint(97, (2, 12))
with torch.no_grad():
    expected = model.eval()(ids).logits
    found = torch.compile(model, fullgraph=True, backend="eager")(ids).logits
print((found - expected).abs().max().item())
"""


def config(**options):
    return Qwen3Config(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        pad_token_id=0,
        **{"eos_token_id": None, **options},
    )


def fresh(**options):
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config(**options)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return model


@pytest.fixture
def model():
    """Converted, with a policy far from where it starts."""
    made = convert(fresh(), METHOD, from_scratch=True)
    with torch.no_grad():
        for parameter in made.model.residual_policy.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return made


def gradients(model, ids):
    model.zero_grad()
    loss = model(ids, labels=ids).loss
    loss.backward()
    return loss, {name: p.grad.clone() for name, p in model.named_parameters()}


def test_checkpointing_changes_no_bit(model, ids):
    model.train()
    loss, found = gradients(model, ids)
    assert found["model.residual_policy.query"].abs().max() > 0
    model.gradient_checkpointing_enable()
    again, recomputed = gradients(model, ids)
    assert torch.equal(loss, again)
    assert all(torch.equal(found[name], recomputed[name]) for name in found)


# torch's, which sees no tensor among what a layer is given, or that its default was taken
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.filterwarnings("ignore:.*use_reentrant parameter should be passed explicitly")
@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("options", [{"use_reentrant": True}, {}], ids=["asked", "default"])
def test_reentrant_checkpointing_is_refused(model, ids, options, every):
    model.train()
    model.gradient_checkpointing_enable(options, every_n_layers=every)
    with pytest.raises(UserError, match="reentrant checkpointing loses the gradient"):
        model(ids)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("place", [0, 3])
def test_wrappers_that_checkpoint(model, ids, place):
    loss, found = gradients(model.train(), ids)
    layers = model.model.layers
    layer = layers[place]
    layers[place] = checkpoint_wrapper(layer, CheckpointImpl.REENTRANT)
    with pytest.raises(UserError, match="reentrant checkpointing loses the gradient"):
        model(ids, use_cache=False)
    layers[place] = checkpoint_wrapper(layer, CheckpointImpl.NO_REENTRANT)
    again, recomputed = gradients(model, ids)
    assert torch.equal(loss, again)
    names = [name.replace("._checkpoint_wrapped_module", "") for name in recomputed]
    assert names == list(found)
    assert all(map(torch.equal, recomputed.values(), found.values()))


def test_static_cache_beams_and_sampling(model, ids):
    options = {"max_new_tokens": 8, "do_sample": False}
    expected = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, cache_implementation="static", **options), expected)
    beams = model.generate(ids, num_beams=3, **options)
    uncached = model.generate(ids, num_beams=3, use_cache=False, **options)
    assert torch.equal(beams, uncached)
    torch.manual_seed(0)
    sampled = model.generate(ids, max_new_tokens=8, do_sample=True, use_cache=False)
    torch.manual_seed(0)
    assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=True), sampled)


@torch.no_grad()
def test_left_padding_changes_nothing(model, ids):
    padded = torch.cat((torch.zeros(2, 3, dtype=torch.long), ids), 1)
    mask = (torch.arange(15) >= 3).long().expand(2, -1)
    found = model(padded, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
    torch.testing.assert_close(found.logits[:, 3:], model(ids).logits, rtol=1e-5, atol=1e-5)
    options = {"max_new_tokens": 5, "do_sample": False}
    generated = model.generate(padded, attention_mask=mask, **options)
    assert torch.equal(generated[:, 15:], model.generate(ids, **options)[:, 12:])


@torch.no_grad()
def test_eager_attention_and_its_weights(model, ids):
    expected = model(ids).logits
    model.set_attn_implementation("eager")
    found = model(ids, output_attentions=True)
    torch.testing.assert_close(found.logits, expected, rtol=1e-5, atol=1e-5)
    assert [tuple(one.shape) for one in found.attentions] == [(2, 4, 12, 12)] * 4


@torch.no_grad()
def test_a_copy_has_a_policy_of_its_own(model, ids):
    expected = model(ids).logits
    copied = copy.deepcopy(model)
    model.model.residual_policy.query.zero_()
    assert torch.equal(copied(ids).logits, expected)
    assert not torch.equal(model(ids).logits, expected)


def test_compiled_as_one_graph():
    # apart: the checks of shapes that tests put around functions cannot be compiled
    command = [sys.executable, "-W", "error::UserWarning", "-c", COMPILED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1e-5


@torch.no_grad()
def test_looking_inside(model, ids):
    with rr.capture(model, keep_tokens=True) as seen:
        model(ids)
    assert seen.table()["sources"][:4] == ["embedding", "state 0", "phase 0", "split 0"]
    assert seen.latest[8].shape == (24, 3)
    windows = ids, ids.roll(-1, 1)
    found = rr.importance(model, windows, by="layer")
    expected = model(ids).logits.flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(expected, windows[1].flatten())
    assert found.loss == pytest.approx(loss.item(), rel=1e-5)
    with rr.without_layer(model, 2):
        changed = torch.nn.functional.cross_entropy(
            model(ids).logits.flatten(0, 1), windows[1].flatten()
        )
    assert found.items[2].change == pytest.approx((changed - loss).item(), abs=1e-5)


def test_decoded_tokens_are_captured_too(model, ids):
    with rr.capture(model) as seen:
        model.generate(ids, max_new_tokens=4, do_sample=False)
    # the prompt once, then one token a pass
    assert (seen.passes, seen.tokens) == (4, 2 * (12 + 3))


@pytest.mark.parametrize("trains_policy", [False, True])
def test_lora(ids, trains_policy, tmp_path):
    base = convert(fresh(), rr.WAV(num_blocks=2, gated=True)).train()
    frozen = {name: p.detach().clone() for name, p in base.named_parameters()}
    expected = base(ids).logits.detach()
    saved = ["residual_policy"] if trains_policy else None
    adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=saved)
    adapted = get_peft_model(base, adapters)
    assert torch.equal(adapted(ids).logits, expected)
    trained = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
    assert any("residual_policy" in name for name in trained) == trains_policy
    optimizer = torch.optim.SGD(trained.values(), lr=0.1)
    losses = []
    for _ in range(3):
        loss = adapted(input_ids=ids, labels=ids).loss
        loss.backward()
        assert all(p.grad is not None for p in trained.values())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] > losses[1] > losses[2]
    if trains_policy:
        gates = [p for name, p in trained.items() if name.endswith("gate")]
        assert (gates[0] != 0).any()
    adapted.save_pretrained(tmp_path)
    again = convert(fresh(), rr.WAV(num_blocks=2, gated=True))
    assert all(torch.equal(p, frozen[name]) for name, p in again.named_parameters())
    loaded = PeftModel.from_pretrained(again, tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, adapted.eval()(ids).logits)
    with pytest.raises(UserError, match="holds adapters of peft"):
        convert(adapted, rr.PreNorm())
    if not trains_policy:
        merged = adapted.merge_and_unload()
        with torch.no_grad():
            torch.testing.assert_close(merged(ids).logits, loaded(ids).logits, rtol=1e-4, atol=1e-4)
        assert type(unconvert(merged)) is Qwen3ForCausalLM


def test_trainer_trains_saves_and_resumes(tmp_path):
    rows = torch.randint(1, 97, (16, 12), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in rows]

    def trained(folder, steps, resume=None):
        options = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=4,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            save_steps=3,
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            seed=0,
        )
        model = convert(fresh(), rr.WAV(num_blocks=2, gated=True))
        trainer = Trainer(model=model, args=options, train_dataset=data)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole = trained(tmp_path / "whole", 6)
    losses = [line["loss"] for line in whole.state.log_history if "loss" in line]
    assert losses[-1] < losses[0]
    resumed = trained(tmp_path / "again", 6, resume=tmp_path / "whole" / "checkpoint-3")
    expected = whole.model.state_dict()
    assert all(torch.equal(t, expected[name]) for name, t in resumed.model.state_dict().items())
    loaded = from_pretrained(tmp_path / "whole" / "checkpoint-6")
    assert all(torch.equal(t, expected[name]) for name, t in loaded.state_dict().items())
    assert (loaded.model.residual_policy.gate != 0).any()


def test_sharded_and_in_bfloat16(model, ids, tmp_path):
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    with torch.no_grad():
        assert torch.equal(from_pretrained(tmp_path)(ids).logits, model(ids).logits)
    half = from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert half.lm_head.weight.dtype == torch.bfloat16
    policy = half.model.residual_policy
    assert all(p.dtype == torch.float32 for p in policy.parameters())
    assert torch.equal(policy.query, model.model.residual_policy.query)


def test_other_heads_and_bare_decoders(ids, tmp_path):
    classifier = transformers.Qwen3ForSequenceClassification(config(num_labels=3)).eval()
    decoder = transformers.Qwen3Model(config()).eval()
    with torch.no_grad():
        labels, states = classifier(ids).logits, decoder(ids).last_hidden_state
        converted = convert(classifier, rr.WAV(num_blocks=2, gated=True))
        assert torch.equal(converted(ids).logits, labels)
        bare = convert(decoder, rr.WAV(num_blocks=2, gated=True))
        assert torch.equal(bare(ids).last_hidden_state, states)
        bare.residual_policy.gate.fill_(0.5)
        bare.save_pretrained(tmp_path)
        loaded = from_pretrained(tmp_path).eval()
        assert torch.equal(loaded(ids).last_hidden_state, bare(ids).last_hidden_state)
        assert not torch.equal(loaded(ids).last_hidden_state, states)
        loaded.residual_policy.gate.zero_()
        assert torch.equal(unconvert(loaded)(ids).last_hidden_state, states)


def test_hooks_of_a_device_map_are_refused():
    model = fresh()
    model.model.layers[1].forward = model.model.layers[1].forward
    with pytest.raises(UserError, match="has a forward of its own, as a device map or"):
        convert(model, rr.PreNorm())


def test_a_layer_alone_says_what_it_lacks(model):
    with pytest.raises(UserError, match="without a stream; run the whole model"):
        model.model.layers[1](torch.zeros(1, 2, 32))
