import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from resroute.experiments.inspect import write as writing

from .conftest import tree

DRAWING = b'<svg viewBox="0 0 9 9"><path d="M0 0"/></svg>'
NEWEST = "runs/base/checkpoints/step_000004"
QUICK = ("--windows", "2", "--without", "none")


@pytest.fixture(autouse=True)
def quick_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """One drawing in place of all of them, which take a second."""
    monkeypatch.setattr(writing, "images", lambda *_: iter([("measures", DRAWING)]))


@pytest.fixture
def other(run: Any, train: Any, place: Path) -> str:
    """A run of PreNorm beside the one that is there."""
    words = list(train("--out", "runs/other", "--method", "pre-norm", "--steps", "2"))
    blocks = words.index("--blocks")
    del words[blocks : blocks + 2]
    assert run(*words).code == 0
    return "runs/other"


def test_what_is_printed_and_written(run: Any, place: Path) -> None:
    before = tree(place)
    outcome = run("inspect", "runs/base", "--windows", "4")
    assert (outcome.code, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    assert lines == [line.rstrip() for line in lines]
    assert lines[1].startswith(
        "WAV, 2 layers, width 16, seed 0 \u00b7 step 4 \u00b7 4 windows of 32 tokens of tiny "
        "\u00b7 loss 3."
    )
    assert "Health: no findings" in lines
    words = [line.split() for line in lines]
    assert ["mean", "weight", "on", "all", "attention", "mlp", "readout"] in words
    heads = "layers effective sources update RMS read RMS update gradient (L2)"
    assert heads.split() in words
    for item in ("layer", "block", "source"):
        start = f"Growth of the loss without each {item}: "
        (line,) = [line for line in lines if line.startswith(start)]
        assert re.search(rf": ({item} \d|embedding|running|state|phase|split)", line)
        assert re.search(r" [+-]\d\.\d{4} \u00b1 \d\.\d{4}(,|$)", line)
    assert "Share of the energy of updates (block 0) that lies in state " in outcome.out
    assert lines[-3:] == [
        "wrote runs/base/inspect/inspect.html",
        "      runs/base/inspect/inspect.json",
        "      runs/base/inspect/figures/",
    ]
    # nothing else is touched
    after = tree(place)
    assert {name: after[name] for name in before} == before
    assert sorted(after.keys() - before.keys()) == [
        f"runs/base/inspect{name}"
        for name in (
            "", "/figures", "/figures/measures.png", "/figures/measures.svg", "/inspect.html",
            "/inspect.json",
        )
    ]  # fmt: skip
    loss = json.loads((place / "runs/base/inspect/inspect.json").read_text())["runs"][0]["loss"]
    assert f"loss {loss:.4f} nats a token" in lines[1]
    # the same again gives the same
    assert run("inspect", "runs/base", "--windows", "4") == outcome
    assert tree(place) == after


def test_nothing_is_left_out_unless_asked(run: Any, place: Path) -> None:
    assert "without each" not in run("inspect", "runs/base", *QUICK).out
    outcome = run("inspect", "runs/base", "--windows", "2", "--without", "block,site")
    assert outcome.out.count("Growth of the loss without each") == 2
    saved = json.loads((place / "runs/base/inspect/inspect.json").read_text())
    assert [found["by"] for found in saved["runs"][0]["importance"]] == ["block", "site"]
    assert len(saved["runs"][0]["importance"][1]["items"]) == 4


@pytest.mark.parametrize(
    ("arguments", "folder"),
    [
        (("runs/base",), "runs/base/inspect"),
        (("runs/base/",), "runs/base/inspect"),
        (("runs/base", "--best"), "runs/base/inspect-best"),
        ((NEWEST,), "runs/base/inspect-step_000004"),
        ((NEWEST, "--best"), "runs/base/inspect-step_000004-best"),
        (("runs/base", "--against", "runs/again"), "runs/base/inspect-against-again"),
        (("runs/base", "--against", NEWEST), "runs/base/inspect-against-step_000004"),
        (("runs/base", "--out", "site/a page"), "site/a page"),
    ],
)
def test_where_the_page_goes(
    run: Any, place: Path, arguments: tuple[str, ...], folder: str
) -> None:
    shutil.copytree(place / "runs/base", place / "runs/again")
    outcome = run("inspect", *arguments, *QUICK)
    assert (outcome.code, outcome.err) == (0, "")
    found = [str(path.parent.relative_to(place)) for path in place.rglob("inspect.html")]
    assert found == [folder]
    where = outcome.out.splitlines()[-3].removeprefix("wrote ")
    assert (place / where).samefile(place / folder / "inspect.html")


def test_from_within_a_run(run: Any, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = str(place / "data/tiny")
    monkeypatch.chdir(place / "runs/base")
    assert run("inspect", ".", *QUICK, "--data", data).code == 0
    assert (place / "runs/base/inspect/inspect.html").is_file()
    monkeypatch.chdir(place / NEWEST)
    assert run("inspect", ".", *QUICK, "--data", data).code == 0
    assert (place / "runs/base/inspect-step_000004/inspect.html").is_file()


def test_two_models(run: Any, place: Path, other: str) -> None:
    outcome = run("inspect", "runs/base", "--against", other, *QUICK, "--title", "Two <b>")
    assert (outcome.code, outcome.err) == (0, "")
    heads = [line for line in outcome.out.splitlines() if line.startswith("==")]
    assert heads == ["== WAV", "== PreNorm"]
    second = outcome.out.split("== PreNorm")[1]
    assert "PreNorm, 2 layers, width 16, seed 0 \u00b7 step 2 \u00b7" in second
    assert "mean weight on" not in second
    text = (place / "runs/base/inspect-against-other/inspect.html").read_text()
    assert "<h1>Two &lt;b&gt;</h1>" in text
    assert "different texts" not in text
    swapped = run("inspect", other, "--against", "runs/base", *QUICK)
    assert (place / "runs/other/inspect-against-base/inspect.html").is_file()
    assert "== PreNorm" in swapped.out.split("== WAV")[0]


def test_a_text_and_a_prompt(run: Any, place: Path) -> None:
    (place / "a text.txt").write_text("The cat ran home. " * 30)
    outcome = run("inspect", "runs/base", *QUICK, "--data", "a text.txt", "--prompt", "The cat")
    assert outcome.code == 0
    assert "2 windows of 32 tokens of a text" in outcome.out
    saved = json.loads((place / "runs/base/inspect/inspect.json").read_text())["runs"][0]
    assert saved["prompt"]["tokens"] == list("The cat")
    assert saved["corpus"] == "a text"


def test_mistakes(refused: Any, place: Path, other: str) -> None:
    base = ("inspect", "runs/base")
    says = "--without laer (did you mean 'layer'?); known: none, layer, block, site, source"
    refused(*base, "--without", "layer,laer", says=says)
    refused(*base, "--without", "none,layer", says="--without none; known: none, layer")
    refused("inspect", "runs/bse", says="runs/bse does not exist; name a run folder")
    refused("inspect", "runs", says="runs has no complete checkpoint; name a run folder")
    refused(*base, "--against", "runs/nope", says="runs/nope does not exist")
    refused(*base, "--data", "data/nope", says=("data/nope: no such file", "with --data"))
    refused(*base, "--data", "runs", says="no prepared corpus")
    refused(*base, "--ema", says="has no average of weights; train with ema_decay")
    refused(*base, "--windows", "0", says="--windows")
    refused(*base, "--device", "cuad", says="cuad")
    (place / "short.txt").write_text("The cat")
    refused(*base, "--data", "short.txt", says="short.txt: 7 tokens, too few for a window")
    (place / "odd.txt").write_text("The c@t ran home. " * 30)
    refused(*base, "--data", "odd.txt", says="odd.txt: characters outside the vocabulary: '@'")
    for out in ("short.txt", "short.txt/page"):
        refused(*base, "--out", out, says=f"{out}: cannot be made (Not a directory)")


def test_what_cannot_be_read_is_said_before_any_work(
    refused: Any, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(*_: Any, **__: Any) -> None:
        raise AssertionError("nothing was to be looked at")

    monkeypatch.setattr("resroute.cli.inspect.inspect_run", work)
    says = "characters outside the vocabulary: '@'; the first is at line 1, column 3"
    refused("inspect", "runs/base", "--prompt", "a @", says=says)
    refused("inspect", "runs/base", "--out", "data/tiny/meta.json", says="cannot be made")
    refused("inspect", "runs/base", "--against", "runs/nope", says="runs/nope does not exist")


def test_a_second_vocabulary_is_asked_early_too(
    refused: Any, run: Any, place: Path, train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "abc.txt").write_text("abc@ def. " * 200)
    assert run(*train("--data", "abc.txt", "--steps", "0", "--out", "runs/abc")).code == 0
    looked: list[Any] = []
    monkeypatch.setattr("resroute.cli.inspect.inspect_run", lambda *a, **_: looked.append(a))
    against = ("inspect", "runs/base", "--against", "runs/abc", "--prompt")
    refused(*against, "The", says="characters outside the vocabulary: 'T', 'h'")
    assert looked == []


def test_other_commands_do_not_mind_the_page(run: Any, train: Any, place: Path) -> None:
    settings = ("--out", "runs/new", "--set", "checkpoint_every=2")
    assert run(*train(*settings, "--steps", "2")).code == 0
    assert run("inspect", "runs/new", *QUICK).code == 0
    assert run("inspect", "runs/new/checkpoints/step_000002", *QUICK).code == 0
    page = tree(place / "runs/new/inspect")
    # a finished run is reused, and reported once
    assert "reused" in run(*train(*settings, "--steps", "2", "--resume")).err
    report = run("report", "runs", "--out", "site")
    assert (report.code, report.err) == (0, "")
    # a line of headings, and one a run
    assert (place / "site/runs.csv").read_text().count("\n") == 3
    (place / "runs/new/summary.json").unlink()
    outcome = run(*train(*settings, "--steps", "2", "--resume"))
    assert outcome.code == 0
    assert "resumed from runs/new/checkpoints/step_000002" in outcome.err
    assert tree(place / "runs/new/inspect") == page
    assert run("sample", "runs/new", "--tokens", "2").code == 0
    # a run that starts over takes its page along
    assert run(*train(*settings, "--steps", "2", "--fresh")).code == 0
    assert (place / "runs/new.old-1/inspect/inspect.html").is_file()
    assert not (place / "runs/new/inspect").exists()


def test_a_damaged_checkpoint_and_log(refused: Any, place: Path) -> None:
    (place / "runs/base/metrics.jsonl").write_text('{"kind": "train"}\n{"kind": "x", "step": 1}\n')
    says = "runs/base/metrics.jsonl line 1: names no kind or step; inspect a copy without it"
    refused("inspect", "runs/base", *QUICK, says=says)
    with (place / NEWEST / "model.safetensors").open("ab") as file:
        file.write(b"x")
    refused("inspect", "runs/base", *QUICK, says="model.safetensors: damaged")
