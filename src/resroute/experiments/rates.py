"""The learning rate of each method and depth, as a sweep over rates has found it."""

import math
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from resroute.analysis import Run
from resroute.config import UserError
from resroute.experiments.conditions import check_rate_alone
from resroute.experiments.plan import read_plan
from resroute.experiments.results import runs_of
from resroute.residual import ResidualConfig


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Best rates by method, depth and corpus; see `best_rates`."""

    by_cell: dict[tuple[str, int, str], float]
    where: str
    told: str
    """In a sentence: among which rates, by which runs they were chosen, and where an end of the
    grid was best."""

    def rate(self, residual: ResidualConfig, num_layers: int, corpus: str) -> float:
        """The best rate of a method: at its depth, else the nearest; on its corpus, else another.

        Variants of a method that were not tuned take the rate of the method.

        Raises:
            UserError: A method that was not tuned.
        """
        name = Path(corpus).name
        known = {
            key: rate
            for key, rate in self.by_cell.items()
            if key[0] in (residual.label, residual.type_name)
        }
        if not known:
            raise UserError(
                f"{self.where}: no learning rate for {residual.label}; run the suite "
                f"learning_rate with it"
            )
        best = min(
            known,
            key=lambda key: (
                key[0] != residual.label,
                abs(math.log(key[1] / num_layers)),
                key[2] != name,
                key[2],
            ),
        )
        return known[best]


def best_rates(runs: Sequence[Run], where: str) -> Rates:
    """Of every method, depth and corpus the rate of lowest mean loss over seeds.

    Only rates that have all the seeds of the cell count; a rate whose run diverged has none.

    Raises:
        UserError: No finished run, a cell with one rate alone, or runs of one that differ in more
            than rate and seed.
    """
    cells: dict[tuple[str, int, str], dict[float, dict[int, float]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    types: dict[str, str] = {}
    firsts: dict[tuple[str, int, str], Run] = {}
    for run in runs:
        loss = run.summary["validation_loss"]
        rate = run.config.get("learning_rate")
        if loss is None or not isinstance(rate, float):
            continue
        key = (run.label, run.num_layers, str(run.summary["corpus"]))
        first = firsts.setdefault(key, run)
        check_rate_alone(first, run)
        cells[key][rate][run.seed] = loss
        types[run.label] = run.method
    if not cells:
        raise UserError(f"{where}: no finished run with a loss; run the suite learning_rate first")
    found: dict[tuple[str, int, str], float] = {}
    ends: list[str] = []
    for key, by_rate in cells.items():
        seeds = {seed for losses in by_rate.values() for seed in losses}
        means = {
            rate: sum(losses.values()) / len(seeds)
            for rate, losses in by_rate.items()
            if set(losses) == seeds
        }
        if len(means) < 2:
            raise UserError(
                f"{where}: {key[0]} at {key[1]} layers on {key[2]} has one learning rate alone; "
                "run the suite learning_rate over several"
            )
        found[key] = min(means, key=lambda rate: (means[rate], rate))
        if found[key] in (min(by_rate), max(by_rate)):
            ends.append(f"{key[0]} at {key[1]} layers ({found[key]:g})")
    # so that variants of a method find it by its type, whose plain form has the shortest label
    for key in sorted(found, key=lambda key: (len(key[0]), key)):
        found.setdefault((types[key[0]], *key[1:]), found[key])
    return Rates(by_cell=found, where=where, told=_told(cells, list(firsts.values()), ends))


def read_rates(folder: Path) -> Rates:
    """The best rates of a sweep's folder, or of a folder of its results.

    Raises:
        UserError: No folder, no finished runs in it, or one learning rate alone.

    Warns:
        UserWarning: Some cells of its plan are not finished: the choice is among the others.
    """
    if not folder.exists():
        raise UserError(
            f"--rates {folder}: no such folder; `resroute sweep learning_rate` trains one"
        )
    runs, plan = runs_of(folder), read_plan(folder)
    finished = {run.name for run in runs}
    left = [name for name in plan.runs if name not in finished] if plan else []
    if left and runs:
        warnings.warn(
            f"{folder}: {len(left)} of {len(plan.runs if plan else ())} cells are not finished "
            f"({left[0]}{', ..' if len(left) > 1 else ''}): learning rates are chosen among the "
            "others",
            stacklevel=2,
        )
    return best_rates(runs, str(folder))


def _told(
    cells: Mapping[tuple[str, int, str], Mapping[float, Mapping[int, float]]],
    runs: Sequence[Run],
    ends: Sequence[str],
) -> str:
    rates = sorted({rate for by_rate in cells.values() for rate in by_rate})
    seeds = {seed for by_rate in cells.values() for losses in by_rate.values() for seed in losses}
    steps = sorted({int(run.summary["steps"]) for run in runs})
    corpora = sorted({corpus for _, _, corpus in cells})
    edge = f" At an end of these did best: {', '.join(ends)}." if ends else ""
    return (
        f"Learning rates were chosen among {', '.join(f'{rate:g}' for rate in rates)} by runs of "
        f"{' or '.join(map(str, steps))} steps on {' and '.join(corpora)}, {len(seeds)} "
        f"seed{'s' if len(seeds) > 1 else ''} each.{edge}"
    )
