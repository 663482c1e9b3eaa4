"""Stopping, going on, and refusing to: preemption, locks, damaged checkpoints, determinism."""

import dataclasses
import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import resroute as rr
from resroute.training.run import RunLock


def send_after(step, number):
    """What sends this process a signal after a step."""
    return lambda now: os.kill(os.getpid(), number) if now == step else None


def final(path):
    folder = sorted(Path(path, "checkpoints").glob("step_??????"))[-1]
    names = ("model", "optimizer", "ema")
    files = [folder / f"{n}.safetensors" for n in names if (folder / f"{n}.safetensors").exists()]
    return {f"{f.stem}:{name}": t for f in files for name, t in load_file(f).items()}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_the_run_goes_on_to_the_bit(make_config, number, runs, make_ear):
    options = {"checkpoint_every": 100, "model": {"dropout": 0.1}, "ema_decay": 0.5}
    whole = rr.train(make_config(out="whole", **options))
    config = make_config(out="stopped", **options)
    before = signal.getsignal(number)
    with pytest.raises(rr.Preempted) as caught:
        rr.train(config, listener=make_ear(send_after(3, number)))
    assert (caught.value.step, caught.value.signal) == (3, number)
    assert str(caught.value) == (
        f"{config.out} was asked to stop after step 3; its checkpoint is saved"
    )
    assert signal.getsignal(number) is before
    ear = make_ear()
    rr.train(config, resume=True, listener=ear)
    assert f"resumed from {config.out}/checkpoints/step_000003" in ear.said
    runs.assert_same(whole["path"], config.out)


def test_a_signal_in_an_evaluation_cuts_it_short_and_it_is_done_again(
    make_config, monkeypatch, runs
):
    whole = rr.train(make_config(out="whole"))
    config = make_config(out="stopped")
    record = rr.training.metrics.MetricsFile.append

    def send(self, line):
        record(self, line)
        # the line of training comes before the evaluation of the same step
        if line["step"] == 4 and line["kind"] == "train":
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("resroute.training.metrics.MetricsFile.append", send)
    with pytest.raises(rr.Preempted):
        rr.train(config)
    monkeypatch.undo()
    assert runs.lines(config.out)[-1]["kind"] == "train"
    state = json.loads(Path(config.out, "checkpoints/step_000004/state.json").read_text())
    assert state["validation_loss"] is None
    rr.train(config, resume=True)
    runs.assert_same(whole["path"], config.out)


def test_a_second_signal_of_a_kind_is_not_held_back(make_config, make_ear):
    def send_twice(step):
        if step == 3:
            holding = signal.getsignal(signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            # two that come at once are one
            while signal.getsignal(signal.SIGINT) is holding:
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)

    config = make_config()
    ear = make_ear(send_twice)
    # a shell starts what is in its background with the signal ignored
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt) as caught:
            rr.train(config, listener=ear)
    finally:
        signal.signal(signal.SIGINT, former)
    assert not isinstance(caught.value, rr.Preempted)
    assert ear.said[-1] == "stopped after step 3; newest checkpoint: step_000002"


@pytest.mark.parametrize("stop", [2, 3])
def test_intervals_may_change_where_a_run_goes_on(make_config, stop, runs):
    before = {"log_every": 2, "evaluate_every": 3, "checkpoint_every": 4}
    after = {"log_every": 1, "evaluate_every": 2, "checkpoint_every": 1, "observe_every": 2}
    whole = rr.train(make_config(out="whole", steps=8, **after))
    config = make_config(out="parts", steps=8, **before)
    rr.train(config, stop_at=stop)
    rr.train(dataclasses.replace(config, **after), resume=True)
    assert all(torch.equal(t, final(config.out)[n]) for n, t in final(whole["path"]).items())
    expected = [line for line in runs.lines(whole["path"]) if line["step"] > stop]
    found = [line for line in runs.lines(config.out) if line["step"] > stop]
    assert found == expected
    keys = [(line["kind"], line["step"]) for line in runs.lines(config.out)]
    assert len(keys) == len(set(keys))


def test_a_run_may_go_on_with_other_fields_that_only_round(make_config):
    whole = rr.train(make_config(out="whole"))
    config = make_config(out="parts")
    rr.train(config, stop_at=3)
    other = {"accumulation": 2, "activation_checkpointing": True, "keep": 5}
    resumed = rr.train(dataclasses.replace(config, **other), resume=True)
    assert resumed["validation_loss"] == pytest.approx(whole["validation_loss"], rel=1e-6)


