import collections
import hashlib
import itertools
import json
import math
import random
import re
import statistics
import struct
from pathlib import Path

import pytest

from resroute import config
from resroute.config import UserError
from resroute.data import END_OF_TEXT, open_corpus, prepare_storyworld, storyworld
from resroute.data.storyworld import Account, Grammar, stories, world
from resroute.data.storyworld_knobs import StoryConfig
from resroute.data.storyworld_odds import Combinations, marginal, odds, weight
from resroute.data.storyworld_recall import recalls
from resroute.data.storyworld_words import (
    COMBINATIONS,
    FACTS,
    SCENERY,
    SCENERY_LENGTH,
)

LONG = StoryConfig(length=3)
CROWD = StoryConfig(entities=5, length=2)
FAR = StoryConfig(distance=400, entities=1)
HELD_OUT = StoryConfig(held_out=0.2)
HARD = StoryConfig(length=4, entities=4, distance=200, held_out=0.3)
SETTINGS = [
    (LONG, False),
    (CROWD, False),
    (FAR, False),
    (HELD_OUT, False),
    (HELD_OUT, True),
    (HARD, False),
    (HARD, True),
]


def accounts(story: StoryConfig, count: int, *, held_out: bool = False) -> list[Account]:
    draw = random.Random(5)
    grammar = world(story, held_out=held_out)
    return [grammar.recount(draw) for _ in range(count)]


def combinations_told(story: StoryConfig, account: Account) -> list[tuple[int, ...]]:
    """The rows of each combination in a story, tale's first, read from its derivation."""
    owned = [(f"owner{k}", f"shade{k}", f"toy{k}") for k in range(1, story.entities + 1)]
    rows = account.rows
    return [
        tuple(rows[f] for f in facts) for facts in (*COMBINATIONS, *owned) if {*facts} <= {*rows}
    ]


def test_the_default_stories_are_those_of_the_first_release() -> None:
    digest = hashlib.sha256()
    for story in itertools.islice(stories(0, StoryConfig()), 5000):
        digest.update(story.text.encode() + b"\n" + struct.pack("<d", story.nats))
    assert digest.hexdigest() == "b0238ad643a6a0398dc545b90537bf0cecb45c8e9da547a4b624b56af05ce395"
    floor = storyworld.entropy()
    assert floor.nats == pytest.approx(33.43072462553782, abs=1e-11)
    assert floor.characters == pytest.approx(212.83465880818932, abs=1e-11)


def test_the_default_corpus_keeps_its_fingerprint_and_its_provenance(tmp_path: Path) -> None:
    corpus = prepare_storyworld(tmp_path / "storyworld", story=StoryConfig())
    assert corpus.fingerprint == "b6a05b37"
    assert corpus.meta.source == {
        "kind": "storyworld",
        "seed": 0,
        "characters": 2_000_000,
        "sample_sha256": "a621996e8bd34ff9ebadb0c9a3dd883a11c3dca1681e298edf9d80a3b55e9c3d",
    }


def test_a_configuration_goes_through_strict_json() -> None:
    data = json.loads(json.dumps(config.to_dict(HARD)))
    assert data == {"length": 4, "entities": 4, "distance": 200, "held_out": 0.3}
    assert config.from_dict(StoryConfig, data) == HARD
    assert config.from_dict(StoryConfig, {}) == StoryConfig()
    with pytest.raises(UserError, match=r"unknown field 'lenght' \(did you mean 'length'\?\)"):
        config.from_dict(StoryConfig, {"lenght": 3})


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("length", -1, "length must be a whole number of at least 0, got -1"),
        ("length", 101, "length must be at most 100, got 101"),
        ("entities", 13, "entities must be at most 12, got 13"),
        ("entities", 1.5, "entities must be a whole number of at least 0, got 1.5"),
        ("distance", 20_001, "distance must be at most 20000, got 20001"),
        ("held_out", 0.01, "held_out must be 0, or 0.06 to 0.5, got 0.01"),
        ("held_out", 0.6, "held_out must be 0, or 0.06 to 0.5, got 0.6"),
        ("held_out", -0.1, "held_out must be 0, or 0.06 to 0.5, got -0.1"),
        ("held_out", math.nan, "held_out must be 0, or 0.06 to 0.5, got nan"),
    ],
)
def test_a_field_out_of_range_is_refused(field: str, value: float, problem: str) -> None:
    with pytest.raises(UserError, match=re.escape(problem)):
        StoryConfig(**{field: value})


