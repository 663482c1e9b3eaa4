"""Findings of health checks in the report."""

import re
from collections import defaultdict

import pytest

from resroute.analysis import find_runs
from resroute.experiments.report import make_report
from resroute.experiments.report.data import Links
from resroute.experiments.report.health import (
    findings_table,
    health_lines,
    health_summary,
    shared_findings,
)
from resroute.experiments.report.page import render_page
from resroute.experiments.report.write import render_text
from resroute.experiments.results import read_results, write_results
from resroute.residual import WAV, BlockAttnRes, Finding, PreNorm

DEAD = Finding(
    check="dead mixing",
    severity="warning",
    where="all sites",
    saw="queries of norm 0.0e+00",
    why="the router has learned nothing",
    remedy="train longer",
)
DRIFT = Finding(
    check="detail bias drift",
    severity="note",
    where="phase",
    saw="mean change -2.50",
    why="a bias far below switches its detail off",
    remedy="fix it",
)
EVIL = '<script>alert("x")</script>'


def like(finding, **fields):
    return Finding(**{**vars(finding), **fields})


@pytest.fixture
def some(make_run, tmp_path):
    """Two healthy runs, three with findings, one from before there were checks."""
    make_run("p0", PreNorm(), findings=[])
    make_run("b0", BlockAttnRes(num_blocks=4), findings=[like(DEAD, saw="queries of norm 1.0e-03")])
    make_run("w0", WAV(num_blocks=4), findings=[DRIFT, DEAD])
    make_run("w1", WAV(num_blocks=4), seed=1, findings=[DEAD])
    make_run("w2", WAV(num_blocks=4), seed=2, findings=[])
    make_run("w3", WAV(num_blocks=4), seed=3)
    return find_runs(tmp_path / "runs")


def cells(table):
    return [[cell.text for cell in row] for row in table.rows]


def test_equal_findings_are_said_once(some):
    dead, drift = shared_findings(some)
    assert (dead.check, drift.check) == ("dead mixing", "detail bias drift")
    assert dead.advice == (
        "(warning, 3 runs): the router has learned nothing. To try: train longer."
    )
    assert drift.advice == (
        "(note, 1 run): a bias far below switches its detail off. To try: fix it."
    )
    found = [(p.where, p.saw, [run.name for run in p.runs]) for p in dead.places]
    assert found == [
        ("all sites", "queries of norm 1.0e-03", ["b0"]),
        ("all sites", "queries of norm 0.0e+00", ["w0", "w1"]),
    ]


def test_one_check_with_two_reasons_is_told_twice_and_a_run_counts_once(make_run, tmp_path):
    other = like(DEAD, why="keys are too small", remedy="lower eps")
    make_run("a", findings=[DRIFT, DEAD, like(DEAD, where="site 3"), other, DEAD])
    (run,) = find_runs(tmp_path / "runs")
    one, two, note = shared_findings([run])
    # warnings first
    assert note.check == "detail bias drift"
    assert one.advice.startswith("(warning, 1 run): the router")
    assert [place.where for place in one.places] == ["all sites", "site 3"]
    assert [[r.name for r in place.runs] for place in one.places] == [["a"], ["a"]]
    assert two.advice == "(warning, 1 run): keys are too small. To try: lower eps."


def test_a_row_a_place(some):
    table = findings_table(shared_findings(some), some)
    assert [heading.text for heading in table.headings] == [
        "finding", "runs", "where", "what was seen",
    ]  # fmt: skip
    assert cells(table) == [
        ["dead mixing", "Block AttnRes, 4 layers, seed 0", "all sites", "queries of norm 1.0e-03"],
        ["dead mixing", "WAV, 4 layers, seeds 0, 1", "all sites", "queries of norm 0.0e+00"],
        ["detail bias drift", "WAV, 4 layers, seed 0", "phase", "mean change -2.50"],
    ]  # fmt: skip
    assert [row[0].below for row in table.rows] == ["warning", "warning", "note"]
    assert [run.name for run in table.rows[1][1].runs] == ["w0", "w1"]


def test_sixty_runs_of_one_finding_are_one_row(make_run, tmp_path):
    for i in range(60):
        depth, seed = 2 + i // 4, i % 4
        make_run(f"w{i}", num_layers=depth, seed=seed, steps=100, routed=False, findings=[DEAD])
    runs = find_runs(tmp_path / "runs")
    (shared,) = shared_findings(runs)
    assert shared.advice.startswith("(warning, 60 runs): ")
    ((_, named, *_),) = cells(findings_table([shared], runs))
    assert named.startswith("WAV, 2 layers, seeds 0, 1, 2, 3; WAV, 3 layers, seeds 0, 1, 2, 3; ")
    assert named.endswith("; WAV, 13 layers, seeds 0, 1, 2, 3; 3 more")
    lines = health_lines(runs)
    assert len(lines) == 13
    assert lines[11:] == [
        "Health: WAV, 4 layers, seed 3: dead mixing (warning)",
        "Health: findings in 48 runs more",
    ]


