"""Standing between a policy and its model while it runs: to look, or to intervene."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from resroute.residual.base import Policy
from resroute.residual.norms import Norm


@contextmanager
def replaced(policy: Policy[Any], **attributes: Any) -> Iterator[None]:
    """Give a policy other methods while the context is open.

    They are set on the instance, so that no other policy is touched; what was there before comes
    back at the end, however it ends. Contexts may be nested.
    """
    held = vars(policy)
    former = {name: held[name] for name in attributes if name in held}
    held.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            held.pop(name, None)
        held.update(former)


@contextmanager
def listening_to(
    policy: Policy[Any],
    on_read: Callable[[Any, int], None],
    on_write: Callable[[Any, int, Tensor], None] | None = None,
    *,
    on_start: Callable[[Tensor], None] | None = None,
    on_given: Callable[[Any, int, Tensor], None] | None = None,
) -> Iterator[None]:
    """Tell of what happens to a policy's streams while the context is open.

    Args:
        policy: Whose streams.
        on_read: Given the stream and its site, `num_sites` at the readout, before a read.
        on_write: Given the stream, its site and the update, before it is written.
        on_start: Given the embedding, before a stream is opened on it.
        on_given: Given the stream, the site and what the sublayer is given, after a read that is
            not the readout. The one callback that may leave something in the autograd graph.
    """
    start, write, finish = policy.start, policy.write, policy.finish
    read, read_normalised = policy.read, policy.read_normalised
    note_read = torch.no_grad()(on_read)

    def heard_read(stream: Any, site: int) -> Tensor:
        note_read(stream, site)
        given = read(stream, site)
        if on_given is not None:
            on_given(stream, site, given)
        return given

    def heard_read_normalised(stream: Any, site: int, norm: Norm) -> tuple[Tensor, Any]:
        note_read(stream, site)
        given, stream = read_normalised(stream, site, norm)
        if on_given is not None:
            on_given(stream, site, given)
        return given, stream

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
            note_write(stream, site, update)
            return write(stream, site, update)

        heard["write"] = heard_write
    if on_start is not None:
        note_start = torch.no_grad()(on_start)

        def heard_start(embedding: Tensor) -> Any:
            note_start(embedding)
            return start(embedding)

        heard["start"] = heard_start
    with replaced(policy, **heard):
        yield
