import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from resroute.model.flops import flops_per_token
from resroute.residual import WAV, FullAttnRes
from resroute.testing import small_gpt, small_gpt_config

SHAPES = {
    "swiglu": {},
    "gelu": {"mlp": "gelu", "mlp_ratio": 2.5},
    "hidden width rounded down": {"mlp_ratio": 1.3},
    "grouped": {"num_kv_heads": 2},
    "one key head": {"num_kv_heads": 1, "qk_norm": True},
    "tied": {"tie_embeddings": True},
    "learned positions": {"position": "learned", "context": 12, "num_layers": 1},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@torch.no_grad()
def test_it_is_three_times_what_a_forward_pass_counts(shape):
    model = small_gpt(**shape)
    tokens = torch.zeros(3, model.config.context, dtype=torch.long)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens)
    assert flops_per_token(model.config) * tokens.numel() == 3 * counter.get_total_flops()


def test_the_formula_by_hand():
    config = small_gpt_config(vocab_size=10, num_layers=3, dim=4, num_heads=2, context=5)
    # per layer four 4 x 4 projections and three of 4 x 16; the head is 4 x 10
    parameters = 3 * (4 * 16 + 3 * 64) + 40
    assert flops_per_token(config) == 6 * parameters + 12 * 3 * 4 * 5


def test_methods_count_the_same():
    plain = flops_per_token(small_gpt_config())
    for method in (FullAttnRes(), WAV(num_blocks=2)):
        assert flops_per_token(small_gpt_config(residual=method)) == plain
