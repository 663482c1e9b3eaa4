"""Which backend serves a policy: the fastest that can, or the one that is asked for."""

import importlib.util
import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch

from resroute.config import UserError, suggestion
from resroute.ops import lean
from resroute.ops.registry import Operators, registered

F = TypeVar("F", bound=Callable[..., Any])

BACKENDS = ("reference", "lean", "native", "triton")

# in C++ and Triton; a site's streams and bases are unrolled there
_MOST_BASES = 3
_MOST_TRITON_DIM = 8192

_logger = logging.getLogger("resroute")


class Choice(NamedTuple):
    """A backend and why it was taken."""

    backend: str
    reason: str

    def __str__(self) -> str:
        return f"{self.backend} ({self.reason})"


class _State:
    asked = "auto"


# what was missed and has been said
_SAID: set[str] = set()


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Ask for a backend while the context is open.

    Args:
        name: `reference` (plain formulas and autograd), `lean` (plain torch, hand-written
            gradients), `native` (C++ on CPUs), `triton` (CUDA GPUs), or `auto`, the fastest that
            can serve. It applies to streams that are started meanwhile, in every thread.

    Raises:
        UserError: An unknown name. A stream that the named backend cannot serve is a `UserError`
            where it is started: there is no silent fall back.
    """
    former = _State.asked
    set_backend(name)
    try:
        yield
    finally:
        _State.asked = former


def set_backend(name: str) -> None:
    """Ask for a backend from here on; see `backend`."""
    known = ("auto", *BACKENDS)
    if name not in known:
        raise UserError(
            f"unknown backend {name!r}{suggestion(name, known)}; use one of {', '.join(known)}"
        )
    _State.asked = name


def choose(device: torch.device | str, dtype: torch.dtype, dim: int, num_bases: int = 1) -> Choice:
    """The backend of a stream; `native` is compiled here where it serves and is not yet.

    Args:
        device: Of the embedding; a name such as `cpu` or `cuda:1` will do.
        dtype: Of the embedding.
        dim: D.
        num_bases: Most sources that a running block gives.

    Raises:
        UserError: The backend that was asked for cannot serve this, or an unknown device.
    """
    kind = _device_type(device) if isinstance(device, str) else device.type
    return _choose(_State.asked, kind, dtype, dim, num_bases)


def _device_type(name: str) -> str:
    try:
        return torch.device(name).type
    except RuntimeError:
        raise UserError(f"unknown device {name!r}; use cpu, cuda, cuda:1 or mps") from None


def _constant(function: F) -> F:
    """Let `torch.compile` call a function as it traces, and keep the answer.

    What `torch.compiler.assume_constant_result` does, which imports the whole compiler (and triton)
    where it is applied.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@_constant
def _choose(asked: str, device: str, dtype: torch.dtype, dim: int, num_bases: int) -> Choice:
    if asked in ("reference", "lean"):
        return Choice(asked, "asked for")
    wanted = {"cpu": "native", "cuda": "triton"}.get(device) if asked == "auto" else asked
    if wanted is None:
        return Choice("lean", f"device {device}")
    # a stream keeps its backend's name, so whether that one can be had is settled here
    why_not = _REFUSALS[wanted](device, dtype, dim, num_bases) or _failure(wanted)
    if asked != "auto":
        if why_not:
            raise UserError(f"backend {asked!r} was asked for, but {why_not}; use 'auto' or 'lean'")
        return Choice(asked, "asked for")
    if not why_not:
        return Choice(wanted, f"device {device}")
    if (why_not in _MISSING or why_not in _FAILED.values()) and why_not not in _SAID:
        _SAID.add(why_not)
        _logger.warning("%s: depth routing runs in plain torch", why_not)
    return Choice("lean", why_not)


_NO_COMPILER = "no C++ compiler (with ninja) was found"
_NO_TRITON = "triton is not installed"
_MISSING = (_NO_COMPILER, _NO_TRITON)

# by backend, why it could not be built: trying again would take a minute again
_FAILED: dict[str, str] = {}


def _failure(name: str) -> str:
    """Build the native backend where that is still to be done; what went wrong, or nothing."""
    if name == "native" and name not in _LOADED and name not in _FAILED:
        try:
            _load(name)
        except RuntimeError as error:
            _FAILED[name] = f"the CPU kernels could not be built ({_first_error(str(error))})"
    return _FAILED.get(name, "")


def _first_error(words: str) -> str:
    """The first line of a build's output that names an error, or else the first line."""
    # after torch's own line, which ends in a command
    lines = [line.strip() for line in words.splitlines() if line.strip()] or ["no reason given"]
    return next((line for line in lines[1:] if re.search(r"\berror\b.*:", line)), lines[0])


def _refuses_native(device: str, dtype: torch.dtype, dim: int, num_bases: int) -> str:
    if device != "cpu":
        return f"it runs on CPUs, got device {device}"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"it computes float32 and bfloat16, got {_name(dtype)}"
    if num_bases > _MOST_BASES:
        return f"it takes {_MOST_BASES} sources of a running block, got {num_bases}"
    return "" if native_available() else _NO_COMPILER


def _refuses_triton(device: str, dtype: torch.dtype, dim: int, num_bases: int) -> str:
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device != "cuda" and not interpreted:
        return f"it runs on CUDA GPUs, got device {device}"
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"it computes float32, bfloat16 and float16, got {_name(dtype)}"
    if dim > _MOST_TRITON_DIM:
        return f"it takes widths up to {_MOST_TRITON_DIM}, got {dim}"
    if num_bases > _MOST_BASES:
        return f"it takes {_MOST_BASES} sources of a running block, got {num_bases}"
    return "" if importlib.util.find_spec("triton") else _NO_TRITON


def native_available() -> bool:
    """Whether there is a compiler for the native backend; building waits for its first use."""
    from resroute.ops import native

    return native.available()


_REFUSALS = {"native": _refuses_native, "triton": _refuses_triton}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def operators(name: str) -> Operators:
    """The operators of `lean`, `native` or `triton`; builds or imports them at first use."""
    if name not in _LOADED:
        _load(name)
    return registered(name) if torch.compiler.is_compiling() else _LOADED[name]


def prepare(name: str) -> None:
    """Build or import a backend now, rather than at the first read."""
    if name != "reference":
        operators(name)


@_constant
def _load(name: str) -> None:
    if name == "native":
        from resroute.ops import native

        if not native.is_built():
            _logger.warning("compiling the CPU kernels for depth routing, once: about a minute")
        _LOADED[name] = native.load()
    else:
        from resroute.ops import triton_backend

        _LOADED[name] = triton_backend.OPERATORS


_LOADED: dict[str, Operators] = {"lean": lean.OPERATORS}
