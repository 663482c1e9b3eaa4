import json
import shutil
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from filelock import FileLock, Timeout
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from resroute.config import UserError
from resroute.data import (
    END_OF_TEXT,
    SPLITS,
    Corpus,
    containers,
    describe,
    folders,
    open_corpus,
    prepare_storyworld,
    prepare_text,
    storyworld,
)
from resroute.data.corpora import smallest_dtype

STORY = "once upon a time\nthere was a box.\n"


def write(folder: Path, text: str, name: str = "story.txt") -> Path:
    path = folder / name
    path.write_bytes(text.encode())
    return path


def decoded(corpus: Corpus) -> list[str]:
    return [corpus.tokenizer.decode(corpus.tokens(split)) for split in SPLITS]


def documents(corpus: Corpus) -> list[int]:
    return [corpus.split(split).documents for split in SPLITS]


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    return prepare_text(write(tmp_path, STORY * 10), tmp_path / "box")


def test_plain_text_is_cut_where_the_shares_fall(tmp_path: Path) -> None:
    text = "".join(chr(ord("a") + i % 26) for i in range(100))
    corpus = prepare_text(
        write(tmp_path, text), tmp_path / "out" / "abc", fractions=(0.8, 0.15, 0.05)
    )
    assert decoded(corpus) == [text[:80], text[80:95], text[95:]]
    assert documents(corpus) == [1, 1, 1]
    assert corpus.tokenizer.symbols == tuple("abcdefghijklmnopqrstuvwxyz")
    assert corpus.tokens("val").tolist() == [i % 26 for i in range(80, 95)]
    assert corpus.document_nats("val") is None
    assert corpus.name == "abc"
    assert not corpus.aligned


@pytest.mark.parametrize("block", [1, 5, 1 << 18])
def test_cuts_move_forward_to_the_next_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(containers, "BLOCK_BYTES", block)
    stories = ["one 1\n", "\ntwo 22\n", "\nthree 3\n", "\nfour 4444\n"]
    text = END_OF_TEXT.join(stories) + END_OF_TEXT + "\n"
    corpus = prepare_text(write(tmp_path, text), tmp_path / "n", fractions=(0.3, 0.3, 0.4))
    # 39 tokens: the shares end inside the second and third story
    assert decoded(corpus) == [
        f"one 1\n{END_OF_TEXT}\ntwo 22\n{END_OF_TEXT}\n",
        f"three 3\n{END_OF_TEXT}\n",
        f"four 4444\n{END_OF_TEXT}\n",
    ]
    assert documents(corpus) == [2, 1, 1]
    assert corpus.document_ends("train").tolist() == [6, 15]
    assert corpus.longest_document == len("four 4444\n") + 1
    assert corpus.meta.separator == "endoftext"


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=100
)
@given(
    st.lists(st.sampled_from(["a", "bc", "\n", "\n\n", END_OF_TEXT, "<", " "]), max_size=40),
    st.integers(1, 9),
    st.sampled_from(["auto", "none", "blank-line", "endoftext"]),
)
def test_the_splits_are_the_text_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pieces: list[str], block: int, separator: Any
) -> None:
    text = "".join(pieces)
    monkeypatch.setattr(containers, "BLOCK_BYTES", block)
    out = tmp_path / "out"
    shutil.rmtree(out, ignore_errors=True)
    try:
        corpus = prepare_text(
            write(tmp_path, text), out, separator=separator, fractions=(0.5, 0.25, 0.25)
        )
    except UserError:
        assert not out.exists()
        return
    assert "".join(decoded(corpus)) == text
    if corpus.meta.separator != "none":
        assert all(not part[0].isspace() for part in decoded(corpus)[1:])
        assert min(documents(corpus)) >= 1


