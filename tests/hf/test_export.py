"""Runs as folders that transformers loads."""

import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline
from transformers.utils import logging

import resroute as rr
from resroute.cli import main
from resroute.config import register
from resroute.experiments import sample
from resroute.hf import export as export_module
from resroute.hf.export import CODE, export
from resroute.residual.scaled import PreNorm
from resroute.training.checkpoint import open_checkpoint

WEIGHTS = {"config.json", "generation_config.json", "model.safetensors", "README.md"}
WORDS = {"tokenizer.json", "tokenizer_config.json"}


def names(folder):
    return {path.name for path in folder.iterdir()}


@pytest.fixture
def run(make_config):
    """A run whose newest and best checkpoints and average all differ."""
    config = make_config(steps=6, ema_decay=0.5, learning_rate=0.8, final_learning_rate=1.0)
    return rr.train(config)["path"]


def test_exported_runs_give_what_they_gave(run, tmp_path, capfd):
    logging.enable_progress_bar()
    folder = export(run, tmp_path / "out")
    assert folder == tmp_path / "out"
    assert names(folder) == WEIGHTS | WORDS | set(CODE)
    assert capfd.readouterr() == ("", "")
    logging.disable_progress_bar()
    ours, tokenizer, _ = rr.load(run)
    model = AutoModelForCausalLM.from_pretrained(folder)
    words = AutoTokenizer.from_pretrained(folder)
    text = "One sunny"
    ids = torch.from_numpy(tokenizer.encode(text)).unsqueeze(0)
    batch = words(text, return_tensors="pt")
    assert torch.equal(batch["input_ids"], ids)
    torch.testing.assert_close(model(**batch).logits, ours(ids)[0], rtol=0, atol=1e-5)
    assert not list(tmp_path.glob(".*"))


def test_pipelines_write_as_samples_do(run, tmp_path):
    folder = export(run, tmp_path / "out")
    ours, tokenizer, _ = rr.load(run)
    write = pipeline("text-generation", model=str(folder), trust_remote_code=True)
    prompts = ["One sunny", "Two"]
    found = write(prompts, max_new_tokens=12, do_sample=False, batch_size=2)
    for prompt, answer in zip(prompts, found, strict=True):
        expected = sample(ours, tokenizer, prompt=prompt, max_new_tokens=12, temperature=0)[0]
        assert answer[0]["generated_text"] == expected


def test_the_weights_that_are_asked_for_are_exported(run, tmp_path):
    ids = torch.arange(10).unsqueeze(0)
    found = []
    for place, options in enumerate(({}, {"best": True}, {"ema": True})):
        folder = export(run, tmp_path / str(place), **options)
        expected = rr.load(run, **options)[0](ids)[0]
        logits = AutoModelForCausalLM.from_pretrained(folder)(ids).logits
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
        found.append(logits)
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert not torch.allclose(found[one], found[other], atol=0.01)
    assert "| weights | best |" in (tmp_path / "1" / "README.md").read_text()
    checkpoint = sorted((tmp_path / "run" / "checkpoints").glob("step_??????"))[0]
    with pytest.raises(rr.UserError, match="is one checkpoint; name its run to take the best"):
        export(checkpoint, tmp_path / "none", best=True)
    folder = export(checkpoint, tmp_path / "first")
    step = open_checkpoint(checkpoint).progress.step
    assert f"| steps | {step} of 6, 4 windows each |" in (folder / "README.md").read_text()


def test_cards_say_what_was_trained_and_how_well(run, tmp_path, cheap_corpus):
    card = (export(run, tmp_path / "out") / "README.md").read_text()
    saved = open_checkpoint(sorted((tmp_path / "run" / "checkpoints").glob("step_??????"))[-1])
    loss = saved.progress.validation_loss
    for line in (
        "pipeline_tag: text-generation",
        "# WAV, 2 layers",
        '| its options | `{"type": "wav", "num_blocks": 1}` |',
        "| layers, width, heads | 2, 12, 2 |",
        f"| data | {cheap_corpus.path.name} |",
        "| steps | 6 of 6, 4 windows each |",
        "| weights | newest |",
        f"| validation loss | {loss:.4f} nats a token |",
    ):
        assert line in card.splitlines(), line
    averaged = (export(run, tmp_path / "ema", ema=True) / "README.md").read_text()
    assert "| weights | average of the weights |" in averaged
    assert "| validation loss | not measured |" in averaged
    for folder in (tmp_path / "out", tmp_path / "ema"):
        for file in folder.iterdir():
            assert str(tmp_path).encode() not in file.read_bytes(), file.name
            assert str(cheap_corpus.path.parent).encode() not in file.read_bytes(), file.name


