"""Intervening in a running model: what happens without a layer, a site, or a source."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from resroute.config import UserError, suggestion
from resroute.residual.base import STREAM, NothingLeftError, policy_of
from resroute.residual.diagnostics import replaced
from resroute.residual.norms import Norm

LeftOut = Callable[[int], frozenset[str]]


@contextmanager
def without_sites(model: nn.Module, sites: Collection[int]) -> Iterator[None]:
    """Write zero instead of the updates of some sites while the context is open.

    The sublayers still compute. Contexts may be nested; a `capture` that is opened before sees the
    zeros, one that is opened inside sees what the sublayers put out.

    Args:
        model: A policy, or a module that holds one.
        sites: From 0 to `num_sites - 1`.

    Raises:
        UserError: Not exactly one policy, or a site that the stack does not have.
    """
    policy = policy_of(model)
    silenced = frozenset(sites)
    unknown = sorted(site for site in silenced if site not in range(policy.num_sites))
    if unknown:
        raise UserError(
            f"there is no site {unknown[0]}: the stack has sites 0 to {policy.num_sites - 1}"
        )
    write = policy.write

    def write_or_not(stream: Any, site: int, update: Tensor) -> Any:
        return write(stream, site, torch.zeros_like(update) if site in silenced else update)

    with replaced(policy, write=write_or_not):
        yield


@contextmanager
def without_layer(model: nn.Module, layer: int) -> Iterator[None]:
    """As `without_sites`, for the sites of a layer.

    Args:
        model: A policy, or a module that holds one.
        layer: From 0 to `num_layers - 1`.

    Raises:
        UserError: Not exactly one policy, or a layer that the stack does not have.
    """
    policy = policy_of(model)
    if layer not in range(policy.num_layers):
        raise UserError(f"there is no layer {layer}: the stack has 0 to {policy.num_layers - 1}")
    size = len(policy.kinds)
    with without_sites(policy, range(layer * size, (layer + 1) * size)):
        yield


@contextmanager
def without_sources(
    model: nn.Module,
    sources: Collection[str] | Callable[[str], bool],
    *,
    at: Collection[int] | None = None,
) -> Iterator[None]:
    """Let reads go without some of their sources while the context is open.

    Reads are those of `Policy.read_without`. One that has no other source is left as it is: the
    first site, say, still reads the embedding. Contexts may be nested, and then leave out all that
    any of them names. A `capture` meanwhile sees the weights that the policy itself has.

    Args:
        model: A policy, or a module that holds one, of a method that routes.
        sources: Names as in `Policy.weights`, or a function that tells of a name whether it is
            left out.
        at: Sites where they are, `num_sites` for the readout; None is everywhere.

    Raises:
        UserError: Not exactly one policy, a method that does not route, or a name that no site
            has.
    """
    policy = policy_of(model)
    names = policy.source_names()
    if names == (STREAM,):
        raise UserError(
            f"{type(policy).__name__} reads one sum: it has no sources to leave out; leave out "
            "sites instead"
        )
    if callable(sources):
        gone = frozenset(name for name in names if sources(name))
    else:
        gone = frozenset([sources] if isinstance(sources, str) else sources)
    for name in sorted(gone - set(names)):
        raise UserError(f"no site has a source {name!r}{suggestion(name, names)}")
    read, read_normalised, finish = policy.read, policy.read_normalised, policy.finish
    former: LeftOut = vars(policy).get("left_out", lambda site: frozenset())

    def left_out(site: int) -> frozenset[str]:
        here = gone.intersection(policy.source_names(site)) if at is None or site in at else set()
        return former(site) | here

    def less(stream: Any, site: int) -> Tensor | None:
        """A read without what is left out; None where it is to be left as it is."""
        missing = left_out(site)
        try:
            return policy.read_without(stream, site, missing) if missing else None
        except NothingLeftError:
            return None

    def read_less(stream: Any, site: int) -> Tensor:
        found = less(stream, site)
        return read(stream, site) if found is None else found

    def read_less_normalised(stream: Any, site: int, norm: Norm) -> tuple[Tensor, Any]:
        found = less(stream, site)
        if found is None:
            return read_normalised(stream, site, norm)
        return norm(found), stream

    def finish_less(stream: Any) -> Tensor:
        # an unfinished stream is refused by `finish` itself
        found = less(stream, stream.site) if stream.site == policy.num_sites else None
        return finish(stream) if found is None else found

    with replaced(
        policy,
        read=read_less,
        read_normalised=read_less_normalised,
        finish=finish_less,
        left_out=left_out,
    ):
        yield
