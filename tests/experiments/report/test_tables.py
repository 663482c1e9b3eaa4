import pytest

from resroute.analysis import find_runs
from resroute.experiments.compare import compare
from resroute.experiments.report.tables import (
    differences_table,
    equal_compute_table,
    groups_table,
    pivots,
    runs_table,
    signed,
)
from resroute.experiments.report.text import latex_pivots, markdown_pivot, markdown_table
from resroute.residual import WAV, BlockAttnRes, PreNorm

MINUS = "\u2212"


@pytest.fixture
def study(make_run, tmp_path):
    """PreNorm and WAV with three seeds at 4 layers, Block AttnRes with one; two at 8 layers."""
    for seed, plain, wav in ((0, 0.80, 0.70), (1, 0.82, 0.71), (2, 0.84, 0.75)):
        make_run(f"p{seed}", PreNorm(), seed=seed, final=plain, speed=1000.0)
        make_run(f"w{seed}", WAV(num_blocks=4), seed=seed, final=wav, speed=800.0)
    make_run("b0", BlockAttnRes(num_blocks=4), final=0.78, speed=None)
    make_run("p8", PreNorm(), num_layers=8, final=0.60)
    make_run("w8", WAV(num_blocks=4), num_layers=8, final=0.60004)
    return compare(find_runs(tmp_path / "runs"))


def texts(table):
    return [[cell.text for cell in row] for row in table.rows]


def test_groups_by_value(study):
    table = groups_table(study)
    assert [h.text for h in table.headings] == [
        "method", "layers", "mean loss", "n", "deviation", "95 % interval", "gap to floor",
        "params", "speed",
    ]  # fmt: skip
    # deviation 0.02, interval 0.82 -+ 4.3027 * 0.02 / sqrt(3)
    assert texts(table)[0] == [
        "PreNorm", "4", "0.8200", "3", "0.0200", "0.7703 .. 0.8697", "0.6630", "0.296", "1,000",
    ]  # fmt: skip
    assert texts(table)[1] == [
        "Block AttnRes", "4", "0.7800", "1", "-", "-", "0.6230", "0.296", "-",
    ]  # fmt: skip
    best = [(row[0].text, row[1].text) for row in table.rows if row[2].is_best]
    # what prints the same is equally good
    assert best == [("WAV", "4"), ("PreNorm", "8"), ("WAV", "8")]
    assert [run.name for run in table.rows[0][2].runs] == ["p0", "p1", "p2"]
    short = groups_table(study, is_short=True)
    assert [h.text for h in short.headings] == [h.text for h in table.headings[:6]]


def test_columns_are_there_where_groups_differ(make_run, tmp_path):
    make_run("a", corpus="tales", rate=1e-3, steps=1000)
    make_run("b", corpus="news", rate=2e-3, dim=64)
    table = groups_table(compare(find_runs(tmp_path / "runs")))
    assert [h.text for h in table.headings][:10] == [
        "method", "corpus", "layers", "width", "tokens", "mean loss", "n", "deviation",
        "95 % interval", "learning rate",
    ]  # fmt: skip
    assert [[*row[:5], row[9]] for row in texts(table)] == [
        ["WAV", "news", "4", "64", "4.1", "0.002"],
        ["WAV", "tales", "4", "128", "2.05", "0.001"],
    ]


def test_differences_by_value(study):
    table = differences_table(study)
    by_name = {(row[0].text, row[0].below): row for row in table.rows}
    row = by_name["WAV " + MINUS + " PreNorm", "4 layers"]
    # -0.10, -0.11, -0.09: mean -0.1, deviation 0.01, t interval of two degrees of freedom
    assert (row[1].text, row[1].below) == (f"{MINUS}0.1000", f"{MINUS}0.1248 .. {MINUS}0.0752")
    assert row[7].text == f"{MINUS}0.1443"
    assert [cell.text for cell in row[2:6]] == ["3", "better", "0.003", "0.003"]
    assert len(row[1].runs) == 6
    one = by_name["WAV " + MINUS + " PreNorm", "8 layers"]
    assert [cell.text for cell in one[1:6]] == ["+0.0000", "1", "too few seeds", "-", "-"]
    assert one[1].below == ""


def test_equal_time_by_value(study):
    table = equal_compute_table(study)
    rows = {(row[0].text, row[0].below): [c.text for c in row[1:]] for row in table.rows}
    # 4.096 million tokens at 1000 a second; Block AttnRes has no speed
    assert rows["PreNorm", "4 layers"] == [
        "0.8200", "3", "0.7703 .. 0.8697", "4,096", "4.10", "100 %",
    ]  # fmt: skip
    assert rows["WAV", "4 layers"][3:] == ["4,096", "3.28", "80 %"]
    assert ("Block AttnRes", "4 layers") not in rows
    assert [row[0].text for row in table.rows if row[1].is_best and "4" in row[0].below] == ["WAV"]


def test_runs_by_value(study):
    runs = study.groups[0].runs
    table = runs_table(runs)
    assert texts(table)[1] == ["PreNorm", "4", "1", "0.8200", "0.6630", "0.296", "1,000", "710"]
    assert [row[3].is_best for row in table.rows] == [True, False, False]
    assert not any(row[3].is_best for row in runs_table(runs, has_best=False).rows)
    assert table.rows[0][6].value == 1000
    assert table.rows[0][0].runs == (runs[0],)


def test_pivots_as_markdown(study):
    (pivot,) = pivots(study)
    assert markdown_pivot(pivot).splitlines() == [
        "| method | 4 layers | 8 layers |",
        "| --- | ---: | ---: |",
        "| PreNorm | 0.8200 \u00b1 0.0200 | **0.6000 (n=1)** |",
        "| Block AttnRes | 0.7800 (n=1) | - |",
        "| WAV | **0.7200 \u00b1 0.0265** | **0.6000 (n=1)** |",
        "",
        "Validation loss in nats/char on storyworld, mean and standard deviation over n = 3 seeds "
        "unless another n stands beside it. Bold: lowest at its depth.",
    ]


def test_pivots_as_latex(study):
    text = latex_pivots(pivots(study))
    assert text.splitlines()[0] == r"% made by `resroute report`; needs \usepackage{booktabs}"
    assert r"\begin{tabular}{lrr}" in text
    rows = text.split("\\midrule\n")[1].split("\\bottomrule")[0].splitlines()
    assert rows == [
        r"PreNorm & 0.8200 {\mdseries$\pm$} 0.0200 & \textbf{0.6000 (n=1)} \\",
        r"Block AttnRes & 0.7800 (n=1) & -- \\",
        r"WAV & \textbf{0.7200 {\mdseries$\pm$} 0.0265} & \textbf{0.6000 (n=1)} \\",
    ]
    assert text.count(r"\begin{table}") == text.count(r"\end{table}") == 1


def test_a_table_as_markdown(study):
    lines = markdown_table(differences_table(study)).splitlines()
    assert lines[0].startswith("| difference | loss, nats/char | n | verdict | p | p, corrected |")
    assert lines[1].startswith("| --- | ---: | ---: | --- |")
    assert all(line.count(" | ") == 7 for line in lines)
    assert f"| {MINUS}0.1000 ({MINUS}0.1248 .. {MINUS}0.0752) |" in "\n".join(lines)


def test_signs():
    assert (signed(0.5), signed(-0.00004), signed(0)) == ("+0.5000", f"{MINUS}0.0000", "+0.0000")
