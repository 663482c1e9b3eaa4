import json
import math
from pathlib import Path

import pytest

from resroute.analysis import Run
from resroute.config import UserError, to_dict
from resroute.experiments.compare import compare, verdict_text
from resroute.experiments.series import series_names
from resroute.experiments.study import Contrast, Setting, series_of
from resroute.experiments.suites import Design, make_suite
from resroute.model import GPTConfig
from resroute.residual import HAARES, WAV, BlockAttnRes, PreNorm
from resroute.training import TrainConfig

PRIMARY = Contrast(treatment="WAV", baseline="Block AttnRes", num_layers=4)
# 0.975 quantile of t with two degrees of freedom
QUANTILE = 0.95 / math.sqrt(2 * 0.975 * 0.025)


def as_run(config, loss, *, name=None, corpus="tales", curve=None, speed=1000.0, **summary):
    """A finished run as it is read; `curve` has validation losses by step."""
    tokens = config.batch_size * config.model.context
    residual = config.model.residual
    return Run(
        path=Path("nowhere"),
        name=name or f"{config.run_name(corpus)}",
        config={
            "format_version": 1,
            **to_dict(config),
            "corpus": {"name": corpus, "fingerprint": f"{corpus}-digits"},
        },
        metrics=[
            {"kind": "validation", "step": step, "tokens": step * tokens, "loss": value}
            for step, value in (curve or {}).items()
        ],
        summary={
            "label": residual.label,
            "method": residual.type_name,
            "corpus": corpus,
            "num_layers": config.model.num_layers,
            "seed": config.seed,
            "steps": config.steps,
            "tokens": config.steps * tokens,
            "validation_loss": loss,
            "floor": None,
            "floor_exact": None,
            "parameters": 5000,
            "tokens_per_second": speed,
            "peak_memory_bytes": None,
            "memory_kind": None,
            "device": "cpu",
            "precision": "float32",
            **summary,
        },
        depth_weights=None,
        sample=None,
    )


def run(residual, loss, seed=0, *, num_layers=4, rate=1e-3, options=None, **rest):
    model = GPTConfig(vocab_size=9, context=10, num_layers=num_layers, num_heads=1, dim=8,
                      residual=residual)  # fmt: skip
    fields = {"batch_size": 1, "steps": 100, "warmup_steps": 0, **(options or {})}
    config = TrainConfig(model=model, data="tales", seed=seed, learning_rate=rate, **fields)
    return as_run(config, loss, **rest)


def seeds(residual, losses, **rest):
    return [run(residual, loss, seed, **rest) for seed, loss in enumerate(losses)]


def test_runs_are_averaged_over_seeds_and_compared_by_seed():
    runs = [*seeds(WAV(), [1.0, 2.0, 4.0, 9.0]), *seeds(PreNorm(), [1.5, 2.2, 4.1])]
    study = compare(runs)
    assert [(g.series, g.loss.n, g.loss.mean) for g in study.groups] == [
        ("PreNorm", 3, pytest.approx(2.6)), ("WAV", 4, 4.0),
    ]  # fmt: skip
    assert study.best == study.groups
    assert study.groups[0].setting == Setting(
        corpus="tales", num_layers=4, width=8, context=10, tokens=1000
    )
    (found,) = study.differences
    assert (found.treatment.series, found.baseline.series) == ("WAV", "PreNorm")
    assert dict(found.by_seed) == pytest.approx({0: -0.5, 1: -0.2, 2: -0.1})
    # as in test_statistics
    assert found.loss.mean == pytest.approx(-0.8 / 3)
    assert found.loss.high == pytest.approx(-0.8 / 3 + QUANTILE * math.sqrt(0.13 / 3 / 3))
    assert found.p_value == found.p_holm == pytest.approx(0.1567, abs=1e-4)
    assert found.verdict == "no significant difference"
    assert found.bits.mean == pytest.approx(-0.8 / 3 / math.log(2))
    by_hand = [math.exp(a) - math.exp(b) for a, b in ((1.0, 1.5), (2.0, 2.2), (4.0, 4.1))]
    assert found.perplexity.mean == pytest.approx(sum(by_hand) / 3)
    assert study.notes == ()


