"""The real files of RESROUTE_DATA, else of ../shared/data: prepared, described, trained on."""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

import resroute as rr
from resroute.cli import main
from resroute.data import SPLITS, CharTokenizer, Corpus, describe, prepare_text
from resroute.data.wikipedia import clean_wikipedia

SHARED = Path(__file__).parents[3] / "shared/data"
DIRTY = "dirty-crlf-mojibake.txt"


@pytest.fixture(scope="module")
def real_data() -> Path:
    """Folder of real text files."""
    folder = Path(os.environ.get("RESROUTE_DATA", SHARED))
    if not folder.is_dir():
        pytest.skip("no real text files: RESROUTE_DATA names no folder, and ../shared/data is none")
    return folder


@dataclass(frozen=True)
class Expected:
    """What a file holds, counted by other means (grep, wc, a loop)."""

    separator: str
    symbols: int
    documents: int
    copies: int
    tokens: int


FILES = {
    "tinystories-cased-2mb.txt": Expected("endoftext", 88, 2317, 0, 2_067_236),
    "tinystories-lower-4mb.txt": Expected("blank-line", 48, 20_020, 5, 4_177_285),
    "text8-first-1mib.txt": Expected("none", 27, 1, 0, 1_048_576),
    "tinyshakespeare.txt": Expected("blank-line", 65, 7222, 74, 1_115_394),
    DIRTY: Expected("blank-line", 65, 332, 0, 75_961),
}


@pytest.fixture(scope="module", params=FILES)
def corpus(
    request: pytest.FixtureRequest, real_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Corpus:
    """Each file, prepared."""
    out = tmp_path_factory.mktemp("real") / "corpus"
    return prepare_text(real_data / request.param, out, clean=request.param == DIRTY)


def decoded(corpus: Corpus) -> str:
    return "".join(corpus.tokenizer.decode(corpus.tokens(split)) for split in SPLITS)


def test_a_file_is_prepared(corpus: Corpus, real_data: Path) -> None:
    source = corpus.meta.source
    expected = FILES[source["file"]]
    sizes = [corpus.split(split) for split in SPLITS]
    # where nothing separates documents each split is one
    documents = len(SPLITS) if expected.separator == "none" else expected.documents
    assert corpus.meta.separator == expected.separator
    assert corpus.tokenizer.vocab_size == expected.symbols
    assert sum(size.documents for size in sizes) == documents
    assert sum(size.tokens for size in sizes) == expected.tokens
    assert source.get("document_copies", 0) == expected.copies
    assert source["cleaned"]["crlf_line_ends"] == (774 if source["file"] == DIRTY else 0)
    text = (real_data / source["file"]).read_bytes().decode()
    assert decoded(corpus) == text.replace("\r\n", "\n")
    ends = sum(len(corpus.document_ends(split)) for split in SPLITS)
    assert ends == (2316 if source["file"] == "tinystories-cased-2mb.txt" else 0)


def test_a_file_is_described(corpus: Corpus, real_data: Path) -> None:
    expected = FILES[corpus.meta.source["file"]]
    found = describe(real_data / corpus.meta.source["file"])
    assert found.documents.separator == expected.separator
    assert found.documents.count == expected.documents
    assert found.documents.copies == expected.copies
    assert found.file
    # each of them ends its line in a CR that the corpus does not have
    assert found.tokens - found.file.crlf_line_ends == expected.tokens
    assert (found.misread, found.file.crlf_line_ends) == (
        (69, 774) if found.name == DIRTY else (0, 0)
    )


def test_a_model_learns_from_a_file(corpus: Corpus, tmp_path: Path) -> None:
    symbols = corpus.tokenizer.vocab_size
    config = rr.TrainConfig(
        model=rr.GPTConfig(
            vocab_size=symbols, context=32, num_layers=2, num_heads=2, dim=24,
            residual=rr.WAV(num_blocks=1),
        ),
        data=str(corpus.path), out=str(tmp_path / "run"), steps=12, batch_size=8, warmup_steps=2,
        learning_rate=2e-2, evaluate_every=6, evaluation_windows=16, log_every=6,
        checkpoint_every=12, precision="float32", device="cpu", peak_flops=1e11,
    )  # fmt: skip
    rr.train(config)
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    losses = [record["loss"] for record in records if record["kind"] == "validation"]
    # no symbol is preferred at the start
    assert losses[0] == pytest.approx(math.log(symbols), abs=0.01)
    assert losses[-1] < losses[0] - 0.5


def test_text8_is_27_symbols_and_has_nothing_to_clean(real_data: Path, tmp_path: Path) -> None:
    path = real_data / "text8-first-1mib.txt"
    corpus = prepare_text(path, tmp_path / "text8")
    assert isinstance(corpus.tokenizer, CharTokenizer)
    assert corpus.tokenizer.symbols == (" ", *"abcdefghijklmnopqrstuvwxyz")
    text = path.read_bytes()
    assert b"".join(clean_wikipedia([b"<text>", text, b"</text>"])) == text


def test_the_dirty_file_is_reported_and_mended(
    real_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(real_data / DIRTY)
    assert main(["data", "describe", path]) == 0
    page = " ".join(capsys.readouterr().out.split())
    assert "Line ends: 774 CRLF; --clean turns them into LF." in page
    assert "69 places look wrongly decoded (â€œ 25 times, â€ 25 times, â€™ 19 times)" in page
    assert main(["data", "prepare", path, "--out", str(tmp_path / "no")]) == 2
    assert "line 1 ends in CRLF; --clean turns CRLF and CR into LF" in capsys.readouterr().err
    out = tmp_path / "mended"
    assert main(["data", "prepare", path, "--clean", "--repair", "--out", str(out)]) == 0
    assert "  cleaned: 774 crlf line ends, 28 repaired lines" in capsys.readouterr().out
    text = decoded(rr.open_corpus(out))
    assert "from behind, \u201cBe careful not to touch it!\u201d Annie jumped back" in text
    counts = {mark: text.count(mark) for mark in "\u201c\u201d\u2019\u00e2\u20ac\r"}
    assert list(counts.values()) == [25, 25, 19, 0, 0, 0]
