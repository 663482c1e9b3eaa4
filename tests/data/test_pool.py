"""Several processes: `eval` is the work, so that pieces say where they are done."""

import builtins
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest

from resroute.config import UserError
from resroute.data import END_OF_TEXT, SPLITS, containers, pool, prepare, prepare_text
from resroute.data.pool import ProcessKilledError, ordered_map

HERE = "__import__('os').getpid()"
# so long that whoever shares work out has some left for itself
WAIT = "__import__('time').sleep(0.004)"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes get work from the first piece on."""
    monkeypatch.setattr(pool, "_ready", lambda starting: starting.result())


@pytest.mark.usefixtures("started")
@pytest.mark.parametrize("processes", [2, 3])
def test_results_come_in_order_from_several_processes(processes: int) -> None:
    pieces = [f"({i}, {HERE}, {WAIT})" for i in range(200)]
    found = list(ordered_map(eval, iter(pieces), processes=processes))
    assert [number for number, *_ in found] == list(range(200))
    assert len({process for _, process, _ in found}) == processes
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("processes", [1, 2])
def test_this_process_works_where_no_other_does(
    monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    monkeypatch.setattr(pool, "_ready", lambda starting: [])
    assert list(ordered_map(eval, [HERE] * 9, processes=processes)) == [os.getpid()] * 9


@pytest.mark.usefixtures("started")
def test_each_process_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtins, "mark", 0, raising=False)
    prepare = "import builtins; builtins.mark = 7"
    marks = ordered_map(
        eval, [f"(mark, {HERE}, {WAIT})"] * 40, processes=2, prepare=exec, arguments=(prepare,)
    )
    found = set(marks)
    assert {mark for mark, *_ in found} == {7}
    assert {process for _, process, _ in found} > {os.getpid()}


@pytest.mark.usefixtures("started")
def test_what_is_larger_than_its_place_arrives() -> None:
    large = 2 * pool._SLOT_BYTES
    pieces = [f"(len('{'y' * large}'), {HERE})", *[f"({i}, 'x' * {large})" for i in range(12)]]
    first, *others = ordered_map(eval, pieces, processes=2)
    # it would fill the pipe, so it is not sent
    assert first == (large, os.getpid())
    assert others == [(i, "x" * large) for i in range(12)]


@pytest.mark.usefixtures("started")
def test_errors_of_other_processes_say_where_they_were() -> None:
    results = ordered_map(eval, ["1", "2", "3", "1 / 0", "5"], processes=2)
    assert [next(results), next(results)] == [1, 2]
    with pytest.raises(ZeroDivisionError) as caught:
        list(results)
    assert "Traceback" in caught.value.__notes__[0]
    assert multiprocessing.active_children() == []


@pytest.mark.usefixtures("started")
def test_a_process_that_is_killed_is_a_line() -> None:
    with pytest.raises(UserError, match=r"a process was killed.*try again, or with --processes 1"):
        list(ordered_map(eval, ["__import__('os')._exit(9)"], processes=2))
    assert multiprocessing.active_children() == []


@pytest.mark.usefixtures("started")
def test_a_process_that_is_killed_meanwhile_is_a_line() -> None:
    kill = f"__import__('os').kill({HERE}, 9) if {HERE} != {os.getpid()} else 1"
    with pytest.raises(ProcessKilledError):
        list(ordered_map(eval, [kill] * 500, processes=3))
    assert multiprocessing.active_children() == []


def test_a_process_that_is_killed_is_no_change_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> Any:
        raise ProcessKilledError

    monkeypatch.setattr(prepare, "encoded", fail)
    (tmp_path / "text.txt").write_text("one two three " * 20)
    with pytest.raises(UserError, match="a process was killed"):
        prepare_text(tmp_path / "text.txt", tmp_path / "out")


@pytest.mark.usefixtures("started")
def test_nobody_is_left_where_results_are_not_taken() -> None:
    results = ordered_map(eval, [HERE] * 1000, processes=2)
    assert next(results) != os.getpid()
    results.close()  # type: ignore[attr-defined]
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("is_early", [False, True])
def test_an_interrupt_ends_them(monkeypatch: pytest.MonkeyPatch, is_early: bool) -> None:
    monkeypatch.setattr(pool, "_ready", lambda starting: [] if is_early else starting.result())

    def pieces() -> Any:
        yield from [HERE] * 20
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(ordered_map(eval, pieces(), processes=2))
    assert multiprocessing.active_children() == []


@pytest.mark.usefixtures("started")
def test_pieces_are_taken_as_they_are_needed() -> None:
    taken = 0

    def pieces() -> Any:
        nonlocal taken
        for taken in range(10_000):  # noqa: B007
            yield "1"

    results = ordered_map(eval, pieces(), processes=2)
    for _ in range(100):
        next(results)
    assert taken < 100 + pool._BATCH * (2 * pool._SLOTS + 2)
    results.close()  # type: ignore[attr-defined]


@pytest.mark.usefixtures("started")
@pytest.mark.parametrize("options", [{}, {"tokens": 300}, {"separator": "blank-line"}])
def test_a_corpus_does_not_depend_on_the_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(containers, "BLOCK_BYTES", 1 << 12)
    source = tmp_path / "text.txt"
    stories = [f"Zoë {i % 700} sat.\n\n€ {'é€😀'[i % 3]}{END_OF_TEXT}\n" for i in range(4000)]
    source.write_text("".join(stories))
    one, three = (prepare_text(source, tmp_path / str(n), processes=n, **options) for n in (1, 3))
    assert one.meta.splits == three.meta.splits
    assert one.meta.source == three.meta.source
    assert one.meta.source["document_copies"] > 1000
    for split in SPLITS:
        assert (one.tokens(split) == three.tokens(split)).all()
