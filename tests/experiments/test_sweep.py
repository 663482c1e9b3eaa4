import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from filelock import FileLock

from resroute.analysis import find_runs
from resroute.config import UserError, to_dict
from resroute.experiments import read_plan, sweep
from resroute.experiments.cell import FAILED, Outcome, Task, outcome, start
from resroute.experiments.engines import LocalEngine
from resroute.experiments.results import read_results
from resroute.experiments.study import Contrast
from resroute.experiments.suites import make_suite
from resroute.experiments.sweep import SweepStopped, plan_tasks, states


def test_two_methods_depths_and_seeds_from_end_to_end(make_paper, here, tmp_path):
    suite = make_paper()
    said, watched = [], []
    engine = LocalEngine(2)
    assert engine.threads == len(os.sched_getaffinity(0)) // 2

    found = sweep(suite, tmp_path / "runs", engine, watch=watched.append, say=said.append)

    assert len(found) == 8
    assert [state.state for state in found] == ["finished"] * 8
    assert said == []
    runs = {run.name: run for run in find_runs(tmp_path / "runs")}
    assert sorted(runs) == sorted(state.task.name for state in found)
    assert sorted((r.label, r.num_layers, r.seed) for r in runs.values()) == [
        (label, depth, seed)
        for label in ("Block AttnRes", "WAV")
        for depth in (2, 4)
        for seed in (0, 1)
    ]
    for state in found:
        assert state.loss == runs[state.task.name].summary["nats_per_character"]
        assert state.step == 6
    # processes of their own give the bits that a plain call gives
    sweep(suite, tmp_path / "again", here)
    again = {state.task.name: state.loss for state in states(plan_tasks(suite, tmp_path / "again"))}
    assert again == {state.task.name: state.loss for state in found}
    # while it ran, two cells ran at a time, never more
    running = [sum(state.state == "running" for state in look) for look in watched]
    assert max(running) == 2
    plan = read_plan(tmp_path / "runs")
    assert plan.runs == tuple(state.task.name for state in found)
    assert plan.primary == Contrast(treatment="WAV", baseline="Block AttnRes", num_layers=4)


def test_what_is_finished_is_not_trained_again(make_paper, here, tmp_path):
    sweep(make_paper(seeds=1, primary_seeds=1), tmp_path, here)
    first = list(here.trained)
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("summary.json")}

    sweep(make_paper(seeds=1, primary_seeds=1), tmp_path, here)
    assert here.trained == first
    # more seeds are a longer plan, of which the old part stays
    sweep(make_paper(), tmp_path, here)
    assert len(here.trained) == 8
    assert {p: p.stat().st_mtime_ns for p in before} == before
    assert read_plan(tmp_path).runs[:4] == tuple(first)
    assert len(read_plan(tmp_path).runs) == 8


def test_cells_in_the_results_are_not_trained_again_without_their_folders(
    make_paper, here, tmp_path
):
    small, results = make_paper(seeds=1, primary_seeds=1), tmp_path / "results"
    first = sweep(small, tmp_path / "a", here)
    # taken in afterwards
    sweep(small, tmp_path / "a", here, results=results)
    kept = {run.name: run for run in read_results(results)}
    assert {name: run.summary["nats_per_character"] for name, run in kept.items()} == {
        state.task.name: state.loss for state in first
    }

    found = sweep(make_paper(), tmp_path / "b", here, results=results)
    assert len(here.trained) == len(set(here.trained)) == 8
    assert [state.state for state in found] == ["finished"] * 8
    assert [state.loss for state in found[:4]] == [state.loss for state in first]
    # as they were, in the order of the plan
    again = read_results(results)
    assert [run.name for run in again] == list(read_plan(results).runs)
    assert {run.name: run for run in again if run.name in kept} == kept


