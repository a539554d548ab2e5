"""The vendor's deformable convolution: offsets in blocks, settings as lists, columns returned."""

from collections.abc import Sequence

import torch
from torch import Tensor

import pliant

from ...functional.convolution import convolve
from ...sampling import checks, ops
from ...sampling.direct import Steps
from ..spelling import also_spelled, check_groups


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

    They are `pliant.deform_conv2d` and `pliant.deform_columns`; a gradient that arrives at either
    counts.

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
    kernel, steps = _settings(kernel_size, stride, padding, dilation, op := "npu_deformable_conv2d")
    _check(op, input, weight, offset, kernel, groups, deformable_groups, modulated, bias=bias)
    moves, mask = _interleaved(offset, modulated)
    columns = pliant.deform_columns(input, moves, kernel, *steps, mask)
    return convolve(input, moves, mask, weight, bias, steps, ""), columns


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
    """The gradients of (input, weight, offset, bias), given that of the output.

    The columns are checked and not needed: the kernels sample again sooner than they read them.
    """
    op = "npu_deformable_conv2dbk"
    kernel, steps = _settings(kernel_size, stride, padding, dilation, op)
    others = {"grad_output": grad_output, "columns": columns}
    _check(op, input, weight, offset, kernel, groups, deformable_groups, modulated, **others)
    moves, mask = _interleaved(offset, modulated)
    operands = (input, moves, mask, weight, None, *steps, "")
    needs = [True, True, mask is not None, True, False]
    by_input, by_moves, by_mask, by_weight, _ = ops.deform_conv.gradients(
        grad_output, *operands, needs, checked=True
    )
    y, x = by_moves.unflatten(1, (-1, 2)).unbind(2)
    by_offset = torch.cat((x, y) if mask is None else (x, y, by_mask), dim=1)
    return by_input, by_weight, by_offset, grad_output.sum((0, 2, 3))


def _interleaved(offset: Tensor, modulated: bool) -> tuple[Tensor, Tensor | None]:
    """Blocks of x and y as pairs (y, x) ``[N, 2 * dg * kh * kw, Ho, Wo]``, and the mask."""
    x, y, *mask = offset.chunk(3 if modulated else 2, dim=1)
    return torch.stack((y, x), dim=2).flatten(1, 2), mask[0] if mask else None


def _settings(
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    op: str,
) -> tuple[tuple[int, int], Steps]:
    """The vendor's lists as ours: the kernel, and (stride, padding, dilation)."""
    top, _, left, _ = _four(op, "padding", padding, "[top, bottom, left, right]", 0)
    kernel = checks.pair(op, "kernel_size", kernel_size, 1)
    steps = _last_two(op, "stride", stride), (top, left), _last_two(op, "dilation", dilation)
    return kernel, steps


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
    checks.bounds(op, name, list(x), x, least)
    return x


def _check(
    op: str,
    input: Tensor,
    weight: Tensor,
    offset: Tensor,
    kernel: tuple[int, int],
    groups: int,
    deformable_groups: int,
    modulated: bool,
    **others: Tensor | None,
) -> None:
    blocks = 3 if modulated else 2
    check_groups(op, "input", input, offset, weight, groups, deformable_groups, blocks)
    (n, c), (co, _, *taps), (ho, wo) = input.shape[:2], weight.shape, offset.shape[2:]
    if tuple(taps) != kernel:
        raise ValueError(f"{op}: kernel_size must be that of weight, {taps}, got {list(kernel)}")
    sizes = {"N": n, "C": c, "Co": co, "Ho": ho, "Wo": wo}
    sizes |= {"Ho*kh": ho * kernel[0], "Wo*kw": wo * kernel[1]}
    axes = {"bias": "Co", "grad_output": "N Co Ho Wo", "columns": "N C Ho*kh Wo*kw"}
    given = {name: checks.signature(op, name, x) for name, x in others.items() if x is not None}
    for name, x in given.items():
        checks.shape(op, name, x.shape, axes[name], sizes)
    given["weight"] = checks.signature(op, "weight", weight)
    checks.feature_dtype(op, "input", input.dtype)
    casts = "grad_output" not in given and checks.autocast(input.device.type)
    for name, x in given.items():
        if x.dtype != input.dtype and not (casts and torch.float64 not in (x.dtype, input.dtype)):
            raise TypeError(
                f"{op}: {name} must have the dtype of input, {_name(input.dtype)}, "
                f"got {_name(x.dtype)}"
            )
    given["offset"] = checks.signature(op, "offset", offset)
    checks.feature_dtype(op, "offset", offset.dtype)
    checks.same_device(op, "input", input.device, given)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
