"""The `ray` engine: the cells of a sweep on the machines of a Ray cluster."""

import itertools
import os
import signal
import socket
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

from resroute.config import UserError
from resroute.experiments.cell import Outcome, Task, outcome, start

_POLL = 0.5
_GRACE = 120.0
_CONNECT = 10.0


class RayEngine:
    """Cells as Ray tasks. Ray places them by cores and GPUs, and tries again where a node is lost.

    All machines see the sweep's folder and the corpora under the same paths (a shared file system):
    a cell whose node is lost goes on from its checkpoint on another.

    Args:
        address: Of the cluster, as `ray.init` takes it; None joins the one that `RAY_ADDRESS`
            names, or else starts one on this machine.
        cpus: Cores of a cell.
        gpus: GPUs of a cell, also a fraction such as 0.25: four cells then share one.

    Raises:
        UserError: Ray is not installed, or there is no such cluster.
    """

    def __init__(self, address: str | None = None, *, cpus: int = 1, gpus: float = 0.0) -> None:
        try:
            import ray
        except ImportError:
            raise UserError("the ray engine needs Ray: pip install 'resroute[ray]'") from None
        if not ray.is_initialized():
            _require_reachable(address or os.environ.get("RAY_ADDRESS", ""))
            try:
                ray.init(address=address, log_to_driver=False, include_dashboard=False)
            except (ConnectionError, ValueError, RuntimeError) as error:
                first = str(error).strip().splitlines()[0]
                raise UserError(f"no Ray cluster at {address or 'this machine'}: {first}") from None
        self.cpus = cpus
        self.gpus = gpus

    @property
    def jobs(self) -> int:
        """Cells at a time, by what the cluster has now."""
        import ray

        has = ray.cluster_resources()
        by_cpu = int(has.get("CPU", 0)) // self.cpus
        by_gpu = int(has.get("GPU", 0) / self.gpus) if self.gpus else by_cpu
        return max(1, min(by_cpu, by_gpu))

    def run(self, tasks: Iterable[Task], logs: Path) -> Generator[Outcome | None, None, None]:
        """See `Engine`."""
        import ray

        # a lost node is not the cell's fault, however often it happens
        place = ray.remote(num_cpus=self.cpus, num_gpus=self.gpus, max_retries=-1)
        remote: Any = place(_train)
        here = str(Path.cwd())
        waiting = iter(tasks)
        left: dict[Any, Task] = {}
        try:
            while True:
                # a cell in waiting for each that runs, so that no core has to
                for task in itertools.islice(waiting, max(0, 2 * self.jobs - len(left))):
                    left[remote.remote(task, str(logs), here, self.cpus)] = task
                if not left:
                    return
                ready, _ = ray.wait(list(left), num_returns=1, timeout=_POLL)
                for ref in ready:
                    task = left.pop(ref)
                    try:
                        yield ray.get(ref)
                    except ray.exceptions.RayError as error:
                        yield Outcome(name=task.name, code=1, message=str(error).strip())
                if not ready:
                    yield None
        finally:
            for ref in left:
                ray.cancel(ref)
            if left:
                ray.wait(list(left), num_returns=len(left), timeout=_GRACE)


def _require_reachable(address: str) -> None:
    """Say at once that nobody is there; Ray itself tries for minutes and then ends the process."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not (host and port.isdecimal()):
        # `auto`, `local` or none: Ray knows
        return
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT).close()
    except (OSError, OverflowError) as error:
        raise UserError(
            f"no Ray cluster at {address}: {error}; start one, or mend the address"
        ) from None


def _train(task: Task, logs: str, folder: str, threads: int) -> Outcome:
    """Runs on a machine of the cluster, in the folder of the sweep's own process."""
    os.chdir(folder)
    log = Path(logs, f"{task.name}.log")
    process = start(task, log, threads=threads)
    try:
        process.wait()
    finally:
        # cancelled: the cell saves first
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait()
        if process.stdin is not None:
            process.stdin.close()
    return outcome(task, process.returncode, log)
