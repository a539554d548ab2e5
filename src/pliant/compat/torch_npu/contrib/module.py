"""The vendor's deformable convolution layer."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from ....sampling import checks
from ...mx_driving import modulated_deform_conv2d
from ...spelling import also_spelled

Pair = int | tuple[int, int]  # as torch.nn.Conv2d has it


class ModulatedDeformConv(nn.Module):
    """Deformable convolution that, with `pack`, predicts its own offsets and mask.

    Without `pack` it is called with a triple (x, offset, mask). The offsets of a tap are (y, x),
    side by side. Parameters: `weight`, `bias` and, with `pack`, those of `conv_offset`, first zero.

    Example:
        >>> import torch
        >>> from pliant.compat.torch_npu.contrib.module import ModulatedDeformConv
        >>> ModulatedDeformConv(8, 16, 3, stride=2, padding=1)(torch.rand(2, 8, 7, 7)).shape
        torch.Size([2, 16, 4, 4])
    """

    @also_spelled(deform_groups="deformable_groups")
    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Pair,
        stride: Pair = 1,
        padding: Pair = 0,
        dilation: Pair = 1,
        groups: int = 1,
        deformable_groups: int = 1,
        bias: bool = True,
        pack: bool = True,
    ) -> None:
        super().__init__()
        layer = "ModulatedDeformConv"
        checks.divides(layer, "in_channels", in_channels, "groups", groups)
        checks.divides(layer, "out_channels", out_channels, "groups", groups)
        checks.divides(layer, "in_channels", in_channels, "deformable_groups", deformable_groups)
        kh, kw = checks.pair(layer, "kernel_size", kernel_size, 1)
        self.in_channels, self.out_channels, self.kernel_size = in_channels, out_channels, (kh, kw)
        self.stride, self.padding, self.dilation = stride, padding, dilation
        self.groups, self.deformable_groups = groups, deformable_groups
        self.with_bias, self.pack = bias, pack
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels // groups, kh, kw))
        self.bias = nn.Parameter(torch.empty(out_channels)) if bias else None
        if pack:
            channels = 3 * deformable_groups * kh * kw
            self.conv_offset = nn.Conv2d(in_channels, channels, (kh, kw), stride, padding, dilation)
        self.init_param()

    def init_param(self) -> None:
        bound = 1 / math.sqrt(self.in_channels * math.prod(self.kernel_size))
        nn.init.uniform_(self.weight, -bound, bound)
        zero = [] if self.bias is None else [self.bias]
        for parameter in (*zero, *(self.conv_offset.parameters() if self.pack else ())):
            nn.init.zeros_(parameter)

    def forward(self, x: Any) -> Tensor:
        if self.pack:
            predicted = self.conv_offset(x)
            taps = predicted.shape[1] // 3
            offset, mask = predicted[:, : 2 * taps], predicted[:, 2 * taps :].sigmoid()
        else:
            x, offset, mask = x
        steps = self.stride, self.padding, self.dilation, self.groups, self.deformable_groups
        return modulated_deform_conv2d(x, offset, mask, self.weight, self.bias, *steps)


DCNv2 = ModulatedDeformConv
