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
from typing import Any, Literal

import numpy as np

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
)
from resroute.data.encode import SplitWriter, encoded, require_room, write_splits
from resroute.data.pool import available_cores
from resroute.data.storyworld_knobs import DEFAULT, StoryConfig
from resroute.data.subword import SubwordTokenizer
from resroute.data.text import (
    Piece,
    Separator,
    Survey,
    TextReader,
    check_is_file,
    pieces_of,
    survey_text,
)
from resroute.data.tokenizer import END_OF_TEXT, CharTokenizer, Tokenizer, Unknown
from resroute.files import new_folder, write_json

Fractions = tuple[float, float, float]
Tokens = Literal["characters"] | int | Tokenizer

# below, starting processes takes longer than the work
_LARGE_BYTES = 64_000_000

_BATCH_STORIES = 1000
_SAMPLE_STORIES = 100


def prepare_text(
    source: Path,
    out: Path,
    *,
    separator: Separator = "auto",
    clean: bool = False,
    fractions: Fractions = (0.9, 0.05, 0.05),
    tokens: Tokens = "characters",
    unknown: Unknown = "error",
    processes: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Corpus:
    """Turn a text file into a corpus, in constant memory.

    The splits are held out by position: the head trains, the tail tests. Each cut moves forward to
    the next start of a document; with the separator "none" it stays where it falls. The splits,
    decoded and joined, are the text again (where the tokenizer gives back what it was given, as
    characters and byte-level BPE do).

    Args:
        source: A UTF-8 file, at any size.
        out: The corpus folder to make.
        separator: See `survey_text`.
        clean: See `TextReader`; `meta.source["cleaned"]` counts what was changed.
        fractions: Shares of train, val and test, by characters.
        tokens: "characters" of the text; a number trains a byte-level BPE of so many tokens on the
            train split's share; a tokenizer is taken as it is.
        unknown: What becomes of characters outside the vocabulary; of this text with another
            corpus's tokenizer, and of prompts.
        processes: That work at once; None takes one for each core where the file is large.
        progress: Called with the bytes read and the bytes to read, all passes together.

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
    if processes is None:
        processes = available_cores() if size >= _LARGE_BYTES else 1
    passes = 3 if isinstance(tokens, int) else 2

    def report(number: int) -> Callable[[int], None]:
        return lambda done: progress(number * size + done, passes * size) if progress else None

    survey = survey_text(
        source, separator=separator, clean=clean, processes=processes, progress=report(0)
    )
    provenance = {
        "kind": "text",
        "file": source.name,
        "bytes": survey.bytes,
        "sha256": survey.sha256,
        "cleaned": dataclasses.asdict(survey.cleaned),
        "options": {
            "separator": separator,
            "clean": clean,
            "fractions": list(fractions),
            **_token_options(tokens, unknown),
        },
    }
    if existing:
        report(passes - 1)(size)
        return _require_equal(existing, provenance)
    goals = _goals(survey, fractions)
    tokenizer = _tokenizer_for(source, survey, clean, tokens, unknown, goals[0], report(1))
    reader = TextReader(source, clean=clean, progress=report(passes - 1))
    # another process may make the same corpus meanwhile: its own is kept
    with contextlib.suppress(FileExistsError), new_folder(out) as folder:
        splits, num_unknown = _write(reader, tokenizer, survey, goals, folder, processes, source)
        if num_unknown:
            provenance["unknown_characters"] = num_unknown
        _write_meta(folder, out.resolve().name, provenance, survey.separator, tokenizer, splits)
    return _require_equal(open_corpus(out), provenance)


def _token_options(tokens: Tokens, unknown: Unknown) -> dict[str, Any]:
    """What is not the default of a corpus of characters."""
    options: dict[str, Any] = {}
    if isinstance(tokens, int):
        options["bpe"] = tokens
    elif tokens != "characters":
        options["tokenizer"] = config.fingerprint(tokens.to_dict())
    if unknown != "error":
        options["unknown"] = unknown
    return options


def _goals(survey: Survey, fractions: Fractions) -> list[int]:
    """Positions from which on val and test begin."""
    goals = [round(survey.tokens * sum(fractions[:count])) for count in (1, 2)]
    if survey.separator == "none":
        # no split is empty
        goals = [max(goals[0], 1), max(goals[1], goals[0] + 1, 2)]
    return goals


def _tokenizer_for(
    source: Path,
    survey: Survey,
    clean: bool,
    tokens: Tokens,
    unknown: Unknown,
    train_length: int,
    progress: Callable[[int], None],
) -> Tokenizer:
    if isinstance(tokens, int):
        reader = TextReader(source, clean=clean, progress=progress)
        texts = _head(pieces_of(reader), train_length)
        return SubwordTokenizer.train(texts, tokens, ends=survey.separator == "endoftext")
    if tokens == "characters":
        return CharTokenizer(survey.symbols, unknown)
    if not isinstance(tokens, CharTokenizer):
        return tokens
    missing = sorted(set(survey.symbols) - set(tokens.symbols))
    if missing and unknown == "error":
        listed = ", ".join(
            "the end of text" if m == END_OF_TEXT else ascii(m) for m in missing[:10]
        )
        more = f" and {len(missing) - 10} more" if len(missing) > 10 else ""
        raise UserError(
            f"{source}: has characters outside the given vocabulary: {listed}{more}\n"
            "--unknown skip leaves them out, --unknown byte spells them as bytes"
        )
    return dataclasses.replace(tokens, unknown=unknown)


def _head(pieces: Iterator[Piece], length: int) -> Iterator[str]:
    """The first characters of a text, about so many: what is held out teaches no merges."""
    for _, text in pieces:
        if length <= 0:
            return
        yield text[:length]
        length -= len(text)


def _write(
    reader: TextReader,
    tokenizer: Tokenizer,
    survey: Survey,
    goals: list[int],
    folder: Path,
    processes: int,
    source: Path,
) -> tuple[dict[Split, SplitMeta], int]:
    """Write the splits of a surveyed text."""
    changed = UserError(f"{source}: changed while it was read; try again")
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(SplitWriter(folder, split, tokenizer)) for split in SPLITS]
        pieces = encoded(pieces_of(reader), tokenizer, survey.separator, goals, processes=processes)
        try:
            filled, unknown = write_splits(
                pieces, writers, goals, has_documents=survey.separator != "none"
            )
        except UserError:
            # the first pass saw every character
            raise changed from None
        if reader.sha256 != survey.sha256:
            raise changed
        require_room(filled, SPLITS, survey.separator, survey.tokens, str(source))
        splits = {split: w.finish() for split, w in zip(SPLITS, writers, strict=True)}
    for split, found in splits.items():
        if found.tokens == 0:
            raise UserError(f"{source}: nothing is left for {split}; add text")
    if survey.separator == "none":
        splits = {split: dataclasses.replace(found, documents=1) for split, found in splits.items()}
    return splits, unknown


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
    tokenizer: Tokenizer,
    folder: Path,
    split: Split,
) -> SplitMeta:
    """Write whole stories until a split has `share` tokens, and at least one story."""
    nats: list[float] = []
    with SplitWriter(folder, split, tokenizer) as writer:
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
    tokenizer: Tokenizer,
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
