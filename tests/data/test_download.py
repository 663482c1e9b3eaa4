import errno
import os
import socket
import threading
import types
import urllib.request
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest

from resroute.config import UserError
from resroute.data import download as module
from resroute.data.download import download

CONTENT = bytes(range(256)) * 4000


@pytest.fixture
def server(serve):
    return serve(CONTENT)


@pytest.fixture
def waits(monkeypatch):
    """What would have been waited for, in seconds."""
    found: list[float] = []
    monkeypatch.setattr(module, "time", types.SimpleNamespace(sleep=found.append))
    return found


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


def failure(server: Any, target: Path, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        download(server.url, target, **{**server.expected, **options})
    message = str(caught.value)
    assert not target.exists()
    assert message.count("\n") <= 1
    return message


def test_a_file_arrives(server, waits, tmp_path) -> None:
    target = tmp_path / "deep" / "file.bin"
    seen: list[tuple[int, int]] = []
    found = download(
        server.url, target, **server.expected, progress=lambda *counts: seen.append(counts)
    )
    assert found == target
    assert target.read_bytes() == CONTENT
    assert names(target.parent) == ["file.bin"]
    assert seen[0] == (0, len(CONTENT))
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    assert seen == sorted(seen)
    assert len(server.requests) == 1
    assert waits == []


def test_a_file_arrives_where_there_are_no_locks(server, tmp_path, monkeypatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSYS, "no locks")

    monkeypatch.setattr("fcntl.flock", refuse)
    target = download(server.url, tmp_path / "file.bin", **server.expected)
    assert target.read_bytes() == CONTENT


def test_a_file_that_is_there_is_kept(server, tmp_path) -> None:
    target = tmp_path / "file.bin"
    target.write_bytes(CONTENT)
    seen: list[tuple[int, int]] = []
    download(server.url, target, **server.expected, progress=lambda *counts: seen.append(counts))
    assert server.requests == []
    assert seen == [(len(CONTENT), len(CONTENT))]
    assert [path.name for path in tmp_path.iterdir()] == ["file.bin"]


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"other", "has 5 bytes, not 1,024,000;"), (CONTENT[::-1], "has another sha256")],
)
def test_another_file_in_its_place_is_not_touched(server, tmp_path, content, message) -> None:
    target = tmp_path / "file.bin"
    target.write_bytes(content)
    with pytest.raises(UserError, match=message):
        download(server.url, target, **server.expected)
    assert target.read_bytes() == content
    assert server.requests == []


def test_a_connection_that_is_cut_is_taken_up_again(server, answers, waits, tmp_path) -> None:
    server.plan = [answers(cut=100_000), answers(cut=0), answers(cut=200_000)]
    target = download(server.url, tmp_path / "file.bin", **server.expected)
    assert target.read_bytes() == CONTENT
    assert server.ranges == [None, "bytes=100000-", "bytes=100000-", "bytes=300000-"]
    assert [headers.get("if-range") for _, _, headers in server.requests[1:]] == ['"first"'] * 3
    # waits begin anew where something has arrived
    assert waits == [1, 2, 1]


def test_a_part_of_an_earlier_process_is_taken_up(server, answers, waits, tmp_path) -> None:
    server.plan = [answers(cut=300_000)] + [answers(status=503)] * 4
    target = tmp_path / "file.bin"
    message = failure(server, target)
    assert "(HTTP 503 Service Unavailable); 300,000 bytes are kept for the next try\n" in message
    assert names(tmp_path) == ["file.bin.part"]
    assert waits == [1, 2, 4, 8]
    seen: list[int] = []
    download(server.url, target, **server.expected, progress=lambda done, _: seen.append(done))
    assert server.ranges[-1] == "bytes=300000-"
    assert seen[0] == 300_000
    assert target.read_bytes() == CONTENT
    assert names(tmp_path) == ["file.bin"]


@pytest.mark.parametrize("size", [10, len(CONTENT), len(CONTENT) + 1])
def test_a_part_of_another_file_is_replaced(server, tmp_path, size) -> None:
    (tmp_path / "file.bin.part").write_bytes(b"x" * size)
    target = download(server.url, tmp_path / "file.bin", **server.expected)
    assert target.read_bytes() == CONTENT
    assert names(tmp_path) == ["file.bin"]


