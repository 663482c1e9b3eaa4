"""Run folders edited, moved or signed to deceive; calls and signals that come at a bad time."""

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch

import resroute as rr
from resroute.training import checkpoint
from resroute.training.device import _without_folders
from resroute.training.distributed import World
from resroute.training.metrics import MetricsFile, finite
from resroute.training.preemption import StopRequest


@pytest.fixture
def stopped(make_config):
    config = make_config()
    rr.train(config, stop_at=4)
    return config


def change(config, sign_checkpoint, **fields):
    folder = Path(config.out, "checkpoints/step_000004")
    state = json.loads((folder / "state.json").read_text())
    text = json.dumps({**state, **fields}).replace('"1e999"', "1e999")
    (folder / "state.json").write_text(text)
    sign_checkpoint(folder)


@pytest.mark.parametrize(
    "fields",
    [
        {"step": 99999}, {"step": -5}, {"step": 3.7}, {"step": "3"}, {"step": True},
        {"seconds": "1e999"}, {"seconds": "inf"}, {"best_validation_loss": "nan"},
        {"best_validation_loss": True}, {"files": {}}, {"format_version": True},
        {"format_version": 1}, {"files": {"x" * 5000 + ".safetensors": {}}},
    ],
    ids=str,
)  # fmt: skip
def test_a_state_that_cannot_be_is_refused(stopped, sign_checkpoint, fields, make_ear):
    change(stopped, sign_checkpoint, **fields)
    newest = Path(stopped.out, "checkpoints/step_000004")
    with pytest.raises(rr.UserError) as caught:
        rr.load(newest)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600
    ear = make_ear()
    rr.train(stopped, resume=True, listener=ear)
    assert f"resumed from {newest.with_name('step_000002')}" in ear.said


def test_a_checkpoint_under_another_name_is_passed_over(stopped):
    folder = Path(stopped.out, "checkpoints")
    (folder / "step_000002").rename(folder / "step_000900")
    rr.train(stopped, resume=True)
    assert (folder / "step_000900.damaged-1").exists()
    assert rr.load(stopped.out)[2] == stopped


def test_checkpoints_without_their_states_do_not_start_a_run_over(stopped):
    lines = Path(stopped.out, "metrics.jsonl").read_text()
    for state in Path(stopped.out).glob("checkpoints/*/state.json"):
        state.unlink()
    with pytest.raises(rr.UserError, match=r"none of its checkpoints is whole \(step_000002, step"):
        rr.train(stopped, resume=True)
    assert Path(stopped.out, "metrics.jsonl").read_text() == lines


def test_an_evaluation_after_its_checkpoint_is_noted_in_it(make_config, monkeypatch):
    config = make_config()
    losses = iter([5.0, 4.0, 3.0])
    monkeypatch.setattr("resroute.training.learner.Learner.evaluate", lambda *_: next(losses))
    real = rr.training.trainer.Trainer._evaluate

    def cut_short(trainer):
        if trainer.step == 4:
            trainer.request.signal = signal.SIGTERM
        else:
            real(trainer)

    with monkeypatch.context() as patch:
        patch.setattr("resroute.training.trainer.Trainer._evaluate", cut_short)
        with pytest.raises(rr.Preempted):
            rr.train(config)
    folder = Path(config.out, "checkpoints")
    assert checkpoint.best(folder).name == "step_000002"
    rr.train(config, resume=True, stop_at=4)
    assert checkpoint.best(folder).name == "step_000004"
    saved = checkpoint.open_checkpoint(folder / "step_000004")
    assert (saved.progress.validation_loss, saved.progress.best_validation_loss) == (3.0, 3.0)


def test_numbers_that_overflow_are_written_as_null(tmp_path):
    record = {"kind": "routing", "step": 1, "a": [1.0, torch.inf], "b": {"c": torch.nan}, "d": True}
    assert finite(record) == {
        "kind": "routing", "step": 1, "a": [1.0, None], "b": {"c": None}, "d": True,
    }  # fmt: skip
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.path.write_text('{"kind": "train", "step": 1, "loss": 1e999}\n' * 2)
    assert file.rewind(5) == [{"kind": "train", "step": 1, "loss": None}]
    for line in ('{"step": 1}', '{"kind": "train"}', '{"kind": "train", "step": true}'):
        file.path.write_text(line + "\n")
        with pytest.raises(rr.UserError, match="a line names no kind or step; delete that line"):
            file.rewind(5)


def test_a_rate_beyond_all_measure_ends_in_a_line(make_config):
    config = make_config(rr.PreNorm(), learning_rate=1e6, observe_every=1, warmup_steps=0, steps=40)
    # or it comes to its end: no traceback in either case
    with contextlib.suppress(rr.UserError):
        rr.train(config)


def test_lines_without_numbers_do_not_stop_a_run(stopped):
    metrics = Path(stopped.out, "metrics.jsonl")
    with metrics.open("a") as file:
        file.write('{"kind": "train", "step": 3}\n{"kind": "validation", "step": 4, "loss": "x"}\n')
    assert rr.train(stopped, resume=True)["validation_loss"] > 0


def test_the_default_dtype_does_not_matter(make_config):
    plain = rr.train(make_config(out="a"))
    torch.set_default_dtype(torch.float64)
    try:
        other = rr.train(make_config(out="b"))
    finally:
        torch.set_default_dtype(torch.float32)
    assert other["validation_loss"] == plain["validation_loss"]
    with torch.inference_mode(), pytest.raises(rr.UserError, match="outside of inference_mode"):
        rr.train(make_config(out="c"))
    with torch.no_grad():
        assert rr.train(make_config(out="d"))["validation_loss"] == plain["validation_loss"]


