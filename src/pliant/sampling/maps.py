"""Where the feature maps lie: (height, width) and first row of each, as tensors on the features'
device.

Metadata on the host (Python ints, CPU tensors) are checked by value and their device copies
remembered, so that a training step neither copies nor synchronises. Metadata on a device are taken
as they are: reading them would synchronise, and the kernels treat rows outside the features as
outside. PLIANT_CHECK=1 reads and checks them too.
"""

import functools
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import checks
from .problem import INDEX_DTYPES


class Names(NamedTuple):
    """How the operator calls its arguments, for messages."""

    op: str
    value: str
    shapes: str
    starts: str
    axes: str  # "L" or "cam scale"


Metadata = Tensor | Sequence[Any]


def resolve(
    names: Names, value: Tensor, shapes: Metadata, starts: Metadata | None
) -> tuple[Tensor, Tensor]:
    """`shapes` [axes..., 2] and `starts` [axes...], checked, on value's device."""
    rank = len(names.axes.split())
    sizes: dict[str, int] = {}
    shapes_host, shapes_size = _host(names.op, names.shapes, shapes, rank + 1)
    checks.shape(names.op, names.shapes, shapes_size, f"{names.axes} 2", sizes)
    starts_host: tuple[int, ...] | None = None
    if starts is not None:
        starts_host, starts_size = _host(names.op, names.starts, starts, rank)
        checks.shape(names.op, names.starts, starts_size, names.axes, sizes)

    if shapes_host is not None and (starts is None or starts_host is not None):
        arguments = (
            names,
            shapes_host,
            starts_host,
            tuple(shapes_size),
            value.shape[1],
            value.device,
        )
        if checks.tracing() or (value.is_cuda and torch.cuda.is_current_stream_capturing()):
            return _from_host(*arguments)
        stream = torch._C._cuda_getCurrentRawStream(value.device.index) if value.is_cuda else 0
        return _remembered(*arguments, stream)

    shapes = torch.as_tensor(shapes, device=value.device)
    if starts is None:
        areas = shapes.prod(-1).flatten()
        starts = (areas.cumsum(0) - areas).view(shapes.shape[:-1])
    return shapes, torch.as_tensor(starts, device=value.device)


def _host(
    op: str, name: str, x: Metadata, rank: int
) -> tuple[tuple[int, ...] | None, Sequence[int]]:
    """The integers of `x`, flat (None if reading them would wait for a device), and its shape."""
    if isinstance(x, Tensor):
        if x.dtype not in INDEX_DTYPES:
            raise TypeError(
                f"{op}: {name} must be int32 or int64, got {str(x.dtype).removeprefix('torch.')}"
            )
        readable = x.device.type == "cpu" or (x.is_cuda and os.environ.get("PLIANT_CHECK") == "1")
        if checks.tracing() or not readable:
            return None, x.shape
        return tuple(x.reshape(-1).tolist()), x.shape
    flat, size = x, [len(x)] if isinstance(x, (list, tuple)) else []
    for _ in range(rank - 1):
        if not size or not all(isinstance(row, (list, tuple, torch.Size)) for row in flat):
            break
        size.append(len(flat[0]) if flat else 2)
        if any(len(row) != size[-1] for row in flat):
            raise ValueError(f"{op}: {name} must have rows of one length, got {x!r}")
        flat = [v for row in flat for v in row]
    if not size or any(isinstance(v, bool) or not isinstance(v, (int, torch.SymInt)) for v in flat):
        raise TypeError(
            f"{op}: {name} must hold integers (an int32 or int64 tensor, or Python ints), got {x!r}"
        )
    return tuple(flat), size


def _from_host(
    names: Names,
    shapes: tuple[int, ...],
    starts: tuple[int, ...] | None,
    size: tuple[int, ...],
    stored: int,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    heights, widths = shapes[0::2], shapes[1::2]
    areas = [h * w for h, w in zip(heights, widths, strict=True)]
    if starts is None:
        starts = tuple(sum(areas[:i]) for i in range(len(areas)))
    if not checks.tracing():
        _check_values(names, shapes, starts, size, stored)
    if torch.compiler.is_compiling() or device.type == "cpu":
        flat = torch.tensor([*shapes, *starts], dtype=torch.int64, device=device)
    else:  # filled on the device, scalar by scalar: nothing to wait for, and a graph may capture it
        fills = [torch.full((1,), v, dtype=torch.int64, device=device) for v in (*shapes, *starts)]
        flat = torch.cat(fills) if fills else torch.empty(0, dtype=torch.int64, device=device)
    return flat[: len(shapes)].view(size), flat[len(shapes) :].view(size[:-1])


@functools.lru_cache(maxsize=256)
def _remembered(
    names: Names,
    shapes: tuple[int, ...],
    starts: tuple[int, ...] | None,
    size: tuple[int, ...],
    stored: int,
    device: torch.device,
    stream: int,
) -> tuple[Tensor, Tensor]:
    # The stream is part of the key: a tensor filled on one stream is not yet there for another.
    return _from_host(names, shapes, starts, size, stored, device)


def _check_values(
    names: Names,
    shapes: tuple[int, ...],
    starts: tuple[int, ...],
    size: tuple[int, ...],
    stored: int,
) -> None:
    for i, start in enumerate(starts):
        h, w = shapes[2 * i], shapes[2 * i + 1]
        at = "".join(f"[{j}]" for j in (divmod(i, size[1]) if len(size) == 3 else (i,)))
        if h < 0 or w < 0:
            raise ValueError(
                f"{names.op}: {names.shapes}{at} must be (height, width) >= 0, got ({h}, {w})"
            )
        if start < 0:
            raise ValueError(f"{names.op}: {names.starts}{at} must be >= 0, got {start}")
        if start + h * w > stored:
            raise ValueError(
                f"{names.op}: the map of {names.shapes}{at} = ({h}, {w}) from row {start} on must end "
                f"within the {stored} rows of {names.value}, got {start + h * w}"
            )
