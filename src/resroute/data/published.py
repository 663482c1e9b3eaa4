"""The published corpora, text8 and TinyStories: where they are, and which part is which split.

| name | published | train | val | test |
| --- | --- | --- | --- | --- |
| text8 | 100,000,000 bytes | the first 90,000,000 | the next 5,000,000 | the last 5,000,000 |
| tinystories | train, validation | train | the first half of validation | its second half |

The splits of text8 are those of the literature. TinyStories is published without a test split: ours
is the second half of the published validation split, in whole documents (rows). By a public count
about one row in seven of the published train split repeats an earlier one, so that a test split cut
from it would have been seen in training.
"""

import abc
import dataclasses
import hashlib
import itertools
from pathlib import Path, PurePosixPath

from resroute.config import UserError, suggestion
from resroute.data.containers import ByteSource, joined, open_text
from resroute.data.corpora import Split
from resroute.data.documents import count_rows
from resroute.data.download import Progress, download
from resroute.data.hub import hub_file
from resroute.data.text import Separator
from resroute.files import digest


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublishedFile:
    """One file as it was published; `name` may have folders in it."""

    name: str
    bytes: int
    sha256: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """Which part of a file belongs to a split; `start` and `stop` as `open_text` counts them."""

    path: Path
    start: int = 0
    stop: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublishedFiles:
    """A published corpus on this machine.

    Attributes:
        corpus: What it is.
        train: The parts of files that make the split, in order.
        val: Likewise.
        test: Likewise.
    """

    corpus: "PublishedCorpus"
    train: tuple[Part, ...]
    val: tuple[Part, ...]
    test: tuple[Part, ...]

    def open(self, split: Split) -> ByteSource:
        """The text of a split."""
        parts: tuple[Part, ...] = getattr(self, split)
        return joined([open_text(part.path, start=part.start, stop=part.stop) for part in parts])


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublishedCorpus(abc.ABC):
    """A corpus that others have published.

    Attributes:
        name: By which it is asked for.
        files: What it consists of.
        separator: Of its documents.
        licence: Whose text it is, and under what terms, in one line.
    """

    name: str
    files: tuple[PublishedFile, ...]
    separator: Separator
    licence: str

    @abc.abstractmethod
    def fetch(self, cache: Path, progress: Progress | None) -> PublishedFiles:
        """See the function `fetch`."""

    @abc.abstractmethod
    def local(self, path: Path) -> PublishedFiles:
        """See the function `local`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublishedText(PublishedCorpus):
    """One text over HTTPS, cut by position.

    Attributes:
        address: The folder of the file.
        cuts: Where val begins, where test does, and where the text ends, in bytes.
        md5: Of the text.
    """

    address: str
    cuts: tuple[int, int, int]
    md5: str

    def fetch(self, cache: Path, progress: Progress | None) -> PublishedFiles:
        """Download the file to `cache`."""
        (file,) = self.files
        url, target = f"{self.address}/{file.name}", cache / file.name
        return self.local(
            download(url, target, size=file.bytes, sha256=file.sha256, progress=progress)
        )

    def local(self, path: Path) -> PublishedFiles:
        """The text in a file, packed or not."""
        size, md5 = 0, hashlib.md5(usedforsecurity=False)
        for block in open_text(path):
            size += len(block)
            md5.update(block)
            if size > self.cuts[-1]:
                break
        if size != self.cuts[-1] or md5.hexdigest() != self.md5:
            found = f"more than {self.cuts[-1]:,}" if size > self.cuts[-1] else f"{size:,}"
            raise UserError(
                f"{path}: is not {self.name}, whose text has {self.cuts[-1]:,} bytes and the md5 "
                f"{self.md5} (found {found} bytes)\n"
                f"get {self.address}/{self.files[0].name}, or prepare it as a text of its own"
            )
        places = (0, *self.cuts)
        train, val, test = (
            (Part(path=path, start=start, stop=stop),) for start, stop in itertools.pairwise(places)
        )
        return PublishedFiles(corpus=self, train=train, val=val, test=test)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublishedDataset(PublishedCorpus):
    """Documents in .parquet files of a dataset on the Hugging Face hub.

    The files whose names begin with `train` are its train split, the others its validation split.

    Attributes:
        repository: Of the dataset.
        revision: The commit to which the files belong.
    """

    repository: str
    revision: str

    def fetch(self, cache: Path, progress: Progress | None) -> PublishedFiles:
        """Find the files in the hub's own cache, or download them to it; `cache` is not used."""
        total = sum(file.bytes for file in self.files)
        remedy = (
            f"get the {len(self.files)} .parquet files of {self._url('data')} some other way, and "
            f"name their folder: resroute data prepare {self.name} --from FOLDER"
        )
        done = 0

        def report(here: int) -> None:
            if progress:
                progress(min(done + here, total), total)

        paths = []
        for file in self.files:
            paths.append(
                hub_file(self.repository, self.revision, file.name, remedy=remedy, report=report)
            )
            done += file.bytes
            report(0)
        for file, path in zip(self.files, paths, strict=True):
            _check_file(path, file)
        return self._split(paths)

    def local(self, path: Path) -> PublishedFiles:
        """The files in a folder, as they lie in the repository or side by side."""
        if path.is_file():
            raise UserError(
                f"{path}: is one file; the splits of {self.name} need the folder of all "
                f"{len(self.files)}\nor prepare it as a text of its own, split by position"
            )
        paths = []
        for file in self.files:
            places = (path / file.name, path / PurePosixPath(file.name).name)
            found = next((place for place in places if place.is_file()), None)
            if found is None:
                raise UserError(
                    f"{path}: has no {file.name} in it; get it from {self._url(file.name)}"
                )
            paths.append(found)
        for file, place in zip(self.files, paths, strict=True):
            _check_file(place, file)
        return self._split(paths)

    def _url(self, name: str) -> str:
        folder = "tree" if name == "data" else "resolve"
        return f"https://huggingface.co/datasets/{self.repository}/{folder}/{self.revision}/{name}"

    def _split(self, paths: list[Path]) -> PublishedFiles:
        train = tuple(Part(path=path) for path in paths if path.name.startswith("train"))
        (held_out,) = (path for path in paths if not path.name.startswith("train"))
        half = count_rows(held_out) // 2
        val, test = Part(path=held_out, stop=half), Part(path=held_out, start=half)
        return PublishedFiles(corpus=self, train=train, val=(val,), test=(test,))


