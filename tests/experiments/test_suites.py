import dataclasses
from collections import Counter

import pytest

import resroute as rr
from resroute.config import UserError, to_dict
from resroute.experiments.rates import Rates
from resroute.experiments.study import Contrast
from resroute.experiments.suites import SUITES, Design, make_suite, series_label


@pytest.fixture
def base():
    model = rr.GPTConfig(vocab_size=20, num_layers=4, dim=32, num_heads=2, context=16)
    return rr.TrainConfig(model=model, data="data/a", steps=40, warmup_steps=4, evaluate_every=10)


def _kinds(suite):
    return [(series_label(c), c.model.num_layers, c.seed, c.data) for c in suite.cells]


def test_paper_has_whole_comparisons_first_then_seeds_of_the_contrast_then_other_methods(base):
    other = dataclasses.replace(base, data="data/b")
    suite = make_suite("paper", Design(bases=(base, other), layers=(12, 48), seeds=2))
    kinds = _kinds(suite)

    three = ("PreNorm", "Block AttnRes", "WAV")
    assert kinds[:12] == [
        (series, depth, 0, corpus)
        for corpus in ("data/a", "data/b")
        for depth in (48, 12)
        for series in three
    ]
    assert [kind[2] for kind in kinds[12:24]] == [1] * 12
    # three more seeds of the contrast's methods at the greatest depth alone
    assert kinds[24:36] == [
        (series, 48, seed, corpus)
        for seed in (2, 3, 4)
        for corpus in ("data/a", "data/b")
        for series in three[1:]
    ]
    assert Counter(kind[0] for kind in kinds[36:]) == dict.fromkeys(
        ("ReZero", "LayerScale", "HAARES", "Delta AttnRes", "Full AttnRes"), 8
    )
    assert suite.primary == Contrast(treatment="WAV", baseline="Block AttnRes", num_layers=48)
    assert suite.baseline == "PreNorm"


def test_cells_differ_in_method_depth_seed_and_corpus_alone(base):
    suite = make_suite("paper", Design(bases=(base,), layers=(12, 24), seeds=2))

    for cell in suite.cells:
        model = dataclasses.replace(
            cell.model, num_layers=base.model.num_layers, residual=base.model.residual
        )
        assert dataclasses.replace(cell, model=model, seed=base.seed) == base


def test_paper_of_chosen_methods_without_the_contrast_declares_none(base):
    suite = make_suite("paper", Design(bases=(base,), layers=(4,), methods=(rr.PreNorm(),)))

    assert suite.primary is None
    assert _kinds(suite) == [("PreNorm", 4, seed, "data/a") for seed in (0, 1, 2)]


def test_ablation_changes_one_thing_at_a_time_and_controls_have_equal_numbers_of_sources(base):
    suite = make_suite("ablation", Design(bases=(base,), layers=(12,), seeds=1))
    plain = to_dict(rr.WAV(num_blocks=4))

    changes = []
    for cell in suite.cells:
        found = to_dict(cell.model.residual)
        if found["type"] == "wav":
            changes.append({k: v for k, v in found.items() if v != plain[k]})
    assert changes[:8] == [
        {},
        {"bases": ["duplicate", "duplicate_2"]},
        {"bases": ["random", "random_2"]},
        {"learn_bases": True},
        {"bases": ["phase"]},
        {"bases": ["split"]},
        {"bases": ["duplicate"]},
        {"bases": ["random"]},
    ]
    # beta, fixed or trainable
    beta = [c for c in changes if "detail_bias" in c or "learn_detail_bias" in c]
    assert [c.get("detail_bias", -2.0) for c in beta] == [0.0, -1.0, -4.0, 0.0, -1.0, -2.0, -4.0]
    assert [c.get("learn_detail_bias", True) for c in beta] == [True] * 3 + [False] * 4
    assert [c["rho_max"] for c in changes if "rho_max" in c] == [1.0, 4.0, None]
    assert [c["matching"] for c in changes if "matching" in c] == ["off", "attached"]
    assert {"bases": []} in changes
    assert {"bases": ["phase"]} in changes
    assert {"learn_bases": True} in changes
    assert {"bias_running": False} in changes
    assert {"details_in_readout": True} in changes
    blocks = Counter((series_label(c), c.model.residual.num_blocks) for c in suite.cells)
    assert [blocks["Block AttnRes", n] for n in (2, 4, 6, 12)] == [1, 1, 1, 1]
    assert [blocks["WAV", n] for n in (2, 6, 12)] == [1, 1, 1]


