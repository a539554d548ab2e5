"""Where the feature maps lie: (height, width) and first row of each, as tensors on the features'
device.

Metadata on the host (Python ints, CPU tensors) are checked by value and their device copies
remembered, so that a training step neither copies nor synchronises. Metadata on a device are taken
as they are: reading them would synchronise, and the kernels treat rows outside the features as
outside. With PLIANT_CHECK=1 at import they are read and checked, too.
"""

import functools
import numbers
import os
from collections.abc import Sequence
from itertools import chain
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
    loc: str
    weight: str
    axes: str  # of the maps, "L" or "cam scale": loc has the first, weight the second


Metadata = Tensor | Sequence[Any]
Read = tuple[tuple[int, ...] | None, tuple[int, ...] | None]  # integers, flat, and their shape
_setting = os.environ.get("PLIANT_CHECK") or "0"
if _setting not in ("0", "1"):
    raise ValueError(f"PLIANT_CHECK must be 0 or 1, got {_setting}")
CHECKED = _setting == "1"  # to ask at each call takes longer than a check
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


def taken_as_given(value: Tensor) -> bool:
    """Whether metadata on value's device are not read, and so right by their signatures alone."""
    return value.is_cuda and not CHECKED


def resolve(
    names: Names,
    value: Tensor,
    shapes: Metadata,
    starts: Metadata | None,
    expected: tuple[int, ...],
    tracing: bool,
) -> tuple[Tensor, Tensor]:
    """`shapes` and `starts`, dense, on value's device; without starts, one map after another.

    `expected` are the sizes of `names.axes`.
    """
    wait = value.is_cuda and CHECKED
    read = _host(names.op, names.shapes, shapes, (*expected, 2), tracing, wait)
    read_starts: Read = (None, None)
    if starts is not None:
        read_starts = _host(names.op, names.starts, starts, expected, tracing, wait)
    if read[0] is not None and (starts is None or read_starts[0] is not None):
        device = value.device
        on_host = (names, expected, read, read_starts, value.shape[1], device)
        on_cuda = value.is_cuda
        if tracing or (on_cuda and torch.cuda.is_current_stream_capturing()):
            return _from_host(*on_host)
        stream = torch._C._cuda_getCurrentRawStream(device.index) if on_cuda else 0
        return _remembered(*on_host, stream)

    _check_given(names, expected, read[1], read_starts[1])
    for name, x in ((names.shapes, shapes), (names.starts, starts)):
        if isinstance(x, Tensor) and x.device.type == "meta" != value.device.type:
            raise ValueError(f"{names.op}: {name} must hold numbers, got a meta tensor")
    shapes = _dense(shapes, read, value.device)
    if starts is None:
        heights, widths = shapes.to(torch.int64).unbind(-1)
        areas = (heights * widths).flatten()
        starts = (areas.cumsum(0) - areas).view(shapes.shape[:-1])
        return shapes, starts
    return shapes, _dense(starts, read_starts, value.device)


def _dense(x: Metadata, read: Read, device: torch.device) -> Tensor:
    if isinstance(x, Tensor) and x.device == device and x.is_contiguous():
        return x
    numbers, size = read
    if numbers is not None and size is not None:
        return _filled(numbers, device).view(size)
    return torch.as_tensor(x, device=device).contiguous()


def _filled(numbers: Sequence[Any], device: torch.device) -> Tensor:
    """On a device number by number: a copy would wait, and no graph could capture it."""
    if torch.compiler.is_compiling() or device.type == "cpu":
        return torch.tensor(numbers, dtype=torch.int64, device=device)
    fills = [torch.full((1,), v, dtype=torch.int64, device=device) for v in numbers]
    return torch.cat(fills) if fills else torch.empty(0, dtype=torch.int64, device=device)


def _check_sizes(names: Names, shapes: tuple[int, ...], starts: tuple[int, ...] | None) -> None:
    sizes: dict[str, int] = {}
    checks.shape(names.op, names.shapes, shapes, f"{names.axes} 2", sizes)
    if starts is not None:
        checks.shape(names.op, names.starts, starts, names.axes, sizes)


def _check_counts(names: Names, expected: tuple[int, ...], shapes: tuple[int, ...]) -> None:
    others = (names.loc, names.weight)
    axes = zip(names.axes.split(), shapes, others, expected, strict=False)
    for axis, got, other, size in axes:
        checks.count(names.op, names.shapes, axis, got, other, size)


