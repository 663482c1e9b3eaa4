"""The page of one inspected model, or of two beside each other."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape

from resroute.experiments.inspect.data import script_data
from resroute.experiments.inspect.inspection import Inspection
from resroute.experiments.inspect.views import bases_of, by_site_kind, has_blocks, weight_cell
from resroute.experiments.page.html import document, figure, paragraph, plain_table, section

HEADINGS = {
    "depth_weights": "Depth weights",
    "kinds": "What sites read",
    "importance": "What the model needs",
    "measures": "Site by site",
    "training": "Over training",
    "bases": "What the bases hold",
}
"""Figures of which there are files, and the headings of their sections."""
_MAP = (
    "A row a site (a sublayer's place in depth), a column a source: the share of the source in "
    "what the site reads, mean over tokens. Sources of finished blocks, then of the running one."
)
_PROMPT = (
    "Where each token is read from. The embedding lies at depth 0, the last layer's update at the "
    "number of layers, a block's sum in its middle. The loss is that of the token itself, given "
    "those before it; its weights are of the position that reads it."
)
_NEEDS = (
    "How much the loss grows when the updates of a layer or block, or a source, are left out, "
    "with the standard error over windows; below, where a source stands for the item alone, the "
    "share of all depth weight on it. Much weight on something that the loss does not need is no "
    "contradiction: others can stand in for it."
)
_MEASURES = (
    "Means over tokens; sizes are root mean squares over tokens and width. Gradients are those of "
    "a few windows."
)
_BASES = (
    "A block's updates are vectors of the width, one a site. How much of their energy lies in what "
    "its sources hold, against the most that as many vectors can hold."
)


def render_page(inspections: Sequence[Inspection], title: str, figures: Mapping[str, bytes]) -> str:
    """The page's HTML.

    Args:
        inspections: One, or two to compare.
        title: The heading.
        figures: SVG files by the names in `HEADINGS`, shown where no script runs.
    """
    labels = run_labels(inspections)
    return document(
        title,
        "\n".join([*map(setup_line, inspections), *_notes(inspections)]),
        list(_sections(inspections, labels, figures)),
        script_data(inspections, labels),
        "resroute.experiments.inspect",
        ("lines.js", "prompt.js", "importance.js", "inspect.js"),
    )


def run_labels(inspections: Sequence[Inspection]) -> list[str]:
    """The methods' labels; with depth, seed, step or name where these alone tell two apart."""
    ways = (
        lambda one: one.label,
        lambda one: f"{one.label}, {one.num_layers} layers",
        lambda one: f"{one.label}, seed {one.seed}",
        lambda one: f"{one.label} ({one.name})",
        lambda one: f"{one.label}, step {one.step}",
    )
    for way in ways:
        labels = [way(one) for one in inspections]
        if len(set(labels)) == len(labels):
            return labels
    return [f"{one.label} ({one.name}) {n}" for n, one in enumerate(inspections, start=1)]


def setup_line(one: Inspection) -> str:
    """What was looked at, on one line."""
    seed = "" if one.seed is None else f", seed {one.seed}"
    parts = [
        f"{one.label}, {one.num_layers} layers, width {one.dim}{seed}",
        *([] if one.step is None else [f"step {one.step:,}"]),
        f"{one.windows} windows of {one.tokens // one.windows} tokens of {one.corpus}",
        f"loss {one.loss:.4f} nats a token",
    ]
    return " \N{MIDDLE DOT} ".join(parts)


def _notes(inspections: Sequence[Inspection]) -> Iterator[str]:
    """What a reader of two must know."""
    if len({one.corpus for one in inspections}) > 1:
        yield "They were looked at on different texts: compare shapes rather than numbers."


def _sections(
    inspections: Sequence[Inspection], labels: Sequence[str], figures: Mapping[str, bytes]
) -> Iterator[str]:
    yield section("health", "Health", *_health(inspections, labels))

    def drawn(name: str, *parts: str) -> str:
        if name not in figures:
            return ""
        return section(name, HEADINGS[name], *parts, figure(name, HEADINGS[name], figures[name]))

    yield drawn("depth_weights", paragraph(_MAP))
    yield drawn("kinds", *_kinds(inspections, labels))
    yield _prompt(inspections)
    yield drawn("importance", paragraph(_NEEDS))
    yield drawn("measures", paragraph(_MEASURES))
    yield drawn("training")
    yield drawn("bases", paragraph(_BASES), *_third(inspections, labels))


def _health(inspections: Sequence[Inspection], labels: Sequence[str]) -> Iterator[str]:
    for one, label in zip(inspections, labels, strict=True):
        of = f"{label}: " if len(inspections) > 1 else ""
        if not one.findings:
            yield paragraph(f"{of}no findings." if of else "No findings.")
            continue
        items = "\n".join(
            f"<li><strong>{found.severity}: {escape(found.check)}</strong>, "
            f"{escape(found.where)}: {escape(found.saw)}. "
            f'<span class="soft">{escape(found.why[:1].upper() + found.why[1:])}. To try: '
            f"{escape(found.remedy)}.</span></li>"
            for found in one.findings
        )
        yield (paragraph(of) if of else "") + f"<ul>\n{items}\n</ul>"


def _kinds(inspections: Sequence[Inspection], labels: Sequence[str]) -> Iterator[str]:
    """Mean weight by kind of source and kind of site, a table for each model that routes."""
    for one, label in zip(inspections, labels, strict=True):
        if not one.tables:
            continue
        groups = by_site_kind(one)
        rows = [
            [kind, *(weight_cell(group[kind]) for group in groups.values())]
            for kind in groups["all"]
        ]
        caption = (
            "Mean weight on each kind of source, by kind of site. A source that a site does not "
            "have counts as zero: the first site, say, can read the embedding alone."
        )
        yield paragraph(f"{label}. {caption}" if len(inspections) > 1 else caption)
        yield plain_table("What sites read", ["source", *groups], rows)


def _prompt(inspections: Sequence[Inspection]) -> str:
    shown = [one.prompt for one in inspections if one.prompt is not None]
    if not shown:
        return ""
    text = escape("".join(shown[0].tokens))
    return section(
        "prompt",
        "Token by token",
        paragraph(_PROMPT),
        '<figure data-figure="prompt" data-title="Token by token">'
        f'<div class="static"><pre>{text}</pre></div></figure>',
    )


def _third(inspections: Sequence[Inspection], labels: Sequence[str]) -> Iterator[str]:
    for one, label in zip(inspections, labels, strict=True):
        if not one.bases["blocks"]:
            continue
        rows = []
        blocks = bases_of(one)[-len(one.bases["blocks"]) :]
        for block, found in zip(blocks, one.bases["blocks"], strict=True):
            used = found["captured"]["in use"]["share"]
            count = len(one.bases["bases"])
            best = found["third"]["best"]
            pattern = found["third"]["signs"]
            rows.append(
                [
                    block.name,
                    str(block.size),
                    f"{100 * used:.1f} %",
                    f"{100 * block.pca[min(count, block.size) - 1]:.1f} %",
                    "-" if best is None else f"{100 * best['share']:.1f} %",
                    "-" if pattern is None else f"{100 * pattern['share']:.1f} %",
                ]
            )
        held = " + ".join(one.bases["bases"])
        if len(inspections) > 1:
            yield paragraph(f"{label}.")
        yield plain_table(
            "What the bases hold",
            [
                "block" if has_blocks(one) else "part",
                "updates",
                held,
                "best as many",
                "one more adds",
                "one more of signs adds",
            ],
            rows,
        )
