"""Kernels in Triton, for NVIDIA GPUs.

taps.py, then forward.py and backward.py, launched by launch.py; the convolution's beside them.
"""

from .convolution import deform_columns, deform_conv
from .convolution_backward import deform_columns_backward, deform_conv_backward
from .launch import describe, missing, sample_sum, sample_sum_backward, supports

__all__ = [
    "deform_columns",
    "deform_columns_backward",
    "deform_conv",
    "deform_conv_backward",
    "describe",
    "missing",
    "sample_sum",
    "sample_sum_backward",
    "supports",
]
