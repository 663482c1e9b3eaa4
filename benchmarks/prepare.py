"""How fast text becomes tokens, and in how much memory.

    python benchmarks/prepare.py --megabytes 1000 10000 --out prepare.json

Writes a text of each size (the stories of storyworld, or the file that is given, again and again),
prepares it as characters by one process and by one a core, each in a fresh process, and prints MB/s
(both passes and the last check together) and the peak of the memory that is the processes' own:
that of the preparing process and all below it, pages that several of them have counted once, pages
of files (libraries, the text, the tokens) not counted. It is looked at five times a second, on
Linux alone.
"""

import argparse
import json
import multiprocessing
import re
import sys
import tempfile
import time
from pathlib import Path

import torch

from resroute.data import prepare_text, stories
from resroute.data.pool import available_cores
from resroute.files import write_json
from resroute.training.device import environment

PROC = Path("/proc")


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


def measure(source: Path, out: Path, processes: int, answer: Path) -> None:
    """Prepare a corpus, and leave what was found in a file."""
    began = time.perf_counter()
    corpus = prepare_text(source, out, processes=processes)
    seconds = time.perf_counter() - began
    answer.write_text(json.dumps({"seconds": seconds, "fingerprint": corpus.fingerprint}))


def own_memory(root: int) -> int:
    """Bytes that are a process's own, and those of all below it."""
    parents = {}
    for path in PROC.glob("[0-9]*/stat"):
        try:
            # the name may hold anything, a bracket too
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(path.parent.name)] = int(fields[1])
    members = [root]
    for member in members:
        members += [process for process, parent in parents.items() if parent == member]
    kilobytes = 0
    for member in members:
        try:
            text = (PROC / str(member) / "smaps_rollup").read_text()
        except OSError:
            continue
        kilobytes += sum(map(int, re.findall(r"^Pss_(?:Anon|Shmem): +(\d+) kB", text, re.M)))
    return 1024 * kilobytes


def row(source: Path, folder: Path, processes: int) -> dict[str, object]:
    """Prepare a text in a process of its own, and watch its memory."""
    answer, out = folder / "answer", folder / "corpus"
    child = multiprocessing.get_context("spawn").Process(
        target=measure, args=(source, out, processes, answer)
    )
    child.start()
    assert child.pid is not None
    peak = 0
    while child.is_alive():
        peak = max(peak, own_memory(child.pid))
        child.join(0.2)
    for path in [*out.iterdir(), out]:
        path.rmdir() if path.is_dir() else path.unlink()
    size = source.stat().st_size
    return {"processes": processes, "bytes": size, "memory": peak, **json.loads(answer.read_text())}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, nargs="+", default=[1000])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, available_cores()])
    parser.add_argument("--sample", type=Path, help="a text to repeat instead of stories")
    parser.add_argument("--folder", type=Path, help="where there is room; else that of the system")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    for megabytes in options.megabytes:
        with tempfile.TemporaryDirectory(dir=options.folder) as name:
            source = Path(name, "text.txt")
            write_source(source, megabytes, options.sample)
            for processes in dict.fromkeys(options.processes):
                found = row(source, Path(name), processes)
                rows.append(found)
                speed = found["bytes"] / 1e6 / found["seconds"]
                print(
                    f"{megabytes} MB, {processes} processes: {speed:.0f} MB/s, "
                    f"{speed / processes:.0f} a process, peak {found['memory'] / 1e6:.0f} MB",
                    flush=True,
                )
    if options.out is not None:
        machine = environment(torch.device("cpu"), torch.float32)
        write_json(options.out, {"machine": machine, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
