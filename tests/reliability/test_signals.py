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
from resroute import ops
from resroute.cli import main
from resroute.training.run import read_config

pytestmark = pytest.mark.slow


class Command:
    """`resroute train` of a small model into a folder."""

    def __init__(self, words, out):
        self.out = out
        self.words = words

    def start(self, *more, **environment):
        return subprocess.Popen(
            [sys.executable, "-m", "resroute", *self.words, *more],
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
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
def command(cheap_corpus, train_words, tmp_path):
    out = tmp_path / "run"
    return Command(train_words(cheap_corpus.path, out), out)


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


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 143), (signal.SIGINT, 130)]
)
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


def test_a_signal_in_an_evaluation(command, train_words, runs, workers, uninterrupted, tmp_path):
    # an evaluation of 400 batches takes a second or more
    corpus = rr.prepare_storyworld(tmp_path / "tales", characters=200_000)
    command.words = train_words(corpus.path, command.out)
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


COMPILER = """\
#!/bin/sh
case " $* " in
  *" -c "*) touch "$0.started"; [ -e "$0.fails" ] && exit 1; exec sleep 100;;
esac
exec c++ "$@"
"""


@pytest.mark.skipif(not ops.native_available(), reason="no C++ compiler")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_while_the_kernels_are_built(command, tmp_path, number, code):
    compiler, cache = tmp_path / "compiler", tmp_path / "cache"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    environment = {"CXX": str(compiler), "TORCH_EXTENSIONS_DIR": str(cache)}
    process = command.start("--steps", "2", **environment)
    deadline = time.monotonic() + 60
    while not Path(f"{compiler}.started").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(number)
    compiling = "compiling the CPU kernels for depth routing, once: about a minute"
    assert ended(process) == (
        code, "",
        [compiling, f"resroute: {command.out} was asked to stop before it began; --resume goes on"],
    )  # fmt: skip
    (folder,) = cache.iterdir()
    assert [path.name for path in folder.iterdir()] == ["build.lock"]
    # the next build begins at once, and a run does without one that fails
    Path(f"{compiler}.fails").touch()
    found, out, said = ended(command.start("--steps", "2", "--resume", **environment))
    assert found == 0
    assert said[0] == compiling
    assert said[1].startswith("the CPU kernels could not be built (")
    assert said[1].endswith("): depth routing runs in plain torch")
    assert out.endswith(f"{command.out}\n")


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
