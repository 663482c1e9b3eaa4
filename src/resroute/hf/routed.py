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
GIVEN = "resroute_given"
"""Argument by which decoders hand a `Given` on to their layers."""


class Given:
    """What the decoder gives to its layers in one call.

    They keep nothing of the decoder, so that a part that was copied, as adapters copy what they
    train, reads by the policy of the model that it is in. A plain object: what wraps layers moves,
    casts or takes apart the modules and tuples among their arguments.
    """

    def __init__(self, policy: Any, is_shown: bool) -> None:
        self.policy: Policy[Any] = policy
        """The decoder's, or what an adapter has put in its place."""
        self.is_shown = is_shown
        """Whether hidden states were asked for."""


class Carried(NamedTuple):
    """What takes the place of hidden states between layers."""

    hidden: Tensor | None
    """What the next site reads (B, T, D), where hidden states were asked for: what
    `output_hidden_states` shows."""
    stream: Any
    given: Given


class Routing(NamedTuple):
    """A layer's place in the stack."""

    form: Form
    is_parallel: bool
    """Whether its sublayers read the same, and are one site."""
    first_site: int


class _New:
    """Makes an instance to be filled by `copy`; pickle, which would write this down, is refused."""

    def __call__(self, kind: Any, *_: Any) -> Any:
        return kind.__new__(kind)

    def __reduce__(self) -> Any:
        raise UserError(
            "a converted model cannot be pickled: its classes are made as it is converted\n"
            "save it by save_pretrained, or save its state_dict"
        )


_new = _New()


class Unpickled:
    """Mixed into converted modules: they can be copied, but not pickled."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        made: Any = super().__reduce_ex__(protocol)
        return (_new, *made[1:])


class RoutedLayer(Unpickled):
    """Mixed into a decoder layer's class."""

    _routing: Routing
    _names: tuple[str, ...]

    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Carried:
        """Carry the stream over this layer's sites; arguments are the layer's own."""
        form, is_parallel, site = self._routing
        stream, given = _carried(hidden_states, kwargs.pop(GIVEN, None), site)
        policy = given.policy
        # names of arguments that were given by position
        kwargs |= dict(zip(self._names, args, strict=False))
        if is_parallel:
            read, stream = policy.read_normalised(stream, site, _as_it_is)
            attended = _update(self, form.attention, read, kwargs)
            stream = policy.write(stream, site, attended + _update(self, form.mlp, read, None))
        else:
            for place, sublayer in enumerate((form.attention, form.mlp)):
                read, stream = policy.read_normalised(stream, site + place, _as_it_is)
                update = _update(self, sublayer, read, None if place else kwargs)
                stream = policy.write(stream, site + place, update)
        return Carried(_shown(policy, stream) if given.is_shown else None, stream, given)


class RoutedNorm(Unpickled):
    """Mixed into the final norm's class."""

    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        """Read out the stream, and normalise."""
        _refuse_reentrant(hidden_states)
        if isinstance(hidden_states, Carried):
            hidden_states = hidden_states.given.policy.finish(hidden_states.stream)
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


def _carried(hidden_states: Any, given: Given | None, site: int) -> tuple[Any, Given]:
    """The stream that comes to a layer, and what the decoder gave; the first layer opens it."""
    if isinstance(hidden_states, Carried):
        return hidden_states.stream, hidden_states.given
    _refuse_reentrant(hidden_states)
    if site or given is None:
        raise UserError(
            "a converted layer was given hidden states without a stream; run the whole model"
        )
    # a whole model on the meta device counts as one that is there
    is_there = hidden_states.is_meta or not any(p.is_meta for p in given.policy.parameters())
    if not is_there:
        raise UserError(
            "the residual policy is not in memory: a converted model cannot be offloaded, or "
            "shared among devices by a device map"
        )
    return given.policy.start(hidden_states), given


def _shown(policy: Policy[Any], stream: Any) -> Tensor:
    if stream.site == policy.num_sites:
        return policy.finish(stream)
    return policy.read(stream, stream.site)


def _refuse_reentrant(hidden_states: Any) -> None:
    # its autograd function makes a plain tuple of what a layer returns, cut off from the graph
    if isinstance(hidden_states, tuple) and not isinstance(hidden_states, Carried):
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
