"""Everything that decides the course of one training run."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from resroute.config import UserError, fingerprint, to_dict
from resroute.model import GPTConfig

# where a run reads and writes and how often it reports does not change what it computes
_NOT_IDENTITY = (
    "data",
    "out",
    "device",
    "backend",
    "log_every",
    "evaluate_every",
    "checkpoint_every",
)

# more than any machine does; keeps numbers within those of torch and numpy
_MOST = 10**9


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Settings of one run. Batches are a function of the corpus, `seed` and the step alone."""

    model: GPTConfig
    data: str
    """Corpus folder, as `resroute data prepare` writes it."""
    out: str | None = None
    """Run folder; None is `runs/train/<method>-L<layers>-s<seed>-<fingerprint>`."""
    steps: int = 1000
    """Optimizer steps."""
    batch_size: int = 8
    """Windows a step, over all its micro-batches."""
    accumulation: int = 1
    """Micro-batches a step; divides `batch_size`."""
    learning_rate: float = 1e-3
    """Peak of the schedule: linear warm-up, then a cosine."""
    final_learning_rate: float = 0.1
    """Where the cosine ends, as a share of the peak."""
    warmup_steps: int = 50
    weight_decay: float = 0.1
    """Of matrices alone; policy parameters, norms and embeddings have none."""
    beta1: float = 0.9
    beta2: float = 0.95
    clip_norm: float = 1.0
    """Largest gradient norm; longer gradients are scaled down to it."""
    seed: int = 0
    """Of initial weights, batches and dropout."""
    evaluate_every: int = 100
    """Steps between evaluations; the last step is always evaluated."""
    evaluation_windows: int = 64
    """Most windows of the validation split that an evaluation reads."""
    log_every: int = 10
    checkpoint_every: int = 100
    """Steps between checkpoints; the last step always gets one."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """bfloat16 is autocast; auto takes it on GPUs and on CPUs with AMX."""
    device: str = "auto"
    """auto takes CUDA, then MPS, then the CPU."""
    backend: Literal["auto", "reference", "lean", "native", "triton"] = "auto"
    """Who computes the depth routing, see `resroute.backend`; auto takes the fastest that can."""
    compile: bool = False
    """Compile sublayers with torch.compile."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "accumulation", "evaluation_windows"):
            self._within(name, 1, _MOST)
        for name in ("evaluate_every", "log_every", "checkpoint_every"):
            self._within(name, 1, _MOST)
        for name in ("steps", "warmup_steps", "weight_decay"):
            self._within(name, 0, _MOST)
        self._within("seed", 0, 2**63 - 1)
        if self.batch_size % self.accumulation:
            raise UserError(
                f"batch_size must be divisible by accumulation, got {self.batch_size} and "
                f"{self.accumulation}"
            )
        for name in ("learning_rate", "clip_norm"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise UserError(f"{name} must be a finite number above 0, got {value}")
        for name in ("final_learning_rate", "beta1", "beta2"):
            value = getattr(self, name)
            if not 0 <= value <= 1 or (value == 1 and name != "final_learning_rate"):
                raise UserError(f"{name} must lie between 0 and 1, got {value}")

    def _within(self, name: str, least: int, most: int) -> None:
        value = getattr(self, name)
        if not least <= value <= most:
            raise UserError(f"{name} must be at least {least} and at most {most}, got {value}")

    def identity(self, corpus_fingerprint: str) -> dict[str, Any]:
        """What two runs must share to be the same run."""
        fields = {k: v for k, v in to_dict(self).items() if k not in _NOT_IDENTITY}
        return {**fields, "corpus": corpus_fingerprint}

    def run_name(self, corpus_fingerprint: str) -> str:
        """`<method>-L<layers>-s<seed>-<fingerprint>`."""
        method = self.model.residual.type_name.replace("_", "-")
        digits = fingerprint(self.identity(corpus_fingerprint))
        return f"{method}-L{self.model.num_layers}-s{self.seed}-{digits}"
