"""What the figures of an inspection show, as values: the files and the page's script alike."""

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from resroute.experiments.inspect.inspection import Inspection, Table
from resroute.residual.base import kind_of_source

SIZE = "RMS"
_LARGEST = 1e100


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One number a site, the readout last where it has one; None where it is not known."""

    name: str
    unit: str
    values: tuple[float | None, ...]


@dataclass(frozen=True, kw_only=True)
class Line:
    """Numbers over training steps."""

    name: str
    x: tuple[int, ...]
    y: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class History:
    """Lines of one kind over training."""

    name: str
    unit: str
    lines: tuple[Line, ...]


@dataclass(frozen=True, kw_only=True)
class Held:
    """The share of a block's updates that one set of vectors holds."""

    name: str
    count: int
    share: float


@dataclass(frozen=True, kw_only=True)
class BlockBases:
    """Of one block: what its bases hold, and the most that as many vectors can."""

    name: str
    size: int
    pca: tuple[float, ...]
    sets: tuple[Held, ...]


def by_kind(table: Table) -> dict[str, list[float | None]]:
    """Weight of each site on each kind of source, None where it has no source of the kind."""
    kinds = [kind_of_source(name) for name in table["sources"]]
    found: dict[str, list[float | None]] = {kind: [] for kind in dict.fromkeys(kinds)}
    for row in table["weights"]:
        for kind, values in found.items():
            pairs = zip(kinds, row, strict=True)
            present = [weight for k, weight in pairs if k == kind and weight is not None]
            values.append(sum(present) if present else None)
    return found


def by_site_kind(inspection: Inspection) -> dict[str, dict[str, float | None]]:
    """Mean weight on each kind of source, over all reads that mix and over each kind of site.

    Returns:
        By `all`, the kinds of sites, and `readout`, those that mix at all; then by kind of source.
        A source that a site does not have counts as zero; None where none of the sites has it, or
        no weight is known.
    """
    sites = [site for site in inspection.seen["sites"] if site["weights"]]
    groups = {"all": sites}
    for kind in inspection.seen["layer_kinds"]:
        groups.setdefault(kind, [site for site in sites if site["kind"] == kind])
    groups["readout"] = [site for site in sites if site["kind"] is None]
    every = list(dict.fromkeys(kind for site in sites for kind in site["kinds"]))
    # as in the map: of finished blocks, then of the running one
    every.sort(key=lambda kind: kind.startswith("running"))
    return {
        name: {
            kind: _mean_of_known(site["kinds"].get(kind, 0.0) for site in group)
            if any(kind in site["kinds"] for site in group)
            else None
            for kind in every
        }
        for name, group in groups.items()
        if group
    }


def weight_cell(weight: float | None) -> str:
    """A weight in a table."""
    return "-" if weight is None else f"{weight:.3f}"


def measures(inspection: Inspection) -> list[Measure]:
    """Numbers of sites that are known of this model."""
    sites = inspection.seen["sites"]
    plain = [
        ("effective sources", "sources", "effective_sources"),
        ("entropy", "nats", "entropy"),
        ("size of updates", SIZE, "update_rms"),
        ("size of reads", SIZE, "read_rms"),
    ]
    norms = [
        ("gradient at updates", "L2 norm", "update_gradient"),
        ("gradient at reads", "L2 norm", "read_gradient"),
        ("coefficient of updates", "mean magnitude", "coefficient"),
        ("gate", "gate", "gate"),
    ]
    found = [Measure(name=n, unit=u, values=tuple(s[key] for s in sites)) for n, u, key in plain]
    ratios = tuple(_ratio(_written(site), site["read_rms"]) for site in sites)
    found.append(Measure(name="update beside read", unit="ratio of RMS", values=ratios))
    cosines = [site["cosine"] for site in sites]
    for name in ("stream", "embedding", "running state"):
        values = tuple(cosine.get(name) for cosine in cosines)
        found.append(Measure(name=f"cosine of update and {name}", unit="cosine", values=values))
    found += [Measure(name=n, unit=u, values=tuple(s[key] for s in sites)) for n, u, key in norms]
    return [one for one in found if any(value is not None for value in one.values)]


def _written(site: Mapping[str, Any]) -> float | None:
    """Size of what a site adds: its update times the method's coefficient."""
    size: float | None = site["update_rms"]
    coefficient: float | None = site["coefficient"]
    return size if size is None or coefficient is None else size * coefficient


def histories(inspection: Inspection) -> list[History]:
    """What the run's log and earlier checkpoints tell over training."""
    routing = [record for record in inspection.records if record.get("kind") == "routing"]
    by_checkpoint = {**inspection.past}
    if inspection.tables and inspection.step is not None:
        by_checkpoint[inspection.step] = inspection.tables["all tokens"]
    found = [_kinds_logged(routing), _kinds_seen(by_checkpoint)]
    for name, unit, key in (
        ("effective sources", "sources", "effective_sources"),
        ("weight on details", "weight", "detail_weight"),
        ("weight on the embedding", "weight", "embedding_weight"),
    ):
        found.append(History(name=name, unit=unit, lines=tuple(_line("all reads", routing, key))))
    sizes = dict.fromkeys(name for r in routing for name in _mapping(r, "source_rms"))
    lines = [one for name in sizes for one in _line(name, routing, "source_rms", name)]
    found.append(History(name="size of sources", unit=SIZE, lines=tuple(lines)))
    found.append(History(name="size of updates", unit=SIZE, lines=tuple(_update_sizes(routing))))
    losses: list[Line] = []
    for kind in ("train", "validation"):
        records = [record for record in inspection.records if record.get("kind") == kind]
        losses += _line(kind, records, "loss")
    found.append(History(name="loss", unit="nats a token", lines=tuple(losses)))
    return [one for one in found if any(len(line.x) > 1 for line in one.lines)]


