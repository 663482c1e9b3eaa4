"""What the command says where several processes run it, or seem to."""

from pathlib import Path
from typing import Any

import pytest

from .conftest import Outcome

TOGETHER = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}


@pytest.mark.parametrize("mistake", [("train", "--nope"), ("trian",), ("sample", "nope")])
def test_one_of_several_processes_says_a_mistake(
    run: Any, place: Path, monkeypatch: pytest.MonkeyPatch, mistake: tuple[str, ...]
) -> None:
    alone = run(*mistake)
    assert (alone.code, alone.out) == (2, "")
    assert 1 <= len(alone.err.splitlines()) <= 2
    for name, value in TOGETHER.items():
        monkeypatch.setenv(name, value)
    for rank, err in (("0", alone.err), ("1", "")):
        monkeypatch.setenv("RANK", rank)
        assert run(*mistake) == Outcome(2, "", err)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("WORLD_SIZE", "two", "WORLD_SIZE is 'two'"),
        ("RANK", None, "RANK is not set"),
        ("RANK", "-1", "RANK is '-1'"),
        ("RANK", "2", "RANK is 2, but WORLD_SIZE is 2"),
        ("LOCAL_RANK", "x", "LOCAL_RANK is 'x'"),
        ("MASTER_PORT", None, "MASTER_PORT is not set"),
        ("MASTER_ADDR", None, "MASTER_ADDR is not set"),
    ],
)
def test_an_environment_that_torchrun_does_not_make(
    refused: Any,
    train: Any,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: str | None,
    says: str,
) -> None:
    for key, text in {**TOGETHER, "RANK": "0", name: value}.items():
        if text is None:
            monkeypatch.delenv(key, raising=False)
        else:
            monkeypatch.setenv(key, text)
    remedy = "; start several processes by torchrun, or unset WORLD_SIZE for one"
    refused(*train("--out", "runs/new"), says=says + remedy)
