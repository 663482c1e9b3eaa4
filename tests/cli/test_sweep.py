import json
import re

import pytest

import resroute as rr
from resroute.cli.sweep import _Display, _summary, _time
from resroute.experiments import CellState, Estimator, Task

SMALL = (
    *("sweep", "paper", "--methods", "block-attn-res,wav", "--layers", "2", "--blocks", "1"),
    *("--seeds", "1", "--primary-seeds", "1", "--steps", "4", "--batch", "2", "--context", "32"),
    *("--set", "model.dim=16", "--set", "model.num_heads=2", "--set", "evaluation_windows=2"),
    *("--set", "peak_flops=1e11", "--precision", "float32", "--device", "cpu", "--out", "swept"),
)


@pytest.fixture
def small(place, cheap_corpus):
    return (*SMALL, "--data", str(cheap_corpus.path))


def test_a_dry_run_prints_the_plan_and_writes_nothing(run, small, place):
    found = run(*small, "--dry-run", "--layers", "2,4", "--seeds", "2", "--primary-seeds", "3")

    assert found.code == 0
    lines = found.out.splitlines()
    cells = [re.match(r"(\S+)-L(\d)-s(\d)-\w{8} ", line).groups() for line in lines[1:11]]
    assert cells == [
        (method, depth, seed)
        for seed, depths in (("0", "42"), ("1", "42"), ("2", "4"))
        for depth in depths
        for method in ("block-attn-res", "wav")
    ]
    assert lines[-3:-1] == [
        "10 cells in swept: 10 waiting",
        "primary contrast: WAV minus Block AttnRes at 4 layers",
    ]
    assert re.match(r"about \d+ s \(.+\), \d+ at a time; 0 estimated by finished", lines[-1])
    assert not (place / "swept").exists()


def test_a_dry_run_says_in_what_cells_differ(run, small, place):
    found = run("sweep", "ablation", *small[4:], "--dry-run", "--layers", "4", "--blocks", "2")
    head, *lines = found.out.splitlines()
    assert re.split(r"  +", head) == [
        "cell", "method", "corpus", "rate", "steps", "blocks", "time", "state",
    ]  # fmt: skip
    rows = [re.split(r"  +", line) for line in lines[: lines.index("")]]
    told = [(method, blocks) for _, method, _, _, _, blocks, _, _ in rows]
    assert told[:4] == [
        ("WAV", "2"), ("Block AttnRes", "2"),
        ("WAV (duplicate + duplicate_2)", "2"), ("WAV (random + random_2)", "2"),
    ]  # fmt: skip
    assert ("WAV (detail_bias=-1.0)", "2") in told
    assert ("WAV", "4") in told
    assert len(set(told)) == len(told)


def test_a_dry_run_refuses_what_the_sweep_would(run, small, place):
    assert run(*small, "--hours", "0").code == 0
    found = run("sweep", "ablation", *small[2:], "--dry-run")
    assert found.code == 2
    assert "swept holds the suite 'paper', not 'ablation'" in found.err


def test_a_sweep_trains_its_cells_once_and_prints_what_it_found(run, small, place):
    found = run(*small, "--jobs", "1")

    assert found.code == 0
    losses = {}
    for path in (place / "swept").glob("*/summary.json"):
        summary = json.loads(path.read_text())
        losses[summary["label"]] = summary["nats_per_character"]
    for label, loss in losses.items():
        assert re.search(rf"{re.escape(label)} +{loss:.4f} \(n=1\)", found.out)
    assert "swept: 2 cells finished; `resroute report swept` compares them" in found.out
    assert re.search(r"wav-L2-s0-\w{8}: loss \d\.\d{4}, \d+ s; 2/2 finished", found.err)

    again = run(*small)
    assert again.code == 0
    assert again.out == found.out
    assert again.err == "2/2 finished, 0 running, about 0 s left\n"
    planned = run(*small, "--dry-run", "--seeds", "2")
    assert "2 finished, 2 waiting" in planned.out
    # by what the finished cells took
    assert "2 estimated by finished ones" in planned.out


def test_cells_that_would_not_end_in_time_wait(run, small, place):
    found = run(*small, "--hours", "0")

    assert found.code == 0
    # nothing that a report could compare
    assert found.out.endswith("swept: 0 cells finished, 2 wait: they need more --hours\n")
    assert not list((place / "swept").glob("*/config.json"))


