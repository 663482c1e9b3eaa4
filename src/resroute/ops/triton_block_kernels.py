"""Kernels of the block read.

A program holds one row for a tile of queries (or of sources) in registers. Sources, mixes and their
gradients are found through a table of addresses, by lists: N values, the N kinds of their dtypes
(0 float32, 1 bfloat16, 2 float16), then lists that each kernel names. Address 0 is no tensor: it
reads as zeros and is never written.

R rows, D width (passed in units of GRAIN), N sources, M queries; logits are (R, M, N). `v` is a
source, `w` a key, `do` the gradient at a read, `dl` at a logit.
"""

# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

ENTRIES = 32
"""Entries of the table that one launch fills."""


@triton.jit(do_not_specialize=["start", "total", *(f"e{i}" for i in range(ENTRIES))])
def fill(
    words, start: tl.int64, total: tl.int64,
    e0: tl.int64, e1: tl.int64, e2: tl.int64, e3: tl.int64, e4: tl.int64, e5: tl.int64,
    e6: tl.int64, e7: tl.int64, e8: tl.int64, e9: tl.int64, e10: tl.int64, e11: tl.int64,
    e12: tl.int64, e13: tl.int64, e14: tl.int64, e15: tl.int64, e16: tl.int64, e17: tl.int64,
    e18: tl.int64, e19: tl.int64, e20: tl.int64, e21: tl.int64, e22: tl.int64, e23: tl.int64,
    e24: tl.int64, e25: tl.int64, e26: tl.int64, e27: tl.int64, e28: tl.int64, e29: tl.int64,
    e30: tl.int64, e31: tl.int64,
):  # fmt: skip
    """Put entries into the table: arguments, because they need no copy from the host."""
    _put(words, start + 0, total, e0)
    _put(words, start + 1, total, e1)
    _put(words, start + 2, total, e2)
    _put(words, start + 3, total, e3)
    _put(words, start + 4, total, e4)
    _put(words, start + 5, total, e5)
    _put(words, start + 6, total, e6)
    _put(words, start + 7, total, e7)
    _put(words, start + 8, total, e8)
    _put(words, start + 9, total, e9)
    _put(words, start + 10, total, e10)
    _put(words, start + 11, total, e11)
    _put(words, start + 12, total, e12)
    _put(words, start + 13, total, e13)
    _put(words, start + 14, total, e14)
    _put(words, start + 15, total, e15)
    _put(words, start + 16, total, e16)
    _put(words, start + 17, total, e17)
    _put(words, start + 18, total, e18)
    _put(words, start + 19, total, e19)
    _put(words, start + 20, total, e20)
    _put(words, start + 21, total, e21)
    _put(words, start + 22, total, e22)
    _put(words, start + 23, total, e23)
    _put(words, start + 24, total, e24)
    _put(words, start + 25, total, e25)
    _put(words, start + 26, total, e26)
    _put(words, start + 27, total, e27)
    _put(words, start + 28, total, e28)
    _put(words, start + 29, total, e29)
    _put(words, start + 30, total, e30)
    _put(words, start + 31, total, e31)


@triton.jit
def _put(words, index, total, entry):
    tl.store(words + index, entry, mask=index < total)


