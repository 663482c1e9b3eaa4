"""An inspection as files."""

import dataclasses
import hashlib
import json
import math
import sys

import pytest

from resroute.config import UserError
from resroute.experiments.importance import Ablation, Importance
from resroute.experiments.inspect import save_inspection, writable
from resroute.experiments.inspect import write as writing

from .conftest import DRAWING

ALL = ("depth_weights", "kinds", "importance", "measures", "training", "bases")
OF_SUMS = ("importance", "measures", "training", "bases")


def tree(folder):
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def names(*figures):
    images = [f"figures/{name}.{kind}" for name in figures for kind in ("png", "svg")]
    return ["inspect.html", "inspect.json", *images]


@pytest.fixture
def without_figures(monkeypatch):
    monkeypatch.setattr(writing, "images", lambda *_: ())


def test_files_of_a_page_and_of_the_one_that_takes_its_place(looked, tmp_path, monkeypatch):
    out = tmp_path / "deep" / "page"
    files = save_inspection([looked["wav"]], out)
    assert [str(file.relative_to(out)) for file in files] == names(*ALL)
    assert all(file.stat().st_size > 900 for file in files)
    assert (out / "figures/kinds.png").read_bytes().startswith(b"\x89PNG")
    text = (out / "inspect.html").read_text()
    assert "<h1>Inside wav</h1>" in text
    assert text.count('class="static"') == 7
    (out / "figures/notes.txt").write_text("mine")
    # figures that another method does not have are gone, a stranger's file stays
    drawn = [(name, DRAWING) for name in OF_SUMS]
    monkeypatch.setattr(writing, "images", lambda *_: iter(drawn))
    files = save_inspection([looked["pre"]], out)
    assert [str(file.relative_to(out)) for file in files] == names(*OF_SUMS)
    assert sorted(tree(out)) == sorted([*names(*OF_SUMS), "figures/notes.txt"])
    (out / "figures/notes.txt").unlink()
    save_inspection([looked["pre"]], tmp_path / "again")
    assert tree(out) == tree(tmp_path / "again")


def test_all_numbers(looked, tmp_path, without_figures):
    both = [looked["wav"], looked["pre"]]
    save_inspection(both, tmp_path, title="A title")
    assert "<h1>A title</h1>" in (tmp_path / "inspect.html").read_text()
    found = json.loads((tmp_path / "inspect.json").read_text())
    assert found["format_version"] == 1
    for run, one in zip(found["runs"], both, strict=True):
        assert set(run) == {field.name for field in dataclasses.fields(one)}
        # to five digits
        assert run["loss"] == pytest.approx(one.loss, rel=1e-5)
        assert (run["step"], run["tokens"]) == (12, 128)
        assert run["importance"][0]["items"][2]["change"] == pytest.approx(
            one.importance[0].items[2].change, rel=1e-4
        )
        assert len(run["records"]) == len(one.records)
    table, expected = found["runs"][0]["tables"]["all tokens"], looked["wav"].tables["all tokens"]
    assert table["weights"][3][0] == pytest.approx(expected["weights"][3][0], rel=1e-4)
    assert table["weights"][3][1] is None
    assert list(found["runs"][0]["past"]) == ["4", "8"]
    assert found["runs"][1]["tables"] == {}
    save_inspection(both, tmp_path / "two")
    assert "<h1>Inside wav and pre</h1>" in (tmp_path / "two/inspect.html").read_text()
    save_inspection([both[0], both[0]], tmp_path / "same")
    assert "<h1>Inside wav</h1>" in (tmp_path / "same/inspect.html").read_text()


def test_numbers_that_json_does_not_have(make_inspection, tmp_path, without_figures, data_of):
    item = Ablation(name="layer 0", sites=(0,), change=math.inf, error=None, mass=None)
    needs = Importance(by="layer", loss=2.5, windows=1, tokens=8, items=(item,))
    records = ({"kind": "train", "step": 1, "loss": math.inf, "more": [math.nan]},)
    save_inspection(
        [make_inspection(loss=math.nan, importance=(needs,), records=records)], tmp_path
    )
    (run,) = json.loads((tmp_path / "inspect.json").read_text())["runs"]
    assert run["loss"] is None
    assert run["importance"][0]["items"][0]["change"] is None
    assert run["records"] == [{"kind": "train", "step": 1, "loss": None, "more": [None]}]
    (shown,) = data_of((tmp_path / "inspect.html").read_text())["runs"]
    assert shown["importance"][0]["items"][0]["change"] is None


def test_one_model_or_two(make_inspection, tmp_path):
    one = make_inspection()
    for count in (0, 3):
        with pytest.raises(UserError, match=f"shows one model or two, got {count}"):
            save_inspection([one] * count, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_title_of_an_undecodable_name(make_inspection, tmp_path, without_figures):
    save_inspection([make_inspection()], tmp_path, title="caf\udce9")
    assert "<h1>caf?</h1>" in (tmp_path / "inspect.html").read_text()


def test_a_folder_that_cannot_be_made(make_inspection, tmp_path, without_figures, monkeypatch):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "half").mkdir()
    (tmp_path / "half/figures").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    for name in ("file", "file/below", "half", "loop", "x" * 300):
        for act in (writable, lambda out: save_inspection([make_inspection()], out)):
            with pytest.raises(UserError, match=r"cannot be made .*; choose another folder"):
                act(tmp_path / name)
    assert (tmp_path / "file").read_text() == "mine"
    # nothing is made to look whether it could be
    writable(tmp_path / "a/b")
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(UserError, match="Permission denied"):
        writable(tmp_path / "a/b")
    assert sorted(tmp_path.rglob("*")) == before


def test_without_matplotlib_there_is_a_hint(make_inspection, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for act in (writable, lambda out: save_inspection([make_inspection()], out)):
        with pytest.raises(UserError, match=r"pip install 'resroute\[report\]'"):
            act(tmp_path / "out")
    assert not (tmp_path / "out").exists()
