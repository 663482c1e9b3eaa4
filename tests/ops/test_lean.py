"""The lean backend under everything that people do to autograd."""

from dataclasses import replace

import jaxtyping
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import resroute as rr
from resroute import ops
from resroute.core import Source, inverse_rms
from resroute.ops import SiteForm, dispatch, native
from resroute.ops.lean import OPERATORS
from resroute.ops.registry import registered
from resroute.testing import Stack, random_stack, randomise, small_gpt

XYS = ((1.0, 1.0, 0.0), (1.0, -1.0, 0.0), (-1.0, -1.0, 2.0))
CONFIGS = {
    "block": rr.BlockAttnRes(num_blocks=2),
    "wav": rr.WAV(num_blocks=2),
    "wav_attached": rr.WAV(num_blocks=2, matching="attached", details_in_readout=True),
    "wav_learned": rr.WAV(num_blocks=2, learn_bases=True),
    "full": rr.FullAttnRes(),
    "delta": rr.DeltaAttnRes(num_blocks=2, gated=True),
}


@pytest.fixture(params=CONFIGS)
def policy(request):
    policy = CONFIGS[request.param].build(4, 6).double()
    randomise(policy)
    return policy


@pytest.fixture
def stack():
    return random_stack(8, 6)


def run(policy, stack, backend="lean"):
    """Reads, readout and every gradient."""
    for leaf in (stack.embedding, stack.weights, *policy.parameters()):
        leaf.grad = None
    with ops.backend(backend):
        reads, readout = stack.run(policy)
        (readout * torch.linspace(-1, 2, readout.numel()).view_as(readout)).sum().backward()
    leaves = (stack.embedding, stack.weights, *policy.parameters())
    grads = [None if leaf.grad is None else leaf.grad.clone() for leaf in leaves]
    return [reads.detach(), readout.detach(), *grads]


def assert_same(found, expected, atol=1e-12):
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, atol=atol, rtol=0)


@pytest.mark.parametrize("matching", [1, 2])
def test_gradcheck_of_a_site(matching):
    # a detached factor is no function of the streams for finite differences: with eps this large
    # and rho this small it is a constant
    form = SiteForm(coefficients=XYS, target=1, matching=matching, rho_max=0.01, eps=0.1)
    if matching == 2:
        form = replace(form, rho_max=0.9)
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape):
        values = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return values.requires_grad_()

    inputs = [drawn(2, 5), drawn(2, 5), drawn(2), drawn(5), drawn(2), drawn(5)]
    streams = [drawn(2, 5) for _ in range(3)]

    def function(update, prior, lse, key, bias, gain, *streams):
        read, after = ops.site(
            OPERATORS, form, update, streams,
            prior=prior, lse=lse, key=key, bias=bias, gain=gain, read_dtype=torch.float64,
        )  # fmt: skip
        return read, *after

    assert torch.autograd.gradcheck(function, (*inputs, *streams))


def test_gradcheck_of_a_block_read():
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    values, scale = [drawn(2, 4) for _ in range(3)], drawn(2)
    keys, biases, priors = drawn(2, 4), drawn(2, 3), [drawn(2, 4), drawn(2), drawn(2, 4), drawn(2)]

    def function(scale, keys, biases, *rest):
        values, priors = rest[:3], rest[3:]
        scales = (None, scale, None)
        sources = [Source(v, inverse_rms(v, 0.1), s) for v, s in zip(values, scales, strict=True)]
        mixes, kept = ops.block_read(
            OPERATORS, sources, keys, biases,
            priors=list(zip(priors[::2], priors[1::2], strict=True)), read_dtype=torch.float64,
        )  # fmt: skip
        return *(t for mix in mixes for t in mix), *(source.value for source in kept)

    assert torch.autograd.gradcheck(function, (scale, keys, biases, *values, *priors))


def test_equals_the_reference(policy, stack):
    assert_same(run(policy, stack), run(policy, stack, "reference"))


def test_a_frozen_subset_of_parameters(policy, stack):
    expected = run(policy, stack)
    names = [name for name, _ in policy.named_parameters()]
    for frozen in ("query", "key_gain", "detail_bias"):
        if frozen not in names:
            continue
        parameter = getattr(policy, frozen)
        parameter.requires_grad_(False)
        found = run(policy, stack)
        parameter.requires_grad_(True)
        assert found[4 + names.index(frozen)] is None
        kept = [i for i in range(len(found)) if i != 4 + names.index(frozen)]
        assert_same([found[i] for i in kept], [expected[i] for i in kept])


