"""Gradients of the deformable convolution, without atomic sums of floats.

The gradient of the columns exists for some images at a time, [groups, positions, taps, channels]:

`locate`, `fill`   sort the samples by the cell of four pixels in which they lie
`collect`          the gradient of the input: a pixel sums over the samples in four cells around it
`differentiate`    the gradients of offset and mask, and the columns, for the gradient of the weight
`settle`           the gradient of the weight, rounded, and right where gradients are infinite

The products with the weight and with the columns are PyTorch's own, but for `product`: three
products of tf32 are faster than one in float32 and as precise.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pliant.sampling.problem import accumulator

from . import INTERPRET, convolution as forward, taps, tuning
from .convolution import (
    Geometry,
    Pair,
    blend,
    from_channels_last,
    last_format,
    load_corners,
    multiply,
    tap,
    tile_mask,
    to_channels_last,
)
from .launch import Launch, remembered
from .refined import refined
from .transpose import alignment

Grads = tuple[Tensor | None, ...]

# For the gradient of the columns, and in half precision the columns, of as many positions as fit.
SCRATCH_BYTES = 256 << 20


# Kernels


@triton.jit
def _cell(
    offset, i, live, Q, H, W, WO, o_n, o_c, o_q, G,
    K: tl.constexpr, KW: tl.constexpr,
    SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr,
    ROW: tl.constexpr, POS: tl.constexpr, ACC: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Of sample `i` of (n, g, k, q): the four, its cell, whether it counts, and its fractions.

    The cells of an image lie between its pixels and around them: H + 1 lines of W + 1.
    """
    q = i % Q
    k = i // Q % K
    g = i // Q // K % G
    n = i // Q // K // G
    row, fx, fy, m00, m01, m10, m11, _ = tap(
        offset + n.to(tl.int64) * o_n, offset, q, g, k, H, W, WO, o_c, o_q, 0, 0, live,
        K, KW, SH, SW, PH, PW, DH, DW, False, ROW, POS, ACC, INTERPRET,
    )  # fmt: skip
    # row = y * W + x of the corner 00, where y and x may be -1; x is if no left corner is read.
    y = (row + W + tl.where(m00 | m10, 0, 1)) // W
    cell = (n * G + g) * ((H.to(ROW) + 1) * (W + 1)) + row + W + 1 + y
    return n, g, k, q, cell, m00 | m01 | m10 | m11, fx, fy


