"""Deformable aggregation (Sparse4D)."""

from torch import Tensor

from ..sampling import checks, direct
from ..sampling.layout import Cameras
from ..sampling.maps import Metadata, Names
from ..sampling.problem import Policy

OP = "deformable_aggregation"
NAMES = Names(
    OP,
    value="feature_maps",
    shapes="spatial_shape",
    starts="scale_start_index",
    loc="sample_locations",
    weight="weight",
    axes="cam scale",
)
LAYOUT = Cameras(Policy("unit", "bilinear", "skip"))


def deformable_aggregation(
    feature_maps: Tensor,
    spatial_shape: Metadata,
    scale_start_index: Metadata | None,
    sample_locations: Tensor,
    weight: Tensor,
    *,
    impl: str | None = None,
) -> Tensor:
    """Sum of the features that each anchor's key points see in every camera and scale, weighted by
    channel group.

    ``out[b, a, c] = sum over p, cam, scale of weight[b, a, p, cam, scale, c // (C / G)] *
    bilinear(map, point)[c]``

    Args:
        feature_maps: features ``[B, F, C]`` of all cameras and scales, one map after another along
            ``F``; rows that no map covers are not read. Differentiable.
        spatial_shape: ``[cam, scale, 2]``, (height, width) of each map: an int32 or int64 tensor
            or Python ints.
        scale_start_index: ``[cam, scale]``, first row of each map; None: the maps follow each
            other.
        sample_locations: ``[B, A, P, cam, 2]``, (x, y) in the unit square of the camera. A point
            counts for a camera iff ``0 < x < 1`` and ``0 < y < 1``. Differentiable.
        weight: ``[B, A, P, cam, scale, G]``, where ``G`` divides ``C``. Differentiable.
        impl: None (the best for the device), "reference", "cpu" or "triton".

    Returns:
        ``[B, A, C]`` in the dtype of ``feature_maps``.

    Example:
        >>> import torch, pliant
        >>> maps = torch.rand(1, 6 * 64, 256)
        >>> locations, weight = torch.rand(1, 10, 13, 6, 2), torch.rand(1, 10, 13, 6, 1, 8)
        >>> pliant.deformable_aggregation(maps, [[(8, 8)]] * 6, None, locations, weight).shape
        torch.Size([1, 10, 256])
    """
    given = (feature_maps, spatial_shape, scale_start_index, sample_locations, weight)
    return direct.sample_sum(NAMES, LAYOUT, _check, given, impl)


@checks.once
def _check(
    features: checks.Signature, locations: checks.Signature, weight: checks.Signature
) -> tuple[int, int]:
    sizes: dict[str, int] = {}
    checks.shape(OP, "feature_maps", features.shape, "B F C", sizes)
    checks.shape(OP, "weight", weight.shape, "B A P cam scale G", sizes, "feature_maps")
    others = "feature_maps and weight"
    checks.shape(OP, "sample_locations", locations.shape, "B A P cam 2", sizes, others)
    if sizes["C"] or sizes["G"]:
        checks.divides(
            OP, "the channels C of feature_maps", sizes["C"], "the groups G of weight", sizes["G"]
        )
    checks.feature_dtype(OP, "feature_maps", features.dtype)
    checks.feature_dtype(OP, "sample_locations", locations.dtype)
    checks.feature_dtype(OP, "weight", weight.dtype)
    checks.same_device(
        OP, "feature_maps", features.device, {"sample_locations": locations, "weight": weight}
    )
    return sizes["cam"], sizes["scale"]
