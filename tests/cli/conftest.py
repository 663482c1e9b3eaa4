import hashlib
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pytest

from resroute.cli import main

# one block of two layers: no note, and every method's code runs
TINY = (
    *("--layers", "2", "--blocks", "1", "--context", "32", "--steps", "4", "--batch", "2"),
    *("--precision", "float32", "--device", "cpu", "--set", "model.dim=16"),
    *("--set", "model.num_heads=2", "--set", "evaluation_windows=2"),
    *("--set", "peak_flops=1e11"),
)


@dataclass(frozen=True)
class Outcome:
    code: int | str | None
    out: str
    err: str


class Run(Protocol):
    def __call__(self, *arguments: str) -> Outcome: ...


class Refused(Protocol):
    def __call__(self, *arguments: str, says: str | tuple[str, ...] = ()) -> str: ...


class Train(Protocol):
    def __call__(self, *arguments: str) -> tuple[str, ...]: ...


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command line in this process."""

    def call(*arguments: str) -> Outcome:
        capsys.readouterr()
        try:
            code: int | str | None = main(arguments)
        except SystemExit as stop:
            code = stop.code
        return Outcome(code, *capsys.readouterr())

    return call


@pytest.fixture
def refused(run: Run, place: Path) -> Refused:
    """Runs a command that is a mistake; returns stderr, after it has checked the rules for it."""

    def call(*arguments: str, says: str | tuple[str, ...] = ()) -> str:
        before = tree(place)
        outcome = run(*arguments)
        assert outcome.code == 2, outcome
        lines = outcome.err.splitlines()
        assert 1 <= len(lines) <= 2, lines
        assert any(line.startswith("resroute") for line in lines)
        assert "Traceback" not in outcome.err
        for words in (says,) if isinstance(says, str) else says:
            assert words in outcome.err
        assert tree(place) == before
        return outcome.err

    return call


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a prepared corpus, `data/tiny`, and a finished run of it, `runs/base`."""
    folder = tmp_path_factory.mktemp("made")
    data = str(folder / "data/tiny")
    assert main(["data", "prepare", "storyworld", "--characters", "8000", "--out", data]) == 0
    assert main(["train", "--data", data, *TINY, "--out", str(folder / "runs/base")]) == 0
    return folder


@pytest.fixture
def place(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of `made`, the current folder of the test."""
    folder = tmp_path / "place"
    shutil.copytree(made, folder)
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def train() -> Train:
    """Arguments that train the tiny model, those given last."""

    def arguments(*more: str) -> tuple[str, ...]:
        return ("train", "--data", "data/tiny", *TINY, *more)

    return arguments


def tree(folder: Path) -> dict[str, str]:
    """Hash of every file, link and folder below `folder`, by its name."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = f"link to {path.readlink()}"
        elif path.is_file():
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        else:
            found[name] = "folder"
    return found
