"""Progress: a bar on a terminal, plain lines elsewhere; both on stderr."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from resroute.data import Floor
from resroute.residual import Finding
from resroute.training import Listener, RunStart

# seconds between plain lines of training, so that a log stays short
_PLAIN_INTERVAL = 10.0


class Display(Listener):
    """Shows a run's progress, its losses beside the floor."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self.is_live = self.console.is_terminal
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=10),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[losses]}"),
            TimeRemainingColumn(compact=True),
            console=self.console,
            disable=not self.is_live,
        )
        self.task: TaskID | None = None
        self.label = ""
        self.total = 0
        self.floor: Floor | None = None
        self.latest: dict[str, dict[str, Any]] = {}
        self.said = 0.0

    def __enter__(self) -> "Display":
        self.progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.progress.stop()

    def message(self, text: str) -> None:
        """Print a line above the bar."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def begin(self, run: RunStart) -> None:
        """Open a bar."""
        self.label, self.total, self.latest = run.label, run.total, {}
        self.said = time.monotonic()
        self.floor = run.floor
        self.task = self.progress.add_task(
            run.label, completed=run.step, total=run.total, losses=""
        )

    def record(self, record: dict[str, Any]) -> None:
        """Show new numbers: on a bar all, as lines every validation and now and then a loss."""
        if record["kind"] not in ("train", "validation"):
            return
        self.latest[record["kind"]] = record
        if self.is_live:
            if self.task is not None:
                self.progress.update(self.task, losses=self._losses(short=True))
            return
        is_due = time.monotonic() - self.said >= _PLAIN_INTERVAL
        if record["kind"] == "validation" or is_due:
            self.said = time.monotonic()
            self.message(f"{self.label} {record['step']}/{self.total}: {self._losses()}")
            # a later line of training must not repeat an earlier validation
            self.latest.pop("validation", None)

    def advance(self, step: int) -> None:
        """Move the bar."""
        if self.task is not None:
            self.progress.update(self.task, completed=step)

    def health(self, findings: list[Finding]) -> None:
        """Say what was found, two lines each: what and where, then why and what to do."""
        for found in findings:
            self.message(f"{found.severity}: {found.check}, {found.where}: {found.saw}")
            self.message(f"  {found.why}; {found.remedy}")

    def _losses(self, *, short: bool = False) -> str:
        """The latest numbers; the short form keeps a bar within 80 columns."""
        parts = []
        train, validation = self.latest.get("train"), self.latest.get("validation")
        if train:
            parts.append(f"loss {_nats(train):.3f}")
        if validation:
            parts.append(f"val {_nats(validation):.3f}")
        if self.floor is not None:
            nats = f"{self.floor.nats:.3f}"
            bound = f">={nats}" if short else f"{nats} (lower bound)"
            parts.append(f"floor {nats if self.floor.exact else bound}")
        if train:
            speed = train["tokens_per_second"]
            parts.append(f"{speed / 1000:.1f}k/s" if short else f"{speed:,.0f} tok/s")
        return (" " if short else "  ").join(parts)


def _nats(record: dict[str, Any]) -> float:
    """Nats per character."""
    nats: float = record.get("nats_per_character", record["loss"])
    return nats


def printable(text: str) -> str:
    """`text` with escapes for what a terminal would act on or could not show; lines stay."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


@contextmanager
def byte_progress(name: str) -> Iterator[Callable[[int, int], None] | None]:
    """A bar for work counted in bytes, gone when it is done; None where nobody watches."""
    if not sys.stderr.isatty():
        yield None
        return
    bar = Progress(console=Console(stderr=True), transient=True)
    task: TaskID | None = None

    def update(done: int, total: int) -> None:
        nonlocal task
        if task is None:
            task = bar.add_task(f"reading {name}", total=total)
        bar.update(task, completed=done)

    with bar:
        yield update


@contextmanager
def task_progress() -> Iterator[Callable[[str, int, int], None] | None]:
    """A bar for work of several named parts, gone when it is done; None where nobody watches."""
    if not sys.stderr.isatty():
        yield None
        return
    columns = TextColumn("{task.description}"), BarColumn(bar_width=24), TimeRemainingColumn()
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task("loading", total=None)
    latest = ""

    def update(what: str, done: int, total: int) -> None:
        nonlocal latest
        if what != latest:
            # the time that is left is of this part
            bar.reset(task, total=total, description=what)
        latest = what
        bar.update(task, completed=done)

    with bar:
        yield update
