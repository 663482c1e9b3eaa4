import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from resroute import files
from resroute.training.metrics import MetricsFile

BAD_TEXTS: dict[str, tuple[bytes, tuple[str, ...]]] = {
    "empty.txt": (b"", ("is empty", "name a file with text")),
    "spaces.txt": (b" \n\n\t", ("no text but white space",)),
    "one.txt": (b"aaaa", ("only one distinct character, 'a'",)),
    "binary.txt": (bytes(range(256)) * 20, ("looks binary", "name a plain UTF-8")),
    "latin.txt": ("caf\u00e9 noir\n".encode("latin1") * 9, ("not UTF-8 at byte 3", "iconv")),
    "utf16.txt": ("hello".encode("utf-16"), ("is UTF-16", "iconv")),
    "cut.txt": ("hello \u00e9".encode()[:-1], ("middle of a UTF-8 character", "head -c 6")),
    "bom.txt": (b"\xef\xbb\xbfhello world", ("byte-order mark", "--clean")),
    "crlf.txt": (b"hello\r\nworld\r\n", ("line 1 ends in CRLF", "--clean")),
    "cr.txt": (b"hello\nworld\rhello", ("line 2 ends in CR;", "--clean")),
    "nul.txt": (b"hello world " * 9 + b"\0", ("NUL byte at offset 108", "--clean")),
    "two.txt": (b"ab", ("2 characters are too few", "add text")),
    "a b\x1b[31m.txt": (b"", ("a b\\x1b[31m.txt: is empty",)),
    "a\nb.txt": (b"hello", ("needs a name of one line, got 'in/a\\nb.txt'; rename it",)),
    "-dash.txt": (b"", ("-dash.txt: is empty",)),
    "\u00fcber \U0001f600.txt": (b"", ("\u00fcber \U0001f600.txt: is empty",)),
}


@pytest.mark.parametrize("name", BAD_TEXTS)
@pytest.mark.parametrize("command", ["data prepare", "train --data", "demo --data"])
def test_bad_texts(refused: Any, place: Path, command: str, name: str) -> None:
    content, says = BAD_TEXTS[name]
    (place / "in").mkdir()
    (place / "in" / name).write_bytes(content)
    refused(*command.split(), f"in/{name}", says=says)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nope.txt", "nope.txt: no such file"),
        ("storywolrd", "no such file"),
        ("in/nope.txt", "there is no folder in"),
        ("data/tiny/meta.jsn", "did you mean 'meta.json'?"),
        ("/dev/null", "not a regular file"),
        ("x" * 300, "File name too long"),
        ("\udcff", "no such file"),
    ],
)
@pytest.mark.parametrize("command", ["data prepare", "train --data", "demo --data"])
def test_missing_texts(refused: Any, command: str, name: str, says: str) -> None:
    refused(*command.split(), name, says=says)


def test_folders_where_a_text_or_a_corpus_is_needed(refused: Any, place: Path) -> None:
    refused("data", "prepare", "data", says="data: is a folder; name a text file in it")
    refused("train", "--data", "runs", says=("no prepared corpus", "resroute data prepare"))
    (place / "loop").symlink_to("loop")
    refused("data", "prepare", "loop", says="loop: no such file")
    (place / "text.txt").write_text("hello world. " * 20)
    refused("data", "prepare", "text.txt", "--out", "loop", says="loop: is a link to itself")
    refused("train", "--data", "loop", says="loop: no such file")


def test_a_text_shorter_than_the_context(refused: Any, run: Any, train: Any, place: Path) -> None:
    (place / "short.txt").write_text("hello world, " * 30)
    assert run("data", "prepare", "short.txt", "--out", "data/short").code == 0
    refused(*train("--data", "data/short"), says=("data/short", "too few", "lower the context"))


