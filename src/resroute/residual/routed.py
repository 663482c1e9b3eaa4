"""What routed methods share: depth sources, parameters of the mixer, the gate, the backend."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from resroute.core import (
    Source,
    accumulate,
    compute_dtype,
    depth_mix,
    depth_weights,
    inverse_rms,
)
from resroute.ops import SiteForm, block_read, choose, operators
from resroute.ops.exact import read_dtype
from resroute.residual.base import STREAM, NothingLeftError, Policy, site_name
from resroute.residual.norms import Folded, Norm, fold, normalise
from resroute.residual.routed_config import RoutedConfig
from resroute.residual.two_phase import Rows, Running, TwoPhase


class RoutedStream(NamedTuple):
    """What a routed policy carries over depth."""

    site: int
    sources: tuple[Source, ...]
    """The embedding, then the sum and the details of every finished block."""
    running: Running
    """The running block's streams; empty at a block's first site. Their sums with coefficients are
    the block's sum and details; on `reference`, and where signs are learned, they are these."""
    total: Tensor | None
    """The plain sum, added in PreNorm's order; carried where a method reads it."""
    backend: str
    rows: Rows | None = None
    """The policy's parameters, folded; None on `reference`."""
    ahead: tuple[tuple[Tensor, Tensor], ...] = ()
    """For each site of the running phase: its mix of the sources that were finished when the phase
    began, and the log-sum-exp of their logits."""

    def __repr__(self) -> str:
        """Sizes instead of numbers."""
        value = self.sources[0].value if self.total is None else self.total
        return (
            f"RoutedStream(site={self.site}, sources={len(self.sources)}, "
            f"shape={tuple(value.shape)}, backend={self.backend!r})"
        )


