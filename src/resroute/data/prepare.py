"""Making corpora of text: from a user's file, packed or not, or from a published corpus."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

from resroute import config
from resroute.config import UserError
from resroute.data.containers import ByteSource, joined, open_text
from resroute.data.copies import MAX_DOCUMENTS, CopyCounter
from resroute.data.corpora import (
    SPLITS,
    Corpus,
    Split,
    SplitMeta,
    open_corpus,
)
from resroute.data.encode import SplitWriter, encoded, require_room, write_splits
from resroute.data.folders import existing_corpus, kept, new_corpus, require_equal, write_meta
from resroute.data.pool import ProcessKilledError, available_cores
from resroute.data.published import PublishedFiles
from resroute.data.subword import SubwordTokenizer
from resroute.data.text import (
    Piece,
    Separator,
    Survey,
    TextReader,
    pieces_of,
    survey_text,
)
from resroute.data.tokenizer import END_OF_TEXT, CharTokenizer, Tokenizer, Unknown
from resroute.data.wikipedia import clean_wikipedia

Fractions = tuple[float, float, float]
Tokens = Literal["characters"] | int | Tokenizer

# below, starting processes takes longer than the work
_LARGE_BYTES = 64_000_000


def prepare_text(
    source: str | Path,
    out: str | Path,
    *,
    separator: Separator = "auto",
    clean: bool = False,
    repair: bool = False,
    wikipedia: bool = False,
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
        source: A file of UTF-8 text, at any size, packed or not: see `open_text`.
        out: The corpus folder to make.
        separator: See `survey_text`.
        clean: See `TextReader`; `meta.source["cleaned"]` counts what was changed.
        repair: See `TextReader`.
        wikipedia: The file is an XML dump of Wikipedia; its text is what the recipe of text8 leaves
            of it, the letters a to z and spaces (`clean_wikipedia`).
        fractions: Shares of train, val and test, by characters.
        tokens: "characters" of the text; a number trains a byte-level BPE of so many tokens on the
            train split's share; a tokenizer is taken as it is.
        unknown: What becomes of characters outside the vocabulary; of this text with another
            corpus's tokenizer, and of prompts. Subwords have their own way.
        processes: That work at once; None takes one for each core where the file is large.
        progress: Called with the bytes read and the bytes to read, all passes together.

    Raises:
        UserError: A file that cannot be used, a split without text, or an `out` that holds
            something else.
    """
    source, out = Path(source), Path(out)
    if min(fractions) <= 0 or abs(sum(fractions) - 1) > 1e-9:
        raise UserError(
            f"fractions of train, val and test must be over 0 and sum to 1: {fractions}"
        )
    task = _Task(
        texts=[lambda: _of_wikipedia(open_text(source)) if wikipedia else open_text(source)],
        separator="none" if wikipedia else separator,
        clean=clean,
        repair=repair,
        tokens=tokens,
        unknown=unknown,
        processes=processes,
        progress=progress,
    )
    options = {"separator": separator, "clean": clean, "fractions": list(fractions)}
    if wikipedia:
        options["wikipedia"] = True
    return task.run(
        out,
        {"kind": "text", "file": source.name},
        options,
        lambda survey: _goals(survey, fractions),
    )


