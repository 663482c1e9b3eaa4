"""What bases explain of a block's updates, against projections of each token's updates."""

import itertools
import json
import math

import pytest
import torch

import resroute as rr
from resroute.config import UserError
from resroute.residual.energy import best_addition, best_signs, captured, curve, spectrum, walsh
from resroute.residual.trajectory import blocks_of
from resroute.testing import random_stack, randomise

WAV = rr.WAV(num_blocks=2, learn_bases=True)


def updates_of(policy, stack):
    """(sites, tokens, D)."""
    stream, found = policy.start(stack.embedding), []
    for site, weight in enumerate(stack.weights):
        read = policy.read(stream, site)
        normalised = read * torch.rsqrt(read.square().mean(-1, keepdim=True) + 1e-6)
        found.append(torch.tanh(normalised @ weight))
        stream = policy.write(stream, site, found[-1])
    return torch.stack(found).detach()


def share_by_token(updates, vectors):
    """Energy of each token's updates (m, tokens, D) in the span of some vectors (k, m)."""
    kept = total = 0.0
    basis = torch.tensor(vectors).double().T
    for token in range(updates.shape[1]):
        rows = updates[:, token]
        # least squares: what the sources that the vectors make can tell of the updates
        fitted = basis @ torch.linalg.lstsq(basis, rows).solution
        kept += fitted.square().sum().item()
        total += rows.square().sum().item()
    return kept / total


ONES, PHASE, SPLIT = [1.0] * 8, [1.0, -1.0] * 4, [1.0] * 4 + [-1.0] * 4


def test_shares_are_those_of_all_tokens():
    policy = WAV.build(8, 5).double()
    randomise(policy)
    stacks = [random_stack(16, 5, tokens=n, seed=n) for n in (3, 6)]
    with rr.trajectory(policy) as seen, torch.no_grad():
        for stack in stacks:
            stack.run(policy)
    found = seen.result()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["bases"] == ["state", "phase", "split"]
    every = torch.cat([updates_of(policy, stack) for stack in stacks], 1)
    for number, block in enumerate(found["blocks"]):
        sites = range(8 * number, 8 * number + 8)
        updates = every[sites.start : sites.stop]
        assert (block["sites"], block["size"]) == ([sites.start, sites.stop], 8)
        assert block["energy"] == pytest.approx(updates.square().mean().item(), rel=1e-12)
        learned = (policy.basis[sites] - policy.basis[sites].mean(0)).T.tolist()
        sets = {
            "state": [ONES],
            "state + phase": [ONES, learned[0]],
            "state + initial phase": [ONES, PHASE],
            "state + split": [ONES, learned[1]],
            "state + initial split": [ONES, SPLIT],
            "in use": [ONES, *learned],
            "state + phase + split": [ONES, PHASE, SPLIT],
        }
        assert list(block["captured"]) == list(sets)
        state = share_by_token(updates, [ONES])
        for name, vectors in sets.items():
            share = share_by_token(updates, vectors)
            assert block["captured"][name]["share"] == pytest.approx(share, rel=1e-9)
            rest = (share - state) / (1 - state)
            assert block["captured"][name]["of_rest"] == pytest.approx(rest, abs=1e-9)
        check_bounds(block, updates, state, [ONES, *learned])


