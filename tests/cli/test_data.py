"""`data prepare`, `data describe` and `facts` on the command line."""

import gzip
import os
import signal
from pathlib import Path
from typing import Any

import pytest

import resroute as rr
from resroute.data import prepare

STORY = "Tom had a café. He saw the cat.\nIt sat.\n<|endoftext|>\n"


def test_tokens_of_every_kind(run: Any, place: Path) -> None:
    (place / "tales.txt").write_text("".join(STORY.replace("cat", f"cat {i}") for i in range(60)))
    assert run("data", "prepare", "tales.txt").code == 0
    assert run("data", "prepare", "tales.txt", "--tokens", "300").code == 0
    corpus = rr.open_corpus(place / "data/tales-300")
    assert corpus.tokenizer.vocab_size <= 300
    (place / "other.txt").write_text("Tom saw a dog, ü!\n<|endoftext|>\n" * 60)
    refusal = run("data", "prepare", "other.txt", "--tokens", "data/tales")
    assert refusal.code == 2
    assert "outside the given vocabulary" in refusal.err
    skipped = run("data", "prepare", "other.txt", "--tokens", "data/tales", "--unknown", "skip")
    assert skipped.code == 0
    assert "left out: " in skipped.out
    wrong = run("data", "prepare", "other.txt", "--tokens", "no.json", "--out", "data/x")
    assert (wrong.code, "no.json: the file is missing" in wrong.err) == (2, True)
    # trained on and sampled from, with bytes of characters split over tokens
    arguments = "train --data data/tales-300 --layers 2 --context 32 --steps 3 --out runs/bpe"
    trained = run(
        *arguments.split(),
        "--method",
        "pre-norm",
        "--set",
        "model.dim=12",
        "--set",
        "model.num_heads=2",
    )
    assert trained.code == 0
    assert "nats/char" in trained.out
    sampled = run("sample", "runs/bpe", "--prompt", "Tom é", "--tokens", "20")
    assert sampled.code == 0
    assert sampled.out.startswith("Tom é")


def test_packed_repaired_and_described(run: Any, place: Path) -> None:
    text = "It is Tomâ€™s cat.\nIt sat.\n<|endoftext|>\n" * 50
    (place / "tales.txt.gz").write_bytes(gzip.compress(text.encode()))
    described = run("data", "describe", "tales.txt.gz")
    assert described.code == 0
    assert "50 places look wrongly decoded" in described.out
    assert run("data", "prepare", "tales.txt.gz", "--repair").code == 0
    corpus = rr.open_corpus(place / "data/tales-repair")
    decoded = corpus.tokenizer.decode(corpus.tokens("val"))
    assert decoded.startswith("It is Tom\u2019s cat.\n")
    assert corpus.meta.source["cleaned"]["repaired_lines"] == 50
    found = run("data", "describe", "data/tales-repair", "--order", "3")
    assert found.code == 0
    assert "n-gram models" in found.out


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ("", "tales"),
        ("--tokens characters --separator auto --unknown error --clean", "tales"),
        ("--separator none --unknown byte --repair", "tales-none-byte-repair"),
        ("--tokens data/tiny --unknown skip", "tales-tiny-skip"),
    ],
)
def test_other_options_make_another_folder(run: Any, place: Path, options: str, name: str) -> None:
    (place / "tales.txt").write_text(STORY.replace("é", "e") * 60)
    outcome = run("data", "prepare", "tales.txt", *options.split())
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.startswith(f"data/{name}: ")


def test_what_is_no_tokenizer(refused: Any, place: Path) -> None:
    (place / "tales.txt").write_text(STORY * 60)
    says = "data/typo: the file is missing; name a tokenizer.json of the package `tokenizers`, or a"
    refused("data", "prepare", "tales.txt", "--tokens", "data/typo", says=says)
    says = "--unknown skip has no use for subwords"
    refused("data", "prepare", "tales.txt", "--tokens", "300", "--unknown", "skip", says=says)


@pytest.mark.parametrize("command", ["data prepare", "train --data", "demo --data"])
def test_sigterm_leaves_nothing_behind(
    run: Any, place: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    (place / "tales.txt").write_text(STORY * 60)
    before = sorted(place.rglob("*"))

    def stop(*_: object, **__: object) -> None:
        assert list(place.glob("data/.tales*.tmp/train.bin"))
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(prepare, "write_meta", stop)
    former = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        assert run("data", "prepare", "storyworld", "--out", "data/tiny").code == 2
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
        outcome = run(*command.split(), "tales.txt")
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, former)
    assert (outcome.code, outcome.out) == (143, "")
    assert outcome.err.splitlines()[-1].startswith("resroute: terminated")
    assert sorted(place.rglob("*")) == before


def test_text8_from_a_file_is_checked(run: Any, place: Path) -> None:
    (place / "text8").write_text("not that text")
    refusal = run("data", "prepare", "text8", "--from", "text8")
    assert refusal.code == 2
    assert "is not text8" in refusal.err


def test_a_dump_of_wikipedia(run: Any, place: Path) -> None:
    (place / "wiki.xml").write_text("<page><text>A [[b|C]] 2.</text></page>\n" * 200)
    assert run("data", "prepare", "wiki.xml", "--wikipedia").code == 0
    corpus = rr.open_corpus(place / "data/wiki")
    assert corpus.tokenizer.decode(corpus.tokens("train")).startswith(" a c two a c two")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("storyworld --tokens 300", "--tokens has no use for storyworld"),
        ("storyworld --from x", "--from has no use for storyworld"),
        ("text8 --length 3", "--length has no use for text8"),
        ("x.txt --held-out 0.2", "--held-out has no use for x.txt"),
        ("storyworld --held-out 0.9", "held_out"),
    ],
)
def test_options_of_another_source(run: Any, place: Path, arguments: str, says: str) -> None:
    outcome = run("data", "prepare", *arguments.split())
    assert outcome.code == 2
    assert says in outcome.err


def test_facts_of_a_run(run: Any, place: Path) -> None:
    arguments = (
        "data prepare storyworld --entities 2 --held-out 0.2 --characters 60000 --out data/hard"
    )
    assert run(*arguments.split()).code == 0
    arguments = (
        "train --data data/hard --layers 2 --context 640 --steps 1 --batch 1 --out runs/hard"
    )
    assert run(
        *arguments.split(), "--method", "pre-norm", "--set", "model.dim=12", "--set",
        "model.num_heads=2", "--set", "evaluation_windows=1",
    ).code == 0  # fmt: skip
    scored = run("facts", "runs/hard", "--stories", "4")
    assert scored.code == 0
    for word in ("seen", "held out", "chance", "blind"):
        assert word in scored.out
