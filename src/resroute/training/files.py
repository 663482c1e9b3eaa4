"""Files that are either there whole or not at all."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from resroute.config import UserError


def sync(path: Path) -> None:
    """Flush a file, or a folder's list of names, to the disk."""
    # Windows cannot open a folder; its renames need no such flush
    if path.is_dir() and os.name == "nt":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    """Write under a temporary name, flush, then rename over `path`."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    sync(temporary)
    temporary.replace(path)
    sync(path.parent)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write an object as indented JSON, whole or not at all."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path, remedy: str) -> dict[str, Any]:
    """Read an object from a JSON file.

    Raises:
        UserError: The file is missing, unreadable or damaged; `remedy` says what to do.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not valid JSON"
        raise UserError(f"cannot read {path}: {reason}; {remedy}") from error
    if not isinstance(value, dict):
        raise UserError(f"cannot read {path}: not an object; {remedy}")
    return value
