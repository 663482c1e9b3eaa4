"""A stack of sublayers: the loop it stands for, and what torch does with modules."""

import copy
import operator
import os
import subprocess
import sys
from pathlib import Path

import jaxtyping
import pytest
import torch
from torch import nn

import resroute as rr
from resroute.testing import randomise

DIM, LAYERS = 6, 3
KINDS = ("attention", "mlp")
CONFIGS = {
    "pre_norm": rr.PreNorm(),
    "layer_scale": rr.LayerScale(),
    "full": rr.FullAttnRes(),
    "delta": rr.DeltaAttnRes(),
    "wav": rr.WAV(num_blocks=2, details_in_readout=True),
    "wav_gated": rr.WAV(num_blocks=2, gated=True),
    "wav_learned": rr.WAV(num_blocks=2, learn_bases=True),
}
pytestmark = pytest.mark.filterwarnings("ignore:with one layer a block")


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def sublayers(count=2 * LAYERS):
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(count)]


def norms(kind=nn.RMSNorm, count=2 * LAYERS):
    found = [kind(DIM) for _ in range(count)]
    for place, norm in enumerate(found):
        nn.init.uniform_(norm.weight, 0.5, 1.0 + 0.1 * place)
    return found


def build(config, modules=None, *, layers=LAYERS, normalised=True, **options):
    modules = sublayers(2 * layers) if modules is None else modules
    options["norms"] = norms(count=len(modules)) if normalised else None
    stack = rr.RoutedStack(modules, config, dim=DIM, kinds=KINDS, **options)
    randomise(stack.policy)
    return stack


def gradients(module, output):
    """Of a function of the output that is not symmetric in it, by name."""
    module.zero_grad()
    (output * torch.linspace(-1, 2, output.numel()).view_as(output)).sum().backward()
    return {name: p.grad.clone() for name, p in module.named_parameters()}


def assert_same(found, expected, *, atol=0.0):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=atol, rtol=0, msg=name)


@pytest.fixture(params=CONFIGS)
def config(request):
    return CONFIGS[request.param]


@pytest.mark.parametrize("normalised", [False, True])
def test_it_is_the_loop_over_the_policy(config, normalised):
    stack, x = build(config, normalised=normalised), drawn(2, 4, DIM)
    assert type(stack.policy) is type(config.build(LAYERS, DIM))
    found = stack(x)

    stream = stack.policy.start(x)
    for site, sublayer in enumerate(stack.sublayers):
        if normalised:
            read, stream = stack.policy.read_normalised(stream, site, stack.norms[site])
        else:
            read = stack.policy.read(stream, site)
        stream = stack.policy.write(stream, site, sublayer(read))
    expected = stack.policy.finish(stream)
    assert torch.equal(found, expected)
    assert_same(gradients(stack, found), gradients(stack, expected))


@pytest.mark.parametrize("config", [rr.PreNorm(), rr.WAV(num_blocks=2, gated=True)])
@pytest.mark.parametrize("kind", [None, nn.LayerNorm])
def test_it_begins_as_the_plain_sum_to_the_bit(config, kind):
    before, x = sublayers(), drawn(2, 4, DIM)
    own = [nn.Identity()] * 6 if kind is None else norms(kind)
    stack = rr.RoutedStack(
        before, config, dim=DIM, kinds=KINDS, norms=None if kind is None else own
    )
    h = x
    for norm, sublayer in zip(own, before, strict=True):
        h = h + sublayer(norm(h))
    assert torch.equal(stack(x), h)


def test_a_built_policy_is_taken_as_it_is():
    policy = rr.WAV(num_blocks=1).build(2, DIM, ("attention", "cross", "mlp"))
    stack = rr.RoutedStack(sublayers(6), policy)
    assert stack.policy is policy
    assert stack(drawn(4, DIM)).shape == (4, DIM)


def test_a_configuration_is_built_for_the_number_of_sublayers():
    stack = rr.RoutedStack(sublayers(6), rr.PreNorm(), dim=DIM, kinds=("mixer",))
    assert (stack.policy.num_layers, stack.policy.kinds) == (6, ("mixer",))
    with pytest.warns(UserWarning, match="phase and split bases coincide") as said:
        rr.RoutedStack(sublayers(4), rr.WAV(num_blocks=2), dim=DIM, kinds=KINDS)
    # it points at the line that made the stack
    assert [warning.filename for warning in said] == [__file__]


