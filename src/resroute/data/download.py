"""Downloading a file of which size and checksum are known, over connections that break.

What has arrived lies in `NAME.part` beside the target and is kept on failure: the next try, of this
process or a later one, asks for the rest. The target appears whole and checked, or not at all.
"""

import email.utils
import http.client
import re
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from resroute.config import UserError
from resroute.files import digest, flush, lock_file

Progress = Callable[[int, int], None]

_BLOCK_BYTES = 1 << 18
# tries that bring nothing new, one after the other
_TRIES = 5
# seconds: of the first wait, which doubles from try to try, and of the longest that is honoured
_WAIT = 1.0
_LONGEST_WAIT = 60.0
_PASSING = (408, 425, 429)


def download(
    url: str,
    target: Path,
    *,
    size: int,
    sha256: str,
    progress: Progress | None = None,
    timeout: float = 30.0,
) -> Path:
    """Fetch a file, or keep the one that is there already where it is the right one.

    Redirects are followed, but not from https to anything else; proxies are those of the
    environment. Answers 408, 425, 429 and 5xx, connections that are cut and silences are waited out
    and tried again: five times in a row without a new byte, with waits of 1, 2, 4 and 8 seconds or
    what `Retry-After` asks for, a minute at most. Where no connection comes about at all, nothing
    is waited for.

    Args:
        url: What to fetch, by https (or http).
        target: Where to; folders are made.
        size: Bytes of the file.
        sha256: Of the file, in hexadecimal.
        progress: Called with the bytes that are here and `size`; goes back where a server starts
            over.
        timeout: Seconds of silence after which a connection is given up.

    Returns:
        `target`.

    Raises:
        UserError: No network, an answer that does not pass, another size or checksum than
            expected, another file at `target`, or a folder that cannot be written.
    """
    assert urlsplit(url).scheme in ("https", "http"), url
    progress = progress or (lambda done, total: None)
    try:
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            with _locked(target):
                # another process may have brought it meanwhile
                if not target.exists():
                    _fetch(_Transfer(url, target, size, progress, timeout), sha256)
                    return target
        _check_present(target, size, sha256)
        progress(size, size)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"{target}: cannot be written ({reason}); check the folder") from None
    return target


class _FailureError(Exception):
    """Why a try did not bring the file; `is_final` where another would not either."""

    def __init__(self, reason: str, *, is_final: bool = False, wait: float | None = None) -> None:
        super().__init__(reason)
        self.is_final = is_final
        self.wait = wait


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects, but not from https to what anyone on the way can change."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any,
        newurl: str,
    ) -> urllib.request.Request | None:  # fmt: skip
        allowed = ("https",) if urlsplit(req.full_url).scheme == "https" else ("https", "http")
        if (scheme := urlsplit(newurl).scheme) not in allowed:
            fp.close()
            raise _FailureError(
                f"it redirects from {allowed[-1]} to {scheme}, which is not followed", is_final=True
            )
        return super().redirect_request(req, fp, code, msg, headers, newurl)