def test_shares_without_text_are_refused_and_leave_nothing_behind(tmp_path: Path) -> None:
    source = write(tmp_path, "a title\n\n" + "text " * 200)
    with pytest.raises(UserError, match=r"begin val .*\nuse --separator none, or a smaller share"):
        prepare_text(source, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [source]
    assert documents(prepare_text(source, tmp_path / "out", separator="none")) == [1, 1, 1]
    with pytest.raises(UserError, match="2 characters are too few for three splits"):
        prepare_text(write(tmp_path, "ab", "short.txt"), tmp_path / "short")


@pytest.mark.parametrize("fractions", [(0.9, 0.05, 0.05), (0.05, 0.05, 0.9), (0.05, 0.9, 0.05)])
def test_every_split_has_a_character_where_there_are_three(
    tmp_path: Path, fractions: tuple[float, float, float]
) -> None:
    for text in ("abc", "abcd"):
        corpus = prepare_text(write(tmp_path, text), tmp_path / text, fractions=fractions)
        assert all(decoded(corpus))
        assert "".join(decoded(corpus)) == text


@pytest.mark.parametrize("fractions", [(1.0, 0.0, 0.0), (0.5, 0.2, 0.2), (1.2, -0.1, -0.1)])
def test_bad_fractions_are_refused(tmp_path: Path, fractions: tuple[float, float, float]) -> None:
    with pytest.raises(UserError, match="fractions of train, val and test"):
        prepare_text(write(tmp_path, STORY), tmp_path / "out", fractions=fractions)


def test_meta_says_what_was_made_and_from_what(tmp_path: Path) -> None:
    source = write(tmp_path, ("\ufeff" + STORY * 10).replace("\n", "\r\n"))
    corpus = prepare_text(source, tmp_path / "box", clean=True)
    meta = json.loads((corpus.path / "meta.json").read_text())
    assert meta["source"] == {
        "kind": "text",
        "file": "story.txt",
        "bytes": source.stat().st_size,
        "sha256": meta["source"]["sha256"],
        "cleaned": {
            "byte_order_marks": 1,
            "crlf_line_ends": 20,
            "cr_line_ends": 0,
            "nul_bytes": 0,
            "repaired_lines": 0,
        },
        "options": {"separator": "auto", "clean": True, "fractions": [0.9, 0.05, 0.05]},
    }
    assert (meta["format_version"], meta["name"], meta["separator"]) == (1, "box", "none")
    assert (meta["dtype"], meta["aligned"]) == ("uint8", False)
    assert sum(split["tokens"] for split in meta["splits"].values()) == len(STORY * 10)
    assert str(tmp_path) not in json.dumps(meta)
    assert "".join(decoded(corpus)) == STORY * 10


def test_large_vocabularies_take_wider_little_endian_tokens(tmp_path: Path) -> None:
    text = "".join(chr(0x4E00 + i) for i in range(300)) * 2
    corpus = prepare_text(write(tmp_path, text), tmp_path / "wide")
    assert corpus.meta.dtype == "uint16"
    assert corpus.tokens("train")[299] == 299
    assert (corpus.path / "train.bin").read_bytes()[598:600] == b"\x2b\x01"
    sizes = [2, 256, 257, 65536, 65537]
    assert [smallest_dtype(n) for n in sizes] == ["uint8"] * 2 + ["uint16"] * 2 + ["uint32"]


def test_equal_work_is_reused_and_other_work_refused(tmp_path: Path) -> None:
    source = write(tmp_path, STORY * 10)
    out = tmp_path / "box"
    out.mkdir()
    first = prepare_text(source, out)
    made = (out / "train.bin").stat().st_mtime_ns
    renamed = source.rename(tmp_path / "same.txt")
    seen: list[tuple[int, int]] = []
    assert prepare_text(str(renamed), str(out)).path == open_corpus(str(out)).path == out
    again = prepare_text(renamed, out, progress=lambda done, total: seen.append((done, total)))
    assert again.fingerprint == first.fingerprint
    assert (out / "train.bin").stat().st_mtime_ns == made
    assert seen[-1] == (2 * len(STORY * 10),) * 2
    with pytest.raises(UserError, match=r"made otherwise \(options.fractions\)"):
        prepare_text(renamed, out, fractions=(0.8, 0.1, 0.1))
    with pytest.raises(UserError, match=r"made otherwise \(bytes, sha256\)"):
        prepare_text(write(tmp_path, STORY * 11), out)
    with pytest.raises(UserError, match="made otherwise"):
        prepare_storyworld(out, characters=1000)
    assert decoded(open_corpus(out)) == decoded(first)


def test_an_unrelated_folder_is_never_written_into(tmp_path: Path) -> None:
    source = write(tmp_path, STORY * 10)
    with pytest.raises(UserError, match=r"is no prepared corpus.*\nname another folder with --out"):
        prepare_text(source, tmp_path)
    with pytest.raises(UserError, match="is a file, not a folder"):
        prepare_text(source, source)
    with pytest.raises(UserError, match="cannot be written"):
        prepare_text(source, source / "out")
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.parametrize("after", [STORY * 9, STORY * 9 + "NEW"])
def test_a_file_that_changes_meanwhile_is_noticed(tmp_path: Path, after: str) -> None:
    source = write(tmp_path, STORY * 10)

    def change(done: int, total: int) -> None:
        source.write_bytes(after.encode())

    with pytest.raises(UserError, match="changed while it was read"):
        prepare_text(source, tmp_path / "out", progress=change)
    assert list(tmp_path.iterdir()) == [source]


def test_two_at_once_keep_the_one_that_came_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path, STORY * 10)
    out = tmp_path / "box"
    rename = Path.rename

    def late(folder: Path, target: Path) -> None:
        monkeypatch.setattr(Path, "rename", rename)
        prepare_text(source, out)
        rename(folder, target)

    monkeypatch.setattr(Path, "rename", late)
    assert "".join(decoded(prepare_text(source, out))) == STORY * 10
    assert sorted(path.name for path in tmp_path.iterdir()) == ["box", "story.txt"]


