import csv
import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resroute.analysis import DepthWeights, Run, find_runs
from resroute.config import UserError, to_dict
from resroute.experiments.compare import compare
from resroute.experiments.plan import Plan, read_plan
from resroute.experiments.results import condensed, read_results, runs_of, write_results
from resroute.experiments.spreadsheet import flat, nested, read_table, table
from resroute.experiments.study import Contrast
from resroute.model import GPTConfig
from resroute.residual import WAV, Finding, PreNorm
from resroute.training import TrainConfig

MAP = DepthWeights(
    sites=("0 attention", "readout"),
    sources=("embedding", "state 0"),
    weights=((1.0, None), (0.25, 0.75)),
)
FINDING = {
    "check": "dead mixing", "severity": "warning", "where": "all sites", "saw": "norm 0.0e+00",
    "why": "nothing was learned", "remedy": "train longer",
}  # fmt: skip
PLAN = Plan(
    suite="paper",
    baseline="PreNorm",
    primary=Contrast(treatment="WAV", baseline="PreNorm", num_layers=2),
    runs=("wav/s0", "wav/s1"),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


def write_run(folder, name, residual, seed, loss, **summary):
    """A finished run's files, as training writes them."""
    path = folder / name
    path.mkdir(parents=True)
    model = GPTConfig(vocab_size=9, context=10, num_layers=2, num_heads=1, dim=8, residual=residual)
    config = TrainConfig(
        model=model,
        data="/somewhere/else/tales",
        mix=("/somewhere/more=0.1", "near/by=0.2"),
        out=str(path),
        steps=100,
        batch_size=1,
        warmup_steps=5,
        seed=seed,
    )
    corpus = {"name": "tales", "fingerprint": "ab12"}
    fields = {
        "format_version": 1,
        "label": residual.label,
        "method": residual.type_name,
        "corpus": "tales",
        "num_layers": 2,
        "seed": seed,
        "steps": 100,
        "tokens": 1000,
        "validation_loss": loss,
        "nats_per_character": loss / 3,
        "floor": None,
        "floor_exact": None,
        "parameters": 5000,
        "tokens_per_second": 100 + seed / 3,
        "peak_memory_bytes": None,
        "memory_kind": None,
        "device": "cpu",
        "precision": "float32",
        **summary,
    }
    records = [{"kind": "routing", "step": 10, "rms": [1.0]}]
    for step in (0, 40, 43, 100):
        value = loss + 1 - step / 100
        at = {"step": step, "tokens": 10 * step, "loss": value, "nats_per_character": value / 3}
        records.append({"kind": "validation", **at, "bits_per_byte": 1.0})
    for step in (15, 30, 45, 60, 75, 90, 100):
        at = {"step": step, "tokens": 10 * step, "loss": 2.0 - step / 100}
        records.append({"kind": "train", **at, "grad_norm": 1.0})
    files = {
        "config.json": {"format_version": 1, **to_dict(config), "corpus": corpus},
        "env.json": {"sessions": [{"torch": "2.8.0", "commit": None, "command": ["-c", "=1"]}]},
        "summary.json": fields,
        **({"depth_weights.json": to_dict(MAP)} if (seed, loss) == (0, 1.0) else {}),
    }
    for file, value in files.items():
        (path / file).write_text(json.dumps(value))
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    if seed == 0:
        checked = {"format_version": 1, "step": 100, "findings": [FINDING] if loss == 1.0 else []}
        (path / "health.json").write_text(json.dumps(checked))
    if seed == 1:
        (path / "sample.txt").write_text('=once, there "was"\n')


@pytest.fixture
def sweep(tmp_path):
    folder = tmp_path / "sweep"
    write_run(folder, "wav/s0", WAV(rho_max=None, bases=("split",)), 0, 1.0)
    write_run(folder, "wav/s1", WAV(rho_max=None, bases=("split",)), 1, 1.0 / 3)
    write_run(folder, "pre/s0", PreNorm(), 0, 1.5, floor=2, commit_note="1e3")
    write_run(folder, "pre/s1", PreNorm(), 1, 1.25, floor=0.2, floor_exact=True)
    return folder


@pytest.fixture
def results(sweep, tmp_path):
    out = tmp_path / "results"
    out.mkdir()
    write_results(find_runs(sweep), out, PLAN)
    return out


def test_runs_come_back_as_they_were(sweep, results):
    kept = condensed(find_runs(sweep))
    found = read_results(results)
    assert [run.path for run in found] == [results / run.name for run in kept]
    assert [dataclasses.replace(r, path=Path()) for r in found] == [
        dataclasses.replace(r, path=Path()) for r in kept
    ]
    # 2 == 2.0 and True == 1 in Python, not in files
    assert repr([r.summary for r in found]) == repr([r.summary for r in kept])
    assert repr([r.config for r in found]) == repr([r.config for r in kept])
    assert read_plan(results) == PLAN
    # of four runs two were checked, and one has a finding
    kept = json.loads((results / "findings.json").read_text())
    assert kept == {"format_version": 1, "runs": {"pre/s0": [], "wav/s0": [FINDING]}}
    assert [r.findings for r in found] == [(), None, (Finding(**FINDING),), None]


def test_what_is_kept_is_what_a_report_needs(sweep):
    first = next(run for run in condensed(find_runs(sweep)) if run.name == "wav/s0")
    assert first.path == sweep / "wav/s0"
    # of the training losses at 15, 30, 45, 60, 75, 90 and 100 the last up to 40 and up to 100
    assert [(r["kind"], r["step"]) for r in first.metrics] == [
        ("validation", 0), ("train", 30), ("validation", 40), ("validation", 43),
        ("train", 100), ("validation", 100),
    ]  # fmt: skip
    assert first.metrics[0] == {
        "step": 0, "tokens": 0, "kind": "validation", "loss": 2.0, "nats_per_character": 2.0 / 3,
    }  # fmt: skip
    assert first.losses("train") == ([300, 1000], [1.7, 1.0])
    assert (first.summary["torch"], first.summary["commit"]) == ("2.8.0", None)
    assert first.config["data"] == "tales"
    assert first.config["mix"] == ["more=0.1", "near/by=0.2"]
    assert first.config["out"] == "s0"


def test_results_compare_as_the_runs_do(sweep, results):
    ours, theirs = (
        compare(runs, baseline="PreNorm") for runs in (find_runs(sweep), read_results(results))
    )
    assert [d.loss for d in theirs.differences] == [d.loss for d in ours.differences]
    assert theirs.differences[0].loss.n == 2
    assert [g.mean for g in theirs.gaps] == [g.mean for g in ours.gaps]
    assert [e.loss for e in theirs.equal_compute] == [e.loss for e in ours.equal_compute]
    assert theirs.notes == ours.notes


def test_the_same_runs_give_the_same_bytes_also_by_way_of_results(results, tmp_path):
    again = tmp_path / "again"
    again.mkdir()
    written = write_results(read_results(results), again, PLAN)
    assert [path.name for path in written] == [
        "runs.csv", "curves.csv", "depth_maps.json", "samples.json", "findings.json",
    ]  # fmt: skip
    for path in results.iterdir():
        assert (again / path.name).read_bytes() == path.read_bytes()


def test_tables_are_plain_to_other_readers_and_hold_no_formula(results):
    with (results / "runs.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0])[:4] == ["name", "series", "format_version", "label"]
    assert [row["series"] for row in rows] == ["PreNorm", "PreNorm", "HAARES", "HAARES"]
    assert rows[2]["config.model.dim"] == "8"
    assert rows[2]["config.model.residual.rho_max"] == "null"
    assert rows[2]["config.model.residual.bases"] == '["split"]'
    assert rows[0]["config.model.residual.bases"] == ""
    assert rows[0]["commit_note"] == '"1e3"'
    assert (rows[0]["floor"], rows[1]["floor"], rows[1]["floor_exact"]) == ("2", "0.2", "true")
    with (results / "curves.csv").open(newline="") as file:
        first = list(csv.reader(file))[:3]
    assert first == [
        ["run", "step", "tokens", "kind", "loss", "nats_per_character"],
        ["pre/s0", "0", "0", "validation", "2.5", repr(2.5 / 3)],
        ["pre/s0", "30", "300", "train", "1.7", ""],
    ]
    for text in ("=1+1", "+1", "-x", "@a", "\t=1", "\r=1", "\uff1d1", "'=1", " =1", '"'):
        (line,) = csv.reader(table([{"a": text}], ["a"]).splitlines()[1:])
        assert line[0].startswith('"')
    # numbers below zero stay numbers
    assert table([{"a": -2.5, "b": "wav-L2, s0"}], ["a"]) == 'a,b\n-2.5,"wav-L2, s0"\n'


def read_back(text, folder):
    path = folder / "table.csv"
    path.write_bytes(text.encode())
    return [row for _, row in read_table(path, (), "mend it")]


@settings(deadline=None, max_examples=150)
@given(rows=st.lists(st.dictionaries(st.text(max_size=4), JSON, max_size=3), max_size=3))
def test_any_value_and_heading_comes_back_exactly(tmp_path_factory, rows):
    folder = tmp_path_factory.mktemp("cells")
    found = read_back(table(rows, ["first"]), folder)
    assert repr(sorted_(found)) == repr(sorted_(rows))


def sorted_(rows):
    return [sorted(row.items()) for row in rows]


@pytest.mark.parametrize(
    "text", ["1", "true", "null", "NaN", "-Infinity", "[1]", "", "1e5", "a\ud800", "a\x00b", "a\nb"]
)
def test_text_that_looks_like_something_else_stays_text(text, tmp_path):
    assert read_back(table([{"a": text, "b": [text]}], []), tmp_path) == [{"a": text, "b": [text]}]


def test_objects_are_flattened_to_dotted_names_and_back():
    value = {"model": {"dim": 8, "empty": {}, "dots": {"a.b": 1}}, "mix": ["a=1"], "ema": None}
    columns = flat(value, "config.")
    assert list(columns) == [
        "config.model.dim", "config.model.empty", "config.model.dots", "config.mix", "config.ema",
    ]  # fmt: skip
    assert nested({"name": 1, **columns}, "config.", "here", "mend it") == value
    with pytest.raises(UserError, match=r"here: damaged \(config.a.b is below a value\); mend it"):
        nested({"config.a": 1, "config.a.b": 2}, "config.", "here", "mend it")


def test_what_former_results_had_does_not_stay(results, sweep):
    runs = [r for r in find_runs(sweep) if r.name == "pre/s1"]
    bare = [dataclasses.replace(run, sample=None) for run in runs]
    assert (results / "findings.json").is_file()
    assert [path.name for path in write_results(bare, results)] == ["runs.csv", "curves.csv"]
    (run,) = read_results(results)
    assert (run.name, run.depth_weights, run.sample) == ("pre/s1", None, None)
    assert (run.findings, (results / "findings.json").exists()) == (None, False)


def test_results_beside_a_run_leave_its_files_alone(sweep):
    folder = sweep / "wav/s0"
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    write_results(find_runs(folder), folder)
    assert {name: (folder / name).read_bytes() for name in before} == before
    assert [run.name for run in find_runs(folder)] == ["s0"]


def test_runs_are_taken_from_run_folders_or_else_from_results(sweep, results):
    assert [run.name for run in runs_of(results)] == ["pre/s0", "pre/s1", "wav/s0", "wav/s1"]
    write_results(find_runs(sweep)[:1], sweep)
    assert len(runs_of(sweep)) == 4
    empty = results / "empty"
    empty.mkdir()
    assert runs_of(empty) == []


def test_a_plan_grows_and_is_not_replaced_by_another(results, sweep):
    runs = find_runs(sweep)
    more = dataclasses.replace(PLAN, runs=("pre/s0",))
    write_results(runs, results, more)
    assert read_plan(results).runs == ("wav/s0", "wav/s1", "pre/s0")
    with pytest.raises(UserError, match="holds the suite 'paper', not 'other'"):
        write_results(runs, results, dataclasses.replace(PLAN, suite="other"))


def test_runs_of_one_name_are_refused(sweep, results):
    runs = find_runs(sweep)
    with pytest.raises(UserError, match="two runs have the name 'pre/s0'"):
        write_results([*runs, runs[0]], results)


@pytest.mark.parametrize(
    ("file", "old", "new", "says"),
    [
        ("runs.csv", "name,", "nam,", "needs a heading with name"),
        ("runs.csv", "seed,", "label,", "needs a heading with name, each once"),
        ("runs.csv", "pre/s1", "pre/s0", "two runs have the name 'pre/s0'"),
        ("runs.csv", "pre/s1", "../s1", "line 3: '../s1' is not the name of a run"),
        ("runs.csv", "pre/s1", '"""\\u001b"""', "line 3.name: damaged"),
        ("runs.csv", "pre/s1", "", r"line 3: damaged \(no name\)"),
        ("runs.csv", "pre/s1,", "pre/s1", "cells under"),
        ("runs.csv", ",5000,", ",many,", "line 2.parameters: needs a whole number, got 'many'"),
        ("runs.csv", ",5000,", ",,", "line 2: the field 'parameters' is missing"),
        ("runs.csv", ",5000,", ',"50"00,', "line 2: damaged CSV"),
        ("runs.csv", "1,HAARES", '1,"""\\u001b"""', "line 4.label: damaged"),
        ("curves.csv", "wav/s0,100", "wav/s9,100", "no run 'wav/s9' in runs.csv"),
        ("curves.csv", "wav/s0,100", "wav/s0,x", "line 18.step: needs a whole number, got 'x'"),
        ("curves.csv", "validation,2.5", "validation,-Infinity", "line 2.loss: needs a number"),
        ("depth_maps.json", '"sites": [', '"sites": ["more",', "sites x sources"),
        ("depth_maps.json", "0.25", '"x"', r"wav/s0.weights\[1\]\[0\]: needs a number"),
        ("depth_maps.json", '"runs"', '"rums"', "needs format_version 1 and runs"),
        ("samples.json", '{\n "format_version": 1', "{", "damaged JSON"),
        ("samples.json", '"=once', '"\\u0007=once', "damaged .needs plain text"),
        ("findings.json", '"warning"', '"grave"', r"wav/s0\[0\].severity: 'grave' is not one of"),
        ("findings.json", '"norm', '"\\nnorm', "wav/s0: damaged .needs plain text"),
        ("findings.json", '"pre/s0": []', '"pre/s0": {}', "pre/s0: needs a list"),
    ],
)
def test_a_damaged_file_says_where_and_what_to_do(results, file, old, new, says):
    path = results / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(UserError, match=says) as caught:
        read_results(results)
    assert str(path) in str(caught.value)
    assert str(caught.value).endswith(
        "write the results again with `resroute report`, from the runs"
    )


def test_a_missing_or_binary_table_is_a_plain_error(results):
    (results / "curves.csv").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="no UTF-8"):
        read_results(results)
    (results / "curves.csv").unlink()
    with pytest.raises(UserError, match=r"curves.csv: the file is missing"):
        read_results(results)


def test_a_run_without_evaluations_keeps_its_training_losses(sweep):
    run = find_runs(sweep)[0]
    train = [record for record in run.metrics if record["kind"] == "train"]
    (kept,) = condensed([Run(**{**vars(run), "metrics": train})])
    assert [record["step"] for record in kept.metrics] == [15, 30, 45, 60, 75, 90, 100]
