"""`resroute train` under the real `torchrun`: equal losses, restarts, signals, two machines."""

import dataclasses
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import resroute as rr
from resroute.training.run import read_config

pytestmark = pytest.mark.slow

_MOST_SECONDS = 150


class Torchrun:
    """`torchrun -m resroute train` of a small model into a folder."""

    def __init__(self, words, out, lines):
        self.out = out
        self.lines = lines
        self.words = ["-m", "resroute", *words]
        self.started = []

    def start(self, launch, *more, within=(), **environment):
        """Options of torchrun, then of the command; `within` comes before all."""
        process = subprocess.Popen(
            [
                *within, sys.executable, "-m", "torch.distributed.run", *launch, *self.words, *more,
            ],
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        self.started.append(process)
        return process

    def wait_for(self, process, step):
        """Until a line tells of a step of training."""
        deadline = time.monotonic() + _MOST_SECONDS
        while process.poll() is None and time.monotonic() < deadline:
            if ("train", step) in [(line["kind"], line["step"]) for line in self.lines(self.out)]:
                return
            time.sleep(0.01)
        process.kill()
        raise AssertionError(process.communicate())

    def end(self):
        """Leave no process behind."""
        for process in self.started:
            for pid in [*workers_of(process.pid), process.pid]:
                if process.returncode is None:
                    os.kill(pid, signal.SIGKILL)
            process.communicate()


def workers_of(agent):
    """Processes that torchrun has started."""
    children = Path(f"/proc/{agent}/task/{agent}/children")
    return [int(pid) for pid in children.read_text().split()] if children.exists() else []


@pytest.fixture
def torchrun(cheap_corpus, train_words, tmp_path, runs):
    out = tmp_path / "run"
    command = Torchrun(train_words(cheap_corpus.path, out), out, runs.lines)
    yield command
    command.end()


@pytest.fixture
def alone(workers, tmp_path, runs):
    """Lines of a run of the same configuration as another, on so many processes, unbroken."""

    def run(other, size=1):
        config, _ = read_config(other)
        config = dataclasses.replace(config, out=str(tmp_path / f"alone-{size}"))
        return runs.lines(workers.values("train", size, config=config)[0]["path"])

    return run


def assert_close(ours, theirs):
    assert [(line["kind"], line["step"]) for line in ours] == [
        (line["kind"], line["step"]) for line in theirs
    ]
    for a, b in zip(ours, theirs, strict=True):
        if "loss" in b:
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-6)


STANDALONE = ("--standalone", "--nproc-per-node", "2")


def test_two_processes_are_one_run_and_one_speaks(torchrun, alone, runs):
    process = torchrun.start(STANDALONE, "--steps", "6", "--blocks", "2")
    out, err = process.communicate(timeout=_MOST_SECONDS)
    assert process.returncode == 0, err
    assert_close(runs.lines(torchrun.out), alone(torchrun.out))
    assert out.count("entropy floor") == 1
    assert out.splitlines()[-1] == str(torchrun.out)
    assert err.count("2 processes (ddp)") == 1
    assert err.count("WAV 6/6: ") == 1
    # a note on a setting, and a mistake: by the main process alone
    assert err.count("resroute: note: ") == 1, err
    process = torchrun.start(STANDALONE, "--steps", "7", "--blocks", "2")
    out, err = process.communicate(timeout=_MOST_SECONDS)
    assert process.returncode == 1
    assert err.count("differs in steps (6 there, 7 here)") == 1
    assert not out


LATE = """
import os, runpy, time
if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0" and os.environ["RANK"] == "0":
    time.sleep(2)
runpy.run_module("resroute", run_name="__main__", alter_sys=True)
"""


