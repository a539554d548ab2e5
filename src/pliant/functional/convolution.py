"""Deformable convolution (DCN v1 and v2)."""

import torch
from torch import Tensor

from ..sampling import checks, direct, ops
from ..sampling.direct import Steps

IntPair = int | tuple[int, ...] | list[int]


def deform_conv2d(
    input: Tensor,
    offset: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: IntPair = 1,
    padding: IntPair = 0,
    dilation: IntPair = 1,
    mask: Tensor | None = None,
    *,
    impl: str | None = None,
) -> Tensor:
    """Convolution whose every tap is moved by an offset and, with a mask, weighted (DCN v2;
    without one, v1).

    ``out = conv2d(columns, weight, bias, stride=(kh, kw))`` with the ``columns`` of
    :func:`deform_columns`, which are never stored as a whole. Under autocast it runs in the
    autocast dtype, as ``conv2d`` does; offsets keep theirs.

    Args:
        input: ``[N, C, H, W]``, contiguous or channels-last. Differentiable.
        offset: ``[N, 2 * dg * kh * kw, Ho, Wo]``, for each deformable group and tap (y, x) in
            pixels. Differentiable.
        weight: ``[Co, C / groups, kh, kw]``; the groups follow from the shapes. Differentiable.
        bias: ``[Co]`` or None. Differentiable.
        stride, padding, dilation: an int or (height, width).
        mask: ``[N, dg * kh * kw, Ho, Wo]`` or None. Differentiable.
        impl: None (the best for the device), "reference", "cpu" or "triton".

    Returns:
        ``[N, Co, Ho, Wo]`` in the dtype of ``input``, with its memory format.

    Example:
        >>> import torch, pliant
        >>> x, weight = torch.rand(2, 16, 8, 8), torch.rand(32, 16, 3, 3)
        >>> offset, mask = torch.rand(2, 18, 8, 8), torch.rand(2, 9, 8, 8)
        >>> pliant.deform_conv2d(x, offset, weight, padding=1, mask=mask).shape
        torch.Size([2, 32, 8, 8])
    """
    op, tensors = "deform_conv2d", (input, offset, mask, weight, bias)
    key, given = direct.convolution_key(*tensors, (stride, padding, dilation), impl)
    if key is not None and (plan := direct.plans.recall(key, *given)):
        return plan(*tensors)  # type: ignore[no-any-return]
    _check_conv(
        checks.signature(op, "input", input),
        checks.signature(op, "offset", offset),
        checks.signature(op, "weight", weight),
        checks.optional(op, "bias", bias),
        checks.optional(op, "mask", mask),
        steps := (
            checks.pair(op, "stride", stride, 1),
            checks.pair(op, "padding", padding, 0),
            checks.pair(op, "dilation", dilation, 1),
        ),
        checks.autocast(input.device.type),
    )
    chosen = ops.implementation(op, impl, input, offset, mask)
    if key is None or checks.autocast(input.device.type) or not direct.plannable(*given):
        return convolve(*tensors, steps, chosen)
    plan = direct.Convolution(tensors, steps, chosen)
    direct.plans.keep(key, plan, *given)
    return plan(*tensors)


def convolve(
    input: Tensor,
    offset: Tensor,
    mask: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    steps: Steps,
    impl: str,
) -> Tensor:
    """The convolution of operands that were checked, in autocast's dtype where that is on."""
    if checks.autocast(input.device.type) and input.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(input.device.type)
        input, weight = input.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    return ops.deform_conv(input, offset, mask, weight, bias, *steps, impl)


def deform_columns(
    input: Tensor,
    offset: Tensor,
    kernel_size: IntPair,
    stride: IntPair = 1,
    padding: IntPair = 0,
    dilation: IntPair = 1,
    mask: Tensor | None = None,
    *,
    impl: str | None = None,
) -> Tensor:
    """The features that a deformable convolution sees, resampled: its input to an ordinary strided
    convolution.

    ``columns[n, c, oy*kh + ky, ox*kw + kx] = mask * bilinear(input[n, c], y, x)`` where
    ``y = oy * stride - padding + ky * dilation + offset``, x likewise. A position counts while it
    is less than a pixel outside; a corner outside the image reads as zero.

    Args:
        input: ``[N, C, H, W]``. Differentiable.
        offset: ``[N, 2 * dg * kh * kw, Ho, Wo]``, for each deformable group and tap (y, x) in
            pixels. Its ``Ho`` and ``Wo`` decide the output's size. Differentiable.
        kernel_size: an int or (height, width).
        stride, padding, dilation: an int or (height, width); the padding is that at the top and at
            the left.
        mask: ``[N, dg * kh * kw, Ho, Wo]`` or None. Differentiable.
        impl: None (the best for the device), "reference", "cpu" or "triton".

    Returns:
        ``[N, C, Ho * kh, Wo * kw]`` in the dtype of ``input``.

    Example:
        >>> import torch, pliant
        >>> x, offset = torch.rand(2, 16, 8, 8), torch.rand(2, 18, 8, 8)
        >>> pliant.deform_columns(x, offset, 3, padding=1).shape
        torch.Size([2, 16, 24, 24])
    """
    op = "deform_columns"
    kernel = checks.pair(op, "kernel_size", kernel_size, 1)
    steps = (
        checks.pair(op, "stride", stride, 1),
        checks.pair(op, "padding", padding, 0),
        checks.pair(op, "dilation", dilation, 1),
    )
    _check_columns(
        op,
        checks.signature(op, "input", input),
        checks.signature(op, "offset", offset),
        checks.optional(op, "mask", mask),
        kernel,
    )
    chosen = ops.implementation(op, impl, input, offset, mask)
    return ops.deform_columns(input, offset, mask, kernel, *steps, chosen)


