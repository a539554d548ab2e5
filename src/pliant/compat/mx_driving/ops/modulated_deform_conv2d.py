"""Deformable convolution with a mask (DCN v2); the offsets of a tap are (y, x), side by side."""

from typing import Any

import torch

import pliant

from ....functional.convolution import IntPair
from ...spelling import check_groups, convolution_gradients


def modulated_deform_conv2d(
    x: torch.Tensor,
    offset: torch.Tensor,
    mask: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: IntPair = 1,
    padding: IntPair = 0,
    dilation: IntPair = 1,
    groups: int = 1,
    deformable_groups: int = 1,
) -> torch.Tensor:
    """`pliant.deform_conv2d` with a mask. The vendor ignores `bias`; here it is added."""
    check_groups("modulated_deform_conv2d", "x", x, offset, weight, groups, deformable_groups)
    return pliant.deform_conv2d(x, offset, weight, bias, stride, padding, dilation, mask)


class ModulatedDeformConv2dFunction(torch.autograd.Function):
    """`apply` is the function; `forward` and `backward` are for those who call them by hand."""

    apply = staticmethod(modulated_deform_conv2d)

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        offset: torch.Tensor,
        mask: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        stride: IntPair = 1,
        padding: IntPair = 0,
        dilation: IntPair = 1,
        groups: int = 1,
        deformable_groups: int = 1,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, offset, mask, weight, bias)
        ctx.stride, ctx.padding, ctx.dilation = stride, padding, dilation
        return modulated_deform_conv2d(
            x, offset, mask, weight, bias, stride, padding, dilation, groups, deformable_groups
        )

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grads = convolution_gradients(ctx, ctx.saved_tensors, grad_output)
        return (*grads, None, None, None, None, None)
