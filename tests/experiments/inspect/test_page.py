"""The page's HTML and the values that its script draws."""

import base64
import dataclasses
import hashlib
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from resroute.experiments.importance import Ablation, Importance
from resroute.experiments.inspect import run_labels, setup_line
from resroute.experiments.inspect.page import HEADINGS
from resroute.residual import Finding

from .conftest import PROMPT, SITES, bases_of_blocks, site, table_of

EVIL = '</script><!--<script>alert("x")</script>&'


class Page(HTMLParser):
    """Every tag with its attributes, and the text of table cells and of what is preformatted."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts, self._open = [], [], False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._open = tag in ("td", "pre", "p", "h1")
        if self._open:
            self.texts.append("")

    def handle_endtag(self, tag):
        self._open = False

    def handle_data(self, data):
        if self._open:
            self.texts[-1] += data

    def all(self, tag, attribute):
        return [attrs[attribute] for name, attrs in self.tags if name == tag and attribute in attrs]


def cells(text, name):
    part = text.split(f'<section id="{name}">')[1].split("</section>")[0]
    return [
        re.findall(r"<t[dh][^>]*>([^<]*)</t[dh]>", row) for row in re.findall(r"<tr>.*?</tr>", part)
    ]


def test_one_model_by_value(make_inspection, rendered):
    text = rendered([make_inspection(prompt=PROMPT)], "Inside & out")
    page = Page(text)
    assert "<h1>Inside &amp; out</h1>" in text
    assert page.texts[1] == (
        "Block AttnRes, 2 layers, width 8, seed 0 \u00b7 step 30 \u00b7 2 windows of 32 tokens of "
        "tales \u00b7 loss 2.5000 nats a token"
    )
    sections = [
        "health", "depth_weights", "kinds", "prompt", "importance", "measures", "training", "bases",
    ]  # fmt: skip
    assert page.all("section", "id") == sections
    assert page.all("a", "href")[: len(sections)] == [f"#{name}" for name in sections]
    assert page.all("figure", "data-figure") == sections[1:]
    assert set(HEADINGS) == set(sections) - {"health", "prompt"}
    assert "No findings." in page.texts
    assert cells(text, "kinds") == [
        ["source", "all", "attention", "mlp", "readout"],
        ["embedding", "0.410", "0.750", "0.175", "0.200"],
        ["state", "0.300", "0.250", "0.100", "0.800"],
        ["running state", "0.290", "-", "0.725", "-"],
    ]
    assert cells(text, "bases") == [
        [
            "block", "updates", "state + phase", "best as many", "one more adds",
            "one more of signs adds",
        ],
        ["block 0", "4", "70.0 %", "80.0 %", "3.0 %", "-"],
        ["block 1", "4", "90.0 %", "95.0 %", "3.0 %", "-"],
    ]  # fmt: skip


def test_two_models_are_told_apart(make_inspection, rendered, data_of):
    one = make_inspection(label="WAV")
    other = make_inspection(label="Block AttnRes", loss=2.25, bases={"blocks": []})
    text = rendered([one, other])
    page = Page(text)
    assert page.texts[1].count("\n") == 1
    assert page.texts[1].splitlines()[1].startswith("Block AttnRes, 2 layers")
    assert {"WAV: no findings.", "Block AttnRes: no findings.", "WAV."} <= set(page.texts)
    # of a model without bases there is no table
    assert len(cells(text, "bases")) == 3
    assert "Block AttnRes." not in page.texts
    assert len(cells(text, "kinds")) == 8
    assert [run["label"] for run in data_of(text)["runs"]] == ["WAV", "Block AttnRes"]


def test_texts_that_differ_are_noted(make_inspection, rendered):
    note = "They were looked at on different texts: compare shapes rather than numbers."
    one, same = make_inspection(), make_inspection(label="WAV")
    other = make_inspection(label="WAV", corpus="news")
    assert Page(rendered([one, other])).texts[1].splitlines()[2] == note
    assert note not in rendered([one, same])
    assert note not in rendered([one])


@pytest.mark.parametrize(
    ("changes", "labels"),
    [
        ({"label": "WAV"}, ["Block AttnRes", "WAV"]),
        ({"num_layers": 4}, ["Block AttnRes, 2 layers", "Block AttnRes, 4 layers"]),
        ({"seed": 1}, ["Block AttnRes, seed 0", "Block AttnRes, seed 1"]),
        ({"step": 60}, ["Block AttnRes, step 30", "Block AttnRes, step 60"]),
        ({"name": "b"}, ["Block AttnRes (a run)", "Block AttnRes (b)"]),
        ({"loss": 2.0}, ["Block AttnRes (a run) 1", "Block AttnRes (a run) 2"]),
        # the first that tells them apart is enough
        ({"seed": 1, "step": 60, "name": "b"}, ["Block AttnRes, seed 0", "Block AttnRes, seed 1"]),
        # a run's name says more than how long it was trained
        ({"step": 60, "name": "b"}, ["Block AttnRes (a run)", "Block AttnRes (b)"]),
    ],
)
def test_labels_of_two_runs_differ(make_inspection, changes, labels):
    one = make_inspection()
    found = run_labels([one, dataclasses.replace(one, **changes)])
    assert found == labels
    assert run_labels([one]) == ["Block AttnRes"]


def test_the_setup_without_step_and_seed(make_inspection):
    assert setup_line(make_inspection(step=None, seed=None)) == (
        "Block AttnRes, 2 layers, width 8 \u00b7 2 windows of 32 tokens of tales \u00b7 "
        "loss 2.5000 nats a token"
    )
    assert "step 12,345" in setup_line(make_inspection(step=12345))


def test_findings_are_told_with_advice(make_inspection, rendered):
    finding = Finding(
        check="idle layers", severity="warning", where="3 mlp <b>", saw="RMS of 1 & less",
        why="they add nothing", remedy="try fewer",
    )  # fmt: skip
    text = rendered([make_inspection(findings=(finding,))])
    assert (
        "<li><strong>warning: idle layers</strong>, 3 mlp &lt;b&gt;: RMS of 1 &amp; less. "
        '<span class="soft">They add nothing. To try: try fewer.</span></li>'
    ) in text


def test_sections_need_something_to_show(looked, rendered):
    text = rendered([looked["pre"]], names=("importance", "measures", "bases"))
    sections = Page(text).all("section", "id")
    assert sections == ["health", "importance", "measures", "bases"]
    # one of two is enough
    both = rendered([looked["pre"], looked["block"]])
    assert Page(both).all("section", "id") == [
        "health", "depth_weights", "kinds", "prompt", "importance", "measures", "training", "bases",
    ]  # fmt: skip
    assert [row[0] for row in cells(both, "kinds")].count("source") == 1


def test_everything_from_files_is_escaped(make_inspection, rendered, data_of):
    finding = Finding(
        check=EVIL, severity="note", where=EVIL, saw=EVIL, why=EVIL, remedy=EVIL
    )  # fmt: skip
    sites = [{**one, "name": f"{one['name']}{EVIL}"} for one in SITES]
    item = Ablation(name=EVIL, sites=(0,), change=0.5, error=0.1, mass=0.5)
    needs = Importance(by="layer", loss=2.5, windows=2, tokens=32, items=(item,))
    one = make_inspection(
        sites, name=EVIL, label=EVIL, corpus=EVIL, findings=(finding,), prompt=PROMPT,
        importance=(needs,),
    )  # fmt: skip
    other = dataclasses.replace(one, label=f"{EVIL}<u>", corpus="<i>")
    text = rendered([one, other], EVIL)
    names = [tag for tag, _ in Page(text).tags]
    assert not set(names) & {"i", "u", "iframe", "object", "embed", "link"}
    assert names.count("script") == 2
    assert "<!--" not in text
    assert "alert(" not in text.replace("alert(&quot;", "").replace('alert(\\"', "")
    # what a reader without the script sees
    assert Page(text).texts[0] == EVIL
    assert "<pre>a&lt;/script&gt;&lt;!--</pre>" in text
    data = data_of(text)
    assert [run["label"] for run in data["runs"]] == [EVIL, f"{EVIL}<u>"]
    assert data["runs"][0]["prompt"]["tokens"] == ["a", "</script>", "<!--", ""]
    assert data["runs"][0]["sites"][4]["name"] == f"readout{EVIL}"
    assert re.search(r'id="data">(.*?)</script>', text)[1].isascii()


def test_a_title_that_is_no_text_can_be_written(make_inspection, rendered):
    text = rendered([make_inspection()], "\udcff\x00")
    assert text.encode("utf-8", errors="replace").count(b"<h1>?") == 1


def test_the_page_loads_nothing_and_runs_its_own_script_alone(make_inspection, rendered):
    text = rendered([make_inspection(prompt=PROMPT)])
    (policy,) = [a["content"] for t, a in Page(text).tags if t == "meta" and "http-equiv" in a]
    (script,) = re.findall(r"<script>(.*?)</script>", text, flags=re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy.startswith(f"default-src 'none'; script-src 'sha256-{digest}'; ")
    assert "unsafe-inline" not in policy.split("style-src")[0]
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
    for tag, attrs in Page(text).tags:
        assert not [name for name in attrs if name.startswith("on")]
        assert "src" not in attrs
        assert tag == "a" or "href" not in attrs
    ids = [attrs["id"] for _, attrs in Page(text).tags if "id" in attrs]
    assert len(ids) == len(set(ids))


def decoded(prompt):
    """Weights as the page's script takes them apart."""
    flat = np.frombuffer(base64.b64decode(prompt["weights"]), dtype=np.uint8) / 255
    found, at = [], 0
    for one in prompt["sites"]:
        size = len(prompt["tokens"]) * len(one["sources"])
        found.append((flat[at : at + size] ** 2).reshape(len(prompt["tokens"]), -1))
        at += size
    assert at == len(flat)
    return found


