"""Multi-scale deformable attention."""

import warnings
from typing import Any

import torch

import pliant

from ....functional.attention import LAYOUT
from ...spelling import also_spelled, sum_gradients
from . import refuse_empty


def multi_scale_deformable_attn(
    value: torch.Tensor,
    value_spatial_shapes: torch.Tensor,
    value_level_start_index: torch.Tensor,
    sampling_locations: torch.Tensor,
    attention_weights: torch.Tensor,
) -> torch.Tensor:
    """`pliant.multi_scale_deformable_attn`, in float32 under autocast; refuses empty tensors."""
    tensors = _as_autocast(
        value, value_spatial_shapes, value_level_start_index, sampling_locations, attention_weights
    )
    refuse_empty(*tensors)
    if not torch.is_autocast_enabled(value.device.type):
        return pliant.multi_scale_deformable_attn(*tensors)
    with torch.autocast(value.device.type, enabled=False):
        return pliant.multi_scale_deformable_attn(*tensors)


def _as_autocast(value: torch.Tensor, *others: Any) -> tuple[Any, ...]:
    """The arguments, with half-precision ones in float32 if autocast is on."""
    tensors = (value, *others)
    if not torch.is_autocast_enabled(value.device.type):
        return tensors
    halves = (torch.float16, torch.bfloat16)
    return tuple(
        t.float() if isinstance(t, torch.Tensor) and t.dtype in halves else t for t in tensors
    )


@also_spelled(
    value_spatial_shapes="shape",
    value_level_start_index="offset",
    sampling_locations="locations",
    attention_weights="weight",
)
def npu_multi_scale_deformable_attn_function(
    value: torch.Tensor,
    shape: torch.Tensor,
    offset: torch.Tensor,
    locations: torch.Tensor,
    weight: torch.Tensor,
) -> torch.Tensor:
    """An older name of `multi_scale_deformable_attn`."""
    warnings.warn(
        "npu_multi_scale_deformable_attn_function is deprecated: use multi_scale_deformable_attn",
        DeprecationWarning,
        stacklevel=3,  # past the decorator, to the caller
    )
    return multi_scale_deformable_attn(value, shape, offset, locations, weight)


class MultiScaleDeformableAttnFunction(torch.autograd.Function):
    """`apply` is the function; `forward` and `backward` are for those who call them by hand."""

    apply = staticmethod(multi_scale_deformable_attn)

    @staticmethod
    def forward(
        ctx: Any,
        value: torch.Tensor,
        value_spatial_shapes: torch.Tensor,
        value_level_start_index: torch.Tensor,
        sampling_locations: torch.Tensor,
        attention_weights: torch.Tensor,
    ) -> torch.Tensor:
        tensors = _as_autocast(
            value,
            value_spatial_shapes,
            value_level_start_index,
            sampling_locations,
            attention_weights,
        )
        ctx.save_for_backward(*tensors)
        return multi_scale_deformable_attn(*tensors)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return sum_gradients(LAYOUT, ctx.saved_tensors, grad_output)
