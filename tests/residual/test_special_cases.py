"""Where methods coincide, and what they are at the start."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import resroute as rr
from resroute.testing import random_stack, randomise

DIM = 5


def run(config, layers, *, random=True, kinds=("attention", "mlp"), seed=0):
    policy = config.build(layers, DIM, kinds=kinds).double()
    if random:
        randomise(policy, seed=seed)
    return random_stack(layers * len(kinds), DIM, seed=seed).run(policy)


def assert_equal(a, b):
    assert torch.equal(a[0], b[0])
    assert torch.equal(a[1], b[1])


@given(st.integers(1, 7), st.integers(1, 7), st.integers(0, 999), st.booleans())
@settings(max_examples=25, deadline=None)
@pytest.mark.filterwarnings("ignore:.* blocks of .* layers make")
def test_wav_without_bases_is_block_attn_res_exactly(layers, blocks, seed, gated):
    blocks = min(blocks, layers)
    wav = rr.WAV(num_blocks=blocks, bases=(), gated=gated)
    block = rr.BlockAttnRes(num_blocks=blocks, gated=gated)
    assert_equal(run(wav, layers, seed=seed), run(block, layers, seed=seed))


@pytest.mark.parametrize("layers", [1, 4, 7])
def test_block_of_one_sublayer_is_full_attn_res(layers):
    block = run(rr.BlockAttnRes(block_layers=1), layers, kinds=("attention",))
    assert_equal(block, run(rr.FullAttnRes(), layers, kinds=("attention",)))


def test_one_block_a_stack_and_one_a_layer():
    layers = 4
    one = rr.BlockAttnRes(num_blocks=1).build(layers, DIM).double()
    stream = one.start(torch.zeros(2, DIM, dtype=torch.float64))
    for site in range(2 * layers):
        expected = ["embedding"] + ["running state"] * (site > 0)
        assert one.weights(stream, site)[0] == expected
        stream = one.write(stream, site, torch.ones(2, DIM, dtype=torch.float64))
    assert one.weights(stream, 2 * layers)[0] == ["embedding", "state 0"]
    # read as the mean of the embedding, zero, and the sum of the eight updates
    assert one.finish(stream)[0, 0].item() == 4.0

    each = rr.BlockAttnRes(num_blocks=layers).build(layers, DIM)
    assert each.num_blocks == layers
    assert each._slots[5] == each._slots[4] + [each._slots[5][-1]]
    assert [slot.name for slot in each._slots[5]][-1] == "running state"


def test_layer_scale_of_one_and_re_zero_of_one_are_pre_norm_to_the_bit():
    plain = run(rr.PreNorm(), 6)
    assert_equal(run(rr.LayerScale(init=1.0), 6, random=False), plain)
    policy = rr.ReZero().build(6, DIM).double()
    torch.nn.init.ones_(policy.alpha)
    assert_equal(random_stack(12, DIM).run(policy), plain)


def test_re_zero_starts_as_the_identity():
    reads, readout = run(rr.ReZero(), 3, random=False)
    embedding = random_stack(6, DIM).embedding
    assert torch.equal(readout, embedding)
    assert all(torch.equal(read, embedding) for read in reads)


@pytest.mark.parametrize(
    ("layers", "init"), [(12, 0.1), (18, 0.1), (19, 1e-5), (24, 1e-5), (25, 1e-6), (48, 1e-6)]
)
def test_cait_depth_rule(layers, init):
    scale = rr.LayerScale(init=None).build(layers, DIM).scale
    assert torch.equal(scale, torch.full((2 * layers, DIM), init))
    assert rr.LayerScale().build(layers, DIM).scale[0, 0].item() == pytest.approx(1e-4)


GATED = [
    rr.FullAttnRes(gated=True),
    rr.BlockAttnRes(num_blocks=2, gated=True),
    rr.DeltaAttnRes(gated=True),
    rr.DeltaAttnRes(num_blocks=2, gated=True),
    rr.WAV(num_blocks=2, gated=True, details_in_readout=True),
]


@pytest.mark.parametrize("config", GATED, ids=lambda c: c.label)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_closed_gate_is_pre_norm_to_the_bit(config, dtype):
    policy, plain = config.build(6, DIM), rr.PreNorm().build(6, DIM)
    randomise(policy)
    torch.nn.init.zeros_(policy.gate)
    stack = random_stack(12, DIM, dtype=dtype)
    assert_equal(
        stack.run(policy.to(torch.float64 if dtype == torch.float64 else torch.float32)),
        stack.run(plain),
    )


@pytest.mark.parametrize("config", GATED, ids=lambda c: c.label)
def test_an_open_gate_is_the_ungated_method(config):
    from dataclasses import replace

    gated, plain = (
        config.build(4, DIM).double(),
        replace(config, gated=False).build(4, DIM).double(),
    )
    randomise(plain)
    state = {**plain.state_dict(), "gate": torch.ones_like(gated.gate)}
    gated.load_state_dict(state)
    stack = random_stack(8, DIM)
    torch.testing.assert_close(stack.run(gated)[0], stack.run(plain)[0])
    torch.testing.assert_close(stack.run(gated)[1], stack.run(plain)[1])


def test_zero_queries_read_the_plain_mean():
    policy = rr.FullAttnRes().build(3, DIM).double()
    stack = random_stack(6, DIM)
    stream, sources = policy.start(stack.embedding), [stack.embedding]
    for site in range(6):
        read = policy.read(stream, site)
        torch.testing.assert_close(read, torch.stack(sources).mean(0))
        sources.append(torch.tanh(read + site))
        stream = policy.write(stream, site, sources[-1])
    torch.testing.assert_close(policy.finish(stream), torch.stack(sources).mean(0))


@pytest.mark.parametrize(
    ("bases", "blocks", "expected"),
    [
        (("phase", "split"), 4, 0.178),
        (("phase", "split"), 6, 0.188),
        (("phase", "split"), 8, 0.194),
        (("split",), 4, 0.098),
    ],
)
def test_the_share_of_details_at_step_0_is_the_documented_one(bases, blocks, expected):
    # the first site of one more block sees the finished blocks alone
    policy = rr.WAV(num_blocks=blocks + 1, bases=bases).build(2 * (blocks + 1), DIM).double()
    stream = policy.start(random_stack(1, DIM).embedding)
    site = 4 * blocks
    for earlier in range(site):
        stream = policy.write(stream, earlier, torch.tanh(policy.read(stream, earlier)))
    names, weights = policy.weights(stream, site)
    details = [i for i, name in enumerate(names) if name.split()[0] in bases]
    share = weights[..., details].sum(-1)
    mass = len(bases) * blocks * math.exp(-2)
    assert share.tolist() == pytest.approx([mass / (blocks + 1 + mass)] * 5)
    assert share[0].item() == pytest.approx(expected, abs=6e-4)


def test_delta_keeps_the_plain_sum():
    config = rr.DeltaAttnRes(num_blocks=2)
    policy = config.build(4, DIM).double()
    randomise(policy)
    stack = random_stack(8, DIM)
    stream, total = policy.start(stack.embedding), stack.embedding
    assert torch.equal(policy.read(stream, 0), stack.embedding)
    for site in range(8):
        update = torch.tanh(policy.read(stream, site))
        stream, total = policy.write(stream, site, update), total + update
    assert torch.equal(policy.finish(stream), total)
    assert policy.query.shape == (8, DIM)


def test_delta_without_embedding_reads_the_plain_sum_until_there_is_a_source():
    policy = rr.DeltaAttnRes(num_blocks=2, embedding_source=False).build(4, DIM).double()
    stream = policy.start(random_stack(8, DIM).embedding)
    assert policy.weights(stream, 0)[0] == []
    seen = []
    for site in range(8):
        seen.append(policy.weights(stream, site)[0])
        stream = policy.write(stream, site, torch.ones(5, DIM, dtype=torch.float64))
    assert seen[1] == ["running state"]
    assert seen[4] == ["state 0"]
    assert seen[7] == ["state 0", "running state"]