@pytest.mark.parametrize(
    ("out", "says"),
    [
        ("data/tiny", ("holds a corpus made otherwise", "name another folder with --out")),
        ("runs/base", ("is no prepared corpus", "name another folder with --out")),
        ("text.txt", ("is a file, not a folder", "name another folder with --out")),
        ("text.txt/below", ("text.txt/below: cannot be written", "check the folder")),
        ("y" * 300, ("File name too long", "check the path")),
    ],
)
def test_data_prepare_overwrites_nothing(
    refused: Any, place: Path, out: str, says: tuple[str, ...]
) -> None:
    (place / "text.txt").write_text("hello world. " * 20)
    refused("data", "prepare", "text.txt", "--out", out, says=says)


SETTINGS: dict[str, tuple[str, ...]] = {
    "": ("--set '': needs KEY=VALUE",),
    "=1": ("--set '=1': needs KEY=VALUE",),
    "steps": ("--set 'steps': needs KEY=VALUE",),
    "residual.type=wav": ("--set residual.type", "--method"),
    "model.residual.type=wav": ("--set model.residual.type", "--method"),
    "residual=wav": ("--set residual", "--method"),
    'model.residual={"type":"pre_norm"}': ("--set model.residual", "--method"),
    "residual.rho_mxa=1": ("no field 'rho_mxa' (did you mean 'rho_max'?)",),
    "stpes=3": ("no field 'stpes' (did you mean 'steps'?)",),
    "a\nb=3": ("--set 'a\\nb=3': needs KEY=VALUE",),
    "model..dim=3": ("no field ''",),
    "model.dim.x=3": ("no field 'x'",),
    "model=3": ("--set model: needs an object, got 3",),
    "model={}": ("--set model: the field 'vocab_size' is missing",),
    "steps=true": ("--set steps: needs a whole number, got True",),
    "steps=1.0": ("--set steps: needs a whole number, got 1.0",),
    "steps=" + "[" * 100_000: ("--set steps: needs a whole number, got '[[[",),
    "steps=" + "9" * 5000: ("--set steps: needs a whole number, got '999",),
    "learning_rate=NaN": ("--set learning_rate: needs a finite number, got nan",),
    "learning_rate=1e999": ("--set learning_rate: needs a finite number, got inf",),
    "learning_rate=1" + "0" * 400: ("--set learning_rate: needs a finite number",),
    "learning_rate=-1": ("learning_rate must be a finite number above 0",),
    "compile=yes": ("--set compile: needs true or false, got 'yes'",),
    "precision=fp8": ("--set precision: 'fp8' is not one of 'auto', 'float32', 'bfloat16'",),
    "model.dim=15": ("--set model: dim must be divisible by num_heads, got 15 and 2", "try 1"),
    "model.num_heads=0": ("num_heads must be a whole number of at least 1",),
    "model.vocab_size=5": ("vocab_size is 5", "data/tiny has 46"),
    "model.dropout=1": ("dropout must be at least 0 and below 1",),
    "residual.block_layers=1": ("give num_blocks or block_layers, not both (got 1 and 1)",),
    "residual.num_blocks=0": ("num_blocks must be a whole number of at least 1",),
    'residual.bases=["pase"]': ("unknown basis 'pase' (did you mean 'phase'?)",),
    "residual.bases=phase": ("residual.bases: needs a list, got 'phase'",),
    "residual.rho_max=nan": ("residual.rho_max: needs a number, got 'nan'",),
    "residual.detail_bias=NaN": ("residual.detail_bias: needs a finite number",),
    "accumulation=3": ("resroute: batch_size must be divisible by accumulation, got 2 and 3",),
    "evaluation_windows=0": ("evaluation_windows must be a whole number of at least 1",),
    "seed=-1": ("seed must be a whole number of at least 0",),
    "device=cud": ("unknown device 'cud' (did you mean 'cuda'?)",),
    "data=data/other": ("data/other: no such folder", "resroute data prepare"),
}


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda text: text[:30])
def test_settings(refused: Any, train: Any, setting: str) -> None:
    error = refused(*train("--out", "runs/new", "--set", setting), says=SETTINGS[setting])
    assert len(error) < 400


