"""Deformable convolution, and its columns alone: tensors to pointers and strides, and one call."""

import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...sampling.problem import accumulator, position_dtype
from .launch import _DTYPES, _like, strided
from .library import library

Pair = Sequence[int]
MaybeTensor = Tensor | None

_NONE = (None,) * 5
_CALL = struct.Struct("69q").pack  # ConvolutionCall of convolution.h
PACKED_BYTES = 64 << 20  # of images that are packed at a time, if they are more than one


class Geometry(NamedTuple):
    """How the taps of the kernel lie, (height, width) each."""

    kernel: Pair
    stride: Pair
    padding: Pair
    dilation: Pair


def deform_columns(
    input: Tensor,
    offset: Tensor,
    mask: MaybeTensor,
    kernel: Pair,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
) -> Tensor:
    """The resampled features [N, C, Ho*kh, Wo*kw]."""
    (n, c), (ho, wo) = input.shape[:2], offset.shape[2:]
    out = input.new_empty(n, c, ho * kernel[0], wo * kernel[1])
    _forward(out, input, offset, mask, None, None, Geometry(kernel, stride, padding, dilation))
    return out


def deform_columns_backward(
    grad: Tensor,
    input: Tensor,
    offset: Tensor,
    mask: MaybeTensor,
    kernel: Pair,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    needs: Sequence[bool],
) -> tuple[MaybeTensor, ...]:
    """Gradients of input, offset and mask."""
    geometry = Geometry(kernel, stride, padding, dilation)
    return _backward(grad, input, offset, mask, None, None, geometry, (*needs, False, False))[:3]


def deform_conv(
    input: Tensor,
    offset: Tensor,
    mask: MaybeTensor,
    weight: Tensor,
    bias: MaybeTensor,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
) -> Tensor:
    """The columns multiplied with `weight` [Co, C/groups, kh, kw], rounded once."""
    last = input.is_contiguous(memory_format=torch.channels_last) and not input.is_contiguous()
    out = torch.empty(
        (len(input), len(weight), *offset.shape[2:]),
        dtype=input.dtype,
        device=input.device,
        memory_format=torch.channels_last if last else torch.contiguous_format,
    )
    geometry = Geometry(weight.shape[2:], stride, padding, dilation)
    _forward(out, input, offset, mask, weight, bias, geometry)
    return out


def plan_conv(*operands: Any) -> Callable[..., Tensor]:
    """deform_conv of tensors like these, with their steps: nothing is worked out before."""
    steps = operands[5:]
    return lambda *tensors: deform_conv(*tensors, *steps)


def plan_conv_backward(*operands: Any) -> Callable[..., tuple[MaybeTensor, ...]]:
    """deform_conv_backward, in the same way."""
    rest = operands[6:]
    return lambda *tensors: deform_conv_backward(*tensors, *rest)


def deform_conv_backward(
    grad: Tensor,
    input: Tensor,
    offset: Tensor,
    mask: MaybeTensor,
    weight: Tensor,
    bias: MaybeTensor,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    needs: Sequence[bool],
) -> tuple[MaybeTensor, ...]:
    """Gradients of input, offset, mask, weight and bias."""
    geometry = Geometry(weight.shape[2:], stride, padding, dilation)
    return _backward(grad, input, offset, mask, weight, bias, geometry, needs)


def _forward(
    out: Tensor,
    input: Tensor,
    offset: Tensor,
    mask: MaybeTensor,
    weight: MaybeTensor,
    bias: MaybeTensor,
    geometry: Geometry,
) -> None:
    """The kernel reads channels side by side: where they do not lie so, images are packed."""
    if input.stride(1) == 1 or input.shape[1] == 1:
        _call(out, input, offset, mask, weight, bias, geometry)
        return
    many = max(1, PACKED_BYTES // max(1, input.shape[1:].numel() * input.itemsize))
    if len(input) <= many:
        packed = input.contiguous(memory_format=torch.channels_last)
        _call(out, packed, offset, mask, weight, bias, geometry)
        return
    for first in range(0, len(input), many):
        some = slice(first, first + many)
        part = None if mask is None else mask[some]
        _forward(out[some], input[some], offset[some], part, weight, bias, geometry)


def _backward(
    grad: Tensor,
    input: Tensor,
    offset: Tensor,
    mask: MaybeTensor,
    weight: MaybeTensor,
    bias: MaybeTensor,
    geometry: Geometry,
    needs: Sequence[bool],
) -> tuple[MaybeTensor, ...]:
    sums = accumulator(input.dtype)
    grad_input = torch.empty_like(input) if needs[0] else None
    grad_offset = torch.empty_like(offset, dtype=sums) if needs[1] else None
    grad_mask = torch.empty_like(mask, dtype=sums) if needs[2] and mask is not None else None
    # The library adds to this one: without positions nothing is added.
    grad_weight = torch.zeros_like(weight, dtype=sums) if needs[3] and weight is not None else None
    grad_bias = torch.empty_like(bias, dtype=sums) if needs[4] and bias is not None else None
    grads = grad_input, grad_offset, grad_mask, grad_weight, grad_bias
    operands = input, offset, mask, weight, bias
    _call(grad.to(input.dtype), *operands, geometry, grads)
    return tuple(
        g if g is None or x is None else _like(g, x) for g, x in zip(grads, operands, strict=True)
    )


def _call(
    out: Tensor,
    input: Tensor,
    offset: Tensor,
    mask: MaybeTensor,
    weight: MaybeTensor,
    bias: MaybeTensor,
    geometry: Geometry,
    grads: Sequence[MaybeTensor] | None = None,
) -> None:
    """Writes `out`, or from `out`, which then is a gradient, the `grads` of the operands."""
    (kernel, stride, padding, dilation), loaded = geometry, library()
    sums = accumulator(input.dtype)
    offset, mask = _in(position_dtype(offset.dtype), offset), _in(sums, mask)
    weight, bias = _in(sums, weight), _in(sums, bias)
    if bias is not None and bias.stride(0) != 1:
        bias = bias.contiguous()
    groups = 0 if weight is None else input.shape[1] // weight.shape[1] if weight.shape[1] else 1
    grad_input, grad_offset, grad_mask, grad_weight, grad_bias = grads or _NONE
    status = loaded.handle.pliant_convolution(
        _CALL(
            loaded.isa,
            torch.get_num_threads(),
            _DTYPES[input.dtype],
            _DTYPES[offset.dtype],
            grads is not None,
            *input.shape,
            0 if weight is None else len(weight),
            *offset.shape[2:],
            *kernel,
            *stride,
            *padding,
            *dilation,
            groups,
            offset.shape[1] // (2 * kernel[0] * kernel[1]),
            input.data_ptr(),
            *input.stride(),
            offset.data_ptr(),
            *offset.stride(),
            *strided(mask, 4),
            *strided(weight, 4),
            0 if bias is None else bias.data_ptr(),
            out.data_ptr(),
            *out.stride(),
            *strided(grad_input, 4),
            *strided(grad_offset, 4),
            *strided(grad_mask, 4),
            *strided(grad_weight, 4),
            0 if grad_bias is None else grad_bias.data_ptr(),
        )
    )
    if status == 1:  # Status of problem.h
        raise MemoryError("deform_conv2d: no memory for the scratch space of the CPU kernels")
    if status:
        raise NotImplementedError(
            f"deform_conv2d: the sides of input must be at most 2**30, got {list(input.shape)}"
        )


def _in(dtype: torch.dtype, x: Any) -> Any:
    return x if x is None or x.dtype == dtype else x.to(dtype)
