"""The report: one self-contained page about a set of runs, and its figures as files."""

import os
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from resroute.analysis.figures import (
    cuts_losses,
    depth_image,
    loss_image,
    map_titles,
    routed_runs,
)
from resroute.analysis.runs import Run, run_labels
from resroute.analysis.table import captions, columns, comparison_rows
from resroute.config import UserError
from resroute.files import write_bytes

_SAMPLE_LIMIT = 4000
_MOST_MAPS = 24

# nothing is loaded and nothing runs, whatever a label or a sample says
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"

_CSS = """
:root { color-scheme: light dark; --ink: #1c1c1e; --soft: #5f6368; --line: #dcdfe3;
  --ground: #fafafa; --card: #fff; --link: #0b5cad; --best: #eef6f1; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8ea; --soft: #a3a7ad; --line: #3a3d42;
  --ground: #16181b; --card: #1f2226; --link: #7fb7f0; --best: #20352a; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 2rem 1rem 3rem; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 .3rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.4rem 0 .7rem; }
h3 { font-size: .95rem; margin: 0 0 .4rem; overflow-wrap: anywhere; }
p { margin: .4rem 0; max-width: 46rem; }
a { color: var(--link); }
p.setup { max-width: none; }
.soft { color: var(--soft); }
.small { font-size: .88rem; }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 8px;
  background: var(--card); width: fit-content; max-width: 100%; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .5rem .9rem; text-align: right; white-space: nowrap; }
th { vertical-align: bottom; font-size: .88rem; line-height: 1.3; }
th span { display: block; font-weight: 400; color: var(--soft); }
td { border-top: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; white-space: normal; min-width: 7rem; }
td.best { font-weight: 700; background: var(--best); }
figure { margin: 0; padding: .8rem; background: #fff; border: 1px solid var(--line);
  border-radius: 8px; min-width: 0; }
figcaption { font-size: .88rem; font-weight: 600; color: #1c1c1e; margin: 0 0 .4rem;
  overflow-wrap: anywhere; }
figure svg { display: block; width: 100%; height: auto; margin: 0 auto; }
figure.curves { max-width: 40rem; }
.grid { display: grid; gap: 1rem; align-items: start; margin-top: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 21rem), 1fr)); }
article { padding: .9rem 1rem; background: var(--card); border: 1px solid var(--line);
  border-radius: 8px; min-width: 0; }
@media (max-width: 30rem) { th, td { padding: .45rem .5rem; } }
article pre { margin: 0; font: inherit; white-space: pre-wrap; overflow-wrap: anywhere;
  unicode-bidi: isolate; }
""".strip()


def write_report(
    runs: list[Run], out: Path, *, title: str, unfinished: Sequence[str] = ()
) -> list[Path]:
    """Write report.html, loss.png and, where a run is routed, depth_weights.png.

    The page needs nothing but itself: figures are inline SVG, no script, no network. The same runs
    give the same bytes. Each file replaces its former version in one step.

    Args:
        runs: Finished runs, at least one; `find_runs` reads those below a folder.
        out: The folder to write to, made if missing.
        title: The page's heading.
        unfinished: Names of runs to list as not finished.

    Returns:
        The files written, the page first.

    Raises:
        UserError: No finished run, matplotlib missing, or `out` not writable.
    """
    if not runs:
        hint = f"not finished: {', '.join(unfinished)}" if unfinished else "no run at all"
        raise UserError(f"no finished run to report ({hint}); finish one first")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{out}: cannot be made ({error.strerror}); choose another folder"
        ) from None
    files = {"loss.png": loss_image(runs, "png")}
    routed = routed_runs(runs)[:_MOST_MAPS]
    if routed:
        files["depth_weights.png"] = depth_image(routed, "png", titles=map_titles(runs))
    page = render_page(runs, unfinished, out, title=title)
    # a title from a command line may hold what UTF-8 cannot
    files = {"report.html": page.encode("utf-8", errors="replace"), **files}
    for name, data in files.items():
        write_bytes(out / name, data)
    return [out / name for name in files]


def render_page(runs: list[Run], unfinished: Sequence[str], out: Path, *, title: str) -> str:
    """The page's HTML; links to the runs' files are relative to `out`."""
    parts = [
        "<!doctype html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title>",
        f"<style>\n{_CSS}\n</style>",
        "</head>",
        "<body>",
        "<main>",
        f"<h1>{escape(title)}</h1>",
        f'<p class="soft setup">{escape(setup_line(runs))}</p>',
        "<h2>Comparison</h2>",
        _table(runs, out),
        *(f'<p class="soft small">{escape(line)}</p>' for line in _notes(runs, unfinished)),
        *_curves(runs),
        *_maps(runs),
        *_stories(runs),
        "</main>",
        "</body>",
        "</html>",
    ]
    return "\n".join(parts) + "\n"


def setup_line(runs: list[Run]) -> str:
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


def _listed(values: list[Any]) -> str:
    texts = [f"{v:,}" if isinstance(v, int) else str(v) for v in sorted(set(values))]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"


