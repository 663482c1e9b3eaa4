"""What a run moves and holds, from shapes alone: bytes of one process, before any is started.

n processes, R rows (tokens of a micro-batch), D width, L layers, V vocabulary, C chunks of layers.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal, NamedTuple

import torch

from resroute.config import UserError, require_whole, settle
from resroute.model import GPTConfig
from resroute.training.activations import (
    WIDE,
    blocks_of,
    built,
    kept_at_ends,
    kept_between_layers,
    kept_by_streams,
    kept_by_sublayers,
    num_bases,
)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a run is laid out over its processes; the fields that decide bytes."""

    processes: int = 1
    parallel: Literal["ddp", "fsdp"] = "ddp"
    precision: Literal["float32", "bfloat16"] = "float32"
    windows: int = 8
    """Of one process in a step, over all its micro-batches."""
    accumulation: int = 1
    activation_checkpointing: bool = False
    average: bool = False
    """Whether an average of the weights is kept (`ema_decay`)."""

    def __post_init__(self) -> None:
        settle(self)
        for name in ("processes", "windows", "accumulation"):
            require_whole(name, getattr(self, name), 1)
        if self.windows % self.accumulation:
            raise UserError(
                f"windows must be divisible by accumulation, got {self.windows} and "
                f"{self.accumulation}"
            )

    @property
    def narrow(self) -> int:
        """Bytes of a number in matrix products."""
        return 2 if self.precision == "bfloat16" else 4

    @property
    def is_sharded(self) -> bool:
        """Whether each process has a share of every parameter."""
        return self.parallel == "fsdp" and self.processes > 1


@dataclass(frozen=True)
class Communication:
    """Bytes that a process hands to collectives in an optimizer's step, by kind.

    Counted is the large side of a collective: what is reduced, what a gather makes. Over a ring a
    process sends `(n - 1) / n` of it, an all-reduce twice that (`sent`).
    """

    all_reduce: int
    all_gather: int
    reduce_scatter: int
    policy: int
    """Of all these, what the parameters of the residual policy take."""
    sent: float
    """Bytes that leave a process where collectives run over a ring."""

    @property
    def total(self) -> int:
        """All kinds."""
        return self.all_reduce + self.all_gather + self.reduce_scatter


@dataclass(frozen=True)
class Memory:
    """Bytes of the process that holds most; what comes and goes within an operation is left out."""

    weights: int
    gradients: int
    optimizer: int
    average: int
    gathered: int
    """FSDP: what is whole while the backward pass begins, and gradients that wait."""
    casts: int
    """bfloat16 copies of weights that autocast keeps for the backward pass."""
    streams: int
    """What the residual method keeps of a micro-batch for the backward pass."""
    sublayers: int
    """What attention and MLPs keep of it."""
    ends: int
    """What embedding, final norm and loss keep."""
    recomputed: int
    """One layer's share of all these, which activation checkpointing computes again."""

    @property
    def total(self) -> int:
        """All of it at once."""
        return sum(asdict(self).values())


class _Shapes(NamedTuple):
    """Shapes of parameters by the unit that FSDP gathers together."""

    layers: list[list[torch.Size]]
    embedding: list[torch.Size]
    """Empty where it is the head too."""
    rest: list[torch.Size]
    policy: list[torch.Size]
    """Those of `rest` that are the policy's."""

    @property
    def every(self) -> list[torch.Size]:
        return [*(shape for layer in self.layers for shape in layer), *self.embedding, *self.rest]


def communication(model: GPTConfig, layout: Layout) -> Communication:
    """Bytes of collectives of one step, evaluations and reports left out.

    DDP reduces every gradient once, in float32. FSDP gathers a layer's matrices, in the run's
    precision, and the embedding for the forward and again for the backward pass of each
    micro-batch, and the rest (policy, norms, head) once; computing activations again gathers
    nothing more. It scatters reduced gradients once, in float32. Shares are of equal size, padded
    by rows where processes do not divide them. Besides, a step sums two numbers, and FSDP a norm a
    parameter.
    """
    shapes, n = _shapes(model), layout.processes
    if n == 1:
        return Communication(0, 0, 0, 0, 0.0)
    scalars = 2 * 8
    if not layout.is_sharded:
        policy = WIDE * _numbers(shapes.policy)
        reduced = WIDE * _numbers(shapes.every) + scalars
        return Communication(reduced, 0, 0, policy, 2 * (n - 1) / n * reduced)
    layers = sum(_numbers(layer, n) for layer in shapes.layers)
    embedding, rest = _numbers(shapes.embedding, n), _numbers(shapes.rest, n)
    gathered = 2 * layout.accumulation * (layout.narrow * layers + WIDE * embedding) + WIDE * rest
    reduced = WIDE * (layers + embedding + rest)
    summed = scalars + 4 * len(shapes.every)
    policy = 2 * WIDE * _numbers(shapes.policy, n) + 4 * len(shapes.policy)
    sent = (n - 1) / n * (2 * summed + gathered + reduced)
    return Communication(summed, gathered, reduced, policy, sent)


