"""Run folders: whose they are, whether they may be used, and what is written into them."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from resroute.config import UserError, differences, from_dict, to_dict
from resroute.data import Corpus, Mixture, vocabulary_difference
from resroute.files import (
    is_leftover,
    lock_file,
    read_json,
    remove_leftovers,
    set_aside,
    write_json,
    writing,
)
from resroute.training import checkpoint
from resroute.training.config import TrainConfig
from resroute.training.metrics import MetricsFile

FORMAT_VERSION = 1
_LOCK = ".lock"


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    """Paths of one run."""

    path: Path
    moved: Path | None = None
    """Where `fresh` has put the run that was here."""

    @property
    def checkpoints(self) -> Path:
        """Folder of checkpoint folders."""
        return self.path / "checkpoints"

    @property
    def metrics(self) -> MetricsFile:
        """The run's lines of metrics."""
        return MetricsFile(self.path / "metrics.jsonl")

    def add_session(self, step: int, environment: dict[str, Any]) -> Path | None:
        """Note in env.json on what the run starts, or goes on after `step`.

        Returns:
            Where an env.json that cannot be read is kept; its sessions are then not in the new one.
        """
        path = self.path / "env.json"
        kept = None
        sessions: Any = []
        if path.exists():
            try:
                sessions = read_json(path, "delete it").get("sessions")
            except UserError:
                sessions = None
        if not isinstance(sessions, list):
            kept, sessions = set_aside(path, "damaged"), []
        write_json(path, {"sessions": [*sessions, {"after_step": step, **environment}]})
        return kept

    def summary(self) -> dict[str, Any] | None:
        """The summary of a finished run."""
        path = self.path / "summary.json"
        if not path.exists():
            return None
        summary = read_json(path, "start over with --fresh")
        if summary.get("format_version") != FORMAT_VERSION:
            raise UserError(
                f"{path}: format version {summary.get('format_version')!r} is not "
                f"{FORMAT_VERSION}; start over with --fresh"
            )
        return summary


class RunInUseError(UserError):
    """Another process is training in the folder."""


class RunLock:
    """Keeps a second run out of a folder; the system opens it again however the holder ends."""

    def __init__(self) -> None:
        self.warning: str | None = None
        """Said where the file system has no locks."""
        self._held: FileLock | None = None

    def take(self, path: Path) -> None:
        """Lock a run folder, which exists.

        Raises:
            RunInUseError: Another process has it.
        """
        self.release()
        try:
            self._held = lock_file(path / _LOCK, timeout=0)
        except Timeout:
            raise RunInUseError(
                f"{path} is in use by another run; wait for it, or give another folder with --out"
            ) from None
        if self._held is None:
            self.warning = f"{path}: no locks on this file system; start no second run there"

    def release(self) -> None:
        """Open it again."""
        if self._held is not None:
            self._held.release()
            self._held = None

    def __enter__(self) -> "RunLock":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def claim(
    config: TrainConfig, corpus: Corpus | Mixture, lock: RunLock, *, resume: bool, fresh: bool
) -> RunFolder:
    """Find or make the folder of a run, without ever overwriting another's.

    A finished run of the same configuration is handed back as it is; its `summary` is not None.
    Any other is locked.

    Raises:
        UserError: The folder is something else, belongs to another configuration, corpus or
            vocabulary, is in use, cannot be written, or holds an unfinished run and neither
            `resume` nor `fresh` is set.
    """
    path = path_of(config, corpus)
    with writing(path):
        moved = _move_aside(path, lock) if fresh and _is_run(path) else None
        run = RunFolder(path=path, moved=moved)
        if _is_run(path):
            _check_same(run, config, corpus)
            if run.summary() is not None:
                return run
        path.mkdir(parents=True, exist_ok=True)
        lock.take(path)
        # another run may have come and gone since the look at the folder
        if _is_run(path):
            _check_same(run, config, corpus)
            _go_on(run, resume=resume)
        else:
            _begin(run, config, corpus)
    return run


def _is_run(path: Path) -> bool:
    """Whether a folder holds a run; it does not where it is missing or has nothing of one yet."""
    if path.exists() and not path.is_dir():
        raise UserError(f"{path} is a file; give another folder with --out")
    # a kill may have come before the first file was in its place
    occupied = path.is_dir() and any(
        child.name != _LOCK and not is_leftover(child) for child in path.iterdir()
    )
    if occupied and not (path / "config.json").is_file():
        raise UserError(f"{path} exists and is not a run folder; give another one with --out")
    return occupied


