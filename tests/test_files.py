import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from filelock import Timeout

from resroute import files
from resroute.config import UserError


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def failing(number: int) -> Any:
    def fail(path: Path, *_: Any) -> None:
        raise OSError(number, os.strerror(number), str(path))

    return fail


def test_write_bytes_replaces_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    files.write_bytes(path, b"old")
    assert path.read_bytes() == b"old"
    files.write_bytes(path, b"")
    assert path.read_bytes() == b""
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_write_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    monkeypatch.setattr(files, "flush", failing(number))
    with pytest.raises(UserError) as caught:
        files.write_bytes(path, b"new")
    reason = os.strerror(number)
    assert str(caught.value) == f"{path}: cannot be written ({reason}); check the folder"
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["file"]


def test_a_write_that_is_interrupted_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(path: Path) -> None:
        raise KeyboardInterrupt

    path = tmp_path / "file"
    path.write_bytes(b"old")
    monkeypatch.setattr(files, "flush", interrupt)
    with pytest.raises(KeyboardInterrupt):
        files.write_bytes(path, b"new")
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["file"]


def test_the_content_is_flushed_before_it_takes_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    seen = []

    def look(flushed: Path) -> None:
        seen.append((flushed.is_dir(), path.exists()))

    monkeypatch.setattr(files, "flush", look)
    files.write_bytes(path, b"new")
    assert seen == [(False, False), (True, True)]


def test_places_that_take_no_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    (tmp_path / "folder").mkdir()
    for place in ("none/file", "file/below", "folder"):
        with pytest.raises(UserError, match=r"cannot be written \(.+\); check the folder"):
            files.write_bytes(tmp_path / place, b"new")
    assert names(tmp_path) == ["file", "folder"]
    assert (tmp_path / "file").read_text() == "old"


def test_write_json_is_utf8_and_strict(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    files.write_json(path, {"b": [1, 2.5, None], "a": "\u00e9 \U0001f600"})
    assert path.read_bytes() == (
        '{\n "b": [\n  1,\n  2.5,\n  null\n ],\n "a": "\u00e9 \U0001f600"\n}\n'.encode()
    )
    with pytest.raises(ValueError, match="JSON compliant"):
        files.write_json(path, {"a": float("nan")})
    assert files.read_json(path, "x")["b"] == [1, 2.5, None]
    assert names(tmp_path) == ["a.json"]


def test_write_json_keeps_undecodable_names(tmp_path: Path) -> None:
    value = {"file": os.fsdecode(b"caf\xe9.txt"), "back\\slash": '"'}
    files.write_json(tmp_path / "a.json", value)
    assert files.read_json(tmp_path / "a.json", "x") == value


def test_new_folder_appears_whole(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "er" / "new"
    with files.new_folder(target) as folder:
        assert folder.parent == target.parent
        assert folder.name.startswith(".new.")
        assert folder.name.endswith(".tmp")
        (folder / "a").write_text("1")
        assert not target.exists()
    assert (target / "a").read_text() == "1"
    assert names(target.parent) == ["new"]


def test_new_folder_is_read_by_whoever_may_read_it(tmp_path: Path) -> None:
    for mask, mode in ((0o022, 0o644), (0o077, 0o600), (0o002, 0o664)):
        former = os.umask(mask)
        try:
            with files.new_folder(tmp_path / f"{mask}") as folder:
                (folder / "a").touch(mode=0o600)
                (folder / "b").write_text("1")
        finally:
            os.umask(former)
        for file in (tmp_path / f"{mask}").iterdir():
            assert file.stat().st_mode & 0o777 == mode


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, UserError])
def test_new_folder_leaves_nothing_where_its_body_fails(
    tmp_path: Path, error: type[BaseException]
) -> None:
    def fail(folder: Path) -> None:
        (folder / "a").write_text("1")
        raise error

    with pytest.raises(error), files.new_folder(tmp_path / "new") as folder:
        fail(folder)
    assert names(tmp_path) == []


def test_new_folder_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "flush", failing(errno.ENOSPC))
    with (
        pytest.raises(UserError, match=r"new: cannot be written \(No space left on device\)"),
        files.new_folder(tmp_path / "new") as folder,
    ):
        (folder / "a").write_text("1")
    assert names(tmp_path) == []


def test_new_folder_takes_an_empty_place_and_no_other(tmp_path: Path) -> None:
    target = tmp_path / "new"
    target.mkdir()
    with files.new_folder(target) as folder:
        (folder / "a").write_text("first")
    with pytest.raises(FileExistsError), files.new_folder(target) as folder:
        (folder / "a").write_text("second")
    assert (target / "a").read_text() == "first"
    assert names(tmp_path) == ["new"]
    with pytest.raises(UserError, match="cannot be written"), files.new_folder(target / "a"):
        pass
    assert (target / "a").read_text() == "first"


def test_new_folder_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("1")
    with (
        pytest.raises(UserError, match="file/new: cannot be written"),
        files.new_folder(tmp_path / "file" / "new"),
    ):
        pytest.fail("the body ran")


