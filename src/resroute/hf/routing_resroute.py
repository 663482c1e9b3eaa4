"""The residual methods of resroute in plain torch, for exported weights where it is not installed.

They have the parameters of resroute's policies, by the same names, and their values; resroute has
them faster, and its policies are taken where it is there. Formulas and papers: docs/methods.md of
resroute. Attention sublayers are even sites, MLPs odd ones.

D width, L layers. `*batch` are leading axes.
"""

import math
import random
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

try:
    from resroute.config import from_dict
    from resroute.residual import ResidualConfig
except ImportError:
    has_resroute = False
else:
    has_resroute = True

SUMS = ("pre_norm", "re_zero", "layer_scale")
ROUTED = ("full_attn_res", "block_attn_res", "delta_attn_res", "wav")
METHODS = (*SUMS, *ROUTED)
"""Types of `residual` for which there is a formula here."""
BASES = ("phase", "split", "duplicate", "duplicate_2", "random", "random_2")
"""Detail bases of `wav` that are known here."""


class Source(NamedTuple):
    """A tensor (*batch, D) that sites can attend to, with `1 / rms` and its matching factor."""

    value: Tensor
    inverse_rms: Tensor
    scale: Tensor | None = None


class Stream(NamedTuple):
    """What is carried over depth: the next site and what it can read."""

    site: int
    total: Tensor | None
    """The plain sum, where the method reads it."""
    sources: tuple[Source, ...] = ()
    """The embedding, then state and details of each finished block."""
    running: tuple[Tensor, ...] = ()
    """State and details of the running block so far."""


def build_policy(residual: dict[str, Any], num_layers: int, dim: int) -> Any:
    """The policy of a residual method: resroute's where it is installed, else one of this file.

    Raises:
        ValueError: A method or an option that is not known.
    """
    with warnings.catch_warnings():
        if torch.get_default_device().type == "meta":
            # weights are about to be loaded: notes on the shape were for their training
            warnings.simplefilter("ignore")
        if has_resroute:
            config = from_dict(ResidualConfig, residual, where="residual")  # type: ignore[type-abstract]
            return config.build(num_layers, dim)
    name = residual["type"]
    if name not in METHODS:
        raise ValueError(f"unknown residual method {name!r}; install resroute, which may have it")
    policy: Sums | Routed = (
        Sums(residual, num_layers, dim) if name in SUMS else Routed(residual, num_layers, dim)
    )
    policy.reset_parameters()
    return policy


class _Policy(nn.Module, ABC):
    """Reads and writes as `resroute.Policy` has them."""

    num_sites: int

    @abstractmethod
    def read(self, stream: Stream, site: int) -> Tensor:
        """What the sublayer at `site` is given (*batch, D), before its norm."""

    def read_normalised(
        self, stream: Stream, site: int, norm: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Stream]:
        """The read after a norm, and the stream to go on with."""
        return norm(self.read(stream, site)), stream

    def finish(self, stream: Stream) -> Tensor:
        """The readout (*batch, D)."""
        return self.read(stream, self.num_sites)


