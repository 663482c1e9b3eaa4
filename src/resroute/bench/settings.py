"""What a benchmark is run with."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

import torch

from resroute import ops
from resroute.config import UserError, suggestion
from resroute.model import GPTConfig
from resroute.residual import ResidualConfig
from resroute.training.device import choose_device, choose_precision, has_cpp_compiler

VOCABULARY = 64
"""V of every model: a small one, so that the stack and not the head is timed."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a case; what is None is the case's own default."""

    layers: int = 48
    """L."""
    dim: int = 256
    """D."""
    batch: int | None = None
    """Rows: 8 where a model is trained, 2 for a read alone, 1 and then 32 for decoding."""
    context: int = 256
    """T."""
    blocks: int | None = None
    """Blocks of the methods that have them; None is four, or fewer where there are fewer layers."""
    methods: tuple[ResidualConfig, ...] = ()
    """Compared with PreNorm, in this order; none is the choice of `cases.METHODS`."""
    backends: tuple[str, ...] = ("auto",)
    """Each method is run on each of them."""
    pairs: int = 30
    """Pairs of measurements, A B A B."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """bfloat16 is autocast; auto is what training takes."""
    compile: bool | None = None
    """Compile sublayers, of both sides; None does where a step is timed and a compiler is found."""
    threads: int | None = None
    """CPU threads; None leaves torch's number."""
    device: str = "auto"

    def __post_init__(self) -> None:
        if self.dim % 2:
            raise UserError(f"dim must be even, got {self.dim}: heads have pairs of channels")
        if self.blocks is not None and self.blocks > self.layers:
            raise UserError(
                f"blocks={self.blocks} is more than the stack's {self.layers} layers; "
                f"use at most {self.layers}"
            )
        for name in self.backends:
            known = ("auto", *ops.BACKENDS)
            if name not in known:
                raise UserError(
                    f"unknown backend {name!r}{suggestion(name, known)}; use {', '.join(known)}"
                )

    @property
    def torch_device(self) -> torch.device:
        """The device that is meant."""
        return choose_device(self.device)

    @property
    def torch_precision(self) -> torch.dtype:
        """float32 or bfloat16."""
        return choose_precision(self.precision, self.torch_device)

    @property
    def compiles(self) -> bool:
        """Whether sublayers are compiled where a step is timed."""
        can_compile = self.torch_device.type != "cpu" or has_cpp_compiler()
        if self.compile and not can_compile:
            raise UserError("compile needs a C++ compiler, and none is found here; leave it out")
        return can_compile if self.compile is None else self.compile

    @property
    def num_blocks(self) -> int:
        """Blocks that methods are asked for; `ceil(L / blocks)` layers each may make fewer."""
        return min(4, self.layers) if self.blocks is None else self.blocks

    @property
    def num_heads(self) -> int:
        """Heads of width 64, at least four, as far as the width can be divided so."""
        most = max(4, self.dim // 64)
        return next(h for h in range(most, 0, -1) if self.dim % (2 * h) == 0)

    def model(self, residual: ResidualConfig) -> GPTConfig:
        """The model that carries a method."""
        return GPTConfig(
            vocab_size=VOCABULARY,
            context=self.context,
            num_layers=self.layers,
            num_heads=self.num_heads,
            dim=self.dim,
            residual=with_blocks(residual, self.num_blocks),
        )

    def served(self) -> list[str]:
        """The backends by the name of the one that serves, each once.

        Raises:
            UserError: One that cannot serve here.
        """
        return list(dict.fromkeys(served(name, self) for name in self.backends))


def served(name: str, settings: Settings) -> str:
    """The backend that serves where `name` is asked for."""
    with ops.backend(name):
        return ops.choose(settings.torch_device, torch.float32, settings.dim).backend


def blocks_made(layers: int, blocks: int) -> int:
    """Blocks that a stack has where so many are asked for; 0 where it is too shallow."""
    return math.ceil(layers / math.ceil(layers / blocks)) if blocks <= layers else 0


def with_blocks(residual: ResidualConfig, blocks: int) -> ResidualConfig:
    """A method with its number of blocks, where it has any and names none."""
    fields = {field.name for field in dataclasses.fields(residual)}
    if "num_blocks" not in fields or any(
        getattr(residual, name, None) is not None for name in ("num_blocks", "block_layers")
    ):
        return residual
    return dataclasses.replace(residual, num_blocks=blocks)  # type: ignore[call-arg]
