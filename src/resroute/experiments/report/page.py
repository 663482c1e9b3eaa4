"""The report's page: one HTML file that needs nothing but itself."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from resroute.analysis import Run
from resroute.analysis.runs import run_titles
from resroute.analysis.table import captions
from resroute.experiments.page.html import document, figure, paragraph, section
from resroute.experiments.plan import Plan
from resroute.experiments.report import text as words
from resroute.experiments.report.data import Links, script_data
from resroute.experiments.report.health import (
    findings_table,
    health_lines,
    health_summary,
    shared_findings,
)
from resroute.experiments.report.html import html_table
from resroute.experiments.report.tables import (
    differences_table,
    equal_compute_table,
    groups_table,
    runs_table,
)
from resroute.experiments.report.views import Chart, Map, Row
from resroute.experiments.spreadsheet import flat
from resroute.experiments.study import Contrast, Study

_SAMPLE_LIMIT = 4000
_MOST_SAMPLES = 24
# of runs that are not finished
_MOST_NAMED = 12


@dataclass(frozen=True, kw_only=True)
class Report:
    """What the page, its figures and its tables are made of."""

    title: str
    runs: tuple[Run, ...]
    """Those of a group stand together."""
    study: Study
    primary: Contrast | None
    plan: Plan | None
    unfinished: tuple[str, ...]
    charts: tuple[Chart, ...]
    differences: tuple[tuple[str, list[Row]], ...]
    maps: tuple[tuple[str, list[Map]], ...]

    @property
    def has_groups(self) -> bool:
        """Whether there is anything to say of groups that is not said of their runs."""
        return any(group.loss.n > 1 for group in self.study.groups)

    @property
    def findings(self) -> list[str]:
        """The primary contrast in words, what was declared first; empty without one."""
        if self.primary is None:
            return []
        found = words.primary_lines(self.study)
        planned = self.plan.primary_seeds if self.plan else ()
        declared = words.declared_text(self.primary, planned, len(found))
        return [declared, *(found or ["No pair of runs yet."])]

    @property
    def notes(self) -> list[str]:
        """Sentences that a reader must know."""
        names = ", ".join(self.unfinished[:_MOST_NAMED])
        more = len(self.unfinished) - _MOST_NAMED
        if more > 0:
            names += f" and {more} more"
        rates = self.plan.rates if self.plan else None
        left = f"Not finished: {names}." if names else None
        return [*self.study.notes, *(note for note in (rates, left) if note)]

    @property
    def health(self) -> list[str]:
        """What health checks found, a line a run; see `health_lines`."""
        return health_lines(self.runs)


def render_page(report: Report, figures: Mapping[str, bytes], links: Links) -> str:
    """The page's HTML.

    Args:
        report: What to show.
        figures: SVG files by the name of their figure, shown where no script runs.
        links: Where the runs' configurations are.
    """
    return document(
        report.title,
        setup_line(report.runs),
        list(_sections(report, figures, links)),
        script_data(report.runs, report.charts, report.differences, report.maps, links),
        "resroute.experiments.report",
        ("figures.js", "charts.js"),
    )


def setup_line(runs: Sequence[Run]) -> str:
    """What the runs have in common and in what they differ, such as `storyworld; 24 layers; ..`."""
    models = [run.config.get("model") for run in runs]
    fields = [model if isinstance(model, dict) else {} for model in models]
    precision = [f"{run.summary['precision']} on {run.summary['device']}" for run in runs]
    parts = [
        _listed([run.summary["corpus"] for run in runs]),
        f"{_listed([run.num_layers for run in runs])} layers",
        *(
            f"{word} {_listed([model[field] for model in fields])}"
            for word, field in (("width", "dim"), ("context", "context"))
            if all(isinstance(model.get(field), int) for model in fields)
        ),
        f"{_listed([run.summary['steps'] for run in runs])} steps",
        f"{_listed([run.summary['tokens'] for run in runs])} tokens",
        _listed(precision),
    ]
    return " \N{MIDDLE DOT} ".join(parts)


def chart_heading(chart: Chart) -> str:
    """What a chart's section is called."""
    if chart.style == "trend":
        return "Loss over depth" if chart.name == "trend" else f"Loss over {chart.x_label}"
    return {"curves": "Learning curves", "gap": "Gap over training"}[chart.style]