@triton.jit
def _pointers(addresses, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    pointers = addresses.to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointers = tl.multiple_of(pointers, [16])
    return pointers[:, None]


@triton.jit
def _load_as(addresses, at, mask, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    pointers = _pointers(addresses, DTYPE, ALIGNED) + at
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store_as(addresses, at, mask, rows, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    tl.store(_pointers(addresses, DTYPE, ALIGNED) + at, rows.to(DTYPE), mask=mask)


@triton.jit
def _load_rows(entries, kinds, index, valid, at, inside, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    """Rows of the tensors at some entries of the table; zeros where there is no tensor."""
    addresses = tl.load(entries + index, mask=valid, other=0)
    mask = (addresses != 0)[:, None] & inside[None, :]
    if KIND == 0:
        rows = _load_as(addresses, at, mask, tl.float32, ALIGNED)
    elif KIND == 1:
        rows = _load_as(addresses, at, mask, tl.bfloat16, ALIGNED)
    elif KIND == 2:
        rows = _load_as(addresses, at, mask, tl.float16, ALIGNED)
    else:
        # loads that are masked off touch no memory
        kind = tl.load(kinds + index, mask=valid, other=0)[:, None]
        rows = _load_as(addresses, at, mask & (kind == 0), tl.float32, ALIGNED)
        rows += _load_as(addresses, at, mask & (kind == 1), tl.bfloat16, ALIGNED)
        rows += _load_as(addresses, at, mask & (kind == 2), tl.float16, ALIGNED)
    return rows


@triton.jit
def _store_rows(
    entries, kinds, index, valid, at, inside, rows, KIND: tl.constexpr, ALIGNED: tl.constexpr
):
    """Each row to its tensor, in that tensor's dtype."""
    addresses = tl.load(entries + index, mask=valid, other=0)
    mask = (addresses != 0)[:, None] & inside[None, :]
    if KIND == 0:
        _store_as(addresses, at, mask, rows, tl.float32, ALIGNED)
    elif KIND == 1:
        _store_as(addresses, at, mask, rows, tl.bfloat16, ALIGNED)
    elif KIND == 2:
        _store_as(addresses, at, mask, rows, tl.float16, ALIGNED)
    else:
        kind = tl.load(kinds + index, mask=valid, other=0)[:, None]
        _store_as(addresses, at, mask & (kind == 0), rows, tl.float32, ALIGNED)
        _store_as(addresses, at, mask & (kind == 1), rows, tl.bfloat16, ALIGNED)
        _store_as(addresses, at, mask & (kind == 2), rows, tl.float16, ALIGNED)


@triton.jit
def _store_numbers(entries, index, valid, row, numbers):
    addresses = tl.load(entries + index, mask=valid, other=0)
    tl.store(addresses.to(tl.pointer_type(tl.float32)) + row, numbers, mask=valid)


@triton.jit
def forward(
    words, inverse_rms, scales, keys, biases, prior_lses, logits, R, units, N, M,
    KIND: tl.constexpr, ALIGNED: tl.constexpr, READ: tl.constexpr, PRIOR: tl.constexpr,
    GRAIN: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Mixes and log-sum-exps of a tile of queries; lists: M reads, M lses, M priors."""
    D = units * GRAIN
    tiles = tl.cdiv(M, TILE)
    # neighbours share a row, which the cache then has; 64 bits: R D passes 2^31
    row = (tl.program_id(0) // tiles + tl.arange(0, 1)).to(tl.int64)
    j = (tl.program_id(0) % tiles * TILE + tl.arange(0, TILE)).to(tl.int64)
    asked = j < M
    columns = tl.arange(0, WIDTH)
    inside = columns < D
    at = row[:, None] * D + columns[None, :]
    kinds = words + N
    w_mask = asked[:, None] & inside[None, :]
    w = tl.load(keys + j[:, None] * D + columns[None, :], mask=w_mask, other=0.0)
    if prior_lses is not None:
        top = tl.load(prior_lses + j * R + row, mask=asked, other=0.0)
        total = tl.full([TILE], 1.0, tl.float32)
        mix = _load_rows(words + 2 * (N + M), kinds, j, asked, at, inside, PRIOR, ALIGNED)
    else:
        top = tl.full([TILE], float("-inf"), tl.float32)
        total = tl.zeros([TILE], tl.float32)
        mix = tl.zeros([TILE, WIDTH], tl.float32)
    for source in range(N):
        n = (source + tl.arange(0, 1)).to(tl.int64)
        v = _load_rows(words, kinds, n, n < N, at, inside, KIND, ALIGNED)
        logit = tl.load(inverse_rms + n * R + row) * tl.sum(w * v, axis=1)
        if biases is not None:
            logit += tl.load(biases + j * N + n, mask=asked, other=0.0)
        tl.store(logits + (row * M + j) * N + n, logit, mask=asked)
        higher = tl.maximum(top, logit)
        shrink = tl.exp(top - higher)
        share = tl.exp(logit - higher)
        total = total * shrink + share
        if scales is not None:
            share *= tl.load(scales + n * R + row)
        mix = mix * shrink[:, None] + share[:, None] * v
        top = higher
    _store_numbers(words + 2 * N + M, j, asked, row, top + tl.log(total))
    read = mix / total[:, None]
    _store_rows(words + 2 * N, kinds, j, asked, at, inside, read, READ, ALIGNED)


@triton.jit
def backward_queries(
    words, inverse_rms, scales, prior_lses, grad_lses, lses, logits, weights, grad_logits, products,
    part_keys, part_biases, R, units, N, M, programs,
    KIND: tl.constexpr, ALIGNED: tl.constexpr, READ: tl.constexpr, PRIOR: tl.constexpr,
    WANTS_PRIORS: tl.constexpr, SOURCES: tl.constexpr,
    GRAIN: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Gradients at the logits, and of keys, biases and priors, for a tile of queries.

    Lists: M gradients of reads, M priors, their M gradients, M gradients of prior lses.
    """
    D = units * GRAIN
    tiles = tl.cdiv(M, TILE)
    first = tl.program_id(0) // tiles
    j = (tl.program_id(0) % tiles * TILE + tl.arange(0, TILE)).to(tl.int64)
    asked = j < M
    columns = tl.arange(0, WIDTH)
    inside = columns < D
    sources = tl.arange(0, SOURCES)
    pairs = asked[:, None] & (sources < N)[None, :]
    kinds = words + N
    lists = words + 2 * N
    sum_keys = tl.zeros([TILE, WIDTH], tl.float32)
    sum_biases = tl.zeros([TILE, SOURCES], tl.float32)
    for step in range(first, R, programs):
        row = (step + tl.arange(0, 1)).to(tl.int64)
        at = row[:, None] * D + columns[None, :]
        do = _load_rows(lists, kinds, j, asked, at, inside, READ, ALIGNED)
        product = tl.zeros([TILE, SOURCES], tl.float32)
        for source in range(N):
            n = (source + tl.arange(0, 1)).to(tl.int64)
            v = _load_rows(words, kinds, n, n < N, at, inside, KIND, ALIGNED)
            here = sources[None, :] == source
            product = tl.where(here, tl.sum(do * v, axis=1)[:, None], product)
        end = tl.load(lses + j * R + row, mask=asked, other=0.0)
        pair = (row * M + j)[:, None] * N + sources[None, :]
        logit = tl.load(logits + pair, mask=pairs, other=float("-inf"))
        p = tl.exp(logit - end[:, None])
        sum_p = tl.sum(p, axis=1)
        p_prior = tl.zeros([TILE], tl.float32)
        if prior_lses is not None:
            before = tl.load(prior_lses + j * R + row, mask=asked, other=float("-inf"))
            p_prior = tl.exp(before - end)
            sum_p += p_prior
        # the log-sum-exp was rounded: weights must sum to one for their gradients to cancel
        sum_p = tl.where(asked, sum_p, 1.0)
        p_prior /= sum_p
        p /= sum_p[:, None]
        tl.store(weights + pair, p, mask=pairs)
        if products is not None:
            tl.store(products + pair, p * product, mask=pairs)
        per_source = sources.to(tl.int64) * R + row
        if scales is not None:
            product *= tl.load(scales + per_source, mask=sources < N, other=0.0)[None, :]
        centre = tl.sum(p * product, axis=1)
        arriving = tl.zeros([TILE], tl.float32)
        if grad_lses is not None:
            arriving = tl.load(grad_lses + j * R + row, mask=asked, other=0.0)
        if prior_lses is not None:
            prior = _load_rows(lists + M, kinds, j, asked, at, inside, PRIOR, ALIGNED)
            prior_product = tl.sum(do * prior, axis=1)
            centre += p_prior * prior_product
            if WANTS_PRIORS:
                share = p_prior[:, None] * do
                _store_rows(lists + 2 * M, kinds, j, asked, at, inside, share, PRIOR, ALIGNED)
                grad_prior_lse = p_prior * (prior_product - centre + arriving)
                _store_numbers(lists + 3 * M, j, asked, row, grad_prior_lse)
        dl = p * (product - centre[:, None] + arriving[:, None])
        tl.store(grad_logits + pair, dl, mask=pairs)
        if part_biases is not None:
            sum_biases += dl
        if part_keys is not None:
            r = tl.load(inverse_rms + per_source, mask=sources < N, other=0.0)
            keyed = dl * r[None, :]
            for source in range(N):
                n = (source + tl.arange(0, 1)).to(tl.int64)
                v = _load_rows(words, kinds, n, n < N, at, inside, KIND, ALIGNED)
                factor = tl.sum(tl.where(sources[None, :] == source, keyed, 0.0), axis=1)
                sum_keys += factor[:, None] * v
    line = first.to(tl.int64) * M + j
    if part_keys is not None:
        w_mask = asked[:, None] & inside[None, :]
        tl.store(part_keys + line[:, None] * D + columns[None, :], sum_keys, mask=w_mask)
    if part_biases is not None:
        tl.store(part_biases + line[:, None] * N + sources[None, :], sum_biases, mask=pairs)


@triton.jit
def backward_values(
    words, inverse_rms, scales, keys, biases, logits, weights, grad_logits, R, units, N, M, skipped,
    KIND: tl.constexpr, ALIGNED: tl.constexpr, READ: tl.constexpr,
    GRAIN: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Gradients at a tile of sources, summed over all queries and what later consumers sent.

    Lists: M gradients of reads, `skipped` others, N gradients of values as they come, N results.
    """
    D = units * GRAIN
    tiles = tl.cdiv(N, TILE)
    row = (tl.program_id(0) // tiles + tl.arange(0, 1)).to(tl.int64)
    n = (tl.program_id(0) % tiles * TILE + tl.arange(0, TILE)).to(tl.int64)
    valid = n < N
    columns = tl.arange(0, WIDTH)
    inside = columns < D
    at = row[:, None] * D + columns[None, :]
    kinds = words + N
    lists = words + 2 * N
    arriving = lists + M + skipped
    r = tl.load(inverse_rms + n * R + row, mask=valid, other=0.0)
    total = _load_rows(arriving, kinds, n, valid, at, inside, KIND, ALIGNED)
    back = tl.zeros([TILE], tl.float32)
    for query in range(M):
        j = (query + tl.arange(0, 1)).to(tl.int64)
        do = _load_rows(lists, kinds, j, j < M, at, inside, READ, ALIGNED)
        w = tl.load(keys + j[:, None] * D + columns[None, :], mask=inside[None, :], other=0.0)
        pair = (row * M + j) * N + n
        logit = tl.load(logits + pair, mask=valid, other=0.0)
        dl = tl.load(grad_logits + pair, mask=valid, other=0.0)
        share = tl.load(weights + pair, mask=valid, other=0.0)
        if scales is not None:
            share *= tl.load(scales + n * R + row, mask=valid, other=0.0)
        total += share[:, None] * do + (dl * r)[:, None] * w
        if biases is not None:
            logit -= tl.load(biases + j * N + n, mask=valid, other=0.0)
        back += dl * logit
    v = _load_rows(words, kinds, n, valid, at, inside, KIND, ALIGNED)
    # through 1 / rms, whose gradient is -r^3 v / D
    total -= (back * r * r / D)[:, None] * v
    _store_rows(arriving + N, kinds, n, valid, at, inside, total, KIND, ALIGNED)
