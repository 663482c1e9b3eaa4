import functools
import hashlib
import http.server
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


class Server(http.server.ThreadingHTTPServer):
    """Serves one file on 127.0.0.1.

    `plan` says how the requests are answered, each in turn; `usual` is the answer once the plan is
    used up.
    """

    def __init__(self, content: bytes) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.content = content
        self.etag = '"first"'
        self.plan: list[Callable[[Handler], None]] = []
        self.usual = answer()
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.is_over = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/file.bin"

    @property
    def expected(self) -> dict[str, Any]:
        return {
            "size": len(self.content),
            "sha256": hashlib.sha256(self.content).hexdigest(),
            "timeout": 5.0,
        }

    @property
    def ranges(self) -> list[str | None]:
        return [headers.get("range") for _, _, headers in self.requests]

    def handle_error(self, *_: object) -> None:
        """A client that hangs up is part of the play."""


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.requests.append((self.command, self.path, headers))
        (self.server.plan.pop(0) if self.server.plan else self.server.usual)(self)

    def do_HEAD(self) -> None:
        self.do_GET()

    def log_message(self, *_: object) -> None:
        pass


def answer(**options: Any) -> Callable[[Handler], None]:
    """The file, or what is left of it; see `_answer` for what can go wrong."""
    return functools.partial(_answer, **options)


def _answer(
    handler: Handler,
    *,
    status: int | None = None,
    headers: dict[str, str] | None = None,
    cut: int | None = None,
    stall: int | None = None,
    length: int | None = None,
    has_length: bool = True,
    has_ranges: bool = True,
    is_heedless: bool = False,
) -> None:
    """Answer a request.

    Args:
        handler: Whose request it is.
        status: Answer with this, and no file.
        headers: To be sent beside the usual ones, or in their place.
        cut: Hang up after as many bytes.
        stall: Fall silent after as many bytes.
        length: What to say as the length in place of the true one.
        has_length: Whether to say it at all.
        has_ranges: Whether ranges are known.
        is_heedless: Whether a range is served whatever If-Range says.
    """
    server, asked = handler.server, handler.headers
    body, answers = server.content, {"ETag": server.etag}
    found = re.fullmatch(r"bytes=(\d+)-", asked.get("Range", ""))
    is_same = is_heedless or asked.get("If-Range", server.etag) == server.etag
    code = status or 200
    if status:
        body = b"no"
    elif found and has_ranges and is_same:
        start = int(found[1])
        code = 206 if start < len(body) else 416
        answers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
        body = body[start:]
    if has_length:
        answers["Content-Length"] = str(len(body) if length is None else length)
    handler.send_response(code)
    for name, value in (answers | (headers or {})).items():
        handler.send_header(name, value)
    handler.end_headers()
    if handler.command == "HEAD":
        return
    place = next((n for n in (cut, stall) if n is not None), len(body))
    handler.wfile.write(body[:place])
    handler.wfile.flush()
    if stall is not None:
        server.is_over.wait(5)


@pytest.fixture
def serve(monkeypatch):
    """Starts servers that misbehave on demand; no proxy stands between."""
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    servers = []

    def start(content: bytes) -> Server:
        server = Server(content)
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return server

    yield start
    for server in servers:
        server.is_over.set()
        server.shutdown()
        server.server_close()


@pytest.fixture
def answers():
    """How a server can answer: `answers(cut=100)` and the like."""
    return answer


@pytest.fixture
def write_table():
    """Writes a .parquet file."""
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    def write(path: Path, texts: Any, *, column: str = "text", rows: int = 4, **more: Any) -> Path:
        table = pyarrow.table({column: texts, **more})
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(table, path, row_group_size=rows)
        return path

    return write
