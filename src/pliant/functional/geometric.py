"""Geometric kernel attention (MapTR)."""

from torch import Tensor

from ..sampling import checks, direct
from ..sampling.layout import Heads
from ..sampling.maps import Metadata, Names
from ..sampling.problem import FEATURE_DTYPES, INDEX_DTYPES, Policy

OP = "geometric_kernel_attention"
NAMES = Names(
    OP,
    value="value",
    shapes="spatial_shapes",
    starts="level_start_index",
    loc="sampling_locations",
    weight="attention_weights",
    axes="L",
)
LAYOUT = Heads(Policy("pixel", "nearest", "clamp"))


def geometric_kernel_attention(
    value: Tensor,
    spatial_shapes: Metadata,
    level_start_index: Metadata | None,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    *,
    impl: str | None = None,
) -> Tensor:
    """Sum of the pixels that each query's sampling points fall on, weighted by attention. No
    interpolation.

    ``out[b, q, h] = sum over l, p of attention_weights[b, q, h, l, p] * (pixel of level l of
    value[b, :, h])``

    Args:
        value: features ``[B, S, H, D]`` of all levels, one after another along ``S``; rows that no
            level covers are not read. Differentiable.
        spatial_shapes: ``[L, 2]``, (height, width) of each level: an int32 or int64 tensor or
            Python ints.
        level_start_index: ``[L]``, first row of each level in ``value``; None: the levels follow
            each other.
        sampling_locations: ``[B, Q, H, L, P, 2]``, (x, y) in pixels, integers or floats:
            truncated, then clamped to the border. NaN does not count. No gradient.
        attention_weights: ``[B, Q, H, L, P]``. Differentiable.
        impl: None (the best for the device), "reference", "cpu" or "triton".

    Returns:
        ``[B, Q, H * D]`` in the dtype of ``value``.

    Example:
        >>> import torch, pliant
        >>> value = torch.rand(1, 64, 8, 32)
        >>> locations = torch.randint(0, 8, (1, 10, 8, 1, 4, 2))
        >>> weights = torch.rand(1, 10, 8, 1, 4)
        >>> pliant.geometric_kernel_attention(value, [(8, 8)], None, locations, weights).shape
        torch.Size([1, 10, 256])
    """
    if isinstance(sampling_locations, Tensor):
        sampling_locations = sampling_locations.detach()  # positions have no gradient
    given = (value, spatial_shapes, level_start_index, sampling_locations, attention_weights)
    return direct.sample_sum(NAMES, LAYOUT, _check, given, impl)


@checks.once
def _check(
    value: checks.Signature, locations: checks.Signature, weights: checks.Signature
) -> tuple[int]:
    sizes: dict[str, int] = {}
    checks.shape(OP, "value", value.shape, "B S H D", sizes)
    checks.shape(OP, "attention_weights", weights.shape, "B Q H L P", sizes, "value")
    others = "value and attention_weights"
    checks.shape(OP, "sampling_locations", locations.shape, "B Q H L P 2", sizes, others)
    checks.feature_dtype(OP, "value", value.dtype)
    checks.feature_dtype(OP, "sampling_locations", locations.dtype, FEATURE_DTYPES + INDEX_DTYPES)
    checks.feature_dtype(OP, "attention_weights", weights.dtype)
    checks.same_device(
        OP, "value", value.device, {"sampling_locations": locations, "attention_weights": weights}
    )
    return (sizes["L"],)
