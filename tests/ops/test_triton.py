import math
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from resroute.config import UserError

on_gpu = torch.cuda.is_available()
with pytest.MonkeyPatch.context() as environment:
    # read as the kernels are imported (and triton, see tests/conftest.py); a GPU compiles them
    if not on_gpu and "TRITON_INTERPRET" not in os.environ:
        environment.setenv("TRITON_INTERPRET", "1")
    triton = pytest.importorskip("triton")
    from resroute.ops.triton_block import block_read_backward, block_read_forward
    from resroute.ops.triton_site import site_backward, site_forward

DEVICE = "cuda" if on_gpu else "cpu"
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
WAV_FIRST = ((1.0, 1.0), (1.0, -1.0), (1.0, 1.0))
WAV_SECOND = ((1.0, 1.0, 0.0), (1.0, -1.0, 0.0), (-1.0, -1.0, 2.0))
needs_gpu = pytest.mark.skipif(not on_gpu, reason="needs a CUDA GPU")


@pytest.fixture(autouse=True)
def unwritten_is_nan(monkeypatch):
    """An output that no kernel writes must not pass by luck."""
    if not on_gpu and isinstance(triton.language.sum, triton.JITFunction):
        pytest.skip("triton was imported before its interpreter was asked for")
    if not on_gpu:
        monkeypatch.setenv("TRITON_INTERPRET", "1")

    def spoilt(make):
        def made(*args, **kwargs):
            tensor = make(*args, **kwargs)
            return tensor.fill_(math.nan if tensor.is_floating_point() else -1)

        return made

    monkeypatch.setattr(torch, "empty", spoilt(torch.empty))
    monkeypatch.setattr(torch, "empty_like", spoilt(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", spoilt(torch.Tensor.new_empty))


def random(*shape, dtype=F32, scale=1.0, seed=0):
    generator = torch.Generator().manual_seed(1000 * seed + sum(shape))
    return (scale * torch.randn(*shape, generator=generator)).to(dtype).to(DEVICE)


def exact(tensor):
    """A float64 leaf of the same numbers."""
    return None if tensor is None else tensor.double().detach().requires_grad_()


def error(got, expected):
    """Largest difference, relative to the largest number."""
    assert got.shape == expected.shape
    if not got.numel():
        return 0.0
    largest = expected.abs().max().item()
    return (got.double() - expected).abs().max().item() / max(largest, 1e-6)


def rounding(dtype):
    # of float32 sums, or of a result to a shorter type
    return {F32: 3e-6, F16: 6e-4, BF16: 4.5e-3 if on_gpu else 8.5e-3}[dtype]


def cast(wide, dtype):
    """What a kernel stores: the interpreter cuts bfloat16 off, where GPUs round to nearest."""
    if dtype == BF16 and not on_gpu:
        return (wide.view(torch.int32) & -65536).view(F32).to(dtype)
    return wide.to(dtype)


class Case(NamedTuple):
    coefficients: tuple[tuple[float, ...], ...] = WAV_SECOND
    rows: tuple[int, ...] = (3,)
    dim: int = 33
    target: int = 0
    streams: int | None = None
    prior: torch.dtype | None = F32
    bias: bool = True
    gain: torch.dtype | None = F32
    matching: int = 1
    rho_max: float = 1.1
    stream: torch.dtype = F32
    update: torch.dtype = F32
    read: torch.dtype = F32
    silent: tuple[int, ...] = ()
    """Streams whose later consumers send no gradient."""
    wants: tuple[bool, bool, bool, bool] = (True, True, True, True)

    @property
    def count(self):
        return len(self.coefficients[0]) if self.coefficients else self.streams


CASES = {
    "prenorm": Case((), streams=1, prior=None),
    "prenorm bf16": Case((), (7,), 48, streams=1, prior=None, stream=BF16, update=BF16, read=BF16),
    "prior alone": Case((), (2, 2), 5, streams=0, target=-1),
    "prior alone, update": Case((), (3,), 100, streams=1, gain=None, update=BF16),
    "state": Case(((1.0,),), (1,), 5, update=F16, stream=BF16, prior=BF16),
    "state, no prior": Case(((1.0,),), (7,), 48, prior=None, gain=None),
    "first half": Case(WAV_FIRST, (7,), 100, target=1, prior=BF16, update=BF16),
    "second half": Case(WAV_SECOND, (2, 3), 48, target=1, silent=(2,), read=BF16),
    "second half, bf16": Case(
        WAV_SECOND, (7,), 33, stream=BF16, update=BF16, prior=BF16, gain=BF16, read=BF16
    ),
    "fp16": Case(WAV_SECOND, (3,), 33, stream=F16, update=F16, prior=F16, read=F16, gain=None),
    "third stream": Case(((1.0, 1.0, 1.0), (1.0, 0.5, -2.0)), (3,), 33, target=2, bias=False),
    "attached": Case(WAV_SECOND, (7,), 33, matching=2, gain=None),
    "attached, no limit": Case(WAV_FIRST, (3,), 48, matching=2, rho_max=math.inf, prior=None),
    "off": Case(WAV_SECOND, (7,), 100, matching=0, target=-1, silent=(0, 1, 2)),
    "one wide": Case(WAV_SECOND, (3,), 1, gain=None),
    "frozen": Case(WAV_SECOND, (17, 3), 100, wants=(False, False, False, False)),
    "many rows": Case(WAV_SECOND, (17, 3), 100, silent=(1,)),
}


def site_read(case, streams, prior, lse, key, bias, gain):
    """The formula, in the dtype of its tensors."""
    bases = [sum(a * z for a, z in zip(row, streams, strict=True)) for row in case.coefficients]
    if bases:
        inverse = [(b.square().mean(-1) + 1e-3).rsqrt() for b in bases]
        logits = [r * (b @ key) for r, b in zip(inverse, bases, strict=True)]
        if bias is not None:
            logits[1:] = [x + b for x, b in zip(logits[1:], bias, strict=True)]
        scales = [torch.ones_like(r) for r in inverse]
        if case.matching:
            scales[1:] = [(r / inverse[0]).clamp(max=case.rho_max) for r in inverse[1:]]
        if case.matching == 1:
            scales = [s.detach() for s in scales]
        parts = [s.unsqueeze(-1) * b for s, b in zip(scales, bases, strict=True)]
        if prior is not None:
            logits, parts = [*logits, lse], [*parts, prior]
        weights = torch.stack(logits).softmax(0).unsqueeze(-1)
        read = sum(p * part for p, part in zip(weights, parts, strict=True))
    else:
        read = streams[0] if prior is None else prior
    if gain is not None:
        read = read * (read.square().mean(-1, keepdim=True) + 1e-2).rsqrt() * gain
    return read


def site_inputs(case):
    shape = (*case.rows, case.dim)
    streams = [random(*shape, dtype=case.stream, scale=1 + i, seed=i) for i in range(case.count)]
    update = random(*shape, dtype=case.update, seed=5) if case.target >= 0 else None
    bases = len(case.coefficients)
    parameters = [
        None if case.prior is None else random(*shape, dtype=case.prior, seed=6),
        None if case.prior is None else random(*case.rows, seed=7),
        random(case.dim, seed=8, scale=case.dim**-0.5) if bases else None,
        random(bases - 1, seed=9) if case.bias and bases else None,
        None if case.gain is None else random(case.dim, dtype=case.gain, seed=10),
    ]
    return streams, update, parameters


def run_site(case):
    """Everything that the two functions return: read, new stream, gradients; and the inputs."""
    streams, update, parameters = site_inputs(case)
    form = (
        [a for row in case.coefficients for a in row],
        len(case.coefficients),
        case.target,
        1e-3,
        case.matching,
        case.rho_max,
        1e-2,
    )
    read, added, saved = site_forward(update, streams, *parameters, *form, case.read)
    after = [added if i == case.target else s for i, s in enumerate(streams)]
    grad_read = random(*case.rows, case.dim, dtype=case.read, seed=11)
    arriving = [
        None if i in case.silent else random(*s.shape, dtype=s.dtype, seed=12 + i)
        for i, s in enumerate(streams)
    ]
    update_dtype = None if update is None else update.dtype
    grads = site_backward(
        grad_read, arriving, update_dtype, after, *parameters, saved, *form, case.wants
    )
    return read, added, grads, after, grad_read, arriving, saved


@pytest.mark.parametrize("name", CASES)
def test_a_site_and_its_gradients_follow_the_formula(name):
    case = CASES[name]
    streams, update, parameters = site_inputs(case)
    read, added, grads, after, grad_read, arriving, saved = run_site(case)
    assert not saved.isnan().any()
    if update is None:
        assert added.numel() == 0
    else:
        sum_ = streams[case.target].float() + update.float()
        assert torch.equal(added, cast(sum_, case.stream))
    leaves = [exact(t) for t in (*after, *parameters)]
    expected = site_read(case, leaves[: case.count], *leaves[case.count :])
    assert read.dtype == case.read
    assert error(read, expected) < rounding(case.read)
    total = (expected * grad_read.double()).sum()
    for leaf, gradient in zip(leaves, arriving, strict=False):
        if gradient is not None:
            total = total + (leaf * gradient.double()).sum()
    there = [leaf for leaf in leaves if leaf is not None]
    right = torch.autograd.grad(total, there, materialize_grads=True)
    of = {id(leaf): grad for leaf, grad in zip(there, right, strict=True)}
    prior, lse, key, bias, gain = leaves[case.count :]
    wants_prior, wants_key, wants_bias, wants_gain = case.wants
    wanted = {
        "update": (grads[0], leaves[case.target], update is not None),
        "prior": (grads[1], prior, wants_prior),
        "lse": (grads[2], lse, True),
        "key": (grads[3], key, wants_key),
        "bias": (grads[4], bias, wants_bias),
        "gain": (grads[5], gain, wants_gain),
    } | {f"stream {i}": (g, leaves[i], True) for i, g in enumerate(grads[6:])}
    assert len(wanted) == 6 + case.count
    dtypes = [case.update, case.prior, F32, F32, F32, F32, *[case.stream] * case.count]
    for (label, (got, leaf, is_wanted)), dtype in zip(wanted.items(), dtypes, strict=True):
        if leaf is None or not is_wanted:
            assert got.numel() == 0, label
        else:
            assert got.dtype == dtype, label
            assert error(got, of[id(leaf)]) < 2 * rounding(dtype), label


def test_a_site_without_a_gradient_at_its_read_passes_on():
    streams, update, parameters = site_inputs(CASES["second half"])
    _, added, saved = site_forward(
        update, streams, *parameters, sum(WAV_SECOND, ()), 3, 1, 1e-6, 1, 2.0, 1e-6, F32
    )
    arriving = [None, random(*added.shape, seed=3), random(*added.shape, seed=4)]
    grads = site_backward(
        None, arriving, BF16, [streams[0], added, streams[2]], *parameters, saved,
        sum(WAV_SECOND, ()), 3, 1, 1e-6, 1, 2.0, 1e-6, (True,) * 4,
    )  # fmt: skip
    assert torch.equal(grads[0], arriving[1].bfloat16())
    assert all(grad.numel() == 0 for grad in grads[1:6])
    assert not grads[6].any()
    assert torch.equal(grads[7], arriving[1])
    assert torch.equal(grads[8], arriving[2])
    assert len({t.data_ptr() for t in (*arriving[1:], *grads[6:])}) == 5


class Read(NamedTuple):
    sources: int
    queries: int
    rows: tuple[int, ...] = (3,)
    dim: int = 33
    dtypes: tuple[torch.dtype, ...] = (F32,)
    """Of the values, in turn."""
    read: torch.dtype = F32
    prior: torch.dtype | None = None
    bias: bool = True
    scaled: bool = True
    silent: bool = False
    """Some reads, log-sum-exps and values get no gradient."""
    wants: tuple[bool, bool, bool, bool] = (True, True, True, True)


READS = {
    "one source": Read(1, 1, (1,), 5, bias=False, scaled=False),
    "one wide": Read(2, 3, (3,), 1),
    "mixed": Read(5, 3, (2, 2), 48, (F32, BF16, F16), read=BF16, silent=True),
    "bf16, prior": Read(2, 3, (7,), 100, (BF16,), read=BF16, prior=BF16, silent=True),
    "fp16": Read(5, 1, (3,), 33, (F16,), read=F16),
    "prior": Read(5, 3, (1,), 33, prior=F32, scaled=False),
    "many sources": Read(33, 1, (2,), 33, (BF16, F32)),
    "many queries": Read(2, 11, (2,), 5, wants=(True, True, False, False), prior=F32),
    "frozen": Read(5, 3, (3,), 48, bias=False, wants=(False, False, False, False)),
}


def read_inputs(case):
    shape = (*case.rows, case.dim)
    values = [
        random(*shape, dtype=case.dtypes[n % len(case.dtypes)], scale=1 + n % 3, seed=n)
        for n in range(case.sources)
    ]
    scales = [
        random(*case.rows, seed=60 + n).abs() if case.scaled and n % 2 else None
        for n in range(case.sources)
    ]
    keys = random(case.queries, case.dim, scale=case.dim**-0.5, seed=90)
    biases = random(case.queries, case.sources, seed=91) if case.bias else None
    priors, prior_lses = [], []
    if case.prior is not None:
        priors = [random(*shape, dtype=case.prior, seed=92 + j) for j in range(case.queries)]
        prior_lses = [random(*case.rows, seed=120 + j) for j in range(case.queries)]
    return values, scales, keys, biases, priors, prior_lses


def inverse_rms(value):
    return (value.square().mean(-1) + 1e-3).rsqrt()


def block_reads(values, scales, keys, biases, priors, prior_lses):
    reads, lses = [], []
    for j, key in enumerate(keys):
        logits = [inverse_rms(v) * (v @ key) for v in values]
        if biases is not None:
            logits = [x + b for x, b in zip(logits, biases[j], strict=True)]
        parts = [
            v if s is None else v * s.unsqueeze(-1) for v, s in zip(values, scales, strict=True)
        ]
        if priors:
            logits, parts = [*logits, prior_lses[j]], [*parts, priors[j]]
        stacked = torch.stack(logits)
        weights = stacked.softmax(0).unsqueeze(-1)
        reads.append(sum(p * part for p, part in zip(weights, parts, strict=True)))
        lses.append(stacked.logsumexp(0))
    return reads, lses


def run_read(case):
    values, scales, keys, biases, priors, prior_lses = read_inputs(case)
    inverse = [inverse_rms(v.double()).float() for v in values]
    m = case.queries
    out = block_read_forward(values, inverse, scales, keys, biases, priors, prior_lses, case.read)
    reads, lses, logits = out[:m], out[m : 2 * m], out[2 * m]

    def unless(skipped, tensor):
        return None if case.silent and skipped else tensor

    arriving = (
        [
            unless(j == 1, random(*t.shape, dtype=t.dtype, seed=200 + j))
            for j, t in enumerate(reads)
        ],
        [unless(j != 1, random(*t.shape, seed=220 + j)) for j, t in enumerate(lses)],
        [
            unless(n == 0, random(*v.shape, dtype=v.dtype, seed=240 + n))
            for n, v in enumerate(values)
        ],
    )
    grads = block_read_backward(
        *arriving, values, inverse, scales, keys, biases, priors, prior_lses, lses, logits,
        case.wants,
    )  # fmt: skip
    return reads, lses, grads, arriving


@pytest.mark.parametrize("name", READS)
def test_a_block_read_and_its_gradients_follow_the_formula(name):
    case = READS[name]
    values, scales, keys, biases, priors, prior_lses = read_inputs(case)
    reads, lses, grads, arriving = run_read(case)
    leaves = [[exact(t) for t in part] for part in (values, scales, priors, prior_lses)]
    keys_leaf, biases_leaf = exact(keys), exact(biases)
    expected = block_reads(leaves[0], leaves[1], keys_leaf, biases_leaf, leaves[2], leaves[3])
    for got, right in zip(reads, expected[0], strict=True):
        assert got.dtype == case.read
        assert error(got, right) < rounding(case.read)
    for got, right in zip(lses, expected[1], strict=True):
        assert error(got, right) < rounding(F32)
    outputs = [*expected[0], *expected[1], *leaves[0]]
    total = sum(
        (out * g.double()).sum()
        for out, g in zip(outputs, (g for part in arriving for g in part), strict=True)
        if g is not None
    )
    flat = [keys_leaf, biases_leaf, *(leaf for part in leaves for leaf in part)]
    there = [leaf for leaf in flat if leaf is not None]
    right = torch.autograd.grad(total, there, materialize_grads=True)
    of = {id(leaf): grad for leaf, grad in zip(there, right, strict=True)}
    wants_keys, wants_biases, wants_scales, wants_priors = case.wants
    wanted = [
        wants_keys,
        wants_biases and case.bias,
        *[True] * case.sources,
        *[wants_scales] * case.sources,
        *[wants_priors] * 2 * len(priors),
    ]
    for got, leaf, is_wanted in zip(grads, flat, wanted, strict=True):
        if not is_wanted or leaf is None:
            continue
        assert error(got, of[id(leaf)]) < 2 * rounding(got.dtype)
    assert [g.dtype for g in grads[2 : 2 + case.sources]] == [v.dtype for v in values]
    if not any(case.wants):
        assert not grads[0].numel()
        assert not grads[1].numel()
    results = [t for t in (*reads, *lses, *grads) if t.numel()]
    assert len({t.untyped_storage().data_ptr() for t in results}) == len(results)


def test_the_same_call_gives_the_same_bits():
    # programs run one after the other where they are interpreted
    site = CASES["many rows" if on_gpu else "second half"]
    for run, case in ((run_site, site), (run_read, READS["mixed"])):
        first, second = run(case), run(case)
        for a, b in zip(first[2], second[2], strict=True):
            assert torch.equal(a, b)


def test_no_rows_give_empty_results_and_zero_gradients():
    _, _, grads, *_ = run_site(CASES["second half"]._replace(rows=(0,)))
    assert grads[3].shape == (48,)
    assert not grads[3].any()
    _, _, grads, _ = run_read(READS["mixed"]._replace(rows=(0,)))
    assert grads[0].shape == (3, 48)
    assert not grads[0].any()


def test_what_the_kernels_cannot_serve_is_said():
    wide = random(1, 8193)
    with pytest.raises(UserError, match="widths up to 8192, got 8193"):
        site_forward(None, [wide], *[None] * 5, [], 0, -1, 1e-6, 0, 2.0, 1e-6, F32)
    with pytest.raises(UserError, match="widths up to 8192, got 8193"):
        block_read_forward([wide], [random(1)], [None], wide, None, [], [], F32)
    double = random(1, 4, dtype=torch.float64)
    with pytest.raises(UserError, match=r"got torch\.float64"):
        site_forward(None, [double], *[None] * 5, [], 0, -1, 1e-6, 0, 2.0, 1e-6, F32)
    row = random(1, 4)
    with pytest.raises(UserError, match="up to 3 streams and bases, got 4 and 1"):
        site_forward(None, [row] * 4, *[None] * 5, [1.0] * 4, 1, -1, 1e-6, 0, 2.0, 1e-6, F32)
    for target, words in ((1, "target 1 is no stream"), (-2, "target -2"), (-1, "has no update")):
        with pytest.raises(UserError, match=words):
            site_forward(row, [row], *[None] * 5, [], 0, target, 1e-6, 0, 2.0, 1e-6, F32)
    with pytest.raises(UserError, match="target 0 needs an update"):
        site_forward(None, [row], *[None] * 5, [], 0, 0, 1e-6, 0, 2.0, 1e-6, F32)


COMPILE = """
import runpy, sys
import torch, triton
from triton.backends.compiler import GPUTarget

class Driver:
    def get_current_target(self): return GPUTarget("cuda", int(sys.argv[2]), 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0
    def get_active_torch_device(self): return torch.device("cpu")

def compile_only(kernel, grid):
    def launch(*args, **kwargs):
        compiled.add(kernel.warmup(*args, grid=grid, **kwargs).hash)
    return launch

compiled = set()
triton.runtime.driver.set_active(Driver())
triton.KernelInterface.__getitem__ = compile_only
tests = runpy.run_path(sys.argv[1])
for name in ("first half", "attached"):
    tests["run_site"](tests["CASES"][name])
tests["run_read"](tests["READS"]["bf16, prior"])
print(len(compiled))
"""


@pytest.mark.slow
@pytest.mark.skipif(on_gpu, reason="the other tests compile")
@pytest.mark.parametrize("capability", ["80", "90"])
def test_kernels_compile_for_gpus_that_are_not_here(capability, tmp_path):
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", COMPILE, str(Path(__file__)), capability]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # two for each site, and four for a read
    assert int(done.stdout) == 8


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dim", [1000, 4096, 7168])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_real_widths_on_a_gpu(dim, dtype, monkeypatch):
    shape = {"rows": (2, 1200), "dim": dim}
    types = {"stream": F32, "update": dtype, "prior": dtype, "read": dtype}
    for form in (WAV_FIRST, WAV_SECOND):
        case = Case(form, gain=dtype, **shape, **types)
        monkeypatch.setitem(CASES, "real", case)
        test_a_site_and_its_gradients_follow_the_formula("real")
    shape["rows"] = (2, 150)
    for sources, queries in ((33, 1), (97, 1), (10, 24)):
        case = Read(sources, queries, dtypes=(F32, dtype), read=dtype, **shape)
        monkeypatch.setitem(READS, "real", case)
        test_a_block_read_and_its_gradients_follow_the_formula("real")
