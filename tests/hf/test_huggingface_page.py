"""The examples of docs/huggingface.md run as they are."""

import re
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "huggingface.md"


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_examples_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    namespace = {}
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 4
    for block in blocks:
        exec(compile(block, PAGE.name, "exec"), namespace)
    table = re.findall(r"^\| `(.*?) \|", PAGE.read_text(), re.MULTILINE)
    named = re.findall(r"[\w.]+\.(?:json|safetensors|md)", " ".join(table))
    code = [f"{name}_resroute.py" for name in ("configuration", "modeling", "attention", "routing")]
    assert {path.name for path in (tmp_path / "exported").iterdir()} == {*named, *code}
