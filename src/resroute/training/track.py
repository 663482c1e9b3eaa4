"""Listeners that hand a run's metrics to other programs, and a listener made of several."""

from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

from resroute.config import UserError
from resroute.residual.findings import Finding
from resroute.training.metrics import Listener, MetricsFile, RunStart

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoard(Listener):
    """Writes every record as TensorBoard events, into `tensorboard` in the run's folder.

    A number is the scalar `<kind>/<key>`; a list of numbers its `<kind>/<key>/mean` and
    `<kind>/<key>/max`; what a record nests is `<kind>/<key>/<name>`. Points that a resumed run
    reports again replace the older ones. TensorBoard puts the host's name into its files' names.

    Raises:
        UserError: TensorBoard is not installed.
    """

    def __init__(self) -> None:
        try:
            tensorboard = import_module("torch.utils.tensorboard")
        except ImportError as error:
            raise UserError(
                'TensorBoard is not installed: pip install "resroute[track]"'
            ) from error
        self._open = tensorboard.SummaryWriter
        self._writer: SummaryWriter | None = None

    def begin(self, run: RunStart) -> None:
        """Open an event file."""
        self._close()
        kept = MetricsFile(run.path / "metrics.jsonl").read()
        # what the run has dropped from its metrics is reported again; a run that was killed before
        # its first checkpoint starts over with step 0 itself
        first = 1 + max((record["step"] for record in kept), default=-1)
        self._writer = self._open(str(run.path / "tensorboard"), purge_step=first)

    def record(self, record: dict[str, Any]) -> None:
        """Write the numbers of a record."""
        assert self._writer is not None, "a run begins before it reports"
        numbers = {key: value for key, value in record.items() if key not in ("kind", "step")}
        for tag, number in _scalars(record["kind"], numbers):
            self._writer.add_scalar(tag, number, record["step"])
        # an interrupted run closes nothing
        self._writer.flush()

    def end(self, summary: dict[str, Any]) -> None:
        """Close the event file."""
        self._close()

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer = None


class Listeners(Listener):
    """Hands every event to several listeners, in their order."""

    def __init__(self, *listeners: Listener) -> None:
        self.listeners = listeners

    def message(self, text: str) -> None:
        """Hand on a line."""
        for listener in self.listeners:
            listener.message(text)

    def begin(self, run: RunStart) -> None:
        """Hand on that a run starts."""
        for listener in self.listeners:
            listener.begin(run)

    def record(self, record: dict[str, Any]) -> None:
        """Hand on a line of metrics."""
        for listener in self.listeners:
            listener.record(record)

    def advance(self, step: int) -> None:
        """Hand on that a step was taken."""
        for listener in self.listeners:
            listener.advance(step)

    def health(self, findings: list[Finding]) -> None:
        """Hand on what was found."""
        for listener in self.listeners:
            listener.health(findings)

    def end(self, summary: dict[str, Any]) -> None:
        """Hand on that the run is over."""
        for listener in self.listeners:
            listener.end(summary)


TRACKERS: dict[str, type[Listener]] = {"tensorboard": TensorBoard}
"""Listeners for other programs by name."""


def _scalars(tag: str, value: object) -> Iterator[tuple[str, float]]:
    """Names and numbers of what a record holds; words, truths and nothing are left out."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _scalars(f"{tag}/{name}", part)
    elif isinstance(value, list):
        numbers = [number for number in value if _is_number(number)]
        if numbers:
            yield f"{tag}/mean", sum(numbers) / len(numbers)
            yield f"{tag}/max", max(numbers)
    elif _is_number(value):
        assert isinstance(value, int | float)
        yield tag, value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
