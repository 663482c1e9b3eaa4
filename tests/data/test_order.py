"""Orders of reading: permutations by position, windows and documents once an epoch, mixtures."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import resroute as rr
from resroute.data import END_OF_TEXT, Mixture, training_batch
from resroute.data.order import DocumentOrder, shuffled, window_starts


@given(st.integers(1, 700), st.integers(0, 5))
def test_a_shuffle_is_a_permutation(count, key):
    found = shuffled(np.arange(count), count, (key,))
    assert sorted(found.tolist()) == list(range(count))


def test_a_shuffle_needs_no_memory_of_its_length():
    count = 10**15
    places = np.array([0, 1, 2, count // 2, count - 1])
    found = shuffled(places, count, (1,))
    assert len(set(found.tolist())) == 5
    assert (found < count).all()
    # in pieces or at once
    assert [int(shuffled(places[i : i + 1], count, (1,))[0]) for i in range(5)] == found.tolist()
    assert shuffled(places, count, (2,)).tolist() != found.tolist()


def test_a_shuffle_mixes():
    found = shuffled(np.arange(4096), 4096, (3,))
    assert abs(np.corrcoef(found, np.arange(4096))[0, 1]) < 0.05
    # of a random permutation one place stays, on average
    assert (found == np.arange(4096)).sum() < 8
    steps = np.diff(found) % 4096
    assert len(np.unique(steps)) > 2400


@pytest.mark.parametrize(("tokens", "context"), [(100, 7), (8, 7), (15, 7), (16, 7), (1000, 10)])
def test_an_epoch_of_windows_reads_each_once(tokens, context):
    count = max(1, (tokens - context) // context)
    for epoch in range(3):
        positions = np.arange(epoch * count, (epoch + 1) * count)
        starts = window_starts(positions, tokens=tokens, context=context, seed=5)
        assert starts.min() >= 0
        assert starts.max() + context < tokens
        assert len(np.unique(starts % context)) == 1
        assert len(np.unique(starts)) == count
    two = [
        window_starts(np.arange(e * count, (e + 1) * count), tokens=tokens, context=context, seed=5)
        for e in (0, 1)
    ]
    if count > 5:
        assert two[0].tolist() != two[1].tolist()


def test_windows_resume_by_position():
    whole = window_starts(np.arange(90), tokens=300, context=7, seed=1)
    parts = [
        window_starts(np.arange(i, i + 9), tokens=300, context=7, seed=1) for i in range(0, 90, 9)
    ]
    assert np.concatenate(parts).tolist() == whole.tolist()


def test_an_epoch_of_documents_reads_each_once_and_whole():
    # documents of 1, 2, .. 6 tokens, the last of each its end
    ends = np.cumsum([1, 2, 3, 4, 5, 6]) - 1
    order = DocumentOrder(ends, 3)
    context = 5
    assert order.windows_per_epoch(context) == 4
    for epoch in range(3):
        windows = [order.places(epoch * 4 + i, context) for i in range(4)]
        read = np.concatenate([*(w[:-1] for w in windows), windows[-1][-1:]])
        assert len(np.unique(read)) == 21
        # within a document places follow each other
        jumps = np.flatnonzero(np.diff(read) != 1)
        assert all(read[jump] in ends for jump in jumps)
        for first, second in itertools.pairwise(windows):
            assert first[-1] == second[0]
    assert order.places(4, context).tolist() == DocumentOrder(ends, 3).places(4, context).tolist()


def corpus_of(folder, text, name):
    (folder / f"{name}.txt").write_text(text)
    return rr.prepare_text(folder / f"{name}.txt", folder / name)


def test_batches_take_an_order(tmp_path):
    story = "a tale of b and c\nthat goes on\n" + END_OF_TEXT + "\n"
    corpus = corpus_of(tmp_path, story * 40, "tales")
    sizes = {"context": 16, "batch_size": 4, "seed": 2}
    for order in ("windows", "documents"):
        whole = training_batch(corpus, step=3, order=order, **sizes)
        part = training_batch(corpus, step=3, order=order, rows=slice(1, 3), **sizes)
        assert (part[0] == whole[0][1:3]).all()
        assert (whole[0][:, 1:] == whole[1][:, :-1]).all()
    plain = corpus_of(tmp_path, "no end of text here, but words\n" * 30, "plain")
    with pytest.raises(rr.UserError, match="too few documents with an end of text"):
        training_batch(plain, step=0, order="documents", **sizes)


@given(st.lists(st.floats(0.01, 1), min_size=1, max_size=5), st.integers(1, 9), st.integers(0, 300))
def test_a_mixture_keeps_its_shares(weights, batch, step):
    mixture = object.__new__(Mixture)
    shares = [w / sum(weights) for w in weights]
    object.__setattr__(mixture, "corpora", tuple((None, share) for share in shares))
    before, after = mixture.read(batch, step), mixture.read(batch, step + 1)
    assert sum(after) == batch * (step + 1)
    for share, old, new in zip(shares, before, after, strict=True):
        assert 0 <= new - old <= batch
        assert abs(new - share * batch * (step + 1)) <= len(shares)


def test_a_mixture_reads_each_corpus_by_its_share(tmp_path):
    main = corpus_of(tmp_path, "abc ABC\n" * 200, "main")
    lower = tmp_path / "lower.txt"
    lower.write_text("abc\n" * 300)
    other = rr.prepare_text(lower, tmp_path / "lower", tokens=main.tokenizer)
    mixture = Mixture(((main, 0.75), (other, 0.25)))
    upper = [main.tokenizer.symbols.index(c) for c in "ABC"]
    of_main = 0
    for step in range(10):
        inputs, _ = training_batch(
            mixture, context=8, batch_size=4, seed=0, step=step, order="windows"
        )
        of_main += sum(any(int(t) in upper for t in row) for row in inputs)
    assert of_main == 30
    stranger = corpus_of(tmp_path, "xyz\n" * 100, "stranger")
    with pytest.raises(rr.UserError, match="has another vocabulary than"):
        Mixture(((main, 0.5), (stranger, 0.5)))
    with pytest.raises(rr.UserError, match="must sum to 1"):
        Mixture(((main, 0.5), (other, 0.4)))
