"""The canonical form to which every operator is brought by strided views.

    value  [N, S, G, K, D]      shapes [V, R, 2] = (height, width), starts [V, R]
    loc    [N, Q, G, V, P, 2]   weight [N, Q, G, V, P, R, K]
    out[n,q,g,k,:] = sum over v, p, r of weight[n,q,g,v,p,r,k] * sample(value[n,:,g,k,:], map (v,
    r), loc[n,q,g,v,p])

N batch; Q queries; S stored pixels of all maps, one after another; G groups with positions of
their own (heads, deformable groups); K groups with weights of their own that share positions; D
channels; V views (levels, cameras); P points in a view; R scales of a view that share its
positions. Positions are (x, y), sizes (height, width).
"""

from typing import NamedTuple

import torch


class Policy(NamedTuple):
    """How a position becomes pixels. Three closed axes; no flag names an operator."""

    position: str  # "unit": pixel = loc * size - 0.5; "pixel": as given
    interpolation: str  # "bilinear": four corners; "nearest": the pixel reached by truncation
    outside: (
        str  # "zero": counts iff -1 < pixel < size; "skip": iff 0 < loc < 1; "clamp": to the border
    )


POLICIES = (
    Policy("unit", "bilinear", "zero"),
    Policy("unit", "bilinear", "skip"),
    Policy("pixel", "bilinear", "zero"),
    Policy("pixel", "nearest", "clamp"),
)

FEATURE_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INDEX_DTYPES = (torch.int32, torch.int64)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums over features of `dtype` run."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def position_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of position arithmetic: never under float32, whatever the features are."""
    return torch.float64 if dtype in (torch.float64, torch.int64, torch.int32) else torch.float32
