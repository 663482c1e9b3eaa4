"""Reading in two phases: finished sources for a whole block at once, running ones site by site.

Queries do not depend on the input. So where a block starts, all its sites' mixes of the finished
sources are made by one operation that reads each source once (phase 1), and a site merges its mix
with the few running sums (phase 2, together with the addition of the latest update and with the
RMSNorm that follows). Attention Residuals describes the split for inference; here both phases have
gradients. Exact: only the order of additions differs from the formula.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from resroute.core import Source, accumulate, compute_dtype
from resroute.ops import SiteForm, block_read, operators, site
from resroute.ops.exact import addable
from resroute.residual.running import RunningPlan, S, running_plan, separate_plan

_GROUP = 8
"""Sites that share a phase 1 where each update is a source of its own: a site then reads 3.5 recent
updates one by one on average. Our choice: near the root of the number of sites, where the traffic
of both phases together is least."""


class Rows(NamedTuple):
    """A policy's parameters in the form that operations take, made once a forward pass."""

    keys: Tensor
    """(rows, D) queries times key gains."""
    key_of: tuple[Tensor, ...]
    """Row by row: one gradient comes back for all of them."""
    biases: Tensor | None
    """(rows, bases), for the details."""
    bias_of: tuple[Tensor, ...]


class Running(NamedTuple):
    """The running block's streams, and an update that is added to one as the site is read."""

    streams: tuple[Tensor, ...]
    pending: Tensor | None = None


class Step(NamedTuple):
    """A site's operation."""

    settled: SiteForm
    """With no update pending."""
    adding: SiteForm
    """With the update of the site before pending."""
    only_adds: bool
    """Whether this site's update goes to a stream that is there, and nothing else happens."""


