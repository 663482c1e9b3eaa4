"""What is seen of a running model, by hand."""

import json
import math

import pytest
import torch

import resroute as rr
from resroute.config import UserError
from resroute.residual.observe import observe
from resroute.testing import random_stack, randomise, small_gpt

from .conftest import E, U, approx, run

LN2, LN3 = math.log(2), math.log(3)
# the initial weight of a detail beside one without a bias
LOW = math.exp(-2)


def rms(*rows):
    """Mean over tokens of the RMS over two channels."""
    return sum(math.sqrt((x * x + y * y) / 2) for x, y in rows) / len(rows)


def seen_of(config, *, layers=1, updates=U):
    policy = config.build(layers, 2).double()
    return observe(policy, lambda: run(policy, updates=updates))


@pytest.mark.parametrize("config", [rr.PreNorm(), rr.ReZero(), rr.LayerScale()], ids=str)
def test_updates_of_methods_with_one_sum(config):
    # over tokens and width together: sqrt(25 / 4), sqrt(11 / 4)
    assert seen_of(config) == approx({"update_rms": [2.5, 11**0.5 / 2]})


def test_block_at_its_start():
    assert seen_of(rr.BlockAttnRes(num_blocks=1)) == approx(
        {
            "update_rms": [2.5, 11**0.5 / 2],
            # the first site has the embedding alone, the others two sources
            "entropy": 2 * LN2 / 3,
            "effective_sources": 5 / 3,
            "detail_weight": 0.0,
            "embedding_weight": 2 / 3,
            "kinds": {"embedding": 2 / 3, "running state": 1 / 6, "state": 1 / 6},
            "source_rms": {
                "embedding": rms((1, 0), (0, 2)),
                "state 0": rms((3, 4), (1, 4)),
            },
        }
    )


def test_entropy_is_of_each_token():
    policy = rr.BlockAttnRes(num_blocks=1, eps=0.0).build(1, 2).double()
    with torch.no_grad():
        # of site 1: the first token's embedding has the normalised key (sqrt(2), 0)
        policy.query[1, 0] = LN3 / math.sqrt(2)
    seen = observe(policy, lambda: run(policy))
    # the first token's weights are 3/4 and 1/4, the second's 1/2 and 1/2
    first = 3 / 4 * math.log(4 / 3) + 1 / 4 * math.log(4)
    assert seen["entropy"] == pytest.approx(((first + LN2) / 2 + LN2) / 3, rel=1e-12)
    assert seen["effective_sources"] == pytest.approx(
        (1 + (math.exp(first) + 2) / 2 + 2) / 3, rel=1e-12
    )
    assert seen["embedding_weight"] == pytest.approx((1 + 5 / 8 + 1 / 2) / 3, rel=1e-12)


def test_full_has_every_update_as_a_source():
    assert seen_of(rr.FullAttnRes()) == approx(
        {
            "update_rms": [2.5, 11**0.5 / 2],
            "entropy": (LN2 + LN3) / 3,
            "effective_sources": 2.0,
            "detail_weight": 0.0,
            "embedding_weight": (1 + 1 / 2 + 1 / 3) / 3,
            # 1/2 of the second site, 2/3 of the readout; both updates are of one kind
            "kinds": {"embedding": 11 / 18, "update": 7 / 18},
            "source_rms": {
                "embedding": rms((1, 0), (0, 2)),
                "update 0": rms((0, 4), (0, 3)),
                "update 1": rms((3, 0), (1, 1)),
            },
        }
    )


def test_delta_counts_the_reads_that_mix():
    # neither the first site nor the readout does
    assert seen_of(rr.DeltaAttnRes()) == approx(
        {
            "update_rms": [2.5, 11**0.5 / 2],
            "entropy": LN2,
            "effective_sources": 2.0,
            "detail_weight": 0.0,
            "embedding_weight": 0.5,
            "kinds": {"embedding": 0.5, "update": 0.5},
            "source_rms": {
                "embedding": rms((1, 0), (0, 2)),
                "update 0": rms((0, 4), (0, 3)),
                "update 1": rms((3, 0), (1, 1)),
            },
        }
    )
    alone = seen_of(rr.DeltaAttnRes(num_blocks=1, embedding_source=False))
    assert alone["entropy"] == alone["embedding_weight"] == 0.0
    assert alone["effective_sources"] == 1.0
    assert alone["kinds"] == {"running state": 1.0}
    assert alone["source_rms"] == approx({"state 0": rms((3, 4), (1, 4))})


