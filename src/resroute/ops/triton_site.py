"""The site operation in Triton: one pass over the rows forward, one backward.

Everything is computed in float32 from float32, bfloat16 or float16. Parameter gradients are summed
by a fixed number of programs that stride over the rows, then over programs: no atomics, so the same
launch gives the same bits. Nothing is tuned at run time, and nothing waits for the device.

R rows (all leading axes), D width, K bases, Z running streams; K and Z are at most 3.
`saved` is (2 + 4 K, ..): p of the prior, 1 / rms of the mix, then p, s, r and logit of each basis.
"""

# mypy: disable-error-code="import-not-found, import-untyped"

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from resroute.config import UserError
from resroute.ops import triton_site_kernels as kernels
from resroute.ops.exact import exact
from resroute.ops.forms import require_target

MAX_DIM = 8192
MAX_PROGRAMS = 1024
"""Partial sums of parameter gradients; a constant, so that results do not depend on the device."""

_MOST = 3
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@exact
def site_forward(
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
    """Add an update to a running stream and read the site: `[read, new stream, saved]`.

    Raises:
        UserError: D above 8192, more than 3 streams or bases, a target that is no stream, or a
            dtype that is not served.
    """
    require_target(target, len(streams), update is not None)
    like = next(t for t in (*streams, prior) if t is not None)
    check([update, *streams, prior], like.shape[-1], read_dtype)
    _check_counts(len(streams), num_bases, coefficients)
    dim, rows = like.shape[-1], like.numel() // like.shape[-1]
    read = torch.empty_like(like, dtype=read_dtype)
    added = like.new_empty(0) if update is None else torch.empty_like(like)
    saved = like.new_empty((2 + 4 * num_bases, *like.shape[:-1]), dtype=torch.float32)
    if not rows:
        return [read, added, saved]
    tiling = _tiling(dim)
    with torch.cuda.device_of(like):
        kernels.forward[(triton.cdiv(rows, tiling["TILE"]),)](
            update,
            *_padded(streams),
            *(_dense(t) for t in (prior, lse, key, bias, gain)),
            read,
            None if update is None else added,
            saved,
            rows,
            dim // tiling["GRAIN"],
            *_numbers(coefficients, num_bases, len(streams)),
            float(eps),
            float(rho_max),
            float(norm_eps),
            K=num_bases,
            Z=len(streams),
            TARGET=target,
            MATCHED=matching > 0,
            **tiling,
        )
    return [read, added, saved]


@exact
def site_backward(
    grad_read: Tensor | None,
    grad_streams: Sequence[Tensor | None],
    update_dtype: torch.dtype | None,
    streams: Sequence[Tensor],
    prior: Tensor | None,
    lse: Tensor | None,
    key: Tensor | None,
    bias: Tensor | None,
    gain: Tensor | None,
    saved: Tensor,
    coefficients: Sequence[float],
    num_bases: int,
    target: int,
    eps: float,
    matching: int,
    rho_max: float,
    norm_eps: float,
    wants: Sequence[bool],
) -> list[Tensor]:
    """Gradients `[update, prior, lse, key, bias, gain, *streams]`; those not wanted are empty."""
    require_target(target, len(streams), update_dtype is not None)
    if grad_read is None:
        return _passed_on(grad_streams, streams, update_dtype, target)
    check([*streams, prior, grad_read], grad_read.shape[-1])
    _check_counts(len(streams), num_bases, coefficients)
    dim, rows = grad_read.shape[-1], grad_read.numel() // grad_read.shape[-1]
    tiling = _tiling(dim)
    programs = min(MAX_PROGRAMS, triton.cdiv(rows, tiling["TILE"]))
    wants_prior, *wants_parameters = wants
    grads = [torch.empty_like(stream) for stream in streams]
    made = [
        None if update_dtype is None else torch.empty_like(grad_read, dtype=update_dtype),
        torch.empty_like(prior) if wants_prior and prior is not None else None,
        None if lse is None else torch.empty_like(lse),
    ]
    parts = [
        grad_read.new_empty((programs, parameter.numel()), dtype=torch.float32)
        if is_wanted and parameter is not None
        else None
        for is_wanted, parameter in zip(wants_parameters, (key, bias, gain), strict=True)
    ]
    if rows:
        with torch.cuda.device_of(grad_read):
            kernels.backward[(programs,)](
                grad_read,
                *_padded([_dense(g) for g in grad_streams]),
                *_padded(streams),
                *(_dense(t) for t in (prior, key, gain)),
                saved,
                *made,
                *parts,
                *_padded(grads),
                rows,
                dim // tiling["GRAIN"],
                *_numbers(coefficients, num_bases, len(streams)),
                float(rho_max),
                K=num_bases,
                Z=len(streams),
                TARGET=target,
                ATTACHED=matching == 2,
                **tiling,
            )
    # the order of these sums is fixed too
    made += [None if part is None else part.sum(0) for part in parts]
    return [*(grad_read.new_empty(0) if grad is None else grad for grad in made), *grads]


def _passed_on(
    grad_streams: Sequence[Tensor | None],
    streams: Sequence[Tensor],
    update_dtype: torch.dtype | None,
    target: int,
) -> list[Tensor]:
    like = streams[0]
    grads = [
        torch.zeros_like(stream) if grad is None else grad.to(stream.dtype, copy=True)
        for grad, stream in zip(grad_streams, streams, strict=True)
    ]
    update = like.new_empty(0)
    if update_dtype is not None:
        update = grads[target].to(update_dtype, copy=True)
    return [update, *(like.new_empty(0) for _ in range(5)), *grads]


def check(tensors: Sequence[Tensor | None], dim: int, *dtypes: torch.dtype) -> None:
    """Refuse what the kernels cannot serve.

    Raises:
        UserError: D above 8192, or a dtype other than float32, bfloat16 and float16.
    """
    if dim > MAX_DIM:
        raise UserError(
            f"the triton backend takes widths up to {MAX_DIM}, got {dim}; use backend 'lean'"
        )
    there = [tensor for tensor in tensors if tensor is not None]
    for dtype in (*(tensor.dtype for tensor in there), *dtypes):
        if dtype not in _DTYPES:
            raise UserError(
                f"the triton backend computes float32, bfloat16 and float16, got {dtype}; "
                "use backend 'lean'"
            )
    assert all(tensor.is_contiguous() for tensor in there), "kernels walk over rows"


def tile_options(rows: int, dim: int) -> dict[str, int]:
    """How a kernel is launched whose programs hold tiles of `rows` rows of width D.

    A rule instead of tuning: the first call is quick, and results never depend on a measurement.
    16 numbers of a tile are in each thread's registers, up to 16 warps.
    """
    width = max(32, int(triton.next_power_of_2(dim)))
    return {
        # D is passed in these units: the compiler then knows that rows can be read by 16 bytes
        "GRAIN": 8 if dim % 8 == 0 else 1,
        "TILE": rows,
        "WIDTH": width,
        "num_warps": max(1, min(16, rows * width // 512)),
        # triton changes its default from release to release
        "enable_fp_fusion": True,
    }


def _tiling(dim: int) -> dict[str, int]:
    # short rows share a program
    return tile_options(max(1, min(16, 1024 // int(triton.next_power_of_2(dim)))), dim)


def _dense(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _check_counts(streams: int, num_bases: int, coefficients: Sequence[float]) -> None:
    if streams > _MOST or num_bases > _MOST:
        raise UserError(
            f"the triton backend takes up to {_MOST} streams and bases, got {streams} and "
            f"{num_bases}; use backend 'lean'"
        )
    assert len(coefficients) == num_bases * streams, "one coefficient for each basis and stream"


def _padded(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [*tensors, *[None] * (_MOST - len(tensors))]


def _numbers(coefficients: Sequence[float], num_bases: int, streams: int) -> list[float]:
    # arguments of the kernel, not constants of it: learned ones would compile it at every step
    return [
        float(coefficients[k * streams + i]) if k < num_bases and i < streams else 0.0
        for k in range(_MOST)
        for i in range(_MOST)
    ]