def test_cards_open_with_a_text_that_the_vocabulary_has():
    for symbols, expected in (("Onex", "One"), ("onex", "one"), ("xy", "x")):
        for unknown in ("error", "skip"):
            assert export_module._opening(rr.CharTokenizer(tuple(symbols), unknown)) == expected


def test_code_may_be_left_out(run, tmp_path):
    folder = export(run, tmp_path / "out", remote_code=False)
    assert names(folder) == WEIGHTS | WORDS
    assert "auto_map" not in json.loads((folder / "config.json").read_text())
    assert "import resroute.hf" in (folder / "README.md").read_text()
    ids = torch.arange(10).unsqueeze(0)
    expected = rr.load(run)[0](ids)[0]
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.testing.assert_close(model(ids).logits, expected, rtol=0, atol=1e-5)


def test_what_is_saved_again_has_its_code(run, tmp_path):
    for remote_code in (True, False):
        folder = export(run, tmp_path / f"{remote_code}", remote_code=remote_code)
        again = tmp_path / f"{remote_code} again"
        AutoModelForCausalLM.from_pretrained(folder).save_pretrained(again)
        assert names(again) == (WEIGHTS - {"README.md"}) | set(CODE)
        said = json.loads((again / "config.json").read_text())["auto_map"]
        assert said["AutoModelForCausalLM"] == "modeling_resroute.ResrouteForCausalLM"


def test_the_command_exports(run, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["export", str(run), "--to", str(out), "--best", "--no-remote-code"]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert names(out) == WEIGHTS | WORDS
    assert main(["export", str(run), "--to", str(out)]) == 2
    assert capsys.readouterr().err == f"resroute: {out}: is not empty; name a new folder\n"
    assert main(["export", str(tmp_path / "none"), "--to", str(tmp_path / "new")]) == 2
    assert "none does not exist; name a run folder" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_folders_in_use_are_refused_and_empty_ones_are_filled(run, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(rr.UserError, match=r"file: is there, and no folder; name a new folder"):
        export(run, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    assert names(export(run, tmp_path / "empty")) == WEIGHTS | WORDS | set(CODE)


def test_nothing_is_left_where_writing_fails(run, tmp_path, monkeypatch):
    before = names(tmp_path)

    def fail(*_):
        raise rr.UserError("no card")

    monkeypatch.setattr(export_module, "_card", fail)
    with pytest.raises(rr.UserError, match="no card"):
        export(run, tmp_path / "out")
    assert names(tmp_path) == before


def test_a_method_without_code_is_refused_unless_it_is_left_out(make_config, tmp_path, monkeypatch):
    from resroute.residual import ResidualConfig

    monkeypatch.setattr(ResidualConfig, "_members", dict(ResidualConfig._members))

    @register("spiral")
    class Spiral(PreNorm):
        pass

    run = rr.train(make_config(Spiral(), steps=2))["path"]
    with pytest.raises(rr.UserError, match=r"no code of the method 'spiral'.*--no-remote-code"):
        export(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert (
        "auto_map"
        not in (export(run, tmp_path / "out", remote_code=False) / "config.json").read_text()
    )


MISSING = """
import sys


class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "transformers":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Block())
import resroute
from resroute.cli import main

assert not [name for name in sys.modules if name.startswith("resroute.hf")]
sys.exit(main(["export", "run", "--to", "out"]))
"""


def test_without_transformers_one_line_says_what_to_install(tmp_path):
    answer = subprocess.run(
        [sys.executable, "-c", MISSING], capture_output=True, text=True, cwd=tmp_path, timeout=120,
        env={**os.environ},
    )  # fmt: skip
    assert answer.returncode == 2
    assert answer.stderr == (
        "resroute: Hugging Face models need the package transformers: pip install 'resroute[hf]'\n"
    )