class TwoPhase:
    """What is known of a policy's two phases before any tensor is.

    Args:
        blocks: Sites of each block; blocks of one site list every update as a source.
        signs: Of the details, by site and basis; None where they are learned.
        num_bases: State and details.
        form: What all sites' forms share.
    """

    def __init__(
        self,
        blocks: Sequence[range],
        signs: Sequence[Sequence[float]] | None,
        num_bases: int,
        form: SiteForm,
    ) -> None:
        num_sites = blocks[-1].stop
        self.is_listed = num_bases == 1 and all(len(block) == 1 for block in blocks)
        self.phases = list(blocks)
        if self.is_listed:
            self.phases = [
                range(first, min(first + _GROUP, num_sites))
                for first in range(0, num_sites, _GROUP)
            ]
        self.starts = {phase.start: phase for phase in self.phases}
        self.phase_of = [phase for phase in self.phases for _ in phase]
        self.plans: list[RunningPlan] = []
        self.is_separate = False
        if not self.is_listed:
            plans = [
                None if signs is None else running_plan(signs[block.start : block.stop])
                for block in blocks
            ]
            # one way to keep sums for the whole stack
            self.is_separate = None in plans
            self.plans = [
                separate_plan(len(block), num_bases) if plan is None or self.is_separate else plan
                for block, plan in zip(blocks, plans, strict=True)
                for _ in block
            ]
        self.steps = [] if self.is_listed else [self._step(site, form) for site in range(num_sites)]
        sizes = [len(part) for plan in self.plans for moment in plan.moments for part in moment]
        self.num_streams = max([0, *sizes])
        """Most streams or bases that an operation takes."""

    def look_ahead(
        self,
        backend: str,
        sources: Sequence[Source],
        rows: Rows,
        phase: range,
        biases: Tensor | None,
        dtype: torch.dtype,
    ) -> tuple[tuple[tuple[Tensor, Tensor], ...], tuple[Source, ...]]:
        """Phase 1: mixes of the finished sources for the sites of a phase."""
        if not sources:
            return (), ()
        keys = rows.keys[phase.start : phase.stop]
        mixes, kept = block_read(operators(backend), sources, keys, biases, read_dtype=dtype)
        return tuple(mixes), tuple(kept)

    def add(self, at: int, running: Running, update: Tensor, dtype: torch.dtype) -> Running:
        """Write the update of a site; where its stream is there, adding is left to the read."""
        if running.pending is None and self.steps[at].only_adds:
            return Running(running.streams, addable(update, dtype))
        plan, written = self.plans[at], at - self.phase_of[at].start
        streams = dict(zip(plan.moments[written].streams, self.settled(at, running), strict=True))
        if plan.snapshot == written:
            streams[S] = _combine(plan.moments[written].coefficients[0], list(streams.values()))
        target = plan.stream_of[written]
        pending: Tensor | None = addable(update, dtype)
        if target not in streams:
            streams[target], pending = update.to(dtype), None
        return Running(tuple(streams[name] for name in sorted(streams)), pending)

    def settled(self, at: int, running: Running) -> tuple[Tensor, ...]:
        """The streams before site `at` is read or written, with no update pending."""
        if running.pending is None:
            return running.streams
        target = self._target(at)
        old = running.streams[target]
        added = accumulate(old, running.pending, dtype=old.dtype)
        return tuple(added if i == target else s for i, s in enumerate(running.streams))

    def bases(self, at: int, written: int, running: Running) -> tuple[Tensor, ...]:
        """State and details of the block of site `at - 1` after some of its updates."""
        moment = self.plans[at - 1].moments[written]
        streams = self.settled(at, running)
        return tuple(_combine(row, streams) for row in moment.coefficients)

    def read(
        self,
        backend: str,
        at: int,
        running: Running,
        ahead: tuple[Tensor, Tensor] | None,
        rows: Rows,
        gain: Tensor | None,
        norm_eps: float,
        read_dtype: torch.dtype,
    ) -> tuple[Tensor, Running]:
        """Phase 2 of a site that has summed sources."""
        step = self.steps[at]
        prior, lse = (None, None) if ahead is None else ahead
        read, streams = site(
            operators(backend),
            step.settled if running.pending is None else step.adding,
            running.pending,
            running.streams,
            prior=prior,
            lse=lse,
            key=rows.key_of[at],
            bias=rows.bias_of[at] if rows.bias_of else None,
            gain=gain,
            norm_eps=norm_eps,
            read_dtype=read_dtype,
        )
        return read, Running(streams)

    def read_listed(
        self,
        backend: str,
        at: int,
        sources: Sequence[Source],
        ahead: tuple[Tensor, Tensor] | None,
        rows: Rows,
        read_dtype: torch.dtype,
    ) -> tuple[Tensor, tuple[Source, ...]]:
        """Phase 2 of a site that has each update as a source: it reads the group's own."""
        count = at - self.phase_of[at].start
        finished, recent = list(sources[: len(sources) - count]), sources[len(sources) - count :]
        if not recent:
            assert ahead is not None, "a read needs a source"
            return ahead[0].to(read_dtype), tuple(sources)
        mixes, kept = block_read(
            operators(backend),
            recent,
            rows.key_of[at].unsqueeze(0),
            priors=() if ahead is None else (ahead,),
            read_dtype=read_dtype,
        )
        return mixes[0][0], (*finished, *kept)

    def _step(self, at: int, form: SiteForm) -> Step:
        plan, written = self.plans[at], at - self.phase_of[at].start
        moment = plan.moments[written]
        settled = replace(form, coefficients=moment.coefficients)
        was_added = written and plan.stream_of[written - 1] in plan.moments[written - 1].streams
        adding = replace(settled, target=self._target(at)) if was_added else settled
        only_adds = plan.stream_of[written] in moment.streams and plan.snapshot != written
        return Step(settled, adding, only_adds)

    def _target(self, at: int) -> int:
        """Position, among the streams before site `at`, of the one that has an update pending."""
        plan, phase = self.plans[at - 1], self.phase_of[at - 1]
        written = at - phase.start
        return plan.moments[written].streams.index(plan.stream_of[written - 1])


def _combine(coefficients: Sequence[float], streams: Sequence[Tensor]) -> Tensor:
    dtype = streams[0].dtype
    wide = compute_dtype(dtype)
    terms = [(c, s.to(wide)) for c, s in zip(coefficients, streams, strict=True) if c != 0]
    # one with coefficient 1 leads, where there is one: it needs no pass of its own
    terms.sort(key=lambda term: term[0] != 1)
    (first, total), *rest = terms
    total = total if first == 1 else total * first
    for number, stream in rest:
        total = torch.add(total, stream, alpha=number)
    return total.to(dtype)
