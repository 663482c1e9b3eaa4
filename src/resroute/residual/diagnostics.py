"""Looking at the routing of a model while it runs, without changing the model."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from resroute.residual.base import Policy
from resroute.residual.norms import Norm

STREAM = ["stream"]
"""Names of the sources of methods that do not route."""


@contextmanager
def listening_to(
    policy: Policy[Any],
    on_read: Callable[[Any, int], None],
    on_write: Callable[[int, Tensor], None] | None = None,
) -> Iterator[None]:
    """Tell of each read and write of a policy before it happens, while the context is open.

    Args:
        policy: Its methods are replaced on the instance, so that no other policy is touched, and
            put back at the end; contexts may be nested.
        on_read: Given the stream and its site, `num_sites` at the readout.
        on_write: Given the site and its update.
    """
    read, read_normalised = policy.read, policy.read_normalised
    finish, write = policy.finish, policy.write
    note_read = torch.no_grad()(on_read)

    def heard_read(stream: Any, site: int) -> Tensor:
        note_read(stream, site)
        return read(stream, site)

    def heard_read_normalised(stream: Any, site: int, norm: Norm) -> tuple[Tensor, Any]:
        note_read(stream, site)
        return read_normalised(stream, site, norm)

    def heard_finish(stream: Any) -> Tensor:
        note_read(stream, policy.num_sites)
        return finish(stream)

    heard: dict[str, Any] = {
        "read": heard_read,
        "read_normalised": heard_read_normalised,
        "finish": heard_finish,
    }
    if on_write is not None:
        note_write = torch.no_grad()(on_write)

        def heard_write(stream: Any, site: int, update: Tensor) -> Any:
            note_write(site, update)
            return write(stream, site, update)

        heard["write"] = heard_write
    former = {name: vars(policy)[name] for name in heard if name in vars(policy)}
    vars(policy).update(heard)
    try:
        yield
    finally:
        for name in heard:
            del vars(policy)[name]
        vars(policy).update(former)


@contextmanager
def capture(policy: Policy[Any]) -> Iterator[dict[int, tuple[list[str], Tensor]]]:
    """Collect the depth weights of every read while the context is open.

    Yields:
        Per site, the readout last: names of the S sources, and their weights (S,), averaged over
        all tokens of the latest forward pass, in float64 on the CPU.
    """
    seen: dict[int, tuple[list[str], Tensor]] = {}

    def note(stream: Any, site: int) -> None:
        names, weights = policy.weights(stream, site)
        seen[site] = (names, weights.flatten(0, -2).cpu().double().mean(0))

    with listening_to(policy, note):
        yield seen


def depth_map(policy: Policy[Any], forward: Callable[[], Any]) -> dict[str, Any] | None:
    """Mean depth weights of one forward pass as a table.

    Args:
        policy: Of the model that `forward` runs.
        forward: Runs the model once.

    Returns:
        `sites` (R names), `sources` (S names) and `weights` (R rows of S numbers, None where a
        site does not have a source); None where the method does not route.
    """
    with capture(policy) as seen:
        forward()
    rows = [seen[site] for site in sorted(seen)]
    sources = list(dict.fromkeys(name for names, _ in rows for name in names))
    if sources == STREAM:
        return None
    # running sources last: they exist at every block, finished ones from theirs on
    sources.sort(key=lambda name: name.startswith("running"))
    kinds = policy.kinds
    sites = [
        f"{site // len(kinds)} {kinds[site % len(kinds)]}" if site < policy.num_sites else "readout"
        for site in sorted(seen)
    ]
    weights = []
    for names, values in rows:
        by_name = dict(zip(names, values.tolist(), strict=True))
        weights.append([by_name.get(name) for name in sources])
    return {"sites": sites, "sources": sources, "weights": weights}
