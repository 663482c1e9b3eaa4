"""The command line: parsing, progress and plain errors around the library's functions."""

from resroute.cli.main import main as main

__all__ = ["main"]
