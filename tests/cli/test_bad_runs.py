import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

CHECKPOINT = "runs/base/checkpoints/step_000004"


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def _weights(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        weights = load_file(path)
        change(weights)
        save_file(weights, path)

    return apply


def _state(**fields: Any) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        state = json.loads(path.read_text())
        for name, value in fields.items():
            state.pop(name) if value is None else state.update({name: value})
        path.write_text(json.dumps(state))

    return apply


HEAD = "head.weight"
# as it happens
DAMAGE: list[tuple[str, Callable[[Path], Any], str]] = [
    ("model.safetensors", _cut, "model.safetensors: truncated; use another checkpoint"),
    ("model.safetensors", lambda p: p.write_bytes(b""), "model.safetensors: truncated"),
    ("model.safetensors", _weights(lambda w: w[HEAD].fill_(1.0)), "model.safetensors: damaged"),
    ("state.json", lambda p: p.write_bytes(b"\xff"), "no UTF-8 at byte 0"),
    ("state.json", lambda p: p.write_text(""), "damaged JSON"),
    ("state.json", lambda p: p.write_text("[]"), "not a JSON object"),
    ("state.json", lambda p: p.write_text("[" * 100_000), "nested too deeply"),
    ("state.json", _state(format_version=99), "format version 99 is not 2"),
    ("state.json", _state(step=3), "state.json: was changed after it was written"),
]
# with checksums that fit
DECEPTION: list[tuple[str, Callable[[Path], Any], str]] = [
    ("model.safetensors", _cut, "damaged or truncated; use another checkpoint"),
    ("model.safetensors", lambda p: p.write_bytes(b""), "damaged or truncated"),
    ("model.safetensors", _weights(lambda w: w.pop(HEAD)), f"lacks {HEAD}; use another"),
    ("model.safetensors", _weights(lambda w: w.update(x=w[HEAD] * 1)), "unknown tensor x"),
    ("model.safetensors", _weights(lambda w: w.update({HEAD: torch.ones(3)})), "has shape (3,)"),
    ("model.safetensors", _weights(lambda w: w[HEAD].fill_(torch.nan)), "non-finite values"),
    ("model.safetensors", _weights(lambda w: w[HEAD][0].fill_(-torch.inf)), "non-finite"),
    ("state.json", _state(config=None), "incomplete ('config')"),
    ("state.json", _state(config={"data": "x"}), "the field 'model' is missing"),
    ("state.json", _state(step="four"), "incomplete"),
    ("state.json", _state(tokenizer={"type": "bytes"}), "needs the type 'character'"),
    ("state.json", _state(tokenizer={"type": "character", "symbols": ["ab"]}), "symbol 0"),
]


CASES = [(False, *case) for case in DAMAGE] + [(True, *case) for case in DECEPTION]


@pytest.mark.parametrize(("signed", "name", "damage", "says"), CASES)
def test_damaged_checkpoints(
    refused: Any, place: Path, sign_checkpoint: Any,
    signed: bool, name: str, damage: Callable[[Path], Any], says: str,
) -> None:  # fmt: skip
    damage(place / CHECKPOINT / name)
    if signed:
        sign_checkpoint(place / CHECKPOINT)
    error = refused("sample", "runs/base", says=(CHECKPOINT, says))
    assert len(error) < 300


@pytest.mark.parametrize(("signed", "name", "damage", "says"), CASES)
def test_resume_from_a_damaged_checkpoint(
    refused: Any, train: Any, place: Path, sign_checkpoint: Any,
    signed: bool, name: str, damage: Callable[[Path], Any], says: str,
) -> None:  # fmt: skip
    (place / "runs/base/summary.json").unlink()
    damage(place / CHECKPOINT / name)
    if signed:
        sign_checkpoint(place / CHECKPOINT)
    refused(
        *train("--out", "runs/base", "--resume"),
        says=("runs/base: none of its 1 checkpoints can be used", CHECKPOINT, says),
    )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            ["--seed", "1"],
            ("another configuration", "differs in seed (0 there, 1 here)", "--out", "--fresh"),
        ),
        (["--steps", "5", "--lr", "1"], ("differs in steps (4 there, 5 here), ",)),
        (["--set", "residual.rho_max=1"], ("model.residual.rho_max (2.0 there, 1.0 here)",)),
        (["--method", "block-attn-res"], ("another configuration", "model.residual.type")),
        (["--data", "data/other"], ("trained on the corpus 'tiny'", "not on 'other'", "--out")),
    ],
)
@pytest.mark.parametrize("resume", [False, True])
def test_a_run_of_another_configuration_or_corpus(
    refused: Any, run: Any, train: Any, options: list[str], says: tuple[str, ...], resume: bool
) -> None:
    arguments = ["data", "prepare", "storyworld", "--characters", "9000", "--out", "data/other"]
    assert run(*arguments).code == 0
    more = ["--resume"] if resume else []
    refused(*train("--out", "runs/base", *options, *more), says=("runs/base", *says))


def test_a_run_of_another_vocabulary(refused: Any, run: Any, train: Any, place: Path) -> None:
    (place / "text.txt").write_text("hello world, " * 100)
    assert run("data", "prepare", "text.txt", "--out", "data/text").code == 0
    arguments = train("--data", "data/text", "--out", "runs/base")
    there = "another vocabulary, only there '!', '\"', '.', 'A', "
    says = (
        "trained on the corpus 'tiny'",
        "not on 'text'",
        there,
        "\ngive another folder with --out",
    )
    refused(*arguments, says=says)
    refused(*arguments, "--resume", says=says)
    for folder in (place / "runs/base/checkpoints").iterdir():
        (folder / "state.json").write_text("{")
    refused(*arguments, "--resume", says="text or vocabulary differ")


def test_an_unfinished_run(refused: Any, train: Any, place: Path) -> None:
    (place / "runs/base/summary.json").unlink()
    says = ("unfinished run, stopped after step_000004", "--resume goes on, --fresh starts over")
    refused(*train("--out", "runs/base"), says=says)
    shutil.rmtree(place / "runs/base/checkpoints")
    refused(*train("--out", "runs/base"), says="stopped before its first checkpoint")
    refused("sample", "runs/base", says="runs/base has no complete checkpoint")
    refused("report", "runs", says=("no finished run", "not finished: base"))


RUN_DAMAGE = {
    "config.json": ["", "[]", "{}", '{"format_version": 1}', '{"format_version": 2}', "\ud800"],
    "summary.json": ["", "[]", "{}", '{"format_version": 1}'],
    "metrics.jsonl": ["x\n{}\n", "[]\n[]\n"],
}


@pytest.mark.parametrize(
    ("name", "text"), [(name, text) for name, texts in RUN_DAMAGE.items() for text in texts]
)
def test_half_written_or_damaged_run_folders(
    refused: Any, train: Any, place: Path, name: str, text: str
) -> None:
    (place / "runs/base" / name).write_text(text, errors="surrogatepass")
    # a report takes no more from config.json than that it is an object
    if name in ("summary.json", "metrics.jsonl"):
        refused("report", "runs", says=f"runs/base/{name}")
    if name == "metrics.jsonl":
        (place / "runs/base/summary.json").unlink()
    refused(*train("--out", "runs/base", "--resume"), says=f"runs/base/{name}")


# training reads it without looking: metrics.py rewind
def test_metrics_without_their_fields(refused: Any, train: Any, place: Path) -> None:
    (place / "runs/base/summary.json").unlink()
    (place / "runs/base/metrics.jsonl").write_text('{"kind": "train"}\n{}\n')
    refused(*train("--out", "runs/base", "--resume"), says="runs/base/metrics.jsonl")
