"""Checkpoint folders: written whole or not at all, checked byte for byte when they are read."""

import hashlib
import json
import math
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from resroute.config import UserError, from_dict, to_dict
from resroute.data import Tokenizer, tokenizer_from_dict
from resroute.files import digest, new_folder, parse_object, read_text, write_json
from resroute.training.config import TrainConfig
from resroute.training.distributed import OtherRankError, World
from resroute.training.tensors import (
    REMEDY,
    Groups,
    read_gathered,
    read_sharded,
    shard_sizes,
    write_gathered,
    write_sharded,
)

FORMAT_VERSION = 2
# the first had no checksums, and kept the state of a random generator that runs no longer need
_OLDER = 1
_OBSOLETE = frozenset({"random_state"})
_NAME = re.compile(r"step_(\d{6,})")
_SHARD = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")
# a vocabulary of a million symbols fits
_LARGEST_STATE = 2**26

Layout = Literal["gathered", "sharded"]


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What a run needs to go on exactly, besides its tensors and its configuration."""

    step: int
    best_validation_loss: float | None
    """Least validation loss so far."""
    validation_loss: float | None
    """Of the weights in this checkpoint, where they were evaluated."""
    seconds: float
    """Time spent on the run so far."""
    numerics: dict[str, Any]
    """What the bits of a result depend on besides the configuration; empty in old checkpoints."""


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint whose files are all there and hold what was written."""

    path: Path
    progress: Progress
    config: TrainConfig
    tokenizer: Tokenizer
    layout: Layout

    def read(self, templates: Groups, world: World | None = None) -> None:
        """Fill tensors with what was saved; on several processes each fills its share.

        Raises:
            UserError: A name, shape, type or value that does not fit.
        """
        if self.layout == "sharded":
            read_sharded(self.path, templates, world or World())
        else:
            read_gathered(self.path, templates, ignored=_OBSOLETE)


def save(
    folder: Path,
    groups: Groups,
    progress: Progress,
    config: TrainConfig,
    tokenizer: Tokenizer,
    world: World,
) -> Path:
    """Write `step_000500` below a run's checkpoint folder, then drop what is not kept.

    Kept are the latest `config.keep` checkpoints and the one of least validation loss. Every
    process calls it.

    Raises:
        UserError: The disk does not take it; earlier checkpoints stay as they are.
    """
    target = folder / f"step_{progress.step:06d}"
    failure: UserError | None = None
    try:
        _write(target, groups, progress, config, tokenizer, world)
    except OtherRankError:
        raise
    except UserError as error:
        failure = error
    # said by the main process, known to all
    world.from_main(lambda: _raise(failure))
    _raise(failure)
    if world.is_main:
        for old in _not_kept(folder, config.keep):
            # a link is someone's own doing; what cannot be removed costs room and no run
            if not old.is_symlink():
                shutil.rmtree(old, ignore_errors=True)
    world.wait()
    return target


def _raise(failure: UserError | None) -> None:
    if failure is not None:
        raise failure


def _write(
    target: Path,
    groups: Groups,
    progress: Progress,
    config: TrainConfig,
    tokenizer: Tokenizer,
    world: World,
) -> None:
    with _new_folder(target, world) as new:
        if config.checkpoint_layout == "sharded":
            write_sharded(new, groups)
        else:
            write_gathered(new if world.is_main else None, groups, world)
        if world.is_main:
            if config.checkpoint_layout == "sharded":
                shard_sizes(new)
            write_json(new / "state.json", _state(new, progress, config, tokenizer))


@contextmanager
def _new_folder(target: Path, world: World) -> Iterator[Path]:
    """The folder that all processes write into, made and put in its place by the main one."""
    if not world.is_main:
        yield world.from_main(Path)
        return
    if target.exists():
        # too damaged to be looked at when the run went on
        set_aside(target)
    with new_folder(target) as new:
        world.from_main(lambda: new)
        yield new


def _state(
    folder: Path, progress: Progress, config: TrainConfig, tokenizer: Tokenizer
) -> dict[str, Any]:
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": digest(path)}
        for path in sorted(folder.glob("*.safetensors"))
    }
    state = {
        "format_version": FORMAT_VERSION,
        **asdict(progress),
        "layout": config.checkpoint_layout,
        "files": files,
        "config": to_dict(config),
        "tokenizer": tokenizer.to_dict(),
    }
    return {**state, "sha256": signature(state)}


