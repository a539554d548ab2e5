"""The gradient of the features in 16 bits where samples are few: every pixel is written once.

Adding atomically needs a buffer in float32 that is cleared before and rounded after, which takes
longer than the sums themselves if most pixels have few samples or none. Here the samples that read
a pixel form a chain (`enter`), and pixels sum over theirs (`gather`).

What a sample reads in one line, the corners 0 and 1, is one entry: the entry before it in its
chain, a query and which of the two are read, and two coefficients. Its chain is that of the row of
corner 0, which may be -1; so a pixel takes the coefficients 0 of its own chain and the coefficients
1 of the chain of the row before. Entries are counted from one: zero is the end of a chain.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import tuning
from .bins import tap
from .launch import Launch
from .refined import refined
from .taps import scaled

# Kernels


@triton.jit(do_not_specialize=["Q", "S", "G"])
def enter(
    shapes, starts, loc, weight, chains, entries,
    Q, S, G, l_n, l_q, l_g, l_v, l_p, l_c, w_n, w_q, w_g, w_v, w_p, w_r,
    V: tl.constexpr, R: tl.constexpr, P: tl.constexpr,
    UNIT: tl.constexpr, SKIP: tl.constexpr, NEAREST: tl.constexpr,
    POS: tl.constexpr, ACC: tl.constexpr, INTERPRET: tl.constexpr,
    B: tl.constexpr,
):  # fmt: skip
    """Write down B samples, each the last of its chains; `chains` holds the last entry of each."""
    samples = Q * V * P * R  # of a pair of item and group
    blocks = tl.cdiv(samples, B)
    pair = tl.program_id(0) // blocks
    n = (pair // G).to(tl.int64)
    g = (pair % G).to(tl.int64)
    i = tl.program_id(0) % blocks * B + tl.arange(0, B)
    live = i < samples
    q, v, p, r, row, w, m00, m01, m10, m11, fx, fy = tap(
        shapes, starts, loc, n, g, i, live, S, l_n, l_q, l_g, l_v, l_p, l_c,
        V, R, P, UNIT, SKIP, NEAREST, POS, ACC, INTERPRET,
    )  # fmt: skip
    at = weight + n * w_n + q.to(tl.int64) * w_q + g * w_g + v * w_v + p * w_p + r * w_r
    a = tl.load(at, mask=live, other=0).to(ACC)
    c00, c01, c10, c11 = scaled(fx, fy, a, m00, m01, m10, m11)
    own = chains + pair.to(tl.int64) * (S + 1) + 1 + row
    i += pair * samples
    if NEAREST:
        _enter(own, entries, i, q, m00, m01, c00, c01, B)
    else:
        _enter(own, entries, 2 * i, q, m00, m01, c00, c01, B)
        _enter(own + w, entries, 2 * i + 1, q, m10, m11, c10, c11, B)


@triton.jit
def _enter(chain, entries, i, q, m0, m1, c0, c1, B: tl.constexpr):
    before = tl.atomic_xchg(chain, i + 1, mask=m0 | m1, sem="relaxed")
    what = (q << 2) | (m1.to(tl.int32) << 1) | m0.to(tl.int32)
    c0 = c0.to(tl.int32, bitcast=True)
    c1 = c1.to(tl.int32, bitcast=True)
    four = tl.join(tl.join(before, c0), tl.join(what, c1))  # one store: before, what, c0, c1
    at = entries + i.to(tl.int64)[:, None] * 4 + tl.arange(0, 4)[None, :]
    tl.store(at, tl.reshape(four, [B, 4]), mask=(m0 | m1)[:, None])


@triton.jit(do_not_specialize=["pairs", "S", "G"])
def gather(
    grad, chains, entries, grad_value,
    pairs, S, G, g_n, g_q, g_g, gv_n, gv_s, gv_g, g_d: tl.constexpr, gv_d: tl.constexpr,
    D: tl.constexpr, NEAREST: tl.constexpr, ACC: tl.constexpr,
    BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Sum over the chains of BR rows, an entry of each at a time."""
    # Small maps, whose pixels have the most samples, come last in memory and go first.
    pair = tl.program_id(0) % pairs
    row = (tl.cdiv(S, BR) - 1 - tl.program_id(0) // pairs) * BR + tl.arange(0, BR)
    stored = row < S
    n = (pair // G).to(tl.int64)
    g = (pair % G).to(tl.int64)
    d = tl.arange(0, BD)
    grad += n * g_n + g * g_g + d.to(tl.int64) * g_d  # [BD]
    chains += pair.to(tl.int64) * (S + 1) + row
    own = tl.load(chains + 1, mask=stored, other=0)
    left = tl.load(chains, mask=stored & (not NEAREST), other=0)
    i, left, corner = _next(own, left, tl.zeros([BR], tl.int32))
    before, what, c0, c1 = _entry(entries, i, BR, ACC)
    acc = tl.zeros([BR, BD], ACC)
    while tl.max(what, 0) != 0:
        read = (what >> corner) & 1 != 0
        at = grad[None, :] + ((what >> 2).to(tl.int64) * g_q)[:, None]
        come = tl.load(at, mask=read[:, None] & (d < D)[None, :], other=0).to(ACC)
        c = tl.where(corner == 0, c0, c1)
        i, left, corner = _next(before, left, corner)
        before, what, c0, c1 = _entry(entries, i, BR, ACC)  # on its way while gradients come
        acc += come * c[:, None]
    at = grad_value + n * gv_n + g * gv_g + row.to(tl.int64)[:, None] * gv_s
    at += (d.to(tl.int64) * gv_d)[None, :]
    # What is written must not drive out of the cache what is still to be read.
    inside = stored[:, None] & (d < D)[None, :]
    tl.store(at, acc, mask=inside, eviction_policy="evict_first")


@triton.jit
def _next(before, left, corner):
    """The entry after one that names `before`: at the end of the first chain, `left`."""
    end = before == 0
    return tl.where(end, left, before), tl.where(end, 0, left), tl.where(end, 1, corner)


@triton.jit
def _entry(entries, i, BR: tl.constexpr, ACC: tl.constexpr):
    """The entry before, query and corners, and coefficients of entry `i`; of none, zeros."""
    at = entries + (i - 1).to(tl.int64)[:, None] * 4 + tl.arange(0, 4)[None, :]
    four = tl.load(at, mask=(i != 0)[:, None], other=0)
    evens, odds = tl.split(tl.reshape(four, [BR, 2, 2]))
    before, c0 = tl.split(evens)
    what, c1 = tl.split(odds)
    return before, what, c0.to(ACC, bitcast=True), c1.to(ACC, bitcast=True)


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
    samples = loc[0, :, 0].numel() // 2 * shapes.shape[1]  # of a pair of item and group
    most = pairs * samples * (1 if options["NEAREST"] else 2)
    about = {"pairs": pairs, "rows": s, "samples": samples, "nearest": options["NEAREST"]}
    block = refined(shapes.device, tuning.enter_tile, **about)
    tile = refined(shapes.device, tuning.list_tile, d, **about)
    chain = Launch(
        enter, (pairs * triton.cdiv(samples, block["B"]),),
        (q, s, g, *loc.stride(), *weight.stride()[:-1]),
        V=loc.shape[3], R=shapes.shape[1], P=loc.shape[4], **options, **block,
    )  # fmt: skip
    collect = Launch(
        gather, (pairs * triton.cdiv(s, tile["BR"]),),
        (pairs, s, g, *grad.stride()[:3], *out.stride()[:3]),
        g_d=grad.stride(4), gv_d=out.stride(4), D=d,
        NEAREST=options["NEAREST"], ACC=options["ACC"], **tile,
    )  # fmt: skip

    def start(
        grad: Tensor, shapes: Tensor, starts: Tensor, loc: Tensor, weight: Tensor, out: Tensor
    ) -> None:
        chains = torch.zeros(pairs * (s + 1), dtype=torch.int32, device=out.device)
        entries = torch.empty(most, 4, dtype=torch.int32, device=out.device)
        chain(shapes, starts, loc, weight, chains, entries)
        collect(grad, chains, entries, out)

    return start
