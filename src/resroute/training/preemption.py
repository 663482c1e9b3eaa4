"""Stopping when the system asks: SIGTERM, a closed terminal and Ctrl-C save first."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from resroute.training.distributed import World

_HANGUP = getattr(signal, "SIGHUP", None)
_SIGNALS = [number for number in (signal.SIGTERM, signal.SIGINT, _HANGUP) if number is not None]


class Preempted(KeyboardInterrupt):
    """A run was asked to stop, by SIGTERM, SIGHUP or Ctrl-C, and has saved a checkpoint.

    Attributes:
        path: Of the run.
        step: After which it stopped; None where it had not begun, so that nothing was saved.
        signal: The number of the signal; SIGHUP counts as SIGTERM.
    """

    def __init__(self, path: Path, step: int | None, number: int) -> None:
        when = "before it began" if step is None else f"after step {step}; its checkpoint is saved"
        super().__init__(f"{path} was asked to stop {when}")
        self.path = path
        self.step = step
        self.signal = number


class _CutError(BaseException):
    """Ends a piece of work; not an Exception, which the work might handle."""


class StopRequest:
    """Whether the system has asked this process to stop, and by which signal."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._cuts = False

    def cut_short(self, work: Callable[[], object]) -> None:
        """Do a piece of work that a request ends at once, or does not let begin."""
        if self.signal is not None:
            return
        with suppress(_CutError):
            self._cuts = True
            try:
                work()
            finally:
                self._cuts = False

    def agreed(self, world: World) -> int | None:
        """The signal by which any process was asked; every process asks, and all are told it."""
        # once: a signal may come between two looks
        number = self.signal
        asked, by_term = world.total(float(number is not None), float(number == signal.SIGTERM))
        if not asked:
            return None
        return signal.SIGTERM if by_term else signal.SIGINT

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take note of SIGTERM, SIGHUP and SIGINT instead of dying of them.

        The second signal of a kind is not held back. Under `nohup`, SIGHUP stays ignored. Outside
        the main thread, where Python lets nobody listen, nothing changes.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        former = {number: signal.getsignal(number) for number in _SIGNALS}
        if _HANGUP is not None and former[_HANGUP] == signal.SIG_IGN:
            del former[_HANGUP]

        def note(number: int, frame: FrameType | None) -> None:
            self.signal = signal.SIGTERM if number == _HANGUP else number
            signal.signal(number, former[signal.Signals(number)] or signal.SIG_DFL)
            if self._cuts:
                raise _CutError

        for number in former:
            signal.signal(number, note)
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler or signal.SIG_DFL)
