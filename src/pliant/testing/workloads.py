"""The problems of real models, by name: what the benchmarks time and the demo runs.

Positions follow what the models do. *local*: a query's own place on a grid plus Gaussian offsets of
2 to 8 pixels of each level (convolution: 2 pixels). *proj*: points around a vehicle projected into
its ring of cameras, each seen by about one camera in five. *uniform*: anywhere in the map.
*integer*: uniform, on whole pixels. They stay a hair away from kinks, where a position rounded
otherwise has another derivative, so that results can be checked element by element.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Generator, Tensor

from pliant.testing.cases import Inputs, Size, away_from_kinks

# In pixels: float32 positions of a map a few hundred pixels wide are good to 2**-15.
MARGIN = 2.0**-8


@dataclass(frozen=True)
class Workload:
    """A problem of a real model's size; `on_cpu` are the sizes that differ there."""

    operator: str
    positions: str
    sizes: dict[str, Any]
    origin: str
    on_cpu: dict[str, Any] = field(default_factory=dict)


def _attention(batch: int, levels: Sequence[Size], queries: int, **rest: int) -> dict[str, Any]:
    sizes = {"batch": batch, "levels": levels, "queries": queries}
    return {**sizes, "heads": 8, "channels": 32, "points": 4, **rest}


def _aggregation(batch: int, cameras: Any, anchors: int, points: int) -> dict[str, Any]:
    sizes = {"batch": batch, "cameras": cameras, "anchors": anchors, "points": points}
    return {**sizes, "channels": 256, "groups": 8}


def _convolution(batch: int, channels: int, size: Size, kernel: int) -> dict[str, Any]:
    return {"batch": batch, "channels": channels, "size": size, "kernel": kernel}


_DETR = ((100, 134), (50, 67), (25, 34), (13, 17))
_RTDETR = ((80, 80), (40, 40), (20, 20))
_BEV = ((116, 200), (58, 100), (29, 50), (15, 25))
_SPARSE4D = (((64, 176), (32, 88), (16, 44), (8, 22)),) * 6
_MSDA, _GKT = "multi_scale_deformable_attn", "geometric_kernel_attention"
_DA, _DCN = "deformable_aggregation", "deform_conv2d"

WORKLOADS = {
    "detr-enc-b1": Workload(_MSDA, "local", _attention(1, _DETR, 17821), "Deformable-DETR encoder"),
    "detr-enc-b8": Workload(_MSDA, "local", _attention(8, _DETR, 17821), "Deformable-DETR encoder"),
    "rtdetr-dec-b1": Workload(_MSDA, "local", _attention(1, _RTDETR, 300), "RT-DETR decoder"),
    "rtdetr-dec-b16": Workload(_MSDA, "local", _attention(16, _RTDETR, 300), "RT-DETR decoder"),
    "bev-sca": Workload(
        _MSDA, "local", _attention(6, _BEV, 10000, points=8), "BEVFormer spatial cross attention",
        {"queries": 2500},
    ),
    "msda-doc": Workload(
        _MSDA, "uniform", _attention(1, ((100, 100),), 16, heads=4, points=8), "documentation"
    ),
    "sparse4d-b1": Workload(_DA, "proj", _aggregation(1, _SPARSE4D, 900, 13), "Sparse4D v3"),
    "sparse4d-b8": Workload(_DA, "proj", _aggregation(8, _SPARSE4D, 900, 13), "Sparse4D v3"),
    "da-doc": Workload(_DA, "uniform", _aggregation(1, (((32, 88),),), 10, 2000), "documentation"),
    "gkt-doc": Workload(_GKT, "uniform", _attention(6, ((60, 40),) * 4, 9680), "documentation"),
    "maptr-tiny": Workload(
        _GKT, "integer", _attention(24, ((15, 25),), 7156, heads=4, channels=64, points=15), "MapTR"
    ),
    "dcn-256": Workload(
        _DCN, "local", _convolution(8, 256, (50, 84), 3), "ResNet-50-DCN", {"batch": 1}
    ),
    "dcn-128": Workload(
        _DCN, "local", _convolution(8, 128, (100, 168), 3), "ResNet-50-DCN", {"batch": 1}
    ),
    "dcn-doc": Workload(_DCN, "uniform", _convolution(16, 32, (32, 32), 5), "documentation"),
}  # fmt: skip


