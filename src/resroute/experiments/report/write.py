"""The report: everything that a set of finished runs says, as a page, text, tables and figures."""

from collections.abc import Sequence
from pathlib import Path

from resroute.analysis import Run
from resroute.analysis.figures import depth_image
from resroute.analysis.runs import run_labels
from resroute.config import UserError
from resroute.experiments.compare import compare
from resroute.experiments.plan import Plan
from resroute.experiments.report import text as words
from resroute.experiments.report import views
from resroute.experiments.report.data import Links
from resroute.experiments.report.figures import chart_image, differences_image
from resroute.experiments.report.health import findings_table, health_summary, shared_findings
from resroute.experiments.report.page import Report, chart_heading, render_page, setup_line
from resroute.experiments.report.tables import (
    differences_table,
    equal_compute_table,
    pivots,
    runs_table,
)
from resroute.experiments.results import condensed, write_results
from resroute.experiments.statistics import summarise
from resroute.experiments.study import Group, Setting, Study
from resroute.files import write_bytes

# of one figure as a file; the page's script shows all of them
_MOST_MAPS = 24
_NAMES = (*views.CHARTS, "differences", "depth_weights")


def write_report(
    runs: Sequence[Run],
    out: Path,
    *,
    title: str,
    plan: Plan | None = None,
    unfinished: Sequence[str] = (),
) -> list[Path]:
    """Make a report of finished runs and save it; see `make_report` and `save_report`."""
    report = make_report(runs, title=title, plan=plan, unfinished=unfinished)
    return save_report(report, runs, out, plan)


def make_report(
    runs: Sequence[Run], *, title: str, plan: Plan | None = None, unfinished: Sequence[str] = ()
) -> Report:
    """What a report shows, as values.

    Runs that cannot be averaged or compared are each shown by themselves, with the reason, unless
    a plan says that they belong together.

    Args:
        runs: Finished runs, at least one; `runs_of` reads those of a folder.
        title: The page's heading.
        plan: What the runs were made for: the baseline and the primary contrast.
        unfinished: Names of runs to list as not finished.

    Raises:
        UserError: No finished run, runs of a plan that cannot be averaged or compared, scipy or
            statsmodels missing.
    """
    if not runs:
        hint = f"not finished: {', '.join(unfinished)}" if unfinished else "no run at all"
        raise UserError(f"no finished run to report ({hint}); finish one first")
    # what a results folder keeps, so that it gives this report again
    kept = condensed(runs)
    primary = plan.primary if plan else None
    try:
        study = compare(
            kept,
            baseline=plan.baseline if plan else None,
            primary=primary,
            primary_seeds=max(plan.primary_seeds, default=None) if plan else None,
        )
    except UserError as error:
        if plan is not None:
            raise
        study = _apart(kept, str(error))
    has_seeds = any(one.loss.n > 1 for one in study.differences)
    ordered = [run for group in study.groups for run in group.runs]
    rest = [run for run in kept if all(run is not other for other in ordered)]
    charts = [*views.trends(study), views.curves(study), views.gap(study)]
    return Report(
        title=title,
        runs=(*ordered, *rest),
        study=study,
        primary=primary,
        plan=plan,
        unfinished=tuple(unfinished),
        charts=tuple(chart for chart in charts if chart is not None),
        # those of one seed are told by the table already
        differences=tuple(views.differences(study)) if has_seeds else (),
        maps=tuple(views.maps(study)),
    )


def save_report(
    report: Report, runs: Sequence[Run], out: Path, plan: Plan | None = None
) -> list[Path]:
    """Write a report and, beside it, its runs as a results folder.

    `report.html` is one page that needs nothing but itself: its script draws the figures, and
    without it they stand there as they are in the files. `report.md` and `table.tex` have the
    tables, `figures/` every figure as PNG and SVG; see `write_results` for the rest. The same runs
    give the same bytes, from their folders or from a results folder. Each file replaces its former
    version in one step.

    Args:
        report: What to write.
        runs: The runs that it is about.
        out: The folder to write to, made if missing.
        plan: What the runs were made for, kept beside them.

    Returns:
        The files written, the page first.

    Raises:
        UserError: Two runs of one name, a folder of another plan, matplotlib missing, or `out` not
            writable.
    """
    figures = _figures(report)
    try:
        (out / "figures").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{out}: cannot be made ({error.strerror}); choose another folder"
        ) from None
    drawings = {Path(name).stem: data for name, data in figures.items() if name.endswith(".svg")}
    results = write_results(runs, out, plan)
    files = {
        "report.html": _encoded(render_page(report, drawings, Links(out=out))),
        "report.md": _encoded(render_text(report)),
        "table.tex": _encoded(words.latex_pivots(pivots(report.study))),
        **figures,
    }
    for name, data in files.items():
        write_bytes(out / name, data)
    for name in (f"figures/{stem}.{kind}" for stem in _NAMES for kind in ("png", "svg")):
        if name not in files:
            # of a former report
            (out / name).unlink(missing_ok=True)
    return [*(out / name for name in files), *results]


