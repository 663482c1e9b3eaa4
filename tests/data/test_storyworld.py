import itertools
import math
import random
import re
import statistics

import pytest

from resroute.config import UserError
from resroute.data import storyworld
from resroute.data.storyworld import ALPHABET, Grammar, Story, derivations, stories, surprisal
from resroute.data.storyworld_markup import Mention
from resroute.data.storyworld_words import (
    COLOURS,
    EARNED,
    FACTS,
    LOST,
    MIDDLE,
    NAMES,
    PLACES,
    TALES,
)

SMALL_NAMES = tuple(
    {"name": name, "he": he} for name, he in (("Mia", "she"), ("Ben", "he"), ("Tess", "she"))
)
SMALL_FACTS = {
    "hero": SMALL_NAMES,
    "friend": SMALL_NAMES,
    "third": SMALL_NAMES,
    "treat": ({"word": "apple"}, {"word": "bun"}),
}
SMALL = Grammar(
    "{hero} [met|saw] {friend}. [{hero.He} gave {treat.a} away.|{hero} had {treat.a}.] "
    "[The {treat} was [good|old].|{friend} and {third} ate.]",
    SMALL_FACTS,
)


def told(count: int, *, seed: int) -> list[Story]:
    return list(itertools.islice(stories(seed), count))


def test_a_seed_gives_the_same_stories_and_another_gives_others() -> None:
    assert told(50, seed=3) == told(50, seed=3)
    assert told(50, seed=3) != told(50, seed=4)


def test_a_negative_seed_is_refused() -> None:
    with pytest.raises(UserError, match="must be 0 or more, got -1"):
        told(1, seed=-1)


def test_the_first_story_stays_as_it_is() -> None:
    story = told(1, seed=0)[0]
    assert story.text == (
        "One misty Sunday, Tom dropped his green wagon. He felt upset and searched by the lake all "
        'alone. "I saw it near the well," cried Ben. Hurrah, near the well they found the green '
        "wagon! He beamed at Ben, glad of that misty Sunday."
    )
    assert story.nats == pytest.approx(37.27567464726212, abs=1e-9)


@pytest.mark.parametrize("seed", [0, 1])
def test_every_story_has_one_derivation_and_its_nats_are_its_surprisal(seed: int) -> None:
    for story in told(1500, seed=seed):
        assert derivations(story.text) == 1
        assert surprisal(story.text) == pytest.approx(story.nats, abs=1e-9)


def test_surprisal_of_a_small_grammar_by_hand() -> None:
    # a choice among n costs -log((1 / (rank + 2)) / sum): two options are 4/7 and 3/7, three names
    # 20/47, 15/47 and 12/47; after Mia, Ben has 15/27
    text = "Mia saw Ben. She gave an apple away. Ben and Tess ate."
    p = 20 / 47 * 3 / 7 * 15 / 27 * 4 / 7 * 4 / 7 * 3 / 7
    readings = SMALL.readings(text)
    assert [reading.nats for reading in readings] == [pytest.approx(-math.log(p), abs=1e-12)]
    assert readings[0].rows == {"hero": 0, "friend": 1, "treat": 0, "third": 2}


def test_a_small_grammar_sums_to_one_and_its_floor_is_the_enumerated_one() -> None:
    draw = random.Random(0)
    texts = {SMALL.tell(draw).text for _ in range(20_000)}
    assert len(texts) == 3 * 2 * 2 * 2 * 2 * 3
    p = {text: math.exp(-SMALL.readings(text)[0].nats) for text in texts}
    assert math.fsum(p.values()) == pytest.approx(1, abs=1e-12)
    assert SMALL.entropy.nats == pytest.approx(
        -math.fsum(q * math.log(q) for q in p.values()), abs=1e-12
    )
    assert SMALL.entropy.characters == pytest.approx(
        math.fsum(q * len(text) for text, q in p.items()), abs=1e-12
    )
    assert SMALL.longest >= max(map(len, texts))