# the model is built after the run folder is made, or not bounded at all: training, model, residual
@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("residual.num_blocks=3", "num_blocks=3 is more than the stack's 2 layers; use at most 2"),
        ("seed=18446744073709551616", "seed"),
        ("batch_size=9999999999999999999999", "batch_size"),
        ("model.context=9999999999999999999999", "context"),
        ("model.mlp_ratio=1e300", "mlp_ratio"),
        ("residual.detail_bias=1e308", "detail_bias"),
        ("residual.eps=1e308", "eps"),
    ],
)
def test_settings_that_only_the_model_or_torch_refuses(
    refused: Any, train: Any, setting: str, says: str
) -> None:
    refused(*train("--out", "runs/new", "--set", setting), says=says)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--method", "prenorm"], "unknown method 'prenorm' (did you mean 'pre-norm'?)"),
        (["--method", ""], "unknown method ''; known: pre-norm"),
        (["--method", "pre-norm"], "the method pre-norm has no blocks; leave out --blocks"),
        (["--resume", "--fresh"], "--resume goes on and --fresh starts over: give one of them"),
        (["--lr", "nan"], "learning_rate must be a finite number above 0, got nan"),
        (["--lr", "0"], "learning_rate must be a finite number above 0, got 0.0"),
        (["--device", ""], "unknown device ''"),
        (["--device", "meta"], "device 'meta' is not supported"),
        (["--context", "9999"], "too few for a window of context 9999"),
        (["--out", "data/tiny"], "data/tiny exists and is not a run folder; give another"),
        (["--out", "data/tiny", "--fresh"], "exists and is not a run folder"),
        (["--out", "data/tiny/meta.json"], "meta.json is a file; give another folder"),
        (["--out", "data/tiny/meta.json/x"], "check the folder"),
        (["--out", "z" * 300], "File name too long"),
    ],
)
def test_options_that_do_not_fit(refused: Any, train: Any, options: list[str], says: str) -> None:
    refused(*train("--out", "runs/new", *options), says=says)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
@pytest.mark.parametrize("device", ["cuda", "cuda:3"])
def test_no_cuda_where_asked(refused: Any, train: Any, device: str) -> None:
    says = (f"device '{device}' was asked for", "use --device cpu")
    refused(*train("--out", "runs/new", "--device", device), says=says)
    refused("sample", "runs/base", "--device", device, says=says)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--prompt", "\U0001f600"], ("'\\U0001f600'", "line 1, column 1", "remove or replace")),
        (["--prompt", "The \u00e9"], ("'\\xe9'", "line 1, column 5", "remove or replace")),
        (["--prompt", "\udcff", "--count", "2"], ("'\\udcff'",)),
        (["--stop", "\u00e9"], ("'\\xe9'", "remove or replace")),
        (["--temperature", "-1"], ("temperature must be at least 0 and finite, got -1.0",)),
        (["--temperature", "nan"], ("temperature must be at least 0 and finite, got nan",)),
        (["--temperature", "inf"], ("temperature must be at least 0 and finite, got inf",)),
        (["--top-p", "0"], ("top_p must be above 0 and at most 1, got 0.0",)),
        (["--top-p", "1.01"], ("top_p must be above 0 and at most 1, got 1.01",)),
        (["--top-p", "nan"], ("top_p must be above 0 and at most 1, got nan",)),
    ],
)
def test_sample_refuses(refused: Any, options: list[str], says: tuple[str, ...]) -> None:
    refused("sample", "runs/base", *options, says=says)


@pytest.mark.parametrize(
    ("folder", "says"),
    [
        ("nope", "nope does not exist; name a run folder"),
        ("runs", "runs has no complete checkpoint; name a run folder"),
        ("data/tiny", "data/tiny has no complete checkpoint"),
        ("runs/base/checkpoints", "has no complete checkpoint"),
        ("x" * 300, "File name too long"),
        ("a\x1b[2J", "a\\x1b[2J does not exist"),
        ("a\nb", "needs a name of one line"),
    ],
)
def test_sample_without_a_run(refused: Any, folder: str, says: str) -> None:
    refused("sample", folder, says=says)