def test_losses_are_per_character_and_perplexity_is_of_a_token():
    (group,) = compare([run(WAV(), 3.0, nats_per_character=1.25)]).groups
    assert group.loss.mean == 1.25
    runs = [
        run(WAV(), 3.0, nats_per_character=1.25),
        run(PreNorm(), 2.0, nats_per_character=1.0),
    ]
    (found,) = compare(runs).differences
    assert (found.loss.mean, found.bits.mean) == (0.25, pytest.approx(0.25 / math.log(2)))
    assert found.perplexity.mean == pytest.approx(math.exp(3) - math.exp(2))
    assert found.verdict == "too few seeds"
    assert verdict_text(found) == "too few seeds (n=1)"


def test_the_primary_contrast_stands_alone_and_all_else_is_corrected():
    clear, noisy = [1.0, 1.1, 1.2], [1.3, 1.35, 1.55]
    runs = []
    for num_layers in (2, 4):
        runs += seeds(PreNorm(), [1.4, 1.5, 1.6], num_layers=num_layers)
        runs += seeds(BlockAttnRes(), noisy, num_layers=num_layers)
        runs += seeds(WAV(), clear, num_layers=num_layers)
    study = compare(runs, primary=PRIMARY)
    told = [
        (d.treatment.series, d.baseline.series, d.treatment.setting.num_layers, d.is_primary)
        for d in study.differences
    ]
    assert told == [
        ("WAV", "Block AttnRes", 4, True),
        ("Block AttnRes", "PreNorm", 2, False),
        ("WAV", "PreNorm", 2, False),
        ("WAV", "Block AttnRes", 2, False),
        ("Block AttnRes", "PreNorm", 4, False),
        ("WAV", "PreNorm", 4, False),
    ]
    primary, *others = study.differences
    # differences -0.3, -0.25, -0.35: t = 0.3 / (0.05 / sqrt 3) = 10.39, p = 1 - t / sqrt(2 + t^2)
    t = 6 * math.sqrt(3)
    assert primary.p_value == pytest.approx(1 - t / math.sqrt(2 + t * t))
    assert (primary.p_holm, primary.verdict) == (None, "better")
    reach = QUANTILE * 0.05 / math.sqrt(3)
    assert verdict_text(primary) == (
        f"WAV better by 0.300 ({0.3 - reach:.3f} .. {0.3 + reach:.3f}), n=3"
    )
    # the same numbers are no find among five tests: WAV - PreNorm takes the first two places
    same = others[2]
    assert same.p_value == pytest.approx(primary.p_value)
    assert same.p_holm == pytest.approx(3 * primary.p_value)
    assert [d.verdict for d in others] == [
        "no significant difference", "better", "better", "no significant difference", "better",
    ]  # fmt: skip


def test_a_find_among_several_has_to_survive_the_correction():
    # differences -0.3, -0.2, -0.4: t = 0.3 / (0.1 / sqrt 3) = 5.196, p = 1 - 5.196 / sqrt 29
    runs = [*seeds(PreNorm(), [0.0, 0.1, 0.1]), *seeds(WAV(), [-0.3, -0.1, -0.3])]
    (alone,) = compare(runs).differences
    assert alone.p_holm == alone.p_value == pytest.approx(0.0351, abs=1e-4)
    assert alone.verdict == "better"
    more = seeds(BlockAttnRes(), [0.0, 0.2, 0.05])
    _, among = compare([*runs, *more]).differences
    assert among.loss == alone.loss
    assert among.p_holm == pytest.approx(2 * alone.p_value)
    assert among.verdict == "no significant difference"
    # declared beforehand, it is one test again
    declared = Contrast(treatment="WAV", baseline="PreNorm", num_layers=4)
    primary = compare([*runs, *more], primary=declared).differences[0]
    assert (primary.is_primary, primary.verdict) == (True, "better")


@pytest.mark.parametrize("sign", [1, -1])
def test_a_primary_contrast_whose_interval_holds_zero_is_no_find(sign):
    runs = [*seeds(WAV(), [1.0, 1.1, 1.2]), *seeds(BlockAttnRes(), [1.1, 1.05, 1.4 * sign])]
    (found,) = compare(runs, baseline="Block AttnRes", primary=PRIMARY).differences
    assert (found.is_primary, found.verdict) == (True, "no significant difference")


