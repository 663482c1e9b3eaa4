"""Helpers for tests: of our residual methods, and of those that people write themselves."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from resroute.config import fingerprint
from resroute.core import inverse_rms
from resroute.data import prepare_storyworld
from resroute.model import GPT, GPTConfig
from resroute.residual import (
    HAARES,
    WAV,
    BlockAttnRes,
    DeltaAttnRes,
    FullAttnRes,
    LayerScale,
    Policy,
    PreNorm,
    ResidualConfig,
    ReZero,
)
from resroute.training import TrainConfig, train
from resroute.training.metrics import MetricsFile

PARITY_EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class Stack:
    """Sublayers `f_s(h) = tanh((h * r(h)) @ weights[s])`, those of the parity cases."""

    embedding: Tensor
    """(..., D)."""
    weights: Tensor
    """(sites, D, D)."""

    def run(self, policy: Policy[Any]) -> tuple[Tensor, Tensor]:
        """Reads (sites, ..., D) and readout (..., D) of a policy over the stack."""
        stream, reads = policy.start(self.embedding), []
        for site, weight in enumerate(self.weights):
            read = policy.read(stream, site)
            reads.append(read)
            normalised = read * inverse_rms(read, PARITY_EPS).unsqueeze(-1).to(read.dtype)
            stream = policy.write(stream, site, torch.tanh(normalised @ weight))
        return torch.stack(reads), policy.finish(stream)


def random_stack(
    num_sites: int, dim: int, *, tokens: int = 5, seed: int = 0, dtype: torch.dtype = torch.float64
) -> Stack:
    """A stack with random embedding and weights, both requiring gradients."""
    generator = torch.Generator().manual_seed(seed)
    embedding = torch.randn(tokens, dim, generator=generator, dtype=torch.float64)
    weights = torch.randn(num_sites, dim, dim, generator=generator, dtype=torch.float64)
    return Stack(
        embedding=embedding.to(dtype).requires_grad_(),
        weights=(weights / dim**0.5).to(dtype).requires_grad_(),
    )


def randomise(policy: Policy[Any], *, seed: int = 0, std: float = 0.5) -> None:
    """Move every parameter off its initial value, so that no gradient vanishes by chance."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in _sorted_parameters(policy):
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(std * noise.to(parameter.dtype))


def _sorted_parameters(policy: Policy[Any]) -> Iterator[tuple[str, Tensor]]:
    yield from sorted(policy.named_parameters())


def small_gpt_config(**options: Any) -> GPTConfig:
    """A shape that tests in milliseconds; `options` replace fields."""
    shape = {"vocab_size": 11, "context": 8, "num_layers": 4, "num_heads": 4, "dim": 16}
    return GPTConfig(**{**shape, **options})


def small_gpt(*, seed: int = 0, **options: Any) -> GPT:
    """A model of `small_gpt_config`, its weights drawn from `seed`."""
    torch.manual_seed(seed)
    return GPT(small_gpt_config(**options))


GOLDEN: dict[str, ResidualConfig] = {
    "pre_norm": PreNorm(),
    "re_zero": ReZero(),
    "layer_scale": LayerScale(),
    "full_attn_res": FullAttnRes(),
    "block_attn_res": BlockAttnRes(num_blocks=2),
    "block_attn_res-gated": BlockAttnRes(num_blocks=2, gated=True),
    "delta_attn_res": DeltaAttnRes(),
    "delta_attn_res-blocks": DeltaAttnRes(num_blocks=2),
    "wav": WAV(num_blocks=2),
    "wav-haares": HAARES(num_blocks=2),
    "wav-learned": WAV(num_blocks=2, learn_bases=True, details_in_readout=True),
}
"""Methods whose first losses are kept in tests/golden/losses.json."""


def golden_losses(residual: ResidualConfig, folder: Path) -> list[float]:
    """Training losses of ten float32 steps of a small model on the CPU.

    Args:
        residual: The method.
        folder: Where the corpus and the run go; the corpus is reused.
    """
    corpus = prepare_storyworld(folder / "corpus", characters=20_000)
    model = GPTConfig(
        vocab_size=corpus.tokenizer.vocab_size,
        context=64,
        num_layers=4,
        num_heads=2,
        dim=32,
        residual=residual,
    )
    config = TrainConfig(
        model=model,
        data=str(corpus.path),
        out=str(folder / fingerprint(model)),
        steps=10,
        batch_size=4,
        learning_rate=3e-2,
        warmup_steps=2,
        evaluation_windows=1,
        log_every=1,
        precision="float32",
        device="cpu",
    )
    summary = train(config, fresh=True)
    records = MetricsFile(Path(summary["path"]) / "metrics.jsonl").read()
    return [record["loss"] for record in records if record["kind"] == "train"]
