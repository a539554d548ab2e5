"""The operators as people write them in plain PyTorch today: the baseline of the benchmarks.

`grid_sample` per map for the bilinear operators, `gather` for the nearest one, all differentiable
by autograd. Same arguments as the public functions; start indices, shapes and their order are
honoured. What only a kernel of its own can promise is not promised here: positions are normalised
to [-1, 1] in the features' dtype, and a sample that does not count still multiplies by zero.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import grid_sample

Ints = Tensor | Sequence[Any]
Pair = int | Sequence[int]


def multi_scale_deformable_attn(
    value: Tensor,
    spatial_shapes: Ints,
    level_start_index: Ints | None,
    sampling_locations: Tensor,
    attention_weights: Tensor,
) -> Tensor:
    batch, _, heads, channels = value.shape
    queries, levels, points = sampling_locations.shape[1], *sampling_locations.shape[3:5]
    shapes, starts = _maps(spatial_shapes, level_start_index, levels)
    grids = (2 * sampling_locations - 1).to(value.dtype)
    grids = grids.transpose(1, 2).reshape(batch * heads, queries, levels, points, 2)
    weights = attention_weights.to(value.dtype).transpose(1, 2)
    weights = weights.reshape(batch * heads, 1, queries, levels, points)
    out = value.new_zeros(batch * heads, channels, queries)
    for level, ((height, width), start) in enumerate(zip(shapes, starts, strict=True)):
        maps = value[:, start : start + height * width].permute(0, 2, 3, 1)
        maps = maps.reshape(batch * heads, channels, height, width)
        samples = _sample(maps, grids[:, :, level])  # [B*H, D, Q, P]
        out = out + (samples * weights[:, :, :, level]).sum(-1)
    return out.view(batch, heads * channels, queries).transpose(1, 2)


def deformable_aggregation(
    feature_maps: Tensor,
    spatial_shape: Ints,
    scale_start_index: Ints | None,
    sample_locations: Tensor,
    weight: Tensor,
) -> Tensor:
    batch, _, channels = feature_maps.shape
    anchors, points, cameras = sample_locations.shape[1:4]
    scales, groups = weight.shape[4:]
    shapes, starts = _maps(spatial_shape, scale_start_index, cameras * scales)
    inside = ((sample_locations > 0) & (sample_locations < 1)).all(-1)  # [B, A, P, cam]
    weights = weight.to(feature_maps.dtype) * inside[..., None, None]
    weights = weights.permute(3, 4, 0, 5, 1, 2).unsqueeze(4)  # [cam, scale, B, G, 1, A, P]
    grids = (2 * sample_locations - 1).to(feature_maps.dtype)
    out = feature_maps.new_zeros(batch, groups, channels // groups, anchors)
    for index, ((height, width), start) in enumerate(zip(shapes, starts, strict=True)):
        camera, scale = divmod(index, scales)
        maps = feature_maps[:, start : start + height * width].transpose(1, 2)
        maps = maps.reshape(batch, channels, height, width)
        samples = _sample(maps, grids[:, :, :, camera])  # [B, C, A, P]
        samples = samples.view(batch, groups, channels // groups, anchors, points)
        out = out + (samples * weights[camera, scale]).sum(-1)
    return out.view(batch, channels, anchors).transpose(1, 2)


def geometric_kernel_attention(
    value: Tensor,
    spatial_shapes: Ints,
    level_start_index: Ints | None,
    sampling_locations: Tensor,
    attention_weights: Tensor,
) -> Tensor:
    batch, _, heads, channels = value.shape
    queries, levels, points = sampling_locations.shape[1], *sampling_locations.shape[3:5]
    sizes = torch.as_tensor(spatial_shapes, device=value.device).view(levels, 2, 1).long()
    height, width = sizes.unbind(1)  # [L, 1]
    start = (height * width).cumsum(0) - height * width
    if level_start_index is not None:
        start = torch.as_tensor(level_start_index, device=value.device).view(levels, 1)
    x, y = sampling_locations.long().unbind(-1)  # [B, Q, H, L, P]
    x = x.clamp(min=0).minimum(width - 1)
    y = y.clamp(min=0).minimum(height - 1)
    rows = (start + y * width + x).transpose(1, 2).reshape(batch, heads, -1, 1)
    samples = value.transpose(1, 2).gather(2, rows.expand(-1, -1, -1, channels))
    samples = samples.view(batch, heads, queries, levels * points, channels)
    weights = attention_weights.to(value.dtype).transpose(1, 2)
    weights = weights.reshape(batch, heads, queries, 1, levels * points)
    out = (weights @ samples).squeeze(3)  # [B, H, Q, D]
    return out.transpose(1, 2).reshape(batch, queries, heads * channels)


def deform_columns(
    input: Tensor,
    offset: Tensor,
    kernel_size: Pair,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
    mask: Tensor | None = None,
) -> Tensor:
    batch, channels = input.shape[:2]
    (kh, kw), (out_h, out_w) = _pair(kernel_size), offset.shape[2:]
    columns = _columns(input, offset, (kh, kw), stride, padding, dilation, mask)
    columns = columns.view(batch, channels, kh, kw, out_h, out_w).permute(0, 1, 4, 2, 5, 3)
    return columns.reshape(batch, channels, out_h * kh, out_w * kw)


def deform_conv2d(
    input: Tensor,
    offset: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
    mask: Tensor | None = None,
) -> Tensor:
    batch, channels = input.shape[:2]
    out_channels, per_group, kh, kw = weight.shape
    groups, (out_h, out_w) = channels // per_group, offset.shape[2:]
    columns = _columns(input, offset, (kh, kw), stride, padding, dilation, mask)
    columns = columns.view(batch, groups, per_group * kh * kw, out_h * out_w)
    out = weight.reshape(groups, out_channels // groups, per_group * kh * kw) @ columns
    out = out.view(batch, out_channels, out_h, out_w)
    return out if bias is None else out + bias.view(1, -1, 1, 1)


def _columns(
    input: Tensor,
    offset: Tensor,
    kernel: tuple[int, int],
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    mask: Tensor | None,
) -> Tensor:
    """The resampled features as [N, C, kh*kw, Ho, Wo]."""
    batch, channels, height, width = input.shape
    (kh, kw), (out_h, out_w) = kernel, offset.shape[2:]
    groups = offset.shape[1] // (2 * kh * kw)
    (sh, sw), (pad_top, pad_left), (dh, dw) = _pair(stride), _pair(padding), _pair(dilation)

    def steps(count: int) -> Tensor:
        return torch.arange(count, device=input.device, dtype=offset.dtype)

    base_y = steps(kh).view(kh, 1, 1, 1) * dh + steps(out_h).view(1, 1, out_h, 1) * sh - pad_top
    base_x = steps(kw).view(1, kw, 1, 1) * dw + steps(out_w).view(1, 1, 1, out_w) * sw - pad_left
    shifts = offset.reshape(batch * groups, kh, kw, 2, out_h, out_w)
    y = (2 * (shifts[:, :, :, 0] + base_y) + 1) / height - 1
    x = (2 * (shifts[:, :, :, 1] + base_x) + 1) / width - 1
    grid = torch.stack((x, y), -1).to(input.dtype).view(batch * groups, kh * kw * out_h, out_w, 2)
    maps = input.reshape(batch * groups, channels // groups, height, width)
    samples = _sample(maps, grid).view(batch, groups, -1, kh * kw, out_h, out_w)
    if mask is not None:
        samples = samples * mask.to(input.dtype).reshape(batch, groups, 1, kh * kw, out_h, out_w)
    return samples.reshape(batch, channels, kh * kw, out_h, out_w)


def _sample(maps: Tensor, grid: Tensor) -> Tensor:
    return grid_sample(maps, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def _maps(shapes: Ints, starts: Ints | None, count: int) -> tuple[list[Any], list[int]]:
    """`count` sizes (h, w) and start indices; without these the maps follow each other."""
    sizes = torch.as_tensor(shapes).view(count, 2).tolist()
    if starts is None:
        return sizes, [sum(h * w for h, w in sizes[:index]) for index in range(count)]
    return sizes, torch.as_tensor(starts).view(count).tolist()


def _pair(number: Pair) -> tuple[int, int]:
    if isinstance(number, int):
        return number, number
    first, second = number
    return first, second
