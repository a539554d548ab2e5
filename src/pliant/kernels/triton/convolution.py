"""Deformable convolution: channels-last rows, sampled straight into the matrix product.

`convolve`    a tile of the output is [positions, output channels]: a sum over taps and channels of
              products of samples, which are never stored, with weights. Where programs share a
              tile, `merge` adds up their parts.
`resample`    the samples alone, as columns; `unfold` brings a gradient of columns into rows.

Weights are read as [Co, kh*kw, C/groups]. A run is a stretch of channels within one group and one
deformable group: its samples share their positions and meet the same weights.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pliant.sampling.problem import accumulator

from . import INTERPRET, taps, tuning
from .launch import Launch, cover, empty, form, remembered
from .refined import refined
from .transpose import alignment, to_tf32, transposition

Pair = Sequence[int]


# Kernels


@triton.jit
def tap(
    offset, modulation, q, g, k, H, W, WO, o_c, o_q, a_c, a_q, live,
    K: tl.constexpr, KW: tl.constexpr,
    SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr,
    MODULATED: tl.constexpr, ROW: tl.constexpr, POS: tl.constexpr, ACC: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """Where tap `k` of the positions `q` reads its image, by taps.bilinear, and its modulation."""
    # Programs come back to the lines of offsets with every block of channels, and to the weights.
    at = offset + (2 * (g * K + k)).to(ROW) * o_c + q.to(ROW) * o_q
    down = tl.load(at, eviction_policy="evict_last").to(POS)
    across = tl.load(at + o_c, eviction_policy="evict_last").to(POS)
    y = (q // WO * SH - PH + k // KW * DH).to(POS) + down
    x = (q % WO * SW - PW + k % KW * DW).to(POS) + across
    row, fx, fy, m00, m01, m10, m11 = taps.bilinear(
        x, y, H.to(ROW), W.to(ROW), 0, 0, live, False, False, True, ROW, ACC, INTERPRET
    )
    counts = m00 | m01 | m10 | m11
    fx = tl.where(counts, fx, 0)
    fy = tl.where(counts, fy, 0)
    if MODULATED:
        at = modulation + (g * K + k).to(ROW) * a_c + q.to(ROW) * a_q
        a = tl.load(at, eviction_policy="evict_last").to(ACC)
    else:
        a = tl.full(fx.shape, 1, ACC)
    return row, fx, fy, m00, m01, m10, m11, a


@triton.jit
def load_corners(
    input, row, c, m00, m01, m10, m11, counts, W, C: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """The corners [positions, channels], as they are stored."""
    at = input + (row * C)[:, None] + c[None, :]
    v00 = tl.load(at, mask=tile_mask(m00, counts, EVEN), other=0)
    v01 = tl.load(at + C, mask=tile_mask(m01, counts, EVEN), other=0)
    at += W.to(row.dtype) * C
    v10 = tl.load(at, mask=tile_mask(m10, counts, EVEN), other=0)
    v11 = tl.load(at + C, mask=tile_mask(m11, counts, EVEN), other=0)
    return v00, v01, v10, v11


@triton.jit
def blend(v00, v01, v10, v11, c00, c01, c10, c11, ACC: tl.constexpr):
    """Samples [positions, channels]."""
    sample = v00.to(ACC) * c00[:, None] + v01.to(ACC) * c01[:, None]
    return sample + v10.to(ACC) * c10[:, None] + v11.to(ACC) * c11[:, None]


@triton.jit
def tile_mask(rows, columns, EVEN: tl.constexpr):
    """The mask of a tile; its columns need none where blocks are EVEN."""
    if EVEN:
        return rows[:, None]
    else:
        return rows[:, None] & columns[None, :]


@triton.jit
def _step(i, RUN: tl.constexpr, BK: tl.constexpr, K: tl.constexpr):
    """Tap, first channel of the run, and channels in the run of step `i` of a sum."""
    BLOCKS: tl.constexpr = (RUN + BK - 1) // BK
    return i % K, i // (K * BLOCKS) * RUN, i // K % BLOCKS * BK + tl.arange(0, BK)


@triton.jit
def _corners(
    input, offset, modulation, q, group, i, H, W, WO, o_c, o_q, a_c, a_q,
    C: tl.constexpr, CG: tl.constexpr, CD: tl.constexpr, RUN: tl.constexpr, BK: tl.constexpr,
    K: tl.constexpr, KW: tl.constexpr,
    SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr,
    MODULATED: tl.constexpr, ROW: tl.constexpr, POS: tl.constexpr, ACC: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """The corners of step `i` and their coefficients."""
    k, run, c = _step(i, RUN, BK, K)
    first = group * CG + run
    row, fx, fy, m00, m01, m10, m11, a = tap(
        offset, modulation, q, first // CD, k, H, W, WO, o_c, o_q, a_c, a_q, None,
        K, KW, SH, SW, PH, PW, DH, DW, MODULATED, ROW, POS, ACC, INTERPRET,
    )  # fmt: skip
    c00, c01, c10, c11 = taps.scaled(fx, fy, a, m00, m01, m10, m11)
    v00, v01, v10, v11 = load_corners(
        input, row, first + c, m00, m01, m10, m11, c < RUN, W, C, RUN % BK == 0
    )
    return v00, v01, v10, v11, c00, c01, c10, c11


@triton.jit
def _filters(
    weight, counts, i, CG: tl.constexpr, RUN: tl.constexpr, BK: tl.constexpr, K: tl.constexpr
):  # fmt: skip
    """The weights [channels, output channels] of step `i`; `weight` is a column of addresses."""
    k, run, c = _step(i, RUN, BK, K)
    at = weight + (k * CG + run + c)[None, :]
    both = counts[:, None] & (c < RUN)[None, :]
    return tl.trans(tl.load(at, mask=both, other=0, eviction_policy="evict_last"))


@triton.jit
def _sampled(
    v00, v01, v10, v11, c00, c01, c10, c11,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Samples as a product takes them."""
    sample = blend(v00, v01, v10, v11, c00, c01, c10, c11, ACC)
    if PRECISION == "tf32":
        sample = to_tf32(sample)
    return sample.to(DTYPE)