def test_report_refuses(refused: Any, place: Path) -> None:
    (place / "empty").mkdir()
    refused("report", "empty", says=("empty: no run in this folder", "resroute train"))
    refused("report", "nope", says="nope: no such folder")
    refused("report", "data/tiny/meta.json", says="meta.json: no such folder")
    refused("report", "z" * 300, says="File name too long")
    out = "data/tiny/meta.json"
    refused("report", "runs", "--out", out, says="choose another folder")
    refused("report", "runs", "--out", f"{out}/x", says="choose another folder")


@pytest.mark.parametrize("name", ["train.bin", "val.nats.bin", "meta.json"])
@pytest.mark.parametrize("content", [None, b"", b"\xff" * 9])
def test_damaged_corpora(
    refused: Any, train: Any, place: Path, name: str, content: bytes | None
) -> None:
    path = place / "data/tiny" / name
    path.unlink() if content is None else path.write_bytes(content)
    says = "prepare" if name == "meta.json" else f"data/tiny/{name}"
    refused(*train("--out", "runs/new"), says=(says, "prepare"))


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root reads everything")
def test_unreadable_files(refused: Any, place: Path) -> None:
    (place / "text.txt").write_text("hello world. " * 20)
    (place / "text.txt").chmod(0)
    refused("data", "prepare", "text.txt", says="text.txt: cannot be read (Permission denied)")
    refused("train", "--data", "text.txt", says="text.txt: cannot be read (Permission denied)")


@pytest.mark.parametrize("number", [28, 30])
def test_a_full_or_read_only_disk(
    run: Any, train: Any, place: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(path: Path) -> None:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(files, "flush", refuse)
    for arguments in (
        train("--out", "runs/new"),
        ("report", "runs", "--out", "page"),
        ("data", "prepare", "storyworld", "--characters", "3000", "--out", "data/new"),
    ):
        outcome = run(*arguments)
        assert outcome.code == 2
        # a report says what it has found before it is written
        assert ("WAV" if arguments[0] == "report" else "") in outcome.out
        assert "wrote" not in outcome.out
        assert outcome.out == "" or arguments[0] == "report"
        (line,) = outcome.err.splitlines()
        assert f"cannot be written ({os.strerror(number)}); check the folder" in line
    files_left = [path for path in place.rglob("*") if path.is_file() and "new" in path.parts]
    # held or not, a lock's file stays
    assert files_left == [place / "runs" / "new" / ".lock"]
    assert not list(place.rglob("*.tmp"))


def test_a_disk_that_fills_up_during_training(
    run: Any, train: Any, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: MetricsFile, record: Any) -> None:
        raise OSError(28, "No space left on device", str(file.path))

    monkeypatch.setattr(MetricsFile, "append", refuse)
    outcome = run(*train("--out", "runs/new"))
    assert outcome.code == 2
    last = "resroute: runs/new/metrics.jsonl: No space left on device; check the path and the disk"
    assert outcome.err.splitlines()[-1] == last
    assert not (place / "runs/new/summary.json").exists()


# safetensors has an error of its own, which checkpoint.save lets through
def test_a_disk_that_fills_up_at_a_checkpoint(
    run: Any, train: Any, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("resroute.training.tensors.save_file", refuse)
    outcome = run(*train("--out", "runs/new"))
    assert outcome.code == 2
    assert "No space left on device" in outcome.err.splitlines()[-1]


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"),
    ],
)
def test_out_of_memory(refused: Any, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("resroute.experiments.sample", refuse)
    refused("sample", "runs/base", "--count", "2", says="out of memory; use a smaller model")


def test_a_bug_of_ours_keeps_its_traceback(
    run: Any, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("resroute.experiments.sample", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        run("sample", "runs/base", "--count", "2")


def test_demo_on_a_file(refused: Any) -> None:
    out = "data/tiny/meta.json"
    refused("demo", "--data", "data/tiny", "--layers", "4", "--out", out, says=out)
