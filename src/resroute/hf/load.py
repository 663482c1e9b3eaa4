"""Loading a converted model from the folder that it was saved to."""

from pathlib import Path
from typing import Any

import transformers
from torch import nn
from transformers import AutoConfig, PreTrainedModel

from resroute.config import UserError, from_dict
from resroute.hf.convert import PARALLEL_KINDS, install
from resroute.hf.forms import form_of
from resroute.hf.routed import FIELD, MARK, decoder_class, model_class
from resroute.residual import ResidualConfig
from resroute.residual.base import DEFAULT_KINDS


def from_pretrained(folder: str | Path, **options: Any) -> PreTrainedModel:
    """Load a converted model with its routing.

    Stock classes refuse the folder and say so; this is the way to load it.

    Args:
        folder: Where `save_pretrained` of a converted model, or `Trainer`, wrote it.
        options: As for `from_pretrained` of transformers, such as `dtype`, `device_map` or
            `attn_implementation`.

    Raises:
        UserError: A folder without a converted model, or of a class that transformers lacks.
    """
    if not (Path(folder) / "config.json").is_file():
        raise UserError(
            f"{folder}: no config.json; name a folder of a converted model's save_pretrained"
        )
    config = AutoConfig.from_pretrained(folder)
    method = getattr(config, FIELD, None)
    if method is None:
        raise UserError(
            f"{folder}: no depth routing in its config.json; load it by transformers, then call "
            "resroute.convert"
        )
    where = f"{folder}/config.json: {FIELD}"
    residual = from_dict(ResidualConfig, method, where=where)  # type: ignore[type-abstract]
    names = getattr(config, "architectures", None) or ["none"]
    stock = getattr(transformers, names[0], None)
    if not (isinstance(stock, type) and issubclass(stock, PreTrainedModel)):
        raise UserError(
            f"{folder}: made for the class {names[0]}, which transformers does not have"
        )
    if hasattr(config, MARK):
        delattr(config, MARK)
    loaded: PreTrainedModel = _building(stock, residual).from_pretrained(
        folder, config=config, **options
    )
    # a class of its own was needed to build it
    loaded.__class__ = decoder_class(stock) if loaded.base_model is loaded else model_class(stock)
    return loaded


def _building(stock: type[PreTrainedModel], residual: ResidualConfig) -> type[Any]:
    """A class whose instances are born with their routing, so that weights find their places."""

    def build(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        stock.__init__(self, config, *args, **kwargs)
        decoder: Any = self.base_model
        form = form_of(decoder)
        kinds = PARALLEL_KINDS if form.is_parallel(decoder.config) else DEFAULT_KINDS
        layers: nn.ModuleList = getattr(decoder, form.layers)
        install(self, residual.build(len(layers), decoder.config.hidden_size, kinds), form)

    routed: Any = model_class(stock)
    body = {"__module__": stock.__module__, "__qualname__": stock.__qualname__, "__init__": build}
    return type(stock.__name__, (routed,), body)
