import dataclasses
import math

import pytest

from resroute.analysis import DepthWeights, find_runs
from resroute.experiments.compare import compare
from resroute.experiments.report import views
from resroute.experiments.report.looks import Look, looks
from resroute.residual import (
    HAARES,
    WAV,
    BlockAttnRes,
    DeltaAttnRes,
    FullAttnRes,
    LayerScale,
    PreNorm,
    ReZero,
)

# 0.975 quantiles of t with one and two degrees of freedom
ONE, TWO = 12.706204736, 4.302652730


@pytest.fixture
def study_of(tmp_path):
    def study(**options):
        return compare(find_runs(tmp_path / "runs"), **options)

    return study


def test_a_method_has_its_own_look_and_its_variants_what_is_left(make_run, study_of):
    # HAARES stands before WAV, whose colour it must not take
    variants = [WAV(num_blocks=4, rho_max=rho) for rho in (1.0, 3.0, 4.0, 5.0, 6.0, 7.0, None)]
    for i, residual in enumerate([PreNorm(), HAARES(num_blocks=4), WAV(num_blocks=4), *variants]):
        make_run(f"r{i}", residual)
    make_run("other", label="Other", method="other")
    found = looks(study_of())
    assert found["PreNorm"] == Look(colour=0, dash=0, marker=0)
    assert found["WAV"] == Look(colour=6, dash=0, marker=6)
    assert found["Other"].colour == 7
    assert len({(look.colour, look.dash) for look in found.values()}) == len(found) == 11
    assert [look.dash for look in found.values()].count(0) == 8


def test_a_colour_that_is_shared_goes_with_another_dash_and_mark(make_run, study_of):
    blocks = (BlockAttnRes, DeltaAttnRes, HAARES, WAV)
    methods = [PreNorm(), ReZero(), LayerScale(), FullAttnRes(), *(m(num_blocks=4) for m in blocks)]
    for i, residual in enumerate(methods):
        make_run(f"r{i}", residual)
    found = looks(study_of())
    assert len(found) == 8
    # seven colours for eight methods
    first, second = found["PreNorm"], found["HAARES"]
    assert first.colour == second.colour == 0
    assert (first.dash, first.marker) == (0, 0)
    assert (second.dash, second.marker) == (1, 1)


def test_more_series_than_looks_share_them(make_run, study_of):
    for i in range(40):
        make_run(f"r{i:02}", WAV(num_blocks=4, detail_bias=-float(i)))
    assert len(looks(study_of())) == 40


def test_curves_are_means_over_seeds_where_all_have_been_evaluated(make_run, study_of):
    first, second = make_run("a", final=0.7), make_run("b", final=0.8, seed=1)
    record = '{{"kind": "validation", "step": {0}, "tokens": {0}, "loss": {1}}}\n'
    for path, losses in ((first, (3.0, 1.0)), (second, (3.5, 1.5))):
        at = zip((10, 20), losses, strict=True)
        (path / "metrics.jsonl").write_text("".join(record.format(*point) for point in at))
    with (second / "metrics.jsonl").open("a") as file:
        file.write(record.format(30, 0.5))
    chart = views.curves(study_of())
    assert chart is not None
    (panel,) = chart.panels
    assert (panel.title, panel.floor) == ("4 layers", 0.157)
    assert panel.floor_text == "entropy floor 0.157 nats/char, lower bound"
    (line,) = panel.lines
    assert (line.name, line.x, line.y) == ("WAV", (10.0, 20.0), (3.25, 1.25))
    # deviation 0.5 / sqrt(2) of two seeds, over sqrt(2)
    assert line.low == pytest.approx((3.25 - ONE * 0.25, 1.25 - ONE * 0.25))
    assert line.high == pytest.approx((3.25 + ONE * 0.25, 1.25 + ONE * 0.25))
    assert [(t.run.seed, t.x[-1], t.y[-1]) for t in line.traces] == [(0, 20, 1.0), (1, 30, 0.5)]
    assert [run.seed for run in line.runs[0]] == [0, 1]


def test_a_trend_has_a_panel_for_what_is_equal_besides(make_run, study_of):
    for depth, corpus, seed, final in [
        (4, "tales", 0, 0.70), (4, "tales", 1, 0.72), (8, "tales", 0, 0.60),
        (4, "news", 0, 0.9), (8, "news", 0, 0.8), (4, "news", 1, 0.96),
    ]:  # fmt: skip
        name = f"{corpus}-{depth}-{seed}"
        make_run(name, num_layers=depth, corpus=corpus, seed=seed, final=final)
    (chart,) = views.trends(study_of())
    assert (chart.name, chart.x_label, chart.is_log) == ("trend", "layers", False)
    news, tales = chart.panels
    assert (news.title, tales.title) == ("news", "tales")
    (line,) = tales.lines
    assert line.x == (4.0, 8.0)
    assert line.y == pytest.approx((0.71, 0.6))
    assert line.low == (pytest.approx(0.71 - ONE * 0.01), None)
    assert [len(runs) for runs in line.runs] == [2, 1]
    assert sorted(t.y[0] for t in line.traces) == [0.6, 0.7, 0.72]


