"""Looking at the routing of a model while it runs, without changing the model."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from resroute.residual.base import Policy
from resroute.residual.norms import Norm

_READERS = ("read", "read_normalised", "finish")


@contextmanager
def capture(policy: Policy[Any]) -> Iterator[dict[int, tuple[list[str], Tensor]]]:
    """Collect the depth weights of every read while the context is open.

    Yields:
        Per site, the readout last: names of the S sources, and their weights (S,), averaged over
        all tokens of the latest forward pass, in float64 on the CPU.
    """
    seen: dict[int, tuple[list[str], Tensor]] = {}
    read, read_normalised, finish = policy.read, policy.read_normalised, policy.finish

    def note(stream: Any, site: int) -> None:
        names, weights = policy.weights(stream, site)
        mean = weights.detach().flatten(0, -2).cpu().double().mean(0)
        seen[site] = (names, mean)

    def noted_read(stream: Any, site: int) -> Tensor:
        note(stream, site)
        return read(stream, site)

    def noted_read_normalised(stream: Any, site: int, norm: Norm) -> tuple[Tensor, Any]:
        note(stream, site)
        return read_normalised(stream, site, norm)

    def noted_finish(stream: Any) -> Tensor:
        note(stream, policy.num_sites)
        return finish(stream)

    # on the instance, so that no other policy is touched; another capture may be open
    former: dict[str, Any] = {name: vars(policy)[name] for name in _READERS if name in vars(policy)}
    noted = (noted_read, noted_read_normalised, noted_finish)
    vars(policy).update(zip(_READERS, noted, strict=True))
    try:
        yield seen
    finally:
        for name in _READERS:
            del vars(policy)[name]
        vars(policy).update(former)


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
    if sources == ["stream"]:
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