POLICY = rr.PreNorm().build(3, DIM)
MISTAKES = [
    ({"count": 5}, "the policy has 6 sites, one a sublayer, got 5 sublayers"),
    ({"norms": norms(count=3)}, "the policy has 6 sites, one a sublayer, got 3 norms"),
    ({"norms": [torch.tanh]}, "norm 0 is a builtin.*; each norm is an nn.Module"),
    ({"dim": DIM}, "dim and kinds go with a configuration; a built policy has its own"),
    ({"policy": rr.WAV(), "kinds": KINDS}, "to build WAV a stack needs dim, the width, and kinds"),
    ({"policy": rr.WAV(), "dim": DIM}, "to build WAV a stack needs dim, the width, and kinds"),
    ({"policy": rr.WAV(), "dim": DIM, "kinds": "mlp"}, "kinds must be names, .*, got 'mlp'"),
    (
        {"policy": rr.WAV(), "dim": DIM, "kinds": KINDS, "count": 5},
        r"5 sublayers are not whole layers of 2 \(attention, mlp\)",
    ),
    ({"policy": rr.WAV(), "dim": DIM, "kinds": set(KINDS)}, "kinds must be names, .*, got {"),
    ({"policy": rr.WAV(), "dim": DIM, "kinds": 2}, "kinds must be names, .*, got 2"),
    ({"norms": nn.RMSNorm(DIM)}, "norms must be modules in order, one a site, got RMSNorm"),
    ({"norms": nn.ModuleDict()}, "norms must be modules in order, one a site, got ModuleDict"),
    ({"policy": rr.WAV}, "needs a policy or the configuration of a method, such as rr.WAV"),
]


@pytest.mark.parametrize(("options", "says"), MISTAKES)
def test_mistakes(options, says):
    options = {"policy": POLICY, "count": 6, **options}
    with pytest.raises(rr.UserError, match=says) as error:
        rr.RoutedStack(sublayers(options.pop("count")), options.pop("policy"), **options)
    assert "\n" not in str(error.value)


def test_a_function_is_no_sublayer_and_another_width_no_embedding():
    with pytest.raises(rr.UserError, match=r"sublayer 1 is a builtin.*; each sublayer is"):
        rr.RoutedStack([nn.Tanh(), torch.tanh], POLICY)
    with pytest.raises(rr.UserError, match="the policy was built for width 6"):
        rr.RoutedStack(sublayers(), POLICY)(drawn(3, 5))


def test_what_a_stack_has_lost_or_won_since_is_noticed():
    stack = build(rr.WAV(num_blocks=2))
    stack.sublayers.append(nn.Tanh())
    with pytest.raises(rr.UserError, match="6 sites, one a sublayer, got 7 sublayers"):
        stack(drawn(2, DIM))
    del stack.sublayers[-1]
    stack.policy = rr.PreNorm().build(2, DIM)
    with pytest.raises(rr.UserError, match="4 sites, one a sublayer, got 6 sublayers"):
        stack(drawn(2, DIM))


@pytest.mark.parametrize("config", [rr.PreNorm(), rr.WAV(num_blocks=2)], ids=lambda c: c.label)
def test_sublayers_that_write_into_what_they_read_are_refused(config):
    modules = [nn.Linear(DIM, DIM) for _ in range(6)]
    modules[3] = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(DIM, DIM))
    stack = rr.RoutedStack(modules, config, dim=DIM, kinds=KINDS)
    with pytest.raises(rr.UserError, match=r"sublayer 3 \(1 mlp\) changes what it reads in place"):
        stack(drawn(2, DIM))
    modules[3][0].inplace = False
    again = rr.RoutedStack(modules, config, dim=DIM, kinds=KINDS)
    with torch.inference_mode():
        found = again(drawn(2, DIM))
    torch.testing.assert_close(found, again(drawn(2, DIM)))


class Turned(nn.Module):
    def forward(self, x):
        return torch.fft.fft(x)


def test_complex_updates_are_refused():
    stack = rr.RoutedStack([Turned()], rr.PreNorm().build(1, DIM, ("mlp",)))
    with pytest.raises(rr.UserError, match=r"sublayer 0 .* returned complex numbers"):
        stack(drawn(2, DIM))


class Scaled(nn.Module):
    """Takes more than what it reads, and returns more than its update."""

    def __init__(self, returns=tuple):
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.returns = returns

    def forward(self, x, mask, scale=1.0):
        update = self.linear(x * mask) * scale
        return {tuple: (update, mask), dict: {"update": update}, torch.Tensor: update}[self.returns]


