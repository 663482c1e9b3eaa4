"""What holds for every policy: the protocol, shapes, dtypes, special cases."""

import pickle
import warnings

import pytest
import torch

import resroute as rr
from resroute.config import from_dict, to_dict, variants
from resroute.residual import ResidualConfig
from resroute.testing import Stack, random_stack, randomise

LAYERS, DIM = 6, 5
CONFIGS = {
    "pre_norm": rr.PreNorm(),
    "re_zero": rr.ReZero(),
    "layer_scale": rr.LayerScale(),
    "full": rr.FullAttnRes(),
    "full_gated": rr.FullAttnRes(gated=True),
    "full_no_gain": rr.FullAttnRes(key_gain=False),
    "block": rr.BlockAttnRes(num_blocks=3),
    "block_layers": rr.BlockAttnRes(block_layers=4),
    "delta": rr.DeltaAttnRes(),
    "delta_blocks": rr.DeltaAttnRes(num_blocks=2, embedding_source=False),
    "delta_gated": rr.DeltaAttnRes(gated=True),
    "wav": rr.WAV(num_blocks=3),
    "wav_gated": rr.WAV(num_blocks=2, gated=True, details_in_readout=True),
    "wav_controls": rr.WAV(num_blocks=2, bases=("duplicate", "random"), matching="attached"),
    "wav_learned": rr.WAV(num_blocks=2, learn_bases=True, learn_detail_bias=False),
    "haares": rr.HAARES(num_blocks=2),
}
ROUTED = [name for name, config in CONFIGS.items() if hasattr(config, "eps")]


@pytest.fixture(params=CONFIGS)
def config(request):
    return CONFIGS[request.param]


def build(config, *, random=True, layers=LAYERS, dim=DIM, dtype=torch.float64):
    policy = config.build(layers, dim).to(dtype)
    if random:
        randomise(policy)
    return policy


def test_every_registered_method_is_covered():
    assert {type(config) for config in CONFIGS.values()} == set(variants(ResidualConfig).values())


def test_reading_is_pure_and_writing_changes_nothing_in_place(config):
    policy = build(config)
    stack = random_stack(2 * LAYERS, DIM)
    stream = policy.start(stack.embedding)
    for site in range(2 * LAYERS):
        read = policy.read(stream, site)
        before = [t.clone() for t in torch.utils._pytree.tree_leaves(stream) if torch.is_tensor(t)]
        assert torch.equal(policy.read(stream, site), read)
        after = policy.write(stream, site, torch.tanh(read))
        assert torch.equal(policy.read(stream, site), read)
        leaves = [t for t in torch.utils._pytree.tree_leaves(stream) if torch.is_tensor(t)]
        assert all(torch.equal(a, b) for a, b in zip(before, leaves, strict=True))
        stream = after


def test_sites_come_in_order(config):
    policy = build(config)
    stream = policy.start(torch.zeros(2, DIM, dtype=torch.float64))
    update = torch.ones(2, DIM, dtype=torch.float64)
    for call in (
        lambda: policy.read(stream, 1),
        lambda: policy.write(stream, 1, update),
        lambda: policy.read(stream, -1),
        lambda: policy.weights(stream, 1),
        lambda: policy.finish(stream),
    ):
        with pytest.raises(ValueError, match=r"the stream (is|ends) at site 0"):
            call()
    for site in range(2 * LAYERS):
        stream = policy.write(stream, site, update)
    with pytest.raises(ValueError, match="at site 12 of 12, got site 12"):
        policy.read(stream, 12)
    with pytest.raises(ValueError, match="at site 12 of 12, got site 0"):
        policy.write(stream, 0, update)
    policy.finish(stream)


def test_another_width_is_refused(config):
    with pytest.raises(ValueError, match=r"width 5, got an embedding of shape \(2, 4\)"):
        build(config).start(torch.zeros(2, 4))


