"""sample_sum and its gradients: tensors to pointers, sizes, strides, and a call of the library.

What sizes and strides fix is worked out before the tensors are looked at: `plan_sum` and
`plan_sum_backward` give functions that take any tensors laid out as the ones they have seen.
"""

import operator
import struct
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from ...sampling.problem import POLICIES, Policy, position_dtype
from .library import library

# Codes of problem.h
_DTYPES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}
_POLICIES = {policy: code for code, policy in enumerate(POLICIES)}
_NO_MEMORY, _NO_SUCH_ISA, _BAD_MAP, _MAP_TOO_LARGE = 1, 2, 3, 4
_STATUS_BITS = 8

# What changes from call to call in SumCall and GradCall of problem.h; the rest follows it.
_SUM, _GRAD = struct.Struct("8q"), struct.Struct("3q")

Grads = tuple[Tensor | None, Tensor | None, Tensor | None]
Strides = tuple[int, ...]


def sample_sum(
    value: Tensor, shapes: Tensor, starts: Tensor, loc: Tensor, weight: Tensor, policy: Policy
) -> Tensor:
    """out [N, Q, G, K, D] of sampling/problem.py."""
    value, loc, weight = _readable(value, loc, weight)
    n, _, *channels = value.shape
    operands = (value, shapes, starts, loc, weight)
    return _forward(*operands, policy, (n, loc.shape[1], *channels))(*operands)


def plan_sum(
    value: Tensor,
    shapes: Tensor,
    starts: Tensor,
    loc: Tensor,
    weight: Tensor,
    policy: Policy,
    size: Sequence[int],
) -> Callable[..., Tensor] | None:
    """sample_sum of tensors in the memory layout of these, its result as [*size]; None if they
    must be laid out anew first.
    """
    given = value, loc, weight
    ready = _readable(*given)
    if any(x.stride() != y.stride() for x, y in zip(given, ready, strict=True)):
        return None
    run = _forward(ready[0], shapes, starts, ready[1], ready[2], policy, size)
    if all(map(operator.is_, given, ready)):
        return run
    _, by_loc, by_weight = (x.dtype for x in ready)
    return lambda value, shapes, starts, loc, weight: run(
        value, shapes, starts, loc.to(by_loc), weight.to(by_weight)
    )


def _forward(
    value: Tensor,
    shapes: Tensor,
    starts: Tensor,
    loc: Tensor,
    weight: Tensor,
    policy: Policy,
    size: Sequence[int],
) -> Callable[..., Tensor]:
    q, (_, _, g, k, d) = loc.shape[1], value.shape
    strides = (q * g * k * d, g * k * d, k * d, d, 1)
    fixed = _fixed(value, shapes, starts, loc, weight, policy, strides)
    scales, stored = shapes.shape[1], value.shape[1]
    call = library().handle.pliant_sample_sum

    def run(value: Tensor, shapes: Tensor, starts: Tensor, loc: Tensor, weight: Tensor) -> Tensor:
        out = value.new_empty(*size)  # as one argument, the size takes twice as long
        status = call(_varying(value, shapes, starts, loc, weight, out) + fixed)
        if status:
            _fail(status, shapes, starts, scales, stored)
        return out

    return run


def sample_sum_backward(
    grad: Tensor,
    value: Tensor,
    shapes: Tensor,
    starts: Tensor,
    loc: Tensor,
    weight: Tensor,
    policy: Policy,
    needs: Sequence[bool],
) -> Grads:
    """Gradients of value, loc and weight for the gradient `grad` [N, Q, G, K, D] of the output."""
    originals = value, loc, weight
    value, loc, weight = _readable(value, loc, weight)
    if needs[0] and value.shape[4] != 1 and torch.empty_like(value, device="meta").stride(4) != 1:
        value = value.contiguous()  # rows that overlap: their gradient would not have such rows
    operands = (grad.to(value.dtype), value, shapes, starts, loc, weight)
    strides = tuple(torch.empty_like(x, device="meta").stride() for x in (value, loc, weight))
    grads = _backward(*operands, policy, needs, strides)(*operands)
    by_value, by_loc, by_weight = map(_like, grads, originals)
    return by_value, by_loc, by_weight


def plan_sum_backward(
    grad: Tensor,
    value: Tensor,
    shapes: Tensor,
    starts: Tensor,
    loc: Tensor,
    weight: Tensor,
    policy: Policy,
    needs: Sequence[bool],
    strides: Sequence[Strides],
) -> Callable[..., Grads] | None:
    """sample_sum_backward of tensors in the memory layout of these; `strides` are those of the
    gradients that `torch.empty_like` gives.
    """
    ready = grad.dtype == value.dtype and _are_readable(value, loc, weight)
    if not ready or (needs[0] and strides[0][4] != 1 and value.shape[4] != 1):
        return None
    return _backward(grad, value, shapes, starts, loc, weight, policy, needs, strides)