@pytest.mark.parametrize(("story", "held_out"), SETTINGS)
def test_every_story_has_one_derivation_and_its_nats_are_its_surprisal(
    story: StoryConfig, held_out: bool
) -> None:
    for told in itertools.islice(stories(3, story, held_out=held_out), 40):
        assert storyworld.derivations(told.text, story, held_out=held_out) == 1
        assert storyworld.surprisal(told.text, story, held_out=held_out) == pytest.approx(
            told.nats, abs=1e-8
        )


@pytest.mark.parametrize(("story", "held_out"), SETTINGS)
def test_means_of_sampled_stories_agree_with_the_exact_floor(
    story: StoryConfig, held_out: bool
) -> None:
    corpus = list(itertools.islice(stories(7, story, held_out=held_out), 1500))
    floor = storyworld.entropy(story, held_out=held_out)
    for values, exact in (
        ([told.nats for told in corpus], floor.nats),
        ([float(len(told.text)) for told in corpus], floor.characters),
    ):
        error = statistics.stdev(values) / math.sqrt(len(values))
        assert abs(statistics.fmean(values) - exact) < 4 * error
    assert max(len(told.text) for told in corpus) <= world(story, held_out=held_out).longest


@pytest.mark.parametrize(("story", "held_out"), SETTINGS)
def test_hard_stories_are_clean_text_over_the_same_alphabet(
    story: StoryConfig, held_out: bool
) -> None:
    assert world(story, held_out=held_out).alphabet == storyworld.ALPHABET
    for told in itertools.islice(stories(2, story, held_out=held_out), 200):
        assert told.text == " ".join(told.text.split())
        assert told.text[-1] in '.!"'
        assert not re.search(r"\ba [aeiou]|\ban [^aeiou]|[{}\[\]|]", told.text)


def test_the_largest_settings_can_be_told() -> None:
    story = StoryConfig(length=100, entities=12, distance=20_000, held_out=0.5)
    account = world(story).recount(random.Random(0))
    assert len(account.story.text) > 27_000
    owners = [account.rows[f"owner{k}"] for k in range(1, 13)]
    people = [account.rows[f] for f in ("hero", "friend", "third") if f in account.rows]
    assert len({*owners, *people}) == len(owners) + len(people) >= 14


def test_length_is_the_number_of_scenes() -> None:
    for told in itertools.islice(stories(0, LONG), 50):
        assert len(re.findall(r"a (?:sailor|baker|miller|piper|weaver) ", told.text)) == 3


def test_every_owner_is_told_once_and_comes_back_at_the_end() -> None:
    for account in accounts(CROWD, 50):
        text = account.story.text
        start = text.index("One ")
        owned = re.findall(r"(\w+) (?:had|owned|kept|got) an? (\w+ \w+)\.", text[:start])
        brought = re.findall(r"(\w+) (?:took|carried|brought) the (\w+ \w+) home", text)
        assert len(owned) == 5
        assert dict(owned) == dict(brought)
        shown = re.findall(r"(\w+) (?:showed|held up|lent out|waved) the (\w+ \w+)\.", text)
        assert len(shown) == 2
        assert {*shown} <= {*owned}
    firsts = collections.Counter(a.steps[0][1].words[a.rows["owner1"]] for a in accounts(CROWD, 50))
    assert len(firsts) > 5


def test_scenery_has_one_length_and_names_no_fact() -> None:
    grammar = Grammar(SCENERY, {})
    draw = random.Random(0)
    sentences = {grammar.tell(draw).text for _ in range(4000)}
    assert {len(sentence) for sentence in sentences} == {SCENERY_LENGTH}
    words = {word for table in FACTS.values() for row in table for word in row.values()}
    assert not any(re.search(rf"\b{word}\b", s) for word in words for s in list(sentences)[:100])


