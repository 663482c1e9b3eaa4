"""Runs from start to end: exactness, reuse, and what a run leaves behind."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import resroute as rr
from resroute.data import evaluation_windows, training_batch
from resroute.training.distributed import World
from resroute.training.learner import Learner


class KilledError(Exception):
    """Stands for a kill."""


class Killer(rr.Listener):
    def __init__(self, step):
        self.step = step

    def advance(self, step):
        if step == self.step:
            raise KilledError


def weights(path):
    folder = sorted(Path(path, "checkpoints").glob("step_*"))[-1]
    return load_file(folder / "model.safetensors"), load_file(folder / "optimizer.safetensors")


METHODS = [
    rr.PreNorm(),
    rr.ReZero(),
    rr.LayerScale(),
    rr.FullAttnRes(),
    rr.BlockAttnRes(num_blocks=2),
    rr.DeltaAttnRes(gated=True),
    rr.WAV(num_blocks=1, learn_bases=True),
]


@pytest.mark.parametrize("residual", METHODS, ids=lambda r: r.label)
def test_three_and_three_steps_are_six_to_the_bit(make_config, residual, runs):
    options = {"model": {"dropout": 0.1}, "accumulation": 2}
    whole = rr.train(make_config(residual, out="whole", **options))
    parts = make_config(residual, out="parts", **options)
    stopped = rr.train(parts, stop_at=3)
    assert stopped == {"path": parts.out, "step": 3}
    resumed = rr.train(parts, resume=True)
    assert resumed["validation_loss"] == whole["validation_loss"]
    runs.assert_same(whole["path"], resumed["path"])


def test_fifty_and_fifty_steps_are_a_hundred_to_the_bit(make_config, runs):
    options = {"steps": 100, "evaluate_every": 20, "checkpoint_every": 50, "log_every": 5}
    whole = rr.train(make_config(out="whole", **options))
    parts = make_config(out="parts", **options)
    rr.train(parts, stop_at=50)
    rr.train(parts, resume=True)
    runs.assert_same(whole["path"], parts.out)
    losses = [r["loss"] for r in runs.lines(parts.out) if r["kind"] == "validation"]
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.parametrize("step", [1, 2, 3, 5, 6])
def test_a_killed_run_goes_on_as_if_nothing_had_happened(make_config, step, runs):
    whole = rr.train(make_config(out="whole"))
    config = make_config(out="killed")
    with pytest.raises(KilledError):
        rr.train(config, listener=Killer(step))
    # a torn line, as a kill in the middle of a write leaves it
    with Path(config.out, "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    assert not Path(config.out, "summary.json").exists()
    rr.train(config, resume=True)
    runs.assert_same(whole["path"], config.out)


def test_reporting_intervals_do_not_change_the_run(make_config, runs):
    often = rr.train(make_config(out="a"))
    seldom = rr.train(make_config(out="b", evaluate_every=5, log_every=4, checkpoint_every=3))
    left, right = weights(often["path"])[0], weights(seldom["path"])[0]
    assert all(torch.equal(left[name], right[name]) for name in left)
    assert seldom["validation_loss"] == often["validation_loss"]
    steps = [(r["kind"], r["step"]) for r in runs.lines(seldom["path"])]
    assert steps == [
        ("validation", 0), ("train", 4), ("validation", 5), ("train", 6), ("routing", 6),
        ("validation", 6),
    ]  # fmt: skip


def test_the_same_seed_twice_is_equal_and_another_is_not(make_config, runs):
    first, second = rr.train(make_config(out="a")), rr.train(make_config(out="b"))
    runs.assert_same(first["path"], second["path"])
    other = rr.train(make_config(out="c", seed=1))
    assert other["validation_loss"] != first["validation_loss"]


def gradients(config, corpus):
    learner = Learner(config, corpus, World(), torch.device("cpu"), torch.float32)
    step = learner.gradients(0)
    return step.loss, step.grad_norm, [p.grad.clone() for p in learner.model.parameters()]


def test_accumulation_gives_equal_gradients_and_losses(make_config, cheap_corpus):
    results = {
        parts: gradients(make_config(batch_size=8, accumulation=parts), cheap_corpus)
        for parts in (1, 2, 8)
    }
    loss, norm, expected = results[1]
    for parts in (2, 8):
        assert results[parts][0] == pytest.approx(loss, rel=1e-6)
        assert results[parts][1] == pytest.approx(norm, rel=1e-5)
        for a, b in zip(results[parts][2], expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)


def test_accumulation_weighs_micro_batches_by_their_counted_tokens(
    make_config, cheap_corpus, monkeypatch
):
    def uneven(*arguments, **options):
        inputs, targets = training_batch(*arguments, **options)
        targets[-1, 5:] = -100
        targets[2] = -100
        return inputs, targets

    monkeypatch.setattr("resroute.training.learner.training_batch", uneven)
    results = [
        gradients(make_config(batch_size=8, accumulation=parts, clip_norm=1e9), cheap_corpus)
        for parts in (1, 2, 8)
    ]
    inputs, targets = uneven(cheap_corpus, context=48, batch_size=8, seed=0, step=0)
    torch.manual_seed(0)
    model = rr.GPT(make_config().model)
    _, loss = model(inputs, targets)
    loss.backward()
    for found, norm, grads in results:
        assert found == pytest.approx(loss.item(), rel=1e-6)
        assert norm == pytest.approx(results[0][1], rel=1e-5)
        for a, b in zip(grads, model.parameters(), strict=True):
            torch.testing.assert_close(a, b.grad, rtol=1e-4, atol=1e-7)


def test_a_step_is_adamw_on_the_batch_of_that_step(make_config, cheap_corpus, runs):
    config = make_config(steps=1, warmup_steps=0, final_learning_rate=1.0, clip_norm=1e9)
    torch.manual_seed(config.seed)
    model = rr.GPT(config.model)
    inputs, targets = training_batch(
        cheap_corpus, context=48, batch_size=4, seed=config.seed, step=0
    )
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    _, loss = model(inputs, targets)
    loss.backward()
    summary = rr.train(config)
    after, _ = weights(summary["path"])
    for name, parameter in model.named_parameters():
        gradient, value = parameter.grad, before[name]
        decay = 0.1 if ".weight" in name and "norm" not in name and "embed" not in name else 0.0
        # the first step of Adam moves by the sign of the gradient, damped by its eps
        moved = value * (1 - 3e-3 * decay) - 3e-3 * gradient / (gradient.abs() + 1e-8)
        torch.testing.assert_close(after[name], moved, atol=2e-6, rtol=1e-5, msg=name)
    first = next(r for r in runs.lines(summary["path"]) if r["kind"] == "train")
    assert first["loss"] == pytest.approx(loss.item(), rel=1e-6)


def test_files_of_a_run(make_config, cheap_corpus, runs):
    config = make_config(rr.WAV(num_blocks=1), steps=5)
    summary = rr.train(config)
    run = Path(summary["path"])
    assert sorted(p.name for p in run.iterdir()) == [
        ".lock", "checkpoints", "config.json", "depth_weights.json", "env.json", "health.json",
        "metrics.jsonl", "summary.json",
    ]  # fmt: skip
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step_000004", "step_000005"]
    written = json.loads((run / "summary.json").read_text())
    assert summary == {**written, "path": str(run)}
    floor = evaluation_windows(cheap_corpus, context=48, max_windows=4).floor
    assert written["floor"] == floor.nats
    assert written["floor_exact"] is False
    assert written["tokens"] == 5 * 4 * 48
    model = rr.GPT(config.model)
    assert written["parameters"] == sum(p.numel() for p in model.parameters())
    assert written["policy_parameters"] == 5 * 12 * 2 + 4 * 2
    assert written["peak_memory_bytes"] > 50e6
    assert (written["memory_kind"], written["device"]) == ("resident", "cpu")
    best = min(r["loss"] for r in runs.lines(run) if r["kind"] == "validation")
    assert written["best_validation_loss"] == best
    rows = json.loads((run / "depth_weights.json").read_text())["weights"]
    assert [sum(w for w in row if w is not None) for row in rows] == pytest.approx([1.0] * 5)
    (session,) = json.loads((run / "env.json").read_text())["sessions"]
    assert session["after_step"] == 0
    assert session["torch"] == torch.__version__
    text = (run / "env.json").read_text()
    assert str(Path.home()) not in text
    assert str(run.parent) not in text


def test_depth_weights_are_of_text_not_of_what_fills_windows_up(make_config, cheap_corpus):
    config = make_config(
        rr.BlockAttnRes(num_blocks=2), model={"context": 256}, batch_size=3, steps=2
    )
    model, _, _ = rr.load(rr.train(config)["path"])
    found = evaluation_windows(cheap_corpus, context=256, max_windows=4)
    lengths = ((found.targets >= 0) * torch.arange(1, 257)).amax(1)
    assert lengths.max() < 256
    with rr.capture(model) as seen, torch.no_grad():
        for row, length in zip(found.inputs, lengths.tolist(), strict=True):
            model(row[None, :length])
    written = json.loads(Path(config.out, "depth_weights.json").read_text())["weights"]
    for row, wanted in zip(written, seen.table()["weights"], strict=True):
        assert row == pytest.approx(wanted, abs=1e-7)


def test_evaluation_weighs_windows_by_their_counted_tokens(make_config, cheap_corpus):
    config = make_config(model={"context": 256}, batch_size=3, steps=0, warmup_steps=0)
    summary = rr.train(config)
    found = evaluation_windows(cheap_corpus, context=256, max_windows=4)
    model, _, _ = rr.load(summary["path"])
    with torch.no_grad():
        _, loss = model(found.inputs, found.targets)
    assert summary["validation_loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert summary["floor"] == found.floor.nats
    assert summary["floor_exact"] is True
    assert (summary["steps"], summary["tokens_per_second"]) == (0, None)
    # an untrained head predicts nearly evenly
    assert loss.item() == pytest.approx(math.log(cheap_corpus.tokenizer.vocab_size), abs=0.01)


def test_finished_work_is_reused_and_fresh_keeps_the_old(make_config):
    config = make_config()
    first = rr.train(config)
    stamp = Path(first["path"], "summary.json").stat().st_mtime_ns
    assert rr.train(config) == first
    assert Path(first["path"], "summary.json").stat().st_mtime_ns == stamp
    again = rr.train(config, fresh=True)
    assert again["validation_loss"] == first["validation_loss"]
    rr.train(config, fresh=True)
    run = Path(config.out)
    assert sorted(p.name for p in run.parent.iterdir()) == ["run", "run.old-1", "run.old-2"]
    assert (run.parent / "run.old-1" / "summary.json").stat().st_mtime_ns == stamp


def test_a_folder_of_another_configuration_is_refused(make_config):
    rr.train(make_config())
    with pytest.raises(
        ValueError, match=r"rho_max \(2\.0 there, 1\.0 here\), learning_rate \(0\.003 there"
    ):
        rr.train(make_config(rr.WAV(num_blocks=1, rho_max=1.0), learning_rate=1e-3), resume=True)
    with pytest.raises(ValueError, match=r"differs in model\.residual"):
        rr.train(make_config(rr.PreNorm()))


def test_a_folder_of_another_corpus_is_refused(make_config, replaced, tmp_path):
    config = make_config()
    rr.train(config, stop_at=2)
    other = rr.prepare_storyworld(tmp_path / "others", seed=1, characters=30_000)
    with pytest.raises(ValueError, match="was trained on the corpus 'tales'"):
        rr.train(replaced(config, data=str(other.path)), resume=True)


def test_an_unfinished_run_needs_a_decision(make_config):
    config = make_config()
    rr.train(config, stop_at=3)
    with pytest.raises(ValueError, match=r"unfinished run, stopped after step_000003; --resume"):
        rr.train(config)


def test_a_model_of_another_vocabulary_is_refused(make_config, replaced):
    config = make_config()
    wrong = replaced(config, model=replaced(config.model, vocab_size=999))
    with pytest.raises(ValueError, match="vocab_size is 999, but"):
        rr.train(wrong)
    assert not Path(config.out).exists()


def test_a_context_that_the_corpus_cannot_fill_is_refused_before_anything_is_written(make_config):
    config = make_config(model={"context": 100_000})
    with pytest.raises(ValueError, match="too few for a window"):
        rr.train(config)
    assert not Path(config.out).exists()


def test_a_loss_that_is_no_longer_finite_stops_the_run(make_config):
    config = make_config(learning_rate=1e30, clip_norm=1e30, warmup_steps=0, steps=20)
    with pytest.raises(ValueError, match=r"step \d+: loss .*lower the learning rate\nlast good"):
        rr.train(config)
    assert not Path(config.out, "summary.json").exists()


def test_events_reach_the_listener_in_order(make_config):
    seen = []

    class Recorder(rr.Listener):
        def begin(self, run):
            assert run.path == Path(run.config.out)
            seen.append(("begin", run.label, run.step, run.total, run.floor.exact))

        def record(self, record):
            seen.append((record["kind"], record["step"]))

        def advance(self, step):
            seen.append(("advance", step))

        def end(self, summary):
            seen.append(("end", summary["steps"]))

    rr.train(make_config(steps=2), listener=Recorder())
    assert seen == [
        ("begin", "WAV", 0, 2, False), ("validation", 0), ("train", 1), ("advance", 1),
        ("train", 2), ("routing", 2), ("validation", 2), ("advance", 2), ("end", 2),
    ]  # fmt: skip


def test_bfloat16_stays_near_float32(make_config):
    single = rr.train(make_config(out="a"))
    half = rr.train(make_config(out="b", precision="bfloat16"))
    assert half["precision"] == "bfloat16"
    assert half["validation_loss"] == pytest.approx(single["validation_loss"], abs=0.02)
    assert half["validation_loss"] != single["validation_loss"]


def test_one_batch_can_be_learnt_by_heart(cheap_corpus):
    inputs, targets = training_batch(cheap_corpus, context=24, batch_size=2, seed=0, step=0)
    torch.manual_seed(0)
    model = rr.GPT(rr.tiny(2, vocab_size=cheap_corpus.tokenizer.vocab_size, context=24,
                           residual=rr.WAV(num_blocks=1)))  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(80):
        _, loss = model(inputs, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.05


def test_without_a_compiler_a_compiled_run_says_so_and_goes_on(make_config, monkeypatch, make_ear):
    monkeypatch.setattr("resroute.training.trainer.has_cpp_compiler", lambda: False)
    ear = make_ear()
    compiled = rr.train(make_config(out="a", compile=True), listener=ear)
    assert "no C++ compiler found: sublayers run uncompiled" in ear.said
    plain = rr.train(make_config(out="b"))
    assert compiled["validation_loss"] == plain["validation_loss"]


@pytest.mark.slow
# torch's own compiler uses what torch deprecates
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_run_stays_near_the_plain_one(make_config):
    compiled = rr.train(make_config(out="a", compile=True))
    plain = rr.train(make_config(out="b"))
    assert compiled["validation_loss"] == pytest.approx(plain["validation_loss"], abs=1e-4)


@pytest.mark.parametrize("first", [0, 1])
def test_a_run_stopped_before_its_first_steps_goes_on(make_config, first, runs):
    whole = rr.train(make_config(out="whole"))
    config = make_config(out="parts")
    rr.train(config, stop_at=first)
    rr.train(config, resume=True)
    runs.assert_same(whole["path"], config.out)
    with pytest.raises(ValueError, match="stop_at must be at least 0, got -1"):
        rr.train(make_config(out="none"), stop_at=-1)


def test_a_lost_metrics_file_does_not_cost_the_final_loss(make_config):
    config = make_config()
    whole = rr.train(config)
    metrics = Path(config.out, "metrics.jsonl")
    torn = "".join(metrics.read_text().splitlines(keepends=True)[:-1])
    for left in ("", torn):
        Path(config.out, "summary.json").unlink()
        metrics.write_text(left)
        assert rr.train(config, resume=True)["validation_loss"] == whole["validation_loss"]


def test_an_unfinished_run_without_checkpoint_says_that_it_starts_over(make_config, make_ear):
    def interrupt(step):
        raise KeyboardInterrupt

    config, ear = make_config(), make_ear(interrupt)
    with pytest.raises(KeyboardInterrupt):
        rr.train(config, listener=ear)
    assert ear.said[-1] == "stopped after step 1; newest checkpoint: none yet"
    ear = make_ear()
    rr.train(config, resume=True, listener=ear)
    assert "no checkpoint yet: starting from step 0" in ear.said
    rr.train(config, fresh=True, listener=ear)
    assert f"the old run is kept as {config.out}.old-1" in ear.said


def test_a_backend_that_cannot_serve_is_refused_before_anything_is_written(
    make_config, monkeypatch
):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    config = make_config(rr.WAV(num_blocks=1), out="refused", backend="triton", device="cpu")
    with pytest.raises(rr.UserError, match="it runs on CUDA GPUs, got device cpu"):
        rr.train(config)
    assert not Path(config.out).exists()


@pytest.mark.parametrize("backend", ["reference", "lean"])
def test_a_run_says_and_uses_the_backend_that_it_names(make_config, backend, make_ear):
    ear = make_ear()
    # who computes is no part of what a run is
    config = make_config(rr.WAV(num_blocks=1), out=f"by-{backend}", backend=backend)
    rr.train(config, listener=ear)
    assert any(f"routing by {backend}" in text for text in ear.said)
    assert config.run_name("x") == make_config(rr.WAV(num_blocks=1)).run_name("x")
