"""Configuration of a resroute model for transformers.

A copy stands beside exported weights, for machines without resroute: it needs transformers alone.
"""

from typing import Any

from transformers import PreTrainedConfig


class ResrouteConfig(PreTrainedConfig):
    """Shape of a model, by the names that transformers has for it.

    Args:
        vocab_size: V.
        hidden_size: D, width of the stream.
        intermediate_size: Hidden width of the MLP; None is 4 D.
        num_hidden_layers: L; each is an attention and an MLP sublayer.
        num_attention_heads: Query heads; D must be divisible by them.
        num_key_value_heads: Key-value heads; None is one for each query head.
        max_position_embeddings: Tokens that the model was trained to see at once.
        residual: The residual method and its options, as `resroute.config.to_dict` gives them;
            None is PreNorm.
        mlp: "swiglu" or "gelu".
        position: "rope" or "learned".
        qk_norm: Normalise queries and keys per head.
        dropout: Probability, on the embedding, the attention weights and each update.
        rms_norm_eps: Added to mean squares in norms.
        tie_word_embeddings: Use the embedding as the head.
        use_cache: Return keys and values.
        bos_token_id: Token with which an empty prompt starts.
        eos_token_id: Token at which `generate` stops.
        pad_token_id: Token that fills rows of a batch.
        **kwargs: What every configuration of transformers takes.

    Raises:
        ValueError: Sizes that do not fit each other, or an unknown choice.
    """

    model_type = "resroute"
    # the second is its name before transformers 5.24
    keys_to_ignore_at_inference = ["cache", "past_key_values"]  # noqa: RUF012

    def __init__(
        self,
        vocab_size: int = 256,
        hidden_size: int = 512,
        intermediate_size: int | None = None,
        num_hidden_layers: int = 12,
        num_attention_heads: int = 8,
        num_key_value_heads: int | None = None,
        max_position_embeddings: int = 256,
        residual: dict[str, Any] | None = None,
        mlp: str = "swiglu",
        position: str = "rope",
        qk_norm: bool = False,
        dropout: float = 0.0,
        rms_norm_eps: float = 1e-6,
        tie_word_embeddings: bool = False,
        use_cache: bool = True,
        bos_token_id: int | None = None,
        eos_token_id: int | list[int] | None = None,
        pad_token_id: int | None = None,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = 4 * hidden_size if intermediate_size is None else intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads or num_attention_heads
        self.max_position_embeddings = max_position_embeddings
        if residual is not None and not isinstance(residual, dict):
            raise ValueError(
                "residual must be a dictionary, such as resroute.config.to_dict gives, got "
                f"{type(residual).__name__}"
            )
        self.residual = dict(residual or {"type": "pre_norm"})
        self.mlp = mlp
        self.position = position
        self.qk_norm = qk_norm
        self.dropout = dropout
        self.rms_norm_eps = rms_norm_eps
        self.use_cache = use_cache
        self._check()
        super().__init__(**kwargs)
        # before the others they would be taken for settings of `generate`, and dropped
        self.tie_word_embeddings = tie_word_embeddings
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        self.pad_token_id = pad_token_id

    def _check(self) -> None:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size must be divisible by num_attention_heads, got {self.hidden_size} and "
                f"{self.num_attention_heads}"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                "num_attention_heads must be divisible by num_key_value_heads, got "
                f"{self.num_attention_heads} and {self.num_key_value_heads}"
            )
        for name, choices in (("mlp", ("swiglu", "gelu")), ("position", ("rope", "learned"))):
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"{name} must be {choices[0]!r} or {choices[1]!r}, got {getattr(self, name)!r}"
                )
        if self.position == "rope" and (self.hidden_size // self.num_attention_heads) % 2:
            raise ValueError(
                f"rotary positions need an even head width, got {self.hidden_size} / "
                f"{self.num_attention_heads}; change the heads or use position='learned'"
            )
        if "type" not in self.residual:
            raise ValueError(f"residual needs a 'type', such as 'wav', got {self.residual}")


__all__ = ["ResrouteConfig"]