def has_blocks(inspection: Inspection) -> bool:
    """Whether the method gathers several sites in a block."""
    return any(stop - start > 1 for start, stop in inspection.seen["blocks"])


def bases_of(inspection: Inspection) -> list[BlockBases]:
    """Of each block, and their mean where there are several of one size."""
    # of methods without blocks of several sites, the depth is parted evenly
    word = "block" if has_blocks(inspection) else "part"
    found = [
        _block(number, block, inspection.bases["bases"], word)
        for number, block in enumerate(inspection.bases["blocks"])
    ]
    if len(found) > 1 and len({block.size for block in found}) == 1:
        shares = zip(*(block.pca for block in found), strict=True)
        sets = [
            Held(
                name=same[0].name,
                count=same[0].count,
                share=statistics.fmean(one.share for one in same),
            )
            for same in zip(*(block.sets for block in found), strict=True)
        ]
        mean = BlockBases(
            name=f"mean of the {word}s",
            size=found[0].size,
            pca=tuple(map(statistics.fmean, shares)),
            sets=tuple(sets),
        )
        found.insert(0, mean)
    return found


def _block(number: int, block: Mapping[str, Any], bases: Sequence[str], word: str) -> BlockBases:
    captured = block["captured"]
    names = [name for name in captured if name != "in use"]
    sets = [
        Held(name=name, count=1 + name.count(" + "), share=captured[name]["share"])
        for name in names
    ]
    # of bases that are not learned, one of the others is the same
    if any(name.startswith("state + initial ") for name in names):
        sets.append(Held(name="in use", count=len(bases), share=captured["in use"]["share"]))
    return BlockBases(
        name=f"{word} {number}",
        size=block["size"],
        pca=tuple(block["pca"]["cumulative"]),
        sets=tuple(sets),
    )


def _kinds_logged(routing: Sequence[Mapping[str, Any]]) -> History:
    names = dict.fromkeys(name for record in routing for name in _mapping(record, "kinds"))
    lines = [line for name in names for line in _line(name, routing, "kinds", name)]
    return History(name="weight by kind of source", unit="weight", lines=tuple(lines))


def _kinds_seen(tables: Mapping[int, Table]) -> History:
    """Mean weight by kind of source at each checkpoint, over reads that mix."""
    mixing = {
        step: sum(any(w is not None for w in row) for row in table["weights"])
        for step, table in sorted(tables.items())
    }
    steps = [step for step, rows in mixing.items() if rows]
    means: dict[str, list[float]] = {}
    for step in steps:
        for kind, values in by_kind(tables[step]).items():
            total = sum(value for value in values if value is not None)
            means.setdefault(kind, []).append(total / mixing[step])
    lines = [Line(name=name, x=tuple(steps), y=tuple(y)) for name, y in means.items()]
    return History(name="weight by kind, of checkpoints", unit="weight", lines=tuple(lines))


def _line(
    label: str, records: Sequence[Mapping[str, Any]], key: str, inner: str | None = None
) -> Iterator[Line]:
    """One line of what records have of a number, where any has it."""
    pairs = []
    for record in records:
        value = record.get(key) if inner is None else _mapping(record, key).get(inner)
        if _is_number(value):
            pairs.append((record["step"], float(value)))
    if pairs:
        steps, values = zip(*sorted(pairs), strict=True)
        yield Line(name=label, x=steps, y=values)


def _update_sizes(routing: Sequence[Mapping[str, Any]]) -> Iterator[Line]:
    """Smallest, middle and largest update of each look."""
    found = sorted((r["step"], sorted(_list(r, "update_rms"))) for r in routing)
    found = [(step, sizes) for step, sizes in found if sizes]
    for name, pick in (("largest", max), ("middle", statistics.median), ("smallest", min)):
        if found:
            steps = tuple(step for step, _ in found)
            yield Line(name=name, x=steps, y=tuple(float(pick(sizes)) for _, sizes in found))


def _mapping(record: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = record.get(key)
    return value if isinstance(value, dict) else {}


def _list(record: Mapping[str, Any], key: str) -> list[float]:
    values = record.get(key)
    return [float(v) for v in values if _is_number(v)] if isinstance(values, list) else []


def _is_number(value: Any) -> TypeGuard[int | float]:
    # files may have what no float holds, or no figure
    return type(value) in (int, float) and abs(value) < _LARGEST


def _mean_of_known(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _ratio(a: float | None, b: float | None) -> float | None:
    return None if a is None or not b else a / b
