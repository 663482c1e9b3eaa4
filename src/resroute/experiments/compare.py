"""Runs become a study: groups over seeds, the differences that were asked for, and verdicts."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from resroute.analysis import Run
from resroute.analysis.runs import nats_of
from resroute.config import suggestion
from resroute.experiments.conditions import check_comparable, check_seed_alone, environment
from resroute.experiments.curves import equal_compute, gap, median_speed, speed_spread
from resroute.experiments.series import block_notes, series_names, series_order
from resroute.experiments.statistics import holm, paired, summarise
from resroute.experiments.study import (
    Contrast,
    Difference,
    Group,
    Setting,
    Study,
    Summary,
    Verdict,
)

ALPHA = 0.05
_BASELINE = "PreNorm"
# of equal runs, fastest to slowest: beyond it a speed says more of the machine than of a method
_MOST_SPREAD = 1.25
# e to this is far above any vocabulary, and its square is still a number
_LARGEST_LOSS = 300.0


def compare(
    runs: Sequence[Run],
    *,
    baseline: str | None = None,
    primary: Contrast | None = None,
    primary_seeds: int | None = None,
) -> Study:
    """Average runs over seeds, and compare series in each setting.

    Every series is compared with the baseline, each at the best of its learning rates. The primary
    contrast comes first, once a corpus, with its own p-value; its two series are compared at all
    other depths too. All but the primary contrast is exploratory and Holm-corrected together.

    Args:
        runs: Finished runs.
        baseline: A series; None takes PreNorm, or without it the first series.
        primary: The contrast that was declared before the runs were made.
        primary_seeds: Seeds planned for it: with fewer there is no verdict yet.

    Raises:
        UserError: Runs of one series, setting and learning rate that differ in more than the seed,
            or share it; runs of one setting that differ in more than method, learning rate and
            seed.
    """
    kept = [run for run in runs if _loss(run) is not None]
    groups = _groups(kept)
    for _, own in _by_setting(groups):
        for group in own[1:]:
            check_comparable(own[0].runs[0], group.runs[0])
    best = _best(groups)
    series = list(dict.fromkeys(group.series for group in groups))
    if baseline is None and series:
        baseline = _BASELINE if _BASELINE in series else series[0]
    pairs, notes = _pairs(best, baseline, primary)
    found = _corrected([_difference(*pair, planned=primary_seeds) for pair in pairs])
    gaps = (gap(difference) for difference in found)
    noisy = {
        setting: spread
        for setting, own in _by_setting(groups)
        if (spread := _widest_spread(own)) > _MOST_SPREAD
    }
    at_equal_time = [
        e for setting, own in _by_setting(best) if setting not in noisy for e in equal_compute(own)
    ]
    return Study(
        groups=tuple(groups),
        best=tuple(best),
        differences=tuple(found),
        gaps=tuple(g for g in gaps if g is not None),
        equal_compute=tuple(at_equal_time),
        notes=(
            *_notes_on_runs(runs, kept),
            *_notes_on_series(series, baseline),
            *notes,
            *_notes_on_rates(groups, best),
            *_notes_on_speeds(noisy, {group.setting for group in best}),
        ),
    )


def verdict_text(difference: Difference) -> str:
    """A difference in words, losses in nats per character.

    `WAV better by 0.021 (0.012 .. 0.030), n=5`, `no significant difference (n=3)`,
    `too few seeds (n=1)` or `an interim look at n=3 of 5, no verdict`.
    """
    loss = difference.loss
    if difference.verdict == "interim":
        return f"an interim look at n={loss.n} of {difference.planned}, no verdict"
    if difference.verdict not in ("better", "worse") or loss.low is None or loss.high is None:
        return f"{difference.verdict} (n={loss.n})"
    ends = sorted((abs(loss.low), abs(loss.high)))
    # three digits after the point, or as many as it takes to show two of the number
    digits = max(3, 1 - math.floor(math.log10(abs(loss.mean))))
    by, low, high = (f"{value:.{digits}f}" for value in (abs(loss.mean), *ends))
    return (
        f"{difference.treatment.series} {difference.verdict} by {by} ({low} .. {high}), n={loss.n}"
    )


def _widest_spread(groups: Sequence[Group]) -> float:
    """Fastest to slowest of runs that do equal work; a learning rate makes none of it."""
    equal: dict[str, list[Run]] = {}
    for group in groups:
        equal.setdefault(group.series, []).extend(group.runs)
    return max(speed_spread(own) for own in equal.values())


def _groups(runs: Sequence[Run]) -> list[Group]:
    found: dict[tuple[str, Setting, float], list[Run]] = {}
    for run, series in zip(runs, series_names(runs), strict=True):
        found.setdefault((series, _setting(run), _rate(run)), []).append(run)
    groups = []
    for (series, setting, rate), own in found.items():
        own.sort(key=lambda run: (run.seed, run.name))
        check_seed_alone(own)
        groups.append(
            Group(
                series=series,
                method=own[0].method,
                setting=setting,
                learning_rate=rate,
                runs=tuple(own),
                loss=summarise([_nats(run) for run in own]),
                parameters=own[0].summary["parameters"],
                tokens_per_second=median_speed(own),
            )
        )
    order = {series: rank for rank, series in enumerate(series_order(runs))}
    return sorted(
        groups, key=lambda g: (*_setting_order(g.setting), order[g.series], g.learning_rate)
    )


def _best(groups: Sequence[Group]) -> list[Group]:
    """Of each series and setting the learning rate of lowest mean loss among most seeds.

    A rate at which a seed diverged, or that a pilot tried with one seed, has fewer.
    """
    cells: dict[tuple[str, Setting], list[Group]] = {}
    for group in groups:
        cells.setdefault((group.series, group.setting), []).append(group)
    return [
        min(own, key=lambda g: (-g.loss.n, g.loss.mean, g.learning_rate)) for own in cells.values()
    ]


def _pairs(
    best: Sequence[Group], baseline: str | None, primary: Contrast | None
) -> tuple[list[tuple[Group, Group, bool]], list[str]]:
    """Treatment, baseline, and whether it is primary, in the order of the study; and notes."""
    declared = _primary_settings(best, primary) if primary else []
    first: list[tuple[Group, Group, bool]] = []
    others: list[tuple[Group, Group, bool]] = []
    notes = []
    for setting, own in _by_setting(best):
        by_series = {group.series: group for group in own}
        asked = [(series, baseline) for series in by_series if baseline]
        if primary:
            asked.append((primary.treatment, primary.baseline))
        for treatment, against in dict.fromkeys(asked):
            a, b = by_series.get(treatment), by_series.get(against or "")
            if a is None or b is None or a is b:
                continue
            if not {run.seed for run in a.runs} & {run.seed for run in b.runs}:
                notes.append(f"{treatment} and {against} share no seed at {_told(setting)}.")
                continue
            is_primary = (
                primary is not None
                and (treatment, against) == (primary.treatment, primary.baseline)
                and setting in declared
            )
            (first if is_primary else others).append((a, b, is_primary))
    if primary and not first:
        notes.append(
            f"The primary contrast, {primary.treatment} minus {primary.baseline} at "
            f"{primary.num_layers} layers, has no finished pair of runs yet."
        )
    return [*first, *others], notes


def _primary_settings(best: Sequence[Group], primary: Contrast) -> list[Setting]:
    """The setting of each corpus that the contrast was declared for.

    One a corpus, since each further one would be another test: the largest in tokens and sizes.
    """
    both = {primary.treatment, primary.baseline}
    found: dict[str, Setting] = {}
    for setting, own in _by_setting(best):
        if setting.num_layers == primary.num_layers and both <= {group.series for group in own}:
            known = found.setdefault(setting.corpus, setting)
            found[setting.corpus] = max(known, setting, key=_size)
    return list(found.values())


def _difference(
    treatment: Group, baseline: Group, is_primary: bool, *, planned: int | None
) -> Difference:
    """Without corrected p-value and verdict, which take all differences."""

    def summary(value: Callable[[Run], float]) -> Summary:
        return paired(_by_seed(treatment, value), _by_seed(baseline, value))[0]

    ours, theirs = _by_seed(treatment, _nats), _by_seed(baseline, _nats)
    loss, p_value, interval = paired(ours, theirs)
    return Difference(
        treatment=treatment,
        baseline=baseline,
        is_primary=is_primary,
        loss=loss,
        perplexity=summary(
            lambda run: math.exp(min(run.summary["validation_loss"], _LARGEST_LOSS))
        ),
        bits=summary(lambda run: _nats(run) / math.log(2)),
        by_seed=tuple(
            (seed, ours[seed] - theirs[seed]) for seed in sorted(ours.keys() & theirs.keys())
        ),
        p_value=p_value,
        p_holm=None,
        interval=interval,
        verdict="too few seeds",
        planned=planned if is_primary else None,
    )


def _corrected(differences: list[Difference]) -> list[Difference]:
    """With p-values corrected over all exploratory differences, and verdicts."""
    corrected: dict[int, float] = {}
    for is_primary in (True, False):
        tested = {
            i: d.p_value
            for i, d in enumerate(differences)
            if d.p_value is not None and d.is_primary == is_primary
        }
        # a declared contrast on one corpus is one test
        if not is_primary or len(tested) > 1:
            corrected |= zip(tested, holm(list(tested.values())), strict=True)
    return [
        dataclasses.replace(d, p_holm=corrected.get(i), verdict=_verdict(d, corrected.get(i)))
        for i, d in enumerate(differences)
    ]


def _verdict(difference: Difference, p_holm: float | None) -> Verdict:
    low, high = difference.loss.low, difference.loss.high
    if low is None or high is None:
        return "too few seeds"
    if difference.planned is not None and difference.loss.n < difference.planned:
        # to look again and again until the interval excludes zero would find something too often
        return "interim"
    is_open = low > 0 or high < 0
    if not is_open or not (difference.is_primary or (p_holm is not None and p_holm < ALPHA)):
        return "no significant difference"
    return "better" if high < 0 else "worse"


def _notes_on_runs(runs: Sequence[Run], kept: Sequence[Run]) -> Iterator[str]:
    left_out = [run.name for run in runs if _loss(run) is None]
    if left_out:
        yield f"Left out, since they have no validation loss: {', '.join(left_out)}."
    # a run that went on after a stop names all that made it
    made_by = [environment(run)["commit"] for run in kept]
    commits = sorted({one for commit in made_by if commit for one in commit.split(", ")})
    if len(commits) > 1:
        yield f"The runs were made by several commits: {', '.join(commits)}."
    yield from block_notes(kept)


def _notes_on_series(series: Sequence[str], baseline: str | None) -> Iterator[str]:
    if baseline is not None and baseline not in series:
        yield (
            f"The baseline {baseline!r}{suggestion(baseline, series)} has no finished run, so "
            "nothing is compared with it."
        )


def _notes_on_rates(groups: Sequence[Group], best: Sequence[Group]) -> Iterator[str]:
    """Where a method may not have had the learning rate that suits it."""
    for chosen in best:
        rates = [
            group.learning_rate
            for group in groups
            if (group.series, group.setting) == (chosen.series, chosen.setting)
        ]
        ends = {min(rates): "lowest", max(rates): "highest"}
        if len(rates) > 1 and chosen.learning_rate in ends:
            yield (
                f"{chosen.series} at {_told(chosen.setting)} does best at the "
                f"{ends[chosen.learning_rate]} of its {len(rates)} learning rates, "
                f"{chosen.learning_rate:g}; a better one may lie beyond."
            )


def _notes_on_speeds(noisy: dict[Setting, float], known: set[Setting]) -> Iterator[str]:
    if noisy:
        yield (
            f"Losses at equal training time are left out at {_listed(noisy, known)}: speeds of "
            f"equal runs differ up to {max(noisy.values()):.1f} times, since the machine did other "
            "work. The command resroute bench step compares speeds."
        )


def _listed(settings: Iterable[Setting], known: set[Setting]) -> str:
    """Settings, those of one corpus together, with what else tells them from other known ones."""
    axes = [name for name in ("width", "tokens") if len({getattr(s, name) for s in known}) > 1]
    depths: dict[str, list[str]] = {}
    for setting in settings:
        more = "".join(f", {name} {getattr(setting, name):,}" for name in axes)
        depths.setdefault(setting.corpus, []).append(f"{setting.num_layers} layers{more}")
    return "; ".join(f"{_joined(own)} on {corpus}" for corpus, own in depths.items())


def _joined(depths: Sequence[str]) -> str:
    """`12, 24 layers`, or in full where more than the depth is told."""
    plain = [text.removesuffix(" layers") for text in depths]
    return f"{', '.join(plain)} layers" if all(map(str.isdigit, plain)) else " and ".join(depths)


def _by_setting(groups: Iterable[Group]) -> list[tuple[Setting, list[Group]]]:
    found: dict[Setting, list[Group]] = {}
    for group in groups:
        found.setdefault(group.setting, []).append(group)
    return list(found.items())


def _by_seed(group: Group, value: Callable[[Run], float]) -> dict[int, float]:
    return {run.seed: value(run) for run in group.runs}


def _setting(run: Run) -> Setting:
    model = run.config.get("model")
    context = model.get("context") if isinstance(model, dict) else None
    return Setting(
        corpus=run.summary["corpus"],
        num_layers=run.num_layers,
        width=run.width or 0,
        context=context if isinstance(context, int) else 0,
        tokens=run.summary["tokens"],
    )


def _size(setting: Setting) -> tuple[int, int, int]:
    return setting.tokens, setting.width, setting.context


def _setting_order(setting: Setting) -> tuple[str, int, int, int, int]:
    return setting.corpus, setting.width, setting.context, setting.tokens, setting.num_layers


def _told(setting: Setting) -> str:
    return f"{setting.num_layers} layers on {setting.corpus}"


def _rate(run: Run) -> float:
    rate = run.config.get("learning_rate")
    return float(rate) if isinstance(rate, int | float) else 0.0


def _loss(run: Run) -> float | None:
    """Nats per character of the finished run, where it has a loss."""
    return (
        None if run.summary["validation_loss"] is None else nats_of(run.summary, "validation_loss")
    )


def _nats(run: Run) -> float:
    loss = _loss(run)
    assert loss is not None, "runs without a loss are left out first"
    return loss
