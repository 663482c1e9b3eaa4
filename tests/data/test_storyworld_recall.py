import random

import pytest

from resroute.data.storyworld import Grammar, world
from resroute.data.storyworld_knobs import StoryConfig
from resroute.data.storyworld_odds import weight
from resroute.data.storyworld_recall import Recall, recalls

NAMES = tuple(
    {"name": name, "he": he}
    for name, he in (("Mia", "she"), ("Ben", "he"), ("Bea", "she"), ("Max", "he"))
)
PLACES = tuple({"word": word} for word in ("in bed", "in hay", "on ice", "at sea"))
FACTS = {"hero": NAMES, "friend": NAMES, "place": PLACES, "spot": PLACES, "toy3": PLACES}


def told(markup: str, text: str) -> list[Recall]:
    """The recalls of the story `text` of a small grammar."""
    grammar = Grammar(markup, FACTS)
    draw = random.Random(0)
    for _ in range(5000):
        account = grammar.recount(draw)
        if account.story.text == text:
            return recalls(account)
    raise AssertionError(f"{text!r} was not told")


def test_a_recall_has_its_place_its_words_and_their_odds() -> None:
    (recall,) = told("{hero} ran. {hero} fell.", "Ben ran. Ben fell.")
    assert recall == Recall(
        fact="hero",
        start=9,
        distance=6,
        words=("Ben", "Mia", "Bea", "Max"),
        weights=(weight(1), weight(0), weight(2), weight(3)),
    )


def test_words_that_rows_share_count_once_and_numbers_are_dropped() -> None:
    (pronoun,) = told("{hero} ran. {hero.He} fell.", "Bea ran. She fell.")
    assert pronoun.words == ("She", "He")
    assert pronoun.weights == pytest.approx((weight(0) + weight(2), weight(1) + weight(3)))
    (numbered,) = told("{toy3}, {toy3}", "on ice, on ice")
    assert numbered.fact == "toy"


def test_distance_counts_from_the_last_word_that_tells_it() -> None:
    found = told("{hero} ran. {hero.He} fell. {hero} wept.", "Ben ran. He fell. Ben wept.")
    # "He" does not tell a name
    assert [(r.words[0], r.start, r.distance) for r in found] == [("He", 9, 6), ("Ben", 18, 15)]
    again = told("{hero} ran. {hero.He} fell. {hero.He} wept.", "Ben ran. He fell. He wept.")
    assert [r.distance for r in again] == [6, 7]


def test_a_word_with_which_another_turn_begins_is_not_wrong() -> None:
    markup = "{place} or {spot}: [it was {place} and {spot}|it was {spot} and {place}]"
    first, second = told(markup, "on ice or in bed: it was on ice and in bed")
    # "in bed" could follow; "in hay" parts from "on ice" by the same letter
    assert first.words == ("on ice", "at sea")
    assert set(second.words) == {"in bed", "in hay", "on ice", "at sea"}
    # "i" may open the other turn
    markup = "{place}: [{place}, yes|in the end, no]"
    (only,) = told(markup, "on ice: on ice, yes")
    assert only.words == ("on ice", "at sea")


def test_a_nested_choice_keeps_all_turns() -> None:
    markup = "{hero} {friend}. [[{hero} ran|{friend} ran]|Mum ran]"
    # Bea could follow, and "M" may be Mum's
    assert told(markup, "Ben Bea. Ben ran") == []
    (recall,) = told(markup, "Mia Ben. Mia ran")
    assert recall.words == ("Mia", "Max")


def test_first_mentions_and_certain_words_are_no_recalls() -> None:
    assert told("{hero} met {friend}", "Mia met Ben") == []


def test_each_recall_stands_in_the_text_and_its_words_part() -> None:
    draw = random.Random(2)
    for story in (StoryConfig(), StoryConfig(length=2, entities=3, distance=50)):
        for _ in range(100):
            account = world(story).recount(draw)
            found = recalls(account)
            assert len(found) >= 3
            for recall in found:
                right, *wrong = recall.words
                assert account.story.text.startswith(right, recall.start)
                assert recall.distance >= 1
                assert len(set(recall.words)) == len(recall.words) == len(recall.weights)
                assert not any(w.startswith(right) or right.startswith(w) for w in wrong)


def test_recount_tells_what_tell_tells() -> None:
    grammar = world(StoryConfig(entities=2))
    assert grammar.recount(random.Random(4)).story == grammar.tell(random.Random(4))
