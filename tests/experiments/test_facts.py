import json
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from resroute import config
from resroute.config import UserError
from resroute.data import END_OF_TEXT, CharTokenizer, storyworld
from resroute.data.storyworld import Grammar, world
from resroute.data.storyworld_knobs import StoryConfig
from resroute.data.storyworld_markup import Mention, Passage, Rows
from resroute.data.storyworld_odds import odds
from resroute.data.storyworld_recall import Recall, recalls
from resroute.experiments.facts import FactGroup, FactScores, lines, score_facts
from resroute.model import GPT, GPTConfig

TOKENIZER = CharTokenizer((*storyworld.ALPHABET, END_OF_TEXT))
END = TOKENIZER.vocab_size - 1
HARD = StoryConfig(length=2, entities=3, distance=60, held_out=0.25)

# what is left to tell: the letters that come next, the pieces after them, the facts told, and p
Thread = tuple[str, Any, Rows, float]


def threads(rest: Any, rows: Rows, p: float) -> Iterator[Thread]:
    """Every way to go on with a linked list of pieces, up to its next letters."""
    if rest is None:
        yield "", None, rows, p
        return
    piece, after = rest
    if isinstance(piece, str):
        yield from [(piece, after, rows, p)] if piece else threads(after, rows, p)
    elif not isinstance(piece, Mention):
        for option, q in odds(len(piece.options)).items():
            yield from threads(linked(piece.options[option], after), rows, p * q)
    elif piece.is_first:
        for row, q in piece.odds(rows).items():
            yield piece.words[row], after, {**rows, piece.fact: row}, p * q
    else:
        yield piece.words[rows[piece.fact]], after, rows, p


def linked(passage: Passage, after: Any) -> Any:
    for piece in reversed(passage):
        after = (piece, after)
    return after


class Oracle:
    """The generator itself as a model: the true distribution of the next letter, and no other."""

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar

    def __call__(self, tokens: Tensor) -> tuple[Tensor, None]:
        logits = torch.full((*tokens.shape, TOKENIZER.vocab_size), -math.inf)
        for row, ids in enumerate(tokens.tolist()):
            assert ids[0] == END
            live = list(threads(linked(self.grammar.passage, None), {}, 1.0))
            for place in range(len(ids)):
                if place and ids[place] == END:
                    logits[row, place:] = 0.0
                    break
                if place:
                    live = list(self.after(live, TOKENIZER.symbols[ids[place]]))
                total = math.fsum(p for *_, p in live)
                for letters, *_, p in live:
                    letter = TOKENIZER.symbols.index(letters[0]) if letters else END
                    share = torch.tensor(math.log(p / total))
                    logits[row, place, letter] = torch.logaddexp(logits[row, place, letter], share)
        return logits, None

    @staticmethod
    def after(live: list[Thread], letter: str) -> Iterator[Thread]:
        for letters, rest, rows, p in live:
            if letters[:1] == letter:
                if len(letters) > 1:
                    yield letters[1:], rest, rows, p
                else:
                    yield from threads(rest, rows, p)


class Teller:
    """A model that at each place puts its trust in words that `choose` weighs."""

    def __init__(
        self, story: StoryConfig, count: int, choose: Callable[[Recall], dict[str, float]]
    ) -> None:
        self.choose = choose
        self.found = {}
        draw = random.Random("facts, seen, 0")
        for _ in range(count):
            account = world(story).recount(draw)
            self.found[account.story.text[:-1]] = recalls(account)

    def __call__(self, tokens: Tensor) -> tuple[Tensor, None]:
        logits = torch.zeros(*tokens.shape, TOKENIZER.vocab_size)
        for row, ids in enumerate(tokens.tolist()):
            text = TOKENIZER.decode([i for i in ids if i != END])
            for recall in self.found[text]:
                weights = self.choose(recall)
                for depth in range(len(recall.words[0])):
                    so_far = recall.words[0][:depth]
                    letters = torch.full((TOKENIZER.vocab_size,), 1e-9)
                    for word, weight in weights.items():
                        if word.startswith(so_far) and len(word) > depth:
                            letters[TOKENIZER.symbols.index(word[depth])] += weight
                    logits[row, recall.start + depth] = letters.log()
        return logits, None


