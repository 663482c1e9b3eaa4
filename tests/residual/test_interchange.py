"""Parameters of other implementations, against each layout's own schedule in float64."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import resroute as rr
from resroute.residual.interchange import block_size, from_layout, to_layout
from resroute.residual.layouts import LAYOUTS, REFUSED
from resroute.residual.routed import RoutedPolicy
from resroute.testing import Stack, random_stack, randomise

DIM = 12
PARITY = Path(__file__).parent / "parity"


@pytest.fixture(params=["reference", "lean"])
def both_backends(request):
    with rr.backend(request.param):
        yield


def mix(sources, query, gain=1.0, eps=1e-6, scale=1.0):
    values = torch.stack(sources)
    keys = gain * values / (values.square().mean(-1, keepdim=True) + eps).sqrt()
    weights = (scale * (keys @ query.flatten())).softmax(0)
    return (weights.unsqueeze(-1) * values).sum(0)


def attn_res(state, x, sublayers, size, **options):
    """Commits a block after the read of the sublayer that begins the next; sums in the end."""
    sources, partial = [x], None
    for i, sublayer in enumerate(sublayers):
        pool = sources if partial is None else [*sources, partial]
        update = sublayer(mix(pool, state[f"layers.{i}.attn_res.pseudo_query"], **options))
        if i > 0 and i % size == 0:
            sources, partial = pool, None
        partial = update if partial is None else partial + update
    return sum([*sources, partial])


def projected(state, sources, name, **options):
    query, gain = state[f"{name}_proj.weight"], state[f"{name}_norm.weight"]
    return mix(sources, query, gain, **options)


def fla(state, x, sublayers, size, **options):
    """What is summed so far is a source, and is settled where the index divides by the size."""
    settled, prefix_sum = [], x
    for i, sublayer in enumerate(sublayers):
        layer, name = f"model.layers.{i // 2}", ("attn_res", "mlp_res")[i % 2]
        residuals = [*settled, prefix_sum]
        if i % size == 0:
            settled, prefix_sum = residuals, None
        update = sublayer(projected(state, residuals, f"{layer}.{name}", **options))
        prefix_sum = update if prefix_sum is None else prefix_sum + update
    return projected(state, [*settled, prefix_sum], "model.res", **options)


def kimi_k3(state, x, sublayers, size, **options):
    """Layer by layer; the sum is settled between the first read of a layer and its attention."""
    block_residual, prefix_sum = [], x
    for layer in range(len(sublayers) // 2):
        name = f"model.layers.{layer}"
        hidden = prefix_sum
        if block_residual:
            hidden = projected(
                state, [*block_residual, prefix_sum], f"{name}.self_attention_res", **options
            )
        if layer % size == 0:
            block_residual, prefix_sum = [*block_residual, prefix_sum], None
        update = sublayers[2 * layer](hidden)
        prefix_sum = update if prefix_sum is None else prefix_sum + update
        hidden = projected(state, [*block_residual, prefix_sum], f"{name}.mlp_res", **options)
        prefix_sum = prefix_sum + sublayers[2 * layer + 1](hidden)
    return projected(state, [*block_residual, prefix_sum], "model.output_attn_res", **options)


SCHEDULES = {"attn-res": attn_res, "fla": fla, "kimi-k3": kimi_k3}
# layout, sublayers, size of blocks in its unit, method, sites of a block
CASES = [
    ("attn-res", 8, 1, "FullAttnRes", 1),
    ("attn-res", 8, 4, "BlockAttnRes", 4),
    ("attn-res", 9, 3, "BlockAttnRes", 3),
    ("attn-res", 10, 2, "BlockAttnRes", 2),
    ("attn-res", 8, 8, "BlockAttnRes", 8),
    ("attn-res", 7, 1, "FullAttnRes", 1),
    ("fla", 10, 1, "FullAttnRes", 1),
    ("fla", 10, 4, "BlockAttnRes", 4),
    ("fla", 12, 2, "BlockAttnRes", 2),
    ("kimi-k3", 10, 2, "BlockAttnRes", 4),
    ("kimi-k3", 6, 1, "BlockAttnRes", 2),
    ("kimi-k3", 6, 12, "BlockAttnRes", 6),
]


def drawn_state(layout, num_sublayers, *, dtype=torch.float64, dim=DIM):
    """A state with a layout's parameters, none of them at an initial value, and others."""
    generator = torch.Generator().manual_seed(num_sublayers)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    state = {"model.embed_tokens.weight": draw(7, dim), "model.norm.weight": draw(dim)}
    if layout == "attn-res":
        for i in range(num_sublayers):
            state[f"layers.{i}.attn_res.pseudo_query"] = draw(dim)
            state[f"layers.{i}.norm.weight"] = draw(dim)
        return state
    first = "attn_res" if layout == "fla" else "self_attention_res"
    stems = [
        f"model.layers.{n}.{stem}" for n in range(num_sublayers // 2) for stem in (first, "mlp_res")
    ]
    for stem in [*stems, "model.res" if layout == "fla" else "model.output_attn_res"]:
        state[f"{stem}_proj.weight"] = draw(1, dim)
        state[f"{stem}_norm.weight"] = 1 + 0.3 * draw(dim)
    for n in range(num_sublayers // 2):
        state[f"model.layers.{n}.mlp.down_proj.weight"] = draw(dim, dim)
    return state


def routing_of(state):
    return {name: value for name, value in state.items() if re.search(r"\bres_|_res[._]", name)}


def sublayers_of(stack):
    def make(weight):
        def sublayer(hidden):
            rms = (hidden.square().mean(-1, keepdim=True) + 1e-6).sqrt()
            return torch.tanh((hidden / rms) @ weight)

        return sublayer

    return [make(weight) for weight in stack.weights]


@pytest.mark.usefixtures("both_backends")
@pytest.mark.parametrize(("layout", "count", "size", "method", "sites"), CASES)
def test_a_policy_reads_as_the_layouts_own_schedule(layout, count, size, method, sites):
    state, stack = drawn_state(layout, count), random_stack(count, DIM)
    options = {"eps": 1e-3, "scale": DIM**-0.5} if size == 4 else {"eps": LAYOUTS[layout].eps}
    expected = SCHEDULES[layout](state, stack.embedding, sublayers_of(stack), size, **options)

    policy = from_layout(state, layout, block_size=size, **options)

    assert [len(policy.blocks[0]), policy.eps] == [sites, options["eps"]]
    assert policy.num_sites == count
    assert (method == "FullAttnRes") == ("update 0" in policy.source_names(2))
    torch.testing.assert_close(stack.run(policy)[1], expected, atol=1e-10, rtol=1e-10)
    # blocks that are longer than the stack end with it
    assert block_size(policy, layout) == min(size, count // 2 if layout == "kimi-k3" else count)


@pytest.mark.parametrize(("layout", "count", "size", "method", "sites"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_was_imported_comes_back_to_the_bit(
    layout, count, size, method, sites, dtype, tmp_path
):
    prefix = "" if layout == "attn-res" else "language_model.model."
    state = drawn_state(layout, count, dtype=dtype)
    state = {name.replace("model.", prefix): value for name, value in state.items()}

    policy = from_layout(state, layout, block_size=size)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert {parameter.dtype for parameter in policy.parameters()} == {wide}
    save_file(to_layout(policy, layout, prefix=prefix, dtype=dtype), tmp_path / "routing")

    found, expected = load_file(tmp_path / "routing"), routing_of(state)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name].dtype, found[name].shape) == (dtype, value.shape)
        assert torch.equal(found[name], value), name


def test_the_oracles_case_in_the_layout_of_kimi_k3():
    file = np.load(PARITY / "block_attn_res-L7-D12-N3.npz")
    assert json.loads(bytes(file["case"]))["num_blocks"] == 3
    query, gain = (torch.from_numpy(file[f"in.{name}"]) for name in ("query", "key_gain"))
    stems = [f"layers.{n}.{stem}" for n in range(7) for stem in ("self_attention_res", "mlp_res")]
    state = {}
    for row, stem in enumerate([*stems, "output_attn_res"]):
        state |= {f"{stem}_proj.weight": query[row, None], f"{stem}_norm.weight": gain[row]}

    policy = from_layout(state, "kimi-k3", block_size=3, eps=1e-6)

    stack = Stack(
        embedding=torch.from_numpy(file["in.embedding"]),
        weights=torch.from_numpy(file["in.weights"]),
    )
    reads, readout = stack.run(policy)
    torch.testing.assert_close(reads, torch.from_numpy(file["out.reads"]), atol=1e-10, rtol=0)
    torch.testing.assert_close(readout, torch.from_numpy(file["out.readout"]), atol=1e-10, rtol=0)


@pytest.mark.parametrize(("dtype", "ulps"), [(torch.float32, 1), (torch.bfloat16, 0)])
@pytest.mark.parametrize("scale", [DIM**-0.5, 0.25])
def test_a_scale_goes_into_the_queries_and_comes_out_again(dtype, ulps, scale):
    state = routing_of(drawn_state("fla", 8, dtype=dtype))
    policy = from_layout(state, "fla", block_size=2, scale=scale)
    plain = from_layout(state, "fla", block_size=2)
    assert torch.equal(policy.key_gain, plain.key_gain)
    torch.testing.assert_close(policy.query, plain.query * scale, atol=0, rtol=2e-7)
    found = to_layout(policy, "fla", dtype=dtype, scale=scale)
    ulps = 0 if scale == 0.25 else ulps
    for name, value in state.items():
        torch.testing.assert_close(found[name], value, atol=0, rtol=ulps * 2**-22)


def test_from_one_layout_to_another():
    state = drawn_state("fla", 8)
    policy = from_layout(state, "fla", block_size=4, eps=1e-5)
    moved = to_layout(policy, "kimi-k3", prefix="")
    assert block_size(policy, "kimi-k3") == 2
    again = from_layout(moved, "kimi-k3", block_size=2)
    assert torch.equal(again.query, policy.query)
    assert torch.equal(again.key_gain, policy.key_gain)
    assert again.eps == policy.eps


def test_without_gains_of_its_own_a_policy_has_gains_of_one():
    policy = rr.BlockAttnRes(num_blocks=2, key_gain=False).build(4, DIM).double()
    randomise(policy)
    state = to_layout(policy, "kimi-k3")
    assert torch.equal(state["model.layers.3.mlp_res_norm.weight"], torch.ones(DIM).double())
    stack = random_stack(8, DIM)
    again = from_layout(state, "kimi-k3", block_size=2, eps=1e-6)
    torch.testing.assert_close(stack.run(again)[1], stack.run(policy)[1], atol=1e-12, rtol=0)


def test_where_a_layout_has_no_gains_they_go_into_the_queries():
    policy = rr.BlockAttnRes(num_blocks=2, gated=True).build(4, DIM).double()
    randomise(policy)
    with torch.no_grad():
        policy.gate.copy_(torch.tensor([1.0] * 8 + [0.0]))
    state = to_layout(policy, "attn-res")
    stack = random_stack(8, DIM)
    expected = attn_res(state, stack.embedding, sublayers_of(stack), 4)
    torch.testing.assert_close(stack.run(policy)[1], expected, atol=1e-10, rtol=0)
    assert set(state) == {f"layers.{i}.attn_res.pseudo_query" for i in range(8)}


def test_the_gates_of_attn_res_stay_as_they_are_in_training():
    policy = from_layout(drawn_state("attn-res", 8), "attn-res", block_size=4)
    stack = random_stack(8, DIM)
    stack.run(policy)[1].square().sum().backward()
    assert policy.gate.tolist() == [1.0] * 8 + [0.0]
    assert policy.gate.grad is None
    # every query but those of the first site and of the readout matters
    assert policy.query.grad[1:8].abs().amax(1).min() > 1e-4
    assert not policy.query.grad[[0, 8]].any()


def test_wav_without_bases_is_block_attn_res():
    policy = rr.WAV(num_blocks=2, bases=()).build(4, DIM)
    randomise(policy)
    again = from_layout(to_layout(policy, "fla"), "fla", block_size=block_size(policy, "fla"))
    assert torch.equal(again.query, policy.query)
    assert block_size(policy, "fla") == 4


def test_exported_tensors_are_new():
    policy = rr.BlockAttnRes(num_blocks=2).build(4, DIM)
    for value in to_layout(policy, "fla").values():
        value.fill_(7.0)
    assert not policy.query.any()
    assert (policy.key_gain == 1).all()


def lacking(layout, name):
    state = drawn_state(layout, 4)
    del state[name]
    return state


def having(layout, name, value):
    return drawn_state(layout, 4) | {name: value}


TWICE = {f"{stack}.{k}": v for k, v in drawn_state("attn-res", 4).items() for stack in "ab"}
QUERY = "layers.1.attn_res.pseudo_query"
BAD_STATES = [
    ("fla", {}, r"has no layers.N.attn_res_proj.weight, as fla has$"),
    ("fla", drawn_state("kimi-k3", 4), "attn_res_proj.weight, as fla has; it has those of kimi-k3"),
    ("kimi-k3", lacking("kimi-k3", "model.output_attn_res_norm.weight"), "no model.output_attn_re"),
    ("fla", lacking("fla", "model.layers.0.mlp_res_norm.weight"), "no model.layers.0.mlp_res_norm"),
    ("attn-res", TWICE, r"2 stacks with parameters of attn-res; give prefix, one of 'a\.', 'b\.'"),
    ("attn-res", having("attn-res", QUERY, torch.ones(5)), rf"{QUERY} must be 12 .* shape \(5,\)"),
    ("attn-res", having("attn-res", QUERY, torch.ones(12).int()), "must be 12 floating-point numb"),
    ("attn-res", having("attn-res", QUERY, np.ones(12)), f"{QUERY} must be a tensor, got ndarray"),
    ("attn-res", lacking("attn-res", QUERY), "1 of 4 layers have no .*, first layer 1: give the"),
    (
        "attn-res",
        having("attn-res", "layers.2000000.attn_res.pseudo_query", torch.ones(12)),
        "1999996 of 2000001 layers have no attn_res.pseudo_query, first layer 4",
    ),
    (
        "kimi-k3",
        having("kimi-k3", "model.layers.3.mlp.weight", torch.ones(2, 2)),
        "layers 2 to 3 have no self_attention_res_proj.weight; give the state of the whole model",
    ),
]


@pytest.mark.parametrize(("layout", "state", "says"), BAD_STATES)
def test_states_that_are_refused(layout, state, says):
    with pytest.raises(rr.UserError, match=says) as error:
        from_layout(state, layout, block_size=2)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        # open-attention-residuals and what came of it share other names with fla
        ("fla", "model.layers.1.mlp_res_bias"),
        ("fla", "model.layers.0.attn_res_gate_logit"),
        ("fla", "model.layers.0.attn_res_gate_proj.weight"),
        ("fla", "model.final_res_bias"),
        ("fla", "model.final_res_proj.weight"),
        ("attn-res", "layers.0.attn_res.key_norm.weight"),
        ("attn-res", "res_proj.weight"),
        ("kimi-k3", "model.layers.0.attn_res_proj.weight"),
        # additive models of another author bear the names of Kimi K3, and one more
        ("kimi-k3", "model.layers.1.self_attention_null_source"),
    ],
)
def test_parameters_of_another_formula_are_refused(layout, name):
    with pytest.raises(rr.UserError, match=f"{layout} has no parameter {name}: it is of another"):
        from_layout(having(layout, name, torch.ones(DIM)), layout, block_size=2)


@pytest.mark.parametrize("layout", REFUSED)
def test_other_formulas_are_refused_with_the_reason(layout):
    for call in (
        lambda: from_layout({}, layout, block_size=2),
        lambda: to_layout(rr.BlockAttnRes().build(4, 8), layout),
    ):
        with pytest.raises(rr.UserError, match=f"{layout} has no counterpart here: it|from"):
            call()


def test_settings_that_are_refused():
    state = drawn_state("fla", 8)
    for options, says in (
        ({"layout": "flah", "block_size": 2}, r"unknown layout 'flah' \(did you mean 'fla'\?\)"),
        ({"layout": "fla", "block_size": 3}, "must be 1 or even, as it counts sublayers, got 3"),
        ({"layout": "fla", "block_size": 0}, "block_size must be a whole number of at least 1"),
        ({"layout": "fla", "block_size": 2, "eps": -1.0}, "eps must be at least 0"),
        ({"layout": "fla", "block_size": 2, "prefix": "other."}, "has no other.layers.N.attn_res"),
        ({"layout": "fla", "block_size": 2, "prefix": "model"}, r"end in a dot, such as 'model\.'"),
        ({"layout": "fla", "block_size": 2, "scale": 0.0}, "scale must be a number other than"),
        ({"layout": "fla", "block_size": 2, "scale": float("nan")}, "other than zero, got nan"),
    ):
        with pytest.raises(rr.UserError, match=says):
            from_layout(state, **options)


def with_gates(gates):
    policy = rr.BlockAttnRes(num_blocks=2, gated=True).build(4, 8)
    with torch.no_grad():
        policy.gate.copy_(torch.tensor(gates))
    return policy


BLOCKS = rr.BlockAttnRes(num_blocks=2)
BAD_POLICIES = [
    ("fla", rr.PreNorm().build(4, 8), "fla holds routing, and SumPolicy has none"),
    ("fla", rr.DeltaAttnRes().build(4, 8), "this policy adds a mix to the plain sum"),
    ("kimi-k3", rr.WAV(num_blocks=2).build(4, 8), "this policy mixes details of blocks too"),
    ("kimi-k3", rr.FullAttnRes().build(4, 8), "whole layers, and these are of 1 of 2 sublayers"),
    ("attn-res", rr.FullAttnRes().build(4, 8), "needs a readout whose gate is 0, got 1"),
    ("fla", with_gates([1.0] * 8 + [0.0]), "needs a readout whose gate is 1, got 0"),
    ("fla", with_gates([0.0] * 9), "fla has no gates, and those of this policy are not all one"),
    ("fla", BLOCKS.build(4, 8, ("attention", "cross", "mlp")), "layers of an attention and an MLP"),
    ("fla", BLOCKS.build(4, 8, ("mlp", "attention")), "fla has layers of an attention and an MLP"),
]


@pytest.mark.parametrize(("layout", "policy", "says"), BAD_POLICIES)
def test_policies_that_a_layout_cannot_hold(layout, policy, says):
    with pytest.raises(rr.UserError, match=says):
        to_layout(policy, layout)


def test_blocks_that_attn_res_cannot_count():
    policy = rr.BlockAttnRes(block_layers=4, gated=True).build(10, 8, ("sublayer",))
    with torch.no_grad():
        policy.gate[:-1] = 1.0
    with pytest.raises(rr.UserError, match="n_layers // n_blocks sublayers, and 4 of 10 is none"):
        block_size(policy, "attn-res")


def test_numbers_that_would_be_lost_are_refused():
    policy = rr.BlockAttnRes().build(4, 8)
    with torch.no_grad():
        policy.query.fill_(1e5)
    for options, says in (
        ({"scale": 0.0}, "scale must be a number other than zero, got 0"),
        ({"scale": float("inf")}, "scale must be a number other than zero, got inf"),
        ({"dtype": torch.int8}, r"floating-point numbers, got torch\.int8"),
        ({"dtype": torch.float16}, r"proj\.weight is beyond torch\.float16; take another dtype"),
    ):
        with pytest.raises(rr.UserError, match=says):
            to_layout(policy, "fla", **options)


def test_an_imported_policy_is_an_ordinary_one():
    policy = from_layout(drawn_state("kimi-k3", 8), "kimi-k3", block_size=2)
    assert isinstance(policy, RoutedPolicy)
    other = rr.BlockAttnRes(block_layers=2, eps=1e-5).build(4, DIM).double()
    other.load_state_dict(policy.state_dict())
    stack = random_stack(8, DIM)
    assert torch.equal(stack.run(other)[1], stack.run(policy)[1])
