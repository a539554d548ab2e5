"""The vendor's deformable convolution: offsets in blocks, settings as lists, columns returned."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import pliant

from ...sampling import checks
from ..spelling import also_spelled, check_groups, gradients


@also_spelled(self="input", dilations="dilation")
def npu_deformable_conv2d(
    input: Tensor,
    weight: Tensor,
    offset: Tensor,
    bias: Tensor | None,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int] = (1, 1, 1, 1),
    groups: int = 1,
    deformable_groups: int = 1,
    modulated: bool = True,
) -> tuple[Tensor, Tensor]:
    """Deformable convolution: (output ``[N, Co, Ho, Wo]``, columns ``[N, C, Ho * kh, Wo * kw]``).

    The columns are `pliant.deform_columns`, the output is their convolution; a gradient that
    arrives at either counts.

    Args:
        input: ``[N, C, H, W]``. Differentiable.
        weight: ``[Co, C / groups, kh, kw]``. Differentiable.
        offset: ``[N, 3 * dg * kh * kw, Ho, Wo]``: the x offsets, the y offsets and the mask, each a
            block of ``dg * kh * kw`` channels; with ``modulated=False`` the first two blocks alone.
            Differentiable.
        bias: ``[Co]`` or None. Differentiable.
        kernel_size: ``[kh, kw]``.
        stride, dilation: ``[1, 1, height, width]``.
        padding: ``[top, bottom, left, right]``. Since ``offset`` decides the output's size, bottom
            and right change nothing.

    Example:
        >>> import torch
        >>> from pliant.compat import torch_npu
        >>> x, weight = torch.rand(2, 8, 6, 6), torch.rand(4, 8, 3, 3)
        >>> output, columns = torch_npu.npu_deformable_conv2d(
        ...     x, weight, torch.rand(2, 27, 6, 6), None, [3, 3], [1, 1, 1, 1], [1, 1, 1, 1]
        ... )
        >>> output.shape, columns.shape
        (torch.Size([2, 4, 6, 6]), torch.Size([2, 8, 18, 18]))
    """
    settings = _settings(kernel_size, stride, padding, dilation, op := "npu_deformable_conv2d")
    _check(op, input, weight, offset, settings, groups, deformable_groups, modulated, bias=bias)
    columns = _columns(input, offset, modulated, **settings)
    kernel = settings["kernel_size"]
    return torch.conv2d(columns, weight, bias, stride=kernel, groups=groups), columns


@also_spelled(self="input", offset_out="columns", dilations="dilation")
def npu_deformable_conv2dbk(
    input: Tensor,
    grad_output: Tensor,
    columns: Tensor,
    weight: Tensor,
    offset: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int] = (1, 1, 1, 1),
    groups: int = 1,
    deformable_groups: int = 1,
    modulated: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of (input, weight, offset, bias), given that of the output and the columns."""
    settings = _settings(kernel_size, stride, padding, dilation, op := "npu_deformable_conv2dbk")
    others = {"grad_output": grad_output, "columns": columns}
    _check(op, input, weight, offset, settings, groups, deformable_groups, modulated, **others)
    convolution = settings["kernel_size"], (0, 0), (1, 1), False, (0, 0), groups
    grad_columns, grad_weight, grad_bias = torch.ops.aten.convolution_backward(
        grad_output, columns, weight, [weight.shape[0]], *convolution, [True, True, True]
    )
    grad_input, grad_offset = gradients(
        lambda x, moved: _columns(x, moved, modulated, **settings), (input, offset), grad_columns
    )
    return grad_input, grad_weight, grad_offset, grad_bias  # type: ignore[return-value]


def _columns(input: Tensor, offset: Tensor, modulated: bool, **settings: Any) -> Tensor:
    x, y, *mask = offset.chunk(3 if modulated else 2, dim=1)
    pairs = torch.stack((y, x), dim=2).flatten(1, 2)  # [N, 2 * dg * kh * kw, Ho, Wo]
    return pliant.deform_columns(input, pairs, mask=mask[0] if mask else None, **settings)


def _settings(
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    op: str,
) -> dict[str, tuple[int, int]]:
    """The vendor's lists as `pliant.deform_columns` takes them."""
    top, _, left, _ = _four(op, "padding", padding, "[top, bottom, left, right]", 0)
    return {
        "kernel_size": checks.pair(op, "kernel_size", kernel_size, 1),
        "stride": _last_two(op, "stride", stride),
        "padding": (top, left),
        "dilation": _last_two(op, "dilation", dilation),
    }


def _last_two(op: str, name: str, x: Sequence[int]) -> tuple[int, int]:
    batch, channel, height, width = _four(op, name, x, "[1, 1, height, width]", 1)
    if (batch, channel) != (1, 1):
        raise ValueError(f"{op}: {name} must be [1, 1, height, width], got {list(x)}")
    return height, width


def _four(op: str, name: str, x: Sequence[int], meaning: str, least: int) -> Sequence[int]:
    ints = isinstance(x, (list, tuple)) and all(
        isinstance(v, (int, torch.SymInt)) and not isinstance(v, bool) for v in x
    )
    if not ints or len(x) != 4:
        raise TypeError(f"{op}: {name} must be four ints {meaning}, got {x!r}")
    if any(v < least for v in x):
        raise ValueError(f"{op}: {name} must be at least {least}, got {list(x)}")
    return x


def _check(
    op: str,
    input: Tensor,
    weight: Tensor,
    offset: Tensor,
    settings: dict[str, tuple[int, int]],
    groups: int,
    deformable_groups: int,
    modulated: bool,
    **others: Tensor | None,
) -> None:
    blocks = 3 if modulated else 2
    check_groups(op, "input", input, offset, weight, groups, deformable_groups, blocks)
    (n, c), (co, _, *kernel), (ho, wo) = input.shape[:2], weight.shape, offset.shape[2:]
    if tuple(kernel) != (size := settings["kernel_size"]):
        raise ValueError(f"{op}: kernel_size must be that of weight, {kernel}, got {list(size)}")
    sizes = {"N": n, "C": c, "Co": co, "Ho": ho, "Wo": wo}
    sizes |= {"Ho*kh": ho * size[0], "Wo*kw": wo * size[1]}
    axes = {"bias": "Co", "grad_output": "N Co Ho Wo", "columns": "N C Ho*kh Wo*kw"}
    given = {name: checks.signature(op, name, x) for name, x in others.items() if x is not None}
    for name, x in given.items():
        checks.shape(op, name, x.shape, axes[name], sizes)
    given["weight"] = checks.signature(op, "weight", weight)
    if not checks.autocast(input.device.type):
        for name, x in given.items():
            if x.dtype != input.dtype:
                raise TypeError(
                    f"{op}: {name} must have the dtype of input, {_name(input.dtype)}, "
                    f"got {_name(x.dtype)}"
                )
    given["offset"] = checks.signature(op, "offset", offset)
    checks.same_device(op, "input", input.device, given)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
