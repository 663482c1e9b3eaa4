"""Whole policies and models on a CUDA GPU: the oracle's cases, a model's step, CUDA graphs."""

import json
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch

import resroute as rr
from resroute import ops
from resroute.bench import Settings
from resroute.bench.check import Truth
from resroute.bench.workload import GPTStep
from resroute.testing import Stack, random_stack, randomise

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

DEVICE = "cuda"
F32, BF16 = torch.float32, torch.bfloat16
PARITY = Path(__file__).parents[1] / "residual"
CASES = runpy.run_path(str(PARITY / "test_parity.py"))
METHODS = {
    "pre_norm": rr.PreNorm(),
    "block": rr.BlockAttnRes(num_blocks=2),
    "wav": rr.WAV(num_blocks=2),
    "wav_attached": rr.WAV(num_blocks=2, matching="attached", details_in_readout=True),
    "wav_learned": rr.WAV(num_blocks=2, learn_bases=True),
    "full": rr.FullAttnRes(),
    "delta": rr.DeltaAttnRes(num_blocks=2, gated=True),
}

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def triton():
    return pytest.importorskip("triton")


def test_triton_is_what_serves():
    with ops.backend("auto"):
        for dtype in (F32, BF16, torch.float16):
            assert ops.choose(torch.device(DEVICE), dtype, 64).backend == "triton"
        assert ops.choose(torch.device(DEVICE), torch.float64, 64).backend == "lean"


@pytest.mark.parametrize("backend", ["triton", "lean"])
# GPUs approximate exp and rsqrt, to 2^-22; seven layers enlarge that. bfloat16 as on the CPU
@pytest.mark.parametrize(
    ("dtype", "bound"), [(F32, 3e-5), (BF16, 0.1)], ids=["float32", "bfloat16"]
)
@pytest.mark.parametrize(
    "path", sorted((PARITY / "parity").glob("*.npz")), ids=lambda path: path.stem
)
def test_case_of_the_oracle(path, dtype, bound, backend):
    file = np.load(path)
    case = json.loads(bytes(file["case"]))
    options = {name: case[name] for name in case if name not in CASES["NOT_OPTIONS"]}
    policy = CASES["CONFIGS"][case["method"]](**options).build(case["num_layers"], case["dim"])
    arrays = {name: torch.from_numpy(file[name]) for name in file if name != "case"}
    inputs = {
        name.removeprefix("in."): array.to(DEVICE, dtype)
        for name, array in arrays.items()
        if name.startswith("in.")
    }
    leaves = {name: inputs.pop(name).requires_grad_() for name in ("embedding", "weights")}
    policy.to(DEVICE, dtype).load_state_dict(inputs)
    with ops.backend(backend):
        reads, readout = Stack(**leaves).run(policy)
        (readout * arrays["probe"].to(DEVICE, dtype)).sum().backward()
    found = {"out.reads": reads, "out.readout": readout}
    for name, leaf in (*leaves.items(), *policy.named_parameters()):
        found[f"grad.{name}"] = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    expected = {k: v for k, v in arrays.items() if k.startswith(("out.", "grad."))}
    assert set(found) == set(expected)
    for name, value in expected.items():
        error = (found[name].detach().cpu().double() - value).norm() / value.norm().clamp(min=1e-3)
        allowed = bound * (1 + name.startswith("grad"))
        assert error <= allowed, f"{name}: relative error {error:.1e}"


@pytest.mark.parametrize("name", METHODS)
def test_a_models_step_is_the_references(name):
    """Loss and every gradient, in float32 and under bfloat16 autocast; each check raises."""
    settings = Settings(
        layers=4, dim=64, batch=2, context=32, precision="bfloat16", device=DEVICE, compile=False
    )
    truth = Truth(settings, METHODS[name])
    assert truth.require_formula("triton") < 2e-4
    truth.require_step(GPTStep(settings, METHODS[name], "triton", compiled=False))


@pytest.mark.parametrize("name", ["block", "wav", "full"])
def test_a_captured_step_replays_on_new_numbers(name):
    policy = METHODS[name].build(4, 32)
    randomise(policy)
    policy.to(DEVICE)
    stack, other = (random_stack(8, 32, seed=seed, dtype=F32) for seed in (0, 1))
    embedding, weights = (
        t.detach().to(DEVICE).requires_grad_() for t in (stack.embedding, stack.weights)
    )

    def step():
        readout = Stack(embedding=embedding, weights=weights).run(policy)[1]
        leaves = (embedding, weights, *policy.parameters())
        grads = torch.autograd.grad(
            readout.square().sum(), leaves, allow_unused=True, materialize_grads=True
        )
        return readout.detach(), *grads

    with ops.backend("triton"):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            # kernels are compiled before anything is captured
            for _ in range(2):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        with torch.no_grad():
            embedding.copy_(other.embedding)
        graph.replay()
        found = [tensor.clone() for tensor in captured]
        expected = step()
    for a, b in zip(found, expected, strict=True):
        # products of matrices may be split in another way under capture
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
