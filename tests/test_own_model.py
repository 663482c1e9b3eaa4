"""docs/own-model.md: its examples run, and are what it says of them."""

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import jaxtyping
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import resroute as rr

PAGE = Path(__file__).parents[1] / "docs" / "own-model.md"
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.DOTALL | re.M))


def blocks(title, language="python"):
    return re.findall(rf"^```{language}\n(.*?)^```", SECTIONS[title], re.DOTALL | re.MULTILINE)


def execute(code, namespace):
    for block in code:
        exec(compile(block, PAGE.name, "exec"), namespace)
    return namespace


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)


def run(title, **others):
    """Names of a section, after those that all share or others in their place."""
    shared, *calls = blocks("The four calls")
    names = execute([shared], {})
    # in place: functions of the page look their names up there
    names.update(others)
    execute([*calls, *blocks("A stack")], names)
    return execute([] if title == "A stack" else blocks(title), names)


def plain_sum(stack, x):
    """`x = x + f(norm(x))`, as a model does it that has no policy."""
    for norm, sublayer in zip(stack.norms, stack.sublayers, strict=True):
        x = x + sublayer(norm(x))
    return x


def put(stack, config):
    """Have a stack carried by another method."""
    held = stack.policy
    stack.policy = config.build(held.num_layers, held.dim, held.kinds)


def assert_begins_as_the_plain_sum(stack, x):
    """By the formula, which calls the norms that are there; kernels round an RMSNorm otherwise."""
    trained = stack.policy
    with rr.backend("reference"):
        expected = plain_sum(stack, x)
        for config in (
            rr.PreNorm(),
            rr.HAARES(num_blocks=2, gated=True),
            rr.FullAttnRes(gated=True),
        ):
            put(stack, config)
            assert torch.equal(stack(x), expected)
    torch.testing.assert_close(stack(x), expected, atol=1e-5, rtol=0)
    stack.policy = trained
    assert not torch.allclose(stack(x), expected, atol=1e-2)


def train(parameters, loss_of, steps=15):
    """Losses of a few steps."""
    optimizer = torch.optim.Adam(list(parameters), lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = loss_of()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_learns(stack, x, target):
    """The stack and a head fit a target; the policy takes part in it."""
    head = nn.Linear(x.shape[-1], target.shape[-1])
    losses = train(
        [*stack.parameters(), *head.parameters()],
        lambda: (head(stack(x)) - target).square().mean(),
    )
    assert losses[-1] < 0.8 * losses[0]
    assert stack.policy.query.abs().max() > 1e-3


def assert_causal(stack, x):
    changed = x.clone()
    changed[:, -1] += 1.0
    before, after = stack(x), stack(changed)
    torch.testing.assert_close(after[:, :-1], before[:, :-1], atol=1e-5, rtol=0)
    assert (after[:, -1] - before[:, -1]).abs().max() > 1e-2


def test_every_section_is_tested():
    tested = set(re.findall(r'(?:run|blocks)\("([^"]+)"', Path(__file__).read_text()))
    assert {title for title in SECTIONS if "```python" in SECTIONS[title]} <= tested


def test_the_four_calls_and_the_stack():
    names = run("A stack")
    x = torch.randn(2, 5, 32)
    assert isinstance(names["stack"].policy, type(names["policy"]))
    assert_begins_as_the_plain_sum(names["stack"], x)
    assert_causal(names["stack"], x)
    assert_learns(names["stack"], x, torch.randn(2, 5, 3))


def patched(before, diff):
    """A text after a diff, whose hunks each fit one place."""
    after = before
    for hunk in re.split(r"^@@\n", diff, flags=re.MULTILINE):
        lines = hunk.splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if line[0] in " -")
        new = "".join(line[1:] for line in lines if line[0] in " +")
        assert after.count(old) == 1, old
        after = after.replace(old, new)
    return after


