"""Bytes by arithmetic against bytes that are counted: in processes, allocations and cut models."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch

import resroute as rr
from resroute.config import UserError
from resroute.model import presets
from resroute.model.flops import flops_per_token
from resroute.residual.routed import RoutedStream
from resroute.residual.two_phase import Running
from resroute.training import activations
from resroute.training.plan import Layout, communication, memory, pipeline

METHODS = (rr.PreNorm(), rr.BlockAttnRes(num_blocks=2), rr.WAV(num_blocks=2))
KINDS = ("all_reduce", "all_gather", "reduce_scatter")
HELD = ("weights", "gradients", "optimizer", "average")
SCALING = Path(__file__).parents[2] / "docs" / "scaling.md"


def account(workers, config, size, **options):
    """What the first of a run's processes counted, and the layout that the run has."""
    found = workers.values("account", size, config=config, **options)
    layout = Layout(
        processes=size,
        parallel=config.parallel,
        precision=config.precision,
        windows=config.batch_size // size,
        accumulation=config.accumulation,
        activation_checkpointing=config.activation_checkpointing,
        average=config.ema_decay is not None,
    )
    assert all(each["moved"] == found[0]["moved"] for each in found)
    return found[0]["moved"], found[0]["held"], layout


def require_counted(workers, config, size):
    moved, held, layout = account(workers, config, size)
    planned, kept = communication(config.model, layout), memory(config.model, layout)
    assert moved == {kind: getattr(planned, kind) for kind in KINDS if getattr(planned, kind)}
    assert {name: held[name] for name in HELD} == {name: getattr(kept, name) for name in HELD}


# widths and a vocabulary that 4 does not divide, and fewer biases than processes: shares are padded
ODD = {"num_layers": 4, "dim": 18, "num_heads": 3}


@pytest.mark.parametrize("residual", METHODS, ids=lambda residual: residual.label)
@pytest.mark.parametrize(("size", "parallel"), [(2, "ddp"), (4, "fsdp")])
def test_collectives_and_what_is_held_are_counted(workers, make_config, residual, size, parallel):
    config = make_config(residual, parallel=parallel, batch_size=8, model=ODD, ema_decay=0.9)
    require_counted(workers, config, size)


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "bfloat16", "accumulation": 2},
        {"precision": "bfloat16", "activation_checkpointing": True},
        {"accumulation": 2, "model": {**ODD, "tie_embeddings": True, "qk_norm": True}},
        {"parallel": "ddp", "accumulation": 2, "model": {**ODD, "position": "learned"}},
    ],
    ids=lambda options: ",".join(options),
)
def test_options_that_change_what_is_exchanged(workers, make_config, options):
    fixed = {"parallel": "fsdp", "batch_size": 8, "model": ODD}
    require_counted(workers, make_config(rr.WAV(num_blocks=2), **{**fixed, **options}), 2)


@pytest.mark.slow
@pytest.mark.parametrize("residual", METHODS, ids=lambda residual: residual.label)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_collectives_of_all_layouts(workers, make_config, residual, size, parallel, accumulation):
    options = {"parallel": parallel, "accumulation": accumulation, "batch_size": 8, "model": ODD}
    require_counted(workers, make_config(residual, precision="bfloat16", **options), size)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_the_share_of_the_policy_is_what_methods_differ_in(parallel):
    layout = Layout(processes=4, parallel=parallel, accumulation=2, windows=2)
    plain, routed = (communication(shape(residual), layout) for residual in METHODS[::2])
    assert routed.total - plain.total == routed.policy > plain.policy == 0