def test_cells_that_another_suite_has_trained_are_taken_over(
    make_paper, make_design, here, tmp_path
):
    paper, ablation = tmp_path / "results", tmp_path / "results" / "ablation"
    sweep(make_paper(), tmp_path / "a", here, results=paper)
    trained = list(here.trained)
    suite = make_suite("ablation", make_design(layers=(2,)))
    assert {s.state for s in states(plan_tasks(suite, tmp_path / "b"), ablation, paper)} == {
        "finished"
    }

    found = sweep(suite, tmp_path / "b", here, results=ablation, reuse=paper)
    assert here.trained == trained
    assert [state.state for state in found] == ["finished"] * 4
    before = {run.name: run for run in read_results(paper)}
    taken = read_results(ablation)
    assert [run.name for run in taken] == list(read_plan(ablation).runs)
    assert sorted({run.num_layers for run in taken}) == [2]
    for run in taken:
        there = before[run.name]
        assert (run.config, run.metrics, run.summary) == (
            there.config,
            there.metrics,
            there.summary,
        )
    # what it lacks is trained
    more = make_suite("ablation", make_design(layers=(2,), seeds=3))
    sweep(more, tmp_path / "b", here, results=ablation, reuse=paper)
    assert len(here.trained) == len(trained) + 2
    with pytest.raises(UserError, match="nowhere"):
        sweep(more, tmp_path / "c", here, results=ablation, reuse=tmp_path / "nowhere")


def test_a_primary_contrast_is_not_taken_over(make_paper, make_design, here, tmp_path):
    seen = tmp_path / "seen"
    sweep(make_suite("ablation", make_design(layers=(4,))), tmp_path / "a", here, results=seen)
    with pytest.raises(UserError, match="a cell of the primary contrast, which is declared before"):
        sweep(make_paper(), tmp_path / "b", here, results=tmp_path / "new", reuse=seen)
    assert not (tmp_path / "new" / "runs.csv").exists()


def test_seeds_of_the_primary_contrast_are_kept_and_so_is_their_raise(make_paper, here, tmp_path):
    out, results = tmp_path / "runs", tmp_path / "results"
    sweep(make_paper(seeds=1, primary_seeds=2), out, here, results=results)
    assert read_plan(results).primary_seeds == (2,)
    sweep(make_paper(seeds=1, primary_seeds=1), out, here, results=results)
    assert read_plan(out).primary_seeds == (2,)
    sweep(make_paper(seeds=1, primary_seeds=3), out, here, results=results)
    assert read_plan(out).primary_seeds == read_plan(results).primary_seeds == (2, 3)


def test_a_cell_whose_process_dies_is_tried_again_twice(make_paper, here, tmp_path):
    deaths = {}
    train = here.train

    def die(task):
        deaths[task.name] = deaths.get(task.name, 0) + 1
        # one dies once, one again and again
        if "block" in task.name and (deaths[task.name] == 1 or "L4" in task.name):
            return Outcome(name=task.name, code=-9, message="so far\nall good")
        return train(task)

    here.train = die
    said = []
    suite = make_paper(seeds=1, primary_seeds=1)
    found = {s.task.name: s.state for s in sweep(suite, tmp_path, here, say=said.append)}

    by_kind = {name.split("-s0")[0]: (state, deaths[name]) for name, state in found.items()}
    assert by_kind == {
        "block-attn-res-L4": ("failed", 3),
        "block-attn-res-L2": ("finished", 2),
        "wav-L4": ("finished", 1),
        "wav-L2": ("finished", 1),
    }
    lost = next(name for name in found if name.startswith("block-attn-res-L4"))
    assert said[-1] == f"{lost} failed: all good"
    assert said.count(f"{lost} died: all good; it is tried again") == 2


def test_a_mistake_is_not_tried_again_and_the_others_go_on(make_paper, here, tmp_path):
    train = here.train

    def refuse(task):
        if "wav-L4" in task.name:
            return Outcome(name=task.name, code=FAILED, message="step 3: loss nan")
        return train(task)

    here.train = refuse
    found = sweep(make_paper(seeds=1, primary_seeds=1), tmp_path, here)

    assert [state.state for state in found] == ["finished", "failed", "finished", "finished"]
    assert len(here.trained) == 4


