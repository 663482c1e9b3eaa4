"""A results folder: finished runs as a few files that can be committed, and read back as runs.

`runs.csv` has a row a run, `curves.csv` the losses at its evaluations; depth weights, samples and
findings of health checks are JSON by run. What is read back gives the report that the runs gave.
"""

import dataclasses
import math
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from resroute.analysis import DepthWeights, Run, find_runs
from resroute.config import UserError, from_dict, to_dict
from resroute.experiments.conditions import environment
from resroute.experiments.plan import Plan, grown, read_plan, write_plan
from resroute.experiments.series import series_names
from resroute.experiments.spreadsheet import flat, nested, read_table, table
from resroute.files import read_json, write_json, write_text
from resroute.residual import Finding

RUNS_FILE = "runs.csv"
CURVES_FILE = "curves.csv"
# not a run's own `depth_weights.json`: results may be written beside what a run has
MAPS_FILE = "depth_maps.json"
SAMPLES_FILE = "samples.json"
# not a run's own `health.json`, for the same reason
FINDINGS_FILE = "findings.json"
FORMAT_VERSION = 1

_REMEDY = "write the results again with `resroute report`, from the runs"
_CONFIG = "config."
_FOLDERS = ("data", "out", "mix")
_T = TypeVar("_T")
_CURVES = ("run", "step", "tokens", "kind", "loss", "nats_per_character")


@dataclass(frozen=True, kw_only=True)
class _Summary:
    """Fields of a summary that tables and figures need, as they are checked."""

    label: str
    method: str
    corpus: str
    device: str
    precision: str
    num_layers: int
    seed: int
    steps: int
    tokens: int
    parameters: int
    validation_loss: float | None
    floor: float | None
    floor_exact: bool | None
    tokens_per_second: float | None
    peak_memory_bytes: float | None
    memory_kind: str | None
    nats_per_character: float | None = None


@dataclass(frozen=True, kw_only=True)
class _Point:
    """One row of curves.csv, as it is checked."""

    run: str
    step: int
    tokens: int
    kind: str
    loss: float | None = None
    nats_per_character: float | None = None


def condensed(runs: Sequence[Run]) -> list[Run]:
    """The runs as far as a results folder keeps them; their paths stay.

    Of the metrics, validation losses and the training losses that come last before each of them.
    Of absolute paths in the configuration, the last name. Versions of torch and the commit join
    the summary.
    """
    return [
        dataclasses.replace(
            run,
            config=_without_places(run.config),
            metrics=_at_evaluations(run.metrics),
            summary={**run.summary, **environment(run)},
        )
        for run in runs
    ]


def write_results(runs: Sequence[Run], out: Path, plan: Plan | None = None) -> list[Path]:
    """Write runs.csv, curves.csv, and what there is of plan, depth weights, samples and findings.

    The same runs give the same bytes.

    Args:
        runs: Finished runs, whose names differ.
        out: The folder to write to, which exists.
        plan: What the runs were made for.

    Returns:
        The files written.

    Raises:
        UserError: Two runs of one name, a folder with the plan of another suite, or one that
            cannot be written.
    """
    _check_names([run.name for run in runs], "the runs")
    kept = condensed(runs)
    rows = [_row(run, series) for run, series in zip(kept, series_names(runs), strict=True)]
    points = [{"run": run.name, **record} for run in kept for record in run.metrics]
    maps = {run.name: to_dict(run.depth_weights) for run in kept if run.depth_weights}
    samples = {run.name: run.sample for run in kept if run.sample is not None}
    findings = {run.name: to_dict(run.findings) for run in kept if run.findings is not None}
    write_text(out / CURVES_FILE, table(points, _CURVES))
    written = [out / CURVES_FILE]
    for name, value in ((MAPS_FILE, maps), (SAMPLES_FILE, samples), (FINDINGS_FILE, findings)):
        if value:
            write_json(out / name, {"format_version": FORMAT_VERSION, "runs": value})
            written.append(out / name)
        else:
            # of former results
            (out / name).unlink(missing_ok=True)
    if plan is not None and (known := read_plan(out)) != (merged := grown(known, plan, out)):
        write_plan(out, merged)
    # last, as what makes the folder one of results
    write_text(out / RUNS_FILE, table(rows, ("name", "series")))
    return [out / RUNS_FILE, *written]


def add_result(run: Run, out: Path, plan: Plan) -> None:
    """Add a run to a folder of results, made if missing, in the order of the plan.

    Raises:
        UserError: As `write_results` and `read_results`.
    """
    out.mkdir(parents=True, exist_ok=True)
    known = read_results(out) if (out / RUNS_FILE).is_file() else []
    runs = [run, *(other for other in known if other.name != run.name)]
    place = {name: number for number, name in enumerate(plan.runs)}
    write_results(sorted(runs, key=lambda r: (place.get(r.name, len(place)), r.name)), out, plan)


