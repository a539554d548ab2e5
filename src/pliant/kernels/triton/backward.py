"""Gradients of the weighted sum: those of positions and weights, which a query owns, and those of
the features, added atomically in the accumulator's dtype.

Programs go through one pair of item and group after another, whose features and sums stay in the
cache. With EARLY they begin while `clear` still sets the sums to zero, and wait before they add.
What they read was there before: `clear` waits for it, and only then lets them begin.
"""

import triton
import triton.language as tl

from . import taps
from .launch import cover, wait


@triton.jit
def clear(sums, N, BACKWARDS: tl.constexpr, EARLY: tl.constexpr, B: tl.constexpr):
    """Set N numbers to zero, and keep them in the cache; BACKWARDS, the first ones last."""
    wait(EARLY)
    block = tl.program_id(0)
    if BACKWARDS:
        block = tl.num_programs(0) - 1 - block
    i = block.to(tl.int64) * B + tl.arange(0, B)
    tl.store(sums + i, 0.0, mask=i < N, eviction_policy="evict_last")


@triton.jit(do_not_specialize=["Q", "S", "G"])
def by_point(
    grad, value, shapes, starts, loc, weight, grad_value, grad_loc, grad_weight,
    Q, S, G,
    g_n, g_g, v_n, v_g, l_n, l_g, w_n, w_g, gv_n, gv_g, gl_n, gl_g, gw_n, gw_g,
    g_q: tl.constexpr, g_k: tl.constexpr, g_d: tl.constexpr,
    v_s: tl.constexpr, v_k: tl.constexpr, v_d: tl.constexpr,
    l_q: tl.constexpr, l_v: tl.constexpr, l_p: tl.constexpr, l_c: tl.constexpr,
    w_q: tl.constexpr, w_v: tl.constexpr, w_p: tl.constexpr, w_r: tl.constexpr, w_k: tl.constexpr,
    gv_s: tl.constexpr, gv_k: tl.constexpr, gv_d: tl.constexpr,
    gl_q: tl.constexpr, gl_v: tl.constexpr, gl_p: tl.constexpr, gl_c: tl.constexpr,
    gw_q: tl.constexpr, gw_v: tl.constexpr, gw_p: tl.constexpr,
    gw_r: tl.constexpr, gw_k: tl.constexpr,
    V: tl.constexpr, R: tl.constexpr, P: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
    UNIT: tl.constexpr, SKIP: tl.constexpr, NEAREST: tl.constexpr,
    TO_VALUE: tl.constexpr, TO_LOC: tl.constexpr, TO_WEIGHT: tl.constexpr,
    ROW: tl.constexpr, POS: tl.constexpr, ACC: tl.constexpr, INTERPRET: tl.constexpr,
    PAIR: tl.constexpr, UNIFORM: tl.constexpr, EARLY: tl.constexpr, BLOCKS: tl.constexpr,
    BQ: tl.constexpr, BJ: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    programs = cover(Q, BQ)  # of a pair
    pid = tl.program_id(0)
    n = (pid // programs // G).to(tl.int64)
    g = (pid // programs % G).to(tl.int64)
    first = pid % programs * BQ
    q = first.to(tl.int64)
    queries = tl.minimum(BQ, Q - first).to(tl.int64)
    k = tl.arange(0, BK)
    grad += n * g_n + q * g_q + g * g_g
    value += n * v_n + g * v_g
    loc += n * l_n + q * l_q + g * l_g
    weight += n * w_n + q * w_q + g * w_g
    grad_value += n * gv_n + g * gv_g
    grad_loc += n * gl_n + q * gl_q + g * gl_g
    grad_weight += n * gw_n + q * gw_q + g * gw_g
    groups = (k.to(ROW) * g_k)[None, :, None]
    grad += tl.zeros([BJ], tl.int32)[:, None, None] + groups  # [BJ, BK, 1]
    m = tl.program_id(1) * R if SKIP else 0
    if taps.all_honest(shapes + 2 * m, starts + m, R if SKIP else V * R, S):
        for i in range(queries):
            _query(
                grad + i * g_q, value, shapes, starts, loc + i * l_q, weight + i * w_q,
                grad_value, grad_loc + i * gl_q, grad_weight + i * gw_q, S, k,
                g_d, v_s, v_k, v_d, l_v, l_p, l_c, w_v, w_p, w_r, w_k, gv_s, gv_k, gv_d,
                gl_v, gl_p, gl_c, gw_v, gw_p, gw_r, gw_k, V, R, P, K, D,
                UNIT, SKIP, NEAREST, True, TO_VALUE, TO_LOC, TO_WEIGHT,
                ROW, ROW, POS, ACC, INTERPRET, PAIR, UNIFORM, EARLY, BLOCKS, BJ, BK, BD,
            )  # fmt: skip
    else:  # where products of a false size and a stride may exceed 32 bits
        for i in range(queries):
            _query(
                grad + i * g_q, value, shapes, starts, loc + i * l_q, weight + i * w_q,
                grad_value, grad_loc + i * gl_q, grad_weight + i * gw_q, S, k,
                g_d, v_s, v_k, v_d, l_v, l_p, l_c, w_v, w_p, w_r, w_k, gv_s, gv_k, gv_d,
                gl_v, gl_p, gl_c, gw_v, gw_p, gw_r, gw_k, V, R, P, K, D,
                UNIT, SKIP, NEAREST, False, TO_VALUE, TO_LOC, TO_WEIGHT,
                tl.int64, ROW, POS, ACC, INTERPRET, PAIR, UNIFORM, EARLY, BLOCKS, BJ, BK, BD,
            )  # fmt: skip
    wait(EARLY)  # no program ends before the sums are clear, though it may not add


@triton.jit
def _query(
    grad, value, shapes, starts, loc, weight, grad_value, grad_loc, grad_weight, S, k,
    g_d: tl.constexpr, v_s: tl.constexpr, v_k: tl.constexpr, v_d: tl.constexpr,
    l_v: tl.constexpr, l_p: tl.constexpr, l_c: tl.constexpr,
    w_v: tl.constexpr, w_p: tl.constexpr, w_r: tl.constexpr, w_k: tl.constexpr,
    gv_s: tl.constexpr, gv_k: tl.constexpr, gv_d: tl.constexpr,
    gl_v: tl.constexpr, gl_p: tl.constexpr, gl_c: tl.constexpr,
    gw_v: tl.constexpr, gw_p: tl.constexpr, gw_r: tl.constexpr, gw_k: tl.constexpr,
    V: tl.constexpr, R: tl.constexpr, P: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
    UNIT: tl.constexpr, SKIP: tl.constexpr, NEAREST: tl.constexpr, HONEST: tl.constexpr,
    TO_VALUE: tl.constexpr, TO_LOC: tl.constexpr, TO_WEIGHT: tl.constexpr,
    ROW: tl.constexpr, INDEX: tl.constexpr, POS: tl.constexpr, ACC: tl.constexpr,
    INTERPRET: tl.constexpr, PAIR: tl.constexpr, UNIFORM: tl.constexpr, EARLY: tl.constexpr,
    BLOCKS: tl.constexpr, BJ: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """A query's samples, BJ at a time. Rows have the type ROW, all other places INDEX."""
    go = _load_grad(grad, 0, g_d, K, D, INDEX, BK, BD, ACC)
    for b in range(BLOCKS):
        j = b * BJ + tl.arange(0, BJ)
        if SKIP:  # one view after another: most see none of the points
            v = tl.program_id(1)
            p = j
            live = p < P
        elif UNIFORM:
            v = b // (P // BJ)
            p = j % P
            live = j >= 0  # all
        else:
            v = j // P
            p = j % P
            live = v < V if V * P % BJ != 0 else j >= 0
        v = tl.cast(v, INDEX)
        p = p.to(INDEX)
        x, y = taps.load_position(loc + v * l_v + p * l_p, l_c, live, PAIR, POS)
        if SKIP:
            live = live & taps.inside(x, y)
        if _any(live, SKIP):
            along_x = tl.zeros([BJ], ACC)
            along_y = tl.zeros([BJ], ACC)
            for r in range(R):
                some = None if UNIFORM else live
                h, w, start, _ = taps.load_map(shapes, starts, v * R + r, some, S, HONEST, ROW)
                scale = tl.cast(r, INDEX)
                by = weight + (v * w_v + p * w_p + scale * w_r)
                to = grad_weight + (v * gw_v + p * gw_p + scale * gw_r)
                dx, dy = _differentiate(
                    grad, go, value, by, grad_value, to, x, y, h, w, start, live, S, k,
                    g_d, v_s, v_k, v_d, w_k, gv_s, gv_k, gv_d, gw_k, K, D,
                    UNIT, SKIP, NEAREST, HONEST, TO_VALUE, TO_LOC, TO_WEIGHT,
                    ROW, INDEX, ACC, INTERPRET, EARLY, BJ, BK, BD,
                )  # fmt: skip
                along_x += dx
                along_y += dy
            if TO_LOC:
                place = grad_loc + v * gl_v + p * gl_p
                tl.store(place, along_x, mask=live)
                tl.store(place + gl_c, along_y, mask=live)


@triton.jit
def _differentiate(
    grad, go, value, weight, grad_value, grad_weight, x, y, h, w, start, live, S, k,
    g_d: tl.constexpr, v_s: tl.constexpr, v_k: tl.constexpr, v_d: tl.constexpr, w_k: tl.constexpr,
    gv_s: tl.constexpr, gv_k: tl.constexpr, gv_d: tl.constexpr, gw_k: tl.constexpr,
    K: tl.constexpr, D: tl.constexpr,
    UNIT: tl.constexpr, SKIP: tl.constexpr, NEAREST: tl.constexpr, HONEST: tl.constexpr,
    TO_VALUE: tl.constexpr, TO_LOC: tl.constexpr, TO_WEIGHT: tl.constexpr,
    ROW: tl.constexpr, INDEX: tl.constexpr, ACC: tl.constexpr, INTERPRET: tl.constexpr,
    EARLY: tl.constexpr, BJ: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Samples [BJ] of one map each: their gradients, of which those along x and y are returned.

    Tiles are [BJ, BK], or have a third axis of BD channels.
    """
    group = live[:, None] & (k < K)[None, :]
    far = k.to(INDEX)
    a = tl.load(weight[:, None] + (far * w_k)[None, :], mask=group, other=0).to(ACC)
    by_a = tl.zeros([BJ, BK], ACC)
    by_x = tl.zeros([BJ, BK], ACC)
    by_y = tl.zeros([BJ, BK], ACC)
    if NEAREST:
        row, counts = taps.nearest(x, y, h, w, start, S, live, HONEST, ROW)
    else:
        row, fx, fy, m00, m01, m10, m11 = taps.bilinear(
            x, y, h, w, start, S, live, UNIT, SKIP, HONEST, ROW, ACC, INTERPRET
        )
        counts = m00 | m01 | m10 | m11
        fx = fx[:, None, None]
        fy = fy[:, None, None]
        below = ((row + w) - row)[:, None, None]  # `w` for each of the points
    from_row = value + (row * v_s)[:, None, None] + (far * v_k)[None, :, None]
    to_row = grad_value + (row * gv_s)[:, None, None] + (far * gv_k)[None, :, None]
    for d0 in range(0, D, BD):
        d = (d0 + _channels(BD))[None, None, :]
        if D > BD:
            go = _load_grad(grad, d0, g_d, K, D, INDEX, BK, BD, ACC)
        if NEAREST:
            n00 = _corner(counts, k, d, K, D, BK, BD)
            if TO_WEIGHT:
                v00 = tl.load(from_row + d.to(INDEX) * v_d, mask=n00, other=0).to(ACC)
                by_a += taps.dot(go, v00, 2, INTERPRET)
            if TO_VALUE:
                wait(EARLY)
                to = to_row + d.to(INDEX) * gv_d
                tl.atomic_add(to, go * a[:, :, None], mask=n00, sem="relaxed")
        else:
            n00 = _corner(m00, k, d, K, D, BK, BD)
            n01 = _corner(m01, k, d, K, D, BK, BD)
            n10 = _corner(m10, k, d, K, D, BK, BD)
            n11 = _corner(m11, k, d, K, D, BK, BD)
            if TO_LOC or TO_WEIGHT:
                at = from_row + d.to(INDEX) * v_d
                v00 = tl.load(at, mask=n00, other=0).to(ACC)
                v01 = tl.load(at + v_s, mask=n01, other=0).to(ACC)
                at += below * v_s
                v10 = tl.load(at, mask=n10, other=0).to(ACC)
                v11 = tl.load(at + v_s, mask=n11, other=0).to(ACC)
                top = v00 * (1 - fx) + v01 * fx
                bottom = v10 * (1 - fx) + v11 * fx
                if TO_WEIGHT:
                    by_a += taps.dot(go, top * (1 - fy) + bottom * fy, 2, INTERPRET)
                if TO_LOC:  # differences before sums: features may have much in common
                    along = (v01 - v00) * (1 - fy) + (v11 - v10) * fy
                    by_x += taps.dot(go, along, 2, INTERPRET)
                    by_y += taps.dot(go, bottom - top, 2, INTERPRET)
            if TO_VALUE:
                wait(EARLY)
                to = to_row + d.to(INDEX) * gv_d
                ga = go * a[:, :, None]
                c00, c01, c10, c11 = taps.coefficients(fx, fy)
                tl.atomic_add(to, ga * c00, mask=n00, sem="relaxed")
                tl.atomic_add(to + gv_s, ga * c01, mask=n01, sem="relaxed")
                to += below * gv_s
                tl.atomic_add(to, ga * c10, mask=n10, sem="relaxed")
                tl.atomic_add(to + gv_s, ga * c11, mask=n11, sem="relaxed")
    # A sample that does not count gives zero, whatever the incoming gradient holds.
    if TO_WEIGHT:
        by_a = tl.where(counts[:, None], by_a, 0)
        tl.store(grad_weight[:, None] + (far * gw_k)[None, :], by_a, mask=group)
    dx = tl.zeros([BJ], ACC)
    dy = tl.zeros([BJ], ACC)
    if TO_LOC:
        scale_x = w.to(ACC) if UNIT else 1.0
        scale_y = h.to(ACC) if UNIT else 1.0
        dx = tl.where(counts, taps.dot(a, by_x, 1, INTERPRET) * scale_x, 0)
        dy = tl.where(counts, taps.dot(a, by_y, 1, INTERPRET) * scale_y, 0)
    return dx, dy


@triton.jit
def _any(live, SKIP: tl.constexpr):
    """Whether a sample counts; where few are skipped, it is not worth asking."""
    if SKIP:
        return tl.max(live.to(tl.int32), 0) > 0
    else:
        return True


@triton.jit
def _channels(BD: tl.constexpr):
    """0 to BD - 1, of which the compiler sees four at a time to be neighbours: it then loads as
    many to a thread as an atomic adds, in 16 bits too, and no layout has to be converted.
    """
    return tl.arange(0, BD) // 4 * 4 + tl.arange(0, BD) % 4


@triton.jit
def _load_grad(
    grad, d0, g_d: tl.constexpr,
    K: tl.constexpr, D: tl.constexpr, INDEX: tl.constexpr,
    BK: tl.constexpr, BD: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The incoming gradient [BJ, BK, BD], the same for a query's points, laid out as they are."""
    d = d0 + _channels(BD)
    column = ((tl.arange(0, BK) < K)[:, None] & (d < D)[None, :])[None, :, :]
    return tl.load(grad + (d.to(INDEX) * g_d)[None, None, :], mask=column, other=0).to(ACC)


@triton.jit
def _corner(
    read, k, d, K: tl.constexpr, D: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr
):  # fmt: skip
    """A mask [BJ, BK, BD] from one of the points; channels need none where the blocks fit."""
    read = read[:, None, None]
    if K != BK:
        read = read & (k < K)[None, :, None]
    if D % BD != 0:
        read = read & (d < D)
    return read
