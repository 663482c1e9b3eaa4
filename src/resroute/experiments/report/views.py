"""What the figures of a report show, as values: the files and the page's script draw the same."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from resroute.analysis import DepthWeights, Run
from resroute.analysis.figures import DASHES
from resroute.analysis.runs import nats_of
from resroute.analysis.table import LOSS_UNIT, floor_text
from resroute.experiments.report.looks import Look, looks
from resroute.experiments.statistics import summarise
from resroute.experiments.study import Difference, Group, Setting, Study

MINUS = "\N{MINUS SIGN}"
_AXES = {
    "num_layers": ("trend", "layers"),
    "width": ("trend_width", "width"),
    "context": ("trend_context", "context"),
    "tokens": ("trend_tokens", "training tokens"),
    "learning_rate": ("trend_learning_rate", "peak learning rate"),
}
CHARTS = (*(name for name, _ in _AXES.values()), "curves", "gap")
"""Names of all charts that a report can have."""
MOST_BANDS = 6
"""Lines whose intervals can be told from each other."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One run's part of a line."""

    run: Run
    x: tuple[float, ...]
    y: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Line:
    """A mean over runs with its interval, and those runs; all of one length but the traces."""

    name: str
    look: Look
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float | None, ...]
    high: tuple[float | None, ...]
    runs: tuple[tuple[Run, ...], ...]
    """Of each point."""
    traces: tuple[Trace, ...] = ()
    training: tuple[Trace, ...] = ()
    open_from: float | None = None
    """From here on the interval stays clear of zero."""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Lines that share axes."""

    title: str
    lines: tuple[Line, ...]
    floor: float | None = None
    floor_text: str = ""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One figure: panels of one kind."""

    name: str
    x_label: str
    y_label: str
    panels: tuple[Panel, ...]
    style: Literal["curves", "trend", "gap"]
    is_log: bool = False
    """Whether the x axis starts out logarithmic."""
    first: int = 0
    """The panel that the page starts with."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the figure of differences."""

    name: str
    setting: str
    look: Look
    difference: Difference


@dataclass(frozen=True, kw_only=True)
class Map:
    """Depth weights of a group, the mean over its runs where they have the same sources."""

    title: str
    name: str
    """The title without the setting."""
    group: Group
    weights: DepthWeights
    runs: tuple[Run, ...]


def final_loss(run: Run) -> float | None:
    """Validation loss at the end in nats per character, None where it is not a finite number."""
    loss = nats_of(run.summary, "validation_loss")
    return loss if loss is not None and math.isfinite(loss) else None


def setting_text(setting: Setting, study: Study, *, without: Iterable[str] = ()) -> str:
    """What tells a setting from the study's others, such as `storyworld, 48 layers`."""
    settings = {group.setting for group in study.groups}
    words: dict[str, Callable[[Any], str]] = {
        "corpus": str,
        "num_layers": lambda v: f"{v:,} layers",
        "width": lambda v: f"width {v:,}",
        "context": lambda v: f"context {v:,}",
        "tokens": lambda v: f"{v:,} tokens",
    }
    hidden = set(without)
    parts = [
        word(getattr(setting, field))
        for field, word in words.items()
        if field not in hidden and len({getattr(s, field) for s in settings}) > 1
    ]
    if parts or "num_layers" in hidden:
        return ", ".join(parts)
    return words["num_layers"](setting.num_layers)


def difference_name(treatment: Group, baseline: Group) -> str:
    """`WAV - Block AttnRes` with a real minus sign."""
    return f"{treatment.series} {MINUS} {baseline.series}"


def curves(study: Study) -> Chart | None:
    """Validation loss over training tokens: a panel a setting, a line a series."""
    look = looks(study)
    panels, settings = [], []
    for setting, groups in _by(study.best, lambda g: g.setting):
        lines = [line for g in groups if (line := _curve(g, look[g.series])) is not None]
        run = groups[0].runs[0]
        if lines:
            settings.append(setting)
            panels.append(
                Panel(
                    title=setting_text(setting, study),
                    lines=tuple(lines),
                    floor=run.floor,
                    floor_text=floor_text(run),
                )
            )
    if not panels:
        return None
    return Chart(
        name="curves",
        style="curves",
        first=_first(settings, study),
        x_label="training tokens",
        y_label=f"loss, {LOSS_UNIT}",
        panels=tuple(panels),
    )


def trends(study: Study) -> list[Chart]:
    """Final loss over depth, width, context, tokens and learning rate, where a study has several.

    Over all but the learning rate each method has its best rate.
    """
    charts = []
    for axis, (name, label) in _AXES.items():
        panels = _trend_panels(study, axis)
        if panels:
            charts.append(
                Chart(
                    name=name,
                    style="trend",
                    x_label=label,
                    y_label=f"loss, {LOSS_UNIT}",
                    panels=tuple(panels),
                    is_log=axis in ("tokens", "learning_rate"),
                )
            )
    return charts


def gap(study: Study) -> Chart | None:
    """Differences over the course of training: a panel a setting, a line a comparison."""
    look = looks(study)
    names = {difference_name(g.treatment, g.baseline): g.treatment.series for g in study.gaps}
    same = {name: [n for n, s in names.items() if s == series] for name, series in names.items()}
    order = {group.setting: place for place, group in enumerate(study.best)}
    panels, settings = [], []
    for setting, gaps in sorted(
        _by(study.gaps, lambda g: g.treatment.setting), key=lambda found: order[found[0]]
    ):
        lines = []
        for one in gaps:
            name, own = difference_name(one.treatment, one.baseline), look[one.treatment.series]
            # the same treatment against another baseline has another dash
            dash = (own.dash + same[name].index(name)) % len(DASHES)
            runs = (*one.treatment.runs, *one.baseline.runs)
            lines.append(
                Line(
                    name=name,
                    look=Look(colour=own.colour, dash=dash, marker=own.marker),
                    x=tuple(map(float, one.tokens)),
                    y=one.mean,
                    low=one.low,
                    high=one.high,
                    runs=(runs,) * len(one.tokens),
                    open_from=one.open_from,
                )
            )
        settings.append(setting)
        panels.append(Panel(title=setting_text(setting, study), lines=tuple(lines)))
    if not panels:
        return None
    return Chart(
        name="gap",
        style="gap",
        first=_first(settings, study),
        x_label="training tokens",
        y_label=f"difference, {LOSS_UNIT}",
        panels=tuple(panels),
    )