def group(scores: FactScores, name: str = "all", combinations: str = "seen") -> FactGroup:
    (found,) = [g for g in scores.groups if (g.name, g.combinations) == (name, combinations)]
    return found


def tiny(context: int = 256) -> GPT:
    torch.manual_seed(0)
    return GPT(
        GPTConfig(
            vocab_size=TOKENIZER.vocab_size, context=context, num_layers=1, num_heads=2, dim=16
        )
    )


@pytest.mark.parametrize(
    ("story", "held_out"), [(StoryConfig(), False), (HARD, False), (HARD, True)]
)
def test_the_oracle_loses_exactly_the_nats_of_a_story(story: StoryConfig, held_out: bool) -> None:
    # the generator read letter by letter agrees with the generator that told the story
    grammar = world(story, held_out=held_out)
    draw = random.Random(3)
    for _ in range(6):
        told = grammar.tell(draw)
        ids = torch.tensor([END, *TOKENIZER.encode(told.text).tolist()])
        logits, _ = Oracle(grammar)(ids[None])
        log_p = logits.double().log_softmax(-1)[0]
        targets = torch.cat((ids[1:], ids[:1]))
        nats = -log_p[torch.arange(len(ids)), targets].sum()
        assert float(nats) == pytest.approx(told.nats, abs=1e-3)


@pytest.mark.parametrize("story", [StoryConfig(), StoryConfig(length=2, entities=3, distance=60)])
def test_the_oracle_is_right_at_every_place(story: StoryConfig) -> None:
    scores = score_facts(Oracle(world(story)), TOKENIZER, story, stories=40, batch=7)
    assert [(g.accuracy, g.log_odds, g.error) for g in scores.groups] == [
        (1.0, 50.0, 0.0) for _ in scores.groups
    ]
    assert group(scores).places > 250
    assert 0.05 < group(scores).chance < group(scores).blind < 0.4


def test_the_oracle_is_right_about_held_out_combinations() -> None:
    class Both:
        """Reads a story by whichever grammar told it."""

        def __call__(self, tokens: Tensor) -> tuple[Tensor, None]:
            rows = []
            for ids in tokens:
                text = TOKENIZER.decode(i for i in ids.tolist() if i != END)
                endings = [text + last for last in '.!"']
                is_seen = any(storyworld.derivations(whole, HARD) for whole in endings)
                rows.append(Oracle(world(HARD, held_out=not is_seen))(ids[None])[0])
            return torch.cat(rows), None

    scores = score_facts(Both(), TOKENIZER, HARD, stories=12)
    for kind in ("seen", "held out"):
        assert group(scores, combinations=kind).accuracy == 1.0
        assert group(scores, "owner", kind).places == 12 * 5
    assert {g.combinations for g in scores.groups} == {"seen", "held out"}


def test_a_model_that_remembers_another_row_scores_chance() -> None:
    draw = random.Random(1)
    shuffled = Teller(StoryConfig(), 400, lambda recall: {draw.choice(recall.words): 1.0})
    found = group(score_facts(shuffled, TOKENIZER, StoryConfig(), stories=400))
    error = math.sqrt(found.chance * (1 - found.chance) / found.places)
    assert abs(found.accuracy - found.chance) < 4 * error
    assert found.log_odds < -10


def test_a_model_that_knows_the_odds_alone_scores_blind() -> None:
    blind = Teller(StoryConfig(), 60, lambda r: dict(zip(r.words, r.weights, strict=True)))
    scores = score_facts(blind, TOKENIZER, StoryConfig(), stories=60)
    assert [g.accuracy for g in scores.groups] == [g.blind for g in scores.groups]
    assert group(scores).blind > group(scores).chance


