import shutil

import pytest

from resroute.analysis import find_runs
from resroute.config import UserError
from resroute.experiments.plan import Plan, read_plan
from resroute.experiments.report import make_report, save_report, write_report
from resroute.experiments.report.write import render_text
from resroute.experiments.results import read_results
from resroute.residual import WAV, BlockAttnRes, PreNorm

FIGURES = ("curves", "depth_weights", "differences", "gap", "trend")


def contents(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture
def few(make_run, tmp_path):
    """Two methods of two seeds at two depths."""
    for i, residual in enumerate((PreNorm(), WAV(num_blocks=2))):
        for depth in (2, 4):
            for seed in (0, 1):
                final = 0.8 - 0.1 * i + 0.01 * seed
                make_run(
                    f"r{i}-{depth}-{seed}", residual, num_layers=depth, seed=seed, final=final,
                    sample="Once." if seed == 0 else None,
                )  # fmt: skip
    return tmp_path / "runs"


def test_the_files_of_a_report(few, tmp_path):
    plan = Plan(suite="paper", baseline="PreNorm", primary=None, runs=())
    out = tmp_path / "site" / "here"
    runs = find_runs(few)
    files = write_report(runs, out, title="t", plan=plan)
    assert [path.relative_to(out).as_posix() for path in files] == [
        "report.html", "report.md", "table.tex",
        *(f"figures/{name}.{kind}" for name in FIGURES for kind in ("png", "svg")),
        "runs.csv", "curves.csv", "depth_maps.json", "samples.json",
    ]  # fmt: skip
    assert read_plan(out) == plan
    made = contents(out)
    assert set(made) == {path.relative_to(out).as_posix() for path in files} | {"suite.json"}
    page = made["report.html"].decode()
    assert page.count('class="static"') == 5
    # the drawing that stands there without a script is the file
    assert "training tokens" in page.split("<script")[0]
    text = made["report.md"].decode()
    assert text.startswith("# t\n\nstoryworld \u00b7 2 and 4 layers")
    for name in FIGURES:
        assert f"(figures/{name}.png)" in text

    # the same again, from what stands there
    assert contents_of_second(read_results(out), out, plan) == {
        name: made[name] for name in made if not name.startswith("report.")
    }
    # links to configurations that are not there lead to the table
    shutil.rmtree(few)
    copy = make_report(read_results(out), title="t", plan=plan)
    assert render_text(copy) == text


def contents_of_second(runs, out, plan):
    report = make_report(runs, title="t", plan=plan)
    save_report(report, runs, out, plan)
    return {k: v for k, v in contents(out).items() if not k.startswith("report.")}


def test_the_same_runs_give_the_same_bytes(make_run, tmp_path):
    make_run("a", num_layers=2, sample="x")
    runs = tmp_path / "runs"
    first = contents_after(runs, tmp_path / "one")
    assert contents_after(runs, tmp_path / "two") == first
    assert contents_after(runs, tmp_path / "one") == first
    # beside the runs, where it is usual, links are shorter
    inside = contents_after(runs, runs)
    assert b'href="a/config.json"' in inside["report.html"]
    assert find_runs(runs)[0].name == "a"


def contents_after(runs, out):
    write_report(find_runs(runs), out, title="t")
    return contents(out)


def test_a_report_in_the_folder_of_its_run_leaves_the_run_as_it_is(make_run):
    path = make_run("a", num_layers=2, sample="x")
    before = contents(path)
    write_report(find_runs(path), path, title="t")
    after = contents(path)
    assert {name: after[name] for name in before} == before
    assert "figures/depth_weights.png" in after


def test_figures_of_a_former_report_go(make_run, tmp_path):
    make_run("a", num_layers=2)
    make_run("b", PreNorm(), num_layers=2)
    out = tmp_path / "out"
    (out / "figures").mkdir(parents=True)
    for name in ("trend.png", "depth_weights.svg", "mine.png"):
        (out / "figures" / name).write_bytes(b"")
    runs = [run for run in find_runs(tmp_path / "runs") if run.name == "b"]
    write_report(runs, out, title="t")
    assert sorted(path.name for path in (out / "figures").iterdir()) == [
        "curves.png", "curves.svg", "mine.png",
    ]  # fmt: skip


def test_runs_that_do_not_go_together_stand_by_themselves(make_run, tmp_path):
    make_run("a", num_layers=2)
    make_run("b", num_layers=2, precision="bf16", final=0.9)
    make_run("c", PreNorm(), num_layers=2, final=None)
    runs = find_runs(tmp_path / "runs")
    report = make_report(runs, title="t")
    (note,) = report.notes
    assert note.startswith(
        "Runs stand by themselves, without means and differences: a and b cannot be averaged, "
        "they differ in precision (float32 and bf16)"
    )
    assert [group.series for group in report.study.groups] == ["WAV (a), seed 0", "WAV (b), seed 0"]
    assert [run.name for run in report.runs] == ["a", "b", "c"]
    assert not report.has_groups
    plan = Plan(suite="s", baseline=None, primary=None, runs=())
    with pytest.raises(UserError, match="cannot be averaged"):
        make_report(runs, title="t", plan=plan)


def test_runs_of_a_group_stand_together_and_lost_ones_last(make_run, tmp_path):
    for seed, final in ((0, None), (1, 0.7), (2, 0.6)):
        make_run(f"w{seed}", num_layers=2, seed=seed, final=final)
        make_run(f"b{seed}", BlockAttnRes(num_blocks=2), num_layers=2, seed=seed)
    report = make_report(find_runs(tmp_path / "runs"), title="t")
    assert [run.name for run in report.runs] == ["b0", "b1", "b2", "w1", "w2", "w0"]
    assert any("w0" in note for note in report.notes)


def test_without_a_single_loss_there_is_still_a_page(make_run, tmp_path):
    make_run("a", PreNorm(), num_layers=2, final=None)
    files = write_report(find_runs(tmp_path / "runs"), tmp_path / "out", title="t")
    assert [path.name for path in files] == [
        "report.html", "report.md", "table.tex", "runs.csv", "curves.csv",
    ]  # fmt: skip


def test_one_seed_has_no_figure_of_differences(make_run, tmp_path):
    make_run("p", PreNorm(), num_layers=2)
    make_run("w", num_layers=2, final=0.7)
    report = make_report(find_runs(tmp_path / "runs"), title="t")
    assert len(report.study.differences) == 1
    assert report.differences == ()
    assert [chart.name for chart in report.charts] == ["curves", "gap"]


def test_nothing_to_report_is_a_user_error(make_run, tmp_path):
    with pytest.raises(UserError, match=r"no finished run to report \(not finished: killed\)"):
        make_report([], title="t", unfinished=["killed"])
    with pytest.raises(UserError, match="no run at all"):
        make_report([], title="t")
    make_run("a", PreNorm())
    (tmp_path / "file").write_text("")
    runs = find_runs(tmp_path / "runs")
    with pytest.raises(UserError, match="cannot be made"):
        write_report(runs, tmp_path / "file", title="t")


def test_a_title_may_hold_anything(make_run, tmp_path):
    make_run("a", PreNorm(), num_layers=2)
    title = "\udcff<b>\x00 _x_"
    files = write_report(find_runs(tmp_path / "runs"), tmp_path / "out", title=title)
    assert "<b>" not in files[0].read_text()
    assert r"&lt;b&gt;" in files[1].read_text()
    assert r"\_x\_" in files[1].read_text()
