from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from resroute.config import UserError
from resroute.data import (
    END_OF_TEXT,
    Corpus,
    evaluation_windows,
    prepare_storyworld,
    prepare_text,
    storyworld,
    training_batch,
)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder = tmp_path_factory.mktemp("plain")
    # each character tells its place: token i of the train split is i
    text = "".join(chr(0x100 + i) for i in range(1000))
    (folder / "text.txt").write_text(text, encoding="utf-8")
    return prepare_text(folder / "text.txt", folder / "out", fractions=(0.5, 0.25, 0.25))


def stand_in(seed: int) -> Iterator[storyworld.Story]:
    random = np.random.default_rng(seed)
    while True:
        size = int(random.integers(1, 10))
        text = "".join("abc"[i] for i in random.integers(3, size=size))
        yield storyworld.Story(text=text, nats=size * float(np.log(3)))


@pytest.fixture(scope="module")
def aligned(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storyworld, "stories", stand_in)
        patch.setattr(storyworld, "ALPHABET", ("a", "b", "c"))
        return prepare_storyworld(tmp_path_factory.mktemp("aligned") / "out", characters=4000)


def test_targets_are_the_next_tokens(plain: Corpus) -> None:
    inputs, targets = training_batch(plain, context=7, batch_size=5, seed=1, step=2)
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.shape == (5, 7)
    assert torch.equal(inputs, inputs[:, :1] + torch.arange(7))
    assert torch.equal(targets, inputs + 1)


def test_a_batch_depends_on_seed_and_step_alone(plain: Corpus) -> None:
    def batch(seed: int, step: int) -> list[list[int]]:
        rows: list[list[int]] = training_batch(
            plain, context=4, batch_size=8, seed=seed, step=step
        )[0].tolist()
        return rows

    first = batch(0, 5)
    batch(0, 6)
    torch.rand(3)
    assert batch(0, 5) == first
    assert len({str(batch(seed, step)) for seed in range(3) for step in range(3)}) == 9


def test_the_data_of_a_seed_and_step_stay_the_same_over_releases(plain: Corpus) -> None:
    inputs, _ = training_batch(plain, context=4, batch_size=4, seed=0, step=0)
    assert inputs[:, 0].tolist() == np.random.default_rng([0, 0]).integers(496, size=4).tolist()


def test_every_window_of_the_train_split_is_drawn(plain: Corpus) -> None:
    inputs, targets = training_batch(plain, context=490, batch_size=400, seed=0, step=0)
    assert set(inputs[:, 0].tolist()) == set(range(10))
    assert int(targets.max()) == 499


def test_a_split_shorter_than_a_window_is_refused(plain: Corpus) -> None:
    training_batch(plain, context=499, batch_size=1, seed=0, step=0)
    with pytest.raises(UserError, match=r"the train split has 500 tokens, too few .* context 500"):
        training_batch(plain, context=500, batch_size=1, seed=0, step=0)
    with pytest.raises(UserError, match=r"the val split has 250 .*\nlower the context, or prepare"):
        evaluation_windows(plain, context=250, max_windows=1)


def test_plain_windows_are_spread_and_do_not_overlap(plain: Corpus) -> None:
    windows = evaluation_windows(plain, context=10, max_windows=4)
    # 24 windows of 10 fit into 250 tokens; every sixth is taken
    assert windows.inputs[:, 0].tolist() == [500, 560, 620, 680]
    assert torch.equal(windows.targets, windows.inputs + 1)
    assert windows.floor is None
    every = evaluation_windows(plain, "test", context=10, max_windows=100)
    assert every.inputs.flatten().tolist() == list(range(750, 990))
    with pytest.raises(UserError, match="max_windows of at least 1, got 0"):
        evaluation_windows(plain, context=10, max_windows=0)