def test_further_arguments_reach_every_sublayer():
    torch.manual_seed(0)
    modules, x = [Scaled(torch.Tensor) for _ in range(2)], drawn(3, DIM)
    mask = torch.tensor([1.0, 0.0, 1.0])[:, None]
    found = rr.RoutedStack(modules, rr.PreNorm(), dim=DIM, kinds=KINDS)(x, mask, scale=0.5)
    h = x
    for module in modules:
        h = h + module.linear(h * mask) * 0.5
    assert torch.equal(found, h)


@pytest.mark.parametrize(("returns", "key"), [(tuple, 0), (dict, "update")])
def test_what_is_no_update_is_refused_or_taken_out(returns, key):
    torch.manual_seed(0)
    # a plain tensor stays what it is
    modules = [Scaled(torch.Tensor), Scaled(returns)]
    x, mask = drawn(3, DIM), torch.ones(3, 1)
    stack = rr.RoutedStack(modules, rr.PreNorm(), dim=DIM, kinds=KINDS)
    says = f"sublayer 1 \\(0 mlp\\) returned a {returns.__name__}; return the update alone, or"
    with pytest.raises(rr.UserError, match=says):
        stack(x, mask)
    stack.update_of = operator.itemgetter(key)
    h = x + modules[0].linear(x)
    assert torch.equal(stack(x, mask), h + modules[1].linear(h))


def test_an_update_of_another_shape_is_refused():
    stack = rr.RoutedStack([nn.Linear(DIM, 2)], rr.PreNorm(), dim=DIM, kinds=("mlp",))
    with pytest.raises(rr.UserError, match=r"update of site 0 has shape \(3, 2\)"):
        stack(drawn(3, DIM))


def test_one_module_may_stand_at_several_sites():
    shared, x = sublayers(1)[0], drawn(3, DIM)
    stack = rr.RoutedStack([shared] * 6, rr.WAV(num_blocks=1), dim=DIM, kinds=KINDS)
    assert sum(p.numel() for n, p in stack.named_parameters() if n[:3] == "sub") == DIM * (DIM + 1)
    assert gradients(stack, stack(x))["sublayers.0.0.weight"].abs().min() > 0


def test_states_and_copies_carry_everything():
    stack, x = build(rr.WAV(num_blocks=2)), drawn(2, DIM)
    assert {name.split(".")[0] for name in stack.state_dict()} == {"sublayers", "norms", "policy"}
    policy = rr.WAV(num_blocks=2).build(LAYERS, DIM)
    other = rr.RoutedStack(nn.Sequential(*sublayers()), policy, norms=nn.ModuleList(norms()))
    assert not torch.equal(other(x), stack(x))
    other.load_state_dict(stack.state_dict())
    assert torch.equal(other(x), stack(x))
    assert torch.equal(copy.deepcopy(stack)(x), stack(x))


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(DIM, DIM), 0

    def forward(self, x, shift):
        self.calls += 1
        return nn.functional.dropout(torch.tanh(self.linear(x) + shift), 0.5)


def test_activation_checkpointing_computes_again_what_was_there(config):
    results = []
    for recomputes in (False, True):
        torch.manual_seed(0)
        modules = [Noisy() for _ in range(6)]
        stack = build(config, modules, activation_checkpointing=recomputes)
        x, shift = drawn(3, DIM).requires_grad_(), drawn(DIM, seed=1).requires_grad_()
        found = stack(x, shift=shift)
        assert [module.calls for module in modules] == [1] * 6
        gradient = gradients(stack, found)
        assert [module.calls for module in modules] == [1 + recomputes] * 6
        with torch.no_grad():
            stack(x, shift)
        assert [module.calls for module in modules] == [2 + recomputes] * 6
        results.append({"out": found.detach(), "x": x.grad, "shift": shift.grad, **gradient})
    assert_same(results[1], results[0])


@pytest.fixture
def traceable():
    # the type checker of the tests cannot be traced
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
    torch.compiler.reset()


def traced(test):
    for warning in ("The .grad attribute of a Tensor:UserWarning", ":DeprecationWarning:torch.*"):
        test = pytest.mark.filterwarnings(f"ignore:{warning}")(test)
    test = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")(test)
    return pytest.mark.usefixtures("traceable")(test)


@traced
@pytest.mark.parametrize(
    ("name", "recomputes"), [("pre_norm", False), ("wav", True), ("full", False)]
)
def test_compiled_as_one_graph(name, recomputes):
    # one layer a block: sites with and without finished ones
    stack = build(CONFIGS[name], layers=2, activation_checkpointing=recomputes)
    # without code generation: graphs, their operators and gradients are what is at stake
    compiled = torch.compile(stack, fullgraph=True, backend="aot_eager")
    for length in (4, 3) if name == "pre_norm" else (4,):
        x = drawn(2, length, DIM)
        expected, found = stack(x), compiled(x)
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
        assert_same(gradients(stack, found), gradients(stack, expected), atol=1e-5)


