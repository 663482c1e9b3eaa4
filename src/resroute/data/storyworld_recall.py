"""Where a story asks for what it told before, and which words would be wrong there."""

import itertools
from collections import defaultdict
from dataclasses import dataclass

from resroute.data.storyworld import Account, Taken
from resroute.data.storyworld_markup import Mention, Rows, beginnings, spell
from resroute.data.storyworld_odds import weight


@dataclass(frozen=True, kw_only=True)
class Recall:
    """A place where a fact that was told before is told again.

    Attributes:
        fact: The fact's name without its number: `owner` for `owner3`.
        start: Place of the word in the story, in characters.
        distance: Characters since the end of the last mention that tells this word.
        words: The right word, then those of the fact's other rows, each once. The generator tells
            none of the others there, and each differs from the right one before either ends.
        weights: Of each word, how likely a guess would be that remembers nothing; not normalised.
    """

    fact: str
    start: int
    distance: int
    words: tuple[str, ...]
    weights: tuple[float, ...]


@dataclass(frozen=True)
class _Turn:
    """Another way in which a story could have gone on from `start`, as far as that is certain."""

    start: int
    text: str


def recalls(account: Account) -> list[Recall]:
    """All places of a story where a fact is told again and a wrong word can be told apart.

    Where the story could have taken another turn at that place, words with which that turn begins
    are not wrong and do not count: after "Tom peeked" both hiding places may follow.
    """
    text = account.story.text
    told: dict[str, list[tuple[int, Mention]]] = defaultdict(list)
    turns: list[_Turn] = []
    found: list[Recall] = []
    for place, step in account.steps:
        # a turn from which the text has departed never comes back
        turns = [turn for turn in turns if turn.text.startswith(text[turn.start : place])]
        if isinstance(step, Taken):
            turns += [_Turn(place, other) for other in _others(step, account.rows)]
            continue
        row = account.rows[step.fact]
        told[step.fact].append((place + len(step.words[row]), step))
        if step.is_first:
            continue
        possible = [turn.text[place - turn.start :] for turn in turns]
        weights = _candidates(step, row, possible)
        if len(weights) > 1:
            last = next(end for end, m in reversed(told[step.fact][:-1]) if _tells(m, step, row))
            found.append(
                Recall(
                    fact=step.fact.rstrip("0123456789"),
                    start=place,
                    distance=place - last,
                    words=tuple(weights),
                    weights=tuple(weights.values()),
                )
            )
    return found


def _others(taken: Taken, rows: Rows) -> list[str]:
    """How the options that were not taken begin, where a fact is told before they are decided."""
    options = taken.choice.options
    begins_with_fact = any(
        isinstance(piece, Mention)
        for beginning in beginnings(options[taken.option])
        for piece in beginning
    )
    if not begins_with_fact:
        return []
    others = options[: taken.option] + options[taken.option + 1 :]
    return [spell(beginning, rows) for option in others for beginning in beginnings(option)]


def _candidates(mention: Mention, row: int, possible: list[str]) -> dict[str, float]:
    """The right word, then the wrong ones, each with the odds of its rows together."""
    right = mention.words[row]
    found = {right: 0.0}
    for other, word in enumerate(mention.words):
        apart = word[: _shared(word, right) + 1]
        is_apart = word == right or not (word.startswith(right) or right.startswith(word))
        is_wrong = not any(turn.startswith(apart) or apart.startswith(turn) for turn in possible)
        if word == right or (is_apart and is_wrong):
            found[word] = found.get(word, 0.0) + weight(other)
    return found


def _shared(one: str, other: str) -> int:
    """Length of the common beginning of two words."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _tells(earlier: Mention, later: Mention, row: int) -> bool:
    """Whether who knows the earlier word knows the later one: a name tells "she", not back."""
    return all(
        later.words[other] == later.words[row]
        for other, word in enumerate(earlier.words)
        if word == earlier.words[row]
    )
