"""`resroute train` as a process: signals, exit codes, and one run at a time in a folder."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import resroute as rr
from resroute.cli import main
from resroute.training.run import read_config

pytestmark = pytest.mark.slow


class Command:
    """`resroute train` of a small model into a folder."""

    def __init__(self, corpus, out):
        self.out = out
        self.words = (
            f"train --data {corpus} --out {out} --layers 2 --blocks 1 --context 48 --batch 4 "
            "--device cpu --precision float32 --set model.dim=12 --set model.num_heads=2 "
            "--set evaluation_windows=4 --set log_every=1 --set peak_flops=1e11"
        ).split()

    def start(self, *more):
        return subprocess.Popen(
            [sys.executable, "-m", "resroute", *self.words, *more],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def wait_for(self, process, step):
        """Until a line tells of a step of training."""
        metrics = self.out / "metrics.jsonl"
        while process.poll() is None:
            if metrics.exists() and f'"train", "step": {step},' in metrics.read_text():
                return
            time.sleep(0.005)
        raise AssertionError(process.communicate())


@pytest.fixture
def command(cheap_corpus, tmp_path):
    return Command(cheap_corpus.path, tmp_path / "run")


def ended(process):
    """Exit code, stdout, and the lines of stderr that are no progress."""
    out, err = process.communicate(timeout=120)
    return process.returncode, out, [x for x in err.splitlines() if not x.startswith("WAV")]


@pytest.fixture
def uninterrupted(workers, tmp_path):
    """A run of the same configuration as another, without a break."""

    def run(other):
        config, _ = read_config(other)
        config = dataclasses.replace(config, out=str(tmp_path / "whole"))
        (summary,) = workers.values("train", config=config)
        return summary["path"]

    return run


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_the_command_goes_on(command, runs, uninterrupted, number, code):
    settings = ("--steps", "150", "--set", "checkpoint_every=100", "--set", "ema_decay=0.9")
    process = command.start(*settings)
    command.wait_for(process, 5)
    process.send_signal(number)
    found, out, said = ended(process)
    (newest,) = runs.checkpoints(command.out)
    step = int(newest.name.removeprefix("step_"))
    assert 5 <= step < 150
    assert (found, out) == (code, "")
    assert said == [
        f"resroute: {command.out} was asked to stop after step {step}; its checkpoint is saved; "
        "--resume goes on"
    ]
    assert runs.leftovers(command.out) == []
    found, out, said = ended(command.start(*settings, "--resume"))
    assert (found, said) == (0, [f"resumed from {newest}"])
    assert out.endswith(f"{command.out}\n")
    runs.assert_same(uninterrupted(command.out), command.out)


def test_a_signal_in_an_evaluation(command, runs, workers, uninterrupted, tmp_path):
    # an evaluation of 400 batches takes a second or more
    corpus = rr.prepare_storyworld(tmp_path / "tales", characters=200_000)
    command = Command(corpus.path, command.out)
    process = command.start(
        "--steps", "15", "--batch", "1", "--context", "16", "--set", "evaluation_windows=400",
        "--set", "evaluate_every=10",
    )  # fmt: skip
    command.wait_for(process, 10)
    sent = time.monotonic()
    process.send_signal(signal.SIGTERM)
    found, _, said = ended(process)
    print(f"stopped {time.monotonic() - sent:.2f} s after the signal")
    assert found == 143
    assert said[0].startswith(f"resroute: {command.out} was asked to stop after step 10; its")
    (newest,) = runs.checkpoints(command.out)
    assert json.loads((newest / "state.json").read_text())["validation_loss"] is None
    assert [r["kind"] for r in runs.lines(command.out) if r["step"] == 10] == ["train"]
    config, _ = read_config(command.out)
    workers.values("train", config=config, resume=True)
    runs.assert_same(uninterrupted(command.out), command.out)


def test_a_folder_takes_one_run_at_a_time(command, workers, capsys):
    settings = ("--steps", "100000", "--set", "checkpoint_every=5")
    process = command.start(*settings)
    command.wait_for(process, 11)
    for more in ((), ("--resume",), ("--fresh",)):
        assert main([*command.words, *settings, *more]) == 2
        assert capsys.readouterr().err == (
            f"resroute: {command.out} is in use by another run; wait for it, or give another "
            "folder with --out\n"
        )
    assert process.poll() is None
    process.kill()
    assert ended(process)[0] == -signal.SIGKILL
    config, _ = read_config(command.out)
    (left,) = workers.values("train", config=config, resume=True, stop_at=1)
    assert left["step"] >= 10
    assert [path.name for path in command.out.parent.iterdir()] == [Path(command.out).name]
