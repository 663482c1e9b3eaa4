import errno
import io
import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from resroute.cli import main
from resroute.config import UserError
from resroute.data.sources import corpus_of
from resroute.training.trainer import Trainer

from .conftest import TINY, Outcome, Train, tree


def text_file(folder: Path) -> Path:
    path = folder / "a text.txt"
    path.write_text("the fox saw the box. " * 60)
    return path


def test_data_prepare_prints_what_it_made(run: Any, place: Path) -> None:
    text_file(place)
    outcome = run("data", "prepare", "a text.txt", "--out", "data/fox")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.splitlines() == [
        "data/fox: 12 symbols, separator none",
        "  train         1,134 tokens in 1 document",
        "  val              63 tokens in 1 document",
        "  test             63 tokens in 1 document",
    ]
    before = tree(place)
    assert run("data", "prepare", "a text.txt", "--out", "data/fox") == outcome
    assert tree(place) == before


def test_data_prepare_cleans_and_says_so(run: Any, place: Path) -> None:
    (place / "dirty.txt").write_bytes(b"\xef\xbb\xbf" + b"a fox\r\nand a box\r" * 20 + b"\0")
    outcome = run("data", "prepare", "dirty.txt", "--clean")
    assert outcome.code == 0
    assert outcome.out.splitlines()[-1] == (
        "  cleaned: 1 byte order marks, 20 crlf line ends, 20 cr line ends, 1 nul bytes"
    )
    tokens = json.loads((place / "data/dirty/meta.json").read_text())["tokenizer"]["symbols"]
    assert not {"\ufeff", "\r", "\0"} & set(tokens)


def test_a_text_of_undecodable_name(run: Any, place: Path) -> None:
    name = os.fsdecode(b"caf\xe9.txt")
    text_file(place).rename(place / name)
    outcome = run("data", "prepare", name)
    assert outcome.code == 0
    assert outcome.out.startswith("data/caf\\udce9: 12 symbols")
    assert run("train", *TINY, "--data", "data/" + name.removesuffix(".txt")).code == 0


def test_sources_of_a_corpus(place: Path) -> None:
    text = text_file(place)
    made = corpus_of(str(text), root=Path("data"))
    assert made.path.parent == Path("data")
    assert made.path.name.startswith("a text-")
    assert corpus_of(str(text)).fingerprint == made.fingerprint
    assert corpus_of(made.path.name).path == made.path
    assert corpus_of("tiny").fingerprint == corpus_of("data/tiny").fingerprint
    text.write_text("another fox saw a box. " * 60)
    edited = corpus_of(str(text))
    assert edited.path.name.startswith("a text-")
    assert edited.path != made.path
    assert corpus_of(str(text), clean=True).path.name == f"{edited.path.name}-clean"
    with pytest.raises(UserError, match="no such file"):
        corpus_of("huge")


def test_train_reuses_a_finished_run(run: Any, train: Any, place: Path) -> None:
    before = tree(place)
    times = {path: path.stat().st_mtime_ns for path in place.rglob("*")}
    outcome = run(*train("--out", "runs/base"))
    assert outcome.code == 0
    assert outcome.err == "runs/base is finished: reused (--fresh trains again)\n"
    assert outcome.out.splitlines()[0].split()[:3] == ["method", "layers", "seed"]
    assert outcome.out.endswith("\nruns/base\n")
    assert tree(place) == before
    assert {path: path.stat().st_mtime_ns for path in place.rglob("*")} == times


def test_what_reports_and_where_it_runs_is_not_another_run(
    run: Any, train: Any, place: Path
) -> None:
    outcome = run(*train("--out", "runs/base", "--set", "log_every=1", "--device", "auto"))
    assert "reused" in outcome.err


def test_fresh_keeps_every_old_run(run: Any, train: Any, place: Path) -> None:
    old = tree(place / "runs/base")
    for number in (1, 2):
        outcome = run(*train("--out", "runs/base", "--fresh"))
        assert outcome.code == 0
        assert "reused" not in outcome.err
        assert (place / f"runs/base.old-{number}").is_dir()
    assert tree(place / "runs/base.old-1") == old
    assert sorted(path.name for path in (place / "runs").iterdir()) == [
        "base", "base.old-1", "base.old-2",
    ]  # fmt: skip
    new = tree(place / "runs/base")
    weights = "checkpoints/step_000004/model.safetensors"
    assert new[weights] == old[weights]


def test_resume_without_a_run_starts_one(run: Any, train: Any, place: Path) -> None:
    outcome = run(*train("--out", "runs/new", "--resume"))
    assert outcome.code == 0
    weights = "checkpoints/step_000004/model.safetensors"
    assert tree(place / "runs/new")[weights] == tree(place / "runs/base")[weights]


