"""Checkpoints: safetensors and JSON, written whole or not at all, checked when read."""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from resroute.config import UserError, from_dict, to_dict
from resroute.data import CharTokenizer
from resroute.files import new_folder, read_json, write_json
from resroute.model import GPT
from resroute.training.config import TrainConfig

FORMAT_VERSION = 1
KEPT = 2
# a folder of checkpoints is read from its newest on
_REMEDY = "use another checkpoint (without this folder the one before it is taken)"
_NAME = re.compile(r"step_(\d{6,})")
_FILES = ("model.safetensors", "optimizer.safetensors", "state.json")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What a run needs to go on exactly, besides its configuration."""

    step: int
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    random_state: Tensor
    """Of torch's CPU generator, which dropout draws from."""
    best_validation_loss: float | None
    seconds: float
    """Time spent on the run so far."""


def save(
    folder: Path, checkpoint: Checkpoint, config: TrainConfig, tokenizer: CharTokenizer
) -> Path:
    """Write `step_000500` below a run's checkpoint folder, then drop all but the latest two."""
    target = folder / f"step_{checkpoint.step:06d}"
    # left by a run that went on from before it, since it was incomplete
    shutil.rmtree(target, ignore_errors=True)
    # safetensors wants plain, contiguous memory
    model = {name: tensor.contiguous() for name, tensor in checkpoint.model.items()}
    state = {**checkpoint.optimizer, "random_state": checkpoint.random_state}
    with new_folder(target) as new:
        for name, tensors in (("model", model), ("optimizer", state)):
            try:
                save_file(tensors, new / f"{name}.safetensors")
            except SafetensorError as error:
                raise UserError(f"{target}: cannot be written ({error}); check the disk") from None
        write_json(
            new / "state.json",
            {
                "format_version": FORMAT_VERSION,
                "step": checkpoint.step,
                "best_validation_loss": checkpoint.best_validation_loss,
                "seconds": checkpoint.seconds,
                "config": to_dict(config),
                "tokenizer": tokenizer.to_dict(),
            },
        )
    for old in _complete(folder)[:-KEPT]:
        shutil.rmtree(old)
    return target


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint below a run's checkpoint folder."""
    found = _complete(folder)
    return found[-1] if found else None


def read(path: Path) -> tuple[Checkpoint, TrainConfig, CharTokenizer]:
    """Read a checkpoint folder.

    Raises:
        UserError: A missing, damaged or unknown file, or non-finite weights.
    """
    remedy = _REMEDY
    state = read_json(path / "state.json", remedy)
    if state.get("format_version") != FORMAT_VERSION:
        raise UserError(
            f"{path}: format version {state.get('format_version')!r} is not {FORMAT_VERSION}; "
            "read it with the version of resroute that wrote it"
        )
    try:
        config = from_dict(TrainConfig, state["config"], where=f"{path}: config")
        tokenizer = CharTokenizer.from_dict(state["tokenizer"])
        step, seconds = int(state["step"]), float(state["seconds"])
        best = state["best_validation_loss"]
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path / 'state.json'}: incomplete ({error}); {remedy}") from error
    optimizer = _tensors(path / "optimizer.safetensors")
    if "random_state" not in optimizer:
        raise UserError(f"{path / 'optimizer.safetensors'}: no random_state; {remedy}")
    checkpoint = Checkpoint(
        step=step,
        model=_tensors(path / "model.safetensors"),
        random_state=optimizer.pop("random_state"),
        optimizer=optimizer,
        best_validation_loss=best,
        seconds=seconds,
    )
    return checkpoint, config, tokenizer


def load(path: str | Path) -> tuple[GPT, CharTokenizer, TrainConfig]:
    """Load a model from a run folder (its newest checkpoint) or from a checkpoint folder.

    Returns:
        The model on the CPU in evaluation mode, its tokenizer, and the run's configuration.

    Raises:
        UserError: No complete checkpoint there, or a damaged one.
    """
    path = Path(path)
    folder = path if (path / "state.json").exists() else latest(path / "checkpoints")
    if folder is None:
        what = "has no complete checkpoint" if path.is_dir() else "does not exist"
        raise UserError(f"{path} {what}; name a run folder of `resroute train`")
    checkpoint, config, tokenizer = read(folder)
    with torch.device("meta"):
        model = GPT(config.model)
    model.to_empty(device="cpu")
    load_weights(model, checkpoint.model, folder)
    return model.eval(), tokenizer, config


def load_weights(model: GPT, weights: dict[str, Tensor], where: Path) -> None:
    """Copy weights into a model of the same shape.

    Raises:
        UserError: Missing, unknown, misshapen or non-finite weights; names the first.
    """
    expected = model.state_dict()
    for problem, names in (
        ("lacks", [name for name in expected if name not in weights]),
        ("has an unknown weight", [name for name in weights if name not in expected]),
    ):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise UserError(f"{where} {problem} {names[0]}{more}; use another checkpoint")
    for name, tensor in weights.items():
        if tensor.shape != expected[name].shape:
            raise UserError(
                f"{where}: {name} has shape {tuple(tensor.shape)}, the configuration needs "
                f"{tuple(expected[name].shape)}; use another checkpoint"
            )
        if not tensor.isfinite().all():
            raise UserError(f"{where}: {name} has non-finite values; use an earlier checkpoint")
    model.load_state_dict(weights)


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """State of an optimizer with named groups, by `<parameter>|<field>`."""
    tensors = {}
    for group in optimizer.param_groups:
        for name, parameter in zip(group["names"], group["params"], strict=True):
            for field, value in optimizer.state.get(parameter, {}).items():
                tensors[f"{name}|{field}"] = value.contiguous()
    return tensors


def restore_optimizer(
    optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor], where: Path
) -> None:
    """Put state from `optimizer_tensors` back.

    Raises:
        UserError: State of a parameter is missing, unknown or of another shape.
    """
    left = dict(tensors)
    for group in optimizer.param_groups:
        for name, parameter in zip(group["names"], group["params"], strict=True):
            state: dict[str, Any] = {}
            for field in ("step", "exp_avg", "exp_avg_sq"):
                value = left.pop(f"{name}|{field}", None)
                shape = torch.Size() if field == "step" else parameter.shape
                if value is None or value.shape != shape:
                    raise UserError(
                        f"{where}: the optimizer's {field} of {name} is missing or misshapen; "
                        "use another checkpoint"
                    )
                state[field] = value.to(parameter.device)
            optimizer.state[parameter] = state
    if left:
        raise UserError(f"{where}: unknown optimizer state {next(iter(left))}")


def _tensors(path: Path) -> dict[str, Tensor]:
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        reason = "missing" if isinstance(error, FileNotFoundError) else "damaged or truncated"
        raise UserError(f"{path}: {reason}; {_REMEDY}") from error
    return tensors


def _complete(folder: Path) -> list[Path]:
    found = []
    for path in folder.glob("step_*"):
        match = _NAME.fullmatch(path.name)
        if match and all((path / name).is_file() for name in _FILES):
            found.append((int(match[1]), path))
    return [path for _, path in sorted(found)]
