"""resroute's GPT as a model of transformers.

Its parameters have the names that `resroute.GPT` has for them, below `model.`; the head is
`lm_head`. A copy stands beside exported weights, for machines without resroute: it needs torch and
transformers alone.

B batch, T tokens, S keys, D width, L layers, V vocabulary.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .attention_resroute import STD, ResrouteAttention, linear, output_std, rotary_angles
from .configuration_resroute import ResrouteConfig
from .routing_resroute import build_policy

# the name of keys and values in transformers, since 5.24 and before it
_CACHE = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"


class ResrouteMLP(nn.Module):
    """SwiGLU or GELU on a normalised read; returns the update."""

    def __init__(self, config: ResrouteConfig) -> None:
        super().__init__()
        self.is_gated = config.mlp == "swiglu"
        self.dropout = config.dropout
        width = config.intermediate_size
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.up = linear(config.hidden_size, width * (1 + self.is_gated))
        self.output = linear(width, config.hidden_size, output_std(config))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Map what the sublayer reads (B, T, D), normalised, to its update."""
        hidden = self.up(hidden_states)
        if self.is_gated:
            gate, value = hidden.chunk(2, dim=-1)
            hidden = F.silu(gate) * value
        else:
            hidden = F.gelu(hidden)
        return F.dropout(self.output(hidden), self.dropout, self.training)


class ResrouteLayer(GradientCheckpointingLayer):
    """One attention and one MLP sublayer; the policy decides what they read."""

    def __init__(self, config: ResrouteConfig, layer_idx: int) -> None:
        super().__init__()
        self.first_site = 2 * layer_idx
        self.attention = ResrouteAttention(config, layer_idx)
        self.mlp = ResrouteMLP(config)

    def forward(
        self,
        hidden_states: Tensor | None,
        stream: Any,
        policy: Any,
        *,
        keeps_hidden: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor | None, Any]:
        """Carry the stream over two sites.

        Args:
            hidden_states: What the first site reads, for those who look; not used.
            stream: The policy's.
            policy: Carries it out.
            keeps_hidden: Whether to hand back what the site after these reads.
            **kwargs: For the attention.
        """
        site = self.first_site
        x, stream = policy.read_normalised(stream, site, self.attention.norm)
        stream = policy.write(stream, site, self.attention(x, **kwargs)[0])
        x, stream = policy.read_normalised(stream, site + 1, self.mlp.norm)
        stream = policy.write(stream, site + 1, self.mlp(x))
        if not keeps_hidden:
            return None, stream
        is_last = stream.site == policy.num_sites
        return policy.finish(stream) if is_last else policy.read(stream, stream.site), stream