def test_means_of_a_sampled_corpus_agree_with_the_exact_floor() -> None:
    corpus = told(20_000, seed=7)
    floor = storyworld.entropy()
    for values, exact in (
        ([story.nats for story in corpus], floor.nats),
        ([float(len(story.text)) for story in corpus], floor.characters),
    ):
        error = statistics.stdev(values) / math.sqrt(len(values))
        assert abs(statistics.fmean(values) - exact) < 4 * error
    sampled = sum(s.nats for s in corpus) / sum(len(s.text) + 1 for s in corpus)
    assert sampled == pytest.approx(floor.nats_per_character, rel=2e-3)
    assert floor.nats_per_character == pytest.approx(floor.nats / (floor.characters + 1))
    assert 0.12 < floor.nats_per_character < 0.30


def test_the_frequencies_of_tales_and_names_are_those_of_the_odds() -> None:
    corpus = told(20_000, seed=8)
    opening = re.compile(r"One \w+ \w+, (\w+) ")
    heroes = [opening.match(story.text)[1] for story in corpus]
    first = 1 / 3 / sum(1 / (rank + 2) for rank in range(1, len(NAMES) + 1))
    assert heroes.count(NAMES[0]["name"]) / 20_000 == pytest.approx(first, abs=0.01)
    hiding = sum("hide and seek" in story.text for story in corpus) / 20_000
    assert hiding == pytest.approx(1 / 6 / sum(1 / r for r in range(3, 3 + len(TALES))), abs=0.012)


def test_no_story_of_the_grammar_outgrows_a_context_of_256() -> None:
    assert storyworld.MAX_CHARACTERS <= 250
    lengths = [len(story.text) for story in told(5000, seed=2)]
    assert max(lengths) <= storyworld.MAX_CHARACTERS
    assert min(lengths) > 150
    assert statistics.fmean(lengths) < 230


def test_stories_are_clean_text_over_exactly_the_alphabet() -> None:
    corpus = told(5000, seed=5)
    assert set().union(*(story.text for story in corpus)) == set(ALPHABET)
    assert list(ALPHABET) == sorted(ALPHABET)
    assert len(ALPHABET) <= 45
    assert "".join(ALPHABET).isascii()
    for story in corpus:
        assert story.text == " ".join(story.text.split())
        assert story.text[-1] in '.!"'
        assert story.text.count('"') % 2 == 0
        assert not re.search(r"\ba [aeiou]|\ban [^aeiou]", story.text)


def test_no_story_begins_another() -> None:
    texts = sorted({story.text for story in told(20_000, seed=6)})
    assert not any(after.startswith(before) for before, after in itertools.pairwise(texts))
    # every proper beginning is refused, so a story's end is certain and free
    assert all(surprisal(texts[0][:end]) == math.inf for end in range(len(texts[0])))
    assert surprisal(texts[0] + " ") == math.inf


def test_late_mentions_repeat_early_facts() -> None:
    def last(pattern: str, text: str) -> str:
        return re.findall(pattern, text)[-1]

    # only its own tale drawn, so that each pattern finds its sentence
    lost = Grammar("{weather} {time}, {hero} " + LOST.replace(MIDDLE, ""), FACTS)
    earned = Grammar("{weather} {time}, {hero} " + EARNED.replace(MIDDLE, ""), FACTS)
    draw = random.Random(0)
    colour = "(?:" + "|".join(row["word"] for row in COLOURS) + ")"
    place = "(?:" + "|".join(row["word"] for row in PLACES) + ")"
    for _ in range(300):
        text = lost.tell(draw).text
        things = re.findall(rf"{colour} \w+", text)
        assert len(things) == 2
        assert things[0] == things[1]
        told_place, found_place = re.findall(place, text)[1:]
        assert told_place == found_place
        hero, owner = re.search(r", (\w+) .*?(his|her) ", text).groups()
        assert owner == next(row["his"] for row in NAMES if row["name"] == hero)
        text = earned.tell(draw).text
        assert re.search(rf"an? ({colour} \w+)\.", text)[1] == last(rf"an? ({colour} \w+)", text)


