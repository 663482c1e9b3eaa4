"""Long runs hold no more memory than short ones."""

import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest

import resroute as rr
from resroute.data import CharTokenizer, open_corpus, training_batch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc"),
]

MB = 1 << 20
SIZES = {"train": 100 * MB, "val": 1000, "test": 1000}


def resident(kind):
    """Bytes of this process that are `Anon` memory, or pages of a `File`."""
    (line,) = (
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith(f"Rss{kind}:")
    )
    return int(line.split()[1]) * 1024


@pytest.fixture
def large_folder(tmp_path):
    """A corpus folder of 100 MB, as `prepare_text` lays it out; without an end of text."""
    tokenizer = CharTokenizer(tuple("abcdefgh"))
    random = np.random.default_rng(0)
    splits = {}
    for split, size in SIZES.items():
        tokens = random.integers(0, tokenizer.vocab_size, size, dtype=np.uint8).tobytes()
        (tmp_path / f"{split}.bin").write_bytes(tokens)
        hashed = hashlib.sha256(tokens).hexdigest()
        splits[split] = {"tokens": size, "documents": 1, "sha256": hashed}
    meta = {
        "format_version": 1, "name": "large", "source": {"kind": "text"}, "separator": "none",
        "tokenizer": tokenizer.to_dict(), "dtype": "uint8", "splits": splits, "aligned": False,
    }  # fmt: skip
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    return tmp_path


def test_five_thousand_batches_of_a_large_file(large_folder):
    mapped = resident("File")
    corpus = open_corpus(large_folder)
    held = {}
    for step in range(5001):
        training_batch(corpus, context=256, batch_size=8, seed=0, step=step)
        if step in (500, 5000):
            held[step] = resident("Anon")
    growth, pages = held[5000] - held[500], resident("File") - mapped
    print(f"anonymous memory grew by {growth / MB:.2f} MB, the file's pages by {pages / MB:.0f} MB")
    assert growth < 4 * MB
    # they are the system's, which takes them back when it needs them
    assert pages > 80 * MB


class Gauge(rr.Listener):
    """Takes note of memory after each step."""

    def __init__(self):
        self.held = []

    def advance(self, step):
        self.held.append(resident("Anon"))


def test_three_hundred_steps(make_config):
    gauge = Gauge()
    config = make_config(
        steps=300, evaluate_every=25, checkpoint_every=25, observe_every=25, ema_decay=0.9,
        peak_flops=1e11,
    )  # fmt: skip
    rr.train(config, listener=gauge)
    warm, last = max(gauge.held[50:100]), max(gauge.held[-50:])
    print(f"anonymous memory grew by {(last - warm) / MB:.2f} MB over 200 steps")
    assert last - warm < 2 * MB