def test_aligned_training_opens_with_the_end_of_text(aligned: Corpus) -> None:
    end = aligned.tokenizer.end_of_text
    inputs, targets = training_batch(aligned, context=20, batch_size=12_000, seed=0, step=0)
    assert set(inputs[:, 0].tolist()) == {end}
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    drawn = {tuple(row) for row in torch.cat([inputs, targets[:, -1:]], dim=1).tolist()}
    ends, tokens = aligned.document_ends("train"), aligned.tokens("train")
    assert drawn == {tuple(tokens[e : e + 21].tolist()) for e in ends if e + 21 <= len(tokens)}


def test_aligned_windows_hold_whole_documents_and_their_exact_floor(aligned: Corpus) -> None:
    end = aligned.tokenizer.end_of_text
    windows = evaluation_windows(aligned, context=20, max_windows=1000)
    texts = aligned.tokenizer.decode(aligned.tokens("val")).split(END_OF_TEXT)[:-1]
    seen: list[str] = []
    for inputs, targets in zip(windows.inputs, windows.targets, strict=True):
        counted = targets[targets != -100]
        assert inputs[0] == counted[-1] == end
        assert torch.equal(inputs[1 : len(counted)], counted[:-1])
        assert (inputs[len(counted) :] == end).all()
        assert (targets[len(counted) :] == -100).all()
        held = aligned.tokenizer.decode(counted).split(END_OF_TEXT)[:-1]
        seen += held
        # the next document would not have fitted
        assert len(seen) == len(texts) or len(counted) + len(texts[len(seen)]) + 1 > 20
    assert seen == texts
    nats = sum(len(text) for text in texts) * np.log(3)
    assert windows.floor is not None
    assert windows.floor.exact
    assert windows.floor.nats == pytest.approx(nats / sum(len(text) + 1 for text in texts))


def test_the_floor_is_that_of_the_windows_taken(aligned: Corpus) -> None:
    windows = evaluation_windows(aligned, "test", context=20, max_windows=3)
    counted = windows.targets[windows.targets != -100]
    letters = len(aligned.tokenizer.decode(counted).replace(END_OF_TEXT, ""))
    assert windows.inputs.shape == (3, 20)
    assert windows.floor is not None
    assert windows.floor.nats == pytest.approx(letters * np.log(3) / len(counted))
    again = evaluation_windows(aligned, "test", context=20, max_windows=3)
    assert torch.equal(again.inputs, windows.inputs)


def test_documents_longer_than_the_context_give_a_lower_bound(aligned: Corpus) -> None:
    assert aligned.longest_document == 10
    assert evaluation_windows(aligned, context=10, max_windows=9).floor.exact  # type: ignore[union-attr]
    windows = evaluation_windows(aligned, context=9, max_windows=9)
    nats = aligned.document_nats("val")
    assert nats is not None
    assert windows.floor is not None
    assert not windows.floor.exact
    assert windows.floor.nats == pytest.approx(nats.sum() / len(aligned.tokens("val")))
    assert (windows.targets != -100).all()
    # training then draws from everywhere, as evaluation does
    inputs, _ = training_batch(aligned, context=9, batch_size=500, seed=0, step=0)
    assert len(set(inputs[:, 0].tolist())) == 4


def test_an_aligned_split_without_room_after_a_document_is_refused(aligned: Corpus) -> None:
    tokens = len(aligned.tokens("train"))
    last = int(aligned.document_ends("train")[0])
    training_batch(aligned, context=tokens - last - 1, batch_size=1, seed=0, step=0)
    with pytest.raises(UserError, match="the train split has"):
        training_batch(aligned, context=tokens - last, batch_size=1, seed=0, step=0)


def test_storyworld_windows_fit_a_context_of_256(tmp_path: Path) -> None:
    corpus = prepare_storyworld(tmp_path / "sw", characters=60_000)
    windows = evaluation_windows(corpus, context=256, max_windows=64)
    assert windows.floor is not None
    assert windows.floor.exact
    population = storyworld.entropy().nats / (storyworld.entropy().characters + 1)
    assert windows.floor.nats == pytest.approx(population, rel=0.15)
