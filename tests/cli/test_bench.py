import json
from pathlib import Path
from typing import Any

import pytest

TINY = (
    *("--layers", "2", "--blocks", "1", "--dim", "16", "--batch", "1", "--context", "8"),
    *("--pairs", "2", "--precision", "float32", "--device", "cpu", "--backends", "lean"),
)


@pytest.fixture(autouse=True)
def no_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resroute.ops.native.available", lambda: False)


def test_a_case_prints_its_table_and_writes_every_pair(run: Any, place: Path) -> None:
    options = ("--no-compile", "--methods", "haares,wav,wav", "--threads", "1")
    outcome = run("bench", "step", *TINY, *options, "--out", "step.json")
    assert outcome.code == 0
    table = outcome.out.splitlines()
    assert [line.split()[0] for line in table[:4]] == ["what", "PreNorm", "HAARES", "WAV"]
    assert table[5:8] == [
        "ratio: time over that of `against` (median of 2 pairs); less is better",
        "fewer than 6 pairs: no interval",
        "2 layers, width 16, 1 block, 1 x 8 tokens, float32, not compiled, 1 thread",
    ]
    assert max(map(len, table)) <= 80
    assert table[-1] == "wrote step.json"
    assert "HAARES on lean: 2 pairs" in outcome.err
    result = json.loads((place / "step.json").read_text())
    assert [len(row["pairs"]) for row in result["rows"]] == [2, 2, 2]
    assert result["complete"] is True
    assert result["settings"]["layers"] == 2
    assert result["settings"]["compile"] is False
    assert result["machine"]["device"].endswith(", 1 thread)")
    assert str(place) not in json.dumps(result)


def test_an_interrupted_case_leaves_what_was_finished(
    run: Any, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = []

    def begin(_: Any, label: str, total: int) -> None:
        began.append(label)
        if len(began) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("resroute.cli.bench._Progress.begin", begin)
    outcome = run("bench", "step", *TINY, "--no-compile", "--out", "step.json")
    assert outcome.code == 130
    last = outcome.err.splitlines()[-1]
    assert last == "resroute: interrupted; finished comparisons, if any, are in step.json"
    result = json.loads((place / "step.json").read_text())
    assert [row["name"] for row in result["rows"]] == ["PreNorm"]
    assert result["complete"] is False
    assert not list(place.glob(".*"))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "required: CASE"),
        (("stp",), "unknown 'stp' (did you mean 'step'?)"),
        (("step", "--layrs", "3"), "did you mean '--layers'?"),
        (("step", "--pairs", "0"), "needs a whole number from 1"),
        (("step", "--precision", "fp8"), "use auto, float32, bfloat16"),
        (("step", "--methods", "wavv"), "unknown method 'wavv' (did you mean 'wav'?)"),
        (("step", "--methods", ","), "--methods needs a name"),
        (("step", "--backends", "leann"), "unknown backend 'leann' (did you mean 'lean'?)"),
        (("step", "--backends", "native"), "backend 'native' was asked for, but no C++ compiler"),
        (("step", "--dim", "15"), "dim must be even, got 15"),
        (
            ("step", "--layers", "2", "--blocks", "3"),
            "--blocks 3 is more than the stack's 2 layers; use at most 2",
        ),
        (("step", "--blocks", "49"), "--blocks 49 is more than the stack's 48 layers"),
        (("step", "--device", "tpu"), "unknown device 'tpu'"),
        (("step", "--out", "runs"), "runs exists: name a new file"),
        (("step", "--out", "no/such.json"), "there is no folder no"),
        (("memory", "--pairs", "3"), "the case memory has no use for --pairs"),
        (("decode", "--no-compile"), "the case decode has no use for --compile"),
        (("mixer", "--methods", "wav"), "the case mixer has no use for --methods"),
        (("mixer", "--precision", "bfloat16"), "the case mixer has no use for --precision"),
    ],
)
def test_mistakes(refused: Any, arguments: tuple[str, ...], says: str) -> None:
    small = () if "--dim" in arguments else ("--dim", "8")
    refused("bench", *arguments, *(small if arguments else ()), says=says)
