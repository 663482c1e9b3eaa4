"""Checkpoint folders: written whole or not at all, checked byte for byte when they are read."""

import hashlib
import json
import math
import re
import shutil
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from resroute.config import UserError, from_dict, to_dict
from resroute.data import Tokenizer, tokenizer_from_dict
from resroute.files import (
    digest,
    new_folder,
    parse_object,
    read_text,
    require_regular,
    set_aside,
    write_json,
)
from resroute.training.config import TrainConfig
from resroute.training.distributed import World
from resroute.training.tensors import (
    REMEDY,
    Groups,
    gathered_shapes,
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
    """What a checkpoint folder says of itself."""

    path: Path
    progress: Progress
    config: TrainConfig
    tokenizer: Tokenizer
    layout: Layout
    files: dict[str, tuple[int, str]]
    """Bytes and SHA-256 of each file of tensors; none in the first format."""

    @property
    def groups(self) -> list[str]:
        """Names of the groups of tensors that it has."""
        return _groups(self.config)

    def place(self, group: str) -> Path:
        """Where the tensors of a group are: its file, or the folder of the shards."""
        return self.path if self.layout == "sharded" else self.path / f"{group}.safetensors"

    def check(self, groups: Iterable[str]) -> None:
        """Compare the files of some groups with their sizes and checksums.

        Raises:
            UserError: A missing or changed file, or a shard of something else.
        """
        if self.layout == "gathered":
            names = [name for group in groups if (name := f"{group}.safetensors") in self.files]
        else:
            names = list(self.files)
        for name in names:
            _check_file(self.path / name, *self.files[name])
        if self.layout == "sharded":
            found = {path.name for path in self.path.glob("*.safetensors")}
            if found - self.files.keys():
                raise UserError(f"{self.path}: has shards of something else; {REMEDY}")

    def shapes(self, group: str) -> dict[str, tuple[int, ...]]:
        """Shapes of a group's tensors by name, as the files list them: no tensor is read.

        Raises:
            UserError: A damaged file.
        """
        if self.layout == "gathered":
            return gathered_shapes(self.place(group), ignored=_OBSOLETE)
        start, sizes = f"{group}:", shard_sizes(self.path)
        names = [name for name in sizes if name.startswith(start)]
        return {name.removeprefix(start): sizes[name][0] for name in names}

    def read(self, templates: Groups, world: World | None = None) -> None:
        """Fill tensors with what was saved; on several processes each fills its share, or none.

        Raises:
            UserError: A name, shape, type or value that does not fit.
        """
        world = world or World()
        if self.layout == "sharded":
            read_sharded(self.path, templates, world)
        else:
            world.together(lambda: read_gathered(self.path, templates, ignored=_OBSOLETE))


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
    with ExitStack() as stack:
        # all write into a folder that the main process makes, and puts in its place
        new = world.from_main(lambda: _open_folder(target, stack))
        world.together(lambda: _write(new, groups, progress, config, tokenizer, world))
        world.from_main(stack.close)
    if world.is_main:
        for old in _not_kept(folder, config.keep):
            # a link is someone's own doing; what cannot be removed costs room and no run
            if not old.is_symlink():
                shutil.rmtree(old, ignore_errors=True)
    world.wait()
    return target


def _open_folder(target: Path, stack: ExitStack) -> Path:
    if target.exists():
        # too damaged to be looked at when the run went on
        set_aside(target, "damaged")
    return stack.enter_context(new_folder(target))


def _write(
    new: Path,
    groups: Groups,
    progress: Progress,
    config: TrainConfig,
    tokenizer: Tokenizer,
    world: World,
) -> None:
    if config.checkpoint_layout == "sharded":
        write_sharded(new, groups)
    else:
        write_gathered(new if world.is_main else None, groups, world)
    if world.is_main:
        if config.checkpoint_layout == "sharded":
            shard_sizes(new)
        write_json(new / "state.json", _state(new, progress, config, tokenizer))


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


def named(folder: Path) -> list[Path]:
    """Folders below a run's that have a checkpoint's name, newest first, whole or not."""
    found = [path for path in folder.glob("step_*") if _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step_")), reverse=True)


def candidates(folder: Path) -> list[Path]:
    """Checkpoint folders below a run's, newest first; they may be damaged."""
    return [path for path in named(folder) if (path / "state.json").is_file()]


def newest(folder: Path) -> Path | None:
    """The first of `candidates`, if there is one."""
    return next(iter(candidates(folder)), None)


def note_evaluation(path: Path, loss: float, best_loss: float | None) -> None:
    """Write into a checkpoint how its weights were evaluated after they were saved."""
    state = _read_state(path)
    if state.get("format_version") != FORMAT_VERSION:
        return
    state |= {"validation_loss": loss, "best_validation_loss": best_loss}
    write_json(path / "state.json", {**state, "sha256": signature(state)})


def best(folder: Path) -> Path | None:
    """The checkpoint of least validation loss among those of a run that were evaluated."""
    losses = {}
    # of equals the oldest
    for path in reversed(candidates(folder)):
        try:
            loss = _read_state(path).get("validation_loss")
        except UserError:
            continue
        if isinstance(loss, float) and math.isfinite(loss):
            losses[path] = loss
    return min(losses, key=lambda path: losses[path], default=None)


def _not_kept(folder: Path, keep: int) -> list[Path]:
    best_path = best(folder)
    return [path for path in candidates(folder)[keep:] if path != best_path]


def open_checkpoint(path: Path) -> Saved:
    """Read what a checkpoint folder says of itself; its tensors are not looked at.

    Raises:
        UserError: No such file, or one that is damaged, changed or of an unknown format.
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
        return _saved(path, state)
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        if isinstance(error, UserError) and str(path) in str(error):
            raise
        raise UserError(f"{file}: incomplete ({error}); {REMEDY}") from error


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
        files={} if state["format_version"] == _OLDER else _files(path, state, layout, config),
    )


def _groups(config: TrainConfig) -> list[str]:
    return ["model", "optimizer", *(["ema"] if config.ema_decay is not None else [])]


def _files(
    path: Path, state: dict[str, Any], layout: Layout, config: TrainConfig
) -> dict[str, tuple[int, str]]:
    """Sizes and checksums of the files that a state lists.

    Raises:
        UserError: Another name than checkpoints have, or a link.
    """
    whole = [f"{group}.safetensors" for group in _groups(config)]
    files = {}
    for name, about in state["files"].items():
        is_known = _SHARD.fullmatch(name) or name in whole
        # names come from the file: one that leads elsewhere is not followed
        if not is_known or (path / name).is_symlink():
            raise UserError(f"{path}: names an unknown file {name[:200]!r}; {REMEDY}")
        size, sha256 = about["bytes"], about["sha256"]
        if type(size) is not int or type(sha256) is not str:
            raise ValueError(f"size and checksum of {name}")
        files[name] = (size, sha256)
    if layout == "gathered" and not set(whole) <= files.keys():
        raise ValueError(f"it lists no {next(name for name in whole if name not in files)}")
    return files


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


def _check_file(file: Path, size: int, sha256: str) -> None:
    try:
        require_regular(file, REMEDY)
        found = file.stat().st_size
        is_whole = found == size and digest(file) == sha256
    except FileNotFoundError:
        raise UserError(f"{file}: missing; {REMEDY}") from None
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror}); {REMEDY}") from None
    if not is_whole:
        raise UserError(f"{file}: {'truncated' if found < size else 'damaged'}; {REMEDY}")
