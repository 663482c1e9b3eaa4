"""Derivatives that hand-written gradients do not have are refused, not left out."""

import pytest
import torch
from torch.autograd import forward_ad

import resroute as rr
from resroute.model.loss import linear_cross_entropy

METHODS = [
    rr.BlockAttnRes(num_blocks=2),
    rr.WAV(num_blocks=2),
    rr.WAV(num_blocks=2, gated=True),
    rr.DeltaAttnRes(gated=True),
    rr.FullAttnRes(),
]


def stack(residual):
    torch.manual_seed(0)
    policy = residual.build(4, 16)
    weights = torch.randn(8, 16, 16) / 4
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)

    def run(x):
        stream = policy.start(x)
        for site, weight in enumerate(weights):
            update = torch.tanh(policy.read(stream, site) @ weight)
            stream = policy.write(stream, site, update)
        # linear in the readout: no gradient that comes in has a graph
        return policy.finish(stream).sum()

    return run


@pytest.mark.parametrize("backend", ["lean", "auto"])
@pytest.mark.parametrize("residual", METHODS, ids=repr)
def test_a_second_derivative_is_refused(residual, backend):
    run = stack(residual)
    x = torch.randn(3, 16, requires_grad=True)
    with rr.backend(backend):
        loss = run(x)
        with pytest.raises(rr.UserError, match="second derivatives of a fast operation"):
            torch.autograd.grad(loss, x, create_graph=True)
        # once is what it is for
        (first,) = torch.autograd.grad(run(x), x)
    with rr.backend("reference"):
        (expected,) = torch.autograd.grad(run(x), x, create_graph=True)
        torch.autograd.grad(expected.square().sum(), x)
    torch.testing.assert_close(first, expected.detach(), rtol=1e-4, atol=1e-5)


# torch's own forward mode uses what torch deprecates
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("backend", ["lean", "auto"])
@pytest.mark.parametrize("residual", METHODS, ids=repr)
def test_a_forward_derivative_is_refused(residual, backend):
    run = stack(residual)
    x, direction = torch.randn(3, 16), torch.randn(3, 16)
    with rr.backend(backend):
        with forward_ad.dual_level(), pytest.raises(rr.UserError, match="forward-mode derivatives"):
            run(forward_ad.make_dual(x, direction))
        with pytest.raises(rr.UserError, match="forward-mode derivatives"):
            torch.func.jvp(run, (x,), (direction,))
        # of something else it is no matter
        with forward_ad.dual_level():
            forward_ad.make_dual(x, direction)
            run(x.clone())
    with rr.backend("reference"):
        _, found = torch.func.jvp(run, (x,), (direction,))
        step = 1e-3
        expected = (run(x + step * direction) - run(x - step * direction)) / (2 * step)
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


def test_a_large_loss_is_differentiable_once():
    hidden = torch.randn(64, 8, requires_grad=True)
    weight = torch.randn(50_000, 8)
    loss = linear_cross_entropy(hidden, weight, torch.randint(50_000, (64,)))
    with pytest.raises(rr.UserError, match="second derivatives of a fast operation"):
        torch.autograd.grad(loss, hidden, create_graph=True)
