import json
import re
from collections import defaultdict
from html.parser import HTMLParser

import pytest

from resroute.analysis import find_runs
from resroute.experiments.report import make_report
from resroute.experiments.report.data import Links
from resroute.experiments.report.page import render_page, setup_line
from resroute.residual import WAV, BlockAttnRes, PreNorm

EVIL = '<script>alert("x")</script>'
DRAWING = b'<svg viewBox="0 0 9 9"><defs><g id="p"/></defs><use href="#p"/></svg>'


class Page(HTMLParser):
    """Every tag with its attributes, and the text of table cells."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.cells, self._in_cell = [], [], False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "td":
            self._in_cell = True
            self.cells.append("")

    def handle_endtag(self, tag):
        self._in_cell = self._in_cell and tag != "td"

    def handle_data(self, data):
        if self._in_cell:
            self.cells[-1] += data

    def all(self, tag, attribute):
        return [attrs[attribute] for name, attrs in self.tags if name == tag and attribute in attrs]


def rendered(folder, out=None, *, runs=None, **options):
    """The page without its figures."""
    runs = find_runs(folder) if runs is None else runs
    report = make_report(runs, **{"title": "t", **options})
    return render_page(report, defaultdict(lambda: DRAWING), Links(out=out or folder))


def data_of(text):
    return json.loads(re.search(r'id="data">(.*?)</script>', text)[1])


def test_runs_of_one_seed_by_value(make_run, tmp_path):
    make_run("suite/p", PreNorm(), final=0.75)
    make_run("suite/w 1", final=0.71, sample="Mia & Tom\nfound it.")
    out = tmp_path / "site" / "here"
    out.mkdir(parents=True)
    text = rendered(tmp_path / "runs", out, title="A title", unfinished=["suite/killed"])
    page = Page(text)
    assert page.cells[:16] == [
        "PreNorm", "4", "0", "0.7500", "0.5930", "0.296", "9,000", "710",
        "WAV", "4", "0", "0.7100", "0.5530", "0.296", "9,000", "710",
    ]  # fmt: skip
    assert '<td class="best">0.7100</td>' in text
    links = [attrs["href"] for tag, attrs in page.tags if tag == "a" and "title" in attrs]
    assert links[:2] == ["../../runs/suite/p/config.json", "../../runs/suite/w%201/config.json"]
    assert (out / "../../runs/suite/w 1/config.json").is_file()
    assert "<h1>A title</h1>" in text
    below = (
        "Bold: lowest loss among runs of equal corpus, depth, width and tokens; "
        "entropy floor 0.157 nats/char, lower bound; memory: peak resident size of the process."
    )
    assert f">{below}</p>" in text
    assert "Not finished: suite/killed." in text
    assert "<pre>Mia &amp; Tom\nfound it.</pre>" in text
    assert page.all("section", "id") == [
        "comparison", "curves", "gap", "time", "maps", "samples", "configuration",
    ]  # fmt: skip
    assert page.all("a", "href")[:7] == [f"#{name}" for name in page.all("section", "id")]
    assert "<dt>model.dim</dt><dd>128</dd>" in text
    assert "<dt>model.residual.type</dt>" not in text


def test_a_sweep_by_value(study_folder, plan):
    text = rendered(study_folder, plan=plan)
    page = Page(text)
    assert page.all("section", "id") == [
        "primary", "comparison", "trend", "curves", "gap", "differences", "time", "maps",
        "samples", "runs", "configuration",
    ]  # fmt: skip
    assert page.all("figure", "data-figure") == [
        "trend", "curves", "gap", "differences", "depth_weights",
    ]  # fmt: skip
    declared = "WAV minus Block AttnRes at 8 layers was declared as the one primary contrast"
    assert declared in text
    assert text.count("<li><strong>") == 2
    assert re.search(r"<li><strong>storyworld: WAV better by 0\.\d{3} \(", text)
    # a mean links to the first of its runs, whose row links to its configuration
    mean = re.search(r'<td class="best" title="([^"]+)"[^>]*><a href="#(run-\d+)">', text)
    first, *others = mean[1].split(", ")
    assert (len(others), first.startswith("wav-L4-s0-storyworld")) == (2, True)
    row = re.search(rf'<tr id="{mean[2]}"><td class="text"><a href="([^"]+)"', text)
    assert row[1] == f"{first}/config.json"
    assert (study_folder / row[1]).is_file()
    assert text.count('<tr class="marked">') == 2
    # no seed is the best one
    runs = text[text.index('<section id="runs">') :]
    assert 'class="best"' not in runs.split("</section>")[0]


def test_ids_are_unique_and_links_within_the_page_resolve(study_folder, plan):
    text = rendered(study_folder, plan=plan)
    page = Page(text)
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    used = set(re.findall(r'href="#([^"]+)"', text)) | set(re.findall(r"url\(#([^)]+)\)", text))
    assert {"curves-p", "trend-p", "comparison"} <= used
    assert used <= set(ids)


def test_the_page_loads_nothing_and_runs_its_own_script_alone(study_folder, plan):
    text = rendered(study_folder, plan=plan)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
    (policy,) = [a["content"] for t, a in Page(text).tags if t == "meta" and "http-equiv" in a]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-inline" not in policy.split("style-src")[0]
    for tag, attrs in Page(text).tags:
        assert not [name for name in attrs if name.startswith("on")]
        for name in {"src", "href", "xlink:href"} & attrs.keys():
            value = attrs[name]
            assert tag == "a" or value.startswith(("#", "data:image/png;base64,")), (tag, value)
    scripts = re.findall(r"<script[^>]*>", text)
    assert scripts == ['<script type="application/json" id="data">', "<script>"]


def test_everything_from_files_is_escaped(make_run, tmp_path):
    make_run("a", label=EVIL, corpus=EVIL, device=EVIL, sample=EVIL, memory_kind=EVIL)
    make_run('b"><i>', WAV(num_blocks=2), label=EVIL, corpus=EVIL)
    make_run("c", PreNorm(), label="</style><u>&amp;", corpus=EVIL)
    text = rendered(tmp_path / "runs", title=EVIL, unfinished=['d"<u>'])
    names = {tag for tag, _ in Page(text).tags}
    assert not names & {"i", "u", "iframe", "object", "embed", "link"}
    assert text.count("<script") == 2
    assert "alert(" not in text.replace("alert(&quot;", "").replace('alert(\\"', "")
    assert "<pre>&lt;script&gt;alert(&quot;x&quot;)&lt;/script&gt;</pre>" in text
    assert {run["label"] for run in data_of(text)["runs"]} == {EVIL, "</style><u>&amp;"}


def test_the_data_is_what_the_figures_show(study_folder, plan):
    report = make_report(find_runs(study_folder), title="t", plan=plan)
    page = render_page(report, defaultdict(lambda: DRAWING), Links(out=study_folder))
    text = re.search(r'id="data">(.*?)</script>', page)[1]
    assert text.isascii()
    assert not set("<>&") & set(text)
    data = json.loads(text)
    assert [run["name"] for run in data["runs"]] == [run.name for run in report.runs]
    assert data["runs"][3]["href"] == f"{report.runs[3].name}/config.json"
    (trend,) = [chart for chart in report.charts if chart.name == "trend"]
    drawn = data["charts"]["trend"]["panels"][0]["lines"][2]
    line = trend.panels[0].lines[2]
    assert drawn["name"] == line.name == "WAV"
    assert drawn["y"] == pytest.approx(line.y, rel=1e-5)
    assert drawn["low"] == pytest.approx(line.low, rel=1e-5)
    seeds = [[data["runs"][place]["seed"] for place in runs] for runs in drawn["runs"]]
    assert seeds == [[0, 1, 2], [0, 1, 2, 3, 4]]
    curve = data["charts"]["curves"]["panels"][0]["lines"][0]
    assert len(curve["runs"]) == 1
    assert len(curve["x"]) == len(curve["y"]) == 21
    assert data["differences"][0]["rows"][0]["isPrimary"] is True
    one = data["maps"][0]["maps"][1]
    assert one["name"] == "WAV, mean of 3 seeds"
    assert one["details"][:4] == [False, False, True, True]
    assert one["weights"][0][:2] == [1.0, None]


def test_without_a_configuration_links_lead_to_the_table(make_run, tmp_path):
    make_run("a")
    (run,) = find_runs(tmp_path / "runs")
    assert Links(out=tmp_path).config(run) == "runs/a/config.json"
    (run.path / "config.json").unlink()
    assert Links(out=tmp_path).config(run) == "runs.csv"


def test_the_setup_line_names_what_differs(make_run, tmp_path):
    make_run("a", num_layers=12)
    make_run("b", num_layers=4, steps=1000)
    make_run("c", num_layers=4, seed=1, device="cuda", precision="bf16")
    assert setup_line(find_runs(tmp_path / "runs")).split(" \u00b7 ") == [
        "storyworld",
        "4 and 12 layers",
        "width 128",
        "context 256",
        "1,000 and 2,000 steps",
        "2,048,000 and 4,096,000 tokens",
        "bf16 on cuda and float32 on cpu",
    ]


def test_sections_need_something_to_show(make_run, tmp_path):
    make_run("a", PreNorm())
    page = Page(rendered(tmp_path / "runs"))
    assert page.all("section", "id") == ["comparison", "curves", "configuration"]


def test_long_lists_are_cut(make_run, tmp_path):
    make_run("a", sample="y" * 5000)
    text = rendered(tmp_path / "runs", unfinished=[f"r{i}" for i in range(14)])
    assert f"<pre>{'y' * 4000} ...</pre>" in text
    assert "r10, r11 and 2 more." in text


def test_one_corpus_without_floor_and_speed(make_run, tmp_path):
    for i, residual in enumerate((PreNorm(), BlockAttnRes(num_blocks=4))):
        for seed in (0, 1):
            make_run(
                f"r{i}{seed}", residual, seed=seed, final=0.7 + 0.01 * i, floor=None,
                floor_exact=None, speed=None, peak_memory_bytes=None, memory_kind=None,
            )  # fmt: skip
    text = rendered(tmp_path / "runs")
    assert "gap to floor" not in text.split("<script")[0]
    assert '<section id="time">' not in text
