import dataclasses
import math
import sys
import xml.etree.ElementTree as ElementTree

import pytest

from resroute.analysis import find_runs
from resroute.analysis.figures import PALETTE
from resroute.config import UserError
from resroute.experiments.compare import compare
from resroute.experiments.report import views
from resroute.experiments.report.figures import chart_image, differences_image, shown_range
from resroute.experiments.report.looks import Look
from resroute.residual import WAV, PreNorm


def words(svg):
    nodes = ElementTree.fromstring(svg).iter()
    return {"".join(node.itertext()).strip() for node in nodes if node.tag.endswith("text")}


def line(y, *, low=None, high=None, x=None, name="a"):
    x = x or [float(i) for i in range(len(y))]
    none = (None,) * len(y)
    return views.Line(
        name=name, look=Look(colour=0, dash=0, marker=0), x=tuple(x), y=tuple(y),
        low=low or none, high=high or none, runs=((),) * len(y),
    )  # fmt: skip


def chart(*lines, style="curves", floor=None):
    panel = views.Panel(title="", lines=lines, floor=floor, floor_text="entropy floor")
    return views.Chart(name=style, x_label="x", y_label="y", panels=(panel,), style=style)


@pytest.fixture
def study(make_run, tmp_path):
    for seed in (0, 1):
        make_run(f"p{seed}", PreNorm(), seed=seed, final=0.8 + 0.01 * seed)
        make_run(f"w{seed}", WAV(num_blocks=4), seed=seed, final=0.7 + 0.02 * seed)
    make_run("w8", WAV(num_blocks=4), num_layers=8)
    return compare(find_runs(tmp_path / "runs"))


def test_curves_say_what_they_show(study):
    found = views.curves(study)
    svg = chart_image(found, "svg")
    assert words(svg) >= {
        "PreNorm", "WAV", "4 layers", "8 layers", "training tokens", "loss, nats/char",
        "the last third", "entropy floor 0.157 nats/char, lower bound",
    }  # fmt: skip
    text = svg.decode().lower()
    assert PALETTE[6].lower() in text
    assert PALETTE[4].lower() not in text


def test_trends_have_ticks_where_there_are_numbers(study):
    (found,) = views.trends(study)
    shown = words(chart_image(found, "svg"))
    assert shown >= {"4", "8", "layers", "PreNorm", "WAV"}
    assert "5" not in shown


def test_differences_are_named_with_their_seeds(study):
    shown = words(differences_image(views.differences(study), "svg"))
    assert "WAV \u2212 PreNorm, 4 layers (n=2)" in shown


def test_a_gap_shows_zero():
    found = chart(line([-2.0, -1.0, -1.0]), style="gap")
    assert shown_range(found, found.panels[0], 0.0) == (pytest.approx(-2.12), pytest.approx(0.12))


def test_the_first_steps_and_wide_intervals_do_not_squash_the_rest():
    found = chart(
        line([9.0, 2.0, 1.0], low=(None, -50.0, 0.9), high=(None, 50.0, 1.1), x=[0.0, 50.0, 100.0])
    )
    low, high = shown_range(found, found.panels[0], 0.06)
    # means span 1 .. 2; intervals have as much room again, and 6 % are left around
    assert (low, high) == (pytest.approx(0 - 0.18), pytest.approx(3 + 0.18))
    low, high = shown_range(found, found.panels[0], 2 / 3)
    assert (low, high) == (pytest.approx(0.9 - 0.012), pytest.approx(1.1 + 0.012))


def test_the_floor_belongs_to_the_whole_and_not_to_the_end():
    found = chart(line([3.0, 2.0, 1.5, 1.0]), floor=0.2)
    assert shown_range(found, found.panels[0], 0.06)[0] < 0.2
    assert shown_range(found, found.panels[0], 2 / 3)[0] > 0.2


def test_intervals_are_drawn_where_they_can_be_told_apart():
    one = line([3.0, 2.0, 1.0], low=(2.9, 1.9, 0.9), high=(3.1, 2.1, 1.1))
    for count, is_drawn in ((6, True), (7, False)):
        lines = [dataclasses.replace(one, name=f"line {i}") for i in range(count)]
        svg = chart_image(chart(*lines), "svg").decode()
        # bands are the only see-through areas
        assert ("fill-opacity: 0.13" in svg or "opacity: 0.13" in svg) == is_drawn


@pytest.mark.parametrize("values", [[], [math.pi], [2.0, 2.0]])
def test_little_data_still_draws(values):
    for style in ("curves", "trend", "gap"):
        found = chart(line(values), style=style)
        if values or style != "trend":
            assert chart_image(found, "png").startswith(b"\x89PNG")


def test_labels_are_text(make_run, tmp_path):
    make_run("a", label=r"_$\frac{ <b>&")
    make_run("b", label="\u6df1\u3044", seed=1)
    found = views.curves(compare(find_runs(tmp_path / "runs")))
    assert {r"$\frac{ <b>&", "\u6df1\u3044"} <= words(chart_image(found, "svg"))


def test_a_long_name_is_wrapped_in_the_legend():
    name = "a long label of a run that has, alas, many more words in it than fit"
    shown = words(chart_image(chart(line([1.0, 2.0], name=name)), "svg"))
    assert shown >= {"a long label of a run that has, alas, many more", "words in it than fit"}


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_the_same_study_gives_the_same_bytes(study, kind):
    found = views.gap(study)
    assert chart_image(found, kind) == chart_image(found, kind)


def test_without_matplotlib_there_is_a_hint(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"pip install 'resroute\[report\]'"):
        chart_image(chart(line([1.0])), "png")