PUBLISHED: dict[str, PublishedCorpus] = {
    "text8": PublishedText(
        name="text8",
        address="https://mattmahoney.net/dc",
        files=(
            PublishedFile(
                name="text8.zip",
                bytes=31_344_016,
                sha256="a6640522afe85d1963ad56c05b0ede0a0c000dddc9671758a6cc09b7a38e5232",
            ),
        ),
        cuts=(90_000_000, 95_000_000, 100_000_000),
        md5="3bea1919949baf155f99411df5fada7e",
        separator="none",
        licence="text8 by Matt Mahoney, from English Wikipedia of March 2006 (GFDL, CC BY-SA)",
    ),
    "tinystories": PublishedDataset(
        name="tinystories",
        repository="roneneldan/TinyStories",
        revision="f54c09fd23315a6f9c86f9dc80f725de7d8f9c64",
        files=(
            PublishedFile(
                name="data/train-00000-of-00004-2d5a1467fff1081b.parquet",
                bytes=248_731_111,
                sha256="77cf780cebe52b6e83e3a2ac84bc56d8059363113e41d17a023f1d8b2ed0fc0b",
            ),
            PublishedFile(
                name="data/train-00001-of-00004-5852b56a2bd28fd9.parquet",
                bytes=248_171_980,
                sha256="e2f173a6dcc2b5895183e8ad376e115bd5c06764eb0cfc01ce1add156b2d017f",
            ),
            PublishedFile(
                name="data/train-00002-of-00004-a26307300439e943.parquet",
                bytes=245_894_874,
                sha256="cac73cd1a0973a7fccde022a5a5c78f8ba58ea6849541835c58e7c5fc747f2ef",
            ),
            PublishedFile(
                name="data/train-00003-of-00004-d243063613e5a057.parquet",
                bytes=247_988_350,
                sha256="862514ae75723ddd339337f1ef7617b88f82290dcddd57445e1d38d257ca7891",
            ),
            PublishedFile(
                name="data/validation-00000-of-00001-869c898b519ad725.parquet",
                bytes=9_989_127,
                sha256="33406a6206554cfc279c29c11f4df51528af487aa1a602b075566fc83c49dcab",
            ),
        ),
        separator="endoftext",
        licence="TinyStories by Ronen Eldan and Yuanzhi Li (CDLA-Sharing-1.0)",
    ),
}


def published(name: str) -> PublishedCorpus:
    """What is known of a published corpus.

    Raises:
        UserError: There is none of that name.
    """
    if name not in PUBLISHED:
        known = " and ".join(PUBLISHED)
        raise UserError(
            f"no published corpus is called {name}{suggestion(name, PUBLISHED)}; there are {known}"
        )
    return PUBLISHED[name]


def fetch(name: str, cache: Path, progress: Progress | None = None) -> PublishedFiles:
    """Download a published corpus, or find it where an earlier call has put it.

    text8 is downloaded to `cache`. TinyStories goes to and comes from the cache of huggingface_hub,
    whose settings hold: `HF_HOME`, `HF_HUB_CACHE`, `HF_HUB_OFFLINE`, `HF_ENDPOINT`, `HF_TOKEN`.
    Files are checked by size and sha256 each time.

    Args:
        name: One of `PUBLISHED`.
        cache: A folder for downloads.
        progress: Called with the bytes that are here and the bytes of all files.

    Raises:
        UserError: An unknown name, no network and nothing in the cache (the error says which file
            to put where), a package that is missing, or a file that is not the published one.
    """
    return published(name).fetch(cache, progress)


def local(name: str, path: Path) -> PublishedFiles:
    """A published corpus from files that are here, for `--from PATH`.

    Args:
        name: One of `PUBLISHED`.
        path: For text8 a file that holds its text, packed in whatever `open_text` reads; for
            tinystories the folder of its .parquet files, with or without the folder `data`.

    Raises:
        UserError: An unknown name, or files that are missing or not the published ones.
    """
    return published(name).local(path)


def _check_file(path: Path, file: PublishedFile) -> None:
    try:
        found = path.stat().st_size
        reason = f"has {found:,} bytes, not {file.bytes:,}" if found != file.bytes else ""
        if not reason and digest(path) != file.sha256:
            reason = "has another sha256"
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    if reason:
        # in the hub's cache the name is a link; without what it leads to the file is got again
        raise UserError(
            f"{path.resolve()}: is not {file.name} as published ({reason}); delete it and try again"
        )
