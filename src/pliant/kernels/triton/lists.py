"""The gradient of the features in 16 bits where samples are few: every pixel is written once.

Adding atomically needs a buffer in float32 that is cleared before and rounded after, which takes
longer than the sums themselves if most pixels have few samples or none. Here samples are listed by
the pixels that they read (`enter`, which counts them first), and the pixels sum over their lists
(`gather`).

What a sample reads in one line, the corners 0 and 1, is one entry: a query, which of the two are
read, and two coefficients. It goes by the row of corner 0, which may be -1. The lists of rows lie
one after another, so a row's samples are those from the list of the row before to its own.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import tuning
from .bins import tap
from .launch import Launch
from .taps import scaled

# Kernels


@triton.jit(do_not_specialize=["samples", "Q", "S", "G"])
def enter(
    shapes, starts, loc, weight, bounds, entries,
    samples, Q, S, G, l_n, l_q, l_g, l_v, l_p, l_c, w_n, w_q, w_g, w_v, w_p, w_r,
    V: tl.constexpr, R: tl.constexpr, P: tl.constexpr,
    UNIT: tl.constexpr, SKIP: tl.constexpr, NEAREST: tl.constexpr,
    ROW: tl.constexpr, POS: tl.constexpr, ACC: tl.constexpr, INTERPRET: tl.constexpr,
    COUNT: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Count the entries of every list or, where `bounds` are the lists' ends, write them down from
    there on backwards: the ends become the beginnings.
    """
    i = tl.program_id(0) * B + tl.arange(0, B)
    live = i < samples
    i = tl.minimum(i, samples - 1)
    pair = i // (Q * V * P * R)
    n = (pair // G).to(tl.int64)
    g = (pair % G).to(tl.int64)
    q, v, p, r, row, w, m00, m01, m10, m11, fx, fy = tap(
        shapes, starts, loc, n, g, i % (Q * V * P * R), live, S, l_n, l_q, l_g, l_v, l_p, l_c,
        V, R, P, UNIT, SKIP, NEAREST, ROW, POS, ACC, INTERPRET,
    )  # fmt: skip
    a = fx
    if not COUNT:
        at = weight + n * w_n + q.to(tl.int64) * w_q + g * w_g + v * w_v + p * w_p + r * w_r
        a = tl.load(at, mask=live, other=0).to(ACC)
    c00, c01, c10, c11 = scaled(fx, fy, a, m00, m01, m10, m11)
    own = bounds + pair.to(tl.int64) * (S + 1) + 1
    _enter(own + row, entries, q, m00, m01, c00, c01, COUNT, B)
    if not NEAREST:
        _enter(own + row + w, entries, q, m10, m11, c10, c11, COUNT, B)


@triton.jit
def _enter(bound, entries, q, m0, m1, c0, c1, COUNT: tl.constexpr, B: tl.constexpr):
    if COUNT:
        tl.atomic_add(bound, 1, mask=m0 | m1, sem="relaxed")
    else:
        place = tl.atomic_add(bound, -1, mask=m0 | m1, sem="relaxed") - 1
        what = (q << 2) | (m1.to(tl.int32) << 1) | m0.to(tl.int32)
        c0 = c0.to(tl.int32, bitcast=True)
        c1 = c1.to(tl.int32, bitcast=True)
        four = tl.join(tl.join(what, c1), tl.join(c0, c1))  # one store: what, c0, c1, c1
        at = entries + place.to(tl.int64)[:, None] * 4 + tl.arange(0, 4)[None, :]
        tl.store(at, tl.reshape(four, [B, 4]), mask=(m0 | m1)[:, None])


@triton.jit(do_not_specialize=["pairs", "S", "G"])
def gather(
    grad, bounds, entries, grad_value,
    pairs, S, G, g_n, g_q, g_g, gv_n, gv_s, gv_g, g_d: tl.constexpr, gv_d: tl.constexpr,
    D: tl.constexpr, NEAREST: tl.constexpr, ACC: tl.constexpr,
    BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Sum over the lists of BR rows, an entry of each at a time."""
    # Small maps, whose pixels have the most samples, come last in memory and go first.
    pair = tl.program_id(0) % pairs
    row = (tl.cdiv(S, BR) - 1 - tl.program_id(0) // pairs) * BR + tl.arange(0, BR)
    stored = row < S
    n = (pair // G).to(tl.int64)
    g = (pair % G).to(tl.int64)
    d = tl.arange(0, BD)
    grad += n * g_n + g * g_g + d * g_d  # [BD]
    bounds += pair.to(tl.int64) * (S + 1) + row
    own = tl.load(bounds + 1, mask=stored, other=0)
    first = own if NEAREST else tl.load(bounds, mask=stored, other=0)
    end = tl.load(bounds + 2, mask=stored, other=0)
    acc = tl.zeros([BR, BD], ACC)
    for e in range(tl.max(end - first, 0)):
        i = first + e
        corner = (i < own).to(tl.int32)
        entry = entries + i.to(tl.int64) * 4
        what = tl.load(entry, mask=i < end, other=0)
        c = tl.load(entry + 1 + corner, mask=i < end, other=0).to(ACC, bitcast=True)
        read = (what >> corner) & 1 != 0
        at = grad[None, :] + ((what >> 2).to(tl.int64) * g_q)[:, None]
        come = tl.load(at, mask=read[:, None] & (d < D)[None, :], other=0).to(ACC)
        acc += come * c[:, None]
    at = grad_value + n * gv_n + g * gv_g + row.to(tl.int64)[:, None] * gv_s + d[None, :] * gv_d
    tl.store(at, acc, mask=stored[:, None] & (d < D)[None, :])


# Launchers


def grad_value(
    grad: Tensor,
    shapes: Tensor,
    loc: Tensor,
    weight: Tensor,
    out: Tensor,
    options: dict[str, object],
) -> Callable[..., None]:
    """A function of such tensors that writes the gradient of the features to the last of them."""
    n, s, g, _, d = out.shape
    q, pairs = loc.shape[1], n * g
    sizes = {"V": loc.shape[3], "R": shapes.shape[1], "P": loc.shape[4]}
    samples = pairs * loc[0, :, 0].numel() // 2 * shapes.shape[1]
    most = samples if options["NEAREST"] else 2 * samples
    tile = tuning.list_tile(d)

    def lists(count: bool) -> Launch:
        return Launch(
            enter, (triton.cdiv(samples, 256),),
            (samples, q, s, g, *loc.stride(), *weight.stride()[:-1]),
            **sizes, **options, COUNT=count, B=256, num_warps=4,
        )  # fmt: skip

    count, place = lists(True), lists(False)
    collect = Launch(
        gather, (pairs * triton.cdiv(s, tile["BR"]),),
        (pairs, s, g, *grad.stride()[:3], *out.stride()[:3]),
        g_d=grad.stride(4), gv_d=out.stride(4), D=d,
        NEAREST=options["NEAREST"], ACC=options["ACC"], **tile,
    )  # fmt: skip

    def start(
        grad: Tensor, shapes: Tensor, starts: Tensor, loc: Tensor, weight: Tensor, out: Tensor
    ) -> None:
        bounds = torch.zeros(pairs * (s + 1) + 1, dtype=torch.int32, device=out.device)
        entries = torch.empty(most, 4, dtype=torch.int32, device=out.device)
        count(shapes, starts, loc, weight, bounds, entries)
        bounds.cumsum_(0)
        place(shapes, starts, loc, weight, bounds, entries)
        collect(grad, bounds, entries, out)

    return start
