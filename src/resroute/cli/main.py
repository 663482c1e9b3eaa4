"""Entry point: runs a command and turns what goes wrong into lines and exit codes."""

import argparse
import io
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TextIO, cast

import torch

from resroute.cli.display import printable
from resroute.cli.parser import make_parser, parse
from resroute.cli.signals import Terminated
from resroute.config import UserError
from resroute.training import Preempted
from resroute.training.distributed import is_main_process

OK, MISTAKE, INTERRUPTED, TERMINATED = 0, 2, 130, 143


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        0 where the command did its work; 2 for a mistake that its user can mend, or where the
        system refused a file or memory (one or two lines on stderr); 130 where Ctrl-C and 143 where
        SIGTERM stopped it, training then with a checkpoint. A bug of ours is not caught: it keeps
        its traceback and exits with 1.
    """
    _make_streams_safe()
    options = parse(make_parser(), sys.argv[1:] if arguments is None else list(arguments))
    try:
        with warnings.catch_warnings():
            if is_main_process():
                warnings.showwarning = _Notes()
            else:
                warnings.simplefilter("ignore")
            options.run(options)
        sys.stdout.flush()
    except UserError as error:
        # which all processes have met
        return _mistake(str(error)) if is_main_process() else MISTAKE
    except Preempted as stopped:
        if is_main_process():
            print(f"resroute: {stopped}{_without_fresh(options)}", file=sys.stderr)
        return TERMINATED if stopped.signal == signal.SIGTERM else INTERRUPTED
    except KeyboardInterrupt as stopped:
        is_term = isinstance(stopped, Terminated)
        what = "terminated" if is_term else "interrupted"
        print(f"resroute: {what}{_without_fresh(options)}", file=sys.stderr)
        return TERMINATED if is_term else INTERRUPTED
    except BrokenPipeError:
        # the reader of our output has gone; nothing more can be written there
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        where = f"{error.filename}: " if error.filename is not None else "reading or writing: "
        return _mistake(f"{where}{error.strerror or error}; check the path and the disk")
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        return _mistake("out of memory; use a smaller model, context, batch or count")
    return OK


class _Notes:
    """Shows each warning once, as one plain line."""

    def __init__(self) -> None:
        self.said: set[str] = set()

    def __call__(self, message: Warning | str, *_: object, **__: object) -> None:
        text = str(message)
        if text not in self.said:
            self.said.add(text)
            print(f"resroute: note: {text}", file=sys.stderr)


def _without_fresh(options: argparse.Namespace) -> str:
    """How to go on."""
    hint: str = options.hint
    return f"{hint} (without --fresh)" if hint and getattr(options, "fresh", False) else hint


def _mistake(text: str) -> int:
    print(f"resroute: {printable(text)}", file=sys.stderr)
    return MISTAKE


def _make_streams_safe() -> None:
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            # the descriptor is closed
            nowhere = os.open(os.devnull, os.O_WRONLY)
            setattr(sys, name, open(nowhere, "w", closefd=False))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            # names may hold what the terminal's encoding cannot
            stream.reconfigure(errors="backslashreplace")
    if not isinstance(sys.stderr, _Patient):
        sys.stderr = cast(TextIO, _Patient(sys.stderr))


class _Patient:
    """A stream whose reader may go, or whose disk may fill: what is told must not stop the work."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write what can be written."""
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush what can be flushed."""
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    # torch has no class of its own for the CPU
    return any(words in str(error) for words in ("can't allocate memory", "not enough memory"))