def test_a_frozen_policy_or_embedding(policy, stack):
    expected = run(policy, stack)
    policy.requires_grad_(False)
    assert_same(run(policy, stack)[:4], expected[:4])
    policy.requires_grad_(True)
    still = Stack(embedding=stack.embedding.detach(), weights=stack.weights)
    found = run(policy, still)
    assert_same([*found[:2], *found[3:]], [*expected[:2], *expected[3:]])


def test_no_grad_and_inference_mode(policy, stack):
    expected = run(policy, stack)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode, ops.backend("lean"):
            reads, readout = stack.run(policy)
        assert not readout.requires_grad
        assert_same([reads, readout], expected[:2])


def test_a_stream_that_is_used_twice(policy, stack):
    def branches(backend):
        for leaf in (stack.embedding, *policy.parameters()):
            leaf.grad = None
        with ops.backend(backend):
            stream = policy.start(stack.embedding)
            for site in range(3):
                stream = policy.write(stream, site, torch.tanh(policy.read(stream, site)))
            total = policy.read(stream, 3).sum()
            normed, onward = policy.read_normalised(stream, 3, torch.nn.RMSNorm(6).double())
            # both the old stream and the one handed back go on
            for branch in (stream, onward, stream):
                for site in range(3, 8):
                    read = policy.read(branch, site)
                    branch = policy.write(branch, site, torch.sin(read + normed))
                total = total + policy.finish(branch).square().sum()
            total.backward()
        return [total.detach(), stack.embedding.grad, *(p.grad for p in policy.parameters())]

    assert_same(branches("lean"), branches("reference"), atol=1e-10)


def test_gradients_add_up_over_two_backward_passes(policy, stack):
    expected = run(policy, stack)
    with ops.backend("lean"):
        readout = stack.run(policy)[1]
        loss = (readout * torch.linspace(-1, 2, readout.numel()).view_as(readout)).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    torch.testing.assert_close(stack.embedding.grad, 3 * expected[2])


def test_activation_checkpointing_of_layers(policy, stack):
    expected = run(policy, stack)
    for leaf in (stack.embedding, stack.weights, *policy.parameters()):
        leaf.grad = None

    def layer(stream, site):
        for at in (site, site + 1):
            read = policy.read(stream, at)
            normalised = read * inverse_rms(read, 1e-6).unsqueeze(-1)
            stream = policy.write(stream, at, torch.tanh(normalised @ stack.weights[at]))
        return stream

    with ops.backend("lean"):
        stream = policy.start(stack.embedding)
        for site in range(0, 8, 2):
            stream = checkpoint(layer, stream, site, use_reentrant=False)
        readout = policy.finish(stream)
        (readout * torch.linspace(-1, 2, readout.numel()).view_as(readout)).sum().backward()
    leaves = (stack.embedding, stack.weights, *policy.parameters())
    assert_same([readout, *(leaf.grad for leaf in leaves)], expected[1:])


def test_autocast_does_not_reach_the_policys_arithmetic():
    policy = rr.WAV(num_blocks=2).build(4, 16)
    randomise(policy)
    embedding = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))
    updates = torch.randn(8, 3, 16, generator=torch.Generator().manual_seed(1))

    def readout():
        stream = policy.start(embedding)
        for site, update in enumerate(updates):
            stream = policy.write(stream, site, update)
        return policy.finish(stream)

    with ops.backend("lean"):
        expected = readout()
        with torch.autocast("cpu", torch.bfloat16):
            found = readout()
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)


