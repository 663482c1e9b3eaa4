"""Several processes: who they are, what they agree on, and how a model is spread over them.

Processes are started by `torchrun`, which tells each its rank by environment variables.
"""

import dataclasses
import inspect
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from resroute.config import UserError, differences
from resroute.model import GPT, GPTConfig
from resroute.training.rendezvous import meeting_place

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

T = TypeVar("T")


# buffers are constants; newer torch has another word for it
_WORDS = inspect.signature(DistributedDataParallel).parameters
_BUFFERS_STAY: dict[str, Any] = {
    "forward_sync_buffers" if "forward_sync_buffers" in _WORDS else "broadcast_buffers": False
}

_START = "start several processes by torchrun, or unset WORLD_SIZE for one"

# gloo's threads may need the interpreter to let go of their last message; where a group is taken
# down before they have, torch 2.13 can wait for them for ever, and where the process ends, abort
_SECONDS_TO_LET_GO = 0.05


class OtherRankError(UserError):
    """A mistake that the main process says; the others stop without a word."""


@dataclasses.dataclass(frozen=True)
class World:
    """The processes of a run; a single one is a world of its own.

    Attributes:
        rank: This process, from 0.
        size: Number of processes.
        local_rank: This process among those of its machine.
        group: Of torch's, for small messages; None is the usual one.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    group: dist.ProcessGroup | None = None

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and reports."""
        return self.rank == 0

    def total(self, *values: float) -> list[float]:
        """Sums over all processes, in float64; on one process the values themselves."""
        if self.size == 1:
            return list(values)
        sums = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(sums, group=self.group)
        totals: list[float] = sums.tolist()
        return totals

    def from_main(self, make: Callable[[], T]) -> T:
        """What `make` returns on the main process, handed to all; so is a `UserError` of it."""
        if self.size == 1:
            return make()
        box: list[Any] = [None, None]
        failure: UserError | None = None
        if self.is_main:
            try:
                box[0] = make()
            except UserError as error:
                failure = error
                box[1] = str(error)
        dist.broadcast_object_list(box, src=0, group=self.group)
        if failure is not None:
            raise failure
        if box[1] is not None:
            raise OtherRankError(box[1])
        value: T = box[0]
        return value

    def together(self, make: Callable[[], T]) -> T:
        """What `make` returns on each process; a `UserError` of any stops all.

        The main process says it, and whose it is.
        """
        if self.size == 1:
            return make()
        made: list[T] = []
        problem = ""
        try:
            made.append(make())
        except UserError as error:
            problem = str(error)
        problems = [""] * self.size
        dist.all_gather_object(problems, problem, group=self.group)
        for rank, text in enumerate(problems):
            if text:
                kind = UserError if self.is_main else OtherRankError
                raise kind(f"process {rank}: {text}" if rank else text)
        return made[0]

    def require_same(self, values: dict[str, Any]) -> None:
        """Stop all where a process has other values than the main one; the main one says which.

        Raises:
            UserError: With the dotted names of the first values that differ.
        """
        if self.size == 1:
            return
        found: list[dict[str, Any]] = [{}] * self.size
        dist.all_gather_object(found, values, group=self.group)
        for rank, theirs in enumerate(found):
            if names := differences(found[0], theirs):
                kind = UserError if self.is_main else OtherRankError
                raise kind(
                    f"process {rank} was given another run than process 0, which differs in "
                    f"{', '.join(names[:3])}; give all the same command and corpus"
                )

    def wait(self) -> None:
        """Wait for all processes."""
        self.total(0.0)


@contextmanager
def join(device: str) -> Iterator[World]:
    """The world that this process belongs to: that of `torchrun`, or itself alone.

    A process group that is there already is used and left alone.

    Args:
        device: What the run's `device` says; decides who carries the messages.

    Raises:
        UserError: Variables of the environment that `torchrun` does not set like this.
    """
    if dist.is_available() and dist.is_initialized():
        # a group of someone who has NCCL alone carries no message of the CPU
        carries = "cpu:gloo" in dist.get_backend_config()
        group = None if carries else dist.new_group(backend="gloo")
        yield World(dist.get_rank(), dist.get_world_size(), _number("LOCAL_RANK", 0), group)
        return
    size, _ = _place()
    if size == 1:
        yield World()
        return
    local_rank = _number("LOCAL_RANK", 0)
    # torch would wait for it, or leave a traceback
    _number("MASTER_PORT")
    if not os.environ.get("MASTER_ADDR"):
        raise UserError(f"MASTER_ADDR is not set; {_START}")
    # a GPU that is not there is said later, by all together
    has_gpu = local_rank < torch.cuda.device_count()
    on_cuda = has_gpu and (device.startswith("cuda") or device == "auto")
    if on_cuda:
        torch.cuda.set_device(local_rank)
    # small sums and objects go over gloo: they need no GPU
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_cuda else "gloo", **meeting_place())
    try:
        yield World(dist.get_rank(), dist.get_world_size(), local_rank)
    finally:
        time.sleep(_SECONDS_TO_LET_GO)
        dist.destroy_process_group()


def is_main_process() -> bool:
    """Whether this process is the one that reports; all do where the environment does not tell."""
    try:
        return _place()[1] == 0
    except UserError:
        return True


