"""The operators as scalar loops: the first of three independent writings, made to be read.

Every function takes the arguments of its public namesake and returns the result in float64.
Given `grad_output` it returns `(result, gradients)`, the gradients of the differentiable arguments
by name. With `absolute=True` every term enters by its absolute value, plus what one rounding of
the position can change in it: the magnitude that rounding errors of the true sum scale with.

Only the positions have a precision of their own: they are computed as float32 unless they are
float64, exactly as the operators must; all else is Python's float.
"""

import ctypes
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

Ints = Tensor | Sequence[Any]
Pair = int | Sequence[int]
Gradients = dict[str, Tensor]

# `absolute` adds the effect of one rounding of a position divided by this number, so that a
# tolerance of ROUNDINGS * eps * magnitude means: that many roundings of every term, one of the
# position.
ROUNDINGS = 16


class Tap(NamedTuple):
    """One corner that lies in the map."""

    row: int  # y * width + x
    coefficient: float
    along_x: float  # derivative of the coefficient by px
    along_y: float


def multi_scale_deformable_attn(
    value: Tensor,
    spatial_shapes: Ints,
    level_start_index: Ints | None,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    grad_output: Tensor | None = None,
    *,
    absolute: bool = False,
) -> Any:
    batch, stored, heads, channels = value.shape
    queries, levels, points = sampling_locations.shape[1], *sampling_locations.shape[3:5]
    shapes, starts = _maps(spatial_shapes, level_start_index)
    rounded = _precision(sampling_locations)
    v, loc, w, g = _lists(absolute, value, sampling_locations, attention_weights, grad_output)
    out = _zeros(batch, queries, heads * channels)
    grad_v, grad_loc, grad_w = (
        _zeros(*t.shape) for t in (value, sampling_locations, attention_weights)
    )

    for b, q, h, level, p in _every(batch, queries, heads, levels, points):
        height, width = shapes[level]
        px = rounded(rounded(loc[b][q][h][level][p][0] * width) - 0.5)
        py = rounded(rounded(loc[b][q][h][level][p][1] * height) - 0.5)
        if not (-1 < px < width and -1 < py < height):
            continue
        weight = w[b][q][h][level][p]
        taps = list(_bilinear(px, py, height, width, starts[level], stored, absolute))
        for d in range(channels if taps else 0):
            sample = sum(tap.coefficient * v[b][tap.row][h][d] for tap in taps)
            out[b][q][h * channels + d] += weight * sample
            if g is None:
                continue
            incoming = g[b][q][h * channels + d]
            along_x = sum(tap.along_x * v[b][tap.row][h][d] for tap in taps)
            along_y = sum(tap.along_y * v[b][tap.row][h][d] for tap in taps)
            for tap in taps:
                grad_v[b][tap.row][h][d] += weight * tap.coefficient * incoming
            grad_w[b][q][h][level][p] += incoming * sample
            grad_loc[b][q][h][level][p][0] += width * weight * incoming * along_x
            grad_loc[b][q][h][level][p][1] += height * weight * incoming * along_y

    result = _tensor(out, batch, queries, heads * channels)
    if grad_output is None:
        return result
    return result, {
        "value": _tensor(grad_v, *value.shape),
        "sampling_locations": _tensor(grad_loc, *sampling_locations.shape),
        "attention_weights": _tensor(grad_w, *attention_weights.shape),
    }


