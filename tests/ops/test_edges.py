"""Sizes and values at the edge: what one row holds stays in it, and nothing is no special case."""

import pytest
import torch

import resroute as rr
from resroute import ops
from resroute.testing import randomise, small_gpt

CONFIGS = {
    "pre_norm": rr.PreNorm(),
    "block": rr.BlockAttnRes(num_blocks=2),
    "wav": rr.WAV(num_blocks=2),
    "full": rr.FullAttnRes(),
    "delta": rr.DeltaAttnRes(),
}


@pytest.fixture(params=["reference", "lean", "native"])
def backend(request):
    if request.param == "native" and not ops.native_available():
        pytest.skip("no C++ compiler")
    with ops.backend(request.param):
        yield request.param


@pytest.fixture(params=CONFIGS)
def policy(request):
    policy = CONFIGS[request.param].build(4, 16)
    randomise(policy)
    return policy


def readout(policy, embedding, norm=None):
    stream = policy.start(embedding)
    for site in range(policy.num_sites):
        if norm is None:
            read = policy.read(stream, site)
        else:
            read, stream = policy.read_normalised(stream, site, norm)
        stream = policy.write(stream, site, torch.tanh(read))
    return policy.finish(stream)


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_an_empty_batch(policy, backend):
    embedding = torch.zeros(0, 3, 16, requires_grad=True)
    out = readout(policy, embedding, torch.nn.RMSNorm(16))
    out.sum().backward()
    assert out.shape == embedding.grad.shape == (0, 3, 16)
    assert all(p.grad is None or not p.grad.any() for p in policy.parameters())


def test_a_single_row_without_leading_axes(policy, backend):
    results = []
    for shape in ((16,), (1, 16)):
        embedding = drawn(16).view(shape).requires_grad_()
        policy.zero_grad()
        norm = torch.nn.RMSNorm(16)
        out = readout(policy, embedding, norm)
        (out * torch.linspace(-1, 1, 16)).sum().backward()
        grads = [norm.weight.grad, *(p.grad for p in policy.parameters())]
        results.append([out.detach().flatten(), embedding.grad.flatten(), *grads])
    for one, row in zip(*results, strict=True):
        torch.testing.assert_close(one, row)


def test_other_strides_are_taken(policy, backend):
    whole = drawn(3, 16, 5)
    expected = readout(policy, whole.mT.contiguous())
    torch.testing.assert_close(readout(policy, whole.mT), expected)
    row = drawn(16)
    torch.testing.assert_close(
        readout(policy, row.expand(4, 16)), readout(policy, row.repeat(4, 1))
    )


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_row_that_is_not_finite_stays_alone(policy, backend, value):
    embedding = drawn(40, 16)
    embedding[7] = value
    embedding.requires_grad_()
    out = readout(policy, embedding)
    others = [i for i in range(40) if i != 7]
    out[others].sum().backward()
    assert out[others].isfinite().all()
    assert embedding.grad[others].isfinite().all()


@pytest.mark.parametrize("backend", ["native"], indirect=True)
@pytest.mark.parametrize("name", ["wav", "full"])
def test_threads_share_the_rows_of_the_kernels(name, backend):
    policy = CONFIGS[name].build(4, 64)
    randomise(policy)
    found = []
    former = torch.get_num_threads()
    try:
        for threads in (1, 3):
            # rows enough for three chunks at every site
            torch.set_num_threads(threads)
            embedding = drawn(1600, 64).requires_grad_()
            out = readout(policy, embedding, torch.nn.RMSNorm(64))
            grads = torch.autograd.grad(out.sin().sum(), (embedding, *policy.parameters()))
            found.append((out, *grads))
    finally:
        torch.set_num_threads(former)
    one, three = found
    assert torch.equal(one[0], three[0])
    assert torch.equal(one[1], three[1])
    # sums over rows are taken chunk by chunk
    for a, b in zip(one[2:], three[2:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert any(not torch.equal(a, b) for a, b in zip(one[2:], three[2:], strict=True))


@pytest.mark.parametrize("name", ["block", "full"])
def test_gradients_hold_where_logits_are_large(name, backend):
    """Weights that are made again from a rounded log-sum-exp do not sum to one."""
    found = {}
    for where, dtype in ((backend, torch.float32), ("reference", torch.float64)):
        policy = CONFIGS[name].build(4, 64).to(dtype)
        with torch.no_grad():
            policy.query.copy_(100 * drawn(*policy.query.shape))
        embedding = drawn(4, 8, 64).to(dtype).requires_grad_()
        with ops.backend(where):
            out = readout(policy, embedding)
        probe = torch.linspace(-1, 1, 64, dtype=dtype)
        leaves = (embedding, *policy.parameters())
        found[dtype] = torch.autograd.grad((out * probe).sum(), leaves)
    for a, b in zip(found[torch.float32], found[torch.float64], strict=True):
        # the plain formula itself errs by 4e-4; weights off by a rounding err by 5e-3
        assert (a - b).norm() < 1.5e-3 * b.norm()


@pytest.mark.parametrize("name", CONFIGS)
def test_float16_autocast_and_float64_updates(name, backend):
    model = small_gpt(residual=CONFIGS[name])
    tokens = torch.randint(11, (2, 8), generator=torch.Generator().manual_seed(0))
    expected = model(tokens, tokens)[1]
    with torch.autocast("cpu", torch.float16):
        loss = model(tokens, tokens)[1]
    loss.backward()
    torch.testing.assert_close(loss, expected, atol=1e-2, rtol=1e-2)
    policy = CONFIGS[name].build(4, 16)
    stream = policy.start(drawn(3, 16))
    for site in range(8):
        _, stream = policy.read_normalised(stream, site, torch.nn.RMSNorm(16))
        stream = policy.write(stream, site, drawn(3, 16).double())
    assert policy.finish(stream).dtype == torch.float32