def workload(
    id: str,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    seed: int = 0,
    positions: str | None = None,
    position_dtype: torch.dtype | None = None,
) -> Inputs:
    """The keyword arguments of workload `id` for its operator, `WORKLOADS[id].operator`.

    Features and weights have `dtype`, positions `position_dtype` or at least float32; shapes and
    start indices are int64 tensors. `positions` replaces the workload's own distribution.
    """
    entry = WORKLOADS[id]
    sizes = {**entry.sizes, **(entry.on_cpu if torch.device(device).type == "cpu" else {})}
    draw = _DRAWS[entry.operator]
    generator = Generator().manual_seed(seed)
    inputs = draw(generator, sizes, positions or entry.positions)
    exact = position_dtype or torch.promote_types(dtype, torch.float32)
    for name, tensor in inputs.items():
        if isinstance(tensor, Tensor):
            where = name in ("sampling_locations", "sample_locations", "offset")
            cast = (exact if where else dtype) if tensor.is_floating_point() else tensor.dtype
            inputs[name] = tensor.to(device, cast)
    return inputs


def _draw_attention(generator: Generator, sizes: dict[str, Any], positions: str) -> Inputs:
    batch, levels, queries, heads, channels, points = (
        sizes[name] for name in ("batch", "levels", "queries", "heads", "channels", "points")
    )
    stored = sum(h * w for h, w in levels)
    shape = (batch, queries, heads, len(levels), points, 2)
    shapes = torch.tensor(levels)
    extent = shapes.flip(-1).view(len(levels), 1, 2)  # (w, h) of each level
    if positions == "local":
        places = _pixels(levels) if queries == stored else _grid(queries)
        sigma = torch.linspace(2, 8, points).view(points, 1)
        offsets = torch.randn(shape, generator=generator) * sigma / extent
        loc = places.view(1, queries, 1, 1, 1, 2) + offsets
    elif positions == "uniform":
        loc = torch.rand(shape, generator=generator)
    else:
        raise ValueError(f"attention has no positions called {positions!r}")
    for level, (height, width) in enumerate(levels):
        for axis, size in enumerate((width, height)):
            loc[:, :, :, level, :, axis] = away_from_kinks(
                loc[:, :, :, level, :, axis], [size], generator, MARGIN
            )
    weights = torch.randn((*shape[:3], len(levels) * points), generator=generator).softmax(-1)
    return {
        "value": torch.randn(batch, stored, heads, channels, generator=generator),
        "spatial_shapes": shapes,
        "level_start_index": shapes.prod(-1).cumsum(0) - shapes.prod(-1),
        "sampling_locations": loc,
        "attention_weights": weights.view(shape[:-1]),
    }


def _draw_geometric(generator: Generator, sizes: dict[str, Any], positions: str) -> Inputs:
    inputs = _draw_attention(generator, sizes, "local" if positions == "local" else "uniform")
    loc = inputs["sampling_locations"] * inputs["spatial_shapes"].flip(-1).view(-1, 1, 2)
    inputs["sampling_locations"] = loc.floor() if positions == "integer" else loc
    return inputs


