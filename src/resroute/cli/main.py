"""Entry point: runs a command and turns what goes wrong into lines and exit codes."""

import os
import sys
import warnings
from collections.abc import Sequence

from resroute.cli.parser import make_parser, parse
from resroute.config import UserError

OK, MISTAKE, INTERRUPTED = 0, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        0 where the command did its work, 2 for a mistake that its user can mend (one or two lines
        on stderr), 130 where it was interrupted. A bug of ours is not caught: it keeps its
        traceback and exits with 1.
    """
    options = parse(make_parser(), sys.argv[1:] if arguments is None else list(arguments))
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _Notes()
            options.run(options)
        sys.stdout.flush()
    except UserError as error:
        print(f"resroute: {error}", file=sys.stderr)
        return MISTAKE
    except KeyboardInterrupt:
        print("resroute: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # the reader of our output has gone; nothing more can be written there
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
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
