"""A decoder-only Transformer that never asks which residual method it carries.

Against a vanilla GPT: RMSNorm without biases, rotary or learned positions, SwiGLU or GELU, grouped
queries, optional qk-norm, tied or untied head, and a residual policy in place of `x = x + f(x)`.

B batch, T tokens, D width, L layers, V vocabulary.
"""

import warnings
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from resroute.config import UserError, documented, require_whole, settle
from resroute.model.attention import Attention, Cache, LayerCache, Rotation, rotation
from resroute.model.loss import cross_entropy, linear_cross_entropy, widen
from resroute.model.projection import project
from resroute.residual import Policy, PreNorm, ResidualConfig
from resroute.residual.untouched import untouched

# beyond any model that fits a machine; a slip of a zero should not hang one
_MOST = {
    "vocab_size": 2**31 - 1,
    "context": 2**27,
    "num_layers": 10_000,
    "num_heads": 2**20,
    "dim": 2**20,
}


@documented
@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Shape of a model.

    Raises:
        UserError: A size out of its range; or heads that do not divide the width, key-value heads
            that do not divide the heads, or rotary positions with an odd head width.
    """

    vocab_size: int
    """V."""
    context: int = 256
    """Most tokens that attend to each other."""
    num_layers: int = 12
    """L; each is an attention and an MLP sublayer."""
    num_heads: int = 8
    """Query heads of an attention; they divide `dim`."""
    dim: int = 512
    """D, width of the stream."""
    residual: ResidualConfig = field(default_factory=PreNorm)
    """How the stack carries information over depth."""
    mlp: Literal["swiglu", "gelu"] = "swiglu"
    """What the MLP does between its matrices."""
    mlp_ratio: float = 4.0
    """Hidden width of the MLP over D."""
    num_kv_heads: int | None = None
    """Key-value heads; None is one for each query head."""
    position: Literal["rope", "learned"] = "rope"
    """Rotary positions in each attention, or a learned embedding of each position."""
    qk_norm: bool = False
    """Normalise queries and keys per head."""
    tie_embeddings: bool = False
    """Use the embedding as the head. Its initial scale is then 0.02, so that `eps` of routed
    methods is no longer small against the embedding's mean square of 4e-4."""
    dropout: float = 0.0
    """Probability, on the embedding, the attention weights and each update."""
    norm_eps: float = 1e-6
    """Added to the mean squares in the norms of sublayers and of the readout."""

    def __post_init__(self) -> None:
        settle(self)
        for name, most in _MOST.items():
            require_whole(name, getattr(self, name), 1, most)
        if self.dim % self.num_heads:
            near = [h for h in range(1, self.dim + 1) if self.dim % h == 0]
            closest = min(near, key=lambda h: abs(h - self.num_heads))
            raise UserError(
                f"dim must be divisible by num_heads, got {self.dim} and {self.num_heads}; "
                f"try {closest} heads"
            )
        if self.position == "rope" and (self.dim // self.num_heads) % 2:
            raise UserError(
                f"rotary positions need an even head width, got {self.dim} / {self.num_heads} = "
                f"{self.dim // self.num_heads}; change the heads or use position='learned'"
            )
        if self.num_kv_heads is not None and (
            self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads
        ):
            raise UserError(
                f"num_heads must be divisible by num_kv_heads, got {self.num_heads} and "
                f"{self.num_kv_heads}"
            )
        if not 0 < self.mlp_ratio <= 1000 or self.hidden_dim < 1:
            raise UserError(
                f"mlp_ratio must be at most 1000 and leave a hidden unit, got {self.mlp_ratio} at "
                f"dim {self.dim}"
            )
        if not 0 <= self.dropout < 1:
            raise UserError(f"dropout must be at least 0 and below 1, got {self.dropout}")
        if not 0 <= self.norm_eps <= 1:
            raise UserError(f"norm_eps must be at least 0 and at most 1, got {self.norm_eps}")

    @property
    def hidden_dim(self) -> int:
        """Hidden width of the MLP."""
        return int(self.mlp_ratio * self.dim)


class MLP(nn.Module):
    """SwiGLU or GELU on a normalised read; returns the update, without any residual.

    `norm` is the read's; the policy applies it (`Policy.read_normalised`).
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.is_gated = config.mlp == "swiglu"
        self.dropout = config.dropout
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.up = nn.Linear(config.dim, config.hidden_dim * (1 + self.is_gated), bias=False)
        self.output = nn.Linear(config.hidden_dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map what the sublayer reads (B, T, D), normalised, to its update."""
        hidden = project(self.up, x)
        if self.is_gated:
            gate, value = hidden.chunk(2, dim=-1)
            hidden = F.silu(gate) * value
        else:
            hidden = F.gelu(hidden)
        return F.dropout(project(self.output, hidden), self.dropout, self.training)


class Layer(nn.Module):
    """One attention and one MLP sublayer; the policy decides what they read."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention = Attention(
            config.dim,
            config.num_heads,
            config.num_kv_heads or config.num_heads,
            qk_norm=config.qk_norm,
            dropout=config.dropout,
            norm_eps=config.norm_eps,
        )
        self.mlp = MLP(config)

    def forward(
        self,
        stream: Any,
        policy: Policy[Any],
        site: int,
        positions: Rotation | None,
        cache: LayerCache | None,
        first: int,
    ) -> Any:
        """Carry the stream over two sites."""
        x, stream = policy.read_normalised(stream, site, self.attention.norm)
        stream = policy.write(stream, site, self.attention(x, positions, cache, first))
        x, stream = policy.read_normalised(stream, site + 1, self.mlp.norm)
        return policy.write(stream, site + 1, self.mlp(x))


class GPT(nn.Module):
    """Decoder-only Transformer with any residual method.

    May be built under `torch.device("meta")`; then `to_empty(device=..)` and `init_weights()`.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.activation_checkpointing = False
        """Keep what layers hand on and compute the rest again in the backward pass."""
        device = torch.get_default_device()
        # torch's own first draws would cost time and move the generator
        with torch.device("meta"):
            self.embedding = nn.Embedding(config.vocab_size, config.dim)
            self.positions = (
                nn.Embedding(config.context, config.dim) if config.position == "learned" else None
            )
            self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
            self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
            self.head = (
                None
                if config.tie_embeddings
                else nn.Linear(config.dim, config.vocab_size, bias=False)
            )
        self.to_empty(device=device)
        with warnings.catch_warnings():
            # said below, of the line that builds the model
            warnings.simplefilter("ignore")
            self.policy = config.residual.build(config.num_layers, config.dim)
        for note in self.policy.notes:
            warnings.warn(note, stacklevel=2)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self, part: str = "") -> None:
        """Set every parameter, or those of one part, from torch's global generator.

        Parts in the order of `named_children` (layers one by one) draw what the whole draws.

        Args:
            part: Name of a module below which to set parameters, such as `layers.3`.

        | parameter | law |
        | --- | --- |
        | embedding, untied | normal, std 1: sources start well above eps |
        | embedding, tied; learned positions | normal, std 0.02 |
        | head | normal, std 0.001: near-uniform predictions |
        | output projections | normal, std 0.02 / sqrt(2 L) |
        | other matrices | normal, std 0.02 |
        | norm gains | one |
        | policy | constants, see its `reset_parameters` |

        Policies draw nothing, so models that differ in the method alone start from equal weights.
        """
        tied = self.head is None
        for name, module in self.get_submodule(part).named_modules(prefix=part):
            if isinstance(module, nn.RMSNorm):
                nn.init.ones_(module.weight)
            elif isinstance(module, nn.Linear):
                std = 0.02
                if name == "head":
                    std = 0.001
                elif name.endswith(".output"):
                    std = 0.02 / (2 * self.config.num_layers) ** 0.5
                nn.init.normal_(module.weight, std=std)
            elif isinstance(module, nn.Embedding):
                is_positions = name == "positions"
                nn.init.normal_(module.weight, std=0.02 if tied or is_positions else 1.0)
        if part in ("", "policy"):
            self.policy.reset_parameters()

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        return_logits: bool | None = None,
        cache: Cache | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Predict each token's successor.

        Args:
            tokens: (B, T) token ids; T is at most the context.
            targets: (B, T) successors, already shifted; -100 is not counted.
            return_logits: Whether to return logits; by default only where there are no targets.
            cache: Past keys and values; these tokens follow them and are added.

        Returns:
            Logits (B, T, V) in float32 or float64, or None; and the mean cross-entropy of the
            counted targets in nats, or None without targets.

        Raises:
            UserError: Tokens that are not (B, T), or more of them than the context holds.
        """
        if targets is not None and targets.shape != tokens.shape:
            raise UserError(
                f"targets must have the shape of tokens, {tuple(tokens.shape)}, got "
                f"{tuple(targets.shape)}"
            )
        hidden = self._hidden(tokens, cache)
        keeps_logits = targets is None if return_logits is None else return_logits
        logits = self._logits(hidden) if keeps_logits else None
        if targets is None:
            return logits, None
        head = self.embedding if self.head is None else self.head
        # another module may have been put in the head's place, or hooks on it
        is_plain = self.head is None or (untouched(head, nn.Linear) and head.bias is None)
        if logits is None and is_plain:
            loss = linear_cross_entropy(hidden.flatten(0, 1), head.weight, targets.flatten())
        else:
            loss = cross_entropy(self._logits(hidden) if logits is None else logits, targets)
        return logits, loss

    def next_logits(self, tokens: Tensor, cache: Cache) -> Tensor:
        """Logits (B, V) of what follows tokens (B, T), as `forward` has them at its last place."""
        return self._logits(self._hidden(tokens, cache)[:, -1])

    def new_cache(self) -> Cache:
        """An empty key-value cache for one batch of sequences."""
        return Cache(self.config.num_layers, self.config.context)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile in place, per sublayer: one compilation serves all layers of any depth."""
        for layer in self.layers:
            assert isinstance(layer, Layer)
            layer.attention.compile(*args, **kwargs)
            layer.mlp.compile(*args, **kwargs)

    def _logits(self, hidden: Tensor) -> Tensor:
        if self.head is None:
            return widen(F.linear(hidden, self.embedding.weight))
        return widen(self.head(hidden))

    def _hidden(self, tokens: Tensor, cache: Cache | None) -> Tensor:
        if tokens.dim() != 2:
            raise UserError(f"tokens must be (batch, tokens), got shape {tuple(tokens.shape)}")
        length = tokens.shape[1]
        if length > self.config.context:
            raise UserError(f"{length} tokens exceed the model's context of {self.config.context}")
        first = 0
        if cache is not None:
            if (len(cache.layers), cache.context) != (self.config.num_layers, self.config.context):
                raise UserError("the cache was made for another model; take model.new_cache()")
            cache.require_room(length)
            first = cache.length
        x = self.embedding(tokens)
        angles = None
        if self.positions is None:
            head_dim = self.config.dim // self.config.num_heads
            angles = rotation(first, length, head_dim, x)
        else:
            x = x + self.positions.weight[first : first + length]
        x = F.dropout(x, self.config.dropout, self.training)
        stream = self.policy.start(x)
        recomputes = self.activation_checkpointing and cache is None and torch.is_grad_enabled()
        for index, layer in enumerate(self.layers):
            layer_cache = None if cache is None else cache.layers[index]
            arguments = (stream, self.policy, 2 * index, angles, layer_cache, first)
            if recomputes:
                stream = checkpoint(layer, *arguments, use_reentrant=False)
            else:
                stream = layer(*arguments)
        if cache is not None:
            # last, so that a forward pass that failed leaves the cache as it was
            cache.length += length
        normalised: Tensor = self.norm(self.policy.finish(stream))
        return normalised


def outline(config: GPTConfig) -> GPT:
    """A model without its numbers, on the meta device, and without notes on its shape."""
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return GPT(config)