def deformable_aggregation(
    feature_maps: Tensor,
    spatial_shape: Ints,
    scale_start_index: Ints | None,
    sample_locations: Tensor,
    weight: Tensor,
    grad_output: Tensor | None = None,
    *,
    absolute: bool = False,
) -> Any:
    batch, stored, channels = feature_maps.shape
    anchors, points, cameras = sample_locations.shape[1:4]
    scales, groups = weight.shape[4:]
    shapes, starts = _maps(spatial_shape, scale_start_index, scales)
    rounded = _precision(sample_locations)
    v, loc, w, g = _lists(absolute, feature_maps, sample_locations, weight, grad_output)
    out = _zeros(batch, anchors, channels)
    grad_v, grad_loc, grad_w = (_zeros(*t.shape) for t in (feature_maps, sample_locations, weight))

    for b, a, p, cam, scale in _every(batch, anchors, points, cameras, scales):
        x, y = loc[b][a][p][cam]
        if not (0 < x < 1 and 0 < y < 1):
            continue
        height, width = shapes[cam * scales + scale]
        px, py = rounded(rounded(x * width) - 0.5), rounded(rounded(y * height) - 0.5)
        start = starts[cam * scales + scale]
        taps = list(_bilinear(px, py, height, width, start, stored, absolute))
        for c in range(channels if taps else 0):
            group = c // (channels // groups)
            factor = w[b][a][p][cam][scale][group]
            sample = sum(tap.coefficient * v[b][tap.row][c] for tap in taps)
            out[b][a][c] += factor * sample
            if g is None:
                continue
            incoming = g[b][a][c]
            along_x = sum(tap.along_x * v[b][tap.row][c] for tap in taps)
            along_y = sum(tap.along_y * v[b][tap.row][c] for tap in taps)
            for tap in taps:
                grad_v[b][tap.row][c] += factor * tap.coefficient * incoming
            grad_w[b][a][p][cam][scale][group] += incoming * sample
            grad_loc[b][a][p][cam][0] += width * factor * incoming * along_x
            grad_loc[b][a][p][cam][1] += height * factor * incoming * along_y

    result = _tensor(out, batch, anchors, channels)
    if grad_output is None:
        return result
    return result, {
        "feature_maps": _tensor(grad_v, *feature_maps.shape),
        "sample_locations": _tensor(grad_loc, *sample_locations.shape),
        "weight": _tensor(grad_w, *weight.shape),
    }


def geometric_kernel_attention(
    value: Tensor,
    spatial_shapes: Ints,
    level_start_index: Ints | None,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    grad_output: Tensor | None = None,
    *,
    absolute: bool = False,
) -> Any:
    batch, stored, heads, channels = value.shape
    queries, levels, points = sampling_locations.shape[1], *sampling_locations.shape[3:5]
    shapes, starts = _maps(spatial_shapes, level_start_index)
    v, loc, w, g = _lists(absolute, value, sampling_locations, attention_weights, grad_output)
    out = _zeros(batch, queries, heads * channels)
    grad_v, grad_w = _zeros(*value.shape), _zeros(*attention_weights.shape)

    for b, q, h, level, p in _every(batch, queries, heads, levels, points):
        height, width = shapes[level]
        x, y = loc[b][q][h][level][p]
        if math.isnan(x) or math.isnan(y) or height < 1 or width < 1:
            continue
        # Clamped first: an infinite position has no integer part, and the order does not matter.
        xi = math.trunc(min(max(x, 0), width - 1))
        yi = math.trunc(min(max(y, 0), height - 1))
        row = starts[level] + yi * width + xi
        if not 0 <= row < stored:
            continue
        weight = w[b][q][h][level][p]
        for d in range(channels):
            out[b][q][h * channels + d] += weight * v[b][row][h][d]
            if g is not None:
                incoming = g[b][q][h * channels + d]
                grad_v[b][row][h][d] += weight * incoming
                grad_w[b][q][h][level][p] += incoming * v[b][row][h][d]

    result = _tensor(out, batch, queries, heads * channels)
    if grad_output is None:
        return result
    return result, {
        "value": _tensor(grad_v, *value.shape),
        "attention_weights": _tensor(grad_w, *attention_weights.shape),
    }


