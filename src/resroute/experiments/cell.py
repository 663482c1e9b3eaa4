"""One cell of a sweep as a process of its own.

The task is one line of JSON on stdin. When stdin ends, whoever has started this process is gone:
the run then saves a checkpoint and stops, as after SIGTERM, and the next sweep goes on with it.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from resroute.config import UserError, from_dict, to_dict
from resroute.training import Listener, Preempted, TrainConfig, train
from resroute.training.run import RunInUseError

FINISHED, FAILED, STOPPED = 0, 2, 143

# seconds that the process of a sweep that was killed may take to finish its step and save
_PATIENCE = 120.0
# not -m, which would import this module twice
_PROGRAM = "from resroute.experiments.cell import run; run()"

# of a log, quoted where a cell fails
_TAIL = 2000


@dataclass(frozen=True, kw_only=True)
class Task:
    """A cell to train. `config.out` is its run folder."""

    name: str
    config: TrainConfig


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How the process of a cell has ended."""

    name: str
    code: int
    """`FINISHED`, `FAILED` for good, anything else where another try may help."""
    message: str
    """Last lines of its log, where it has not finished."""


def start(
    task: Task,
    log: Path,
    *,
    threads: int,
    cores: Sequence[int] | None = None,
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a cell's process, which ends by itself when its stdin is closed.

    Args:
        task: What to train.
        log: File to which what it says is appended.
        threads: Of torch.
        cores: Numbers of the cores that it may use; None leaves that to the system.
        environment: Variables besides those of this process.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    message = {"config": to_dict(task.config), "threads": threads, "cores": cores}
    # before torch is imported, which sizes its pools once
    sizes = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    with log.open("ab") as file:
        # also tells by its time that the cell runs
        file.write(f"{task.name} starts\n".encode())
        file.flush()
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **sizes, **(environment or {})},
            # Ctrl-C on a terminal is the sweep's, which passes it on
            start_new_session=True,
        )
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(message).encode() + b"\n")
        process.stdin.flush()
    except BrokenPipeError:
        # it has died already; its exit code tells
        pass
    return process


def outcome(task: Task, code: int, log: Path) -> Outcome:
    """The outcome of a process that has ended with `code`."""
    told = ""
    if code != FINISHED and log.is_file():
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL))
            told = file.read().decode(errors="replace").strip()
    return Outcome(name=task.name, code=code, message=told)


class _Log(Listener):
    """Lines for the log of a cell."""

    def message(self, text: str) -> None:
        print(text, flush=True)


def _stop_with_parent() -> None:
    """End as after SIGTERM when stdin ends."""

    def wait() -> None:
        sys.stdin.buffer.read()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


def main() -> int:
    """Train the cell that stdin names.

    Returns:
        `FINISHED`, `FAILED` for an error that another try would meet again, `STOPPED` where the run
        was asked to stop and has saved. A bug keeps its traceback.
    """
    message: dict[str, Any] = json.loads(sys.stdin.buffer.readline())
    if message["cores"] is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, message["cores"])
    torch.set_num_threads(message["threads"])
    config = from_dict(TrainConfig, message["config"])
    _stop_with_parent()
    until = time.monotonic() + _PATIENCE
    while True:
        try:
            train(config, resume=True, listener=_Log())
            return FINISHED
        except RunInUseError as error:
            if time.monotonic() > until:
                print(error, flush=True)
                return 1
            time.sleep(0.5)
        except UserError as error:
            print(error, flush=True)
            return FAILED
        except Preempted as stopped:
            print(stopped, flush=True)
            return STOPPED


def run() -> None:
    """`main`, as the whole of a process."""
    code = main()
    sys.stdout.flush()
    # the thread that waits for stdin holds its lock, over which a usual exit would stumble
    os._exit(code)
