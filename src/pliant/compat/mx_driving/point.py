"""An older name of `mx_driving`'s attention."""

import warnings

from . import npu_multi_scale_deformable_attn_function

__all__ = ["npu_multi_scale_deformable_attn_function"]

warnings.warn(
    "mx_driving.point is deprecated: import its names from mx_driving",
    DeprecationWarning,
    stacklevel=2,
)
