"""The oracle: the computation and its adjoint in plain PyTorch, on any device, in any float dtype,
differentiable.

Nothing here is fast; everything is exact. A sample that does not count is replaced by zero before
any product, in every operand, so that no NaN or Inf of it can reach a result or a gradient of any
order.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .problem import Policy, accumulator, position_dtype

Needs = Sequence[bool]
Pair = Sequence[int]


class Tap(NamedTuple):
    """One pixel that a sample reads, for all samples of a map."""

    row: Tensor  # [..., P] int64, its row in storage, 0 where it is not read
    inside: Tensor  # [..., P] bool, whether it is read
    coefficient: Tensor  # [..., P]
    d_x: Tensor  # [..., P] derivative of the coefficient by the pixel position
    d_y: Tensor


def taps(
    loc: Tensor, shape: Tensor, start: Tensor, stored: int, policy: Policy, acc: torch.dtype
) -> list[Tap]:
    """The pixels that positions `loc` [..., P, 2] read in a map of `shape` from row `start` on."""
    height, width = (_sane(s) for s in shape.to(torch.int64).unbind(-1))
    start = start.to(torch.int64).clamp(-(2**62), 2**62)
    x, y = loc.to(position_dtype(loc.dtype)).unbind(-1)

    def row(xi: Tensor, yi: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        index = start + yi * width + xi
        inside = (
            counts
            & (xi >= 0)
            & (xi < width)
            & (yi >= 0)
            & (yi < height)
            & (index >= 0)
            & (index < stored)
        )
        return torch.where(inside, index, 0), inside

    if policy.interpolation == "nearest":
        counts = ~(x.isnan() | y.isnan()) & (height > 0) & (width > 0)
        xi = torch.where(counts, x.trunc().clamp(min=0).minimum((width - 1).to(x.dtype)), 0).to(
            torch.int64
        )
        yi = torch.where(counts, y.trunc().clamp(min=0).minimum((height - 1).to(y.dtype)), 0).to(
            torch.int64
        )
        index, inside = row(xi.minimum(width - 1), yi.minimum(height - 1), counts)
        one = torch.ones_like(x, dtype=acc)
        return [Tap(index, inside, one, torch.zeros_like(one), torch.zeros_like(one))]

    px, py = (x * width - 0.5, y * height - 0.5) if policy.position == "unit" else (x, y)
    if policy.outside == "skip":
        counts = (x > 0) & (x < 1) & (y > 0) & (y < 1)
    else:
        counts = (px > -1) & (px < width) & (py > -1) & (py < height)
    px, py = torch.where(counts, px, 0), torch.where(counts, py, 0)
    x0, y0 = px.floor(), py.floor()
    fx, fy = (px - x0).to(acc), (py - y0).to(acc)
    x0, y0 = x0.to(torch.int64), y0.to(torch.int64)
    return [
        Tap(*row(x0, y0, counts), (1 - fx) * (1 - fy), fy - 1, fx - 1),
        Tap(*row(x0 + 1, y0, counts), fx * (1 - fy), 1 - fy, -fx),
        Tap(*row(x0, y0 + 1, counts), (1 - fx) * fy, -fy, 1 - fx),
        Tap(*row(x0 + 1, y0 + 1, counts), fx * fy, fy, fx),
    ]


def _sane(size: Tensor) -> Tensor:
    """A size that no map can have counts as none, so that row arithmetic cannot overflow."""
    return torch.where((size < 0) | (size >= 2**31), 0, size)


class _Rows:
    """value [N, S, G, K, D] as a table of rows [K, D], read and added to at [N, Q, G, P]."""

    def __init__(self, value: Tensor, acc: torch.dtype) -> None:
        self.shape, self.acc, self.device = value.shape, acc, value.device
        n, s, g, k, d = value.shape
        self.table = value.reshape(n * s * g, k, d)

    def places(self, tap: Tap) -> Tensor:
        n, s, g, _, _ = self.shape
        batch = torch.arange(n, device=self.device).view(n, 1, 1, 1)
        group = torch.arange(g, device=self.device).view(1, 1, g, 1)
        return (batch * s + tap.row) * g + group

    def read(self, tap: Tap) -> Tensor:
        """[N, Q, G, P, K, D], zero where the tap is outside."""
        rows = self.table[self.places(tap)].to(self.acc)
        return torch.where(tap.inside[..., None, None], rows, 0)

    def add(self, total: Tensor, tap: Tap, rows: Tensor) -> Tensor:
        """`total` (a table) plus `rows` [N, Q, G, P, K, D] at the tap's places."""
        return total.index_add(0, self.places(tap).flatten(), rows.flatten(0, 3))