def test_what_a_ring_sends():
    """Of a model of 4 parameters: its embedding, which is the head, and the final norm."""
    model = rr.GPTConfig(
        vocab_size=3, num_layers=1, num_heads=1, dim=1, mlp="gelu", mlp_ratio=1,
        position="learned", context=1, tie_embeddings=True, residual=rr.PreNorm(),
    )  # fmt: skip
    # and 4 matrices of attention, 2 of the MLP, 2 norms, a position
    numbers = 4 + 6 + 2 + 1
    reduced = 4 * numbers + 16
    found = communication(model, Layout(processes=4))
    assert (found.all_reduce, found.total, found.sent) == (reduced, reduced, 1.5 * reduced)
    # shares are padded to 4 rows each: matrices and norms of one row, an embedding of three
    found = communication(model, Layout(processes=4, parallel="fsdp", precision="bfloat16"))
    matrices, rest = 6 * 4, 4 * (1 + 1 + 2 + 1)
    assert found.all_gather == 2 * 2 * matrices + 4 * rest
    assert found.reduce_scatter == 4 * (matrices + rest)
    assert found.all_reduce == 16 + 4 * 11
    moved = found.all_gather + found.reduce_scatter
    assert found.sent == 0.75 * (moved + 2 * found.all_reduce)


def shape(residual, **options):
    sizes = {"vocab_size": 46, "context": 128, "num_layers": 7, "num_heads": 4, "dim": 64}
    return rr.GPTConfig(**{**sizes, "residual": residual, **options})


@pytest.mark.parametrize("residual", METHODS[::2], ids=lambda residual: residual.label)
@pytest.mark.parametrize(
    ("parallel", "recomputes"),
    [
        ("ddp", False),
        pytest.param("ddp", True, marks=pytest.mark.slow),
        pytest.param("fsdp", True, marks=pytest.mark.slow),
    ],
)
def test_the_most_that_a_step_holds(workers, make_config, residual, parallel, recomputes):
    sizes = {"num_layers": 8, "dim": 32, "num_heads": 4, "context": 128}
    config = make_config(
        residual, model=sizes, parallel=parallel, batch_size=16, evaluation_windows=1,
        activation_checkpointing=recomputes,
    )  # fmt: skip
    _, held, layout = account(workers, config, 2, peak=True)
    plan = memory(config.model, layout)
    # what was there before the step is not in its peak; DDP's gradients are
    there = plan.weights + plan.optimizer + (plan.gradients if parallel == "ddp" else 0)
    # what operations need for themselves is in it
    assert plan.total - there == pytest.approx(held["peak"], rel=0.1)


def passed(policy, stream):
    """What a boundary passes of a stream: finished sources, and running sums."""
    if not isinstance(stream, RoutedStream):
        return [policy._read(stream)], []
    running = policy._phases.settled(stream.site, stream.running)
    return [source.value for source in stream.sources], list(running)


def rebuilt(policy, stream, sources, running):
    """The stream that a stage makes of what it was passed, and of parameters."""
    if not isinstance(stream, RoutedStream):
        return stream._replace(total=sources[0], pending=None)
    first, *rest = sources
    size = 1 + len(policy.bases)
    made = [policy._source(first)]
    for start in range(0, len(rest), size):
        made += policy._block_sources(tuple(rest[start : start + size]))
    begun = policy._phases.phase_of[stream.site].start
    fresh = RoutedStream(
        begun, tuple(made), Running(()), None, stream.backend, policy._rows(torch.float32)
    )
    return policy._look_ahead(fresh)._replace(site=stream.site, running=Running(tuple(running)))


def run_cut(model, tokens, stages, virtual):
    """Run a model chunk by chunk, each from what the one before it passes alone.

    Returns its readout, the leaves that were passed, and by boundary the tensors that had to be
    sent where a stage keeps nothing, what it was given, and also what it made.
    """
    policy, size = model.policy, len(model.layers) // (stages * virtual)
    given, known = [set() for _ in range(stages)], [set() for _ in range(stages)]
    stream = policy.start(model.embedding(tokens))
    given[0], known[0] = {0}, {0}
    leaves, sent = [], []
    for chunk in range(stages * virtual):
        stage = chunk % stages
        if chunk:
            sources, running = passed(policy, stream)
            names = set(range(len(sources)))
            is_sum = not isinstance(stream, RoutedStream)
            fresh = [names if is_sum else names - kept[stage] for kept in (given, known)]
            sent.append([len(running) + len(part) for part in (names, *fresh)])
            given[stage] |= names
            known[stage] |= names
            own = [[t.detach().requires_grad_() for t in part] for part in (sources, running)]
            leaves.append((own, [*sources, *running]))
            stream = rebuilt(policy, stream, *own)
        for index in range(chunk * size, (chunk + 1) * size):
            stream = model.layers[index](stream, policy, 2 * index, None, None, 0)
        known[stage] |= set(range(len(passed(policy, stream)[0])))
    return policy.finish(stream), leaves, list(zip(*sent, strict=True))


