"""What learning curves add to final losses: gaps over training, and losses at equal time."""

import statistics
from collections.abc import Sequence

from resroute.analysis import Run
from resroute.experiments.statistics import summarise, summarise_differences
from resroute.experiments.study import Difference, EqualCompute, Gap, Group


def gap(difference: Difference) -> Gap | None:
    """A difference at every evaluation that all of its runs have; None with fewer than two.

    Its band is pointwise: each evaluation has its own 95 % interval.
    """
    seeds = [seed for seed, _ in difference.by_seed]
    ours, theirs = (_curves(g, seeds) for g in (difference.treatment, difference.baseline))
    tokens = sorted(set.intersection(*(set(curve) for curve in (*ours, *theirs))))
    if len(tokens) < 2:
        return None
    points = [
        summarise_differences([a[at] - b[at] for a, b in zip(ours, theirs, strict=True)])[0]
        for at in tokens
    ]
    low, high = tuple(p.low for p in points), tuple(p.high for p in points)
    return Gap(
        treatment=difference.treatment,
        baseline=difference.baseline,
        tokens=tuple(tokens),
        mean=tuple(p.mean for p in points),
        low=low,
        high=high,
        open_from=_open_from(tokens, [_side(a, b) for a, b in zip(low, high, strict=True)]),
    )


def equal_compute(groups: Sequence[Group]) -> list[EqualCompute]:
    """Losses of a setting's groups at the training time of the fastest of them.

    A group's time is its tokens over its median speed. Losses between two evaluations are
    interpolated, linearly in tokens. Groups without a speed, or without an evaluation before that
    time, are left out; empty where fewer than two are left.
    """
    speeds = {i: g.tokens_per_second for i, g in enumerate(groups) if g.tokens_per_second}
    if len(speeds) < 2:
        return []
    seconds = min(groups[i].setting.tokens / speed for i, speed in speeds.items())
    found = []
    for i, speed in speeds.items():
        group = groups[i]
        tokens = min(seconds * speed, float(group.setting.tokens))
        losses = [_loss_at(run, tokens) for run in group.runs]
        kept = [loss for loss in losses if loss is not None]
        if len(kept) == len(group.runs):
            found.append(
                EqualCompute(group=group, seconds=seconds, tokens=tokens, loss=summarise(kept))
            )
    return found if len(found) > 1 else []


def speed_spread(runs: Sequence[Run]) -> float:
    """How many times as fast the fastest of equal runs is as the slowest."""
    known = [float(s) for run in runs if (s := run.summary["tokens_per_second"])]
    return max(known) / min(known) if known else 1.0


def median_speed(runs: Sequence[Run]) -> float | None:
    """Tokens a second in the middle of runs, None where no run tells."""
    found = [run.summary["tokens_per_second"] for run in runs]
    known = [float(speed) for speed in found if speed]
    return statistics.median(known) if known else None


def _curves(group: Group, seeds: Sequence[int]) -> list[dict[int, float]]:
    """Validation losses by training tokens, of each seed's run."""
    by_seed = {run.seed: run for run in group.runs}
    return [dict(zip(*by_seed[seed].losses("validation"), strict=True)) for seed in seeds]


def _side(low: float | None, high: float | None) -> int:
    """On which side of zero an interval lies, 0 where it holds zero or is not known."""
    if low is None or high is None:
        return 0
    return (low > 0) - (high < 0)


def _open_from(tokens: Sequence[int], sides: Sequence[int]) -> int | None:
    if not sides[-1]:
        return None
    first = len(sides) - 1
    while first and sides[first - 1] == sides[-1]:
        first -= 1
    return tokens[first]


def _loss_at(run: Run, tokens: float) -> float | None:
    """The validation loss after so many tokens, None where no evaluation lies before or after."""
    import numpy as np

    at, losses = run.losses("validation")
    if not at or not at[0] <= tokens <= at[-1]:
        return None
    return float(np.interp(tokens, at, losses))
