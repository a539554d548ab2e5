"""The weighted sum of samples: from tensors to launches of its kernels."""

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from pliant.sampling.problem import Policy, accumulator

from . import INTERPRET, backward, bins, forward, tuning
from .launch import Launch, _device_of, run

_TL = {torch.float32: tl.float32, torch.float64: tl.float64}
_INTEGER = {torch.int32: tl.int32, torch.int64: tl.int64}


def sample_sum(
    value: Tensor, shapes: Tensor, starts: Tensor, loc: Tensor, weight: Tensor, policy: Policy
) -> Tensor:
    n, s, g, k, d = value.shape
    _, q, _, views, points, _ = loc.shape
    scales = shapes.shape[1]
    out = torch.empty(n, q, g, k, d, dtype=value.dtype, device=value.device)
    if out.numel() == 0:
        return out
    if views * points * scales == 0 or s == 0:
        return out.zero_()
    shapes, starts = _on(value, shapes), _on(value, starts)
    splits = (
        1 if _by_query(k, policy) else tuning.point_splits(n * q * g, k * d, views * points, value)
    )
    parts = out if splits == 1 else out.new_empty(splits, *out.shape, dtype=accumulator(out.dtype))
    tensors = (value, shapes, starts, loc, weight, parts)
    run(tensors, policy, lambda: _forward(*tensors, policy, splits))
    if splits > 1:
        torch.sum(parts, 0, out=out) if out.dtype == parts.dtype else out.copy_(parts.sum(0))
    return out


def plan_sum(
    value: Tensor,
    shapes: Tensor,
    starts: Tensor,
    loc: Tensor,
    weight: Tensor,
    policy: Policy,
    size: Sequence[int],
) -> Callable[..., Tensor | None] | None:
    """sample_sum of tensors in the memory layout of these, its result as [*size].

    None, here or from the function, if the way through sample_sum is the right one.
    """
    n, s, g, k, d = value.shape
    _, q, _, views, points, _ = loc.shape
    if n * q * g * k * d == 0 or views * points * shapes.shape[1] == 0 or s == 0:
        return None
    splits = (
        1 if _by_query(k, policy) else tuning.point_splits(n * q * g, k * d, views * points, value)
    )
    loc, weight = _twin(loc), _twin(weight)
    dtype, acc = value.dtype, accumulator(value.dtype)
    out = torch.empty((n, q, g, k, d), dtype=dtype if splits == 1 else acc, device="meta")
    launch = _forward(value, shapes, starts, loc, weight, out, policy, splits)

    def run(
        value: Tensor, shapes: Tensor, starts: Tensor, loc: Tensor, weight: Tensor
    ) -> Tensor | None:
        if not _aligned(loc, weight):
            return None
        out = value.new_empty(*size)
        parts = out if splits == 1 else value.new_empty(splits, *size, dtype=acc)
        with _device_of(value):
            launch(value, shapes, starts, loc, weight, parts)
        if splits > 1:
            torch.sum(parts, 0, out=out) if dtype == acc else out.copy_(parts.sum(0))
        return out

    return run


def _by_query(groups: int, policy: Policy) -> bool:
    return groups == 1 and policy.outside != "skip"


