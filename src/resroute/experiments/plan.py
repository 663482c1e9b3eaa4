"""What a sweep has set out to do: the cells of its suite and the contrast declared beforehand."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resroute.config import UserError, from_dict, to_dict
from resroute.experiments.study import Contrast
from resroute.files import read_json, write_json

PLAN_FILE = "suite.json"
FORMAT_VERSION = 1
_REMEDY = "give the sweep another folder"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What stands in `suite.json` beside the run folders of a sweep."""

    suite: str
    baseline: str | None
    """The series that all others are compared with; None takes the first one."""
    primary: Contrast | None
    """The one comparison that was declared before any run."""
    runs: tuple[str, ...]
    """Names of the run folders, in the order in which they are made."""
    primary_seeds: tuple[int, ...] = ()
    """Seeds planned for the primary contrast; a later number was added once results were known."""
    rates: str | None = None
    """A sentence on where the learning rates come from."""


def read_plan(folder: Path) -> Plan | None:
    """The plan of a sweep's folder, None where there is none.

    Raises:
        UserError: A damaged file, or one of a later format.
    """
    path = folder / PLAN_FILE
    if not path.is_file():
        return None
    data = read_json(path, _REMEDY)
    version = data.pop("format_version", None)
    if version != FORMAT_VERSION:
        raise UserError(f"{path}: format version {version!r} is not {FORMAT_VERSION}; {_REMEDY}")
    return from_dict(Plan, data, where=str(path))


def write_plan(folder: Path, plan: Plan) -> None:
    """Write `suite.json`, whole or not at all."""
    data: dict[str, Any] = to_dict(plan)
    write_json(folder / PLAN_FILE, {"format_version": FORMAT_VERSION, **data})


def grown(old: Plan | None, new: Plan, folder: Path) -> Plan:
    """The plan of a folder to which a sweep returns, perhaps with more cells.

    What was declared before the first run cannot be declared anew once results are known.

    Raises:
        UserError: The folder is of another suite, or its primary contrast differs.
    """
    if old is None:
        return new
    if old.suite != new.suite:
        raise UserError(
            f"{folder} holds the suite {old.suite!r}, not {new.suite!r}; give another folder "
            "with --out"
        )
    # another part of a suite may lack the baseline's method
    baseline = old.baseline or new.baseline
    if old.primary != new.primary or baseline != (new.baseline or baseline):
        raise UserError(
            f"{folder} was started with the primary contrast {_told(old)}, not {_told(new)}\n"
            "it is declared once, before results are known; give another folder with --out"
        )
    added = [name for name in new.runs if name not in old.runs]
    seeds = old.primary_seeds
    more = tuple(number for number in new.primary_seeds if number > max(seeds, default=0))
    return dataclasses.replace(
        new,
        baseline=baseline,
        runs=(*old.runs, *added),
        primary_seeds=(*seeds, *more),
        rates=new.rates or old.rates,
    )


def _told(plan: Plan) -> str:
    baseline = f" (baseline {plan.baseline})" if plan.baseline else ""
    if plan.primary is None:
        return f"none{baseline}"
    c = plan.primary
    return f"{c.treatment} minus {c.baseline} at {c.num_layers} layers{baseline}"
