"""What a translation needs: keywords spelled two ways, groups stated, gradients asked by hand."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from ..sampling import checks, ops
from ..sampling.layout import Layout

R = TypeVar("R")


def also_spelled(**aliases: str) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Let a function take its keyword `name` as `alias` too, for each `alias="name"`."""

    def decorate(function: Callable[..., R]) -> Callable[..., R]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> R:
            for alias, name in aliases.items():
                if alias in kwargs:
                    if name in kwargs:
                        raise TypeError(
                            f"{function.__name__}() got {name!r} and {alias!r}, "
                            "two spellings of one argument"
                        )
                    kwargs[name] = kwargs.pop(alias)
            return function(*args, **kwargs)

        return call

    return decorate


def check_groups(
    op: str,
    name: str,
    input: torch.Tensor,
    offset: torch.Tensor,
    weight: torch.Tensor,
    groups: int,
    deformable_groups: int,
    blocks: int = 2,
) -> None:
    """Hold the groups that a caller states against the shapes, from which pliant takes them.

    `name` is the caller's word for the input; `blocks` counts the offset's channels for each tap:
    x, y and, where it travels with them, the mask.
    """
    sizes: dict[str, int] = {}
    channels = f"{blocks}*dg*kh*kw"
    checks.shape(op, name, checks.signature(op, name, input).shape, "N C H W", sizes)
    checks.divides(op, f"the channels C of {name}", sizes["C"], "groups", groups)
    checks.divides(
        op, f"the channels C of {name}", sizes["C"], "deformable_groups", deformable_groups
    )
    sizes["C/groups"] = sizes["C"] // groups
    checks.shape(
        op, "weight", checks.signature(op, "weight", weight).shape, "Co C/groups kh kw", sizes
    )
    checks.divides(op, "the output channels Co of weight", sizes["Co"], "groups", groups)
    sizes[channels] = blocks * deformable_groups * sizes["kh"] * sizes["kw"]
    checks.shape(
        op, "offset", checks.signature(op, "offset", offset).shape, f"N {channels} Ho Wo", sizes
    )


# For the `backward` of an old-style autograd.Function, called by hand or traced by a compiler


def sum_gradients(
    layout: Layout, tensors: Sequence[torch.Tensor], grad_output: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of a weighted sum, one for each argument; None for the maps."""
    value, shapes, starts, loc, weight = tensors
    views = layout.views(value, shapes.to(value.device), starts.to(value.device), loc, weight)
    grad = grad_output.unflatten(2, views[0].shape[2:])
    moves = layout.policy.interpolation != "nearest"
    grads = ops.sample_sum.backward(grad, *views, *layout.policy, "", [True, moves, True])
    by_value, by_loc, by_weight = layout.undo(*grads)
    return by_value, None, None, by_loc if moves else None, by_weight


def convolution_gradients(
    ctx: Any, tensors: Sequence[torch.Tensor | None], grad_output: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    """Those of input, offset, mask, weight and bias; `ctx` holds stride, padding and dilation."""
    dtype = grad_output.dtype  # autocast's, where that was on
    operands = [x if x is None or i in (1, 2) else x.to(dtype) for i, x in enumerate(tensors)]
    steps = [
        checks.pair("deform_conv2d", name, getattr(ctx, name), least)
        for name, least in (("stride", 1), ("padding", 0), ("dilation", 1))
    ]
    needs = [x is not None for x in tensors]
    grads = ops.deform_conv.backward(grad_output, *operands, *steps, "", needs)
    return tuple(None if x is None else g.to(x.dtype) for g, x in zip(grads, tensors, strict=True))
