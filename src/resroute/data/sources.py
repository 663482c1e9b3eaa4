"""From what a person names, a folder, a text file or `storyworld`, to a corpus."""

import hashlib
from collections.abc import Callable
from pathlib import Path

from resroute.config import UserError
from resroute.data.containers import check_is_file
from resroute.data.corpora import META_FILE, Corpus, open_corpus
from resroute.data.prepare import prepare_text
from resroute.data.prepare_storyworld import prepare_storyworld
from resroute.data.published import PUBLISHED

STORYWORLD = "storyworld"


def corpus_of(
    source: str,
    *,
    root: Path = Path("data"),
    clean: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Corpus:
    """Open a prepared corpus, or prepare one below `root` where that has not been done yet.

    Args:
        source: A corpus folder, a text file, or `storyworld` for the embedded generator.
        root: Where new corpora go: `storyworld`, or the file's name and part of its hash, so that
            an edited file makes a corpus of its own.
        clean: See `prepare_text`.
        progress: See `prepare_text`.

    Raises:
        UserError: Nothing of that name, or a text that cannot be used.
    """
    path = Path(source)
    if path.is_dir():
        return open_corpus(path)
    if source == STORYWORLD:
        return prepare_storyworld(root / STORYWORLD)
    if not path.exists() and (root / source / META_FILE).is_file():
        return open_corpus(root / source)
    if source in PUBLISHED and not path.exists():
        raise UserError(f"{source} is not here yet; `resroute data prepare {source}` gets it")
    check_is_file(path)
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    name = f"{path.stem}-{digest[:8]}" + ("-clean" if clean else "")
    return prepare_text(path, root / name, clean=clean, progress=progress)
