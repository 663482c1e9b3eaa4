"""What the page's script does, seen in a browser; without chromium these tests are left out."""

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest
import torch

import resroute as rr
from resroute.experiments.importance import Ablation, Importance
from resroute.experiments.inspect import inspect_model
from resroute.testing import small_gpt

from .conftest import PROMPT, SITES, bases_of_blocks, table_of

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")

WIDTHS = (1280, 390)

PROBE = Path(__file__).with_name("probe.js").read_text()
# a window is never narrower than 500 pixels, a frame may be
FRAMES = """<body><script>const found = [];
onmessage = (event) => {{
  if (found.push(event.data) === {count}) document.body.replaceChildren(`[${{found}}]`);
}};</script>{frames}</body>"""
FRAME = '<iframe src="{0}.html" width="{1}" height="1400" style="border: 0"></iframe>'


def item(name, change, error, mass):
    return Ablation(name=name, sites=(0,), change=change, error=error, mass=mass)


def needs(by, *items):
    return Importance(by=by, loss=2.5, windows=2, tokens=32, items=items)


def changed(table, **weights):
    """A table with other weights, at places such as `r1c3`."""
    rows = [list(row) for row in table["weights"]]
    for place, weight in weights.items():
        rows[int(place[1])][int(place[3])] = weight
    return {**table, "weights": rows}


ALL = table_of(SITES)
ONE = {
    "label": "WAV",
    "tables": {"all tokens": ALL, "vowel": {**changed(ALL, r1c3=0.625, r3c0=0.15), "tokens": 1234}},
    "past": {10: changed(ALL, r1c0=0.375)},
    "prompt": PROMPT,
    "importance": (
        needs("layer", item("layer 0", 0.5, 0.0625, 0.25), item("layer 1", -0.125, None, None)),
        needs("block", item("block 0", -0.25, 0.125, None)),
    ),
    "records": tuple(
        {"kind": "train", "step": step, "loss": loss} for step, loss in ((10, 3.0), (20, 2.75))
    ),
    "bases": bases_of_blocks(
        *[({"state": 0.05, "state + phase": 0.091 + 0.01 * i, "in use": 0.091 + 0.01 * i},
          (0.1, 0.2, 0.3, 0.4 + i / 32)) for i in range(11)]
    ),
}  # fmt: skip
OTHER = {
    "label": "Block AttnRes",
    "tables": {"all tokens": changed(ALL, r3c0=0.35, r1c3=0.5)},
    "importance": (needs("layer", item("layer 0", 0.25, 0.125, 0.5)),),
    "bases": bases_of_blocks(({"state": 0.5, "in use": 0.5}, (0.75, 1.0))),
}


def lost_model(where):
    model = small_gpt(residual=rr.WAV(num_blocks=2))
    with torch.no_grad():
        weight = model.embedding.weight if where == "all" else model.layers[2].mlp.output.weight
        weight.fill_(float("nan"))
    ids = torch.arange(40).remainder(11).view(5, 8)
    return inspect_model(model, (ids, ids.roll(-1, 1)), label=f"lost {where}")


@pytest.fixture(scope="module")
def pages(looked, make_inspection, rendered):
    """HTML by name."""
    one, lost = make_inspection(**ONE), [lost_model("all"), lost_model("part")]
    of = {
        "one": [one],
        "same": [one, make_inspection(**OTHER)],
        "real": [looked["wav"], looked["block"]],
        "pre": [looked["pre"]],
        "lost": lost,
        "nothing": lost[:1],
    }
    return {name: rendered(found, names=drawn_of(found)) for name, found in of.items()}


def drawn_of(inspections):
    """Figures that `images` would draw of these."""
    names = ["importance"] if any(one.importance for one in inspections) else []
    names += ["depth_weights", "kinds"] if any(one.tables for one in inspections) else []
    names += ["measures"]
    names += ["bases"] if any(one.bases["blocks"] for one in inspections) else []
    return [*names, "training"] if any(one.records for one in inspections) else names