def prepare_published(
    files: PublishedFiles,
    out: Path,
    *,
    clean: bool = False,
    tokens: Tokens = "characters",
    unknown: Unknown = "error",
    processes: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Corpus:
    """Turn a published corpus into a corpus folder, with its own splits.

    Args:
        files: What `published.fetch` or `published.local` has found.
        out: The corpus folder to make.
        clean: See `prepare_text`, as all that follow.
        tokens: See `prepare_text`.
        unknown: See `prepare_text`.
        processes: See `prepare_text`.
        progress: See `prepare_text`.

    Raises:
        UserError: See `prepare_text`.
    """
    task = _Task(
        texts=[partial(files.open, split) for split in SPLITS],
        separator=files.corpus.separator,
        clean=clean,
        repair=False,
        tokens=tokens,
        unknown=unknown,
        processes=processes,
        progress=progress,
    )
    about = {"kind": "published", "file": files.corpus.name, "licence": files.corpus.licence}

    def goals(survey: Survey) -> list[int]:
        train, val = (task.length(text) for text in task.texts[:2])
        return [train, train + val]

    return task.run(out, about, {"clean": clean}, goals)


@dataclasses.dataclass(kw_only=True)
class _Task:
    """What `prepare_text` and `prepare_published` share: the passes over one or several texts."""

    texts: list[Callable[[], ByteSource]]
    separator: Separator
    clean: bool
    repair: bool
    tokens: Tokens
    unknown: Unknown
    processes: int | None
    progress: Callable[[int, int], None] | None

    def run(
        self,
        out: Path,
        about: dict[str, Any],
        options: dict[str, Any],
        goals_of: Callable[[Survey], list[int]],
    ) -> Corpus:
        """Make the corpus, or find that it is there."""
        is_subword = self.tokens != "characters" and not isinstance(self.tokens, CharTokenizer)
        if is_subword and self.unknown != "error":
            raise UserError(
                f"--unknown {self.unknown} has no use for subwords, which spell what they do not "
                "know in their own way: leave it out"
            )
        source = self.open()
        existing = existing_corpus(out)
        processes = self.processes
        if processes is None:
            processes = available_cores() if source.size >= _LARGE_BYTES else 1
        passes = 3 if isinstance(self.tokens, int) else 2
        survey = survey_text(
            source,
            separator=self.separator,
            clean=self.clean,
            repair=self.repair,
            processes=processes,
            progress=self._report(source, 0, passes),
        )
        provenance = {
            **about,
            "bytes": survey.bytes,
            "sha256": survey.sha256,
            "cleaned": dataclasses.asdict(survey.cleaned),
            "options": {
                **options,
                **({"repair": True} if self.repair else {}),
                **_token_options(self.tokens, self.unknown),
            },
        }
        if existing:
            self._report(source, passes - 1, passes)(source.size)
            return kept(existing, provenance)
        goals = goals_of(survey)
        tokenizer = self._tokenizer(survey, goals[0], self._report(source, 1, passes))
        reader = self.reader(self.open(), self._report(source, passes - 1, passes))
        # another process may make the same corpus meanwhile: its own is kept
        with contextlib.suppress(FileExistsError), new_corpus(out) as folder:
            splits, results = _write(reader, tokenizer, survey, goals, folder, processes)
            provenance |= results
            write_meta(folder, out.resolve().name, provenance, survey.separator, tokenizer, splits)
        return require_equal(open_corpus(out), provenance)

    def open(self) -> ByteSource:
        """All texts as one."""
        return joined([text() for text in self.texts]) if len(self.texts) > 1 else self.texts[0]()

    def reader(
        self, source: ByteSource, progress: Callable[[int], None] | None = None
    ) -> TextReader:
        """A pass over a text, cleaned as asked."""
        return TextReader(source, clean=self.clean, repair=self.repair, progress=progress)

    def length(self, text: Callable[[], ByteSource]) -> int:
        """Positions of a text, an end of text that is a token as one."""
        extra = len(END_OF_TEXT) - 1 if self.separator == "endoftext" else 0
        pieces = self.reader(text())
        return sum(len(piece) - extra * piece.count(END_OF_TEXT) for piece in pieces)

    def _report(self, source: ByteSource, number: int, passes: int) -> Callable[[int], None]:
        size, progress = source.size, self.progress
        return lambda done: progress(number * size + done, passes * size) if progress else None

    def _tokenizer(
        self, survey: Survey, train_length: int, progress: Callable[[int], None]
    ) -> Tokenizer:
        if isinstance(self.tokens, int):
            texts = _head(pieces_of(self.reader(self.open(), progress)), train_length)
            return SubwordTokenizer.train(texts, self.tokens, ends=survey.separator == "endoftext")
        if self.tokens == "characters":
            return CharTokenizer(survey.symbols, self.unknown)
        if not isinstance(self.tokens, CharTokenizer):
            return self.tokens
        missing = sorted(set(survey.symbols) - set(self.tokens.symbols))
        if missing and self.unknown == "error":
            shown = ["the end of text" if m == END_OF_TEXT else ascii(m) for m in missing[:10]]
            more = f" and {len(missing) - 10} more" if len(missing) > 10 else ""
            raise UserError(
                f"{self.open().path}: has characters outside the given vocabulary: "
                f"{', '.join(shown)}{more}\n"
                "--unknown skip leaves them out, --unknown byte spells them as bytes"
            )
        return dataclasses.replace(self.tokens, unknown=self.unknown)


def _of_wikipedia(dump: ByteSource) -> ByteSource:
    def read(report: Callable[[int], None]) -> Iterator[tuple[str, bytes]]:
        for article in clean_wikipedia(dump):
            report(dump.done)
            yield "", article

    return ByteSource(dump.path, dump.size, read)


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
        # no split is empty, where there is a token for each
        first = max(1, min(goals[0], survey.tokens - 2))
        goals = [first, max(first + 1, min(goals[1], survey.tokens - 1))]
    return goals


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
) -> tuple[dict[Split, SplitMeta], dict[str, int]]:
    """Write the splits of a surveyed text; also what `meta.source` says of the results."""
    source = reader.path
    copies = CopyCounter(has_literals=survey.separator == "endoftext")
    changed = UserError(f"{source}: changed while it was read; try again")
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(SplitWriter(folder, split, tokenizer)) for split in SPLITS]
        pieces = encoded(pieces_of(reader), tokenizer, survey.separator, goals, processes=processes)
        try:
            filled, unknown = write_splits(
                pieces, writers, goals, has_documents=survey.separator != "none", copies=copies
            )
        except ProcessKilledError:
            raise
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
    results = {"unknown_characters": unknown, "document_copies": copies.finish()}
    documents = sum(found.documents for found in splits.values())
    if results["document_copies"] and documents > MAX_DOCUMENTS:
        results["compared_documents"] = MAX_DOCUMENTS
    return splits, {name: count for name, count in results.items() if count}
