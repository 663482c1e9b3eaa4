import math
from typing import Any

import pytest
import torch

from resroute.model import GPT
from resroute.residual import WAV, FullAttnRes, ResidualConfig
from resroute.testing import small_gpt, small_gpt_config


@pytest.mark.parametrize("tied", [False, True])
@torch.no_grad()
def test_initial_weights_follow_their_laws(tied: bool) -> None:
    model = small_gpt(
        dim=64,
        vocab_size=200,
        context=50,
        position="learned",
        qk_norm=True,
        tie_embeddings=tied,
        residual=WAV(num_blocks=2),
    )
    output = 0.02 / math.sqrt(8)
    laws = {
        "embedding.weight": 0.02 if tied else 1.0,
        "positions.weight": 0.02,
        "head.weight": 0.001,
    }
    for name, parameter in model.named_parameters():
        if name.startswith("policy."):
            continue
        if "norm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
            continue
        std = laws.get(name, output if name.endswith("output.weight") else 0.02)
        count = parameter.numel()
        # four standard errors
        assert float(parameter.std()) == pytest.approx(std, rel=4 / math.sqrt(2 * count)), name
        assert abs(float(parameter.mean())) < 4 * std / math.sqrt(count), name
    assert torch.equal(model.policy.query, torch.zeros(9, 64))
    assert torch.equal(model.policy.detail_bias, torch.full((8, 2), -2.0))


def test_models_that_differ_in_the_method_alone_start_from_equal_weights(
    residual: ResidualConfig,
) -> None:
    state = small_gpt(residual=residual, seed=5).state_dict()
    expected = small_gpt(seed=5).state_dict()
    assert {key for key in state if not key.startswith("policy.")} == set(expected)
    for key, value in expected.items():
        assert torch.equal(state[key], value), key
    other = small_gpt(seed=6).state_dict()
    assert not torch.equal(other["embedding.weight"], expected["embedding.weight"])


def test_a_model_from_the_meta_device_equals_one_built_directly(residual: ResidualConfig) -> None:
    options = {"residual": residual, "position": "learned", "qk_norm": True}
    with torch.device("meta"):
        model = GPT(small_gpt_config(**options))
    assert all(tensor.is_meta for tensor in model.state_dict().values())
    model.to_empty(device="cpu")
    for tensor in model.state_dict().values():
        tensor.fill_(math.nan)
    torch.manual_seed(3)
    model.init_weights()
    expected = small_gpt(seed=3, **options).state_dict()
    state = model.state_dict()
    assert list(state) == list(expected)
    for key, value in expected.items():
        assert torch.equal(state[key], value), key


def test_a_forward_pass_on_the_meta_device_gives_shapes() -> None:
    with torch.device("meta"):
        model, tokens = GPT(small_gpt_config(num_kv_heads=2)), torch.zeros(2, 8, dtype=torch.int64)
    logits, loss = model(tokens, tokens, return_logits=True)
    assert logits.is_meta
    assert logits.shape == (2, 8, 11)
    assert loss.shape == ()


@torch.no_grad()
def test_predictions_start_near_uniform() -> None:
    tokens = torch.arange(8).unsqueeze(0)
    loss = small_gpt()(tokens, tokens)[1]
    assert loss.item() == pytest.approx(math.log(11), abs=0.005)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # per layer 16 d^2 and two norms; the final norm, embedding and head
        ({}, 4 * (16 * 256 + 32) + 16 + 2 * 11 * 16),
        ({"tie_embeddings": True}, 4 * (16 * 256 + 32) + 16 + 11 * 16),
        ({"position": "learned"}, 4 * (16 * 256 + 32) + 16 + 2 * 11 * 16 + 8 * 16),
        ({"mlp": "gelu"}, 4 * (12 * 256 + 32) + 16 + 2 * 11 * 16),
        ({"num_kv_heads": 1}, 4 * (16 * 256 - 2 * 16 * 12 + 32) + 16 + 2 * 11 * 16),
        ({"qk_norm": True}, 4 * (16 * 256 + 32 + 2 * 4) + 16 + 2 * 11 * 16),
    ],
)
def test_parameters_by_formula(options: dict[str, Any], expected: int) -> None:
    def count(**more: Any) -> int:
        return sum(p.numel() for p in small_gpt(**options, **more).parameters())

    assert count() == expected
    # queries and key gains, and two biases a site
    assert count(residual=WAV(num_blocks=2)) == expected + 2 * 9 * 16 + 2 * 8
    assert count(residual=FullAttnRes(key_gain=False, gated=True)) == expected + 9 * 16 + 9


@pytest.mark.parametrize("where", ["first site of the fifth block", "readout"])
def test_details_of_four_blocks_start_with_their_documented_share(where: str) -> None:
    residual = WAV(block_layers=2, details_in_readout=True)
    num_layers, site = (10, 16) if where.startswith("first") else (8, 16)
    policy = residual.build(num_layers, 6).double()
    torch.manual_seed(0)
    stream = policy.start(torch.randn(5, 6, dtype=torch.float64))
    for index in range(site):
        stream = policy.write(stream, index, torch.randn(5, 6, dtype=torch.float64))
    names, weights = policy.weights(stream, site)
    is_detail = torch.tensor([name.startswith(("phase", "split")) for name in names])
    assert int(is_detail.sum()) == 8
    assert len(names) == 13
    share = 8 * math.exp(-2) / (5 + 8 * math.exp(-2))
    assert share == pytest.approx(0.178, abs=5e-4)
    expected = torch.full((5,), share, dtype=torch.float64)
    torch.testing.assert_close(weights[..., is_detail].sum(-1), expected)


@torch.no_grad()
@pytest.mark.parametrize(
    ("residual", "expected"), [(FullAttnRes(), 5.5e-8), (WAV(bases=(), num_blocks=4), 3.6e-5)]
)
def test_tied_embeddings_shrink_reads_as_documented(
    residual: ResidualConfig, expected: float
) -> None:
    model = small_gpt(
        vocab_size=40, context=16, num_layers=48, dim=128, residual=residual, tie_embeddings=True
    )
    reads, policy, read_normalised = [], model.policy, model.policy.read_normalised

    def spy(stream: Any, site: int, norm: Any) -> Any:
        reads.append(policy.read(stream, site))
        return read_normalised(stream, site, norm)

    policy.read_normalised = spy
    model(torch.randint(40, (2, 16)))
    # docs/methods.md, "The initial state": far below norm_eps, 1e-6, for Full AttnRes
    assert reads[-1].square().mean().item() == pytest.approx(expected, rel=0.3)
