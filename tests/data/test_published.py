import bz2
import dataclasses
import gzip
import hashlib
import json
import logging
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from resroute.config import UserError
from resroute.data import hub as hub_module
from resroute.data.published import PUBLISHED, PublishedFile, fetch, local, published
from resroute.data.tokenizer import END_OF_TEXT

END = END_OF_TEXT.encode()


def text_of(files: Any, split: str) -> bytes:
    return b"".join(files.open(split))


def refusal(call: Any, *arguments: Any) -> str:
    with pytest.raises(UserError) as caught:
        call(*arguments)
    message = str(caught.value)
    assert message.count("\n") <= 1
    return message


def described(path: Path, name: str) -> PublishedFile:
    data = path.read_bytes()
    return PublishedFile(name=name, bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


def test_what_is_published() -> None:
    text8, stories = PUBLISHED["text8"], PUBLISHED["tinystories"]
    assert [(file.name, file.bytes) for file in text8.files] == [("text8.zip", 31_344_016)]
    assert text8.cuts == (90_000_000, 95_000_000, 100_000_000)
    assert text8.separator == "none"
    assert stories.separator == "endoftext"
    assert sum(file.bytes for file in stories.files) == 1_000_775_442
    for name, corpus in PUBLISHED.items():
        assert corpus.name == name
        assert published(name) is corpus
        assert "\n" not in corpus.licence
        assert all(len(bytes.fromhex(file.sha256)) == 32 for file in corpus.files)
        assert len({file.sha256 for file in corpus.files}) == len(corpus.files)


def test_an_unknown_name() -> None:
    assert refusal(fetch, "txet8", Path()) == (
        "no published corpus is called txet8 (did you mean 'text8'?); "
        "there are text8 and tinystories"
    )


@pytest.fixture
def small_text8(serve, tmp_path, monkeypatch):
    """A text of 1,000 bytes in the place of text8, on a server."""
    text = b"".join(b"%07d " % number for number in range(125))
    path = tmp_path / "text8.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("text8", text)
    server = serve(path.read_bytes())
    corpus = dataclasses.replace(
        PUBLISHED["text8"],
        address=server.url.removesuffix("/file.bin"),
        files=(described(path, "text8.zip"),),
        cuts=(900, 950, 1000),
        md5=hashlib.md5(text).hexdigest(),
    )
    monkeypatch.setitem(PUBLISHED, "text8", corpus)
    return server, text


def test_text8_is_fetched_once(small_text8, tmp_path) -> None:
    server, text = small_text8
    seen: list[tuple[int, int]] = []
    for _ in range(2):
        files = fetch("text8", tmp_path / "cache", lambda *counts: seen.append(counts))
        assert files.corpus is PUBLISHED["text8"]
        assert text_of(files, "train") == text[:900]
        assert text_of(files, "val") == text[900:950]
        assert text_of(files, "test") == text[950:]
    assert [path for _, path, _ in server.requests] == ["/text8.zip"]
    size = len(server.content)
    assert seen[0] == (0, size)
    assert seen[-1] == (size, size)
    source = files.open("val")
    assert source.size == size
    list(source)
    assert source.done == size


def test_text8_without_a_network_says_what_to_put_where(small_text8, tmp_path) -> None:
    server, text = small_text8
    server.shutdown()
    server.server_close()
    target = tmp_path / "cache" / "text8.zip"
    address = PUBLISHED["text8"].address
    assert refusal(fetch, "text8", tmp_path / "cache") == (
        f"{address}/text8.zip: cannot be downloaded (Connection refused)\n"
        f"try again later, or get it some other way and put it at {target}"
    )
    target.write_bytes(server.content)
    assert text_of(fetch("text8", tmp_path / "cache"), "val") == text[900:950]


@pytest.mark.parametrize("pack", [bytes, gzip.compress, bz2.compress])
def test_text8_from_a_file(small_text8, tmp_path, pack) -> None:
    _, text = small_text8
    path = tmp_path / "mine"
    path.write_bytes(pack(text))
    files = local("text8", path)
    assert [text_of(files, split) for split in ("train", "val", "test")] == [
        text[:900],
        text[900:950],
        text[950:],
    ]


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda text: text[:-1], "found 999 bytes"),
        (lambda text: text + b"x", "found more than 1,000 bytes"),
        (lambda text: text.replace(b"0", b"o"), "found 1,000 bytes"),
    ],
)
def test_another_text_is_not_text8(small_text8, tmp_path, change, found) -> None:
    _, text = small_text8
    path = tmp_path / "mine.txt"
    path.write_bytes(change(text))
    message = refusal(local, "text8", path)
    assert message.startswith(f"{path}: is not text8, whose text has 1,000 bytes and the md5 ")
    assert found in message
    assert "no such file" in refusal(local, "text8", tmp_path / "no.txt")


