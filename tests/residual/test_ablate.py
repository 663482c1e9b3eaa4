"""Reads without sources and stacks without sites, against references written by hand."""

import pytest
import torch

import resroute as rr
from resroute import ops
from resroute.config import UserError
from resroute.residual.ablate import without_layer, without_sites, without_sources
from resroute.residual.base import NothingLeftError
from resroute.testing import random_stack, randomise, small_gpt

ROUTED = {
    "full": rr.FullAttnRes(),
    "full_gated": rr.FullAttnRes(gated=True),
    "block": rr.BlockAttnRes(num_blocks=2),
    "block_gated": rr.BlockAttnRes(num_blocks=2, gated=True),
    "delta": rr.DeltaAttnRes(),
    "delta_gated": rr.DeltaAttnRes(num_blocks=2, gated=True),
    "wav": rr.WAV(num_blocks=2),
    "wav_learned": rr.WAV(num_blocks=2, learn_bases=True, details_in_readout=True),
    "wav_attached": rr.WAV(num_blocks=2, matching="attached", rho_max=0.5, gated=True),
}
each_routed = pytest.mark.parametrize("config", ROUTED.values(), ids=ROUTED)
EPS = 1e-6


def rms(x):
    return (x.square().mean(-1, keepdim=True) + EPS).sqrt()


def read_by_hand(policy, stream, site, left_out):
    """Of the interface's weights and sources alone: weights of what is left, renormalised."""
    names, weights = policy.weights(stream, site)
    sources = policy.sources(stream, site)
    total = sources.get("stream")
    kept = [i for i, name in enumerate(names) if name not in left_out]
    mix = torch.zeros_like(next(iter(sources.values())))
    share = weights[..., kept].sum(-1)
    for i in kept:
        value = sources[names[i]]
        if names[i] in policy.detail_names:
            basis = names[i].removeprefix("running ").split(" ")[0]
            state = sources[names[i].replace(basis, "state")]
            value = value * (rms(state) / rms(value)).clamp(max=policy.config.rho_max)
        mix = mix + (weights[..., i] / share).unsqueeze(-1) * value
    if isinstance(policy.gate, torch.Tensor) and site < len(policy.gate):
        mix = policy.gate[site] * (mix if policy.additive else mix - total)
        return total + mix if kept or not policy.additive else total
    return total + mix if total is not None else mix


def choices_at(names):
    """Some sets of names to leave out, none of them all."""
    return [set(), set(names[:1]), set(names[1:]), set(names[::2][:-1]), {names[-1]}]


@each_routed
@pytest.mark.parametrize("backend", ["reference", "lean"])
@torch.no_grad()
def test_reads_without_sources_by_hand(config, backend):
    policy = config.build(4, 5).double()
    randomise(policy)
    stack, tried = random_stack(8, 5), 0
    with ops.backend(backend):
        stream = policy.start(stack.embedding)
        for site in range(9):
            names = policy.source_names(site)
            assert list(names) == policy.weights(stream, site)[0]
            for left_out in choices_at(names) if names else [set()]:
                if names and left_out >= set(names) and not policy.additive:
                    continue
                tried += 1
                expected = read_by_hand(policy, stream, site, left_out)
                found = policy.read_without(stream, site, left_out)
                torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
                if not left_out:
                    plain = policy.finish(stream) if site == 8 else policy.read(stream, site)
                    torch.testing.assert_close(found, plain, rtol=1e-10, atol=1e-10)
            if site < 8:
                update = torch.tanh(policy.read(stream, site) @ stack.weights[site])
                stream = policy.write(stream, site, update)
    assert tried > 25


def test_a_softmax_without_a_source_by_hand():
    policy = rr.BlockAttnRes(num_blocks=2, eps=0.0, key_gain=False).build(2, 2).double()
    with torch.no_grad():
        policy.query[2] = torch.tensor([1.0, 0.0])
    stream = policy.start(torch.tensor([[2.0, 0.0]], dtype=torch.float64))
    stream = policy.write(stream, 0, torch.tensor([[0.0, 3.0]], dtype=torch.float64))
    stream = policy.write(stream, 1, torch.tensor([[0.0, 1.0]], dtype=torch.float64))
    # logits sqrt(2) of the embedding and 0 of the first block's sum (0, 4)
    high = torch.tensor(2.0).double().sqrt().exp()
    expected = torch.tensor([[2 * high, 4.0]]).double() / (high + 1)
    torch.testing.assert_close(policy.read(stream, 2), expected)
    alone = policy.read_without(stream, 2, ["embedding"])
    assert alone.tolist() == [[0.0, 4.0]]
    with pytest.raises(NothingLeftError, match="nothing is left to read at 1 attention"):
        policy.read_without(stream, 2, ["embedding", "state 0"])
    # a name that other sites have changes nothing
    torch.testing.assert_close(policy.read_without(stream, 2, ["state 1"]), expected)


def test_delta_without_any_source_reads_its_plain_sum():
    policy = rr.DeltaAttnRes().build(1, 2).double()
    embedding = torch.tensor([[2.0, 0.0]], dtype=torch.float64)
    stream = policy.write(policy.start(embedding), 0, embedding)
    assert policy.read_without(stream, 1, ["embedding", "update 0"]).tolist() == [[4.0, 0.0]]
    assert policy.read(stream, 1).tolist() == [[6.0, 0.0]]


