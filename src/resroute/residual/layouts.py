"""How other implementations of Attention Residuals write down what their routing learned.

Names, units of blocks and readouts are as in attn-res 0.1.0, which the tests run beside this, and,
read in 2026 and not run, in flash-linear-attention 0.5 and the published weights of Kimi K3. In all
of them the embedding is a source of its own, values are raw, and keys are RMS-normalised with the
`eps` of the model's other norms, inside the root. The first site has a query too, without effect:
there is one source.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from resroute.config import UserError, suggestion


class Names(NamedTuple):
    """A query, and the gain on its keys where the layout has one."""

    query: str
    gain: str | None = None


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Names of an implementation's parameters, and what they mean."""

    name: str
    sites: tuple[Names, ...]
    """Below each `layers.N.`: of one sublayer, or of attention and of MLP."""
    readout: Names | None
    """Below the prefix; None where the readout is the plain sum."""
    prefix: str
    """What stands before `layers.` in its model with a head."""
    eps: float
    """The default of its configuration."""
    counts_layers: bool = False
    """Whether a block size counts layers, not sublayers."""

    def names(self, prefix: str, num_layers: int) -> list[Names]:
        """Parameters of every site in order, then of the readout where it has any."""
        below = [(f"{prefix}layers.{n}.", names) for n in range(num_layers) for names in self.sites]
        below += [] if self.readout is None else [(prefix, self.readout)]
        return [
            Names(start + names.query, None if names.gain is None else start + names.gain)
            for start, names in below
        ]


def _pair(stem: str) -> Names:
    # a projection to one number is a matrix (1, D)
    return Names(f"{stem}_proj.weight", f"{stem}_norm.weight")


_KNOWN = (
    Layout(
        name="attn-res",
        sites=(Names("attn_res.pseudo_query"),),
        readout=None,
        prefix="",
        eps=1e-6,
    ),
    Layout(
        name="fla",
        sites=(_pair("attn_res"), _pair("mlp_res")),
        readout=_pair("res"),
        prefix="model.",
        eps=1e-6,
    ),
    Layout(
        name="kimi-k3",
        sites=(_pair("self_attention_res"), _pair("mlp_res")),
        readout=_pair("output_attn_res"),
        prefix="model.",
        eps=1e-5,
        counts_layers=True,
    ),
)
LAYOUTS = {layout.name: layout for layout in _KNOWN}

REFUSED = {
    "inkling2": "it mixes normalised values, and some of its sites have three queries",
    "x-transformers": "its queries are made of the latest hidden state",
    "open-attention-residuals": "its partial sums run on from block to block, and the last logit "
    "has a bias",
    "delta-attention-residuals": "from the third block on its sources are not sums of blocks",
    "rms-block-attnres": "it normalises each update before a block sums it",
    "hyper-connections": "it carries several streams and has no sources",
}
"""Why other implementations have no counterpart here."""

_ROUTING = r"(?:(?:\w+_)?(?:attn|attention|mlp)_res(?:_\w+)?|\w+_null_source)(?:\.\w+)*"
_READOUT = r"(?:\w+_)?res_(?:proj|norm|bias|query|gate)(?:\.\w+)*"


def layout_of(name: str) -> Layout:
    """A layout by its name.

    Raises:
        UserError: An unknown name, or that of another formula.
    """
    if name in REFUSED:
        raise UserError(f"{name} has no counterpart here: {REFUSED[name]}")
    if name not in LAYOUTS:
        known = ", ".join(LAYOUTS)
        raise UserError(f"unknown layout {name!r}{suggestion(name, LAYOUTS)}; known: {known}")
    return LAYOUTS[name]


