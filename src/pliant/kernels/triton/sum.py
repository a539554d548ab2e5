"""The weighted sum of samples: from tensors to launches of its kernels.

These read and write strided tensors where they lie. Only features whose channels lie apart are
copied, if there are samples enough: a corner of a sample is to be one stretch of memory.
"""

import math
from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from pliant.sampling.problem import Policy, accumulator

from . import INTERPRET, backward, bins, forward, lists, tuning
from .launch import Launch, empty, form, run
from .refined import refined
from .transpose import transposition

_TL = {torch.float32: tl.float32, torch.float64: tl.float64}
_INTEGER = {torch.int32: tl.int32, torch.int64: tl.int64}


def sample_sum(
    value: Tensor, shapes: Tensor, starts: Tensor, loc: Tensor, weight: Tensor, policy: Policy
) -> Tensor:
    size = (value.shape[0], loc.shape[1], *value.shape[2:])
    if _nothing(value, shapes, loc):
        return value.new_zeros(size)
    tensors = (value, _on(value, shapes), _on(value, starts), loc, weight)
    out: Tensor = run(tensors, policy, lambda: _forward(*tensors, policy, size))
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
    if _nothing(value, shapes, loc):
        return None
    start = _forward(value, shapes, starts, _twin(loc), _twin(weight), policy, size)

    def planned(
        value: Tensor, shapes: Tensor, starts: Tensor, loc: Tensor, weight: Tensor
    ) -> Tensor | None:
        return start(value, shapes, starts, loc, weight) if _aligned(loc, weight) else None

    return planned


def _nothing(value: Tensor, shapes: Tensor, loc: Tensor) -> bool:
    return value.numel() * loc.numel() * shapes.shape[1] == 0


def _by_query(groups: int, policy: Policy) -> bool:
    return groups == 1 and policy.outside != "skip"


def _forward(
    value: Tensor,
    shapes: Tensor,
    starts: Tensor,
    loc: Tensor,
    weight: Tensor,
    policy: Policy,
    size: Sequence[int],
) -> Callable[..., Tensor]:
    """A function of such tensors: their sum as [*size]."""
    if tuning.apart(value, _samples(loc, shapes)):
        near, join = _dense(value), _join(value)
        sum_near = _forward(near, shapes, starts, loc, weight, policy, size)
        return lambda value, *rest: sum_near(join(value), *rest)
    n, _, g, k, d = value.shape
    q, views, points = loc.shape[1], *loc.shape[3:5]
    splits = (
        1
        if _by_query(k, policy)
        else tuning.point_splits(n * q * g, k * d, views * points, shapes.device)
    )
    dtype, acc = value.dtype, accumulator(value.dtype)
    out = torch.empty(n, q, g, k, d, dtype=dtype if splits == 1 else acc, device="meta")
    launch = _launch(value, shapes, starts, loc, weight, out, policy, splits)
    rule, early = tuning.sum_tile(splits), tuning.early(shapes.device)
    merge = Launch(
        forward.merge, (triton.cdiv(out.numel(), rule["B"]),), (out.numel(),),
        SPLITS=splits, EARLY=early, **rule,
    )  # fmt: skip
    whole = form(torch.empty(*size, dtype=dtype, device="meta"))
    partial = form(torch.empty(splits, *size, dtype=acc, device="meta"))

    def start(value: Tensor, shapes: Tensor, starts: Tensor, loc: Tensor, weight: Tensor) -> Tensor:
        out: Tensor = empty(value, *whole)
        parts = out if splits == 1 else empty(value, *partial)
        launch(value, shapes, starts, loc, weight, parts)
        if splits > 1:
            merge(parts, out)
        return out

    return start


