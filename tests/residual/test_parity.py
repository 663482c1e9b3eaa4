"""Every method against cases computed by an independent float64 oracle."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from resroute import ops
from resroute.residual import (
    WAV,
    BlockAttnRes,
    DeltaAttnRes,
    FullAttnRes,
    LayerScale,
    PreNorm,
    ReZero,
)
from resroute.testing import Stack

OWN = Path(__file__).parent / "parity"
ALL = Path(os.environ["RESROUTE_PARITY"]) if "RESROUTE_PARITY" in os.environ else None
CONFIGS = {
    "pre_norm": PreNorm,
    "re_zero": ReZero,
    "layer_scale": LayerScale,
    "full_attn_res": FullAttnRes,
    "block_attn_res": BlockAttnRes,
    "delta_attn_res": DeltaAttnRes,
    "delta_block_attn_res": DeltaAttnRes,
    "wav": WAV,
}
# what describes the case and is not an option of its method
NOT_OPTIONS = {"method", "num_layers", "dim", "tokens", "weight_scale"}


def compute(path: Path, dtype: torch.dtype = torch.float64):
    """Reads, readout and every gradient of a case, and the oracle's."""
    file = np.load(path)
    case = json.loads(bytes(file["case"]))
    options = {name: value for name, value in case.items() if name not in NOT_OPTIONS}
    policy = CONFIGS[case["method"]](**options).build(case["num_layers"], case["dim"]).to(dtype)
    tensors = {k: torch.from_numpy(file[k]) for k in file if k != "case"}
    inputs = {k.removeprefix("in."): v.to(dtype) for k, v in tensors.items() if k[:3] == "in."}
    stack = Stack(
        embedding=inputs.pop("embedding").requires_grad_(),
        weights=inputs.pop("weights").requires_grad_(),
    )
    # strict: the parameters are the oracle's by name and shape
    policy.load_state_dict(inputs)
    reads, readout = stack.run(policy)
    (readout * tensors["probe"].to(dtype)).sum().backward()

    leaves = {"embedding": stack.embedding, "weights": stack.weights}
    leaves.update(policy.named_parameters())
    found = {"out.reads": reads.detach(), "out.readout": readout.detach()}
    for name, leaf in leaves.items():
        # a parameter that no read depends on has no gradient, the oracle's zero
        found[f"grad.{name}"] = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    expected = {k: v for k, v in tensors.items() if k.startswith(("out.", "grad."))}
    assert set(found) == set(expected)
    return found, expected


def check(path: Path, backend: str) -> None:
    with ops.backend(backend):
        found, expected = compute(path)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-10, rtol=0, msg=name)


def check_single(path: Path, backend: str, dtype: torch.dtype, bound: float) -> None:
    """In a narrower type: relative errors of whole tensors, gradients at twice the bound.

    Backends may not be worse than the type: the plain formula itself errs by 1.2e-5 (float32) and
    by 0.15 (bfloat16, of which the sublayers make most) in the worst gradient of all cases.
    """
    if backend == "native" and not ops.native_available():
        pytest.skip("no C++ compiler")
    with ops.backend(backend):
        found, expected = compute(path, dtype)
    for name, value in expected.items():
        error = (found[name].double() - value).norm() / value.norm().clamp(min=1e-3)
        allowed = bound * (1 + name.startswith("grad"))
        assert error <= allowed, f"{name}: relative error {error:.1e}"


@pytest.mark.parametrize("backend", ["reference", "lean"])
@pytest.mark.parametrize("path", sorted(OWN.glob("*.npz")), ids=lambda path: path.stem)
def test_case_of_this_repository(path, backend):
    check(path, backend)


@pytest.mark.parametrize("backend", ["reference", "lean", "native"])
@pytest.mark.parametrize("path", sorted(OWN.glob("*.npz")), ids=lambda path: path.stem)
def test_case_in_float32(path, backend):
    check_single(path, backend, torch.float32, 1e-5)


@pytest.mark.parametrize("backend", ["reference", "lean", "native"])
@pytest.mark.parametrize("path", sorted(OWN.glob("*.npz")), ids=lambda path: path.stem)
def test_case_in_bfloat16(path, backend):
    check_single(path, backend, torch.bfloat16, 0.1)


def test_this_repository_has_every_method_and_option():
    cases = [json.loads(bytes(np.load(path)["case"])) for path in OWN.glob("*.npz")]
    assert {case["method"] for case in cases} == set(CONFIGS)
    assert {(case["num_layers"], case["dim"]) for case in cases} == {(3, 5), (7, 12)}
    for option in ("gated", "learn_bases", "details_in_readout"):
        assert any(case.get(option) for case in cases), option
    assert {case.get("matching", "detached") for case in cases} == {"detached", "attached", "off"}


@pytest.mark.skipif(ALL is None, reason="RESROUTE_PARITY names no folder of cases")
def test_every_handed_case():
    assert ALL is not None
    paths = sorted(ALL.glob("*.npz"))
    assert len(paths) >= 92
    for path in paths:
        check(path, "reference")
        check(path, "lean")
        check_single(path, "native", torch.float32, 1e-5)
