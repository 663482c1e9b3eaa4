"""A process that runs trainings in forked children, so that tests need not import torch for each.

Reads one job a line from stdin as JSON and answers with one line on stdout. A job is

    {"action": name, "size": processes, "arguments": {...}, "kill_after": seconds or null}

and its answer has, per process, `value`, or `error` with the exception's name and text, or
`killed`. Children are forked from here: this process never computes, so no thread is lost.
"""

import ctypes
import json
import os
import signal
import socket
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.distributed.fsdp

import resroute as rr
from resroute.config import from_dict
from resroute.training.launch import train as _  # noqa: F401  imported before forking


def train(config: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Train, by a configuration in JSON."""
    return rr.train(from_dict(rr.TrainConfig, config), **options)


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
        answer = {"error": [type(error).__name__, str(error)]}
    out.write_text(json.dumps(answer))


def run(job: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Fork a job's processes and gather their answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    files = [folder / f"answer-{rank}" for rank in range(job["size"])]
    children = []
    for rank, file in enumerate(files):
        file.unlink(missing_ok=True)
        pid = os.fork()
        if pid == 0:
            os.dup2(2, 1)
            run_child(job, rank, port, file)
            os._exit(0)
        children.append(pid)
    if job.get("kill_after") is not None:
        time.sleep(job["kill_after"])
        for pid in children:
            os.kill(pid, job.get("signal", signal.SIGKILL))
    for pid in children:
        os.waitpid(pid, 0)
    return [json.loads(f.read_text()) if f.exists() else {"killed": True} for f in files]


ACTIONS = {"train": train}


def serve() -> None:
    """Answer jobs until stdin ends."""
    warnings.simplefilter("ignore")
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line), folder)), flush=True)


if __name__ == "__main__":
    serve()
