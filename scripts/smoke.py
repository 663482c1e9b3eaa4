"""What an installed resroute does, by itself: `python -I smoke.py [--extras]`.

`make test-wheel` runs it on the built wheel in a new environment: first with its own dependencies
alone, then with the extras `hf` and `report`.
"""

import contextlib
import importlib.util
import io
import json
import sys
import tempfile
from pathlib import Path

import resroute as rr
from resroute.cli import main


def command(*arguments: str, code: int = 0) -> str:
    """Run one command of the line; what it wrote to stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        found = main(list(arguments))
    assert found == code, f"{arguments}: {found} instead of {code}\n{err.getvalue()}"
    return out.getvalue() + err.getvalue()


def train(folder: Path, method: str) -> str:
    """Two steps of a small model; the run's path."""
    run = str(folder / "runs" / method)
    command(
        *("train", "--data", str(folder / "stories"), "--method", method, "--out", run),
        *("--layers", "2", "--context", "64", "--steps", "2"),
        *("--device", "cpu", "--precision", "float32"),
        *("--set", "model.dim=16", "--set", "model.num_heads=2", "--set", "evaluation_windows=2"),
    )
    return run


def own_dependencies(folder: Path) -> None:
    """Text, training, sampling, and one plain line where an extra is missing."""
    command(
        *("data", "prepare", "storyworld", "--characters", "20000"),
        *("--out", str(folder / "stories")),
    )
    run = train(folder, "wav")
    assert command("sample", run, "--tokens", "5", "--device", "cpu").strip()
    if importlib.util.find_spec("transformers") is None:
        said = command("export", run, "--to", str(folder / "no"), code=2)
        assert "resroute[hf]" in said, said
        assert len(said.strip().splitlines()) <= 2, said
        assert not (folder / "no").exists()


def extras(folder: Path) -> None:
    """The report, the page of what a router learned, and both ways to and from transformers."""
    import torch
    import transformers

    train(folder, "pre-norm")
    command("report", str(folder / "runs"))
    assert "<svg" in (folder / "runs" / "report.html").read_text(encoding="utf-8")
    command("inspect", str(folder / "runs" / "wav"), "--windows", "2")
    assert "function drawMap" in (folder / "runs" / "wav" / "inspect" / "inspect.html").read_text(
        "utf-8"
    )

    command("export", str(folder / "runs" / "wav"), "--to", str(folder / "hf"))
    ours, _, _ = rr.load(folder / "runs" / "wav")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder / "hf")
    ids = torch.arange(12).unsqueeze(0)
    with torch.no_grad():
        assert (theirs.eval()(ids).logits - ours.eval()(ids)[0]).abs().max() < 1e-5

    config = transformers.LlamaConfig(
        vocab_size=31,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    llama = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        before = llama(ids).logits
        rr.convert(llama, rr.WAV(num_blocks=1, gated=True))
        assert torch.equal(llama(ids).logits, before)


if __name__ == "__main__":
    assert "site-packages" in rr.__file__, f"{rr.__file__} is not an installed package"
    with tempfile.TemporaryDirectory() as temporary:
        own_dependencies(Path(temporary))
        if "--extras" in sys.argv:
            extras(Path(temporary))
    print(json.dumps({"resroute": rr.__version__, "extras": "--extras" in sys.argv, "ok": True}))
