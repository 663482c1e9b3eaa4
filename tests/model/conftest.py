"""Every residual method, and the shapes of models that carry it."""

import dataclasses
from typing import Any

import pytest

from resroute.config import variants
from resroute.residual import (
    HAARES,
    WAV,
    BlockAttnRes,
    DeltaAttnRes,
    FullAttnRes,
    ResidualConfig,
)


def plain(config: type[ResidualConfig]) -> ResidualConfig:
    """A method by its defaults, in two blocks where it has blocks."""
    names = {field.name for field in dataclasses.fields(config)}
    return config(**({"num_blocks": 2} if "num_blocks" in names else {}))


METHODS: dict[str, ResidualConfig] = {
    # every registered method, those to come as well
    **{name: plain(config) for name, config in variants(ResidualConfig).items()},
    "haares": HAARES(num_blocks=2),
    "delta_of_updates": DeltaAttnRes(),
    "delta_without_embedding": DeltaAttnRes(num_blocks=2, embedding_source=False),
    "full_gated": FullAttnRes(gated=True),
    "block_gated": BlockAttnRes(num_blocks=2, gated=True),
    "delta_gated": DeltaAttnRes(gated=True),
    "wav_gated": WAV(num_blocks=2, gated=True),
    "wav_of_all_options": WAV(
        block_layers=3,
        learn_bases=True,
        learn_detail_bias=False,
        details_in_readout=True,
        matching="attached",
        rho_max=None,
        key_gain=False,
        bias_running=False,
    ),
}
SHAPES: dict[str, dict[str, Any]] = {
    "learned": {"position": "learned"},
    "grouped": {"num_kv_heads": 2},
    "one_key_head": {"num_kv_heads": 1, "qk_norm": True},
    "tied": {"tie_embeddings": True},
    "gelu": {"mlp": "gelu", "mlp_ratio": 2.5},
}


@pytest.fixture(params=METHODS)
def residual(request: pytest.FixtureRequest) -> ResidualConfig:
    """Each method in turn."""
    return METHODS[request.param]


@pytest.fixture(
    params=[*METHODS, *(f"{shape}-{name}" for shape in SHAPES for name in ("pre_norm", "wav"))]
)
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Each method in the plain shape, and two methods in each other shape."""
    *shape, name = request.param.split("-")
    return {"residual": METHODS[name], **(SHAPES[shape[0]] if shape else {})}
