"""Geometric kernel attention."""

from typing import Any

import torch

import pliant

from ....functional.geometric import LAYOUT
from ...spelling import also_spelled, sum_gradients


@also_spelled(attn_weights="attention_weights")
def geometric_kernel_attention(
    value: torch.Tensor,
    spatial_shapes: torch.Tensor,
    level_start_index: torch.Tensor,
    sampling_locations: torch.Tensor,
    attention_weights: torch.Tensor,
) -> torch.Tensor:
    """`pliant.geometric_kernel_attention`."""
    return pliant.geometric_kernel_attention(
        value, spatial_shapes, level_start_index, sampling_locations, attention_weights
    )


class GeometricKernelAttentionFunc(torch.autograd.Function):
    """`apply` is the function; `forward` and `backward` are for those who call them by hand."""

    apply = staticmethod(geometric_kernel_attention)

    @staticmethod
    def forward(
        ctx: Any,
        value: torch.Tensor,
        spatial_shapes: torch.Tensor,
        level_start_index: torch.Tensor,
        sampling_locations: torch.Tensor,
        attention_weights: torch.Tensor,
    ) -> torch.Tensor:
        tensors = value, spatial_shapes, level_start_index, sampling_locations, attention_weights
        ctx.save_for_backward(*tensors)
        return geometric_kernel_attention(*tensors)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return sum_gradients(LAYOUT, ctx.saved_tensors, grad_output)