def test_an_interrupted_run_goes_on(
    run: Any, train: Any, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ("--out", "runs/new", "--set", "checkpoint_every=2")
    real = Trainer._take_step

    def interrupted(trainer: Trainer) -> None:
        if trainer.step == 3:
            raise KeyboardInterrupt
        real(trainer)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_take_step", interrupted)
        outcome = run(*train(*settings))
    assert outcome.code == 130
    assert outcome.err.splitlines()[-2:] == [
        "stopped after step 3; newest checkpoint: step_000002",
        "resroute: interrupted; --resume goes on",
    ]
    assert outcome.out == ""
    assert not (place / "runs/new/summary.json").exists()
    # what a kill leaves behind is in nobody's way
    (place / "runs/new/checkpoints/.step_000003.0a1b2c3d.tmp").mkdir()
    (place / "runs/new/checkpoints/step_000003").mkdir()
    with (place / "runs/new/metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    assert run(*train(*settings)).code == 2
    outcome = run(*train(*settings, "--resume"))
    assert outcome.code == 0
    assert "resumed from runs/new/checkpoints/step_000002" in outcome.err
    weights = "checkpoints/step_000004/model.safetensors"
    assert tree(place / "runs/new")[weights] == tree(place / "runs/base")[weights]
    lines = (place / "runs/new/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 4, 4, 4]


def test_train_names_its_folder_after_the_run(run: Any, place: Path) -> None:
    outcome = run("train", "--data", "tiny", *TINY, "--seed", "3")
    path = Path(outcome.out.splitlines()[-1])
    assert path.parent == Path("runs/train")
    assert path.name.startswith("wav-L2-s3-")
    assert (path / "summary.json").is_file()


@pytest.mark.parametrize("out", ["runs/a b/c", "runs/\u00fcber \U0001f600", "--out=-dash", "link"])
def test_odd_names_of_run_folders(run: Any, train: Any, place: Path, out: str) -> None:
    (place / "behind").mkdir()
    (place / "link").symlink_to("behind")
    outcome = run(*train(*([out] if out.startswith("-") else ["--out", out])))
    folder = out.removeprefix("--out=")
    assert outcome.code == 0
    assert outcome.out.endswith(f"\n{folder}\n")
    assert (place / folder / "summary.json").is_file()
    assert (place / "link").is_symlink()


def test_settings_reach_the_configuration(run: Any, train: Any, place: Path) -> None:
    settings = ("residual.rho_max=null", "model.residual.detail_bias=-1", "steps=1", "steps=0")
    options = [part for setting in settings for part in ("--set", setting)]
    assert run(*train("--out", "runs/new", *options)).code == 0
    config = json.loads((place / "runs/new/config.json").read_text())
    assert config["model"]["residual"]["rho_max"] is None
    assert config["model"]["residual"]["detail_bias"] == -1.0
    assert config["steps"] == 0


def test_a_note_is_said_once(run: Any, train: Any, place: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        outcome = run(*train("--out", "runs/new", "--blocks", "2", "--steps", "0"))
    notes = [line for line in outcome.err.splitlines() if line.startswith("resroute: note:")]
    assert outcome.code == 0
    assert len(notes) == 1
    assert "phase and split bases coincide" in notes[0]
    assert run("sample", "runs/new", "--tokens", "1").err == ""


def test_sample_is_seeded_and_continues_the_prompt(run: Any, place: Path) -> None:
    first = run("sample", "runs/base", "--prompt", "The ", "--tokens", "40")
    assert (first.code, first.err) == (0, "")
    assert first.out.startswith("The ")
    assert run("sample", "runs/base", "--prompt", "The ", "--tokens", "40") == first
    other = run("sample", "runs/base", "--prompt", "The ", "--tokens", "40", "--seed", "1")
    assert other.out != first.out
    checkpoint = "runs/base/checkpoints/step_000004"
    assert run("sample", checkpoint, "--prompt", "The ", "--tokens", "40") == first
    assert run("sample", "runs/base", "--tokens", "0", "--prompt", "The ").out == "The \n"
    # longer than the context of 32
    long = "a" * 200
    assert run("sample", "runs/base", "--prompt", long, "--tokens", "2").out.startswith(long)


def test_sample_options(run: Any, place: Path) -> None:
    def sample(*options: str) -> str:
        outcome = run("sample", "runs/base", "--tokens", "12", *options)
        assert (outcome.code, outcome.err) == (0, "")
        return str(outcome.out)

    greedy = sample("--temperature", "0")
    assert sample("--top-k", "1") == greedy
    assert sample("--temperature", "1e-320") == greedy
    assert sample("--temperature", "0", "--stop", "") == greedy
    assert sample("--temperature", "0", "--stop", greedy[2]) == greedy[:3] + "\n"
    assert sample("--temperature", "0", "--count", "2") == f"--- 1\n{greedy}--- 2\n{greedy}"
    free = sample()
    assert sample("--top-p", "1", "--top-k", "1000000") == free
    assert 1 < len(free) <= 13


# model/generate.py: no token is left where top_p is below what the first token's share rounds to
def test_a_tiny_top_p_is_greedy(run: Any, place: Path) -> None:
    greedy = run("sample", "runs/base", "--tokens", "4", "--temperature", "0").out
    assert run("sample", "runs/base", "--tokens", "4", "--top-p", "1e-300").out == greedy


def test_a_report_whose_reader_goes_away_is_written(
    run: Any, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class GoneError(Exception):
        pass

    def gone(*_: object) -> None:
        raise GoneError

    monkeypatch.setattr("resroute.cli.commands._print_table", gone)
    with pytest.raises(GoneError):
        run("report", "runs", "--out", "page")
    assert (place / "page/report.html").is_file()
    assert (place / "page/runs.csv").is_file()


def test_a_report_without_matplotlib_says_what_it_has_found(
    run: Any, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    outcome = run("report", "runs", "--out", "page")
    assert outcome.code == 2
    assert "gap to floor" in outcome.out
    assert "resroute[report]" in outcome.err
    assert not (place / "page").exists()


def test_report(run: Any, place: Path) -> None:
    runs = tree(place / "runs/base")
    outcome = run("report", "runs", "--out", "page", "--title", "\udcff<b>\x00")
    assert (outcome.code, outcome.err) == (0, "")
    assert "\nHealth: no findings in " in outcome.out
    assert outcome.out.splitlines()[-8:] == [
        "wrote page/report.html",
        "      page/report.md",
        "      page/table.tex",
        "      page/figures/",
        "      page/runs.csv",
        "      page/curves.csv",
        "      page/depth_maps.json",
        "      page/findings.json",
    ]
    assert "<b>" not in (place / "page/report.html").read_text().split("<main>")[1]
    assert tree(place / "runs/base") == runs
    before = tree(place / "page")
    assert run("report", "runs/base", "--out", "page", "--title", "\udcff<b>\x00").code == 0
    assert before.keys() == tree(place / "page").keys()


@pytest.mark.filterwarnings("default:with one layer a block")
def test_demo_trains_three_methods_and_reuses_them(run: Any, place: Path) -> None:
    arguments = ("demo", "--data", "data/tiny", "--layers", "4", "--steps", "1")
    outcome = run(*arguments)
    assert outcome.code == 0
    for words in ("PreNorm", "Block AttnRes", "WAV", "writes:", "wrote runs/demo-tiny/report.html"):
        assert words in outcome.out
    before = tree(place)
    again = run(*arguments)
    assert again.code == 0
    assert again.err.count("is finished: reused (--fresh trains again)") == 3
    assert again.out == outcome.out
    assert tree(place) == before
    shutil.rmtree(place / "runs/demo-tiny")


@pytest.mark.parametrize("reason", [errno.EPIPE, errno.ENOSPC, errno.EIO])
def test_training_goes_on_where_nothing_can_be_told(
    place: Path, train: Train, monkeypatch: pytest.MonkeyPatch, reason: int
) -> None:
    class Gone(io.TextIOWrapper):
        def write(self, _: str) -> int:
            raise OSError(reason, os.strerror(reason))

    told = Gone(io.BytesIO())
    monkeypatch.setattr(sys, "stderr", told)
    assert main(train("--out", "runs/untold")) == 0
    assert (place / "runs/untold/summary.json").exists()
    # a mistake keeps its code
    assert main(train("--out", "runs/untold", "--steps", "5")) == 2
    assert told.buffer.getvalue() == b""


def test_the_script_exits_as_main_returns(made: Path) -> None:
    script = Path(sys.executable).parent / "resroute"
    if not script.exists():
        pytest.skip("resroute is not installed as a script")
    environment = {**os.environ, "PYTHONWARNINGS": "default", "OMP_NUM_THREADS": "1"}

    def start(command: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", "-c", f"set -o pipefail; {command}"],
            cwd=made, env={**environment, "R": str(script)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def ended(process: subprocess.Popen[str]) -> Outcome:
        out, err = process.communicate(timeout=60)
        return Outcome(process.returncode, out, err)

    # two at a time: they mostly import
    missing = start('"$R" sample nope')
    piped = start('"$R" sample runs/base --tokens 500 | head -c 3')
    said = "resroute: nope does not exist; name a run folder of `resroute train`\n"
    assert ended(missing) == Outcome(2, "", said)
    closed = start('"$R" sample runs/base --tokens 2 >&-')
    # whose reader has gone long before it speaks
    untold = start('"$R" sample nope 2> >(true)')
    found = ended(piped)
    assert (found.code, len(found.out), found.err) == (0, 3, "")
    if Path("/dev/full").exists():
        full = ended(start('"$R" sample runs/base --tokens 2 --count 2 >/dev/full'))
        assert full.code == 2
        assert "No space left on device" in full.err
        assert len(full.err.splitlines()) == 1
    assert ended(closed) == Outcome(0, "", "")
    assert ended(untold) == Outcome(2, "", "")


def test_main_reads_the_process_arguments(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["resroute", "sample", "nope"])
    assert main() == 2
    assert "nope does not exist" in capsys.readouterr().err


def test_a_table_that_is_piped_has_no_trailing_spaces_and_no_bold(run: Any, place: Path) -> None:
    shutil.copytree(place / "runs/base", place / "runs/again")
    outcome = run("report", "runs")
    assert outcome.code == 0
    lines = outcome.out.splitlines()
    assert lines == [line.rstrip() for line in lines]
    assert lines[0].startswith("method")
    assert "memory: peak resident size of the process" in lines
    assert "bold" not in outcome.out
