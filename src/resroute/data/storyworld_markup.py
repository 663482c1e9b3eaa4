"""Marked-up stories as data: reads the markup of `storyworld_words` and refuses ambiguous ones."""

import functools
import itertools
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from resroute.data.storyworld_odds import Combinations, Odds, combined_marginal, marginal, odds
from resroute.data.storyworld_words import Table

Bonds = Mapping[tuple[str, str, str], Combinations]
Rows = dict[str, int]


@dataclass(frozen=True)
class Bond:
    """What a fact's draw depends on where it is the second or third of a combination.

    Attributes:
        given: The facts of the combination told before this one, from its first.
        rivals: Those of the combination's first fact.
        combinations: What may be told.
    """

    given: tuple[str, ...]
    rivals: tuple[str, ...]
    combinations: Combinations


@dataclass(frozen=True)
class Mention:
    """A fact's word at one place in a story.

    Attributes:
        fact: The fact's name.
        words: The text to print for each row of the fact's table.
        rivals: Facts of the same table told before this one; their rows are taken.
        is_first: Whether the fact is drawn here rather than repeated.
        bond: The combination to which the fact belongs here, if any; it then has no rivals.
    """

    fact: str
    words: tuple[str, ...]
    rivals: tuple[str, ...]
    is_first: bool
    bond: Bond | None = None

    def odds(self, rows: Rows) -> Odds:
        """Odds of the fact's draw, given the rows of the facts told so far."""
        if self.bond is not None:
            return self.bond.combinations.odds(tuple([rows[fact] for fact in self.bond.given]))
        if not self.rivals:
            return odds(len(self.words))
        # in one order, since only the set matters
        return odds(len(self.words), tuple(sorted([rows[fact] for fact in self.rivals])))

    def moments(self) -> tuple[float, tuple[float, ...]]:
        """Mean entropy of the fact's draw, and the distribution of its row, over all stories."""
        if self.bond is None:
            return marginal(len(self.words), len(self.rivals))
        bond = self.bond
        return combined_marginal(bond.combinations, len(bond.given), len(bond.rivals))


@dataclass(frozen=True)
class Choice:
    """Alternative passages, likeliest first."""

    options: tuple["Passage", ...]


Piece = str | Mention | Choice
Passage = tuple[Piece, ...]
Told = tuple[str | Mention, ...]


@dataclass(frozen=True)
class _Tables:
    facts: Mapping[str, Table]
    bonds: Bonds


def read_markup(markup: str, facts: Mapping[str, Table], bonds: Bonds) -> Passage:
    """Read marked-up text into pieces and check that every choice in it can be decided.

    Options of a choice must introduce the same facts, unless nothing follows the choice.

    Args:
        markup: See `storyworld_words`.
        facts: The table of each fact.
        bonds: Facts of which some combinations alone are told. A bond holds for its second and
            third fact where those before them have been told already.

    Raises:
        ValueError: The markup is malformed, or a choice in it is ambiguous.
    """
    tokens = deque(re.findall(r"[\[\]|]|\{[^{}]*\}|[^\[\]|{}]+", markup))
    if "".join(tokens) != markup:
        raise ValueError("storyworld markup: a stray { or }")
    passage, _ = _read(tokens, (), _Tables(facts, bonds))
    if tokens:
        raise ValueError(f"storyworld markup: {tokens[0]!r} stands outside of [...]")
    _check(passage)
    return passage


def _read(
    tokens: deque[str], known: tuple[str, ...], tables: _Tables
) -> tuple[Passage, tuple[str, ...]]:
    """Take tokens up to a `|` or `]` of an outer choice; returns the passage and the facts known.

    Known facts stand in the order in which they are told.
    """
    pieces: list[Piece] = []
    while tokens and tokens[0] not in ("|", "]"):
        token = tokens.popleft()
        if token == "[":
            choice, known = _read_choice(tokens, known, tables)
            pieces.append(choice)
        elif token.startswith("{"):
            mention = _mention(token[1:-1], known, tables)
            known = (*known, mention.fact) if mention.is_first else known
            pieces.append(mention)
        else:
            pieces.append(token)
    return tuple(pieces), known


def _read_choice(
    tokens: deque[str], known: tuple[str, ...], tables: _Tables
) -> tuple[Choice, tuple[str, ...]]:
    options: list[Passage] = []
    learned: list[tuple[str, ...]] = []
    separator = "|"
    while separator == "|":
        option, after = _read(tokens, known, tables)
        if not tokens:
            raise ValueError("storyworld markup: a [ is not closed")
        options.append(option)
        learned.append(after)
        separator = tokens.popleft()
    if len(set(learned)) > 1 and tokens:
        raise ValueError(f"storyworld markup: options tell different facts: {learned}")
    return Choice(tuple(options)), learned[0]