def test_the_fingerprint_follows_the_tokens_and_the_vocabulary(tmp_path: Path) -> None:
    texts = ["ab" * 50, "ba" * 50, "ac" * 50]
    prints = [
        prepare_text(write(tmp_path, text), tmp_path / str(i)).fingerprint
        for i, text in enumerate(texts)
    ]
    assert len(set(prints)) == 3
    assert all(len(found) == 8 and int(found, 16) >= 0 for found in prints)
    shutil.copytree(tmp_path / "0", tmp_path / "copy")
    assert open_corpus(tmp_path / "copy").fingerprint == prints[0]


def edit_meta(corpus: Corpus, **changes: object) -> None:
    path = corpus.path / "meta.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_damage_is_one_plain_error(corpus: Corpus) -> None:
    good = (corpus.path / "meta.json").read_text()
    cases: list[tuple[dict[str, object], str]] = [
        ({"format_version": 2}, "has format_version 2, this resroute reads 1"),
        ({"surprise": 1}, "unknown field 'surprise'"),
        ({"dtype": "int8"}, "'int8' is not one of"),
        ({"dtype": "uint16"}, r"train.bin: has 306 bytes, meta.json says 612"),
        ({"aligned": True}, "aligned windows need an end of text"),
        ({"source": "x"}, "source: needs an object"),
        ({"separator": "auto"}, "separator: a corpus has one, got 'auto'; prepare it again"),
        ({"tokenizer": {"type": "character", "symbols": ["a"]}}, "but the vocabulary has 1;"),
    ]
    for changes, message in cases:
        edit_meta(corpus, **changes)
        with pytest.raises(UserError, match=message):
            open_corpus(corpus.path)
        (corpus.path / "meta.json").write_text(good)
    assert open_corpus(corpus.path).fingerprint == corpus.fingerprint


@pytest.mark.parametrize(
    ("name", "value"),
    [("documents", -5), ("bytes", 0), ("characters", -3), ("tokens", 0), ("documents", 0)],
)
def test_counts_of_nothing_are_refused(corpus: Corpus, name: str, value: int) -> None:
    splits = json.loads((corpus.path / "meta.json").read_text())["splits"]
    splits["val"][name] = value
    edit_meta(corpus, splits=splits)
    says = rf"meta.json: splits.val.{name}: must be at least 1, got {value}; prepare the corpus"
    with pytest.raises(UserError, match=says):
        open_corpus(corpus.path)