def dumped(folder, name):
    answer = subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            "--window-size=1400,1400", "--virtual-time-budget=3000", "--dump-dom",
            f"--user-data-dir={folder / 'profile'}", (folder / f"{name}.html").as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return answer.stdout


@pytest.fixture(scope="module")
def probed(pages, tmp_path_factory):
    """What each page shows, by name and width."""
    folder = tmp_path_factory.mktemp("pages")
    for name, text in pages.items():
        # the page lets no other script run: the probe takes the place of its policy
        text = re.sub(r"<meta http-equiv[^>]*>", "", text)
        probe = PROBE.replace("PAGE", json.dumps(name))
        text = text.replace("</body>", f"<script>{{{probe}}}</script></body>")
        (folder / f"{name}.html").write_text(text)
    frames = [FRAME.format(name, width) for name in pages for width in WIDTHS]
    outer = FRAMES.format(frames="".join(frames), count=len(frames))
    (folder / "outer.html").write_text(outer)
    body = re.search(r"<body>(.*)</body>", dumped(folder, "outer"), re.DOTALL)
    found = json.loads(unescape(body[1]))
    return {(one["page"], one["width"]): one for one in found}


def test_the_script_runs_under_its_own_policy(pages, tmp_path):
    text = pages["pre"]
    assert text.count('class="static"') == 4
    (tmp_path / "own.html").write_text(text)
    shown = dumped(tmp_path, "own")
    assert 'class="static"' not in shown
    assert shown.count("<figure") == 4
    # a byte of another script, and nothing runs
    (tmp_path / "other.html").write_text(text.replace('"use strict";', '"use strict"; ', 1))
    assert dumped(tmp_path, "other").count('class="static"') == 4


FIGURES = {
    "one": ["depth_weights", "kinds", "prompt", "importance", "measures", "training", "bases"],
    "same": ["depth_weights", "kinds", "prompt", "importance", "measures", "training", "bases"],
    "real": ["depth_weights", "kinds", "prompt", "importance", "measures", "training", "bases"],
    "pre": ["importance", "measures", "training", "bases"],
    "lost": ["depth_weights", "kinds", "measures"],
    "nothing": ["depth_weights", "kinds", "measures"],
}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", FIGURES)
def test_all_that_can_be_drawn_is_drawn_and_fits(probed, name, width):
    found = probed[name, width]
    assert found["errors"] == []
    assert found["figures"] == FIGURES[name]
    # what stood there without a script is gone
    assert found["still"] == 0
    assert found["overflow"] <= 0
    # after everything was chosen and pointed at
    assert found["odd"] is None
    # of a model of which nothing is known there is no map
    assert found["empty"] == (["depth_weights"] if name == "nothing" else [])


@pytest.fixture(params=WIDTHS)
def one(request, probed):
    return probed["one", request.param]


def test_a_map(one):
    assert one["tokens"] == ["all tokens", "vowel (1,234)"]
    assert one["sites"] == ["all", "attention", "mlp"]
    assert one["steps"] == ["10", "the newest"]
    assert one["titles"] == [
        ["all tokens, step 30"], ["vowel, 1,234 of them, step 30"], ["all tokens, step 10"],
    ]  # fmt: skip
    assert one["cells"] == [
        "0 mlp takes 0.750 from running state; most from running state 0.750, embedding 0.250",
        "0 attention has no source state 0; most from embedding 1.000",
        "0 mlp takes 0.625 from running state; most from running state 0.625, embedding 0.250",
        "1 mlp takes 0.150 from embedding; most from running state 0.700, state 0 0.200, "
        "embedding 0.150",
        "0 mlp takes 0.375 from embedding; most from running state 0.750, embedding 0.375",
    ]