@pytest.fixture
def scripted(monkeypatch):
    """Evaluations that find given losses, in turn."""

    def script(*losses):
        left = iter(losses)
        monkeypatch.setattr(
            "resroute.training.learner.Learner.evaluate", lambda *_, **__: next(left)
        )

    return script


def test_best_so_far_goes_on(make_config, scripted):
    config = make_config()
    scripted(5.0, 3.0, 4.0)
    rr.train(config, stop_at=4)
    scripted(3.5)
    resumed = rr.train(config, resume=True)
    assert (resumed["best_validation_loss"], resumed["validation_loss"]) == (3.0, 3.5)


def test_the_latest_and_the_best_checkpoints_are_kept(make_config, scripted):
    scripted(5.0, 4.0, 3.0, 3.2, 3.3, 3.4, 3.5)
    summary = rr.train(make_config(keep=3, steps=12))
    folder = Path(summary["path"], "checkpoints")
    names = sorted(path.name for path in folder.iterdir())
    assert names == [f"step_{step:06d}" for step in (4, 8, 10, 12)]
    model, _, _ = rr.load(summary["path"], best=True)
    saved = load_file(folder / "step_000004" / "model.safetensors")
    assert torch.equal(model.embedding.weight, saved["embedding.weight"])
    newest, _, _ = rr.load(summary["path"])
    assert not torch.equal(model.embedding.weight, newest.embedding.weight)


def test_a_second_run_in_the_same_folder_is_refused(make_config):
    config = make_config()
    rr.train(config, stop_at=2)
    with RunLock() as lock:
        lock.take(Path(config.out))
        for options in ({"resume": True}, {"fresh": True}, {}):
            with pytest.raises(rr.UserError, match="is in use by another run; wait for it"):
                rr.train(config, **options)
    rr.train(config, resume=True)
    # a finished one is only read
    with RunLock() as lock:
        lock.take(Path(config.out))
        assert rr.train(config)["validation_loss"] > 0


def test_what_a_kill_left_is_removed(make_config):
    config = make_config()
    rr.train(config, stop_at=2)
    run = Path(config.out)
    half = run / "checkpoints" / ".step_000004.0123abcd.tmp"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    (run / ".metrics.jsonl.0123abcd.tmp").write_bytes(b"half")
    (run / ".mine.tmp").write_bytes(b"not ours")
    rr.train(config, resume=True)
    assert not half.exists()
    assert [path.name for path in run.glob(".*.tmp")] == [".mine.tmp"]


def test_a_damaged_checkpoint_is_told_of_kept_and_passed_over(make_config, runs, make_ear):
    whole = rr.train(make_config(out="whole"))
    config = make_config(out="parts")
    rr.train(config, stop_at=4)
    newest = Path(config.out, "checkpoints/step_000004")
    content = (newest / "optimizer.safetensors").read_bytes()
    (newest / "optimizer.safetensors").write_bytes(content[:-1])
    ear = make_ear()
    rr.train(config, resume=True, listener=ear)
    assert ear.said[:3] == [
        f"{newest}/optimizer.safetensors: truncated; use another checkpoint: going back",
        f"kept as {newest}.damaged-1",
        f"resumed from {newest.with_name('step_000002')}",
    ]
    runs.assert_same(whole["path"], config.out)
    assert (newest.with_name("step_000004.damaged-1") / "state.json").exists()


def test_a_checkpoint_without_its_state_is_kept_aside(make_config, runs):
    whole = rr.train(make_config(out="whole"))
    config = make_config(out="parts")
    rr.train(config, stop_at=4)
    newest = Path(config.out, "checkpoints/step_000004")
    (newest / "state.json").unlink()
    rr.train(config, resume=True)
    runs.assert_same(whole["path"], config.out)
    aside = newest.with_name("step_000004.damaged-1")
    assert sorted(path.name for path in aside.iterdir()) == [
        "model.safetensors", "optimizer.safetensors",
    ]  # fmt: skip


def test_a_run_that_comes_between_is_noticed(make_config, workers, monkeypatch):
    config = make_config()
    take = RunLock.take

    def late(lock, path):
        monkeypatch.setattr(RunLock, "take", take)
        # another process was faster, and is gone
        workers.values("train", config=config, stop_at=2)
        take(lock, path)

    monkeypatch.setattr(RunLock, "take", late)
    with pytest.raises(rr.UserError, match=r"unfinished run, stopped after step_000002; --resume"):
        rr.train(config)


