"""Finished runs as values, read from their folders' files and never from logs."""

import dataclasses
import math
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from resroute.config import UserError, from_dict, variants
from resroute.files import read_json, read_json_lines, read_text
from resroute.residual import Finding, ResidualConfig

METHODS = tuple(variants(ResidualConfig))
"""Methods in the order of rows, legends and panels: as they are registered, baselines first."""

_LARGEST = 1e15
_REMEDY = "run it again with --fresh, or remove its folder"

_NUMBER = (int, float)
_SUMMARY: dict[str, tuple[type, ...]] = {
    "label": (str,),
    "method": (str,),
    "corpus": (str,),
    "device": (str,),
    "precision": (str,),
    "num_layers": (int,),
    "seed": (int,),
    "steps": (int,),
    "tokens": (int,),
    "parameters": (int,),
    "validation_loss": (*_NUMBER, type(None)),
    "floor": (*_NUMBER, type(None)),
    "floor_exact": (bool, type(None)),
    "tokens_per_second": (*_NUMBER, type(None)),
    "peak_memory_bytes": (*_NUMBER, type(None)),
    "memory_kind": (str, type(None)),
}

# hidden folders, and runs that --fresh has moved aside
_SKIPPED = re.compile(r"^\.|\.old-\d+$")


@dataclass(frozen=True, kw_only=True)
class DepthWeights:
    """Mean routing weights of one model: a row per site, a column per source.

    `weights[i][j]` is the share of source j in the read of site i, None where site i has no such
    source; a row's numbers sum to one.
    """

    sites: tuple[str, ...]
    sources: tuple[str, ...]
    weights: tuple[tuple[float | None, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Run:
    """One finished run. `name` is its folder's path below the folder that was searched."""

    path: Path
    name: str
    config: dict[str, Any]
    metrics: list[dict[str, Any]]
    summary: dict[str, Any]
    depth_weights: DepthWeights | None
    sample: str | None
    findings: tuple[Finding, ...] | None = None
    """Of the health checks at the end, each text on one line; None where there were none."""

    @property
    def label(self) -> str:
        """The method's name as readers see it."""
        return str(self.summary["label"])

    @property
    def method(self) -> str:
        """The residual configuration's type."""
        return str(self.summary["method"])

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return int(self.summary["num_layers"])

    @property
    def seed(self) -> int:
        """The run's seed."""
        return int(self.summary["seed"])

    @property
    def width(self) -> int | None:
        """Width of the model's stream, where the configuration tells."""
        model = self.config.get("model")
        width = model.get("dim") if isinstance(model, dict) else None
        return width if _is(width, (int,)) else None

    @property
    def setting(self) -> tuple[Any, ...]:
        """What must be equal for losses to be compared: corpus, depth, width, tokens."""
        return self.summary["corpus"], self.num_layers, self.width, self.summary["tokens"]

    @property
    def floor(self) -> float | None:
        """Entropy floor of the corpus in nats per character, None where it is not known."""
        value = self.summary["floor"]
        return None if value is None else float(value)

    def losses(self, kind: Literal["train", "validation"]) -> tuple[list[int], list[float]]:
        """Training tokens seen and the finite losses there, in nats per character.

        Of a step that a resumed run went through twice, the later record counts.
        """
        by_step = {record["step"]: record for record in self.metrics if record["kind"] == kind}
        records = [by_step[step] for step in sorted(by_step)]
        found = [(r["tokens"], nats_of(r, "loss")) for r in records]
        kept = [(tokens, n) for tokens, n in found if n is not None and math.isfinite(n)]
        return [int(tokens) for tokens, _ in kept], [nats for _, nats in kept]


def nats_of(found: dict[str, Any], loss: str) -> float | None:
    """Nats per character of a record or summary, whose loss is per token; None without one.

    Older ones have characters for tokens, and the loss alone.
    """
    value = found.get("nats_per_character", found[loss])
    return None if value is None else float(value)


def read_run(path: Path) -> Run:
    """Read one finished run.

    Raises:
        UserError: The folder holds no finished run, or one of its files is damaged.
    """
    if not (path / "summary.json").is_file():
        raise UserError(
            f"{path}: no finished run here (no summary.json); finish its training first"
        )
    weights_file, sample_file = path / "depth_weights.json", path / "sample.txt"
    health_file = path / "health.json"
    return Run(
        path=path,
        name=_name(path, path),
        config=read_json(path / "config.json", _REMEDY),
        metrics=_read_metrics(path / "metrics.jsonl"),
        summary=_read_summary(path / "summary.json"),
        depth_weights=_read_depth_weights(weights_file) if weights_file.is_file() else None,
        sample=(_printable(read_text(sample_file, _REMEDY)) if sample_file.is_file() else None),
        findings=_read_findings(health_file) if health_file.is_file() else None,
    )


def find_runs(folder: Path) -> list[Run]:
    """Read every finished run in and below `folder`.

    Returns:
        Runs by depth, method (`METHODS`, then others), label, seed and name.

    Raises:
        UserError: `folder` does not exist, or a file of a finished run is damaged.
    """
    runs = [
        dataclasses.replace(read_run(path), name=_name(path, folder))
        for path in _run_folders(folder)
        if (path / "summary.json").is_file()
    ]
    return sorted(runs, key=_order)


def unfinished_runs(folder: Path) -> list[str]:
    """Names of the runs in and below `folder` that have no summary yet, sorted.

    Raises:
        UserError: `folder` does not exist.
    """
    return sorted(
        _name(path, folder)
        for path in _run_folders(folder)
        if not (path / "summary.json").is_file()
    )


def run_labels(runs: list[Run]) -> list[str]:
    """The runs' labels, made to differ.

    By the corpus where there are several; by width and tokens where any two runs differ in them;
    by the peak learning rate where a method has several at one depth; by the options in which
    methods of one label differ; by the name where nothing else does.
    """
    one_corpus = len({run.summary["corpus"] for run in runs}) < 2
    labels = [run.label if one_corpus else f"{run.label}, {run.summary['corpus']}" for run in runs]
    notes = zip(labels, _sizes(runs), _options(runs, labels), _rates(runs, labels), strict=True)
    labels = [
        f"{label} ({', '.join(told)})" if (told := [*sizes, *options, *rates]) else label
        for label, sizes, options, rates in notes
    ]
    keys = [(label, r.num_layers, r.seed) for label, r in zip(labels, runs, strict=True)]
    counts = Counter(keys)
    return [
        label if counts[key] == 1 else f"{label} ({run.name})"
        for label, key, run in zip(labels, keys, runs, strict=True)
    ]


def run_titles(runs: Sequence[Run]) -> dict[str, str]:
    """The runs for people, by name: `WAV, 48 layers, seed 0`."""
    labels = run_labels(list(runs))
    return {
        run.name: f"{label}, {run.num_layers} layers, seed {run.seed}"
        for run, label in zip(runs, labels, strict=True)
    }


def _sizes(runs: list[Run]) -> list[list[str]]:
    """Width and tokens of each run, where runs differ in them."""
    notes: list[list[str]] = [[] for _ in runs]
    if len({run.width for run in runs}) > 1:
        for note, run in zip(notes, runs, strict=True):
            note.append(f"width {run.width}")
    if len({run.summary["tokens"] for run in runs}) > 1:
        for note, run in zip(notes, runs, strict=True):
            note.append(f"{run.summary['tokens']:,} tokens")
    return notes


def _rates(runs: list[Run], labels: list[str]) -> list[list[str]]:
    """The peak learning rate of each run whose label and depth have several."""
    found: dict[tuple[str, int], set[Any]] = defaultdict(set)
    keys = [(label, run.num_layers) for label, run in zip(labels, runs, strict=True)]
    for key, run in zip(keys, runs, strict=True):
        found[key].add(run.config.get("learning_rate"))
    return [
        [_printable(f"rate {run.config.get('learning_rate')}")] if len(found[key]) > 1 else []
        for key, run in zip(keys, runs, strict=True)
    ]


def _options(runs: list[Run], labels: list[str]) -> list[list[str]]:
    """Options such as `rho_max=1.0` in which a run's method differs from others of its label."""
    options = [_residual(run) for run in runs]
    told = []
    for label, own in zip(labels, options, strict=True):
        others = [o for o, other in zip(options, labels, strict=True) if other == label]
        names = [name for name in own if any(o.get(name) != own[name] for o in others)]
        told.append([_printable(f"{name}={own[name]}") for name in names])
    return told


def _residual(run: Run) -> dict[str, Any]:
    model = run.config.get("model")
    residual = model.get("residual") if isinstance(model, dict) else None
    return residual if isinstance(residual, dict) else {}


def _order(run: Run) -> tuple[int, int, str, int, str]:
    rank = METHODS.index(run.method) if run.method in METHODS else len(METHODS)
    return run.num_layers, rank, run.label, run.seed, run.name


def _name(path: Path, folder: Path) -> str:
    relative = path.resolve().name if path == folder else path.relative_to(folder).as_posix()
    return _printable(relative)


def _printable(text: str) -> str:
    # control characters and lone surrogates fit neither HTML nor SVG, and can hide what a file says
    return "".join(
        "\ufffd" if unicodedata.category(c) in ("Cc", "Cs") and c not in "\n\t" else c for c in text
    )


def _run_folders(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; name the one that holds the runs")
    # config.json alone may be an exported model; a run has at least env.json beside it
    marks = ("env.json", "metrics.jsonl", "summary.json")
    if (folder / "config.json").is_file() and any((folder / m).is_file() for m in marks):
        return [folder]
    try:
        below = sorted(p for p in folder.iterdir() if p.is_dir() and not p.is_symlink())
    except OSError as error:
        raise UserError(f"{folder}: cannot be read ({error.strerror}); check the folder") from None
    return [run for p in below if not _SKIPPED.search(p.name) for run in _run_folders(p)]


def _is(value: Any, kinds: tuple[type, ...], most: float = _LARGEST) -> bool:
    # true and false count as numbers in Python, not in these files
    if isinstance(value, bool):
        return bool in kinds
    # numbers that no run has would only fail later, in a figure
    if isinstance(value, int | float) and abs(value) > most:
        return False
    return isinstance(value, kinds)


def _read_versioned(path: Path) -> dict[str, Any]:
    data = read_json(path, _REMEDY)
    version = data.get("format_version")
    if version != 1:
        raise UserError(
            f"{path}: has format_version {version!r}, this resroute reads 1; "
            "use the resroute that wrote it, or run it again with --fresh"
        )
    return data


def _read_summary(path: Path) -> dict[str, Any]:
    summary = _read_versioned(path)
    for field, kinds in _SUMMARY.items():
        # a seed is drawn on no axis
        most = 2**63 if field == "seed" else _LARGEST
        if field not in summary or not _is(summary[field], kinds, most):
            found = repr(summary[field]) if field in summary else "nothing"
            raise UserError(f"{path}: damaged ({field!r} holds {found}); {_REMEDY}")
    return {k: _printable(v) if isinstance(v, str) else v for k, v in summary.items()}


def _read_metrics(path: Path) -> list[dict[str, Any]]:
    records = []
    for where, record in read_json_lines(path, _REMEDY):
        if record.get("kind") in ("train", "validation") and not (
            _is(record.get("step"), (int,))
            and _is(record.get("tokens"), (int,))
            and _is(record.get("loss", ""), (*_NUMBER, type(None)))
        ):
            raise UserError(f"{where}: damaged (needs step, tokens and loss); {_REMEDY}")
        records.append({"kind": None, **record})
    return records


def _read_depth_weights(path: Path) -> DepthWeights:
    data = read_json(path, _REMEDY)
    sites, sources, rows = (data.get(key) for key in ("sites", "sources", "weights"))
    names = [*sites, *sources] if isinstance(sites, list) and isinstance(sources, list) else []
    if not (
        isinstance(sites, list)
        and isinstance(sources, list)
        and isinstance(rows, list)
        and sites
        and sources
        and all(isinstance(name, str) for name in names)
        and len(rows) == len(sites)
        and all(isinstance(row, list) and len(row) == len(sources) for row in rows)
        and all(_is(w, (*_NUMBER, type(None))) for row in rows for w in row)
    ):
        raise UserError(f"{path}: damaged (weights are not sites x sources numbers); {_REMEDY}")
    return DepthWeights(
        sites=tuple(map(_printable, sites)),
        sources=tuple(map(_printable, sources)),
        weights=tuple(tuple(None if w is None else float(w) for w in row) for row in rows),
    )


def _read_findings(path: Path) -> tuple[Finding, ...]:
    data = _read_versioned(path)
    try:
        found = from_dict(tuple[Finding, ...], data.get("findings"), where=f"{path}: findings")
    except UserError as error:
        raise UserError(f"{error}; {_REMEDY}") from None
    return tuple(map(_on_one_line, found))


def _on_one_line(finding: Finding) -> Finding:
    texts: dict[str, Any] = {
        name: " ".join(_printable(text).split()) for name, text in vars(finding).items()
    }
    return dataclasses.replace(finding, **texts)