def memory(model: GPTConfig, layout: Layout) -> Memory:
    """Bytes that a process holds as the backward pass begins, where a step needs most.

    For what `training.activations` says. Of several processes; a single one, whose gradients come
    as activations go, needs less.

    Raises:
        UserError: Another method, or an option of these that keeps more.
    """
    shapes = _shapes(model)
    n = layout.processes if layout.is_sharded else 1
    share = sum(math.ceil(shape[0] / n) * shape[1:].numel() for shape in shapes.every)
    layer, rest = _numbers(shapes.layers[0], n), _numbers(shapes.rest, n)
    gathered = 0
    if layout.is_sharded:
        # whole weights of the layer at work and of the next; one gradient in both types
        gathered = WIDE * rest + (3 * layout.narrow + WIDE) * layer
        # gradients of the unit that ends the backward pass, or of all, until they are reduced
        waits = _numbers(shapes.every, n) if layout.accumulation > 1 else rest
        gathered += WIDE * waits
    casts = 0
    if layout.narrow < WIDE and not layout.is_sharded:
        layers = 1 if layout.activation_checkpointing else model.num_layers
        casts = layout.narrow * layers * _numbers(shapes.layers[0])
    rows = layout.windows // layout.accumulation * model.context
    whole = kept_by_streams(model, layout.narrow)
    sublayers = model.num_layers * kept_by_sublayers(model, layout.narrow)
    recomputed = 0
    if layout.activation_checkpointing:
        recomputed = (whole + sublayers) // model.num_layers
        whole, sublayers = kept_between_layers(model, layout.narrow), 0
    return Memory(
        weights=WIDE * share,
        gradients=WIDE * share,
        optimizer=2 * WIDE * share + 4 * len(shapes.every),
        average=WIDE * share if layout.average else 0,
        gathered=gathered,
        casts=casts,
        streams=rows * whole,
        sublayers=rows * sublayers,
        ends=kept_at_ends(model, rows, layout.narrow),
        recomputed=rows * recomputed,
    )


@dataclass(frozen=True)
class Pipeline:
    """Tensors of width D that a token takes over each boundary of a pipeline's chunks, in order.

    The backward pass takes their gradients back: as many again.
    """

    naive: tuple[int, ...]
    """All that later layers read."""
    cached: tuple[int, ...]
    """Less the sources that the receiving stage was given for an earlier chunk of its own."""
    least: tuple[int, ...]
    """Less those that it made itself there, too."""


def pipeline(model: GPTConfig, stages: int, virtual: int = 1) -> Pipeline:
    r"""What passes between P stages of V chunks each, chunk c on stage c mod P.

    A boundary passes the embedding, every finished block's sum and details, and the running
    block's sums: X, for WAV also Y and, in the block's second half, S. What is computed of them
    (1 / rms, matching, the look-ahead) is computed again. With C = P V chunks of N_p sources each
    and blocks that end where chunks do, the sources besides the embedding are

    $$ \frac{C (C - 1)}{2} N_p \qquad \frac{P (P - 1)}{2} N_p + (V - 1) P^2 N_p $$

    naive and cached (Attention Residuals, section on pipeline communication); `least` has
    $(P - 1) N_p$ in place of $P N_p$ a transition from the second chunk of a stage on.

    Raises:
        UserError: Layers that chunks do not divide, or a method as for `memory`.
    """
    require_whole("stages", stages, 2)
    require_whole("virtual", virtual, 1)
    chunks, blocks = stages * virtual, blocks_of(model)
    if model.num_layers % chunks:
        raise UserError(
            f"{stages} stages of {virtual} chunks do not divide {model.num_layers} layers; use "
            "numbers whose product does"
        )
    boundaries = range(1, chunks)
    if not blocks:
        return Pipeline(*[(1,) * len(boundaries)] * 3)
    sources, running = [1], [0]
    for chunk in boundaries:
        site = 2 * model.num_layers // chunks * chunk
        finished = sum(block.stop <= site for block, _ in blocks)
        sources.append(1 + finished * num_bases(model))
        inside = [(site - b.start, plan) for b, plan in blocks if b.start < site < b.stop]
        running.append(sum(len(plan.moments[written].streams) for written, plan in inside))

    def given(at: int, earlier: int) -> int:
        return running[at] + sources[at] - (sources[earlier] if at >= stages else 0)

    return Pipeline(
        naive=tuple(running[at] + sources[at] for at in boundaries),
        cached=tuple(given(at, at - stages) for at in boundaries),
        least=tuple(given(at, at - stages + 1) for at in boundaries),
    )


def _shapes(config: GPTConfig) -> _Shapes:
    model = built(config)
    layers: list[list[torch.Size]] = [[] for _ in range(config.num_layers)]
    found = _Shapes(layers, [], [], [p.shape for p in model.policy.parameters()])
    for name, parameter in model.named_parameters():
        part, *inner = name.split(".")
        if part == "layers" and parameter.dim() == 2:
            layers[int(inner[0])].append(parameter.shape)
        elif part == "embedding" and model.head is not None:
            found.embedding.append(parameter.shape)
        else:
            found.rest.append(parameter.shape)
    return found


def _numbers(shapes: Sequence[torch.Size], n: int = 1) -> int:
    """Numbers of tensors, rows padded to a multiple of n."""
    return sum(n * math.ceil(shape[0] / n) * shape[1:].numel() for shape in shapes)
