"""A full disk stops a run with a plain line; what was saved stays, and the run goes on from it."""

import dataclasses
import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

import resroute as rr
from resroute.training.run import read_config

pytestmark = pytest.mark.slow

SIZE = 4 << 20
REASONS = ("No space left on device", "File too large")


class Disk:
    """A file system of its own, which can be filled."""

    def __init__(self, path):
        self.path = path
        self.filler = path / "filler"

    def fill(self, room):
        """Leave `room` bytes."""
        self.free()
        stat = os.statvfs(self.path)
        with self.filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, stat.f_bavail * stat.f_frsize - room)

    def free(self):
        self.filler.unlink(missing_ok=True)


class Limit(Disk):
    """Stands in where nothing can be mounted: no file of this process grows past a size."""

    def fill(self, room):
        resource = pytest.importorskip("resource", reason="no file system to fill, no limits")
        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, most))

    def free(self):
        resource = pytest.importorskip("resource", reason="no file system to fill, no limits")
        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))


@pytest.fixture
def limit(tmp_path):
    made = Limit(tmp_path)
    yield made
    made.free()


@pytest.fixture
def disk(tmp_path, limit):
    """A disk, or what stands in for it."""
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "resroute-test", str(path)]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        yield limit
        return
    yield Disk(path)
    subprocess.run(["umount", "--lazy", str(path)], check=True, timeout=20)


class Filler(rr.Listener):
    """Fills a disk after a step."""

    def __init__(self, disk, step, room):
        self.disk = disk
        self.step = step
        self.room = room

    def advance(self, step):
        if step == self.step:
            self.disk.fill(self.room() if callable(self.room) else self.room)


@pytest.fixture
def on(make_config):
    """A configuration whose run lies on a disk."""

    def make(disk, **options):
        config = make_config(**options)
        return dataclasses.replace(config, out=str(disk.path / "run"))

    return make


def refused(config, listener=None, **options):
    """The lines with which a run stops on a full disk."""
    with pytest.raises(rr.UserError) as caught:
        rr.train(config, listener=listener, **options)
    message = str(caught.value)
    assert 1 <= len(message.splitlines()) <= 2
    assert message.startswith(f"{config.out}/")
    assert "cannot be written (" in message
    assert "check the" in message
    assert any(reason in message for reason in REASONS)
    return message


def weights(path):
    return {name: value.tolist() for name, value in rr.load(path)[0].state_dict().items()}


def check_full_while_saving(disk, on, make_config, runs, layout, share):
    options = {"steps": 8, "ema_decay": 0.9, "checkpoint_layout": layout, "peak_flops": 1e11}
    whole = rr.train(make_config(out="whole", keep=9, **options))
    (first, *_) = runs.checkpoints(whole["path"])
    size = sum(file.stat().st_size for file in first.iterdir())
    config = on(disk, **options)
    refused(config, Filler(disk, 3, int(share * size)))
    assert runs.leftovers(disk.path) == []
    assert [path.name for path in runs.checkpoints(config.out)] == [first.name]
    assert weights(config.out) == weights(first)
    # still full
    refused(config, resume=True)
    assert runs.leftovers(disk.path) == []
    assert weights(config.out) == weights(first)
    disk.free()
    rr.train(config, resume=True)
    runs.assert_same(whole["path"], config.out)


@pytest.mark.parametrize("layout", ["gathered", "sharded"])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.9])
def test_full_while_a_checkpoint_is_written(disk, on, make_config, runs, layout, share):
    check_full_while_saving(disk, on, make_config, runs, layout, share)


@pytest.mark.parametrize("layout", ["gathered", "sharded"])
def test_a_file_that_may_not_grow_while_a_checkpoint_is_written(
    limit, on, make_config, runs, layout
):
    check_full_while_saving(limit, on, make_config, runs, layout, 0.2)


