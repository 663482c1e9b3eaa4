import base64
import io
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest

from resroute.analysis.figures import depth_figure, depth_image, limits
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


def test_axes_have_a_little_room():
    assert limits([1.0, 3.0]) == pytest.approx((0.88, 3.12))
    assert limits([2.0, 2.0]) is None
    assert limits([]) is None


def test_a_long_title_is_drawn_in_lines(make_run, tmp_path):
    make_run("a", label="a long label of a run that has, alas, many words in it", routed=True)
    found = find_runs(tmp_path / "runs")
    depth_figure(found, tmp_path / "maps.svg")
    assert words(tmp_path / "maps.svg") >= {
        "a long label of a run that has, alas,",
        "many words in it, 2 layers, seed 0",
    }


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


def test_one_map_for_several_seeds(runs, tmp_path):
    depth_figure(runs, tmp_path / "maps.svg")
    assert "WAV, 2 layers, seed 1" not in words(tmp_path / "maps.svg")


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_same_runs_give_the_same_bytes(runs, tmp_path, suffix):
    first, second = tmp_path / f"first.{suffix}", tmp_path / f"second.{suffix}"
    depth_figure(runs, first)
    depth_figure(runs, second)
    assert first.read_bytes() == second.read_bytes()
    assert len(first.read_bytes()) > 5000
    assert [path.name for path in tmp_path.glob("*.tmp")] == []


def test_labels_are_text(make_run, tmp_path):
    make_run("a", label=r"_$\frac{ <b>&", routed=True)
    make_run("b", label="\u6df1\u3044", seed=1, routed=True)
    depth_figure(find_runs(tmp_path / "runs"), tmp_path / "maps.svg")
    assert words(tmp_path / "maps.svg") >= {
        r"$\frac{ <b>&, 2 layers, seed 0",
        "\u6df1\u3044, 2 layers, seed 1",
    }


def test_what_cannot_be_drawn_is_a_user_error(runs, make_run, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="none of the runs has a routed method"):
        depth_figure([run for run in runs if run.label == "PreNorm"], tmp_path / "maps.png")
    with pytest.raises(UserError, match=r"written as \.png or \.svg"):
        depth_figure(runs, tmp_path / "maps.pdf")
    with pytest.raises(UserError, match="cannot be written"):
        depth_figure(runs, tmp_path / "nowhere" / "maps.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"pip install 'resroute\[report\]'"):
        depth_image([("", run.depth_weights) for run in runs if run.depth_weights], "png")


def test_importing_the_package_does_not_import_matplotlib():
    code = "import sys, resroute.experiments; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
