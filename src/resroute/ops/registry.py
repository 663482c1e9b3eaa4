"""The four operators of every backend: one schema, registered with torch, with fake versions.

`torch.compile` sees registered operators and keeps them whole in its graphs. Outside of it the
functions of Python backends are called directly, which saves a dispatch.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from resroute.core import compute_dtype

SCHEMAS = {
    "site_forward": (
        "(Tensor? update, Tensor[] streams, Tensor? prior, Tensor? lse, Tensor? key, Tensor? bias, "
        "Tensor? gain, float[] coefficients, int num_bases, int target, float eps, int matching, "
        "float rho_max, float norm_eps, ScalarType read_dtype) -> Tensor[]"
    ),
    "site_backward": (
        "(Tensor? grad_read, Tensor?[] grad_streams, ScalarType? update_dtype, Tensor[] streams, "
        "Tensor? prior, Tensor? lse, Tensor? key, Tensor? bias, Tensor? gain, Tensor saved, "
        "float[] coefficients, int num_bases, int target, float eps, int matching, float rho_max, "
        "float norm_eps, bool[] wants) -> Tensor[]"
    ),
    "block_read_forward": (
        "(Tensor[] values, Tensor[] inverse_rms, Tensor?[] scales, Tensor keys, Tensor? biases, "
        "Tensor[] priors, Tensor[] prior_lses, ScalarType read_dtype) -> Tensor[]"
    ),
    "block_read_backward": (
        "(Tensor?[] grad_reads, Tensor?[] grad_lses, Tensor?[] grad_values, Tensor[] values, "
        "Tensor[] inverse_rms, Tensor?[] scales, Tensor keys, Tensor? biases, Tensor[] priors, "
        "Tensor[] prior_lses, Tensor[] lses, Tensor logits, bool[] wants) -> Tensor[]"
    ),
}


class Operators(NamedTuple):
    """What a backend is: four functions of tensors, numbers and lists of them."""

    site_forward: Callable[..., list[Tensor]]
    site_backward: Callable[..., list[Tensor]]
    block_read_forward: Callable[..., list[Tensor]]
    block_read_backward: Callable[..., list[Tensor]]


class Layout(Protocol):
    """Shapes of the tensors that a backend keeps from its forward for its backward passes."""

    def site_saved(
        self, rows: Sequence[int], num_bases: int, has_prior: bool, has_gain: bool
    ) -> Sequence[int]:
        """Of a site's numbers, where `rows` are the leading axes."""

    def block_saved(self, rows: Sequence[int], queries: int, sources: int) -> Sequence[int]:
        """Of a block read's logits."""


def registered(name: str) -> Operators:
    """The operators of a backend as `torch.compile` sees them."""
    namespace = getattr(torch.ops, f"resroute_{name}")
    return Operators(*(getattr(namespace, op) for op in Operators._fields))


def register_python(name: str, operators: Operators) -> None:
    """Define the operators of a backend that is written in Python."""
    library = torch.library.Library(f"resroute_{name}", "DEF")
    _LIBRARIES.append(library)
    for op, function in operators._asdict().items():
        library.define(op + SCHEMAS[op])
        library.impl(op, function, "CompositeExplicitAutograd")


def register_fakes(name: str, layout: Layout) -> None:
    """Tell torch the shapes of a backend's results, so that graphs can be made without running."""
    fakes = _Fakes(layout)
    for op in Operators._fields:
        torch.library.register_fake(f"resroute_{name}::{op}", getattr(fakes, op))


class _Fakes:
    """The operators as shapes and dtypes alone."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def site_forward(
        self,
        update: Tensor | None,
        streams: Sequence[Tensor],
        prior: Tensor | None,
        lse: Tensor | None,
        key: Tensor | None,
        bias: Tensor | None,
        gain: Tensor | None,
        coefficients: Sequence[float],
        num_bases: int,
        target: int,
        eps: float,
        matching: int,
        rho_max: float,
        norm_eps: float,
        read_dtype: torch.dtype,
    ) -> list[Tensor]:
        like = streams[0] if streams else prior
        assert like is not None
        shape = self.layout.site_saved(
            like.shape[:-1], num_bases, prior is not None, gain is not None
        )
        return [
            torch.empty_like(like, dtype=read_dtype),
            like.new_empty(0) if update is None else torch.empty_like(like),
            like.new_empty(shape, dtype=compute_dtype(like.dtype)),
        ]

    def site_backward(
        self,
        grad_read: Tensor | None,
        grad_streams: Sequence[Tensor | None],
        update_dtype: torch.dtype | None,
        streams: Sequence[Tensor],
        prior: Tensor | None,
        lse: Tensor | None,
        key: Tensor | None,
        bias: Tensor | None,
        gain: Tensor | None,
        *rest: Any,
    ) -> list[Tensor]:
        wants = rest[-1]
        like = streams[0] if streams else prior
        assert like is not None
        has_read = grad_read is not None

        def made(wanted: bool, tensor: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
            if not wanted or tensor is None:
                return like.new_empty(0)
            return torch.empty_like(tensor, dtype=dtype)

        wide = compute_dtype(like.dtype)
        return [
            made(update_dtype is not None, like, update_dtype),
            made(has_read and wants[0], prior),
            made(has_read and lse is not None, lse),
            made(has_read and wants[1], key, wide),
            made(has_read and wants[2], bias, wide),
            made(has_read and wants[3], gain, wide),
            *(torch.empty_like(stream) for stream in streams),
        ]

    def block_read_forward(
        self,
        values: Sequence[Tensor],
        inverse_rms: Sequence[Tensor],
        scales: Sequence[Tensor | None],
        keys: Tensor,
        biases: Tensor | None,
        priors: Sequence[Tensor],
        prior_lses: Sequence[Tensor],
        read_dtype: torch.dtype,
    ) -> list[Tensor]:
        rows, queries = values[0].shape[:-1], range(keys.shape[0])
        shape = self.layout.block_saved(rows, len(queries), len(values))
        return [
            *(torch.empty_like(values[0], dtype=read_dtype) for _ in queries),
            *(keys.new_empty(rows) for _ in queries),
            keys.new_empty(shape),
        ]

    def block_read_backward(
        self,
        grad_reads: Sequence[Tensor | None],
        grad_lses: Sequence[Tensor | None],
        grad_values: Sequence[Tensor | None],
        values: Sequence[Tensor],
        inverse_rms: Sequence[Tensor],
        scales: Sequence[Tensor | None],
        keys: Tensor,
        biases: Tensor | None,
        priors: Sequence[Tensor],
        prior_lses: Sequence[Tensor],
        lses: Sequence[Tensor],
        logits: Tensor,
        wants: Sequence[bool],
    ) -> list[Tensor]:
        def made(wanted: bool, tensor: Tensor | None) -> Tensor:
            return torch.empty_like(tensor) if wanted and tensor is not None else keys.new_empty(0)

        return [
            made(wants[0], keys),
            keys.new_empty((keys.shape[0], len(values))) if wants[1] else keys.new_empty(0),
            *(torch.empty_like(value) for value in values),
            *(made(wants[2], scale) for scale in scales),
            *(made(wants[3], prior) for prior in priors),
            *(made(wants[3], prior_lse) for prior_lse in prior_lses),
        ]


# a library's registrations end with it
_LIBRARIES: list[torch.library.Library] = []
