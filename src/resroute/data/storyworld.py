"""The embedded corpus: children's stories without end, each with its exact probability.

A story tells a few facts early (who, whose, which colour, where, how they felt) and needs them
late: a model that remembers pays nothing for the second mention, one that does not pays for a
guess. Because the probability of every story is known, so is the entropy floor that no model
beats on average, in nats per character.

One grammar is read three ways: drawn from (`tell`), followed along a text (`readings`), and
averaged over exactly (`entropy`). Its words and tales are in `storyworld_words`, and a new tale, a
longer one or one with more facts is an edit there; `storyworld_markup` reads their notation.
"""

import functools
import itertools
import math
import random
from bisect import bisect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from resroute.config import UserError
from resroute.data.storyworld_markup import Choice, Mention, Passage, Piece, read_markup
from resroute.data.storyworld_words import FACTS, MARKUP, Table


@dataclass(frozen=True, kw_only=True)
class Story:
    """One story: its text and its surprisal `nats = -log p(text)`, end included."""

    text: str
    nats: float


@dataclass(frozen=True, kw_only=True)
class Entropy:
    """Population means over stories: the entropy `nats` and the length in `characters`."""

    nats: float
    characters: float

    @property
    def nats_per_character(self) -> float:
        """Nats per token when every story is followed by one end-of-text token."""
        return self.nats / (self.characters + 1)


Rows = dict[str, int]


@dataclass(frozen=True)
class Reading:
    """A derivation of `text[:end]`: the facts it binds and its surprisal."""

    end: int
    rows: Rows
    nats: float


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


@functools.cache
def odds(size: int, taken: tuple[int, ...] = ()) -> Odds:
    """Odds of every choice with `size` options: p(rank) ~ 1 / (rank + 2) over those not `taken`.

    Ranks count from 1, so the first of ten options is four times as likely as the last.
    """
    options = tuple(i for i in range(size) if i not in taken)
    weights = [1 / (i + 3) for i in options]
    probabilities = tuple(weight / math.fsum(weights) for weight in weights)
    return Odds(
        options=options,
        probabilities=probabilities,
        # the exact 1.0 keeps a draw inside the list however the sum was rounded
        cumulative=(*itertools.accumulate(probabilities[:-1]), 1.0),
        nats=tuple(-math.log(p) for p in probabilities),
    )


class Grammar:
    """Stories as marked-up text (see `storyworld_words`) over tables of facts.

    Derivations are unambiguous by construction. The texts of a fact's first mention are a
    prefix-free set, and so are the beginnings of a choice's options under every assignment of the
    facts told so far (`read_markup` checks both). Each choice can thus be decided from the text
    that follows, whatever comes later: a story has exactly one derivation, and p(text) is the
    product of that derivation's choices. No story is a proper prefix of another for the same
    reason, so the end of a story is certain and costs no nats.

    Raises:
        ValueError: The markup is malformed or a choice in it is ambiguous.
    """

    def __init__(self, markup: str, facts: Mapping[str, Table]) -> None:
        self.passage = read_markup(markup, facts)

    def tell(self, draw: random.Random) -> Story:
        """Draw one story."""
        parts: list[str] = []
        nats = _tell(self.passage, draw, {}, parts)
        return Story(text="".join(parts), nats=nats)

    def readings(self, text: str) -> list[Reading]:
        """All derivations of a text, by exhaustive search: one, or none if it is no story."""
        found = _follow(self.passage, text, [Reading(0, {}, 0.0)])
        return [reading for reading in found if reading.end == len(text)]

    @functools.cached_property
    def entropy(self) -> Entropy:
        """Exact means over all stories.

        The entropy is the sum over choices of each one's mean entropy given the earlier ones
        (chain rule); lengths add by linearity. Both need only the exact distribution of each
        fact, since options do not depend on facts.
        """
        nats, characters = _mean(self.passage)
        return Entropy(nats=nats, characters=characters)

    @functools.cached_property
    def longest(self) -> int:
        """A length in characters that no story exceeds."""
        return _longest(self.passage)

    @functools.cached_property
    def alphabet(self) -> tuple[str, ...]:
        """The characters that occur in stories, sorted."""
        return tuple(sorted(_characters(self.passage)))


def _tell(passage: Passage, draw: random.Random, rows: Rows, parts: list[str]) -> float:
    nats = 0.0
    for piece in passage:
        if isinstance(piece, str):
            parts.append(piece)
        elif isinstance(piece, Mention):
            if piece.is_first:
                chances = odds(len(piece.words), tuple(rows[fact] for fact in piece.rivals))
                drawn = bisect(chances.cumulative, draw.random())
                rows[piece.fact] = chances.options[drawn]
                nats += chances.nats[drawn]
            parts.append(piece.words[rows[piece.fact]])
        else:
            chances = odds(len(piece.options))
            drawn = bisect(chances.cumulative, draw.random())
            nats += chances.nats[drawn]
            nats += _tell(piece.options[drawn], draw, rows, parts)
    return nats


