"""Older names of `mx_driving`'s operators."""

import warnings

from . import (
    DeformConv2dFunction,
    ModulatedDeformConv2dFunction,
    MultiScaleDeformableAttnFunction,
    deform_conv2d,
    modulated_deform_conv2d,
    multi_scale_deformable_attn,
    npu_deformable_aggregation,
    npu_multi_scale_deformable_attn_function,
)

__all__ = [
    "DeformConv2dFunction",
    "ModulatedDeformConv2dFunction",
    "MultiScaleDeformableAttnFunction",
    "deform_conv2d",
    "modulated_deform_conv2d",
    "multi_scale_deformable_attn",
    "npu_deformable_aggregation",
    "npu_multi_scale_deformable_attn_function",
]

warnings.warn(
    "mx_driving.fused is deprecated: import its names from mx_driving",
    DeprecationWarning,
    stacklevel=2,
)