def _mention(reference: str, known: tuple[str, ...], tables: _Tables) -> Mention:
    fact, _, form = reference.partition(".")
    if fact not in tables.facts:
        raise ValueError(f"storyworld markup: unknown fact in {{{reference}}}")
    earlier = known[: known.index(fact)] if fact in known else known
    mention = Mention(
        fact=fact,
        words=tuple(_word(row, form) for row in tables.facts[fact]),
        rivals=_rivals(fact, earlier, tables),
        is_first=fact not in known,
        bond=_bond(fact, earlier, tables),
    )
    if mention.rivals and mention.bond:
        raise ValueError(f"storyworld markup: {{{reference}}} has rivals and a bond")
    return mention


def _rivals(fact: str, earlier: tuple[str, ...], tables: _Tables) -> tuple[str, ...]:
    return tuple(other for other in earlier if tables.facts[other] is tables.facts[fact])


def _bond(fact: str, earlier: tuple[str, ...], tables: _Tables) -> Bond | None:
    for names, combinations in tables.bonds.items():
        given = names[: names.index(fact)] if fact in names else ()
        if given and set(given) <= set(earlier):
            before_first = earlier[: earlier.index(given[0])]
            return Bond(given, _rivals(given[0], before_first, tables), combinations)
    return None


def _word(row: Mapping[str, str], form: str) -> str:
    plain = next(iter(row.values()))
    if not form:
        return plain
    if form == "a":
        return f"{'an' if plain[0] in 'aeiou' else 'a'} {plain}"
    if form.lower() not in row:
        raise ValueError(f"storyworld markup: {plain!r} has no form {form!r}")
    word = row[form.lower()]
    return word.capitalize() if form[0].isupper() else word


def _check(passage: Passage) -> None:
    """Every first mention and every choice must be decided by the text that follows."""
    for piece in passage:
        if isinstance(piece, Mention) and piece.is_first:
            for one, other in itertools.permutations(piece.words, 2):
                if one.startswith(other):
                    raise ValueError(f"storyworld: {other!r} begins {one!r} of {piece.fact!r}")
        elif isinstance(piece, Choice):
            for option in piece.options:
                _check(option)
            for pair in itertools.combinations(map(beginnings, piece.options), 2):
                for begun in itertools.product(*pair):
                    _check_decidable(*begun)


def beginnings(option: Passage) -> list[Told]:
    """How an option can begin: the pieces before anything in it is left to chance.

    Where it opens with a choice, the beginnings of all the choice's options.
    """
    if option and isinstance(option[0], Choice):
        return [b for inner in option[0].options for b in beginnings(inner + option[1:])]
    told: list[str | Mention] = []
    for piece in option:
        if isinstance(piece, Choice) or (isinstance(piece, Mention) and piece.is_first):
            break
        told.append(piece)
    return [tuple(told)]


# the scenes of a long story begin alike
@functools.lru_cache(1 << 12)
def _check_decidable(one: Told, other: Told) -> None:
    """Neither beginning may be a prefix of the other, whatever the facts are.

    Looks as far as the first difference and the first fact after it: stricter than needed, and
    small enough to try every assignment of facts.
    """
    shared = 0
    while shared < min(len(one), len(other)) and one[shared] == other[shared]:
        shared += 1
    heads = [_up_to_mention(one[shared:]), _up_to_mention(other[shared:])]
    mentions = {piece.fact: piece for head in heads for piece in head if isinstance(piece, Mention)}
    for drawn in itertools.product(*(range(len(m.words)) for m in mentions.values())):
        rows = dict(zip(mentions, drawn, strict=True))
        if any(rows.get(rival) == rows[m.fact] for m in mentions.values() for rival in m.rivals):
            continue
        first, second = (spell(head, rows) for head in heads)
        if first.startswith(second) or second.startswith(first):
            raise ValueError(f"storyworld: {first!r} and {second!r} cannot be told apart")


def _up_to_mention(pieces: Told) -> Told:
    first = next((i for i, p in enumerate(pieces) if isinstance(p, Mention)), len(pieces))
    return pieces[: first + 1]


def spell(pieces: Told, rows: Mapping[str, int]) -> str:
    """The text of pieces in which nothing is left to chance."""
    return "".join(p if isinstance(p, str) else p.words[rows[p.fact]] for p in pieces)
