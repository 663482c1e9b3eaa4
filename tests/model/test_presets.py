import pytest
import torch

from resroute.config import from_dict, to_dict
from resroute.model import GPT, PRESETS, GPTConfig, paper, small, tiny
from resroute.residual import WAV, FullAttnRes, PreNorm


def parameters_on_meta(config: GPTConfig) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in GPT(config).parameters())


@pytest.mark.parametrize("num_layers", [12, 24, 48])
def test_the_papers_sizes(num_layers: int) -> None:
    config = paper(num_layers, vocab_size=256)
    assert (config.dim, config.num_layers, config.hidden_dim) == (512, num_layers, 2048)
    assert config.residual == WAV()
    matrices, norms = 16 * 512**2 * num_layers, 512 * (2 * num_layers + 1)
    embeddings = 2 * 256 * 512
    # queries and key gains of every site and the readout, two biases a site
    policy = 2 * 512 * (2 * num_layers + 1) + 2 * 2 * num_layers
    assert parameters_on_meta(config) == matrices + norms + embeddings + policy


def test_the_paper_at_48_layers_has_about_201_million_parameters() -> None:
    config = paper(vocab_size=256)
    assert config.num_layers == 48
    assert parameters_on_meta(config) == pytest.approx(201e6, rel=0.01)
    without = paper(vocab_size=256, residual=PreNorm())
    # the policy is small
    assert parameters_on_meta(config) - parameters_on_meta(without) == 99_520


@pytest.mark.parametrize(
    ("config", "dim", "expected"),
    [(small(vocab_size=100), 128, 6.3e6), (tiny(vocab_size=100), 48, 0.9e6)],
    ids=["small", "tiny"],
)
def test_sizes_for_cpus(config: GPTConfig, dim: int, expected: float) -> None:
    assert (config.dim, config.num_layers, config.context) == (dim, 24, 256)
    assert parameters_on_meta(config) == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("name", ["paper", "small", "tiny"])
def test_presets_by_name_take_depth_context_vocabulary_and_method(name: str) -> None:
    config = PRESETS[name](6, vocab_size=77, context=32, residual=FullAttnRes())
    assert (config.num_layers, config.vocab_size, config.context) == (6, 77, 32)
    assert config.residual == FullAttnRes()
    assert PRESETS[name](8, vocab_size=77).residual == WAV()
    assert from_dict(GPTConfig, to_dict(config)) == config
    assert list(PRESETS) == ["paper", "small", "tiny"]


def test_a_tiny_model_predicts() -> None:
    torch.manual_seed(0)
    model = GPT(tiny(4, vocab_size=10, context=8, residual=WAV(num_blocks=2)))
    tokens = torch.arange(8).unsqueeze(0)
    loss = model(tokens, tokens)[1]
    assert loss.item() == pytest.approx(2.3026, abs=0.01)


def test_presets_suit_any_depth() -> None:
    with pytest.warns(UserWarning, match="phase and split bases coincide"):
        assert GPT(tiny(2, vocab_size=10)).policy.num_blocks == 2