def test_packed_weights_of_a_prompt(make_inspection, rendered, data_of):
    (run,) = data_of(rendered([make_inspection(prompt=PROMPT)]))["runs"]
    prompt = run["prompt"]
    # five digits, and none of what is no number
    assert prompt["losses"] == [None, 1.2346, None, 2.0]
    assert prompt["sites"][1] == {
        "name": "readout", "sources": ["embedding", "state 0", "state 1"],
        "depths": [0.0, 0.75, 1.75],
    }  # fmt: skip
    first, readout = decoded(prompt)
    assert first == pytest.approx(np.array(PROMPT.sites[0].weights), abs=0.004)
    assert readout == pytest.approx(np.array(PROMPT.sites[1].weights), abs=0.004)
    assert first[1].tolist() == [1.0, 0.0]
    # small ones to much less
    assert first[2, 0] == pytest.approx(0.001, abs=0.00013)


def test_packed_weights_of_a_model(looked, rendered, data_of):
    (run,) = data_of(rendered([looked["wav"]]))["runs"]
    for found, expected in zip(decoded(run["prompt"]), looked["wav"].prompt.sites, strict=True):
        assert found == pytest.approx(np.array(expected.weights), abs=0.004)


def test_the_data_is_what_was_seen(make_inspection, rendered, data_of):
    item = Ablation(name="layer 0", sites=(0, 1), change=0.123456789, error=None, mass=0.25)
    needs = Importance(by="layer", loss=2.5, windows=2, tokens=32, items=(item,))
    vowels = {**table_of(SITES), "tokens": 12}
    past = {
        **table_of(SITES),
        "weights": [[0.123456, *row[1:]] for row in table_of(SITES)["weights"]],
    }
    one = make_inspection(
        importance=(needs,), past={10: past},
        tables={"all tokens": table_of(SITES), "vowel": vowels},
    )  # fmt: skip
    (run,) = data_of(rendered([one]))["runs"]
    assert (run["step"], run["kinds"], run["details"]) == (30, ["attention", "mlp"], [])
    assert run["sites"][1] == {"name": "0 mlp", "kind": "mlp", "depth": 0.5}
    assert run["sites"][4] == {"name": "readout", "kind": None, "depth": 2.0}
    assert run["tables"]["all tokens"]["sources"] == [
        "embedding", "state 0", "state 1", "running state",
    ]  # fmt: skip
    assert run["tables"]["all tokens"]["weights"][3] == [0.1, 0.2, None, 0.7]
    assert "tokens" not in run["tables"]["all tokens"]
    assert run["tables"]["vowel"]["tokens"] == 12
    # a weight to four places
    assert (run["past"][0]["step"], run["past"][0]["weights"][2][0]) == (10, 0.1235)
    assert run["importance"][0]["items"] == [
        {"name": "layer 0", "sites": [0, 1], "change": 0.12346, "error": None, "mass": 0.25}
    ]
    assert [one["name"] for one in run["bases"]] == ["mean of the blocks", "block 0", "block 1"]
    assert run["bases"][0]["sets"][1] == {"name": "state + phase", "count": 2, "share": 0.8}
    assert run["bases"][0]["pca"] == [0.5, 0.875, 0.94, 1.0]
    assert [one["name"] for one in run["history"]] == ["weight by kind, of checkpoints"]
    assert run["measures"][0] == {
        "name": "size of updates", "unit": "RMS", "values": [1.0, 3.0, None, 0.5, None],
    }  # fmt: skip


def test_data_of_a_method_without_sources(looked, rendered, data_of):
    (run,) = data_of(rendered([looked["pre"]]))["runs"]
    assert (run["tables"], run["prompt"], run["past"]) == (None, None, [])
    assert "source" not in [one["by"] for one in run["importance"]]


def test_a_block_of_fewer_updates_than_bases(make_inspection, rendered):
    shares = {"state": 0.5, "state + phase": 1.0, "in use": 1.0}
    bases = bases_of_blocks((shares, (1.0,)))
    bases["blocks"][0]["third"] = {"best": None, "signs": {"share": 0.5}}
    text = rendered([make_inspection([site(0, "0 mlp", {"a": 1.0})], bases=bases)])
    assert cells(text, "bases")[1] == ["block 0", "1", "100.0 %", "100.0 %", "-", "50.0 %"]