def test_wav_counts_finished_and_running_details():
    updates = [*U, 2 * U[0], torch.zeros_like(E)]
    seen = seen_of(rr.WAV(num_blocks=2, bases=("split",)), layers=2, updates=updates)
    # sites 1 and 2 have two sources without a bias and one detail, site 3 three and two
    few, many = 2 + LOW, 3 + 2 * LOW
    assert seen["detail_weight"] == pytest.approx((2 * LOW / few + 2 * LOW / many) / 5, rel=1e-12)
    # the readout mixes the embedding and both states
    embedding = (1 + 2 / few + 1 / many + 1 / 3) / 5
    assert seen["embedding_weight"] == pytest.approx(embedding, rel=1e-12)
    # of sites 1 and 3 the running block, of sites 2 and 3 the finished one
    half = 1 / few + 1 / many
    kinds = {
        "embedding": embedding,
        "running state": half / 5,
        "running split": LOW * half / 5,
        "state": (half + 2 / 3) / 5,
        "split": LOW * half / 5,
    }
    assert list(seen["kinds"]) == list(kinds)
    assert seen["kinds"] == pytest.approx(kinds, rel=1e-12)
    # -ln p is ln(sum) for a source without a bias, and 2 more for a detail
    entropies = [
        0.0,
        *[math.log(few) + 2 * LOW / few] * 2,
        math.log(many) + 4 * LOW / many,
        LN3,
    ]
    assert seen["entropy"] == pytest.approx(sum(entropies) / 5, rel=1e-12)
    effective = sum(math.exp(entropy) for entropy in entropies) / 5
    assert seen["effective_sources"] == pytest.approx(effective, rel=1e-12)
    assert seen["update_rms"] == pytest.approx([2.5, 11**0.5 / 2, 5.0, 0.0], rel=1e-12)
    assert seen["source_rms"] == approx(
        {
            "embedding": rms((1, 0), (0, 2)),
            "state 0": rms((3, 4), (1, 4)),
            # without matching
            "split 0": rms((-3, 4), (-1, 2)),
            "state 1": rms((0, 8), (0, 6)),
            "split 1": rms((0, 8), (0, 6)),
        }
    )


def test_sizes_have_no_eps():
    zeros = [torch.zeros_like(E)] * 2
    seen = seen_of(rr.FullAttnRes(eps=0.25), updates=zeros)
    assert seen["update_rms"] == [0.0, 0.0]
    assert seen["source_rms"]["update 0"] == 0.0
    assert seen["source_rms"]["embedding"] == pytest.approx(rms((1, 0), (0, 2)), rel=1e-12)


METHODS = {
    "pre_norm": rr.PreNorm(),
    "full": rr.FullAttnRes(),
    "block": rr.BlockAttnRes(num_blocks=2),
    "block_gated": rr.BlockAttnRes(num_blocks=2, gated=True),
    "delta": rr.DeltaAttnRes(),
    "delta_of_blocks": rr.DeltaAttnRes(num_blocks=2),
    "wav": rr.WAV(num_blocks=2),
    "wav_learned": rr.WAV(num_blocks=2, learn_bases=True, details_in_readout=True),
}


@pytest.mark.parametrize("config", METHODS.values(), ids=METHODS)
@torch.no_grad()
def test_the_model_computes_the_same_and_the_policy_is_as_before(config):
    model = small_gpt(residual=config).eval()
    randomise(model.policy)
    tokens = torch.arange(16).remainder(11).view(2, 8)
    plain = model(tokens)[0]
    before = dict(vars(model.policy))
    watched = []
    seen = observe(model.policy, lambda: watched.append(model(tokens)[0]))
    assert torch.equal(watched[0], plain)
    after = vars(model.policy)
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)
    assert len(seen["update_rms"]) == 8
    # plain JSON values and finite ones
    assert json.loads(json.dumps(seen, allow_nan=False)) == seen