def _forward(
    value: Tensor,
    shapes: Tensor,
    starts: Tensor,
    loc: Tensor,
    weight: Tensor,
    out: Tensor,
    policy: Policy,
    splits: int,
) -> Launch:
    n, s, g, k, d = value.shape
    _, q, _, views, points, _ = loc.shape
    scales = shapes.shape[1]
    strides = (*_outer(value), *_outer(loc), *_outer(weight))
    constants = {
        **_inner("l", loc, "n q g v p c"), "V": views, "R": scales, "P": points, "D": d,
        **_options(policy, value, loc, _row_type(value, loc, weight, out)), "PAIR": _paired(loc, 5),
    }  # fmt: skip
    if _by_query(k, policy):
        tile = tuning.query_tile(d, q, g, points, value.dtype)
        return Launch(
            forward.by_query,
            (triton.cdiv(q, tile["BQ"]) * n * g // tile["BG"], triton.cdiv(d, tile["BD"])),
            (q, s, *strides),
            **_inner("v", value, "n s g - d"), **_inner("w", weight, "n q g v p r -"),
            **constants, **tile, G=g, WEIGHT_PAIR=tile["BP"] % 2 == 0 and _paired(weight, 4),
        )  # fmt: skip
    tile = tuning.point_tile(k * d, points)
    return Launch(
        forward.by_point,
        (n * q * g, triton.cdiv(k * d, tile["BC"]), splits),
        (q, s, g, *strides),
        **_inner("v", value, "n s g k d"), **_inner("w", weight, "n q g v p r k"),
        **constants, **tile, K=k, SPLITS=splits,
    )  # fmt: skip


def sample_sum_backward(
    grad: Tensor,
    value: Tensor,
    shapes: Tensor,
    starts: Tensor,
    loc: Tensor,
    weight: Tensor,
    policy: Policy,
    needs: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    n, s, views, points = *value.shape[:2], *loc.shape[3:5]
    scales, acc = shapes.shape[1], accumulator(value.dtype)
    to_value, to_loc, to_weight = needs
    nothing = grad.numel() * s * views * points * scales == 0
    # The policy "skip" never visits a point that does not count: its gradients are set here.
    fresh = torch.zeros_like if nothing or policy.outside == "skip" else torch.empty_like
    moved = to_loc and policy.interpolation != "nearest"
    grad_value = torch.empty_like(value) if to_value else None
    grad_loc = (fresh(loc) if moved else torch.zeros_like(loc)) if to_loc else None
    grad_weight = fresh(weight) if to_weight else None
    if nothing:
        return grad_value if grad_value is None else grad_value.zero_(), grad_loc, grad_weight

    shapes, starts = _on(value, shapes), _on(value, starts)
    if grad_value is not None and torch.are_deterministic_algorithms_enabled():
        options = _options(policy, value, loc, _row_type(value, loc, weight, grad))
        bins.grad_value(grad, shapes, starts, loc, weight, grad_value, options)
        to_value = False
    rounded = to_value and acc != value.dtype
    step = _items_at_once(value, loc, scales) if to_value else n
    total = torch.empty_like(value[:step], dtype=acc) if rounded else None
    for first in range(0, n, step):
        items = slice(first, first + step)
        sums = None
        if grad_value is not None and to_value:
            sums = grad_value[items] if total is None else total[: len(grad_value[items])]
            sums.zero_()
        _gradients(
            grad[items], value[items], shapes, starts, loc[items], weight[items], sums,
            grad_loc[items] if moved and grad_loc is not None else None,
            None if grad_weight is None else grad_weight[items],
            policy,
        )  # fmt: skip
        if grad_value is not None and total is not None and sums is not None:
            grad_value[items].copy_(sums)
    return grad_value, grad_loc, grad_weight


def _items_at_once(value: Tensor, loc: Tensor, scales: int) -> int:
    samples = loc.shape[1] * loc.shape[3] * loc.shape[4] * scales
    size = value.numel() * accumulator(value.dtype).itemsize
    return tuning.batch_step(value.shape[0], size, samples, value.shape[1])


def plan_sum_backward(
    grad: Tensor,
    value: Tensor,
    shapes: Tensor,
    starts: Tensor,
    loc: Tensor,
    weight: Tensor,
    policy: Policy,
    needs: Sequence[bool],
    strides: Sequence[tuple[int, ...]],
) -> Callable[..., tuple[Tensor | None, ...] | None] | None:
    """sample_sum_backward of tensors in the memory layout of these; `strides` are those of the
    gradients that `torch.empty_like` gives.

    None, here or from the function, if the way through sample_sum_backward is the right one.
    """
    to_value, to_loc, to_weight = needs
    acc, moved = accumulator(value.dtype), to_loc and policy.interpolation != "nearest"
    samples = grad.numel() * value.shape[1] * loc.shape[3] * loc.shape[4] * shapes.shape[1]
    in_parts = to_value and _items_at_once(value, loc, shapes.shape[1]) < value.shape[0]
    operands = (grad, value, shapes, starts, _twin(loc), _twin(weight))
    if samples == 0 or in_parts or to_loc != moved or not any(needs):
        return None
    fresh = torch.zeros_like if policy.outside == "skip" else torch.empty_like
    pairs = zip((value, loc, weight), strides, needs, strict=True)
    gv, gl, gw = (
        torch.empty_strided(x.shape, stride, dtype=x.dtype, device="meta") if need else x
        for x, stride, need in pairs
    )
    launch = _backward(*operands, gv, gl, gw, policy, (to_value, to_loc, to_weight))

    def run(
        grad: Tensor, value: Tensor, shapes: Tensor, starts: Tensor, loc: Tensor, weight: Tensor
    ) -> tuple[Tensor | None, ...] | None:
        operands = (grad, value, shapes, starts, loc, weight)
        if torch.are_deterministic_algorithms_enabled() or not _aligned(loc, weight):
            return None
        sums = torch.zeros_like(value, dtype=acc) if to_value else None
        grad_loc = fresh(loc) if to_loc else None
        grad_weight = fresh(weight) if to_weight else None
        with _device_of(value):
            launch(
                *operands,
                value if sums is None else sums,
                loc if grad_loc is None else grad_loc,
                weight if grad_weight is None else grad_weight,
            )
        return sums if sums is None else sums.to(value.dtype), grad_loc, grad_weight

    return run


def _gradients(
    grad: Tensor,
    value: Tensor,
    shapes: Tensor,
    starts: Tensor,
    loc: Tensor,
    weight: Tensor,
    grad_value: Tensor | None,
    grad_loc: Tensor | None,
    grad_weight: Tensor | None,
    policy: Policy,
) -> None:
    """Gradients of some items of the batch; that of the features is added to `grad_value`."""
    atomic = grad_value is not None
    if atomic or grad_loc is not None or grad_weight is not None:
        wanted = (atomic, grad_loc is not None, grad_weight is not None)
        gv = value if grad_value is None else grad_value
        gl = loc if grad_loc is None else grad_loc
        gw = weight if grad_weight is None else grad_weight
        tensors = (grad, value, shapes, starts, loc, weight, gv, gl, gw)
        run(tensors, (policy, wanted), lambda: _backward(*tensors, policy, wanted))


def _backward(
    grad: Tensor,
    value: Tensor,
    shapes: Tensor,
    starts: Tensor,
    loc: Tensor,
    weight: Tensor,
    grad_value: Tensor,
    grad_loc: Tensor,
    grad_weight: Tensor,
    policy: Policy,
    wanted: tuple[bool, bool, bool],
) -> Launch:
    n, s, g, k, d = value.shape
    _, q, _, views, points, _ = loc.shape
    skip = policy.outside == "skip"
    places = points if skip else views * points
    tile = tuning.backward_tile(n * q * g, k, d, places, policy, value.dtype)
    operands = (grad, value, loc, weight, grad_value, grad_loc, grad_weight)
    return Launch(
        backward.by_point,
        (n * g * triton.cdiv(q, tile["BQ"]), views if skip else 1),
        (q, s, g, *(stride for x in operands for stride in _outer(x))),
        **_inner("g", grad, "n q g k d"), **_inner("v", value, "n s g k d"),
        **_inner("l", loc, "n q g v p c"), **_inner("w", weight, "n q g v p r k"),
        **_inner("gv", grad_value, "n s g k d"), **_inner("gl", grad_loc, "n q g v p c"),
        **_inner("gw", grad_weight, "n q g v p r k"),
        V=views, R=shapes.shape[1], P=points, K=k, D=d,
        **_options(policy, value, loc, _row_type(value, loc, weight, grad)),
        TO_VALUE=wanted[0], TO_LOC=wanted[1], TO_WEIGHT=wanted[2], PAIR=_paired(loc, 5),
        UNIFORM=skip or points % tile["BJ"] == 0,
        BLOCKS=triton.cdiv(places, tile["BJ"]), **tile,
    )  # fmt: skip


def _on(value: Tensor, metadata: Tensor) -> Tensor:
    return metadata.to(value.device).contiguous()


def _outer(x: Tensor) -> tuple[int, int]:
    """Strides of the batch and of the groups, which change with the sizes of a problem."""
    return x.stride(0), x.stride(2)


def _inner(name: str, x: Tensor, axes: str) -> dict[str, int]:
    """The other strides, which a model fixes: constants of a kernel, so that addresses fold."""
    named = zip(axes.split(), x.stride(), strict=True)
    return {f"{name}_{axis}": stride for axis, stride in named if axis not in "ng-"}


def _paired(x: Tensor, axis: int) -> bool:
    """Whether neighbours along `axis` can be loaded two at a time."""
    others = [
        s for i, (n, s) in enumerate(zip(x.shape, x.stride(), strict=True)) if i != axis and n > 1
    ]
    aligned = x.data_ptr() % (2 * x.element_size()) == 0
    return (
        x.element_size() <= 4
        and x.stride(axis) == 1
        and aligned
        and all(s % 2 == 0 for s in others)
    )


def _row_type(*operands: Tensor) -> torch.dtype:
    """int32 for offsets inside one item of the batch, unless an operand extends farther."""
    far = max(
        sum((n - 1) * s for n, s in zip(x.shape[1:], x.stride()[1:], strict=True)) for x in operands
    )
    return torch.int64 if far >= 2**31 - 2**16 else torch.int32


def _options(policy: Policy, value: Tensor, loc: Tensor, row: torch.dtype) -> dict[str, object]:
    position = tl.float64 if loc.dtype == torch.float64 else tl.float32
    return {
        "UNIT": policy.position == "unit",
        "SKIP": policy.outside == "skip",
        "NEAREST": policy.interpolation == "nearest",
        "ROW": _INTEGER[row],
        "POS": _INTEGER.get(loc.dtype, position),
        "ACC": _TL[accumulator(value.dtype)],
        "INTERPRET": INTERPRET,
    }


def _twin(x: Tensor) -> Tensor:
    """A tensor like `x` that starts where pairs can be read, as those do that a plan takes."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _aligned(*tensors: Tensor) -> bool:
    """Whether all start at a multiple of 16 bytes, as tensors do that are no slices."""
    together = 0
    for x in tensors:
        together |= x.data_ptr()
    return together % 16 == 0
