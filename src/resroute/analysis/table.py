"""The comparison table: one row per run, the same cells on a terminal and on a page."""

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from resroute.analysis.runs import Run, nats_of, run_labels

if TYPE_CHECKING:
    from rich.table import Table

LOSS_UNIT = "nats/char"
# of losses as they are printed
_DIGITS = 4


@dataclass(frozen=True, kw_only=True)
class ComparisonRow:
    """What one run is compared by.

    Losses and the gap are in nats per character; `gap` is the validation loss minus the corpus's
    entropy floor, None where there is no floor. `is_best` marks the lowest finite loss among
    several runs of equal corpus, depth, width and tokens; runs that print the same loss share it.
    """

    label: str
    num_layers: int
    seed: int
    validation_loss: float | None
    gap: float | None
    parameters: int
    tokens_per_second: float | None
    peak_memory_bytes: float | None
    memory_kind: str | None
    is_best: bool


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column as text: a heading, its unit ("" for none), a cell per row."""

    heading: str
    unit: str
    cells: list[str]
    is_number: bool = True
    is_loss: bool = False


def comparison_rows(runs: list[Run]) -> list[ComparisonRow]:
    """One row per run, in the order given."""
    sizes = Counter(run.setting for run in runs)
    best: dict[tuple[Any, ...], float] = {}
    for run in runs:
        printed = _printed(_loss(run))
        if sizes[run.setting] > 1 and math.isfinite(printed):
            best[run.setting] = min(printed, best.get(run.setting, math.inf))
    rows = []
    for run, label in zip(runs, run_labels(runs), strict=True):
        loss, floor = _loss(run), run.floor
        rows.append(
            ComparisonRow(
                label=label,
                num_layers=run.num_layers,
                seed=run.seed,
                validation_loss=loss,
                gap=None if loss is None or floor is None else loss - floor,
                parameters=run.summary["parameters"],
                tokens_per_second=run.summary["tokens_per_second"],
                peak_memory_bytes=run.summary["peak_memory_bytes"],
                memory_kind=run.summary["memory_kind"],
                is_best=_printed(loss) == best.get(run.setting, math.nan),
            )
        )
    return rows


def columns(rows: list[ComparisonRow]) -> list[Column]:
    """The table's columns as text; a gap column only where a floor is known."""
    sizes = [row.peak_memory_bytes for row in rows if row.peak_memory_bytes is not None]
    # one unit for the whole column, so that its numbers can be compared by eye
    scale, memory_unit, digits = (1e6, "MB", 0) if max(sizes, default=0) < 1e10 else (1e9, "GB", 1)

    def numbers(heading: str, unit: str, values: list[float | None], digits: int) -> Column:
        cells = ["-" if v is None else f"{v:,.{digits}f}" for v in values]
        return Column(heading=heading, unit=unit, cells=cells, is_loss=heading == "loss")

    labels = [row.label for row in rows]
    gaps = [row.gap for row in rows]
    memory = [
        None if row.peak_memory_bytes is None else row.peak_memory_bytes / scale for row in rows
    ]
    return [
        Column(heading="method", unit="", cells=labels, is_number=False),
        numbers("layers", "", [row.num_layers for row in rows], 0),
        Column(heading="seed", unit="", cells=[str(row.seed) for row in rows]),
        numbers("loss", LOSS_UNIT, [row.validation_loss for row in rows], _DIGITS),
        *(
            [numbers("gap to floor", LOSS_UNIT, gaps, 4)]
            if any(g is not None for g in gaps)
            else []
        ),
        numbers("params", "millions", [row.parameters / 1e6 for row in rows], 3),
        numbers("speed", "tokens/s", [row.tokens_per_second for row in rows], 0),
        numbers("memory", memory_unit, memory, digits),
    ]


def floor_text(run: Run) -> str:
    """`entropy floor 0.213 nats/char, exact`, or an empty string where no floor is known."""
    if run.floor is None:
        return ""
    kind = "exact" if run.summary["floor_exact"] else "lower bound"
    return f"entropy floor {run.floor:.3f} {LOSS_UNIT}, {kind}"


def captions(runs: list[Run], *, bold: bool = True) -> list[str]:
    """Lines under the table: what bold says, each corpus's entropy floor, what memory is.

    Args:
        runs: The table's.
        bold: Whether the table can show bold; it is explained only where something is bold.
    """
    has_best = bold and any(row.is_best for row in comparison_rows(runs))
    best = ["bold: lowest loss among runs of equal corpus, depth, width and tokens"]
    several = len({run.summary["corpus"] for run in runs}) > 1
    floors = [
        floor_text(run) + (f" ({run.summary['corpus']})" if several else "")
        for run in runs
        if run.floor is not None
    ]
    names = {"resident": "resident size of the process", "cuda": "allocation on the GPU"}
    kinds = sorted({run.summary["memory_kind"] for run in runs} - {None})
    memory = " or ".join(names.get(kind, kind) for kind in kinds)
    below = [*dict.fromkeys(floors), *([f"memory: peak {memory}"] if memory else [])]
    return [*(best if has_best else []), *below]


def comparison_table(runs: list[Run], *, bold: bool = True) -> "Table":
    """The table for a terminal of 80 columns or more.

    The lowest loss among runs of one setting is bold; floors stand in the caption.

    Args:
        runs: Finished runs, a row each.
        bold: Whether the reader can see bold, which the caption then explains.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    rows = comparison_rows(runs)
    shown = columns(rows)
    lines = captions(runs, bold=bold)
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
        header_style="",
        caption=Text("\n".join(lines), style="not italic dim") if lines else None,
        caption_justify="left",
    )
    for column in shown:
        heading = Text(column.heading, style="bold")
        heading.append(f"\n{column.unit}", style="not bold dim")
        justify: Literal["left", "right"] = "right" if column.is_number else "left"
        table.add_column(heading, justify=justify, no_wrap=column.is_number, overflow="fold")
    for index, row in enumerate(rows):
        table.add_row(
            *(
                Text(column.cells[index], style="bold" if column.is_loss and row.is_best else "")
                for column in shown
            )
        )
    return table


def _printed(loss: float | None) -> float:
    """A loss as far as the table shows it."""
    return math.nan if loss is None else round(loss, _DIGITS)


def _loss(run: Run) -> float | None:
    return nats_of(run.summary, "validation_loss")
