"""SIGTERM as Ctrl-C, for commands that have something to clean up."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Terminated(KeyboardInterrupt):
    """The system has asked this process to end."""


@contextmanager
def cleaning_up() -> Iterator[None]:
    """Let SIGTERM end the body by an exception, so that it leaves nothing behind.

    Outside the main thread, where Python lets nobody listen, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        # the second one is not held back
        signal.signal(signal.SIGTERM, former)
        raise Terminated

    former = signal.signal(signal.SIGTERM, end) or signal.SIG_DFL
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)