def test_text8_has_its_published_splits(tmp_path, monkeypatch) -> None:
    block, md5 = bytes(range(97, 122)) * 40_000, hashlib.md5()
    path = tmp_path / "text8.zip"
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        archive.open("text8", "w") as member,
    ):
        for _ in range(100):
            md5.update(block)
            member.write(block)
    small = dataclasses.replace(PUBLISHED["text8"], md5=md5.hexdigest())
    monkeypatch.setitem(PUBLISHED, "text8", small)
    files = local("text8", path)
    lengths = {split: sum(map(len, files.open(split))) for split in ("train", "val", "test")}
    assert lengths == {"train": 90_000_000, "val": 5_000_000, "test": 5_000_000}


REVISION = "0123456789abcdef0123456789abcdef01234567"
STORIES = [f"story {number}" for number in range(333)]
CHECKED = [f"checked {number}" for number in range(20)]


@pytest.fixture
def small_stories(tmp_path, monkeypatch, write_table):
    """Small files in the place of TinyStories."""
    pieces = {
        "data/train-0.parquet": STORIES[:200],
        "data/train-1.parquet": STORIES[200:331],
        "data/train-2.parquet": STORIES[331:],
        "data/validation-0.parquet": CHECKED,
    }
    folder = tmp_path / "published"
    files = tuple(
        described(write_table(folder / name, texts, rows=50), name)
        for name, texts in pieces.items()
    )
    corpus = dataclasses.replace(PUBLISHED["tinystories"], revision=REVISION, files=files)
    monkeypatch.setitem(PUBLISHED, "tinystories", corpus)
    return folder


def assert_is_split(files: Any) -> None:
    def joined(stories: list[str]) -> bytes:
        return b"".join(story.encode() + END for story in stories)

    assert text_of(files, "train") == joined(STORIES)
    assert text_of(files, "val") == joined(CHECKED[:10])
    assert text_of(files, "test") == joined(CHECKED[10:])


def test_tinystories_from_a_folder(small_stories) -> None:
    assert_is_split(local("tinystories", small_stories))
    # the files alone, without the folder of the repository
    assert_is_split(local("tinystories", small_stories / "data"))


def test_tinystories_from_something_else(small_stories, tmp_path) -> None:
    path = small_stories / "data" / "train-1.parquet"
    assert refusal(local, "tinystories", path) == (
        f"{path}: is one file; the splits of tinystories need the folder of all 4\n"
        "or prepare it as a text of its own, split by position"
    )
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    message = f"{path}: is not data/train-1.parquet as published (has {len(data) - 1:,} bytes, not "
    assert refusal(local, "tinystories", small_stories).startswith(message)
    path.write_bytes(data[:-1] + b"x")
    assert "(has another sha256); delete it" in refusal(local, "tinystories", small_stories)
    path.unlink()
    assert refusal(local, "tinystories", small_stories) == (
        f"{small_stories}: has no data/train-1.parquet in it; get it from "
        "https://huggingface.co/datasets/roneneldan/TinyStories/resolve/"
        f"{REVISION}/data/train-1.parquet"
    )


@pytest.fixture
def hub(serve, small_stories, tmp_path, monkeypatch):
    """A server that answers as the hub does, and a client with an empty cache set to it."""
    pytest.importorskip("huggingface_hub")
    from huggingface_hub import constants
    from huggingface_hub.utils import close_session

    def answer(handler: Any) -> None:
        if "/resolve/" in handler.path and server.trouble:
            handler.send_error(server.trouble.pop(0))
            return
        folder = f"/datasets/roneneldan/TinyStories/resolve/{REVISION}/"
        path = small_stories / handler.path.removeprefix(folder)
        if not handler.path.startswith(folder) or not path.is_file():
            handler.send_error(404)
            return
        data = path.read_bytes()
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(data)))
        handler.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        handler.send_header("X-Repo-Commit", REVISION)
        handler.end_headers()
        if handler.command == "GET":
            handler.wfile.write(data)

    server = serve(b"")
    server.usual = answer
    server.trouble = []
    address = server.url.removesuffix("/file.bin")
    monkeypatch.setattr(constants, "ENDPOINT", address)
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    yield server
    close_session()


def requested(server: Any) -> list[tuple[str, str]]:
    return [(m, path.rpartition("/")[2]) for m, path, _ in server.requests if "resolve" in path]


def test_tinystories_is_fetched_once(hub, tmp_path, capfd) -> None:
    seen: list[tuple[int, int]] = []
    level = logging.getLogger("huggingface_hub").level
    files = fetch("tinystories", tmp_path, lambda *counts: seen.append(counts))
    assert_is_split(files)
    names = {name for _, name in requested(hub)}
    assert names == {Path(file.name).name for file in PUBLISHED["tinystories"].files}
    assert [method for method, _ in requested(hub)].count("GET") == 4
    total = sum(file.bytes for file in PUBLISHED["tinystories"].files)
    assert seen == sorted(seen)
    assert seen[-1] == (total, total)
    assert len(seen) >= 8
    hub.requests.clear()
    assert_is_split(fetch("tinystories", tmp_path))
    assert hub.requests == []
    assert capfd.readouterr() == ("", "")
    assert logging.getLogger("huggingface_hub").level == level