def _launch(
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
        **_options(policy, value, loc), "ROW": _row_type(value, loc, weight, out),
        "PAIR": _paired(loc, 5), "EARLY": tuning.early(shapes.device),
    }  # fmt: skip
    if _by_query(k, policy):
        rule = (tuning.query_tile, d, q, g, points, value.dtype)
        about = {"items": n, "views": views, "rows": s, "policy": policy, "positions": loc.dtype}
        tile = refined(shapes.device, *rule, **about)
        share = tuning.shared(tile, value, loc, weight, policy) if constants["PAIR"] else 0
        return Launch(
            forward.by_query,
            (triton.cdiv(q, tile["BQ"]) * n * g // tile["BG"], triton.cdiv(d, tile["BD"])),
            (q, s, *strides),
            **_inner("v", value, "n s g - d"), **_inner("w", weight, "n q g v p r -"),
            **constants, **tile, G=g, SHARE=share,
            CACHE=tuning.cache_hint(s, q * views * points),
            WEIGHT_PAIR=tile["BP"] % 2 == 0 and _paired(weight, 4),
        )  # fmt: skip
    tile = refined(
        shapes.device, tuning.point_tile, k * d, points,
        dtype=value.dtype, items=n, queries=q, groups=g, split=k, views=views, scales=scales,
        rows=s, policy=policy,
    )  # fmt: skip
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
) -> tuple[Tensor | None, ...]:
    likes = (value, loc, weight)
    if _nothing(value, shapes, loc):
        both = zip(likes, needs, strict=True)
        return tuple(torch.zeros_like(x) if need else None for x, need in both)
    tensors = (grad, value, _on(value, shapes), _on(value, starts), loc, weight)
    to_value, to_loc, to_weight = needs
    collected = to_value and torch.are_deterministic_algorithms_enabled()
    wanted = (to_value and not collected, to_loc, to_weight)

    def plan() -> Callable[..., tuple[Tensor | None, ...]]:
        strides = [torch.empty_like(x, device="meta").stride() for x in likes]
        return _backward(*tensors, policy, wanted, strides)

    grads = run(tensors, (policy, wanted), plan)
    if collected:
        by_value = torch.empty_like(value)
        bins.grad_value(grad, *tensors[2:], by_value, _options(policy, value, loc))
        return by_value, *grads[1:]
    return grads


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
    if _nothing(value, shapes, loc):
        return None
    operands = (grad, value, shapes, starts, _twin(loc), _twin(weight))
    start = _backward(*operands, policy, needs, strides)

    def planned(
        grad: Tensor, value: Tensor, shapes: Tensor, starts: Tensor, loc: Tensor, weight: Tensor
    ) -> tuple[Tensor | None, ...] | None:
        if torch.are_deterministic_algorithms_enabled() or not _aligned(loc, weight):
            return None
        return start(grad, value, shapes, starts, loc, weight)

    return planned