def signature(state: dict[str, Any]) -> str:
    """SHA-256 of a `state.json` without its own, whatever its spaces and order."""
    rest = {key: value for key, value in state.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def candidates(folder: Path) -> list[Path]:
    """Checkpoint folders below a run's, newest first; they may be damaged."""
    found = []
    for path in folder.glob("step_*"):
        match = _NAME.fullmatch(path.name)
        if match and (path / "state.json").is_file():
            found.append((int(match[1]), path))
    return [path for _, path in sorted(found, reverse=True)]


def note_evaluation(path: Path, loss: float, best_loss: float | None) -> None:
    """Write into a checkpoint how its weights were evaluated after they were saved."""
    state = _read_state(path)
    if state.get("format_version") != FORMAT_VERSION:
        return
    state |= {"validation_loss": loss, "best_validation_loss": best_loss}
    write_json(path / "state.json", {**state, "sha256": signature(state)})


def set_aside(path: Path) -> Path:
    """Give a damaged checkpoint or file a name that is not looked for; returns it."""
    number = 1
    while (kept := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    return path.rename(kept)


def best(folder: Path) -> Path | None:
    """The checkpoint of least validation loss among those of a run that were evaluated."""
    losses = []
    for path in candidates(folder):
        try:
            loss = _read_state(path).get("validation_loss")
        except UserError:
            continue
        if isinstance(loss, float) and math.isfinite(loss):
            losses.append((loss, path.name, path))
    return min(losses)[2] if losses else None


def _not_kept(folder: Path, keep: int) -> list[Path]:
    best_path = best(folder)
    return [path for path in candidates(folder)[keep:] if path != best_path]


def open_checkpoint(path: Path, *, checks_files: bool = True) -> Saved:
    """Read what a checkpoint folder says of itself and check its files against it.

    Args:
        path: The folder.
        checks_files: Whether to compare every byte with its checksum, as is done first of all;
            of several processes one is enough.

    Raises:
        UserError: A missing, damaged or unknown file.
    """
    state = _read_state(path)
    version = state.get("format_version")
    # `true` equals one in Python
    if type(version) is not int or version not in (FORMAT_VERSION, _OLDER):
        raise UserError(
            f"{path}: format version {version!r} is not {FORMAT_VERSION}; read it with the "
            "version of resroute that wrote it"
        )
    file = path / "state.json"
    is_signed = version == FORMAT_VERSION or "sha256" in state
    if is_signed and (version == _OLDER or state.get("sha256") != signature(state)):
        raise UserError(f"{file}: was changed after it was written; {REMEDY}")
    try:
        saved = _saved(path, state)
        if version == FORMAT_VERSION and checks_files:
            _check_files(path, state["files"], saved)
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        if isinstance(error, UserError) and str(path) in str(error):
            raise
        raise UserError(f"{file}: incomplete ({error}); {REMEDY}") from error
    return saved


def _saved(path: Path, state: dict[str, Any]) -> Saved:
    layout = state.get("layout", "gathered")
    if layout not in ("gathered", "sharded"):
        raise ValueError(f"layout {layout!r}")
    step = state["step"]
    if type(step) is not int or step < 0:
        raise ValueError(f"step {step!r}")
    named = _NAME.fullmatch(path.name)
    if named and int(named[1]) != step:
        raise ValueError(f"step {step} in a folder of step {int(named[1])}")
    config = from_dict(TrainConfig, state["config"], where="config")
    tokenizer = tokenizer_from_dict(state["tokenizer"])
    if tokenizer.vocab_size != config.model.vocab_size:
        raise ValueError(
            f"a vocabulary of {tokenizer.vocab_size} for a model of {config.model.vocab_size}"
        )
    return Saved(
        path=path,
        progress=Progress(
            step=step,
            best_validation_loss=_number(state["best_validation_loss"]),
            validation_loss=_number(state.get("validation_loss")),
            seconds=_number(state["seconds"]) or 0.0,
            numerics=dict(state.get("numerics", {})),
        ),
        config=config,
        tokenizer=tokenizer,
        layout=layout,
    )


def _number(value: Any) -> float | None:
    if value is None:
        return None
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError(f"{str(value)[:40]!r} is no finite number")
    return float(value)


def _read_state(path: Path) -> dict[str, Any]:
    file = path / "state.json"
    if file.is_file() and file.stat().st_size > _LARGEST_STATE:
        raise UserError(f"{file}: longer than any that was written; {REMEDY}")
    return parse_object(read_text(file, REMEDY), str(file), REMEDY)


def _check_files(path: Path, files: dict[str, Any], saved: Saved) -> None:
    """Compare each file with its size and checksum.

    Raises:
        UserError: Another name than checkpoints have, or a missing or changed file.
    """
    groups = ["model", "optimizer", *(["ema"] if saved.config.ema_decay is not None else [])]
    whole = [f"{group}.safetensors" for group in groups]
    if saved.layout == "gathered" and not set(whole) <= files.keys():
        raise ValueError(f"it lists no {next(name for name in whole if name not in files)}")
    for name, about in files.items():
        is_known = _SHARD.fullmatch(name) or name in whole
        # names come from the file: one that leads elsewhere is not followed
        if not is_known or (path / name).is_symlink():
            raise UserError(f"{path}: names an unknown file {name[:200]!r}; {REMEDY}")
        file = path / name
        try:
            size = file.stat().st_size
            is_whole = size == about["bytes"] and digest(file) == about["sha256"]
        except FileNotFoundError:
            raise UserError(f"{file}: missing; {REMEDY}") from None
        except OSError as error:
            raise UserError(f"{file}: cannot be read ({error.strerror}); {REMEDY}") from None
        if not is_whole:
            what = "truncated" if size < about["bytes"] else "damaged"
            raise UserError(f"{file}: {what}; {REMEDY}")
    if saved.layout == "sharded" and {p.name for p in path.glob("*.safetensors")} - files.keys():
        raise UserError(f"{path}: has shards of something else; {REMEDY}")