def test_each_corpus_has_one_primary_contrast_that_of_its_largest_setting():
    runs = []
    for corpus in ("tales", "text"):
        for steps in (100, 200) if corpus == "tales" else (100,):
            for method, losses in ((WAV(), [2.0, 2.1]), (BlockAttnRes(), [1.0, 1.2])):
                runs += seeds(method, losses, corpus=corpus, options={"steps": steps})
    study = compare(runs, primary=PRIMARY)
    assert [
        (d.treatment.setting.corpus, d.treatment.setting.tokens, d.is_primary)
        for d in study.differences
    ] == [("tales", 2000, True), ("text", 1000, True), ("tales", 1000, False)]


def test_a_contrast_the_other_way_round_is_another_one():
    runs = [*seeds(WAV(), [1.0, 1.1]), *seeds(BlockAttnRes(), [1.2, 1.4])]
    study = compare(runs, baseline="WAV", primary=PRIMARY)
    assert [(d.treatment.series, d.is_primary) for d in study.differences] == [
        ("WAV", True), ("Block AttnRes", False),
    ]  # fmt: skip
    again = compare(runs, baseline="Block AttnRes", primary=PRIMARY)
    assert [d.is_primary for d in again.differences] == [True]


def test_series_show_options_that_differ_and_are_not_at_their_default():
    runs = [
        run(WAV(num_blocks=2, key_gain=False), 1.0),
        run(WAV(num_blocks=2, key_gain=False, rho_max=None), 1.0),
        run(WAV(num_blocks=2, key_gain=False, rho_max=1.0, matching="off"), 1.0),
        run(HAARES(num_blocks=2), 1.0),
        run(PreNorm(), 1.0),
    ]
    assert series_names(runs) == [
        "WAV", "WAV (rho_max=None)", "WAV (matching=off, rho_max=1.0)", "HAARES", "PreNorm",
    ]  # fmt: skip
    # which of two is the usual one, only the default says
    assert series_names([run(WAV(detail_bias=b), 1.0) for b in (0.0, -1.0)]) == [
        "WAV (detail_bias=0.0)", "WAV (detail_bias=-1.0)",
    ]  # fmt: skip
    options = [run(WAV(detail_bias=b), 1.0) for b in (-1.0, -4.0, -2.0, 0.0)]
    assert series_of(compare(options)) == [
        "WAV", "WAV (detail_bias=-4.0)", "WAV (detail_bias=-1.0)", "WAV (detail_bias=0.0)",
    ]  # fmt: skip


def test_block_counts_are_shown_where_they_are_the_question():
    deeper = [run(WAV(num_blocks=b), 1.0, num_layers=layers) for b, layers in ((2, 4), (4, 8))]
    assert series_names(deeper) == ["WAV", "WAV"]
    assert compare(deeper).notes == ("WAV: num_blocks is 2 at 4 layers, 4 at 8 layers.",)
    several = [run(WAV(num_blocks=b), 1.0) for b in (2, 4)]
    assert series_names([*deeper, *several]) == ["WAV", "WAV (num_blocks=4)"] * 2
    usual = [run(BlockAttnRes(num_blocks=4), 1.0), run(PreNorm(), 1.0)]
    assert series_names([*several, *usual])[:2] == ["WAV (num_blocks=2)", "WAV"]
    more = [run(WAV(num_blocks=2, rho_max=1.0), 1.0)]
    assert series_names([*several, *usual, *more])[:2] == ["WAV", "WAV (num_blocks=4)"]
    default = [run(WAV(), 1.0), run(WAV(num_blocks=2), 1.0), run(WAV(num_blocks=2), 1.0, 1)]
    assert series_names(default) == ["WAV", *["WAV (num_blocks=2)"] * 2]


@pytest.mark.parametrize("suite", ["paper", "ablation"])
def test_every_method_of_a_suite_has_a_name_and_its_baseline_is_one(suite):
    base = TrainConfig(
        model=GPTConfig(vocab_size=9, num_heads=1, dim=8), data="tales", steps=4, warmup_steps=0
    )
    made = make_suite(suite, Design(bases=(base,), layers=(12, 24), seeds=2))
    runs = [as_run(cell, 1.0 + 0.01 * cell.seed) for cell in made.cells]
    study = compare(runs, baseline=made.baseline, primary=made.primary)
    residuals = {cell.model.residual for cell in made.cells}
    assert len(series_of(study)) == len(residuals)
    assert made.baseline in series_of(study)
    assert len(study.differences) == 2 * (len(residuals) - 1) + 2 * (made.primary is not None)
    assert study.differences[0].is_primary == (made.primary is not None)
    assert study.notes == ()