def _counts(pixels: list[Tap]) -> Tensor:
    return torch.stack([t.inside for t in pixels]).any(0)


def _maps(
    value: Tensor, shapes: Tensor, starts: Tensor, loc: Tensor, policy: Policy
) -> Iterator[tuple[int, int, list[Tap]]]:
    shapes, starts = shapes.to(value.device), starts.to(value.device)
    if value.shape[1] == 0:
        return  # no stored pixel: no sample counts
    for v in range(shapes.shape[0]):
        for r in range(shapes.shape[1]):
            acc = accumulator(value.dtype)
            yield (
                v,
                r,
                taps(loc[:, :, :, v], shapes[v, r], starts[v, r], value.shape[1], policy, acc),
            )


def sample_sum(
    value: Tensor, shapes: Tensor, starts: Tensor, loc: Tensor, weight: Tensor, policy: Policy
) -> Tensor:
    """out [N, Q, G, K, D] of problem.py."""
    acc = accumulator(value.dtype)
    rows = _Rows(value, acc)
    n, _, g, k, d = value.shape
    out = torch.zeros(n, loc.shape[1], g, k, d, dtype=acc, device=value.device)
    for v, r, pixels in _maps(value, shapes, starts, loc, policy):
        sample = sum(
            t.coefficient[..., None, None] * rows.read(t) for t in pixels
        )  # [N, Q, G, P, K, D]
        counted = torch.where(_counts(pixels)[..., None], weight[:, :, :, v, :, r].to(acc), 0)
        out = out + (counted[..., None] * sample).sum(3)
    return out.to(value.dtype)


