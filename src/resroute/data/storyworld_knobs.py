"""How hard stories are: from a `StoryConfig` to the markup and the tables of its stories."""

import math
from dataclasses import dataclass

from resroute.config import UserError, documented, require_whole
from resroute.data.storyworld_markup import Bonds
from resroute.data.storyworld_odds import Combinations
from resroute.data.storyworld_words import (
    BROUGHT,
    COLOURS,
    COMBINATIONS,
    FACTS,
    MIDDLE,
    OPENING,
    OWNED,
    SCENE,
    SCENERY,
    SCENERY_LENGTH,
    SHOWN,
    TALES,
    THINGS,
    Table,
)

# twelve owners and the three of a tale are all but one of the sixteen names
_MOST = {"length": 100, "entities": 12, "distance": 20_000}
# less would leave a hero without a held-out combination
_LEAST_HELD_OUT = 0.06


@documented
@dataclass(frozen=True, kw_only=True)
class StoryConfig:
    """What stories ask of a memory; the default is the stories of the default corpus.

    A story tells what each owner has, begins one of the tales, stops at scenery, goes through
    scenes, ends the tale and comes back to every owner. Each knob works without the others.

    Raises:
        UserError: A field out of its range.
    """

    length: int = 0
    """Scenes in the middle. In each a stranger passes with a thing of a colour that the scene's
    end repeats, and one of the owners shows what it owns. At most 100."""
    entities: int = 0
    """Owners, each with a name, a thing and its colour, told at the beginning and used in scenes
    and at the end. At most 12."""
    distance: int = 0
    """Least number of characters of scenery, which names no fact, between what is told before the
    middle of a story and its first use after it. At most 20,000."""
    held_out: float = 0.0
    """Share of the combinations of name, colour and thing (in tales without a thing, of the
    tale's own facts) that train and val never tell and test alone does. Zero, or 0.06 to 0.5."""

    def __post_init__(self) -> None:
        for name, most in _MOST.items():
            value = require_whole(f"a story's {name}", getattr(self, name), 0)
            object.__setattr__(self, name, value)
            if value > most:
                raise UserError(f"a story's {name} must be at most {most}, got {value}")
        if self.held_out != 0 and not _LEAST_HELD_OUT <= self.held_out <= 0.5:
            raise UserError(
                f"a story's held_out must be 0, or {_LEAST_HELD_OUT} to 0.5, got {self.held_out}"
            )


DEFAULT = StoryConfig()
"""Of the default corpus."""


def markup(story: StoryConfig) -> str:
    """The marked-up text of a world; see `storyworld_words`."""
    owners = range(1, story.entities + 1)
    turn = _choice([_of_owner(SHOWN, k) for k in owners]) + " " if owners else ""
    scenes = [
        SCENE.replace("{tint", f"{{tint{k}").replace("{cargo", f"{{cargo{k}")
        for k in range(1, story.length + 1)
    ]
    scenery = SCENERY * math.ceil(story.distance / SCENERY_LENGTH)
    middle = scenery + "".join(scenes).replace("{turn}", turn)
    # the end may begin with any owner and goes on in the order of the beginning
    brought = [_of_owner(BROUGHT, k) for k in owners]
    orders = ["".join(brought[first:] + brought[:first]) for first in range(len(brought))]
    end = _choice(orders) if owners else ""
    # the end belongs to each tale, since tales tell different facts
    tales = [tale.replace(MIDDLE, middle) + end for tale in TALES]
    return "".join(_of_owner(OWNED, k) for k in owners) + OPENING + _choice(tales)


def tables(story: StoryConfig) -> dict[str, Table]:
    """The table of each fact in `markup`."""
    found = dict(FACTS)
    for k in range(1, story.entities + 1):
        found |= {f"owner{k}": FACTS["hero"], f"shade{k}": _own(COLOURS), f"toy{k}": _own(THINGS)}
    for k in range(1, story.length + 1):
        found |= {f"tint{k}": _own(COLOURS), f"cargo{k}": _own(THINGS)}
    return found


def bonds(story: StoryConfig, *, held_out: bool) -> Bonds:
    """The combinations that stories tell: the held-out ones alone, or all others."""
    if story.held_out == 0:
        return {}
    facts = tables(story)
    owned = [(f"owner{k}", f"shade{k}", f"toy{k}") for k in range(1, story.entities + 1)]
    return {
        (a, b, c): Combinations(
            (len(facts[a]), len(facts[b]), len(facts[c])), story.held_out, held_out
        )
        for a, b, c in (*COMBINATIONS, *owned)
    }


def _own(table: Table) -> Table:
    """An equal table of a fact's own, so that the fact may share rows with others."""
    return tuple(dict(row) for row in table)


def _of_owner(text: str, k: int) -> str:
    for fact in ("owner", "shade", "toy"):
        text = text.replace(f"{{{fact}", f"{{{fact}{k}")
    return text


def _choice(options: list[str]) -> str:
    return f"[{'|'.join(options)}]"
