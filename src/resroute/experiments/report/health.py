"""What health checks found in a report's runs, equal findings of several runs put together."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from resroute.analysis import Run
from resroute.analysis.runs import run_labels, run_titles
from resroute.experiments.report.tables import Cell, Heading, Table

# longer texts are none of ours
_MOST_CHARACTERS = 400
# runs that a terminal names, and a cell of the table
_MOST_RUNS = 12


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where something was found and what was seen, word for word the same in all of its runs."""

    where: str
    saw: str
    runs: tuple[Run, ...]


@dataclass(frozen=True, kw_only=True)
class Shared:
    """A finding with what is said of it once, and all places where it was made."""

    check: str
    severity: str
    why: str
    remedy: str
    places: tuple[Place, ...]

    @property
    def advice(self) -> str:
        """What is said once, to stand behind the name of the check."""
        names = {run.name for place in self.places for run in place.runs}
        return f"({self.severity}, {_runs(len(names))}): {self.why}. To try: {self.remedy}."


def shared_findings(runs: Iterable[Run]) -> list[Shared]:
    """Findings by check, severity, reason and remedy: warnings first, else in the order of runs."""
    found: dict[tuple[str, ...], dict[tuple[str, ...], dict[str, Run]]] = {}
    for run in runs:
        for one in run.findings or ():
            said = tuple(map(_cut, (one.check, one.severity, one.why, one.remedy)))
            places = found.setdefault(said, {})
            places.setdefault((_cut(one.where), _cut(one.saw)), {})[run.name] = run
    return [
        Shared(
            check=check,
            severity=severity,
            why=why,
            remedy=remedy,
            places=tuple(
                Place(where=where, saw=saw, runs=tuple(of_place.values()))
                for (where, saw), of_place in places.items()
            ),
        )
        for (check, severity, why, remedy), places in sorted(
            found.items(), key=lambda item: item[0][1] != "warning"
        )
    ]


def health_summary(runs: Sequence[Run]) -> str:
    """How many runs were checked, and how many have findings; empty where none was checked."""
    checked = [run for run in runs if run.findings is not None]
    if not checked:
        return ""
    found = sum(bool(run.findings) for run in checked)
    of_all = f"findings in {found} of {_runs(len(checked))}"
    rest = len(runs) - len(checked)
    return (of_all if found else f"no findings in {_runs(len(checked))}") + (
        f"; {_runs(rest)} not checked" if rest else ""
    )


def health_lines(runs: Sequence[Run]) -> list[str]:
    """For a terminal: a line a run with findings; one line where all that were checked have none.

    Empty where none was checked.
    """
    titles = run_titles(runs)
    lines = [
        f"Health: {titles[run.name]}: "
        + ", ".join(dict.fromkeys(f"{_cut(f.check)} ({f.severity})" for f in run.findings))
        for run in runs
        if run.findings
    ]
    if len(lines) > _MOST_RUNS:
        more = len(lines) - _MOST_RUNS
        lines[_MOST_RUNS:] = [f"Health: findings in {_runs(more)} more"]
    summary = health_summary(runs)
    return lines or ([f"Health: {summary}"] if summary else [])


def findings_table(shared: Sequence[Shared], runs: Sequence[Run]) -> Table:
    """A row a place.

    Args:
        shared: Findings of some of the runs.
        runs: All runs of the report, which tell them apart.
    """
    names = [run.name for run in runs]
    labels = dict(zip(names, run_labels(list(runs)), strict=True))
    rows = []
    for one in shared:
        for place in one.places:
            named = _named(place.runs, labels)
            rows.append(
                (
                    Cell(text=one.check, below=one.severity, value=one.check),
                    Cell(text=named, value=named, runs=place.runs),
                    Cell(text=place.where, value=place.where),
                    Cell(text=place.saw, value=place.saw),
                )
            )
    headings = ("finding", "runs", "where", "what was seen")
    return Table(
        name="Health",
        headings=tuple(Heading(text=text, is_number=False) for text in headings),
        rows=tuple(rows),
    )


def _named(runs: Sequence[Run], labels: dict[str, str]) -> str:
    """Runs with the seeds of those that are alike: `WAV, 48 layers, seeds 0, 1`."""
    seeds: dict[str, list[int]] = {}
    for run in runs:
        seeds.setdefault(f"{labels[run.name]}, {run.num_layers} layers", []).append(run.seed)
    told = [
        f"{alike}, seed{'s' if len(own) > 1 else ''} {', '.join(map(str, own))}"
        for alike, own in seeds.items()
    ]
    if len(told) > _MOST_RUNS:
        told[_MOST_RUNS:] = [f"{len(told) - _MOST_RUNS} more"]
    return "; ".join(told)


def _runs(count: int) -> str:
    return "1 run" if count == 1 else f"{count:,} runs"


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]} .."
