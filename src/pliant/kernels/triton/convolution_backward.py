"""Gradients of the deformable convolution, without atomic sums of floats.

The gradient of the columns exists for some images at a time, [groups, positions, taps, channels]:

`locate`, `fill`   sort the samples by the cell of four pixels in which they lie
`collect`          the gradient of the input: a pixel sums over the samples in four cells around it
`differentiate`    the gradients of offset and mask, and the columns, for the gradient of the weight

The products with the weight and with the columns are PyTorch's own.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pliant.sampling.problem import accumulator

from . import INTERPRET, convolution as forward, taps
from .convolution import Geometry, Pair, blend, load_corners, sides, tap
from .launch import _device_of, start

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
    cell = (n * G + g) * ((H + 1) * (W + 1)) + row + W + 1 + y
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
    g = tl.program_id(1)
    c = tl.program_id(2) * BC + tl.arange(0, BC)
    counts = c < CD
    c += g * CD
    columns += (c // CG).to(ROW) * (count.to(ROW) * CG) + c % CG
    begin = tl.program_id(0).to(ROW) * BP
    for p in range(begin, tl.minimum(begin + BP, pixels)):
        pixel = start + p
        n = pixel // (H * W)
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
            come = tl.load(come, mask=sides(live, counts, CD % BC == 0), other=0).to(ACC)
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
    k = tl.program_id(1)
    g = tl.program_id(2)
    local = tl.program_id(0) % tl.cdiv(part, BM) * BM + tl.arange(0, BM)
    live = local < part
    local = tl.minimum(local, part - 1)
    q = first + local
    item = tl.program_id(0) // tl.cdiv(part, BM)
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
        both = sides(live, counts, RUN % BC == 0)
        at = (group.to(ROW) * rows * (K * CG) + line * CG)[:, None] + (c - group * CG)[None, :]
        v00, v01, v10, v11 = load_corners(
            input + n * H * W * C, row, c, m00, m01, m10, m11, counts, W, C, RUN % BC == 0
        )
        if TO_OFFSET or TO_MASK:
            come = tl.load(grad_columns + at, mask=both, other=0).to(ACC)
            s00 += tl.sum(come * v00.to(ACC), 1)
            s01 += tl.sum(come * v01.to(ACC), 1)
            s10 += tl.sum(come * v10.to(ACC), 1)
            s11 += tl.sum(come * v11.to(ACC), 1)
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


class Bins(NamedTuple):
    """The samples, cell by cell."""

    bounds: Tensor  # [cells + 1], where the samples of a cell begin
    rows: Tensor  # [samples], (n * Q + q) * K + k
    coefficients: Tensor  # [samples, 4], of the corners, times the modulation


class Problem(NamedTuple):
    """The operands as the kernels take them."""

    pixels: Tensor  # [N, C, H, W], channels last
    offset: Tensor  # [N, 2*dg*K, Q]
    mask: Tensor | None  # [N, dg*K, Q]
    width: int  # Wo
    constants: dict[str, int]
    sizes: dict[str, int]
    options: dict[str, object]

    @property
    def modulation(self) -> Tensor:
        return self.offset if self.mask is None else self.mask

    @property
    def groups(self) -> int:
        return self.sizes["C"] // self.sizes["CD"]


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
    co, cg, kh, kw = weight.shape
    geometry = Geometry((kh, kw), stride, padding, dilation)
    grad_bias = None
    with _device_of(input):
        if input.numel() and grad.numel():
            grad = forward.channels_last(grad.to(input.dtype))
        if needs[4] and bias is not None:  # in two steps, the first of which has many sums to share
            grad_bias = grad.sum(3, dtype=accumulator(input.dtype)).sum((0, 2)).to(bias.dtype)
        if not (input.numel() and grad.numel() and any(needs[:4])):
            return *_zeros((input, offset, mask, weight), needs[:4]), grad_bias
        problem = _problem(input, offset, mask, co, cg, geometry)
        *grads, by_group = _gradients(problem, input, offset, mask, grad, weight, needs[:4])
        grad_weight = None
        if by_group is not None:
            grad_weight = torch.empty_like(weight)
            grad_weight.copy_(by_group.view(co, kh, kw, cg).permute(0, 3, 1, 2))
    return *grads, grad_weight, grad_bias


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
    geometry = Geometry(kernel, stride, padding, dilation)
    with _device_of(input):
        problem = _problem(input, offset, mask, 0, input.shape[1], geometry)
        grad = grad.contiguous()
        return _gradients(problem, input, offset, mask, grad, None, (*needs, False))[:3]


def _zeros(operands: Grads, needs: Sequence[bool]) -> Grads:
    given = zip(operands, needs, strict=True)
    return tuple(torch.zeros_like(x) if need and x is not None else None for x, need in given)


def _problem(
    input: Tensor, offset: Tensor, mask: Tensor | None, outputs: int, cg: int, geometry: Geometry
) -> Problem:
    constants = geometry.constants()
    return Problem(
        forward.channels_last(input),
        offset.flatten(2),
        None if mask is None else mask.flatten(2),
        offset.shape[3],
        constants,
        forward.channel_sizes(input.shape[1], outputs, cg, offset.shape[1] // (2 * constants["K"])),
        forward.options(input, offset, mask),
    )


def _gradients(
    problem: Problem,
    input: Tensor,
    offset: Tensor,
    mask: Tensor | None,
    grad: Tensor,
    weight: Tensor | None,
    needs: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of input, offset and mask, and of the weight as [groups, Co/groups, K * C/groups].

    `grad` is that of the output, channels last, or, without a weight, of the columns.
    """
    to_input, to_offset, to_mask, to_weight = needs
    n, c = input.shape[:2]
    q, cg, k = problem.offset.shape[2], problem.sizes["CG"], problem.constants["K"]
    sums = accumulator(input.dtype)
    # In float32 the columns take the place of their gradient. In half precision the gradient is not
    # rounded, since that of an offset in float32 needs all of it.
    stored = input.dtype if weight is None else sums
    apart = to_weight and stored != input.dtype
    sampled = to_input or to_offset or (to_mask and mask is not None)
    chunks = list(chunked(n, q, k * c * (stored.itemsize + apart * input.element_size())))
    space = chunks[0].rows * k * c
    grad_scratch = input.new_empty(space if sampled or not apart else 0, dtype=stored)
    # The interpreter rounds badly to bfloat16.
    scratch = input.new_empty(space, dtype=sums if INTERPRET else None) if apart else grad_scratch
    grad_offset = torch.empty_like(offset) if to_offset else None
    grad_mask = torch.empty_like(mask) if to_mask and mask is not None else None
    flat_offset, flat_mask = (None if x is None else x.flatten(2) for x in (grad_offset, grad_mask))
    grad_pixels = bins = filters = by_group = None
    if to_input:
        split = chunks[0].part < q  # then sums go over several chunks
        grad_pixels = torch.empty_like(problem.pixels, dtype=sums if split else None)
        bins = _bins(problem)
    if weight is not None:
        filters = forward.channels_last(weight).permute(0, 2, 3, 1).reshape(c // cg, -1, k * cg)
    for chunk in chunks:
        shape, here = (c // cg, chunk.rows, k * cg), chunk.rows * k * c
        grad_columns, columns = (
            x[:here].view(shape) if x.numel() else x for x in (grad_scratch, scratch)
        )
        outputs = None if weight is None else _outputs(grad, chunk, q, c // cg)
        if sampled and outputs is not None and filters is not None:
            _multiply(outputs, filters, grad_columns)
        elif sampled:
            _unfold(problem, chunk, grad, grad_columns)
        if bins is not None and grad_pixels is not None:
            _collect(problem, chunk, bins, grad_columns, grad_pixels)
        if to_weight or flat_offset is not None or flat_mask is not None:
            _differentiate(problem, chunk, grad_columns, columns, flat_offset, flat_mask, to_weight)
        if to_weight and outputs is not None:
            by_group = _add_product(by_group, outputs.transpose(1, 2), columns, sums)
    for flat, whole in ((flat_offset, grad_offset), (flat_mask, grad_mask)):
        if flat is not None and whole is not None and flat.data_ptr() != whole.data_ptr():
            whole.copy_(flat.view(whole.shape))  # its strides do not allow a flat view
    grad_input = None if grad_pixels is None else _as_input(grad_pixels, input)
    return grad_input, grad_offset, grad_mask, by_group


def chunked(images: int, positions: int, position_bytes: int) -> Iterator[Chunk]:
    """Whole images if one of them fits into the scratch space, else equal parts of one."""
    at_once = max(1, SCRATCH_BYTES // position_bytes)
    if positions <= at_once:
        many = triton.cdiv(images, triton.cdiv(images, at_once // positions))
        for image in range(0, images, many):
            yield Chunk(image, min(many, images - image), 0, positions)
    else:
        part = triton.cdiv(positions, triton.cdiv(positions, at_once))
        for image in range(images):
            for first in range(0, positions, part):
                yield Chunk(image, 1, first, min(part, positions - first))


def _bins(problem: Problem) -> Bins:
    """Sort the samples of the batch by cell, stably in the deterministic mode: 24 bytes each."""
    (n, _, h, w), q, device = problem.pixels.shape, problem.offset.shape[2], problem.offset.device
    samples = n * problem.groups * problem.constants["K"] * q
    cells = n * problem.groups * (h + 1) * (w + 1)
    wide = max(samples, cells) >= 2**31 - 2**16
    index = torch.int64 if wide else torch.int32
    choices = {**problem.options, **({"ROW": tl.int64} if wide else {})}
    sort = torch.are_deterministic_algorithms_enabled()
    keys = torch.empty(samples, dtype=index, device=device)
    counts = torch.zeros(cells + 1, dtype=index, device=device)
    where = (q, h, w, problem.width, *problem.offset.stride())
    tile = {"B": 256, "num_warps": 4}
    blocks = triton.cdiv(samples, tile["B"])
    start(
        locate, (blocks,), (problem.offset, counts, keys), (samples, cells, *where, problem.groups),
        SORT=sort, **problem.constants, **choices, **tile,
    )  # fmt: skip
    if sort:
        sorted_keys, keys = torch.sort(keys, stable=True)
        places = torch.arange(cells + 1, dtype=index, device=device)
        bounds = torch.searchsorted(sorted_keys, places, out_int32=not wide)
    else:
        bounds = torch.cumsum(counts, 0, dtype=index)
    rows = torch.empty(samples, dtype=index, device=device)
    acc = accumulator(problem.pixels.dtype)
    coefficients = torch.empty(samples, 4, dtype=acc, device=device)
    start(
        fill, (blocks,),
        (problem.offset, problem.modulation, bounds, keys, rows, coefficients),
        (samples, *where, *problem.modulation.stride(), problem.groups),
        MODULATED=problem.mask is not None, SORT=sort, **problem.constants, **choices, **tile,
    )  # fmt: skip
    return Bins(bounds, rows, coefficients)


def _collect(
    problem: Problem, chunk: Chunk, bins: Bins, columns: Tensor, grad_pixels: Tensor
) -> None:
    h, w = grad_pixels.shape[2:]
    sizes, k, q = problem.sizes, problem.constants["K"], problem.offset.shape[2]
    pixels = chunk.images * h * w
    tile = forward.collect_tile(sizes["CD"], columns.element_size())
    wide = bins.rows.dtype == torch.int64
    blocks = (triton.cdiv(pixels, tile["BP"]), problem.groups, triton.cdiv(sizes["CD"], tile["BC"]))
    start(
        collect, blocks, (columns, bins.bounds, bins.rows, bins.coefficients, grad_pixels),
        ((chunk.image * q + chunk.first) * k, chunk.rows * k, pixels, chunk.image * h * w,
         h, w, problem.groups),
        C=sizes["C"], CG=sizes["CG"], CD=sizes["CD"], ADD=chunk.first > 0,
        ROW=tl.int64 if wide else problem.options["ROW"], ACC=problem.options["ACC"], **tile,
    )  # fmt: skip


def _differentiate(
    problem: Problem,
    chunk: Chunk,
    grad_columns: Tensor,
    columns: Tensor,
    grad_offset: Tensor | None,
    grad_mask: Tensor | None,
    to_weight: bool,
) -> None:
    sizes, pixels = problem.sizes, problem.pixels
    tile = forward.differentiate_tile(sizes["RUN"], pixels.element_size())
    go = problem.offset if grad_offset is None else grad_offset
    ga = problem.modulation if grad_mask is None else grad_mask
    blocks = triton.cdiv(chunk.part, tile["BM"]) * chunk.images
    start(
        differentiate, (blocks, problem.constants["K"], problem.groups),
        (pixels, problem.offset, problem.modulation, grad_columns, columns, go, ga),
        (chunk.first, chunk.part, chunk.image, chunk.rows, *pixels.shape[2:], problem.width,
         *problem.offset.stride(), *problem.modulation.stride(), *go.stride(), *ga.stride()),
        **{name: sizes[name] for name in ("C", "CG", "CD", "RUN")}, **problem.constants,
        MODULATED=problem.mask is not None, TO_OFFSET=grad_offset is not None,
        TO_MASK=grad_mask is not None, TO_WEIGHT=to_weight, **problem.options, **tile,
    )  # fmt: skip


def _unfold(problem: Problem, chunk: Chunk, grad: Tensor, columns: Tensor) -> None:
    """Bring the gradient of the columns [N, C, Ho*kh, Wo*kw] into rows, for a chunk's positions."""
    (_, c, lines, width), constants = grad.shape, problem.constants
    kh = constants["K"] // constants["KW"]
    top = chunk.first // problem.width  # of the output lines that the chunk touches
    touched = triton.cdiv(chunk.first + chunk.part, problem.width) - top
    tile = forward.columns_tile(width, c, grad.element_size())
    align = forward.alignment(width)
    blocks = chunk.images * touched * kh * triton.cdiv(width, tile["BJ"])
    wide = grad[:1].numel() >= 2**31 - 2**16
    start(
        forward.unfold, (blocks, triton.cdiv(c, tile["BC"])), (grad, columns),
        (lines, width // align, problem.width,
         chunk.first, chunk.part, chunk.image, top * kh, touched * kh),
        C=c, K=constants["K"], KW=constants["KW"], W_ALIGN=align,
        ROW=tl.int64 if wide else tl.int32, **tile,
    )  # fmt: skip


def _outputs(grad: Tensor, chunk: Chunk, positions: int, groups: int) -> Tensor:
    """The gradients of a chunk's outputs, [groups, rows, Co/groups]."""
    first = chunk.image * positions + chunk.first
    rows = grad.permute(0, 2, 3, 1).reshape(-1, grad.shape[1])[first : first + chunk.rows]
    return rows.view(chunk.rows, groups, -1).transpose(0, 1)


def _multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Write a @ b to `out`, for every group, in its dtype."""
    a, b, more = _factors(a, b, out.dtype)
    if len(a) == 1:  # the way to the faster routines
        torch.mm(a[0], b[0], out=out[0], **more)
    else:
        torch.bmm(a, b, out=out, **more)


def _add_product(total: Tensor | None, a: Tensor, b: Tensor, sums: torch.dtype) -> Tensor:
    """`total` + a @ b, for every group, in `sums`."""
    product: Tensor
    a, b, more = _factors(a, b, sums)
    if len(a) == 1:
        one = (a[0], b[0]) if total is None else (total[0], a[0], b[0])
        product = (torch.mm if total is None else torch.addmm)(*one, **more)
        return product[None]
    product = torch.bmm(a, b, **more) if total is None else torch.baddbmm(total, a, b, **more)
    return product


def _factors(a: Tensor, b: Tensor, sums: torch.dtype) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Factors whose product comes out in `sums`, and the argument that brings it about."""
    if a.dtype == sums or not a.is_cuda:
        return a.to(sums), b.to(sums), {}
    return a, b, {"out_dtype": sums}


def _as_input(pixels: Tensor, input: Tensor) -> Tensor:
    """Channels-last `pixels` in the layout and dtype of `input`."""
    if input.is_contiguous(memory_format=torch.channels_last):
        return pixels.to(input.dtype)
    out = torch.empty_like(input)
    if not out.is_contiguous():
        return out.copy_(pixels)
    n, c, h, w = input.shape
    forward.transposed(pixels, out, n, h * w, c)
    return out