def test_what_cannot_be_left_out_is_named():
    policy = rr.WAV(num_blocks=2).build(4, 2).double()
    stream = policy.start(torch.ones(1, 2).double())
    with pytest.raises(UserError, match=r"no site has a source 'sate 0' \(did you mean 'state 0'"):
        policy.read_without(stream, 0, ["sate 0"])
    # the readout leaves the last block's details out, and nothing comes after it
    with pytest.raises(UserError, match="no site has a source 'phase 1'"):
        policy.read_without(stream, 0, ["phase 1"])
    with pytest.raises(UserError, match="the stream is at site 0, not at 3"):
        policy.read_without(stream, 3, ["state 0"])
    with pytest.raises(UserError, match="no site has a source 'nothing'"):
        with_all(without_sources(policy, ["nothing"]))
    plain = rr.PreNorm().build(1, 2)
    with pytest.raises(UserError, match="SumPolicy reads one sum: it has no sources"):
        with_all(without_sources(plain, ["stream"]))
    with pytest.raises(UserError, match="SumPolicy reads one sum: it has no sources"):
        plain.read_without(plain.start(torch.ones(1, 2)), 0, [])
    with pytest.raises(UserError, match="there is no site 8: the stack has sites 0 to 7"):
        with_all(without_sites(policy, [0, 8]))
    with pytest.raises(UserError, match="there is no layer 4: the stack has 0 to 3"):
        with_all(without_layer(policy, 4))


def with_all(context):
    with context:
        pass


METHODS = {"pre_norm": rr.PreNorm(), "layer_scale": rr.LayerScale(), **ROUTED}


@pytest.mark.parametrize("config", METHODS.values(), ids=METHODS)
@torch.no_grad()
def test_without_sites_is_the_stack_whose_sublayers_give_zero(config):
    policy = config.build(4, 5).double()
    randomise(policy)
    stack, silenced = random_stack(8, 5), random_stack(8, 5)
    silenced.weights[[2, 3, 6]] = 0.0
    plain = stack.run(policy)
    expected = silenced.run(policy)
    with without_sites(policy, [6]), without_layer(policy, 1):
        found = stack.run(policy)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert not torch.allclose(found[1], plain[1])
    assert torch.equal(stack.run(policy)[1], plain[1])
    assert "write" not in vars(policy)


def run_by_hand(policy, stack, left_out):
    """The stack with reads as `left_out(site)` says; those with nothing left as they are."""
    stream = policy.start(stack.embedding)

    def read_less(site):
        gone = left_out(site)
        if set(policy.source_names(site)) <= gone and not policy.additive:
            gone = set()
        return policy.read_without(stream, site, gone)

    for site in range(8):
        read = read_less(site)
        normalised = read * torch.rsqrt(read.square().mean(-1, keepdim=True) + EPS)
        stream = policy.write(stream, site, torch.tanh(normalised @ stack.weights[site]))
    return read_less(8)


@each_routed
@pytest.mark.parametrize("backend", ["reference", "lean"])
@torch.no_grad()
def test_without_sources_every_read_goes_without(config, backend):
    policy = config.build(4, 5).double()
    randomise(policy)
    stack = random_stack(8, 5)
    old = "update 2" if "update 2" in policy.source_names() else "state 0"
    close = {"rtol": 1e-9, "atol": 1e-10}
    with ops.backend(backend):
        plain = stack.run(policy)[1]
        with without_sources(policy, ["embedding"]):
            found = stack.run(policy)[1]
            torch.testing.assert_close(
                found, run_by_hand(policy, stack, lambda site: {"embedding"}), **close
            )
            assert not torch.allclose(found, plain)
            # both contexts count
            with without_sources(policy, lambda name: name == old, at=[5, 7]):
                found = stack.run(policy)[1]
            both = run_by_hand(
                policy,
                stack,
                lambda site: {"embedding", old} if site in (5, 7) else {"embedding"},
            )
            torch.testing.assert_close(found, both, **close)
        assert torch.equal(stack.run(policy)[1], plain)
    assert not {"read", "read_normalised", "finish", "left_out"} & vars(policy).keys()


@torch.no_grad()
def test_the_model_reads_by_its_norm_without_sources_too():
    model = small_gpt(residual=rr.WAV(num_blocks=2)).eval()
    randomise(model.policy)
    tokens = torch.arange(8).view(1, 8)
    plain = model(tokens)[0]
    details = model.policy.detail_names
    with without_sources(model, details.__contains__):
        found = model(tokens)[0]
    assert not torch.allclose(found, plain)
    # that is Block AttnRes with the same queries
    block = small_gpt(residual=rr.BlockAttnRes(num_blocks=2)).eval()
    block.load_state_dict(model.state_dict(), strict=False)
    torch.testing.assert_close(found, block(tokens)[0], rtol=1e-4, atol=1e-6)
    assert torch.equal(model(tokens)[0], plain)


def test_they_end_when_the_model_fails():
    policy = rr.WAV(num_blocks=2).build(4, 5).double()

    def fail():
        with without_sources(policy, "embedding"), without_layer(policy, 0):
            raise RuntimeError("boom")

    before = dict(vars(policy))
    with rr.capture(policy):
        inside = dict(vars(policy))
        with pytest.raises(RuntimeError, match="boom"):
            fail()
        assert dict(vars(policy)) == inside
    assert dict(vars(policy)) == before


@torch.no_grad()
def test_gradients_flow_through_what_is_left():
    policy = rr.WAV(num_blocks=2).build(4, 5).double()
    randomise(policy)
    stack = random_stack(8, 5)
    with torch.enable_grad(), without_sites(policy, [3]):
        (gradient,) = torch.autograd.grad(stack.run(policy)[1].sum(), stack.weights)
    assert torch.equal(gradient[3], torch.zeros_like(gradient[3]))
    assert gradient[4].abs().sum() > 0