def test_a_whole_part_needs_no_network(server, tmp_path) -> None:
    (tmp_path / "file.bin.part").write_bytes(CONTENT)
    download(server.url, tmp_path / "file.bin", **server.expected)
    assert server.requests == []


def test_a_server_without_ranges_starts_over(server, answers, waits, tmp_path) -> None:
    server.plan = [answers(cut=100_000), answers(has_ranges=False)]
    seen: list[int] = []
    target = download(
        server.url, tmp_path / "file.bin", **server.expected, progress=lambda n, _: seen.append(n)
    )
    assert target.read_bytes() == CONTENT
    assert seen.count(0) == 2


def test_a_server_that_always_starts_over_is_given_up(server, answers, waits, tmp_path) -> None:
    # what is less than has been here before is nothing new
    cuts = [200_000, 100_000, 150_000, 199_000, 200_000, 300_000]
    server.plan = [answers(cut=cut, has_ranges=False) for cut in cuts]
    message = failure(server, tmp_path / "file.bin")
    assert "the connection was cut after 200,000 of 1,024,000 bytes" in message
    assert len(server.requests) == 5


@pytest.mark.parametrize("is_heedless", [False, True])
def test_a_file_that_changes_meanwhile_is_begun_anew(
    server, answers, waits, tmp_path, is_heedless
) -> None:
    def change(handler: Any) -> None:
        server.content, server.etag = CONTENT, '"second"'
        answers(is_heedless=is_heedless)(handler)

    expected, server.content = server.expected, CONTENT[::-1]
    server.plan = [answers(cut=100_000), change]
    target = download(server.url, tmp_path / "file.bin", **expected)
    assert target.read_bytes() == CONTENT
    assert len(server.requests) == (3 if is_heedless else 2)


def test_a_range_that_was_not_asked_for_is_not_used(server, answers, waits, tmp_path) -> None:
    wrong = {"Content-Range": f"bytes 5-{len(CONTENT) - 1}/{len(CONTENT)}"}
    server.plan = [answers(cut=100_000), answers(headers=wrong)]
    target = download(server.url, tmp_path / "file.bin", **server.expected)
    assert target.read_bytes() == CONTENT
    assert server.ranges == [None, "bytes=100000-", None]


@pytest.mark.parametrize("length", [len(CONTENT) - 1, len(CONTENT) + 1])
def test_a_wrong_length_is_refused_at_once(server, answers, tmp_path, length) -> None:
    server.plan = [answers(length=length)]
    message = failure(server, tmp_path / "file.bin")
    assert f"(it has {length} bytes there, 1024000 were published)\n" in message
    assert names(tmp_path) == []
    assert len(server.requests) == 1


@pytest.mark.parametrize("length", [1000, 2001, len(CONTENT) + 5])
def test_a_part_whose_file_has_another_length_now(server, waits, tmp_path, length) -> None:
    expected = server.expected
    server.content = (CONTENT * 2)[:length]
    (tmp_path / "file.bin.part").write_bytes(CONTENT[:2000])
    message = failure(server, tmp_path / "file.bin", **expected)
    assert f"(it has {length} bytes there, 1024000 were published)" in message
    assert names(tmp_path) == []


def test_a_file_without_a_length_arrives(server, answers, waits, tmp_path) -> None:
    server.plan = [answers(has_length=False, cut=1000), answers(has_length=False)]
    target = download(server.url, tmp_path / "file.bin", **server.expected)
    assert target.read_bytes() == CONTENT


def test_a_file_without_a_length_that_does_not_end_is_refused(server, answers, tmp_path) -> None:
    expected = server.expected
    server.content = CONTENT * 2
    server.plan = [answers(has_length=False)]
    message = failure(server, tmp_path / "file.bin", **expected)
    assert "(it is longer than the 1,024,000 bytes published)" in message
    assert names(tmp_path) == []


