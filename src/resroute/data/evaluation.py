"""Fixed windows for evaluation, and the loss that a perfect model has on them.

T tokens (the context), N windows.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from resroute.config import UserError
from resroute.data.corpora import Corpus, Split
from resroute.data.order import Places

IGNORED_TARGET = -100


@dataclasses.dataclass(frozen=True)
class Floor:
    """The loss that a perfect model has.

    Attributes:
        nats: Per counted target.
        exact: False where `nats` is a lower bound.
    """

    nats: float
    exact: bool


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class EvaluationSet:
    """Windows on which a model is evaluated.

    Attributes:
        inputs: Token ids, (N, T) int64.
        targets: The next token of each input, (N, T) int64; -100 is not counted.
        floor: The least possible mean loss, where the source of the text knows it.
        tokens: Targets that are counted.
        characters: That these stand for, each end of text counted as one.
        bytes: Likewise, of UTF-8.
    """

    inputs: Tensor
    targets: Tensor
    floor: Floor | None
    tokens: int
    characters: int
    bytes: int


def evaluation_windows(
    corpus: Corpus, split: Split = "val", *, context: int, max_windows: int
) -> EvaluationSet:
    """At most `max_windows` windows, spread evenly over a split; equal at every call.

    Plain text gives windows that do not overlap, without a floor. An aligned corpus gives windows
    of whole documents: the end of text as the first input, then as many documents as fit, each
    with its end of text as a target; what is left over is not counted, and the floor is exact.
    Where some document does not fit into the context, an aligned corpus is cut like plain text;
    the floor is then the split's mean per token, a lower bound because a window hides the context
    that lies before it.

    Raises:
        UserError: The split is shorter than one window, or `max_windows` is below one.
    """
    if max_windows < 1:
        raise UserError(f"evaluation needs max_windows of at least 1, got {max_windows}")
    if is_aligned(corpus, context):
        return _document_windows(corpus, split, context, max_windows)
    require_window(corpus, split, context)
    num_windows = (corpus.split(split).tokens - 1) // context
    starts = context * _spread(num_windows, max_windows)
    inputs, targets = _windows(corpus, split, starts, context)
    nats = corpus.document_nats(split)
    floor = None
    if nats is not None:
        floor = Floor(float(nats.sum()) / corpus.split(split).tokens, exact=False)
    return _evaluation_set(corpus, inputs, targets, floor)


def parts_of(inputs: Tensor, targets: Tensor, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Windows (N, T) in batches, without what fills windows after the last target that counts.

    Windows of whole documents are filled up; each then comes by itself, cut to its length.
    """
    lengths = ((targets >= 0) * torch.arange(1, targets.shape[1] + 1, device=targets.device)).amax(
        1
    )
    if bool((lengths == targets.shape[1]).all()):
        yield from zip(inputs.split(batch), targets.split(batch), strict=True)
        return
    for row, wanted, length in zip(inputs, targets, lengths.tolist(), strict=True):
        if length:
            yield row[None, :length], wanted[None, :length]


def _document_windows(
    corpus: Corpus, split: Split, context: int, max_windows: int
) -> EvaluationSet:
    end_of_text = corpus.tokenizer.end_of_text
    nats = corpus.document_nats(split)
    assert end_of_text is not None
    # document i holds the tokens past bounds[i] up to bounds[i + 1], its end of text included
    bounds = np.concatenate([[-1], corpus.document_ends(split)])
    firsts = _packed(bounds, context)
    chosen = _spread(len(firsts) - 1, max_windows)
    shape = (len(chosen), context)
    inputs = np.full(shape, end_of_text, dtype=np.int64)
    targets = np.full(shape, IGNORED_TARGET, dtype=np.int64)
    tokens = corpus.tokens(split)
    total = 0.0
    for row, window in enumerate(chosen):
        first, last = firsts[window], firsts[window + 1]
        text = tokens[bounds[first] + 1 : bounds[last] + 1]
        inputs[row, 1 : len(text)] = text[:-1]
        targets[row, : len(text)] = text
        if nats is not None:
            total += float(nats[first:last].sum())
    counted = int((targets != IGNORED_TARGET).sum())
    floor = Floor(total / counted, exact=True) if nats is not None else None
    return _evaluation_set(corpus, torch.from_numpy(inputs), torch.from_numpy(targets), floor)


def _evaluation_set(
    corpus: Corpus, inputs: Tensor, targets: Tensor, floor: Floor | None
) -> EvaluationSet:
    counted = targets[targets != IGNORED_TARGET].numpy()
    tokenizer = corpus.tokenizer
    used = np.bincount(counted, minlength=tokenizer.vocab_size)
    return EvaluationSet(
        inputs=inputs,
        targets=targets,
        floor=floor,
        tokens=len(counted),
        characters=int(used @ tokenizer.token_characters),
        bytes=int(used @ tokenizer.token_bytes),
    )


def _packed(bounds: Places, context: int) -> list[int]:
    """First document of each window of whole documents, then the number of documents."""
    firsts = [0]
    while firsts[-1] < len(bounds) - 1:
        reach = bounds[firsts[-1]] + context
        firsts.append(int(np.searchsorted(bounds, reach, side="right")) - 1)
    return firsts


def _spread(available: int, wanted: int) -> Places:
    """At most `wanted` of `available` places, evenly apart."""
    count = min(available, wanted)
    return np.arange(count) * available // count


def _windows(corpus: Corpus, split: Split, starts: Places, context: int) -> tuple[Tensor, Tensor]:
    places = starts[:, None] + np.arange(context + 1)
    tokens = torch.from_numpy(corpus.tokens(split)[places].astype(np.int64))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def is_aligned(corpus: Corpus, context: int) -> bool:
    """Whether windows hold whole documents."""
    return corpus.aligned and corpus.longest_document <= context


def require_window(corpus: Corpus, split: Split, context: int) -> None:
    """Raise a `UserError` where a split is shorter than one window."""
    if corpus.split(split).tokens < context + 1:
        raise too_short(corpus, split, context)


def too_short(corpus: Corpus, split: Split, context: int) -> UserError:
    """What is said of a split that is shorter than one window."""
    return UserError(
        f"{corpus.path}: the {split} split has {corpus.split(split).tokens} tokens, too few for a "
        f"window of context {context} and its targets\nlower the context, or prepare more text"
    )
