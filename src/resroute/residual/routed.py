"""What all routed methods share: blocks, depth sources, the mixer's parameters and the gate."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from resroute.config import UserError, require_whole
from resroute.core import Source, accumulate, block_sites, depth_mix, depth_weights, inverse_rms
from resroute.residual.base import Policy, ResidualConfig


class RoutedStream(NamedTuple):
    """What a routed policy carries over depth."""

    site: int
    sources: tuple[Source, ...]
    """The embedding, then the sum and the details of every finished block."""
    running: tuple[Tensor, ...]
    """The running block's sum, then its details (..., D); empty at a block's first site."""
    total: Tensor | None
    """The plain sum, added in PreNorm's order; carried where a method reads it."""


class Slot(NamedTuple):
    """One source as a site sees it."""

    name: str
    basis: int | None = None
    """Index of the detail basis; None for the embedding and for sums."""
    running: bool = False


@dataclass(frozen=True, kw_only=True)
class RoutedConfig(ResidualConfig):
    """Options of every method with a depth-wise softmax."""

    eps: float = 1e-6
    """Added to mean squares. Our choice: the papers give none. Zero is for tests: a source of
    zeros then gives NaN."""
    key_gain: bool = True
    """Learn an RMSNorm gain on the keys, as Kimi K3 does; False leaves it out."""
    gated: bool = False
    """Blend from the plain sum by a gate that starts at zero: step 0 is PreNorm exactly."""

    def __post_init__(self) -> None:
        if not (isinstance(self.eps, float | int) and 0 <= self.eps <= 1):
            raise UserError(f"eps must be at least 0 and at most 1, got {self.eps}")


