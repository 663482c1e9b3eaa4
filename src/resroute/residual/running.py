"""How a running block's sums are kept: few streams, of which each update touches one.

A block's state and details are sums of its updates with signs. WAV's three need not be kept as
such: with X and Y the sums of the updates where a sign is plus and minus, and S the whole sum at
its half, they are C = X + Y, P = X - Y and Q = C, from the second half on Q = 2 S - C.
"""

from collections.abc import Sequence
from typing import NamedTuple

X, Y, S = 0, 1, 2


class Moment(NamedTuple):
    """A block after some of its updates."""

    streams: tuple[int, ...]
    """Which of X, Y and S there are, in order."""
    coefficients: tuple[tuple[float, ...], ...]
    """Each basis, the state first, as a combination of the streams."""


class RunningPlan(NamedTuple):
    """Streams of one block over its m sites."""

    stream_of: tuple[int, ...]
    """By site: the stream that its update is added to."""
    moments: tuple[Moment, ...]
    """By number of updates written, 0 to m."""
    snapshot: int | None
    """After this many updates the whole sum is kept as S; None keeps none."""


def running_plan(signs: Sequence[Sequence[float]]) -> RunningPlan | None:
    """The streams of a block whose details have these signs, by site and basis.

    Returns:
        None where no such form is known, as for two unrelated sign patterns: each basis is then a
        stream of its own, and an update touches all of them.
    """
    length = len(signs)
    columns = [tuple(column) for column in zip(*signs, strict=True)] if signs[0] else []
    half = length // 2
    same = (1.0,) * length
    flip = (1.0,) * half + (-1.0,) * (length - half) if length % 2 == 0 else None
    others = {column for column in columns if column not in (same, flip)}
    if len(others) > 1 or any(abs(sign) != 1 for column in others for sign in column):
        return None
    pattern = others.pop() if others else same
    snapshot = half if flip in columns else None
    stream_of = tuple(X if sign > 0 else Y for sign in pattern)

    def row(column: tuple[float, ...], written: int) -> tuple[float, float, float]:
        if column == same or (column == flip and written <= half):
            return (1.0, 1.0, 0.0)
        return (-1.0, -1.0, 2.0) if column == flip else (1.0, -1.0, 0.0)

    moments = []
    for written in range(length + 1):
        there = set(stream_of[:written])
        if snapshot is not None and written > snapshot:
            there.add(S)
        streams = tuple(sorted(there))
        rows = (row(column, written) for column in (same, *columns)) if written else ()
        moments.append(Moment(streams, tuple(tuple(r[i] for i in streams) for r in rows)))
    return RunningPlan(stream_of, tuple(moments), snapshot)


def separate_plan(length: int, num_bases: int) -> RunningPlan:
    """One stream for each basis: any signs, and coefficients that are learned."""
    streams = tuple(range(num_bases))
    rows = tuple(tuple(float(i == k) for i in streams) for k in streams)
    moments = (Moment((), ()), *(Moment(streams, rows) for _ in range(length)))
    return RunningPlan((-1,) * length, moments, None)
