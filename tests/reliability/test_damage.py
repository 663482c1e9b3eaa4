"""Damaged checkpoints are refused with one line, and a run goes back to the one before."""

import dataclasses
import json
import random
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import resroute as rr

pytestmark = pytest.mark.slow

NEWEST, BEFORE, OLDEST = "step_000006", "step_000004", "step_000002"
FIRST, SECOND = (f"shard-0000{n}-model-00001-of-00001.safetensors" for n in (1, 2))
REMEDY = re.compile(
    "; (use (another|an earlier) checkpoint|read it with the version of resroute|"
    "sharded checkpoints need a folder that all processes share)"
)


class Damage:
    """What is done to the newest checkpoint of a run."""

    def __init__(self, folder, seed):
        self.folder = folder
        self.random = random.Random(seed)

    def flip(self, name, *, in_header=False):
        """Change one bit; of the list of tensors or anywhere."""
        content = bytearray((self.folder / name).read_bytes())
        end = 8 + int.from_bytes(content[:8], "little") if in_header else len(content)
        content[self.random.randrange(8 if in_header else 0, end)] ^= 1 << self.random.randrange(8)
        (self.folder / name).write_bytes(content)

    def cut(self, name, share):
        """Keep a share of a file; 1 is all but the last byte."""
        content = (self.folder / name).read_bytes()
        size = len(content) - 1 if share == 1 else int(share * len(content))
        (self.folder / name).write_bytes(content[:size])

    def delete(self, name):
        (self.folder / name).unlink()

    def swap(self, name, other=f"../{BEFORE}/"):
        """Exchange a file with another, by default of the checkpoint before."""
        one, two = self.folder / name, self.folder / (other + name if other[-1] == "/" else other)
        first, second = one.read_bytes(), two.read_bytes()
        one.write_bytes(second)
        two.write_bytes(first)

    def copy(self, name, new):
        shutil.copy(self.folder / name, self.folder / new)

    def tensors(self, name, change):
        path = self.folder / name
        with safe_open(path, framework="pt") as file:
            notes = file.metadata()
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, notes)

    def state(self, change):
        path = self.folder / "state.json"
        state = json.loads(path.read_text())
        change(state)
        path.write_text(json.dumps(state))


def grow(tensors):
    tensors["extra"] = torch.ones(3)


def shrink(tensors):
    del tensors[min(tensors)]


def retype(dtype):
    def change(tensors):
        name = max(tensors)
        tensors[name] = tensors[name].to(dtype)

    return change


MODEL, OPTIMIZER, EMA, STATE = (
    "model.safetensors", "optimizer.safetensors", "ema.safetensors", "state.json",
)  # fmt: skip
WHOLE = {
    **{f"flip {name} {n}": lambda d, name=name: d.flip(name)
       for name, count in ((MODEL, 3), (OPTIMIZER, 3), (EMA, 2), (STATE, 6)) for n in range(count)},
    **{f"cut {name} to {share}": lambda d, name=name, share=share: d.cut(name, share)
       for name in (MODEL, OPTIMIZER, EMA, STATE) for share in (0, 0.5, 1)},
    **{f"delete {name}": lambda d, name=name: d.delete(name) for name in (MODEL, OPTIMIZER, EMA)},
    **{f"swap {name}": lambda d, name=name: d.swap(name) for name in (MODEL, OPTIMIZER, STATE)},
    "swap model and ema": lambda d: d.swap(MODEL, EMA),
    "extra tensor": lambda d: d.tensors(MODEL, grow),
    "another step": lambda d: d.state(lambda s: s.update(step=7)),
    "a file less": lambda d: d.state(lambda s: s["files"].pop(OPTIMIZER)),
}  # fmt: skip
SHARDS = {
    **{f"flip {name[:11]} {n}": lambda d, name=name: d.flip(name)
       for name in (FIRST, SECOND) for n in range(2)},
    **{f"cut {name[:11]} to {share}": lambda d, name=name, share=share: d.cut(name, share)
       for name, share in ((FIRST, 0), (FIRST, 1), (SECOND, 0.5))},
    "delete shard": lambda d: d.delete(SECOND),
    "swap shard with before": lambda d: d.swap(FIRST),
    "swap both shards": lambda d: d.swap(FIRST, SECOND),
    "extra shard": lambda d: d.copy(SECOND, "shard-00003-model-00001-of-00001.safetensors"),
}  # fmt: skip
# with checksums that fit: what is wrong has to be seen
WHOLE_SIGNED = {
    **{f"flip list of {name} {n}": lambda d, name=name: d.flip(name, in_header=True)
       for name in (MODEL, OPTIMIZER) for n in range(3)},
    **{f"cut {name} to {share}": lambda d, name=name, share=share: d.cut(name, share)
       for name, share in ((MODEL, 0), (MODEL, 1), (OPTIMIZER, 0.5), (EMA, 1))},
    **{f"{change.__name__} {name}": lambda d, name=name, change=change: d.tensors(name, change)
       for name in (MODEL, OPTIMIZER, EMA) for change in (grow, shrink)},
    **{f"{dtype} in {name}": lambda d, name=name, dtype=dtype: d.tensors(name, retype(dtype))
       for name, dtype in
       ((MODEL, torch.float16), (OPTIMIZER, torch.float64), (EMA, torch.int32))},
    "delete optimizer": lambda d: d.delete(OPTIMIZER),
    "no step": lambda d: d.state(lambda s: s.pop("step")),
    "step is a word": lambda d: d.state(lambda s: s.update(step="six")),
    "another layout": lambda d: d.state(lambda s: s.update(layout="sharded")),
    "wrong width": lambda d: d.state(lambda s: s["config"]["model"].update(dim=13)),
    "unknown field": lambda d: d.state(lambda s: s["config"].update(stepz=1)),
    "no vocabulary": lambda d: d.state(lambda s: s.pop("tokenizer")),
    "later format": lambda d: d.state(lambda s: s.update(format_version=9)),
}  # fmt: skip
SHARDS_SIGNED = {
    **{f"flip list of {name[:11]} {n}": lambda d, name=name: d.flip(name, in_header=True)
       for name in (FIRST, SECOND) for n in range(4)},
    "cut shard": lambda d: d.cut(SECOND, 0.5),
    "retype shard": lambda d: d.tensors(FIRST, retype(torch.float64)),
    "shrink shard": lambda d: d.tensors(FIRST, shrink),
    "swap both shards": lambda d: d.swap(FIRST, SECOND),
}  # fmt: skip
CASES = [
    pytest.param(kind, is_signed, damage, seed, id=f"{kind}{'-signed' * is_signed}-{name}")
    for kind, is_signed, damages in (
        ("whole", False, WHOLE), ("shards", False, SHARDS),
        ("whole", True, WHOLE_SIGNED), ("shards", True, SHARDS_SIGNED),
    )
    for seed, (name, damage) in enumerate(damages.items())
]  # fmt: skip


