import re
from html.parser import HTMLParser

import pytest

from resroute.analysis.page import setup_line, write_report
from resroute.analysis.runs import find_runs, unfinished_runs
from resroute.config import UserError

EVIL = '<script>alert("x")</script>'


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


def report(folder, out=None, *, title="t"):
    return write_report(
        find_runs(folder), out or folder, title=title, unfinished=unfinished_runs(folder)
    )


def test_the_report_by_value(make_run, tmp_path):
    make_run("suite/p", label="PreNorm", method="pre_norm", validation_loss=0.75)
    make_run("suite/w 1", routed=True, sample="Mia & Tom\nfound it.")
    (make_run("suite/killed") / "summary.json").unlink()
    out = tmp_path / "site" / "here"
    written = report(tmp_path / "runs", out, title="A title")
    assert [path.relative_to(out).as_posix() for path in written] == [
        "report.html", "loss.png", "depth_weights.png",
    ]  # fmt: skip
    text = written[0].read_text()
    page = Page(text)
    assert page.cells == [
        "PreNorm", "2", "0", "0.7500", "0.5370", "1.612", "9,000", "900",
        "WAV", "2", "0", "0.7100", "0.4970", "1.612", "9,000", "900",
    ]  # fmt: skip
    assert '<td class="best">0.7100</td>' in text
    assert text.count('class="best"') == 1
    links = [attrs["href"] for tag, attrs in page.tags if tag == "a" and "title" in attrs]
    assert links == ["../../runs/suite/p/config.json", "../../runs/suite/w%201/config.json"]
    assert (out / "../../runs/suite/w 1/config.json").is_file()
    assert "<h1>A title</h1>" in text
    below = (
        "Bold: lowest loss among runs of equal corpus, depth, width and tokens; "
        "entropy floor 0.213 nats/char, exact; memory: peak resident size of the process."
    )
    assert f">{below}</p>" in text
    assert "<figcaption>WAV, 2 layers, seed 0</figcaption>" in text
    assert "Without a map here" not in text
    assert "Not finished: suite/killed." in text
    assert "<pre>Mia &amp; Tom\nfound it.</pre>" in text
    assert [tag for tag, _ in page.tags].count("svg") == 2


def test_the_setup_line_names_what_differs(make_run, tmp_path):
    make_run("a", num_layers=12)
    make_run("b", num_layers=4, steps=1000)
    make_run("c", num_layers=4, seed=1, device="cuda", precision="bf16")
    assert setup_line(find_runs(tmp_path / "runs")).split(" \u00b7 ") == [
        "storyworld",
        "4 and 12 layers",
        "width 128",
        "context 256",
        "20 and 1,000 steps",
        "2,000 tokens",
        "bf16 on cuda and float32 on cpu",
    ]


def test_without_routed_runs_there_is_no_map(make_run, tmp_path):
    make_run("a")
    runs = tmp_path / "runs"
    assert report(runs, title="t") == [runs / "report.html", runs / "loss.png"]
    text = (runs / "report.html").read_text()
    assert "Depth weights" not in text
    assert "Samples" not in text
    assert not (runs / "depth_weights.png").exists()


def test_the_page_has_24_maps_and_names_the_rest(make_run, tmp_path, monkeypatch):
    drawn = []

    def draw(runs, kind, *, titles):
        drawn.append((kind, [run.name for run in runs]))
        return b'<svg viewBox="0 0 9 9"></svg>'

    monkeypatch.setattr("resroute.analysis.page.depth_image", draw)
    for i in range(26):
        make_run(f"r{i:02}", label=f"M{i:02}", routed=True)
    report(tmp_path / "runs")
    text = (tmp_path / "runs" / "report.html").read_text()
    names = [f"r{i:02}" for i in range(24)]
    assert sorted(drawn) == [("png", names), *(("svg", [name]) for name in names)]
    assert text.count("<figcaption>") == 24
    assert "Without a map here: M24, 2 layers, seed 0; M25, 2 layers, seed 0.</p>" in text


def test_only_a_figure_that_cuts_says_so(make_run, tmp_path):
    path = make_run("a")
    said = "The first steps are cut off at the top."
    report(tmp_path / "runs")
    assert said in (tmp_path / "runs" / "report.html").read_text()
    line = '{{"kind": "train", "step": {0}, "tokens": {0}00, "loss": 0.7}}'
    (path / "metrics.jsonl").write_text("\n".join(line.format(step) for step in range(1, 21)))
    report(tmp_path / "runs")
    assert said not in (tmp_path / "runs" / "report.html").read_text()


def test_everything_from_files_is_escaped(make_run, tmp_path):
    make_run("a", label=EVIL, corpus=EVIL, device=EVIL, sample=EVIL, memory_kind=EVIL, routed=True)
    make_run('b"><i>', label=EVIL, corpus=EVIL, sample=None)
    (make_run('c"<u>') / "summary.json").unlink()
    report(tmp_path / "runs", title=EVIL)
    text = (tmp_path / "runs" / "report.html").read_text()
    names = {tag for tag, _ in Page(text).tags}
    assert not names & {"script", "i", "u", "iframe", "object", "embed", "link"}
    assert "<pre>&lt;script&gt;alert(&quot;x&quot;)&lt;/script&gt;</pre>" in text


def test_the_page_loads_nothing(make_run, tmp_path):
    make_run("a", routed=True, sample="x")
    report(tmp_path / "runs", title="t")
    text = (tmp_path / "runs" / "report.html").read_text()
    assert not re.search(r"https?://", text)
    assert "default-src 'none'" in text
    for tag, attrs in Page(text).tags:
        for name in {"src", "href", "xlink:href"} & attrs.keys():
            value = attrs[name]
            assert tag == "a" or value.startswith(("#", "data:image/png;base64,")), (tag, value)
    assert "url(" not in re.sub(r"url\(#[\w-]+\)", "", text)


def test_ids_are_unique_and_references_resolve(make_run, tmp_path):
    make_run("a", routed=True)
    make_run("b", label="WAV split", routed=True, num_layers=3)
    report(tmp_path / "runs", title="t")
    text = (tmp_path / "runs" / "report.html").read_text()
    ids = [attrs["id"] for _, attrs in Page(text).tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    used = set(re.findall(r"url\(#([^)]+)\)", text)) | set(re.findall(r'href="#([^"]+)"', text))
    assert used
    assert used <= set(ids)


def test_the_same_runs_give_the_same_bytes(make_run, tmp_path):
    make_run("a", routed=True, sample="x")
    first = [path.read_bytes() for path in report(tmp_path / "runs", title="t")]
    second = [path.read_bytes() for path in report(tmp_path / "runs", title="t")]
    assert first == second
    assert len(first) == 3
    assert not list((tmp_path / "runs").glob(".*"))


def test_a_long_sample_is_cut(make_run, tmp_path):
    make_run("a", sample="y" * 5000)
    report(tmp_path / "runs", title="t")
    text = (tmp_path / "runs" / "report.html").read_text()
    assert f"<pre>{'y' * 4000} ...</pre>" in text


def test_nothing_to_report_is_a_user_error(make_run, tmp_path):
    (make_run("killed") / "summary.json").unlink()
    with pytest.raises(UserError, match=r"no finished run to report \(not finished: killed\)"):
        report(tmp_path / "runs", title="t")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no run at all"):
        report(tmp_path / "empty", title="t")
    make_run("a")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be made"):
        report(tmp_path / "runs", tmp_path / "file", title="t")
