"""What tests of looking at a running model share."""

import pytest
import torch

import resroute as rr

# two tokens of width two
E = torch.tensor([[1.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
U = [
    torch.tensor([[0.0, 4.0], [0.0, 3.0]], dtype=torch.float64),
    torch.tensor([[3.0, 0.0], [1.0, 1.0]], dtype=torch.float64),
]
METHODS = {
    "pre_norm": rr.PreNorm(),
    "re_zero": rr.ReZero(),
    "layer_scale": rr.LayerScale(),
    "full": rr.FullAttnRes(),
    "block_gated": rr.BlockAttnRes(num_blocks=2, gated=True),
    "delta": rr.DeltaAttnRes(),
    "delta_of_blocks": rr.DeltaAttnRes(num_blocks=2, embedding_source=False),
    "wav": rr.WAV(num_blocks=2),
    "wav_learned": rr.WAV(num_blocks=2, learn_bases=True, details_in_readout=True),
}
each_method = pytest.mark.parametrize("config", METHODS.values(), ids=METHODS)


def run(policy, embedding=E, updates=U):
    stream = policy.start(embedding)
    for site, update in enumerate(updates):
        policy.read(stream, site)
        stream = policy.write(stream, site, update)
    return policy.finish(stream)


def approx(expected):
    return {k: pytest.approx(v, rel=1e-12, abs=1e-15) for k, v in expected.items()}