def deform_columns(
    input: Tensor,
    offset: Tensor,
    kernel_size: Pair,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
    mask: Tensor | None = None,
    grad_output: Tensor | None = None,
    *,
    absolute: bool = False,
) -> Any:
    batch, channels, height, width = input.shape
    (kh, kw), (sh, sw), (dh, dw) = _pair(kernel_size), _pair(stride), _pair(dilation)
    pad_top, pad_left = _pair(padding)
    kernel = kh * kw
    out_h, out_w = offset.shape[2:]
    deformable_groups = offset.shape[1] // (2 * kernel) if kernel else 0
    rounded = _precision(offset)
    v, off, m, g = _lists(absolute, input, offset, mask, grad_output)
    out = _zeros(batch, channels, out_h * kh, out_w * kw)
    grad_v, grad_off = _zeros(*input.shape), _zeros(*offset.shape)
    grad_m = None if mask is None else _zeros(*mask.shape)

    for n, c, oy, ox, ky, kx in _every(batch, channels, out_h, out_w, kh, kw):
        group, k = c // (channels // deformable_groups), ky * kw + kx
        y_channel, x_channel = group * 2 * kernel + 2 * k, group * 2 * kernel + 2 * k + 1
        py = rounded(oy * sh - pad_top + ky * dh + off[n][y_channel][oy][ox])
        px = rounded(ox * sw - pad_left + kx * dw + off[n][x_channel][oy][ox])
        if not (-1 < py < height and -1 < px < width):
            continue
        factor = 1.0 if mask is None else m[n][group * kernel + k][oy][ox]
        row, column = oy * kh + ky, ox * kw + kx
        taps = list(_bilinear(px, py, height, width, 0, height * width, absolute))
        if not taps:
            continue
        pixels = [v[n][c][tap.row // width][tap.row % width] for tap in taps]
        sample = sum(tap.coefficient * pixel for tap, pixel in zip(taps, pixels, strict=True))
        out[n][c][row][column] = factor * sample
        if g is None:
            continue
        incoming = g[n][c][row][column]
        along_x = sum(tap.along_x * pixel for tap, pixel in zip(taps, pixels, strict=True))
        along_y = sum(tap.along_y * pixel for tap, pixel in zip(taps, pixels, strict=True))
        for tap in taps:
            gradient = factor * tap.coefficient * incoming
            grad_v[n][c][tap.row // width][tap.row % width] += gradient
        if grad_m is not None:
            grad_m[n][group * kernel + k][oy][ox] += incoming * sample
        grad_off[n][x_channel][oy][ox] += factor * incoming * along_x
        grad_off[n][y_channel][oy][ox] += factor * incoming * along_y

    result = _tensor(out, batch, channels, out_h * kh, out_w * kw)
    if grad_output is None:
        return result
    gradients = {
        "input": _tensor(grad_v, *input.shape),
        "offset": _tensor(grad_off, *offset.shape),
    }
    if mask is not None:
        gradients["mask"] = _tensor(grad_m, *mask.shape)
    return result, gradients


def deform_conv2d(
    input: Tensor,
    offset: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
    mask: Tensor | None = None,
    grad_output: Tensor | None = None,
    *,
    absolute: bool = False,
) -> Any:
    batch, channels = input.shape[:2]
    out_h, out_w = offset.shape[2:]
    out_channels, per_group, kh, kw = weight.shape
    groups = channels // per_group if per_group else 1

    def columns_of(grad_columns: Tensor | None = None) -> Any:
        return deform_columns(
            input, offset, (kh, kw), stride, padding, dilation, mask, grad_columns,
            absolute=absolute,
        )  # fmt: skip

    columns = columns_of()
    counts: Any = None
    if grad_output is not None:  # a sample of ones is above zero if it counts
        ones = torch.ones_like(input)
        counts = deform_columns(ones, offset, (kh, kw), stride, padding, dilation).tolist()
    col, w, b, g = _lists(absolute, columns, weight, bias, grad_output, positions=None)
    out = _zeros(batch, out_channels, out_h, out_w)
    grad_col, grad_w, grad_b = _zeros(*columns.shape), _zeros(*weight.shape), _zeros(out_channels)

    for n, o, oy, ox in _every(batch, out_channels, out_h, out_w):
        first = o // (out_channels // groups) * per_group
        total = 0.0 if bias is None else b[o]
        incoming = None if g is None else g[n][o][oy][ox]
        for c, ky, kx in _every(per_group, kh, kw):
            row, column = oy * kh + ky, ox * kw + kx
            total += w[o][c][ky][kx] * col[n][first + c][row][column]
            if incoming is not None:
                if counts[n][first + c][row][column]:
                    grad_w[o][c][ky][kx] += incoming * col[n][first + c][row][column]
                grad_col[n][first + c][row][column] += incoming * w[o][c][ky][kx]
        out[n][o][oy][ox] = total
        if incoming is not None:
            grad_b[o] += incoming

    result = _tensor(out, batch, out_channels, out_h, out_w)
    if grad_output is None:
        return result
    _, gradients = columns_of(_tensor(grad_col, *columns.shape))
    gradients["weight"] = _tensor(grad_w, *weight.shape)
    if bias is not None:
        gradients["bias"] = _tensor(grad_b, out_channels)
    return result, gradients


def _bilinear(
    px: float, py: float, height: int, width: int, start: int, stored: int, absolute: bool
) -> Iterator[Tap]:
    """The corners around (px, py) that may be read: inside the map, and inside what is stored."""
    x0, y0 = math.floor(px), math.floor(py)
    fx, fy = px - x0, py - y0
    for y, across_y, sign_y in ((y0, 1 - fy, -1), (y0 + 1, fy, 1)):
        for x, across_x, sign_x in ((x0, 1 - fx, -1), (x0 + 1, fx, 1)):
            row = start + y * width + x
            if not (0 <= x < width and 0 <= y < height and 0 <= row < stored):
                continue
            coefficient, along_x, along_y = (
                across_y * across_x, across_y * sign_x, sign_y * across_x,
            )  # fmt: skip
            if absolute:
                shift_x, shift_y = (1 + abs(px)) / ROUNDINGS, (1 + abs(py)) / ROUNDINGS
                coefficient += shift_x * abs(along_x) + shift_y * abs(along_y)
                along_x, along_y = abs(along_x) + shift_y, abs(along_y) + shift_x
            yield Tap(row, coefficient, along_x, along_y)


def _precision(positions: Tensor) -> Callable[[float], float]:
    """The rounding of one operation on positions.

    One operation in Python's double and one rounding give the float32 result exactly.
    """
    if positions.dtype == torch.float64:
        return float
    return lambda number: ctypes.c_float(number).value


def _maps(shapes: Ints, starts: Ints | None, scales: int | None = None) -> Any:
    """Shapes and start indices as flat lists; without start indices the maps follow each other."""
    flat = shapes.tolist() if isinstance(shapes, Tensor) else [list(entry) for entry in shapes]
    if scales is not None:
        flat = [size for camera in flat for size in camera]
    if starts is None:
        return flat, [sum(h * w for h, w in flat[:i]) for i in range(len(flat))]
    first = starts.tolist() if isinstance(starts, Tensor) else list(starts)
    return flat, first if scales is None else [start for camera in first for start in camera]


def _lists(absolute: bool, *tensors: Tensor | None, positions: int | None = 1) -> list[Any]:
    """The numbers of each tensor; the one at `positions` keeps its sign under `absolute`."""

    def numbers(index: int, tensor: Tensor) -> Any:
        exact = tensor.detach().to("cpu", torch.float64)
        return (exact.abs() if absolute and index != positions else exact).tolist()

    return [None if t is None else numbers(index, t) for index, t in enumerate(tensors)]


def _zeros(*shape: int) -> Any:
    return torch.zeros(shape, dtype=torch.float64).tolist()


def _tensor(numbers: Any, *shape: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64).reshape(shape)


def _every(*sizes: int) -> Iterator[tuple[int, ...]]:
    return product(*(range(size) for size in sizes))


def _pair(number: Pair) -> tuple[int, int]:
    if isinstance(number, int):
        return number, number
    first, second = number
    return first, second
