"""Everything that decides the course of one training run."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from resroute.config import (
    UserError,
    documented,
    fingerprint,
    from_defaults,
    require_whole,
    settle,
    to_dict,
)
from resroute.data import Order
from resroute.model import GPTConfig

# where a run computes, reads and writes, and how often it reports, does not change what it
# computes but by rounding; with dropout the split of a batch over micro-batches and processes does,
# since each draws masks of its own
_NOT_IDENTITY = (
    # the corpora themselves are part of it
    "data",
    "mix",
    "out",
    "device",
    "backend",
    "accumulation",
    "activation_checkpointing",
    "parallel",
    "deterministic",
    "log_every",
    "observe_every",
    "evaluate_every",
    "checkpoint_every",
    "checkpoint_layout",
    "keep",
    "peak_flops",
)

# more than any machine does; keeps numbers within those of torch and numpy
_MOST = 10**9


@documented
@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Settings of one run. Batches are a function of the corpus, `seed` and the step alone.

    Raises:
        UserError: A setting out of its range or of another kind than its field, or a batch size
            that `accumulation` does not divide.
    """

    model: GPTConfig
    """Its shape and method."""
    data: str
    """Corpus folder, as `resroute data prepare` writes it."""
    mix: tuple[str, ...] = ()
    """Corpora that are mixed in, as `folder=share`; the rest of the windows is of `data`."""
    order: Order = "uniform"
    """In which the train split is read, see `resroute.data.Order`."""
    out: str | None = None
    """Run folder; None is `runs/train/<method>-L<layers>-s<seed>-<fingerprint>`."""
    steps: int = 1000
    """Optimizer steps."""
    batch_size: int = 8
    """Windows a step, over all its micro-batches."""
    accumulation: int = 1
    """Micro-batches a step on each process; times the processes it divides `batch_size`."""
    learning_rate: float = 1e-3
    """Peak of the schedule: linear warm-up, then a cosine."""
    final_learning_rate: float = 0.1
    """Where the cosine ends, as a share of the peak."""
    warmup_steps: int = 50
    """Steps until the peak; the rate rises linearly."""
    weight_decay: float = 0.1
    """Of matrices alone; policy parameters, norms and embeddings have none."""
    beta1: float = 0.9
    """Of AdamW: what its mean of gradients keeps a step."""
    beta2: float = 0.95
    """Of AdamW: what its mean of their squares keeps a step."""
    clip_norm: float = 1.0
    """Largest gradient norm; longer gradients are scaled down to it."""
    seed: int = 0
    """Of initial weights, batches and dropout."""
    evaluate_every: int = 100
    """Steps between evaluations; the last step is always evaluated."""
    evaluation_windows: int = 64
    """Most windows of the validation split that an evaluation reads."""
    log_every: int = 10
    """Steps between lines of the training loss."""
    observe_every: int = 50
    """Steps between looks at the routing, on one window: weights of sources, RMS of updates."""
    checkpoint_every: int = 100
    """Steps between checkpoints; the last step always gets one."""
    keep: int = 2
    """Latest checkpoints that are kept, besides the one of least validation loss."""
    checkpoint_layout: Literal["gathered", "sharded"] = "gathered"
    """One file for the weights and one for the optimizer, or a file for each process. Either can
    be resumed on any number of processes."""
    ema_decay: float | None = None
    """Also keep an average of the weights, which forgets by this factor a step."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """bfloat16 is autocast; auto takes it on GPUs and on CPUs with AMX."""
    device: str = "auto"
    """auto takes CUDA, then MPS, then the CPU."""
    backend: Literal["auto", "reference", "lean", "native", "triton"] = "auto"
    """Who computes the depth routing, see `resroute.backend`; auto takes the fastest that can."""
    compile: bool = False
    """Compile sublayers with torch.compile."""
    activation_checkpointing: bool = False
    """Keep what layers hand on and compute the rest again in the backward pass: less memory, one
    more forward pass."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """On several processes (`torchrun`): a whole model on each, or a share of every parameter."""
    deterministic: bool = False
    """Let torch take deterministic algorithms alone, and refuse to go on where the bits would
    differ: another number of threads or processes, torch or device."""
    peak_flops: float | None = None
    """Of one device, in FLOP/s, for model FLOP utilisation; None measures a matrix product."""

    def __post_init__(self) -> None:
        settle(self)
        for name in ("batch_size", "accumulation", "evaluation_windows"):
            require_whole(name, getattr(self, name), 1, _MOST)
        for name in ("evaluate_every", "log_every", "observe_every", "checkpoint_every", "keep"):
            require_whole(name, getattr(self, name), 1, _MOST)
        for name in ("steps", "warmup_steps"):
            require_whole(name, getattr(self, name), 0, _MOST)
        require_whole("seed", self.seed, 0, 2**63 - 1)
        if not 0 <= self.weight_decay <= _MOST:
            raise UserError(
                f"weight_decay must be at least 0 and at most {_MOST}, got {self.weight_decay}"
            )
        if self.batch_size % self.accumulation:
            raise UserError(
                f"batch_size must be divisible by accumulation, got {self.batch_size} and "
                f"{self.accumulation}"
            )
        for name in ("learning_rate", "clip_norm", "peak_flops"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise UserError(f"{name} must be a finite number above 0, got {value}")
        for name in ("final_learning_rate", "beta1", "beta2", "ema_decay"):
            value = getattr(self, name)
            if value is None:
                continue
            if not 0 <= value <= 1 or (value == 1 and name != "final_learning_rate"):
                raise UserError(f"{name} must lie between 0 and 1, got {value}")

    def identity(self, corpus_fingerprint: str) -> dict[str, Any]:
        """What two runs must share to be the same run."""
        fields = {k: v for k, v in to_dict(self).items() if k not in _NOT_IDENTITY}
        return {**fields, "corpus": corpus_fingerprint}

    def run_name(self, corpus_fingerprint: str) -> str:
        """`<method>-L<layers>-s<seed>-<fingerprint>`."""
        method = self.model.residual.type_name.replace("_", "-")
        # without what is at its default, so that fields of later versions change no name
        fields = from_defaults(self)
        named = {k: v for k, v in fields.items() if k not in _NOT_IDENTITY}
        digits = fingerprint({**named, "corpus": corpus_fingerprint})
        return f"{method}-L{self.model.num_layers}-s{self.seed}-{digits}"