def read_results(folder: Path) -> list[Run]:
    """Read what `write_results` has written: its runs in their order, as `condensed` has them.

    A run's path is `folder / name`, where its files may or may not be.

    Raises:
        UserError: A file that is missing or damaged.
    """
    path = folder / RUNS_FILE
    rows = list(read_table(path, ("name",), _REMEDY))
    names = [_name(row["name"], where) for where, row in rows]
    _check_names(names, str(path))
    curves = _read_curves(folder / CURVES_FILE, names)
    maps = _read_by_run(folder / MAPS_FILE, names)
    samples = _read_by_run(folder / SAMPLES_FILE, names)
    findings = _read_by_run(folder / FINDINGS_FILE, names)
    return [
        Run(
            path=folder / name,
            name=name,
            config=nested(row, _CONFIG, where, _REMEDY),
            metrics=curves[name],
            summary=_summary(row, where),
            depth_weights=(
                _depth_weights(maps[name], f"{folder / MAPS_FILE} {name}") if name in maps else None
            ),
            sample=(
                _text(samples[name], f"{folder / SAMPLES_FILE} {name}", also="\n\t")
                if name in samples
                else None
            ),
            findings=(
                _findings(findings[name], f"{folder / FINDINGS_FILE} {name}")
                if name in findings
                else None
            ),
        )
        for name, (where, row) in zip(names, rows, strict=True)
    ]


def runs_of(folder: Path) -> list[Run]:
    """Finished runs in and below a folder or, where there is none, those of a results folder.

    Raises:
        UserError: No such folder, or a damaged file.
    """
    runs = find_runs(folder)
    return read_results(folder) if not runs and (folder / RUNS_FILE).is_file() else runs


def _row(run: Run, series: str) -> dict[str, Any]:
    # a summary of other software may have fields of these names
    summary = {
        key: value
        for key, value in run.summary.items()
        if key not in ("name", "series") and not key.startswith(_CONFIG)
    }
    return {"name": run.name, "series": series, **summary, **flat(run.config, _CONFIG)}


def _summary(row: dict[str, Any], where: str) -> dict[str, Any]:
    found = {
        key: value
        for key, value in row.items()
        if key not in ("name", "series") and not key.startswith(_CONFIG)
    }
    needed = {field.name for field in dataclasses.fields(_Summary)}
    _checked(_Summary, {k: v for k, v in found.items() if k in needed}, where)
    for key, value in found.items():
        if isinstance(value, str):
            _text(value, f"{where}.{key}")
    return found


def _read_curves(path: Path, names: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for where, row in read_table(path, _CURVES[:5], _REMEDY):
        _checked(_Point, row, where)
        run = row.pop("run")
        if run not in found:
            raise UserError(f"{where}: no run {run!r} in {RUNS_FILE}; {_REMEDY}")
        found[run].append(row)
    return found


def _read_by_run(path: Path, names: Sequence[str]) -> dict[str, Any]:
    if not path.is_file():
        return {}
    data = read_json(path, _REMEDY)
    if data.get("format_version") != FORMAT_VERSION or not isinstance(data.get("runs"), dict):
        raise UserError(f"{path}: damaged (needs format_version 1 and runs by name); {_REMEDY}")
    return {name: data["runs"][name] for name in names if name in data["runs"]}


def _depth_weights(data: Any, where: str) -> DepthWeights:
    found = _checked(DepthWeights, data, where)
    is_whole = len(found.weights) == len(found.sites) and all(
        len(row) == len(found.sources) for row in found.weights
    )
    if not (is_whole and found.sites and found.sources):
        raise UserError(f"{where}: damaged (weights are not sites x sources numbers); {_REMEDY}")
    for name in (*found.sites, *found.sources):
        _text(name, where)
    return found


def _findings(data: Any, where: str) -> tuple[Finding, ...]:
    found = _checked(tuple[Finding, ...], data, where)
    for finding in found:
        for text in vars(finding).values():
            _text(text, where)
    return found


def _checked(cls: type[_T], data: Any, where: str) -> _T:
    try:
        return from_dict(cls, data, where=where)
    except UserError as error:
        raise UserError(f"{error}; {_REMEDY}") from None


def _at_evaluations(metrics: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Validation records, each after the training record that comes last before it."""
    by_step: dict[str, dict[int, dict[str, Any]]] = {"train": {}, "validation": {}}
    for record in metrics:
        if record["kind"] in by_step:
            by_step[record["kind"]][record["step"]] = record
    evaluated, trained = sorted(by_step["validation"]), sorted(by_step["train"])
    kept = []
    former = -math.inf
    for step in evaluated:
        before = [at for at in trained if former < at <= step]
        kept += [by_step["train"][at] for at in before[-1:]]
        kept.append(by_step["validation"][step])
        former = step
    return [_point(record) for record in kept or (by_step["train"][at] for at in trained)]


def _point(record: dict[str, Any]) -> dict[str, Any]:
    kept = {key: record[key] for key in ("step", "tokens", "kind", "loss")}
    nats = record.get("nats_per_character")
    return kept if nats is None else {**kept, "nats_per_character": nats}


def _without_places(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration without absolute paths, which say where a machine keeps its files."""

    def relative(value: Any) -> Any:
        if isinstance(value, list):
            return [relative(item) for item in value]
        is_absolute = isinstance(value, str) and Path(value).is_absolute()
        return Path(value).name if is_absolute else value

    return {key: relative(value) if key in _FOLDERS else value for key, value in config.items()}


def _name(value: Any, where: str) -> str:
    name = _text(value, f"{where}.name")
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts:
        raise UserError(f"{where}: {name!r} is not the name of a run; {_REMEDY}")
    return name


def _text(value: Any, where: str, *, also: str = "") -> str:
    """Text that pages and figures can show: without control characters and lone surrogates."""
    if not isinstance(value, str) or any(
        unicodedata.category(c) in ("Cc", "Cs") and c not in also for c in value
    ):
        raise UserError(f"{where}: damaged (needs plain text); {_REMEDY}")
    return value


def _check_names(names: Sequence[str], where: str) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UserError(f"{where}: two runs have the name {twice[0]!r}; {_REMEDY}")
