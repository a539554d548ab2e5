"""CPU kernels: C++ without torch headers, called through a plain C interface.

library.py   finds and loads the shared library, chooses the instruction set
launch.py, convolution.py
             tensors to pointers, sizes and strides; one call of the library
csrc/        the kernels; taps.h is the only place that knows corners, masks and derivatives
"""

from .convolution import (
    deform_columns,
    deform_columns_backward,
    deform_conv,
    deform_conv_backward,
    plan_conv,
    plan_conv_backward,
)
from .launch import plan_sum, plan_sum_backward, sample_sum, sample_sum_backward
from .library import describe, missing, supports

__all__ = [
    "deform_columns",
    "deform_columns_backward",
    "deform_conv",
    "deform_conv_backward",
    "describe",
    "missing",
    "plan_conv",
    "plan_conv_backward",
    "plan_sum",
    "plan_sum_backward",
    "sample_sum",
    "sample_sum_backward",
    "supports",
]
