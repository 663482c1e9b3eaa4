"""Reading with a norm folded in gives what the norm gives."""

import pytest
import torch
from torch import nn

import resroute as rr
from resroute import ops
from resroute.residual.norms import fold
from resroute.testing import randomise


class Doubled(nn.RMSNorm):
    def forward(self, x):
        return 2 * super().forward(x)


def hooked():
    norm = nn.RMSNorm(6)
    norm.register_forward_hook(lambda module, args, out: 2 * out)
    return norm


NORMS = {
    "gain": (lambda: nn.RMSNorm(6, eps=1e-3), True),
    "default eps": (lambda: nn.RMSNorm(6), True),
    "no gain": (lambda: nn.RMSNorm(6, elementwise_affine=False), False),
    "subclass": (lambda: Doubled(6), False),
    "hook": (hooked, False),
    "layer norm": (lambda: nn.LayerNorm(6), False),
    "function": (lambda: torch.tanh, False),
}
CONFIGS = {
    "pre_norm": rr.PreNorm(),
    "re_zero": rr.ReZero(),
    "block": rr.BlockAttnRes(num_blocks=2),
    "wav": rr.WAV(num_blocks=2),
    "wav_gated": rr.WAV(num_blocks=2, gated=True),
    "full": rr.FullAttnRes(),
    "delta": rr.DeltaAttnRes(num_blocks=2),
}


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("method", CONFIGS)
@pytest.mark.parametrize("backend", ["reference", "lean"])
def test_read_normalised_is_the_norm_of_the_read(name, method, backend):
    make, _ = NORMS[name]
    norm = make()
    if isinstance(norm, nn.Module):
        norm = norm.double()
        for parameter in norm.parameters():
            nn.init.normal_(parameter)
    policy = CONFIGS[method].build(4, 6).double()
    randomise(policy)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(9, 3, 6, generator=generator, dtype=torch.float64)
    with ops.backend(backend):
        plain = onward = policy.start(drawn[0])
        for site in range(8):
            expected = norm(policy.read(plain, site))
            found, onward = policy.read_normalised(onward, site, norm)
            torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
            plain = policy.write(plain, site, drawn[site + 1])
            onward = policy.write(onward, site, drawn[site + 1])
        torch.testing.assert_close(policy.finish(onward), policy.finish(plain), atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", NORMS)
def test_only_a_plain_norm_is_folded(name):
    make, is_folded = NORMS[name]
    assert (fold("lean", make(), torch.zeros(3, 6)) is not None) == is_folded
    assert fold("reference", make(), torch.zeros(3, 6)) is None


def test_torchs_default_eps_is_taken_where_it_is_known():
    assert fold("lean", nn.RMSNorm(6), torch.zeros(3, 6)).eps == torch.finfo(torch.float32).eps
    assert fold("lean", nn.RMSNorm(6), torch.zeros(3, 6).bfloat16()) is None