def _sections(report: Report, figures: Mapping[str, bytes], links: Links) -> Iterator[str]:
    study = report.study
    places = {run.name: place for place, run in enumerate(report.runs)}
    yield _primary(report)
    yield _comparison(report, links)
    yield _health(report, links)
    texts = {"trend": words.trend_text, "curves": words.curves_text, "gap": words.gap_text}
    for chart in report.charts:
        heading = chart_heading(chart)
        drawing = figure(chart.name, heading, figures[chart.name])
        yield section(chart.name, heading, paragraph(texts[chart.style](study)), drawing)
    if report.differences:
        yield section(
            "differences",
            "Paired differences",
            *map(paragraph, (words.DIFFERENCES, words.EXPLORATORY)),
            figure("differences", "Paired differences", figures["differences"]),
            html_table(
                differences_table(study),
                links,
                marked=[d.is_primary for d in study.differences],
                anchors=[places[d.treatment.runs[0].name] for d in study.differences],
            ),
        )
    if study.equal_compute:
        anchors = [places[e.group.runs[0].name] for e in study.equal_compute]
        table = html_table(equal_compute_table(study), links, anchors=anchors)
        yield section("time", "Equal training time", paragraph(words.EQUAL_TIME), table)
    if report.maps:
        drawing = figure("depth_weights", "Depth weights", figures["depth_weights"])
        yield section("maps", "Depth weights", paragraph(words.MAPS), drawing)
    yield _samples(report)
    if report.has_groups:
        yield section("runs", "All runs", *_runs(report, links))
    yield _configuration(report.runs)


def _primary(report: Report) -> str:
    if not report.findings:
        return ""
    declared, *lines = report.findings
    found = []
    for line in lines:
        verdict, sign, rest = escape(line).partition("; ")
        found.append(f"<li><strong>{verdict}</strong>{sign}{rest}</li>")
    body = "\n".join(["<ul>", *found, "</ul>"])
    return section("primary", "Primary contrast", paragraph(declared), body)


def _comparison(report: Report, links: Links) -> str:
    groups = report.study.groups
    if report.has_groups:
        places = {run.name: place for place, run in enumerate(report.runs)}
        anchors = [places[group.runs[0].name] for group in groups]
        shown = [
            html_table(groups_table(report.study), links, anchors=anchors),
            paragraph("Bold: lowest mean of a setting. Means and n link to their runs."),
        ]
    else:
        shown = _runs(report, links)
    notes = map(paragraph, report.notes)
    return section("comparison", "Comparison", *shown, *notes)


def _health(report: Report, links: Links) -> str:
    summary = health_summary(report.runs)
    if not summary:
        return ""
    parts = [paragraph(f"{words.HEALTH}: {summary}.")]
    if shared := shared_findings(report.runs):
        told = [
            f"<li><strong>{escape(one.check)}</strong> {escape(one.advice)}</li>" for one in shared
        ]
        places = {run.name: place for place, run in enumerate(report.runs)}
        anchors = [places[place.runs[0].name] for one in shared for place in one.places]
        table = html_table(findings_table(shared, report.runs), links, anchors=anchors)
        parts += ["\n".join(["<ul>", *told, "</ul>"]), table]
    return section("health", "Health", *parts)


def _runs(report: Report, links: Links) -> list[str]:
    has_best = not report.has_groups
    line = "; ".join(captions(list(report.runs), bold=has_best))
    table = html_table(runs_table(report.runs, has_best=has_best), links, has_ids=True)
    return [table, *([paragraph(f"{line[0].upper()}{line[1:]}.")] if line else [])]


def _samples(report: Report) -> str:
    articles: list[str] = []
    titles = run_titles(report.runs)
    for run in report.runs:
        if run.sample is None or len(articles) == _MOST_SAMPLES:
            continue
        text = run.sample.strip()
        cut = text if len(text) <= _SAMPLE_LIMIT else text[:_SAMPLE_LIMIT] + " ..."
        head = escape(titles[run.name])
        articles.append(f"<article><h3>{head}</h3><pre>{escape(cut)}</pre></article>")
    if not articles:
        return ""
    body = "\n".join(articles)
    return section("samples", "Samples", f'<div class="cards">\n{body}\n</div>')


def _configuration(runs: Sequence[Run]) -> str:
    """Fields of the configuration in which no two runs differ."""
    found = [flat(run.config, "") for run in runs]
    shared = {
        key: value
        for key, value in found[0].items()
        if key != "out" and all(key in other and other[key] == value for other in found)
    }
    if not shared:
        return ""
    rows = "\n".join(
        f"<dt>{escape(key)}</dt><dd>{escape(_shown(value))}</dd>" for key, value in shared.items()
    )
    summary = "<summary>What all runs share</summary>"
    return section(
        "configuration", "Configuration", f"<details>{summary}\n<dl>\n{rows}\n</dl></details>"
    )


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else repr(value)


def _listed(values: list[Any]) -> str:
    texts = [f"{v:,}" if isinstance(v, int) else str(v) for v in sorted(set(values))]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"