def find_names(state: Iterable[str], layout: Layout, prefix: str | None) -> list[Names]:
    """Names that a state must have, by the highest of its layers.

    Raises:
        UserError: No parameters of the layout or those of several stacks; or some that belong to
            another formula.
    """
    state = list(state)
    if prefix and not prefix.endswith("."):
        raise UserError(f"prefix must end in a dot, such as {prefix + '.'!r}")
    prefix = _prefix(state, layout) if prefix is None else prefix
    _refuse_others(state, layout, prefix)
    own = "|".join(re.escape(names.query) for names in layout.sites)
    pattern = re.compile(rf"{re.escape(prefix)}layers\.(\d+)\.(?:{own})")
    numbers = [int(match[1]) for name in state if (match := pattern.fullmatch(name))]
    if not numbers:
        raise UserError(
            f"the state has no {prefix}layers.N.{layout.sites[0].query}, as {layout.name} has"
        )
    layers, missing = set(numbers), max(numbers) + 1 - len(set(numbers))
    if missing:
        first = next(n for n in range(max(numbers)) if n not in layers)
        raise UserError(
            f"{missing} of {max(numbers) + 1} layers have no {layout.sites[0].query}, first layer "
            f"{first}: give the state of the whole model"
        )
    # whatever else a layer has: where one file of several was read, the last ones may lack routing
    others = re.compile(rf"{re.escape(prefix)}layers\.(\d+)\..+")
    deepest = max(int(match[1]) for name in state if (match := others.fullmatch(name)))
    if deepest > max(numbers):
        raise UserError(
            f"layers {max(numbers) + 1} to {deepest} have no {layout.sites[0].query}; give the "
            "state of the whole model"
        )
    return layout.names(prefix, max(numbers) + 1)


def stacked(
    state: Mapping[str, Tensor], layout: Layout, names: Iterable[str], dim: int | None = None
) -> Tensor:
    """Parameters by name as rows (rows, D), in float32, or in float64 where one of them is.

    Raises:
        UserError: One that is not there, or not D numbers.
    """
    rows = []
    for name in names:
        if name not in state:
            raise UserError(f"the state has no {name}, as {layout.name} has")
        if not isinstance(state[name], Tensor):
            raise UserError(f"{name} must be a tensor, got {type(state[name]).__name__}")
        row = state[name].detach()
        dim = row.numel() if dim is None else dim
        if not row.is_floating_point() or row.shape not in ((dim,), (1, dim)):
            raise UserError(
                f"{name} must be {dim} floating-point numbers, as others are, got {row.dtype} of "
                f"shape {tuple(row.shape)}"
            )
        rows.append(row.flatten())
    dtype = torch.float64 if any(row.dtype == torch.float64 for row in rows) else torch.float32
    return torch.stack([row.to(dtype) for row in rows])


def _prefix(state: list[str], layout: Layout) -> str:
    found = _prefixes(state, layout)
    if len(found) == 1:
        return found.pop()
    if found:
        raise UserError(
            f"the state has {len(found)} stacks with parameters of {layout.name}; give prefix, one "
            f"of {', '.join(map(repr, sorted(found)))}"
        )
    others = [name for name, other in LAYOUTS.items() if _prefixes(state, other)]
    hint = f"; it has those of {others[0]}" if others else ""
    raise UserError(
        f"the state has no layers.N.{layout.sites[0].query}, as {layout.name} has{hint}"
    )


def _prefixes(state: list[str], layout: Layout) -> set[str]:
    pattern = re.compile(rf"((?:.*\.)?)layers\.\d+\.{re.escape(layout.sites[0].query)}")
    return {match[1] for name in state if (match := pattern.fullmatch(name))}


def _refuse_others(state: list[str], layout: Layout, prefix: str) -> None:
    """Refuse routing parameters that the layout does not have."""
    known = {name for names in layout.sites for name in names}
    top = set() if layout.readout is None else set(layout.readout)
    below = re.compile(re.escape(prefix) + r"layers\.\d+\.(?P<name>.+)")
    start = re.compile(re.escape(prefix) + r"(?P<name>.+)")
    for name in state:
        for place, routing, own in ((below, _ROUTING, known), (start, _READOUT, top)):
            match = place.fullmatch(name)
            if match and re.fullmatch(routing, match["name"]) and match["name"] not in own:
                raise UserError(
                    f"{layout.name} has no parameter {name}: it is of another formula, such as one "
                    "with a bias or a gate"
                )
