"""Deformable aggregation."""

from typing import Any

import torch

import pliant

from ....functional.aggregation import LAYOUT
from ...spelling import also_spelled, sum_gradients
from . import refuse_empty


@also_spelled(mc_ms_feat="feature_maps", sampling_location="sample_locations", weights="weight")
def deformable_aggregation(
    feature_maps: torch.Tensor,
    spatial_shape: torch.Tensor,
    scale_start_index: torch.Tensor,
    sample_locations: torch.Tensor,
    weight: torch.Tensor,
) -> torch.Tensor:
    """`pliant.deformable_aggregation`; refuses empty tensors."""
    refuse_empty(feature_maps, spatial_shape, scale_start_index, sample_locations, weight)
    return pliant.deformable_aggregation(
        feature_maps, spatial_shape, scale_start_index, sample_locations, weight
    )


npu_deformable_aggregation = deformable_aggregation


class AdsDeformableAggregation(torch.autograd.Function):
    """`apply` is the function; `forward` and `backward` are for those who call them by hand."""

    apply = staticmethod(deformable_aggregation)

    @staticmethod
    def forward(
        ctx: Any,
        mc_ms_feat: torch.Tensor,
        spatial_shape: torch.Tensor,
        scale_start_index: torch.Tensor,
        sampling_location: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        tensors = mc_ms_feat, spatial_shape, scale_start_index, sampling_location, weights
        ctx.save_for_backward(*tensors)
        return deformable_aggregation(*tensors)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return sum_gradients(LAYOUT, ctx.saved_tensors, grad_output)
