import json
from pathlib import Path
from typing import Any, Protocol

import pytest

SUMMARY = {
    "format_version": 1,
    "label": "WAV",
    "method": "wav",
    "num_layers": 2,
    "seed": 0,
    "steps": 20,
    "tokens": 2000,
    "validation_loss": 0.71,
    "best_validation_loss": 0.70,
    "floor": 0.213,
    "floor_exact": True,
    "parameters": 1_612_000,
    "policy_parameters": 12_000,
    "tokens_per_second": 9000.4,
    "seconds": 70.1,
    "peak_memory_bytes": 9e8,
    "memory_kind": "resident",
    "device": "cpu",
    "precision": "float32",
    "corpus": "storyworld",
}
DEPTH_WEIGHTS = {
    "sites": ["0 attention", "0 mlp", "1 attention", "1 mlp", "readout"],
    "sources": ["embedding", "state 0", "phase 0", "running state"],
    "weights": [
        [1, None, None, None],
        [0.25, None, None, 0.75],
        [0.5, 0.25, 0.25, None],
        [0.125, 0.5, 0.125, 0.25],
        [0.5, 0.5, None, None],
    ],
}


class MakeRun(Protocol):
    def __call__(
        self, name: str, *, routed: bool = ..., sample: str | None = ..., **summary: Any
    ) -> Path: ...


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Write a finished run below `tmp_path / "runs"`; keywords replace fields of its summary."""

    def make(name: str, *, routed: bool = False, sample: str | None = None, **summary: Any) -> Path:
        fields = {**SUMMARY, **summary}
        path = tmp_path / "runs" / name
        path.mkdir(parents=True)
        model = {"num_layers": fields["num_layers"], "dim": 128, "context": 256}
        (path / "config.json").write_text(json.dumps({"model": model, "seed": fields["seed"]}))
        (path / "env.json").write_text("{}")
        records: list[dict[str, Any]] = []
        for step in range(1, 21):
            at = {"step": step, "tokens": 100 * step}
            records.append({"kind": "train", **at, "loss": 0.7 + 2 / step, "grad_norm": 0.9})
            if step % 5 == 0:
                records.append({"kind": "validation", **at, "loss": 0.71 + 2 / step})
        (path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
        (path / "summary.json").write_text(json.dumps(fields))
        if routed:
            (path / "depth_weights.json").write_text(json.dumps(DEPTH_WEIGHTS))
        if sample is not None:
            (path / "sample.txt").write_text(sample)
        return path

    return make
