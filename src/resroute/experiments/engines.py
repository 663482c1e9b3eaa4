"""Who runs the cells of a sweep: `local`, processes of this machine, each on cores of its own."""

import os
import signal
import subprocess
import time
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from resroute.config import UserError
from resroute.data.pool import available_cores
from resroute.experiments.cell import Outcome, Task, outcome, start

# seconds between looks at the processes
_POLL = 0.2
# seconds that a cell may take to save when it is asked to stop
_GRACE = 120.0


class Engine(Protocol):
    """Runs tasks, several at a time."""

    @property
    def jobs(self) -> int:
        """Cells at a time, for estimates."""

    def run(self, tasks: Iterable[Task], logs: Path) -> Generator[Outcome | None, None, None]:
        """Run every task once.

        Args:
            tasks: In order, drawn one by one when there is room.
            logs: Folder of a log a task.

        Yields:
            The outcome of a task that has ended, or None now and then while nothing has, so that
            the caller can look at what is running. A caller that closes the generator stops what is
            running; it saves first.
        """


@dataclass
class _Running:
    task: Task
    log: Path
    process: subprocess.Popen[bytes]


class LocalEngine:
    """Processes on this machine; the cores, or the GPUs, are shared out evenly among them.

    Args:
        jobs: Cells at a time; None takes one a GPU that cells use, else one a core.
        device: Device of the cells, as `TrainConfig.device`.

    Raises:
        UserError: More cells at a time than cores.
    """

    def __init__(self, jobs: int | None = None, device: str = "auto") -> None:
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
        count = available_cores() if cores is None else len(cores)
        has_cuda = torch.cuda.is_available() and device in ("auto", "cuda")
        self.gpus = torch.cuda.device_count() if has_cuda else 0
        self._jobs = jobs or self.gpus or count
        if not 1 <= self._jobs <= count:
            raise UserError(f"this machine has {count} cores; use 1 to {count} jobs, got {jobs}")
        self.threads = count // self._jobs
        self.cores = cores

    @property
    def jobs(self) -> int:
        """Cells at a time."""
        return self._jobs

    def run(self, tasks: Iterable[Task], logs: Path) -> Generator[Outcome | None, None, None]:
        """See `Engine`."""
        waiting = iter(tasks)
        slots: list[_Running | None] = [None] * self._jobs
        is_left = True
        try:
            while is_left or any(slots):
                ended = None
                for slot, running in enumerate(slots):
                    if running is not None and running.process.poll() is not None:
                        slots[slot] = None
                        ended = outcome(running.task, running.process.returncode, running.log)
                        _close(running.process)
                        yield ended
                    if slots[slot] is None and is_left:
                        task = next(waiting, None)
                        is_left = task is not None
                        slots[slot] = None if task is None else self._start(task, slot, logs)
                if ended is None:
                    yield None
                    time.sleep(_POLL)
        finally:
            _stop([running.process for running in slots if running is not None])

    def _start(self, task: Task, slot: int, logs: Path) -> _Running:
        log = logs / f"{task.name}.log"
        first = slot * self.threads
        cores = None if self.cores is None else self.cores[first : first + self.threads]
        gpu = {"CUDA_VISIBLE_DEVICES": str(slot % self.gpus)} if self.gpus > 1 else {}
        process = start(task, log, threads=self.threads, cores=cores, environment=gpu)
        return _Running(task, log, process)


def _stop(processes: list[subprocess.Popen[bytes]]) -> None:
    """Ask all to save and end; what does not in time is killed, and resumes from its checkpoint."""
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
    until = time.monotonic() + _GRACE
    for process in processes:
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        _close(process)


def _close(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        process.stdin.close()
