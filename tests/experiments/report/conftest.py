import json
import math
import random
from pathlib import Path

import pytest

from resroute.analysis import find_runs
from resroute.config import to_dict
from resroute.experiments.compare import compare
from resroute.experiments.plan import Plan
from resroute.experiments.study import Contrast
from resroute.model import GPTConfig
from resroute.residual import WAV, BlockAttnRes, PreNorm
from resroute.training import TrainConfig

METHODS = (PreNorm(), BlockAttnRes(num_blocks=4), WAV(num_blocks=4))
STEPS, EVERY, BATCH, CONTEXT = 2000, 100, 8, 256
TEXT = "Mia & Tom found the <red> key.\nThey went home."
PRIMARY = Contrast(treatment="WAV", baseline="Block AttnRes", num_layers=48)


def depth_weights(residual, num_layers, seed):
    """Weights of believable shape: the newest sources have most, details little."""
    blocks = residual.num_blocks
    bases = ("state", *getattr(residual, "bases", ()))
    finished = [f"{base} {b}" for b in range(blocks) for base in bases]
    sources = ["embedding", *finished, *(f"running {base}" for base in bases)]
    per_block = -(-2 * num_layers // blocks)
    noise, rows = random.Random(seed), []
    for site in range(2 * num_layers + 1):
        block, place = divmod(min(site, 2 * num_layers - 1), per_block)
        is_readout = site == 2 * num_layers
        row = {"embedding": 1.0}
        for b in range(block + is_readout):
            for base in bases[: 1 if is_readout else None]:
                share = (0.6 + 0.5 * b) if base == "state" else 0.15 + 0.1 * (b == block - 1)
                row[f"{base} {b}"] = share * (1 + 0.2 * noise.random())
        if place and not is_readout:
            for base in bases:
                row[f"running {base}"] = (1.5 if base == "state" else 0.3) * (1 + noise.random())
        total = sum(row.values())
        rows.append([row[s] / total if s in row else None for s in sources])
    sites = [f"{s // 2} {('attention', 'mlp')[s % 2]}" for s in range(2 * num_layers)]
    return {"sites": [*sites, "readout"], "sources": sources, "weights": rows}


def losses(final, steps, every, noise):
    """Records of a learning curve that ends in `final`."""

    def loss(step):
        fall = 3.3 * math.exp(-step / (0.035 * steps)) + 0.5 * math.exp(-4 * step / steps)
        return final + fall - 0.5 * math.exp(-4)

    records = []
    for step in range(0, steps + 1, every // 2):
        at = {"step": step, "tokens": step * BATCH * CONTEXT}
        if step:
            records.append({"kind": "train", **at, "loss": loss(step) + noise.gauss(0, 0.03)})
        if step % every == 0:
            wobble = noise.gauss(0, 0.004) if step < steps else 0.0
            records.append({"kind": "validation", **at, "loss": loss(step) + wobble})
    return records


def write_run(
    folder, residual, *, num_layers=12, seed=0, corpus="storyworld", final=0.8, speed=9000.0,
    steps=STEPS, rate=2e-3, sample=None, dim=128, name=None, routed=True, findings=None,
    **summary,
):  # fmt: skip
    """A finished run's folder; further keywords replace fields of its summary."""
    model = GPTConfig(
        vocab_size=64, context=CONTEXT, num_layers=num_layers, num_heads=2, dim=dim,
        residual=residual,
    )  # fmt: skip
    config = TrainConfig(
        model=model, data=f"data/{corpus}", steps=steps, seed=seed, learning_rate=rate,
        evaluate_every=EVERY,
    )  # fmt: skip
    method = residual.type_name.replace("_", "-")
    digits = f"{corpus}-{rate:g}-{steps}-{dim}"
    path = folder / (name or f"{method}-L{num_layers}-s{seed}-{digits}")
    path.mkdir(parents=True)
    described = {"name": corpus, "fingerprint": f"{corpus}-digits"}
    written = {"format_version": 1, **to_dict(config), "corpus": described}
    (path / "config.json").write_text(json.dumps(written))
    (path / "env.json").write_text('{"sessions": [{"torch": "2.13.0", "commit": "0123abcd"}]}')
    noise = random.Random(f"{seed} {corpus} {num_layers} {method}")
    records = losses(final, steps, EVERY, noise) if final is not None else []
    (path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    fields = {
        "format_version": 1, "label": residual.label, "method": residual.type_name,
        "num_layers": num_layers, "seed": seed, "steps": steps, "tokens": steps * BATCH * CONTEXT,
        "validation_loss": final, "best_validation_loss": final, "floor": 0.157,
        "floor_exact": False, "parameters": 74_000 * num_layers, "policy_parameters": 100,
        "tokens_per_second": speed, "seconds": 500.0, "processes": 1,
        "peak_memory_bytes": 7.1e8, "memory_kind": "resident", "device": "cpu",
        "precision": "float32", "corpus": corpus, **summary,
    }  # fmt: skip
    (path / "summary.json").write_text(json.dumps(fields))
    if routed and hasattr(residual, "num_blocks"):
        weights = depth_weights(residual, num_layers, seed)
        (path / "depth_weights.json").write_text(json.dumps(weights))
    if sample is not None:
        (path / "sample.txt").write_text(sample)
    if findings is not None:
        checked = {"format_version": 1, "step": steps, "findings": to_dict(findings)}
        (path / "health.json").write_text(json.dumps(checked))
    return path


def write_study(folder: Path, *, corpora=("storyworld", "tinystories"), layers=(12, 24, 48)):
    """Three methods, each depth and corpus, 3 seeds and 5 for the primary contrast's cells."""
    gain = {"pre_norm": 0.0, "block_attn_res": 0.015, "wav": 0.03}
    speed = {"pre_norm": 1.0, "block_attn_res": 0.92, "wav": 0.85}
    for corpus in corpora:
        for depth in layers:
            for residual in METHODS:
                primary = depth == max(layers) and residual.type_name != "pre_norm"
                for seed in range(5 if primary else 3):
                    shared = random.Random(f"{seed} {corpus} {depth}").gauss(0, 0.006)
                    own = random.Random(f"{seed} {corpus} {depth} {residual.label}").gauss(0, 0.003)
                    level = 0.86 - 0.05 * math.log2(depth / 12) + 0.4 * (corpus != "storyworld")
                    final = (
                        level
                        - gain[residual.type_name] * (1 + math.log2(depth / min(layers)))
                        + shared
                        + own
                    )
                    write_run(
                        folder, residual, num_layers=depth, seed=seed, corpus=corpus, final=final,
                        speed=90_000 / depth * speed[residual.type_name],
                        floor=0.157 if corpus == "storyworld" else None,
                        floor_exact=False if corpus == "storyworld" else None,
                        sample=TEXT if depth == min(layers) and seed == 0 else None,
                    )  # fmt: skip


@pytest.fixture
def make_run(tmp_path):
    """Write a finished run below `tmp_path / "runs"`, as `write_run` does."""

    def make(name, residual=WAV(num_blocks=4), **options):  # noqa: B008 - frozen
        return write_run(tmp_path / "runs", residual, name=name, **{"num_layers": 4, **options})

    return make


@pytest.fixture(scope="session")
def study_folder(tmp_path_factory):
    """Runs of a sweep over depth, seeds and two corpora."""
    folder = tmp_path_factory.mktemp("study") / "runs"
    write_study(folder, layers=(4, 8))
    return folder


@pytest.fixture(scope="session")
def plan():
    """What those runs were made for."""
    primary = Contrast(treatment="WAV", baseline="Block AttnRes", num_layers=8)
    return Plan(suite="paper", baseline="PreNorm", primary=primary, runs=())


@pytest.fixture(scope="session")
def study_of_sweep(study_folder, plan):
    """What those runs say."""
    return compare(find_runs(study_folder), baseline="PreNorm", primary=plan.primary)