def sample_sum_backward(
    grad: Tensor,
    value: Tensor,
    shapes: Tensor,
    starts: Tensor,
    loc: Tensor,
    weight: Tensor,
    policy: Policy,
    needs: Needs,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of value, loc and weight for the gradient `grad` [N, Q, G, K, D] of the output."""
    acc = accumulator(value.dtype)
    rows = _Rows(value, acc)
    grad = grad.to(acc)[:, :, :, None]  # [N, Q, G, 1, K, D]
    grad_table = torch.zeros_like(rows.table, dtype=acc)
    n, q, g, views, p, _ = loc.shape
    grad_loc = [torch.zeros(n, q, g, p, 2, dtype=acc, device=loc.device) for _ in range(views)]
    by_map: dict[tuple[int, int], Tensor] = {}
    for v, r, pixels in _maps(value, shapes, starts, loc, policy):
        w = weight[:, :, :, v, :, r].to(acc)  # [N, Q, G, P, K]
        grad_w, grad_x, grad_y = (torch.zeros_like(w) for _ in range(3))
        for t in pixels:
            inside = t.inside[..., None]
            here = torch.where(inside[..., None], grad, 0)  # [N, Q, G, P, K, D]
            counted = torch.where(inside, w, 0)
            if needs[0]:
                grad_table = rows.add(
                    grad_table, t, (counted * t.coefficient[..., None])[..., None] * here
                )
            if needs[1] or needs[2]:
                dot = (here * rows.read(t)).sum(-1)  # [N, Q, G, P, K]
                grad_w = grad_w + t.coefficient[..., None] * dot
                grad_x = grad_x + counted * t.d_x[..., None] * dot
                grad_y = grad_y + counted * t.d_y[..., None] * dot
        by_map[v, r] = grad_w
        scale = shapes[v, r].flip(0).to(loc.device, acc) if policy.position == "unit" else 1
        grad_loc[v] = grad_loc[v] + torch.stack([grad_x.sum(-1), grad_y.sum(-1)], -1) * scale
    return (
        grad_table.view(value.shape).to(value.dtype) if needs[0] else None,
        _stack(grad_loc, 3, loc) if needs[1] else None,
        _grad_weight(by_map, weight, acc) if needs[2] else None,
    )


def _stack(parts: list[Tensor], dim: int, like: Tensor) -> Tensor:
    return torch.stack(parts, dim).to(like.dtype) if parts else torch.zeros_like(like)


def _grad_weight(by_map: dict[tuple[int, int], Tensor], weight: Tensor, acc: torch.dtype) -> Tensor:
    if not by_map:
        return torch.zeros_like(weight)
    views, scales = weight.shape[3], weight.shape[5]
    of_view = [torch.stack([by_map[v, r] for r in range(scales)], 4) for v in range(views)]
    return torch.stack(of_view, 3).to(weight.dtype)


# Deformable convolution: the same taps, each point kept, then a matrix product.

PIXEL_ZERO = Policy("pixel", "bilinear", "zero")


class _Window(NamedTuple):
    """A convolution's samples in the canonical form: one view, one scale, P = kh * kw points."""

    value: Tensor  # [N, H*W, dg, 1, C/dg]
    loc: Tensor  # [N, Ho*Wo, dg, P, 2]
    mask: Tensor  # [N, Ho*Wo, dg, P, 1]
    pixels: list[Tap]
    rows: _Rows


def positions(offset: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair) -> Tensor:
    """Positions (x, y) [N, Ho*Wo, dg, kh*kw, 2] of offsets (y, x) [N, 2*dg*kh*kw, Ho, Wo]."""
    n, channels, ho, wo = offset.shape
    (kh, kw), device = kernel, offset.device
    points = kh * kw
    moved = offset.to(position_dtype(offset.dtype)).reshape(
        n, channels // max(2 * points, 1), points, 2, ho, wo
    )

    def axis(out: int, taps_: int, step: int, pad: int, gap: int) -> Tensor:  # [out, taps]
        return (
            torch.arange(out, device=device)[:, None] * step
            - pad
            + torch.arange(taps_, device=device) * gap
        )

    y = axis(ho, kh, stride[0], padding[0], dilation[0]).view(ho, 1, kh, 1).expand(ho, wo, kh, kw)
    x = axis(wo, kw, stride[1], padding[1], dilation[1]).view(1, wo, 1, kw).expand(ho, wo, kh, kw)
    y = y.reshape(ho, wo, points).permute(2, 0, 1) + moved[:, :, :, 0]  # [N, dg, P, Ho, Wo]
    x = x.reshape(ho, wo, points).permute(2, 0, 1) + moved[:, :, :, 1]
    return torch.stack([x, y], -1).permute(0, 3, 4, 1, 2, 5).flatten(1, 2)


def _window(
    input: Tensor,
    offset: Tensor,
    mask: Tensor | None,
    kernel: Pair,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
) -> _Window:
    n, c, h, w = input.shape
    points, acc = kernel[0] * kernel[1], accumulator(input.dtype)
    groups = offset.shape[1] // (2 * points)
    value = input.reshape(n, groups, 1, c // groups, h * w).permute(0, 4, 1, 2, 3)
    loc = positions(offset, kernel, stride, padding, dilation)
    if mask is None:
        modulation = torch.ones(*loc.shape[:-1], 1, dtype=acc, device=loc.device)
    else:
        modulation = (
            mask.to(acc)
            .reshape(n, groups, points, mask.shape[2] * mask.shape[3])
            .permute(0, 3, 1, 2)[..., None]
        )
    shape = torch.stack([torch.full((), size, device=input.device) for size in (h, w)])
    pixels = taps(loc, shape, torch.zeros_like(shape[0]), h * w, PIXEL_ZERO, acc) if h * w else []
    return _Window(value, loc, modulation, pixels, _Rows(value, acc))


def _points(window: _Window) -> Tensor:
    """The mask-weighted samples [N, Q, dg, P, 1, C/dg] in the accumulator's dtype."""
    n, q, g, p, _ = window.loc.shape
    sample = torch.zeros(
        n, q, g, p, 1, window.value.shape[-1], dtype=window.rows.acc, device=window.loc.device
    )
    if not window.pixels:
        return sample
    for t in window.pixels:
        sample = sample + t.coefficient[..., None, None] * window.rows.read(t)
    return torch.where(_counts(window.pixels)[..., None], window.mask, 0)[..., None] * sample


def _points_backward(
    grad: Tensor, window: _Window, input: Tensor, offset: Tensor, mask: Tensor | None, needs: Needs
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of input, offset and mask for that of the samples, [N, Q, dg, P, 1, C/dg]."""
    rows, (n, c, h, w) = window.rows, input.shape
    table = torch.zeros_like(rows.table, dtype=rows.acc)
    grad_mask, grad_x, grad_y = (torch.zeros_like(window.mask) for _ in range(3))
    for t in window.pixels:
        inside = t.inside[..., None]
        here = torch.where(inside[..., None], grad, 0)
        counted = torch.where(inside, window.mask, 0)
        if needs[0]:
            table = rows.add(table, t, (counted * t.coefficient[..., None])[..., None] * here)
        if needs[1] or needs[2]:
            dot = (here * rows.read(t)).sum(-1)
            grad_mask = grad_mask + t.coefficient[..., None] * dot
            grad_x = grad_x + counted * t.d_x[..., None] * dot
            grad_y = grad_y + counted * t.d_y[..., None] * dot
    grad_input = table.view(n, h * w, c).transpose(1, 2).reshape(input.shape)
    grad_offset = torch.cat([grad_y, grad_x], -1).permute(0, 2, 3, 4, 1).reshape(offset.shape)
    return (
        grad_input.to(input.dtype) if needs[0] else None,
        grad_offset.to(offset.dtype) if needs[1] else None,
        grad_mask[..., 0].permute(0, 2, 3, 1).reshape(mask.shape).to(mask.dtype)
        if needs[2] and mask is not None
        else None,
    )


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
    points = _points(_window(input, offset, mask, kernel, stride, padding, dilation))
    n, _, g, _, _, d = points.shape
    (kh, kw), (ho, wo) = kernel, offset.shape[2:]
    columns = points.view(n, ho, wo, g, kh, kw, d).permute(0, 3, 6, 1, 4, 2, 5)
    return columns.reshape(n, g * d, ho * kh, wo * kw).to(input.dtype)


def deform_columns_backward(
    grad: Tensor,
    input: Tensor,
    offset: Tensor,
    mask: Tensor | None,
    kernel: Pair,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    needs: Needs,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    window = _window(input, offset, mask, kernel, stride, padding, dilation)
    n, q, g, p, _ = window.loc.shape
    (kh, kw), (ho, wo) = kernel, offset.shape[2:]
    d = window.value.shape[-1]
    points = grad.to(window.rows.acc).reshape(n, g, d, ho, kh, wo, kw).permute(0, 3, 5, 1, 4, 6, 2)
    points = points.reshape(n, q, g, p, 1, d)
    return _points_backward(points, window, input, offset, mask, needs)


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
    """The columns multiplied with `weight` [Co, C/groups, kh, kw], rounded once."""
    columns, filters = _products(
        _points(_window(input, offset, mask, weight.shape[2:], stride, padding, dilation)), weight
    )
    out = torch.einsum("nqgi,goi->ngoq", columns, filters).reshape(
        len(input), len(weight), *offset.shape[2:]
    )
    if bias is not None:
        out = out + bias.to(out.dtype).view(1, -1, 1, 1)
    return out.to(input.dtype)


def _products(points: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Samples [N, Q, dg, P, 1, C/dg] and weights as operands of the matrix product.

    They are [N, Q, groups, C/groups*P] and [groups, Co/groups, C/groups*P].
    """
    n, q, g, p, _, d = points.shape
    co, inner = weight.shape[:2]
    groups = g * d // inner if inner else 1
    columns = points.permute(0, 1, 2, 5, 3, 4).reshape(n, q, groups, inner * p)
    return columns, weight.to(points.dtype).reshape(groups, co // max(groups, 1), inner * p)


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
    needs: Needs,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of input, offset, mask, weight and bias."""
    window = _window(input, offset, mask, weight.shape[2:], stride, padding, dilation)
    points = _points(window)
    _, filters = _products(points, weight)
    n, q, g, p, _, d = points.shape
    groups = filters.shape[0]
    by_group = grad.to(points.dtype).reshape(
        n, groups, len(weight) // max(groups, 1), q
    )  # [N, groups, Co/groups, Q]
    grad_columns = torch.einsum("ngoq,goi->nqgi", by_group, filters)
    grad_points = grad_columns.reshape(n, q, g, d, p, 1).permute(0, 1, 2, 4, 5, 3)
    sampled = _points_backward(grad_points, window, input, offset, mask, needs)
    return (
        *sampled,
        _grad_filters(by_group, points, window, weight).to(weight.dtype) if needs[3] else None,
        grad.to(points.dtype).sum((0, 2, 3)).to(weight.dtype) if needs[4] else None,
    )


def _grad_filters(by_group: Tensor, points: Tensor, window: _Window, weight: Tensor) -> Tensor:
    """Tap by tap, so that the gradient can be left out where a sample does not count.

    `by_group` is [N, groups, Co/groups, Q], a run of channels has one group and one offset group.
    """
    n, q, g, p, _, d = points.shape
    inner = weight.shape[1]
    if not window.pixels or not inner:
        return torch.zeros_like(weight, dtype=points.dtype)
    run = math.gcd(inner, d)
    come = by_group.permute(0, 3, 1, 2).repeat_interleave(
        inner // run, 2
    )  # [N, Q, runs, Co/groups]
    counts = _counts(window.pixels).repeat_interleave(d // run, 2)  # [N, Q, runs, P]
    samples = points.permute(0, 1, 2, 5, 3, 4).reshape(n, q, g * d // run, run, p)
    by_tap: list[Tensor] = [
        torch.einsum("nqro,nqri->ori", torch.where(counts[..., k, None], come, 0), samples[..., k])
        for k in range(p)
    ]  # [Co/groups, runs, run] each
    grad: Tensor = torch.stack(by_tap, -1).unflatten(1, (-1, inner // run)).transpose(0, 1)
    return grad.reshape(weight.shape)