def test_tinystories_offline(hub, tmp_path, monkeypatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    message = refusal(fetch, "tinystories", tmp_path)
    assert message == (
        "roneneldan/TinyStories/data/train-0.parquet: cannot be downloaded (HF_HUB_OFFLINE is set, "
        "and it is not in the cache)\nget the 4 .parquet files of https://huggingface.co/datasets/roneneldan/TinyStories/tree/"
        f"{REVISION}/data some other way, and name their folder: "
        "resroute data prepare tinystories --from FOLDER"
    )
    assert hub.requests == []


def test_tinystories_without_a_network(hub, tmp_path, capfd) -> None:
    hub.shutdown()
    hub.server_close()
    message = refusal(fetch, "tinystories", tmp_path)
    assert "cannot be downloaded ([Errno " in message
    assert "refused" in message
    assert capfd.readouterr() == ("", "")


def test_tinystories_from_a_hub_in_trouble(hub, tmp_path, monkeypatch) -> None:
    said: list[logging.LogRecord] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", said.append)
    monkeypatch.setattr(logging.getLogger("huggingface_hub"), "handlers", [handler])
    waits: list[float] = []
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", waits.append)
    # to the question whether it is there, and to the download's own; then it waits
    hub.trouble += [503, 503, 500]
    assert_is_split(fetch("tinystories", tmp_path))
    assert waits == [1]
    assert said == []


def test_tinystories_from_a_hub_that_has_it_not(hub, small_stories, tmp_path) -> None:
    (small_stories / "data" / "train-1.parquet").unlink()
    message = refusal(fetch, "tinystories", tmp_path)
    assert "TinyStories/data/train-1.parquet: cannot be downloaded (" in message
    assert "404" in message


def test_a_damaged_file_in_the_cache_is_named_and_got_again(hub, tmp_path) -> None:
    files = fetch("tinystories", tmp_path)
    blob = files.train[0].path.resolve()
    assert blob.parent.name == "blobs"
    data = blob.read_bytes()
    blob.write_bytes(data[:-1] + b"x")
    assert refusal(fetch, "tinystories", tmp_path) == (
        f"{blob}: is not data/train-0.parquet as published (has another sha256); "
        "delete it and try again"
    )
    blob.unlink()
    assert_is_split(fetch("tinystories", tmp_path))
    assert blob.read_bytes() == data


def test_a_package_that_is_missing_is_one_line(small_stories, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert refusal(fetch, "tinystories", tmp_path) == (
        "downloading roneneldan/TinyStories needs the package huggingface_hub: "
        'pip install "resroute[data]"'
    )


def test_the_bar_counts_bytes_of_the_file_alone() -> None:
    seen: list[int] = []
    with hub_module._bar(seen.append)(total=9, desc="x", unit="B") as bar:
        bar.update(5)
        bar.update_transfer(3)
        bar.set_postfix_str("1 MB/s", refresh=False)
        bar.set_transfer_postfix_str("1 MB/s", refresh=False)
        bar.update(4.0)
        bar.refresh()
    bar.close()
    assert seen == [5, 9]


def test_the_settings_of_the_environment_hold(hub, tmp_path) -> None:
    # without the rest of the package, which takes seconds to import
    script = """
import json, sys, types
root, *arguments = sys.argv[1:]
for name in ("resroute", "resroute.data"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [root + name.removeprefix("resroute").replace(".", "/")]
from resroute.data.hub import hub_file
from resroute.config import UserError
repository, revision, name = arguments
try:
    print(hub_file(repository, revision, name, remedy="remedy", report=lambda done: None))
except UserError as error:
    print(json.dumps(str(error)))
"""
    address = hub.url.removesuffix("/file.bin")
    name = "data/validation-0.parquet"
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": address}
    environment |= {"HF_HUB_DISABLE_TELEMETRY": "1", "OMP_NUM_THREADS": "1"}

    def run(**more: str) -> str:
        command = [
            sys.executable,
            "-W",
            "error",
            "-c",
            script,
            str(Path(hub_module.__file__).parents[1]),
        ]
        done = subprocess.run(
            [*command, "roneneldan/TinyStories", REVISION, name],
            env={**environment, **more},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout.strip()

    path = Path(run())
    assert path.is_relative_to(tmp_path / "home" / "hub")
    assert hashlib.sha256(path.read_bytes()).hexdigest() == PUBLISHED["tinystories"].files[3].sha256
    assert json.loads(run(HF_HOME=str(tmp_path / "other"), HF_HUB_OFFLINE="1")).endswith("\nremedy")
