import math
from typing import Any

import numpy as np
import pytest

from resroute.config import UserError, fingerprint, from_dict, to_dict
from resroute.model import GPT, GPTConfig, outline
from resroute.residual import WAV, BlockAttnRes, DeltaAttnRes, ResidualConfig


def config(**options: Any) -> GPTConfig:
    shape = {"vocab_size": 11, "context": 8, "num_layers": 4, "num_heads": 4, "dim": 16}
    return GPTConfig(**{**shape, **options})


def test_configurations_survive_json(residual: ResidualConfig) -> None:
    original = config(residual=residual, num_kv_heads=2, position="learned", dropout=0.1)
    assert from_dict(GPTConfig, to_dict(original)) == original


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"vocab_size": 0},
            "vocab_size must be a whole number of at least 1 and at most .*, got 0",
        ),
        ({"context": 0}, "context must be a whole number of at least 1 and at most .*, got 0"),
        (
            {"num_layers": -1},
            "num_layers must be a whole number of at least 1 and at most .*, got -1",
        ),
        ({"num_heads": 0}, "num_heads must be a whole number of at least 1 and at most .*, got 0"),
        ({"dim": 0}, "dim must be a whole number of at least 1 and at most .*, got 0"),
        ({"dim": 32, "num_heads": 5}, "divisible by num_heads, got 32 and 5; try 4 heads"),
        ({"num_heads": 16}, r"even head width, got 16 / 16 = 1; .* position='learned'"),
        ({"num_kv_heads": 3}, "divisible by num_kv_heads, got 4 and 3"),
        ({"num_kv_heads": 0}, "divisible by num_kv_heads, got 4 and 0"),
        ({"mlp": "relu"}, "mlp must be 'swiglu' or 'gelu', got 'relu'"),
        ({"position": "alibi"}, "position must be 'rope' or 'learned', got 'alibi'"),
        ({"mlp_ratio": 0.05}, "leave a hidden unit, got 0.05 at dim 16"),
        ({"mlp_ratio": math.inf}, "mlp_ratio must be at most 1000 and .*, got inf"),
        ({"mlp_ratio": math.nan}, "mlp_ratio must be at most 1000 and .*, got nan"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1, got 1.0"),
        ({"dropout": -0.1}, "dropout must be at least 0 and below 1, got -0.1"),
        ({"norm_eps": -1e-6}, "norm_eps must be at least 0 and at most 1, got -1e-06"),
        ({"norm_eps": math.nan}, "norm_eps must be at least 0 and at most 1, got nan"),
    ],
)
def test_impossible_shapes_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        config(**options)


def test_odd_heads_are_fine_with_learned_positions() -> None:
    assert config(num_heads=16, position="learned").num_heads == 16


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (WAV(num_blocks=5), "num_blocks=5 is more than the stack's 4 layers; use at most 4"),
        (DeltaAttnRes(num_blocks=9), "num_blocks=9 is more than the stack's 4 layers"),
        (BlockAttnRes(block_layers=6), "block_layers=6 is more than the stack's 4 layers"),
    ],
    ids=str,
)
def test_a_method_that_does_not_fit_the_depth_says_so(method: ResidualConfig, message: str) -> None:
    with pytest.raises(UserError, match=message):
        GPT(config(residual=method))


def test_numbers_of_other_kinds_make_the_same_shape() -> None:
    plain = config(residual=WAV(num_blocks=2, rho_max=1.0), dropout=0.0)
    other = config(
        num_layers=np.int64(4), dim=np.int32(16), dropout=0,
        residual=WAV(num_blocks=np.uint8(2), rho_max=1),
    )  # fmt: skip
    assert fingerprint(other) == fingerprint(plain)
    with pytest.raises(UserError, match=r"^dim must be a whole number, got 16\.0$"):
        config(dim=16.0)
    with pytest.raises(UserError, match=r"^residual must be a ResidualConfig, got 'wav'$"):
        config(residual="wav")


def test_notes_on_a_shape_name_the_line_that_builds_it() -> None:
    shape = config(num_layers=6, residual=WAV(num_blocks=5))
    with pytest.warns(UserWarning, match="make 3") as caught:
        GPT(shape)
    assert [warning.filename for warning in caught] == [__file__]
    # without numbers it is looked at, not trained
    assert outline(shape).norm.weight.is_meta
