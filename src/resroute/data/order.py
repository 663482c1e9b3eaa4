"""In which order windows are read: a function of seed and position alone.

N windows or documents of an epoch, B windows of a batch.
"""

from typing import Literal

import numpy as np
import numpy.typing as npt

Places = npt.NDArray[np.int64]

Order = Literal["uniform", "windows", "documents"]
"""`uniform`: windows start anywhere, with replacement. `windows`: a split is cut into windows, and
an epoch reads each once. `documents`: an epoch reads each document once, one after the other."""

_ROUNDS = 6


def shuffled(places: Places, count: int, key: tuple[int, ...]) -> Places:
    """A pseudo-random permutation of `range(count)`, evaluated at some places, (places,).

    A Feistel network (Luby and Rackoff 1988) over the least even number of bits that holds `count`,
    walked along its cycles until it lands below `count` (Black and Rogaway 2002): no memory of
    `count`, and any place at once.

    Args:
        places: From 0 to below `count`.
        count: N, at least 1.
        key: Another key is another permutation.
    """
    half = max(1, (max(count - 1, 1).bit_length() + 1) // 2)
    words = np.random.SeedSequence([*key, count]).generate_state(_ROUNDS, np.uint64)
    keys: npt.NDArray[np.uint64] = words.astype(np.uint64)
    found = places.astype(np.uint64)
    outside = np.ones(len(found), dtype=np.bool_)
    while outside.any():
        found[outside] = _network(found[outside], np.uint64(half), keys)
        outside = found >= np.uint64(count)
    return found.astype(np.int64)


def _network(
    values: npt.NDArray[np.uint64], half: np.uint64, keys: npt.NDArray[np.uint64]
) -> npt.NDArray[np.uint64]:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = values >> half, values & mask
    for key in keys:
        mixed = right ^ key
        # the finaliser of splitmix64 (Steele, Lea and Flood 2014); products wrap
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
        left, right = right, left ^ (mixed & mask)
    return (left << half) | right


def window_starts(positions: Places, *, tokens: int, context: int, seed: int) -> Places:
    """Where the windows at some positions of a run start, (positions,): order `windows`.

    Each epoch cuts the split anew, from an offset of its own, and reads every window once, in an
    order of its own. Less than two windows of the split are left out of an epoch.

    Args:
        positions: Windows read so far in the run.
        tokens: Of the split, at least `context + 1`.
        context: T.
        seed: Of the run.
    """
    count = max(1, (tokens - context) // context)
    starts = np.empty(len(positions), dtype=np.int64)
    for epoch in np.unique(positions // count).tolist():
        here = positions // count == epoch
        room = min(context, tokens - count * context)
        offset = int(np.random.default_rng([seed, epoch, 1]).integers(room))
        places = shuffled(positions[here] % count, count, (seed, epoch, 2))
        starts[here] = offset + places * context
    return starts


class DocumentOrder:
    """Order `documents`: the split's documents in another order at each epoch, cut into windows.

    Args:
        ends: Places of the end-of-text tokens that close documents, (N,).
        seed: Of the run.
    """

    def __init__(self, ends: Places, seed: int) -> None:
        self._firsts = np.concatenate([[0], ends[:-1] + 1]).astype(np.int64)
        self._lengths = ends + 1 - self._firsts
        self._seed = seed
        self._epoch = -1
        self._order = self._bounds = np.zeros(0, dtype=np.int64)

    def windows_per_epoch(self, context: int) -> int:
        """Whole windows that the documents fill."""
        return int((self._lengths.sum() - 1) // context)

    def places(self, position: int, context: int) -> Places:
        """Places in the split of the tokens of one window and its last target, (T + 1,)."""
        count = self.windows_per_epoch(context)
        self._turn_to(position // count)
        first = position % count * context
        wanted = np.arange(first, first + context + 1)
        which = np.searchsorted(self._bounds, wanted, side="right") - 1
        return self._firsts[self._order[which]] + wanted - self._bounds[which]

    def _turn_to(self, epoch: int) -> None:
        if epoch == self._epoch:
            return
        self._epoch = epoch
        self._order = np.random.default_rng([self._seed, epoch, 3]).permutation(len(self._lengths))
        self._bounds = np.concatenate([[0], np.cumsum(self._lengths[self._order])[:-1]])
