"""Work on a stream of pieces by several processes, results in order and memory bounded."""

import multiprocessing
import multiprocessing.context
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any, TypeVar

P = TypeVar("P")
R = TypeVar("R")

# pieces that wait or are worked on, for each process
_AHEAD = 3


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

    Args:
        work: A module-level function; its pieces and results travel between processes.
        pieces: Taken as they are needed, in this process.
        processes: One works here, without a pool.
        prepare: Called once in each process, before any work, with `arguments`.
        arguments: See `prepare`.
    """
    if processes <= 1:
        if prepare is not None:
            prepare(*arguments)
        yield from map(work, pieces)
        return
    context = _context(work.__module__)
    with ProcessPoolExecutor(
        processes, mp_context=context, initializer=prepare, initargs=arguments
    ) as pool:
        waiting: deque[Future[R]] = deque()
        try:
            for piece in pieces:
                waiting.append(pool.submit(work, piece))
                if len(waiting) >= _AHEAD * processes:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def _context(module: str) -> multiprocessing.context.BaseContext:
    """Processes without this one's threads, which share what `module` imports where they can."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([module])
    return context