@pytest.mark.parametrize("distance", [1, 29, 30, 500])
def test_distance_lies_between_a_fact_and_its_use(distance: int) -> None:
    story = StoryConfig(distance=distance, entities=2, length=1)
    for account in accounts(story, 40):
        middle = re.search(
            rf"(?:The \w+ \w+ \w\w the \w+\. ){{{-(-distance // 29)}}}", account.story.text
        )
        assert middle is not None
        assert distance <= len(middle[0]) < distance + 29
        crossing = [
            recall
            for recall in recalls(account)
            if recall.start >= middle.end() and recall.start - recall.distance <= middle.start()
        ]
        assert all(recall.distance >= distance for recall in crossing)
        # each owner's name, colour and thing, and something of the tale
        assert len(crossing) >= 7


@pytest.mark.parametrize("story", [HELD_OUT, HARD])
def test_held_out_combinations_are_told_by_held_out_stories_alone(story: StoryConfig) -> None:
    found: dict[bool, set[tuple[int, ...]]] = {}
    for held_out in (False, True):
        told = accounts(story, 300 if story.entities else 1500, held_out=held_out)
        each = [combinations_told(story, account) for account in told]
        assert all(len(rows) == 1 + story.entities for rows in each)
        # of names, colours and things alone, which have one size
        owned = [rows[1:] for rows in each] if story.entities else []
        tales = [
            tuple(a.rows[f] for f in ("hero", "colour", "thing")) for a in told if "thing" in a.rows
        ]
        found[held_out] = {*tales, *itertools.chain(*owned)}
    assert found[False].isdisjoint(found[True])
    # the words of the others: every name, colour and thing, each told by both
    for place, size in enumerate((16, 10, 14)):
        assert {rows[place] for rows in found[False]} == {*range(size)}
    told = next(stories(0, story, held_out=True))
    assert storyworld.surprisal(told.text, story) == math.inf
    assert math.isfinite(
        storyworld.surprisal(
            told.text,
            StoryConfig(length=story.length, entities=story.entities, distance=story.distance),
        )
    )


@pytest.mark.parametrize("share", [0.06, 0.2, 0.5])
def test_the_share_is_kept_and_no_word_or_pair_is_lost(share: float) -> None:
    for facts in COMBINATIONS:
        sizes = tuple(len(FACTS[fact]) for fact in facts)
        told = Combinations(sizes, share, False)
        everything = list(itertools.product(*map(range, sizes)))
        seen = [rows for rows in everything if told.has(rows)]
        assert len(seen) == pytest.approx((1 - share) * len(everything), rel=0.02)
        # training tells every pair of words, so that a held-out combination is new as a whole
        for one, other in itertools.combinations(range(3), 2):
            assert len({(rows[one], rows[other]) for rows in seen}) == sizes[one] * sizes[other]
        # each first word has held-out combinations
        assert len({rows[0] for rows in everything if not told.has(rows)}) == sizes[0]


def test_held_out_stories_need_a_share() -> None:
    with pytest.raises(UserError, match="no combinations are held out"):
        next(stories(0, LONG, held_out=True))


def test_held_out_stories_are_not_the_seen_ones_with_other_words() -> None:
    both = zip(stories(0, HELD_OUT), stories(0, HELD_OUT, held_out=True), strict=True)
    openings = [[told.text.split(",")[0] for told in pair] for pair in itertools.islice(both, 300)]
    # by chance: the sums of squares of eight and six odds
    assert sum(one == other for one, other in openings) / 300 < 0.1


NAMES = tuple({"name": name} for name in ("Mia", "Ben", "Tom"))
COLOURS = tuple({"word": word} for word in ("red", "blue", "orange"))
THINGS = tuple({"word": word} for word in ("kite", "ball"))


