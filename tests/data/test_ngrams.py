import math
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resroute.config import UserError
from resroute.data import ngrams, prepare_text
from resroute.data.corpora import Corpus
from resroute.data.ngrams import ngram_baselines, token_nats


def nats(train: list[int], text: list[int], vocab_size: int, max_order: int) -> np.ndarray:
    orders = token_nats(np.array(train), np.array(text), vocab_size=vocab_size, max_order=max_order)
    return np.array(list(orders))


# the formula as it stands in the docstring, by dictionaries
def naive(train: list[int], text: list[int], vocab_size: int, max_order: int) -> np.ndarray:
    counts = Counter(
        tuple(train[place : place + order])
        for order in range(1, max_order + 1)
        for place in range(len(train) - order + 1)
    )
    total: Counter[tuple[int, ...]] = Counter()
    distinct: Counter[tuple[int, ...]] = Counter()
    for gram, count in counts.items():
        total[gram[:-1]] += count
        distinct[gram[:-1]] += 1

    def probability(word: int, context: tuple[int, ...], order: int) -> float:
        if order == 0:
            return 1 / vocab_size
        if len(context) < order - 1:
            return probability(word, context, order - 1)
        lower = probability(word, context[1:], order - 1)
        if not total[context]:
            return lower
        seen = counts[(*context, word)]
        return (seen + distinct[context] * lower) / (total[context] + distinct[context])

    def nats(place: int, order: int) -> float:
        context = text[max(0, place - order + 1) : place]
        return -math.log(probability(text[place], tuple(context), order))

    orders = range(1, max_order + 1)
    return np.array([[nats(place, order) for place in range(len(text))] for order in orders])


def test_four_tokens_by_hand() -> None:
    # train a b a b; V = 3. p1(a) = p1(b) = (2 + 2/3) / (4 + 2), p1(c) = (0 + 2/3) / (4 + 2)
    a, b, c = 4 / 9, 4 / 9, 1 / 9
    # b follows a twice; a follows the b that is not the last: p2(w|a) = (2 [w = b] + p1(w)) / 3,
    # p2(w|b) = ([w = a] + p1(w)) / 2, and nothing follows c: p2(w|c) = p1(w)
    expected = [[a, b, a, a, c, b], [a, (2 + b) / 3, (1 + a) / 2, a / 3, c / 3, b]]
    found = nats([0, 1, 0, 1], [0, 1, 0, 0, 2, 1], 3, 2)
    assert np.exp(-found) == pytest.approx(np.array(expected), rel=1e-14)


TEXTS = st.integers(1, 4).flatmap(
    lambda vocab_size: st.tuples(
        st.just(vocab_size),
        st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=5)
        | st.lists(st.integers(0, vocab_size - 1), min_size=15, max_size=60),
        st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=15),
    )
)


@settings(deadline=None)
@given(TEXTS, st.integers(1, 6))
def test_every_order_equals_the_formula(
    texts: tuple[int, list[int], list[int]], max_order: int
) -> None:
    vocab_size, train, text = texts
    expected = naive(train, text, vocab_size, max_order)
    assert nats(train, text, vocab_size, max_order) == pytest.approx(expected, abs=1e-12)


@settings(deadline=None)
@given(TEXTS)
def test_probabilities_sum_to_one_after_every_context(
    texts: tuple[int, list[int], list[int]],
) -> None:
    vocab_size, train, context = texts
    last = [nats(train, [*context, word], vocab_size, 6)[:, -1] for word in range(vocab_size)]
    assert np.exp(-np.array(last)).sum(axis=0) == pytest.approx(np.ones(6), abs=1e-12)


def test_pieces_of_the_text_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    train, text = random.integers(5, size=(2, 200)).tolist()
    whole = nats(train, text, 5, 4)
    monkeypatch.setattr(ngrams, "_CHUNK", 7)
    assert (nats(train, text, 5, 4) == whole).all()


