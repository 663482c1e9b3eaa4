"""Whether a model remembers: which word it prefers where a story tells a fact again.

The generator knows every such place, the right word and the wrong ones (`storyworld_recall`), so
that a score needs no judge. B stories at once, T tokens, V vocabulary.
"""

import contextlib
import itertools
import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from resroute.config import UserError, require_whole
from resroute.data.storyworld import Account, Grammar, world
from resroute.data.storyworld_knobs import StoryConfig
from resroute.data.storyworld_recall import Recall, recalls
from resroute.data.tokenizer import CharTokenizer
from resroute.model import GPT

Model = Callable[[Tensor], tuple[Tensor | None, Any]]
Combined = Literal["seen", "held out"]

MOST_LOG_ODDS = 50.0
"""Log-odds are cut off here, so that a certain model has a finite mean."""

# beyond these the log-odds are cut off anyway
_LEAST_LOG_P = -1e4
_MOST_EXPONENT = 700.0
_FIRST_BUCKET = 32


@dataclass(frozen=True, kw_only=True)
class FactGroup:
    """Scores over some of the places where a fact is told again."""

    combinations: Combined
    """Whether the stories tell combinations that training stories tell, or held-out ones alone."""
    by: Literal["all", "distance", "fact"]
    name: str
    """The fact, or the distance in characters since it was last told, such as `64-127`."""
    places: int
    accuracy: float
    """Share of places at which the right word is preferred to every wrong one."""
    error: float
    """Standard error of the accuracy, stories taken as independent."""
    log_odds: float
    """Mean log-odds of the right word against all wrong ones together, in nats."""
    chance: float
    """Accuracy of a word picked evenly among the right and the wrong ones."""
    blind: float
    """Accuracy of a model that knows how often each word is told, and remembers nothing."""


@dataclass(frozen=True, kw_only=True)
class FactScores:
    """How well a model remembers the facts of stories; see `score_facts`."""

    story: StoryConfig
    seed: int
    stories: int
    groups: tuple[FactGroup, ...]


@dataclass(frozen=True)
class _Score:
    story: int
    recall: Recall
    is_right: bool
    log_odds: float
    is_right_blind: bool


def score_facts(
    model: GPT | Model,
    tokenizer: CharTokenizer,
    story: StoryConfig,
    *,
    seed: int = 0,
    stories: int = 200,
    device: torch.device | str = "cpu",
    batch: int = 16,
) -> FactScores:
    """Score every place at which fresh stories tell a fact again.

    The model reads the right story. Words are compared where their letters part: with the same text
    before and the same letters so far, which letter is likelier? A place is right where the right
    word wins against every wrong one. The log-odds are log(p / (1 - p)), where p is the product of
    p(letter) over the right word's letters, each among the letters with which the right or a wrong
    word goes on there: what the model would tell if it had to tell one of these words.

    Stories are drawn from a generator that no corpus uses. With `story.held_out`, as many stories
    again tell held-out combinations alone.

    Args:
        model: Maps tokens (B, T) to logits (B, T, V) of the next tokens, and anything else.
        tokenizer: The model's.
        story: Of what kind the stories are; a model may be scored on others than it was trained on.
        seed: Of the stories.
        stories: How many of each kind.
        device: Where the model is.
        batch: B, stories read at once.

    Raises:
        UserError: A vocabulary without the stories' characters or without an end of text, or
            stories longer than the model's context, or a model that has diverged.
    """
    seed = require_whole("the seed of the stories", seed, 0)
    stories = require_whole("the number of stories", stories, 1)
    batch = require_whole("the batch", batch, 1)
    kinds: list[Combined] = ["seen", "held out"] if story.held_out else ["seen"]
    groups: list[FactGroup] = []
    for kind in kinds:
        grammar = world(story, held_out=kind == "held out")
        _check(tokenizer, grammar)
        draw = random.Random(f"facts, {kind}, {seed}")
        accounts = [grammar.recount(draw) for _ in range(stories)]
        _require_room(model, accounts)
        with torch.no_grad(), _evaluating(model):
            scores = list(_scores(model, tokenizer, accounts, torch.device(device), batch))
        groups += _grouped(scores, kind)
    return FactScores(story=story, seed=seed, stories=stories, groups=tuple(groups))


def lines(scores: FactScores) -> list[str]:
    """The scores as a table in plain text, of less than 80 columns."""
    found: list[str] = []
    for kind, groups in itertools.groupby(scores.groups, key=lambda group: group.combinations):
        found += [
            *([""] if found else []),
            f"{scores.stories} stories, {kind} combinations",
            f"{'':<20}{'places':>8}{'right %':>16}{'log-odds':>10}{'chance %':>10}{'blind %':>9}",
        ]
        by = "all"
        for group in groups:
            if group.by != by:
                by = group.by
                found.append("characters since told" if by == "distance" else "fact")
            name = group.name if by == "all" else f"  {group.name}"
            right = f"{100 * group.accuracy:.1f} +- {100 * group.error:.1f}"
            found.append(
                f"{name:<20}{group.places:>8,}{right:>16}{group.log_odds:>10.2f}"
                f"{100 * group.chance:>10.1f}{100 * group.blind:>9.1f}"
            )
    return found


def _check(tokenizer: CharTokenizer, grammar: Grammar) -> None:
    missing = sorted(set(grammar.alphabet) - set(tokenizer.symbols))
    if missing or tokenizer.end_of_text is None:
        lacks = ", ".join(map(repr, missing[:5])) or "an end of text"
        raise UserError(
            f"the model's vocabulary lacks {lacks}\nfacts are scored on models of storyworld"
        )