def test_counts_of_older_corpora_may_be_missing(corpus: Corpus) -> None:
    splits = json.loads((corpus.path / "meta.json").read_text())["splits"]
    for split in SPLITS:
        del splits[split]["bytes"], splits[split]["characters"]
    edit_meta(corpus, splits=splits)
    assert open_corpus(corpus.path).split("val").characters is None


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0])
def test_nats_that_are_none_are_refused(tmp_path: Path, bad: float) -> None:
    path = prepare_storyworld(tmp_path / "sw", characters=2000).path / "test.nats.bin"
    nats = np.fromfile(path)
    nats[-1] = bad
    nats.tofile(path)
    with pytest.raises(UserError, match=r"test.nats.bin: holds what are no nats; prepare the corp"):
        open_corpus(path.parent)


@pytest.mark.parametrize("kind", ["text", "storyworld"])
def test_tokens_that_have_changed_are_noticed(tmp_path: Path, kind: str) -> None:
    def prepared() -> Corpus:
        if kind == "text":
            return prepare_text(write(tmp_path, STORY * 10), tmp_path / "out")
        return prepare_storyworld(tmp_path / "out", characters=2000)

    file = prepared().path / "val.bin"
    assert prepared().path == file.parent
    # of equal size, and in the vocabulary
    file.write_bytes(file.read_bytes()[::-1])
    open_corpus(file.parent)
    says = r"val.bin: is not what was written, by its hash; delete the folder and prepare"
    with pytest.raises(UserError, match=says):
        prepared()
    with pytest.raises(UserError, match=says):
        describe(file.parent)


def test_what_a_killed_process_has_left_is_removed(tmp_path: Path) -> None:
    folders = {
        name: tmp_path / f".{name}.tmp"
        for name in ("box.0123abcd", "box.89abcdef", "box.00000000", "fox.0123abcd", "box.0123")
    }
    for folder in folders.values():
        folder.mkdir()
        (folder / "train.bin").write_bytes(b"x" * 99)
        (folder / ".lock").touch()
    # this one is not begun
    (folders["box.00000000"] / ".lock").unlink()
    living = FileLock(folders["box.89abcdef"] / ".lock")
    with living:
        corpus = prepare_text(write(tmp_path, STORY * 10), tmp_path / "box")
        assert not folders.pop("box.0123abcd").exists()
        assert all((folder / "train.bin").exists() for folder in folders.values())
    assert sorted(path.name for path in corpus.path.iterdir()) == [
        "meta.json",
        "test.bin",
        "train.bin",
        "val.bin",
    ]


def test_a_folder_is_locked_until_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_locked = []

    def look(path: Path) -> None:
        if path.name.endswith(".bin"):
            (lock,) = tmp_path.glob(".box.*.tmp/.lock")
            with pytest.raises(Timeout):
                FileLock(lock, timeout=0).acquire()
            is_locked.append(path.name)

    monkeypatch.setattr(folders, "flush", look)
    prepare_text(write(tmp_path, STORY * 10), tmp_path / "box")
    assert sorted(is_locked) == ["test.bin", "train.bin", "val.bin"]


def test_damaged_and_missing_files(corpus: Corpus, tmp_path: Path) -> None:
    data = np.fromfile(corpus.path / "test.bin", dtype=np.uint8)
    data[-1] = 200
    data.tofile(corpus.path / "test.bin")
    with pytest.raises(UserError, match=r"test.bin: holds token 200, but the vocabulary has"):
        open_corpus(corpus.path)
    (corpus.path / "val.bin").unlink()
    with pytest.raises(UserError, match=r"val.bin: is missing; prepare the corpus again"):
        open_corpus(corpus.path)
    (corpus.path / "meta.json").write_text("{")
    with pytest.raises(UserError, match=r"damaged JSON"):
        open_corpus(corpus.path)
    (corpus.path / "meta.json").unlink()
    with pytest.raises(UserError, match=r"it has no meta.json"):
        open_corpus(corpus.path)
    with pytest.raises(UserError, match="no such folder; `resroute data prepare`"):
        open_corpus(tmp_path / "none")