def _draw_aggregation(generator: Generator, sizes: dict[str, Any], positions: str) -> Inputs:
    batch, cameras, anchors, points, channels, groups = (
        sizes[name] for name in ("batch", "cameras", "anchors", "points", "channels", "groups")
    )
    shapes = torch.tensor(cameras)  # [cam, scale, 2]
    views, scales = shapes.shape[:2]
    if positions == "proj":
        loc = _projections(generator, batch, anchors, points, views)
    elif positions == "uniform":
        loc = torch.rand(batch, anchors, points, views, 2, generator=generator)
    else:
        raise ValueError(f"deformable_aggregation has no positions called {positions!r}")
    for camera in range(views):
        for axis in range(2):
            along = shapes[camera, :, 1 - axis].tolist()
            loc[:, :, :, camera, axis] = away_from_kinks(
                loc[:, :, :, camera, axis], along, generator, MARGIN
            )
    # A softmax over all that is summed, as the models have it.
    shape = (batch, anchors, points * views * scales, groups)
    weight = torch.randn(shape, generator=generator).softmax(2)
    pixels = shapes.prod(-1).flatten()
    return {
        "feature_maps": torch.randn(batch, int(pixels.sum()), channels, generator=generator),
        "spatial_shape": shapes,
        "scale_start_index": (pixels.cumsum(0) - pixels).view(views, scales),
        "sample_locations": loc,
        "weight": weight.view(batch, anchors, points, views, scales, groups),
    }


def _draw_convolution(generator: Generator, sizes: dict[str, Any], positions: str) -> Inputs:
    batch, channels, size, kernel = (
        sizes[name] for name in ("batch", "channels", "size", "kernel")
    )
    taps = kernel * kernel
    shape = (batch, 2 * taps, *size)
    if positions == "local":
        offset = 2 * torch.randn(shape, generator=generator)
    elif positions == "uniform":
        offset = torch.rand(shape, generator=generator)
    else:
        raise ValueError(f"deform_conv2d has no positions called {positions!r}")
    weight = torch.randn(channels, channels, kernel, kernel, generator=generator)
    return {
        "input": torch.randn(batch, channels, *size, generator=generator),
        "offset": away_from_kinks(offset, [1], generator, MARGIN, shift=0.0),
        "weight": weight / math.sqrt(channels * taps),
        "bias": None,
        "stride": 1,
        "padding": kernel // 2,
        "dilation": 1,
        "mask": torch.rand(batch, taps, *size, generator=generator),
    }


_DRAWS: dict[str, Callable[[Generator, dict[str, Any], str], Inputs]] = {
    _MSDA: _draw_attention,
    _GKT: _draw_geometric,
    _DA: _draw_aggregation,
    _DCN: _draw_convolution,
}


def _pixels(levels: Sequence[Size]) -> Tensor:
    """The centre of every pixel of every level, [S, 2]: queries that are pixels themselves."""
    return torch.cat([_centres(height, width) for height, width in levels])


def _grid(queries: int) -> Tensor:
    """Places for `queries` queries, row by row over the unit square, [Q, 2]."""
    side = math.isqrt(max(queries - 1, 0)) + 1
    return _centres(side, side)[:queries]


def _centres(height: int, width: int) -> Tensor:
    y, x = torch.meshgrid(
        (torch.arange(height) + 0.5) / height, (torch.arange(width) + 0.5) / width, indexing="ij"
    )
    return torch.stack((x, y), -1).view(-1, 2)


def _projections(
    generator: Generator, batch: int, anchors: int, points: int, cameras: int
) -> Tensor:
    """Points around a vehicle in cameras that look outwards, [B, A, P, cam, 2].

    The points of an anchor stand close together; the fields of view, 70 degrees each for six
    cameras, overlap a little.
    """
    half_view = math.radians(35) * 6 / cameras
    bearing = torch.rand(batch, anchors, 1, 1, generator=generator) * 2 * math.pi
    bearing = bearing + 0.03 * torch.randn(batch, anchors, points, 1, generator=generator)
    looking = torch.arange(cameras) * (2 * math.pi / cameras)
    angle = (bearing - looking + math.pi) % (2 * math.pi) - math.pi
    x = 0.5 + angle.clamp(-1.5, 1.5).tan() / (2 * math.tan(half_view))
    y = 0.5 + 0.12 * torch.randn(x.shape, generator=generator)
    # Behind the camera a projection is meaningless; models push it far out.
    x = torch.where(angle.abs() < 1.5, x, torch.full_like(x, -2.0))
    return torch.stack((x, y), -1)
