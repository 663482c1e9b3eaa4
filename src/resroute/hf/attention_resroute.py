"""Attention of resroute's GPT for transformers: rotary positions, grouped queries, its cache.

A copy stands beside exported weights. B batch, T tokens, S keys, D width, H query heads, G
key-value heads, E head width.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .configuration_resroute import ResrouteConfig
from .routing_resroute import compute_dtype

ROPE_BASE = 10_000.0
STD = 0.02
"""Of the initial weights of most matrices."""


def rotary_angles(positions: Tensor, head_dim: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines (B or 1, 1, T, E) of positions (B or 1, T), base 10,000.

    In float64, since float32 angles lose digits at long contexts; both halves of a head have the
    same angles, the first half's sines are negative.
    """
    # MPS has no float64
    home = "cpu" if like.device.type == "mps" else like.device
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=home) / head_dim
    angles = positions.to(home, torch.float64)[:, None, :, None] * ROPE_BASE**-exponents
    cosine, sine = angles.cos(), angles.sin()
    tables = torch.cat((cosine, cosine), -1), torch.cat((-sine, sine), -1)
    dtype = compute_dtype(like.dtype)
    return tables[0].to(like.device, dtype), tables[1].to(like.device, dtype)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate pairs of channels, first half against second half, of x (B, H, T, E)."""
    wide = x.to(torch.promote_types(x.dtype, cosine.dtype))
    first, second = wide.chunk(2, dim=-1)
    return torch.addcmul(wide * cosine, torch.cat((second, first), dim=-1), sine).to(x.dtype)


def eager_attention_forward(
    module: "ResrouteAttention",
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Softmax attention by the formula, which also hands back its weights (B, H, T, S)."""
    key = key.repeat_interleave(module.num_key_value_groups, dim=1)
    value = value.repeat_interleave(module.num_key_value_groups, dim=1)
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    wide = torch.promote_types(scores.dtype, torch.float32)
    weights = scores.softmax(-1, dtype=wide).to(query.dtype)
    weights = F.dropout(weights, dropout, module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


class ResrouteHeadNorm(nn.RMSNorm):
    """RMSNorm of a head's queries or keys, in the dtype of its gain and cast back once."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x (B, H, T, E)."""
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


def linear(inputs: int, outputs: int, std: float = STD) -> nn.Linear:
    """A matrix that knows the std of its initial weights."""
    layer = nn.Linear(inputs, outputs, bias=False)
    layer.initial_std = std  # type: ignore[assignment]
    return layer


def output_std(config: ResrouteConfig) -> float:
    """Of matrices whose outputs add up over depth."""
    return float(STD / (2 * config.num_hidden_layers) ** 0.5)


class ResrouteAttention(nn.Module):
    """Causal self-attention on a normalised read; hands back the update and the weights.

    `norm` is the read's; the policy applies it.
    """

    is_causal = True

    def __init__(self, config: ResrouteConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        dim = config.hidden_size
        self.head_dim = dim // config.num_attention_heads
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        kv_dim = config.num_key_value_heads * self.head_dim
        eps = config.rms_norm_eps
        self.norm = nn.RMSNorm(dim, eps=eps)
        self.query = linear(dim, dim)
        self.key = linear(dim, kv_dim)
        self.value = linear(dim, kv_dim)
        self.output = linear(dim, dim, output_std(config))
        has_norms = config.qk_norm
        self.query_norm = ResrouteHeadNorm(self.head_dim, eps=eps) if has_norms else nn.Identity()
        self.key_norm = ResrouteHeadNorm(self.head_dim, eps=eps) if has_norms else nn.Identity()

    def forward(
        self,
        hidden_states: Tensor,
        angles: tuple[Tensor, Tensor] | None,
        attention_mask: Tensor | None,
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from hidden_states (B, T, D); the weights are None but where eager."""
        shape = (*hidden_states.shape[:2], -1, self.head_dim)
        queries = self.query_norm(self.query(hidden_states).view(shape).transpose(1, 2))
        keys = self.key_norm(self.key(hidden_states).view(shape).transpose(1, 2))
        values = self.value(hidden_states).view(shape).transpose(1, 2)
        if angles is not None:
            queries, keys = rotate(queries, *angles), rotate(keys, *angles)
        if cache is not None:
            keys, values = cache.update(keys, values, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        dropout = self.config.dropout if self.training else 0.0
        attended, weights = attend(
            self,
            queries,
            keys,
            values,
            attention_mask,
            dropout=dropout,
            scaling=self.scaling,
            **kwargs,
        )
        update = self.output(attended.reshape(*hidden_states.shape[:2], -1))
        return F.dropout(update, self.config.dropout, self.training), weights