def test_a_tampered_story_is_no_story() -> None:
    told_lost = next(s.text for s in stories(0) if re.search(r"(lay|was) the red \w+!", s.text))
    assert math.isfinite(surprisal(told_lost))
    start = told_lost.rindex("red")
    tampered = told_lost[:start] + "blue" + told_lost[start + 3 :]
    assert surprisal(tampered) == math.inf
    assert derivations(tampered) == 0
    assert surprisal("") == math.inf


def test_forgetting_a_colour_would_cost_the_log_of_its_odds() -> None:
    # drawing the colour again, in place of repeating it, is dearer by exactly its entropy
    remembered = Grammar("{colour} {thing} and {colour} {thing}", FACTS)
    forgotten = Grammar(
        "{colour} {thing} and {again} {thing}", {**FACTS, "again": tuple(map(dict, COLOURS))}
    )
    weights = [1 / (rank + 2) for rank in range(1, len(COLOURS) + 1)]
    p = [w / sum(weights) for w in weights]
    cost = forgotten.entropy.nats - remembered.entropy.nats
    assert cost == pytest.approx(-sum(q * math.log(q) for q in p), abs=1e-12)


def test_facts_of_one_table_never_share_a_row() -> None:
    for story in told(2000, seed=9):
        rows = storyworld.WORLD.readings(story.text)[0].rows
        people = [rows[fact] for fact in ("hero", "friend", "third") if fact in rows]
        places = [rows[fact] for fact in ("place", "spot") if fact in rows]
        assert len(set(people)) == len(people) >= 2
        assert len(set(places)) == len(places) >= 1


def test_the_odds_leave_out_what_is_taken() -> None:
    chances = storyworld.odds(4, (1, 2))
    assert chances.options == (0, 3)
    assert chances.probabilities == pytest.approx((2 / 3, 1 / 3))
    assert chances.nats == pytest.approx((math.log(3 / 2), math.log(3)))
    assert chances.cumulative[-1] == 1.0


@pytest.mark.parametrize(
    ("markup", "problem"),
    [
        ("[glad|gladly] so", "'glad' and 'gladly' cannot be told apart"),
        ("[|very ]glad", "cannot be told apart"),
        ("{hero} ran, [{hero.he} sat|she sat]", "cannot be told apart"),
        ("{hero} ran. [Mia sat|{friend} sat]", "cannot be told apart"),
        ("[{hero} sat|Mia ran]", "cannot be told apart"),
        ("[[a|b] c|b c d] e", "'b c' and 'b c d' cannot be told apart"),
        ("[ran to {hero}|sat] there", "options tell different facts"),
        ("[ran", "not closed"),
        ("ran] off", "']' stands outside"),
        ("{dragon} ran", "unknown fact in {dragon}"),
        ("{hero.tail} ran", "no form 'tail'"),
        ("{hero ran", "stray"),
    ],
)
def test_an_ambiguous_or_malformed_grammar_is_refused(markup: str, problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)):
        Grammar(markup, SMALL_FACTS)


def test_words_that_begin_one_another_are_refused() -> None:
    with pytest.raises(ValueError, match="'Ann' begins 'Anna' of 'hero'"):
        Grammar("{hero} ran", {"hero": ({"name": "Anna"}, {"name": "Ann"})})


def test_options_that_differ_only_after_shared_facts_are_accepted() -> None:
    grammar = Grammar("{hero} met {friend}. [{hero} ran.|{hero} sat.|{friend} sat.]", SMALL_FACTS)
    text = "Mia met Ben. Mia sat."
    assert len(grammar.readings(text)) == 1
    assert isinstance(grammar.passage[0], Mention)