def _follow(passage: Passage, text: str, readings: list[Reading]) -> list[Reading]:
    for piece in passage:
        readings = [after for before in readings for after in _continue(piece, text, before)]
    return readings


def _continue(piece: Piece, text: str, before: Reading) -> list[Reading]:
    end, rows, nats = before.end, before.rows, before.nats
    if isinstance(piece, str):
        return [Reading(end + len(piece), rows, nats)] if text.startswith(piece, end) else []
    if isinstance(piece, Choice):
        costs = zip(piece.options, odds(len(piece.options)).nats, strict=True)
        return [
            reading
            for option, cost in costs
            for reading in _follow(option, text, [Reading(end, rows, nats + cost)])
        ]
    if not piece.is_first:
        word = piece.words[rows[piece.fact]]
        return [Reading(end + len(word), rows, nats)] if text.startswith(word, end) else []
    chances = odds(len(piece.words), tuple(rows[fact] for fact in piece.rivals))
    return [
        Reading(end + len(piece.words[row]), {**rows, piece.fact: row}, nats + cost)
        for row, cost in zip(chances.options, chances.nats, strict=True)
        if text.startswith(piece.words[row], end)
    ]


@functools.cache
def _draws(size: int, count: int) -> tuple[tuple[tuple[int, ...], float], ...]:
    """Ordered draws of `count` rows from a table without replacement, with probabilities."""
    if count == 0:
        return (((), 1.0),)
    return tuple(
        ((*taken, row), before * p)
        for taken, before in _draws(size, count - 1)
        for row, p in zip(odds(size, taken).options, odds(size, taken).probabilities, strict=True)
    )


def _mean(passage: Passage) -> tuple[float, float]:
    nats, characters = [0.0], [0.0]
    for piece in passage:
        if isinstance(piece, str):
            characters.append(len(piece))
        elif isinstance(piece, Mention):
            size, order = len(piece.words), len(piece.rivals)
            lengths = [len(word) for word in piece.words]
            characters += [p * lengths[rows[-1]] for rows, p in _draws(size, order + 1)]
            if piece.is_first:
                nats += [p * odds(size, rows).entropy for rows, p in _draws(size, order)]
        else:
            chances = odds(len(piece.options))
            nats.append(chances.entropy)
            for option, p in zip(piece.options, chances.probabilities, strict=True):
                option_nats, option_characters = _mean(option)
                nats.append(p * option_nats)
                characters.append(p * option_characters)
    return math.fsum(nats), math.fsum(characters)


def _longest(passage: Passage) -> int:
    length = 0
    for piece in passage:
        if isinstance(piece, str):
            length += len(piece)
        elif isinstance(piece, Mention):
            length += max(map(len, piece.words))
        else:
            length += max(map(_longest, piece.options))
    return length


def _characters(passage: Passage) -> set[str]:
    found: set[str] = set()
    for piece in passage:
        if isinstance(piece, str):
            found.update(piece)
        elif isinstance(piece, Mention):
            found.update(*piece.words)
        else:
            found.update(*map(_characters, piece.options))
    return found


WORLD = Grammar(MARKUP, FACTS)
"""The grammar of the default corpus."""

ALPHABET: tuple[str, ...] = WORLD.alphabet
"""Every character that occurs in stories, sorted."""

MAX_CHARACTERS = WORLD.longest
"""No story is longer, so that a story and its end token fit a context of 256."""


def stories(seed: int) -> Iterator[Story]:
    """Independent stories without end, the same for a seed everywhere.

    Only `random.Random.random` is drawn from, whose sequence Python keeps fixed for a seed.

    Raises:
        UserError: A negative seed, which would give the stories of the positive one.
    """
    if seed < 0:
        raise UserError(f"storyworld: the seed must be 0 or more, got {seed}")
    draw = random.Random(seed)
    while True:
        yield WORLD.tell(draw)


def surprisal(text: str) -> float:
    """`-log p(text)` in nats of one whole story, end included; inf where it is no story."""
    readings = WORLD.readings(text)
    assert len(readings) < 2, "a grammar without ambiguity gave two readings"
    return readings[0].nats if readings else math.inf


def derivations(text: str) -> int:
    """How many ways the grammar derives a text: one for each story, none for anything else."""
    return len(WORLD.readings(text))


def entropy() -> Entropy:
    """Exact entropy and mean length of the stories; see `Entropy.nats_per_character`."""
    return WORLD.entropy
