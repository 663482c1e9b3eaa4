"""The report in words: what its sections say, and its tables as Markdown and LaTeX."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from resroute.analysis.table import LOSS_UNIT
from resroute.experiments.compare import verdict_text
from resroute.experiments.report.tables import DIGITS, MISSING, Pivot, Table, signed
from resroute.experiments.report.views import MOST_BANDS, setting_text
from resroute.experiments.study import Contrast, Difference, Group, Study, Summary

if TYPE_CHECKING:
    from rich.table import Table as RichTable

_FEW = f" where there are at most {MOST_BANDS} lines"
DIFFERENCES = (
    "Final validation loss, the first minus the second, paired by seed, with 95 % intervals: below "
    "zero the first is better. Filled marks are finds; hollow ones are not, which is no proof that "
    "nothing is there. Small dots are seeds."
)
EXPLORATORY = (
    "What was not declared beforehand is exploratory: there a find has an interval that excludes "
    "zero and a p-value below 0.05 after Holm's correction over all exploratory rows. The "
    "intervals themselves are not corrected."
)
EQUAL_TIME = (
    "Losses at the training time of the fastest method of each setting, read off the learning "
    "curves. A slower method is read before its learning rate has decayed, which overstates the "
    "loss that it would reach in that time by itself."
)
HEALTH = "Checked after the last step"
MAPS = (
    "Each row is a site (one sublayer, first at the top, the readout last) and shows how its read "
    "is shared out over the sources in the columns, averaged over tokens and seeds: the brighter, "
    "the more weight, and grey where the site has no such source. Columns with orange names are "
    "detail sources: what a plain block sum leaves out, such as phase (attention minus MLP) and "
    "split (first half minus second half of a block)."
)


def trend_text(study: Study) -> str:
    """What a chart of final losses shows."""
    bars = "bars are 95 % t intervals of the mean over seeds, dots single runs"
    return f"Final validation loss; {bars}." if _has_seeds(study) else "Final validation loss."


def curves_text(study: Study) -> str:
    """What the learning curves show."""
    parts = ["Validation loss"]
    if _has_seeds(study):
        parts.append(f"the mean over seeds with its 95 % t interval at each evaluation{_FEW}")
    if has_rates(study):
        parts.append("each method at its best learning rate")
    return f"{', '.join(parts)}. The first steps are cut off at the top."


def gap_text(study: Study) -> str:
    """What the gaps show."""
    if not _has_seeds(study):
        return (
            "Differences of validation losses, the first minus the second: below zero the first "
            "is better."
        )
    return (
        "Paired differences of validation losses, the first minus the second, with the 95 % "
        f"interval of each evaluation by itself{_FEW}. A circle marks the evaluation from which "
        "the interval stays clear of zero to the end. Below zero the first is better."
    )


def has_rates(study: Study) -> bool:
    """Whether a method has several learning rates in a setting."""
    return len(study.groups) > len(study.best)


def declared_text(contrast: Contrast, planned: Sequence[int], corpora: int) -> str:
    """What was declared beforehand.

    Args:
        contrast: The primary one.
        planned: Its seeds, first as planned, then as raised.
        corpora: On which it is tested.
    """
    seeds = f", with {planned[0]} seeds" if planned else ""
    raised = f" (raised to {planned[-1]} when results were known)" if len(planned) > 1 else ""
    several = (
        f" It is tested on {corpora} corpora: p is also given after Holm's correction over these."
        if corpora > 1
        else ""
    )
    return (
        f"{contrast.treatment} minus {contrast.baseline} at {contrast.num_layers} layers was "
        f"declared as the one primary contrast before the runs were made{seeds}{raised}.{several}"
    )


def primary_lines(study: Study) -> list[str]:
    """What the primary contrast has found, a line a corpus."""
    found = []
    for one in study.differences:
        if one.is_primary:
            where = setting_text(one.treatment.setting, study, without=["num_layers"])
            found.append(f"{where}: {_primary(one)}" if where else _primary(one))
    return found


def terminal_table(table: Table, *, bold: bool = True) -> "RichTable":
    """A table for a terminal of 80 columns or more.

    Args:
        table: What to show; small print is left out.
        bold: Whether the reader can see bold, which marks best cells.
    """
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    shown = RichTable(
        box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, header_style=""
    )
    for heading in table.headings:
        text = Text(heading.text, style="bold")
        text.append(f"\n{heading.unit}", style="not bold dim")
        justify: Literal["left", "right"] = "right" if heading.is_number else "left"
        shown.add_column(text, justify=justify, no_wrap=heading.is_number, overflow="fold")
    for row in table.rows:
        shown.add_row(*(Text(c.text, style="bold" if bold and c.is_best else "") for c in row))
    return shown


def markdown_table(table: Table) -> str:
    """A table of Markdown; a best cell is bold."""
    heads = [f"{h.text}, {h.unit}" if h.unit else h.text for h in table.headings]
    lines = [heads, ["---:" if h.is_number else "---" for h in table.headings]]
    for row in table.rows:
        texts = (f"{c.text} ({c.below})" if c.below else c.text for c in row)
        cells = list(map(markdown, texts))
        lines.append(
            [f"**{text}**" if cell.is_best else text for text, cell in zip(cells, row, strict=True)]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def markdown_pivot(pivot: Pivot) -> str:
    """Series down and depths across, `mean +- deviation`, in Markdown."""
    heads = ["method", *(f"{depth} layers" for depth in pivot.depths)]
    lines = [heads, ["---", *("---:" for _ in pivot.depths)]]
    for series, groups in pivot.rows:
        cells = [_mean(group, pivot, "\N{PLUS-MINUS SIGN}") for group in groups]
        cells = [
            f"**{text}**" if id(group) in pivot.best else text
            for text, group in zip(cells, groups, strict=True)
        ]
        lines.append([markdown(series), *cells])
    body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{body}\n\n{markdown(pivot_caption(pivot))}"


def latex_pivots(pivots: Sequence[Pivot]) -> str:
    """Tables for `booktabs`, one for each of the pivots."""
    head = "% made by `resroute report`; needs \\usepackage{booktabs}\n"
    return head + "\n".join(_latex_pivot(pivot, i) for i, pivot in enumerate(pivots))


def pivot_caption(pivot: Pivot) -> str:
    """What a table of means says, with its corpus and its seeds."""
    seeds = f"{pivot.seeds} seeds" if pivot.seeds > 1 else "one seed"
    is_uneven = any(
        group is not None and group.loss.n != pivot.seeds for _, row in pivot.rows for group in row
    )
    spread = "mean and standard deviation over" if _has_spread(pivot) else "of"
    return (
        f"Validation loss in {LOSS_UNIT} on {pivot.title}, {spread} n = {seeds}"
        f"{' unless another n stands beside it' if is_uneven else ''}"
        f"{'; each method at its best learning rate' if pivot.has_rates else ''}. "
        "Bold: lowest at its depth."
    )


def markdown(text: str) -> str:
    """Text as Markdown shows it, on one line."""
    escaped = re.sub(r"([\\`*_\[\]|#~])", r"\\\1", " ".join(text.split()))
    return escaped.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def latex(text: str) -> str:
    """Text as LaTeX prints it."""
    signs = {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
        "\N{MINUS SIGN}": "$-$",
        **{sign: f"\\{sign}" for sign in "{}$&#_%"},
    }
    return "".join(signs.get(sign, sign) for sign in " ".join(text.split()))


def _has_seeds(study: Study) -> bool:
    return any(group.loss.n > 1 for group in study.groups)


def _primary(one: Difference) -> str:
    parts = [verdict_text(one)]
    if one.verdict in ("better", "worse"):
        parts[0] += f" ({LOSS_UNIT})"
    else:
        parts.append(f"difference {_with_interval(one.loss)} {LOSS_UNIT}")
    parts += [
        f"perplexity {_with_interval(one.perplexity)}",
        f"bits per character {_with_interval(one.bits)}",
    ]
    if one.p_value is not None:
        told = "p < 0.001" if one.p_value < 0.001 else f"p = {one.p_value:.3f}"
        corrected = "" if one.p_holm is None else f" ({one.p_holm:.3f} corrected)"
        parts.append(told + corrected)
    return "; ".join(parts)


def _with_interval(summary: Summary) -> str:
    if summary.low is None or summary.high is None:
        return signed(summary.mean)
    return f"{signed(summary.mean)} ({signed(summary.low)} .. {signed(summary.high)})"


def _has_spread(pivot: Pivot) -> bool:
    return any(g is not None and g.loss.sd is not None for _, row in pivot.rows for g in row)


def _mean(group: Group | None, pivot: Pivot, sign: str) -> str:
    if group is None:
        return MISSING
    loss = group.loss
    text = f"{loss.mean:.{DIGITS}f}"
    if loss.sd is not None:
        text += f" {sign} {loss.sd:.{DIGITS}f}"
    return text if loss.n == pivot.seeds else f"{text} (n={loss.n})"


def _latex_pivot(pivot: Pivot, place: int) -> str:
    heads = " & ".join(["Method", *(f"{depth} layers" for depth in pivot.depths)])
    lines = []
    for series, groups in pivot.rows:
        cells = [_latex_cell(group, pivot) for group in groups]
        lines.append(f"{' & '.join([latex(series), *cells])} \\\\")
    body = "\n".join(lines)
    return (
        "\\begin{table}\n\\centering\n"
        f"\\caption{{{latex(pivot_caption(pivot))}}}\n\\label{{tab:loss-{place + 1}}}\n"
        f"\\begin{{tabular}}{{l{'r' * len(pivot.depths)}}}\n\\toprule\n{heads} \\\\\n\\midrule\n"
        f"{body}\n\\bottomrule\n\\end{{tabular}}\n\\end{{table}}\n"
    )


def _latex_cell(group: Group | None, pivot: Pivot) -> str:
    if group is None:
        return "--"
    # bold reaches text alone, not mathematics
    text = _mean(group, pivot, r"{\mdseries$\pm$}")
    return f"\\textbf{{{text}}}" if id(group) in pivot.best else text
