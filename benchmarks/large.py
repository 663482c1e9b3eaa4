"""One real optimizer step of a large model: vocabulary 200,000, context 4,096, `paper(48)`.

    python benchmarks/large.py --out large.json

Trains WAV at 48 layers and width 512 (about 406 M parameters, half of them embedding and head) for
one step with activation checkpointing, through `resroute.train`, in a fresh process, and reports
time and the process's peak resident memory.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import resroute as rr
from resroute.data import Corpus
from resroute.files import write_json
from resroute.training.device import environment


class Printer(rr.Listener):
    """Shows where it is, and keeps the records."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self.began = time.perf_counter()

    def message(self, text: str) -> None:
        """Print a line."""
        print(text, flush=True)

    def record(self, record: dict[str, Any]) -> None:
        """Print a loss and when it came."""
        if record["kind"] != "routing":
            seconds = time.perf_counter() - self.began
            print(f"{seconds:7.1f} s  {record['kind']} loss {record['loss']:.4f}", flush=True)
            self.records.append({**record, "seconds": round(seconds, 1)})


def corpus_of(folder: Path, symbols: int) -> Corpus:
    """A corpus in which every one of so many symbols occurs."""
    codes = [code for code in range(0x100, 0x110000) if not 0xD800 <= code < 0xE000][:symbols]
    text = folder / "symbols.txt"
    text.write_text("".join(map(chr, codes)), encoding="utf-8")
    return rr.prepare_text(text, folder / "corpus", separator="none")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=200_000)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    printer = Printer()
    with tempfile.TemporaryDirectory() as name:
        corpus = corpus_of(Path(name), options.vocabulary)
        model = rr.paper(
            options.layers,
            vocab_size=corpus.tokenizer.vocab_size,
            context=options.context,
            residual=rr.WAV(num_blocks=4),
        )
        config = rr.TrainConfig(
            model=model,
            data=str(corpus.path),
            out=f"{name}/run",
            steps=1,
            batch_size=1,
            warmup_steps=0,
            evaluation_windows=1,
            activation_checkpointing=True,
        )
        summary = rr.train(config, listener=printer)
    print(
        f"{summary['parameters']:,} parameters, peak {summary['peak_memory_bytes'] / 2**30:.1f} GiB"
    )
    if options.out is not None:
        machine = environment(torch.device("cpu"), torch.float32)
        kept = {k: v for k, v in summary.items() if k != "path"}
        write_json(options.out, {"machine": machine, "summary": kept, "records": printer.records})
    return 0


if __name__ == "__main__":
    sys.exit(main())