def test_new_folder_behind_links(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("behind")
    with files.new_folder(tmp_path / "link") as folder:
        (folder / "a").write_text("1")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "behind" / "a").read_text() == "1"
    (tmp_path / "loop").symlink_to("loop")
    with (
        pytest.raises(UserError, match="loop: is a link to itself; name another folder"),
        files.new_folder(tmp_path / "loop"),
    ):
        pytest.fail("the body ran")


def test_read_text(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with pytest.raises(UserError) as caught:
        files.read_text(path, "make it")
    assert str(caught.value) == f"{path}: the file is missing; make it"
    path.write_bytes(b"ab\xff")
    with pytest.raises(UserError) as caught:
        files.read_text(path, "make it")
    assert str(caught.value) == f"{path}: damaged (no UTF-8 at byte 2); make it"
    with pytest.raises(UserError, match=r"cannot be read \(no regular file\); make it"):
        files.read_text(tmp_path, "make it")
    path.write_bytes("\u00e9\n".encode())
    assert files.read_text(path, "make it") == "\u00e9\n"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "damaged JSON (Expecting value)"),
        ('{"a": 1', "damaged JSON (Expecting ',' delimiter)"),
        ('{"a": 1} {}', "damaged JSON (Extra data)"),
        ("[" * 100_000, "damaged JSON (nested too deeply)"),
        ('{"a": ' + "9" * 5000 + "}", "damaged JSON (a number too long)"),
        ("[]", "damaged (not a JSON object)"),
        ("null", "damaged (not a JSON object)"),
    ],
    ids=lambda text: text[:20],
)
def test_parse_object_refuses(text: str, reason: str) -> None:
    with pytest.raises(UserError) as caught:
        files.parse_object(text, "there", "do this")
    assert str(caught.value) == f"there: {reason}; do this"


def test_read_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n')
    assert files.read_json_lines(path, "x") == [
        (f"{path} line 1", {"a": 1}),
        (f"{path} line 2", {"a": 2}),
    ]
    path.write_text("")
    assert files.read_json_lines(path, "x") == []


@pytest.mark.parametrize("tail", ['{"a": 3', "{", '{"a": 3, "b"', "\0\0\0", "3"])
def test_a_torn_last_line_may_be_left_out(tmp_path: Path, tail: str) -> None:
    path = tmp_path / "a.jsonl"
    whole = [json.dumps({"a": number}) for number in (1, 2)]
    path.write_text("\n".join([*whole, tail]))
    kept = [record["a"] for _, record in files.read_json_lines(path, "x", may_be_torn=True)]
    assert kept == [1, 2]
    with pytest.raises(UserError, match=r"a\.jsonl line 3: damaged"):
        files.read_json_lines(path, "x")
    path.write_text("\n".join([whole[0], tail, whole[1]]))
    with pytest.raises(UserError, match=r"a\.jsonl line 2: damaged"):
        files.read_json_lines(path, "x", may_be_torn=True)


def test_a_line_torn_within_a_character(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes('{"a": 1}\n{"a": "\u00e9'.encode()[:-1])
    lines = files.read_json_lines(path, "x", may_be_torn=True)
    assert lines == [(f"{path} line 1", {"a": 1})]


def test_lines_end_at_line_feeds_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": "x\u2028y\x85z"}\n', encoding="utf-8")
    assert files.read_json_lines(path, "x") == [(f"{path} line 1", {"a": "x\u2028y\x85z"})]


@pytest.mark.parametrize("name", ["ENOSYS", "ENOLCK", "EOPNOTSUPP"])
def test_a_file_system_without_locks_gives_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("fcntl.flock", failing(getattr(errno, name)))
    assert files.lock_file(tmp_path / "lock", timeout=0) is None


def test_locks_are_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = files.lock_file(tmp_path / "lock")
    assert first is not None
    with pytest.raises(Timeout):
        files.lock_file(tmp_path / "lock", timeout=0)
    first.release()
    assert names(tmp_path) == ["lock"]
    second = files.lock_file(tmp_path / "lock", timeout=0)
    assert second is not None
    second.release()
    monkeypatch.setattr("fcntl.flock", failing(errno.EIO))
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        files.lock_file(tmp_path / "lock", timeout=0)


def test_set_aside_takes_the_first_free_name(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "file"
    for text in ("first", "second"):
        path.write_text(text)
        files.set_aside(path, "old")
    assert names(tmp_path) == ["file.old-1", "file.old-2"]
    assert (tmp_path / "file.old-2").read_text() == "second"
    path.write_text("third")
    monkeypatch.setattr(Path, "rename", failing(errno.EROFS))
    with pytest.raises(UserError, match=r"file: cannot be written \(Read-only file system\)"):
        files.set_aside(path, "old")


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("{}")
    (tmp_path / "link").symlink_to("file")
    assert files.read_json(tmp_path / "link", "make it") == {}
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    for name in ("pipe", "device"):
        with pytest.raises(UserError) as caught:
            files.read_text(tmp_path / name, "make it")
        assert str(caught.value) == (
            f"{tmp_path / name}: cannot be read (no regular file); make it"
        )
