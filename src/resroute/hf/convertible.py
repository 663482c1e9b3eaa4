"""Which models can be converted: what is refused, before anything changes."""

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from resroute.config import UserError
from resroute.hf.forms import Form, form_of
from resroute.hf.routed import stock_class

_ADAPTERS = "the model holds adapters of peft; convert it before they are added"


def convertible_form(model: Any) -> Form:
    """The form of a model's decoder, of which nothing says that its layers add up otherwise.

    Raises:
        UserError: No model of a supported architecture, or one that was changed.
    """
    if not isinstance(model, PreTrainedModel):
        raise UserError(_no_model(model))
    decoder: Any = model.base_model
    form = form_of(decoder)
    layers = getattr(decoder, form.layers)
    for module in (model, decoder, getattr(decoder, form.norm), *layers):
        _require_stock(module)
    require_known(decoder, form)
    return form


def require_known(decoder: Any, form: Form) -> None:
    """Refuse decoders and layers of which it is not known how they add up: it would be lost."""
    layers = getattr(decoder, form.layers)
    for module in (decoder, *layers):
        made_in = getattr(type(module).forward, "__module__", "")
        if not made_in.startswith("transformers."):
            raise UserError(
                f"{type(module).__name__}.forward is that of {made_in}, not of transformers: how "
                "it adds up is not known to resroute"
            )
    if len({id(layer) for layer in layers}) < len(layers):
        raise UserError(
            "one layer of the model is in it several times, but each has a place in depth; give "
            "each its own copy by copy.deepcopy"
        )
    asked = decoder.config.num_hidden_layers
    if asked != len(layers):
        raise UserError(
            f"the configuration says {asked} layers, and the model has {len(layers)}; set "
            f"config.num_hidden_layers = {len(layers)}"
        )


def require_own_forward(module: nn.Module) -> None:
    """Refuse modules whose `forward` is not that of their class."""
    if "forward" in module.__dict__:
        raise UserError(
            f"{type(module).__name__} has a forward of its own, as a device map or the autocast of "
            "accelerate gives it; do this before the model is dispatched or prepared"
        )


def has_adapters(model: Any) -> bool:
    """Whether a module is, or holds, one of peft's."""
    parts = model.modules() if isinstance(model, nn.Module) else (model,)
    return any(type(part).__module__.startswith("peft.") for part in parts)


def _require_stock(module: nn.Module) -> None:
    """Refuse modules that are changed already."""
    if stock_class(module) is not None:
        raise UserError(
            "the model was converted before; resroute.unconvert takes a method out again"
        )
    require_own_forward(module)
    if has_adapters(module):
        raise UserError(_ADAPTERS)


def _no_model(model: Any) -> str:
    if has_adapters(model):
        return _ADAPTERS
    return (
        f"{type(model).__name__} is no model of transformers; put the method into your own model "
        "by policy.read and policy.write, or by resroute.RoutedStack"
    )