@pytest.mark.parametrize("residual", METHODS, ids=lambda residual: residual.label)
@pytest.mark.parametrize(
    ("layers", "blocks", "stages", "virtual"), [(8, 2, 2, 2), (6, 3, 3, 2), (12, 2, 2, 3)]
)
def test_a_cut_model_needs_what_the_plan_says(residual, layers, blocks, stages, virtual):
    if not isinstance(residual, rr.PreNorm):
        residual = dataclasses.replace(residual, num_blocks=blocks)
    sizes = {"num_layers": layers, "dim": 8, "num_heads": 1, "context": 6}
    config = shape(residual, position="learned", **sizes)
    torch.manual_seed(0)
    model = rr.GPT(config)
    for parameter in model.parameters():
        # at initial values many weights are equal
        torch.nn.init.normal_(parameter, std=0.5)
    tokens = torch.randint(46, (2, 6))
    stream = model.policy.start(model.embedding(tokens))
    for index, layer in enumerate(model.layers):
        stream = layer(stream, model.policy, 2 * index, None, None, 0)
    whole = model.policy.finish(stream)
    whole.square().sum().backward()
    wanted = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()

    cut, leaves, sent = run_cut(model, tokens, stages, virtual)
    plan = pipeline(config, stages, virtual)
    assert sent == [plan.naive, plan.cached, plan.least]
    torch.testing.assert_close(cut, whole, rtol=1e-5, atol=1e-5)
    # backwards, as many gradients come back, none of which is zero, and they are all it needs
    cut.square().sum().backward()
    for own, outside in reversed(leaves):
        inside = [leaf.grad for part in own for leaf in part]
        assert all(float(grad.abs().sum()) > 0 for grad in inside)
        torch.autograd.backward(outside, inside)
    for name, parameter in model.named_parameters():
        if name in wanted:
            torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("stages", "virtual"), [(2, 1), (4, 2), (3, 4)])
@pytest.mark.parametrize(("residual", "bases"), [(METHODS[1], 1), (METHODS[2], 3)])
def test_the_paper_s_formulas_where_chunks_are_blocks(stages, virtual, residual, bases):
    chunks = stages * virtual
    residual = dataclasses.replace(residual, num_blocks=chunks)
    found = pipeline(shape(residual, num_layers=2 * chunks), stages, virtual)
    # the embedding, which the paper does not count, goes once to every other stage
    once = chunks * (chunks - 1) // 2 * bases
    assert sum(found.naive) == once + chunks - 1
    later = (virtual - 1) * stages
    first = stages * (stages - 1) // 2 * bases + stages - 1
    assert sum(found.cached) == first + later * stages * bases
    assert sum(found.least) == first + later * (stages - 1) * bases
    # a transition: from O(C) to O(P)
    assert max(found.naive) == (chunks - 1) * bases + 1
    assert max(found.cached) <= stages * bases + 1


def test_what_plans_do_not_know():
    for residual, words in (
        (rr.FullAttnRes(), "got Full AttnRes"),
        (rr.BlockAttnRes(gated=True), "got gated Block AttnRes"),
        (rr.WAV(learn_bases=True), "not learned"),
        (rr.WAV(bases=("phase", "random")), "not learned"),
    ):
        for ask in (lambda m: memory(m, Layout()), lambda m: pipeline(m, 2)):
            with pytest.raises(UserError, match=words):
                ask(shape(residual, num_layers=8))
        # what is exchanged depends on the parameters alone
        assert communication(shape(residual), Layout(processes=2)).policy > 0
    with pytest.raises(UserError, match="2 stages of 2 chunks do not divide 7 layers"):
        pipeline(shape(rr.WAV()), 2, 2)
    with pytest.raises(UserError, match="stages must be a whole number of at least 2"):
        pipeline(shape(rr.WAV()), 1)
    with pytest.raises(UserError, match="windows must be divisible by accumulation, got 3 and 2"):
        Layout(windows=3, accumulation=2)