@checks.once
def _check_columns(
    op: str,
    input: checks.Signature,
    offset: checks.Signature,
    mask: checks.Signature | None,
    kernel: tuple[int, int],
) -> None:
    sizes: dict[str, int] = {}
    checks.shape(op, "input", input.shape, "N C H W", sizes)
    checks.shape(op, "offset", offset.shape, "N 2*dg*kh*kw Ho Wo", sizes)
    points = kernel[0] * kernel[1]
    offsets = sizes["2*dg*kh*kw"]
    if offsets == 0 or offsets % (2 * points):
        raise ValueError(
            f"{op}: offset must have a multiple of 2 * kh * kw = {2 * points} channels, "
            f"got {offsets}"
        )
    groups = offsets // (2 * points)
    checks.divides(
        op, "the channels C of input", sizes["C"], "the deformable groups dg of offset", groups
    )
    checks.feature_dtype(op, "input", input.dtype)
    checks.feature_dtype(op, "offset", offset.dtype)
    checks.same_device(op, "input", input.device, {"offset": offset})
    if mask is not None:
        checks.shape(
            op, "mask", mask.shape, "N dg*kh*kw Ho Wo", {**sizes, "dg*kh*kw": groups * points}
        )
        checks.feature_dtype(op, "mask", mask.dtype)
        checks.same_device(op, "input", input.device, {"mask": mask})


@checks.once
def _check_conv(
    input: checks.Signature,
    offset: checks.Signature,
    weight: checks.Signature,
    bias: checks.Signature | None,
    mask: checks.Signature | None,
    steps: Steps,
    autocast: bool,
) -> None:
    op = "deform_conv2d"
    sizes: dict[str, int] = {}
    checks.shape(op, "input", input.shape, "N C H W", sizes)
    checks.shape(op, "weight", weight.shape, "Co C/groups kh kw", sizes)
    if sizes["kh"] < 1 or sizes["kw"] < 1:
        raise ValueError(
            f"{op}: weight must have a kernel of at least 1x1, got {sizes['kh']}x{sizes['kw']}"
        )
    if sizes["C"] or sizes["C/groups"]:
        checks.divides(
            op,
            "the channels C of input",
            sizes["C"],
            "the channels C/groups of weight",
            sizes["C/groups"],
        )
        groups = sizes["C"] // sizes["C/groups"]
        checks.divides(
            op,
            "the output channels Co of weight",
            sizes["Co"],
            "the groups C / (C/groups)",
            max(groups, 1),
        )
    _check_columns(op, input, offset, mask, (sizes["kh"], sizes["kw"]))
    expected = tuple(
        (size + 2 * pad - gap * (taps - 1) - 1) // step + 1
        for size, taps, step, pad, gap in zip(
            (sizes["H"], sizes["W"]), (sizes["kh"], sizes["kw"]), *steps, strict=True
        )
    )
    if any(size < 0 for size in expected):
        padded = [sizes[a] + 2 * pad for a, pad in zip("HW", steps[1], strict=True)]
        reach = [gap * (sizes[a] - 1) + 1 for a, gap in zip(("kh", "kw"), steps[2], strict=True)]
        raise ValueError(
            f"{op}: input must be, with its padding, as large as the kernel with its dilation, "
            f"{reach}, got {padded}"
        )
    if tuple(offset.shape[2:]) != expected:
        raise ValueError(
            f"{op}: offset must have the output's size [Ho, Wo] = {list(expected)}, "
            f"got {list(offset.shape[2:])}"
        )
    others = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    if bias is not None:
        checks.shape(op, "bias", bias.shape, "Co", sizes)
    for name, other in others.items():
        checks.feature_dtype(op, name, other.dtype)
        cast = autocast and torch.float64 not in (other.dtype, input.dtype)
        if other.dtype != input.dtype and not cast:
            names = [str(d).removeprefix("torch.") for d in (input.dtype, other.dtype)]
            raise TypeError(
                f"{op}: {name} must have the dtype of input, {names[0]}, got {names[1]}"
            )
    checks.same_device(op, "input", input.device, others)
