import io
from pathlib import Path

from rich.console import Console

from resroute.cli.display import Display, byte_progress
from resroute.data import Floor
from resroute.model import GPTConfig
from resroute.residual import Finding
from resroute.training import RunStart, TrainConfig

TRAIN = {"kind": "train", "step": 10, "loss": 2.5, "tokens_per_second": 12345.6}
VALIDATION = {"kind": "validation", "step": 10, "loss": 2.25}


def start(label, floor):
    config = TrainConfig(model=GPTConfig(vocab_size=2), data="x")
    return RunStart(path=Path("x"), label=label, step=0, total=20, floor=floor, config=config)


def shown(*, is_terminal, events):
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=is_terminal, width=100, color_system=None)
    with Display(console) as display:
        events(display)
    return stream.getvalue()


def run(display):
    display.message("WAV: 24 layers [not markup]")
    display.begin(start("WAV", Floor(0.1563, True)))
    display.record(TRAIN)
    display.advance(10)
    display.record(VALIDATION)
    display.record({"kind": "routing", "step": 10, "entropy": 1.0})


def test_plain_lines_show_losses_beside_the_floor():
    assert shown(is_terminal=False, events=run).splitlines() == [
        "WAV: 24 layers [not markup]",
        "WAV 10/20: loss 2.500  val 2.250  floor 0.156  12,346 tok/s",
    ]


def test_training_losses_are_said_now_and_then(monkeypatch):
    monkeypatch.setattr("resroute.cli.display._PLAIN_INTERVAL", 0.0)
    text = shown(is_terminal=False, events=run)
    assert "WAV 10/20: loss 2.500  floor 0.156  12,346 tok/s" in text


def test_a_lower_bound_is_called_one():
    def events(display):
        display.begin(start("PreNorm", Floor(0.5, False)))
        display.record(VALIDATION)

    assert "val 2.250  floor 0.500 (lower bound)" in shown(is_terminal=False, events=events)
    assert "floor >=0.500" in shown(is_terminal=True, events=events)


def test_without_a_floor_none_is_shown():
    def events(display):
        display.begin(start("PreNorm", None))
        display.record(VALIDATION)

    assert shown(is_terminal=False, events=events) == "PreNorm 10/20: val 2.250\n"


def test_a_terminal_gets_a_bar():
    text = shown(is_terminal=True, events=run)
    # each redraw clears its line first
    last = text.split("\x1b[2K")[-1].splitlines()[0]
    assert last.startswith("WAV ")
    assert "10/20 loss 2.500 val 2.250 floor 0.156 12.3k/s" in last
    assert len(last) < 80


def test_findings_have_two_lines_each():
    found = Finding(
        check="dead mixing",
        severity="warning",
        where="9 of 9 sites",
        saw="queries of norm 1e-5",
        why="nothing is learned",
        remedy="train [longer]",
    )
    text = shown(is_terminal=False, events=lambda display: display.health([found, found]))
    assert text.splitlines() == 2 * [
        "warning: dead mixing, 9 of 9 sites: queries of norm 1e-5",
        "  nothing is learned; train [longer]",
    ]
    assert shown(is_terminal=False, events=lambda display: display.health([])) == ""


def test_nobody_watches_a_bar_of_bytes_in_a_log():
    with byte_progress("x.txt") as progress:
        assert progress is None
