"""The weighted sum of samples. Two tilings of one computation:

`by_query`   a tile is [queries x heads, channels]; a query's points are read one after another,
             where it can be after its lanes have found the corners of several for each other.
`by_point`   a tile is [points, channels] of one query and view; one in which no point counts is
             left out before anything is read. For weights by channel group, for points mostly
             outside, and for few queries of many points, which several programs share.
"""

import triton
import triton.language as tl

from . import taps
from .launch import cover, wait


@triton.jit(do_not_specialize=["Q", "S"])
def by_query(
    value, shapes, starts, loc, weight, out,
    Q, S,
    v_n, v_g, l_n, l_g, w_n, w_g,
    v_s: tl.constexpr, v_d: tl.constexpr,
    l_q: tl.constexpr, l_v: tl.constexpr, l_p: tl.constexpr, l_c: tl.constexpr,
    w_q: tl.constexpr, w_v: tl.constexpr, w_p: tl.constexpr, w_r: tl.constexpr,
    G: tl.constexpr, V: tl.constexpr, R: tl.constexpr, P: tl.constexpr, D: tl.constexpr,
    UNIT: tl.constexpr, SKIP: tl.constexpr, NEAREST: tl.constexpr,
    ROW: tl.constexpr, POS: tl.constexpr, ACC: tl.constexpr, INTERPRET: tl.constexpr,
    BQ: tl.constexpr, BG: tl.constexpr, BD: tl.constexpr, BP: tl.constexpr,
    SHARE: tl.constexpr, CACHE: tl.constexpr, PAIR: tl.constexpr, WEIGHT_PAIR: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    blocks = cover(Q, BQ)
    pid = tl.program_id(0)
    n = (pid // blocks // (G // BG)).to(tl.int64)
    first_g = (pid // blocks % (G // BG) * BG).to(tl.int64)
    line = tl.arange(0, BQ * BG)
    g = (line % BG).to(ROW)
    q = (pid % blocks) * BQ + line // BG
    live = q < Q
    q = tl.minimum(q, Q - 1).to(ROW)  # a query too many repeats the last: its loads need no mask
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    value += n * v_n + first_g * v_g
    loc += n * l_n + first_g * l_g
    weight += n * w_n + first_g * w_g
    column = (d.to(ROW) * v_d)[None, :] + (g * v_g)[:, None]
    acc = tl.zeros([BQ * BG, BD], ACC)
    loc += q * l_q + g * l_g
    weight += q * w_q + g * w_g
    if SHARE > 0:
        lanes = tl.arange(0, BD * value.dtype.element_ty.primitive_bitwidth // 128)
        x, y, a = _load_samples(loc, weight, lanes, V * P, POS, ACC)
    if taps.all_honest(shapes, starts, V * R, S):  # always, unless the metadata lie
        if SHARE > 0:
            for first in range(0, V * P, SHARE):
                acc = _add_shared(
                    acc, value + column, x, y, a, shapes, starts, first, first + lanes, S,
                    v_s, V, P, UNIT, ROW, ACC, INTERPRET, BQ * BG, SHARE, CACHE,
                )  # fmt: skip
                x, y, a = _load_samples(loc, weight, first + SHARE + lanes, V * P, POS, ACC)
        else:
            for m in tl.range(V * R, loop_unroll_factor=2):
                acc = _add_map(
                    acc, value, loc, weight, shapes, starts, m, S, column, d,
                    l_v, l_p, l_c, w_v, w_p, w_r, v_s, R, P, D,
                    UNIT, SKIP, NEAREST, True, ROW, POS, ACC, INTERPRET, BD, BP, PAIR, WEIGHT_PAIR,
                )  # fmt: skip
    else:  # where products of a false size and a stride may exceed 32 bits
        for m in range(V * R):
            acc = _add_map(
                acc, value, loc, weight, shapes, starts, m, S, column, d,
                l_v, l_p, l_c, w_v, w_p, w_r, v_s, R, P, D,
                UNIT, SKIP, NEAREST, False, tl.int64, POS, ACC, INTERPRET, BD, BP,
                PAIR, WEIGHT_PAIR,
            )  # fmt: skip
    at = out + (n * Q * G + first_g) * D + ((q * G + g) * D)[:, None] + d[None, :]
    tl.store(at, acc, mask=_both(live, d, D, BD))


@triton.jit
def _both(rows, d, D: tl.constexpr, BD: tl.constexpr):
    """A mask [rows, channels]; channels need none where the blocks fit."""
    if D % BD == 0:
        return rows[:, None]
    else:
        return rows[:, None] & (d < D)[None, :]


@triton.jit
def _add_map(
    acc, value, loc, weight, shapes, starts, m, S, column, d,
    l_v: tl.constexpr, l_p: tl.constexpr, l_c: tl.constexpr,
    w_v: tl.constexpr, w_p: tl.constexpr, w_r: tl.constexpr, v_s: tl.constexpr,
    R: tl.constexpr, P: tl.constexpr, D: tl.constexpr,
    UNIT: tl.constexpr, SKIP: tl.constexpr, NEAREST: tl.constexpr, HONEST: tl.constexpr,
    ROW: tl.constexpr, POS: tl.constexpr, ACC: tl.constexpr, INTERPRET: tl.constexpr,
    BD: tl.constexpr, BP: tl.constexpr, PAIR: tl.constexpr, WEIGHT_PAIR: tl.constexpr,
):  # fmt: skip
    """`acc` [queries, channels] plus each query's samples of map `m`."""
    h, w, start, _ = taps.load_map(shapes, starts, m, None, S, HONEST, ROW)
    view = tl.cast(m // R, ROW)
    loc += view * l_v
    weight += view * w_v + tl.cast(m % R, ROW) * w_r
    for first in range(0, P, BP):
        for i in tl.static_range(BP):
            p = tl.cast(first + i, ROW)
            x, y = taps.load_position(loc + p * l_p, l_c, None, PAIR, POS)
            if not WEIGHT_PAIR:
                a = tl.load(weight + p * w_p).to(ACC)
            elif i % 2 == 0:
                a0, a1 = taps.load_pair(weight + p * w_p, None)
                a = a0.to(ACC)
            else:
                a = a1.to(ACC)
            if NEAREST:
                row, counts = taps.nearest(x, y, h, w, start, S, None, HONEST, ROW)
                at = value + (row * v_s)[:, None] + column
                a = tl.where(counts, a, 0)[:, None]
                acc += a * tl.load(at, mask=_both(counts, d, D, BD), other=0).to(ACC)
            else:
                row, fx, fy, m00, m01, m10, m11 = taps.bilinear(
                    x, y, h, w, start, S, None, UNIT, SKIP, HONEST, ROW, ACC, INTERPRET
                )
                c00, c01, c10, c11 = taps.scaled(fx, fy, a, m00, m01, m10, m11)
                at = value + (row * v_s)[:, None] + column
                v00 = tl.load(at, mask=_both(m00, d, D, BD), other=0).to(ACC)
                v01 = tl.load(at + v_s, mask=_both(m01, d, D, BD), other=0).to(ACC)
                at += w * v_s
                v10 = tl.load(at, mask=_both(m10, d, D, BD), other=0).to(ACC)
                v11 = tl.load(at + v_s, mask=_both(m11, d, D, BD), other=0).to(ACC)
                acc += v00 * c00[:, None]
                acc += v01 * c01[:, None]
                acc += v10 * c10[:, None]
                acc += v11 * c11[:, None]
    return acc


@triton.jit
def _load_samples(loc, weight, j, SAMPLES: tl.constexpr, POS: tl.constexpr, ACC: tl.constexpr):
    """Positions and weights [queries, lanes] of the samples `j`, which lie side by side.

    A position is an element, of two numbers: so the compiler sees that lanes load neighbours.
    """
    live = (j < SAMPLES)[None, :]
    x, y = taps.load_pair(loc[:, None], live, j[None, :])
    return x.to(POS), y.to(POS), tl.load(weight[:, None] + j[None, :], mask=live).to(ACC)


@triton.jit
def _add_shared(
    acc, value, x, y, a, shapes, starts, first, j, S,
    v_s: tl.constexpr, V: tl.constexpr, P: tl.constexpr,
    UNIT: tl.constexpr, ROW: tl.constexpr, ACC: tl.constexpr, INTERPRET: tl.constexpr,
    ROWS: tl.constexpr, SHARE: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    """`acc` [queries, channels] plus each query's samples from `first` on, SHARE of them.

    Each of the lanes that read one query's pixels finds the corners of one sample, for them all.
    """
    h, w, start, _ = taps.load_map(shapes, starts, j // P, j < V * P, S, True, ROW)
    row, fx, fy, up, down, left, right = taps.sides(
        x, y, h[None, :], w[None, :], start[None, :], UNIT, ROW, ACC, INTERPRET
    )
    c00, c01, c10, c11 = taps.scaled(fx, fy, a, up & left, up & right, down & left, down & right)
    # What is not read (1 up, 2 down, 4 left, 8 right), in bits that are zero in a row's offset.
    outside = tl.where(up, 0, 1) | tl.where(down, 0, 2) | tl.where(left, 0, 4)
    outside |= tl.where(right, 0, 8)
    packed = (row * v_s) | outside
    for i in tl.static_range(SHARE):
        _, width, _, _ = taps.load_map(shapes, starts, (first + i) // P, None, S, True, ROW)
        offset = _lane(packed, i, ROWS)
        bits = offset.to(tl.int32)
        at = value + tl.multiple_of(offset & -16, (16, 16))
        v00 = tl.load(at, mask=bits & (1 + 4) == 0, other=0, eviction_policy=CACHE).to(ACC)
        v01 = tl.load(at + v_s, mask=bits & (1 + 8) == 0, other=0, eviction_policy=CACHE).to(ACC)
        at += width * v_s
        v10 = tl.load(at, mask=bits & (2 + 4) == 0, other=0, eviction_policy=CACHE).to(ACC)
        v11 = tl.load(at + v_s, mask=bits & (2 + 8) == 0, other=0, eviction_policy=CACHE).to(ACC)
        acc += v00 * _lane(c00, i, ROWS)
        acc += v01 * _lane(c01, i, ROWS)
        acc += v10 * _lane(c10, i, ROWS)
        acc += v11 * _lane(c11, i, ROWS)
    return acc


@triton.jit
def _lane(x, i: tl.constexpr, ROWS: tl.constexpr):
    """Column `i` of `x`, by shuffles. Turned and reshaped it is free from the layout of `x`, in
    which some compilers would add up the tile, through shared memory.
    """
    column = tl.gather(x, tl.full([ROWS, 1], i, tl.int32), 1)
    return tl.reshape(tl.trans(column), [ROWS])[:, None]


@triton.jit(do_not_specialize=["Q", "S", "G"])
def by_point(
    value, shapes, starts, loc, weight, out,
    Q, S, G,
    v_n, v_g, l_n, l_g, w_n, w_g,
    v_s: tl.constexpr, v_k: tl.constexpr, v_d: tl.constexpr,
    l_q: tl.constexpr, l_v: tl.constexpr, l_p: tl.constexpr, l_c: tl.constexpr,
    w_q: tl.constexpr, w_v: tl.constexpr, w_p: tl.constexpr, w_r: tl.constexpr, w_k: tl.constexpr,
    V: tl.constexpr, R: tl.constexpr, P: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
    UNIT: tl.constexpr, SKIP: tl.constexpr, NEAREST: tl.constexpr,
    ROW: tl.constexpr, POS: tl.constexpr, ACC: tl.constexpr, INTERPRET: tl.constexpr,
    PAIR: tl.constexpr, SPLITS: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """With SPLITS programs to a tile, `out` holds as many results, one after another."""
    wait(EARLY)
    pid = tl.program_id(0).to(tl.int64)
    n = pid // G // Q
    q = pid // G % Q
    g = pid % G
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    value += n * v_n + g * v_g
    loc += n * l_n + q * l_q + g * l_g
    weight += n * w_n + q * w_q + g * w_g
    k = (c // D).to(ROW)
    column = (k * v_k + (c % D).to(ROW) * v_d)[None, :]
    group = (k * w_k)[None, :]
    acc = tl.zeros([BP, BC], ACC)
    for b in range(tl.program_id(2), V * ((P + BP - 1) // BP), SPLITS):
        v = tl.cast(b // ((P + BP - 1) // BP), ROW)
        p = b % ((P + BP - 1) // BP) * BP + tl.arange(0, BP)
        live = p < P
        p = p.to(ROW)
        x, y = taps.load_position(loc + v * l_v + p * l_p, l_c, live, PAIR, POS)
        if SKIP:
            live = live & taps.inside(x, y)
        if tl.max(live.to(tl.int32), 0) > 0:
            for r in range(R):
                m = v * R + r
                h, w, start, honest = taps.load_map(shapes, starts, m, None, S, False, tl.int64)
                by = (weight + (v * w_v + p * w_p + tl.cast(r, ROW) * w_r))[:, None] + group
                if honest:  # always, unless the metadata lie
                    acc = _add_points(
                        acc, value, by, x, y, h.to(ROW), w.to(ROW), start.to(ROW), S, live,
                        column, c, v_s, K * D, UNIT, SKIP, NEAREST, True, ROW, ACC, INTERPRET, BC,
                    )  # fmt: skip
                else:
                    acc = _add_points(
                        acc, value, by, x, y, h, w, start, S, live, column, c, v_s, K * D,
                        UNIT, SKIP, NEAREST, False, tl.int64, ACC, INTERPRET, BC,
                    )  # fmt: skip
    out += (tl.program_id(2) * tl.num_programs(0).to(tl.int64) + pid) * (K * D)
    tl.store(out + c, tl.sum(acc, 0), mask=c < K * D)


@triton.jit
def merge(
    parts, out, N, SPLITS: tl.constexpr, BS: tl.constexpr, B: tl.constexpr, EARLY: tl.constexpr
):
    """The sum of SPLITS results of N numbers."""
    wait(EARLY)
    split = tl.arange(0, BS)[:, None]
    i = tl.program_id(0) * B + tl.arange(0, B)
    x = tl.load(parts + split * N + i[None, :], mask=(split < SPLITS) & (i < N)[None, :], other=0)
    tl.store(out + i, tl.sum(x, 0), mask=i < N)


@triton.jit
def _add_points(
    acc, value, weight, x, y, h, w, start, S, live, column, c, v_s: tl.constexpr, C: tl.constexpr,
    UNIT: tl.constexpr, SKIP: tl.constexpr, NEAREST: tl.constexpr, HONEST: tl.constexpr,
    ROW: tl.constexpr, ACC: tl.constexpr, INTERPRET: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """`acc` [points, channels] plus the samples of one map."""
    if NEAREST:
        row, counts = taps.nearest(x, y, h, w, start, S, live, HONEST, ROW)
        at = value + (row * v_s)[:, None] + column
        sample = tl.load(at, mask=_both(counts, c, C, BC), other=0).to(ACC)
    else:
        row, fx, fy, m00, m01, m10, m11 = taps.bilinear(
            x, y, h, w, start, S, live, UNIT, SKIP, HONEST, ROW, ACC, INTERPRET
        )
        counts = m00 | m01 | m10 | m11
        at = value + (row * v_s)[:, None] + column
        v00 = tl.load(at, mask=_both(m00, c, C, BC), other=0).to(ACC)
        v01 = tl.load(at + v_s, mask=_both(m01, c, C, BC), other=0).to(ACC)
        at += w * v_s
        v10 = tl.load(at, mask=_both(m10, c, C, BC), other=0).to(ACC)
        v11 = tl.load(at + v_s, mask=_both(m11, c, C, BC), other=0).to(ACC)
        c00, c01, c10, c11 = taps.scaled(fx, fy, 1.0, m00, m01, m10, m11)
        sample = v00 * c00[:, None] + v01 * c01[:, None]
        sample += v10 * c10[:, None] + v11 * c11[:, None]
    return acc + tl.load(weight, mask=_both(counts, c, C, BC), other=0).to(ACC) * sample