class _Transfer:
    """A file on its way, over as many connections as it takes."""

    def __init__(
        self, url: str, target: Path, size: int, progress: Progress, timeout: float
    ) -> None:
        self.url = url
        self.target = target
        self.part = target.with_name(f"{target.name}.part")
        self.size = size
        self._progress = progress
        self._timeout = timeout
        self._opener = urllib.request.build_opener(_Redirects())
        self._version: str | None = None
        self._was_reached = False

    @property
    def here(self) -> int:
        """How many bytes have arrived."""
        return self.part.stat().st_size if self.part.exists() else 0

    def complete(self) -> None:
        """Try until the part has as many bytes as the file, or it is no use."""
        most, fruitless = self.here, 0
        while self.here < self.size:
            try:
                self._try()
            except _FailureError as failure:
                # a server that starts over each time makes no progress by that
                fruitless = 1 if self.here > most else fruitless + 1
                most = max(most, self.here)
                if failure.is_final or fruitless == _TRIES:
                    raise UserError(self._advice(str(failure))) from None
                wait = _WAIT * 2 ** (fruitless - 1) if failure.wait is None else failure.wait
                time.sleep(min(wait, _LONGEST_WAIT))

    def _advice(self, reason: str) -> str:
        kept = f"; {self.here:,} bytes are kept for the next try" if self.here else ""
        return (
            f"{self.url}: cannot be downloaded ({reason}){kept}\n"
            f"try again later, or get it some other way and put it at {self.target}"
        )

    def _try(self) -> None:
        start = self.here
        with self._open(start) as response:
            if response.status == 206:
                self._check_continues(response, start)
            elif response.status == 200:
                self._check_length(response.headers.get("Content-Length"))
                start = 0
            else:
                raise _FailureError(f"HTTP {response.status}", is_final=True)
            self._version = _version(response.headers) or self._version
            self._progress(start, self.size)
            with self.part.open("ab" if start else "wb") as file:
                for block in self._blocks(response):
                    start += len(block)
                    if start > self.size:
                        break
                    file.write(block)
                    self._progress(start, self.size)
        if start > self.size:
            self.part.unlink()
            raise _FailureError(
                f"it is longer than the {self.size:,} bytes published", is_final=True
            )
        if start < self.size:
            raise _FailureError(f"the connection was cut after {start:,} of {self.size:,} bytes")

    def _open(self, start: int) -> Any:
        headers = {"User-Agent": "resroute", "Accept-Encoding": "identity"}
        if start:
            headers["Range"] = f"bytes={start}-"
            if self._version:
                headers["If-Range"] = self._version
        request = urllib.request.Request(self.url, headers=headers)
        try:
            response = self._opener.open(request, timeout=self._timeout)
        except urllib.error.HTTPError as error:
            with error:
                self._was_reached = True
                raise self._refusal(error) from None
        except urllib.error.URLError as error:
            # without a network there is nothing to wait for; one that was there may come back
            raise _FailureError(_said(error.reason), is_final=not self._was_reached) from None
        except (OSError, http.client.HTTPException) as error:
            self._was_reached = True
            raise _FailureError(_said(error)) from None
        self._was_reached = True
        return response

    def _refusal(self, error: urllib.error.HTTPError) -> _FailureError:
        if error.code == 416:
            # what is here is no beginning of the file that is there
            self.part.unlink(missing_ok=True)
            return _FailureError("HTTP 416")
        reason = f"HTTP {error.code} {error.reason}".splitlines()[0].strip()
        is_passing = error.code in _PASSING or error.code >= 500
        return _FailureError(reason, is_final=not is_passing, wait=_retry_after(error.headers))

    def _check_continues(self, response: Any, start: int) -> None:
        """Whether a partial answer is the rest of the file that is here; else start over."""
        found = re.fullmatch(
            r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", "").strip()
        )
        version = _version(response.headers)
        is_other = version and self._version and version != self._version
        if not found or int(found[1]) != start or is_other:
            self.part.unlink(missing_ok=True)
            self._version = None
            raise _FailureError("the file there is not the one that was begun")
        if found[2] != "*":
            self._check_length(found[2])

    def _check_length(self, length: str | None) -> None:
        if length is not None and length.strip() != str(self.size):
            self.part.unlink(missing_ok=True)
            raise _FailureError(
                f"it has {length.strip()} bytes there, {self.size} were published", is_final=True
            )

    def _blocks(self, response: Any) -> Iterator[bytes]:
        try:
            # read would lose what came before a silence
            while block := response.read1(_BLOCK_BYTES):
                yield block
        except (OSError, http.client.HTTPException) as error:
            raise _FailureError(_said(error)) from None


def _fetch(transfer: _Transfer, sha256: str) -> None:
    """Bring the file to its target."""
    is_resumed = transfer.here > 0
    transfer.complete()
    if digest(transfer.part) != sha256 and is_resumed:
        # the part of an earlier process may have been of another file
        transfer.part.unlink()
        transfer.complete()
    if digest(transfer.part) != sha256:
        transfer.part.unlink()
        raise UserError(
            f"{transfer.url}: has another sha256 than was published, what came was removed\n"
            f"try again, or get the file some other way and put it at {transfer.target}"
        )
    flush(transfer.part)
    transfer.part.replace(transfer.target)
    flush(transfer.target.parent)


def _check_present(target: Path, size: int, sha256: str) -> None:
    found = target.stat().st_size if target.is_file() else 0
    if found != size:
        raise UserError(f"{target}: has {found:,} bytes, not {size:,}; delete it and try again")
    if digest(target) != sha256:
        raise UserError(f"{target}: has another sha256 than was published; delete it and try again")


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Keep other processes from the same target; they find the file when their turn comes."""
    held = lock_file(target.with_name(f".{target.name}.lock"))
    try:
        yield
    finally:
        # none where the file system has no locks, which is no reason not to download
        if held is not None:
            held.release()


def _version(headers: Any) -> str | None:
    """What `If-Range` takes: a strong ETag, else the date of the last change."""
    tag: str | None = headers.get("ETag")
    if tag and not tag.startswith("W/"):
        return tag
    changed: str | None = headers.get("Last-Modified")
    return changed


def _retry_after(headers: Any) -> float | None:
    """Seconds that `Retry-After` asks to wait, given as a number or a date."""
    text = (headers.get("Retry-After") or "").strip()
    if text.isdecimal():
        return float(text)
    try:
        until = email.utils.parsedate_to_datetime(text)
    except ValueError:
        return None
    if until.tzinfo is None:
        until = until.replace(tzinfo=UTC)
    return max(0.0, (until - datetime.now(UTC)).total_seconds())


def _said(error: object) -> str:
    """What an error of the network says, in one line."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, socket.gaierror):
        return f"the host is not found: {error.strerror}"
    if isinstance(error, http.client.IncompleteRead):
        return "the connection was cut"
    text = str(getattr(error, "strerror", None) or error)
    return " ".join(text.split())[:160] or type(error).__name__
