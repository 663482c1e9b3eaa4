r"""Cross-entropy of n-gram models: what a model of the same text must beat.

The models are interpolated with the smoothing of Witten and Bell (1991), as Chen and Goodman
(1999, "An empirical study of smoothing techniques for language modeling", section 2) write it.
With h the n - 1 tokens before w, h' the same without its first, c(h w) how often w follows h in
the training text, c(h) the sum of these over w, and d(h) how many different w follow h:

$$ p_n(w | h) = \frac{c(h w) + d(h) p_{n-1}(w | h')}{c(h) + d(h)}, \qquad p_0(w) = 1 / V $$

A context that nothing follows in the training text leaves p to the next shorter one, as do the
first tokens of a text, which have fewer than n - 1 before them. All probabilities over w sum to
one. Contexts run across the ends of documents, whose marks are tokens like others.

N tokens of training text, V vocabulary, n order.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from resroute.config import require_whole
from resroute.data.corpora import Corpus, Tokens
from resroute.data.tokenizer import CharTokenizer

Nats = npt.NDArray[np.float64]
_Ranks = npt.NDArray[np.int32]
_Keys = npt.NDArray[np.int64]

_CHUNK = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class NgramBaselines:
    """Mean cross-entropy of n-gram models on the validation split.

    Attributes:
        nats: Per token of the orders 1, 2, and so on.
        unit: What a token is: one "character" (the end of text counts as one), or a "token".
        train_tokens: Tokens at the head of the train split from which the models were made.
        train_total: Tokens of the whole train split.
        val_tokens: Tokens at the head of the validation split that were predicted.
        val_total: Tokens of the whole validation split.
    """

    nats: tuple[float, ...]
    unit: Literal["character", "token"]
    train_tokens: int
    train_total: int
    val_tokens: int
    val_total: int


def ngram_baselines(
    corpus: Corpus,
    *,
    max_order: int = 6,
    max_tokens: int = 20_000_000,
    max_val_tokens: int = 5_000_000,
    progress: Callable[[int, int], None] | None = None,
) -> NgramBaselines:
    """Train n-gram models on the train split and evaluate them on the validation split.

    Memory is bounded by the two limits: 1 to 2 GB where both are reached at their defaults.

    Args:
        corpus: An open corpus.
        max_order: The highest n; every order from 1 on is evaluated.
        max_tokens: At most so many tokens of the train split are read.
        max_val_tokens: At most so many tokens of the validation split are predicted.
        progress: Called with the orders done and the orders to do.

    Raises:
        UserError: A limit below one.
    """
    for name, value in (("max_tokens", max_tokens), ("max_val_tokens", max_val_tokens)):
        require_whole(name, value, 1)
    train = corpus.tokens("train")[:max_tokens]
    val = corpus.tokens("val")[:max_val_tokens]
    orders = token_nats(train, val, vocab_size=corpus.tokenizer.vocab_size, max_order=max_order)
    means: list[float] = []
    for nats in orders:
        means.append(float(nats.mean()))
        if progress:
            progress(len(means), max_order)
    return NgramBaselines(
        nats=tuple(means),
        unit="character" if isinstance(corpus.tokenizer, CharTokenizer) else "token",
        train_tokens=len(train),
        train_total=corpus.split("train").tokens,
        val_tokens=len(val),
        val_total=corpus.split("val").tokens,
    )


def token_nats(
    train: Tokens, text: Tokens, *, vocab_size: int, max_order: int = 6
) -> Iterator[Nats]:
    """-log p of each token of `text` given those before it, one array for each order.

    Args:
        train: Token ids from which the models are made, (N,).
        text: Token ids to predict, (tokens,).
        vocab_size: V; every id is below it.
        max_order: The highest n.

    Yields:
        Nats of the orders 1 to `max_order`, (tokens,) each.

    Raises:
        UserError: `max_order` below one.
    """
    require_whole("max_order", max_order, 1)
    return _each_order(train, text, vocab_size, max_order)


def _each_order(train: Tokens, text: Tokens, vocab_size: int, max_order: int) -> Iterator[Nats]:
    probability = np.full(len(text), 1 / vocab_size)
    # ranks number the distinct n-grams of the training text; at order 0 there is one, the empty
    ranks, counts = np.zeros(len(train) + 1, np.int32), np.array([len(train) + 1], np.int32)
    text_ranks = np.zeros(len(text) + 1, np.int32)
    for order in range(1, max_order + 1):
        # nothing follows the n-gram at the very end of the training text
        followed = counts
        if len(ranks):
            followed[ranks[-1]] -= 1
        ranks, table, counts = _count(ranks[:-1], train[order - 1 :], vocab_size)
        distinct = np.bincount(table // vocab_size, minlength=len(followed)).astype(np.int32)
        level = _Level(table, counts, followed, distinct)
        text_ranks = level.apply(text_ranks[:-1], text, probability, vocab_size, order)
        yield -np.log(probability)


def _count(
    contexts: _Ranks, tokens: Tokens, vocab_size: int
) -> tuple[_Ranks, _Keys, npt.NDArray[np.int32]]:
    """Number the n-grams that contexts and the tokens after them make.

    Returns:
        The rank of each n-gram, and of each rank the key, ascending, and the count.
    """
    # a rank is below 2^31 and a token below 2^21: keys are exact for every vocabulary and order
    keys = contexts.astype(np.int64) * vocab_size + tokens
    order = np.argsort(keys)
    keys = keys[order]
    is_new = np.ones(len(keys), np.bool_)
    np.not_equal(keys[1:], keys[:-1], out=is_new[1:])
    ranks = np.empty(len(keys), np.int32)
    ranks[order] = np.cumsum(is_new, dtype=np.int32) - np.int32(1)
    del order
    starts = np.flatnonzero(is_new)
    return ranks, keys[starts], np.diff(starts, append=len(keys)).astype(np.int32)


@dataclasses.dataclass(frozen=True, eq=False)
class _Level:
    """The n-grams of one order and their contexts, by rank.

    Attributes:
        keys: Of n-grams, ascending: the context's rank times V, plus the token.
        counts: c(h w) of n-grams.
        followed: c(h) of contexts.
        distinct: d(h) of contexts.
    """

    keys: _Keys
    counts: npt.NDArray[np.int32]
    followed: npt.NDArray[np.int32]
    distinct: npt.NDArray[np.int32]

    def apply(
        self, contexts: _Ranks, text: Tokens, probability: Nats, vocab_size: int, order: int
    ) -> _Ranks:
        """Turn p of the next lower order into p of this one, in place.

        Args:
            contexts: Rank of the n-gram that ends before each token but the first n - 1; -1 where
                the training text has it not.
            text: All token ids, (tokens,).
            probability: p of each token, (tokens,).
            vocab_size: V.
            order: n.

        Returns:
            Rank of the n-gram that ends at each token but the first n - 1, -1 where it is new.
        """
        ranks = np.full(len(contexts), -1, np.int32)
        for start in range(0, len(contexts), _CHUNK):
            context = contexts[start : start + _CHUNK]
            places = np.flatnonzero(context >= 0)
            context = context[places]
            tokens = start + places + order - 1
            found = self._look_up(context.astype(np.int64) * vocab_size + text[tokens])
            ranks[start + places] = found
            seen = np.zeros(len(found))
            seen[found >= 0] = self.counts[found[found >= 0]]
            distinct = self.distinct[context].astype(np.float64)
            total = self.followed[context] + distinct
            mixed = (seen + distinct * probability[tokens]) / np.maximum(total, 1)
            probability[tokens] = np.where(total > 0, mixed, probability[tokens])
        return ranks

    def _look_up(self, keys: npt.NDArray[Any]) -> _Ranks:
        """Rank of each key, -1 where it is not there."""
        if not len(self.keys):
            return np.full(len(keys), -1, np.int32)
        # searching in ascending order stays in the cache
        order = np.argsort(keys)
        ascending = keys[order]
        places = np.searchsorted(self.keys, ascending)
        is_there = self.keys.take(places, mode="clip") == ascending
        ranks = np.empty(len(keys), np.int32)
        ranks[order] = np.where(is_there, places, -1)
        return ranks
