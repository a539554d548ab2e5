"""The vendor's `torch_npu`: its deformable convolution, a layer of it, and its device's answers."""

from . import contrib, npu
from .deformable_conv2d import npu_deformable_conv2d, npu_deformable_conv2dbk

__all__ = ["contrib", "npu", "npu_deformable_conv2d", "npu_deformable_conv2dbk"]
