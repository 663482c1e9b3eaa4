"""The case `decode`: tokens a second of cached greedy decoding against PreNorm's."""

from collections.abc import Iterator

import torch
from torch import Tensor

from resroute import ops
from resroute.bench.check import require_close
from resroute.bench.settings import Settings, served
from resroute.bench.timing import Comparison, Listener, alternate, seconds
from resroute.bench.workload import built_blocks, make_model, random_tokens
from resroute.model import GPT, generate
from resroute.residual import PreNorm

BATCHES = (1, 32)

# tokens of a prompt and of its continuation, where the context has room
_PROMPT = 32
_NEW = 64


class Decoding:
    """Greedy continuation of one batch of prompts."""

    def __init__(self, settings: Settings, model: GPT, backend: str, rows: int) -> None:
        self.model = model
        self.backend = backend
        self.device = settings.torch_device
        self.is_half = settings.precision == "bfloat16"
        half = max(1, settings.context // 2)
        self.new = min(_NEW, half)
        self.prompts = random_tokens(rows, min(_PROMPT, half), self.device)

    def tokens_per_second(self) -> float:
        """Of all rows together."""
        return len(self.prompts) * self.new / seconds(self._generate, self.device)

    def _generate(self) -> Tensor:
        half = torch.autocast(self.device.type, torch.bfloat16, enabled=self.is_half)
        with ops.backend(self.backend), half:
            return generate(self.model, self.prompts, self.new, temperature=0)


def decode(settings: Settings, listener: Listener) -> Iterator[Comparison]:
    """Time `generate` for one row and for many, methods x backends, each in turn with PreNorm.

    Models run in float32, as `resroute sample` runs them, or under autocast where bfloat16 is
    asked for; uncompiled.
    """
    plain = make_model(settings, PreNorm()).eval()
    usual = served("auto", settings)
    require_decoding(settings, plain, usual, "PreNorm")
    for residual in settings.methods:
        model = make_model(settings, residual).eval()
        for backend in settings.served():
            found = require_decoding(settings, model, backend, residual.label)
            listener.message(f"{residual.label} on {backend}: checked, decoding")
            for rows in (settings.batch,) if settings.batch else BATCHES:
                baseline = Decoding(settings, plain, usual, rows)
                measured = Decoding(settings, model, backend, rows)
                pairs = alternate(
                    baseline.tokens_per_second,
                    measured.tokens_per_second,
                    pairs=settings.pairs,
                    warmup=1,
                    label=f"{residual.label} on {backend}, batch {rows}",
                    listener=listener,
                )
                yield Comparison(
                    name=residual.label,
                    backend=backend,
                    against="PreNorm",
                    group=f"batch {rows}",
                    unit="tokens/s",
                    pairs=pairs,
                    details={
                        "num_blocks": built_blocks(model),
                        "new_tokens": measured.new,
                        "deviation": {"logits": found},
                    },
                )


@torch.no_grad()
def require_decoding(settings: Settings, model: GPT, backend: str, label: str) -> float:
    """Compare logits of cached decoding with those of one uncached pass of the reference."""
    tokens = random_tokens(2, min(8, settings.context), settings.torch_device)
    with ops.backend("reference"):
        expected = model(tokens)[0]
    cache, parts = model.new_cache(), []
    with ops.backend(backend):
        for first, last in [(0, 4), *((i, i + 1) for i in range(4, tokens.shape[1]))]:
            parts.append(model(tokens[:, first:last], cache=cache)[0])
    found = torch.cat(parts, dim=1)
    what = f"decoding with {label} on {backend}"
    return require_close(what, {"logits": found}, {"logits": expected})