def test_of_several_learning_rates_the_best_with_most_seeds_is_compared():
    runs = [
        *seeds(WAV(), [1.0, 1.2], rate=1e-3),
        *seeds(WAV(), [0.8, 1.1], rate=2e-3),
        *seeds(WAV(), [0.9, 1.3], rate=4e-3),
        # one of its seeds diverged, or was not run
        run(WAV(), 0.1, rate=3e-3),
        *seeds(PreNorm(), [1.5, 1.7], rate=1e-3),
        *seeds(PreNorm(), [1.5, 1.4], rate=9e-3),
    ]
    study = compare(runs)
    assert len(study.groups) == 6
    assert [(g.series, g.learning_rate) for g in study.best] == [("PreNorm", 9e-3), ("WAV", 2e-3)]
    (found,) = study.differences
    assert dict(found.by_seed) == pytest.approx({0: -0.7, 1: -0.3})
    assert study.notes == (
        "PreNorm at 4 layers on tales does best at the highest of its 2 learning rates, 0.009; "
        "a better one may lie beyond.",
    )


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        ({"options": {"batch_size": 2, "steps": 50}}, r"steps \(100 and 50\), batch_size \(1 and"),
        ({"options": {"weight_decay": 0.0}}, r"weight_decay \(0.1 and 0.0\)"),
        ({"options": {"evaluation_windows": 8}}, "evaluation_windows"),
        ({"options": {"order": "windows"}}, "order"),
        ({"precision": "bfloat16"}, r"precision \(float32 and bfloat16\)"),
        ({"device": "cuda:0"}, r"device \(cpu and cuda\)"),
        ({"torch": "2.9.0"}, r"torch \(2.8.0 and 2.9.0\)"),
    ],
)
def test_runs_that_differ_in_more_than_the_seed_are_not_averaged_nor_compared(change, fields):
    first = run(WAV(), 1.0, name="first", torch="2.8.0")
    other = {"torch": "2.8.0", "name": "other", **change}
    with pytest.raises(UserError, match=f"first and other cannot be averaged, .*{fields}") as told:
        compare([first, run(WAV(), 1.0, 1, **other)])
    assert str(told.value).count("\n") == 1
    # PreNorm comes first in tables
    name = fields.partition(" ")[0]
    with pytest.raises(UserError, match=f"other and first cannot be compared, .*{name}"):
        compare([first, run(PreNorm(), 1.0, 1, **other)])


def test_what_does_not_change_a_run_does_not_stand_in_the_way():
    runs = [
        run(WAV(), 1.0, 0, torch="2.8.0", commit="a1"),
        run(WAV(), 1.0, 1, device="cpu", commit="a1, b2"),
        run(WAV(), 1.0, 2, options={"log_every": 3, "keep": 1, "precision": "float32"}),
        run(PreNorm(), 2.0, 0, rate=7e-3, parameters=4000),
    ]
    study = compare(runs)
    assert [group.loss.n for group in study.groups] == [1, 3]
    assert study.notes == ("The runs were made by several commits: a1, b2.",)


def test_one_seed_counts_once():
    with pytest.raises(UserError, match=r"a and b are two runs of one configuration and seed \(0"):
        compare([run(WAV(), 1.0, name="a"), run(WAV(), 1.1, name="b")])


def test_another_text_of_the_same_name_is_another_corpus():
    first, other = run(WAV(), 1.0, name="a"), run(WAV(), 1.0, 1, name="b")
    other.config["corpus"]["fingerprint"] = "other"
    with pytest.raises(UserError, match="a and b cannot be averaged, they differ in corpus"):
        compare([first, other])


def test_versions_are_read_from_the_folder_of_a_run(tmp_path):
    def at(name, torch, seed):
        (tmp_path / name).mkdir()
        sessions = [{"torch": torch, "commit": None}, {"torch": torch, "commit": "c3"}]
        (tmp_path / name / "env.json").write_text(json.dumps({"sessions": sessions}))
        made = run(WAV(), 1.0, seed, name=name)
        return Run(**{**vars(made), "path": tmp_path / name})

    with pytest.raises(UserError, match=r"torch \(2.7 and 2.8\)"):
        compare([at("a", "2.7", 0), at("b", "2.8", 1)])
    assert compare([at("c", "2.7", 0), at("d", "2.7", 1)]).groups[0].loss.n == 2


