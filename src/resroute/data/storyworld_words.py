"""The words of storyworld: tables of things to tell about, and the tales that tell them.

Markup of a tale: `[one|two]` is a choice, `{fact}` a mention. The first mention of a fact draws it
from its table, each later one repeats it. `{fact.form}` picks a column of the table; `a` stands for
the word with its article, and a capital form (`He`) for the same word with a capital letter.

Options and rows are listed from the likeliest. Facts that share a table never share a row.
`{middle}` marks where a tale makes room for what `storyworld_knobs` puts in.
"""

from collections.abc import Mapping

Table = tuple[Mapping[str, str], ...]


def _table(header: str, *rows: str) -> Table:
    columns = header.split("/")
    return tuple(dict(zip(columns, row.split("/"), strict=True)) for row in rows)


def _words(text: str) -> Table:
    return _table("word", *text.split(", "))


NAMES = _table(
    "name/he/him/his",
    "Mia/she/her/her",
    "Ben/he/him/his",
    "Anna/she/her/her",
    "Tom/he/him/his",
    "Lily/she/her/her",
    "Sam/he/him/his",
    "Nora/she/her/her",
    "Max/he/him/his",
    "Ida/she/her/her",
    "Leo/he/him/his",
    "Tess/she/her/her",
    "Finn/he/him/his",
    "Hana/she/her/her",
    "Otto/he/him/his",
    "Fay/she/her/her",
    "Noah/he/him/his",
)
PLACES = _words(
    "by the pond, in the barn, on the hill, under the oak, at the mill, in the shed, "
    "near the well, by the gate, in the hay, by the lake, in the cave, on the farm"
)
THINGS = _words(
    "kite, ball, drum, boat, scarf, sled, hat, bell, wagon, lamp, cup, flute, mask, top"
)
COLOURS = _words("red, blue, green, yellow, white, orange, brown, purple, silver, black")
MOODS = _words("sad, cross, upset, gloomy, lonely, grumpy, angry, glum")
WEATHERS = _words("sunny, windy, warm, rainy, snowy, misty, frosty, bright")
TIMES = _words("day, morning, evening, Sunday, Monday, Friday")
TREATS = _words("apple, plum, bun, pear, cake, peach, tart, fig")
NUMBERS = _words("ten, twenty, fifty, seven, sixty, nine, forty, eight")
CHORES = _words(
    "fed the hens, raked leaves, chopped wood, washed pots, sorted beans, "
    "mended nets, swept floors, milked goats, baked bread, cut grass"
)
ANIMALS = _words("puppy, kitten, lamb, goat, duck, pony, piglet, owl, hen, mouse")
NEEDS = _table(
    "word/some/the",
    "hungry/some bread/the bread",
    "cold/a blanket/the blanket",
    "thirsty/some milk/the milk",
    "wet/a towel/the towel",
    "sleepy/a soft bed/the soft bed",
    "dusty/a bath/the bath",
    "scared/a hug/the hug",
    "sick/some tea/the tea",
)
DISHES = _table(
    "word/of",
    "apple pie/apples",
    "plum cake/plums",
    "bean stew/beans",
    "pear tart/pears",
    "nut loaf/nuts",
    "onion pie/onions",
    "leek stew/leeks",
    "fig cake/figs",
)

FACTS: Mapping[str, Table] = {
    "hero": NAMES,
    "friend": NAMES,
    "third": NAMES,
    "place": PLACES,
    "spot": PLACES,
    "thing": THINGS,
    "colour": COLOURS,
    "mood": MOODS,
    "weather": WEATHERS,
    "time": TIMES,
    "treat": TREATS,
    "number": NUMBERS,
    "chore": CHORES,
    "animal": ANIMALS,
    "need": NEEDS,
    "dish": DISHES,
}