def test_ablation_ends_a_group_before_the_next_begins(base):
    suite = make_suite("ablation", Design(bases=(base,), layers=(12,), seeds=2))
    first = ["WAV", "Block AttnRes", "WAV (duplicate + duplicate_2)", "WAV (random + random_2)"]

    assert [(series_label(c), c.seed) for c in suite.cells[:9]] == [
        *((label, 0) for label in first),
        *((label, 1) for label in first),
        ("WAV (learn_bases=True)", 0),
    ]


def test_blocks_never_outnumber_layers(base):
    suite = make_suite("ablation", Design(bases=(base,), layers=(4,), seeds=1))

    assert {c.model.residual.num_blocks for c in suite.cells} == {2, 4}


def test_learning_rate_width_and_horizon_move_along_their_axis(base):
    design = Design(bases=(base,), layers=(4,), seeds=1, axis=(1.0, 2.0))

    rates = make_suite("learning_rate", design)
    assert [c.learning_rate for c in rates.cells] == [1.0, 2.0] * 3
    steps = make_suite("horizon", design)
    assert [(c.steps, c.warmup_steps, c.evaluate_every) for c in steps.cells[:2]] == [
        (40, 4, 10),
        (80, 8, 20),
    ]
    widths = make_suite("width", dataclasses.replace(design, axis=(16.0, 64.0)))
    # heads stay 16 wide
    assert [(c.model.dim, c.model.num_heads) for c in widths.cells[:2]] == [(16, 1), (64, 4)]
    with pytest.raises(UserError, match="a width of 40 is not a multiple of the head width 16"):
        make_suite("width", dataclasses.replace(design, axis=(40.0,)))
    with pytest.raises(UserError, match=r"multiple of the steps must be a whole number.*1\.5"):
        make_suite("horizon", dataclasses.replace(design, axis=(1.5,)))


@pytest.mark.parametrize(
    ("heads", "dim", "widths"),
    [(3, 48, [32, 48, 96]), (1, 16, [16, 32]), (4, 64, [32, 64, 128])],
)
def test_widths_are_whole_heads_by_default(base, heads, dim, widths):
    model = dataclasses.replace(base.model, num_heads=heads, dim=dim)
    design = Design(bases=(dataclasses.replace(base, model=model),), layers=(4,), seeds=1)
    cells = make_suite("width", design).cells
    assert [c.model.dim for c in cells] == widths * 3
    assert {c.model.dim // c.model.num_heads for c in cells} == {16}


@pytest.mark.parametrize("suite", ["paper", "learning_rate", "width", "horizon", "ablation"])
def test_a_baseline_is_one_of_the_methods(base, suite):
    design = Design(bases=(base,), layers=(4,), seeds=1)
    with_all = make_suite(suite, design).baseline
    assert with_all == ("WAV" if suite == "ablation" else "PreNorm")
    some = dataclasses.replace(design, methods=(rr.BlockAttnRes(num_blocks=4), rr.HAARES()))
    assert make_suite(suite, some).baseline is None


def test_each_method_takes_its_own_rate(base):
    rates = Rates(
        by_cell={("PreNorm", 4, "a"): 0.5, ("WAV", 4, "a"): 0.25}, where="here", told="By hand."
    )
    design = Design(
        bases=(base,), layers=(4,), seeds=1, methods=(rr.PreNorm(), rr.WAV()), rates=rates
    )

    found = make_suite("horizon", dataclasses.replace(design, axis=(1,)))
    assert [c.learning_rate for c in found.cells] == [0.5, 0.25]
    assert found.rates == "By hand."


def test_designs_that_name_nothing_are_refused(base):
    with pytest.raises(UserError, match=r"unknown suite 'papers' \(did you mean 'paper'\?\)"):
        make_suite("papers", Design(bases=(base,)))
    for empty in ({"bases": ()}, {"layers": ()}, {"seeds": 0}):
        with pytest.raises(UserError, match="at least one corpus, one depth and one seed"):
            make_suite("paper", Design(**{"bases": (base,), **empty}))


@pytest.mark.parametrize("name", SUITES)
def test_no_cell_comes_twice(base, name):
    suite = make_suite(name, Design(bases=(base, base), layers=(4, 4), seeds=1))

    assert len(set(suite.cells)) == len(suite.cells)