@pytest.mark.parametrize("kind", ["disk", "limit"])
def test_full_while_metrics_are_appended(request, on, make_config, runs, kind):
    disk = request.getfixturevalue(kind)
    options = {"steps": 40, "checkpoint_every": 20, "evaluate_every": 20, "observe_every": 1}
    whole = rr.train(make_config(out="whole", **options))
    config = on(disk, **options)
    metrics = Path(config.out, "metrics.jsonl")
    # a file system takes what still fits into the file's last block
    room = 0 if kind == "disk" else lambda: metrics.stat().st_size + 100
    message = refused(config, Filler(disk, 21, room))
    assert message.startswith(f"{metrics}: cannot be written")
    assert not metrics.read_bytes().endswith(b"\n")
    assert runs.leftovers(disk.path) == []
    saved = weights(config.out)
    refused(config, resume=True)
    assert weights(config.out) == saved
    disk.free()
    rr.train(config, resume=True)
    runs.assert_same(whole["path"], config.out)


@pytest.mark.parametrize("layout", ["gathered", "sharded"])
def test_full_where_only_a_flush_finds_it_out(make_config, runs, monkeypatch, layout):
    # as file systems with quotas or over a network do
    options = {"steps": 4, "checkpoint_layout": layout, "peak_flops": 1e11}
    flush = os.fsync
    calls = 0
    fails_at = None

    def fail(descriptor):
        nonlocal calls
        calls += 1
        if calls == fails_at:
            raise OSError(errno.ENOSPC, REASONS[0])
        flush(descriptor)

    monkeypatch.setattr("os.fsync", fail)
    whole = rr.train(make_config(out="whole", **options))
    for number in range(1, calls + 1, 3):
        config = make_config(out=f"stopped-{number}", **options)
        calls, fails_at = 0, number
        refused(config)
        assert runs.leftovers(config.out) == []
        fails_at = None
        rr.train(config, resume=True)
        runs.assert_same(whole["path"], config.out)


def test_the_command_says_it_in_one_line(disk, make_config, runs, cheap_corpus):
    sized = rr.train(make_config(out="sized", steps=1))
    size = sum(file.stat().st_size for file in runs.checkpoints(sized["path"])[0].iterdir())
    # for one checkpoint and what belongs to a run, not for two
    disk.fill(int(1.6 * size) if type(disk) is Disk else size // 4)
    command = (
        f"train --data {cheap_corpus.path} --out {disk.path / 'run'} --layers 2 --blocks 1 "
        "--context 48 --steps 6 --batch 4 --device cpu --precision float32 --set model.dim=12 "
        "--set model.num_heads=2 --set checkpoint_every=2 --set evaluation_windows=4 "
        "--set peak_flops=1e11"
    )
    done = subprocess.run(
        [sys.executable, "-m", "resroute", *command.split()],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stdout == ""
    said = [line for line in done.stderr.splitlines() if not line.startswith("WAV")]
    assert len(said) == 1
    assert said[0].startswith(f"resroute: {disk.path / 'run'}/")
    assert any(reason in said[0] for reason in REASONS)
    assert runs.leftovers(disk.path) == []
    config, _ = read_config(disk.path / "run")
    if type(disk) is Disk:
        assert rr.load(disk.path / "run")[2] == config
    disk.free()
    rr.train(config, resume=True)
    whole = rr.train(dataclasses.replace(config, out=str(disk.path / "whole")))
    runs.assert_same(whole["path"], config.out)


def test_full_where_two_processes_write(disk, on, workers, make_config, runs):
    if type(disk) is Limit:
        pytest.skip("no file system to fill: limits are those of a process")
    options = {"steps": 8, "checkpoint_every": 2, "peak_flops": 1e11, "parallel": "fsdp"}
    for layout in ("gathered", "sharded"):
        whole = make_config(out=f"whole-{layout}", checkpoint_layout=layout, **options)
        workers.values("train", 2, config=whole)
        size = sum(f.stat().st_size for f in runs.checkpoints(whole.out)[-1].iterdir())
        disk.fill(int(1.6 * size))
        config = on(disk, checkpoint_layout=layout, **options)
        answers = workers.run("train", 2, config=config, timeout=60)
        # one says it for both
        assert [answer["error"][0] for answer in answers] == ["UserError", "OtherRankError"]
        assert any(reason in answers[0]["error"][1] for reason in REASONS)
        assert runs.leftovers(disk.path) == []
        assert [path.name for path in runs.checkpoints(config.out)] == ["step_000002"]
        disk.free()
        workers.values("train", 2, config=config, resume=True)
        runs.assert_same(whole.out, config.out)
        Path(config.out).rename(disk.path / f"done-{layout}")