LOST = (
    "[lost|dropped|missed|mislaid|forgot] {hero.his} {colour} {thing}. "
    "[{hero.He} felt {mood} and|{hero} was {mood} and|Feeling {mood}, {hero.he}] "
    "[looked|searched|hunted|peeked] {place}[ in vain.| all alone.| for hours.| for ages.] "
    '{middle}"[I saw it|Try|It may be|Look|Now look] {spot}," [said|called|cried|yelled] {friend}. '
    "[Sure enough,|And oh joy,|And there,|Hurrah,] {spot} "
    "[lay|was|they saw|sat|they found] the {colour} {thing}! "
    "[{hero} hugged {friend}|{hero} thanked {friend}|{hero.He} beamed at {friend}], "
    "[{mood} no more.|no longer {mood}.|glad of that {weather} {time}.]"
)
EARNED = (
    "[wished for|longed for|dreamed of|asked for] {colour.a} {thing}. "
    "[To earn it, {hero.he}|So {hero.he}|With a song, {hero.he}|Bit by bit, {hero.he}] "
    "{chore} for {friend} {place}. "
    '{middle}"You {chore} [so well|for hours|all day|with love|with joy]!" '
    '[said|laughed|cried|called|sang] {friend}. "[Now look|Look|Just look|Peek] {spot}." '
    "[There|And there] {hero} [found|saw|spied|got] "
    "{colour.a} {thing}[, brand new!| for {hero.him}!| at last!| to keep!] "
    "[What a {weather} {time}!|{hero.He} felt proud.|{hero.He} thanked {friend}.|"
    "How {hero.he} danced!|How {friend} smiled!]"
)
QUARREL = (
    "and {friend} [fought for|pulled at|both held|tugged at] {colour.a} {thing}. "
    '"[Mine|Let go|Not you|Stop it|I had it]!" [cried|yelled|said|hissed] {friend}. '
    "[{hero} ran off|{hero} left|{hero} fled] and [sat|hid|wept|lay] {place}, {mood}. "
    "{middle}[Soon|At last|Later|Then] {friend} [came|ran up|rode up] with {treat.a}. "
    '"[Sorry|Oh dear|Peace], {hero}!" '
    "[They shared|Both shared] the {treat} and the {colour} {thing}"
    "[, {mood} no more.|, no longer {mood}.|, friends again.| that {weather} {time}.]"
)
HIDING = (
    "played hide and seek with {friend} and {third}. "
    "{friend} [hid|lay low|sat|knelt|stood] {place}, {third} {spot}. {hero} counted to {number}. "
    "{middle}[{hero.He} peeked {place} and [found|saw|caught|met] {friend}, then {third} {spot}.|"
    "{hero.He} peeked {spot} and [found|saw|caught|met] {third}, then {friend} {place}.] "
    "[They shared|They ate|Each had|Each got] "
    "{treat.a} [and laughed.|and ran home.|for tea.|that {weather} {time}.]"
)
STRAY = (
    "[found|met|saw|spotted|heard] {animal.a} {place}. "
    "It [was|looked|seemed|felt] {need}, so {hero.he} [gave|offered] it {need.some}. "
    "{middle}[Soon|Just then|Then|At last] {friend} [came by|ran up|came up|rode up]. "
    '"[That is|There is|Oh, it is|I miss] my {animal}! '
    '[It ran off|I lost it|It was|It hid] {spot}." '
    "{friend} [thanked|praised|kissed|cheered] {hero} for {need.the}. "
    "[Now the|And the|So the] {animal} "
    "[was {need} no more.|was not {need} now.|slept all {time}.|loved {hero} too.]"
)
BAKING = (
    "[wanted|hoped|began|set out|tried] to [make|cook] {dish.a} for {friend}, "
    "who [was|felt|looked] {mood}. "
    '"[I have no|We have no|I need some|We need] {dish.of}!" [said|cried|sighed|sobbed] {hero}. '
    "{middle}[Luckily|But|Oh joy,|By luck] {third} [had|kept|hid|saw] "
    "[some|plenty|a heap|a few|lots] {place}. "
    "[{friend} ate the {dish} and|{friend} had it all and|Soon {friend}] "
    "[was {mood} no more.|was not {mood} now.|sang all {time}.] "
    '"[Thank|Bless|We owe] {third} for the {dish.of}," [said|laughed|added|sang] {hero}.'
)

TALES = (LOST, EARNED, QUARREL, HIDING, STRAY, BAKING)
OPENING = "One {weather} {time}, {hero} "
MIDDLE = "{middle}"

COMBINATIONS = (
    ("hero", "colour", "thing"),
    ("hero", "animal", "need"),
    ("hero", "dish", "mood"),
    ("hero", "number", "treat"),
)
"""Facts of which some combinations can be held out: one of these in every tale, in its order."""

# of an owner and what is its own; the numbers of owner, shade and toy are put in
OWNED = "{owner} [had|owned|kept|got] {shade.a} {toy}. "
SHOWN = "{owner} [showed|held up|lent out|waved] the {shade} {toy}."
BROUGHT = " {owner} [took|carried|brought] the {shade} {toy} home[.| at last.| again.| with care.]"

# {turn} is that of one owner
SCENE = (
    "[Then|Soon|Later|Next] [a sailor|a baker|a miller|a piper|a weaver] "
    "[came by|rode by|stood there|passed] with {tint.a} {cargo}. {turn}"
    "[Nobody|No one|Everyone] [liked|praised|bought|took] the {tint} {cargo}. "
)

SCENERY = (
    "The [lark|crow|deer|frog|wren|hawk|hare|toad] [slept|stood|moved|cried|drank|paced] "
    "[in the trees|on the roofs|at the shore|by the brook|in the reeds|on the cliff|in the woods|"
    "by the fence]. "
)
"""One sentence without a fact, always of one length."""

SCENERY_LENGTH = len("The lark slept in the trees. ")