@dataclass(frozen=True, kw_only=True)
class BlockedConfig(RoutedConfig):
    """Options of methods that gather layers into blocks; the unit is layers, not sublayers."""

    num_blocks: int | None = None
    """Blocks of the stack; each takes `ceil(L / num_blocks)` layers, the last may be shorter.
    With neither option `min(4, L)` is taken; the policy's `num_blocks` is what that makes."""
    block_layers: int | None = None
    """Layers a block, instead of `num_blocks`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_blocks is not None and self.block_layers is not None:
            raise UserError(
                f"give num_blocks or block_layers, not both (got {self.num_blocks} and "
                f"{self.block_layers})"
            )
        for name in ("num_blocks", "block_layers"):
            value = getattr(self, name)
            if value is not None:
                require_whole(name, value, 1)

    def blocks(self, num_layers: int, sites_per_layer: int) -> list[range]:
        """Sites of each block of a stack."""
        layers = self.block_layers
        if layers is None:
            asked = min(4, num_layers) if self.num_blocks is None else self.num_blocks
            return blocks_by_number(asked, num_layers, sites_per_layer)
        if layers > num_layers:
            raise UserError(
                f"block_layers={layers} is more than the stack's {num_layers} layers; "
                f"use at most {num_layers}"
            )
        return block_sites(num_layers, sites_per_layer, layers)


def blocks_by_number(num_blocks: int, num_layers: int, sites_per_layer: int) -> list[range]:
    """Sites of each block where a number of blocks is asked for; there may be fewer."""
    if num_blocks > num_layers:
        raise UserError(
            f"num_blocks={num_blocks} is more than the stack's {num_layers} layers; "
            f"use at most {num_layers}"
        )
    return block_sites(num_layers, sites_per_layer, math.ceil(num_layers / num_blocks))


class RoutedPolicy(Policy[RoutedStream]):
    """Reads by a depth-wise softmax over the embedding, finished blocks and the running block.

    Parameters by name: `query` (rows, D), zero; `key_gain` (rows, D), one; `gate` (rows,), zero.
    Rows are the sites, and one more for the readout where it mixes.

    Args:
        config: Options of the method.
        blocks: Sites of each block.
        num_layers: L.
        dim: D.
        kinds: Sublayers of one layer.
        sum_name: What a block's sum is called in `weights`.
        bases: Names of the details that each block gives besides its sum.
        embedding_source: Whether the embedding is a source.
        additive: The mix is added to the plain sum, and the readout is the plain sum (Delta).
        details_in_readout: Whether the readout mixes details too.
    """

    def __init__(
        self,
        config: RoutedConfig,
        blocks: list[range],
        num_layers: int,
        dim: int,
        kinds: tuple[str, ...],
        *,
        sum_name: str = "state",
        bases: tuple[str, ...] = (),
        embedding_source: bool = True,
        additive: bool = False,
        details_in_readout: bool = False,
    ) -> None:
        super().__init__(num_layers, dim, kinds)
        self.eps = config.eps
        self.blocks = blocks
        self.num_blocks = len(blocks)
        self.bases = bases
        self.embedding_source = embedding_source
        self.additive = additive
        self.details_in_readout = details_in_readout
        asked = getattr(config, "num_blocks", None)
        if asked not in (None, self.num_blocks):
            self.notes.append(
                f"{asked} blocks of {num_layers} layers make {self.num_blocks} blocks of "
                f"{len(blocks[0]) // len(kinds)} layers (the last may be shorter)"
            )
        self._ends = {block.stop for block in blocks}
        self._slots = [self._slots_at(site, sum_name) for site in range(self.num_sites + 1)]
        rows = self.num_sites if additive else self.num_sites + 1
        self.query = nn.Parameter(torch.empty(rows, dim))
        self.key_gain = nn.Parameter(torch.empty(rows, dim)) if config.key_gain else None
        self.gate = nn.Parameter(torch.empty(rows)) if config.gated else None

    def extra_repr(self) -> str:
        """Sizes, blocks and bases, for printing."""
        bases = f", bases={self.bases}" if self.bases else ""
        return f"{super().extra_repr()}, num_blocks={self.num_blocks}{bases}"

    def reset_parameters(self) -> None:
        """Zero queries and gates, unit gains: every site starts as the plain mean."""
        nn.init.zeros_(self.query)
        if self.key_gain is not None:
            nn.init.ones_(self.key_gain)
        if self.gate is not None:
            nn.init.zeros_(self.gate)

    def _slots_at(self, site: int, sum_name: str) -> list[Slot]:
        """Sources of a site in the order of the stream's, finished ones first."""
        if self.additive and site in (0, self.num_sites):
            return []
        slots = [Slot("embedding")] if self.embedding_source else []
        names = [(sum_name, None), *((name, i) for i, name in enumerate(self.bases))]
        for index, block in enumerate(self.blocks):
            if block.stop <= site:
                slots += [Slot(f"{name} {index}", basis) for name, basis in names]
            elif block.start < site:
                slots += [Slot(f"running {name}", basis, True) for name, basis in names]
        return slots

    def _is_read(self, site: int, slot: Slot) -> bool:
        return site < self.num_sites or self.details_in_readout or slot.basis is None

    def _start(self, embedding: Tensor) -> RoutedStream:
        keeps_total = self.additive or self.gate is not None
        sources = (self._source(embedding),) if self.embedding_source else ()
        return RoutedStream(0, sources, (), embedding if keeps_total else None)

    def _write(self, stream: RoutedStream, update: Tensor) -> RoutedStream:
        dtype = self._reference(stream).dtype
        total = stream.total
        if total is not None:
            total = accumulate(total, update, dtype=dtype)
        running = self._accumulate(stream, update, dtype)
        sources = stream.sources
        if stream.site + 1 in self._ends:
            sources, running = sources + self._block_sources(running), ()
        return RoutedStream(stream.site + 1, sources, running, total)

    def _read(self, stream: RoutedStream) -> Tensor:
        slots, sources = self._pool(stream)
        total = stream.total
        if not slots:
            assert total is not None
            return total
        weights = self._mix_weights(stream.site, slots, sources)
        mix = depth_mix(sources, weights)
        if total is not None:
            # in the mix's dtype; with a closed gate this is the plain sum to the bit
            base = total.to(mix.dtype)
            step = mix if self.additive else mix - base
            mix = base + (step if self.gate is None else self.gate[stream.site].to(mix) * step)
        return mix.to(self._reference(stream).dtype)

    def _weights(self, stream: RoutedStream) -> tuple[list[str], Tensor]:
        slots, sources = self._pool(stream)
        if not slots:
            assert stream.total is not None
            return [], stream.total.new_zeros((*stream.total.shape[:-1], 0))
        weights = self._mix_weights(stream.site, slots, sources)
        return [slot.name for slot in slots], weights.movedim(0, -1)

    def _pool(self, stream: RoutedStream) -> tuple[list[Slot], list[Source]]:
        slots = self._slots[stream.site]
        sources = list(stream.sources)
        if stream.running:
            sources += self._block_sources(stream.running)
        # the readout leaves details out; sites read all there is
        pairs = zip(slots, sources, strict=bool(slots))
        kept = [pair for pair in pairs if self._is_read(stream.site, pair[0])]
        return [slot for slot, _ in kept], [source for _, source in kept]

    def _mix_weights(self, site: int, slots: Sequence[Slot], sources: Sequence[Source]) -> Tensor:
        gain = None if self.key_gain is None else self.key_gain[site]
        biases = [self._bias(site, slot) for slot in slots]
        return depth_weights(sources, self.query[site], gain, biases)

    def _source(self, value: Tensor) -> Source:
        return Source(value, inverse_rms(value, self.eps))

    def _reference(self, stream: RoutedStream) -> Tensor:
        return stream.sources[0].value if stream.total is None else stream.total

    def _accumulate(
        self, stream: RoutedStream, update: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        """Add an update to the running block's sum, and to its details where there are any."""
        total = stream.running[0] if stream.running else None
        return (accumulate(total, update, dtype=dtype),)

    def _block_sources(self, running: tuple[Tensor, ...]) -> tuple[Source, ...]:
        """Turn a block's sum and details into sources."""
        return (self._source(running[0]),)

    def _bias(self, site: int, slot: Slot) -> Tensor | None:
        """What is added to the logit of a source; None is nothing."""
        return None
