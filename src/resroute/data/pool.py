"""Work on a stream of pieces by several processes, results in order and memory bounded.

Pieces and results travel in memory that two processes share. In pipes, 64 KB at a time, each a
change of process, they would take as long as the work.
"""

import itertools
import multiprocessing
import os
import pickle
import signal
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from resroute.config import UserError

P = TypeVar("P")
R = TypeVar("R")

# pieces that are handed over at once
_BATCH = 2
# batches that a process has before it, the one it works on included
_AHEAD = 4
# places for batches, and then for their results until they are taken
_SLOTS = 8
# room for a batch of 256 KB pieces, or for their tokens of 16 bits
_SLOT_BYTES = 5 << 18


class ProcessKilledError(UserError):
    """One of the processes is gone."""

    def __init__(self) -> None:
        super().__init__(
            "a process was killed, maybe for want of memory; try again, or with --processes 1"
        )


def available_cores() -> int:
    """Processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def ordered_map(
    work: Callable[[P], R],
    pieces: Iterable[P],
    *,
    processes: int,
    prepare: Callable[..., None] | None = None,
    arguments: tuple[Any, ...] = (),
) -> Iterator[R]:
    """`map(work, pieces)` by several processes, a few pieces ahead of what is taken.

    This process is one of them: it does what the others have no room for, and all of it until they
    have started, which takes seconds.

    Args:
        work: A module-level function; its pieces and results are pickled.
        pieces: Taken as they are needed, in this process.
        processes: How many there are.
        prepare: Called once in each process, before any work, with `arguments`.
        arguments: See `prepare`.

    Raises:
        ProcessKilledError: What its name says.
    """
    _keep_memory()
    if prepare is not None:
        prepare(*arguments)
    if processes <= 1:
        yield from map(work, pieces)
        return
    task = (work, prepare, arguments)
    with ThreadPoolExecutor(1) as starter:
        starting = starter.submit(_started, processes - 1, _context(), task)
        try:
            yield from _shared_out(work, pieces, starting)
        finally:
            if starting.exception() is None:
                for worker in starting.result():
                    worker.stop()


def _shared_out(
    work: Callable[[P], R], pieces: Iterable[P], starting: "Future[list[_Worker]]"
) -> Iterator[R]:
    # each batch as its results, or as who has them
    waiting: deque[_Worker | list[R]] = deque()
    for batch in _batches(pieces):
        workers = _ready(starting)
        taker = next((worker for worker in workers if worker.send(batch)), None)
        waiting.append(taker or [work(piece) for piece in batch])
        while waiting and (_is_there(waiting[0]) or len(waiting) > _AHEAD * len(workers) + 2):
            yield from _taken(waiting.popleft())
    while waiting:
        yield from _taken(waiting.popleft())


def _batches(pieces: Iterable[P]) -> Iterator[list[P]]:
    source = iter(pieces)
    while batch := list(itertools.islice(source, _BATCH)):
        yield batch


def _is_there(results: "_Worker | list[Any]") -> bool:
    return isinstance(results, list) or results.has_answer()


def _taken(results: "_Worker | list[Any]") -> list[Any]:
    return results if isinstance(results, list) else results.take()


class _Worker:
    """Another process, which works on batches in the order in which they are sent."""

    def __init__(self, context: Any, task: tuple[Any, ...]) -> None:
        shared = context.RawArray("B", _SLOTS * _SLOT_BYTES)
        self._memory = _slots(shared)
        self._answers: deque[int | bytes | Exception] = deque()
        self._sent = self._answered = self._taken = 0
        self._connection, other_end = context.Pipe()
        self._process = context.Process(target=_serve, args=(other_end, shared, *task), daemon=True)
        self._process.start()
        other_end.close()

    def wait(self) -> Any:
        """What it says next; its first word is that it has started."""
        try:
            return self._connection.recv()
        except (EOFError, ConnectionError):
            raise ProcessKilledError from None

    def send(self, batch: list[Any]) -> bool:
        """Give it a batch; False where it has no room."""
        self._listen()
        if self._sent - self._answered == _AHEAD or self._sent - self._taken == _SLOTS:
            return False
        slot = self._sent % _SLOTS
        size = _pack(self._memory[slot], batch)
        # what does not fit would block the pipe
        if isinstance(size, bytes):
            return False
        try:
            self._connection.send((slot, size))
        except ConnectionError:
            raise ProcessKilledError from None
        self._sent += 1
        return True

    def has_answer(self) -> bool:
        """Whether `take` need not wait."""
        self._listen()
        return len(self._answers) > 0

    def take(self) -> list[Any]:
        """The results of its first batch that is not taken."""
        if not self.has_answer():
            self._hear()
        answer = self._answers.popleft()
        if isinstance(answer, Exception):
            raise answer
        self._taken += 1
        results: list[Any] = _unpack(self._memory[(self._taken - 1) % _SLOTS], answer)
        return results

    def stop(self) -> None:
        """End it, and wait until it is gone."""
        self._connection.close()
        self._process.join()

    def _listen(self) -> None:
        while self._answered < self._sent and self._connection.poll():
            self._hear()

    def _hear(self) -> None:
        self._answers.append(self.wait())
        self._answered += 1


def _started(count: int, context: Any, task: tuple[Any, ...]) -> list[_Worker]:
    if hasattr(signal, "pthread_sigmask"):
        # what this thread starts leaves Ctrl-C to the process that ends it; but the tracker, which
        # all others need, lets the signal through again where it is started
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    workers = [_Worker(context, task) for _ in range(count)]
    for worker in workers:
        worker.wait()
    return workers


def _ready(starting: "Future[list[_Worker]]") -> list[_Worker]:
    return starting.result() if starting.done() else []


def _serve(
    connection: "Connection[Any, Any]",
    shared: Any,
    work: Callable[[Any], Any],
    prepare: Callable[..., None] | None,
    arguments: tuple[Any, ...],
) -> None:
    """Work until the other end is closed, or its process is gone."""
    # who is told to stop there sees to it that this process does
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _keep_memory()
    if prepare is not None:
        prepare(*arguments)
    memory = _slots(shared)
    with suppress(EOFError, OSError):
        connection.send(None)
        while True:
            slot, size = connection.recv()
            answer: int | bytes | Exception
            try:
                # the slot has room again once the pieces are here
                pieces = _unpack(memory[slot], size)
                answer = _pack(memory[slot], [work(piece) for piece in pieces])
            except Exception as error:
                error.add_note(traceback.format_exc())
                answer = error
            connection.send(answer)


def _slots(shared: Any) -> list[memoryview]:
    memory = memoryview(shared).cast("B")
    return [memory[n * _SLOT_BYTES : (n + 1) * _SLOT_BYTES] for n in range(_SLOTS)]


def _pack(memory: memoryview, values: list[Any]) -> int | bytes:
    """Write values; how long they are, or themselves where they do not fit."""
    data = pickle.dumps(values, pickle.HIGHEST_PROTOCOL)
    if len(data) > len(memory):
        return data
    memory[: len(data)] = data
    return len(data)


def _unpack(memory: memoryview, packed: int | bytes) -> Any:
    return pickle.loads(memory[:packed] if isinstance(packed, int) else packed)


def _keep_memory() -> None:
    # glibc gives the memory of a piece back to the system and soon asks for it again, page by page,
    # unless a larger block was freed before; elsewhere this does nothing
    bytearray(1 << 23)


def _context() -> Any:
    """Processes without this one's threads, which share what this package imports, if they can."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context
