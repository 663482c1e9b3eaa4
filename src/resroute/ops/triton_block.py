"""The block read in Triton: m queries mix N finished sources, without a stack of them.

Kernels find the sources through a table of their addresses, so any number of them, of mixed dtypes,
is one launch and one compilation. The table is filled on the device by a kernel that has the
addresses as arguments. A copy from the host would wait for it, and a CUDA graph that captured one
would replay from host memory that is gone; pointers as arguments of the main kernels would mean
launches by chunks, whose states (m D numbers a row) cost more to carry than the sources to read.

Everything is computed in float32; sources are scored and mixed in a single pass, by a running
softmax. Parameter gradients are summed by a fixed number of programs that stride over the rows,
then over programs: no atomics, so the same launch gives the same bits.

R rows (all leading axes), D width, N sources, m queries. The saved logits are (.., m, N).
"""

# mypy: disable-error-code="import-not-found, import-untyped"

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from resroute.config import UserError
from resroute.ops import triton_block_kernels as kernels
from resroute.ops.exact import exact
from resroute.ops.triton_site import MAX_PROGRAMS, check, tile_options

_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_MIXED = 3


@exact
def block_read_forward(
    values: Sequence[Tensor],
    inverse_rms: Sequence[Tensor],
    scales: Sequence[Tensor | None],
    keys: Tensor,
    biases: Tensor | None,
    priors: Sequence[Tensor],
    prior_lses: Sequence[Tensor],
    read_dtype: torch.dtype,
) -> list[Tensor]:
    """Mix finished sources for each query: `[*m reads, *m log-sum-exps, logits (.., m, N)]`.

    Raises:
        UserError: D above 8192, or a dtype that is not served.
    """
    m, dim = keys.shape
    check([*values, *priors], dim, read_dtype)
    like, rows = values[0], values[0].numel() // dim
    reads = [torch.empty_like(like, dtype=read_dtype) for _ in range(m)]
    lses = [like.new_empty(like.shape[:-1], dtype=torch.float32) for _ in range(m)]
    logits = like.new_empty((*like.shape[:-1], m, len(values)), dtype=torch.float32)
    if not rows:
        return [*reads, *lses, logits]
    tiling = _tiling(m, dim)
    with torch.cuda.device_of(like):
        table = _Table.of(values, reads, lses, priors)
        kernels.forward[(rows * triton.cdiv(m, tiling["TILE"]),)](
            table.words,
            torch.stack(list(inverse_rms)),
            _stacked(scales, 1.0),
            keys.contiguous(),
            None if biases is None else biases.contiguous(),
            torch.stack(list(prior_lses)) if prior_lses else None,
            logits,
            rows,
            dim // tiling["GRAIN"],
            len(values),
            m,
            **table.kinds,
            READ=_KINDS[read_dtype],
            PRIOR=_kind_of(priors),
            **tiling,
        )
    return [*reads, *lses, logits]


