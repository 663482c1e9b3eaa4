from pathlib import Path

import pytest

import resroute as rr
from resroute.analysis import Run
from resroute.config import UserError
from resroute.experiments.plan import Plan, write_plan
from resroute.experiments.rates import best_rates, read_rates


def _run(residual, depth, rate, seed, loss, corpus="tales", steps=240):
    summary = {
        "precision": "float32",
        "device": "cpu",
        "parameters": 10,
        "steps": steps,
        "label": residual.label,
        "method": residual.type_name,
        "corpus": corpus,
        "num_layers": depth,
        "seed": seed,
        "validation_loss": loss,
    }
    config = {"learning_rate": rate, "steps": steps}
    return Run(
        path=Path("x"), name=f"{rate}-{steps}", config=config, metrics=[], summary=summary,
        depth_weights=None, sample=None,
    )  # fmt: skip


@pytest.fixture
def rates():
    runs = [
        # the mean over seeds decides, 1.5 against 1.4, not the best run
        _run(rr.WAV(), 12, 0.1, 0, 1.0),
        _run(rr.WAV(), 12, 0.1, 1, 2.0),
        _run(rr.WAV(), 12, 0.2, 0, 1.4),
        _run(rr.WAV(), 12, 0.2, 1, 1.4),
        # of the highest rate one seed diverged
        _run(rr.WAV(), 12, 0.4, 0, 0.5),
        _run(rr.WAV(), 12, 0.4, 1, None),
        _run(rr.WAV(), 48, 0.1, 0, 1.0),
        _run(rr.WAV(), 48, 0.2, 0, 1.1),
        _run(rr.WAV(), 48, 0.1, 0, 1.1, corpus="letters"),
        _run(rr.WAV(), 48, 0.2, 0, 1.0, corpus="letters"),
    ]
    return best_rates(runs, "runs/rates")


def test_the_best_rate_has_the_lowest_mean_loss_over_all_seeds(rates):
    assert rates.rate(rr.WAV(), 12, "data/tales") == 0.2
    assert rates.rate(rr.WAV(), 48, "data/tales") == 0.1
    assert rates.rate(rr.WAV(), 48, "data/letters") == 0.2


def test_what_was_not_tuned_takes_the_nearest(rates):
    # the depth counts before the corpus, on a scale of ratios: 24 lies as near 12 as 48
    assert rates.rate(rr.WAV(), 16, "data/tales") == 0.2
    assert rates.rate(rr.WAV(), 40, "data/tales") == 0.1
    assert rates.rate(rr.WAV(), 12, "data/letters") == 0.2
    # variants take the rate of their method
    assert rates.rate(rr.WAV(bases=("split",)), 48, "data/tales") == 0.1


def test_where_rates_come_from_is_told(rates):
    assert rates.told == (
        "Learning rates were chosen among 0.1, 0.2, 0.4 by runs of 240 steps on letters and tales, "
        "2 seeds each. At an end of these did best: WAV at 48 layers (0.1), WAV at 48 layers (0.2)."
    )


def test_runs_that_differ_in_more_tell_no_rate():
    runs = [_run(rr.WAV(), 12, 0.1, 0, 1.0), _run(rr.WAV(), 12, 0.2, 0, 0.9, steps=2400)]
    with pytest.raises(UserError, match=r"do not tell a learning rate, they differ in steps \(240"):
        best_rates(runs, "here")


def test_rates_are_compared_over_equal_seeds():
    runs = [
        *(_run(rr.WAV(), 12, rate, 0, loss) for rate, loss in ((0.1, 1.0), (0.2, 1.1))),
        *(_run(rr.WAV(), 12, rate, 1, loss) for rate, loss in ((0.1, 1.0), (0.2, 1.1))),
        # as many, but not those of the others
        _run(rr.WAV(), 12, 0.3, 1, 0.1),
        _run(rr.WAV(), 12, 0.3, 2, 0.1),
    ]
    with pytest.raises(UserError, match="has one learning rate alone"):
        best_rates(runs, "here")
    assert best_rates(runs[:4], "here").rate(rr.WAV(), 12, "tales") == 0.1


def test_an_unfinished_sweep_of_rates_says_so(tmp_path, monkeypatch):
    runs = [_run(rr.WAV(), 12, 0.1, 0, 1.0), _run(rr.WAV(), 12, 0.2, 0, 0.9)]
    monkeypatch.setattr("resroute.experiments.rates.runs_of", lambda folder: runs)
    names = (*(run.name for run in runs), "0.4-240")
    write_plan(tmp_path, Plan(suite="learning_rate", baseline=None, primary=None, runs=names))
    with pytest.warns(UserWarning, match=r"1 of 3 cells are not finished \(0\.4-240\): learning"):
        assert read_rates(tmp_path).rate(rr.WAV(), 12, "tales") == 0.2


def test_a_method_without_a_rate_is_refused(rates):
    with pytest.raises(UserError, match="runs/rates: no learning rate for PreNorm; run the suite"):
        rates.rate(rr.PreNorm(), 12, "data/tales")


def test_one_rate_alone_is_no_choice():
    with pytest.raises(UserError, match="here: WAV at 12 layers on tales has one learning rate"):
        best_rates([_run(rr.WAV(), 12, 0.1, 0, 1.0)], "here")
    with pytest.raises(UserError, match="here: no finished run with a loss"):
        best_rates([_run(rr.WAV(), 12, 0.1, 0, None)], "here")
