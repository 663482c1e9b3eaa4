"""Stopping when the system asks: SIGTERM and Ctrl-C save first."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Preempted(KeyboardInterrupt):
    """A run was asked to stop, by SIGTERM or Ctrl-C, and has saved a checkpoint.

    Attributes:
        path: Of the run.
        step: After which it stopped.
        signal: The number of the signal.
    """

    def __init__(self, path: Path, step: int, number: int) -> None:
        super().__init__(f"{path} was asked to stop after step {step}; its checkpoint is saved")
        self.path = path
        self.step = step
        self.signal = number


class StopRequest:
    """Whether the system has asked this process to stop, and by which signal."""

    def __init__(self) -> None:
        self.signal: int | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take note of SIGTERM and SIGINT instead of dying of them.

        The second signal of a kind is not held back. Outside the main thread, where Python lets
        nobody listen, nothing changes.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        former = {number: signal.getsignal(number) for number in _SIGNALS}

        def note(number: int, frame: FrameType | None) -> None:
            self.signal = number
            signal.signal(number, former[signal.Signals(number)] or signal.SIG_DFL)

        for number in _SIGNALS:
            signal.signal(number, note)
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler or signal.SIG_DFL)
