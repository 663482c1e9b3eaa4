"""Weights of the package attn-res, against the package itself."""

import pytest
import torch
from attn_res import AttnResMode, AttnResTransformer, TransformerConfig
from torch import nn

import resroute as rr
from resroute.residual.interchange import block_size, from_layout, to_layout


class Sublayer(nn.Module):
    """One of theirs, which are given what they read."""

    def __init__(self, layer, frequencies, mask):
        super().__init__()
        self.layer, self.rest = layer, (frequencies, mask)

    def forward(self, x):
        normalised = self.layer.norm(x)
        rest = self.rest if self.layer.is_attention else ()
        return self.layer.fn(normalised, *rest)


@pytest.mark.parametrize("mode", [AttnResMode.BLOCK, AttnResMode.FULL], ids=["block", "full"])
# sublayers and blocks, also where blocks are no whole layers of two, or the last one is longer
@pytest.mark.parametrize(("sublayers", "blocks"), [(8, 4), (8, 8), (9, 2), (10, 4), (7, 3), (5, 1)])
@torch.no_grad()
def test_logits_are_those_of_the_package(sublayers, blocks, mode):
    torch.manual_seed(0)
    config = TransformerConfig(
        d_model=16,
        n_layers=sublayers,
        n_heads=2,
        n_kv_heads=1,
        vocab_size=11,
        max_seq_len=16,
        attn_res_mode=mode,
        n_blocks=blocks,
    )
    theirs = AttnResTransformer(config).double().eval()
    for parameter in theirs.parameters():
        parameter.add_(0.3 * torch.randn_like(parameter))
    tokens = torch.randint(0, 11, (2, 7))
    expected = theirs(tokens)

    state = theirs.state_dict()
    size = 1 if mode is AttnResMode.FULL else config.block_size
    policy = from_layout(state, "attn-res", block_size=size)
    mask = theirs._build_causal_mask(7, tokens.device).double()
    layers = [Sublayer(layer, theirs.rope_freqs[:7], mask) for layer in theirs.layers]
    stack = rr.RoutedStack(layers, policy)
    found = theirs.lm_head(theirs.out_norm(stack(theirs.token_emb(tokens))))
    # their norms compute in float32
    torch.testing.assert_close(found, expected, rtol=0, atol=5e-6)
    plain = nn.Sequential(*layers)
    hidden = theirs.token_emb(tokens)
    for sublayer in plain:
        hidden = hidden + sublayer(hidden)
    # and the routing is no trifle
    assert (theirs.lm_head(theirs.out_norm(hidden)) - expected).abs().max() > 0.01

    back = to_layout(policy, "attn-res", dtype=torch.float64)
    queries = {name for name in state if "attn_res" in name}
    assert set(back) == queries
    assert all(torch.equal(back[name], state[name]) for name in queries)
    assert block_size(policy, "attn-res") == size