@torch.no_grad()
def test_reads_with_their_norm_count_too():
    model = small_gpt(residual=rr.FullAttnRes()).eval()
    seen = observe(model.policy, lambda: model(torch.arange(8).view(1, 8)))
    # 1 to 9 sources of equal weight
    assert seen["effective_sources"] == pytest.approx(5.0, rel=1e-6)
    assert seen["entropy"] == pytest.approx(math.log(math.factorial(9)) / 9, rel=1e-6)


@pytest.mark.parametrize(
    "config", [METHODS["wav"], METHODS["wav_learned"], METHODS["delta_of_blocks"]], ids=str
)
def test_weights_are_those_that_capture_sees(config):
    policy = config.build(4, 5).double()
    randomise(policy)
    stack = random_stack(8, 5)
    with rr.capture(policy) as captured:
        seen = observe(policy, lambda: stack.run(policy))
        assert captured.passes == 1
    assert not {"read", "read_normalised", "finish", "write"} & vars(policy).keys()
    sites = [site for site in captured.result()["sites"] if site["weights"]]
    reads = [site["weights"] for site in sites]
    details = [
        sum(weight for name, weight in read.items() if "phase" in name or "split" in name)
        for read in reads
    ]
    assert seen["detail_weight"] == pytest.approx(sum(details) / len(reads), rel=1e-12)
    assert seen["embedding_weight"] == pytest.approx(
        sum(read["embedding"] for read in reads) / len(reads), rel=1e-12
    )
    kinds = {
        kind: sum(site["kinds"].get(kind, 0.0) for site in sites) / len(sites)
        for site in sites
        for kind in site["kinds"]
    }
    assert seen["kinds"] == pytest.approx(kinds, rel=1e-12)
    assert sum(kinds.values()) == pytest.approx(1.0, rel=1e-12)
    assert 0 < seen["entropy"] < math.log(seen["effective_sources"])


def test_gradients_are_those_of_a_plain_pass():
    policy = rr.WAV(num_blocks=2).build(4, 5).double()
    randomise(policy)
    stack = random_stack(8, 5)
    plain = torch.autograd.grad(stack.run(policy)[1].sum(), stack.weights)[0]
    watched = []
    observe(policy, lambda: watched.append(stack.run(policy)[1]))
    assert torch.equal(torch.autograd.grad(watched[0].sum(), stack.weights)[0], plain)


def test_it_ends_when_the_model_fails():
    policy = rr.WAV(num_blocks=1, bases=("split",)).build(1, 2).double()

    def fail():
        policy.read(policy.start(E), 0)
        raise RuntimeError("boom")

    with rr.capture(policy):
        outer = dict(vars(policy))
        with pytest.raises(RuntimeError, match="boom"):
            observe(policy, fail)
        assert dict(vars(policy)) == outer
    assert "write" not in vars(policy)


def test_a_forward_that_runs_another_model_is_named():
    policy, other = rr.PreNorm().build(1, 2), rr.PreNorm().build(1, 2)
    with pytest.raises(UserError, match="forward wrote 0 of the policy's 2 sites"):
        observe(policy, lambda: run(other))


def test_sources_of_a_stream_that_is_not_finished():
    policy = rr.WAV(num_blocks=2, bases=("split",)).build(2, 2).double()
    stream = policy.start(E)
    assert policy.source_rms(stream) == approx({"embedding": rms((1, 0), (0, 2))})
    for site, update in enumerate([*U, U[0]]):
        stream = policy.write(stream, site, update)
    # the second block runs
    assert list(policy.source_rms(stream)) == ["embedding", "state 0", "split 0"]
    assert policy.detail_names == {"split 0", "split 1", "running split"}
    assert rr.PreNorm().build(1, 2).detail_names == frozenset()
