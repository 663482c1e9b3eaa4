"""Training resroute's GPT by Trainer and by accelerate."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import resroute as rr
from resroute.hf import ResrouteForCausalLM
from resroute.hf.gpt import from_gpt

# the names of Trainer's own options change
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")


@pytest.fixture
def rows():
    """Runs through the vocabulary, which are easy to learn."""
    return [
        {"input_ids": (torch.arange(16) + first) % 23, "labels": (torch.arange(16) + first) % 23}
        for first in range(40)
    ]


def settings(out, **options):
    return TrainingArguments(
        output_dir=str(out),
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_steps=4,
        dataloader_pin_memory=False,
        **{"max_steps": 12, "save_steps": 8, **options},
    )


@pytest.mark.parametrize("method", [rr.PreNorm(), rr.WAV(num_blocks=1, gated=True)])
def test_trainer_learns_saves_and_goes_on(make_gpt, rows, tmp_path, method):
    start = from_gpt(make_gpt(method, dropout=0.1))
    whole = Trainer(copy.deepcopy(start), settings(tmp_path / "a"), train_dataset=rows)
    whole.train()
    losses = [entry["loss"] for entry in whole.state.log_history if "loss" in entry]
    assert len(losses) == 3
    assert losses[2] < losses[0] - 0.3
    resumed = Trainer(copy.deepcopy(start), settings(tmp_path / "b"), train_dataset=rows)
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-8"))
    for (name, one), other in zip(
        whole.model.named_parameters(), resumed.model.parameters(), strict=True
    ):
        assert torch.equal(one, other), name
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "a" / "checkpoint-12")
    assert type(loaded) is ResrouteForCausalLM
    ids = rows[0]["input_ids"].unsqueeze(0)
    assert torch.equal(loaded(ids).logits, whole.model.eval()(ids).logits)


def test_accumulation_and_checkpointing_take_the_same_steps(make_gpt, rows, tmp_path):
    start = from_gpt(make_gpt())
    ends = []
    for place, options in enumerate(
        (
            {},
            {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2},
            {"gradient_checkpointing": True},
        )
    ):
        choice = {"max_steps": 3, "save_strategy": "no", "optim": "sgd", **options}
        batch = choice.pop("per_device_train_batch_size", 4)
        arguments = settings(tmp_path / str(place), **choice)
        arguments.per_device_train_batch_size = batch
        trainer = Trainer(copy.deepcopy(start), arguments, train_dataset=rows)
        trainer.train()
        ends.append(trainer.model)
    for other in ends[1:]:
        for (name, one), two in zip(ends[0].named_parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(two, one, rtol=0, atol=1e-5, msg=name)
    refused = settings(
        tmp_path / "r", gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": True},
    )  # fmt: skip
    with pytest.raises(ValueError, match="reentrant checkpointing would lose the gradients"):
        Trainer(copy.deepcopy(start), refused, train_dataset=rows).train()


def test_evaluation_hands_back_losses_and_logits(make_gpt, rows, tmp_path):
    model = from_gpt(make_gpt())
    trainer = Trainer(model, settings(tmp_path), eval_dataset=rows[:8])
    ids = torch.stack([row["input_ids"] for row in rows[:8]])
    expected = model(ids, labels=ids)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected.loss.item(), abs=1e-5)
    found = trainer.predict(rows[:8]).predictions
    torch.testing.assert_close(torch.from_numpy(found), expected.logits, rtol=0, atol=1e-5)


def test_accelerate_trains_as_a_loop_by_hand(make_gpt, rows):
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    start = from_gpt(make_gpt())
    ends = []
    for accelerator in (None, Accelerator(cpu=True)):
        model = copy.deepcopy(start).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        batches = DataLoader(rows, batch_size=8)
        if accelerator is not None:
            model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
        losses = []
        for batch in batches:
            loss = model(**batch).loss
            loss.backward() if accelerator is None else accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[-1] < losses[0] - 0.3
        ends.append(model if accelerator is None else accelerator.unwrap_model(model))
    for (name, one), two in zip(ends[0].named_parameters(), ends[1].parameters(), strict=True):
        assert torch.equal(one, two), name


def test_adapters_train_beside_frozen_weights(make_gpt, rows):
    from peft import LoraConfig, get_peft_model

    model = from_gpt(make_gpt())
    ids = torch.stack([row["input_ids"] for row in rows[:8]])
    before = model(ids, labels=ids).loss.item()
    frozen = copy.deepcopy(model.state_dict())
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=0.03)
    for _ in range(8):
        adapted(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert adapted(input_ids=ids, labels=ids).loss.item() < before - 0.3
    written = adapted.generate(input_ids=ids[:1, :4], max_new_tokens=2, do_sample=False)
    assert written.shape == (1, 6)
    merged = adapted.merge_and_unload()
    assert torch.equal(merged.model.policy.query, frozen["model.policy.query"])
    name = "model.layers.0.mlp.up.weight"
    assert not torch.equal(merged.get_parameter(name), frozen[name])
