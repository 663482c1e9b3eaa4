"""The command `bench`: options to settings, progress on stderr, the table on stdout."""

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from resroute import bench as benchmarks
from resroute.bench.cases import UNUSED
from resroute.cli.commands import residual_of
from resroute.config import UserError
from resroute.files import write_json

# options of the library's settings by the name of theirs on the command line
_PLAIN = ("layers", "dim", "batch", "context", "blocks", "pairs", "precision", "threads", "device")


def bench(options: argparse.Namespace) -> None:
    """Run a case and print its table."""
    given = {name: value for name, value in vars(options).items() if value is not None}
    for name in UNUSED.get(options.case, ()):
        if name in given:
            raise UserError(f"the case {options.case} has no use for --{name}: leave it out")
    chosen = {name: given[name] for name in (*_PLAIN, "compile") if name in given}
    if "methods" in given:
        chosen["methods"] = tuple(residual_of(name, None) for name in _words(given, "methods"))
    if "backends" in given:
        chosen["backends"] = _words(given, "backends")
    _require_blocks(chosen)
    out = None if options.out is None else Path(options.out)
    if out is not None:
        _require_new(out)
        options.hint = f"; finished comparisons, if any, are in {out}"
    with _Progress() as progress:
        settings = benchmarks.Settings(**chosen)
        save = None if out is None else partial(write_json, out)
        rows, _ = benchmarks.run(options.case, settings, progress, save=save)
    if sys.stdout.isatty():
        Console().print(benchmarks.table(rows))
    else:
        print("\n".join(benchmarks.lines(rows)))
    print("\n".join(["", *benchmarks.footer(options.case, settings, rows)]))
    if out is not None:
        print(f"\nwrote {out}")


def _require_blocks(chosen: dict[str, Any]) -> None:
    """Refuse more blocks than layers by the name of the option."""
    blocks, layers = chosen.get("blocks", 1), chosen.get("layers", benchmarks.Settings.layers)
    if blocks > layers:
        raise UserError(
            f"--blocks {blocks} is more than the stack's {layers} layers; use at most {layers}"
        )


def _words(given: dict[str, str], name: str) -> tuple[str, ...]:
    """The names of a list with commas, each once."""
    words = tuple(dict.fromkeys(word.strip() for word in given[name].split(",") if word.strip()))
    if not words:
        raise UserError(f"--{name} needs a name, or several with commas, got {given[name]!r}")
    return words


def _require_new(out: Path) -> None:
    """Refuse a file that could not be written, before minutes of timing."""
    if out.exists() or out.is_symlink():
        raise UserError(f"{out} exists: name a new file with --out")
    if not out.parent.is_dir():
        raise UserError(f"{out}: there is no folder {out.parent}; make it or name another file")


class _Progress(benchmarks.Listener):
    """A bar on a terminal, a line a comparison elsewhere; on stderr."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=10),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TimeRemainingColumn(compact=True),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self.task: TaskID | None = None

    def __enter__(self) -> "_Progress":
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def message(self, text: str) -> None:
        """Print a line above the bar."""
        self.bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def begin(self, label: str, total: int) -> None:
        """Open a bar."""
        if self.task is not None:
            self.bar.remove_task(self.task)
        self.task = self.bar.add_task(label, total=total)
        if self.bar.disable:
            self.message(f"{label}: {total} pairs")

    def advance(self, done: int) -> None:
        """Move the bar."""
        if self.task is not None:
            self.bar.update(self.task, completed=done)