def test_log_odds_are_those_of_the_words() -> None:
    # nine to one for the right word, the rest shared by the wrong ones
    sure = Teller(
        StoryConfig(),
        30,
        lambda r: {w: 0.9 if w == r.words[0] else 0.1 / (len(r.words) - 1) for w in r.words},
    )
    scores = score_facts(sure, TOKENIZER, StoryConfig(), stories=30)
    assert group(scores).accuracy == 1.0
    assert [g.log_odds for g in scores.groups] == pytest.approx(
        [math.log(9)] * len(scores.groups), abs=1e-4
    )


def test_groups_share_out_the_places() -> None:
    scores = score_facts(tiny(), TOKENIZER, StoryConfig(), stories=50)
    everything = group(scores)
    for by in ("distance", "fact"):
        parts = [g for g in scores.groups if g.by == by]
        assert sum(g.places for g in parts) == everything.places
        assert math.fsum(g.places * g.accuracy for g in parts) == pytest.approx(
            everything.places * everything.accuracy
        )
    names = [g.name for g in scores.groups if g.by == "distance"]
    assert names == ["0-31", "32-63", "64-127", "128-255"]
    # one accuracy for each story, all of which count alike: the error of a mean
    assert 0 < everything.error < 0.05


def test_scores_depend_on_the_seed_and_not_on_the_batch() -> None:
    def scored(**changed: int) -> FactScores:
        return score_facts(tiny(), TOKENIZER, StoryConfig(), stories=20, **changed)

    one, other = scored(batch=20), scored(batch=3)
    assert [g.accuracy for g in one.groups] == [g.accuracy for g in other.groups]
    assert group(one).log_odds == pytest.approx(group(other).log_odds, abs=1e-5)
    assert scored(seed=1).groups != one.groups


def test_the_stories_are_not_those_of_a_corpus() -> None:
    draw = random.Random("facts, seen, 0")
    assert world(StoryConfig()).tell(draw) != next(storyworld.stories(0))


def test_a_model_keeps_its_mode() -> None:
    model = tiny()
    modes = []
    model.register_forward_pre_hook(lambda module, _: modes.append(module.training))
    score_facts(model.train(), TOKENIZER, StoryConfig(), stories=2)
    assert modes == [False]
    assert model.training
    assert not any(parameter.grad is not None for parameter in model.parameters())


def test_scores_are_json_and_lines() -> None:
    scores = score_facts(tiny(1024), TOKENIZER, HARD, stories=5)
    data = json.loads(json.dumps(config.to_dict(scores), allow_nan=False))
    assert config.from_dict(FactScores, data) == scores
    shown = lines(scores)
    assert shown[0] == "5 stories, seen combinations"
    assert shown.count("") == 1
    assert "5 stories, held out combinations" in shown
    assert shown[2].split()[:2] == ["all", f"{group(scores).places}"]
    assert max(map(len, shown)) <= 80
    row = next(line for line in shown if line.startswith("  owner "))
    owner = group(scores, "owner")
    assert row.split()[1:3] == ["25", f"{100 * owner.accuracy:.1f}"]


def test_what_cannot_be_scored_is_refused() -> None:
    with pytest.raises(UserError, match="more than the model's context of 64\nscore shorter ones"):
        score_facts(tiny(64), TOKENIZER, StoryConfig(), stories=2)
    with pytest.raises(UserError, match=r"vocabulary lacks an end of text"):
        score_facts(tiny(), CharTokenizer(storyworld.ALPHABET), StoryConfig(), stories=2)
    small = CharTokenizer(tuple(s for s in TOKENIZER.symbols if s not in "WY"))
    with pytest.raises(UserError, match=r"vocabulary lacks 'W', 'Y'"):
        score_facts(tiny(), small, StoryConfig(), stories=2)
    broken = tiny()
    torch.nn.init.constant_(broken.norm.weight, math.nan)
    with pytest.raises(UserError, match="gives no numbers"):
        score_facts(broken, TOKENIZER, StoryConfig(), stories=2)
    with pytest.raises(UserError, match="number of stories must be a whole number of at least 1"):
        score_facts(tiny(), TOKENIZER, StoryConfig(), stories=0)
