"""What readers call the methods of a study: a label, with the options that tell it from others."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from resroute.analysis import METHODS, Run
from resroute.config import UserError, from_defaults, from_dict
from resroute.residual import ResidualConfig

_BLOCKS = ("num_blocks", "block_layers")


@dataclass(frozen=True)
class _Options:
    """Options of one run's method that are not at their default, and where the run belongs."""

    method: str
    label: str
    setting: tuple[Any, ...]
    values: dict[str, Any]

    def value(self, name: str) -> str:
        """An option as text, empty where it is at its default."""
        return repr(self.values[name]) if name in self.values else ""


def series_names(runs: Sequence[Run]) -> list[str]:
    """The series of each run, such as `WAV` and `WAV (detail_bias=0.0)`.

    Shown are options that are not at their default and in which runs of one label differ. Of block
    counts, which each study chooses, the one that most runs have counts as the default; a count
    that only follows the depth is not shown.
    """
    return [_text(label, shown) for _, label, shown in _identified(runs)]


def series_order(runs: Sequence[Run]) -> list[str]:
    """The study's series: by method as in tables, label, and the values of options."""
    found = {_text(label, shown): (m, label, shown) for m, label, shown in _identified(runs)}

    def key(series: str) -> tuple[Any, ...]:
        method, label, shown = found[series]
        rank = METHODS.index(method) if method in METHODS else len(METHODS)
        return rank, label, [(name, *_sortable(value)) for name, value in shown.items()]

    return sorted(found, key=key)


def block_notes(runs: Sequence[Run]) -> list[str]:
    """Sentences about block counts that differ between depths and are not shown in names."""
    notes = []
    read = [_options(run) for run in runs]
    for label in dict.fromkeys(options.label for options in read):
        for name in _BLOCKS:
            own = [(o, run) for o, run in zip(read, runs, strict=True) if o.label == label]
            found = {(run.num_layers, o.value(name)) for o, run in own}
            if len({value for _, value in found}) > 1 and not _varies([o for o, _ in own], name):
                told = ", ".join(
                    f"{value or 'the default'} at {layers} layers"
                    for layers, value in sorted(found)
                )
                notes.append(f"{label}: {name} is {told}.")
    return notes


def _identified(runs: Sequence[Run]) -> list[tuple[str, str, dict[str, Any]]]:
    """Method, label and shown options of each run."""
    read = [_options(run) for run in runs]
    by_label: dict[str, list[_Options]] = {}
    for options in read:
        by_label.setdefault(options.label, []).append(options)
    hidden = {label: _hidden(own, read) for label, own in by_label.items()}
    return [
        (
            options.method,
            options.label,
            {
                name: value
                for name, value in options.values.items()
                if (name, repr(value)) not in hidden[options.label]
            },
        )
        for options in read
    ]


def _hidden(own: list[_Options], everyone: list[_Options]) -> set[tuple[str, str]]:
    """Options, by name and value, that names of one label leave out."""
    found: set[tuple[str, str]] = set()
    for name in {name for options in own for name in options.values}:
        values = {options.value(name) for options in own}
        if len(values) < 2 or (name in _BLOCKS and not _varies(own, name)):
            found |= {(name, value) for value in values}
        elif name in _BLOCKS and "" not in values:
            counts = Counter(options.value(name) for options in own)
            # one of each within a label, as in a series over blocks: what the study has elsewhere
            study = Counter(options.value(name) for options in everyone)
            found.add((name, max(sorted(values), key=lambda v: (counts[v], study[v]))))
    return found


def _varies(own: list[_Options], name: str) -> bool:
    """Whether runs of one label and setting differ in an option."""
    values: dict[tuple[Any, ...], set[str]] = {}
    for options in own:
        values.setdefault(options.setting, set()).add(options.value(name))
    return any(len(found) > 1 for found in values.values())


def _options(run: Run) -> _Options:
    model = run.config.get("model")
    residual = model.get("residual") if isinstance(model, dict) else None
    values = residual if isinstance(residual, dict) else {}
    try:
        config: ResidualConfig = from_dict(ResidualConfig, values)  # type: ignore[type-abstract]
        values = from_defaults(config)
    except UserError:
        # of another version of resroute: all that is written there counts
        values = dict(values)
    values.pop("type", None)
    return _Options(run.method, run.label, run.setting, values)


def _text(label: str, shown: dict[str, Any]) -> str:
    options = ", ".join(f"{name}={_shown(value)}" for name, value in shown.items())
    return f"{label} ({options})" if options else label


def _shown(value: Any) -> str:
    is_plain = isinstance(value, str) and value.isprintable()
    return str(value) if is_plain else repr(value)


def _sortable(value: Any) -> tuple[int, float, str]:
    is_number = isinstance(value, int | float)
    return (0, float(value), "") if is_number else (1, 0.0, repr(value))
