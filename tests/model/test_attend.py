import math
from typing import Any

import pytest
import torch
from torch import Tensor

from resroute.model import attend
from resroute.model.attend import causal_attention


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def plain(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """A softmax over all scores, of which those of keys to come are minus infinity."""
    group, past = queries.shape[1] // keys.shape[1], keys.shape[2] - queries.shape[2]
    keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
    scores = queries @ keys.mT / math.sqrt(queries.shape[-1])
    for i in range(queries.shape[2]):
        scores[..., i, past + i + 1 :] = -math.inf
    return scores.softmax(-1) @ values


def with_gradients(way: Any, *tensors: Tensor, **options: Any) -> list[Tensor]:
    """What a way of attending returns, and its gradients at a fixed direction."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    attended = way(*leaves, **options)
    direction = draw(*attended.shape, seed=9, dtype=torch.bfloat16)
    attended.backward(direction.to(attended.dtype))
    return [attended.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


SHAPES = [(5, 0), (1, 0), (1, 4), (3, 4), (150, 0), (70, 30)]


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize(("length", "past"), SHAPES)
def test_attention_is_a_causal_softmax_over_all_keys_so_far(
    length: int, past: int, heads: int, kv_heads: int
) -> None:
    queries = draw(2, heads, length, 6, seed=1)
    keys, values = (draw(2, kv_heads, past + length, 6, seed=seed) for seed in (2, 3))
    expected = with_gradients(plain, queries, keys, values)
    found = with_gradients(causal_attention, queries, keys, values, dropout=0.0)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("is_autocast", [False, True])
@pytest.mark.parametrize("kv_heads", [2, 1])
@pytest.mark.parametrize(("length", "past"), SHAPES)
def test_sixteen_bits_are_computed_in_float32_and_rounded_once(
    length: int, past: int, kv_heads: int, is_autocast: bool
) -> None:
    shapes = [(2, length), (kv_heads, past + length), (kv_heads, past + length)]
    tensors = [
        draw(2, *shape, 16, seed=seed, dtype=torch.bfloat16) for seed, shape in enumerate(shapes)
    ]
    truth = with_gradients(plain, *(tensor.double() for tensor in tensors))
    with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        found = with_gradients(causal_attention, *tensors, dropout=0.0)
    assert [one.dtype for one in found] == [torch.bfloat16] * 4
    # one rounding of bfloat16 is a relative error of 0.0017 on average, and at most 0.0039
    most = 0.003 if length > 1 else 0.01
    for one, exact in zip(found, truth, strict=True):
        assert float((one - exact).norm()) <= most * float(exact.norm()) + 1e-6


@pytest.mark.parametrize(
    ("dtype", "length", "expected"),
    [
        (torch.float64, 8, torch.float64),
        (torch.float32, 8, torch.float32),
        (torch.bfloat16, 8, torch.float32),
        (torch.float16, 8, torch.float32),
        # decoding
        (torch.bfloat16, 1, torch.bfloat16),
    ],
)
def test_what_is_widened(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, length: int, expected: torch.dtype
) -> None:
    taken: list[torch.dtype] = []

    def spy(queries: Tensor, *rest: Any) -> Tensor:
        taken.append(queries.dtype)
        return queries

    monkeypatch.setattr(attend, "_attend", spy)
    x = torch.ones(1, 1, length, 2, dtype=dtype)
    assert causal_attention(x, x, x, dropout=0.0).dtype == dtype
    assert taken == [expected]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_drops_weights_and_scales_up_the_rest(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    # equal scores, and values that show each weight in a channel of its own
    zeros = torch.zeros(400, 1, 4, 4, dtype=dtype)
    values = torch.eye(4, dtype=dtype).expand(400, 1, 4, 4)
    weights = causal_attention(zeros, zeros, values, dropout=0.75)[:, 0]
    for i in range(4):
        assert (weights[:, i, i + 1 :] == 0).all()
        seen = weights[:, i, : i + 1].float()
        kept = seen[seen != 0]
        assert 0.18 < len(kept) / seen.numel() < 0.32
        torch.testing.assert_close(kept, torch.full_like(kept, 4 / (i + 1)), rtol=0.01, atol=0)


def test_one_graph_under_autocast() -> None:
    torch._dynamo.reset()
    tensors = [draw(2, 2, 20, 8, seed=seed, dtype=torch.bfloat16) for seed in range(3)]
    compiled = torch.compile(causal_attention, backend="eager", fullgraph=True, dynamic=False)
    with torch.autocast("cpu", torch.bfloat16):
        found = with_gradients(compiled, *tensors, dropout=0.0)
        expected = with_gradients(causal_attention, *tensors, dropout=0.0)
    torch._dynamo.reset()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