def stand_in(seed: int) -> Iterator[storyworld.Story]:
    while True:
        seed += 1
        yield storyworld.Story(text="ab" * (1 + seed % 3), nats=float(seed))


def test_storyworld_is_whole_stories_with_their_nats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storyworld, "stories", stand_in)
    monkeypatch.setattr(storyworld, "ALPHABET", ("a", "b"))
    corpus = prepare_storyworld(tmp_path / "sw", seed=0, characters=100)
    # lengths with the end of text go 5, 7, 3, ...: shares of 90, 5 and 5 tokens
    assert [len(corpus.tokens(split)) for split in SPLITS] == [90, 5, 7]
    assert documents(corpus) == [18, 1, 1]
    assert decoded(corpus)[1:] == [f"abab{END_OF_TEXT}", f"ababab{END_OF_TEXT}"]
    assert decoded(corpus)[0].startswith(f"abab{END_OF_TEXT}ababab{END_OF_TEXT}ab{END_OF_TEXT}")
    nats = [corpus.document_nats(split) for split in SPLITS]
    assert nats[0] is None
    assert [found.tolist() for found in nats[1:] if found is not None] == [[19.0], [20.0]]
    assert corpus.aligned
    assert corpus.longest_document == 7
    (corpus.path / "val.nats.bin").unlink()
    with pytest.raises(UserError, match=r"val.nats.bin: is missing"):
        open_corpus(corpus.path)


def test_storyworld_is_reused_for_equal_settings(tmp_path: Path) -> None:
    first = prepare_storyworld(tmp_path / "sw", seed=3, characters=20_000)
    again = prepare_storyworld(str(tmp_path / "sw"), seed=3, characters=20_000)
    assert again.meta == first.meta
    with pytest.raises(UserError, match=r"made otherwise \(seed, sample_sha256\)"):
        prepare_storyworld(tmp_path / "sw", seed=4, characters=20_000)
    with pytest.raises(UserError, match="at least 1, got 0"):
        prepare_storyworld(tmp_path / "none", characters=0)
    for split in ("val", "test"):
        nats = first.document_nats(split)
        stories = first.tokenizer.decode(first.tokens(split)).split(END_OF_TEXT)[:-1]
        assert nats is not None
        assert nats.tolist() == pytest.approx([storyworld.surprisal(story) for story in stories])


def test_other_stories_of_a_later_release_are_not_taken_for_these(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare_storyworld(tmp_path / "sw", characters=1000)
    monkeypatch.setattr(storyworld, "stories", stand_in)
    with pytest.raises(UserError, match=r"made otherwise \(sample_sha256\)"):
        prepare_storyworld(tmp_path / "sw", characters=1000)


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    source = tmp_path / "big.txt"
    block = "".join(f"{STORY}{i}\n{END_OF_TEXT}\n" for i in range(20_000)).encode()
    with source.open("wb") as file:
        while file.tell() < 64 << 20:
            file.write(block)
    tracemalloc.start()
    try:
        prepare_text(source, tmp_path / "big")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 << 20


@pytest.mark.parametrize("name", ["tinystories-cased-2mb.txt", "text8-first-1mib.txt"])
def test_real_files_come_back(real_data: Path, tmp_path: Path, name: str) -> None:
    corpus = prepare_text(real_data / name, tmp_path / "real")
    parts = decoded(corpus)
    assert "".join(parts) == (real_data / name).read_bytes().decode()
    if corpus.meta.separator == "endoftext":
        assert documents(corpus) == [
            sum(bool(story.strip()) for story in part.split(END_OF_TEXT)) for part in parts
        ]