def check_bounds(block, updates, state, used):
    """PCA, Walsh-Hadamard and one more vector, by what each token's updates say."""
    gram = torch.einsum("itd,jtd->ij", updates, updates)
    values = (torch.linalg.eigvalsh(gram).flip(0) / gram.trace()).tolist()
    assert block["pca"]["shares"] == pytest.approx(values, abs=1e-12)
    assert block["pca"]["cumulative"] == pytest.approx(list(itertools.accumulate(values)))
    # no k vectors hold more than the first k eigenvectors
    assert block["captured"]["in use"]["share"] <= block["pca"]["cumulative"][2] + 1e-12
    rest = block["pca"]["residual_cumulative"]
    assert rest[6] == pytest.approx(1.0)
    least = state + rest[1] * (1 - state)
    assert block["captured"]["state + phase + split"]["share"] <= least + 1e-12
    patterns = dict(enumerate(walsh(8).tolist()))
    assert (patterns[0], patterns[1], patterns[7]) == (ONES, SPLIT, PHASE)
    shares = {n: share_by_token(updates, [pattern]) for n, pattern in patterns.items()}
    order = sorted(shares, key=shares.get, reverse=True)
    assert block["walsh"]["sequency"] == order
    assert block["walsh"]["shares"] == pytest.approx([shares[n] for n in order], rel=1e-9)
    assert block["walsh"]["cumulative"][-1] == pytest.approx(1.0)
    now = share_by_token(updates, used)
    third = block["third"]
    added = {n: share_by_token(updates, [*used, pattern]) - now for n, pattern in patterns.items()}
    best = max(added, key=added.get)
    assert third["walsh"]["sequency"] == best
    for entry in third.values():
        grown = share_by_token(updates, [*used, entry["coefficients"]]) - now
        assert entry["share"] == pytest.approx(grown, abs=1e-9)
        assert entry["of_rest"] == pytest.approx(grown / (1 - now), rel=1e-9)
        assert entry["share"] <= third["best"]["share"] + 1e-12
    assert third["best"]["share"] > third["signs"]["share"] >= third["walsh"]["share"]


def test_a_block_by_hand():
    # updates 2, 0, 1, 1 of one token and one channel
    policy = rr.BlockAttnRes(num_blocks=1).build(2, 1).double()
    stream = policy.start(torch.ones(1, 1).double())
    with rr.trajectory(policy) as seen:
        for _ in range(2):
            stream = policy.start(torch.ones(1, 1).double())
            for site, value in enumerate((2.0, 0.0, 1.0, 1.0)):
                stream = policy.write(stream, site, torch.full((1, 1), value).double())
    (block,) = seen.result()["blocks"]
    assert seen.gram(0)[0].tolist() == [4.0, 0.0, 2.0, 2.0]
    # of 6, the state has 4 * 4 / 4, the phase 2 * 2 / 4, the split 0
    assert block["captured"]["state"] == {"share": pytest.approx(4 / 6), "of_rest": 0.0}
    assert block["captured"]["in use"] == block["captured"]["state"]
    assert block["captured"]["state + phase + split"] == {
        "share": pytest.approx(5 / 6),
        "of_rest": pytest.approx(1 / 2),
    }
    assert block["pca"]["shares"] == pytest.approx([1.0, 0.0, 0.0, 0.0], abs=1e-12)
    # (2, 0, 1, 1) less its mean
    best = block["third"]["best"]["coefficients"]
    assert best == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5), 0, 0], abs=1e-9)
    assert block["third"]["best"]["of_rest"] == pytest.approx(1.0)
    assert block["third"]["walsh"]["share"] == pytest.approx(1 / 6)
    assert block["third"]["walsh"]["sequency"] in (2, 3)


def test_blocks_of_methods_without_any():
    full, plain = rr.FullAttnRes().build(6, 3), rr.PreNorm().build(6, 3)
    assert blocks_of(full, 4) == blocks_of(plain, 4) == [range(0, 4), range(4, 8), range(8, 12)]
    assert blocks_of(plain, 100) == [range(2 * i, 2 * i + 2) for i in range(6)]
    assert blocks_of(rr.WAV(num_blocks=1).build(6, 3), 4) == [range(12)]
    with rr.trajectory(plain, num_blocks=2) as seen, torch.no_grad():
        random_stack(12, 3, dtype=torch.float32).run(plain)
    first, second = seen.result()["blocks"]
    assert (first["sites"], second["sites"]) == ([0, 6], [6, 12])
    assert list(first["captured"]) == ["state", "in use", "state + phase + split"]
    # six is no power of two
    assert first["walsh"] is first["third"]["walsh"] is None
    with pytest.raises(UserError, match="num_blocks must be a whole number of at least 1"):
        with_all(rr.trajectory(plain, num_blocks=0))
    with rr.trajectory(plain) as nothing, pytest.raises(UserError, match="nothing was seen"):
        nothing.result()