def test_a_stopped_sweep_says_so_and_goes_on(make_paper, here, tmp_path):
    train = here.train

    def stop(task):
        if len(here.trained) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return train(task)

    here.train = stop
    with pytest.raises(SweepStopped, match=r"stopped with 3 of 8 cells finished; .* goes on"):
        sweep(make_paper(), tmp_path, here)
    assert here.is_closed

    here.train = train
    sweep(make_paper(), tmp_path, here)
    assert len(here.trained) == len(set(here.trained)) == 8


def test_a_second_sweep_of_a_folder_is_refused(make_paper, here, tmp_path):
    with (
        FileLock(tmp_path / ".sweep.lock"),
        pytest.raises(UserError, match="is in use by another sweep"),
    ):
        sweep(make_paper(), tmp_path, here)


def test_a_sweep_needs_no_locks(make_paper, here, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr("fcntl.flock", refuse)
    assert len(sweep(make_paper(seeds=1, primary_seeds=1, layers=(2,)), tmp_path, here)) == 2


def test_the_primary_contrast_is_declared_once(make_paper, here, tmp_path):
    sweep(make_paper(seeds=1, primary_seeds=1), tmp_path, here)

    with pytest.raises(UserError, match=r"WAV minus Block AttnRes at 4 layers, not .* at 6 layers"):
        sweep(make_paper(layers=(6,)), tmp_path, here)


def test_a_folder_of_another_suite_is_refused(make_paper, make_design, here, tmp_path):
    sweep(make_paper(seeds=1, primary_seeds=1, layers=(2,)), tmp_path, here)

    with pytest.raises(UserError, match="holds the suite 'paper', not 'horizon'"):
        sweep(make_suite("horizon", make_design()), tmp_path, here)


@pytest.fixture
def task(make_config, tmp_path):
    config = make_config(out="cell", steps=100_000, checkpoint_every=100_000)
    return Task(name="cell", config=config)


def _wait_for(condition, seconds=60):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.05)


def _has_lines(path):
    return path.is_file() and len(path.read_bytes().splitlines()) > 3


def test_a_cell_saves_and_ends_when_its_sweep_is_gone(task, tmp_path):
    log = tmp_path / "log"
    process = start(task, log, threads=1)
    run = Path(task.config.out)
    _wait_for(lambda: _has_lines(run / "metrics.jsonl"))

    # as the system does where the sweep is killed
    process.stdin.close()
    assert process.wait(timeout=60) == 143

    (checkpoint,) = (run / "checkpoints").iterdir()
    ended = outcome(task, 143, log)
    step = int(checkpoint.name.removeprefix("step_"))
    assert ended.message.endswith(f"was asked to stop after step {step}; its checkpoint is saved")


def test_a_sweep_that_is_killed_leaves_nothing_running_and_is_gone_on_with(
    make_paper, here, tmp_path
):
    suite = make_paper(seeds=1, primary_seeds=1, layers=(2,))
    reference = {s.task.name: s.loss for s in sweep(suite, tmp_path / "plain", here)}
    program = (
        "import json, sys\n"
        "from pathlib import Path\n"
        "from resroute.config import from_dict\n"
        "from resroute.experiments import LocalEngine, Suite, sweep\n"
        "sweep(from_dict(Suite, json.load(sys.stdin)), Path(sys.argv[1]), LocalEngine(1))\n"
    )
    out = tmp_path / "runs"
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(out)], stdin=subprocess.PIPE, text=True
    )
    json.dump(to_dict(suite), process.stdin)
    process.stdin.close()
    _wait_for(lambda: any(out.glob("*/config.json")))
    process.kill()
    process.wait()

    found = sweep(suite, out, LocalEngine(2))
    assert {s.task.name: s.loss for s in found} == reference
