"""Named small problems, each stressing one axis.

A problem is the dict of keyword arguments of a public function. Numbers are drawn on the CPU in
float64 and then rounded, so that a case is the same problem on every device and in every dtype.
Positions keep clear of kinks (see `away_from_kinks`), where a derivative has two right answers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Generator, Tensor

Size = tuple[int, int]
Inputs = dict[str, Any]
Make = Callable[[torch.dtype, str, int], Inputs]

OPERATORS = (
    "multi_scale_deformable_attn",
    "deformable_aggregation",
    "geometric_kernel_attention",
    "deform_conv2d",
    "deform_columns",
)
DIFFERENTIABLE = {
    "multi_scale_deformable_attn": ("value", "sampling_locations", "attention_weights"),
    "deformable_aggregation": ("feature_maps", "sample_locations", "weight"),
    "geometric_kernel_attention": ("value", "attention_weights"),
    "deform_conv2d": ("input", "offset", "weight", "bias", "mask"),
    "deform_columns": ("input", "offset", "mask"),
}
POSITIONS = {
    "multi_scale_deformable_attn": "sampling_locations",
    "deformable_aggregation": "sample_locations",
    "geometric_kernel_attention": "sampling_locations",
    "deform_conv2d": "offset",
    "deform_columns": "offset",
}


@dataclass(frozen=True)
class Case:
    """One small problem: `make(dtype, device, seed)` gives its arguments."""

    id: str
    operator: str
    make: Make

    def __str__(self) -> str:
        return f"{self.operator}-{self.id}"


def away_from_kinks(
    positions: Tensor,
    sizes: Sequence[int],
    generator: Generator,
    margin: float = 0.1,
    shift: float = 0.5,
) -> Tensor:
    """`positions` along one axis, moved until `position * size - shift` is between pixels.

    The fraction ends up in [margin, 1 - margin] for every size at once. A position that offends
    takes random steps of up to two pixels of the largest map.
    """
    sizes = [size for size in sizes if size > 0]
    if not sizes or positions.numel() == 0:
        return positions
    positions = positions.clone()
    for _ in range(1000):
        pixels = positions.unsqueeze(-1) * positions.new_tensor(sizes) - shift
        fractions = pixels - pixels.floor()
        offends = ((fractions < margin) | (fractions > 1 - margin)).any(-1)
        if not offends.any():
            return positions
        steps = _uniform(generator, (int(offends.sum()),), -2.0, 2.0) / max(sizes)
        positions[offends] += steps
    raise ValueError(f"no position keeps {margin} away from the pixels of all of {sizes}")


def attention(
    *,
    batch: int = 2,
    levels: Sequence[Size] = ((6, 5), (3, 4)),
    queries: int = 4,
    heads: int = 2,
    channels: int = 4,
    points: int = 3,
    low: float = -0.2,
    high: float = 1.2,
) -> Make:
    def make(dtype: torch.dtype, device: str, seed: int) -> Inputs:
        generator = Generator().manual_seed(seed)
        stored = sum(h * w for h, w in levels)
        loc = _uniform(generator, (batch, queries, heads, len(levels), points, 2), low, high)
        for level, (height, width) in enumerate(levels):
            for axis, size in enumerate((width, height)):
                loc[:, :, :, level, :, axis] = away_from_kinks(
                    loc[:, :, :, level, :, axis], [size], generator
                )
        return {
            "value": _normal(generator, (batch, stored, heads, channels)).to(device, dtype),
            "spatial_shapes": _sizes(levels, device),
            "level_start_index": _starts(levels, device),
            "sampling_locations": loc.to(device, dtype),
            "attention_weights": _normal(generator, loc.shape[:-1]).to(device, dtype),
        }

    return make


def geometric(*, low: float = -2.0, high: float = 8.0, **sizes: Any) -> Make:
    def make(dtype: torch.dtype, device: str, seed: int) -> Inputs:
        inputs = attention(**sizes)(dtype, device, seed)
        generator = Generator().manual_seed(seed + 1)
        loc = _uniform(generator, inputs["sampling_locations"].shape, low, high)
        inputs["sampling_locations"] = loc.to(device, dtype)
        return inputs

    return make


def aggregation(
    *,
    batch: int = 2,
    cameras: Sequence[Sequence[Size]] = (((4, 6), (2, 3)), ((4, 6), (2, 3))),
    anchors: int = 3,
    points: int = 3,
    channels: int = 8,
    groups: int = 2,
    low: float = -0.2,
    high: float = 1.2,
) -> Make:
    def make(dtype: torch.dtype, device: str, seed: int) -> Inputs:
        generator = Generator().manual_seed(seed)
        scales = len(cameras[0]) if cameras else 2
        maps = [size for camera in cameras for size in camera]
        stored = sum(h * w for h, w in maps)
        loc = _uniform(generator, (batch, anchors, points, len(cameras), 2), low, high)
        for index, camera in enumerate(cameras):
            for axis, along in enumerate(([w for _, w in camera], [h for h, _ in camera])):
                loc[:, :, :, index, axis] = away_from_kinks(
                    loc[:, :, :, index, axis], along, generator
                )
        weight = _normal(generator, (*loc.shape[:-1], scales, groups))
        return {
            "feature_maps": _normal(generator, (batch, stored, channels)).to(device, dtype),
            "spatial_shape": _sizes(maps, device).view(len(cameras), scales, 2),
            "scale_start_index": _starts(maps, device).view(len(cameras), scales),
            "sample_locations": loc.to(device, dtype),
            "weight": weight.to(device, dtype),
        }

    return make


def convolution(
    *,
    batch: int = 2,
    channels: int = 4,
    size: Size = (5, 6),
    out_channels: int = 4,
    kernel: Size = (3, 3),
    stride: int | Size = 1,
    padding: int | Size = 1,
    dilation: int | Size = 1,
    groups: int = 1,
    deformable_groups: int = 1,
    bias: bool = True,
    mask: bool = True,
    sigma: float = 1.0,
) -> Make:
    def make(dtype: torch.dtype, device: str, seed: int) -> Inputs:
        generator = Generator().manual_seed(seed)
        taps = deformable_groups * prod(kernel)
        out = _out_size(size, kernel, stride, padding, dilation)
        offset = sigma * _normal(generator, (batch, 2 * taps, *out))
        offset = away_from_kinks(offset, [1], generator, shift=0.0)
        weight = _normal(generator, (out_channels, channels // groups, *kernel))
        inputs: Inputs = {
            "input": _normal(generator, (batch, channels, *size)).to(device, dtype),
            "offset": offset.to(device, dtype),
            "weight": weight.to(device, dtype),
            "bias": _normal(generator, (out_channels,)).to(device, dtype) if bias else None,
            "stride": stride,
            "padding": padding,
            "dilation": dilation,
            "mask": _uniform(generator, (batch, taps, *out), 0.0, 1.0).to(device, dtype)
            if mask
            else None,
        }
        return inputs

    return make


def columns(make: Make) -> Make:
    """The deform_columns problem inside a deform_conv2d problem."""

    def made(dtype: torch.dtype, device: str, seed: int) -> Inputs:
        inputs = make(dtype, device, seed)
        inputs["kernel_size"] = tuple(inputs.pop("weight").shape[2:])
        del inputs["bias"]
        return inputs

    return made


def changed(make: Make, change: Callable[[Inputs], None]) -> Make:
    """`make` with `change` applied to the arguments."""

    def made(dtype: torch.dtype, device: str, seed: int) -> Inputs:
        inputs = make(dtype, device, seed)
        change(inputs)
        return inputs

    return made


def each(change: Callable[[Tensor], Tensor], *names: str) -> Callable[[Inputs], None]:
    """A change of the tensors called `names`, or of every floating-point tensor."""

    def apply(inputs: Inputs) -> None:
        for name, tensor in inputs.items():
            if isinstance(tensor, Tensor) and (
                name in names if names else tensor.is_floating_point()
            ):
                inputs[name] = change(tensor)

    return apply


def strided(tensor: Tensor) -> Tensor:
    """Equal, but with the last axis strided and the memory order reversed."""
    order = tuple(reversed(range(tensor.dim())))
    return tensor.repeat_interleave(2, -1).permute(order).contiguous().permute(order)[..., ::2]


def turned(tensor: Tensor) -> Tensor:
    """Equal, but with the second axis innermost, as in features that were [N, C, H, W]."""
    return tensor.movedim(1, -1).contiguous().movedim(-1, 1)


def spread(tensor: Tensor, axis: int) -> Tensor:
    """Equal, but the last along `axis` lies 2**31 elements from the first; no other memory is
    touched.
    """
    strides: list[int] = []
    step = 1
    for i in reversed(range(tensor.dim())):
        strides.insert(0, step if i != axis else 2**31 // (tensor.shape[i] - 1))
        step *= tensor.shape[i] if i != axis else 1
    storage = torch.UntypedStorage((2**31 + step) * tensor.element_size(), device=tensor.device)
    far = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return far.set_(storage, 0, tensor.shape, strides).copy_(tensor)


def expanded(tensor: Tensor) -> Tensor:
    """The first entry along the first axis for all of it, with stride 0."""
    return tensor[:1].expand(tensor.shape) if tensor.shape[0] else tensor


def python_ints(inputs: Inputs) -> None:
    for name, tensor in inputs.items():
        if isinstance(tensor, Tensor) and not tensor.is_floating_point():
            inputs[name] = tensor.tolist()


def no_starts(inputs: Inputs) -> None:
    inputs["level_start_index" if "level_start_index" in inputs else "scale_start_index"] = None


def gaps(inputs: Inputs) -> None:
    """Maps in reverse order with a pixel nobody asks for before, between and after them."""
    features = "value" if "value" in inputs else "feature_maps"
    shapes = inputs["spatial_shapes" if "value" in inputs else "spatial_shape"]
    name = "level_start_index" if "value" in inputs else "scale_start_index"
    pixels = shapes.prod(-1).flatten() + 1
    starts = pixels.flip(0).cumsum(0).flip(0) - pixels + 1
    inputs[name] = starts.view(shapes.shape[:-1])
    old = inputs[features]
    new = old.new_full((old.shape[0], int(pixels.sum()) + 1, *old.shape[2:]), torch.nan)
    begin = 0
    for start, count in zip(starts.tolist(), (pixels - 1).tolist(), strict=True):
        new[:, start : start + count] = old[:, begin : begin + count]
        begin += count
    inputs[features] = new


def same_map(inputs: Inputs) -> None:
    """All start indices 0: the maps overlap."""
    name = "level_start_index" if "value" in inputs else "scale_start_index"
    inputs[name] = torch.zeros_like(inputs[name])


def one_place(inputs: Inputs) -> None:
    """Every sample at one position: all gradients of the features fall on four pixels."""
    for name in ("sampling_locations", "sample_locations"):
        if name in inputs:
            inputs[name] = torch.full_like(inputs[name], 0.43)


def far_outside(inputs: Inputs) -> None:
    for name in ("sampling_locations", "sample_locations", "offset"):
        if name in inputs:
            inputs[name] = inputs[name] + 1000


def unpaired(inputs: Inputs) -> None:
    """A padding at the top left that does not go with the size of the output."""
    inputs["padding"] = [3, 2]


INT32 = each(lambda tensor: tensor.int(), "spatial_shapes", "level_start_index", "spatial_shape",
             "scale_start_index")  # fmt: skip

_SIX = (((4, 5), (2, 3)),) * 6

CASES = [
    *(
        Case(id, "multi_scale_deformable_attn", make)
        for id, make in {
            "plain": attention(),
            "batch-1": attention(batch=1),
            "batch-3": attention(batch=3, queries=2),
            "one-level": attention(levels=[(7, 9)]),
            "many-levels": attention(
                levels=[(5, 7), (1, 1), (1, 6), (6, 1), (2, 2), (3, 5), (4, 4)], queries=2, points=2
            ),
            "one-pixel": attention(levels=[(1, 1)]),
            "empty-level": attention(levels=[(3, 4), (0, 4), (3, 0), (2, 2)]),
            "one-head": attention(heads=1),
            "heads-5": attention(heads=5, queries=2),
            "head-dim-1": attention(channels=1),
            "head-dim-16": attention(channels=16, queries=2),
            "head-dim-32": attention(channels=32, queries=3, heads=1),
            "head-dim-37": attention(channels=37, queries=2),
            "head-dim-48": attention(channels=48, queries=2),
            "head-dim-64": attention(channels=64, queries=2, heads=1, points=4),
            "head-dim-147": attention(channels=147, batch=1, queries=2, heads=1),
            "head-dim-256": attention(channels=256, batch=1, queries=2, heads=1, points=2),
            "points-1": attention(points=1),
            "points-4": attention(points=4),
            "points-9": attention(points=9, queries=2),
            "queries-1": attention(queries=1),
            "queries-67": attention(queries=67, batch=1, heads=1, channels=2, points=2),
            "inside": attention(low=0.2, high=0.8),
            "mostly-outside": attention(low=-2.0, high=3.0, queries=8),
            "all-outside": changed(attention(), far_outside),
            "gaps": changed(attention(), gaps),
            "same-map": changed(attention(levels=[(4, 4), (3, 4)]), same_map),
            "one-place": changed(attention(levels=[(6, 5), (5, 6)], queries=16), one_place),
            "int32": changed(attention(), INT32),
            "python-ints": changed(attention(), python_ints),
            "no-starts": changed(attention(), no_starts),
            "strided": changed(attention(), each(strided)),
            "strided-indices": changed(
                attention(), each(strided, "spatial_shapes", "level_start_index")
            ),
            "channels-apart": changed(attention(), each(turned, "value")),
            "expanded": changed(attention(), each(expanded)),
            "expanded-weights": changed(attention(), each(expanded, "attention_weights")),
            "positions-float32": changed(attention(), each(Tensor.float, "sampling_locations")),
            "positions-float64": changed(attention(), each(Tensor.double, "sampling_locations")),
            "positions-float16": changed(attention(), each(Tensor.half, "sampling_locations")),
            "positions-bfloat16": changed(attention(), each(Tensor.bfloat16, "sampling_locations")),
            "weights-float32": changed(attention(), each(Tensor.float, "attention_weights")),
            "weights-float16": changed(attention(), each(Tensor.half, "attention_weights")),
            "empty-batch": attention(batch=0),
            "no-queries": attention(queries=0),
            "no-heads": attention(heads=0),
            "no-levels": attention(levels=[]),
            "no-points": attention(points=0),
            "no-channels": attention(channels=0),
            "no-pixels": attention(levels=[(0, 0), (0, 3)]),
        }.items()
    ),
    *(
        Case(id, "deformable_aggregation", make)
        for id, make in {
            "plain": aggregation(),
            "batch-1": aggregation(batch=1),
            "one-camera": aggregation(cameras=[[(4, 6), (2, 3)]]),
            "six-cameras": aggregation(cameras=_SIX, batch=1, anchors=2),
            "cameras-outside": aggregation(cameras=_SIX, batch=1, low=-2.0, high=3.0),
            "cameras-unlike": aggregation(cameras=[[(4, 6), (1, 1)], [(3, 2), (5, 1)]]),
            "one-scale": aggregation(cameras=[[(4, 6)], [(4, 6)]]),
            "four-scales": aggregation(
                cameras=[[(8, 8), (4, 4), (2, 2), (1, 1)]], low=0.0, high=1.0
            ),
            "empty-scale": aggregation(cameras=[[(4, 6), (0, 3)], [(3, 3), (2, 0)]]),
            "groups-1": aggregation(groups=1),
            "groups-8": aggregation(channels=24, groups=8),
            "groups-all": aggregation(channels=6, groups=6),
            "channels-1": aggregation(channels=1, groups=1),
            "channels-147": aggregation(channels=147, groups=7, batch=1, anchors=2, points=2),
            "points-1": aggregation(points=1),
            "points-13": aggregation(points=13, batch=1, anchors=2),
            "one-anchor": aggregation(anchors=1),
            "anchors-33": aggregation(anchors=33, batch=1, points=1, channels=2),
            "all-outside": changed(aggregation(), far_outside),
            "gaps": changed(aggregation(), gaps),
            "same-map": changed(aggregation(), same_map),
            "one-place": changed(aggregation(anchors=9), one_place),
            "int32": changed(aggregation(), INT32),
            "python-ints": changed(aggregation(), python_ints),
            "no-starts": changed(aggregation(), no_starts),
            "strided": changed(aggregation(), each(strided)),
            "channels-apart": changed(aggregation(), each(turned, "feature_maps")),
            "expanded": changed(aggregation(), each(expanded)),
            "positions-float32": changed(aggregation(), each(Tensor.float, "sample_locations")),
            "positions-float16": changed(aggregation(), each(Tensor.half, "sample_locations")),
            "weights-float32": changed(aggregation(), each(Tensor.float, "weight")),
            "empty-batch": aggregation(batch=0),
            "no-anchors": aggregation(anchors=0),
            "no-points": aggregation(points=0),
            "no-cameras": aggregation(cameras=[]),
            "no-scales": aggregation(cameras=[[], []]),
            "no-channels": aggregation(channels=0, groups=1),
            "no-groups": aggregation(channels=0, groups=0),
            "no-pixels": aggregation(cameras=[[(0, 0), (0, 3)]]),
        }.items()
    ),
    *(
        Case(id, "geometric_kernel_attention", make)
        for id, make in {
            "plain": geometric(),
            "batch-1": geometric(batch=1),
            "one-level": geometric(levels=[(7, 9)]),
            "many-levels": geometric(levels=[(5, 7), (1, 1), (1, 6), (6, 1), (2, 2)], queries=3),
            "empty-level": geometric(levels=[(3, 4), (0, 4), (3, 0), (2, 2)]),
            "heads-5": geometric(heads=5),
            "head-dim-1": geometric(channels=1),
            "head-dim-16": geometric(channels=16),
            "head-dim-37": geometric(channels=37),
            "head-dim-48": geometric(channels=48, heads=1),
            "head-dim-147": geometric(channels=147, heads=1),
            "points-1": geometric(points=1),
            "points-15": geometric(points=15, queries=2),
            "queries-67": geometric(queries=67, batch=1, heads=1, channels=2, points=2),
            "inside": geometric(low=0.0, high=3.0),
            "far-outside": geometric(low=-1e4, high=1e4),
            "integer-valued": changed(geometric(), each(Tensor.floor, "sampling_locations")),
            "int64-positions": changed(geometric(), each(Tensor.long, "sampling_locations")),
            "int32-positions": changed(geometric(), each(Tensor.int, "sampling_locations")),
            "gaps": changed(geometric(), gaps),
            "same-map": changed(geometric(levels=[(4, 4), (3, 4)]), same_map),
            "one-place": changed(geometric(queries=16), one_place),
            "int32": changed(geometric(), INT32),
            "python-ints": changed(geometric(), python_ints),
            "no-starts": changed(geometric(), no_starts),
            "strided": changed(geometric(), each(strided)),
            "channels-apart": changed(geometric(), each(turned, "value")),
            "expanded": changed(geometric(), each(expanded)),
            "positions-float32": changed(geometric(), each(Tensor.float, "sampling_locations")),
            "weights-float32": changed(geometric(), each(Tensor.float, "attention_weights")),
            "empty-batch": geometric(batch=0),
            "no-queries": geometric(queries=0),
            "no-heads": geometric(heads=0),
            "no-levels": geometric(levels=[]),
            "no-points": geometric(points=0),
            "no-channels": geometric(channels=0),
            "no-pixels": geometric(levels=[(0, 0), (0, 3)]),
        }.items()
    ),
]

_CONVOLUTIONS = {
    "plain": convolution(),
    "batch-1": convolution(batch=1),
    "no-mask": convolution(mask=False),
    "no-bias": convolution(bias=False),
    "neither": convolution(mask=False, bias=False),
    "kernel-1x1": convolution(kernel=(1, 1), padding=0),
    "kernel-3x2": convolution(kernel=(3, 2)),
    "kernel-2x5": convolution(kernel=(2, 5), padding=(0, 2), channels=2, out_channels=2),
    "stride-2x1": convolution(stride=(2, 1)),
    "dilation-2x1": convolution(dilation=(2, 1), padding=(2, 1)),
    "padding-0": convolution(padding=0),
    "padding-2x0": convolution(padding=(2, 0)),
    "padding-wide": convolution(padding=4, batch=1, channels=2),
    "awkward": convolution(
        channels=6, kernel=(3, 2), stride=(2, 1), padding=(1, 0), dilation=(2, 1),
        groups=2, deformable_groups=3,
    ),
    "groups-2": convolution(groups=2, out_channels=6),
    "depthwise": convolution(groups=4),
    "deformable-groups-3": convolution(channels=6, deformable_groups=3),
    "deformable-groups-all": convolution(deformable_groups=4),
    "channels-1": convolution(channels=1, out_channels=1),
    "channels-19": convolution(channels=19, out_channels=3, size=(3, 4), batch=1),
    "out-channels-17": convolution(out_channels=17, channels=2, batch=1),
    "one-pixel": convolution(size=(1, 1)),
    "one-row": convolution(size=(1, 7)),
    "far-offsets": convolution(sigma=5.0),
    "all-outside": changed(convolution(), far_outside),
    "strided": changed(convolution(), each(strided)),
    "channels-last": changed(
        convolution(),
        each(lambda t: t.contiguous(memory_format=torch.channels_last), "input", "weight"),
    ),
    "expanded": changed(convolution(), each(expanded)),
    "positions-float32": changed(convolution(), each(Tensor.float, "offset")),
    "positions-float64": changed(convolution(), each(Tensor.double, "offset")),
    "mask-float32": changed(convolution(), each(Tensor.float, "mask")),
    "empty-batch": convolution(batch=0),
    "no-out-channels": convolution(out_channels=0),
    "no-output": convolution(size=(2, 4), kernel=(3, 3), padding=(0, 1)),
}  # fmt: skip
CASES += [Case(id, "deform_conv2d", make) for id, make in _CONVOLUTIONS.items()]
CASES += [
    Case(id, "deform_columns", columns(_CONVOLUTIONS[id]))
    for id in (
        "plain", "no-mask", "kernel-1x1", "kernel-3x2", "stride-2x1", "dilation-2x1", "awkward",
        "deformable-groups-all", "channels-19", "one-pixel", "far-offsets", "all-outside",
        "strided", "channels-last", "expanded", "empty-batch", "no-output", "positions-float32",
    )
]  # fmt: skip
CASES += [
    Case("padding-unpaired", "deform_columns", changed(columns(convolution()), unpaired)),
    Case("no-channels", "deform_columns", columns(convolution(channels=0))),
    Case("no-image", "deform_columns", columns(convolution(size=(0, 3)))),
]


def _out_size(
    size: Size, kernel: Size, stride: int | Size, padding: int | Size, dilation: int | Size
) -> Size:
    def along(axis: int) -> int:
        step, pad, spread = (
            n if isinstance(n, int) else n[axis] for n in (stride, padding, dilation)
        )
        return (size[axis] + 2 * pad - spread * (kernel[axis] - 1) - 1) // step + 1

    return along(0), along(1)


def _sizes(maps: Sequence[Size], device: str) -> Tensor:
    return torch.tensor(maps, dtype=torch.int64, device=device).view(len(maps), 2)


def _starts(maps: Sequence[Size], device: str) -> Tensor:
    starts = [sum(h * w for h, w in maps[:index]) for index in range(len(maps))]
    return torch.tensor(starts, dtype=torch.int64, device=device)


def _normal(generator: Generator, shape: Sequence[int]) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _uniform(generator: Generator, shape: Sequence[int], low: float, high: float) -> Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.float64) * (high - low) + low
