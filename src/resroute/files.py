"""Files that are there whole or not at all, JSON that is read strictly, and locks."""

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock

from resroute.config import UserError

_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}\.tmp")
# what file systems say that have no locks, or none that reach other machines
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP)


@contextmanager
def writing(path: Path, failures: tuple[type[BaseException], ...] = (OSError,)) -> Iterator[None]:
    """Say in one line that `path` cannot be written where the body fails to.

    Args:
        path: What is written.
        failures: What the body then raises.

    Raises:
        UserError: In their place.
    """
    try:
        yield
    except failures as error:
        reason = getattr(error, "strerror", None) or str(error).strip().rpartition("\n")[2]
        raise UserError(f"{path}: cannot be written ({reason}); check the folder") from None


def flush(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    # Windows flushes no folder, and a file only through a handle that may write
    is_windows = os.name == "nt"
    if is_windows and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR if is_windows else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file under a temporary name, flush it, and rename it.

    Raises:
        UserError: The folder does not take it; what was at `path` stays as it was.
    """
    temporary = _temporary(path)
    try:
        with writing(path):
            temporary.write_bytes(data)
            flush(temporary)
            temporary.replace(path)
            flush(path.parent)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 as `write_bytes` does."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write an object as indented JSON, as `write_bytes` does."""
    text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    # file names may hold lone surrogates; their backslash form is JSON's too
    write_bytes(path, text.encode("utf-8", "backslashreplace"))


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A temporary folder beside `path`, which takes its place where the body succeeds.

    Everything in it is flushed first, and read by whoever may read the folder (safetensors makes
    files of their owner alone). Where the body fails, nothing is left behind.

    Raises:
        FileExistsError: `path` has files by now.
        UserError: The folder cannot be written.
    """
    try:
        # a link stays a link: the folder behind it is made
        path = path.resolve()
    except (OSError, RuntimeError):
        raise UserError(f"{path}: is a link to itself; name another folder") from None
    folder = _temporary(path)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
    try:
        with writing(path):
            yield folder
            # what the user's mask leaves of a folder
            mode = stat.S_IMODE(folder.stat().st_mode) & 0o666
            for file in folder.iterdir():
                if file.is_file() and os.name != "nt":
                    file.chmod(mode)
                flush(file)
            flush(folder)
            is_placed = _take_place(folder, path)
            flush(path.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if not is_placed:
        raise FileExistsError(path)


def _take_place(folder: Path, path: Path) -> bool:
    """Rename a folder; False where `path` has files by now."""
    # Windows does not rename over an empty folder; elsewhere this is one step
    if os.name == "nt" and path.is_dir() and not any(path.iterdir()):
        path.rmdir()
    try:
        folder.rename(path)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise
    return True


def set_aside(path: Path, why: str) -> Path:
    """Keep a file or folder as `<name>.<why>-<number>`, the first that is free; returns that.

    Raises:
        UserError: It cannot be renamed.
    """
    number = 1
    while (kept := path.with_name(f"{path.name}.{why}-{number}")).exists():
        number += 1
    with writing(path):
        return path.rename(kept)


def lock_file(path: Path, timeout: float = -1) -> FileLock | None:
    """Lock a file, until the lock is released or the process ends, however it ends.

    Args:
        path: Made where it is missing, and left there.
        timeout: Seconds to wait for another process; below zero for ever.

    Returns:
        The lock; None where the file system has none.

    Raises:
        filelock.Timeout: Another process has it.
        OSError: The file cannot be opened.
    """
    # else filelock would take a file for a lock, which outlives a process that is killed
    held = FileLock(path, timeout, fallback_to_soft=False)
    try:
        held.acquire()
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return None
    return held


def digest(path: Path) -> str:
    """SHA-256 of a file in hexadecimal.

    Raises:
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_leftover(path: Path) -> bool:
    """Whether a file or folder has the name of an unfinished write."""
    return _TEMPORARY.fullmatch(path.name) is not None


def remove_leftovers(folder: Path) -> None:
    """Remove what a kill left of unfinished writes directly below a folder.

    Only for a folder that nobody else writes to at the time.
    """
    for path in folder.glob(".*.tmp"):
        if not is_leftover(path):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink()


def read_text(path: Path, remedy: str) -> str:
    """Read UTF-8; `remedy` says in the error what to do.

    Raises:
        UserError: The file is missing, unreadable or not UTF-8.
    """
    return _decode(_read_bytes(path, remedy), str(path), remedy)


def parse_object(text: str, where: str, remedy: str) -> dict[str, Any]:
    """Read one JSON object.

    Raises:
        UserError: Not JSON, or not an object; `where` and `remedy` say where and what to do.
    """
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        reason = "a number too long" if isinstance(error, ValueError) else "nested too deeply"
        if isinstance(error, json.JSONDecodeError):
            reason = error.msg
        elif isinstance(error, _ConstantError):
            reason = str(error)
        raise UserError(f"{where}: damaged JSON ({reason}); {remedy}") from None
    if not isinstance(value, dict):
        raise UserError(f"{where}: damaged (not a JSON object); {remedy}")
    return value


def read_json(path: Path, remedy: str) -> dict[str, Any]:
    """Read a file that holds one JSON object; errors as `read_text` and `parse_object`."""
    return parse_object(read_text(path, remedy), str(path), remedy)


def read_json_lines(
    path: Path, remedy: str, *, may_be_torn: bool = False
) -> list[tuple[str, dict[str, Any]]]:
    """Read a file of one JSON object a line.

    Args:
        path: The file.
        remedy: What to do where it is damaged.
        may_be_torn: Leave out a damaged last line, as a kill leaves it.

    Returns:
        Each object after the words that name its line in errors.
    """
    lines = _read_bytes(path, remedy).removesuffix(b"\n").split(b"\n")
    records: list[tuple[str, dict[str, Any]]] = []
    if lines == [b""]:
        return records
    for number, line in enumerate(lines, start=1):
        where = f"{path} line {number}"
        try:
            text = _decode(line, where, remedy)
            records.append((where, parse_object(text, where, remedy)))
        except UserError:
            if not (may_be_torn and number == len(lines)):
                raise
    return records


class _ConstantError(ValueError):
    """JSON has no NaN and no Infinity."""


def _refuse_constant(name: str) -> None:
    raise _ConstantError(f"{name} is no number of JSON")


def require_regular(path: Path, remedy: str) -> None:
    """Refuse what would be waited for, as a pipe, or has no end, as a device.

    Raises:
        UserError: Neither a file nor a link to one; whoever opens it says where there is nothing.
    """
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(path.stat().st_mode):
            raise UserError(f"{path}: cannot be read (no regular file); {remedy}")


def _read_bytes(path: Path, remedy: str) -> bytes:
    try:
        require_regular(path, remedy)
        return path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{path}: the file is missing; {remedy}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check the file") from None


def _decode(data: bytes, where: str, remedy: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: damaged (no UTF-8 at byte {error.start}); {remedy}") from None


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