def test_a_wrong_checksum_leaves_nothing(server, tmp_path) -> None:
    target = tmp_path / "file.bin"
    message = failure(server, target, sha256="0" * 64)
    assert message == (
        f"{server.url}: has another sha256 than was published, what came was removed\n"
        f"try again, or get the file some other way and put it at {target}"
    )
    assert names(tmp_path) == []


def test_retry_after_is_honoured_up_to_a_minute(server, answers, waits, tmp_path) -> None:
    late = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
    server.plan = [
        answers(status=429, headers={"Retry-After": value}) for value in ("7", "3600", late, "soon")
    ]
    target = download(server.url, tmp_path / "file.bin", **server.expected)
    assert target.read_bytes() == CONTENT
    assert waits[:2] == [7, 60]
    assert 25 < waits[2] <= 30
    assert waits[3] == 8


def test_a_server_in_trouble_is_waited_for(server, answers, waits, tmp_path) -> None:
    server.plan = [answers(status=500), answers(status=500)]
    target = download(server.url, tmp_path / "file.bin", **server.expected)
    assert target.read_bytes() == CONTENT
    assert waits == [1, 2]


def test_a_server_that_stays_in_trouble_is_given_up(server, answers, waits, tmp_path) -> None:
    server.plan = [answers(status=500)] * 9
    target = tmp_path / "file.bin"
    assert failure(server, target) == (
        f"{server.url}: cannot be downloaded (HTTP 500 Internal Server Error)\n"
        f"try again later, or get it some other way and put it at {target}"
    )
    assert len(server.requests) == 5


@pytest.mark.parametrize(
    ("status", "reason"), [(404, "HTTP 404 Not Found"), (403, "HTTP 403 Forbidden"), (204, "204")]
)
def test_other_answers_are_final(server, answers, waits, tmp_path, status, reason) -> None:
    server.plan = [answers(status=status)]
    assert reason in failure(server, tmp_path / "file.bin")
    assert len(server.requests) == 1
    assert waits == []


def test_silence_is_given_up_and_taken_up_again(server, answers, waits, tmp_path) -> None:
    server.plan = [answers(stall=100_000), answers(stall=0)]
    expected = {**server.expected, "timeout": 0.2}
    target = download(server.url, tmp_path / "file.bin", **expected)
    assert target.read_bytes() == CONTENT
    assert server.ranges == [None, "bytes=100000-", "bytes=100000-"]


def test_a_server_that_never_answers_is_given_up(server, waits, tmp_path) -> None:
    server.plan = [lambda handler: server.is_over.wait(5)] * 9
    assert "(no answer in time)" in failure(server, tmp_path / "file.bin", timeout=0.1)
    assert len(waits) == 4


def test_an_answer_that_is_no_http_is_tried_again(server, waits, tmp_path) -> None:
    server.plan = [lambda handler: handler.wfile.write(b"what?\r\n\r\n"), lambda handler: None]
    target = download(server.url, tmp_path / "file.bin", **server.expected)
    assert target.read_bytes() == CONTENT


def test_chunks_that_break_off_are_taken_up_again(server, waits, tmp_path) -> None:
    def chunked(handler: Any) -> None:
        head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        handler.wfile.write(
            head + b"3e8\r\n" + CONTENT[:1000] + b"\r\n3e8\r\n" + CONTENT[1000:1500]
        )

    server.plan = [chunked]
    target = download(server.url, tmp_path / "file.bin", **server.expected)
    assert target.read_bytes() == CONTENT
    assert server.ranges[1] in ("bytes=1000-", "bytes=1500-")


def test_redirects_are_followed_with_their_range(server, answers, waits, tmp_path) -> None:
    def to(path: str, status: int = 302) -> Any:
        return answers(status=status, headers={"Location": path})

    server.plan = [to("/a"), to("/b", 308), answers(cut=1000), to("/c", 307), answers()]
    target = download(server.url, tmp_path / "file.bin", **server.expected)
    assert target.read_bytes() == CONTENT
    assert [path for _, path, _ in server.requests] == ["/file.bin", "/a", "/b", "/file.bin", "/c"]
    assert server.ranges == [None, None, None, "bytes=1000-", "bytes=1000-"]