class Sums(_Policy):
    """PreNorm, ReZero and LayerScale: `h <- h + c_s u`."""

    def __init__(self, options: dict[str, Any], num_layers: int, dim: int) -> None:
        super().__init__()
        self.options, self.num_layers, self.num_sites = options, num_layers, 2 * num_layers
        name = options["type"]
        self.alpha = nn.Parameter(torch.empty(num_layers)) if name == "re_zero" else None
        is_scaled = name == "layer_scale"
        self.scale = nn.Parameter(torch.empty(self.num_sites, dim)) if is_scaled else None

    def reset_parameters(self) -> None:
        """Close layers of ReZero; LayerScale at its initial gain."""
        if self.alpha is not None:
            nn.init.zeros_(self.alpha)
        if self.scale is not None:
            gain = self.options.get("init", 1e-4)
            if gain is None:
                gain = 0.1 if self.num_layers <= 18 else 1e-5 if self.num_layers <= 24 else 1e-6
            nn.init.constant_(self.scale, gain)

    def start(self, embedding: Tensor) -> Stream:
        """Open a stream on the embedding (*batch, D)."""
        return Stream(0, embedding)

    def read(self, stream: Stream, site: int) -> Tensor:
        """The sum so far."""
        assert stream.total is not None
        return stream.total

    def write(self, stream: Stream, site: int, update: Tensor) -> Stream:
        """Add an update, times its coefficient."""
        total = self.read(stream, site)
        coefficient: float | Tensor = 1.0
        if self.alpha is not None:
            coefficient = self.alpha[site // 2]
        elif self.scale is not None:
            coefficient = self.scale[site]
        return Stream(site + 1, accumulate(total, update, coefficient, total.dtype))


class Routed(_Policy):
    """A depth-wise softmax over the embedding, finished blocks and the running block."""

    def __init__(self, options: dict[str, Any], num_layers: int, dim: int) -> None:
        super().__init__()
        self.num_sites = 2 * num_layers
        name, known = options["type"], options.get
        self.eps: float = known("eps", 1e-6)
        self.additive = name == "delta_attn_res"
        self.embedding_source: bool = known("embedding_source", True)
        self.blocks = _blocks(options, num_layers)
        self.block_of = [block for block in self.blocks for _ in block]
        self.bases: tuple[str, ...] = tuple(known("bases", ("phase", "split")))
        if name != "wav":
            self.bases = ()
        self.matching: str = known("matching", "detached")
        self.rho_max: float | None = known("rho_max", 2.0)
        self.bias_running: bool = known("bias_running", True)
        self.details_in_readout: bool = known("details_in_readout", False)
        self.initial_bias: float = known("detail_bias", -2.0)
        seed = known("basis_seed", 0) * 100_003
        self.signs = [
            [_signs(basis, block, seed + index)[site - block.start] for basis in self.bases]
            for index, block in enumerate(self.blocks)
            for site in block
        ]
        rows, count = self.num_sites + (not self.additive), len(self.bases)
        self.query = nn.Parameter(torch.empty(rows, dim))
        self.key_gain = nn.Parameter(torch.empty(rows, dim)) if known("key_gain", True) else None
        self.gate = nn.Parameter(torch.empty(rows)) if known("gated", False) else None
        self.detail_bias: Tensor | None = None
        self.basis: Tensor | None = None
        if self.bases:
            bias = torch.empty(self.num_sites + self.details_in_readout, count)
            if known("learn_detail_bias", True):
                self.detail_bias = nn.Parameter(bias)
            else:
                del self.detail_bias
                self.register_buffer("detail_bias", bias)
            if known("learn_bases", False):
                self.basis = nn.Parameter(torch.empty(self.num_sites, count))

    def reset_parameters(self) -> None:
        """Zero queries and gates, unit gains, biases and coefficients as they start."""
        nn.init.zeros_(self.query)
        if self.key_gain is not None:
            nn.init.ones_(self.key_gain)
        if self.gate is not None:
            nn.init.zeros_(self.gate)
        if self.detail_bias is not None:
            nn.init.constant_(self.detail_bias, self.initial_bias)
        if self.basis is not None:
            with torch.no_grad():
                self.basis.copy_(torch.tensor(self.signs))

    def start(self, embedding: Tensor) -> Stream:
        """Open a stream on the embedding (*batch, D)."""
        keeps_total = self.additive or self.gate is not None
        sources = (self._source(embedding),) if self.embedding_source else ()
        return Stream(0, embedding if keeps_total else None, sources)

    def write(self, stream: Stream, site: int, update: Tensor) -> Stream:
        """Add an update to the running block, and close the block at its last site."""
        total, sources, dtype = stream.total, stream.sources, _like(stream).dtype
        if total is not None:
            total = accumulate(total, update, 1.0, dtype)
        sums = stream.running or (None,) * (1 + len(self.bases))
        running = tuple(
            accumulate(one, update, coefficient, dtype)
            for one, coefficient in zip(sums, (1.0, *self._coefficients(site)), strict=True)
        )
        if site + 1 == self.block_of[site].stop:
            sources, running = (*sources, *self._block_sources(running)), ()
        return Stream(site + 1, total, sources, running)

    def read(self, stream: Stream, site: int) -> Tensor:
        """Mix what the site, or the readout, attends to."""
        total, like = stream.total, _like(stream)
        pool = stream.sources
        if stream.running:
            pool = (*pool, *self._block_sources(stream.running))
        is_readout = site == self.num_sites
        # place by place: the detail's basis, -1 for the embedding and for sums
        width = 1 + len(self.bases)
        bases = [(place - 1) % width - 1 if place else -1 for place in range(len(pool))]
        kept = [
            place
            for place in range(len(pool))
            if bases[place] < 0 or not is_readout or self.details_in_readout
        ]
        if not kept or (self.additive and (site == 0 or is_readout)):
            assert total is not None
            return total
        dtype = compute_dtype(like.dtype)
        key = self.query[site].to(dtype)
        if self.key_gain is not None:
            key = key * self.key_gain[site].to(dtype)
        logits = []
        for place in kept:
            source, basis = pool[place], bases[place]
            logit = source.inverse_rms * (source.value.to(dtype) * key).sum(-1)
            if basis >= 0 and (self.bias_running or place < len(stream.sources)):
                assert self.detail_bias is not None
                logit = logit + self.detail_bias[site, basis].to(dtype)
            logits.append(logit)
        mix = torch.zeros_like(like, dtype=dtype)
        for place, weight in zip(kept, torch.stack(logits).softmax(0).unbind(0), strict=True):
            source = pool[place]
            share = weight if source.scale is None else weight * source.scale
            mix = mix + share.unsqueeze(-1) * source.value.to(dtype)
        if total is None:
            return mix.to(like.dtype)
        base = total.to(dtype)
        step = mix if self.additive else mix - base
        if self.gate is not None:
            step = self.gate[site].to(dtype) * step
        return (base + step).to(like.dtype)

    def _coefficients(self, site: int) -> tuple[float | Tensor, ...]:
        """What an update is multiplied by in each detail."""
        if self.basis is None:
            return tuple(self.signs[site])
        block = self.block_of[site]
        basis = self.basis.to(compute_dtype(self.basis.dtype))
        return (basis[site] - basis[block.start : block.stop].mean(0)).unbind(0)

    def _block_sources(self, running: tuple[Tensor, ...]) -> tuple[Source, ...]:
        """A block's sum, and its details with the factors that match their size to the sum's."""
        state = self._source(running[0])
        details = []
        for value in running[1:]:
            detail = self._source(value)
            if self.matching != "off":
                scale = detail.inverse_rms / state.inverse_rms
                scale = scale if self.rho_max is None else scale.clamp(max=self.rho_max)
                scale = scale.detach() if self.matching == "detached" else scale
                detail = detail._replace(scale=scale)
            details.append(detail)
        return (state, *details)

    def _source(self, value: Tensor) -> Source:
        wide = value.to(compute_dtype(value.dtype))
        return Source(value, torch.rsqrt(wide.square().mean(-1) + self.eps))


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """What norms, logits and mixes are computed in: float32, or float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def accumulate(
    total: Tensor | None, update: Tensor, coefficient: float | Tensor, dtype: torch.dtype
) -> Tensor:
    """`total + coefficient * update` in `dtype`, rounded once."""
    wide = compute_dtype(dtype)
    term = update.to(wide)
    if isinstance(coefficient, Tensor):
        term = term * coefficient.to(wide)
    elif coefficient != 1.0:
        term = term * coefficient
    return (term if total is None else total.to(wide) + term).to(dtype)


def _like(stream: Stream) -> Tensor:
    return stream.sources[0].value if stream.total is None else stream.total


def _blocks(options: dict[str, Any], num_layers: int) -> list[range]:
    """Sites of each block; where every update is a source, a site is a block."""
    number, layers = options.get("num_blocks"), options.get("block_layers")
    name, num_sites = options["type"], 2 * num_layers
    if name == "full_attn_res" or (name == "delta_attn_res" and number is None):
        return [range(site, site + 1) for site in range(num_sites)]
    if layers is None:
        layers = math.ceil(num_layers / (min(4, num_layers) if number is None else number))
    return [
        range(first, min(first + 2 * layers, num_sites))
        for first in range(0, num_sites, 2 * layers)
    ]


def _signs(name: str, block: range, seed: int) -> list[float]:
    """Signs of a basis over the sites of a block."""
    half = len(block) // 2
    split = [1.0] * half + [-1.0] * half
    phase = [-1.0 if site % 2 else 1.0 for site in block]
    if name in ("duplicate", "duplicate_2"):
        return [1.0] * len(block)
    if name == "random":
        return _drawn(split, random.Random(seed), [split, phase])
    if name == "random_2":
        first = _signs("random", block, seed)
        return _drawn(split, random.Random(f"again, {seed}"), [split, phase, first])
    if name not in ("phase", "split"):
        raise ValueError(f"unknown basis {name!r}; install resroute, which may have it")
    return phase if name == "phase" else split


def _drawn(values: list[float], draw: random.Random, avoided: list[list[float]]) -> list[float]:
    """Signs in a random order that is not avoided, up to sign, where the block has another."""
    values = list(values)
    for _ in range(100):
        draw.shuffle(values)
        if values not in avoided and [-value for value in values] not in avoided:
            break
    return values