def test_torchrun_goes_on_after_a_worker_was_killed(torchrun, alone, tmp_path, runs):
    # after the restart the main process comes last, when what the killed one has left in
    # torchrun's store was long seen
    script = tmp_path / "late.py"
    script.write_text(LATE)
    torchrun.words[:2] = [str(script)]
    process = torchrun.start(
        [*STANDALONE, "--max-restarts", "1"],
        "--steps", "90", "--resume", "--set", "parallel=fsdp",
        "--set", "checkpoint_every=20", "--set", "checkpoint_layout=sharded",
    )  # fmt: skip
    torchrun.wait_for(process, 30)
    main, _ = workers_of(process.pid)
    os.kill(main, signal.SIGKILL)
    out, err = process.communicate(timeout=_MOST_SECONDS)
    assert process.returncode == 0, err
    assert err.count("resumed from ") == 1
    assert out.count("entropy floor") == 1
    env = json.loads((torchrun.out / "env.json").read_text())
    first, second = (session["after_step"] for session in env["sessions"])
    assert first == 0
    assert second in (20, 40, 60, 80)
    # to the bit those of two processes that nobody has killed, and close to those of one
    assert runs.lines(torchrun.out) == alone(torchrun.out, 2)
    assert_close(runs.lines(torchrun.out), alone(torchrun.out))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_torchrun_leaves_a_checkpoint(torchrun, number, runs):
    # it hands the signal on to its workers, and waits for them up to 30 seconds
    process = torchrun.start(STANDALONE, "--steps", "2000", "--set", "checkpoint_every=1999")
    torchrun.wait_for(process, 5)
    process.send_signal(number)
    out, err = process.communicate(timeout=_MOST_SECONDS)
    assert process.returncode == 1
    assert not out
    assert err.count("was asked to stop after step ") == 1
    assert err.count("its checkpoint is saved; --resume goes on") == 1
    (checkpoint,) = (torchrun.out / "checkpoints").iterdir()
    step = int(checkpoint.name.removeprefix("step_"))
    assert f"was asked to stop after step {step};" in err
    assert max(line["step"] for line in runs.lines(torchrun.out)) == step
    rr.load(torchrun.out)


@pytest.fixture
def machines():
    """Two network namespaces with an address each; a name, an address and an interface of each."""
    if not (shutil.which("ip") and hasattr(os, "geteuid") and os.geteuid() == 0):
        pytest.skip("network namespaces need root and the command ip")
    token = secrets.token_hex(3)
    subnet = f"10.{200 + secrets.randbelow(50)}.{secrets.randbelow(256)}"
    nodes = [(f"rr{token}n{i}", f"{subnet}.{i + 1}", f"rr{token}v{i}") for i in range(2)]

    def ip(*words):
        return subprocess.run(["ip", *words], capture_output=True, text=True, timeout=20)

    try:
        ends = [word for name, _, link in nodes for word in ("peer", "name", link, "netns", name)]
        steps = [
            *(("netns", "add", name) for name, _, _ in nodes),
            ("link", "add", *ends[2:5], "type", "veth", *ends[5:]),
            *(("-n", name, "addr", "add", f"{at}/24", "dev", link) for name, at, link in nodes),
            *(("-n", name, "link", "set", link, "up") for name, _, link in nodes),
            *(("-n", name, "link", "set", "lo", "up") for name, _, _ in nodes),
        ]
        for step in steps:
            if (done := ip(*step)).returncode:
                pytest.skip(f"no network namespaces here: {done.stderr.strip()}")
        yield nodes
    finally:
        # with it go its interfaces
        for name, _, _ in nodes:
            ip("netns", "del", name)


def test_two_machines_are_one_run(torchrun, alone, machines, runs):
    (_, host, _), _ = machines
    processes = [
        torchrun.start(
            [
                "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d",
                "--rdzv-endpoint", f"{host}:29417", "--rdzv-id", "tale", "--local-addr", address,
                # names of machines resolve to none of these addresses
                "--rdzv-conf", f"is_host={int(address == host)}",
            ],
            "--steps", "6", "--set", "parallel=fsdp",
            within=("ip", "netns", "exec", name), GLOO_SOCKET_IFNAME=link,
        )
        for name, address, link in machines
    ]  # fmt: skip
    ended = [process.communicate(timeout=_MOST_SECONDS) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], ended
    assert_close(runs.lines(torchrun.out), alone(torchrun.out))
    assert sum(out.count("entropy floor") for out, _ in ended) == 1
    assert sum(err.count("2 processes (fsdp)") for _, err in ended) == 1
    env = json.loads((torchrun.out / "env.json").read_text())
    assert [session["processes"] for session in env["sessions"]] == [2]
