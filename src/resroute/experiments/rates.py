"""The learning rate of each method and depth, as a sweep over rates has found it."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from resroute.analysis import Run
from resroute.config import UserError
from resroute.experiments.results import runs_of
from resroute.residual import ResidualConfig


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Best rates by method, depth and corpus; see `best_rates`."""

    by_cell: dict[tuple[str, int, str], float]
    where: str

    def rate(self, residual: ResidualConfig, num_layers: int, corpus: str) -> float:
        """The best rate of a method: on its corpus, else another; at its depth, else the nearest.

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
        UserError: No finished run, or a cell with one rate alone.
    """
    cells: dict[tuple[str, int, str], dict[float, list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )
    types = {}
    for run in runs:
        loss = run.summary["validation_loss"]
        rate = run.config.get("learning_rate")
        if loss is None or not isinstance(rate, float):
            continue
        key = (run.label, run.num_layers, str(run.summary["corpus"]))
        cells[key][rate].append(loss)
        types[run.label] = run.method
    if not cells:
        raise UserError(f"{where}: no finished run with a loss; run the suite learning_rate first")
    found: dict[tuple[str, int, str], float] = {}
    for key, by_rate in cells.items():
        most = max(map(len, by_rate.values()))
        means = {rate: sum(v) / most for rate, v in by_rate.items() if len(v) == most}
        if len(means) < 2:
            raise UserError(
                f"{where}: {key[0]} at {key[1]} layers on {key[2]} has one learning rate alone; "
                "run the suite learning_rate over several"
            )
        found[key] = min(means, key=lambda rate: (means[rate], rate))
    # so that variants of a method find it by its type, whose plain form has the shortest label
    for key in sorted(found, key=lambda key: (len(key[0]), key)):
        found.setdefault((types[key[0]], *key[1:]), found[key])
    return Rates(by_cell=found, where=where)


def read_rates(folder: Path) -> Rates:
    """The best rates of a sweep's folder, or of a folder of its results."""
    return best_rates(runs_of(folder), str(folder))
