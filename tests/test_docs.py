"""The README's code runs, and what the documents name exists."""

import importlib
import math
import re
import shlex
from pathlib import Path

import pytest
import torch

import resroute as rr
from resroute.cli.commands import overrides
from resroute.cli.parser import make_parser, parse
from resroute.config import variants, with_overrides
from resroute.data.storyworld import surprisal
from resroute.residual import ResidualConfig

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def test_the_readme_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    code = blocks(ROOT / "README.md", "python")
    assert len(code) >= 5
    namespace = {}
    for block in code:
        exec(compile(block, "README.md", "exec"), namespace)
    assert not list(tmp_path.iterdir())


def test_the_example_of_the_engine_prints_what_it_says(capsys):
    text = (ROOT / "docs" / "engine.md").read_text()
    examples = re.findall(
        r"^```python\n(.*?)^```\n\n```\n(.*?)^```", text, re.DOTALL | re.MULTILINE
    )
    assert len(examples) == 1
    for code, said in examples:
        exec(compile(code, "engine.md", "exec"), {})
        assert capsys.readouterr().out == said


def test_the_examples_of_inspect_run_and_find_what_they_say(capsys):
    torch.manual_seed(0)
    namespace = {}
    for block in blocks(ROOT / "docs" / "inspect.md", "python"):
        exec(compile(block, "inspect.md", "exec"), namespace)
    inspected, *said = capsys.readouterr().out.splitlines()
    # the model of the example was never trained
    loss, found = inspected.split(" ", 1)
    assert float(loss) == pytest.approx(math.log(48), abs=0.2)
    assert found.startswith("dead mixing ")
    assert said[0].startswith("5 mlp {'embedding': ")
    assert said[1].startswith("warning: dead mixing, 16 of 16 sites: 0 mlp, ")
    assert [line.split()[:2] for line in said[-2:]] == [["block", "0"], ["block", "1"]]
    assert namespace["weights"].shape == (64, len(namespace["names"]))


@pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning")
def test_the_examples_of_convert_run_and_a_stock_class_refuses(capsys):
    torch.manual_seed(0)
    namespace = {}
    for block in blocks(ROOT / "docs" / "convert.md", "python"):
        exec(compile(block, "convert.md", "exec"), namespace)
    inspected, refusal = capsys.readouterr().out.splitlines()
    loss, *changes = (float(word.strip("[],")) for word in inspected.split())
    # five steps have taught it these rows
    assert 3 < loss < math.log(97)
    assert len(changes) == 2
    assert "load this folder by resroute.from_pretrained: it has depth routing" in refusal


def test_training_from_python_runs_as_it_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("fox.txt").write_text("the quick brown fox jumps over the lazy dog. " * 400)
    code, tracker = blocks(ROOT / "docs" / "training.md", "python")
    namespace = {}
    exec(compile(code, "training.md", "exec"), namespace)
    assert namespace["summary"]["steps"] == 20
    assert namespace["tokenizer"].decode(namespace["tokenizer"].encode("fox")) == "fox"
    exec(compile(tracker, "training.md", "exec"), namespace)
    assert namespace["WeightsAndBiases"]().message("all methods are there") is None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_ones_that_we_parse(page):
    for block in blocks(page, "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["resroute"] and not {"--help", "--version"} & set(words):
                assert parse(make_parser(), words[1:]).run is not None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_settings_that_a_page_names_are_ones_that_there_are(page):
    model = rr.GPTConfig(
        vocab_size=8, context=8, num_layers=12, num_heads=2, dim=64, residual=rr.WAV()
    )
    config = rr.TrainConfig(model=model, data="", out="")
    for name, value in re.findall(r"--set ([a-z_.]+)=([^\s`\"]+)", page.read_text()):
        if value != "..":
            with_overrides(config, overrides([f"{name}={value.rstrip(',.;)')}"]))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)#]+)\)", prose):
        assert not target.startswith("http") or "arxiv.org" in target
        assert target.startswith("http") or (page.parent / target).exists(), target


def test_every_method_is_in_the_readme_and_in_the_maths():
    for page in (ROOT / "README.md", ROOT / "docs" / "methods.md"):
        text = page.read_text()
        for method in variants(ResidualConfig).values():
            assert f"`{method.__name__}" in text, (page.name, method.__name__)


def test_the_page_of_the_api_has_every_public_name_and_says_where_others_are():
    text = (ROOT / "docs" / "api.md").read_text()
    homes = {
        name: module
        for names, module in re.findall(
            r"^\| (`\w+`(?:, `\w+`)*) \| `([\w.]+)` \|$", text, re.MULTILINE
        )
        for name in re.findall(r"\w+", names)
    }
    assert homes["Finding"] == "resroute.residual"
    named = set()
    for path in re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE):
        module, name = path.rsplit(".", 1)
        thing = getattr(importlib.import_module(module), name)
        if module == "resroute.residual.interchange":
            assert name in rr.interchange.__all__
            named.add("interchange")
        elif name in homes:
            assert getattr(importlib.import_module(homes.pop(name)), name) is thing
            assert not hasattr(rr, name)
        else:
            assert getattr(rr, name) is thing
            named.add(name)
    assert not homes
    assert named == {*rr.__all__, "convert", "unconvert", "from_pretrained"} - {"__version__"}


def test_make_targets_in_the_documents_exist():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        named = set(re.findall(r"`make ([a-z-]+)", page.read_text()))
        assert named <= targets, (page.name, named - targets)


def test_the_story_in_the_documents_has_the_nats_that_they_say():
    text = (ROOT / "docs" / "data.md").read_text()
    lines = re.search(r"^```\n(One .*?)^```", text, re.DOTALL | re.MULTILINE)
    story = " ".join(lines[1].split())
    said = re.search(r"this story has (\d+) characters and ([\d.]+) nats", text)
    assert (str(len(story)), f"{surprisal(story):.2f}") == said.groups()
