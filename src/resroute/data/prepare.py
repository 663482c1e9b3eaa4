"""Making corpora: from a user's text file, or from the storyworld generator.

A corpus appears whole or not at all: it is written to a temporary folder beside its place, flushed
to disk and renamed. One that is there already is kept where it equals what was asked for, and is
never overwritten.
"""

import contextlib
import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from resroute import config
from resroute.config import UserError
from resroute.data import storyworld
from resroute.data.corpora import (
    FORMAT_VERSION,
    META_FILE,
    SPLITS,
    Corpus,
    CorpusMeta,
    Split,
    SplitMeta,
    SplitsMeta,
    nats_file,
    open_corpus,
    smallest_dtype,
    tokens_file,
)
from resroute.data.storyworld_knobs import DEFAULT, StoryConfig
from resroute.data.text import (
    DocumentStarts,
    Separator,
    Survey,
    TextReader,
    check_is_file,
    survey_text,
    text_code_points,
)
from resroute.data.tokenizer import END_OF_TEXT, CharTokenizer
from resroute.files import new_folder, write_json

Fractions = tuple[float, float, float]

_BATCH_STORIES = 1000
_SAMPLE_STORIES = 100


def prepare_text(
    source: Path,
    out: Path,
    *,
    separator: Separator = "auto",
    clean: bool = False,
    fractions: Fractions = (0.9, 0.05, 0.05),
    progress: Callable[[int, int], None] | None = None,
) -> Corpus:
    """Turn a text file into a corpus of characters, in two passes and constant memory.

    The splits are held out by position: the head trains, the tail tests. Each cut moves forward to
    the next start of a document; with the separator "none" it stays where it falls. The splits,
    decoded and joined, are the text again.

    Args:
        source: A UTF-8 file, at any size.
        out: The corpus folder to make.
        separator: See `survey_text`.
        clean: See `TextReader`; `meta.source["cleaned"]` counts what was changed.
        fractions: Shares of train, val and test.
        progress: Called with the bytes read and the bytes to read, both passes together.

    Raises:
        UserError: A file that cannot be used, a split without text, or an `out` that holds
            something else.
    """
    if min(fractions) <= 0 or abs(sum(fractions) - 1) > 1e-9:
        raise UserError(
            f"fractions of train, val and test must be over 0 and sum to 1: {fractions}"
        )
    check_is_file(source)
    existing = _existing(out)
    size = source.stat().st_size

    def report(done: int) -> None:
        if progress:
            progress(done, 2 * size)

    survey = survey_text(source, separator=separator, clean=clean, progress=report)
    options = {"separator": separator, "clean": clean, "fractions": list(fractions)}
    provenance = {
        "kind": "text",
        "file": source.name,
        "bytes": survey.bytes,
        "sha256": survey.sha256,
        "cleaned": dataclasses.asdict(survey.cleaned),
        "options": options,
    }
    if existing:
        report(2 * size)
        return _require_equal(existing, provenance)
    tokenizer = CharTokenizer(survey.symbols)
    reader = TextReader(source, clean=clean, progress=lambda done: report(size + done))
    # another process may make the same corpus meanwhile: its own is kept
    with contextlib.suppress(FileExistsError), new_folder(out) as folder:
        splits = _encode(reader, tokenizer, survey, fractions, folder, where=str(source))
        _write_meta(folder, out.resolve().name, provenance, survey.separator, tokenizer, splits)
    return _require_equal(open_corpus(out), provenance)


