"""The embedded corpus: children's stories without end, each with its exact probability.

A story tells a few facts early (who, whose, which colour, where, how they felt) and needs them
late: a model that remembers pays nothing for the second mention, one that does not pays for a
guess. Because the probability of every story is known, so is the entropy floor that no model
beats on average, in nats per character.

One grammar is read three ways: drawn from (`tell`), followed along a text (`readings`), and
averaged over exactly (`entropy`). Its words and tales are in `storyworld_words`, and a new tale, a
longer one or one with more facts is an edit there; `storyworld_markup` reads their notation,
`storyworld_odds` has the odds of every draw. `storyworld_knobs` makes stories harder: longer, with
more facts, more text between a fact and its use, and combinations of facts that are held out.
"""

import functools
import itertools
import math
import random
from bisect import bisect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from resroute.config import UserError
from resroute.data.storyworld_knobs import DEFAULT, StoryConfig, bonds, markup, tables
from resroute.data.storyworld_markup import (
    Bonds,
    Choice,
    Mention,
    Passage,
    Piece,
    Rows,
    read_markup,
)
from resroute.data.storyworld_odds import odds
from resroute.data.storyworld_words import Table


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


@dataclass(frozen=True)
class Taken:
    """A choice and which of its options was taken."""

    choice: Choice
    option: int


@dataclass(frozen=True, kw_only=True)
class Account:
    """A story with its derivation.

    Attributes:
        story: The story.
        rows: The row of each fact told.
        steps: Mentions and choices in order, each with its place in characters.
    """

    story: Story
    rows: Rows
    steps: tuple[tuple[int, Mention | Taken], ...]


@dataclass(frozen=True)
class Reading:
    """A derivation of `text[:end]`: the facts it binds and its surprisal."""

    end: int
    rows: Rows
    nats: float


_Steps = list[tuple[int, Mention | Taken]]


