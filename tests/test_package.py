"""What people install: the wheel's and the sdist's contents; `make test-wheel` runs the wheel."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


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
    # what its tests and `make check` read
    assert {"scripts/gpu_study.sh", "scripts/docs_hooks.py", "mkdocs.yml"} <= names
    assert {"benchmarks/README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"} <= names
    assert "tests/test_package.py" in names
    assert "src/resroute/experiments/page/base.js" in names
    assert not any(name.startswith(("results/", "runs/", "build/", ".venv/")) for name in names)