def _table(runs: list[Run], out: Path) -> str:
    rows = comparison_rows(runs)
    shown = columns(rows)
    units = [f"<span>{escape(c.unit)}</span>" if c.unit else "" for c in shown]
    heads = "".join(
        f'<th scope="col">{escape(column.heading)}{unit}</th>'
        for column, unit in zip(shown, units, strict=True)
    )
    lines = []
    for index, (run, row) in enumerate(zip(runs, rows, strict=True)):
        cells = []
        for column in shown:
            cell = escape(column.cells[index])
            if not column.is_number:
                target = os.path.relpath((run.path / "config.json").resolve(), out.resolve())
                link = quote(os.fsencode(Path(target).as_posix()))
                cell = f'<a href="{link}" title="{escape(run.name)}/config.json">{cell}</a>'
            best = ' class="best"' if column.is_loss and row.is_best else ""
            cells.append(f"<td{best}>{cell}</td>")
        lines.append(f"<tr>{''.join(cells)}</tr>")
    body = "\n".join(lines)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="Comparison of the runs">\n'
        f"<table>\n<thead><tr>{heads}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>\n</div>"
    )


def _notes(runs: list[Run], unfinished: Sequence[str]) -> list[str]:
    below = ["; ".join(captions(runs))]
    if unfinished:
        below.append(f"not finished: {', '.join(unfinished)}")
    return [f"{line[0].upper()}{line[1:]}." for line in below if line]


def _curves(runs: list[Run]) -> list[str]:
    figure = _inline(loss_image(runs, "svg"), "loss", "Loss over training tokens")
    cut = "The first steps are cut off at the top. " if cuts_losses(runs) else ""
    return [
        "<h2>Loss</h2>",
        f'<figure class="curves">{figure}</figure>',
        f'<p class="soft small">Bold with markers: validation. Thin: training. {cut}'
        'The same figure as a file: <a href="loss.png">loss.png</a>.</p>',
    ]


def _maps(runs: list[Run]) -> list[str]:
    routed = routed_runs(runs)
    if not routed:
        return []
    titles = map_titles(runs)
    figures = []
    for i, run in enumerate(routed[:_MOST_MAPS]):
        # the caption is the page's, where it can wrap
        image = depth_image([run], "svg", titles={run.path: ""})
        title = titles[run.path]
        drawing = _inline(image, f"map{i}", f"Depth weights: {title}")
        figures.append(f"<figure><figcaption>{escape(title)}</figcaption>{drawing}</figure>")
    rest = "; ".join(titles[run.path] for run in routed[_MOST_MAPS:])
    return [
        "<h2>Depth weights</h2>",
        "<p>Each row is a site (one sublayer, first at the top, the readout last) and shows how "
        "its read is shared out over the sources in the columns, averaged over tokens: the "
        "brighter, the more weight, and grey where the site has no such source. Columns with "
        "orange names are detail sources: what a plain block sum leaves out, such as phase "
        "(attention minus MLP) and split (first half minus second half of a block).</p>",
        '<p class="soft small">The same maps as a file: '
        '<a href="depth_weights.png">depth_weights.png</a>.</p>',
        f'<div class="grid">\n{chr(10).join(figures)}\n</div>',
        *([f'<p class="soft small">Without a map here: {escape(rest)}.</p>'] if rest else []),
    ]


def _stories(runs: list[Run]) -> list[str]:
    articles = []
    for run, label in zip(runs, run_labels(runs), strict=True):
        if run.sample is None:
            continue
        text = run.sample.strip()
        cut = text if len(text) <= _SAMPLE_LIMIT else text[:_SAMPLE_LIMIT] + " ..."
        head = f"{escape(label)}, {run.num_layers} layers, seed {run.seed}"
        articles.append(f"<article><h3>{head}</h3><pre>{escape(cut)}</pre></article>")
    if not articles:
        return []
    body = "\n".join(articles)
    return ["<h2>Samples</h2>", f'<div class="grid">\n{body}\n</div>']


def _inline(svg: bytes, prefix: str, name: str) -> str:
    """An SVG document as an element of the page, its ids made the page's own by `prefix`."""
    text = svg.decode("utf-8")
    text = re.sub(r"<!--.*?-->\s*", "", text, flags=re.DOTALL)
    opening = re.search(r'<svg\b[^>]*\bviewBox="([^"]+)"[^>]*>', text)
    assert opening is not None, "matplotlib wrote an SVG without a viewBox"
    width = float(opening.group(1).split()[2])
    body = re.sub(r"<metadata>.*?</metadata>\s*", "", text[opening.end() :], flags=re.DOTALL)
    body = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{prefix}-", body)
    # 1.6 CSS pixels to the point: text a little above its printed size, and no larger
    return (
        f'<svg role="img" aria-label="{escape(name)}" viewBox="{opening.group(1)}" '
        f'style="max-width: {1.6 * width:.0f}px">{body.strip()}'
    )