def with_all(context):
    with context:
        pass


def test_kinds_without_a_phase_have_no_such_set():
    policy = rr.WAV(num_blocks=1, bases=("split",)).build(2, 3, ("mixer",)).double()
    with rr.trajectory(policy) as seen, torch.no_grad():
        random_stack(2, 3).run(policy)
    (block,) = seen.result()["blocks"]
    assert list(block["captured"]) == ["state", "state + split", "in use"]
    # two vectors are all there are
    assert block["captured"]["in use"]["share"] == pytest.approx(1.0)
    assert (block["third"]["best"], block["third"]["signs"]) == (None, None)
    assert block["third"]["walsh"]["of_rest"] == 0.0


def test_a_model_that_adds_nothing():
    policy = rr.PreNorm().build(1, 2).double()
    with rr.trajectory(policy, num_blocks=1) as seen:
        stream = policy.start(torch.ones(1, 2).double())
        for site in range(2):
            stream = policy.write(stream, site, torch.zeros(1, 2).double())
    (block,) = seen.result()["blocks"]
    assert block["captured"]["state"]["share"] == 0.0
    assert block["pca"]["cumulative"] == [0.0, 0.0]


def test_walsh_vectors_are_orthogonal_and_in_order():
    for size in (1, 2, 8):
        basis = walsh(size)
        assert torch.equal(basis @ basis.T, size * torch.eye(size).double())
        changes = [sum(a != b for a, b in itertools.pairwise(row)) for row in basis.tolist()]
        assert changes == list(range(size))
    assert walsh(8)[1].tolist() == [1.0] * 4 + [-1.0] * 4


@pytest.mark.parametrize("seed", range(8))
def test_the_best_addition_and_the_best_signs(seed):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(6, 9, generator=generator, dtype=torch.float64)
    gram = rows @ rows.T
    used = torch.tensor([[1.0] * 6, [1.0, -1.0] * 3]).double().T

    def gain(vector):
        vectors = torch.cat((used, torch.as_tensor(vector).double()[:, None]), 1)
        return captured(gram, vectors) - captured(gram, used)

    best = gain(best_addition(gram, used))
    assert best == pytest.approx(spectrum(gram, without=used)[0], rel=1e-9)
    for _ in range(50):
        assert gain(torch.randn(6, generator=generator, dtype=torch.float64)) <= best + 1e-12
    exhaustive = max(gain(signs) for signs in itertools.product((1.0, -1.0), repeat=6))
    found = best_signs(gram, used)
    assert found.abs().tolist() == [1.0] * 6
    # a search by single flips may end beside the best of all
    assert 0.85 * exhaustive <= gain(found) <= exhaustive + 1e-12
    flipped = [gain(found * (1 - 2 * torch.eye(6)[i])) for i in range(6)]
    assert max(flipped) <= gain(found) + 1e-9


def test_vectors_that_depend_on_each_other_count_once():
    gram = torch.diag(torch.tensor([3.0, 1.0, 0.0])).double()
    vectors = torch.tensor([[1.0, 0.0, 0.0], [2.0, 0.0, 0.0], [0.0, 0.0, 5.0]]).double().T
    assert captured(gram, vectors) == pytest.approx(0.75)
    assert curve([0.5, 0.25]) == [0.5, 0.75]


def test_a_model_that_diverged_has_no_bases():
    policy = rr.WAV(num_blocks=2).build(4, 8)
    with rr.trajectory(policy) as seen:
        stream = policy.start(torch.randn(1, 3, 8))
        for site in range(8):
            stream = policy.write(stream, site, torch.full((1, 3, 8), float("inf")))
    with pytest.raises(UserError, match="updates of block 0 are not finite"):
        seen.result()