@checks.once
def _check_given(
    names: Names,
    expected: tuple[int, ...],
    shapes: tuple[int, ...],
    starts: tuple[int, ...] | None,
) -> None:
    _check_sizes(names, shapes, starts)
    _check_counts(names, expected, shapes)


def _host(
    op: str, name: str, x: Metadata, expected: tuple[int, ...], tracing: bool, wait: bool
) -> Read:
    """The integers of `x`, flat (None if they lie on a device, unless we may `wait` for it), and
    its shape: as `expected` where an empty list does not say.
    """
    if not isinstance(x, (Tensor, list, tuple)) and hasattr(x, "__array__"):  # NumPy's
        x = torch.as_tensor(x)
    if isinstance(x, Tensor):
        if x.layout is not torch.strided:
            raise TypeError(f"{op}: {name} must be a dense tensor, got {x.layout}")
        if x.dtype not in INDEX_DTYPES:
            got = str(x.dtype).removeprefix("torch.")
            raise TypeError(f"{op}: {name} must be int32 or int64, got {got}")
        readable = x.is_cpu or (x.is_cuda and wait)
        if tracing or not readable or _is_wrapped(x):
            return None, x.shape
        rows = x.tolist() if x.dim() else [x.item()]
        while rows and type(rows[0]) is list:
            rows = list(chain(*rows))
        return tuple(rows), x.shape
    flat: Any = x
    lists, size = (list, tuple), [len(x)] if isinstance(x, (list, tuple)) else []
    while size and flat and isinstance(flat[0], lists) and all(isinstance(v, lists) for v in flat):
        size.append(len(flat[0]))
        if any(len(row) != size[-1] for row in flat):
            raise ValueError(f"{op}: {name} must have rows of one length, got {x!r}")
        flat = list(chain(*flat))
    if size and not flat:
        size += expected[len(size) :]
    if size and not tracing and set(map(type, flat)) == {int}:  # the common case is quick to see
        return tuple(flat), tuple(size)
    integers = (int, torch.SymInt, numbers.Integral)
    if not size or any(isinstance(v, bool) or not isinstance(v, integers) for v in flat):
        raise TypeError(
            f"{op}: {name} must hold integers (an int32 or int64 tensor, or Python ints), got {x!r}"
        )
    plain: Any = (v if isinstance(v, (int, torch.SymInt)) else int(v) for v in flat)
    return tuple(plain), tuple(size)


def _from_host(
    names: Names,
    expected: tuple[int, ...],
    read: Any,
    read_starts: Read,
    stored: int,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    (shapes, size), (starts, starts_size) = read, read_starts
    _check_sizes(names, size, starts_size)
    heights, widths = shapes[0::2], shapes[1::2]
    areas = [h * w for h, w in zip(heights, widths, strict=True)]
    if starts is None:
        starts = tuple(sum(areas[:i]) for i in range(len(areas)))
    if all(isinstance(v, int) for v in (*shapes, *starts, stored)):  # a tracer's may be symbols
        _check_values(names, shapes, starts, size, stored)
    _check_counts(names, expected, size)
    flat = _filled((*shapes, *starts), device)
    return flat[: len(shapes)].view(size), flat[len(shapes) :].view(size[:-1])


@functools.lru_cache(maxsize=256)
def _remembered(
    names: Names,
    expected: tuple[int, ...],
    read: Read,
    read_starts: Read,
    stored: int,
    device: torch.device,
    stream: int,
) -> tuple[Tensor, Tensor]:
    # The stream is part of the key: a tensor filled on one stream is not yet there for another.
    # What is remembered must serve in every mode, so no mode of this call may mark it.
    with torch.inference_mode(False), torch._C._DisableFuncTorch():
        return _from_host(names, expected, read, read_starts, stored, device)


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
        if h >= 2**31 or w >= 2**31:
            raise ValueError(
                f"{names.op}: {names.shapes}{at} must be (height, width) below 2**31, "
                f"got ({h}, {w})"
            )
        if start < 0:
            raise ValueError(f"{names.op}: {names.starts}{at} must be >= 0, got {start}")
        if start + h * w > stored:
            raise ValueError(
                f"{names.op}: the map of {names.shapes}{at} = ({h}, {w}) from row {start} on must "
                f"end within the {stored} rows of {names.value}, got {start + h * w}"
            )