def test_runs_without_a_loss_are_left_out_and_named():
    study = compare([run(WAV(), None, 0, name="lost"), run(WAV(), 1.0, 1)])
    assert [group.loss.n for group in study.groups] == [1]
    assert study.notes == ("Left out, since they have no validation loss: lost.",)
    assert compare([]).groups == ()


def test_a_baseline_or_contrast_without_runs_is_a_note():
    runs = [*seeds(WAV(), [1.0, 1.1]), run(BlockAttnRes(), 1.0, 5, num_layers=2)]
    study = compare(runs, baseline="WAVE", primary=PRIMARY)
    assert study.differences == ()
    assert study.notes == (
        "The baseline 'WAVE' (did you mean 'WAV'?) has no finished run, so nothing is compared "
        "with it.",
        "The primary contrast, WAV minus Block AttnRes at 4 layers, has no finished pair of runs "
        "yet.",
    )
    apart = [run(WAV(), 1.0, 0), run(PreNorm(), 1.0, 1)]
    assert compare(apart).notes == ("WAV and PreNorm share no seed at 4 layers on tales.",)


def test_the_gap_over_training_and_where_it_stays_open():
    curves = {
        (WAV(), 0): {0: 3.0, 25: 2.0, 50: 1.5, 75: 1.2, 100: 1.0},
        (WAV(), 1): {0: 3.1, 25: 2.0, 50: 1.5, 75: 1.2, 100: 1.0},
        (PreNorm(), 0): {0: 3.0, 20: 9.0, 25: 1.9, 50: 1.6, 75: 1.4, 100: 1.3},
        (PreNorm(), 1): {0: 3.0, 25: 2.3, 50: 1.602, 75: 1.402, 100: 1.301},
        # its partner is missing
        (PreNorm(), 2): {0: 3.0},
    }
    runs = [run(r, c[max(c)], seed, curve=c) for (r, seed), c in curves.items()]
    (gap,) = compare(runs).gaps
    assert gap.tokens == (0, 250, 500, 750, 1000)
    assert gap.mean == pytest.approx((0.05, -0.1, -0.101, -0.201, -0.3005))
    # two seeds: half of what lies between the differences, times 12.706
    quantile = math.tan(0.475 * math.pi)
    assert gap.high[2] == pytest.approx(-0.101 + quantile * 0.001)
    assert gap.low[1] == pytest.approx(-0.1 - quantile * 0.2)
    assert gap.open_from == 500
    alone = compare([r for r in runs if r.seed == 0])
    (gap,) = alone.gaps
    assert (gap.low, gap.high, gap.open_from) == ((None,) * 5, (None,) * 5, None)


def test_a_gap_that_changes_sides_or_closes_again_is_not_open():
    def gap_of(*means):
        wav = {25 * i: 2.0 + mean for i, mean in enumerate(means)}
        flat = {25 * i: 2.0 for i in range(len(means))}
        runs = [run(WAV(), 1.0, seed, curve=wav) for seed in (0, 1)]
        runs += [run(PreNorm(), 1.0, seed, curve=flat) for seed in (0, 1)]
        return compare(runs).gaps[0]

    assert gap_of(-0.5, 0.5, 0.5).open_from == 250
    assert gap_of(0.5, 0.5, 0.0).open_from is None
    assert gap_of(0.5, 0.5).open_from == 0