def test_weight_on_kinds_over_depth(one):
    assert one["kinds"] == [
        # attention sites first
        "embedding: 1.000 of what 0 attention reads",
        "embedding: 0.500 of what 1 attention reads",
        "state: 0.500 of what 1 attention reads",
        "embedding: 0.500 of what 1 attention reads",
        "embedding: 0.250 of what 0 mlp reads",
        "running state: 0.700 of what 1 mlp reads",
        "running state: 0.700 of what 1 mlp reads",
    ]
    assert one["apart"] == [
        "all", "none", "embedding (attention)", "state (attention)", "embedding (mlp)",
        "state (mlp)", "running state (mlp)",
    ]  # fmt: skip


def depths_of_prompt():
    """Mean depth of each token's read: over the sites, and of the readout."""
    found = []
    for token in range(4):
        by_site = [
            sum(w * d for w, d in zip(site.weights[token], site.depths, strict=True))
            for site in PROMPT.sites
        ]
        found.append((sum(by_site) / 2, by_site[1]))
    return found


def number(text):
    return float(re.search(r"-?\d+\.\d+", text)[0])


def test_a_text_by_its_tokens(one):
    assert one["spans"] == ["a", "</script>", "<!--", "\u2400"]
    depths = depths_of_prompt()
    assert all(colour.startswith("rgb(") for colour in one["colours"])
    # the deepest and the least deep are the ends of the scale
    order = sorted(range(4), key=lambda token: depths[token][0])
    assert one["colours"][order[0]] == "rgb(68, 1, 84)"
    assert one["colours"][order[-1]] == "rgb(253, 231, 37)"
    assert one["chosen"] == [2, 3, 0, 1, 0]
    pressed, pointed, *of_cells, of_readout = one["reads"]
    assert pressed.startswith('"a": depth it is read from ')
    assert number(pressed) == pytest.approx(depths[0][0], abs=0.01)
    assert pointed.startswith('"</script>": depth it is read from ')
    assert number(pointed) == pytest.approx(depths[1][0], abs=0.01)
    assert one["head"] == ['token 2, "</script>"']
    assert of_cells == [
        '0 mlp reads 1.00 of token 2, "</script>" from embedding',
        "0 mlp has no source state 0",
        'readout reads 0.50 of token 2, "</script>" from state 1',
    ]
    assert of_readout.endswith(" layers, readout")
    assert number(of_readout) == pytest.approx(1.1, abs=0.01)
    assert one["losses"] == [
        '"a": loss not known', '"</script>": loss 1.235 nats', '"<!--": loss not known',
        '"": loss 2.000 nats',
    ]  # fmt: skip
    assert one["uncoloured"] == [True, False, True, False]
    assert one["shows"] == [
        "depth it is read from", "effective sources", "weight on the embedding", "loss",
    ]  # fmt: skip


def test_bars(one):
    assert one["bars"] == [
        "without layer 0 the loss is +0.5000 \u00b1 0.0625 nats; 25.0 % of the weight",
        "without layer 1 the loss is \u22120.1250 nats",
        "without block 0 the loss is \u22120.2500 \u00b1 0.1250 nats",
    ]
    # a quarter of the change is half as long on the root scale
    assert one["heights"] == pytest.approx([0.5, 0.25], abs=0.02)
    assert one["whiskers"] == 1
    # where nothing grows the axis ends at zero: 230 pixels for 0.25 and its error
    assert one["falling"] == pytest.approx([230 * 0.25 / 0.375], abs=1)


def test_lines(one):
    assert one["measures"] == [
        "attention: 1, layer 0", "mlp: 3, layer 0.5", "attention: 0.5, layer 0",
    ]  # fmt: skip
    assert one["training"] == ["train: 3, step 10", "train: 2.75, step 20"]
    assert one["bases"] == [
        "the best vectors (PCA): 10.0 % of the updates' energy by 1 of 4 vectors",
        "state + phase: 14.1 % of the updates' energy by 2 of 4 vectors",
        "state: 5.0 % of the updates' energy by 1 of 4 vectors",
        "the best vectors (PCA): 10.0 % of the updates' energy by 1 of 4 vectors",
    ]


