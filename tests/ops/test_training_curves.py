"""A model learns the same on every backend: its losses, step by step."""

import functools

import pytest
import torch

import resroute as rr
from resroute import ops
from resroute.testing import small_gpt

CONFIGS = {
    "pre_norm": rr.PreNorm(),
    "block": rr.BlockAttnRes(num_blocks=2),
    "wav": rr.WAV(num_blocks=2),
    "full": rr.FullAttnRes(),
    "delta": rr.DeltaAttnRes(num_blocks=2),
}


@functools.cache
def losses(name, backend, steps, dtype):
    model = small_gpt(residual=CONFIGS[name], dim=8).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.randint(11, (2, 9), generator=torch.Generator().manual_seed(0))
    curve = []
    with ops.backend(backend):
        for _ in range(steps):
            loss = model(tokens[:, :-1], tokens[:, 1:])[1]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            curve.append(loss.item())
    return torch.tensor(curve, dtype=torch.float64)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("backend", ["lean", "native"])
def test_25_steps_in_float32(name, backend):
    if backend == "native" and not ops.native_available():
        pytest.skip("no C++ compiler")
    curves = [losses(name, b, 25, torch.float32) for b in (backend, "reference")]
    assert curves[1][-1] < curves[1][0] - 1
    torch.testing.assert_close(*curves, atol=1e-5, rtol=0)


def test_100_steps_in_float64():
    curves = [losses("wav", b, 100, torch.float64) for b in ("lean", "reference")]
    assert curves[1][-1] < curves[1][0] - 1
    torch.testing.assert_close(*curves, atol=1e-5, rtol=0)
