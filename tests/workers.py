"""A process that runs trainings in forked children, so that tests need not import torch for each.

Reads one job a line from stdin as JSON and answers with one line on stdout. A job is

    {"action": name, "size": processes, "arguments": {...}, "kill_after": seconds or null,
     "kill_when": {"run": folder, "step": number, "is_writing": bool} or null, "stagger": seconds}

and its answer has, per process, `value`, or `error` with the exception's name and text, or
`killed`. The last process is killed first, `kill_after` seconds after the job began or, with
`kill_when`, after its run has reported a step (and is writing a checkpoint). Children are forked
from here: this process never computes, so no thread is lost. What hangs is killed after `timeout`
seconds, and has that as its error.
"""

import ctypes
import gc
import json
import os
import signal
import socket
import sys
import time
import warnings
from pathlib import Path
from typing import Any, ClassVar

import torch

# what a run would import as it goes: imported once, before forking
import torch._dynamo
import torch.distributed
import torch.distributed.checkpoint.hf_storage
import torch.distributed.fsdp
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import rank_actions
import resroute as rr
from resroute.bench.memory import peak_bytes
from resroute.config import from_dict
from resroute.data import open_corpus
from resroute.training.device import choose_precision
from resroute.training.distributed import join, local_parts
from resroute.training.launch import train as _  # noqa: F401  imported before forking
from resroute.training.learner import Learner