def test_how_many_were_checked(some):
    by_name = {run.name: run for run in some}
    assert health_summary(some) == "findings in 3 of 5 runs; 1 run not checked"
    assert health_lines(some) == [
        "Health: Block AttnRes, 4 layers, seed 0: dead mixing (warning)",
        "Health: WAV, 4 layers, seed 0: detail bias drift (note), dead mixing (warning)",
        "Health: WAV, 4 layers, seed 1: dead mixing (warning)",
    ]
    healthy = [by_name["p0"], by_name["w2"]]
    assert health_lines(healthy) == ["Health: no findings in 2 runs"]
    assert health_lines([by_name["p0"], by_name["w3"]]) == [
        "Health: no findings in 1 run; 1 run not checked"
    ]
    assert (health_summary([by_name["w3"]]), health_lines([by_name["w3"]])) == ("", [])


def page_of(runs, folder):
    drawing = b'<svg viewBox="0 0 9 9"></svg>'
    report = make_report(runs, title="t")
    return render_page(report, defaultdict(lambda: drawing), Links(out=folder))


def test_the_page_and_the_text_have_a_section_of_it(some, tmp_path):
    page = page_of(some, tmp_path / "runs")
    assert re.findall(r'<section id="(\w+)">', page)[:2] == ["comparison", "health"]
    assert '<a href="#health">Health</a>' in page
    part = page[page.index('<section id="health">') :].split("</section>")[0]
    assert ">Checked after the last step: findings in 3 of 5 runs; 1 run not checked.</p>" in part
    assert re.findall(r"<li>.*</li>", part) == [
        "<li><strong>dead mixing</strong> (warning, 3 runs): the router has learned nothing. "
        "To try: train longer.</li>",
        "<li><strong>detail bias drift</strong> (note, 1 run): a bias far below switches its "
        "detail off. To try: fix it.</li>",
    ]
    assert part.count("<tr>") == 1 + 3
    # one run leads to its configuration, several to the first of their rows
    assert '<a href="b0/config.json" title="b0">Block AttnRes, 4 layers, seed 0</a>' in part
    row = re.search(r'title="w0, w1"><a href="#(run-\d+)">WAV, 4 layers, seeds 0, 1<', part)[1]
    assert re.search(rf'<tr id="{row}"><td class="text"><a href="w0/config.json"', page)

    text = render_text(make_report(some, title="t"))
    assert text.index("## Comparison") < text.index("## Health") < text.index("## Learning curves")
    head, told, *_ = text[text.index("## Health") :].split("\n\n")[1:]
    assert head == "Checked after the last step: findings in 3 of 5 runs; 1 run not checked."
    assert told == (
        "- **dead mixing** (warning, 3 runs): the router has learned nothing. To try: train "
        "longer.\n- **detail bias drift** (note, 1 run): a bias far below switches its detail off. "
        "To try: fix it."
    )
    assert (
        "\n\n| finding | runs | where | what was seen |\n| --- | --- | --- | --- |\n"
        "| dead mixing (warning) | Block AttnRes, 4 layers, seed 0 | all sites | queries of norm "
        "1.0e-03 |\n"
    ) in text
    assert make_report(some, title="t").health == health_lines(some)


def test_a_results_folder_gives_the_same_text(some, tmp_path):
    out = tmp_path / "results"
    out.mkdir()
    assert out / "findings.json" in write_results(some, out)
    copies = read_results(out)
    assert [run.findings for run in copies] == [run.findings for run in some]
    assert render_text(make_report(copies, title="t")) == render_text(make_report(some, title="t"))


def test_healthy_runs_are_a_sentence_and_unchecked_ones_nothing(make_run, tmp_path):
    make_run("a", PreNorm(), findings=[])
    runs = find_runs(tmp_path / "runs")
    page, text = page_of(runs, tmp_path), render_text(make_report(runs, title="t"))
    told = "Checked after the last step: no findings in 1 run."
    part = page[page.index('<section id="health">') :].split("</section>")[0]
    assert (told in part, "<table" in part, "<li>" in part) == (True, False, False)
    assert f"## Health\n\n{told}\n\n## Learning curves" in text
    (runs[0].path / "health.json").unlink()
    runs = find_runs(tmp_path / "runs")
    page, text = page_of(runs, tmp_path), render_text(make_report(runs, title="t"))
    assert 'id="health"' not in page
    assert "Health" not in text
    assert make_report(runs, title="t").health == []


def test_texts_of_findings_are_escaped_and_cut(make_run, tmp_path):
    evil = {name: f"{EVIL} | _{name}_" for name in ("check", "where", "saw", "why", "remedy")}
    make_run("a", findings=[like(DEAD, **evil)])
    make_run("b", PreNorm(), findings=[like(DEAD, where="y" * 5000)])
    runs = find_runs(tmp_path / "runs")
    page, text = page_of(runs, tmp_path), render_text(make_report(runs, title="t"))
    # the data and the script
    assert page.count("<script") == 2
    assert "<strong>&lt;script&gt;alert(&quot;x&quot;)&lt;/script&gt; | _check_</strong>" in page
    assert "<script" not in text
    assert r"\| \_saw\_ |" in text
    assert f"| {'y' * 400} .. |" in text
    (line,) = [line for line in health_lines(runs) if "WAV" in line]
    assert line == f"Health: WAV, 4 layers, seed 0: {EVIL} | _check_ (warning)"