def _backward(
    grad: Tensor,
    value: Tensor,
    shapes: Tensor,
    starts: Tensor,
    loc: Tensor,
    weight: Tensor,
    policy: Policy,
    needs: Sequence[bool],
    strides: Sequence[tuple[int, ...]],
    copied: bool = False,
) -> Callable[..., tuple[Tensor | None, ...]]:
    """A function of such tensors: the gradients that are needed, some items of the batch at a time.

    That of the features is summed in the accumulator's dtype, and rounded if it has another; by
    lists of samples, it is of all items at once. Of features that are a copy, which takes memory,
    it may be left unrounded: it will be on its way to its own layout.
    """
    samples = _samples(loc, shapes)
    if tuning.apart(value, samples):
        near, join = _dense(value), _join(value)
        part = _part(near.as_strided(near.shape, strides[0]))
        operands = (grad, near, shapes, starts, loc, weight)
        differentiate = _backward(*operands, policy, needs, [near.stride(), *strides[1:]], True)

        def through_copies(grad: Tensor, value: Tensor, *rest: Tensor) -> tuple[Tensor | None, ...]:
            grad_value, *others = differentiate(grad, join(value) if any(needs) else value, *rest)
            return None if grad_value is None else part(grad_value, value), *others

        return through_copies
    (to_value, to_loc, to_weight), n = needs, value.shape[0]
    moved = to_loc and policy.interpolation != "nearest"
    acc = accumulator(value.dtype)
    size = value.numel() * acc.itemsize
    by_list = to_value and tuning.by_list(value, size, samples, copied)
    added = to_value and not by_list
    rounded = added and acc != value.dtype
    # A part is cleared as one stretch of memory.
    stretches = rounded or strides[0][0] * n == value.numel()
    split = added and stretches
    count = tuning.batch_parts(n, size, samples, value.shape[1]) if split else 1
    wanted = (added, moved, to_weight)
    made = [
        torch.empty_strided(x.shape, stride, dtype=x.dtype, device="meta") if need else x
        for x, stride, need in zip(
            (value, loc, weight), strides, (to_value, moved, to_weight), strict=True
        )
    ]
    gather = None
    if by_list:
        gather = lists.grad_value(grad, shapes, loc, weight, made[0], _options(policy, value, loc))
    if rounded:
        made[0] = made[0].to(acc) if count == 1 else made[0].new_empty(value.shape, dtype=acc)

    def launch(items: slice) -> Launch:
        g, v, x, w, gv, gx, gw = (t[items] for t in (grad, value, loc, weight, *made))
        return _launch_backward(g, v, shapes, starts, x, w, gv, gx, gw, policy, wanted)

    parts = [slice(n * i // count, n * (i + 1) // count) for i in range(count)]
    each = [part.stop - part.start for part in parts]
    lengths = dict(zip(each, parts, strict=True))
    launches = {length: launch(part) for length, part in lengths.items()} if any(wanted) else {}
    item = value.numel() // n
    clears = {x: _launch_clear(x * item, count, shapes.device) for x in lengths} if added else {}
    # The policy "skip" never visits a point that does not count: its gradients are set here.
    fresh = torch.zeros_like if policy.outside == "skip" else torch.empty_like

    def start(
        grad: Tensor, value: Tensor, shapes: Tensor, starts: Tensor, loc: Tensor, weight: Tensor
    ) -> tuple[Tensor | None, ...]:
        grad_loc = (fresh(loc) if moved else torch.zeros_like(loc)) if to_loc else None
        grad_weight = fresh(weight) if to_weight else None
        gl = loc if grad_loc is None or not moved else grad_loc
        gw = weight if grad_weight is None else grad_weight
        if count == 1:
            sums = value
            if to_value:
                sums = torch.empty_like(value, dtype=None if by_list else acc)
            if added:
                clears[n](sums)
            if launches:
                launches[n](grad, value, shapes, starts, loc, weight, sums, gl, gw)
            if gather is not None:
                gather(grad, shapes, starts, loc, weight, sums)
            grad_value = sums if copied else sums.to(value.dtype)
            return grad_value if to_value else None, grad_loc, grad_weight
        grad_value = torch.empty_like(value)
        total = value.new_empty(max(lengths), *value.shape[1:], dtype=acc) if rounded else None
        operands = (grad, value, loc, weight, grad_value, gl, gw)
        for length, g, v, x, w, gv, *others in zip(
            each, *(operand.split_with_sizes(each) for operand in operands), strict=True
        ):
            sums = gv if total is None else total[:length]
            clears[length](sums)
            launches[length](g, v, shapes, starts, x, w, sums, *others)
            if rounded:
                gv.copy_(sums)
        return grad_value, grad_loc, grad_weight

    return start


def _join(like: Tensor) -> Callable[[Tensor], Tensor]:
    """The way from features like these to a copy whose channels lie side by side."""
    if not _turned(like):
        return Tensor.contiguous
    n, s, *channels = like.shape
    turn = transposition((n, math.prod(channels), s))

    def join(x: Tensor) -> Tensor:
        out = x.new_empty(x.shape)
        turn(x, out)
        return out

    return join


def _part(like: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """The way back, from such a copy, or one that was not rounded yet, to the layout and dtype of
    `like`, which the second argument has.
    """
    if like.is_contiguous():  # as far as its axes are longer than 1
        return lambda x, like: x.to(like.dtype).as_strided(
            like.shape, torch.empty_like(like, device="meta").stride()
        )
    if not _turned(like):
        return lambda x, like: torch.empty_like(like).copy_(x)
    n, s, *channels = like.shape
    turn = transposition((n, s, math.prod(channels)))

    def part(x: Tensor, like: Tensor) -> Tensor:
        out = torch.empty_like(like)
        turn(x, out)
        return out

    return part


def _turned(x: Tensor) -> bool:
    """Whether each channel is a stretch of memory, as in images [N, C, H, W]."""
    return x.movedim(1, -1).is_contiguous()


def _dense(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="meta")


def _launch_clear(size: int, parts: int, device: torch.device) -> Launch:
    tile, early = tuning.clear_tile(parts), tuning.early(device)
    grid = (triton.cdiv(size, tile["B"]),)
    return Launch(backward.clear, grid, (size,), EARLY=early, **tile)


def _launch_backward(
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
    early = wanted[0] and tuning.early(shapes.device)
    rule = (tuning.backward_tile, n * q * g, k, d, places, policy, value.dtype, wanted[0])
    about = {"views": views, "scales": shapes.shape[1], "rows": s, "wanted": wanted}
    tile = refined(shapes.device, *rule, **about)
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
        **_options(policy, value, loc), ROW=_row_type(*operands),
        TO_VALUE=wanted[0], TO_LOC=wanted[1], TO_WEIGHT=wanted[2], PAIR=_paired(loc, 5),
        UNIFORM=skip or points % tile["BJ"] == 0, EARLY=early,
        BLOCKS=triton.cdiv(places, tile["BJ"]), **tile,
    )  # fmt: skip


def _samples(loc: Tensor, shapes: Tensor) -> int:
    """How often a group of one item reads its maps."""
    return loc.shape[1] * loc.shape[3] * loc.shape[4] * shapes.shape[1]


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
    """Whether neighbours along `axis` can be loaded two at a time, in other items of the batch too:
    `x` may be one of them.
    """
    others = [
        s
        for i, (n, s) in enumerate(zip(x.shape, x.stride(), strict=True))
        if i != axis and (n > 1 or i == 0)
    ]
    aligned = x.data_ptr() % (2 * x.element_size()) == 0
    return (
        x.element_size() <= 4
        and x.stride(axis) == 1
        and aligned
        and all(s % 2 == 0 for s in others)
    )


def _row_type(*operands: Tensor) -> tl.dtype:
    """int32 for offsets inside one item of the batch, unless an operand extends farther.

    A line of a map before the first row, or behind the last, is counted too.
    """
    far = max(
        sum((n - 1) * s for n, s in zip(x.shape[1:], x.stride()[1:], strict=True)) + 2 * x.stride(1)
        for x in operands
    )
    return tl.int64 if far >= 2**31 - 2**16 else tl.int32


def _options(policy: Policy, value: Tensor, loc: Tensor) -> dict[str, object]:
    position = tl.float64 if loc.dtype == torch.float64 else tl.float32
    return {
        "UNIT": policy.position == "unit",
        "SKIP": policy.outside == "skip",
        "NEAREST": policy.interpolation == "nearest",
        "POS": _INTEGER.get(loc.dtype, position),
        "ACC": _TL[accumulator(value.dtype)],
        "INTERPRET": INTERPRET,
    }


def _twin(x: Tensor) -> Tensor:
    """A tensor like `x` that starts where pairs can be read, as those do that a plan takes."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _aligned(x: Tensor, y: Tensor) -> bool:
    """Whether both start at a multiple of 16 bytes, as tensors do that are no slices."""
    return (x.data_ptr() | y.data_ptr()) % 16 == 0
