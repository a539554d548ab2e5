"""Deformable convolution without a mask (DCN v1); the offsets of a tap are (y, x), side by side."""

from typing import Any

import torch

import pliant

from ....functional.convolution import IntPair
from ...spelling import check_groups, convolution_gradients


def deform_conv2d(
    x: torch.Tensor,
    offset: torch.Tensor,
    weight: torch.Tensor,
    stride: IntPair = 1,
    padding: IntPair = 0,
    dilation: IntPair = 1,
    groups: int = 1,
    deformable_groups: int = 1,
    bias: torch.Tensor | bool | None = False,
    im2col_step: int = 32,
) -> torch.Tensor:
    """`pliant.deform_conv2d`. `bias` is False or a tensor to add; `im2col_step` changes nothing."""
    if bias is True:
        raise TypeError("deform_conv2d: bias must be False, None or a torch.Tensor, got True")
    check_groups("deform_conv2d", "x", x, offset, weight, groups, deformable_groups)
    addend = bias if isinstance(bias, torch.Tensor) else None
    return pliant.deform_conv2d(x, offset, weight, addend, stride, padding, dilation)


class DeformConv2dFunction(torch.autograd.Function):
    """`apply` is the function; `forward` and `backward` are for those who call them by hand."""

    apply = staticmethod(deform_conv2d)

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        offset: torch.Tensor,
        weight: torch.Tensor,
        stride: IntPair = 1,
        padding: IntPair = 0,
        dilation: IntPair = 1,
        groups: int = 1,
        deformable_groups: int = 1,
        bias: torch.Tensor | bool | None = False,
        im2col_step: int = 32,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, offset, weight, bias if isinstance(bias, torch.Tensor) else None)
        ctx.stride, ctx.padding, ctx.dilation = stride, padding, dilation
        return deform_conv2d(
            x, offset, weight, stride, padding, dilation, groups, deformable_groups, bias
        )

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, offset, weight, bias = ctx.saved_tensors
        by_x, by_offset, _, by_weight, by_bias = convolution_gradients(
            ctx, (x, offset, None, weight, bias), grad_output
        )
        return by_x, by_offset, by_weight, None, None, None, None, None, by_bias, None
