"""What the layers and the final norm of a converted model do: carry a stream from layer to layer.

A layer of `transformers` is given hidden states and returns them. Here they are a `Carried` from
the first layer to the final norm: everything between stays as it is, and so do embeddings, masks,
positions, caches and heads.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from resroute.config import UserError
from resroute.hf.forms import Form, Sublayer
from resroute.residual import Policy

POLICY = "residual_policy"
"""Name of the policy in the decoder, and in the names of its parameters."""
SHOWN = "resroute_shows"
"""Argument that decoders hand on to layers; some keep `output_hidden_states` to themselves."""


class Carried(NamedTuple):
    """What takes the place of hidden states between layers."""

    hidden: Tensor | None
    """What the next site reads (B, T, D), where hidden states were asked for: what
    `output_hidden_states` shows."""
    stream: Any


class Routing(NamedTuple):
    """What a layer knows of the stack; no module, so that nothing is registered twice."""

    decoder: Any
    form: Form
    first_site: int

    @property
    def policy(self) -> Policy[Any]:
        """The decoder's, or what an adapter has put in its place."""
        found: Policy[Any] = getattr(self.decoder, POLICY)
        return found


class RoutedLayer:
    """Mixed into a decoder layer's class."""

    _routing: Routing
    _names: tuple[str, ...]

    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Carried:
        """Carry the stream over this layer's sites; arguments are the layer's own."""
        policy, form, site = self._routing.policy, self._routing.form, self._routing.first_site
        is_shown = kwargs.pop(SHOWN, False)
        _refuse_reentrant(self)
        # names of arguments that were given by position
        kwargs |= dict(zip(self._names, args, strict=False))
        stream = _stream(hidden_states, policy, site)
        if form.is_parallel(self._routing.decoder.config):
            read, stream = policy.read_normalised(stream, site, _as_it_is)
            attended = _update(self, form.attention, read, kwargs)
            stream = policy.write(stream, site, attended + _update(self, form.mlp, read, None))
        else:
            for place, sublayer in enumerate((form.attention, form.mlp)):
                read, stream = policy.read_normalised(stream, site + place, _as_it_is)
                update = _update(self, sublayer, read, None if place else kwargs)
                stream = policy.write(stream, site + place, update)
        return Carried(_shown(policy, stream) if is_shown else None, stream)


class RoutedNorm:
    """Mixed into the final norm's class."""

    _routing: Routing

    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        """Read out the stream, and normalise."""
        if isinstance(hidden_states, Carried):
            hidden_states = self._routing.policy.finish(hidden_states.stream)
        return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]


def _as_it_is(read: Tensor) -> Tensor:
    # norms are applied by the modules themselves: no bit of them changes
    return read


def _update(layer: Any, sublayer: Sublayer, read: Tensor, kwargs: dict[str, Any] | None) -> Tensor:
    """What a sublayer adds, from what it reads."""
    if sublayer.before is not None:
        read = getattr(layer, sublayer.before)(read)
    # attention is given masks, positions and the cache; an MLP nothing
    output = getattr(layer, sublayer.module)(read, **(kwargs or {}))
    update: Tensor = output[0] if isinstance(output, tuple) else output
    for name in sublayer.after:
        update = getattr(layer, name)(update)
    return update


def _stream(hidden_states: Any, policy: Policy[Any], site: int) -> Any:
    if isinstance(hidden_states, Carried):
        return hidden_states.stream
    if site:
        raise UserError(
            "a converted layer was given hidden states without a stream; run the whole model"
        )
    # a whole model on the meta device counts as one that is there
    is_there = hidden_states.is_meta or not any(p.is_meta for p in policy.parameters())
    if not is_there:
        raise UserError(
            "the residual policy is not in memory: a converted model cannot be offloaded, or "
            "shared among devices by a device map"
        )
    return policy.start(hidden_states)


def _shown(policy: Policy[Any], stream: Any) -> Tensor:
    if stream.site == policy.num_sites:
        return policy.finish(stream)
    return policy.read(stream, stream.site)


def _refuse_reentrant(layer: Any) -> None:
    checkpoint = getattr(layer, "_gradient_checkpointing_func", None)
    if not (layer.training and getattr(layer, "gradient_checkpointing", False)):
        return
    if getattr(checkpoint, "keywords", {}).get("use_reentrant"):
        raise UserError(
            "reentrant checkpointing loses the gradient of a stream; enable checkpointing with "
            "use_reentrant=False"
        )


def once(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A class is made once of each stock class."""
    return functools.cache(make)


@once
def layer_class(stock: Any) -> Any:
    """A layer's class that carries a stream."""
    names = [name for name in inspect.signature(stock.forward).parameters if name != "self"]
    return derived(RoutedLayer, stock, {"_names": tuple(names[1:])})


@once
def norm_class(stock: Any) -> Any:
    """A final norm's class that reads out a stream."""
    return derived(RoutedNorm, stock, {})


def stock_class(module: nn.Module) -> Any:
    """The class that a module had before it was converted; None where it was not."""
    return getattr(type(module), "_stock", None)


def derived(mixin: type, stock: Any, fields: dict[str, Any]) -> Any:
    """A class that a stock class's instances can be given; it keeps the stock class's name."""
    # known by the stock class's name: transformers looks up by it what a model can record, saves it
    # as the architecture, and picks the loss by it
    body = {
        "__module__": stock.__module__,
        "__qualname__": stock.__qualname__,
        "__doc__": stock.__doc__,
        "_stock": stock,
        **fields,
    }
    return type(stock.__name__, (mixin, stock), body)
