"""Pliant: deformable-sampling operators for PyTorch, exact and fast on CPUs and GPUs.

functional/   what you call: one file an operator
sampling/     the computation behind them: canonical form, checks, reference, registered operators
kernels/      how it runs fast: one folder a backend (cpu: C++, triton: GPUs)
compat/       other people's names for the same operators
testing/      scalar loops, plain-PyTorch composites, named cases and comparisons
"""

from .functional.aggregation import deformable_aggregation
from .functional.attention import multi_scale_deformable_attn
from .functional.convolution import deform_columns, deform_conv2d
from .functional.geometric import geometric_kernel_attention

__version__ = "0.1.0"

__all__ = [
    "deform_columns",
    "deform_conv2d",
    "deformable_aggregation",
    "geometric_kernel_attention",
    "multi_scale_deformable_attn",
]