def test_at_equal_time_the_slower_method_is_read_off_its_curve():
    curve = {0: 3.0, 50: 2.0, 100: 1.0}
    runs = [
        run(PreNorm(), 1.5, 0, curve={0: 3.0, 100: 1.5}, speed=100.0),
        run(WAV(), 1.0, 0, curve=curve, speed=70.0),
        # the median of three speeds is 75, so WAV gets through 750 of 1000 tokens
        run(WAV(), 1.0, 1, curve={0: 3.0, 50: 2.2, 100: 1.0}, speed=75.0),
        run(WAV(), 1.0, 2, curve=curve, speed=80.0),
    ]
    first, second = compare(runs).equal_compute
    assert (first.group.series, first.seconds, first.tokens) == ("PreNorm", 10.0, 1000.0)
    assert first.loss.mean == 1.5
    assert (second.group.series, second.seconds, second.tokens) == ("WAV", 10.0, 750.0)
    assert second.loss.mean == pytest.approx((1.5 + 1.6 + 1.5) / 3)
    assert compare(runs[1:]).equal_compute == ()
    # without a curve, an evaluation before that time in every run, or a speed
    assert compare([runs[0], run(WAV(), 1.0, speed=50.0)]).equal_compute == ()
    # speeds that tell more of what else the machine did than of the method
    noisy = compare([*runs, run(WAV(), 1.0, 3, curve=curve, speed=55.0)])
    assert noisy.equal_compute == ()
    (note,) = (note for note in noisy.notes if "equal training time" in note)
    assert "are left out at 4 layers on tales: speeds of equal runs differ up to 1.5 times" in note
    longer = run(PreNorm(), 1.0, options={"steps": 200}, speed=100.0)
    (note,) = (n for n in compare([*noisy.groups[1].runs, longer]).notes if "equal training" in n)
    assert "are left out at 4 layers, tokens 1,000 on tales: speeds" in note
    assert not any("equal training time" in note for note in compare(runs).notes)
    # a run at a rate that is not the best one does the same work
    other_rate = run(WAV(), 1.3, 0, rate=3e-3, curve=curve, speed=55.0)
    assert compare([*runs, other_rate]).equal_compute == ()
    late = run(WAV(), 1.0, 3, curve={80: 1.2, 100: 1.0}, speed=75.0)
    assert compare([*runs, late]).equal_compute == ()
    assert compare([runs[0], run(WAV(), 1.0, curve=curve, speed=None)]).equal_compute == ()


def test_a_primary_contrast_has_no_verdict_before_its_seeds_are_there():
    contrast = Contrast(treatment="WAV", baseline="PreNorm", num_layers=4)
    runs = [*seeds(WAV(), [1.0, 1.1, 1.2]), *seeds(PreNorm(), [2.0, 2.1, 2.201])]
    (found,) = compare(runs, primary=contrast, primary_seeds=5).differences
    assert (found.verdict, found.planned) == ("interim", 5)
    assert verdict_text(found) == "an interim look at n=3 of 5, no verdict"
    (found,) = compare(runs, primary=contrast, primary_seeds=3).differences
    assert found.verdict == "better"
    # one corpus is one test
    assert found.p_holm is None


def test_a_primary_contrast_on_two_corpora_is_two_tests():
    contrast = Contrast(treatment="WAV", baseline="PreNorm", num_layers=4)
    runs = [
        one
        for corpus, noise in (("tales", 0.01), ("letters", 0.1))
        for residual, loss in ((WAV(), 1.0), (PreNorm(), 2.0))
        for one in seeds(
            residual, [loss, loss + 0.1 + noise * (loss > 1), loss + 0.2], corpus=corpus
        )
    ]
    found = compare(runs, primary=contrast).differences
    assert all(one.is_primary for one in found)
    small, large = sorted(found, key=lambda one: one.p_value)
    assert small.p_holm == pytest.approx(2 * small.p_value)
    assert large.p_holm == pytest.approx(max(large.p_value, small.p_holm))


def test_verdicts_in_words():
    def words(ours, theirs):
        (found,) = compare([*seeds(WAV(), ours), *seeds(PreNorm(), theirs)]).differences
        return verdict_text(found)

    assert words([2.0, 2.1, 2.2], [1.0, 1.1, 1.201]).startswith("WAV worse by 1.000 (0.998 .. 1.00")
    assert words([1.0, 2.0, 1.5], [1.1, 1.9, 1.5]) == "no significant difference (n=3)"
    # small effects keep two digits
    base = [1.0, 1.1, 1.2]
    small = [b - d for b, d in zip(base, (0.00041, 0.00042, 0.00043), strict=True)]
    assert words(small, base) == "WAV better by 0.00042 (0.00040 .. 0.00044), n=3"


def test_a_run_whose_configuration_tells_little_is_compared_too():
    def bare(label, method, seed, loss):
        made = run(PreNorm(), loss, seed, label=label, method=method)
        made.config.clear()
        made.config.update({"model": {"num_layers": 4}, "seed": seed})
        return made

    study = compare([bare("Mine", "mine", 0, 1.0), bare("PreNorm", "pre_norm", 0, 1.25)])
    assert [(d.treatment.series, d.loss.mean) for d in study.differences] == [("Mine", -0.25)]
    assert study.groups[0].setting.width == 0