class Grammar:
    """Stories as marked-up text (see `storyworld_words`) over tables of facts.

    With `bonds`, some facts are told in some combinations alone (see `Combinations`).

    Derivations are unambiguous by construction. The texts of a fact's first mention are a
    prefix-free set, and so are the beginnings of a choice's options under every assignment of the
    facts told so far (`read_markup` checks both). Each choice can thus be decided from the text
    that follows, whatever comes later: a story has exactly one derivation, and p(text) is the
    product of that derivation's choices. No story is a proper prefix of another for the same
    reason, so the end of a story is certain and costs no nats.

    Raises:
        ValueError: The markup is malformed or a choice in it is ambiguous.
    """

    def __init__(
        self, markup: str, facts: Mapping[str, Table], bonds: Bonds = MappingProxyType({})
    ) -> None:
        self.passage = read_markup(markup, facts, bonds)

    def tell(self, draw: random.Random) -> Story:
        """Draw one story."""
        parts: list[str] = []
        nats = _tell(self.passage, draw, {}, parts, None)
        return Story(text="".join(parts), nats=nats)

    def recount(self, draw: random.Random) -> Account:
        """Draw the story that `tell` would draw, with its derivation."""
        parts: list[str] = []
        rows: Rows = {}
        steps: _Steps = []
        nats = _tell(self.passage, draw, rows, parts, steps)
        places = list(itertools.accumulate(map(len, parts), initial=0))
        return Account(
            story=Story(text="".join(parts), nats=nats),
            rows=rows,
            steps=tuple((places[part], step) for part, step in steps),
        )

    def readings(self, text: str) -> list[Reading]:
        """All derivations of a text, by exhaustive search: one, or none if it is no story."""
        found = _follow(self.passage, text, [Reading(0, {}, 0.0)])
        return [reading for reading in found if reading.end == len(text)]

    @functools.cached_property
    def entropy(self) -> Entropy:
        """Exact means over all stories.

        The entropy is the sum over choices of each one's mean entropy given the earlier ones
        (chain rule); lengths add by linearity. Both need only the exact distribution of each
        fact, in a combination jointly with its earlier facts, since options do not depend on facts.
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


def _tell(
    passage: Passage, draw: random.Random, rows: Rows, parts: list[str], steps: _Steps | None
) -> float:
    """Add a passage to `parts`; steps are noted with the part at which they stand."""
    nats = 0.0
    for piece in passage:
        if isinstance(piece, str):
            parts.append(piece)
        elif isinstance(piece, Mention):
            if piece.is_first:
                chances = piece.odds(rows)
                drawn = bisect(chances.cumulative, draw.random())
                rows[piece.fact] = chances.options[drawn]
                nats += chances.nats[drawn]
            if steps is not None:
                steps.append((len(parts), piece))
            parts.append(piece.words[rows[piece.fact]])
        else:
            chances = odds(len(piece.options))
            drawn = bisect(chances.cumulative, draw.random())
            nats += chances.nats[drawn]
            if steps is not None:
                steps.append((len(parts), Taken(piece, drawn)))
            nats += _tell(piece.options[drawn], draw, rows, parts, steps)
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
    chances = piece.odds(rows)
    return [
        Reading(end + len(piece.words[row]), {**rows, piece.fact: row}, nats + cost)
        for row, cost in zip(chances.options, chances.nats, strict=True)
        if text.startswith(piece.words[row], end)
    ]


def _mean(passage: Passage) -> tuple[float, float]:
    nats, characters = [0.0], [0.0]
    for piece in passage:
        if isinstance(piece, str):
            characters.append(len(piece))
        elif isinstance(piece, Mention):
            entropy, shares = piece.moments()
            characters += [p * len(w) for p, w in zip(shares, piece.words, strict=True)]
            if piece.is_first:
                nats.append(entropy)
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


@functools.lru_cache(32)
def world(story: StoryConfig, *, held_out: bool = False) -> Grammar:
    """The grammar of stories, or with `held_out` of those that tell held-out combinations alone.

    Raises:
        UserError: Held-out stories where the configuration holds nothing out.
    """
    if held_out and not story.held_out:
        raise UserError("storyworld: no combinations are held out; give held_out of at least 0.06")
    return Grammar(markup(story), tables(story), bonds(story, held_out=held_out))


WORLD = world(DEFAULT)
"""The grammar of the default corpus."""

ALPHABET: tuple[str, ...] = WORLD.alphabet
"""Every character that occurs in stories of any configuration, sorted."""

MAX_CHARACTERS = WORLD.longest
"""No default story is longer, so that a story and its end token fit a context of 256."""


def stories(seed: int, story: StoryConfig = DEFAULT, *, held_out: bool = False) -> Iterator[Story]:
    """Independent stories without end, the same for a seed everywhere.

    Only `random.Random.random` is drawn from, whose sequence Python keeps fixed for a seed.

    Raises:
        UserError: A negative seed, which would give the stories of the positive one; or held-out
            stories where nothing is held out.
    """
    if seed < 0:
        raise UserError(f"storyworld: the seed must be 0 or more, got {seed}")
    grammar = world(story, held_out=held_out)
    # of their own, not those of the other stories with other words
    draw = random.Random(f"held out {seed}" if held_out else seed)
    while True:
        yield grammar.tell(draw)


def surprisal(text: str, story: StoryConfig = DEFAULT, *, held_out: bool = False) -> float:
    """`-log p(text)` in nats of one whole story, end included; inf where it is no story."""
    readings = world(story, held_out=held_out).readings(text)
    assert len(readings) < 2, "a grammar without ambiguity gave two readings"
    return readings[0].nats if readings else math.inf


def derivations(text: str, story: StoryConfig = DEFAULT, *, held_out: bool = False) -> int:
    """How many ways the grammar derives a text: one for each story, none for anything else."""
    return len(world(story, held_out=held_out).readings(text))


def entropy(story: StoryConfig = DEFAULT, *, held_out: bool = False) -> Entropy:
    """Exact entropy and mean length of the stories; see `Entropy.nats_per_character`."""
    return world(story, held_out=held_out).entropy
