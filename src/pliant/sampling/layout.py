"""How an operator's own tensors are those of the canonical form: views of the same memory.

`views` gives the operands of `sample_sum`; `undo` brings a canonical value, loc and weight, such as
their gradients, back to the operator's own shapes.
"""

import math
from typing import NamedTuple

from torch import Tensor

from .problem import Policy

Tensors = tuple[Tensor, ...]


class Heads(NamedTuple):
    """value [B, S, H, D], shapes [L, 2], starts [L], loc [B, Q, H, L, P, 2],
    weight [B, Q, H, L, P]: heads have positions of their own, levels are views of one scale.
    """

    policy: Policy

    def views(
        self, value: Tensor, shapes: Tensor, starts: Tensor, loc: Tensor, weight: Tensor
    ) -> Tensors:
        maps = shapes.unsqueeze(1), starts.unsqueeze(1)
        return value.unsqueeze(3), *maps, loc, weight.unsqueeze(5).unsqueeze(6)

    def undo(self, value: Tensor, loc: Tensor, weight: Tensor) -> Tensors:
        return value.squeeze(3), loc, weight.squeeze(6).squeeze(5)


class Cameras(NamedTuple):
    """value [B, F, C], shapes [cam, scale, 2], starts [cam, scale], loc [B, A, P, cam, 2],
    weight [B, A, P, cam, scale, G]: groups of channels share the positions.
    """

    policy: Policy

    def views(
        self, value: Tensor, shapes: Tensor, starts: Tensor, loc: Tensor, weight: Tensor
    ) -> Tensors:
        groups = weight.shape[5]
        grouped = value.unflatten(2, (1, groups, value.shape[2] // max(groups, 1)))
        places = loc.transpose(2, 3).unsqueeze(2)  # [B, A, 1, cam, P, 2]
        return grouped, shapes, starts, places, weight.transpose(2, 3).unsqueeze(2)

    def undo(self, value: Tensor, loc: Tensor, weight: Tensor) -> Tensors:
        batch, stored, *channels = value.shape
        whole = value.reshape(batch, stored, math.prod(channels))
        return whole, loc.squeeze(2).transpose(2, 3), weight.squeeze(2).transpose(2, 3)


Layout = Heads | Cameras