@triton.jit(do_not_specialize=["samples", "cells", "Q", "H", "W", "WO", "o_n", "G"])
def locate(
    offset, counts, keys, samples, cells, Q, H, W, WO, o_n, o_c, o_q, G,
    K: tl.constexpr, KW: tl.constexpr,
    SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr,
    SORT: tl.constexpr, ROW: tl.constexpr, POS: tl.constexpr, ACC: tl.constexpr,
    INTERPRET: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """For each sample its cell, as a key to sort by; or its number in the cell, while counting."""
    i = tl.program_id(0).to(ROW) * B + tl.arange(0, B)
    live = i < samples
    _, _, _, _, cell, inside, _, _ = _cell(
        offset, tl.minimum(i, samples - 1), live, Q, H, W, WO, o_n, o_c, o_q, G,
        K, KW, SH, SW, PH, PW, DH, DW, ROW, POS, ACC, INTERPRET,
    )  # fmt: skip
    if SORT:
        tl.store(keys + i, tl.where(inside, cell, cells), mask=live)
    else:
        one = tl.full([B], 1, counts.dtype.element_ty)
        number = tl.atomic_add(counts + cell + 1, one, mask=inside, sem="relaxed")
        tl.store(keys + i, number, mask=live)


@triton.jit(do_not_specialize=["samples", "Q", "H", "W", "WO", "o_n", "a_n", "G"])
def fill(
    offset, modulation, bounds, keys, rows, coefficients, samples, Q, H, W, WO,
    o_n, o_c, o_q, a_n, a_c, a_q, G,
    K: tl.constexpr, KW: tl.constexpr,
    SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr,
    MODULATED: tl.constexpr, SORT: tl.constexpr, ROW: tl.constexpr, POS: tl.constexpr,
    ACC: tl.constexpr, INTERPRET: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Write down the samples cell by cell: rows of the columns, and coefficients of the corners."""
    i = tl.program_id(0).to(ROW) * B + tl.arange(0, B)
    live = i < samples
    i = tl.minimum(i, samples - 1)
    key = tl.load(keys + i).to(ROW)
    n, g, k, q, cell, inside, fx, fy = _cell(
        offset, key if SORT else i, live, Q, H, W, WO, o_n, o_c, o_q, G,
        K, KW, SH, SW, PH, PW, DH, DW, ROW, POS, ACC, INTERPRET,
    )  # fmt: skip
    place = i if SORT else tl.load(bounds + cell, mask=inside, other=0) + key
    tl.store(rows + place, (n * Q + q) * K + k, mask=inside)
    a = tl.full([B], 1, ACC)
    if MODULATED:
        at = modulation + n.to(tl.int64) * a_n + (g * K + k).to(ROW) * a_c + q.to(ROW) * a_q
        a = tl.load(at).to(ACC)
    c00, c01, c10, c11 = taps.coefficients(fx, fy)
    four = tl.join(tl.join(c00 * a, c10 * a), tl.join(c01 * a, c11 * a))  # one store of 16 bytes
    at = coefficients + place.to(tl.int64)[:, None] * 4 + tl.arange(0, 4)[None, :]
    tl.store(at, tl.reshape(four, [B, 4]), mask=inside[:, None])


@triton.jit(do_not_specialize=["first", "count", "pixels", "start", "H", "W", "G"])
def collect(
    columns, bounds, rows, coefficients, grad, first, count, pixels, start, H, W, G,
    C: tl.constexpr, CG: tl.constexpr, CD: tl.constexpr,
    ADD: tl.constexpr, ROW: tl.constexpr, ACC: tl.constexpr,
    BP: tl.constexpr, BE: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The gradient of `pixels` pixels from `start` on, by the samples whose columns are here.

    Those are `count` rows of the columns from `first` on.
    """
    BLOCKS: tl.constexpr = (CD + BC - 1) // BC
    g = tl.program_id(1)
    c = tl.program_id(0) % BLOCKS * BC + tl.arange(0, BC)
    counts = c < CD
    c += g * CD
    columns += (c // CG).to(ROW) * (count.to(ROW) * CG) + c % CG
    begin = (tl.program_id(0) // BLOCKS).to(ROW) * BP
    for p in range(begin, tl.minimum(begin + BP, pixels)):
        pixel = start + p
        n = pixel // (H.to(ROW) * W)
        cell = ((n * G + g) * (H + 1) + pixel // W % H) * (W + 1) + pixel % W
        # Samples of the cells above, left and right, follow one another; so do those below.
        above = tl.load(bounds + cell)
        above_right = tl.load(bounds + cell + 1)
        length = tl.load(bounds + cell + 2) - above
        cell += W + 1
        below = tl.load(bounds + cell)
        below_right = tl.load(bounds + cell + 1)
        total = length + tl.load(bounds + cell + 2) - below
        acc = tl.zeros([BE, BC], ACC)
        for e in range(0, total, BE):
            i = e + tl.arange(0, BE)
            up = i < length
            at = tl.where(up, above + i, below - length + i)
            row = tl.load(rows + at, mask=i < total, other=-1) - first
            live = (row >= 0) & (row < count)
            # A pixel is the bottom of the cells above it, and the right of those on its left.
            left = at < tl.where(up, above_right, below_right)
            corner = tl.where(up, 2, 0) + tl.where(left, 1, 0)
            a = tl.load(coefficients + at.to(tl.int64) * 4 + corner, mask=live, other=0)
            come = columns[None, :] + (row.to(ROW) * CG)[:, None]
            come = tl.load(come, mask=tile_mask(live, counts, CD % BC == 0), other=0).to(ACC)
            acc += come * a[:, None]
        out = tl.sum(acc, 0)
        to = grad + pixel.to(tl.int64) * C + c
        if ADD:
            out += tl.load(to, mask=counts, other=0).to(ACC)
        tl.store(to, out, mask=counts)


@triton.jit(
    do_not_specialize=[
        "first", "part", "image", "rows", "H", "W", "WO", "o_n", "a_n", "go_n", "ga_n"
    ]
)  # fmt: skip
def differentiate(
    input, offset, modulation, grad_columns, columns, grad_offset, grad_modulation,
    first, part, image, rows, H, W, WO, o_n, o_c, o_q, a_n, a_c, a_q,
    go_n, go_c, go_q, ga_n, ga_c, ga_q,
    C: tl.constexpr, CG: tl.constexpr, CD: tl.constexpr, RUN: tl.constexpr,
    K: tl.constexpr, KW: tl.constexpr,
    SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr,
    MODULATED: tl.constexpr, TO_OFFSET: tl.constexpr, TO_MASK: tl.constexpr,
    TO_WEIGHT: tl.constexpr, ROW: tl.constexpr, POS: tl.constexpr, ACC: tl.constexpr,
    INTERPRET: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """One tap of `part` positions from `first` on, in the images from `image` on.

    The `columns` may take the place of `grad_columns`.
    """
    BLOCKS: tl.constexpr = (RUN + BC - 1) // BC
    # Taps before positions: those of one position share pixels, and a stretch of the columns.
    k = tl.program_id(0) % K
    block = tl.program_id(0) // K
    g = tl.program_id(1)
    local = block % tl.cdiv(part, BM) * BM + tl.arange(0, BM)
    live = local < part
    local = tl.minimum(local, part - 1)
    q = first + local
    item = block // tl.cdiv(part, BM)
    n = (image + item).to(tl.int64)
    line = ((item * part + local) * K + k).to(ROW)  # of the columns
    row, fx, fy, m00, m01, m10, m11, a = tap(
        offset + n * o_n, modulation + n * a_n, q, g, k, H, W, WO, o_c, o_q, a_c, a_q, live,
        K, KW, SH, SW, PH, PW, DH, DW, MODULATED, ROW, POS, ACC, INTERPRET,
    )  # fmt: skip
    c00, c01, c10, c11 = taps.scaled(fx, fy, a, m00, m01, m10, m11)
    s00 = tl.zeros([BM], ACC)
    s01 = tl.zeros([BM], ACC)
    s10 = tl.zeros([BM], ACC)
    s11 = tl.zeros([BM], ACC)
    for b in range(CD // RUN * BLOCKS):
        c = b % BLOCKS * BC + tl.arange(0, BC)
        counts = c < RUN
        start = g * CD + b // BLOCKS * RUN  # of the run
        group = start // CG
        c += start
        both = tile_mask(live, counts, RUN % BC == 0)
        at = (group.to(ROW) * rows * (K * CG) + line * CG)[:, None] + (c - group * CG)[None, :]
        v00, v01, v10, v11 = load_corners(
            input + n * H * W * C, row, c, m00, m01, m10, m11, counts, W, C, RUN % BC == 0
        )
        if TO_OFFSET or TO_MASK:
            come = tl.load(grad_columns + at, mask=both, other=0).to(ACC)
            s00 += taps.dot(come, v00.to(ACC), 1, INTERPRET)
            s01 += taps.dot(come, v01.to(ACC), 1, INTERPRET)
            s10 += taps.dot(come, v10.to(ACC), 1, INTERPRET)
            s11 += taps.dot(come, v11.to(ACC), 1, INTERPRET)
        if TO_WEIGHT:
            sample = blend(v00, v01, v10, v11, c00, c01, c10, c11, ACC)
            tl.store(columns + at, sample, mask=both)
    if TO_OFFSET or TO_MASK:  # what is not read counts for nothing, whatever gradient came
        s00 = tl.where(m00, s00, 0)
        s01 = tl.where(m01, s01, 0)
        s10 = tl.where(m10, s10, 0)
        s11 = tl.where(m11, s11, 0)
    if TO_MASK:
        c00, c01, c10, c11 = taps.coefficients(fx, fy)
        at = grad_modulation + n * ga_n + (g * K + k).to(ROW) * ga_c + q.to(ROW) * ga_q
        tl.store(at, c00 * s00 + c01 * s01 + c10 * s10 + c11 * s11, mask=live)
    if TO_OFFSET:
        a = tl.where(m00 | m01 | m10 | m11, a, 0)
        at = grad_offset + n * go_n + (2 * (g * K + k)).to(ROW) * go_c + q.to(ROW) * go_q
        tl.store(at, a * ((s10 - s00) * (1 - fx) + (s11 - s01) * fx), mask=live)
        tl.store(at + go_c, a * ((s01 - s00) * (1 - fy) + (s11 - s10) * fy), mask=live)


@triton.jit(do_not_specialize=["rows"])
def product(
    grad, filters, columns, rows,
    C: tl.constexpr, CO: tl.constexpr, CG: tl.constexpr, COG: tl.constexpr, K: tl.constexpr,
    PRECISION: tl.constexpr, ACC: tl.constexpr, INTERPRET: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The gradient of the columns, [groups, rows, K * CG], by that of the outputs, [rows, CO]."""
    N: tl.constexpr = K * CG
    EVEN: tl.constexpr = COG % BK == 0
    blocks = tl.cdiv(rows, BM)
    pid = tl.program_id(0)
    m = pid % blocks * BM + tl.arange(0, BM)
    g = (pid // blocks % (C // CG)).to(tl.int64)
    n = pid // blocks // (C // CG) * BN + tl.arange(0, BN)
    line = m.to(tl.int64)[:, None]
    acc = tl.zeros([BM, BN], ACC)
    for first in range(0, COG, BK):
        c = first + tl.arange(0, BK)
        at = grad + g * COG + line * CO + c[None, :]
        come = tl.load(at, mask=tile_mask(m < rows, c < COG, EVEN), other=0)
        at = filters + (g * COG + c)[:, None] * N + n[None, :]
        counts = (n < N)[None, :]
        weights = tl.load(at, mask=counts if EVEN else (c < COG)[:, None] & counts, other=0)
        acc = multiply(come, weights, acc, PRECISION, ACC, INTERPRET)
    at = columns + (g * rows + line) * N + n[None, :]
    tl.store(at, acc, mask=tile_mask(m < rows, n < N, N % BN == 0))


@triton.jit(do_not_specialize=["parts", "rows", "Q", "H", "W", "WO", "o_n", "a_n"])
def settle(
    filters, grad, input, offset, modulation, out,
    parts, rows, Q, H, W, WO, o_n, o_c, o_q, a_n, a_c, a_q, w_o, w_c, w_y, w_x,
    C: tl.constexpr, CO: tl.constexpr, CG: tl.constexpr, COG: tl.constexpr, CD: tl.constexpr,
    RUN: tl.constexpr, K: tl.constexpr, KW: tl.constexpr,
    SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr,
    MODULATED: tl.constexpr, ROW: tl.constexpr, POS: tl.constexpr, ACC: tl.constexpr,
    INTERPRET: tl.constexpr, BQ: tl.constexpr, BC: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """The gradient of the weight, [CO, CG, kh, kw], by the sums `filters`.

    There are `parts` of them, [groups, K * CG, COG] each. They have multiplied the gradients of all
    `rows` outputs with columns, which are zero where a sample does not count. That makes a NaN of
    an infinite gradient: where there is one, only the samples that count are summed again.
    """
    BLOCKS: tl.constexpr = (RUN + BC - 1) // BC
    k = tl.program_id(1)
    run = tl.program_id(0) // BLOCKS * RUN
    group = run // CG
    c = tl.program_id(0) % BLOCKS * BC + tl.arange(0, BC)
    counts = c < RUN
    c += run
    o = tl.program_id(2) * BO + tl.arange(0, BO)
    both = counts[:, None] & (o < COG)[None, :]
    line = (group * K + k) * CG + c - group * CG
    sums = tl.zeros([BC, BO], ACC)
    for part in range(parts):
        at = filters + (part * (K * C) + line).to(tl.int64)[:, None] * COG + o[None, :]
        sums += tl.load(at, mask=both, other=0)
    if tl.max((sums != sums).to(tl.int32)) > 0:
        sums = tl.zeros([BC, BO], ACC)
        for first in range(0, rows, BQ):
            i = first + tl.arange(0, BQ)
            live = i < rows
            i = tl.minimum(i, rows - 1).to(tl.int64)
            n = i // Q
            row, fx, fy, m00, m01, m10, m11, a = tap(
                offset + n * o_n, modulation + n * a_n, (i % Q).to(tl.int32), run // CD, k,
                H, W, WO, o_c, o_q, a_c, a_q, live,
                K, KW, SH, SW, PH, PW, DH, DW, MODULATED, ROW, POS, ACC, INTERPRET,
            )  # fmt: skip
            c00, c01, c10, c11 = taps.scaled(fx, fy, a, m00, m01, m10, m11)
            v00, v01, v10, v11 = load_corners(
                input, n * H * W + row, c, m00, m01, m10, m11, counts, W, C, False
            )
            sample = blend(v00, v01, v10, v11, c00, c01, c10, c11, ACC)
            inside = (m00 | m01 | m10 | m11)[:, None] & (o < COG)[None, :]
            at = grad + i[:, None] * CO + (group * COG + o)[None, :]
            come = tl.load(at, mask=inside, other=0).to(ACC)
            sums += taps.dot(sample[:, :, None], come[:, None, :], 0, INTERPRET)
    at = out + (group * COG + o).to(tl.int64)[None, :] * w_o + (c - group * CG)[:, None] * w_c
    tl.store(at + k // KW * w_y + k % KW * w_x, sums, mask=both)


# Launchers


class Chunk(NamedTuple):
    """What is worked on at a time: `part` positions from `first` on of some images in a row."""

    image: int
    images: int
    first: int
    part: int

    @property
    def rows(self) -> int:
        return self.images * self.part


class Flat:
    """How kernels take [N, C, Ho, Wo] as [N, C, Ho*Wo], and how they give its gradient.

    They go by strides: the tensor itself will do, unless it has none for Ho*Wo.
    """

    def __init__(self, x: Tensor) -> None:
        grad = torch.empty_like(x, device="meta")
        self.strides, self.grad_strides = x.flatten(2).stride(), grad.flatten(2).stride()
        self.copied, self.grad_copied = not _flat(x), not _flat(grad)

    def __call__(self, x: Tensor) -> Tensor:
        return x.contiguous() if self.copied else x

    def empty(self, x: Tensor) -> Tensor:
        """Room for the gradient of `x`."""
        form = torch.contiguous_format if self.grad_copied else torch.preserve_format
        return torch.empty_like(x, memory_format=form)

    def finished(self, grad: Tensor, x: Tensor) -> Tensor:
        """`grad` in the layout that a gradient of `x` has."""
        return torch.empty_like(x).copy_(grad) if self.grad_copied else grad


def _flat(x: Tensor) -> bool:
    return 1 in x.shape[2:] or x.stride(2) == x.shape[3] * x.stride(3)


class Problem(NamedTuple):
    """What launches are planned by."""

    size: torch.Size  # N, C, H, W
    element: int  # bytes of a feature
    positions: int  # Ho * Wo
    width: int  # Wo
    offset: Flat
    modulation: Flat
    modulated: bool
    constants: dict[str, int]
    sizes: dict[str, int]
    options: dict[str, object]
    device: torch.device

    @property
    def groups(self) -> int:
        return self.sizes["C"] // self.sizes["CD"]

    @property
    def about(self) -> dict[str, Any]:
        """What tells it from others where `refined` tiles are looked up."""
        sizes = {"channels": self.sizes["C"], "taps": self.constants["K"]}
        return {**sizes, "deformed": self.groups, "modulated": self.modulated}


class Step(NamedTuple):
    """A chunk, `rows` positions from `first` on in the batch, and its launches that are needed."""

    first: int
    rows: int
    columns: tuple[int, ...]  # [rows, K * C] or [groups, rows, K * C/groups]
    unfold: Launch | None
    product: Launch | None
    collect: Launch | None
    differentiate: Launch | None


def deform_conv_backward(
    grad: Tensor,
    input: Tensor,
    offset: Tensor,
    mask: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    needs: Sequence[bool],
) -> Grads:
    """Gradients of input, offset, mask, weight and bias."""
    operands = (grad, input, offset, mask, weight, bias)
    geometry = Geometry.of(weight.shape[2:], stride, padding, dilation)
    key = (deform_conv_backward, input.device, *needs, *forward.signature(operands, geometry))
    return remembered(key, lambda: plan_conv_backward(*operands, *geometry[1:], needs))(*operands)


def plan_conv_backward(
    grad: Tensor,
    input: Tensor,
    offset: Tensor,
    mask: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    needs: Sequence[bool],
) -> Callable[..., Grads]:
    """deform_conv_backward of tensors in the memory layout of these."""
    if input.numel() and grad.numel() and any(needs[:4]):
        return _planned(Geometry.of(weight.shape[2:], stride, padding, dilation), tuple(needs))
    *others, to_bias = needs

    def without_samples(
        grad: Tensor,
        input: Tensor,
        offset: Tensor,
        mask: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Grads:
        grads = _zeros((input, offset, mask, weight), others)
        return *grads, _grad_bias(grad.to(input.dtype), bias if to_bias else None)

    return without_samples


def deform_columns_backward(
    grad: Tensor,
    input: Tensor,
    offset: Tensor,
    mask: Tensor | None,
    kernel: Pair,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    needs: Sequence[bool],
) -> Grads:
    """Gradients of input, offset and mask."""
    if not (input.numel() and grad.numel() and any(needs)):
        return _zeros((input, offset, mask), needs)
    operands = (grad, input, offset, mask)
    geometry = Geometry.of(kernel, stride, padding, dilation)
    key = (deform_columns_backward, input.device, *needs, *forward.signature(operands, geometry))
    gradients = remembered(key, lambda: _planned(geometry, (*needs, False, False)))
    return gradients(*operands, None, None)[:3]


def _zeros(operands: Grads, needs: Sequence[bool]) -> Grads:
    given = zip(operands, needs, strict=True)
    return tuple(torch.zeros_like(x) if need and x is not None else None for x, need in given)


def _grad_bias(grad: Tensor, bias: Tensor | None) -> Tensor | None:
    """In two steps, the first of which has many sums to share."""
    if bias is None:
        return None
    return grad.sum(3, dtype=accumulator(grad.dtype)).sum((0, 2)).to(bias.dtype)


def _planned(geometry: Geometry, needs: Sequence[bool]) -> Callable[..., Grads]:
    """Gradients of a convolution or, without a weight, of columns; of tensors in one layout."""
    plans: dict[tuple[bool, str], Gradients] = {}  # by what PyTorch is told at each call

    def planned(
        grad: Tensor,
        input: Tensor,
        offset: Tensor,
        mask: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
    ) -> Grads:
        told = (torch.are_deterministic_algorithms_enabled(), forward.precision(input.dtype))
        if told not in plans:
            operands = (grad, input, offset, mask, weight)
            plans[told] = Gradients(*operands, geometry, needs, *told)
        return plans[told](grad, input, offset, mask, weight, bias)

    return planned


class Gradients:
    """The launches for gradients with one signature, and all else that it fixes."""

    def __init__(
        self,
        grad: Tensor,
        input: Tensor,
        offset: Tensor,
        mask: Tensor | None,
        weight: Tensor | None,
        geometry: Geometry,
        needs: Sequence[bool],
        sort: bool,
        exact: str,
    ) -> None:
        to_input, self.to_offset, to_mask, self.to_weight, self.to_bias = needs
        self.to_mask = to_mask and mask is not None
        self.sampled = to_input or self.to_offset or self.to_mask
        (n, c), (ho, wo), constants = input.shape[:2], offset.shape[2:], geometry.constants()
        co, cg = (0, c) if weight is None else weight.shape[:2]
        q, k, groups = ho * wo, constants["K"], c // cg
        self.offset, self.modulation = Flat(offset), Flat(offset if mask is None else mask)
        problem = Problem(
            input.shape, input.element_size(), q, wo,
            self.offset, self.modulation, mask is not None, constants,
            forward.channel_sizes(c, co, cg, offset.shape[1] // (2 * k)),
            forward.options(input, offset, mask), input.device,
        )  # fmt: skip
        self.dtype, self.device, sums = input.dtype, input.device, accumulator(input.dtype)
        # In float32 the columns take the place of their gradient. In half precision the gradient is
        # not rounded, since that of an offset in float32 needs all of it.
        stored = input.dtype if weight is None else sums
        apart = self.to_weight and stored != input.dtype
        rounded = sums if INTERPRET else input.dtype  # it rounds badly to bfloat16
        self.stored = stored if self.sampled or not apart else rounded
        self.apart = rounded if self.sampled and apart else None
        chunks = list(chunked(n, q, k * c * (stored.itemsize + apart * input.element_size())))
        split = chunks[0].part < q  # then sums go over several chunks

        self.grad_input = from_channels_last(input)
        self.last, self.summed = last_format(input), sums if split else input.dtype
        self.bins = Bins(problem, input, sort) if to_input else None
        self.products: Products | None = None
        self.settle: Launch | None = None
        if weight is not None:
            rows = math.gcd(*(chunk.rows for chunk in chunks))
            alone = groups == 1 and exact == "tf32x3"
            parts = tuning.filter_parts(rows, k * c, co, input.device) if alone else 1
            self.products = Products(weight, groups, parts)
            self.settle = _settle(problem, weight, parts) if self.to_weight else None
        wanted = (self.to_offset, self.to_mask, self.to_weight)
        # Pixels, rows of outputs and filters, as far as they are needed.
        self.lay = to_channels_last(
            input if any(wanted) else None,
            None if weight is None else grad.to(input.dtype),
            weight if self.sampled else None,
        )
        ours = self.sampled and weight is not None and exact == "tf32x3"
        self.steps = [
            Step(
                chunk.image * q + chunk.first,
                chunk.rows,
                (chunk.rows, k * c) if groups == 1 else (groups, chunk.rows, k * cg),
                _unfold(problem, chunk, grad) if self.sampled and weight is None else None,
                _product(problem, chunk, exact) if ours else None,
                None if self.bins is None else _collect(problem, chunk, input, stored, self.bins),
                _differentiate(problem, chunk, *wanted) if any(wanted) else None,
            )
            for chunk in chunks
        ]

    def __call__(
        self,
        grad: Tensor,
        input: Tensor,
        offset: Tensor,
        mask: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
    ) -> Grads:
        products, shifts = self.products, self.offset(offset)
        grad = grad.contiguous() if products is None else grad.to(self.dtype)
        pixels, grad, filters = self.lay(input, grad, weight)
        given = shifts if mask is None else self.modulation(mask)
        grad_offset = self.offset.empty(offset) if self.to_offset else None
        grad_mask = self.modulation.empty(mask) if self.to_mask and mask is not None else None
        go = shifts if grad_offset is None else grad_offset
        ga = given if grad_mask is None else grad_mask
        grad_pixels = grad_input = grad_filters = grad_weight = grad_bias = None
        bins: tuple[Tensor, ...] = ()
        if self.bins is not None:
            grad_pixels = torch.empty_like(input, dtype=self.summed, memory_format=self.last)
            bins = self.bins(shifts, given)
        if products is not None:
            filters = products.filters(filters) if self.sampled else grad
            grad_bias = _grad_bias(grad, bias if self.to_bias else None)
        space = torch.empty(self.steps[0].columns, dtype=self.stored, device=self.device)
        other = space if self.apart is None else torch.empty_like(space, dtype=self.apart)
        for step in self.steps:
            grad_columns, columns = _cut(space, step.columns), _cut(other, step.columns)
            outputs = grad if products is None else products.outputs(grad, step.first, step.rows)
            if step.unfold is not None:
                step.unfold(grad, grad_columns)
            elif step.product is not None:
                step.product(outputs, filters, grad_columns)
            elif products is not None and self.sampled:
                products.multiply(outputs, filters, out=grad_columns)
            if step.collect is not None and grad_pixels is not None:
                step.collect(grad_columns, *bins, grad_pixels)
            if step.differentiate is not None:
                step.differentiate(pixels, shifts, given, grad_columns, columns, go, ga)
            if products is not None and self.to_weight:
                grad_filters = products.grad_filters(grad_filters, outputs, columns)
        if grad_pixels is not None:
            grad_input = self.grad_input(grad_pixels, input)
        if grad_offset is not None:
            grad_offset = self.offset.finished(grad_offset, offset)
        if grad_mask is not None and mask is not None:
            grad_mask = self.modulation.finished(grad_mask, mask)
        if self.settle is not None and grad_filters is not None and weight is not None:
            grad_weight = torch.empty_like(weight)
            self.settle(grad_filters, grad, pixels, shifts, given, grad_weight)
        return grad_input, grad_offset, grad_mask, grad_weight, grad_bias


def chunked(images: int, positions: int, position_bytes: int) -> Iterator[Chunk]:
    """Whole images, of a batch half at most, if one fits into the scratch space; else equal parts
    of one.
    """
    at_once = max(1, SCRATCH_BYTES // position_bytes)
    if positions <= at_once:
        most = min(at_once // positions, triton.cdiv(images, 2))
        many = triton.cdiv(images, triton.cdiv(images, most))
        for image in range(0, images, many):
            yield Chunk(image, min(many, images - image), 0, positions)
    else:
        part = triton.cdiv(positions, triton.cdiv(positions, at_once))
        for image in range(images):
            for first in range(0, positions, part):
                yield Chunk(image, 1, first, min(part, positions - first))


def _cut(space: Tensor, shape: tuple[int, ...]) -> Tensor:
    """As much of contiguous `space` as [*shape] takes."""
    return space if space.shape == shape else space.view(-1)[: math.prod(shape)].view(shape)


class Products:
    """Products with a weight: of matrices or, with groups, of stacks of them."""

    def __init__(self, weight: Tensor, groups: int, parts: int) -> None:
        co, cg, kh, kw = weight.shape
        each, row = co // groups, kh * kw * cg
        one = groups == 1  # the way to the faster routines
        self.multiply = _summed(torch.mm if one else torch.bmm, weight)
        stacked = not one or parts > 1
        self.sum = _summed(torch.bmm if stacked else torch.mm, weight)
        self.add = _summed(torch.baddbmm if stacked else torch.addmm, weight)
        self.parts = parts
        self.stack, self.each, self.strides = (groups,)[one:], each, (each, co, 1)[one:]
        self.matrix = (groups, each, row)[one:], (each * row, row, 1)[one:]

    def outputs(self, grad: Tensor, first: int, rows: int) -> Tensor:
        """Rows of channels-last `grad`, [rows, Co] or [groups, rows, Co/groups]."""
        at = grad.storage_offset() + first * self.strides[-2]
        return grad.as_strided((*self.stack, rows, self.each), self.strides, at)

    def filters(self, weight: Tensor) -> Tensor:
        """Of a channels-last `weight`: [Co, K * C/groups] or [groups, Co/groups, K * C/groups]."""
        return weight.as_strided(*self.matrix)

    def grad_filters(self, so_far: Tensor | None, outputs: Tensor, columns: Tensor) -> Tensor:
        """[K * C/groups, Co/groups] for each group, or each part of the rows, or `so_far` with that
        added in place. This way round it is faster.
        """
        if self.parts > 1:
            columns, outputs = (x.unflatten(0, (self.parts, -1)) for x in (columns, outputs))
        factors = columns.mT, outputs
        if so_far is None:
            return self.sum(*factors)
        return self.add(so_far, *factors, out=so_far)


def _summed(multiply: Callable[..., Tensor], factor: Tensor) -> Callable[..., Tensor]:
    """`multiply` whose result has the dtype in which it sums."""
    sums = accumulator(factor.dtype)
    if factor.dtype == sums:
        return multiply
    if factor.is_cuda:
        return functools.partial(multiply, out_dtype=sums)
    return lambda *factors, **out: multiply(*(x.to(sums) for x in factors), **out)


class Bins:
    """The samples of a batch sorted by cell, 24 bytes each; stably in the deterministic mode, with
    32 bytes and what `torch.sort` takes.
    """

    def __init__(self, problem: Problem, like: Tensor, sort: bool) -> None:
        n, _, h, w = problem.size
        self.sums, self.device, self.sort = accumulator(like.dtype), like.device, sort
        self.samples = n * problem.groups * problem.constants["K"] * problem.positions
        self.cells = n * problem.groups * (h + 1) * (w + 1)
        self.wide = max(self.samples, self.cells) >= 2**31 - 2**16
        self.index = torch.int64 if self.wide else torch.int32
        where = (problem.positions, h, w, problem.width, *problem.offset.strides)
        choices = {**problem.constants, **problem.options}
        if self.wide:
            choices["ROW"] = tl.int64
        tile = {"B": 256, "num_warps": 4}
        blocks = triton.cdiv(self.samples, tile["B"])
        self.locate = Launch(
            locate, (blocks,), (self.samples, self.cells, *where, problem.groups),
            SORT=sort, **choices, **tile,
        )  # fmt: skip
        self.fill = Launch(
            fill, (blocks,), (self.samples, *where, *problem.modulation.strides, problem.groups),
            MODULATED=problem.modulated, SORT=sort, **choices, **tile,
        )  # fmt: skip

    def __call__(self, offset: Tensor, modulation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[cells + 1], where the samples of a cell begin; and cell by cell, their rows and factors.

        Those are [samples], (n * Q + q) * K + k, and [samples, 4], the coefficients of the corners
        times the modulation.
        """
        index, device = self.index, self.device
        keys = torch.empty(self.samples, dtype=index, device=device)
        counts = torch.zeros(self.cells + 1, dtype=index, device=device)
        self.locate(offset, counts, keys)
        if self.sort:
            sorted_keys, keys = torch.sort(keys, stable=True)
            places = torch.arange(self.cells + 1, dtype=index, device=device)
            bounds = torch.searchsorted(sorted_keys, places, out_int32=not self.wide)
        else:
            bounds = torch.cumsum(counts, 0, dtype=index)
        rows = torch.empty(self.samples, dtype=index, device=device)
        coefficients = torch.empty(self.samples, 4, dtype=self.sums, device=device)
        self.fill(offset, modulation, bounds, keys, rows, coefficients)
        return bounds, rows, coefficients


def _product(problem: Problem, chunk: Chunk, exact: str) -> Launch:
    sizes, k = problem.sizes, problem.constants["K"]
    row = k * sizes["CG"]
    rule, groups = (tuning.product_tile, sizes["COG"], row), sizes["C"] // sizes["CG"]
    tile = refined(problem.device, *rule, rows=chunk.rows, groups=groups)
    blocks = triton.cdiv(chunk.rows, tile["BM"]) * triton.cdiv(row, tile["BN"])
    return Launch(
        product, (blocks * groups,), (chunk.rows,),
        **{name: sizes[name] for name in ("C", "CO", "CG", "COG")}, K=k, PRECISION=exact,
        ACC=problem.options["ACC"], INTERPRET=INTERPRET, **tile,
    )  # fmt: skip


def _collect(
    problem: Problem, chunk: Chunk, input: Tensor, stored: torch.dtype, bins: Bins
) -> Launch:
    (_, _, h, w), sizes, k = problem.size, problem.sizes, problem.constants["K"]
    pixels = chunk.images * h * w
    rule = (tuning.collect_tile, sizes["CD"], stored.itemsize, pixels)
    tile = refined(input.device, *rule, taps=k, positions=problem.positions)
    return Launch(
        collect,
        (triton.cdiv(pixels, tile["BP"]) * triton.cdiv(sizes["CD"], tile["BC"]), problem.groups),
        ((chunk.image * problem.positions + chunk.first) * k, chunk.rows * k, pixels,
         chunk.image * h * w, h, w, problem.groups),
        C=sizes["C"], CG=sizes["CG"], CD=sizes["CD"], ADD=chunk.first > 0,
        ROW=tl.int64 if bins.wide else problem.options["ROW"], ACC=problem.options["ACC"], **tile,
    )  # fmt: skip


def _differentiate(
    problem: Problem, chunk: Chunk, to_offset: bool, to_mask: bool, to_weight: bool
) -> Launch:
    sizes, offset, modulation = problem.sizes, problem.offset, problem.modulation
    rule, about = (tuning.differentiate_tile, sizes["RUN"], problem.element), problem.about
    wanted = (to_offset, to_mask, to_weight)
    tile = refined(problem.device, *rule, rows=chunk.rows, wanted=wanted, **about)
    blocks = triton.cdiv(chunk.part, tile["BM"]) * chunk.images
    return Launch(
        differentiate, (blocks * problem.constants["K"], problem.groups),
        (chunk.first, chunk.part, chunk.image, chunk.rows, *problem.size[2:], problem.width,
         *offset.strides, *modulation.strides, *offset.grad_strides, *modulation.grad_strides),
        **{name: sizes[name] for name in ("C", "CG", "CD", "RUN")}, **problem.constants,
        MODULATED=problem.modulated, TO_OFFSET=to_offset, TO_MASK=to_mask, TO_WEIGHT=to_weight,
        **problem.options, **tile,
    )  # fmt: skip


def _settle(problem: Problem, weight: Tensor, parts: int) -> Launch:
    (n, _, h, w), sizes, constants = problem.size, problem.sizes, problem.constants
    rule = (tuning.settle_tile, sizes["RUN"], sizes["COG"])
    tile = refined(problem.device, *rule, parts=parts, **problem.about)
    runs = sizes["C"] // sizes["RUN"] * triton.cdiv(sizes["RUN"], tile["BC"])
    return Launch(
        settle, (runs, constants["K"], triton.cdiv(sizes["COG"], tile["BO"])),
        (parts, n * problem.positions, problem.positions, h, w, problem.width,
         *problem.offset.strides, *problem.modulation.strides,
         *torch.empty_like(weight, device="meta").stride()),
        **sizes, **constants, MODULATED=problem.modulated, **problem.options, **tile,
    )  # fmt: skip


def _unfold(problem: Problem, chunk: Chunk, grad: Tensor) -> Launch:
    """Bring the gradient of the columns [N, C, Ho*kh, Wo*kw] into rows, for a chunk's positions."""
    (_, c, lines, width), constants = grad.shape, problem.constants
    kh = constants["K"] // constants["KW"]
    top = chunk.first // problem.width  # of the output lines that the chunk touches
    touched = triton.cdiv(chunk.first + chunk.part, problem.width) - top
    rule = (tuning.columns_tile, width, c, grad.element_size())
    tile = refined(problem.device, *rule, lines=chunk.images * touched * kh, **problem.about)
    align = alignment(width)
    blocks = chunk.images * touched * kh * triton.cdiv(width, tile["BJ"])
    wide = grad[:1].numel() >= 2**31 - 2**16
    return Launch(
        forward.unfold, (blocks, triton.cdiv(c, tile["BC"])),
        (lines, width // align, problem.width,
         chunk.first, chunk.part, chunk.image, top * kh, touched * kh),
        C=c, K=constants["K"], KW=constants["KW"], W_ALIGN=align,
        ROW=tl.int64 if wide else tl.int32, **tile,
    )  # fmt: skip