def test_redirects_in_a_circle_are_refused(server, answers, waits, tmp_path) -> None:
    server.plan = [answers(status=302, headers={"Location": "/file.bin"})] * 20
    assert "HTTP 302" in failure(server, tmp_path / "file.bin")
    assert len(server.requests) <= 11
    assert waits == []


@pytest.mark.parametrize("location", ["ftp://127.0.0.1/file.bin", "file:///etc/hostname"])
def test_redirects_to_other_protocols_are_refused(server, answers, tmp_path, location) -> None:
    server.plan = [answers(status=302, headers={"Location": location})]
    message = failure(server, tmp_path / "file.bin")
    assert "redirect" in message
    assert names(tmp_path) == []


def test_redirects_do_not_leave_https() -> None:
    handler = module._Redirects()
    request = urllib.request.Request("https://host/file")
    with Path(os.devnull).open("rb") as answer:
        moved = handler.redirect_request(request, answer, 302, "Found", {}, "https://other/file")
        assert moved is not None
        assert moved.full_url == "https://other/file"
        with pytest.raises(
            module._FailureError, match="from https to http, which is not"
        ) as caught:
            handler.redirect_request(request, answer, 302, "Found", {}, "http://other/file")
        assert caught.value.is_final
        assert answer.closed


def test_nothing_listens(server, waits, tmp_path) -> None:
    server.shutdown()
    server.server_close()
    message = failure(server, tmp_path / "file.bin")
    assert message == (
        f"{server.url}: cannot be downloaded (Connection refused)\n"
        f"try again later, or get it some other way and put it at {tmp_path / 'file.bin'}"
    )
    assert waits == []


def test_no_network(server, waits, tmp_path, monkeypatch) -> None:
    def not_found(*_: object, **__: object) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", not_found)
    message = failure(server, tmp_path / "file.bin")
    assert "(the host is not found: Name or service not known)\n" in message
    assert waits == []


def test_a_network_that_goes_away_is_waited_for(
    server, answers, waits, tmp_path, monkeypatch
) -> None:
    connect, calls = socket.create_connection, []

    def unreachable(*args: Any, **options: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH))
        return connect(*args, **options)

    monkeypatch.setattr(socket, "create_connection", unreachable)
    server.plan = [answers(cut=1000)]
    target = download(server.url, tmp_path / "file.bin", **server.expected)
    assert target.read_bytes() == CONTENT
    assert waits == [1, 2]


def test_the_proxy_of_the_environment_is_used(server, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("http_proxy", server.url.removesuffix("/file.bin"))
    target = download("http://files.invalid/file.bin", tmp_path / "file.bin", **server.expected)
    assert target.read_bytes() == CONTENT
    assert server.requests[0][1] == "http://files.invalid/file.bin"


def test_a_full_disk_is_one_line(server, tmp_path, monkeypatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module, "flush", full)
    target = tmp_path / "file.bin"
    assert failure(server, target) == (
        f"{target}: cannot be written (No space left on device); check the folder"
    )
    assert names(tmp_path) == ["file.bin.part"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_disk_that_fills_up_is_one_line(server, tmp_path) -> None:
    (tmp_path / "file.bin.part").symlink_to("/dev/full")
    assert "cannot be written (No space left on device)" in failure(server, tmp_path / "file.bin")


def test_a_folder_that_is_a_file_is_one_line(server, tmp_path) -> None:
    (tmp_path / "folder").write_bytes(b"")
    assert "cannot be written" in failure(server, tmp_path / "folder" / "file.bin")


def test_two_at_once_download_once(server, answers, tmp_path) -> None:
    target = tmp_path / "file.bin"
    is_asked = threading.Event()

    def slowly(handler: Any) -> None:
        is_asked.set()
        server.is_over.wait(0.3)
        answers()(handler)

    server.plan = [slowly]
    other = threading.Thread(
        target=download, args=(server.url, target), kwargs=server.expected, daemon=True
    )
    other.start()
    assert is_asked.wait(5)
    download(server.url, target, **server.expected)
    other.join(5)
    assert len(server.requests) == 1
    assert target.read_bytes() == CONTENT