def methods(blocks):
    return rr.PreNorm(), rr.BlockAttnRes(num_blocks=blocks), rr.WAV(num_blocks=blocks)


def small_run():
    """201 M parameters on 8 processes."""
    models = [presets.paper(48, vocab_size=256, residual=residual) for residual in methods(4)]
    return models, Layout(processes=8, precision="bfloat16", windows=64)


def large_run():
    """7.9 billion parameters on 256 processes."""
    sizes = {"num_layers": 48, "dim": 4096, "num_heads": 32, "num_kv_heads": 8, "mlp_ratio": 2.0}
    models = [
        rr.GPTConfig(vocab_size=131_072, context=4096, residual=residual, **sizes)
        for residual in methods(8)
    ]
    layout = Layout(processes=256, parallel="fsdp", precision="bfloat16", windows=4)
    return models, layout


def recomputing(layout):
    return dataclasses.replace(layout, activation_checkpointing=True)


def rows_of_channels():
    """Bytes that are kept, by token, layer and channel."""
    for precision in ("float32", "bfloat16"):
        for model in small_run()[0]:
            layout = Layout(precision=precision, windows=1)
            each = model.context * model.num_layers * model.dim
            whole, less = memory(model, layout), memory(model, recomputing(layout))
            cells = (whole.streams, whole.sublayers, less.streams)
            numbers = " | ".join(f"{cell / each:.1f}" for cell in cells)
            yield f"| {model.residual.label} | {precision} | {numbers} |"


def rows_of_run(models, layout):
    """What a process exchanges and holds; MB are 10^6 bytes, GB 10^9."""
    for model in models:
        moved = communication(model, layout)
        whole, less = memory(model, layout), memory(model, recomputing(layout))
        state = whole.weights + whole.gradients + whole.optimizer
        giga = (state, whole.gathered + whole.casts, whole.streams, whole.sublayers + whole.ends)
        cells = (
            f"{sum(p.numel() for p in activations.built(model).parameters()) / 1e6:,.1f}",
            f"{moved.total / 1e6:,.0f}",
            f"{100 * moved.policy / moved.total:.3f} %",
            *(f"{part / 1e9:.2f}" for part in (*giga, whole.total, less.streams, less.total)),
        )
        yield f"| {model.residual.label} | {' | '.join(cells)} |"


def rows_of_pipeline():
    """Tensors of a token over all boundaries, and the most over one."""
    for stages, virtual in ((8, 1), (8, 2), (4, 4), (4, 6)):
        for model in large_run()[0]:
            found = pipeline(model, stages, virtual)
            ways = (found.naive, found.cached, found.least)
            cells = [f"{sum(way)}, {max(way)}" for way in ways]
            yield f"| {stages} x {virtual} | {model.residual.label} | {' | '.join(cells)} |"


def sentence():
    """What a step of the large run takes."""
    models, layout = large_run()
    model = models[-1]
    sent = communication(model, layout).sent
    work = flops_per_token(model) * layout.windows * model.context
    return (
        f"sends {sent / 1e9:.1f} GB from each process and takes {work / 1e12:.0f} TFLOP there "
        f"(`flops_per_token`): at 50 GB/s and 400 TFLOP/s {sent / 50e9:.1f} s and "
        f"{work / 400e12:.1f} s"
    )


TABLES = {
    "channels": rows_of_channels,
    "small run": lambda: rows_of_run(*small_run()),
    "large run": lambda: rows_of_run(*large_run()),
    "pipeline": rows_of_pipeline,
}


@pytest.mark.parametrize("name", TABLES)
def test_the_tables_of_the_document_are_the_plan_s(name):
    lines = SCALING.read_text().splitlines()
    rows = list(TABLES[name]())
    first = lines.index(rows[0])
    assert lines[first : first + len(rows)] == rows
    assert not lines[first + len(rows)].startswith("|")


def test_the_document_s_sentences_and_code():
    text = SCALING.read_text()
    assert sentence() in " ".join(text.split())
    (code,) = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    exec(compile(code, "scaling.md", "exec"), {})
