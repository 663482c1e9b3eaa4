"""Putting a residual method into a model of transformers, and taking it out again."""

from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from resroute.config import UserError, to_dict
from resroute.hf.fold import fold
from resroute.hf.forms import Form, form_of
from resroute.hf.routed import (
    FIELD,
    POLICY,
    Routing,
    decoder_class,
    layer_class,
    model_class,
    norm_class,
    stock_class,
)
from resroute.residual import LayerScale, Policy, PreNorm, ResidualConfig
from resroute.residual.base import DEFAULT_KINDS
from resroute.residual.routed import RoutedPolicy
from resroute.residual.routed_config import RoutedConfig

PARALLEL_KINDS = ("attention+mlp",)
"""The one sublayer of a layer whose attention and MLP read the same."""

M = TypeVar("M", bound=PreTrainedModel)


def convert(model: M, method: ResidualConfig, *, from_scratch: bool = False) -> M:
    """Put a residual method into a decoder of transformers, in place.

    Sublayers, norms, masks, positions, caches and heads stay its own; what adds up over depth
    is the policy's, which becomes `residual_policy` of the decoder, in float32. `generate`,
    gradient checkpointing (non-reentrant), `save_pretrained`, LoRA and `Trainer` work as before.
    The configuration gets the method as `resroute`; a saved model is loaded by `from_pretrained`.

    A trained model has to start as what it was: `PreNorm`, `LayerScale(init=1)` and every routed
    method with `gated=True` leave all logits equal to the bit, and can then be trained.

    Args:
        model: A causal model, or any other with the same decoder; see `hf.forms.FORMS` for the
            architectures.
        method: The method.
        from_scratch: Also take methods that change what a trained model computes, for a model with
            initial weights. They stay as they are: embeddings of std 0.02, as most have, are small
            against `eps` of routed methods (see docs/methods.md).

    Returns:
        The model itself.

    Raises:
        UserError: An architecture that is not supported, a model that was converted before, that
            holds LoRA adapters or hooks of a device map, or a method that does not start as the
            identity.
    """
    if not isinstance(model, PreTrainedModel):
        raise UserError(_no_model(model))
    if not (from_scratch or starts_as_prenorm(method)):
        raise UserError(
            f"{method.label} changes what a trained model computes; take gated=True, or PreNorm, "
            "or LayerScale(init=1)\ngive from_scratch=True for a model with initial weights"
        )
    decoder: Any = model.base_model
    form = form_of(decoder)
    layers, norm = getattr(decoder, form.layers), getattr(decoder, form.norm)
    for module in (model, decoder, norm, *layers):
        _require_stock(module)
    config = decoder.config
    kinds = PARALLEL_KINDS if form.is_parallel(config) else DEFAULT_KINDS
    policy = method.build(len(layers), config.hidden_size, kinds)
    policy.to(decoder.get_input_embeddings().weight.device)
    install(model, policy, form)
    setattr(model.config, FIELD, to_dict(method))
    return model


def starts_as_prenorm(method: ResidualConfig) -> bool:
    """Whether a stack with a method computes, before any training, what plain residuals compute."""
    if isinstance(method, RoutedConfig):
        return method.gated
    return isinstance(method, PreNorm) or (isinstance(method, LayerScale) and method.init == 1)


def install(model: PreTrainedModel, policy: nn.Module, form: Form) -> None:
    """Change the classes of a model's modules so that they carry a stream."""
    decoder: Any = model.base_model
    setattr(decoder, POLICY, policy)
    layers = getattr(decoder, form.layers)
    size = 1 if form.is_parallel(decoder.config) else 2
    for index, layer in enumerate(layers):
        layer.__dict__["_routing"] = Routing(decoder, form, size * index)
        layer.__class__ = layer_class(type(layer))
    norm = getattr(decoder, form.norm)
    norm.__dict__["_routing"] = Routing(decoder, form, size * len(layers))
    norm.__class__ = norm_class(type(norm))
    decoder.__class__ = decoder_class(stock_class(decoder) or type(decoder))
    # a model may be its own decoder, or be born with its class
    if stock_class(model) is None:
        model.__class__ = model_class(type(model))


@torch.no_grad()
def unconvert(model: M) -> M:
    """Take a method out again, where plain residuals can compute the same, in place.

    `PreNorm` and closed gates (all zero) leave the weights as they are; coefficients of
    `LayerScale` and `ReZero` are multiplied into the last maps, or last norms, of the sublayers.

    Returns:
        The model itself, of its stock classes.

    Raises:
        UserError: A model that was not converted, or whose routing cannot be folded into weights.
    """
    if not isinstance(model, PreTrainedModel) or stock_class(model) is None:
        raise UserError(f"{type(model).__name__} was not converted by resroute")
    decoder: Any = model.base_model
    form, policy = form_of(decoder), getattr(decoder, POLICY)
    layers = getattr(decoder, form.layers)
    if _has_coefficients(policy):
        fold(layers, form, policy, decoder.config)
    for module in {
        id(m): m for m in (model, decoder, getattr(decoder, form.norm), *layers)
    }.values():
        module.__dict__.pop("_routing", None)
        stock = stock_class(module)
        assert stock is not None
        module.__class__ = stock
    delattr(decoder, POLICY)
    delattr(model.config, FIELD)
    return model


def _has_coefficients(policy: Policy[Any]) -> bool:
    """Whether updates are multiplied as they are written.

    Raises:
        UserError: Routing that plain residuals cannot compute.
    """
    if not isinstance(policy, RoutedPolicy):
        return policy.coefficient(0) is not None
    if policy.gate is None or bool(policy.gate.any()):
        what = "has no gates" if policy.gate is None else "has gates that have opened"
        raise UserError(
            f"the routing {what}: no weights of plain residuals compute the same\nonly PreNorm, "
            "ReZero, LayerScale and closed gates can be taken out"
        )
    return False


def _require_stock(module: nn.Module) -> None:
    """Refuse modules whose `forward` is not that of their class."""
    if stock_class(module) is not None:
        raise UserError(
            "the model was converted before; resroute.unconvert takes a method out again"
        )
    if "forward" in module.__dict__:
        raise UserError(
            f"{type(module).__name__} has a forward of its own, as a device map gives it; convert "
            "the model before it is dispatched"
        )
    # class-level marks of adapters
    if any(type(part).__module__.startswith("peft.") for part in module.modules()):
        raise UserError("the model holds adapters of peft; convert it before they are added")


def _no_model(model: Any) -> str:
    if type(model).__module__.startswith("peft."):
        return "the model holds adapters of peft; convert it before they are added"
    return (
        f"{type(model).__name__} is no model of transformers; put the method into your own model "
        "by policy.read and policy.write, or by resroute.RoutedStack"
    )
