"""A model that is looked at computes what it would, and is left as it was."""

import contextlib
import json
import math

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import resroute as rr
from resroute import ops
from resroute.testing import random_stack, randomise, small_gpt

from .conftest import METHODS, each_method


@each_method
@pytest.mark.parametrize("backend", ["reference", "lean"])
@pytest.mark.parametrize("recomputes", [False, True])
def test_outputs_and_gradients_are_equal_to_the_bit(config, backend, recomputes):
    tokens = torch.arange(16).remainder(11).view(2, 8)

    def step(context):
        model = small_gpt(residual=config)
        randomise(model.policy)
        model.activation_checkpointing = recomputes
        with context(model) as seen:
            loss = model(tokens, tokens.roll(-1, 1))[1]
            loss.backward()
        return loss, [parameter.grad for parameter in model.parameters()], model, seen

    with ops.backend(backend):
        loss, gradients, model, _ = step(contextlib.nullcontext)
        watched, watched_gradients, watched_model, seen = step(
            lambda model: rr.capture(model, classes=lambda ids: ids % 2)
        )
    assert torch.equal(loss, watched)
    assert all(torch.equal(a, b) for a, b in zip(gradients, watched_gradients, strict=True))
    assert vars(watched_model.policy).keys() == vars(model.policy).keys()
    # layers that are computed again do not count again
    assert (seen.passes, seen.tokens) == (1, 16)
    counts = seen._tally.counts
    assert {counts[site, "update"] for site in range(8)} == {16}
    assert {counts[site, "read"] for site in range(9)} == {16}
    found = seen.result()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    for site in found["sites"][:-1]:
        assert site["update_gradient"] > 0
        assert site["read_gradient"] > 0
        if site["weights"]:
            assert sum(site["weights"].values()) == pytest.approx(1.0, rel=1e-6)
            assert [found["tokens"] for found in site["classes"].values()] == [9, 7]


@pytest.mark.parametrize("name", ["wav", "full", "delta"])
def test_gradient_norms_are_those_of_the_tensors(name):
    policy = METHODS[name].build(4, 5).double()
    randomise(policy)
    stack = random_stack(8, 5)
    reads, updates = [], []

    def forward():
        stream = policy.start(stack.embedding)
        for site, weight in enumerate(stack.weights):
            read = policy.read(stream, site)
            read.retain_grad()
            update = torch.tanh(read @ weight)
            update.retain_grad()
            reads.append(read)
            updates.append(update)
            stream = policy.write(stream, site, update)
        return policy.finish(stream).square().sum()

    with rr.capture(policy) as seen:
        forward().backward()
        (3 * forward()).backward()
    # root mean square of two passes whose gradients are 1 and 3 times one
    factor = math.sqrt((1 + 9) / 2)
    sites = seen.result()["sites"]
    for site in range(8):
        norm = updates[site].grad.norm().item() * factor
        assert sites[site]["update_gradient"] == pytest.approx(norm, rel=1e-12)
        if name == "delta" and site == 0:
            # it reads the stream's own tensor
            assert sites[site]["read_gradient"] is None
            continue
        norm = reads[site].grad.norm().item() * factor
        assert sites[site]["read_gradient"] == pytest.approx(norm, rel=1e-12)
    assert sites[8]["update_gradient"] is None


def test_without_gradients_there_are_no_norms():
    model = small_gpt(residual=METHODS["wav"])
    with rr.capture(model) as seen, torch.no_grad():
        model(torch.zeros(1, 4, dtype=torch.long))
    assert {site["update_gradient"] for site in seen.result()["sites"]} == {None}


def test_the_graph_is_as_before():
    model = small_gpt(residual=rr.WAV(num_blocks=1), context=4, num_layers=2).eval()
    tokens = torch.arange(4).view(1, 4)

    def traced():
        return make_fx(lambda ids: model(ids)[0])(tokens).print_readable(print_output=False)

    before = traced()
    with rr.capture(model), torch.no_grad():
        model(tokens)
    assert traced() == before


def test_captures_may_be_nested_and_end_when_the_model_fails():
    policy = rr.BlockAttnRes(num_blocks=2).build(4, 5).double()
    stack = random_stack(8, 5)

    def fail():
        with rr.capture(policy) as seen:
            inners.append(seen)
            stack.run(policy)
            raise RuntimeError("boom")

    inners = []
    with rr.capture(policy) as outer:
        with pytest.raises(RuntimeError, match="boom"):
            fail()
        (inner,) = inners
        assert inner.result() == outer.result()
        stack.run(policy)
        assert (inner.passes, outer.passes) == (1, 2)
    assert not {"start", "read", "read_normalised", "write", "finish"} & vars(policy).keys()
