"""Putting a residual method into a model of transformers, and taking it out again."""

from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from resroute.config import UserError, to_dict, variants
from resroute.hf.convertible import convertible_form, has_adapters, require_own_forward
from resroute.hf.fold import fold
from resroute.hf.forms import form_of
from resroute.hf.routed import POLICY, stock_class
from resroute.hf.routed_model import FIELD, WITHIN, install, policy_for
from resroute.residual import LayerScale, Policy, PreNorm, ResidualConfig
from resroute.residual.routed import RoutedPolicy
from resroute.residual.routed_config import RoutedConfig

_CONVERTED = " (converted by resroute)"

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
            holds LoRA adapters or hooks of a device map, whose decoder or layers run code that is
            not of transformers, or a method that does not start as the identity. The model is then
            as it was.
    """
    form = convertible_form(model)
    if not isinstance(method, ResidualConfig):
        got = f"the class {method.__name__}" if isinstance(method, type) else repr(method)
        raise UserError(
            f"method must be a configuration such as resroute.WAV(num_blocks=4, gated=True), "
            f"got {got}"
        )
    if not (from_scratch or starts_as_prenorm(method)):
        raise UserError(
            f"{method.label} changes what a trained model computes; take gated=True, or PreNorm, "
            "or LayerScale(init=1)\ngive from_scratch=True for a model with initial weights"
        )
    if variants(ResidualConfig).get(getattr(method, "type_name", "")) is not type(method):
        raise UserError(
            f"{type(method).__name__} is not registered, so that it could not be saved; see "
            "resroute.config.register"
        )
    decoder: Any = model.base_model
    field = to_dict(method)
    policy = policy_for(decoder, form, method)
    policy.to(decoder.get_input_embeddings().weight.device, torch.float32)
    # calls of `init_weights` leave it as it is, as they do with weights that were loaded
    policy.__dict__["_is_hf_initialized"] = True
    install(model, policy, form)
    setattr(model.config, FIELD, field)
    # adapters name their base by this: one that names the stock folder would load without routing
    if model.name_or_path:
        model.name_or_path += _CONVERTED
    return model


def starts_as_prenorm(method: ResidualConfig) -> bool:
    """Whether a stack with a method computes, before any training, what plain residuals compute."""
    if isinstance(method, RoutedConfig):
        return method.gated
    return isinstance(method, PreNorm) or (isinstance(method, LayerScale) and method.init == 1)


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
    if has_adapters(model):
        raise UserError(
            "the model holds adapters of peft; merge them (merge_and_unload) before "
            "resroute.unconvert"
        )
    if not isinstance(model, PreTrainedModel) or stock_class(model) is None:
        raise UserError(f"{type(model).__name__} was not converted by resroute")
    decoder: Any = model.base_model
    if decoder.__dict__[WITHIN] and decoder is model:
        raise UserError(
            f"{type(model).__name__} was converted as a part of a model: give resroute.unconvert "
            "that model"
        )
    form, policy = form_of(decoder), getattr(decoder, POLICY)
    layers = getattr(decoder, form.layers)
    for module in (decoder, getattr(decoder, form.norm), *layers):
        require_own_forward(module)
    if _has_coefficients(policy):
        fold(model, form, policy)
    for module in {
        id(m): m for m in (model, decoder, getattr(decoder, form.norm), *layers)
    }.values():
        module.__dict__.pop("_routing", None)
        module.__dict__.pop(WITHIN, None)
        stock = stock_class(module)
        assert stock is not None
        module.__class__ = stock
    delattr(decoder, POLICY)
    delattr(model.config, FIELD)
    model.name_or_path = (model.name_or_path or "").removesuffix(_CONVERTED)
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
