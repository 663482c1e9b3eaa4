"""Causal self-attention with rotary positions, grouped queries and a key-value cache.

B batch, T tokens, D width, H query heads, G key-value heads, E = D / H head width.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from resroute.config import UserError
from resroute.core import compute_dtype
from resroute.model.attend import causal_attention
from resroute.model.projection import project

ROPE_BASE = 10_000.0


class Rotation(NamedTuple):
    """Cosines and sines (T, E) of the rotary angles of a run of positions.

    Both halves of a head have the same angles; the first half's sines are negative.
    """

    cosine: Tensor
    sine: Tensor


def rotation(first: int, length: int, head_dim: int, like: Tensor) -> Rotation:
    """Rotary angles (RoFormer, eq. 34, base 10,000) of positions `first .. first + length - 1`.

    Computed at each forward pass instead of kept in a buffer, so that models work on the meta
    device; in float64, since float32 angles lose digits at long contexts. On the device of
    `like`, in float32, or float64 where `like` is.
    """
    # MPS has no float64
    home = "cpu" if like.device.type == "mps" else like.device
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=home) / head_dim
    positions = torch.arange(first, first + length, dtype=torch.float64, device=home)
    angles = positions.unsqueeze(-1) * ROPE_BASE**-exponents
    cosine, sine = angles.cos(), angles.sin()
    tables = torch.cat((cosine, cosine), -1), torch.cat((-sine, sine), -1)
    dtype = compute_dtype(like.dtype)
    return Rotation(*(table.to(like.device, dtype) for table in tables))


def rotate(x: Tensor, by: Rotation) -> Tensor:
    """Rotate pairs of channels, first half against second half, of x (B, H, T, E)."""
    wide = x.to(torch.promote_types(x.dtype, by.cosine.dtype))
    first, second = wide.chunk(2, dim=-1)
    swapped = torch.cat((second, first), dim=-1)
    return torch.addcmul(wide * by.cosine, swapped, by.sine).to(x.dtype)


class LayerCache:
    """Keys and values of one layer's past tokens, in a buffer of the whole context."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def append(self, keys: Tensor, values: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Store keys and values (B, G, T, E) from position `first` on; return all so far."""
        if self.keys is None or self.values is None or first == 0:
            shape = (*keys.shape[:2], self.capacity, keys.shape[-1])
            self.keys, self.values = keys.new_empty(shape), values.new_empty(shape)
        elif keys.shape[0] != self.keys.shape[0]:
            raise UserError(
                f"the cache holds {self.keys.shape[0]} sequences, got {keys.shape[0]}; start a "
                "new cache for another batch"
            )
        elif (keys.shape[1], keys.shape[3]) != (self.keys.shape[1], self.keys.shape[3]):
            raise UserError("the cache was made for another model; take model.new_cache()")
        end = first + keys.shape[2]
        self.keys[:, :, first:end] = keys
        self.values[:, :, first:end] = values
        return self.keys[:, :, :end], self.values[:, :, :end]


class Cache:
    """Keys and values of a model's past tokens; `length` counts them. Routing needs no cache."""

    def __init__(self, num_layers: int, context: int) -> None:
        self.layers = [LayerCache(context) for _ in range(num_layers)]
        self.context = context
        self.length = 0

    def require_room(self, count: int) -> None:
        """Raise a `UserError` where `count` more tokens do not fit."""
        if self.length + count > self.context:
            raise UserError(
                f"{self.length} cached and {count} new tokens exceed the context of "
                f"{self.context}; start a new cache on the latest tokens"
            )


class HeadNorm(nn.RMSNorm):
    """RMSNorm of a head's queries or keys, in the dtype of its gain and cast back once."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x (B, H, T, E)."""
        # autocast hands over bfloat16 and leaves the gain in float32
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention on a normalised read; returns the update, without any residual.

    `norm` is the read's; the policy applies it (`Policy.read_normalised`).
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_kv_heads: int,
        *,
        qk_norm: bool,
        dropout: float,
        norm_eps: float,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = dim // num_heads
        self.dropout = dropout
        kv_dim = num_kv_heads * self.head_dim
        self.norm = nn.RMSNorm(dim, eps=norm_eps)
        self.query = nn.Linear(dim, dim, bias=False)
        self.key = nn.Linear(dim, kv_dim, bias=False)
        self.value = nn.Linear(dim, kv_dim, bias=False)
        self.output = nn.Linear(dim, dim, bias=False)
        self.query_norm = HeadNorm(self.head_dim, eps=norm_eps) if qk_norm else nn.Identity()
        self.key_norm = HeadNorm(self.head_dim, eps=norm_eps) if qk_norm else nn.Identity()

    def forward(
        self, x: Tensor, positions: Rotation | None, cache: LayerCache | None, first: int
    ) -> Tensor:
        """Attend over tokens.

        Args:
            x: What the sublayer reads (B, T, D), normalised.
            positions: Rotary angles of these tokens; None where positions are learned.
            cache: Past keys and values, to which these tokens' are added.
            first: Position of the first token; zero without a cache.
        """
        queries = self.query_norm(self._heads(project(self.query, x), self.num_heads))
        keys = self.key_norm(self._heads(project(self.key, x), self.num_kv_heads))
        values = self._heads(project(self.value, x), self.num_kv_heads)
        if positions is not None:
            queries, keys = rotate(queries, positions), rotate(keys, positions)
        if cache is not None:
            keys, values = cache.append(keys, values, first)
        attended = causal_attention(
            queries, keys, values, dropout=self.dropout if self.training else 0.0
        )
        update = project(self.output, attended.transpose(1, 2).flatten(2))
        return F.dropout(update, self.dropout, self.training)

    def _heads(self, x: Tensor, num_heads: int) -> Tensor:
        return x.view(*x.shape[:2], num_heads, self.head_dim).transpose(1, 2)
