"""Values of options: read strictly, refused in words."""

import argparse
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def whole(least: int, most: int) -> Callable[[str], int]:
    """A reader of whole numbers within bounds, beyond which a machine could only hang or fail."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(
                f"needs a whole number from {least} to {most}, got {text[:40]!r}"
            )
        return value

    return read


def number(text: str) -> float:
    """A number; the library knows its bounds."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"needs a number, got {text[:40]!r}") from None


def several(read: Callable[[str], T]) -> Callable[[str], list[T]]:
    """A reader of values with commas between them."""

    def read_all(text: str) -> list[T]:
        return [read(word.strip()) for word in text.split(",")]

    return read_all


def name(text: str) -> str:
    """The name of a file or folder; a script's unset variable must not mean the current one."""
    if not text.strip():
        raise argparse.ArgumentTypeError("needs a name, got an empty one")
    if len(text.splitlines()) > 1:
        raise argparse.ArgumentTypeError(f"needs a name of one line, got {text[:40]!r}; rename it")
    return text


COUNT = whole(1, 10**6)
LAYERS = whole(1, 10_000)
SEED = whole(0, 2**63 - 1)
STEPS = whole(0, 10**9)