@pytest.mark.parametrize(
    ("dtype", "vocab_size"), [(np.uint8, 256), (np.uint16, 1 << 16), (np.uint32, 0x110000)]
)
def test_large_vocabularies_are_exact(dtype: type, vocab_size: int) -> None:
    random = np.random.default_rng(0)
    # thousands of ranks times a million tokens are more than 32 bits hold
    train = vocab_size - 1 - random.zipf(1.3, size=6000) % 250
    text = vocab_size - 1 - random.zipf(1.3, size=200) % 256
    found = token_nats(train.astype(dtype), text.astype(dtype), vocab_size=vocab_size)
    expected = naive(train.tolist(), text.tolist(), vocab_size, 6)
    assert np.array(list(found)) == pytest.approx(expected, abs=1e-12)


def test_memory_is_bounded_by_the_tokens_that_are_read() -> None:
    tokens = np.random.default_rng(0).integers(60_000, size=300_000).astype(np.uint16)
    tracemalloc.start()
    try:
        for _ in token_nats(tokens, tokens[:1000], vocab_size=60_000):
            pass
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # of 20 million tokens that makes under 2 GiB
    assert peak / len(tokens) < 100


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    path = tmp_path / "text.txt"
    path.write_text("the cat sat on the mat. a dog ran to the cat. " * 40)
    return prepare_text(path, tmp_path / "corpus")


def test_baselines_of_a_corpus(corpus: Corpus) -> None:
    train, val = corpus.tokens("train"), corpus.tokens("val")
    seen: list[tuple[int, int]] = []
    found = ngram_baselines(corpus, max_order=3, progress=lambda *done: seen.append(done))
    expected = naive(train.tolist(), val.tolist(), corpus.tokenizer.vocab_size, 3).mean(axis=1)
    assert found.nats == pytest.approx(tuple(expected))
    assert found.nats[0] > found.nats[1] > found.nats[2]
    assert (found.unit, found.train_tokens, found.train_total) == ("character", 1656, 1656)
    assert (found.val_tokens, found.val_total) == (len(val), len(val))
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_limits_read_the_head_of_a_split(corpus: Corpus) -> None:
    found = ngram_baselines(corpus, max_order=2, max_tokens=30, max_val_tokens=10)
    train, val = corpus.tokens("train")[:30].tolist(), corpus.tokens("val")[:10].tolist()
    expected = naive(train, val, corpus.tokenizer.vocab_size, 2).mean(axis=1)
    assert found.nats == pytest.approx(tuple(expected))
    assert (found.train_tokens, found.val_tokens) == (30, 10)
    assert (found.train_total, found.val_total) == (1656, len(corpus.tokens("val")))


@pytest.mark.parametrize("limit", ["max_order", "max_tokens", "max_val_tokens"])
def test_limits_below_one_are_refused(corpus: Corpus, limit: str) -> None:
    with pytest.raises(UserError, match=f"{limit} must be a whole number of at least 1, got 0"):
        ngram_baselines(corpus, **{limit: 0})


def test_no_order_is_better_than_the_generator(cheap_corpus: Corpus) -> None:
    sums = cheap_corpus.document_nats("val")
    assert sums is not None
    floor = sums.sum() / cheap_corpus.split("val").tokens
    assert min(ngram_baselines(cheap_corpus).nats) > floor


def test_a_real_text(real_data: Path) -> None:
    text = np.fromfile(real_data / "text8-first-1mib.txt", np.uint8) - ord("`")
    tokens = np.where(text > 26, 0, text)
    head, tail = tokens[:-50_000], tokens[-50_000:]
    means = [found.mean() for found in token_nats(head, tail, vocab_size=27)]
    # the entropy of single characters by another way
    shares = np.bincount(head) / len(head)
    assert means[0] == pytest.approx(-np.log(shares[tail]).mean(), abs=1e-4)
    assert means == sorted(means, reverse=True)
    assert 1.4 < means[-1] < 1.6