def test_nanogpt_in_eight_lines():
    [before], [diff] = blocks("nanoGPT in eight lines"), blocks("nanoGPT in eight lines", "diff")
    assert len(re.findall(r"^[+-]", diff, re.MULTILINE)) == 8
    after = patched(before, diff)
    method = "rr.WAV(num_blocks=2, gated=True)"
    shared = blocks("The four calls")[0]
    old = execute([shared, before], {})
    model = old["GPT"](old["config"])
    tokens = torch.randint(16, (2, 9))
    expected = model(tokens)
    for config in (method, "rr.PreNorm()", "rr.FullAttnRes(gated=True)"):
        new = execute([shared, after.replace(method, config)], {})
        other = new["GPT"](new["config"])
        missing, unexpected = other.load_state_dict(model.state_dict(), strict=False)
        assert (unexpected, {name.split(".")[0] for name in missing} - {"policy"}) == ([], set())
        assert torch.equal(other(tokens), expected)
    other = execute([shared, after], {})["GPT"](old["config"])
    losses = train(
        other.parameters(),
        lambda: F.cross_entropy(other(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()),
    )
    assert losses[-1] < 0.5 * losses[0]
    # the first site has one source: nothing to blend
    assert other.policy.gate[1:].abs().min() > 1e-3
    # without a gate it is not the old model
    free = execute([shared, after.replace(method, "rr.WAV(num_blocks=2)")], {})
    other = free["GPT"](free["config"])
    other.load_state_dict(model.state_dict(), strict=False)
    assert not torch.allclose(other(tokens), expected, atol=1e-2)


def test_an_encoder():
    names = run("An encoder")
    vit, images = names["vit"], torch.randn(4, 3, 16, 16)
    assert names["logits"].shape == (2, 10)
    stack, tokens = vit.stack, torch.randn(4, 17, 32)
    assert_begins_as_the_plain_sum(stack, tokens)
    # the first token sees a change of the last
    changed = tokens.clone()
    changed[:, -1] = torch.randn(32)
    assert (stack(changed) - stack(tokens))[:, 0].abs().min() > 1e-6
    labels = torch.arange(4)
    losses = train(vit.parameters(), lambda: F.cross_entropy(vit(images), labels))
    assert losses[-1] < 0.5 * losses[0]
    assert vit.class_token.grad.any()
    # its norms are LayerNorms: any backend gives the bits of the plain sum
    for config in (rr.PreNorm(), rr.WAV(num_blocks=2, gated=True)):
        put(stack, config)
        assert torch.equal(stack(tokens), plain_sum(stack, tokens))


def test_a_hybrid():
    names = run("A hybrid")
    stack, x = names["hybrid"], torch.randn(2, 5, 32)
    kinds = [type(stack.sublayers[site]).__name__ for site in range(0, 16, 2)]
    assert kinds == ["Recurrence"] * 3 + ["Attention"] + ["Recurrence"] * 3 + ["Attention"]
    assert_begins_as_the_plain_sum(stack, x)
    assert_causal(stack, x)
    assert_learns(stack, x, torch.randn(2, 5, 3))
    with pytest.raises(rr.UserError, match="the phase basis needs as many attention as mlp"):
        rr.WAV(num_blocks=2).build(4, 32, ("attention", "attention", "mlp"))


def test_attention_and_mlp_in_parallel():
    names = run("Attention and MLP in parallel")
    stack, x = names["parallel"], torch.randn(2, 5, 32)
    assert_begins_as_the_plain_sum(stack, x)
    assert_causal(stack, x)
    assert_learns(stack, x, torch.randn(2, 5, 3))
    for bases in (("phase",), ("phase", "split")):
        for kinds in (("parallel",), ("attention",)):
            with pytest.raises(rr.UserError, match="the phase basis needs as many attention as"):
                rr.WAV(num_blocks=2, bases=bases).build(8, 32, kinds)
    for bases in (("split",), ("duplicate",), ("random",), ("split", "random")):
        put(stack, rr.WAV(num_blocks=2, bases=bases))
        assert stack(x).isfinite().all()
    assert rr.HAARES(block_layers=3).build(6, 32, ("parallel",)).signs == [[1.0], [0.0], [-1.0]] * 2
    # in a block of one layer the detail is nothing, with weight
    with pytest.warns(UserWarning, match="in a block of 1 the basis 'split' is zero"):
        policy = rr.HAARES(block_layers=1).build(2, 32, ("parallel",))
    stream = policy.write(policy.start(x), 0, x)
    assert not policy.sources(stream, 1)["split 0"].any()
    assert policy.initial_weights(1)["split 0"] > 0.05


def test_a_mixture_of_experts():
    names = run("A mixture of experts")
    stack, experts, x = names["moe"], names["experts"], torch.randn(2, 5, 32)
    assert_begins_as_the_plain_sum(stack, x)
    assert_causal(stack, x)
    # 1 is even; two of four are chosen, whose shares are counted once each
    assert names["balance"].item() == pytest.approx(2 * len(experts), rel=0.2)
    target = torch.randn(2, 5, 32)

    def loss():
        fit = (stack(x) - target).square().mean()
        return fit + 0.01 * sum(expert.balance for expert in experts)

    losses = train(stack.parameters(), loss)
    assert losses[-1] < 0.8 * losses[0]
    assert all(expert.router.weight.grad.any() for expert in experts)


@pytest.mark.filterwarnings("ignore:.*:UserWarning:lightning.*")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_lightning():
    names = run("Lightning")
    module, again, tokens = names["module"], names["again"], names["tokens"]
    assert names["trainer"].global_step == 2
    assert module.stack.policy.query.abs().max() > 1e-3
    assert Path("decoder.ckpt").stat().st_size > 0
    for name, value in module.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    assert torch.equal(again(tokens), module(tokens))
    torch.manual_seed(0)
    fresh = names["Decoder"](rr.WAV(num_blocks=2))
    assert module.training_step(tokens, 0) < fresh.training_step(tokens, 0) - 0.1
    groups = module.configure_optimizers().param_groups
    routing = {id(p) for p in module.stack.policy.parameters()}
    assert {id(p) for p in groups[1]["params"]} == routing
    assert (groups[0]["weight_decay"], groups[1]["weight_decay"]) == (0.1, 0.0)
    assert len(groups[0]["params"]) + len(routing) == len(list(module.parameters()))


@pytest.fixture
def traceable():
    # the type checker of the tests cannot be traced
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
    torch.compiler.reset()


@pytest.mark.usefixtures("traceable")
@pytest.mark.filterwarnings("ignore:with one layer a block")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_compile_and_export(monkeypatch):
    # without code generation, which takes minutes; the graph is what is at stake
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    names = run("Compile and export", layers=2)
    stack, x = names["stack"], names["x"]
    torch.testing.assert_close(names["compiled_hidden"], stack(x), atol=1e-5, rtol=0)
    program, other = torch.export.load("stack.pt2").module(), torch.randn(3, 7, 32)
    torch.testing.assert_close(program(other), stack(other), atol=1e-5, rtol=0)
    assert not [node for node in program.graph.nodes if "resroute" in str(node.target)]


@pytest.mark.slow
def test_several_processes():
    [script] = blocks("Several processes")
    Path("train.py").write_text(script)
    losses = {}
    for way, size in (("ddp", 1), ("ddp", 2), ("fsdp", 2)):
        launch = ["--standalone", "--nproc-per-node", str(size), "train.py", way]
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", *launch],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr
        said = re.findall(r"^step \d: ([\d.]+)$", done.stdout, re.MULTILINE)
        losses[way, size] = [float(loss) for loss in said]
        assert len(said) == 4
    assert losses["ddp", 1][-1] < losses["ddp", 1][0]
    for found in losses.values():
        assert found == pytest.approx(losses["ddp", 1], abs=2e-4)


def test_weights_of_other_implementations():
    names = run("Weights of other implementations")
    assert (names["size"], names["policy"].eps) == (2, 1e-5)
    stack, x = names["stack"], torch.randn(2, 5, 32)
    # queries were zero: a site reads the mean of its sources, here of the embedding alone
    assert torch.equal(stack.policy.read(stack.policy.start(x), 0), x)
    put(stack, rr.BlockAttnRes(block_layers=2, eps=1e-5))
    stack.policy.load_state_dict(names["trained"].state_dict())
    expected = stack(x)
    stack.policy = names["policy"]
    assert torch.equal(stack(x), expected)
    assert len(names["state"]) == 2 * (2 * 6 + 1)
