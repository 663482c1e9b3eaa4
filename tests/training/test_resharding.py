"""Checkpoints of some processes that another number goes on from, or one process loads."""

import json
import shutil
from pathlib import Path

import pytest
import torch

import resroute as rr
from resroute.config import to_dict

pytestmark = pytest.mark.slow

LAYOUTS = ("gathered", "sharded")
# how it is spread, and what its checkpoints look like
KINDS = {
    f"{parallel}-{layout}": {"parallel": parallel, "checkpoint_layout": layout}
    for parallel in ("ddp", "fsdp")
    for layout in LAYOUTS
}
# processes and kind of the first half of a run, and of the second
MOVES = [
    *((4, kind, size, kind) for kind in KINDS for size in (1, 2, 4)),
    *((1, f"ddp-{layout}", size, f"fsdp-{layout}") for layout in LAYOUTS for size in (2, 4)),
    (1, "ddp-sharded", 4, "ddp-gathered"),
    (2, "fsdp-sharded", 2, "fsdp-sharded"),
    (2, "fsdp-sharded", 4, "ddp-gathered"),
    (2, "ddp-gathered", 4, "fsdp-sharded"),
]


def name_of(move):
    before, first, after, second = move
    return f"{before}-{first}-{after}-{second}"


@pytest.fixture(scope="module")
def configure(cheap_corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("resharding")

    def make(out, kind, **options):
        model = rr.GPTConfig(
            vocab_size=cheap_corpus.tokenizer.vocab_size,
            residual=rr.WAV(num_blocks=1, learn_bases=True),
            num_layers=2, dim=12, num_heads=6, qk_norm=True, context=48,
        )  # fmt: skip
        settings = {
            "steps": 6, "batch_size": 8, "warmup_steps": 2, "learning_rate": 3e-3,
            "ema_decay": 0.5, "evaluate_every": 2, "evaluation_windows": 5, "log_every": 1,
            "precision": "float32", "device": "cpu", "peak_flops": 1e10,
        }  # fmt: skip
        return rr.TrainConfig(
            model=model,
            data=str(cheap_corpus.path),
            out=str(folder / out),
            **{**settings, **KINDS[kind], **options},
        )

    return make


@pytest.fixture(scope="module")
def train(workers):
    """Runs several configurations, one after the other, on the same processes."""

    def run(size, configs, **options):
        jobs = [("train", {"config": to_dict(config), **options}) for config in configs]
        return workers.values("several", size, jobs=jobs)[0]

    return run


@pytest.fixture(scope="module")
def resumed(configure, train):
    """Summaries of all second halves, by name of the move."""
    for size in (1, 2, 4):
        kinds = {first for before, first, _, _ in MOVES if before == size}
        train(size, [configure(f"{size}-{kind}", kind) for kind in sorted(kinds)], stop_at=3)
    found = {}
    for size in (1, 2, 4):
        moves = [move for move in MOVES if move[2] == size]
        configs = [configure(name_of(move), move[3]) for move in moves]
        for (before, first, _, _), config in zip(moves, configs, strict=True):
            out = Path(config.out)
            shutil.copytree(out.with_name(f"{before}-{first}"), out)
        summaries = train(size, configs, resume=True)
        found |= {name_of(move): one for move, one in zip(moves, summaries, strict=True)}
    return found


@pytest.fixture(scope="module")
def whole(configure, train):
    """Summaries of uninterrupted runs, by size and parallel."""
    known = {}

    def ask(size, parallel):
        if (size, parallel) not in known:
            config = configure(f"whole-{size}-{parallel}", f"{parallel}-gathered")
            (known[size, parallel],) = train(size, [config])
        return known[size, parallel]

    return ask


def weights(path, **options):
    return rr.load(path, **options)[0].state_dict()


@pytest.mark.parametrize("move", MOVES, ids=name_of)
def test_a_run_goes_on_with_any_number_of_processes(resumed, whole, move, runs):
    one, found = whole(1, "ddp"), resumed[name_of(move)]
    assert found["processes"] == move[2]
    assert found["validation_loss"] == pytest.approx(one["validation_loss"], rel=1e-6)
    assert found["best_validation_loss"] == pytest.approx(one["best_validation_loss"], rel=1e-6)
    ours, theirs = runs.lines(found["path"]), runs.lines(one["path"])
    assert [(line["kind"], line["step"]) for line in ours] == [
        (line["kind"], line["step"]) for line in theirs
    ]
    for a, b in zip(ours, theirs, strict=True):
        for name in {"loss", "ema_loss", "grad_norm"} & b.keys():
            assert a[name] == pytest.approx(b[name], rel=1e-5)
    for ema in (False, True):
        expected = weights(one["path"], ema=ema)
        for name, value in weights(found["path"], ema=ema).items():
            # sums in another order round otherwise, see test_ranks.py
            torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("move", [m for m in MOVES if (m[0], m[1]) == (m[2], m[3])], ids=name_of)
def test_the_same_number_goes_on_to_the_bit(resumed, whole, move, runs):
    found = resumed[name_of(move)]
    expected = whole(move[0], move[1].partition("-")[0])
    assert found["validation_loss"] == expected["validation_loss"]
    assert runs.lines(found["path"]) == runs.lines(expected["path"])
    for ema in (False, True):
        ours, theirs = (weights(run["path"], ema=ema) for run in (found, expected))
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            assert torch.equal(value, theirs[name]), name


def test_shards_hold_what_one_file_holds(resumed, configure):
    halves = {layout: configure(f"4-fsdp-{layout}", "fsdp-gathered").out for layout in LAYOUTS}
    found = {}
    for ema in (False, True):
        ours, found[ema] = (weights(halves[layout], ema=ema) for layout in LAYOUTS)
        assert ours.keys() == found[ema].keys()
        for name, value in ours.items():
            assert torch.equal(value, found[ema][name]), name
    assert not torch.equal(found[False]["head.weight"], found[True]["head.weight"])


def test_one_process_loads_the_best_of_sharded_checkpoints(configure, train):
    # it forgets what it has learned
    options = {"steps": 4, "learning_rate": 10.0, "warmup_steps": 4, "keep": 1}
    config = configure("best", "fsdp-sharded", checkpoint_every=2, **options)
    (summary,) = train(4, [config])
    # the best is kept, and the newest
    best, newest = sorted(Path(config.out, "checkpoints").iterdir())
    losses = [
        json.loads((folder / "state.json").read_text())["validation_loss"]
        for folder in (best, newest)
    ]
    assert losses[0] < losses[1] == summary["validation_loss"]
    assert len(list(best.glob("*.safetensors"))) == 4
    for ema in (False, True):
        expected = [weights(folder, ema=ema) for folder in (best, newest)]
        assert not torch.equal(expected[0]["head.weight"], expected[1]["head.weight"])
        for is_best, theirs in ((True, expected[0]), (False, expected[1])):
            ours = weights(config.out, best=is_best, ema=ema)
            assert all(torch.equal(ours[name], value) for name, value in theirs.items())
    _, tokenizer, found = rr.load(config.out, best=True)
    assert found == config
    assert tokenizer.vocab_size == config.model.vocab_size
