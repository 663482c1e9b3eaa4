"""A plain GPT without this library: what its PreNorm is measured against.

Written as a textbook has it: eager torch, `x = x + f(norm(x))`, `scaled_dot_product_attention`. Its
parameters have the names of ours, so that it loads our weights; nothing else is shared.

B batch, T tokens, D width, H heads, E = D / H head width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class PlainAttention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm = nn.RMSNorm(dim, eps=1e-6)
        self.query = nn.Linear(dim, dim, bias=False)
        self.key = nn.Linear(dim, dim, bias=False)
        self.value = nn.Linear(dim, dim, bias=False)
        self.output = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """The update of x (B, T, D)."""
        batch, length, dim = x.shape
        shape = (batch, length, self.num_heads, dim // self.num_heads)
        x = self.norm(x)
        q = _rotate(self.query(x).view(shape).transpose(1, 2), cosine, sine)
        k = _rotate(self.key(x).view(shape).transpose(1, 2), cosine, sine)
        v = self.value(x).view(shape).transpose(1, 2)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        update: Tensor = self.output(attended.transpose(1, 2).reshape(batch, length, dim))
        return update


class PlainMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(dim, eps=1e-6)
        self.up = nn.Linear(dim, 2 * hidden, bias=False)
        self.output = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The update of x (B, T, D)."""
        gate, value = self.up(self.norm(x)).chunk(2, dim=-1)
        update: Tensor = self.output(F.silu(gate) * value)
        return update


class PlainLayer(nn.Module):
    """`x = x + attention(x)`, then `x = x + mlp(x)`."""

    def __init__(self, dim: int, num_heads: int, hidden: int) -> None:
        super().__init__()
        self.attention = PlainAttention(dim, num_heads)
        self.mlp = PlainMLP(dim, hidden)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Carry x (B, T, D) over the layer."""
        x = x + self.attention(x, cosine, sine)
        after: Tensor = x + self.mlp(x)
        return after


class PlainGPT(nn.Module):
    """The whole model: untied head, SwiGLU of four times the width, no biases."""

    def __init__(self, *, vocab_size: int, num_layers: int, num_heads: int, dim: int) -> None:
        super().__init__()
        self.head_dim = dim // num_heads
        self.embedding = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleList(PlainLayer(dim, num_heads, 4 * dim) for _ in range(num_layers))
        self.norm = nn.RMSNorm(dim, eps=1e-6)
        self.head = nn.Linear(dim, vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (B, T, V) of tokens (B, T)."""
        x = self.embedding(tokens)
        steps = torch.arange(self.head_dim // 2, device=x.device) / (self.head_dim // 2)
        angles = torch.outer(torch.arange(tokens.shape[1], device=x.device), 10_000.0**-steps)
        for layer in self.layers:
            x = layer(x, angles.cos(), angles.sin())
        logits: Tensor = self.head(self.norm(x))
        return logits

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats."""
        logits = self(tokens)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    rotated = torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
    return rotated.to(x.dtype)
