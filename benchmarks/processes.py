"""Training steps of two processes against one, in alternating pairs: what sharing the work costs.

    python benchmarks/processes.py --layers 12 --dim 256 --pairs 20

Every process has one thread and takes the same number of windows, so that without any cost a step
of two takes as long as a step of one and has twice the tokens. The baseline is measured while the
other process waits. `apart` are processes that compute at once and exchange nothing: it is what
they take from each other of the machine; `ddp` and `fsdp` over it is what the exchange costs.
"""

import argparse
import dataclasses
import json
import os
import socket
import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing

from resroute import ops
from resroute.bench import Comparison, Listener, Settings, lines
from resroute.bench.timing import alternate, seconds
from resroute.config import to_dict
from resroute.data import Corpus, open_corpus, prepare_storyworld
from resroute.residual import WAV, BlockAttnRes, PreNorm, ResidualConfig
from resroute.training import TrainConfig
from resroute.training.device import environment, keep_freed_memory
from resroute.training.distributed import World, join
from resroute.training.learner import Learner
from resroute.training.plan import Layout, communication

METHODS: tuple[ResidualConfig, ...] = (PreNorm(), BlockAttnRes(), WAV())
BATCH = 4


class Lines(Listener):
    """Says what is going on."""

    def message(self, text: str) -> None:
        """Print it."""
        print(text, flush=True)


class Bench:
    """The models of one process of a world."""

    def __init__(self, settings: Settings, corpus: Corpus, world: World) -> None:
        self.settings = settings
        self.corpus = corpus
        self.world = world
        self.windows = settings.batch or BATCH

    def learner(self, residual: ResidualConfig, parallel: str, world: World) -> Learner:
        """A learner whose every process takes the same windows a step."""
        model = self.settings.model(residual)
        model = dataclasses.replace(model, vocab_size=self.corpus.tokenizer.vocab_size)
        config = TrainConfig(
            model=model,
            data=str(self.corpus.path),
            batch_size=self.windows * world.size,
            parallel="fsdp" if parallel == "fsdp" else "ddp",
        )
        device, precision = self.settings.torch_device, self.settings.torch_precision
        return Learner(config, self.corpus, world, device, precision)

    def stepping(self, learner: Learner) -> Callable[[], None]:
        """A step of a learner, each on other windows."""
        count = 0

        def step() -> None:
            nonlocal count
            learner.gradients(count)
            learner.update(learner.config.learning_rate)
            count += 1

        return step

    def compare(self, listener: Listener) -> Iterator[Comparison]:
        """Time each method and way; what the other processes take is dropped."""
        for residual in METHODS:
            alone = self.learner(residual, "apart", World())
            for way in ("apart", "ddp", "fsdp"):
                listener.message(f"{residual.label}, {way}")
                several = alone if way == "apart" else self.learner(residual, way, self.world)
                pairs = self.alternate(self.stepping(alone), self.stepping(several))
                if self.world.is_main:
                    yield self.comparison(alone, several, way, pairs)

    def alternate(
        self, one: Callable[[], None], several: Callable[[], None]
    ) -> tuple[tuple[float, float], ...]:
        """Time a step of the first process alone in turn with a step that all take."""
        device, world = self.settings.torch_device, self.world

        def baseline() -> float:
            return seconds(one, device) if world.is_main else 0.0

        def measured() -> float:
            # the others wait here for the baseline
            world.wait()
            taken = seconds(several, device)
            world.wait()
            return taken

        return alternate(baseline, measured, pairs=self.settings.pairs)

    def comparison(
        self, alone: Learner, several: Learner, way: str, pairs: tuple[tuple[float, float], ...]
    ) -> Comparison:
        """The step of several processes over that of one, and their tokens a second over its."""
        size = self.world.size
        layout = Layout(
            processes=several.world.size,
            parallel=several.config.parallel,
            precision="float32" if several.precision == torch.float32 else "bfloat16",
            windows=self.windows,
        )
        return Comparison(
            name=alone.config.model.residual.label,
            against="one process",
            group=f"{size} x {way}",
            unit="s",
            pairs=pairs,
            details={
                "processes": size,
                "parameters": sum(p.numel() for p in alone.model.parameters()),
                "tokens_of_a_process": self.windows * self.settings.context,
                "bytes_exchanged": communication(several.config.model, layout).total,
                "speed_over_one": statistics.median(size * a / b for a, b in pairs),
            },
        )


def work(rank: int, options: dict[str, Any], data: str, port: int, out: Path | None) -> None:
    """Be one of the processes; the first reports."""
    processes = options.pop("processes")
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    keep_freed_memory()
    settings = Settings(**options, compile=False, device="cpu", threads=1)
    with join("cpu") as world:
        backend = ops.choose(settings.torch_device, torch.float32, settings.dim).backend
        # built by one for all
        world.from_main(lambda: ops.prepare(backend))
        bench = Bench(settings, open_corpus(Path(data)), world)
        rows = list(bench.compare(Lines() if world.is_main else Listener()))
    if rank:
        return
    print("\n".join(lines(rows)))
    for row in rows:
        moved = row.details["bytes_exchanged"] / 1e6
        print(
            f"{row.name}, {row.group}: {row.details['speed_over_one']:.2f} times the tokens of one "
            f"process, {moved:,.1f} MB exchanged a step"
        )
    if out is not None:
        machine = environment(settings.torch_device, settings.torch_precision)
        machine["cores"] = os.cpu_count()
        result = {"case": "processes", "settings": to_dict(settings), "machine": machine}
        result["rows"] = [row.to_json() for row in rows]
        out.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default, words in (
        ("layers", 12, "layers of attention and MLP"),
        ("dim", 256, "width"),
        ("batch", BATCH, "windows a step of each process"),
        ("context", 256, "tokens of a window"),
        ("pairs", 20, "measurements of each side, A B A B"),
        ("processes", 2, "processes of one thread each"),
    ):
        help_ = f"{words} ({default})"
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=help_)
    parser.add_argument("--blocks", type=int, metavar="N", help="depth blocks (4)")
    parser.add_argument(
        "--precision",
        default="auto",
        choices=["auto", "float32", "bfloat16"],
        metavar="P",
        help="auto, float32 or bfloat16 (auto)",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="JSON file to write: settings and every pair"
    )
    options = vars(parser.parse_args())
    out = options.pop("out")
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        corpus = prepare_storyworld(Path(folder) / "tales", characters=300_000)
        arguments = (options, str(corpus.path), port, out)
        torch.multiprocessing.spawn(work, args=arguments, nprocs=options["processes"])


if __name__ == "__main__":
    main()
