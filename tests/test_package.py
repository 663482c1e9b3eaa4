"""What people install: the wheel's and the sdist's contents, and a run from the wheel alone."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# from an environment whose resroute is the unpacked wheel, with this one's dependencies
SMOKE = """
import sys, tempfile
from pathlib import Path
import resroute as rr
assert "site" in rr.__file__, rr.__file__
from resroute.cli import main
from resroute.experiments.inspect.page import render_page
from resroute.experiments.page.html import document
text = document("t", "s", [], {}, "resroute.experiments.inspect", ("lines.js",))
assert "function drawMap" in text and "function lineFigure" in text
with tempfile.TemporaryDirectory() as folder:
    stories = str(Path(folder) / "stories")
    run = str(Path(folder) / "run")
    assert main(["data", "prepare", "storyworld", "--characters", "20000", "--out", stories]) == 0
    assert main(["train", "--data", stories, "--layers", "2", "--blocks", "1", "--context", "64",
                 "--steps", "2", "--set", "model.dim=16", "--set", "model.num_heads=2",
                 "--set", "evaluation_windows=2",
                 "--device", "cpu", "--precision", "float32", "--out", run]) == 0
    assert main(["sample", run, "--tokens", "5", "--device", "cpu"]) == 0
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder with the wheel and the sdist."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_wheel_has_the_package_and_nothing_else(built):
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    inside = {name for name in names if not name.split("/")[0].endswith(".dist-info")}
    package = ROOT / "src"
    kinds = (".py", ".js", ".css", ".cpp", ".h", ".typed")
    there = {
        str(path.relative_to(package))
        for path in package.rglob("*")
        if path.is_file() and path.suffix in kinds
    }
    assert inside == there
    assert "resroute/py.typed" in inside
    assert sum(name.endswith((".js", ".css")) for name in inside) >= 10
    ends = {Path(name).name for name in names} - {Path(name).name for name in inside}
    assert ends == {"METADATA", "WHEEL", "entry_points.txt", "LICENSE", "NOTICE", "RECORD"}


def test_the_sdist_builds_and_tests(built):
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames()}
    wanted = {"pyproject.toml", "README.md", "LICENSE", "Makefile", "constraints.txt"}
    assert wanted <= names
    assert "tests/test_package.py" in names
    assert "src/resroute/experiments/page/base.js" in names
    assert not any(name.startswith(("results/", "runs/", "build/", ".venv/")) for name in names)


def test_it_runs_from_the_wheel_alone(built, tmp_path):
    (wheel,) = built.glob("*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SMOKE],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
