"""The odds of every draw in a story, and which combinations of facts may be drawn."""

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# in units of 2^-32, see _is_held_out
_STEPS = (3518319155, 2882110345, 2360945575)


@dataclass(frozen=True)
class Odds:
    """The distribution of one choice over the options that are still free."""

    options: tuple[int, ...]
    probabilities: tuple[float, ...]
    cumulative: tuple[float, ...]
    nats: tuple[float, ...]

    @property
    def entropy(self) -> float:
        """Mean surprisal of the choice."""
        return math.fsum(p * n for p, n in zip(self.probabilities, self.nats, strict=True))

    def items(self) -> Iterator[tuple[int, float]]:
        """Each option with its probability."""
        return zip(self.options, self.probabilities, strict=True)


def weight(row: int) -> float:
    """How likely a row or option is, up to a factor: 1 / (rank + 2), ranks from 1.

    The first of ten options is four times as likely as the last.
    """
    return 1 / (row + 3)


# bounded, since orders in which many rows were taken are many
@functools.lru_cache(1 << 14)
def odds(size: int, taken: tuple[int, ...] = ()) -> Odds:
    """Odds of every choice with `size` options, over those not `taken`."""
    options = tuple(i for i in range(size) if i not in taken)
    return _odds(options, tuple(map(weight, options)))


def _odds(options: tuple[int, ...], weights: tuple[float, ...]) -> Odds:
    probabilities = tuple(weight / math.fsum(weights) for weight in weights)
    return Odds(
        options=options,
        probabilities=probabilities,
        # the exact 1.0 keeps a draw inside the list however the sum was rounded
        cumulative=(*itertools.accumulate(probabilities[:-1]), 1.0),
        nats=tuple(-math.log(p) for p in probabilities),
    )


@dataclass(frozen=True)
class Combinations:
    """The combinations of rows of three tables that one kind of stories tells.

    The first row is drawn by its own odds. The two others are drawn by theirs on condition that the
    whole combination is one of these, given the first: p(b | a) and p(c | a, b) are exact sums over
    the combinations that are left.

    Attributes:
        sizes: Rows of the three tables.
        share: Share of all combinations that is held out.
        held_out: Whether these are the held-out ones, or all others.
    """

    sizes: tuple[int, int, int]
    share: float
    held_out: bool

    def has(self, rows: tuple[int, ...]) -> bool:
        """Whether these three rows may meet."""
        return _is_held_out(rows, self.share) == self.held_out

    def odds(self, rows: tuple[int, ...]) -> Odds:
        """Odds of the second row given the first, or of the third given both."""
        return _combined(self, rows)


@functools.cache
def _combined(combinations: Combinations, rows: tuple[int, ...]) -> Odds:
    last = range(combinations.sizes[2])
    weights = {}
    for row in range(combinations.sizes[len(rows)]):
        if len(rows) == 2:
            found = weight(row) if combinations.has((*rows, row)) else 0.0
        else:
            allowed = [weight(c) for c in last if combinations.has((*rows, row, c))]
            found = weight(row) * math.fsum(allowed)
        if found:
            weights[row] = found
    assert weights, f"no combination begins with {rows}"
    return _odds(tuple(weights), tuple(weights.values()))


def _is_held_out(rows: tuple[int, ...], share: float) -> bool:
    """Whether a point of a sequence that fills the unit interval evenly lies below `share`.

    The steps are 1 / g, 1 / g^2, 1 / g^3 with g^4 = g + 1: each row, and nearly each pair of rows,
    has about its share of held-out combinations, and no short period lines these up.
    """
    place = sum(step * row for step, row in zip(_STEPS, rows, strict=True)) % (1 << 32)
    return place < share * (1 << 32)


@functools.cache
def combined_marginal(
    combinations: Combinations, given: int, order: int
) -> tuple[float, tuple[float, ...]]:
    """Mean entropy and distribution of a combination's draw after its first `given` ones.

    The first of these is drawn after `order` others from its table.
    """
    first = marginal(combinations.sizes[0], order)[1]
    told: dict[tuple[int, ...], float] = {(row,): p for row, p in enumerate(first)}
    for _ in range(given - 1):
        told = {
            (*rows, row): p * q
            for rows, p in told.items()
            for row, q in combinations.odds(rows).items()
        }
    shares = [0.0] * combinations.sizes[given]
    for rows, p in told.items():
        for row, q in combinations.odds(rows).items():
            shares[row] += p * q
    entropy = math.fsum(p * combinations.odds(rows).entropy for rows, p in told.items())
    return entropy, tuple(shares)


@functools.cache
def marginal(size: int, order: int) -> tuple[float, tuple[float, ...]]:
    """Mean entropy and distribution of a draw after `order` others from the same table.

    Exact, over the sets of rows that may be taken already.
    """
    if order == 0:
        return odds(size).entropy, odds(size).probabilities
    assert size <= 20, "a table whose rows exclude each other is too large"
    sets = np.arange(1 << size)
    is_free: npt.NDArray[np.bool_] = (sets[:, None] >> np.arange(size)) & 1 == 0
    weights = is_free * np.array([weight(row) for row in range(size)])
    # a full set has nothing left to draw, and no probability
    chances = weights / np.maximum(weights.sum(axis=1, keepdims=True), 1e-300)
    reached = np.zeros(1 << size)
    reached[0] = 1.0
    for _ in range(order):
        after = np.zeros(1 << size)
        for row in range(size):
            free = sets[is_free[:, row]]
            after[free | 1 << row] += reached[free] * chances[free, row]
        reached = after
    nats = -np.log(chances, out=np.zeros_like(chances), where=chances > 0)
    entropy = math.fsum(reached * (chances * nats).sum(axis=1))
    return entropy, tuple(float(p) for p in reached @ chances)