class ResroutePreTrainedModel(PreTrainedModel):
    """What the models below share."""

    config: ResrouteConfig
    config_class = ResrouteConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    # every layer reads what earlier ones wrote, by parameters of the whole stack: one device
    _no_split_modules = ["ResrouteModel"]  # noqa: RUF012
    _skip_keys_device_placement = ["cache", "past_key_values"]  # noqa: RUF012
    _keep_in_fp32_modules_strict = ["policy"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _input_embed_layer = "embedding"
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": ResrouteLayer,
        "attentions": ResrouteAttention,
    }

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Set the initial weights of a module, by the law of `resroute.GPT.init_weights`."""
        if isinstance(module, nn.RMSNorm):
            nn.init.ones_(module.weight)
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=getattr(module, "initial_std", STD))
        elif isinstance(module, nn.Embedding):
            std = STD if self.config.tie_word_embeddings else 1.0
            nn.init.normal_(module.weight, std=getattr(module, "initial_std", std))
        elif module is getattr(self, "policy", None):
            # what was loaded stays
            loaded = {
                name: parameter.clone()
                for name, parameter in module.named_parameters()
                if getattr(parameter, "_is_hf_initialized", False)
            }
            module.reset_parameters()
            for name, parameter in module.named_parameters():
                if name in loaded:
                    parameter.copy_(loaded[name])

    def _set_gradient_checkpointing(self, *args: Any, **kwargs: Any) -> None:
        function = kwargs.get("gradient_checkpointing_func")
        if getattr(function, "keywords", {}).get("use_reentrant"):
            raise ValueError(
                "reentrant checkpointing would lose the gradients of earlier layers' sources; pass "
                "gradient_checkpointing_kwargs={'use_reentrant': False}"
            )
        super()._set_gradient_checkpointing(*args, **kwargs)


class ResrouteModel(ResroutePreTrainedModel):
    """The stack without its head."""

    def __init__(self, config: ResrouteConfig) -> None:
        super().__init__(config)
        dim = config.hidden_size
        self.head_dim = dim // config.num_attention_heads
        self.embedding = nn.Embedding(config.vocab_size, dim)
        self.positions = None
        if config.position == "learned":
            self.positions = nn.Embedding(config.max_position_embeddings, dim)
            self.positions.initial_std = STD  # type: ignore[assignment]
        self.layers = nn.ModuleList(
            ResrouteLayer(config, index) for index in range(config.num_hidden_layers)
        )
        self.norm = nn.RMSNorm(dim, eps=config.rms_norm_eps)
        self.policy = build_policy(config.residual, config.num_hidden_layers, dim)
        self.gradient_checkpointing = False
        self.post_init()  # type: ignore[no-untyped-call]

    @merge_with_config_defaults  # type: ignore[untyped-decorator]
    @capture_outputs  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Normalised readouts (B, T, D).

        `hidden_states[i]`, where asked for, is what the attention of layer i reads, before its
        norm (the embedding first of all); the last one is the normalised readout.

        Args:
            input_ids: (B, T) token ids.
            attention_mask: (B, S) ones at tokens and zeros at padding, or a mask (B, 1, T, S).
            position_ids: (B, T); by default places among the tokens that are not padding.
            cache: Keys and values of earlier tokens.
            past_key_values: The same by its former name.
            inputs_embeds: (B, T, D) in place of token ids.
            use_cache: Whether to hand back keys and values.
            **kwargs: For the attention; `output_hidden_states`, `output_attentions`.

        Raises:
            ValueError: Token ids and embeddings, or neither; more tokens than learned positions.
        """
        x = self._embed(input_ids, inputs_embeds)
        cache = past_key_values if cache is None else cache
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            cache, use_cache = None, False
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        if position_ids is None:
            position_ids = _positions(x, attention_mask, cache)
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=x,
            attention_mask=attention_mask,
            position_ids=position_ids,
            **{_CACHE: cache},
        )
        angles = None
        if self.positions is None:
            angles = rotary_angles(position_ids, self.head_dim, x)
        else:
            _require_learned(position_ids, self.positions.num_embeddings)
            x = x + self.positions(position_ids)
        x = F.dropout(x, self.config.dropout, self.training)
        keeps_hidden = bool(kwargs.pop("output_hidden_states", self.config.output_hidden_states))
        hidden: Tensor | None = x
        stream = self.policy.start(x)
        for layer in self.layers:
            hidden, stream = layer(
                hidden,
                stream,
                self.policy,
                keeps_hidden=keeps_hidden,
                angles=angles,
                attention_mask=mask,
                position_ids=position_ids,
                cache=cache,
                **kwargs,
            )
        return BaseModelOutputWithPast(
            last_hidden_state=self.norm(self.policy.finish(stream)), **{_CACHE: cache}
        )

    def _embed(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give input_ids or inputs_embeds, one of them")
        x: Tensor = self.embedding(input_ids) if inputs_embeds is None else inputs_embeds
        if any(parameter.device != x.device for parameter in self.policy.parameters()):
            raise ValueError(
                "the policy is not where the embedding is: layers read each other's updates, so "
                "load the whole model onto one device, without offloading"
            )
        return x


class ResrouteForCausalLM(ResroutePreTrainedModel, GenerationMixin):
    """A model that predicts each token's successor."""

    _tied_weights_keys = {"lm_head.weight": "model.embedding.weight"}  # noqa: RUF012

    def __init__(self, config: ResrouteConfig) -> None:
        super().__init__(config)
        self.model = ResrouteModel(config)
        self.vocab_size = config.vocab_size
        # near-uniform predictions at first
        self.lm_head = linear(config.hidden_size, config.vocab_size, 0.001)
        self.post_init()  # type: ignore[no-untyped-call]

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits (B, T, V), and the loss where there are labels.

        Args:
            input_ids: See `ResrouteModel.forward`, as the next five.
            attention_mask: (B, S) or (B, 1, T, S).
            position_ids: (B, T).
            cache: Keys and values of earlier tokens.
            past_key_values: The same by its former name.
            inputs_embeds: (B, T, D).
            labels: (B, T), the tokens themselves: they are shifted here; -100 is not counted.
            use_cache: Whether to hand back keys and values.
            logits_to_keep: Of so many last tokens, or at these places; 0 is all.
            **kwargs: As there; `num_items_in_batch` divides the sum of losses.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=past_key_values if cache is None else cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs
            )
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            **{_CACHE: getattr(outputs, _CACHE)},
        )


def _positions(x: Tensor, attention_mask: Tensor | None, cache: Any) -> Tensor:
    """Places (B or 1, T) of tokens, among those that are not padding where a mask tells them."""
    past = 0 if cache is None else cache.get_seq_length()
    columns = (torch.arange(x.shape[1], device=x.device) + past).unsqueeze(0)
    if attention_mask is None or attention_mask.dim() != 2:
        return columns
    # of a static cache it is a tensor; what was compiled has no number to compare
    if isinstance(past, int) and attention_mask.shape[1] < past + x.shape[1]:
        raise ValueError(
            f"attention_mask has {attention_mask.shape[1]} places; it needs one for each of the "
            f"{past} tokens in the cache and the {x.shape[1]} new ones"
        )
    # a mask may go on behind the last token, as that of a static cache does
    places = (attention_mask.to(x.device).long().cumsum(-1) - 1).clamp(min=0)
    return places.gather(1, columns.expand(len(places), -1))


def _require_learned(position_ids: Tensor, learned: int) -> None:
    # a look at numbers on a GPU would wait for it; there torch's own assertion has to do
    if torch.compiler.is_compiling() or position_ids.device.type != "cpu":
        return
    if position_ids.numel() and int(position_ids.max()) >= learned:
        raise ValueError(
            f"a token in place {int(position_ids.max()) + 1} exceeds the {learned} positions that "
            "the model has learned"
        )


__all__ = ["ResrouteForCausalLM", "ResrouteModel", "ResroutePreTrainedModel"]
