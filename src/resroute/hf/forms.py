"""Where decoders of the supported architectures keep their parts, and in which order they run.

Nothing of their code is here: sublayers, norms and dropouts stay theirs.
"""

from dataclasses import dataclass
from typing import Any

from torch import nn

from resroute.config import UserError, suggestion


@dataclass(frozen=True, kw_only=True)
class Sublayer:
    """One sublayer of a layer, by the names of the layer's modules.

    Its update is `after(module(before(read)))`.
    """

    module: str
    before: str | None = None
    """A norm of what is read."""
    after: tuple[str, ...] = ()
    """Norms and dropouts of the update."""
    outputs: tuple[str, ...] = ()
    """Inside of `module`, the linear maps that end it."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """One architecture's decoder."""

    attention: Sublayer
    mlp: Sublayer
    layers: str = "layers"
    norm: str = "norm"
    """The final norm."""
    parallel: str | None = None
    """A field of the configuration, or `always`, that says whether both sublayers read the same."""
    gain_offset: float = 0.0
    """Norms multiply by this plus their weight."""
    refused: tuple[str, ...] = ()
    """Fields of the configuration that must be false."""

    def is_parallel(self, config: Any) -> bool:
        """Whether attention and MLP of a layer read the same, and are one site."""
        if self.parallel is None:
            return False
        return self.parallel == "always" or bool(getattr(config, self.parallel))


_EXPERTS = ("down_proj", "experts.down_proj", "shared_expert.down_proj")


def _llama(attention_after: tuple[str, ...] = (), mlp_after: tuple[str, ...] = ()) -> Form:
    return Form(
        attention=Sublayer(
            module="self_attn",
            before="input_layernorm",
            after=attention_after,
            outputs=("o_proj",),
        ),
        mlp=Sublayer(
            module="mlp",
            before="post_attention_layernorm",
            after=mlp_after,
            outputs=(*_EXPERTS, "c_proj"),
        ),
    )


_SANDWICH = Form(
    attention=Sublayer(
        module="self_attn",
        before="input_layernorm",
        after=("post_attention_layernorm",),
    ),
    mlp=Sublayer(
        module="mlp",
        before="pre_feedforward_layernorm",
        after=("post_feedforward_layernorm",),
    ),
    gain_offset=1.0,
)
_POST = Form(
    attention=Sublayer(module="self_attn", after=("post_attention_layernorm",)),
    mlp=Sublayer(module="mlp", after=("post_feedforward_layernorm",)),
)

FORMS: dict[str, Form] = {
    **dict.fromkeys(
        (
            "llama",
            "mistral",
            "mixtral",
            "qwen2",
            "qwen2_moe",
            "qwen3",
            "qwen3_moe",
            "gemma",
            "olmo",
            "olmoe",
            "smollm3",
            "starcoder2",
        ),
        _llama(),
    ),
    "phi3": _llama(("resid_attn_dropout",), ("resid_mlp_dropout",)),
    **dict.fromkeys(("gemma2", "gemma3_text"), _SANDWICH),
    **dict.fromkeys(("olmo2", "olmo3"), _POST),
    "phi": Form(
        attention=Sublayer(
            module="self_attn",
            before="input_layernorm",
            after=("resid_dropout",),
            outputs=("dense",),
        ),
        mlp=Sublayer(
            module="mlp", before="input_layernorm", after=("resid_dropout",), outputs=("fc2",)
        ),
        norm="final_layernorm",
        parallel="always",
    ),
    "gpt2": Form(
        attention=Sublayer(module="attn", before="ln_1", outputs=("c_proj",)),
        mlp=Sublayer(module="mlp", before="ln_2", outputs=("c_proj",)),
        layers="h",
        norm="ln_f",
        refused=("add_cross_attention",),
    ),
    "gpt_neox": Form(
        attention=Sublayer(
            module="attention",
            before="input_layernorm",
            after=("post_attention_dropout",),
            outputs=("dense",),
        ),
        mlp=Sublayer(
            module="mlp",
            before="post_attention_layernorm",
            after=("post_mlp_dropout",),
            outputs=("dense_4h_to_h",),
        ),
        norm="final_layer_norm",
        parallel="use_parallel_residual",
    ),
}
"""By `model_type` of the configuration."""


def form_of(decoder: nn.Module) -> Form:
    """The form of a decoder.

    Raises:
        UserError: An architecture that is not supported, or one of its options.
    """
    config: Any = getattr(decoder, "config", None)
    name = getattr(config, "model_type", None)
    if name is None:
        raise UserError(
            f"{type(decoder).__name__} is no model of transformers; put the method into your own "
            "model by policy.read and policy.write, or by resroute.RoutedStack"
        )
    form = FORMS.get(name)
    if form is None:
        raise UserError(
            f"models of type {name!r} are not supported{suggestion(name, FORMS)}: how their layers "
            f"add up is not known to resroute\nsupported are {', '.join(sorted(FORMS))}"
        )
    for field in form.refused:
        if getattr(config, field, False):
            raise UserError(f"{name} with {field} is not supported: its layers have other sites")
    return form
