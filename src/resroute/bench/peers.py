"""Other people's reads over depth, where they are installed; nothing here needs them.

Each is used by its public interface and given what it asks for: a stacked tensor or a list. A read
is `softmax_i <key, v_i / rms(v_i)>` over raw values, the same mathematics as ours.
"""

import importlib
import warnings
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

Reads = Callable[[Sequence[Tensor], Tensor, float], Sequence[Tensor]]
"""From N values (..., D), keys (m, D) and eps to m mixes (..., D)."""

PACKAGES = {"attn-res": "attn-res==0.1.0", "fla naive": "flash-linear-attention==0.6.0"}
"""What to install for each peer; benchmarks/README.md has the whole commands."""


def read_peers() -> tuple[dict[str, Reads], list[str]]:
    """The reads that can be run here by name, and why others cannot."""
    found, missing = {}, []
    for name, make in {"attn-res": _attn_res, "fla naive": _fla}.items():
        if peer_version(name) is None:
            missing.append(f"{name}: left out, {PACKAGES[name]} is not installed")
            continue
        try:
            with warnings.catch_warnings():
                # that there is no GPU
                warnings.simplefilter("ignore")
                found[name] = make()
        except ImportError as error:
            missing.append(f"{name}: left out, it cannot be imported ({error})")
    return found, missing


def peer_version(name: str) -> str | None:
    """Version of the package that is installed for a peer."""
    try:
        return version(PACKAGES[name].partition("==")[0])
    except PackageNotFoundError:
        return None


def _attn_res() -> Reads:
    operator_class = importlib.import_module("attn_res").AttnResOperator

    def reads(values: Sequence[Tensor], keys: Tensor, eps: float) -> list[Tensor]:
        operator = operator_class(keys.shape[-1], eps=eps)
        stacked = torch.stack(list(values))
        return [
            torch.func.functional_call(operator, {"pseudo_query": key}, (stacked,))
            for key in keys.unbind(0)
        ]

    return reads


def _fla() -> Reads:
    naive_attnres = importlib.import_module("fla.ops.attnres").naive_attnres

    def reads(values: Sequence[Tensor], keys: Tensor, eps: float) -> list[Tensor]:
        gain = torch.ones_like(keys[0])
        return [naive_attnres(key, list(values), gain, rms_eps=eps) for key in keys.unbind(0)]

    return reads
