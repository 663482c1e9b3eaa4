"""Making corpora of stories by the storyworld generator."""

import contextlib
import hashlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from resroute import config
from resroute.config import UserError
from resroute.data import storyworld
from resroute.data.corpora import (
    SPLITS,
    Corpus,
    Split,
    SplitMeta,
    nats_file,
    open_corpus,
)
from resroute.data.encode import SplitWriter
from resroute.data.folders import existing_corpus, kept, new_corpus, require_equal, write_meta
from resroute.data.storyworld_knobs import DEFAULT, StoryConfig
from resroute.data.tokenizer import END_OF_TEXT, CharTokenizer, Tokenizer

_BATCH_STORIES = 1000
_SAMPLE_STORIES = 100


def prepare_storyworld(
    out: str | Path, *, seed: int = 0, characters: int = 2_000_000, story: StoryConfig = DEFAULT
) -> Corpus:
    """Make a corpus of generated stories, each followed by the end of text.

    The splits are whole stories, independent draws: 90 % train, 5 % val, 5 % test. The exact -log p
    of each story of val and test is kept, which gives the entropy floor. With `story.held_out`,
    test tells held-out combinations of facts alone, and train and val all others.

    Args:
        out: The corpus folder to make.
        seed: Of the generator.
        characters: Least number of tokens of the three splits together.
        story: How hard the stories are.

    Raises:
        UserError: `characters` below one, or an `out` that holds something else.
    """
    if characters < 1:
        raise UserError(f"a storyworld corpus needs characters of at least 1, got {characters}")
    samples = dict.fromkeys(_tellers(seed, story).values())
    sample = "\n".join(s.text for told in samples for s in itertools.islice(told, _SAMPLE_STORIES))
    provenance: dict[str, Any] = {
        "kind": "storyworld",
        "seed": seed,
        "characters": characters,
        # changes when a later release tells other stories
        "sample_sha256": hashlib.sha256(sample.encode()).hexdigest(),
    }
    if story != DEFAULT:
        provenance["story"] = config.from_defaults(story)
    out = Path(out)
    if existing := existing_corpus(out):
        return kept(existing, provenance)
    tokenizer = CharTokenizer((*storyworld.ALPHABET, END_OF_TEXT))
    stories = _tellers(seed, story)
    splits = {}
    # another process may make the same corpus meanwhile: its own is kept
    with contextlib.suppress(FileExistsError), new_corpus(out) as folder:
        shares = (characters - 2 * (characters // 20), characters // 20, characters // 20)
        for split, share in zip(SPLITS, shares, strict=True):
            splits[split] = _write_stories(stories[split], share, tokenizer, folder, split)
        name = out.resolve().name
        write_meta(folder, name, provenance, "endoftext", tokenizer, splits, aligned=True)
    return require_equal(open_corpus(out), provenance)


def _tellers(seed: int, story: StoryConfig) -> dict[Split, Iterator[storyworld.Story]]:
    """The stories of each split; splits of one kind take turns at one iterator."""
    knobs: dict[str, Any] = {} if story == DEFAULT else {"story": story}
    told = storyworld.stories(seed, **knobs)
    if not story.held_out:
        return dict.fromkeys(SPLITS, told)
    return {"train": told, "val": told, "test": storyworld.stories(seed, **knobs, held_out=True)}


def _write_stories(
    stories: Iterator[storyworld.Story],
    share: int,
    tokenizer: Tokenizer,
    folder: Path,
    split: Split,
) -> SplitMeta:
    """Write whole stories until a split has `share` tokens, and at least one story."""
    nats: list[float] = []
    with SplitWriter(folder, split, tokenizer) as writer:
        while writer.documents == 0 or writer.tokens < share:
            need = share - writer.tokens
            texts: list[str] = []
            while not texts or (need > 0 and len(texts) < _BATCH_STORIES):
                story = next(stories)
                texts.append(story.text + END_OF_TEXT)
                nats.append(story.nats)
                need -= len(story.text) + 1
            writer.write(tokenizer.encode("".join(texts)), documents=len(texts))
        if split != "train":
            np.array(nats, dtype="<f8").tofile(folder / nats_file(split))
        return writer.finish()
