"""The gradient of the features in a fixed order of sums, for the deterministic mode.

Samples are sorted by the cell of four pixels in which they lie (`locate`) and written down in that
order with fractions and weight (`fill`); then every pixel sums over the samples in the four cells
around it (`collect`).

A cell goes by the row of its corner 00. That may lie in another line than the cell, in another map
or outside, so cells may share a bin, and the corners that a sample reads are written down with it:
a pixel that meets a sample in bin `row - dy * w - dx` of its own map is its corner (dy, dx) if, and
only if, that is one of them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pliant.sampling.problem import accumulator

from . import taps, tuning
from .launch import Launch, run
from .refined import refined

# What is sorted at a time, for which a sample takes SORTED bytes, is at most as large as the
# features in the accumulator's dtype, or this.
AT_ONCE = 64 << 20
SORTED = 48
MANY = 1 << 27  # samples of a pair, or rows, whose numbers take 64 bits together with corners


# Kernels


@triton.jit
def _bin(row, S):
    """The bin of a cell: its row modulo S + 1."""
    size = S.to(tl.int64) + 1
    return _positive(row % size, size)


@triton.jit
def _positive(i, size):
    """`i` modulo `size`, if it is not smaller than -size."""
    return tl.where(i < 0, i + size, i)


@triton.jit
def tap(
    shapes, starts, loc, n, g, j, live, S, l_n, l_q, l_g, l_v, l_p, l_c,
    V: tl.constexpr, R: tl.constexpr, P: tl.constexpr,
    UNIT: tl.constexpr, SKIP: tl.constexpr, NEAREST: tl.constexpr,
    POS: tl.constexpr, ACC: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Sample `j` of q, v, p, r in pair (n, g): the four, the row of its corner 00, the width of its
    map, which of the corners 00, 01, 10, 11 are read, and fractions. Rows are 64 bits wide, because
    those of metadata that lie would come round in 32.
    """
    q = j // (V * P * R)
    v = (j // (P * R) % V).to(tl.int64)
    p = (j // R % P).to(tl.int64)
    r = (j % R).to(tl.int64)
    at = loc + n * l_n + q.to(tl.int64) * l_q + g.to(tl.int64) * l_g + v * l_v + p * l_p
    x, y = taps.load_position(at, l_c, live, False, POS)
    h, w, start, _ = taps.load_map(shapes, starts, v * R + r, live, S, False, tl.int64)
    if NEAREST:
        row, m00 = taps.nearest(x, y, h, w, start, S, live, False, tl.int64)
        m01 = m00 & False
        m10 = m01
        m11 = m01
        fx = tl.zeros(j.shape, ACC)
        fy = fx
    else:
        row, fx, fy, m00, m01, m10, m11 = taps.bilinear(
            x, y, h, w, start, S, live, UNIT, SKIP, False, tl.int64, ACC, INTERPRET
        )
    return q, v, p, r, row, w, m00, m01, m10, m11, fx, fy


@triton.jit
def _sample(
    shapes, starts, loc, i, live, first, Q, S, G, l_n, l_q, l_g, l_v, l_p, l_c,
    V: tl.constexpr, R: tl.constexpr, P: tl.constexpr,
    UNIT: tl.constexpr, SKIP: tl.constexpr, NEAREST: tl.constexpr,
    POS: tl.constexpr, ACC: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Sample `i` of (n g), q, v, p, r from pair `first` on: its pair of (n g), counted from there,
    its number in the pair, bin, corners that are read (a bit each), and fractions.
    """
    pair = i // (Q * V * P * R)
    j = i % (Q * V * P * R)
    n = ((first + pair) // G).to(tl.int64)
    g = (first + pair) % G
    q, v, p, r, row, _, m00, m01, m10, m11, fx, fy = tap(
        shapes, starts, loc, n, g, j, live, S, l_n, l_q, l_g, l_v, l_p, l_c,
        V, R, P, UNIT, SKIP, NEAREST, POS, ACC, INTERPRET,
    )  # fmt: skip
    corners = m00.to(tl.int32) | (m01.to(tl.int32) << 1)
    corners = corners | (m10.to(tl.int32) << 2) | (m11.to(tl.int32) << 3)
    return n, g, q, v, p, r, pair, j, _bin(row, S), corners, fx, fy


@triton.jit(do_not_specialize=["samples", "first", "Q", "S", "G", "nowhere"])
def locate(
    shapes, starts, loc, keys,
    samples, first, Q, S, G, nowhere, l_n, l_q, l_g, l_v, l_p, l_c,
    V: tl.constexpr, R: tl.constexpr, P: tl.constexpr,
    UNIT: tl.constexpr, SKIP: tl.constexpr, NEAREST: tl.constexpr,
    POS: tl.constexpr, ACC: tl.constexpr, INTERPRET: tl.constexpr,
    B: tl.constexpr,
):  # fmt: skip
    """The bin of every sample, or `nowhere`."""
    INDEX: tl.constexpr = keys.dtype.element_ty
    i = tl.program_id(0).to(INDEX) * B + tl.arange(0, B)
    live = i < samples
    _, _, _, _, _, _, pair, _, bin, corners, _, _ = _sample(
        shapes, starts, loc, tl.minimum(i, samples - 1), live, first, Q, S, G,
        l_n, l_q, l_g, l_v, l_p, l_c, V, R, P, UNIT, SKIP, NEAREST, POS, ACC, INTERPRET,
    )  # fmt: skip
    bin = pair * (S + 1) + bin.to(INDEX)
    tl.store(keys + i, tl.where(corners != 0, bin, nowhere), mask=live)


@triton.jit(do_not_specialize=["samples", "first", "Q", "S", "G"])
def fill(
    shapes, starts, loc, weight, order, entries,
    samples, first, Q, S, G, l_n, l_q, l_g, l_v, l_p, l_c, w_n, w_q, w_g, w_v, w_p, w_r,
    V: tl.constexpr, R: tl.constexpr, P: tl.constexpr, K: tl.constexpr,
    UNIT: tl.constexpr, SKIP: tl.constexpr, NEAREST: tl.constexpr,
    POS: tl.constexpr, ACC: tl.constexpr, INTERPRET: tl.constexpr,
    B: tl.constexpr,
):  # fmt: skip
    """Write the samples down in `order`: number and corners, fractions, and weight if K is 1."""
    WORD: tl.constexpr = entries.dtype.element_ty
    FLOAT: tl.constexpr = tl.float32 if entries.dtype.element_ty == tl.int32 else tl.float64
    place = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    live = place < samples
    i = tl.load(order + place, mask=live, other=0).to(WORD)
    n, g, q, v, p, r, _, j, _, corners, fx, fy = _sample(
        shapes, starts, loc, i, live, first, Q, S, G,
        l_n, l_q, l_g, l_v, l_p, l_c, V, R, P, UNIT, SKIP, NEAREST, POS, ACC, INTERPRET,
    )  # fmt: skip
    a = fx
    if K == 1:
        at = weight + n * w_n + q.to(tl.int64) * w_q + g.to(tl.int64) * w_g
        a = tl.load(at + v * w_v + p * w_p + r * w_r, mask=live, other=0).to(ACC)
    what = (j.to(WORD) << 4) | corners.to(WORD)
    fx = fx.to(FLOAT).to(WORD, bitcast=True)
    fy = fy.to(FLOAT).to(WORD, bitcast=True)
    a = a.to(FLOAT).to(WORD, bitcast=True)
    four = tl.join(tl.join(what, fy), tl.join(fx, a))  # one store: what, fx, fy, a
    at = entries + place[:, None] * 4 + tl.arange(0, 4)[None, :]
    tl.store(at, tl.reshape(four, [B, 4]), mask=live[:, None])


@triton.jit(do_not_specialize=["first", "S", "G"])
def collect(
    grad, weight, shapes, starts, bounds, entries, grad_value,
    first, S, G, g_n, g_q, g_g, w_n, w_q, w_g, w_v, w_p, w_r, w_k, gv_n, gv_s, gv_g,
    g_k: tl.constexpr, g_d: tl.constexpr, gv_k: tl.constexpr, gv_d: tl.constexpr,
    V: tl.constexpr, R: tl.constexpr, P: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
    NEAREST: tl.constexpr, ACC: tl.constexpr,
    BM: tl.constexpr, BE: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Sum over the samples around a pixel."""
    # Small maps, whose pixels have the most samples, come last in memory and go first.
    pixel = tl.num_programs(0) - 1 - tl.program_id(0)
    pair = pixel // S
    row = (pixel % S).to(tl.int64)
    n = ((first + pair) // G).to(tl.int64)
    g = ((first + pair) % G).to(tl.int64)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    counts = c < K * D
    k = (c // D).to(tl.int64)
    d = (c % D).to(tl.int64)
    bounds += pair.to(tl.int64) * (S + 1)
    grad += n * g_n + g * g_g + k * g_k + d * g_d  # [BC]
    weight += n * w_n + g * w_g + k * w_k
    grad_value += n * gv_n + g * gv_g + k * gv_k + d * gv_d
    acc = tl.zeros([BE, BC], ACC)
    for some in range(0, V * R, BM):
        maps = some + tl.arange(0, BM)
        h, w, start, _ = taps.load_map(shapes, starts, maps, maps < V * R, S, False, tl.int64)
        hold = (row >= start) & (row - start < h * w)  # the pixel: one map, unless some overlap
        m = tl.min(tl.where(hold, maps, V * R), 0)
        while m < V * R:
            width = tl.sum(tl.where(maps == m, w, 0), 0)
            acc = _around(
                grad, weight, bounds, entries, acc, row, m, width, counts, S,
                g_q, w_q, w_v, w_p, w_r, V, R, P, K, D, NEAREST, ACC, BE, BC,
            )  # fmt: skip
            m = tl.min(tl.where(hold & (maps > m), maps, V * R), 0)
    tl.store(grad_value + row * gv_s, tl.sum(acc, 0), mask=counts)


@triton.jit
def _around(
    grad, weight, bounds, entries, acc, row, m, w, counts, S, g_q, w_q, w_v, w_p, w_r,
    V: tl.constexpr, R: tl.constexpr, P: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
    NEAREST: tl.constexpr, ACC: tl.constexpr, BE: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """`acc` [BE, BC] plus what the samples of map `m` around pixel `row` give."""
    size = S.to(tl.int64) + 1
    w = w % size
    at = bounds + row
    b0 = tl.load(at)
    e0 = tl.load(at + 1) - b0
    total = e0
    if not NEAREST:
        at = bounds + _positive(row - 1, size)
        b1 = tl.load(at)
        e1 = e0 + tl.load(at + 1) - b1
        b1 -= e0
        at = bounds + _positive(row - w, size)
        b2 = tl.load(at)
        e2 = e1 + tl.load(at + 1) - b2
        b2 -= e1
        at = bounds + _positive(row - w - 1, size)
        b3 = tl.load(at)
        total = e2 + tl.load(at + 1) - b3
        b3 -= e2
    WORD: tl.constexpr = entries.dtype.element_ty
    FLOAT: tl.constexpr = tl.float32 if entries.dtype.element_ty == tl.int32 else tl.float64
    for e in range(0, total, BE):
        i = e + tl.arange(0, BE)
        if NEAREST:
            corner = tl.zeros([BE], tl.int32)
            place = b0 + i
        else:
            corner = (i >= e0).to(tl.int32) + (i >= e1).to(tl.int32) + (i >= e2).to(tl.int32)
            place = i + tl.where(i < e0, b0, tl.where(i < e1, b1, tl.where(i < e2, b2, b3)))
        live = i < total
        entry = entries + place.to(tl.int64) * 4
        what = tl.load(entry, mask=live, other=0)
        j = what >> 4
        live = live & ((what >> corner.to(WORD)) & 1 != 0)
        if V * R > 1:
            live = live & (j // (P * R) % V * R + j % R == m)
        a = tl.full([BE], 1, ACC)
        if not NEAREST:
            fx = tl.load(entry + 1, mask=live, other=0).to(FLOAT, bitcast=True).to(ACC)
            fy = tl.load(entry + 2, mask=live, other=0).to(FLOAT, bitcast=True).to(ACC)
            a = tl.where(corner % 2 == 0, 1 - fx, fx) * tl.where(corner < 2, 1 - fy, fy)
        if K == 1:
            a *= tl.load(entry + 3, mask=live, other=0).to(FLOAT, bitcast=True).to(ACC)
        both = live[:, None]
        if K * D % BC != 0:
            both = both & counts[None, :]
        q = (j // (V * P * R)).to(tl.int64)
        come = tl.load(grad[None, :] + (q * g_q)[:, None], mask=both, other=0).to(ACC)
        if K > 1:
            j = j.to(tl.int64)
            by = q * w_q + j // (P * R) % V * w_v + j // R % P * w_p + j % R * w_r
            come *= tl.load(weight[None, :] + by[:, None], mask=both, other=0).to(ACC)
        acc += come * a[:, None]
    return acc


# Launchers


def grad_value(
    grad: Tensor,
    shapes: Tensor,
    starts: Tensor,
    loc: Tensor,
    weight: Tensor,
    out: Tensor,
    options: dict[str, object],
) -> None:
    """Write the gradient of the features to `out`, some pairs of item and group at a time."""
    n, s, g = out.shape[:3]
    samples = loc[0, :, 0].numel() // 2 * shapes.shape[1]  # of a pair
    most = max(out.numel() * accumulator(out.dtype).itemsize, AT_ONCE)
    step = min(most // (samples * SORTED), (2**31 - 2**16) // max(samples, s + 1), n * g)
    operands = (grad, shapes, starts, loc, weight, out)
    for first in range(0, n * g, max(step, 1)):
        _grad_value(*operands, options, samples, first, min(max(step, 1), n * g - first))


def _grad_value(
    grad: Tensor,
    shapes: Tensor,
    starts: Tensor,
    loc: Tensor,
    weight: Tensor,
    out: Tensor,
    options: dict[str, object],
    samples: int,
    first: int,
    pairs: int,
) -> None:
    s, g, k, d = out.shape[1:]
    wide = out.dtype == torch.float64 or max(samples, s) >= MANY
    index = torch.int64 if wide else torch.int32
    many, bins, q = pairs * samples, pairs * (s + 1), loc.shape[1]
    sizes = {"V": loc.shape[3], "R": shapes.shape[1], "P": loc.shape[4]}
    blocks, tile = (triton.cdiv(many, 256),), {"B": 256, "num_warps": 4}
    key = (first, pairs, s, *options.values())  # what no tensor of every launch says
    keys = torch.empty(many, dtype=index, device=out.device)
    run(
        (shapes, starts, loc, keys), (locate, *key),
        lambda: Launch(
            locate, blocks, (many, first, q, s, g, bins, *loc.stride()),
            **sizes, **options, **tile,
        ),
    )  # fmt: skip
    keys, order = torch.sort(keys, stable=True)
    places = torch.arange(bins + 1, dtype=index, device=out.device)
    bounds = torch.searchsorted(keys, places, out_int32=not wide)
    entries = torch.empty(many, 4, dtype=index, device=out.device)
    run(
        (shapes, starts, loc, weight, order, entries), (fill, *key),
        lambda: Launch(
            fill, blocks, (many, first, q, s, g, *loc.stride(), *weight.stride()[:-1]),
            **sizes, K=k, **options, **tile,
        ),
    )  # fmt: skip
    # Where cameras skip what they do not see, one of them sees a point.
    seen = samples // (sizes["V"] if options["SKIP"] else 1)
    corners = (1 if options["NEAREST"] else 4) * seen // s

    def collecting() -> Launch:
        rule = (tuning.bins_tile, k * d, sizes["V"] * sizes["R"], corners)
        about = {"groups": k, "rows": pairs * s, "dtype": out.dtype}
        piece = refined(out.device, *rule, **about, nearest=options["NEAREST"])
        return Launch(
            collect, (pairs * s, triton.cdiv(k * d, piece["BC"])),
            (first, s, g, *grad.stride()[:3], *weight.stride(), *out.stride()[:3]),
            g_k=grad.stride(3), g_d=grad.stride(4), gv_k=out.stride(3), gv_d=out.stride(4),
            **sizes, K=k, D=d, NEAREST=options["NEAREST"], ACC=options["ACC"], **piece,
        )  # fmt: skip

    run((grad, weight, shapes, starts, bounds, entries, out), (collect, *key), collecting)