@pytest.mark.parametrize("held_out", [False, True])
def test_a_conditioned_grammar_is_exact_by_enumeration(held_out: bool) -> None:
    told = Combinations((3, 3, 2), 0.4, held_out)
    grammar = Grammar(
        "{friend} met {hero}. {hero} had {colour.a} [big|old] {thing}. The {thing} was {colour}.",
        {"hero": NAMES, "friend": NAMES, "colour": COLOURS, "thing": THINGS},
        {("hero", "colour", "thing"): told},
    )
    by_hand = {}
    for friend, hero in itertools.permutations(range(3), 2):
        p = weight(friend) / sum(map(weight, range(3)))
        p *= weight(hero) / sum(weight(row) for row in range(3) if row != friend)
        pairs = [pair for pair in itertools.product(range(3), range(2)) if told.has((hero, *pair))]
        total = sum(weight(colour) * weight(thing) for colour, thing in pairs)
        for colour, thing in pairs:
            for size, q in (("big", 4 / 7), ("old", 3 / 7)):
                word, what = COLOURS[colour]["word"], THINGS[thing]["word"]
                text = (
                    f"{NAMES[friend]['name']} met {NAMES[hero]['name']}. {NAMES[hero]['name']} had "
                    f"{'an' if word == 'orange' else 'a'} {word} {size} {what}. "
                    f"The {what} was {word}."
                )
                by_hand[text] = p * q * weight(colour) * weight(thing) / total
    assert math.fsum(by_hand.values()) == pytest.approx(1, abs=1e-12)
    for text, p in by_hand.items():
        assert [r.nats for r in grammar.readings(text)] == [pytest.approx(-math.log(p), abs=1e-12)]
    draw = random.Random(0)
    assert {grammar.tell(draw).text for _ in range(5000)} == {*by_hand}
    assert grammar.entropy.nats == pytest.approx(
        -math.fsum(p * math.log(p) for p in by_hand.values()), abs=1e-12
    )
    assert grammar.entropy.characters == pytest.approx(
        math.fsum(p * len(text) for text, p in by_hand.items()), abs=1e-12
    )


def test_a_bond_of_facts_that_share_a_table_is_refused() -> None:
    with pytest.raises(ValueError, match="has rivals and a bond"):
        Grammar(
            "{hero} met {friend} with {colour}",
            {"hero": NAMES, "friend": NAMES, "colour": COLOURS},
            {("hero", "friend", "colour"): Combinations((3, 3, 3), 0.2, False)},
        )


@pytest.mark.parametrize("order", [0, 1, 3])
def test_the_marginal_of_a_draw_is_the_enumerated_one(order: int) -> None:
    probabilities, entropy = [0.0] * 5, 0.0
    for taken in itertools.permutations(range(5), order):
        p = math.prod(
            weight(row) / sum(weight(r) for r in range(5) if r not in taken[:place])
            for place, row in enumerate(taken)
        )
        left = odds(5, taken)
        entropy += p * left.entropy
        for row, q in left.items():
            probabilities[row] += p * q
    assert marginal(5, order)[0] == pytest.approx(entropy, abs=1e-13)
    assert marginal(5, order)[1] == pytest.approx(tuple(probabilities), abs=1e-13)


def test_a_corpus_of_hard_stories_says_so_and_keeps_its_test_apart(tmp_path: Path) -> None:
    corpus = prepare_storyworld(tmp_path / "hard", seed=1, characters=60_000, story=HARD)
    assert corpus.meta.source["story"] == config.to_dict(HARD)
    assert corpus.longest_document > 800
    again = prepare_storyworld(tmp_path / "hard", seed=1, characters=60_000, story=HARD)
    assert again.meta == corpus.meta == open_corpus(tmp_path / "hard").meta
    with pytest.raises(UserError, match=r"made otherwise \(sample_sha256, story\.distance"):
        prepare_storyworld(
            tmp_path / "hard",
            seed=1,
            characters=60_000,
            story=StoryConfig(length=4, entities=4, held_out=0.3),
        )
    for split in ("train", "val", "test"):
        texts = corpus.tokenizer.decode(corpus.tokens(split)).split(END_OF_TEXT)[:-1]
        exact = [storyworld.surprisal(text, HARD, held_out=split == "test") for text in texts[:5]]
        assert all(map(math.isfinite, exact))
        nats = corpus.document_nats(split)
        if split != "train":
            assert nats[:5].tolist() == pytest.approx(exact)
            assert len(nats) == len(texts)


def test_other_knobs_than_the_default_are_another_corpus(tmp_path: Path) -> None:
    prepare_storyworld(tmp_path / "sw", characters=1000)
    with pytest.raises(UserError, match=r"made otherwise \(sample_sha256, story\)"):
        prepare_storyworld(tmp_path / "sw", characters=1000, story=LONG)
