"""Whose a run folder is: locks, moving aside, and folders that cannot be written."""

import errno
import os
from pathlib import Path

import pytest

import resroute as rr
from resroute.training import run
from resroute.training.run import RunInUseError, RunLock


def refuse(number):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("name", ["ENOSYS", "ENOLCK", "EOPNOTSUPP"])
def test_a_file_system_without_locks_is_said_and_used(make_config, make_ear, monkeypatch, name):
    monkeypatch.setattr("fcntl.flock", refuse(getattr(errno, name)))
    config, ear = make_config(steps=1), make_ear()
    rr.train(config, listener=ear)
    assert f"{config.out}: no locks on this file system; start no second run there" in ear.said
    # nothing that a kill would leave as a lock
    assert Path(config.out, ".lock").read_bytes() == b""


def test_a_lock_that_fails_otherwise_is_one_line(make_config, monkeypatch):
    monkeypatch.setattr("fcntl.flock", refuse(errno.EIO))
    config = make_config()
    with pytest.raises(rr.UserError) as caught:
        rr.train(config)
    assert str(caught.value) == (
        f"{config.out}: cannot be written (Input/output error); check the folder"
    )


def test_nobody_takes_a_run_that_is_being_moved_aside(make_config, monkeypatch):
    config = make_config()
    rr.train(config, stop_at=2)
    move = run.set_aside

    def watched(path, why):
        with RunLock() as other, pytest.raises(RunInUseError):
            other.take(path)
        moved = move(path, why)
        # the old run is nobody's, and the new one not begun
        assert not path.exists()
        return moved

    monkeypatch.setattr("resroute.training.run.set_aside", watched)
    rr.train(config, fresh=True)
    with RunLock() as other:
        other.take(Path(f"{config.out}.old-1"))


def test_a_run_that_comes_while_the_old_is_moved_aside_is_left_alone(make_config, monkeypatch):
    config = make_config()
    rr.train(config, stop_at=2)
    move = run.set_aside

    def late(path, why):
        monkeypatch.setattr("resroute.training.run.set_aside", move)
        moved = move(path, why)
        # another process was faster, and is gone
        path.mkdir()
        (path / "config.json").write_text((moved / "config.json").read_text())
        return moved

    monkeypatch.setattr("resroute.training.run.set_aside", late)
    with pytest.raises(rr.UserError, match="unfinished run, stopped before its first checkpoint"):
        rr.train(config, fresh=True)


def test_the_file_of_a_lock_stays_where_a_run_could_not_begin(make_config, monkeypatch):
    def full(*_):
        raise rr.UserError("the disk is full")

    config = make_config()
    with monkeypatch.context() as patch:
        patch.setattr("resroute.training.run.write_json", full)
        with pytest.raises(rr.UserError, match="the disk is full"):
            rr.train(config)
    # removed by one, another could still wait for it while a third makes a new one
    assert [path.name for path in Path(config.out).iterdir()] == [".lock"]
    assert rr.train(config)["validation_loss"] > 0


@pytest.mark.parametrize(
    ("out", "reason"),
    [
        ("file/run", "Not a directory"),
        ("x" * 300, "File name too long"),
        ("nowhere", "File exists"),
    ],
    ids=["file", "long", "link"],
)
def test_a_folder_that_cannot_be_made_is_one_line(make_config, tmp_path, out, reason):
    (tmp_path / "file").write_text("")
    (tmp_path / "nowhere").symlink_to("missing")
    config = make_config(out=out)
    with pytest.raises(rr.UserError) as caught:
        rr.train(config)
    assert str(caught.value) == f"{config.out}: cannot be written ({reason}); check the folder"