def test_a_folder_that_is_named_by_a_dot(make_config, replaced, monkeypatch):
    config = make_config()
    rr.train(config)
    monkeypatch.chdir(config.out)
    rr.train(replaced(config, out="."), fresh=True)
    names = sorted(path.name for path in Path(config.out).parent.iterdir())
    assert names == ["run", "run.old-1"]


def test_a_link_to_a_run_is_not_what_fresh_moves(stopped, replaced):
    folder = Path(stopped.out)
    link = folder.with_name("link")
    link.symlink_to(folder.name)
    linked = replaced(stopped, out=str(link))
    with pytest.raises(rr.UserError) as caught:
        rr.train(linked, fresh=True)
    assert str(caught.value) == (
        f"{link} is a link, which --fresh would not follow; give its folder with --out "
        f"{folder.resolve()}"
    )
    assert sorted(path.name for path in folder.parent.iterdir()) == ["link", "run"]
    # going on writes into the folder behind it
    rr.train(linked, resume=True)
    assert link.is_symlink()
    assert (folder / "summary.json").is_file()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"sessions": 5}'])
def test_a_damaged_note_of_sessions_is_kept_and_begun_anew(stopped, text, make_ear):
    file = Path(stopped.out, "env.json")
    file.write_text(text)
    ear = make_ear()
    rr.train(stopped, resume=True, listener=ear)
    kept = file.with_name("env.json.damaged-1")
    assert f"{file}: damaged; kept as {kept}, begun anew" in ear.said
    assert kept.read_text() == text
    assert [s["after_step"] for s in json.loads(file.read_text())["sessions"]] == [4]


def test_lost_metrics_are_noticed(stopped, make_ear):
    metrics = Path(stopped.out, "metrics.jsonl")
    metrics.unlink()
    ear = make_ear()
    rr.train(stopped, resume=True, listener=ear)
    assert f"{metrics}: the lines up to step 4 are lost; the run goes on without them" in ear.said
    # the loss of the weights in the checkpoint is found again
    steps = {json.loads(line)["step"] for line in metrics.read_text().splitlines()}
    assert steps == {4, 5, 6}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_build_of_kernels(make_config, monkeypatch, number):
    def build(_):
        os.kill(os.getpid(), number)
        subprocess.run(["sleep", "60"], check=True)

    config = make_config()
    before = signal.getsignal(number)
    began = time.monotonic()
    with monkeypatch.context() as patch:
        patch.setattr("resroute.ops.prepare", build)
        with pytest.raises(rr.Preempted) as caught:
            rr.train(config)
    assert time.monotonic() - began < 30
    assert (caught.value.step, caught.value.signal) == (None, number)
    assert str(caught.value) == f"{config.out} was asked to stop before it began"
    assert signal.getsignal(number) is before
    assert not Path(config.out).exists()
    assert rr.train(config, resume=True)["validation_loss"] > 0


def test_one_training_at_a_time_in_a_process(make_config):
    refused = []

    class Second(rr.Listener):
        def advance(self, step):
            if step == 3:
                thread = threading.Thread(target=self.train)
                thread.start()
                thread.join()

        def train(self):
            with pytest.raises(rr.UserError) as caught:
                rr.train(make_config(out="second"))
            refused.append(str(caught.value))

    first = rr.train(make_config(out="first"), listener=Second())
    assert refused == [
        "this process is training another model; wait for it, or train in another process"
    ]
    assert rr.train(make_config(out="second"))["validation_loss"] == first["validation_loss"]


def test_commands_are_kept_without_folders():
    found = [_without_folders(a) for a in ("--out=/a/b", "data=/x/y", "/z/w", "--steps=3", "a/b")]
    assert found == ["--out=b", "data=y", "w", "--steps=3", "a/b"]


def test_a_run_of_a_million_steps_is_not_started_over(stopped):
    folder = Path(stopped.out, "checkpoints")
    (folder / "step_000002").rename(folder / "step_999999")
    (folder / "step_000004").rename(folder / "step_1000000")
    assert [path.name for path in checkpoint.candidates(folder)] == ["step_1000000", "step_999999"]
    (folder / "step_10").mkdir()
    lines = Path(stopped.out, "metrics.jsonl").read_text()
    for state in folder.glob("*/state.json"):
        state.unlink()
    with pytest.raises(rr.UserError, match=r"is whole \(step_999999, step_1000000\)"):
        rr.train(stopped, resume=True)
    assert Path(stopped.out, "metrics.jsonl").read_text() == lines


def test_a_signal_between_two_looks_is_not_another_signal():
    class Late(StopRequest):
        """Is asked by SIGTERM after the first look."""

        looks = 0

        @property
        def signal(self):
            self.looks += 1
            return signal.SIGTERM if self.looks > 1 else None

        @signal.setter
        def signal(self, number):
            pass

    request = Late()
    assert request.agreed(World()) is None
    assert request.agreed(World()) == signal.SIGTERM


def test_the_callers_random_numbers_are_left_alone(make_config):
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    rr.train(make_config(steps=1, model={"dropout": 0.1}))
    assert torch.equal(torch.rand(3), expected)
    with pytest.raises(rr.UserError):
        rr.train(make_config(out="b", learning_rate=1e30, clip_norm=1e30, warmup_steps=0, steps=20))
    torch.manual_seed(7)
    assert torch.equal(torch.rand(3), expected)


def test_a_closed_terminal_asks_to_stop_unless_nohup_says_otherwise():
    ignored, asked = StopRequest(), StopRequest()
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ignored.listening():
            os.kill(os.getpid(), signal.SIGHUP)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with asked.listening():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, former)
    assert (ignored.signal, asked.signal) == (None, signal.SIGTERM)
