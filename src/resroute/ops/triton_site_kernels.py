"""Kernels of the site operation.

A program holds a tile of whole rows in registers, so each tensor is read once and sums over D need
no second pass. What is absent is None, which the compiler knows: nothing is generated for it.

R rows, D width (passed in units of GRAIN, which tells the compiler how rows are aligned), K bases,
Z running streams; K and Z are at most 3, and each is written out. Per basis k: `b` the basis, `r`
its 1 / rms, `p` its softmax weight, `s` its matching factor; `w` is the key, `dh` the gradient at
the mix. `saved` holds p of the prior, 1 / rms of the mix, then p, s, r and logit of each basis.
"""

# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def _load(pointer, at, mask):
    return tl.load(pointer + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _stream(stream, update, added, at, mask, IS_TARGET: tl.constexpr):
    """A stream with the update in it, rounded once: as it will be read later."""
    value = _load(stream, at, mask)
    if IS_TARGET:
        value += _load(update, at, mask)
        rounded = value.to(added.dtype.element_ty)
        tl.store(added + at, rounded, mask=mask)
        value = rounded.to(tl.float32)
    return value


@triton.jit
def _combine(z0, z1, z2, a0, a1, a2, Z: tl.constexpr):
    value = a0 * z0
    if Z > 1:
        value += a1 * z1
    if Z > 2:
        value += a2 * z2
    return value


@triton.jit
def _score(basis, w, eps, D):
    r = tl.rsqrt(tl.sum(basis * basis, axis=1) / D + eps)
    return r, r * tl.sum(basis * w, axis=1)


@triton.jit
def _save(saved, k, rows, R, there, p, s, r, logit):
    tl.store(saved + (2 + 4 * k) * R + rows, p, mask=there)
    tl.store(saved + (3 + 4 * k) * R + rows, s, mask=there)
    tl.store(saved + (4 + 4 * k) * R + rows, r, mask=there)
    tl.store(saved + (5 + 4 * k) * R + rows, logit, mask=there)


@triton.jit
def _number(saved, index, rows, R, there):
    # one where there is no row, so that nothing divides by zero
    return tl.load(saved + index * R + rows, mask=there, other=1.0)


@triton.jit
def _numbers(saved, k, rows, R, there):
    return (
        _number(saved, 2 + 4 * k, rows, R, there),
        _number(saved, 3 + 4 * k, rows, R, there),
        _number(saved, 4 + 4 * k, rows, R, there),
        _number(saved, 5 + 4 * k, rows, R, there),
    )


@triton.jit
def _mix_bases(
    z0, z1, z2, prior, lse, key, bias, saved, rows, there, at, mask, columns, inside, R, D,
    a00, a01, a02, a10, a11, a12, a20, a21, a22, eps, rho_max,
    K: tl.constexpr, Z: tl.constexpr, MATCHED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The softmax over bases and prior: the mix and the prior's weight."""
    absent = tl.full([TILE], float("-inf"), tl.float32)
    outer, score1, score2 = absent, absent, absent
    w = _load(key, columns, inside)[None, :]
    b0 = _combine(z0, z1, z2, a00, a01, a02, Z)
    r0, logit0 = _score(b0, w, eps, D)
    if prior is not None:
        outer = tl.load(lse + rows, mask=there, other=0.0)
    if K > 1:
        b1 = _combine(z0, z1, z2, a10, a11, a12, Z)
        r1, logit1 = _score(b1, w, eps, D)
        score1 = logit1
        if bias is not None:
            score1 += tl.load(bias)
    if K > 2:
        b2 = _combine(z0, z1, z2, a20, a21, a22, Z)
        r2, logit2 = _score(b2, w, eps, D)
        score2 = logit2
        if bias is not None:
            score2 += tl.load(bias + 1)
    top = tl.maximum(tl.maximum(outer, logit0), tl.maximum(score1, score2))
    e_prior, e0 = tl.exp(outer - top), tl.exp(logit0 - top)
    e1, e2 = tl.exp(score1 - top), tl.exp(score2 - top)
    total = e_prior + e0 + e1 + e2
    p_prior, p0, p1, p2 = e_prior / total, e0 / total, e1 / total, e2 / total
    one = tl.full([TILE], 1.0, tl.float32)
    _save(saved, 0, rows, R, there, p0, one, r0, logit0)
    mix = p0[:, None] * b0
    if K > 1:
        s1 = tl.minimum(r1 / r0, rho_max) if MATCHED else one
        _save(saved, 1, rows, R, there, p1, s1, r1, logit1)
        mix += (p1 * s1)[:, None] * b1
    if K > 2:
        s2 = tl.minimum(r2 / r0, rho_max) if MATCHED else one
        _save(saved, 2, rows, R, there, p2, s2, r2, logit2)
        mix += (p2 * s2)[:, None] * b2
    if prior is not None:
        mix += p_prior[:, None] * _load(prior, at, mask)
    return mix, p_prior


@triton.jit
def forward(
    update, s0, s1, s2, prior, lse, key, bias, gain, read, added, saved, R, units,
    a00, a01, a02, a10, a11, a12, a20, a21, a22, eps, rho_max, norm_eps,
    K: tl.constexpr, Z: tl.constexpr, TARGET: tl.constexpr, MATCHED: tl.constexpr,
    GRAIN: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Update, mix and norm of a tile of rows."""
    D = units * GRAIN
    # 64 bits: R D passes 2^31
    rows = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    columns = tl.arange(0, WIDTH)
    there = rows < R
    inside = columns < D
    mask = there[:, None] & inside[None, :]
    at = rows[:, None] * D + columns[None, :]
    z0 = tl.zeros([TILE, WIDTH], tl.float32)
    if Z > 0:
        z0 = _stream(s0, update, added, at, mask, TARGET == 0)
    z1, z2 = z0, z0
    if Z > 1:
        z1 = _stream(s1, update, added, at, mask, TARGET == 1)
    if Z > 2:
        z2 = _stream(s2, update, added, at, mask, TARGET == 2)
    p_prior = tl.full([TILE], 1.0, tl.float32)
    if K > 0:
        mix, p_prior = _mix_bases(
            z0, z1, z2, prior, lse, key, bias, saved, rows, there, at, mask, columns, inside, R, D,
            a00, a01, a02, a10, a11, a12, a20, a21, a22, eps, rho_max, K, Z, MATCHED, TILE,
        )  # fmt: skip
    elif prior is not None:
        mix = _load(prior, at, mask)
    else:
        mix = z0
    tl.store(saved + rows, p_prior, mask=there)
    norm = tl.full([TILE], 1.0, tl.float32)
    if gain is not None:
        norm = tl.rsqrt(tl.sum(mix * mix, axis=1) / D + norm_eps)
        mix = mix * norm[:, None] * _load(gain, columns, inside)[None, :]
    tl.store(saved + R + rows, norm, mask=there)
    tl.store(read + at, mix.to(read.dtype.element_ty), mask=mask)


@triton.jit
def _streams(s0, s1, s2, at, mask, Z: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr):
    """The streams that there are."""
    z0 = tl.zeros([TILE, WIDTH], tl.float32)
    if Z > 0:
        z0 = _load(s0, at, mask)
    z1, z2 = z0, z0
    if Z > 1:
        z1 = _load(s1, at, mask)
    if Z > 2:
        z2 = _load(s2, at, mask)
    return z0, z1, z2


@triton.jit
def _through_norm(grad, mix, norm, gain, D):
    """The gradient at the mix, from that at its norm times gain."""
    dh = grad * norm[:, None] * gain
    return dh - mix * (norm * norm * tl.sum(dh * mix, axis=1) / D)[:, None]


@triton.jit
def _through_rms(product, p, r, r0, rho_max):
    """What an attached matching factor min(r / r0, rho) sends to r and to r0."""
    free = tl.where(r / r0 < rho_max, p * product, 0.0)
    return free / r0, -free * r / (r0 * r0)


@triton.jit
def _terms(p, s, r, logit, product, delta, turn, D):
    """The gradient at the logit, and the factors of key and basis in the gradient at the basis."""
    dl = p * (s * product - delta)
    # through r(x), whose gradient is -r^3 x / D
    return dl, dl * r, -(dl * r * r * logit + turn * r * r * r) / D


@triton.jit
def _stream_gradient(
    arriving, grad, grad_update, dh, w, b0, b1, b2, a0, a1, a2, m0, m1, m2, f0, f1, f2, c0, c1, c2,
    at, mask, K: tl.constexpr, IS_READ: tl.constexpr, IS_TARGET: tl.constexpr,
):  # fmt: skip
    """Sum over the bases of a_k (m_k dh + f_k w + c_k b_k), onto what later consumers sent."""
    if K > 0:
        along_dh, along_w = a0 * m0, a0 * f0
        total = (a0 * c0)[:, None] * b0
        if K > 1:
            along_dh += a1 * m1
            along_w += a1 * f1
            total += (a1 * c1)[:, None] * b1
        if K > 2:
            along_dh += a2 * m2
            along_w += a2 * f2
            total += (a2 * c2)[:, None] * b2
        total += along_dh[:, None] * dh + along_w[:, None] * w
    elif IS_READ:
        total = dh
    else:
        total = tl.zeros_like(dh)
    if arriving is not None:
        total += _load(arriving, at, mask)
    tl.store(grad + at, total.to(grad.dtype.element_ty), mask=mask)
    if IS_TARGET:
        tl.store(grad_update + at, total.to(grad_update.dtype.element_ty), mask=mask)


@triton.jit
def _store_parts(
    part_key, part_bias, part_gain, sum_key, sum_bias1, sum_bias2, sum_gain, first, columns,
    inside, D, K: tl.constexpr,
):  # fmt: skip
    """A program's sums over its rows."""
    line = first.to(tl.int64) * D + columns
    if part_key is not None:
        tl.store(part_key + line, tl.sum(sum_key, axis=0), mask=inside)
    if part_gain is not None:
        tl.store(part_gain + line, tl.sum(sum_gain, axis=0), mask=inside)
    if K > 1 and part_bias is not None:
        tl.store(part_bias + first * (K - 1), tl.sum(sum_bias1, axis=0))
    if K > 2 and part_bias is not None:
        tl.store(part_bias + first * (K - 1) + 1, tl.sum(sum_bias2, axis=0))


@triton.jit
def backward(
    grad_read, g0, g1, g2, s0, s1, s2, prior, key, gain, saved,
    grad_update, grad_prior, grad_lse, part_key, part_bias, part_gain, d0, d1, d2, R, units,
    a00, a01, a02, a10, a11, a12, a20, a21, a22, rho_max,
    K: tl.constexpr, Z: tl.constexpr, TARGET: tl.constexpr, ATTACHED: tl.constexpr,
    GRAIN: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Gradients of tiles of rows, and a program's share of those of key, bias and gain."""
    D = units * GRAIN
    first = tl.program_id(0)
    columns = tl.arange(0, WIDTH)
    inside = columns < D
    sum_key = tl.zeros([TILE, WIDTH], tl.float32)
    sum_gain = tl.zeros([TILE, WIDTH], tl.float32)
    sum_bias1 = tl.zeros([TILE], tl.float32)
    sum_bias2 = tl.zeros([TILE], tl.float32)
    for tile in range(first, tl.cdiv(R, TILE), tl.num_programs(0)):
        rows = (tile * TILE + tl.arange(0, TILE)).to(tl.int64)
        there = rows < R
        mask = there[:, None] & inside[None, :]
        at = rows[:, None] * D + columns[None, :]
        z0, z1, z2 = _streams(s0, s1, s2, at, mask, Z, TILE, WIDTH)
        p_prior = _number(saved, 0, rows, R, there)
        norm = _number(saved, 1, rows, R, there)
        b0, b1, b2 = z0, z0, z0
        zero = tl.zeros([TILE], tl.float32)
        p0, s_0, r0, logit0, product0 = zero, zero, zero, zero, zero
        p1, s_1, r1, logit1, product1 = zero, zero, zero, zero, zero
        p2, s_2, r2, logit2, product2 = zero, zero, zero, zero, zero
        # the mix is built again
        if prior is not None:
            outer = _load(prior, at, mask)
            mix = p_prior[:, None] * outer
        elif K == 0:
            mix = z0
        else:
            mix = tl.zeros([TILE, WIDTH], tl.float32)
        if K > 0:
            b0 = _combine(z0, z1, z2, a00, a01, a02, Z)
            p0, s_0, r0, logit0 = _numbers(saved, 0, rows, R, there)
            mix += p0[:, None] * b0
        if K > 1:
            b1 = _combine(z0, z1, z2, a10, a11, a12, Z)
            p1, s_1, r1, logit1 = _numbers(saved, 1, rows, R, there)
            mix += (p1 * s_1)[:, None] * b1
        if K > 2:
            b2 = _combine(z0, z1, z2, a20, a21, a22, Z)
            p2, s_2, r2, logit2 = _numbers(saved, 2, rows, R, there)
            mix += (p2 * s_2)[:, None] * b2
        dh = _load(grad_read, at, mask)
        if gain is not None:
            if part_gain is not None:
                sum_gain += dh * mix * norm[:, None]
            dh = _through_norm(dh, mix, norm, _load(gain, columns, inside)[None, :], D)
        # <dh, mix> by its parts: the weights sum to one, so the gradients at the logits to zero
        delta = zero
        if prior is not None:
            product = tl.sum(dh * outer, axis=1)
            delta += p_prior * product
        if K > 0:
            product0 = tl.sum(dh * b0, axis=1)
            delta += p0 * product0
        if K > 1:
            product1 = tl.sum(dh * b1, axis=1)
            delta += p1 * s_1 * product1
        if K > 2:
            product2 = tl.sum(dh * b2, axis=1)
            delta += p2 * s_2 * product2
        if grad_lse is not None:
            tl.store(grad_lse + rows, p_prior * (product - delta), mask=there)
        if grad_prior is not None:
            share = p_prior[:, None] * dh
            tl.store(grad_prior + at, share.to(grad_prior.dtype.element_ty), mask=mask)
        w = dh
        if K > 0:
            w = _load(key, columns, inside)[None, :]
        turn0, turn1, turn2 = zero, zero, zero
        if ATTACHED and K > 1:
            turn1, back = _through_rms(product1, p1, r1, r0, rho_max)
            turn0 += back
        if ATTACHED and K > 2:
            turn2, back = _through_rms(product2, p2, r2, r0, rho_max)
            turn0 += back
        _, f0, c0 = _terms(p0, s_0, r0, logit0, product0, delta, turn0, D)
        dl1, f1, c1 = _terms(p1, s_1, r1, logit1, product1, delta, turn1, D)
        dl2, f2, c2 = _terms(p2, s_2, r2, logit2, product2, delta, turn2, D)
        sum_bias1 += dl1
        sum_bias2 += dl2
        if part_key is not None:
            sum_key += f0[:, None] * b0
            if K > 1:
                sum_key += f1[:, None] * b1
            if K > 2:
                sum_key += f2[:, None] * b2
        m0, m1, m2 = p0 * s_0, p1 * s_1, p2 * s_2
        if Z > 0:
            _stream_gradient(
                g0, d0, grad_update, dh, w, b0, b1, b2, a00, a10, a20, m0, m1, m2, f0, f1, f2,
                c0, c1, c2, at, mask, K, prior is None, TARGET == 0,
            )  # fmt: skip
        if Z > 1:
            _stream_gradient(
                g1, d1, grad_update, dh, w, b0, b1, b2, a01, a11, a21, m0, m1, m2, f0, f1, f2,
                c0, c1, c2, at, mask, K, False, TARGET == 1,
            )  # fmt: skip
        if Z > 2:
            _stream_gradient(
                g2, d2, grad_update, dh, w, b0, b1, b2, a02, a12, a22, m0, m1, m2, f0, f1, f2,
                c0, c1, c2, at, mask, K, False, TARGET == 2,
            )  # fmt: skip
    _store_parts(
        part_key, part_bias, part_gain, sum_key, sum_bias1, sum_bias2, sum_gain, first, columns,
        inside, D, K,
    )  # fmt: skip
