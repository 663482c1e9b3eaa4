"""Runs that are killed again and again end with the bits of a run that never was."""

import itertools
import random
from collections import Counter
from pathlib import Path

import pytest

import resroute as rr

pytestmark = pytest.mark.slow

SETTINGS = {
    "steps": 40,
    "checkpoint_every": 3,
    "evaluate_every": 4,
    "evaluation_windows": 48,
    "observe_every": 5,
    "ema_decay": 0.9,
    # else each process would measure it
    "peak_flops": 1e11,
}
AIMS = ("step", "checkpoint", "evaluation", "checkpoint", "step", "going on")


def kills(run, count, last, seed=0):
    """Moments all over a run until a step, in order, as `Workers.run` takes them."""
    random_ = random.Random(seed)
    steps = sorted(random_.uniform(0, last) for _ in range(count))
    for step, aim in zip(steps, itertools.cycle(AIMS)):
        if aim == "going on":
            # reads the checkpoint, drops lines of metrics
            yield {"kill_after": random_.uniform(0.0, 0.15)}
            continue
        if aim == "evaluation":
            # follows the line of such a step
            step = 4 * round(step / 4)
        when = {"run": run, "step": int(step), "is_writing": aim == "checkpoint"}
        yield {"kill_when": when, "kill_after": random_.uniform(0.0, 0.01)}


def what_was_cut_off(runs, run):
    """What a kill has hit, as the files that it left tell."""
    if (run / "summary.json").exists():
        return "nothing"
    if any(run.glob("checkpoints/.step_*.tmp")):
        return "checkpoint"
    metrics = run / "metrics.jsonl"
    line = metrics.read_text().rpartition("\n")[0].rpartition("\n")[2] if metrics.exists() else ""
    # an evaluation is reported last of all that belongs to a step
    is_due = any(f'"step": {step},' in line for step in range(0, SETTINGS["steps"], 4))
    return "evaluation" if is_due and '"validation"' not in line else "step"


def kill_in_turn(workers, runs, config, moments, size=1):
    """Kill a run at each of some moments, and let it go on; how often what was hit."""
    run = Path(config.out)
    hits = Counter()
    newest = ""
    for moment in moments:
        answers = workers.run("train", size, config=config, resume=True, **moment)
        for answer in answers:
            # one of several processes sees the other die
            assert "error" not in answer or answer["error"][0] == "RuntimeError", answer
        hits[what_was_cut_off(runs, run)] += 1
        found = runs.checkpoints(run)
        if newest or found:
            assert found[-1].name >= newest
            newest = found[-1].name
            rr.load(run)
    return hits


def test_sixty_kills(workers, runs, make_config):
    (whole,) = workers.values("train", config=make_config(out="whole", **SETTINGS))
    config = make_config(out="killed", **SETTINGS)
    hits = kill_in_turn(workers, runs, config, kills(config.out, 60, last=37))
    print(dict(hits))
    assert hits["nothing"] <= 10
    assert min(hits["checkpoint"], hits["evaluation"], hits["step"]) >= 3
    workers.values("train", config=config, resume=True)
    runs.assert_same(whole["path"], config.out)
    assert runs.leftovers(config.out) == []


@pytest.mark.parametrize("layout", ["gathered", "sharded"])
def test_a_kill_before_any_use_of_a_file(workers, runs, make_config, layout):
    settings = {
        **SETTINGS, "steps": 4, "checkpoint_every": 2, "evaluation_windows": 4,
        "checkpoint_layout": layout,
    }  # fmt: skip
    (whole,) = workers.values(
        "train_until_event", config=make_config(out="whole", **settings), event=0
    )
    # the folder is claimed at the first ten, by the same words whatever the layout
    first = range(2, 11) if layout == "gathered" else ()
    for event in [*first, *random.Random(0).sample(range(11, whole["events"]), 8)]:
        config = make_config(out=f"killed-{event}", **settings)
        (answer,) = workers.run("train_until_event", config=config, event=event)
        assert answer == {"killed": True}
        workers.values("train", config=config, resume=True)
        runs.assert_same(whole["path"], config.out)
        assert runs.leftovers(config.out) == []


@pytest.mark.parametrize(("parallel", "layout"), [("ddp", "gathered"), ("fsdp", "sharded")])
def test_kills_of_two_processes(workers, runs, make_config, parallel, layout):
    settings = {**SETTINGS, "steps": 12, "parallel": parallel, "checkpoint_layout": layout}
    (whole, _) = workers.values("train", 2, config=make_config(out="whole", **settings))
    config = make_config(out="killed", **settings)
    moments = [
        # a while after the other
        {**moment, "stagger": 0.1 * (number // 2 % 2)}
        for number, moment in enumerate(kills(config.out, 5, last=9))
    ]
    hits = kill_in_turn(workers, runs, config, moments, size=2)
    print(dict(hits))
    assert hits["nothing"] <= 1
    workers.values("train", 2, config=config, resume=True)
    runs.assert_same(whole["path"], config.out)
    assert runs.leftovers(config.out) == []