class Slot(NamedTuple):
    """One source as a site sees it."""

    name: str
    basis: int | None = None
    """Index of the detail basis; None for the embedding and for sums."""
    running: bool = False


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
        signs: Of the details, by site and basis; None where they are learned, empty without any.
        form: What the sites' operations share (matching and its maximum).
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
        signs: Sequence[Sequence[float]] | None = (),
        form: SiteForm | None = None,
    ) -> None:
        super().__init__(num_layers, dim, kinds)
        self.eps = config.eps
        self.blocks = blocks
        self.num_blocks = len(blocks)
        self.bases = bases
        self.embedding_source = embedding_source
        self.additive = additive
        self.details_in_readout = details_in_readout
        self.bias_running = True
        asked = getattr(config, "num_blocks", None)
        if asked not in (None, self.num_blocks):
            self.notes.append(
                f"{asked} blocks of {num_layers} layers make {self.num_blocks} blocks of "
                f"{len(blocks[0]) // len(kinds)} layers (the last may be shorter)"
            )
        self._ends = {block.stop for block in blocks}
        self._slots = [self._slots_at(site, sum_name) for site in range(self.num_sites + 1)]
        self._finished = self._slots[-1]
        if additive:
            self._slots[0] = self._slots[-1] = []
        every = [slot for slots in self._slots for slot in slots]
        read = [name for site in range(len(self._slots)) for name in self.source_names(site)]
        self._names = tuple(dict.fromkeys(read))
        self.detail_names = frozenset(slot.name for slot in every if slot.basis is not None)
        if signs is not None and not signs:
            signs = [()] * self.num_sites
        shared = SiteForm(eps=config.eps) if form is None else form
        self._phases = TwoPhase(blocks, signs, len(bases) + 1, shared)
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

    def source_names(self, site: int | None = None) -> tuple[str, ...]:
        """Names that `weights` gives at a site, or at any site, in order."""
        if site is None:
            return self._names
        return tuple(slot.name for slot in self._slots[site] if self._is_read(site, slot))

    def initial_weights(self, site: int) -> dict[str, float]:
        """Depth weights of a site, or of the readout, before any training: the same of all tokens.

        A zero query leaves the biases of details.
        """
        slots = [slot for slot in self._slots[site] if self._is_read(site, slot)]
        powers = [math.exp(self._initial_bias(slot)) for slot in slots]
        total = math.fsum(powers)
        return {slot.name: power / total for slot, power in zip(slots, powers, strict=True)}

    def gate_of(self, site: int) -> Tensor | None:
        """The gate () of a site that mixes, where the method is gated."""
        return self.gate[site] if self.gate is not None and self._slots[site] else None

    def coefficients(self, site: int) -> Sequence[float | Tensor]:
        """What the update of a site is multiplied by in each detail of its block."""
        return ()

    def source_rms(self, stream: RoutedStream) -> dict[str, float]:
        """Sizes of the embedding, where it is a source, and of what finished blocks gave."""
        values = (source.value for source in stream.sources)
        # sources hold theirs with eps
        sizes = (inverse_rms(value, 0.0).reciprocal().mean().item() for value in values)
        return {slot.name: size for slot, size in zip(self._finished, sizes, strict=False)}

    def _slots_at(self, site: int, sum_name: str) -> list[Slot]:
        """Sources of a site in the order of the stream's, finished ones first."""
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
        choice = choose(
            embedding.device, embedding.dtype, self.dim, num_bases=self._phases.num_streams
        )
        stream = RoutedStream(
            0, sources, Running(()), embedding if keeps_total else None, choice.backend
        )
        if choice.backend == "reference":
            return stream
        return self._look_ahead(stream._replace(rows=self._rows(compute_dtype(embedding.dtype))))

    def _write(self, stream: RoutedStream, update: Tensor) -> RoutedStream:
        dtype = self._reference(stream).dtype
        site, total, running, sources = stream.site, stream.total, stream.running, stream.sources
        if total is not None:
            total = accumulate(total, update, dtype=dtype)
        adds_all = stream.backend == "reference" or self._phases.is_separate
        if adds_all or self._phases.is_listed:
            running = Running(self._accumulate(stream, update, dtype))
        else:
            running = self._phases.add(site, running, update, dtype)
        stream = stream._replace(site=site + 1, total=total, running=running)
        if site + 1 in self._ends:
            sources += self._block_sources(self._bases(stream))
            stream = stream._replace(sources=sources, running=Running(()))
        return stream if stream.backend == "reference" else self._look_ahead(stream)

    def _read(self, stream: RoutedStream) -> Tensor:
        return self._read_normalised(stream, None)[0]

    def _read_normalised(
        self, stream: RoutedStream, norm: Norm | None
    ) -> tuple[Tensor, RoutedStream]:
        dtype = self._reference(stream).dtype
        if not self._slots[stream.site]:
            assert stream.total is not None
            read = stream.total
        elif stream.total is None:
            folded = None if norm is None else fold(stream.backend, norm, self._reference(stream))
            read, stream, is_normalised = self._mix(stream, folded, dtype)
            if is_normalised:
                return read, stream
        else:
            mix, stream, _ = self._mix(stream, None, compute_dtype(dtype))
            read = self._blend(stream, mix)
        return (read if norm is None else normalise(stream.backend, read, norm)), stream

    def _blend(self, stream: RoutedStream, mix: Tensor) -> Tensor:
        """A read: its mix, or the plain sum and a mix, in the stream's dtype."""
        if stream.total is None:
            return mix.to(self._reference(stream).dtype)
        # in the mix's dtype; with a closed gate this is the plain sum to the bit
        base = stream.total.to(mix.dtype)
        step = mix if self.additive else mix - base
        gate = self.gate
        step = step if gate is None else gate[stream.site].to(mix) * step
        return (base + step).to(stream.total.dtype)

    def _mix(
        self, stream: RoutedStream, norm: Folded | None, dtype: torch.dtype
    ) -> tuple[Tensor, RoutedStream, bool]:
        """Mix the sources of a site, normalised where that could be folded in."""
        site, phases = stream.site, self._phases
        if stream.backend == "reference":
            slots, sources = self._pool(stream)
            mix = depth_mix(sources, self._mix_weights(site, slots, sources))
            return mix.to(dtype), stream, False
        assert stream.rows is not None
        if site == self.num_sites:
            return self._mix_all(stream, stream.rows, dtype), stream, False
        ahead = stream.ahead[site - phases.phase_of[site].start] if stream.ahead else None
        if phases.is_listed:
            mix, kept = phases.read_listed(
                stream.backend, site, stream.sources, ahead, stream.rows, dtype
            )
            return mix, stream._replace(sources=kept), False
        gain, eps = (None, 0.0) if norm is None else norm
        device = self._reference(stream).device.type
        out = dtype if norm is None else read_dtype(device, dtype)
        mix, running = phases.read(
            stream.backend, site, stream.running, ahead, stream.rows, gain, eps, out
        )
        return mix, stream._replace(running=running), norm is not None

    def _mix_all(self, stream: RoutedStream, rows: Rows, dtype: torch.dtype) -> Tensor:
        """The readout: one query over finished sources."""
        slots, sources = self._pool(stream)
        biases = self._finished_biases(rows, range(stream.site, stream.site + 1), slots)
        keys = rows.key_of[stream.site].unsqueeze(0)
        mixes, _ = block_read(operators(stream.backend), sources, keys, biases, read_dtype=dtype)
        return mixes[0][0]

    def _look_ahead(self, stream: RoutedStream) -> RoutedStream:
        phase = self._phases.starts.get(stream.site)
        if phase is None:
            return stream
        assert stream.rows is not None
        finished = self._slots[stream.site] if stream.site or not self.additive else []
        finished = finished or [Slot("")] * len(stream.sources)
        biases = self._finished_biases(stream.rows, phase, finished)
        value = self._reference(stream)
        dtype = read_dtype(value.device.type, value.dtype)
        ahead, sources = self._phases.look_ahead(
            stream.backend, stream.sources, stream.rows, phase, biases, dtype
        )
        return stream._replace(ahead=ahead, sources=sources)

    def _rows(self, dtype: torch.dtype) -> Rows:
        keys = self.query.to(dtype)
        if self.key_gain is not None:
            keys = keys * self.key_gain.to(dtype)
        biases = self._detail_biases(dtype)
        bias_of = () if biases is None or not self.bias_running else biases.unbind(0)
        return Rows(keys, keys.unbind(0), biases, tuple(bias_of))

    def _finished_biases(self, rows: Rows, sites: range, slots: Sequence[Slot]) -> Tensor | None:
        """Biases (sites, N) of finished sources; None where there are none."""
        if rows.biases is None or all(slot.basis is None for slot in slots):
            return None
        table = rows.biases[sites.start : sites.stop]
        zero = table.new_zeros(len(table))
        columns = table.unbind(1)
        return torch.stack([zero if s.basis is None else columns[s.basis] for s in slots], dim=1)

    def _weights(self, stream: RoutedStream) -> tuple[list[str], Tensor]:
        slots, sources = self._pool(stream)
        if not slots:
            assert stream.total is not None
            return [], stream.total.new_zeros((*stream.total.shape[:-1], 0))
        weights = self._mix_weights(stream.site, slots, sources)
        return [slot.name for slot in slots], weights.movedim(0, -1)

    def _sources(self, stream: RoutedStream) -> dict[str, Tensor]:
        slots, sources = self._pool(stream)
        values = {slot.name: source.value for slot, source in zip(slots, sources, strict=True)}
        return values if stream.total is None else {**values, STREAM: stream.total}

    def _read_without(self, stream: RoutedStream, left_out: frozenset[str]) -> Tensor:
        pairs = zip(*self._pool(stream), strict=True)
        kept = [(slot, source) for slot, source in pairs if slot.name not in left_out]
        if not kept:
            if not self.additive:
                raise NothingLeftError(
                    f"without {', '.join(sorted(left_out))} nothing is left to read at "
                    f"{site_name(self, stream.site)}; leave one of its sources"
                )
            assert stream.total is not None
            return stream.total
        slots, sources = [slot for slot, _ in kept], [source for _, source in kept]
        mix = depth_mix(sources, self._mix_weights(stream.site, slots, sources))
        return self._blend(stream, mix)

    def _pool(self, stream: RoutedStream) -> tuple[list[Slot], list[Source]]:
        slots = self._slots[stream.site]
        sources = list(stream.sources)
        if stream.running.streams:
            sources += self._block_sources(self._bases(stream))
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

    def _bases(self, stream: RoutedStream) -> tuple[Tensor, ...]:
        """Sum and details of the block that site `stream.site - 1` belongs to."""
        phases, last = self._phases, stream.site - 1
        if stream.backend == "reference" or phases.is_separate or phases.is_listed:
            return stream.running.streams
        written = stream.site - phases.phase_of[last].start
        return phases.bases(stream.site, written, stream.running)

    def _accumulate(
        self, stream: RoutedStream, update: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        """Add an update to the running block's sum, and to its details where there are any."""
        streams = stream.running.streams
        return (accumulate(streams[0] if streams else None, update, dtype=dtype),)

    def _block_sources(self, running: tuple[Tensor, ...]) -> tuple[Source, ...]:
        """Turn a block's sum and details into sources."""
        return (self._source(running[0]),)

    def _bias(self, site: int, slot: Slot) -> Tensor | None:
        """What is added to the logit of a source; None is nothing."""
        return None

    def _initial_bias(self, slot: Slot) -> float:
        return 0.0

    def _detail_biases(self, dtype: torch.dtype) -> Tensor | None:
        """Biases (rows, bases) of the details; None where there are none."""
        return None