def test_under_autocast_a_normalised_read_has_its_dtype():
    policy = rr.WAV(num_blocks=2).build(4, 16)
    randomise(policy)
    norm = torch.nn.RMSNorm(16)
    embedding = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))
    updates = torch.randn(8, 3, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    reads = {}
    for backend in ("reference", "lean"):
        with ops.backend(backend), torch.autocast("cpu", torch.bfloat16):
            stream, reads[backend] = policy.start(embedding), []
            for site in range(8):
                read, stream = policy.read_normalised(stream, site, norm)
                assert read.dtype == (torch.bfloat16 if backend == "lean" else torch.float32)
                stream = policy.write(stream, site, updates[site])
                reads[backend].append(read.float())
    found, expected = torch.stack(reads["lean"]), torch.stack(reads["reference"])
    # two roundings to 8 bits, of the mix of finished sources and of the read
    torch.testing.assert_close(found, expected, atol=0.03, rtol=0.02)


@pytest.fixture
def no_shape_checks():
    # the type checker of the tests cannot be traced
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")
@pytest.mark.filterwarnings("ignore:with one layer a block")
@pytest.mark.usefixtures("no_shape_checks")
@pytest.mark.parametrize(
    ("name", "backend"), [("wav", "lean"), ("full", "lean"), ("wav", "native")]
)
def test_compiled_as_one_graph(name, backend):
    if backend == "native" and not ops.native_available():
        pytest.skip("no C++ compiler")
    # two blocks: sites with and without finished ones
    model = small_gpt(num_layers=2, residual=CONFIGS[name])
    randomise(model.policy)
    tokens = torch.randint(11, (2, 8), generator=torch.Generator().manual_seed(0))
    with ops.backend(backend):
        results = []
        # without code generation: graphs, their operators and gradients are what is at stake
        for run in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
            model.zero_grad()
            loss = run(tokens, tokens)[1]
            loss.backward()
            results.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    assert_same(results[1], results[0], atol=1e-6)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")
@pytest.mark.filterwarnings("ignore:with one layer a block")
@pytest.mark.usefixtures("no_shape_checks")
@pytest.mark.parametrize("fails", [False, True])
def test_compiled_before_the_kernels_are_loaded(monkeypatch, fails):
    """The backend is settled, and loaded, while torch traces."""
    if not ops.native_available():
        pytest.skip("no C++ compiler")
    monkeypatch.setattr(dispatch, "_LOADED", {"lean": OPERATORS})
    monkeypatch.setattr(dispatch, "_FAILED", {})
    monkeypatch.setattr(dispatch, "_SAID", set())
    if fails:

        def load():
            raise RuntimeError("no")

        monkeypatch.setattr(native, "load", load)
    model = small_gpt(num_layers=2, residual=CONFIGS["wav"])
    randomise(model.policy)
    tokens = torch.randint(11, (2, 8), generator=torch.Generator().manual_seed(0))
    with ops.backend("auto"):
        found = torch.compile(model, fullgraph=True, backend="eager")(tokens, tokens)[1]
    assert set(dispatch._LOADED) == ({"lean"} if fails else {"lean", "native"})
    with ops.backend("lean"):
        expected = model(tokens, tokens)[1]
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


def test_a_bias_of_one_basis_has_an_empty_gradient():
    rows, width = 3, 6
    update, stream, key = (
        torch.randn(*shape) for shape in ((rows, width), (rows, width), (width,))
    )
    for count, bias in ((1, torch.empty(0)), (1, None), (2, None)):
        form = ([1.0] * count, count, 0, 1e-6, 0, 2.0, 1e-6)
        read, added, saved = OPERATORS.site_forward(
            update, [stream], None, None, key, bias, None, *form, torch.float32
        )
        grads = OPERATORS.site_backward(
            read, [None], torch.float32, [added], None, None, key, bias, None, saved, *form,
            [True] * 4,
        )  # fmt: skip
        assert grads[4].shape == (0,)
        assert grads[3].shape == (width,)


def test_the_operators_pass_torchs_checks():
    rows, width = 3, 6
    streams = [torch.randn(rows, width) for _ in range(3)]
    flat = [number for row in XYS for number in row]
    static = (flat, 3, 1, 1e-6, 1, 2.0, 1e-6)
    lean = registered("lean")
    update, prior, lse = torch.randn(rows, width), torch.randn(rows, width), torch.randn(rows)
    key, bias, gain = torch.randn(width), torch.randn(2), torch.randn(width)
    site = (update, streams, prior, lse, key, bias, gain, *static, torch.float32)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(lean.site_forward.default, site, test_utils=tests)
    read, added, saved = lean.site_forward(*site)
    after = [streams[0], added, streams[2]]
    back = (torch.randn_like(read), [None, torch.randn(rows, width), None], torch.float32, after,
            prior, lse, key, bias, gain, saved, *static, [True] * 4)  # fmt: skip
    torch.library.opcheck(lean.site_backward.default, back, test_utils=tests)

    inverse, keys = [inverse_rms(s, 1e-6) for s in streams], torch.randn(2, width)
    scales, biases = [None, torch.rand(rows), None], torch.randn(2, 3)
    priors, lses = [torch.randn(rows, width) for _ in range(2)], [torch.randn(rows)] * 2
    block = (streams, inverse, scales, keys, biases, priors, lses)
    torch.library.opcheck(
        lean.block_read_forward.default, (*block, torch.float32), test_utils=tests
    )
    out = lean.block_read_forward(*block, torch.float32)
    back = ([out[0], None], [None, lses[0]], [streams[1], None, None], *block, out[2:4], out[4],
            [True] * 4)  # fmt: skip
    torch.library.opcheck(lean.block_read_backward.default, back, test_utils=tests)