@pytest.mark.parametrize("sizes", [(0, 4), (4, 0), (-1, 4)])
def test_sizes_below_one_are_refused(config, sizes):
    with pytest.raises(ValueError, match="must be a whole number of at least 1"):
        config.build(*sizes)


def test_tokens_are_independent(config):
    policy = build(config)
    stack = random_stack(2 * LAYERS, DIM, tokens=6)
    _, whole = stack.run(policy)
    part = Stack(embedding=stack.embedding[2:4], weights=stack.weights)
    torch.testing.assert_close(part.run(policy)[1], whole[2:4])
    batched = Stack(embedding=stack.embedding.view(2, 3, DIM), weights=stack.weights)
    torch.testing.assert_close(batched.run(policy)[1].view(6, DIM), whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_reads_keep_the_dtype_of_the_embedding(config, dtype):
    policy = build(config, dtype=torch.float32)
    stack = random_stack(2 * LAYERS, DIM)
    stream = policy.start(stack.embedding.to(dtype))
    for site in range(2 * LAYERS):
        read = policy.read(stream, site)
        assert read.dtype == dtype
        # updates of another type do not change the stream's
        stream = policy.write(stream, site, torch.tanh(read.float()))
    assert policy.finish(stream).dtype == dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_half_and_single_precision_stay_near_double(config, dtype):
    policy = build(config)
    stack = random_stack(2 * LAYERS, DIM)
    _, exact = stack.run(policy)
    single = build(config, dtype=torch.float32)
    cast = Stack(embedding=stack.embedding.to(dtype), weights=stack.weights.to(dtype))
    _, found = cast.run(single)
    error = (found.double() - exact).norm() / exact.norm()
    assert error < {torch.float32: 1e-5, torch.bfloat16: 5e-2}[dtype]


@pytest.mark.parametrize("backend", ["reference", "lean", "auto"])
def test_a_bfloat16_model_with_a_float32_policy(config, backend):
    def run(dtype, policy):
        torch.manual_seed(0)
        sublayers = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.RMSNorm(DIM), torch.nn.Linear(DIM, DIM))
            for _ in range(2 * LAYERS)
        ).to(dtype)
        embedding = torch.randn(7, DIM).to(dtype)
        with rr.backend(backend):
            stream = policy.start(embedding)
            for site, (norm, linear) in enumerate(sublayers):
                normalised, stream = policy.read_normalised(stream, site, norm)
                stream = policy.write(stream, site, linear(normalised))
            readout = policy.finish(stream)
        readout.float().square().sum().backward()
        return readout, {name: p.grad for name, p in policy.named_parameters()}

    policy = build(config, dtype=torch.float64)
    exact, gradients = run(torch.float64, policy)
    single = build(config, dtype=torch.float64).bfloat16().float()
    found, rounded = run(torch.bfloat16, single)
    assert found.dtype == torch.bfloat16
    assert (found.double() - exact).norm() / exact.norm() < 5e-2
    for name, gradient in gradients.items():
        assert rounded[name].dtype == torch.float32
        error = (rounded[name].double() - gradient).norm() / gradient.norm()
        assert error < 0.15, name


def test_updates_are_optional_to_read_and_may_have_another_dtype():
    embedding = torch.randn(3, DIM).bfloat16()
    updates = [torch.randn(3, DIM) for _ in range(2 * LAYERS)]
    policy = rr.PreNorm().build(LAYERS, DIM)
    stream = policy.start(embedding)
    expected = embedding
    for site, update in enumerate(updates):
        stream = policy.write(stream, site, update)
        # rounded once, after the sum
        expected = (expected.float() + update).bfloat16()
    assert torch.equal(policy.finish(stream), expected)