@traced
def test_a_compiled_stack_is_looked_into_without_its_graph():
    stack, x = build(rr.WAV(num_blocks=1), layers=1), drawn(2, 4, DIM)
    compiled = torch.compile(stack, fullgraph=True, backend="aot_eager")
    expected = compiled(x)
    with rr.capture(stack) as plain:
        stack(x)
    with torch.compiler.set_stance("force_eager"), rr.capture(compiled) as seen:
        found = compiled(x)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    assert seen.result() == plain.result()


LOADING = """
import sys, torch
for backend in ("reference", "lean"):
    program = torch.export.load(f"{backend}.pt2")
    x, expected = torch.load(f"{backend}.pt")
    print(backend, torch.equal(program.module()(x), expected), "resroute" in sys.modules)
"""


@traced
def test_exported_by_the_formula_it_needs_torch_alone(tmp_path):
    stack = build(rr.WAV(num_blocks=1), layers=1)
    whatever = torch.export.Dim.DYNAMIC
    # another batch and length than it is traced with
    traced_with, x = drawn(2, 4, DIM), drawn(3, 5, DIM, seed=1)
    for backend in ("reference", "lean"):
        with rr.backend(backend):
            program = torch.export.export(
                stack, (traced_with,), dynamic_shapes=({0: whatever, 1: whatever},)
            )
            expected = stack(x).detach()
        assert torch.equal(program.module()(x), expected)
        torch.export.save(program, tmp_path / f"{backend}.pt2")
        torch.save((x, expected), tmp_path / f"{backend}.pt")
    command = [sys.executable, "-W", "ignore", "-c", LOADING]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "reference True False\n", done.stderr
    assert done.returncode == 1
    assert "failed to resolve torch.ops.resroute_lean" in done.stderr


def test_autocast_narrows_sublayers_and_leaves_the_stream_wide(config):
    stack, x = build(config), drawn(2, 4, DIM)
    expected = stack(x)
    exact = gradients(stack, expected)
    with torch.autocast("cpu", torch.bfloat16):
        found = stack(x)
    rough = gradients(stack, found)
    assert found.dtype == torch.float32
    # a few roundings to 8 bits
    assert 1e-5 < (found - expected).abs().max() < 0.1
    for name, gradient in exact.items():
        assert rough[name].dtype == torch.float32
        assert (rough[name] - gradient).norm() <= 0.1 * gradient.norm() + 1e-3, name


class Model(nn.Module):
    """Tokens to logits by way of a stack."""

    def __init__(self, config):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(11, DIM), nn.Linear(DIM, 11)
        self.stack = build(config)

    def forward(self, tokens):
        return self.head(self.stack(self.embedding(tokens)))


def test_looking_inside():
    model = Model(rr.WAV(num_blocks=2))
    tokens = torch.randint(11, (2, 8), generator=torch.Generator().manual_seed(0))
    plain = gradients(model, model(tokens))
    results = []
    for recomputes in (False, True):
        model.stack.activation_checkpointing = recomputes
        with rr.capture(model) as seen:
            assert_same(gradients(model, model(tokens)), plain)
        results.append(seen.result())
    assert results[0] == results[1]
    site = results[0]["sites"][5]
    assert sum(site["weights"].values()) == pytest.approx(1.0, abs=1e-6)
    assert (site["name"], site["update_gradient"] > 0) == ("2 mlp", True)
    assert [finding.check for finding in rr.health(seen, model)] == []
    found = rr.importance(model, (tokens, tokens.roll(-1, 1)), "site")
    with torch.no_grad():
        logits = model(tokens)
        expected = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())
    assert found.loss == pytest.approx(expected.item(), rel=1e-5)
    assert all(abs(item.change) > 1e-6 for item in found.items)


RANKS = Path(__file__).with_name("stack_ranks.py")


@pytest.mark.slow
def test_two_processes_have_the_gradients_of_one():
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
            str(RANKS),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = [line.split(": ") for line in done.stdout.splitlines()]
    distances = {name: float(distance) for name, distance in said if name != "refused"}
    kinds = ("ddp", "fsdp", "fsdp, recomputed", "fsdp around it", "ddp, compiled")
    assert set(distances) == {f"{method} {kind}" for kind in kinds for method in ("WAV", "gated")}
    # relative to the largest gradient
    assert max(distances.values()) < 1e-5
    [(_, why)] = [line for line in said if line[0] == "refused"]
    assert why.startswith("each process holds a share of the policy alone; fully_shard the stack")
