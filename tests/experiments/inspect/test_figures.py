"""Figures as files: what they say, of inspections made by hand."""

import math
import xml.etree.ElementTree as ElementTree

import pytest
from matplotlib.figure import Figure

from resroute.analysis.figures import PALETTE, depth_image
from resroute.experiments.importance import Ablation, Importance
from resroute.experiments.inspect import figures
from resroute.experiments.inspect.figures import images
from resroute.residual.base import by_kind

from .conftest import SITES, site, table_of


def words(svg):
    nodes = ElementTree.fromstring(svg).iter()
    return ["".join(node.itertext()).strip() for node in nodes if node.tag.endswith("text")]


def needs(*changes, mass=0.25):
    items = [
        Ablation(name=f"layer {i}", sites=(i,), change=change, error=0.01, mass=mass)
        for i, change in enumerate(changes)
    ]
    return Importance(by="layer", loss=2.5, windows=2, tokens=32, items=tuple(items))


RECORDS = tuple(
    {"kind": "routing", "step": step, "kinds": {"embedding": 0.5, "state": 0.5}}
    for step in (10, 20)
)


@pytest.fixture(scope="module")
def drawn(make_inspection):
    """Figures of two models, by name."""
    one = make_inspection(label="WAV", importance=(needs(0.5, -0.1),), records=RECORDS)
    other = make_inspection(importance=(needs(0.25, 0.1, mass=None),), past={10: table_of(SITES)})
    return dict(images([one, other], ["WAV", "$\\frac{ Block"], "svg"))


def test_figures_say_what_they_show(drawn):
    said = {name: words(svg) for name, svg in drawn.items()}
    assert list(said) == [
        "depth_weights", "kinds", "importance", "measures", "training", "bases",
    ]  # fmt: skip
    assert {"WAV", "$\\frac{ Block", "state 1", "1 mlp", "weight (sqrt scale)"} <= set(
        said["depth_weights"]
    )
    assert {
        "WAV, attention sites", "$\\frac{ Block, mlp sites", "embedding", "running state", "layer",
    } <= set(said["kinds"])  # fmt: skip
    # one legend of a figure, whatever number of panels
    assert said["kinds"].count("running state") == 1
    assert {
        "loss without each layer", "layer 0", "layer 1", "share of depth weight", "WAV",
    } <= set(said["importance"])  # fmt: skip
    assert {"size of updates", "update beside read", "mlp, WAV", "RMS"} <= set(said["measures"])
    assert {
        "WAV: weight by kind of source", "$\\frac{ Block: weight by kind, of checkpoints", "step",
    } <= set(said["training"])  # fmt: skip
    assert {
        "WAV, mean of the blocks", "state + phase", "the best vectors (PCA)", "vectors",
    } <= set(said["bases"])  # fmt: skip


def test_panels_of_kinds_share_their_scale(make_inspection):
    weights = [{**one, "weights": {n: w / 4 for n, w in one["weights"].items()}} for one in SITES]
    low = make_inspection([{**one, "kinds": by_kind(one["weights"])} for one in weights])
    limits = []
    for pairs in ([(low, "a"), (make_inspection(), "b")], [(low, "a")]):
        for _, draw in figures._kind_panels(pairs):
            axes = Figure().add_subplot()
            draw(axes)
            limits.append(axes.get_ylim())
    # the largest weight, of the embedding at the first site, and a margin
    assert limits[:4] == [(0, pytest.approx(1.04))] * 4
    assert limits[4:] == [(0, pytest.approx(0.26))] * 2


def test_a_map_of_few_sites_has_a_least_height():
    def height(count):
        sites = [site(i, f"{i} mlp", {"embedding": 1.0}) for i in range(count)]
        image = depth_image([("a", figures._weights(table_of(sites)))], "svg")
        return float(ElementTree.fromstring(image).attrib["height"].removesuffix("pt"))

    # 3.4 inches up to twenty sites, 0.085 more for each, 6.6 at most
    assert [height(n) for n in (1, 20)] == pytest.approx([244.8, 244.8], abs=0.1)
    assert [height(n) for n in (40, 200)] == pytest.approx([367.2, 475.2], abs=0.1)


def test_bars_have_the_colours_of_their_models(drawn):
    text = drawn["importance"].decode().lower()
    assert PALETTE[4].lower() in text
    assert PALETTE[6].lower() in text


def test_the_same_inspection_gives_the_same_bytes(make_inspection):
    one = make_inspection(importance=(needs(0.5),), tables={}, bases={"blocks": []})
    for kind in ("png", "svg"):
        first = dict(images([one], ["a"], kind))
        assert list(first) == ["importance", "measures"]
        assert dict(images([one], ["a"], kind)) == first


def test_what_is_not_known_is_not_drawn(make_inspection):
    sites = [{**one, "update_rms": None, "read_rms": None} for one in SITES]
    # a number that only the readout has
    sites[4] = {**sites[4], "effective_sources": 2.0}
    one = make_inspection(
        sites, importance=(needs(0.5, math.inf, math.nan),), bases={"blocks": []},
        tables={"all tokens": {**table_of(SITES), "weights": [[None] * 4] * 5}},
    )  # fmt: skip
    found = dict(images([one], ["a"], "svg"))
    assert list(found) == ["depth_weights", "kinds", "importance", "measures"]
    said = words(found["importance"])
    assert "layer 0" in said
    assert "layer 1" not in said