@pytest.mark.parametrize("backend", ["reference", "lean", "auto"])
@pytest.mark.parametrize("name", ["block", "wav", "delta_gated"])
def test_a_read_changes_nothing_that_is_written(name, backend):
    policy = build(CONFIGS[name], dtype=torch.float32)
    embedding, *updates = torch.randn(2 * LAYERS + 1, 3, DIM)
    with rr.backend(backend):
        streams = [policy.start(embedding)] * 2
        for site, update in enumerate(updates):
            policy.read(streams[0], site)
            streams = [policy.write(stream, site, update) for stream in streams]
        torch.testing.assert_close(*[policy.finish(stream) for stream in streams])


def test_weights_sum_to_one_and_name_each_source_once(config):
    policy = build(config)
    stack = random_stack(2 * LAYERS, DIM)
    stream = policy.start(stack.embedding)
    for site in range(2 * LAYERS + 1):
        names, weights = policy.weights(stream, site)
        assert len(set(names)) == len(names) == weights.shape[-1]
        assert weights.shape[:-1] == stack.embedding.shape[:-1]
        if names:
            torch.testing.assert_close(weights.sum(-1), torch.ones(5, dtype=torch.float64))
        if site < 2 * LAYERS:
            stream = policy.write(stream, site, torch.tanh(policy.read(stream, site)))


def test_reset_restores_the_initial_state(config):
    fresh, moved = build(config, random=False), build(config)
    moved.reset_parameters()
    for (name, a), (_, b) in zip(
        fresh.state_dict().items(), moved.state_dict().items(), strict=True
    ):
        torch.testing.assert_close(a, b, atol=0, rtol=1e-7, msg=name)


def test_meta_device(config):
    with torch.device("meta"):
        policy = config.build(LAYERS, DIM)
    policy.to_empty(device="cpu").reset_parameters()
    expected = config.build(LAYERS, DIM).state_dict()
    assert all(torch.equal(policy.state_dict()[k], v) for k, v in expected.items())


def test_configs_go_through_json_and_are_frozen(config):
    assert from_dict(ResidualConfig, to_dict(config)) == config
    with pytest.raises(AttributeError):
        config.eps = 1
    assert pickle.loads(pickle.dumps(config)) == config


def test_gradients_reach_every_parameter_that_can_have_one(config):
    policy = build(config)
    stack = random_stack(2 * LAYERS, DIM)
    _, readout = stack.run(policy)
    (readout * torch.randn(readout.shape, dtype=readout.dtype)).sum().backward()
    assert stack.embedding.grad.abs().min() > 0
    assert stack.weights.grad.flatten(1).abs().amax(1).min() > 0
    # a softmax over one source is constant, and Delta's site 0 mixes nothing
    slots = getattr(policy, "_slots", [])
    single = {site for site, names in enumerate(slots) if len(names) < 2}
    for name, parameter in policy.named_parameters():
        rows = parameter.grad.reshape(len(parameter), -1).abs().amax(1)
        dead = {i for i, value in enumerate(rows.tolist()) if value == 0}
        if name in ("query", "key_gain"):
            assert dead <= single, name
        elif name == "gate":
            assert dead <= {0}, name
        elif name == "detail_bias":
            # until a block's second site there are no details
            assert dead == {0}, name
        else:
            assert not dead, name


@pytest.mark.parametrize("name", ROUTED)
def test_gradcheck(name):
    config = CONFIGS[name]
    if name.startswith("wav") or name == "haares":
        # a detached factor is no derivative: compare what is differentiable
        config = from_dict(ResidualConfig, {**to_dict(config), "matching": "attached"})
    policy = config.build(LAYERS, 2).double()
    randomise(policy)
    stack = random_stack(2 * LAYERS, 2, tokens=1)
    names = [n for n, _ in policy.named_parameters()]

    def run(embedding, weights, *parameters):
        inputs = Stack(embedding=embedding, weights=weights)
        swapped = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(_Runner(policy, inputs), _prefixed(swapped), ())

    parameters = [p.detach().clone().requires_grad_() for p in policy.parameters()]
    assert torch.autograd.gradcheck(
        run, (stack.embedding, stack.weights, *parameters), fast_mode=True
    )


