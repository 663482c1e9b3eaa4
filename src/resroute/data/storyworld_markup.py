"""Marked-up stories as data: reads the markup of `storyworld_words` and refuses ambiguous ones."""

import itertools
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from resroute.data.storyworld_words import Table


@dataclass(frozen=True)
class Mention:
    """A fact's word at one place in a story.

    Attributes:
        fact: The fact's name.
        words: The text to print for each row of the fact's table.
        rivals: Facts of the same table told before this one; their rows are taken.
        is_first: Whether the fact is drawn here rather than repeated.
    """

    fact: str
    words: tuple[str, ...]
    rivals: tuple[str, ...]
    is_first: bool


@dataclass(frozen=True)
class Choice:
    """Alternative passages, likeliest first."""

    options: tuple["Passage", ...]


Piece = str | Mention | Choice
Passage = tuple[Piece, ...]
Told = tuple[str | Mention, ...]


def read_markup(markup: str, facts: Mapping[str, Table]) -> Passage:
    """Read marked-up text into pieces and check that every choice in it can be decided.

    Options of a choice must introduce the same facts, unless nothing follows the choice.

    Raises:
        ValueError: The markup is malformed, or a choice in it is ambiguous.
    """
    tokens = deque(re.findall(r"[\[\]|]|\{[^{}]*\}|[^\[\]|{}]+", markup))
    if "".join(tokens) != markup:
        raise ValueError("storyworld markup: a stray { or }")
    passage, _ = _read(tokens, (), facts)
    if tokens:
        raise ValueError(f"storyworld markup: {tokens[0]!r} stands outside of [...]")
    _check(passage)
    return passage


def _read(
    tokens: deque[str], known: tuple[str, ...], facts: Mapping[str, Table]
) -> tuple[Passage, tuple[str, ...]]:
    """Take tokens up to a `|` or `]` of an outer choice; returns the passage and the facts known.

    Known facts stand in the order in which they are told.
    """
    pieces: list[Piece] = []
    while tokens and tokens[0] not in ("|", "]"):
        token = tokens.popleft()
        if token == "[":
            choice, known = _read_choice(tokens, known, facts)
            pieces.append(choice)
        elif token.startswith("{"):
            mention = _mention(token[1:-1], known, facts)
            known = (*known, mention.fact) if mention.is_first else known
            pieces.append(mention)
        else:
            pieces.append(token)
    return tuple(pieces), known


def _read_choice(
    tokens: deque[str], known: tuple[str, ...], facts: Mapping[str, Table]
) -> tuple[Choice, tuple[str, ...]]:
    options: list[Passage] = []
    learned: list[tuple[str, ...]] = []
    separator = "|"
    while separator == "|":
        option, after = _read(tokens, known, facts)
        if not tokens:
            raise ValueError("storyworld markup: a [ is not closed")
        options.append(option)
        learned.append(after)
        separator = tokens.popleft()
    if len(set(learned)) > 1 and tokens:
        raise ValueError(f"storyworld markup: options tell different facts: {learned}")
    return Choice(tuple(options)), learned[0]


def _mention(reference: str, known: tuple[str, ...], facts: Mapping[str, Table]) -> Mention:
    fact, _, form = reference.partition(".")
    if fact not in facts:
        raise ValueError(f"storyworld markup: unknown fact in {{{reference}}}")
    earlier = known[: known.index(fact)] if fact in known else known
    return Mention(
        fact=fact,
        words=tuple(_word(row, form) for row in facts[fact]),
        rivals=tuple(rival for rival in earlier if facts[rival] is facts[fact]),
        is_first=fact not in known,
    )


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
            for pair in itertools.combinations(map(_beginnings, piece.options), 2):
                for beginnings in itertools.product(*pair):
                    _check_decidable(*beginnings)


def _beginnings(option: Passage) -> list[Told]:
    """How an option can begin: the pieces before anything in it is left to chance.

    Where it opens with a choice, the beginnings of all the choice's options.
    """
    if option and isinstance(option[0], Choice):
        return [b for inner in option[0].options for b in _beginnings(inner + option[1:])]
    told: list[str | Mention] = []
    for piece in option:
        if isinstance(piece, Choice) or (isinstance(piece, Mention) and piece.is_first):
            break
        told.append(piece)
    return [tuple(told)]


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
        first, second = (_print(head, rows) for head in heads)
        if first.startswith(second) or second.startswith(first):
            raise ValueError(f"storyworld: {first!r} and {second!r} cannot be told apart")


def _up_to_mention(pieces: Told) -> Told:
    first = next((i for i, p in enumerate(pieces) if isinstance(p, Mention)), len(pieces))
    return pieces[: first + 1]


def _print(pieces: Told, rows: Mapping[str, int]) -> str:
    return "".join(p if isinstance(p, str) else p.words[rows[p.fact]] for p in pieces)