def differences(study: Study) -> list[tuple[str, list[Row]]]:
    """Final differences by corpus: a title and rows, primary ones first."""
    look = looks(study)
    several = len({group.setting.corpus for group in study.groups}) > 1
    return [
        (
            corpus if several else "",
            [
                Row(
                    name=difference_name(one.treatment, one.baseline),
                    setting=setting_text(one.treatment.setting, study, without=["corpus"]),
                    look=look[one.treatment.series],
                    difference=one,
                )
                for one in found
            ],
        )
        for corpus, found in _by(study.differences, lambda d: d.treatment.setting.corpus)
    ]


def maps(study: Study) -> list[tuple[str, list[Map]]]:
    """Depth weights of every routed group that is best of its rates, by setting."""
    found = []
    for setting, groups in _by(study.best, lambda g: g.setting):
        text = setting_text(setting, study)
        here = [one for group in groups if (one := _map(group, text)) is not None]
        if here:
            found.append((text, here))
    return found


def _by(items: Sequence[Any], key: Callable[[Any], Any]) -> list[tuple[Any, list[Any]]]:
    """Items of one key together, in the order in which keys appear."""
    found: dict[Any, list[Any]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return list(found.items())


def _first(settings: list[Setting], study: Study) -> int:
    """Where readers look first: the primary contrast's setting, or the deepest models."""
    primary = [one.treatment.setting for one in study.differences if one.is_primary]
    if primary and primary[0] in settings:
        return settings.index(primary[0])
    return max(range(len(settings)), key=lambda i: (settings[i].num_layers, -i))


def _curve(group: Group, look: Look) -> Line | None:
    traces = [_trace(run, "validation") for run in group.runs]
    by_run = [dict(zip(trace.x, trace.y, strict=True)) for trace in traces]
    shared = sorted(set.intersection(*(set(values) for values in by_run)))
    training = [trace for run in group.runs if (trace := _trace(run, "train")).x]
    if not shared and not training:
        return None
    means = [summarise([values[at] for values in by_run]) for at in shared]
    return Line(
        name=group.series,
        look=look,
        x=tuple(shared),
        y=tuple(mean.mean for mean in means),
        low=tuple(mean.low for mean in means),
        high=tuple(mean.high for mean in means),
        runs=(group.runs,) * len(shared),
        traces=tuple(traces),
        training=tuple(training),
    )


def _trace(run: Run, kind: Literal["train", "validation"]) -> Trace:
    tokens, losses = run.losses(kind)
    return Trace(run=run, x=tuple(map(float, tokens)), y=tuple(losses))


def _trend_panels(study: Study, axis: str) -> list[Panel]:
    look = looks(study)
    fields = ("corpus", "num_layers", "width", "context", "tokens")

    def at(group: Group) -> float:
        return float(getattr(group if axis == "learning_rate" else group.setting, axis))

    def others(group: Group) -> tuple[Any, ...]:
        return tuple(getattr(group.setting, field) for field in fields if field != axis)

    groups = study.groups if axis == "learning_rate" else study.best
    panels = []
    for _, family in _by(groups, others):
        lines = [
            _trend(series, sorted(own, key=at), at, look[series])
            for series, own in _by(family, lambda g: g.series)
        ]
        if max(len(line.x) for line in lines) > 1:
            title = setting_text(family[0].setting, study, without=[axis])
            panels.append(Panel(title=title, lines=tuple(lines)))
    return panels


def _trend(series: str, groups: list[Group], at: Callable[[Group], float], look: Look) -> Line:
    return Line(
        name=series,
        look=look,
        x=tuple(at(group) for group in groups),
        y=tuple(group.loss.mean for group in groups),
        low=tuple(group.loss.low for group in groups),
        high=tuple(group.loss.high for group in groups),
        runs=tuple(group.runs for group in groups),
        traces=tuple(
            Trace(run=run, x=(at(group),), y=(loss,))
            for group in groups
            for run in group.runs
            if (loss := final_loss(run)) is not None
        ),
    )


def _map(group: Group, setting: str) -> Map | None:
    routed = [(run, run.depth_weights) for run in group.runs if run.depth_weights is not None]
    if not routed:
        return None
    first = routed[0][1]
    same = [(run, w) for run, w in routed if (w.sites, w.sources) == (first.sites, first.sources)]
    weights = DepthWeights(
        sites=first.sites,
        sources=first.sources,
        weights=tuple(
            tuple(map(_mean, zip(*rows, strict=True)))
            for rows in zip(*(w.weights for _, w in same), strict=True)
        ),
    )
    seeds = [str(run.seed) for run, _ in same]
    whose = f"seed {seeds[0]}" if len(seeds) == 1 else f"mean of {len(seeds)} seeds"
    return Map(
        title=f"{group.series}, {setting}, {whose}",
        name=f"{group.series}, {whose}",
        group=group,
        weights=weights,
        runs=tuple(run for run, _ in same),
    )


def _mean(weights: Sequence[float | None]) -> float | None:
    found = [weight for weight in weights if weight is not None]
    return sum(found) / len(found) if found else None