def test_marks_stand_where_the_axes_say(one):
    assert [text for text, _ in one["vectors"]] == ["1", "2", "3", "4"]
    columns = [place for _, place in one["vectors"]]
    shares = [(float(text), place) for text, place in one["shares"]]
    (low, bottom), (high, top) = shares[0], shares[-1]
    assert low == 0
    assert top < bottom - 100

    def stands(place, count, share):
        y = bottom + (top - bottom) * share / high
        # a triangle's middle is not half its height
        return place == [
            pytest.approx(columns[count - 1], abs=0.6), pytest.approx(y, abs=1.5),
        ]  # fmt: skip

    best = [0.1, 0.2, 0.3, 0.4 + 10 / 32]
    assert len(one["best"]) == 4
    for place, count, share in zip(one["best"], range(1, 5), best, strict=True):
        assert stands(place, count, share)
    # sets of vectors are one mark each, larger than those of lines
    state, both = one["single"]
    assert stands(state, 1, 0.05)
    assert stands(both, 2, 0.091 + 0.1)
    assert one["widths"][0] > 1.5 * one["widths"][1]


def test_the_axis_of_layers_and_steps_has_whole_numbers_alone(one):
    # half a layer has no place of its own
    assert one["layers"] == ["0", "1"]
    steps = [float(text) for text in one["steps_shown"]]
    assert (steps[0], steps[-1]) == (10, 20)
    assert len(steps) >= 3
    assert all(step.is_integer() for step in steps)


def test_tables_are_sorted_by_number(one):
    up, down, nothing, names = one["sorted"]
    assert up == [f"{9.1 + i:.1f} %" for i in range(11)]
    assert down == up[::-1]
    assert nothing == ["-"] * 11
    assert names == [f"block {i}" for i in range(11)]


def test_two_models_of_equal_sources(probed):
    found = probed["same", 1280]
    assert found["titles"] == [
        ["WAV: all tokens, step 30", "Block AttnRes: all tokens, step 30", "second less first"],
        # the second text has no such token, the second run no such step
        ["WAV: vowel, 1,234 of them, step 30", "Block AttnRes: all tokens, step 30"],
        ["WAV: all tokens, step 10", "Block AttnRes: all tokens, step 30", "second less first"],
    ]
    assert found["cells"] == [
        "1 mlp takes 0.100 from embedding; most from running state 0.700, state 0 0.200, "
        "embedding 0.100",
        "1 mlp takes 0.350 from embedding; most from running state 0.700, embedding 0.350, "
        "state 0 0.200",
        "1 mlp differs by +0.250 from embedding",
        "0 mlp differs by \u22120.250 from running state",
        "0 attention has no source state 0",
    ]
    assert "embedding, WAV" in found["legend"]
    assert "embedding, Block AttnRes" in found["legend"]
    # whose text has no such token is not drawn in its place
    assert "embedding, WAV" in found["legend_of_class"]
    assert "embedding, Block AttnRes" not in found["legend_of_class"]
    assert found["bar"] == (
        "WAV: without layer 0 the loss is +0.5000 \u00b1 0.0625 nats; 25.0 % of the weight. "
        "Block AttnRes: without layer 0 the loss is +0.2500 \u00b1 0.1250 nats; 50.0 % of the "
        "weight"
    )
    assert found["bases"][0].startswith("the best vectors (PCA), WAV: 40.0 % of the updates'")
    assert found["bases"][1] == (
        "the best vectors (PCA), Block AttnRes: 100.0 % of the updates' energy by 2 of 2 vectors"
    )


def test_two_models_of_other_sources(probed):
    found = probed["real", 1280]
    assert found["titles"] == [["WAV: all tokens, step 12", "Block AttnRes: all tokens, step 12"]]
    assert found["runs"] == ["WAV", "Block AttnRes"]