@triton.jit(do_not_specialize=["size"])
def round_to_tf32(x, out, size, B: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    tl.store(out + i, to_tf32(tl.load(x + i, mask=i < size)), mask=i < size)


@triton.jit
def multiply(
    sample, filters, acc, PRECISION: tl.constexpr, ACC: tl.constexpr, INTERPRET: tl.constexpr
):  # fmt: skip
    if INTERPRET:  # which knows no arithmetic below float32
        return acc + tl.dot(sample, filters.to(ACC), out_dtype=ACC)
    else:
        return tl.dot(sample, filters, acc, input_precision=PRECISION, out_dtype=ACC)


@triton.jit
def _store(
    out, bias, acc, n, q, co, live, counts, Q,
    CO: tl.constexpr, BIAS: tl.constexpr, LAST: tl.constexpr, EVEN: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    """Write a tile, with the bias, to an output that is channels-last or contiguous."""
    if BIAS:
        acc += tl.load(bias + co, mask=counts, other=0).to(acc.dtype)[None, :]
    if LAST:
        at = out + n * Q * CO + (q.to(ROW) * CO)[:, None] + co[None, :]
    else:
        at = out + n * Q * CO + q[:, None] + (co.to(ROW) * Q)[None, :]
    tl.store(at, acc, mask=tile_mask(live, counts, EVEN))


@triton.jit(do_not_specialize=["N", "Q_UNITS", "H", "W", "WO", "o_n", "a_n"])
def convolve(
    input, offset, modulation, weight, bias, out,
    N, Q_UNITS, H, W, WO, o_n, o_c, o_q, a_n, a_c, a_q,
    C: tl.constexpr, CO: tl.constexpr, CG: tl.constexpr, COG: tl.constexpr, CD: tl.constexpr,
    RUN: tl.constexpr,
    K: tl.constexpr, KW: tl.constexpr,
    SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr,
    MODULATED: tl.constexpr, BIAS: tl.constexpr, LAST: tl.constexpr, Q_ALIGN: tl.constexpr,
    PRECISION: tl.constexpr, ROW: tl.constexpr, POS: tl.constexpr, ACC: tl.constexpr,
    INTERPRET: tl.constexpr,
    SPLITS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """With SPLITS programs to a tile, `out` holds as many outputs, one after another."""
    Q = Q_UNITS * Q_ALIGN
    COLUMNS: tl.constexpr = (COG + BN - 1) // BN
    # Runs, then blocks, then taps: taps one after another share pixels, which stay in the cache.
    STEPS: tl.constexpr = CG // RUN * ((RUN + BK - 1) // BK) * K
    PART: tl.constexpr = (STEPS + SPLITS - 1) // SPLITS
    DTYPE: tl.constexpr = ACC if INTERPRET else weight.dtype.element_ty
    pid = tl.program_id(0)
    group = pid // COLUMNS % (C // CG)
    tile = pid // (COLUMNS * (C // CG))
    tiles = cover(Q, BM)
    n = (tile // tiles).to(tl.int64)
    q = tile % tiles * BM + tl.arange(0, BM)
    clamped = tl.minimum(q, Q - 1)  # a position too many repeats the last: its loads need no mask
    co = pid % COLUMNS * BN + tl.arange(0, BN)
    counts = co < COG
    co += group * COG
    input += n * H * W * C
    offset += n * o_n
    modulation += n * a_n
    weight += (co.to(ROW) * (K * CG))[:, None]
    begin = tl.program_id(1) * PART
    end = tl.minimum(begin + PART, STEPS)
    v00, v01, v10, v11, c00, c01, c10, c11 = _corners(
        input, offset, modulation, clamped, group, begin, H, W, WO, o_c, o_q, a_c, a_q,
        C, CG, CD, RUN, BK, K, KW, SH, SW, PH, PW, DH, DW, MODULATED, ROW, POS, ACC, INTERPRET,
    )  # fmt: skip
    sample = _sampled(v00, v01, v10, v11, c00, c01, c10, c11, DTYPE, PRECISION, ACC)
    acc = tl.zeros([BM, BN], ACC)
    for i in range(begin + 1, end):  # a step ahead: corners are on their way during the product
        v00, v01, v10, v11, c00, c01, c10, c11 = _corners(
            input, offset, modulation, clamped, group, i, H, W, WO, o_c, o_q, a_c, a_q,
            C, CG, CD, RUN, BK, K, KW, SH, SW, PH, PW, DH, DW, MODULATED, ROW, POS, ACC, INTERPRET,
        )  # fmt: skip
        filters = _filters(weight, counts, i - 1, CG, RUN, BK, K)
        acc = multiply(sample, filters, acc, PRECISION, ACC, INTERPRET)
        sample = _sampled(v00, v01, v10, v11, c00, c01, c10, c11, DTYPE, PRECISION, ACC)
    filters = _filters(weight, counts, end - 1, CG, RUN, BK, K)
    acc = multiply(sample, filters, acc, PRECISION, ACC, INTERPRET)
    n += tl.program_id(1).to(tl.int64) * N
    _store(out, bias, acc, n, q, co, q < Q, counts, Q, CO, BIAS, LAST, COG % BN == 0, ROW)


@triton.jit(do_not_specialize=["N", "Q_UNITS"])
def merge(
    parts, bias, out, N, Q_UNITS,
    CO: tl.constexpr, BIAS: tl.constexpr, LAST: tl.constexpr, Q_ALIGN: tl.constexpr,
    ROW: tl.constexpr, ACC: tl.constexpr,
    SPLITS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The sum of SPLITS channels-last outputs."""
    Q = Q_UNITS * Q_ALIGN
    tiles = cover(Q, BM)
    n = (tl.program_id(0) // tiles).to(tl.int64)
    q = tl.program_id(0) % tiles * BM + tl.arange(0, BM)
    co = tl.program_id(1) * BN + tl.arange(0, BN)
    live = q < Q
    counts = co < CO
    acc = tl.zeros([BM, BN], ACC)
    for part in range(SPLITS):
        at = parts + (part * N + n) * Q * CO + (q.to(ROW) * CO)[:, None] + co[None, :]
        acc += tl.load(at, mask=tile_mask(live, counts, CO % BN == 0), other=0)
    _store(out, bias, acc, n, q, co, live, counts, Q, CO, BIAS, LAST, CO % BN == 0, ROW)


@triton.jit(do_not_specialize=["LINES", "W_UNITS", "H", "W", "WO", "o_n", "a_n"])
def resample(
    input, offset, modulation, out,
    LINES, W_UNITS, H, W, WO, o_n, o_c, o_q, a_n, a_c, a_q,
    C: tl.constexpr, CD: tl.constexpr, K: tl.constexpr, KW: tl.constexpr,
    SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr,
    MODULATED: tl.constexpr, W_ALIGN: tl.constexpr, ROW: tl.constexpr, POS: tl.constexpr,
    ACC: tl.constexpr, INTERPRET: tl.constexpr, BJ: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Columns [N, C, Ho*kh, Wo*kw]: a tile is of one of its lines, oy*kh + ky."""
    n, line, j, live, q, k = _in_line(LINES, W_UNITS * W_ALIGN, WO, K, KW, BJ)
    g = tl.program_id(1) // tl.cdiv(CD, BC)
    c = tl.program_id(1) % tl.cdiv(CD, BC) * BC + tl.arange(0, BC)
    counts = c < CD
    c += g * CD
    row, fx, fy, m00, m01, m10, m11, a = tap(
        offset + n * o_n, modulation + n * a_n, q, g, k, H, W, WO, o_c, o_q, a_c, a_q, live,
        K, KW, SH, SW, PH, PW, DH, DW, MODULATED, ROW, POS, ACC, INTERPRET,
    )  # fmt: skip
    c00, c01, c10, c11 = taps.scaled(fx, fy, a, m00, m01, m10, m11)
    v00, v01, v10, v11 = load_corners(
        input + n * H * W * C, row, c, m00, m01, m10, m11, counts, W, C, CD % BC == 0
    )
    at = _in_columns(out, n, c, line, j, C, LINES, W_UNITS * W_ALIGN, ROW)
    sample = blend(v00, v01, v10, v11, c00, c01, c10, c11, ACC)
    tl.store(at, sample, mask=tile_mask(live, counts, CD % BC == 0))


@triton.jit(do_not_specialize=["LINES", "W_UNITS", "WO", "first", "part", "image", "top", "lines"])
def unfold(
    grad, columns, LINES, W_UNITS, WO, first, part, image, top, lines,
    C: tl.constexpr, K: tl.constexpr, KW: tl.constexpr, W_ALIGN: tl.constexpr, ROW: tl.constexpr,
    BJ: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Columns as [positions, kh*kw, C]: `part` positions from `first` on, of each image.

    They touch `lines` lines from `top` on.
    """
    n, line, j, live, q, k = _in_line(lines, W_UNITS * W_ALIGN, WO, K, KW, BJ)
    q += top // (K // KW) * WO - first
    live = live & (q >= 0) & (q < part)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    both = tile_mask(live, c < C, C % BC == 0)
    at = _in_columns(grad, image + n, c, line + top, j, C, LINES, W_UNITS * W_ALIGN, ROW)
    to = columns + (((n * part + q) * K + k) * C)[:, None] + c[None, :]
    tl.store(to, tl.load(at, mask=both, other=0), mask=both)


@triton.jit
def _in_line(lines, width, WO, K: tl.constexpr, KW: tl.constexpr, BJ: tl.constexpr):
    """A program's image, line of the columns and places in it, and their positions and taps."""
    pid = tl.program_id(0)
    blocks = cover(width, BJ)
    n = (pid // blocks // lines).to(tl.int64)
    line = pid // blocks % lines
    j = pid % blocks * BJ + tl.arange(0, BJ)
    clamped = tl.minimum(j, width - 1)
    q = line // (K // KW) * WO + clamped // KW
    return n, line, j, j < width, q, line % (K // KW) * KW + clamped % KW


@triton.jit
def _in_columns(columns, n, c, line, j, C: tl.constexpr, lines, width, ROW: tl.constexpr):
    """Addresses [j, c] in columns [N, C, lines, width]."""
    plane = lines.to(ROW) * width
    at = columns + n * C * plane + (line.to(ROW) * width + j)[:, None]
    return at + (c.to(ROW) * plane)[None, :]


# Launchers


class Geometry(NamedTuple):
    """How the taps of a kernel lie, (height, width) each."""

    kernel: Pair
    stride: Pair
    padding: Pair
    dilation: Pair

    @classmethod
    def of(cls, *pairs: Sequence[int]) -> "Geometry":
        """Of sequences that their owner may change later."""
        return cls(*((y, x) for y, x in pairs))

    def constants(self) -> dict[str, int]:
        """Of the kernels: what a model fixes."""
        (kh, kw), (sh, sw), (ph, pw), (dh, dw) = self
        steps = {"SH": sh, "SW": sw, "PH": ph, "PW": pw, "DH": dh, "DW": dw}
        return {"K": kh * kw, "KW": kw, **steps}


def deform_conv(
    input: Tensor,
    offset: Tensor,
    mask: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
) -> Tensor:
    """The columns multiplied with `weight` [Co, C/groups, kh, kw], never stored; rounded once."""
    operands = (input, offset, mask, weight, bias)
    geometry = Geometry.of(weight.shape[2:], stride, padding, dilation)
    key = (deform_conv, input.device, *signature(operands, geometry))
    return remembered(key, lambda: plan_conv(*operands, *geometry[1:]))(*operands)


def plan_conv(
    input: Tensor,
    offset: Tensor,
    mask: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
) -> Callable[..., Tensor]:
    """deform_conv of tensors in the memory layout of these."""
    size = (input.shape[0], weight.shape[0], *offset.shape[2:])
    last = input.is_contiguous(memory_format=torch.channels_last) and not input.is_contiguous()
    order = torch.channels_last if last else torch.contiguous_format
    made = form(torch.empty(size, dtype=input.dtype, device="meta", memory_format=order))
    nothing, unread = math.prod(size) == 0, input.numel() == 0
    geometry = Geometry.of(weight.shape[2:], stride, padding, dilation)
    plans: dict[str, Convolution] = {}  # by what PyTorch is told of products, at each call

    def planned(
        input: Tensor, offset: Tensor, mask: Tensor | None, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        out: Tensor = empty(input, *made)
        if nothing:
            return out
        if unread:
            return out.zero_() if bias is None else out.copy_(bias.view(1, -1, 1, 1).expand(size))
        exact = precision(input.dtype)
        if exact not in plans:
            plans[exact] = Convolution(input, offset, mask, weight, bias, geometry, exact, last)
        plans[exact](input, offset, mask, weight, bias, out)
        return out

    return planned


def signature(operands: Iterable[Tensor | None], geometry: Geometry) -> tuple[Hashable, ...]:
    """What two problems have in common if the launches of one serve the other."""
    layouts = (None if x is None else (x.shape, x.stride(), x.dtype) for x in operands)
    return *layouts, geometry


class Convolution:
    """The launches of convolutions with one signature."""

    def __init__(
        self,
        input: Tensor,
        offset: Tensor,
        mask: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        geometry: Geometry,
        exact: str,
        last: bool,
    ) -> None:
        (n, c, h, w), (co, cg, kh, kw), (ho, wo) = input.shape, weight.shape, offset.shape[2:]
        sizes = channel_sizes(c, co, cg, offset.shape[1] // (2 * kh * kw))
        q, align = ho * wo, alignment(ho * wo)
        how, outputs = (exact, input.dtype), sizes["COG"]
        rule = (tuning.forward_tile, outputs, sizes["RUN"], *how)
        tile = refined(
            input.device, *rule, images=n, positions=q, channels=cg, groups=c // cg, taps=kh * kw,
            modulated=mask is not None,
        )  # fmt: skip
        splits = tuning.forward_splits(tile, n, q, kh * kw, sizes, *how, input.device)
        blocks = triton.cdiv(q, tile["BM"]) * n * (c // cg) * triton.cdiv(outputs, tile["BN"])
        end = {"BIAS": bias is not None, "LAST": last}
        self.turned = to_channels_last(input, weight, rounded=1 if exact == "tf32" else -1)
        self.parts = None if splits == 1 else (splits, n, co, ho, wo)
        made = weight.new_empty((1, co, ho, wo), device="meta")
        choices = options(input, offset, mask, made, weight[None])
        shifts, given = offset.flatten(2), (offset if mask is None else mask).flatten(2)
        moved = offset.data_ptr() != shifts.data_ptr()
        moved |= mask is not None and mask.data_ptr() != given.data_ptr()
        self.moved = moved  # a flat view of them does not exist
        self.convolve = Launch(
            convolve, (blocks, splits),
            (n, q // align, h, w, wo, *shifts.stride(), *given.stride()),
            **sizes, **geometry.constants(), MODULATED=mask is not None, Q_ALIGN=align,
            **(end if splits == 1 else {"BIAS": False, "LAST": True}),
            PRECISION=exact, SPLITS=splits, **choices, **tile,
        )  # fmt: skip
        piece = tuning.merge_tile(co)
        self.merge = Launch(
            merge, (triton.cdiv(q, piece["BM"]) * n, triton.cdiv(co, piece["BN"])),
            (n, q // align),
            CO=co, **end, Q_ALIGN=align, SPLITS=splits,
            ROW=choices["ROW"], ACC=choices["ACC"], **piece,
        )  # fmt: skip

    def __call__(
        self,
        input: Tensor,
        offset: Tensor,
        mask: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        out: Tensor,
    ) -> None:
        shifts = offset.flatten(2) if self.moved else offset
        given = shifts if mask is None else mask.flatten(2) if self.moved else mask
        pixels, filters = self.turned(input, weight)
        added = filters if bias is None else bias.contiguous()
        target = out
        if self.parts is not None:
            target = out.new_empty(self.parts, dtype=accumulator(out.dtype))
        self.convolve(pixels, shifts, given, filters, added, target)
        if self.parts is not None:
            self.merge(target, added, out)


def deform_columns(
    input: Tensor,
    offset: Tensor,
    mask: Tensor | None,
    kernel: Pair,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
) -> Tensor:
    """The resampled features [N, C, Ho*kh, Wo*kw]."""
    (n, c), (ho, wo), (kh, kw) = input.shape[:2], offset.shape[2:], kernel
    out = torch.empty(n, c, ho * kh, wo * kw, dtype=input.dtype, device=input.device)
    if out.numel() == 0:
        return out
    if input.numel() == 0:
        return out.zero_()
    geometry, operands = Geometry.of(kernel, stride, padding, dilation), (input, offset, mask)
    key = (deform_columns, input.device, *signature(operands, geometry))
    lay, launch = remembered(
        key, lambda: (to_channels_last(input), _resample(*operands, out, geometry))
    )
    shifts = offset.flatten(2)
    launch(*lay(input), shifts, shifts if mask is None else mask.flatten(2), out)
    return out


def _resample(
    input: Tensor, offset: Tensor, mask: Tensor | None, out: Tensor, geometry: Geometry
) -> Launch:
    (_, c, h, w), (n, _, lines, width), constants = input.shape, out.shape, geometry.constants()
    per_group = c * 2 * constants["K"] // offset.shape[1]
    rule = (tuning.columns_tile, width, per_group, input.element_size())
    about = {"lines": n * lines, "channels": c, "taps": constants["K"]}
    tile = refined(input.device, *rule, **about, modulated=mask is not None)
    align = alignment(width)
    shifts, given = offset.flatten(2), (offset if mask is None else mask).flatten(2)
    return Launch(
        resample,
        (n * lines * triton.cdiv(width, tile["BJ"]),
         c // per_group * triton.cdiv(per_group, tile["BC"])),
        (lines, width // align, h, w, offset.shape[3], *shifts.stride(), *given.stride()),
        C=c, CD=per_group, **constants, MODULATED=mask is not None, W_ALIGN=align,
        **options(input, offset, mask, out), **tile,
    )  # fmt: skip


def channel_sizes(
    channels: int, outputs: int, per_group: int, deformable_groups: int
) -> dict[str, int]:
    """How channels fall into groups, deformable groups and runs: constants of the kernels."""
    deformed = channels // deformable_groups
    return {
        "C": channels, "CO": outputs, "CG": per_group, "COG": outputs * per_group // channels,
        "CD": deformed, "RUN": math.gcd(per_group, deformed),
    }  # fmt: skip


def to_channels_last(*likes: Tensor | None, rounded: int = -1) -> Callable[..., list[Any]]:
    """The way from up to three tensors in the layouts of these [N, C, H, W] to adjacent channels.

    One in the place of None is left as it is. The one of the number `rounded` is rounded to tf32.
    """
    last = torch.channels_last
    others = [x is not None and not x.is_contiguous(memory_format=last) for x in likes]
    turned = [i for i, x in enumerate(likes) if others[i] and x is not None and x.is_contiguous()]
    copied = [i for i, other in enumerate(others) if other and i not in turned]
    given: list[Any] = [likes[i] for i in turned]
    on_the_way = turned.index(rounded) if rounded in turned else -1
    turn = transposition(*map(_matrices, given), rounded=on_the_way) if turned else None
    afterwards = rounded >= 0 and rounded not in turned
    rounding = _round_to_tf32(likes[rounded]) if afterwards else None
    forms = [form(torch.empty_like(x, device="meta", memory_format=last)) for x in given]

    def run(*tensors: Any) -> list[Any]:
        laid = list(tensors)
        for i in copied:
            laid[i] = tensors[i].contiguous(memory_format=last)
        if turn is not None:
            sources = [tensors[i] for i in turned]
            targets = [empty(x, *made) for x, made in zip(sources, forms, strict=True)]
            turn(*sources, *targets)
            for i, x in zip(turned, targets, strict=True):
                laid[i] = x
        if rounding is not None:
            whole = laid[rounded]
            laid[rounded] = empty(whole, *form(whole))
            rounding(whole, laid[rounded])
        return laid

    return run


def _round_to_tf32(x: Any) -> Launch:
    tile = {"B": 1024, "num_warps": 4}
    return Launch(round_to_tf32, (triton.cdiv(x.numel(), tile["B"]),), (x.numel(),), **tile)


def _matrices(x: Any) -> tuple[int, int, int]:
    n, c, h, w = x.shape
    return n, c, h * w


def from_channels_last(like: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """The way from adjacent channels to the layout and dtype of `like`, the second argument."""
    if like.is_contiguous(memory_format=torch.channels_last):
        return lambda x, like: x.to(like.dtype)
    if not torch.empty_like(like, device="meta").is_contiguous():
        return lambda x, like: torch.empty_like(like).copy_(x)
    n, c, h, w = like.shape
    turn = transposition((n, h * w, c))

    def run(x: Tensor, like: Tensor) -> Tensor:
        out = torch.empty_like(like)
        turn(x, out)
        return out

    return run


def last_format(like: Tensor) -> torch.memory_format:
    """For a tensor in the layout that `to_channels_last` gives."""
    last = like.is_contiguous(memory_format=torch.channels_last)
    return torch.preserve_format if last else torch.channels_last


def precision(dtype: torch.dtype) -> str:
    """How factors are multiplied: in float32 as PyTorch is told to multiply its own.

    Three products of tf32 have the precision of one in float32 and take a quarter of its time.
    """
    if dtype != torch.float32:
        return "ieee"
    return "tf32" if _told("cuda", "matmul") == "tf32" else "tf32x3"


# What torch.backends.cuda.matmul.fp32_precision asks, in a sixth of the time.
_told = torch._C._get_fp32_precision_getter


def options(
    input: Tensor, offset: Tensor, mask: Tensor | None, *others: Tensor
) -> dict[str, object]:
    """Types of a kernel: places in one image are int32 unless an operand extends farther."""
    strided = (offset,) if mask is None else (offset, mask)
    far = max(
        *(
            sum((n - 1) * s for n, s in zip(x.shape[1:], x.stride()[1:], strict=True))
            for x in strided
        ),
        input[:1].numel() + input.shape[1],  # and the pixel before
        *(x[:1].numel() for x in others),
    )
    exact = offset.dtype != torch.float64 and max(input.shape[2:]) < 2**taps.SIDE.value
    return {
        "ROW": tl.int64 if far >= 2**31 - 2**16 else tl.int32,
        "POS": tl.float32 if exact else tl.float64,  # which resolves the pixels of any image
        "ACC": tl.float64 if input.dtype == torch.float64 else tl.float32,
        "INTERPRET": INTERPRET,
    }