def _require_room(model: GPT | Model, accounts: Sequence[Account]) -> None:
    longest = max(len(account.story.text) for account in accounts)
    if isinstance(model, GPT) and longest > model.config.context:
        raise UserError(
            f"stories have up to {longest} tokens, more than the model's context of "
            f"{model.config.context}\nscore shorter ones, or train with a longer context"
        )


@contextlib.contextmanager
def _evaluating(model: GPT | Model) -> Iterator[None]:
    was_training = isinstance(model, nn.Module) and model.training
    if isinstance(model, nn.Module):
        model.eval()
    try:
        yield
    finally:
        if isinstance(model, nn.Module):
            model.train(was_training)


def _scores(
    model: GPT | Model,
    tokenizer: CharTokenizer,
    accounts: Sequence[Account],
    device: torch.device,
    batch: int,
) -> Iterator[_Score]:
    end = tokenizer.end_of_text
    assert end is not None
    ids = {symbol: i for i, symbol in enumerate(tokenizer.symbols)}
    # stories of similar length together, to pad little
    order = sorted(range(len(accounts)), key=lambda i: len(accounts[i].story.text))
    for first in range(0, len(order), batch):
        chosen = order[first : first + batch]
        texts = [tokenizer.encode(accounts[i].story.text) for i in chosen]
        tokens = torch.full((len(texts), max(map(len, texts))), end)
        for row, text in enumerate(texts):
            tokens[row, 1 : len(text)] = torch.from_numpy(text[:-1])
        logits, _ = model(tokens.to(device))
        assert logits is not None
        if logits.isnan().any():
            raise UserError("the model gives no numbers: it has diverged and cannot be scored")
        log_p = logits.float().log_softmax(-1).clamp(min=_LEAST_LOG_P).cpu()
        for row, index in enumerate(chosen):
            for recall in recalls(accounts[index]):
                reach = slice(recall.start, recall.start + len(recall.words[0]))
                yield _score(index, recall, log_p[row, reach].tolist(), ids)


def _score(story: int, recall: Recall, log_p: list[list[float]], ids: Mapping[str, int]) -> _Score:
    """Judge one place; `log_p` has V numbers for each letter of the right word."""
    told = turned_off = 0.0
    is_right = is_right_blind = True
    for parting, letters in zip(_partings(recall), log_p, strict=False):
        right = letters[ids[parting.right]]
        wrong = [letters[ids[letter]] for letter in parting.wrong]
        is_right &= all(right > other for other in wrong)
        is_right_blind &= all(parting.weight > other for other in parting.wrong.values())
        # shares of this letter alone; only differences of log p enter
        odds = math.fsum(math.exp(min(other - right, _MOST_EXPONENT)) for other in wrong)
        turned_off += math.exp(told) * odds / (1 + odds)
        told -= math.log1p(odds)
    log_odds = told - math.log(turned_off) if turned_off > 0 else math.inf
    return _Score(
        story=story,
        recall=recall,
        is_right=is_right,
        log_odds=min(max(log_odds, -MOST_LOG_ODDS), MOST_LOG_ODDS),
        is_right_blind=is_right_blind,
    )


@dataclass(frozen=True)
class _Parting:
    """A letter of the right word, with the letters by which wrong words turn off from it.

    Weights are those of the words, the right letter's of all words that still go on together.
    """

    right: str
    weight: float
    wrong: dict[str, float]


def _partings(recall: Recall) -> list[_Parting]:
    """The letters of the right word up to where no wrong one is left."""
    right, *wrong = recall.words
    left = dict(zip(wrong, recall.weights[1:], strict=True))
    found = []
    for depth, letter in enumerate(right):
        if not left:
            break
        off: dict[str, float] = {}
        for word in [word for word in left if word[depth] != letter]:
            off[word[depth]] = off.get(word[depth], 0.0) + left.pop(word)
        found.append(_Parting(letter, recall.weights[0] + sum(left.values()), off))
    return found


def _grouped(scores: Sequence[_Score], kind: Combined) -> list[FactGroup]:
    by_distance: dict[int, list[_Score]] = defaultdict(list)
    by_fact: dict[str, list[_Score]] = defaultdict(list)
    for score in scores:
        by_distance[_bucket(score.recall.distance)].append(score)
        by_fact[score.recall.fact].append(score)
    return [
        *([_group(kind, "all", "all", scores)] if scores else []),
        *(
            _group(kind, "distance", f"{least}-{max(2 * least, _FIRST_BUCKET) - 1}", found)
            for least, found in sorted(by_distance.items())
        ),
        *(_group(kind, "fact", fact, found) for fact, found in sorted(by_fact.items())),
    ]


def _bucket(distance: int) -> int:
    """The least distance of a bucket: 0, 32, 64, 128 and on by doubling."""
    return 0 if distance < _FIRST_BUCKET else 1 << (distance.bit_length() - 1)


def _group(
    kind: Combined, by: Literal["all", "distance", "fact"], name: str, scores: Sequence[_Score]
) -> FactGroup:
    places = len(scores)
    accuracy = sum(score.is_right for score in scores) / places
    # places of one story share its facts
    excess: dict[int, float] = defaultdict(float)
    for score in scores:
        excess[score.story] += score.is_right - accuracy
    return FactGroup(
        combinations=kind,
        by=by,
        name=name,
        places=places,
        accuracy=accuracy,
        error=math.sqrt(math.fsum(e * e for e in excess.values())) / places,
        log_odds=math.fsum(score.log_odds for score in scores) / places,
        chance=math.fsum(1 / len(score.recall.words) for score in scores) / places,
        blind=sum(score.is_right_blind for score in scores) / places,
    )