def _move_aside(path: Path, lock: RunLock) -> Path:
    """Give the run that is here another name, while nobody can begin or go on with it."""
    if path.is_symlink():
        # renamed, it would be another link to the old run
        raise UserError(
            f"{path} is a link, which --fresh would not follow; give its folder with --out "
            f"{path.resolve()}"
        )
    lock.take(path)
    if os.name == "nt":
        # Windows renames no folder with an open file
        lock.release()
    moved = set_aside(path, "old")
    lock.release()
    return moved


def _go_on(run: RunFolder, *, resume: bool) -> None:
    if not resume and run.summary() is None:
        newest = checkpoint.newest(run.checkpoints)
        at = f"after {newest.name}" if newest else "before its first checkpoint"
        raise UserError(
            f"{run.path} holds an unfinished run, stopped {at}; --resume goes on, --fresh starts "
            "over (the old folder is kept under another name)"
        )
    # of writes that a kill has cut off
    remove_leftovers(run.path)
    remove_leftovers(run.checkpoints)


def _begin(run: RunFolder, config: TrainConfig, corpus: Corpus | Mixture) -> None:
    remove_leftovers(run.path)
    described = {"name": corpus.name, "fingerprint": corpus.fingerprint}
    write_json(
        run.path / "config.json",
        {"format_version": FORMAT_VERSION, **to_dict(config), "corpus": described},
    )


def path_of(config: TrainConfig, corpus: Corpus | Mixture) -> Path:
    """Where a run has its folder."""
    path = Path(config.out or Path("runs/train") / config.run_name(corpus.fingerprint))
    # `.` has no name beside which to keep an old run
    return path if path.name else path.resolve()


def read_config(path: Path) -> tuple[TrainConfig, dict[str, Any]]:
    """The configuration in a run folder, and what it says of its corpus."""
    file = path / "config.json"
    data = read_json(file, "start over with --fresh")
    version = data.pop("format_version", None)
    if version != FORMAT_VERSION:
        raise UserError(
            f"{file}: format version {version!r} is not {FORMAT_VERSION}; read it with the "
            "version of resroute that wrote it"
        )
    corpus = data.pop("corpus", None)
    if not isinstance(corpus, dict) or not {"name", "fingerprint"} <= corpus.keys():
        raise UserError(f"{file}: says nothing of its corpus; start over with --fresh")
    return from_dict(TrainConfig, data, where=str(file)), corpus


def _check_same(run: RunFolder, config: TrainConfig, corpus: Corpus | Mixture) -> None:
    old, old_corpus = read_config(run.path)
    if old_corpus["fingerprint"] != corpus.fingerprint:
        raise UserError(
            f"{run.path} was trained on the corpus {old_corpus['name']!r} "
            f"({old_corpus['fingerprint']}), not on {corpus.name!r} ({corpus.fingerprint}): "
            f"{_in_what(run, corpus)}\ngive another folder with --out"
        )
    theirs, ours = old.identity(corpus.fingerprint), config.identity(corpus.fingerprint)
    named = [
        f"{name} ({_at(theirs, name)} there, {_at(ours, name)} here)"
        for name in differences(theirs, ours)
    ]
    if named:
        more = f" and {len(named) - 3} more" if len(named) > 3 else ""
        raise UserError(
            f"{run.path} belongs to another configuration, which differs in "
            f"{', '.join(named[:3])}{more}\ngive another folder with --out, or start over with "
            "--fresh"
        )


def _in_what(run: RunFolder, corpus: Corpus | Mixture) -> str:
    """In what a corpus differs from the one that a run's newest checkpoint was trained on."""
    path = checkpoint.newest(run.checkpoints)
    try:
        known = None if path is None else checkpoint.open_checkpoint(path).tokenizer
    except UserError:
        # damaged: that is told where the run goes on
        known = None
    if known is None:
        return "text or vocabulary differ"
    if known == corpus.tokenizer:
        return "the text differs"
    return f"another vocabulary, {vocabulary_difference(known, corpus.tokenizer)}"


def _at(data: Any, path: str) -> Any:
    for name in path.split("."):
        data = data.get(name, "none") if isinstance(data, dict) else "none"
    return data
