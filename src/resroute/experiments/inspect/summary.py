"""An inspection for a terminal: a few tables and lines."""

import math
import statistics
from collections.abc import Iterator
from typing import TYPE_CHECKING

from resroute.experiments.importance import Ablation
from resroute.experiments.inspect.inspection import Inspection
from resroute.experiments.inspect.views import bases_of, by_site_kind, weight_cell

if TYPE_CHECKING:
    from rich.table import Table

_PARTS = 6
_FEW = 3


def summary(inspection: Inspection) -> Iterator["str | Table"]:
    """What to print, in order: health, what is read, depth in a few parts, needs, bases."""
    yield from _health(inspection)
    if inspection.tables:
        yield _kinds(inspection)
    yield _depth(inspection)
    yield from _needs(inspection)
    yield from _bases(inspection)


def _health(inspection: Inspection) -> Iterator[str]:
    if not inspection.findings:
        yield "Health: no findings"
    for found in inspection.findings:
        yield f"{found.severity}: {found.check}, {found.where}: {found.saw}"
        yield f"  {found.why}; {found.remedy}"


def _kinds(inspection: Inspection) -> "Table":
    groups = by_site_kind(inspection)
    is_gated = any(site["gate"] is not None for site in inspection.seen["sites"])
    table = _table("mean weight, behind the gates, on" if is_gated else "mean weight on", *groups)
    for kind in groups["all"]:
        table.add_row(kind, *(weight_cell(group[kind]) for group in groups.values()))
    return table


def _depth(inspection: Inspection) -> "Table":
    """Means over parts of the depth."""
    sites = inspection.seen["sites"][:-1]
    layers = inspection.num_layers
    size = math.ceil(layers / min(_PARTS, layers))
    routes = bool(inspection.tables)
    # behind closed gates, and small coefficients, the rest says little
    scales = [key for key in ("gate", "coefficient") if any(s[key] is not None for s in sites)]
    heads = [*(["effective sources"] if routes else []), *scales]
    table = _table("layers", *heads, "update RMS", "read RMS", "update gradient (L2)")
    for first in range(0, layers, size):
        last = min(first + size, layers) - 1
        part = [site for site in sites if first <= site["layer"] <= last]
        keys = [*(["effective_sources"] if routes else []), *scales, "update_rms", "read_rms"]
        cells = [_mean([site[key] for site in part]) for key in (*keys, "update_gradient")]
        name = str(first) if first == last else f"{first} to {last}"
        table.add_row(name, *cells)
    return table


def _needs(inspection: Inspection) -> Iterator[str]:
    for found in inspection.importance:
        ordered = sorted(found.items, key=lambda item: -item.change)
        shown = [_change(item) for item in ordered]
        if len(shown) > 2 * _FEW + 2:
            shown = [*shown[:_FEW], "..", *shown[-_FEW:]]
        yield f"Growth of the loss without each {found.by}: {', '.join(shown)}"


def _change(item: Ablation) -> str:
    error = "" if item.error is None else f" \N{PLUS-MINUS SIGN} {item.error:.4f}"
    return f"{item.name} {item.change:+.4f}{error}"


def _bases(inspection: Inspection) -> Iterator[str]:
    blocks = bases_of(inspection)
    if not blocks:
        return
    block = blocks[0]
    held = ", ".join(
        f"{one.name} {100 * one.share:.1f} % "
        f"(the best {one.count} of {block.size}: {100 * block.pca[one.count - 1]:.1f} %)"
        for one in block.sets
        if one.count <= block.size
    )
    yield f"Share of the energy of updates ({block.name}) that lies in {held}"
    thirds = [found["third"]["best"] for found in inspection.bases["blocks"]]
    added = [best["share"] for best in thirds if best is not None]
    if added:
        yield f"One more vector than in use would add at most {100 * statistics.fmean(added):.1f} %"


def _mean(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.fmean(known):.3g}" if known else "-"


def _table(first: str, *others: str) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right")
    return table