def prepare_storyworld(
    out: Path, *, seed: int = 0, characters: int = 2_000_000, story: StoryConfig = DEFAULT
) -> Corpus:
    """Make a corpus of generated stories, each followed by the end of text.

    The splits are whole stories, independent draws: 90 % train, 5 % val, 5 % test. The exact -log p
    of each story of val and test is kept, which gives the entropy floor. With `story.held_out`,
    test tells held-out combinations of facts alone, and train and val all others.

    Args:
        out: The corpus folder to make.
        seed: Of the generator.
        characters: Least number of tokens of the three splits together.
        story: How hard the stories are.

    Raises:
        UserError: `characters` below one, or an `out` that holds something else.
    """
    if characters < 1:
        raise UserError(f"a storyworld corpus needs characters of at least 1, got {characters}")
    samples = dict.fromkeys(_tellers(seed, story).values())
    sample = "\n".join(s.text for told in samples for s in itertools.islice(told, _SAMPLE_STORIES))
    provenance: dict[str, Any] = {
        "kind": "storyworld",
        "seed": seed,
        "characters": characters,
        # changes when a later release tells other stories
        "sample_sha256": hashlib.sha256(sample.encode()).hexdigest(),
    }
    if story != DEFAULT:
        provenance["story"] = config.from_defaults(story)
    if existing := _existing(out):
        return _require_equal(existing, provenance)
    tokenizer = CharTokenizer((*storyworld.ALPHABET, END_OF_TEXT))
    stories = _tellers(seed, story)
    splits = {}
    # another process may make the same corpus meanwhile: its own is kept
    with contextlib.suppress(FileExistsError), new_folder(out) as folder:
        shares = (characters - 2 * (characters // 20), characters // 20, characters // 20)
        for split, share in zip(SPLITS, shares, strict=True):
            splits[split] = _write_stories(stories[split], share, tokenizer, folder, split)
        name = out.resolve().name
        _write_meta(folder, name, provenance, "endoftext", tokenizer, splits, aligned=True)
    return _require_equal(open_corpus(out), provenance)


class _SplitWriter(contextlib.AbstractContextManager["_SplitWriter"]):
    """Writes one split's token file and counts and hashes what it writes."""

    def __init__(self, folder: Path, split: Split, vocab_size: int) -> None:
        self._dtype = np.dtype(smallest_dtype(vocab_size)).newbyteorder("<")
        self._file = (folder / tokens_file(split)).open("wb")
        self._hash = hashlib.sha256()
        self.tokens = 0
        self.documents = 0

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def write(self, ids: npt.NDArray[np.int64], *, documents: int) -> None:
        data = ids.astype(self._dtype).tobytes()
        self._file.write(data)
        self._hash.update(data)
        self.tokens += len(ids)
        self.documents += documents

    def finish(self) -> SplitMeta:
        return SplitMeta(
            tokens=self.tokens, documents=self.documents, sha256=self._hash.hexdigest()
        )


def _encode(
    reader: TextReader,
    tokenizer: CharTokenizer,
    survey: Survey,
    fractions: Fractions,
    folder: Path,
    *,
    where: str,
) -> dict[Split, SplitMeta]:
    """Second pass: write the splits, cutting at the first document start past each share."""
    changed = UserError(f"{where}: changed while it was read; try again")
    find_starts = _document_finder(tokenizer, survey.separator)
    goals = [round(survey.tokens * sum(fractions[:count])) for count in (1, 2)]
    with contextlib.ExitStack() as stack:
        writers = [
            stack.enter_context(_SplitWriter(folder, split, tokenizer.vocab_size))
            for split in SPLITS
        ]
        current = position = 0
        for text in reader:
            try:
                ids = tokenizer.encode(text)
            except UserError:
                # the first pass saw every character
                raise changed from None
            starts = find_starts(ids)
            while current < len(goals):
                # a split has at least one document
                first = 0 if writers[current].documents else 1
                place = max(int(np.searchsorted(starts, goals[current] - position)), first)
                if place >= len(starts):
                    break
                cut = int(starts[place])
                writers[current].write(ids[:cut], documents=place)
                ids, starts = ids[cut:], starts[place:] - cut
                current, position = current + 1, position + cut
            writers[current].write(ids, documents=len(starts))
            position += len(ids)
        if reader.sha256 != survey.sha256:
            raise changed
        if current < len(goals):
            raise UserError(_no_room(survey, SPLITS[: current + 1], where))
        splits = {split: w.finish() for split, w in zip(SPLITS, writers, strict=True)}
    if survey.separator == "none":
        return {split: dataclasses.replace(found, documents=1) for split, found in splits.items()}
    return splits


def _no_room(survey: Survey, filled: tuple[Split, ...], where: str) -> str:
    missing = SPLITS[len(filled)]
    if survey.separator == "none":
        return f"{where}: {survey.tokens} characters are too few for three splits; add text"
    return (
        f"{where}: no document starts late enough to begin {missing} (separator "
        f"{survey.separator})\nuse --separator none, or a smaller share for {' and '.join(filled)}"
    )


def _document_finder(
    tokenizer: CharTokenizer, separator: Separator
) -> Callable[[npt.NDArray[np.int64]], npt.NDArray[np.int64]]:
    if separator == "none":
        return lambda ids: np.arange(len(ids))
    end = tokenizer.end_of_text
    is_text = text_code_points()[[ord(s) for s in tokenizer.symbols[:end]]]
    if end is not None:
        return DocumentStarts(np.append(is_text, False), mark=end, num_marks=1).find
    return DocumentStarts(is_text, mark=tokenizer.symbols.index("\n"), num_marks=2).find


def _tellers(seed: int, story: StoryConfig) -> dict[Split, Iterator[storyworld.Story]]:
    """The stories of each split; splits of one kind take turns at one iterator."""
    knobs: dict[str, Any] = {} if story == DEFAULT else {"story": story}
    told = storyworld.stories(seed, **knobs)
    if not story.held_out:
        return dict.fromkeys(SPLITS, told)
    return {"train": told, "val": told, "test": storyworld.stories(seed, **knobs, held_out=True)}


def _write_stories(
    stories: Iterator[storyworld.Story],
    share: int,
    tokenizer: CharTokenizer,
    folder: Path,
    split: Split,
) -> SplitMeta:
    """Write whole stories until a split has `share` tokens, and at least one story."""
    nats: list[float] = []
    with _SplitWriter(folder, split, tokenizer.vocab_size) as writer:
        while writer.documents == 0 or writer.tokens < share:
            need = share - writer.tokens
            texts: list[str] = []
            while not texts or (need > 0 and len(texts) < _BATCH_STORIES):
                story = next(stories)
                texts.append(story.text + END_OF_TEXT)
                nats.append(story.nats)
                need -= len(story.text) + 1
            writer.write(tokenizer.encode("".join(texts)), documents=len(texts))
        if split != "train":
            np.array(nats, dtype="<f8").tofile(folder / nats_file(split))
        return writer.finish()


def _write_meta(
    folder: Path,
    name: str,
    source: dict[str, Any],
    separator: Separator,
    tokenizer: CharTokenizer,
    splits: dict[Split, SplitMeta],
    *,
    aligned: bool = False,
) -> None:
    meta = CorpusMeta(
        format_version=FORMAT_VERSION,
        name=name,
        source=source,
        separator=separator,
        tokenizer=tokenizer.to_dict(),
        dtype=smallest_dtype(tokenizer.vocab_size),
        splits=SplitsMeta(**splits),
        aligned=aligned,
    )
    write_json(folder / META_FILE, dataclasses.asdict(meta))


def _existing(out: Path) -> Corpus | None:
    """The corpus at `out`, None where nothing is there; UserError for anything else."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    try:
        return open_corpus(out)
    except UserError as error:
        raise UserError(f"{error}\nname another folder with --out, or delete {out}") from None


def _require_equal(corpus: Corpus, source: dict[str, Any]) -> Corpus:
    """`corpus` where it was made from the same content in the same way, else UserError."""
    # the same bytes under another name are the same corpus
    old, new = ({**item, "file": ""} for item in (corpus.meta.source, source))
    if changed := config.differences(old, new):
        raise UserError(
            f"{corpus.path}: holds a corpus made otherwise ({', '.join(changed)})\n"
            "name another folder with --out, or delete that one"
        )
    return corpus
