import math

import pytest
import torch
from torch import Tensor

from resroute.config import UserError
from resroute.model.attention import (
    Attention,
    Cache,
    LayerCache,
    Rotation,
    rotate,
    rotation,
)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def complex_rope(x: Tensor, first: int) -> Tensor:
    """RoFormer in complex numbers: channel i and i + E / 2 are one number, turned by its angle."""
    half = x.shape[-1] // 2
    numbers = torch.complex(x[..., :half], x[..., half:])
    for t in range(x.shape[-2]):
        for i in range(half):
            angle = (first + t) / 10_000 ** (2 * i / x.shape[-1])
            numbers[..., t, i] *= complex(math.cos(angle), math.sin(angle))
    return torch.cat((numbers.real, numbers.imag), dim=-1)


def explicit_attention(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """One query at a time, over the keys that it may see."""
    heads, length = queries.shape[1:3]
    past, group = keys.shape[2] - length, heads // keys.shape[1]
    attended = torch.empty_like(queries)
    for head in range(heads):
        for i in range(length):
            seen = slice(0, past + i + 1)
            key, value = keys[:, head // group, seen], values[:, head // group, seen]
            logits = torch.einsum("be,bse->bs", queries[:, head, i], key) / queries.shape[-1] ** 0.5
            attended[:, head, i] = torch.einsum("bs,bse->be", logits.softmax(-1), value)
    return attended


@pytest.mark.parametrize("first", [0, 7])
@pytest.mark.parametrize("head_dim", [2, 6])
def test_rotation_is_a_product_of_complex_numbers(first: int, head_dim: int) -> None:
    x = draw(2, 3, 5, head_dim)
    rotated = rotate(x, rotation(first, 5, head_dim, like=x))
    torch.testing.assert_close(rotated, complex_rope(x.clone(), first), rtol=0, atol=1e-12)


def test_rotated_scores_depend_on_the_distance_alone() -> None:
    query, key = draw(1, 1, 1, 8, seed=1), draw(1, 1, 1, 8, seed=2)

    def score(m: int, n: int) -> float:
        turned = rotate(query, rotation(m, 1, 8, query)) * rotate(key, rotation(n, 1, 8, key))
        return float(turned.sum())

    assert score(3, 1) == pytest.approx(score(102, 100), abs=1e-12)
    assert score(9, 9) == pytest.approx(float((query * key).sum()), abs=1e-12)
    assert abs(score(3, 1) - score(1, 3)) > 0.1
    assert abs(score(3, 1) - score(4, 1)) > 0.1


def test_angles_of_a_run_continue_those_before() -> None:
    like = draw(1)
    whole, rest = rotation(0, 9, 6, like), rotation(4, 5, 6, like)
    assert torch.equal(whole.cosine[4:], rest.cosine)
    assert torch.equal(whole.sine[4:], rest.sine)


def test_angles_keep_their_digits_at_long_contexts() -> None:
    angles = rotation(1_000_000, 2, 64, draw(1, dtype=torch.bfloat16))
    assert angles.cosine.dtype == torch.float32
    for i in range(32):
        angle = 1_000_001 / 10_000 ** (2 * i / 64)
        assert float(angles.cosine[1, i]) == pytest.approx(math.cos(angle), abs=1e-7)
        assert float(angles.sine[1, 32 + i]) == pytest.approx(math.sin(angle), abs=1e-7)


def test_bfloat16_is_rotated_in_float32_and_rounded_once() -> None:
    x = draw(1, 2, 5, 8, dtype=torch.bfloat16)
    angles = rotation(3, 5, 8, x)
    rotated = rotate(x, angles)
    assert rotated.dtype == torch.bfloat16
    assert torch.equal(rotated, rotate(x.float(), angles).bfloat16())


def attention(
    num_heads: int = 4, num_kv_heads: int = 2, *, qk_norm: bool = False, dropout: float = 0.0
) -> Attention:
    module = Attention(8, num_heads, num_kv_heads, qk_norm=qk_norm, dropout=dropout, norm_eps=1e-5)
    with torch.no_grad():
        for seed, parameter in enumerate(module.double().parameters()):
            parameter.copy_(draw(*parameter.shape, seed=seed))
    return module


def normed(x: Tensor, gain: Tensor) -> Tensor:
    return gain * x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()


@pytest.mark.parametrize("is_rotary", [False, True])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_the_sublayer_by_hand(qk_norm: bool, is_rotary: bool) -> None:
    module, x = attention(qk_norm=qk_norm), draw(3, 5, 8, seed=9)
    queries = (x @ module.query.weight.T).reshape(3, 5, 4, 2).transpose(1, 2)
    keys = (x @ module.key.weight.T).reshape(3, 5, 2, 2).transpose(1, 2)
    values = (x @ module.value.weight.T).reshape(3, 5, 2, 2).transpose(1, 2)
    if qk_norm:
        gains = dict(module.named_parameters())
        queries = normed(queries, gains["query_norm.weight"])
        keys = normed(keys, gains["key_norm.weight"])
    if is_rotary:
        queries, keys = complex_rope(queries, 0), complex_rope(keys, 0)
    attended = explicit_attention(queries, keys, values)
    expected = attended.transpose(1, 2).reshape(3, 5, 8) @ module.output.weight.T
    update = module(x, rotation(0, 5, 2, x) if is_rotary else None, None, 0)
    torch.testing.assert_close(update, expected, rtol=0, atol=1e-12)


def test_one_token_drops_its_only_weight_and_then_channels_of_the_update() -> None:
    module, x = attention(1, 1, dropout=0.5), draw(200, 1, 8)
    kept = module.eval()(x, None, None, 0)
    torch.manual_seed(0)
    ratio = (module.train()(x, None, None, 0) / kept).squeeze(1)
    # what is left is scaled up twice
    assert sorted(set(ratio.flatten().round(decimals=9).tolist())) == [0.0, 4.0]
    is_whole_row_dropped = (ratio == 0).all(-1)
    assert 0.4 < is_whole_row_dropped.double().mean() < 0.6
    assert 0.4 < (ratio[~is_whole_row_dropped] == 0).double().mean() < 0.6


def test_qk_norm_makes_scores_blind_to_the_size_of_the_projections() -> None:
    module, x = attention(qk_norm=True), draw(2, 4, 8, seed=5)
    module.query_norm.eps = module.key_norm.eps = 0.0
    angles = rotation(0, 4, 2, x)
    before = module(x, angles, None, 0)
    with torch.no_grad():
        module.query.weight.mul_(7)
        module.key.weight.mul_(0.1)
    torch.testing.assert_close(module(x, angles, None, 0), before, rtol=0, atol=1e-12)


def test_a_layer_cache_returns_all_keys_so_far_in_order() -> None:
    cache, keys, values = LayerCache(6), draw(2, 3, 5, 4, seed=1), draw(2, 3, 5, 4, seed=2)
    for first, end in ((0, 2), (2, 3), (3, 5)):
        seen = cache.append(keys[:, :, first:end], values[:, :, first:end], first)
        assert torch.equal(seen[0], keys[:, :, :end])
        assert torch.equal(seen[1], values[:, :, :end])


def test_a_cache_counts_its_tokens_and_refuses_more_than_the_context() -> None:
    cache = Cache(num_layers=3, context=5)
    assert len(cache.layers) == 3
    cache.length = 4
    cache.require_room(1)
    with pytest.raises(UserError, match="4 cached and 2 new tokens exceed the context of 5"):
        cache.require_room(2)
    assert cache.length == 4


def test_a_rotation_of_nothing_is_the_identity() -> None:
    x = draw(1, 1, 1, 4)
    still = Rotation(torch.ones(1, 4, dtype=torch.float64), torch.zeros(1, 4, dtype=torch.float64))
    assert torch.equal(rotate(x, still), x)
