"""Causal softmax attention, by the fastest exact way for device, dtype and length.

B batch, T tokens, S keys, H query heads, G key-value heads, E head width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def causal_attention(queries: Tensor, keys: Tensor, values: Tensor, *, dropout: float) -> Tensor:
    """Softmax attention in which query i of T sees keys up to `S - T + i` of S.

    By torch's `scaled_dot_product_attention`; on CPUs runs of bfloat16 or float16 tokens are
    computed in float32 and rounded once: forward and backward in 16 bits take 1.4 to 5 times as
    long at contexts of 64 to 2,048 (without AMX). Matrix products and a softmax in 16 bits were
    faster at 64 tokens, and at 256 in heads of 128, but keep T scores a token, and compiled they
    gave NaN gradients (torch 2.13; LOG.md).

    Args:
        queries: (B, H, T, E).
        keys: (B, G, S, E); G divides H, and each key head serves H / G query heads.
        values: (B, G, S, E).
        dropout: Probability of dropping a weight.

    Returns:
        (B, H, T, E) in the dtype of the queries.
    """
    dtype = queries.dtype
    is_narrow = dtype in (torch.bfloat16, torch.float16)
    # one token is decoded, and widening all keys so far would cost more than it saves
    if queries.device.type != "cpu" or not is_narrow or queries.shape[2] == 1:
        return _attend(queries, keys, values, dropout)
    # autocast would narrow them again
    with torch.autocast("cpu", enabled=False):
        return _attend(queries.float(), keys.float(), values.float(), dropout).to(dtype)


def _attend(queries: Tensor, keys: Tensor, values: Tensor, dropout: float) -> Tensor:
    length, past = queries.shape[2], keys.shape[2] - queries.shape[2]
    mask = None
    if past > 0 and length > 1:
        seen = torch.ones(length, length + past, dtype=torch.bool, device=queries.device)
        mask = seen.tril(past)
    return F.scaled_dot_product_attention(
        queries,
        keys,
        values,
        attn_mask=mask,
        dropout_p=dropout,
        # a plain bool also where the length is symbolic, in a compiled model
        is_causal=True if past == 0 and length > 1 else False,  # noqa: SIM210
        enable_gqa=queries.shape[1] != keys.shape[1],
    )
