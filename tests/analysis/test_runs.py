import json
import shutil

import pytest

from resroute.analysis.runs import (
    METHODS,
    DepthWeights,
    find_runs,
    read_run,
    run_labels,
    run_titles,
    unfinished_runs,
)
from resroute.config import UserError
from resroute.residual import Finding

FINDING = {
    "check": "dead mixing", "severity": "warning", "where": "all sites", "saw": "norm 0.0e+00",
    "why": "nothing was learned", "remedy": "train longer",
}  # fmt: skip


def health(*findings):
    """A run's health.json."""
    return json.dumps({"format_version": 1, "step": 20, "findings": findings})


def test_a_run_is_read_by_value(make_run):
    run = read_run(make_run("wav-L2-s0-ab12", routed=True, sample="Mia found it."))
    assert (run.name, run.label, run.method, run.num_layers, run.seed) == (
        "wav-L2-s0-ab12", "WAV", "wav", 2, 0,
    )  # fmt: skip
    assert run.floor == 0.213
    assert run.config == {"model": {"num_layers": 2, "dim": 128, "context": 256}, "seed": 0}
    assert run.sample == "Mia found it."
    assert isinstance(run.depth_weights, DepthWeights)
    assert run.depth_weights.sites[-1] == "readout"
    assert run.depth_weights.weights[1] == (0.25, None, None, 0.75)
    tokens, losses = run.losses("validation")
    assert tokens == [500, 1000, 1500, 2000]
    assert losses == pytest.approx([1.11, 0.91, 0.71 + 2 / 15, 0.81], abs=1e-12)


def test_a_run_without_routing_sample_or_floor(make_run):
    run = read_run(make_run("plain", floor=None, floor_exact=None))
    assert (run.depth_weights, run.sample, run.floor) == (None, None, None)


def test_findings_are_values_and_none_where_nobody_looked(make_run):
    path = make_run("a")
    assert read_run(path).findings is None
    (path / "health.json").write_text(health())
    assert read_run(path).findings == ()
    note = {**FINDING, "severity": "note", "saw": "one\n two\x1b\t\ud800"}
    (path / "health.json").write_text(health(FINDING, note))
    first, second = read_run(path).findings
    assert first == Finding(**FINDING)
    assert (second.severity, second.saw) == ("note", "one two\ufffd \ufffd")


def test_methods_are_in_the_order_of_tables():
    assert METHODS == (
        "pre_norm", "re_zero", "layer_scale", "full_attn_res", "block_attn_res",
        "delta_attn_res", "wav",
    )  # fmt: skip


def test_losses_keep_the_later_record_of_a_step_and_skip_what_is_not_finite(make_run):
    path = make_run("a")
    lines = [
        '{"kind": "train", "step": 2, "tokens": 20, "loss": 9.0}',
        '{"kind": "train", "step": 1, "tokens": 10, "loss": 3.0}',
        '{"kind": "train", "step": 2, "tokens": 20, "loss": 2.0}',
        '{"kind": "train", "step": 4, "tokens": 40, "loss": null}',
        '{"kind": "note", "text": "resumed"}',
    ]
    (path / "metrics.jsonl").write_text("\n".join(lines))
    assert read_run(path).losses("train") == ([10, 20], [3.0, 2.0])


def test_runs_are_found_in_order_and_unfinished_ones_apart(make_run, tmp_path):
    make_run("suite/wav-s1", seed=1)
    make_run("suite/wav-s0")
    make_run("z-prenorm", label="PreNorm", method="pre_norm")
    make_run("deep", num_layers=1)
    make_run("other", label="Mine", method="mine")
    (make_run("suite/killed") / "summary.json").unlink()
    runs = tmp_path / "runs"
    (runs / "exported").mkdir()
    (runs / "exported" / "config.json").write_text("{}")
    shutil.copytree(runs / "deep", runs / "deep" / "checkpoints" / "copy")
    shutil.copytree(runs / "deep", runs / ".hidden")
    assert [run.name for run in find_runs(runs)] == [
        "deep", "z-prenorm", "suite/wav-s0", "suite/wav-s1", "other",
    ]  # fmt: skip
    assert unfinished_runs(runs) == ["suite/killed"]


def test_the_searched_folder_may_itself_be_a_run(make_run):
    assert [run.name for run in find_runs(make_run("alone"))] == ["alone"]


def test_labels_tell_apart_what_nothing_else_does(make_run, tmp_path):
    make_run("a")
    make_run("b")
    make_run("c", seed=1)
    runs = find_runs(tmp_path / "runs")
    assert run_labels(runs) == ["WAV (a)", "WAV (b)", "WAV"]
    make_run("d", seed=2, corpus="mine")
    runs = find_runs(tmp_path / "runs")
    assert run_labels(runs)[2:] == ["WAV, storyworld", "WAV, mine"]


def test_titles_are_labels_with_depth_and_seed(make_run, tmp_path):
    make_run("a")
    make_run("b")
    make_run("c", seed=1, num_layers=48)
    assert run_titles(find_runs(tmp_path / "runs")) == {
        "a": "WAV (a), 2 layers, seed 0",
        "b": "WAV (b), 2 layers, seed 0",
        "c": "WAV, 48 layers, seed 1",
    }


def test_control_characters_and_lone_surrogates_are_replaced(make_run):
    run = read_run(make_run("a", label="W\x1b[31m\ud800V", sample="one\ntwo\x00"))
    assert run.label == "W\ufffd[31m\ufffdV"
    assert run.sample == "one\ntwo\ufffd"