def test_a_cell_that_diverges_is_named_and_fails_the_command(run, small, place):
    found = run(*small, "--lr", "1e30", "--methods", "wav", "--set", "clip_norm=1e30")

    assert found.code == 2
    first, second = found.err.splitlines()[-2:]
    assert re.match(r"resroute: 1 of 1 cells failed: wav-L2-s0-\w{8}$", first)
    assert second == "their logs are in swept/logs; the same command tries them again"
    (log,) = (place / "swept" / "logs").iterdir()
    assert "lower the learning rate" in log.read_text()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--methods", "wva"), "unknown method 'wva' (did you mean 'wav'?)"),
        (("--data", "nowhere.txt"), "nowhere.txt"),
        (("--layers", "0"), "needs a whole number from 1"),
        (("--layers", "2,x"), "needs a whole number from 1 to 10000, got 'x'"),
        (("--jobs", "5000"), "cores; use 1 to"),
        (("--cpus", "2"), "--cpus and --gpus are for --engine ray"),
        (("--engine", "ray", "--jobs", "2"), "--jobs is for the local engine"),
        (("--rates", "nowhere"), "nowhere: no such folder; `resroute sweep learning_rate`"),
        (("--set", "steps"), "needs KEY=VALUE"),
        (("--reuse", "results"), "name it with --results"),
        (("--hours", "-1"), "--hours"),
        (("--primary-seeds", "0"), "needs a whole number from 1"),
    ],
)
def test_mistakes_are_plain(refused, small, arguments, says):
    refused(*small, *arguments, says=says)


def test_an_unknown_suite_is_named(refused, small):
    refused("sweep", "papre", says=("unknown 'papre' (did you mean 'paper'?)", "ablation"))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59, "59 s"), (90, "2 min"), (3599, "1 h 00 min"), (9000, "2 h 30 min")],
)
def test_times_are_rounded_to_what_a_person_needs(seconds, text):
    assert _time(seconds) == text


def test_losses_are_averaged_over_seeds_alone(make_config):
    def state(name, loss, **options):
        config = make_config(rr.WAV(num_blocks=1), **options)
        task = Task(name=name, config=config)
        return CellState(task=task, state="finished", step=6, loss=loss, seconds=1.0)

    def rows(states):
        found = _summary(states)
        cells = [list(column.cells) for column in found.columns]
        return [column.header for column in found.columns], list(zip(*cells, strict=True))

    seeds = [state("a", 2.0, seed=0), state("b", 3.0, seed=1)]
    header, (row,) = rows(seeds)
    assert header == ["corpus", "method", "2 layers"]
    assert row[1:] == ("WAV", "2.5000 (n=2)")
    rates = [
        state(f"{rate}{seed}", rate * 100 + seed, seed=seed, learning_rate=rate)
        for rate in (0.01, 0.003)
        for seed in (0, 1)
    ]
    header, found = rows(rates)
    assert header == ["corpus", "method", "rate", "2 layers"]
    assert [row[2:] for row in found] == [("0.01", "1.5000 (n=2)"), ("0.003", "0.8000 (n=2)")]
    longer = [state("a", 2.0), state("b", 1.0, steps=12)]
    header, found = rows(longer)
    assert header[2] == "steps"
    assert [row[2:] for row in found] == [("6", "2.0000 (n=1)"), ("12", "1.0000 (n=1)")]
    # a rate of its own for each depth is no axis
    depths = [state("a", 2.0), state("b", 1.0, model={"num_layers": 4}, learning_rate=0.5)]
    header, (row,) = rows(depths)
    assert header == ["corpus", "method", "2 layers", "4 layers"]
    assert row[2:] == ("2.0000 (n=1)", "1.0000 (n=1)")


def test_cells_that_end_at_once_are_counted_one_by_one(make_config, capsys):
    def states(*kinds):
        return [
            CellState(
                task=Task(name=name, config=make_config(out=name)),
                state=kind, step=0, loss=1.0, seconds=1.0,
            )
            for name, kind in zip("abc", kinds, strict=True)
        ]  # fmt: skip

    display = _Display(Estimator(jobs=2, threads=1))
    display.watch(states("finished", "running", "running"))
    display.watch(states("finished", "finished", "finished"))
    lines = capsys.readouterr().err.splitlines()
    assert [re.search(r"\d/\d finished", line)[0] for line in lines] == [
        "1/3 finished",
        "2/3 finished",
        "3/3 finished",
    ]


def test_what_is_left_is_in_proportion_to_steps_and_shared_among_jobs(make_config):
    def state(name, kind, step, seconds):
        config = make_config(steps=100, out=name)
        return CellState(
            task=Task(name=name, config=config), state=kind, step=step, loss=None, seconds=seconds
        )

    states = [
        state("a", "finished", 100, 30.0),
        state("b", "finished", 100, 50.0),
        state("c", "running", 25, None),
        state("d", "waiting", 0, None),
        state("e", "failed", 10, None),
    ]
    found = Estimator(jobs=2, threads=1)(states)

    # the median of 0.3 and 0.5 s a step, for 75 and 100 steps
    assert found.seconds == pytest.approx({"a": 0, "b": 0, "c": 30.0, "d": 40.0, "e": 0})
    assert found.wall == pytest.approx(40.0)
    assert Estimator(jobs=1, threads=1)(states).wall == pytest.approx(70.0)
    assert found.from_finished == 2
