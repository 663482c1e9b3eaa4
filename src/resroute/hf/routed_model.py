"""What the whole of a converted model does: how it is built, loaded, saved and called."""

import functools
from pathlib import Path
from typing import Any

from torch import nn

from resroute.config import UserError, from_dict
from resroute.files import read_json, write_json
from resroute.hf.convertible import require_known
from resroute.hf.forms import Form, form_of
from resroute.hf.routed import (
    GIVEN,
    POLICY,
    Given,
    Routing,
    Unpickled,
    derived,
    layer_class,
    norm_class,
    once,
    stock_class,
)
from resroute.residual import Policy, ResidualConfig
from resroute.residual.base import DEFAULT_KINDS

FIELD = "resroute"
"""Field of the configuration that holds the method."""
WITHIN = "_converted_within"
"""Attribute of a converted decoder: whether it is a part of the model that was converted."""
PARALLEL_KINDS = ("attention+mlp",)
"""The one sublayer of a layer whose attention and MLP read the same."""
MARK = "transformers_weights"
"""Field of a saved configuration by which stock classes refuse to load it."""
_REMEDY = "load this folder by resroute.from_pretrained: it has depth routing"


def policy_for(decoder: Any, form: Form, method: ResidualConfig) -> Policy[Any]:
    """A new policy that fits a decoder."""
    config = decoder.config
    kinds = PARALLEL_KINDS if form.is_parallel(config) else DEFAULT_KINDS
    return method.build(len(getattr(decoder, form.layers)), config.hidden_size, kinds)


def install(model: Any, policy: nn.Module, form: Form) -> None:
    """Change the classes of a model's modules so that they carry a stream."""
    decoder = model.base_model
    layers, norm = getattr(decoder, form.layers), getattr(decoder, form.norm)
    is_parallel = form.is_parallel(decoder.config)
    # whatever may fail comes before anything changes
    changes: list[tuple[Any, Any]] = [(layer, layer_class(type(layer))) for layer in layers]
    changes += [(norm, norm_class(type(norm)))]
    changes += [(decoder, decoder_class(stock_class(decoder) or type(decoder)))]
    # a model may be its own decoder, or be born with its class
    if model is not decoder and stock_class(model) is None:
        changes += [(model, model_class(type(model)))]
    setattr(decoder, POLICY, policy)
    decoder.__dict__[WITHIN] = decoder is not model
    for index, layer in enumerate(layers):
        site = index if is_parallel else 2 * index
        layer.__dict__["_routing"] = Routing(form, is_parallel, site)
    for module, routed in changes:
        module.__class__ = routed


class RoutedModel(Unpickled):
    """Mixed into a converted model's class: how it is born, its initial weights, what is saved."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        """Build the stock model, and put the method of its configuration in."""
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        decoder: Any = self.base_model  # type: ignore[attr-defined]
        form = form_of(decoder)
        require_known(decoder, form)
        install(self, policy_for(decoder, form, method_of(config, "the configuration")), form)

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        """Save as before; the folder is one that stock classes refuse to load.

        Raises:
            UserError: `push_to_hub` here: upload the folder that was saved. Or a configuration
                with another number of layers.
        """
        if kwargs.get("push_to_hub"):
            raise UserError("save a converted model to a folder, then upload the folder")
        _require_all_layers(self.base_model)  # type: ignore[attr-defined]
        saved = super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]
        mark(Path(save_directory))
        return saved

    def _init_weights(self, module: nn.Module) -> None:
        """Initial values of one module, as transformers asks for them."""
        if isinstance(module, Policy):
            module.reset_parameters()
        else:
            super()._init_weights(module)  # type: ignore[misc]


def method_of(config: Any, where: str) -> ResidualConfig:
    """The method that a converted model's configuration names.

    Raises:
        UserError: None, or one that is not known.
    """
    method = getattr(config, FIELD, None)
    if method is None:
        raise UserError(
            f"{where}: no depth routing in it; load the model by transformers, then call "
            "resroute.convert"
        )
    where = f"{where}: {FIELD}"
    return from_dict(ResidualConfig, method, where=where)  # type: ignore[type-abstract]


def _require_all_layers(decoder: Any) -> None:
    """Refuse a configuration that asks for fewer layers than there are, and mend it."""
    policy, config = getattr(decoder, POLICY), decoder.config
    layers = policy.num_sites // len(policy.kinds)
    if config.num_hidden_layers != layers:
        asked = config.num_hidden_layers
        # generation leaves it where it has put it, and every later call would fail
        config.num_hidden_layers = layers
        raise UserError(
            f"the configuration asked for {asked} of {layers} layers, as assistant_early_exit "
            "does; a converted model runs all"
        )


@once
def model_class(stock: Any) -> Any:
    """A model's class whose instances are saved and initialised with their policy."""
    kept = getattr(stock, "_keep_in_fp32_modules_strict", None) or ()
    # of few numbers, which bfloat16 would round away
    fields = {"_keep_in_fp32_modules_strict": {*kept, POLICY}}
    return derived(RoutedModel, stock, fields)


@once
def decoder_class(stock: Any) -> Any:
    """As `model_class`, of the module that has the layers: it gives them the policy."""

    @functools.wraps(stock.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        _require_all_layers(self)
        wanted = kwargs.get("output_hidden_states", self.config.output_hidden_states)
        # a number, also zero, asks for some layers' alone
        is_shown = wanted is not None and wanted is not False
        kwargs[GIVEN] = Given(getattr(self, POLICY), is_shown)
        return stock.forward(self, *args, **kwargs)

    routed = model_class(stock)
    body = {"__module__": stock.__module__, "__qualname__": stock.__qualname__}
    return type(stock.__name__, (routed,), {**body, "forward": forward})


def mark(folder: Path) -> None:
    """Make stock classes refuse a folder: its configuration says why, in place of a file's name."""
    file = folder / "config.json"
    # one of several processes writes it
    if file.is_file():
        found = read_json(file, "save the model again")
        write_json(file, {**found, MARK: _REMEDY})
