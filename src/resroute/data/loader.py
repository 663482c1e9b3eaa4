"""Training batches.

Stateless: what a step trains on depends on (seed, step) alone, so a resumed run and every method
compared see equal data. B batch, T tokens (the context), N windows.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from resroute import config
from resroute.config import UserError
from resroute.data.corpora import Corpus, open_corpus
from resroute.data.evaluation import is_aligned, require_window, too_short
from resroute.data.order import Order, Places, window_starts
from resroute.data.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Several corpora of one vocabulary, read by weight.

    Attributes:
        corpora: Each with its share of the windows; shares sum to one.
    """

    corpora: tuple[tuple[Corpus, float], ...]

    def __post_init__(self) -> None:
        (main, _), *others = self.corpora
        for corpus, share in self.corpora:
            if not 0 < share <= 1:
                raise UserError(f"{corpus.path}: its share must be over 0 and at most 1: {share}")
        if abs(sum(share for _, share in self.corpora) - 1) > 1e-9:
            raise UserError("the shares of the mixed corpora must sum to 1")
        for corpus, _ in others:
            if corpus.tokenizer != main.tokenizer:
                raise UserError(
                    f"{corpus.path} has another vocabulary than {main.path}; prepare it with "
                    f"--tokens {main.path}"
                )

    @property
    def main(self) -> Corpus:
        """The first corpus, whose validation split is evaluated."""
        return self.corpora[0][0]

    @property
    def tokenizer(self) -> Tokenizer:
        """Of all."""
        return self.main.tokenizer

    @property
    def name(self) -> str:
        """`main + 0.25 other`."""
        others = [f"{share:g} {corpus.name}" for corpus, share in self.corpora[1:]]
        return " + ".join([self.main.name, *others])

    @property
    def fingerprint(self) -> str:
        """Eight hexadecimal digits that change with any corpus or share."""
        return config.fingerprint([[c.fingerprint, share] for c, share in self.corpora])

    def places(
        self, context: int, batch_size: int, seed: int, step: int, order: Order
    ) -> list[tuple[Corpus, Places]]:
        """The windows of a step: each corpus with its next ones, mixed by a shuffle of the step."""
        rows: list[tuple[Corpus, Places]] = []
        before, after = self.read(batch_size, step), self.read(batch_size, step + 1)
        for number, (corpus, _) in enumerate(self.corpora):
            found = train_places(
                corpus,
                context,
                # corpora of equal length must not be read in step
                seed if number == 0 else seed + 7919 * number,
                order,
                step=step,
                first=before[number],
                count=after[number] - before[number],
            )
            rows += [(corpus, place) for place in found]
        return [rows[i] for i in np.random.default_rng([seed, step, 4]).permutation(len(rows))]

    def read(self, batch_size: int, step: int) -> list[int]:
        """Windows of each corpus in all steps before one: its share of them, rounded.

        The first takes its share of all, the next its share of what is left, and so on: each count
        grows by no more than the batch, and none ever shrinks.
        """
        left, share_left = batch_size * step, 1.0
        counts = []
        for _, share in self.corpora[:-1]:
            counts.append(int(np.floor(min(1.0, share / share_left) * left + 0.5)))
            left -= counts[-1]
            share_left -= share
        return [*counts, left]


def open_mixture(main: Path, mix: Sequence[str]) -> Corpus | Mixture:
    """Open the corpus of a run and those that are mixed into it.

    Args:
        main: Its folder.
        mix: Others, as `folder=share`.

    Raises:
        UserError: A share that is none, or what `open_corpus` and `Mixture` refuse.
    """
    corpus = open_corpus(main)
    if not mix:
        return corpus
    others = []
    for item in mix:
        folder, equals, text = item.rpartition("=")
        try:
            share = float(text)
        except ValueError:
            share = 0.0
        if not (equals and folder and 0 < share < 1):
            raise UserError(f"mix {item!r}: needs FOLDER=SHARE, such as data/other=0.25")
        others.append((open_corpus(Path(folder)), share))
    rest = 1 - sum(share for _, share in others)
    if rest <= 0:
        raise UserError(f"the shares of the mixed corpora leave nothing for {main}")
    return Mixture(((corpus, rest), *others))


def training_batch(
    corpus: Corpus | Mixture,
    *,
    context: int,
    batch_size: int,
    seed: int,
    step: int,
    rows: slice | None = None,
    order: Order = "uniform",
) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one step, (B, T) int64 each, from the train split.

    Order `uniform`: window starts are uniform over the split. In an aligned corpus whose documents
    all fit into the context they are uniform over the end-of-text tokens, so that a window opens
    like those of `evaluation_windows`: with the end of text and then a document's first token.
    `windows` and `documents` read everything once in an epoch, see `Order`.

    Args:
        corpus: One corpus, or several by weight.
        context: T.
        batch_size: B.
        seed: Of the run.
        step: Counted from zero.
        rows: Reads only some windows of the batch: the share of one of several processes.
        order: See `Order`.

    Raises:
        UserError: A split that is shorter than one window, or that has no documents where they are
            asked for.
    """
    if isinstance(corpus, Mixture):
        places = corpus.places(context, batch_size, seed, step, order)
    else:
        places = [
            (corpus, place)
            for place in train_places(
                corpus, context, seed, order, step=step, first=step * batch_size, count=batch_size
            )
        ]
    return _read(places if rows is None else places[rows])


def train_places(
    corpus: Corpus,
    context: int,
    seed: int,
    order: Order,
    *,
    step: int,
    first: int,
    count: int,
) -> Places:
    """Places in the train split of the tokens of some windows and their last targets, (N, T + 1).

    Args:
        corpus: Its train split.
        context: T.
        seed: Of the run.
        order: See `Order`.
        step: Seeds the draws of `uniform`.
        first: Windows that the run has read of this corpus before.
        count: N.

    Raises:
        UserError: As `training_batch`.
    """
    require_window(corpus, "train", context)
    tokens = corpus.split("train").tokens
    if order == "documents":
        found = corpus.document_order(seed)
        if found is None or found.windows_per_epoch(context) < 1:
            raise UserError(
                f"{corpus.path}: has too few documents with an end of text for order=documents; "
                "use order=windows"
            )
        rows = [found.places(first + row, context) for row in range(count)]
        return np.stack(rows) if rows else np.zeros((0, context + 1), dtype=np.int64)
    if order == "windows":
        positions = np.arange(first, first + count)
        starts = window_starts(positions, tokens=tokens, context=context, seed=seed)
    else:
        random = np.random.default_rng([seed, step])
        starts = _uniform_starts(corpus, context, random, count)
    return starts[:, None] + np.arange(context + 1)


def _uniform_starts(
    corpus: Corpus, context: int, random: np.random.Generator, count: int
) -> Places:
    num_starts = corpus.split("train").tokens - context
    if not is_aligned(corpus, context):
        return random.integers(num_starts, size=count)
    ends = corpus.document_ends("train")
    ends = ends[: np.searchsorted(ends, num_starts)]
    if len(ends) == 0:
        raise too_short(corpus, "train", context)
    return ends[random.integers(len(ends), size=count)]


def _read(rows: list[tuple[Corpus, Places]]) -> tuple[Tensor, Tensor]:
    found = [corpus.tokens("train")[places].astype(np.int64) for corpus, places in rows]
    tokens = torch.from_numpy(np.stack(found))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
