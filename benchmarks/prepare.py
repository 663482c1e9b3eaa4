"""How fast text becomes tokens, and in how much memory.

    python benchmarks/prepare.py --megabytes 1000 --out prepare.json

Writes a text of that size (the stories of storyworld, or the file that is given, again and again),
prepares it as characters by one process and by one a core, each in a fresh process, and prints MB/s
(both passes and the last check together) and the peak memory of all processes, what they share
counted once for each.
"""

import argparse
import json
import multiprocessing
import resource
import sys
import tempfile
import time
from pathlib import Path

import torch

from resroute.data import prepare_text, stories
from resroute.data.pool import available_cores
from resroute.files import write_json
from resroute.training.device import environment


def write_source(path: Path, megabytes: int, sample: Path | None) -> None:
    """Write a text of a size, in documents."""
    if sample is None:
        told = stories(0)
        piece = "".join(f"{next(told).text}\n<|endoftext|>\n" for _ in range(20_000)).encode()
    else:
        piece = sample.read_bytes().rsplit(b"\n", 1)[0] + b"\n"
    with path.open("wb") as file:
        while file.tell() < megabytes * 1_000_000:
            file.write(piece)


def measure(source: Path, out: Path, processes: int, answer: str) -> None:
    """Prepare a corpus, and leave seconds and memory in a file."""
    began = time.perf_counter()
    prepare_text(source, out, processes=processes)
    seconds = time.perf_counter() - began
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    # of the largest child: there are as many as processes
    memory = 1024 * (own + (children * processes if processes > 1 else 0))
    Path(answer).write_text(json.dumps({"seconds": seconds, "memory": memory}))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--sample", type=Path, help="a text to repeat instead of stories")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        source = Path(name, "text.txt")
        write_source(source, options.megabytes, options.sample)
        size = source.stat().st_size
        for processes in dict.fromkeys((1, available_cores())):
            answer = Path(name, "answer")
            child = multiprocessing.get_context("spawn").Process(
                target=measure, args=(source, Path(name, f"c{processes}"), processes, str(answer))
            )
            child.start()
            child.join()
            found = json.loads(answer.read_text())
            speed = size / 1e6 / found["seconds"]
            print(
                f"{processes} processes: {speed:.0f} MB/s, {speed / processes:.0f} a process, "
                f"peak {found['memory'] / 1e6:.0f} MB",
                flush=True,
            )
            rows.append({"processes": processes, "bytes": size, **found})
    if options.out is not None:
        machine = environment(torch.device("cpu"), torch.float32)
        write_json(options.out, {"machine": machine, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