class Template:
    """A run stopped after three checkpoints, to be copied; written by one process or by two."""

    def __init__(self, folder, config, runs):
        self.config = config
        self.runs = runs
        self.folder = folder
        self.ends = {}

    def copy(self, place):
        shutil.copytree(self.config.out, place)
        return dataclasses.replace(self.config, out=str(place))

    def end(self, name):
        """Weights and metrics of the run that goes on from one of its checkpoints."""
        if name not in self.ends:
            config = self.copy(self.folder / f"from-{name}")
            for path in self.runs.checkpoints(config.out):
                if path.name > name:
                    shutil.rmtree(path)
            rr.train(config, resume=True)
            self.ends[name] = config.out
        return self.ends[name]


@pytest.fixture(scope="module")
def templates(tmp_path_factory, cheap_corpus, workers, runs):
    made = {}
    for kind, size in (("whole", 1), ("shards", 2)):
        folder = tmp_path_factory.mktemp(kind)
        config = rr.TrainConfig(
            model=rr.GPTConfig(
                vocab_size=cheap_corpus.tokenizer.vocab_size, context=32, num_layers=2, dim=12,
                num_heads=2, residual=rr.WAV(num_blocks=1),
            ),
            data=str(cheap_corpus.path), out=str(folder / "run"), steps=7, batch_size=4,
            evaluate_every=2, evaluation_windows=4, log_every=1, checkpoint_every=2, keep=3,
            ema_decay=0.9, precision="float32", device="cpu", peak_flops=1e11, parallel="fsdp",
            checkpoint_layout="gathered" if size == 1 else "sharded",
        )  # fmt: skip
        workers.values("train", size, config=config, stop_at=6)
        made[kind] = Template(folder, config, runs)
    return made


def weights(folder, *, ema):
    model, _, _ = rr.load(folder, ema=ema)
    return {name: tensor.numpy().tobytes() for name, tensor in model.state_dict().items()}


def refusal(folder, expected):
    """Why a checkpoint is not loaded, if it is not; what is loaded must be unharmed."""
    said = None
    for ema in (False, True):
        try:
            assert weights(folder, ema=ema) == expected[ema]
        except rr.UserError as error:
            said = str(error)
            assert "\n" not in said
            assert str(folder) in said
            assert REMEDY.search(said), said
    return said


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(("kind", "is_signed", "damage", "seed"), CASES)
def test_damage_is_refused_and_the_run_goes_back(
    templates, runs, sign_checkpoint, tmp_path, kind, is_signed, damage, seed, make_ear
):
    template = templates[kind]
    config = template.copy(tmp_path / "run")
    newest = Path(config.out, "checkpoints", NEWEST)
    expected = [weights(newest, ema=ema) for ema in (False, True)]
    damage(Damage(newest, seed))
    if is_signed:
        sign_checkpoint(newest)
    damaged = contents(newest)
    said = refusal(newest, expected)
    ear = make_ear()
    rr.train(config, resume=True, listener=ear)
    (resumed,) = (text for text in ear.said if text.startswith("resumed from "))
    start = resumed.rpartition("/")[2]
    if said is not None or start != NEWEST:
        assert start != NEWEST
        kept = newest.with_name(f"{NEWEST}.damaged-1")
        assert contents(kept) == damaged
        (reason,) = (text for text in ear.said if text.startswith(str(newest)))
        assert reason.endswith(": going back")
        assert REMEDY.search(reason), reason
        assert f"kept as {kept}" in ear.said
    assert list(Path(config.out).glob("checkpoints/.*")) == []
    runs.assert_same(template.end(start), config.out)