def train(config: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Train, by a configuration in JSON."""
    return rr.train(from_dict(rr.TrainConfig, config), **options)


def train_until_event(config: dict[str, Any], event: int, **options: Any) -> dict[str, Any]:
    """Train until the run's folder is about to be used for the `event`th time; then be killed."""
    folder = config["out"]
    seen = 0

    def count(name: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if name != "open" and not name.startswith("os."):
            return
        # a tree is removed by names relative to an open folder
        if folder in str(arguments[0]) or (name in ("os.remove", "os.rmdir") and arguments[1] >= 0):
            seen += 1
            if seen == event:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    return {**train(config, **options), "events": seen}


class Collectives(TorchDispatchMode):
    """Adds up, by kind, the bytes of collectives: the larger side of each."""

    kinds: ClassVar = {
        "allreduce_": "all_reduce",
        "_allgather_base_": "all_gather",
        "_reduce_scatter_base_": "reduce_scatter",
    }

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[str, int] = {}

    def __torch_dispatch__(
        self, call: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            # it comes back as the operations on shares that it is made of
            return NotImplemented
        name = call.overloadpacket.__name__
        is_wait = name in ("wait_tensor", "_wrap_tensor_autograd")
        if call.namespace in ("c10d", "_c10d_functional") and not is_wait:
            kind = self.kinds.get(name, name)
            sizes = [t.nbytes for t in tree_leaves(arguments) if isinstance(t, torch.Tensor)]
            self.bytes[kind] = self.bytes.get(kind, 0) + max(sizes)
        return call(*arguments, **(options or {}))


def account(config: dict[str, Any], *, peak: bool = False) -> dict[str, Any]:
    """Bytes of a step's collectives, of what this process holds after it, and at most in one."""
    chosen = from_dict(rr.TrainConfig, config)
    device = torch.device("cpu")
    with join("cpu") as world:
        precision = choose_precision(chosen.precision, device)
        learner = Learner(chosen, open_corpus(Path(chosen.data)), world, device, precision)
        # DDP learns the order of gradients in the first step and tells it in the second
        for step in range(2):
            learner.gradients(step)
            learner.update(chosen.learning_rate)
        with Collectives() as moved:
            learner.gradients(2)
        weights = list(learner.model.parameters())
        held = {"gradients": [p.grad for p in weights], "weights": [p.detach() for p in weights]}
        held["optimizer"] = [t for s in learner.optimizer.state.values() for t in s.values()]
        held["average"] = list(learner.average.tensors.values()) if learner.average else []
        found = {kind: sum(t.nbytes for t in local_parts(held[kind])) for kind in held}
        learner.update(chosen.learning_rate)
        if peak:
            found["peak"] = peak_bytes(lambda: learner.gradients(3), device)
    return {"moved": moved.bytes, "held": found}


def run_child(job: dict[str, Any], rank: int, port: int, out: Path) -> None:
    """Be one process of a job, and leave its answer in a file."""
    # a child must not outlive a server that was killed
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if job["size"] > 1:
        os.environ |= {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(job["size"]),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
    try:
        answer = {"value": ACTIONS[job["action"]](**job["arguments"])}
    except BaseException as error:
        import traceback

        traceback.print_exc()
        answer = {"error": [type(error).__name__, str(error)]}
    unfinished = out.with_suffix(".part")
    unfinished.write_text(json.dumps(answer))
    unfinished.replace(out)


def run(job: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Fork a job's processes and gather their answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    files = [folder / f"answer-{rank}" for rank in range(job["size"])]
    when = job.get("kill_when")
    former = when and inode(metrics_of(when))
    children = []
    for rank, file in enumerate(files):
        file.unlink(missing_ok=True)
        pid = os.fork()
        if pid == 0:
            os.dup2(2, 1)
            run_child(job, rank, port, file)
            os._exit(0)
        children.append(pid)
    deadline = time.monotonic() + job.get("timeout", 240.0)
    while when and not has_come(when, former) and any(is_alive(pid) for pid in children):
        if time.monotonic() > deadline:
            break
        time.sleep(0.0005)
    if when or job.get("kill_after") is not None:
        time.sleep(job.get("kill_after") or 0.0)
        for pid in reversed(children):
            os.kill(pid, job.get("signal", signal.SIGKILL))
            time.sleep(job.get("stagger", 0.0))
    lost = {"killed": True}
    if not ended(children, job.get("timeout", 240.0)):
        lost = {"error": ["TimeoutError", "hung, and was killed"]}
    return [json.loads(f.read_text()) if f.exists() else lost for f in files]


def ended(children: list[int], timeout: float) -> bool:
    """Wait for children; False where they had to be killed."""
    left, deadline = set(children), time.monotonic() + timeout
    while left and time.monotonic() < deadline:
        left -= {pid for pid in left if os.waitpid(pid, os.WNOHANG)[0]}
        time.sleep(0.005)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return not left


def has_come(when: dict[str, Any], former: int | None) -> bool:
    """Whether the moment for a kill has come, in a run whose metrics had an inode before."""
    metrics = metrics_of(when)
    # a run that goes on writes its metrics anew; until then the lines are those of the run before
    if inode(metrics) in (None, former):
        return False
    whole = metrics.read_bytes().rpartition(b"\n")[0]
    step = json.loads(whole.rpartition(b"\n")[2])["step"] if whole else -1
    is_written = any(metrics.parent.glob("checkpoints/.step_*.tmp"))
    return step >= when["step"] and (is_written or not when["is_writing"])


def metrics_of(when: dict[str, Any]) -> Path:
    return Path(when["run"], "metrics.jsonl")


def inode(file: Path) -> int | None:
    try:
        return file.stat().st_ino
    except FileNotFoundError:
        return None


def is_alive(pid: int) -> bool:
    # whoever has ended stays to be waited for
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def several(jobs: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    """Values of actions, one after the other on one group of processes."""
    with join("cpu"):
        return [ACTIONS[action](**arguments) for action, arguments in jobs]


ACTIONS = {
    "train": train,
    "train_until_event": train_until_event,
    "several": several,
    "account": account,
    **rank_actions.ACTIONS,
}


def serve() -> None:
    """Answer jobs until stdin ends."""
    warnings.simplefilter("ignore")
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    # children collect their own garbage alone
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line), folder)), flush=True)


if __name__ == "__main__":
    serve()
    # some libraries complain on stderr where they are taken down in order
    os._exit(0)