def test_learning_rates_have_a_trend_and_all_else_has_the_best(make_run, study_of):
    for depth in (4, 8):
        for rate, final in ((1e-3, 0.8), (2e-3, 0.6 if depth == 4 else 0.7)):
            make_run(f"r{depth}-{rate}", num_layers=depth, rate=rate, final=final)
    over_depth, over_rate = views.trends(study_of())
    assert over_depth.panels[0].lines[0].y == (0.6, 0.7)
    assert (over_rate.name, over_rate.is_log) == ("trend_learning_rate", True)
    assert [panel.title for panel in over_rate.panels] == ["4 layers", "8 layers"]
    assert [panel.lines[0].x for panel in over_rate.panels] == [(1e-3, 2e-3)] * 2
    assert [panel.lines[0].y for panel in over_rate.panels] == [(0.8, 0.6), (0.8, 0.7)]


@pytest.mark.parametrize(
    ("name", "label", "options", "x"),
    [
        ("trend_width", "width", [{"dim": 64}, {"dim": 128}], (64.0, 128.0)),
        (
            "trend_tokens",
            "training tokens",
            [{"steps": 1000}, {"steps": 2000}],
            (2048e3, 4096e3),
        ),
    ],
)
def test_other_trends(make_run, study_of, name, label, options, x):
    for i, option in enumerate(options):
        make_run(f"r{i}", **option)
    (chart,) = views.trends(study_of())
    assert (chart.name, chart.x_label, chart.panels[0].lines[0].x) == (name, label, x)
    assert chart.panels[0].title == "4 layers"


def test_gaps_tell_baselines_apart(study_of_sweep):
    study = study_of_sweep
    chart = views.gap(study)
    assert chart is not None
    titles = [panel.title for panel in chart.panels]
    assert titles == [f"{c}, {n} layers" for c in ("storyworld", "tinystories") for n in (4, 8)]
    # the primary contrast's
    assert chart.first == 1
    for panel in chart.panels:
        by_name = {line.name: line.look for line in panel.lines}
        assert by_name["WAV \u2212 PreNorm"].colour == by_name["WAV \u2212 Block AttnRes"].colour
        assert by_name["WAV \u2212 PreNorm"].dash != by_name["WAV \u2212 Block AttnRes"].dash
    same = {line.name: line.look for panel in chart.panels for line in panel.lines}
    assert all(line.look == same[line.name] for panel in chart.panels for line in panel.lines)
    (gap,) = [
        g for g in study.gaps
        if (g.treatment.series, g.baseline.series) == ("WAV", "Block AttnRes")
        and (g.treatment.setting.corpus, g.treatment.setting.num_layers) == ("storyworld", 8)
    ]  # fmt: skip
    line = {line.name: line for line in chart.panels[1].lines}["WAV \u2212 Block AttnRes"]
    assert (line.y, line.low, line.open_from) == (gap.mean, gap.low, gap.open_from)
    assert {run.label for run in line.runs[0]} == {"WAV", "Block AttnRes"}
    assert len(line.runs[0]) == 10


def test_the_deepest_comes_first_without_a_primary_contrast(make_run, study_of):
    for depth in (4, 8):
        make_run(f"r{depth}", num_layers=depth)
    chart = views.curves(study_of())
    assert chart is not None
    assert chart.first == 1


def test_differences_by_corpus_with_the_primary_one_first(study_of_sweep):
    study = study_of_sweep
    (first, rows), (second, _) = views.differences(study)
    assert (first, second) == ("storyworld", "tinystories")
    assert (rows[0].name, rows[0].setting) == ("WAV \u2212 Block AttnRes", "8 layers")
    assert [row.difference.is_primary for row in rows] == [True, False, False, False, False, False]


def test_maps_are_means_over_seeds(make_run, study_of):
    for seed in (0, 1, 2):
        make_run(f"r{seed}", BlockAttnRes(num_blocks=4), seed=seed, routed=seed < 2)
    ((title, (one,)),) = views.maps(study_of())
    runs = [run for run in one.group.runs if run.depth_weights is not None]
    assert (title, one.title) == ("4 layers", "Block AttnRes, 4 layers, mean of 2 seeds")
    assert (one.name, one.runs) == ("Block AttnRes, mean of 2 seeds", tuple(runs))
    a, b = (run.depth_weights.weights for run in runs)
    assert one.weights.weights[3][0] == pytest.approx((a[3][0] + b[3][0]) / 2)
    assert math.fsum(w for w in one.weights.weights[3] if w is not None) == pytest.approx(1)
    assert one.weights.weights[0] == (1.0, None, None, None, None, None)


def test_maps_of_other_sources_are_not_averaged(make_run, study_of):
    make_run("a")
    make_run("b", seed=1)
    study = study_of()
    other = DepthWeights(sites=("x",), sources=("y",), weights=((1.0,),))
    (group,) = study.best
    changed = dataclasses.replace(group.runs[1], depth_weights=other)
    group = dataclasses.replace(group, runs=(group.runs[0], changed))
    ((_, (one,)),) = views.maps(dataclasses.replace(study, best=(group,)))
    assert one.title == "WAV, 4 layers, seed 0"
    assert one.weights == group.runs[0].depth_weights


def test_a_setting_is_named_by_what_differs(make_run, study_of):
    make_run("a", num_layers=4, dim=64)
    make_run("b", num_layers=8, dim=128)
    study = study_of()
    small, large = (group.setting for group in study.groups)
    assert views.setting_text(small, study) == "4 layers, width 64"
    assert views.setting_text(large, study, without=["width"]) == "8 layers"
    assert views.setting_text(large, study, without=["num_layers", "width"]) == ""