def test_a_run_without_any_good_checkpoint_is_not_started_over(make_config):
    config = make_config()
    rr.train(config, stop_at=4)
    for folder in Path(config.out, "checkpoints").iterdir():
        (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(rr.UserError) as caught:
        rr.train(config, resume=True)
    first, second = str(caught.value).splitlines()
    assert first == f"{config.out}: none of its 2 checkpoints can be used"
    assert "step_000002/model.safetensors: truncated" in second


def test_weights_that_are_not_finite_are_not_saved(make_config):
    class Spoiler(rr.Listener):
        """Makes a weight infinite after the third step, as an overflowing update does."""

        def record(self, record):
            if (record["kind"], record["step"]) == ("train", 4):
                model = next(m for m in MODELS if m.config.num_layers == 2)
                with torch.no_grad():
                    model.embedding.weight[0, 0] = torch.inf

    config = make_config(evaluate_every=100)
    seen = rr.training.learner.Learner.__init__

    def remember(self, *arguments):
        seen(self, *arguments)
        MODELS.append(self.model)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("resroute.training.learner.Learner.__init__", remember)
        with pytest.raises(rr.UserError) as caught:
            rr.train(config, listener=Spoiler())
    newest = f"{config.out}/checkpoints/step_000002"
    assert str(caught.value) == (
        "step 4: the weights are no longer finite and were not saved; lower the learning rate\n"
        f"last good checkpoint: {newest}"
    )


MODELS: list[rr.GPT] = []


def test_a_loss_that_is_no_longer_finite_names_everything(make_config):
    config = make_config(learning_rate=1e30, clip_norm=1e30, warmup_steps=0, steps=20)
    with pytest.raises(
        ValueError,
        match=r"^step \d+: loss \S+ with gradient norm \S+ at learning rate [0-9.]+e\+\d+; "
        r"lower the learning rate\nlast good checkpoint: ",
    ):
        rr.train(config)


def test_an_average_of_the_weights_follows_them(make_config, runs):
    config = make_config(steps=3, ema_decay=0.75, checkpoint_every=1, keep=10, evaluate_every=1)
    summary = rr.train(config)
    torch.manual_seed(config.seed)
    average = {n: p.detach().clone() for n, p in rr.GPT(config.model).named_parameters()}
    for step in (1, 2, 3):
        folder = Path(summary["path"], f"checkpoints/step_{step:06d}")
        weights, found = (load_file(folder / f"{n}.safetensors") for n in ("model", "ema"))
        assert found.keys() == weights.keys()
        for name, value in average.items():
            average[name] = 0.75 * value + 0.25 * weights[name]
            torch.testing.assert_close(found[name], average[name], rtol=1e-6, atol=1e-7)
    model, _, _ = rr.load(summary["path"], ema=True)
    assert torch.equal(model.head.weight, found["head.weight"])
    last = runs.lines(summary["path"], "validation")[-1]
    assert last["loss"] == summary["validation_loss"]
    evaluation = rr.data.evaluation_windows(
        rr.data.open_corpus(Path(config.data)), context=48, max_windows=4
    )
    with torch.no_grad():
        _, loss = model(evaluation.inputs, evaluation.targets)
    assert last["ema_loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert last["ema_loss"] > last["loss"]
    plain = rr.train(make_config(out="plain", steps=3))
    assert plain["validation_loss"] == summary["validation_loss"]
    with pytest.raises(rr.UserError, match="has no average of weights; train with ema_decay"):
        rr.load(plain["path"], ema=True)


@pytest.mark.parametrize(("steps", "warmup"), [(0, 0), (1, 0), (1, 1), (4, 4), (4, 0), (2, 50)])
def test_short_runs_and_warm_ups_of_every_length_behave(make_config, steps, warmup, runs):
    summary = rr.train(make_config(steps=steps, warmup_steps=warmup))
    rates = [r["learning_rate"] for r in runs.lines(summary["path"], "train")]
    assert len(rates) == steps
    peak, final_rate = 3e-3, 3e-4
    if warmup >= steps:
        assert rates == pytest.approx([peak * (i + 1) / warmup for i in range(steps)])
    else:
        assert rates[-1] == pytest.approx(final_rate)
    assert sorted(r["step"] for r in runs.lines(summary["path"], "validation"))[-1] == steps
    assert rr.load(summary["path"])[2].steps == steps


def test_names_of_runs_do_not_change_with_later_fields(make_config):
    # of a configuration with every field at its default but these
    config = rr.TrainConfig(model=rr.GPTConfig(vocab_size=30, residual=rr.WAV()), data="x")
    assert config.run_name("corpus") == "wav-L12-s0-18616e11"
    assert make_config(keep=7, parallel="fsdp", accumulation=2).run_name("x") == (
        make_config().run_name("x")
    )
    assert make_config(ema_decay=0.9).run_name("x") != make_config().run_name("x")