def render_text(report: Report) -> str:
    """The report as Markdown: what was found, the tables, and links to the figures."""
    study = report.study
    lines = [f"# {words.markdown(report.title)}", words.markdown(setup_line(report.runs))]
    if report.findings:
        declared, *found = map(words.markdown, report.findings)
        lines += ["## Primary contrast", declared, "\n".join(f"- {line}" for line in found)]
    lines += ["## Comparison", *map(words.markdown_pivot, pivots(study))]
    lines += map(words.markdown, report.notes)
    lines += _health(report.runs)
    for chart in report.charts:
        heading = chart_heading(chart)
        lines += [f"## {heading}", f"![{heading}](figures/{chart.name}.png)"]
    if report.differences:
        lines += ["## Paired differences", words.DIFFERENCES, words.EXPLORATORY]
        lines += ["![Paired differences](figures/differences.png)"]
        lines += [words.markdown_table(differences_table(study))]
    if study.equal_compute:
        lines += ["## Equal training time", words.EQUAL_TIME]
        lines += [words.markdown_table(equal_compute_table(study))]
    if report.maps:
        lines += ["## Depth weights", words.MAPS, "![Depth weights](figures/depth_weights.png)"]
    lines += [
        "## All runs",
        words.markdown_table(runs_table(report.runs, has_best=not report.has_groups)),
    ]
    return "\n\n".join(lines) + "\n"


def _health(runs: Sequence[Run]) -> list[str]:
    """What health checks found, in Markdown; empty where none was made."""
    summary = health_summary(runs)
    if not summary:
        return []
    lines = ["## Health", words.markdown(f"{words.HEALTH}: {summary}.")]
    if shared := shared_findings(runs):
        told = (f"- **{words.markdown(one.check)}** {words.markdown(one.advice)}" for one in shared)
        lines += ["\n".join(told), words.markdown_table(findings_table(shared, runs))]
    return lines


def _figures(report: Report) -> dict[str, bytes]:
    """Figures by the names of their files."""
    files = {}
    for kind in ("png", "svg"):
        for chart in report.charts:
            files[f"figures/{chart.name}.{kind}"] = chart_image(chart, kind)
        if report.differences:
            files[f"figures/differences.{kind}"] = differences_image(report.differences, kind)
        maps = [one for _, found in report.maps for one in found][-_MOST_MAPS:]
        if maps:
            titled = [(one.title, one.weights) for one in maps]
            files[f"figures/depth_weights.{kind}"] = depth_image(titled, kind)
    return dict(sorted(files.items()))


def _apart(runs: Sequence[Run], reason: str) -> Study:
    """Runs that cannot be averaged or compared, each a group of its own."""
    groups = []
    for run, label in zip(runs, run_labels(list(runs)), strict=True):
        loss = views.final_loss(run)
        if loss is None:
            continue
        model = run.config.get("model")
        context = model.get("context") if isinstance(model, dict) else None
        rate = run.config.get("learning_rate")
        groups.append(
            Group(
                series=f"{label}, seed {run.seed}",
                method=run.method,
                setting=Setting(
                    corpus=run.summary["corpus"],
                    num_layers=run.num_layers,
                    width=run.width or 0,
                    context=context if isinstance(context, int) else 0,
                    tokens=run.summary["tokens"],
                ),
                learning_rate=float(rate) if isinstance(rate, float | int) else 0.0,
                runs=(run,),
                loss=summarise([loss]),
                parameters=run.summary["parameters"],
                tokens_per_second=run.summary["tokens_per_second"],
            )
        )
    note = f"Runs stand by themselves, without means and differences: {' '.join(reason.split())}."
    return Study(
        groups=tuple(groups), best=tuple(groups), differences=(), gaps=(), equal_compute=(),
        notes=(note,),
    )  # fmt: skip


def _encoded(text: str) -> bytes:
    # a title from a command line may hold what UTF-8 cannot
    return text.encode("utf-8", errors="replace")