def _place() -> tuple[int, int]:
    """How many processes there are and which this is, by what `torchrun` has set."""
    size = _number("WORLD_SIZE", 1)
    if size <= 1:
        return 1, 0
    rank = _number("RANK")
    if rank >= size:
        raise UserError(f"RANK is {rank}, but WORLD_SIZE is {size}; {_START}")
    return size, rank


def _number(name: str, default: int | None = None) -> int:
    text = os.environ.get(name, "" if default is None else str(default))
    if not (text.isascii() and text.isdecimal()):
        raise UserError(f"{name} is {repr(text) if text else 'not set'}; {_START}")
    return int(text)


class Spread:
    """A model on the processes of a world.

    `ddp` keeps a whole copy on each process and sums gradients. `fsdp` (FSDP2) keeps a share of
    every parameter: the matrices of a layer are one unit, gathered where the layer computes, in
    bfloat16 where the run computes in it; the embedding is another; the policy's parameters, the
    norms and the head are one unit in float32, gathered once for a step.

    Attributes:
        model: The model itself; its parameters are what the optimizer holds.
        forward: Called in its stead.
    """

    def __init__(
        self, config: GPTConfig, world: World, device: torch.device, kind: str, dtype: torch.dtype
    ) -> None:
        self.world = world
        self.kind = kind if world.size > 1 else "none"
        if self.kind == "fsdp":
            self.model = _sharded(config, world, device, dtype)
        else:
            self.model = GPT(config).to(device)
        self.forward: nn.Module = self.model
        if self.kind == "ddp":
            self.forward = DistributedDataParallel(
                self.model,
                device_ids=[device] if device.type == "cuda" else None,
                gradient_as_bucket_view=True,
                **_BUFFERS_STAY,
            )
            self._sort_buckets(device)

    def _sort_buckets(self, device: torch.device) -> None:
        # DDP puts gradients into the order in which its first backward pass makes them; sums over
        # more than two processes are then rounded otherwise, so that a run which goes on would
        # not be, to the bit, the one that was never stopped
        token = torch.zeros((1, 1), dtype=torch.long, device=device)
        (self.forward(token, token)[1] * 0.0).backward()
        self.model.zero_grad(set_to_none=True)

    def accumulating(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Around one micro-batch: gradients are exchanged after the last alone."""
        if self.kind == "ddp" and not is_last:
            assert isinstance(self.forward, DistributedDataParallel)
            quiet: AbstractContextManager[None] = self.forward.no_sync()
            return quiet
        if self.kind == "fsdp":
            from torch.distributed.fsdp import FSDPModule

            assert isinstance(self.model, FSDPModule)
            self.model.set_requires_gradient_sync(is_last)
            # the unit of all that is small stays whole from one micro-batch to the next
            self.model.set_reshard_after_backward(is_last, recurse=False)
        return nullcontext()

    def settle(self) -> None:
        """Let every parameter be this process's share again after a forward pass on its own."""
        if self.kind != "fsdp":
            return
        from torch.distributed.fsdp import FSDPModule

        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def _sharded(config: GPTConfig, world: World, device: torch.device, dtype: torch.dtype) -> GPT:
    """A model by FSDP2, from the weights that `GPT(config)` draws.

    Built on no device; each layer gets its weights and is sharded before the next gets any, so
    that no process holds the whole model.
    """
    # half a second, which a single process need not wait
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    with torch.device("meta"):
        model = GPT(config)
    mesh = init_device_mesh(device.type, (world.size,))
    narrow = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    # the order in which init_weights draws
    for name, part in model.named_children():
        for inner, layer in part.named_children() if name == "layers" else [("", part)]:
            prefix = f"{name}.{inner}" if inner else name
            _materialise(model, prefix, layer, device)
            matrices: list[nn.Module] = [m for m in layer.modules() if isinstance(m, nn.Linear)]
            if name == "layers":
                fully_shard(matrices, mesh=mesh, mp_policy=narrow)
    if model.head is not None:
        fully_shard(model.embedding, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _materialise(model: GPT, prefix: str, part: nn.Module, device: torch.device) -> None:
    # weights are drawn on the CPU, like those of a model that is not sharded
    part.to_empty(device="cpu")
    model.init_weights(prefix)
    part.to(device)


def whole(tensor: Tensor, *, wanted: bool) -> Tensor | None:
    """All of a tensor on the CPU, gathered where it is sharded; None where it is not `wanted`.

    Every process must ask; one that does not want it still sends its share.
    """
    full = tensor.full_tensor() if _is_sharded(tensor) else tensor
    return full.detach().cpu().contiguous() if wanted else None


def put(target: Tensor, value: Tensor) -> None:
    """Copy a whole tensor into a target, or this process's share of it where that is sharded."""
    with torch.no_grad():
        if not _is_sharded(target):
            target.copy_(value)
            return
        from torch.distributed.tensor import distribute_tensor

        local = target.to_local()
        # every process has the whole value: nothing is sent
        share = distribute_tensor(
            value.to(local.device), target.device_mesh, target.placements, src_data_rank=None
        )
        local.copy_(share.to_local())


def local_parts(tensors: Sequence[Tensor]) -> list[Tensor]:
    """This process's share of each tensor; whole ones as they are."""
    return [t.to_local() if _is_sharded(t) else t for t in tensors]


def _is_sharded(tensor: Tensor) -> "TypeGuard[DTensor]":
    # who has not imported it, which takes half a second, has no such tensor
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)
