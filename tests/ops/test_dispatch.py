"""The dispatcher takes the fastest backend that can serve, says so, never falls back silently."""

import logging

import pytest
import torch

import resroute as rr
from resroute import ops
from resroute.ops import dispatch
from resroute.testing import random_stack, randomise

CPU = torch.device("cpu")


def choice(device="cpu", dtype=torch.float32, dim=8, num_bases=3):
    return ops.choose(torch.device(device), dtype, dim, num_bases)


@pytest.fixture(autouse=True)
def automatic():
    with ops.backend("auto"):
        yield


@pytest.fixture
def compiler(monkeypatch):
    monkeypatch.setattr(dispatch, "native_available", lambda: True)


@pytest.fixture
def no_compiler(monkeypatch):
    monkeypatch.setattr(dispatch, "native_available", lambda: False)
    monkeypatch.setattr(dispatch, "_SAID", set())


@pytest.mark.usefixtures("compiler")
def test_automatic_choices():
    assert choice() == ("native", "device cpu")
    assert choice(dtype=torch.bfloat16).backend == "native"
    assert choice(dtype=torch.float64) == (
        "lean",
        "it computes float32 and bfloat16, got float64",
    )
    assert choice(num_bases=4).backend == "lean"
    assert choice("meta") == ("lean", "device meta")
    assert str(choice()) == "native (device cpu)"


def test_on_a_gpu_triton_serves_what_it_can(monkeypatch):
    monkeypatch.setattr(dispatch.importlib.util, "find_spec", lambda name: object())
    assert choice("cuda") == ("triton", "device cuda")
    assert choice("cuda", torch.float16).backend == "triton"
    assert choice("cuda", dim=8193) == ("lean", "it takes widths up to 8192, got 8193")
    assert choice("cuda", torch.float64).backend == "lean"
    assert choice("cuda", num_bases=4).backend == "lean"


@pytest.mark.usefixtures("no_compiler")
def test_a_missing_compiler_is_said_once(caplog):
    with caplog.at_level(logging.WARNING, logger="resroute"):
        assert choice().backend == "lean"
        assert choice().backend == "lean"
    assert [record.message for record in caplog.records] == [
        "no C++ compiler (with ninja) was found: depth routing runs in plain torch"
    ]


@pytest.mark.usefixtures("no_compiler")
def test_what_is_forced_and_cannot_serve_is_refused():
    policy = rr.WAV(num_blocks=2).build(4, 8)
    with (
        ops.backend("native"),
        pytest.raises(rr.UserError, match=r"no C\+\+ compiler .* use 'auto'"),
    ):
        policy.start(torch.zeros(2, 8))


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    ("name", "dtype", "bases", "words"),
    [
        ("native", torch.float64, ("phase",), "it computes float32 and bfloat16, got float64"),
        ("native", torch.float32, ("phase", "random", "duplicate"), "3 sources of a running"),
        ("triton", torch.float32, ("phase",), "it runs on CUDA GPUs, got device cpu"),
    ],
)
def test_a_forced_backend_names_what_it_cannot_do(monkeypatch, name, dtype, bases, words):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    policy = rr.WAV(num_blocks=2, bases=bases).build(4, 8)
    with ops.backend(name), pytest.raises(ValueError, match=words):
        policy.start(torch.zeros(2, 8, dtype=dtype))


def test_an_unknown_backend_is_refused():
    with pytest.raises(rr.UserError, match=r"unknown backend 'leen' \(did you mean 'lean'\?\)"):
        ops.set_backend("leen")
    with ops.backend("lean"):
        assert choice().backend == "lean"
        with ops.backend("reference"):
            assert choice() == ("reference", "asked for")
        assert choice().backend == "lean"


@pytest.mark.parametrize("backend", ["reference", "lean", "native"])
def test_the_backend_that_was_chosen_is_the_one_that_runs(monkeypatch, backend):
    """Equal results would also come from a silent fall back."""
    if backend == "native" and not ops.native_available():
        pytest.skip("no C++ compiler")
    calls = []
    loaded = {}
    for name in ("lean", "native"):
        if name == "native" and not ops.native_available():
            continue
        operators = ops.operators(name)
        loaded[name] = operators._replace(
            site_forward=lambda *a, n=name, f=operators.site_forward: calls.append(n) or f(*a),
            block_read_forward=lambda *a, n=name, f=operators.block_read_forward: (
                calls.append(n) or f(*a)
            ),
        )
    monkeypatch.setattr(dispatch, "_LOADED", loaded)
    policy = rr.WAV(num_blocks=2).build(4, 8)
    randomise(policy)
    stack = random_stack(8, 8, dtype=torch.float32)
    with ops.backend(backend):
        stack.run(policy)
    # 8 reads, and a block read for each of the two blocks and the readout
    assert calls == ([] if backend == "reference" else [backend] * 11)
