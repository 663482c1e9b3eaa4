"""The table of a case's comparisons, for a terminal or as plain lines of 80 columns."""

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from resroute.bench import mixer
from resroute.bench.settings import Settings, blocks_made
from resroute.bench.timing import LEAST_PAIRS, Comparison
from resroute.bench.workload import BATCH

if TYPE_CHECKING:
    from rich.table import Table

HEADINGS = ("what", "measured", "backend", "against", "ratio", "95 % interval", "median")
_NUMBERS = ("ratio", "95 % interval", "median")


def cells(rows: Sequence[Comparison]) -> list[tuple[str, ...]]:
    """A tuple of texts a comparison, as `HEADINGS` has them."""
    return [
        (
            row.name,
            row.group,
            row.backend,
            row.against,
            f"{row.ratio:.3f}",
            "" if row.interval is None else f"{row.interval[0]:.3f}-{row.interval[1]:.3f}",
            amount(row.measured, row.unit),
        )
        for row in rows
    ]


def amount(value: float, unit: str) -> str:
    """A measurement with its unit, at most nine characters long."""
    if unit == "s":
        return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"
    if unit == "bytes":
        return f"{value / 1e6:,.0f} MB" if value >= 1e7 else f"{value / 1e3:,.0f} kB"
    return f"{value:,.0f} tok/s"


def footer(case: str, settings: Settings, rows: Sequence[Comparison]) -> list[str]:
    """Lines of at most 80 characters below the table: what its ratio is, and the setting."""
    if not rows:
        return [_setting(case, settings, rows)]
    units = list(dict.fromkeys(row.unit for row in rows))
    # memory is counted once, and is the same each time
    counts = sorted({len(row.pairs) for row in rows if row.unit != "bytes"})
    pairs = f" (median of {counts[-1]} pairs)" if counts else ""
    better = "more" if units == ["tokens/s"] else "less"
    names = " or ".join({"s": "time"}.get(unit, unit) for unit in units)
    those = "that" if names == "time" else "those"
    below = [f"ratio: {names} over {those} of `against`{pairs}; {better} is better"]
    if counts and counts[0] < LEAST_PAIRS:
        below.append(f"fewer than {LEAST_PAIRS} pairs: no interval")
    below.append(_setting(case, settings, rows))
    return [line for text in below for line in textwrap.wrap(text, 80)]


def _setting(case: str, settings: Settings, rows: Sequence[Comparison]) -> str:
    """Such as `48 layers, width 256, 4 blocks, 8 x 256 tokens, float32, compiled, 2 threads`."""
    device = settings.torch_device
    parts = [_counted(settings.layers, "layer"), f"width {settings.dim}"]
    if case == "mixer" or any(row.details.get("num_blocks") for row in rows):
        parts.append(_counted(blocks_made(settings.layers, settings.num_blocks), "block"))
    if case == "decode":
        parts.append(f"context {settings.context}")
        is_half, is_compiled = settings.precision == "bfloat16", False
    else:
        batch = settings.batch or (mixer.BATCH if case == "mixer" else BATCH)
        parts.append(f"{batch} x {settings.context} tokens")
        is_half = case != "mixer" and settings.torch_precision == torch.bfloat16
        is_compiled = case != "mixer" and settings.compiles
    parts.append("bfloat16" if is_half else "float32")
    parts.append("compiled" if is_compiled else "not compiled")
    threads = settings.threads or torch.get_num_threads()
    parts.append(_counted(threads, "thread") if device.type == "cpu" else str(device))
    start = "where a row says nothing else: " if case == "scaling" else ""
    return start + ", ".join(parts)


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def lines(rows: Sequence[Comparison]) -> list[str]:
    """The table as plain text; columns that say nothing are left out."""
    shown = _columns(rows)
    widths = [max(len(text) for text in column) for column in shown]
    headings = [column[0] for column in shown]
    return [
        "  ".join(
            text.rjust(width) if heading in _NUMBERS else text.ljust(width)
            for text, width, heading in zip(line, widths, headings, strict=True)
        ).rstrip()
        for line in zip(*shown, strict=True)
    ]


def table(rows: Sequence[Comparison]) -> "Table":
    """The table for rich."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    made = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    shown = _columns(rows)
    for heading, *_ in shown:
        is_number = heading in _NUMBERS
        made.add_column(
            heading, justify="right" if is_number else "left", no_wrap=is_number, overflow="fold"
        )
    for line in zip(*(column[1:] for column in shown), strict=True):
        made.add_row(*(Text(text) for text in line))
    return made


def _columns(rows: Sequence[Comparison]) -> list[list[str]]:
    columns = [list(column) for column in zip(HEADINGS, *cells(rows), strict=True)]
    return [column for column in columns if any(column[1:])]
