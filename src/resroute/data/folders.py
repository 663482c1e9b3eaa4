"""What corpus folders have in common, however they are made.

A corpus appears whole or not at all: it is written to a temporary folder beside its place, flushed
to disk and renamed. One that is there already is kept where it equals what was asked for, and is
never overwritten.
"""

import dataclasses
import glob
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import Timeout

from resroute import config
from resroute.config import UserError
from resroute.data.corpora import (
    FORMAT_VERSION,
    META_FILE,
    Corpus,
    CorpusMeta,
    Split,
    SplitMeta,
    SplitsMeta,
    open_corpus,
    require_unchanged,
    smallest_dtype,
)
from resroute.data.text import Separator
from resroute.data.tokenizer import Tokenizer
from resroute.files import flush, is_leftover, lock_file, new_folder, write_json

_LOCK = ".lock"
# fields of a source that are found while the corpus is made
_RESULTS = ("unknown_characters", "document_copies", "compared_documents")


@contextmanager
def new_corpus(out: Path) -> Iterator[Path]:
    """`new_folder`, after what killed processes have left of the same corpus is removed.

    The folder is locked while it is written: so others know that its process lives.
    """
    with new_folder(out) as folder:
        lock = folder / _LOCK
        held = lock_file(lock)
        siblings = f"{glob.escape(folder.name.removesuffix('.tmp')[:-8])}????????.tmp"
        for other in folder.parent.glob(siblings):
            if is_leftover(other) and other != folder:
                _remove_abandoned(other)
        try:
            yield folder
            # here and not later: it takes long, and what has no lock nobody removes
            for file in folder.iterdir():
                flush(file)
        finally:
            if os.name != "nt":
                # nobody locks what is gone; Windows removes no open file
                lock.unlink(missing_ok=True)
            if held is not None:
                held.release()
            lock.unlink(missing_ok=True)


def _remove_abandoned(folder: Path) -> None:
    lock = folder / _LOCK
    with suppress(Timeout, OSError):
        if lock.is_file() and (held := lock_file(lock, timeout=0)):
            held.release()
            shutil.rmtree(folder, ignore_errors=True)


def write_meta(
    folder: Path,
    name: str,
    source: dict[str, Any],
    separator: Separator,
    tokenizer: Tokenizer,
    splits: dict[Split, SplitMeta],
    *,
    aligned: bool = False,
) -> None:
    """Write `meta.json`; the arguments are its fields (`CorpusMeta`)."""
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


def existing_corpus(out: Path) -> Corpus | None:
    """The corpus at `out`, None where nothing is there; UserError for anything else."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    try:
        return open_corpus(out)
    except UserError as error:
        raise UserError(f"{error}\nname another folder with --out, or delete {out}") from None


def kept(corpus: Corpus, source: dict[str, Any]) -> Corpus:
    """An existing corpus, where `require_equal` holds and its files are what was written."""
    require_unchanged(require_equal(corpus, source))
    return corpus


def require_equal(corpus: Corpus, source: dict[str, Any]) -> Corpus:
    """`corpus` where it was made from the same content in the same way, else UserError."""
    # the same bytes under another name are the same corpus, and results are no part of the way
    old, new = (
        {**item, "file": "", **dict.fromkeys(_RESULTS)} for item in (corpus.meta.source, source)
    )
    for item in (old, new):
        item["cleaned"] = {k: v for k, v in item.get("cleaned", {}).items() if v}
    if changed := config.differences(old, new):
        raise UserError(
            f"{corpus.path}: holds a corpus made otherwise ({', '.join(changed)})\n"
            "name another folder with --out, or delete that one"
        )
    return corpus