def _backward(
    grad: Tensor,
    value: Tensor,
    shapes: Tensor,
    starts: Tensor,
    loc: Tensor,
    weight: Tensor,
    policy: Policy,
    needs: Sequence[bool],
    strides: Sequence[Strides],
) -> Callable[..., Grads]:
    to_value, to_loc, to_weight = needs
    fixed = _fixed(value, shapes, starts, loc, weight, policy, grad.stride())
    scales, stored = shapes.shape[1], value.shape[1]
    fixed_grads = struct.pack("17q", *strides[0][:4], *strides[1], *strides[2])
    # The kernels write every row of value, but only those samples of loc and weight that may count.
    some = policy.outside == "skip" or value.numel() == 0
    fill = torch.zeros_like if some else torch.empty_like

    def run(
        grad: Tensor, value: Tensor, shapes: Tensor, starts: Tensor, loc: Tensor, weight: Tensor
    ) -> Grads:
        grad_value = torch.empty_like(value) if to_value else None
        grad_loc = fill(loc) if to_loc else None
        grad_weight = fill(weight) if to_weight else None
        varying = _varying(value, shapes, starts, loc, weight, grad)
        pointers = (0 if x is None else x.data_ptr() for x in (grad_value, grad_loc, grad_weight))
        status = library().handle.pliant_sample_sum_backward(
            varying + fixed + _GRAD.pack(*pointers) + fixed_grads
        )
        if status:
            _fail(status, shapes, starts, scales, stored)
        return grad_value, grad_loc, grad_weight

    return run


def _are_readable(value: Tensor, loc: Tensor, weight: Tensor) -> bool:
    return all(map(operator.is_, _readable(value, loc, weight), (value, loc, weight)))


def _readable(value: Tensor, loc: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The operands as the kernels read them: channels adjacent, only features in half precision."""
    if value.stride(4) != 1 and value.shape[4] != 1:
        value = value.contiguous()
    if loc.dtype != torch.float32 and loc.dtype != torch.float64:
        loc = loc.to(position_dtype(loc.dtype))
    sums = torch.float64 if value.dtype == torch.float64 else torch.float32
    return value, loc, weight if weight.dtype == sums else weight.to(sums)


def _fixed(
    value: Tensor,
    shapes: Tensor,
    starts: Tensor,
    loc: Tensor,
    weight: Tensor,
    policy: Policy,
    strides: Strides,
) -> bytes:
    """The part of SumCall that sizes and strides fix."""
    _, q, _, v, p, _ = loc.shape
    return struct.pack(
        "41q",
        *(_POLICIES[policy], _DTYPES[value.dtype], _DTYPES[loc.dtype]),
        *(*value.shape, q, v, p, weight.shape[5]),
        *(*value.stride()[:4], shapes.itemsize, *shapes.stride()),
        *(starts.itemsize, *starts.stride(), *loc.stride(), *weight.stride(), *strides),
    )


def _varying(
    value: Tensor, shapes: Tensor, starts: Tensor, loc: Tensor, weight: Tensor, grad: Tensor
) -> bytes:
    return _SUM.pack(
        library().isa,
        torch.get_num_threads(),
        value.data_ptr(),
        shapes.data_ptr(),
        starts.data_ptr(),
        loc.data_ptr(),
        weight.data_ptr(),
        grad.data_ptr(),
    )


def strided(x: Tensor | None, rank: int) -> tuple[int, ...]:
    """Pointer and strides; all 0 if nobody asked for it."""
    return (0,) * (rank + 1) if x is None else (x.data_ptr(), *x.stride())


def _like(computed: Tensor | None, original: Tensor) -> Tensor | None:
    """A gradient in the dtype and with the strides of `torch.empty_like(original)`."""
    if computed is None or (
        computed.dtype == original.dtype and computed.stride() == original.stride()
    ):
        return computed
    return torch.empty_like(original).copy_(computed)


def _fail(status: int, shapes: Tensor, starts: Tensor, scales: int, stored: int) -> NoReturn:
    code, number = status & (1 << _STATUS_BITS) - 1, status >> _STATUS_BITS
    if code == _NO_MEMORY:
        raise MemoryError("sample_sum: no memory for the scratch space of the CPU kernels")
    if code == _NO_SUCH_ISA:
        raise RuntimeError("sample_sum: this CPU or build has no such instruction set")
    (height, width), start = shapes.reshape(-1, 2)[number].tolist(), int(starts.flatten()[number])
    place = list(divmod(number, scales))
    what = f"sample_sum: map {place} of size (height, width) = ({height}, {width})"
    if code == _MAP_TOO_LARGE:
        raise NotImplementedError(f"{what}: the CPU kernels take sides of at most 2**30")
    if height < 0 or width < 0:
        raise ValueError(f"{what}: sizes must be >= 0")
    raise ValueError(
        f"{what} that starts at row {start} must lie within the {stored} rows of value"
    )
