import base64
import io
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest

from resroute.analysis.figures import (
    COLOURS,
    _loss_figure,
    _style,
    cuts_losses,
    depth_figure,
    loss_figure,
    routed_runs,
    smooth,
)
from resroute.analysis.runs import find_runs
from resroute.config import UserError


@pytest.fixture
def runs(make_run, tmp_path):
    make_run("p", label="PreNorm", method="pre_norm")
    make_run("w", routed=True)
    make_run("w1", routed=True, seed=1)
    return find_runs(tmp_path / "runs")


def words(path):
    return {
        "".join(node.itertext()).strip()
        for node in ElementTree.parse(path).iter()
        if node.tag.endswith("text")
    }


def test_smoothing_is_a_centred_mean():
    values = [float(i % 2) for i in range(100)]
    assert smooth(values)[0] == 0.0
    assert smooth(values)[1] == pytest.approx(1 / 3)
    assert smooth(values)[50] == pytest.approx(2 / 5)
    assert smooth([3.0, 1.0]) == [3.0, 1.0]
    assert smooth([]) == []


def test_the_loss_figure_says_what_it_shows(runs, tmp_path):
    loss_figure(runs, tmp_path / "loss.svg")
    assert words(tmp_path / "loss.svg") >= {
        "PreNorm", "WAV", "training, smoothed", "entropy floor 0.213 nats/char, exact",
        "training tokens", "loss, nats/char", "validation, the last third",
    }  # fmt: skip
    text = (tmp_path / "loss.svg").read_text().lower()
    assert COLOURS["wav"].lower() in text
    assert COLOURS["block_attn_res"].lower() not in text


def test_depths_have_panels_of_their_own(make_run, runs, tmp_path):
    make_run("deep", num_layers=4)
    loss_figure(find_runs(tmp_path / "runs"), tmp_path / "loss.svg")
    assert {"2 layers", "4 layers"} <= words(tmp_path / "loss.svg")


def test_where_runs_differ_in_length_the_end_is_that_of_each(make_run, runs, tmp_path):
    assert "share of the run" not in drawn_words(runs, tmp_path)
    make_run("short", label="Short", tokens=1000)
    found = drawn_words(find_runs(tmp_path / "runs"), tmp_path)
    assert found >= {"validation, the last third of each run", "share of the run", "100%"}
    assert "training tokens" not in found


def drawn_words(runs, folder):
    loss_figure(runs, folder / "loss.svg")
    return words(folder / "loss.svg")


def test_a_long_title_is_drawn_in_lines(make_run, tmp_path):
    make_run("a", label="a long label of a run that has, alas, many words in it", routed=True)
    found = find_runs(tmp_path / "runs")
    depth_figure(found, tmp_path / "maps.svg")
    assert words(tmp_path / "maps.svg") >= {
        "a long label of a run that has, alas,",
        "many words in it, 2 layers, seed 0",
    }


def test_whether_losses_are_cut_off(runs, make_run, tmp_path):
    # the first steps have 2.7 and 1.7, the rest 1.4 and less
    assert cuts_losses(runs)
    for run in runs:
        run.metrics[:] = [m for m in run.metrics if m["step"] > 2]
    assert not cuts_losses(runs)
    assert not cuts_losses([])


def test_the_legend_hides_no_line(make_run, runs, tmp_path):
    make_run("x", label="a long label of a run that has, alas, many words in it")
    with _style():
        figure = _loss_figure(find_runs(tmp_path / "runs"))
        figure.savefig(io.BytesIO(), format="png")
        whole, end = figure.axes
        legend = whole.get_legend().get_window_extent()
        ticks = [tick.get_window_extent() for tick in whole.get_xticklabels()]
        for other in (whole.get_window_extent(), end.get_window_extent(), *ticks):
            assert not legend.overlaps(other)
        # and stays as narrow as the panels, which keep their width
        assert legend.x1 < whole.get_window_extent().x1
        assert whole.get_window_extent().width > 0.7 * figure.bbox.width
    text = [entry.get_text() for entry in whole.get_legend().get_texts()]
    assert "a long label of a run that has, alas, many words\nin it" in text


def test_a_map_shows_its_numbers(runs, tmp_path):
    import matplotlib
    import numpy as np
    from matplotlib.image import imread

    depth_figure(runs, tmp_path / "maps.svg")
    text = (tmp_path / "maps.svg").read_text()
    assert words(tmp_path / "maps.svg") >= {
        "WAV, 2 layers, seed 0", "0 attention", "readout", "embedding", "phase 0",
        "weight (sqrt scale)",
    }  # fmt: skip
    data = re.search(r"data:image/png;base64,\s*([^\"]+)", text)
    assert data is not None
    pixels = imread(io.BytesIO(base64.b64decode(data.group(1))))[..., :3]
    assert pixels.shape == (5, 4, 3)
    viridis = matplotlib.colormaps["viridis"]
    expected = {(0, 0): 1.0, (1, 3): 0.75, (3, 0): 0.125, (4, 1): 0.5}
    for (row, column), weight in expected.items():
        np.testing.assert_allclose(
            pixels[row, column], viridis(weight**0.5)[:3], atol=0.01, err_msg=f"{row, column}"
        )
    for row, column in [(0, 1), (1, 2), (2, 3), (4, 2)]:
        np.testing.assert_allclose(pixels[row, column], 0xE9 / 255, atol=0.005)


def test_one_map_for_several_seeds(runs):
    assert [run.name for run in routed_runs(runs)] == ["w"]


@pytest.mark.parametrize("figure", [loss_figure, depth_figure])
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_same_runs_give_the_same_bytes(runs, tmp_path, figure, suffix):
    first, second = tmp_path / f"first.{suffix}", tmp_path / f"second.{suffix}"
    figure(runs, first)
    figure(runs, second)
    assert first.read_bytes() == second.read_bytes()
    assert len(first.read_bytes()) > 5000
    assert [path.name for path in tmp_path.glob("*.tmp")] == []


def test_labels_are_text(make_run, tmp_path):
    make_run("a", label=r"_$\frac{ <b>&", routed=True)
    make_run("b", label="\u6df1\u3044", seed=1)
    runs = find_runs(tmp_path / "runs")
    loss_figure(runs, tmp_path / "loss.svg")
    depth_figure(runs, tmp_path / "maps.svg")
    assert {r"$\frac{ <b>&", "\u6df1\u3044"} <= words(tmp_path / "loss.svg")
    assert r"$\frac{ <b>&, 2 layers, seed 0" in words(tmp_path / "maps.svg")


def test_a_run_without_metrics_still_draws(make_run, tmp_path):
    path = make_run("a", floor=None, tokens=0)
    (path / "metrics.jsonl").write_text("")
    loss_figure(find_runs(tmp_path / "runs"), tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_drawn_is_a_user_error(make_run, tmp_path, monkeypatch):
    make_run("a")
    runs = find_runs(tmp_path / "runs")
    with pytest.raises(UserError, match="none of the runs has a routed method"):
        depth_figure(runs, tmp_path / "maps.png")
    with pytest.raises(UserError, match=r"written as \.png or \.svg"):
        loss_figure(runs, tmp_path / "loss.pdf")
    with pytest.raises(UserError, match="cannot be written"):
        loss_figure(runs, tmp_path / "nowhere" / "loss.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"pip install 'resroute\[report\]'"):
        loss_figure(runs, tmp_path / "loss.png")


def test_importing_the_package_does_not_import_matplotlib():
    code = "import sys, resroute.analysis; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
