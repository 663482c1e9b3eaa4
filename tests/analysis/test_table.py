import io
import math

import pytest
from rich.console import Console

from resroute.analysis.runs import find_runs
from resroute.analysis.table import captions, columns, comparison_rows, comparison_table

BOLD = "bold: lowest loss among runs of equal corpus, depth, width and tokens"


@pytest.fixture
def runs(make_run, tmp_path):
    make_run("p", label="PreNorm", method="pre_norm", validation_loss=0.75, parameters=1_600_000)
    make_run("b", label="Block AttnRes", method="block_attn_res", validation_loss=0.725)
    make_run("w", label="WAV", validation_loss=0.713, peak_memory_bytes=1.2345e9)
    return find_runs(tmp_path / "runs")


def printed(runs, width):
    console = Console(width=width, force_terminal=True, color_system="truecolor")
    with console.capture() as capture:
        console.print(comparison_table(runs))
    return capture.get()


def plain(runs, width):
    console = Console(width=width)
    with console.capture() as capture:
        console.print(comparison_table(runs))
    return [line.rstrip() for line in capture.get().splitlines()]


def test_rows_by_value(runs):
    rows = comparison_rows(runs)
    assert [row.label for row in rows] == ["PreNorm", "Block AttnRes", "WAV"]
    assert [row.validation_loss for row in rows] == [0.75, 0.725, 0.713]
    assert [row.gap for row in rows] == pytest.approx([0.537, 0.512, 0.5], abs=1e-12)
    assert [row.is_best for row in rows] == [False, False, True]
    assert (rows[0].parameters, rows[0].tokens_per_second) == (1_600_000, 9000.4)
    assert (rows[2].peak_memory_bytes, rows[2].memory_kind) == (1.2345e9, "resident")


def test_cells_by_value(runs):
    shown = {
        column.heading: (column.unit, column.cells) for column in columns(comparison_rows(runs))
    }
    assert shown == {
        "method": ("", ["PreNorm", "Block AttnRes", "WAV"]),
        "layers": ("", ["2", "2", "2"]),
        "seed": ("", ["0", "0", "0"]),
        "loss": ("nats/char", ["0.7500", "0.7250", "0.7130"]),
        "gap to floor": ("nats/char", ["0.5370", "0.5120", "0.5000"]),
        "params": ("millions", ["1.600", "1.612", "1.612"]),
        "speed": ("tokens/s", ["9,000", "9,000", "9,000"]),
        "memory": ("MB", ["900", "900", "1,234"]),
    }


def test_the_best_is_told_for_each_depth_and_never_is_not_finite(make_run, tmp_path):
    make_run("a", num_layers=1, validation_loss=0.9)
    make_run("b", num_layers=2)
    make_run("c", num_layers=2, validation_loss=None, seed=1)
    make_run("d", num_layers=2, validation_loss=0.8, seed=2)
    runs = find_runs(tmp_path / "runs")
    # files hold null for it
    runs[1].summary["validation_loss"] = math.nan
    rows = comparison_rows(runs)
    # a run that is alone at its depth is compared with nothing
    assert [row.is_best for row in rows] == [False, False, False, True]
    assert rows[2].gap is None
    loss = next(column for column in columns(rows) if column.is_loss)
    assert loss.cells == ["0.9000", "nan", "-", "0.8000"]


def test_runs_that_print_the_same_loss_are_all_best(make_run, tmp_path):
    for name, loss in (("a", 0.71234), ("b", 0.71226), ("c", 0.71236)):
        make_run(name, label=name, validation_loss=loss)
    rows = comparison_rows(find_runs(tmp_path / "runs"))
    assert [row.is_best for row in rows] == [True, True, False]
    make_run("d", label="d", validation_loss=0.71224)
    rows = comparison_rows(find_runs(tmp_path / "runs"))
    shown = next(column for column in columns(rows) if column.is_loss).cells
    assert shown == ["0.7123", "0.7123", "0.7124", "0.7122"]
    assert [row.is_best for row in rows] == [False, False, False, True]


def test_no_floor_means_no_gap(make_run, tmp_path):
    make_run("a", floor=None, floor_exact=None, memory_kind=None, peak_memory_bytes=None)
    runs = find_runs(tmp_path / "runs")
    rows = comparison_rows(runs)
    assert rows[0].gap is None
    shown = columns(rows)
    assert "gap to floor" not in [column.heading for column in shown]
    assert shown[-1].cells == ["-"]
    assert captions(runs) == []


def test_captions_say_what_the_floor_is(make_run, tmp_path):
    make_run("a")
    make_run("b", seed=1)
    runs = find_runs(tmp_path / "runs")
    memory = "memory: peak resident size of the process"
    floor = "entropy floor 0.213 nats/char, exact"
    assert captions(runs) == [BOLD, floor, memory]
    assert captions(runs, bold=False) == [floor, memory]
    assert captions(runs[:1]) == [floor, memory]
    make_run("c", seed=2, corpus="mine", floor=0.5, floor_exact=False, memory_kind="cuda")
    assert captions(find_runs(tmp_path / "runs")) == [
        BOLD,
        "entropy floor 0.213 nats/char, exact (storyworld)",
        "entropy floor 0.500 nats/char, lower bound (mine)",
        "memory: peak allocation on the GPU or resident size of the process",
    ]


def test_large_memory_is_in_gigabytes_for_the_whole_column(make_run, tmp_path):
    make_run("a", peak_memory_bytes=2.04e10)
    make_run("b", seed=1, peak_memory_bytes=9e8)
    memory = columns(comparison_rows(find_runs(tmp_path / "runs")))[-1]
    assert (memory.unit, memory.cells) == ("GB", ["20.4", "0.9"])


@pytest.mark.parametrize("width", [80, 120])
def test_the_terminal_table_fits_with_one_line_a_run(runs, width):
    assert plain(runs, width) == [
        "method         layers  seed       loss  gap to floor    params     speed  memory",
        "                             nats/char     nats/char  millions  tokens/s      MB",
        "─" * 80,
        "PreNorm             2     0     0.7500        0.5370     1.600     9,000     900",
        "Block AttnRes       2     0     0.7250        0.5120     1.612     9,000     900",
        "WAV                 2     0     0.7130        0.5000     1.612     9,000   1,234",
        BOLD,
        "entropy floor 0.213 nats/char, exact",
        "memory: peak resident size of the process",
    ]


def test_the_best_loss_alone_is_bold(runs):
    text = printed(runs, 80)
    body = text.split("─\n")[-1]
    assert body.count("\x1b[1m") == 1
    assert "\x1b[1m0.7130\x1b[0m" in body.replace("   ", "")


def test_a_label_is_text_and_not_markup(make_run, tmp_path):
    make_run("a", label="[red]WAV[/red]")
    assert any("[red]WAV[/red]" in line for line in plain(find_runs(tmp_path / "runs"), 120))


def test_only_runs_of_one_setting_are_compared_and_labels_say_so(make_run, tmp_path):
    make_run("a", label="PreNorm", validation_loss=0.9, tokens=1000)
    make_run("b", label="PreNorm", validation_loss=0.5, tokens=2000)
    make_run("c", label="WAV", validation_loss=0.7, tokens=2000)
    runs = find_runs(tmp_path / "runs")
    rows = comparison_rows(runs)
    assert [(row.label, row.is_best) for row in rows] == [
        ("PreNorm (1,000 tokens)", False),
        ("PreNorm (2,000 tokens)", True),
        ("WAV (2,000 tokens)", False),
    ]
    console = Console(width=80, file=io.StringIO())
    console.print(comparison_table(runs))
    assert "PreNorm" in console.file.getvalue()
