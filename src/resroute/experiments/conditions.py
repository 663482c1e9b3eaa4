"""What runs must share before they are averaged or compared, and the refusal where they do not."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from resroute.analysis import Run
from resroute.config import UserError, differences, from_dict
from resroute.files import read_json
from resroute.model import GPTConfig
from resroute.training import TrainConfig

_MOST_NAMED = 4


def environment(run: Run) -> dict[str, str | None]:
    """Versions of torch and commits a run was made with, None where that is not known.

    Those of several sessions stand beside each other.
    """
    if "torch" in run.summary or "commit" in run.summary:
        # read from a results folder
        return {key: run.summary.get(key) for key in ("torch", "commit")}
    path = run.path / "env.json"
    sessions = read_json(path, "delete it").get("sessions") if path.is_file() else None
    found: dict[str, str | None] = {}
    for key in ("torch", "commit"):
        told = [s.get(key) for s in sessions or [] if isinstance(s, dict)]
        found[key] = ", ".join(dict.fromkeys(v for v in told if isinstance(v, str))) or None
    return found


def check_seed_alone(runs: Sequence[Run]) -> None:
    """Refuse to average runs that differ in anything but the seed.

    Raises:
        UserError: Names two runs and the fields, or the seed that two runs share.
    """
    first, conditions = runs[0], _conditions(runs[0])
    seen: dict[int, Run] = {}
    for run in runs:
        fields = _differing(conditions, _conditions(run))
        if fields:
            raise UserError(
                f"{first.name} and {run.name} cannot be averaged, they differ in {fields}\n"
                "report them apart: move one of them to another folder"
            )
        twin = seen.setdefault(run.seed, run)
        if twin is not run:
            raise UserError(
                f"{twin.name} and {run.name} are two runs of one configuration and seed "
                f"({run.seed})\nmove one of them to another folder"
            )


def check_rate_alone(first: Run, second: Run) -> None:
    """Refuse to choose a learning rate among runs that differ in more than it and the seed.

    Raises:
        UserError: Names the two runs and the fields.
    """
    one, other = _conditions(first), _conditions(second)
    for conditions in (one, other):
        conditions.pop("learning_rate", None)
    if fields := _differing(one, other):
        raise UserError(
            f"{first.name} and {second.name} do not tell a learning rate, they differ in {fields}\n"
            "give a folder of one sweep"
        )


def check_comparable(first: Run, second: Run) -> None:
    """Refuse to compare runs that differ in more than method, learning rate and seed.

    Raises:
        UserError: Names the two runs and the fields.
    """
    one, other = _conditions(first), _conditions(second)
    for conditions in (one, other):
        # of the method, or chosen for it
        conditions["model"] = {k: v for k, v in conditions["model"].items() if k != "residual"}
        conditions.pop("learning_rate", None)
        conditions.pop("parameters")
    fields = _differing(one, other)
    if fields:
        raise UserError(
            f"{first.name} and {second.name} cannot be compared, they differ in {fields}\n"
            "report them apart: move one of them to another folder"
        )


def _conditions(run: Run) -> dict[str, Any]:
    """Everything that decides a run's loss, the seed apart."""
    written = {k: v for k, v in run.config.items() if k not in ("format_version", "corpus")}
    corpus = run.config.get("corpus")
    fingerprint = corpus.get("fingerprint") if isinstance(corpus, dict) else None
    try:
        # fields that an older version did not have are at their default
        found = from_dict(TrainConfig, written).identity(str(fingerprint))
    except UserError:
        found = {k: v for k, v in written.items() if k in _identity_fields()}
        found["corpus"] = str(fingerprint)
    found.pop("seed", None)
    if not isinstance(found.get("model"), dict):
        found["model"] = {}
    return {
        **found,
        # as it was chosen, where the configuration says `auto`
        "precision": run.summary["precision"],
        "device": run.summary["device"].partition(":")[0],
        "torch": environment(run)["torch"],
        "parameters": run.summary["parameters"],
    }


@functools.cache
def _identity_fields() -> frozenset[str]:
    any_config = TrainConfig(model=GPTConfig(vocab_size=2), data="")
    names = {field.name for field in dataclasses.fields(TrainConfig)}
    return frozenset(names & any_config.identity("").keys())


def _differing(one: dict[str, Any], other: dict[str, Any]) -> str:
    """`batch_size (8 and 4), steps (10 and 20)`; empty where nothing differs."""
    names = differences(one, other)
    if one["torch"] is None or other["torch"] is None:
        names = [name for name in names if name != "torch"]
    told = [f"{name} ({_at(one, name)} and {_at(other, name)})" for name in names[:_MOST_NAMED]]
    more = len(names) - len(told)
    return ", ".join(told) + (f" and {more} more" if more else "")


def _at(conditions: Any, path: str) -> Any:
    for name in path.split("."):
        conditions = conditions.get(name, "none") if isinstance(conditions, dict) else "none"
    return conditions
