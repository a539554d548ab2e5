"""The vendor's `mx_driving`: the operators of this package under its names, keywords and errors."""

import importlib
from types import ModuleType

from .ops.deform_conv2d import DeformConv2dFunction, deform_conv2d
from .ops.geometric_kernel_attention import geometric_kernel_attention
from .ops.modulated_deform_conv2d import ModulatedDeformConv2dFunction, modulated_deform_conv2d
from .ops.multi_scale_deformable_attn import (
    MultiScaleDeformableAttnFunction,
    multi_scale_deformable_attn,
    npu_multi_scale_deformable_attn_function,
)
from .ops.npu_deformable_aggregation import deformable_aggregation, npu_deformable_aggregation

__all__ = [
    "DeformConv2dFunction",
    "ModulatedDeformConv2dFunction",
    "MultiScaleDeformableAttnFunction",
    "deform_conv2d",
    "deformable_aggregation",
    "geometric_kernel_attention",
    "modulated_deform_conv2d",
    "multi_scale_deformable_attn",
    "npu_deformable_aggregation",
    "npu_multi_scale_deformable_attn_function",
]


def __getattr__(name: str) -> ModuleType:
    # Importing these two warns, so they wait until someone spells them.
    if name in ("fused", "point"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
