"""Tensors of a checkpoint on the disk: safetensors, gathered into whole files or in shards.

Nothing here is ever unpickled. A template is a tensor of the running model, its optimizer or its
average; what is read must have its name, shape and type, and goes straight into it.
"""

import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from resroute.config import UserError
from resroute.files import require_regular, writing
from resroute.training.distributed import World, local_parts, put, whole

Group = dict[str, Tensor]
Groups = dict[str, Group]
"""`model`, `optimizer` and, where a run averages its weights, `ema`; each by name."""

REMEDY = "use another checkpoint"


def write_gathered(folder: Path | None, groups: Groups, world: World) -> None:
    """Write each group to `<group>.safetensors`; `folder` is the main process's, others give None.

    Raises:
        UserError: The disk does not take a file.
    """
    failure: UserError | None = None
    for group, tensors in groups.items():
        wholes = {name: whole(tensor, wanted=world.is_main) for name, tensor in tensors.items()}
        # after a failure the others still send their shares
        if folder is None or failure is not None:
            continue
        kept = {name: tensor for name, tensor in wholes.items() if tensor is not None}
        try:
            with _writing(folder):
                save_file(kept, folder / f"{group}.safetensors")
        except UserError as error:
            failure = error
    if failure is not None:
        raise failure


def write_sharded(folder: Path, groups: Groups) -> None:
    """Write what this process holds, by torch's distributed checkpoint in its safetensors form.

    Every process calls it with the same folder.

    Raises:
        UserError: A disk does not take a file, or torch is too old for this form.
    """
    from torch.distributed.checkpoint import state_dict_saver

    try:
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

        writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    except (ImportError, TypeError):
        raise UserError(
            f"torch {torch.__version__} does not write sharded safetensors; use "
            "checkpoint_layout=gathered"
        ) from None
    with _writing(folder), _without_note():
        state_dict_saver.save(_joined(groups), storage_writer=writer)


def read_gathered(folder: Path, templates: Groups, *, ignored: frozenset[str]) -> None:
    """Fill templates from files that `write_gathered` wrote.

    Args:
        folder: The checkpoint.
        templates: Filled; the groups that are wanted, with all names of each.
        ignored: Names that older files have and nobody needs.

    Raises:
        UserError: A missing or damaged file, or a name, shape, type or value that does not fit.
    """
    for group, wanted in templates.items():
        path = folder / f"{group}.safetensors"
        require_shapes(path, gathered_shapes(path, ignored=ignored), wanted)
        with _readable(path), safe_open(path, framework="pt") as file:
            for name, template in wanted.items():
                value = file.get_tensor(name)
                _require_dtype(path, name, template, value.dtype)
                _require_finite(path, name, value)
                put(template, value)


def gathered_shapes(path: Path, *, ignored: frozenset[str]) -> dict[str, tuple[int, ...]]:
    """Shapes by name in a file that `write_gathered` wrote; reads the file's list alone.

    Raises:
        UserError: A missing or damaged file.
    """
    with _readable(path):
        require_regular(path, REMEDY)
    with _readable(path), safe_open(path, framework="pt") as file:
        names = [name for name in file.keys() if name not in ignored]  # noqa: SIM118
        return {name: tuple(file.get_slice(name).get_shape()) for name in names}


def read_sharded(folder: Path, templates: Groups, world: World) -> None:
    """Fill templates from files that `write_sharded` wrote, on any number of processes.

    Raises:
        UserError: As `read_gathered`; on every process, whichever of them finds the fault.
    """
    from torch.distributed.checkpoint import state_dict_loader
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    joined = _joined(templates)

    def check() -> None:
        sizes = shard_sizes(folder)
        groups = tuple(f"{group}:" for group in templates)
        shapes = {name: shape for name, (shape, _) in sizes.items() if name.startswith(groups)}
        require_shapes(folder, shapes, joined)
        for name, template in joined.items():
            _require_dtype(folder, name, template, sizes[name][1])

    # what follows needs every process
    world.together(check)
    with _readable(folder), _without_note():
        state_dict_loader.load(
            joined,
            storage_reader=HuggingFaceStorageReader(str(folder)),
            no_dist=world.size == 1,
        )
    is_bad = [not bool(part.isfinite().all()) for part in local_parts(list(joined.values()))]
    if world.total(float(any(is_bad)))[0]:
        raise UserError(f"{folder}: has non-finite values; use an earlier checkpoint")


def shard_sizes(folder: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and type of every tensor in the shards of a folder.

    Raises:
        UserError: A damaged file, or shards that do not add up to whole tensors.
    """
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    with _readable(folder):
        for file in folder.glob("*.safetensors"):
            require_regular(file, REMEDY)
        found = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
        sizes = {}
        for name, about in found.items():
            assert isinstance(about, TensorStorageMetadata)
            held = sum(chunk.sizes.numel() for chunk in about.chunks)
            if held != about.size.numel():
                raise UserError(
                    f"{folder}: shards of {name} are missing; sharded checkpoints need a folder "
                    "that all processes share"
                )
            sizes[name] = (tuple(about.size), about.properties.dtype)
    return sizes


def _joined(groups: Groups) -> Group:
    return {f"{g}:{name}": tensor for g, group in groups.items() for name, tensor in group.items()}


def require_shapes(where: Path, found: Mapping[str, tuple[int, ...]], wanted: Group) -> None:
    """Compare the names and shapes of a file or folder with those of templates on any device.

    Raises:
        UserError: One that does not fit.
    """
    for problem, names in (
        ("lacks", [name for name in wanted if name not in found]),
        ("has an unknown tensor", sorted(name for name in found if name not in wanted)),
    ):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise UserError(f"{where} {problem} {names[0][:200]}{more}; {REMEDY}")
    for name, template in wanted.items():
        if found[name] != tuple(template.shape):
            raise UserError(
                f"{where}: {name} has shape {found[name]}, the configuration needs "
                f"{tuple(template.shape)}; {REMEDY}"
            )


def _require_dtype(where: Path, name: str, template: Tensor, dtype: torch.dtype) -> None:
    if dtype != template.dtype:
        raise UserError(
            f"{where}: {name} is {dtype}, the configuration needs {template.dtype}; {REMEDY}"
        )


def _require_finite(where: Path, name: str, value: Tensor) -> None:
    if not value.isfinite().all():
        raise UserError(f"{where}: {name} has non-finite values; use an earlier checkpoint")


@contextmanager
def _without_note() -> Iterator[None]:
    """Without torch's note that a single process is alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def _writing(folder: Path) -> AbstractContextManager[None]:
    from torch.distributed.checkpoint.api import CheckpointException

    # the folder itself has a passing name
    return writing(folder.parent, (OSError, SafetensorError, CheckpointException))


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn what readers raise about a damaged file into one line."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(f"{path}: missing; {REMEDY}") from None
    except (
        OSError, SafetensorError, CheckpointException, KeyError, TypeError, ValueError,
        json.JSONDecodeError, RecursionError,
    ):  # fmt: skip
        raise UserError(f"{path}: damaged or truncated; {REMEDY}") from None