class _Runner(torch.nn.Module):
    def __init__(self, policy, stack):
        super().__init__()
        self.policy, self.stack = policy, stack

    def forward(self):
        return self.stack.run(self.policy)[1]


def _prefixed(tensors):
    return {f"policy.{name}": tensor for name, tensor in tensors.items()}


def test_no_warning_escapes_usual_settings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rr.WAV().build(12, 8)
        rr.BlockAttnRes(num_blocks=4).build(48, 8)


def test_updates_have_the_shape_of_the_stream(config):
    policy = build(config)
    stream = policy.start(torch.zeros(2, 3, DIM, dtype=torch.float64))
    for shape in ((DIM,), (1, 1, DIM), (4, 2, 3, DIM), (2, 3, DIM - 1), (2, 3, 1)):
        with pytest.raises(ValueError, match=r"update of site 0 has shape .*, the stream has"):
            policy.write(stream, 0, torch.zeros(shape, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"floating-point embedding, got torch\.int64"):
        policy.start(torch.zeros(2, DIM, dtype=torch.int64))


@pytest.mark.parametrize("name", ROUTED)
def test_parameters_are_widened_before_they_are_multiplied(name):
    config, stack = CONFIGS[name], random_stack(2 * LAYERS, DIM)
    narrow = build(config, dtype=torch.float32).bfloat16()
    wide = config.build(LAYERS, DIM).double()
    wide.load_state_dict({k: v.double() for k, v in narrow.state_dict().items()})
    torch.testing.assert_close(stack.run(narrow)[1], stack.run(wide)[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rr.WAV(num_blocks=2.5), "num_blocks must be a whole number, got 2.5"),
        (lambda: rr.WAV(num_blocks=True), "num_blocks must be a whole number, got True"),
        (lambda: rr.BlockAttnRes(block_layers="4"), "block_layers must be a whole number"),
        (lambda: rr.WAV(basis_seed=1.5), "basis_seed must be a whole number"),
        (lambda: rr.WAV(bases="phase"), "bases must be a sequence of names, .*, got 'phase'"),
        (lambda: rr.WAV(bases=None), "bases must be a sequence of names, .*, got None"),
        (lambda: rr.WAV(rho_max="x"), "rho_max must be a number, got .x."),
        (lambda: rr.WAV(detail_bias="x"), "detail_bias must be a number"),
        (lambda: rr.LayerScale(init="x"), "init must be a number, got .x."),
        (lambda: rr.FullAttnRes(eps="1e-6"), "eps must be a number"),
        (lambda: rr.PreNorm().build(2.0, 4), "num_layers must be a whole number"),
        (lambda: rr.PreNorm().build(2, 4, "attention"), r"kinds must be .* \('attention',\)"),
    ],
)
def test_values_of_another_type_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("backend", ["reference", "lean"])
def test_streams_print_their_sizes(backend):
    policy, update = rr.WAV(num_blocks=2).build(4, 6), torch.ones(2, 5, 6)
    with rr.backend(backend):
        stream = policy.start(torch.ones(2, 5, 6))
        for site in range(5):
            stream = policy.write(stream, site, update)
    # the embedding; the sum, phase and split of the first block
    assert repr(stream) == (
        f"RoutedStream(site=5, sources=4, shape=(2, 5, 6), backend='{backend}')"
    )
    delta = rr.DeltaAttnRes(num_blocks=2, embedding_source=False).build(4, 6)
    with rr.backend(backend):
        assert "sources=0, shape=(5, 6)" in str(delta.start(torch.ones(5, 6)))


def test_policies_print_their_sizes():
    assert "num_layers=6, dim=5" in repr(rr.PreNorm().build(6, 5))
    text = repr(rr.WAV(num_blocks=3).build(6, 5))
    assert "num_blocks=3, bases=('phase', 'split')" in text
