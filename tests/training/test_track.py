"""What TensorBoard reads of a run."""

import sys

import pytest

from resroute.config import UserError
from resroute.training.metrics import Listener, MetricsFile, RunStart
from resroute.training.track import TRACKERS, Listeners, TensorBoard


@pytest.fixture
def start(make_config, tmp_path):
    """Begins of a run in one folder."""

    def begin(step=0):
        config = make_config()
        return RunStart(path=tmp_path, label="WAV", step=step, total=6, floor=None, config=config)

    return begin


def points(folder):
    """By tag: steps and values, as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {
        tag: [(point.step, point.value) for point in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def test_every_number_of_a_record_is_a_scalar(start, tmp_path):
    board = TensorBoard()
    board.begin(start())
    board.record({"kind": "train", "step": 1, "tokens": 192, "loss": 2.5, "floor": None})
    board.record(
        {
            "kind": "routing",
            "step": 1,
            "entropy": 0.5,
            "method": "wav",
            "floor_exact": True,
            "update_rms": [1.0, 4.0, 1.0],
            "names": ["a", "b"],
            "empty": [],
            "kinds": {"embedding": 0.75, "running state": 0.25},
            "source_rms": {"embedding": 1.0, "state 0": {"rms": 3}},
        }
    )
    board.record({"kind": "train", "step": 2, "tokens": 384, "loss": 2.25, "floor": None})
    board.end({})
    assert points(tmp_path) == {
        "train/tokens": [(1, 192.0), (2, 384.0)],
        "train/loss": [(1, 2.5), (2, 2.25)],
        "routing/entropy": [(1, 0.5)],
        "routing/update_rms/mean": [(1, 2.0)],
        "routing/update_rms/max": [(1, 4.0)],
        "routing/kinds/embedding": [(1, 0.75)],
        "routing/kinds/running state": [(1, 0.25)],
        "routing/source_rms/embedding": [(1, 1.0)],
        "routing/source_rms/state 0/rms": [(1, 3.0)],
    }


def report(board, metrics, step, loss):
    record = {"kind": "train", "step": step, "loss": loss}
    metrics.append(record)
    board.record(record)


def keep(metrics, step):
    """What a run does to its metrics that goes on after a step."""
    records = metrics.read()
    metrics.path.unlink()
    for record in records:
        if record["step"] <= step:
            metrics.append(record)


def test_a_resumed_run_has_no_point_twice(start, tmp_path):
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    killed = TensorBoard()
    killed.begin(start())
    for step in range(5):
        report(killed, metrics, step, 1.0)
    # it never ends; nothing is lost
    assert [step for step, _ in points(tmp_path)["train/loss"]] == [0, 1, 2, 3, 4]

    keep(metrics, 2)
    resumed = TensorBoard()
    resumed.begin(start(2))
    for step in (3, 4, 5):
        report(resumed, metrics, step, 2.0)
    resumed.end({})
    assert points(tmp_path)["train/loss"] == [
        (0, 1.0), (1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0), (5, 2.0),
    ]  # fmt: skip


@pytest.mark.parametrize(("kept", "expected"), [(-1, [(0, 2.0)]), (0, [(0, 1.0)])])
def test_step_zero_is_replaced_where_it_is_reported_again(start, tmp_path, kept, expected):
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    board = TensorBoard()
    board.begin(start())
    report(board, metrics, 0, 1.0)
    report(board, metrics, 1, 1.0)
    # without a checkpoint the run starts over; with one at step 0 it goes on after it
    keep(metrics, kept)
    board.begin(start())
    if kept < 0:
        report(board, metrics, 0, 2.0)
    board.end({})
    assert points(tmp_path)["train/loss"] == expected


def test_a_missing_package_is_named(start, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UserError) as caught:
        TensorBoard().begin(start())
    assert str(caught.value) == 'TensorBoard is not installed: pip install "resroute[track]"'


class Recorder(Listener):
    def __init__(self, name, events):
        self.name, self.events = name, events

    def __getattribute__(self, name):
        if name in ("message", "begin", "record", "advance", "health", "end"):
            return lambda *args: self.events.append((self.name, name, *args))
        return super().__getattribute__(name)


def test_several_listeners_hear_every_event(start):
    events = []
    both = Listeners(Recorder("a", events), Recorder("b", events))
    run = start()
    told = [
        ("message", "hello"), ("begin", run), ("record", {"kind": "train"}), ("advance", 3),
        ("health", []), ("end", {"steps": 6}),
    ]  # fmt: skip
    for name, value in told:
        getattr(both, name)(value)
    assert events == [(who, name, value) for name, value in told for who in "ab"]
    # an event that is added to listeners is handed on too
    public = {name for name in vars(Listener) if not name.startswith("_")}
    assert public == {name for name, _ in told} == public & vars(Listeners).keys()


def test_trackers_by_name():
    assert list(TRACKERS.items()) == [("tensorboard", TensorBoard)]