@exact
def block_read_backward(
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
    """Gradients `[keys, biases, *values, *scales, *priors, *prior lses]`; unwanted ones empty."""
    m, dim = keys.shape
    check([*values, *priors, *grad_reads, *grad_values], dim)
    for grad, value in zip(grad_values, values, strict=True):
        assert grad is None or grad.dtype == value.dtype, "addresses have no dtype of their own"
    like, rows, count = values[0], values[0].numel() // dim, len(values)
    wants_keys, wants_biases, wants_scales, wants_priors = wants
    tiles = triton.cdiv(m, _tiling(m, dim)["TILE"])
    programs = min(rows, max(1, MAX_PROGRAMS // tiles))

    def wide(*shape: int) -> Tensor:
        return like.new_empty(shape, dtype=torch.float32)

    out = _Gradients(
        part_keys=wide(programs, m, dim) if wants_keys else None,
        part_biases=wide(programs, m, count) if wants_biases else None,
        values=[torch.empty_like(value) for value in values],
        products=torch.empty_like(logits) if wants_scales else None,
        priors=[torch.empty_like(prior) for prior in priors if wants_priors],
        prior_lses=[torch.empty_like(prior_lse) for prior_lse in prior_lses if wants_priors],
    )
    if rows:
        with torch.cuda.device_of(like):
            _launch_backward(
                out,
                programs,
                (grad_reads, grad_lses, grad_values),
                values,
                (torch.stack(list(inverse_rms)), _stacked(scales, 1.0)),
                keys,
                biases,
                (priors, prior_lses),
                (torch.stack(list(lses)), logits),
            )
    empty = keys.new_empty
    return [
        # the order of these sums is fixed too
        empty(0) if out.part_keys is None else out.part_keys.sum(0),
        empty(0) if out.part_biases is None else out.part_biases.sum(0),
        *out.values,
        *(
            empty(0) if s is None or out.products is None else out.products[..., n].sum(-1)
            for n, s in enumerate(scales)
        ),
        *(out.priors or [empty(0) for _ in priors]),
        *(out.prior_lses or [empty(0) for _ in priors]),
    ]


class _Gradients(NamedTuple):
    """What the kernels of the backward pass write; None, or no list, where it is not wanted."""

    part_keys: Tensor | None
    """(programs, m, D), to be summed."""
    part_biases: Tensor | None
    """(programs, m, N), to be summed."""
    values: list[Tensor]
    products: Tensor | None
    """(.., m, N): p <grad read, value>, which the gradients of the scales are sums of."""
    priors: list[Tensor]
    prior_lses: list[Tensor]


def _launch_backward(
    out: _Gradients,
    programs: int,
    arriving: tuple[Sequence[Tensor | None], ...],
    values: Sequence[Tensor],
    factors: tuple[Tensor, Tensor | None],
    keys: Tensor,
    biases: Tensor | None,
    priors: tuple[Sequence[Tensor], Sequence[Tensor]],
    kept: tuple[Tensor, Tensor],
) -> None:
    """Run the two kernels of the backward pass: over queries, then over values.

    `arriving` are the gradients at reads, log-sum-exps and values, `factors` 1 / rms and scales of
    the values, `priors` these and their log-sum-exps, `kept` log-sum-exps and logits.
    """
    (grad_reads, grad_lses, grad_values), (outer, outer_lses), (_, logits) = arriving, priors, kept
    weights = torch.empty_like(logits)
    (m, dim), count, rows = keys.shape, len(values), values[0].numel() // keys.shape[1]
    tiling, none = _tiling(m, dim), [None] * len(outer)
    table = _Table.of(
        values,
        grad_reads,
        outer,
        out.priors or none,
        out.prior_lses or none,
        grad_values,
        out.values,
    )
    read_kind, grad_logits = _kind_of(grad_reads), torch.empty_like(logits)
    kernels.backward_queries[(programs * triton.cdiv(m, tiling["TILE"]),)](
        table.words,
        *factors,
        torch.stack(list(outer_lses)) if outer_lses else None,
        _stacked(grad_lses, 0.0),
        *kept,
        weights,
        grad_logits,
        out.products,
        out.part_keys,
        out.part_biases,
        rows,
        dim // tiling["GRAIN"],
        count,
        m,
        programs,
        **table.kinds,
        READ=read_kind,
        PRIOR=_kind_of(outer),
        WANTS_PRIORS=bool(out.priors),
        SOURCES=triton.next_power_of_2(count),
        **tiling,
    )
    tiling = _tiling(count, dim)
    kernels.backward_values[(rows * triton.cdiv(count, tiling["TILE"]),)](
        table.words,
        *factors,
        keys.contiguous(),
        None if biases is None else biases.contiguous(),
        logits,
        weights,
        grad_logits,
        rows,
        dim // tiling["GRAIN"],
        count,
        m,
        3 * len(outer),
        **table.kinds,
        READ=read_kind,
        **tiling,
    )


class _Table(NamedTuple):
    """Addresses of tensors on their device: N values, the N kinds of these, then further lists."""

    words: Tensor
    kinds: dict[str, int]
    """KIND of all values (or `_MIXED`); ALIGNED: each tensor begins at a multiple of 16 bytes."""

    @classmethod
    def of(cls, values: Sequence[Tensor], *lists: Sequence[Tensor | None]) -> "_Table":
        """The table of tensors that stay alive until the kernels are launched; None is 0."""
        if values[0].is_cuda and not isinstance(kernels.fill, triton.JITFunction):
            # it works on copies of its arguments and would follow addresses of the device
            raise UserError("triton's interpreter takes CPU tensors; unset TRITON_INTERPRET")
        kinds = [_KINDS[value.dtype] for value in values]
        tensors = [*values, *(tensor for tensors in lists for tensor in tensors)]
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        entries = [*addresses[: len(values)], *kinds, *addresses[len(values) :]]
        words = values[0].new_empty(len(entries), dtype=torch.int64)
        for start in range(0, len(entries), kernels.ENTRIES):
            chunk = entries[start : start + kernels.ENTRIES]
            chunk += [0] * (kernels.ENTRIES - len(chunk))
            kernels.fill[(1,)](
                words, start, len(entries), *chunk, num_warps=1, enable_fp_fusion=True
            )
        kind = kinds[0] if len(set(kinds)) == 1 else _MIXED
        is_aligned = all(address % 16 == 0 for address in addresses)
        return cls(words, {"KIND": kind, "ALIGNED": is_aligned})


def _kind_of(tensors: Sequence[Tensor | None]) -> int:
    kinds = {_KINDS[tensor.dtype] for tensor in tensors if tensor is not None}
    assert len(kinds) < 2, "reads have one dtype, and so have priors"
    return kinds.pop() if kinds else 0


def _stacked(tensors: Sequence[Tensor | None], missing: float) -> Tensor | None:
    there = next((tensor for tensor in tensors if tensor is not None), None)
    if there is None:
        return None
    filler = torch.full_like(there, missing)
    return torch.stack([filler if tensor is None else tensor for tensor in tensors])


def _tiling(count: int, dim: int) -> dict[str, int]:
    # of queries or sources; more share what is loaded of the row, as long as registers last
    width = int(triton.next_power_of_2(dim))
    return tile_options(max(1, min(8, 8192 // width, int(triton.next_power_of_2(count)))), dim)