@pytest.mark.parametrize(
    ("file", "text", "says"),
    [
        ("summary.json", '{"format_version": 1,', "damaged JSON"),
        ("summary.json", "[1]", "not a JSON object"),
        ("summary.json", '{"floor": Infinity}', "Infinity is no number of JSON"),
        ("summary.json", '{"format_version": 2}', "format_version 2"),
        ("config.json", "", "damaged JSON"),
        ("config.json", "[" * 100_000, "damaged JSON"),
        ("depth_weights.json", '{"sites": ["a"], "sources": ["b"], "weights": [[1, 2]]}', "sites"),
        ("depth_weights.json", '{"sites": ["a"], "sources": ["b"], "weights": [["x"]]}', "sites"),
        ("depth_weights.json", '{"sites": [1], "sources": ["b"], "weights": [[1]]}', "sites"),
        ("depth_weights.json", "{}", "sites"),
        ("health.json", '{"findings": []}', "format_version None"),
        ("health.json", '{"format_version": 1}', "findings: needs a list, got None"),
        ("health.json", health("dead"), r"findings\[0\]: needs an object, got 'dead'"),
        ("health.json", health(FINDING, {}), r"findings\[1\]: the field 'check' is missing"),
        ("health.json", health({**FINDING, "saw": 3}), r"findings\[0\].saw: needs text, got 3"),
        ("health.json", health({**FINDING, "severity": "fatal"}), "'fatal' is not one of 'note'"),
        ("health.json", health({**FINDING, "size": 1}), "unknown field 'size'"),
    ],
)
def test_a_damaged_file_is_one_line_with_a_remedy(make_run, file, text, says):
    path = make_run("a", routed=True)
    (path / file).write_text(text)
    with pytest.raises(UserError, match=says) as caught:
        read_run(path)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path / file) in message
    assert "run it again with --fresh" in message


@pytest.mark.parametrize(
    "line",
    [
        '{"kind": "train", "st',
        '{"kind": "train", "tokens": 1, "loss": 1.0}',
        '{"kind": "validation", "step": 1, "tokens": 1}',
        '{"kind": "validation", "step": 1, "tokens": true, "loss": 1.0}',
    ],
)
def test_a_damaged_metrics_line_is_named(make_run, line):
    path = make_run("a")
    text = (path / "metrics.jsonl").read_text()
    (path / "metrics.jsonl").write_text(text + line)
    with pytest.raises(UserError, match=r"metrics\.jsonl line 25: damaged"):
        read_run(path)


@pytest.mark.parametrize(
    ("field", "value"),
    [("parameters", "many"), ("seed", True), ("label", None), ("validation_loss", "low")],
)
def test_a_summary_field_of_the_wrong_type_is_named(make_run, field, value):
    path = make_run("a", **{field: value})
    with pytest.raises(UserError, match=f"'{field}' holds {value!r}"):
        read_run(path)


def test_a_missing_summary_field_is_named(make_run):
    path = make_run("a")
    summary = json.loads((path / "summary.json").read_text())
    del summary["tokens"]
    (path / "summary.json").write_text(json.dumps(summary))
    with pytest.raises(UserError, match="'tokens' holds nothing"):
        read_run(path)


def test_missing_things_are_user_errors(make_run, tmp_path):
    path = make_run("a")
    (path / "metrics.jsonl").write_bytes(b"\xff")
    with pytest.raises(UserError, match="no UTF-8 at byte 0"):
        read_run(path)
    (path / "metrics.jsonl").unlink()
    with pytest.raises(UserError, match=r"metrics\.jsonl: the file is missing"):
        read_run(path)
    (path / "summary.json").unlink()
    with pytest.raises(UserError, match="no finished run here"):
        read_run(path)
    with pytest.raises(UserError, match="no such folder"):
        find_runs(tmp_path / "nowhere")


@pytest.mark.parametrize("value", [10**400, 1e300, True])
@pytest.mark.parametrize("field", ["validation_loss", "floor", "parameters", "tokens"])
def test_numbers_that_no_run_has_are_damage(make_run, field, value):
    path = make_run("a", **{field: value})
    with pytest.raises(UserError, match=rf"damaged \('{field}' holds"):
        read_run(path)


def test_runs_of_one_label_are_told_apart_by_their_options(make_run, tmp_path):
    for name, rho in (("a", 1.0), ("b", 2.0)):
        path = make_run(name, label="WAV")
        config = json.loads((path / "config.json").read_text())
        config["model"]["residual"] = {"type": "wav", "rho_max": rho, "eps": 1e-6}
        (path / "config.json").write_text(json.dumps(config))
    make_run("c", label="PreNorm")
    labels = run_labels(find_runs(tmp_path / "runs"))
    assert sorted(labels) == ["PreNorm", "WAV (rho_max=1.0)", "WAV (rho_max=2.0)"]


def test_runs_of_several_rates_are_told_apart_by_them(make_run, tmp_path):
    for name, label, rate in (("a", "WAV", 0.1), ("b", "WAV", 0.2), ("c", "PreNorm", 0.3)):
        path = make_run(name, label=label)
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, "learning_rate": rate}))
    labels = run_labels(find_runs(tmp_path / "runs"))
    assert sorted(labels) == ["PreNorm", "WAV (rate 0.1)", "WAV (rate 0.2)"]


def test_a_seed_may_be_any(make_run):
    assert read_run(make_run("a", seed=2**63 - 1)).seed == 2**63 - 1
