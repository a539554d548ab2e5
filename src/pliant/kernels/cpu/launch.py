"""sample_sum and its gradients: tensors to pointers, sizes, strides, and a call of the library."""

import struct
from collections.abc import Sequence
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

_FORWARD = struct.Struct("49q")  # SumCall of problem.h
_BACKWARD = struct.Struct("69q")  # SumCall, GradCall


def sample_sum(
    value: Tensor, shapes: Tensor, starts: Tensor, loc: Tensor, weight: Tensor, policy: Policy
) -> Tensor:
    """out [N, Q, G, K, D] of sampling/problem.py."""
    value, loc, weight = _readable(value, loc, weight)
    n, _, g, k, d = value.shape
    out = value.new_empty((n, loc.shape[1], g, k, d))
    call = _pack(
        _FORWARD, value, shapes, starts, loc, weight, policy, out.data_ptr(), *out.stride()
    )
    status = library().handle.pliant_sample_sum(call)
    if status:
        _fail(status, value, shapes, starts)
    return out


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
    """Gradients of value, loc and weight for the gradient `grad` [N, Q, G, K, D] of the output."""
    originals = value, loc, weight
    value, loc, weight = _readable(value, loc, weight)
    grad = grad.to(value.dtype)
    # The kernels write every row of value, but only those samples of loc and weight that may count.
    some = policy.outside == "skip" or value.numel() == 0
    fill = torch.zeros_like if some else torch.empty_like
    grad_value = torch.empty_like(value) if needs[0] else None
    grad_loc = fill(loc) if needs[1] else None
    grad_weight = fill(weight) if needs[2] else None
    call = _pack(
        _BACKWARD,
        *(value, shapes, starts, loc, weight, policy),
        *_strided(grad, 5),
        *_strided(grad_value, 5)[:-1],  # its channels are adjacent, as those of value
        *_strided(grad_loc, 6),
        *_strided(grad_weight, 7),
    )
    status = library().handle.pliant_sample_sum_backward(call)
    if status:
        _fail(status, value, shapes, starts)
    by_value, by_loc, by_weight = map(_like, (grad_value, grad_loc, grad_weight), originals)
    return by_value, by_loc, by_weight


def _readable(value: Tensor, loc: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The operands as the kernels read them: channels adjacent, only features in half precision."""
    if value.stride(4) != 1 and value.shape[4] != 1:
        value = value.contiguous()
    if loc.dtype != torch.float32 and loc.dtype != torch.float64:
        loc = loc.to(position_dtype(loc.dtype))
    sums = torch.float64 if value.dtype == torch.float64 else torch.float32
    return value, loc, weight if weight.dtype == sums else weight.to(sums)


def _pack(
    layout: struct.Struct,
    value: Tensor,
    shapes: Tensor,
    starts: Tensor,
    loc: Tensor,
    weight: Tensor,
    policy: Policy,
    *rest: int,
) -> bytes:
    """SumCall of problem.h and the rest. Written out: it is on the way of every call."""
    value_n, value_s, value_g, value_k, _ = value.stride()
    _, q, _, v, p, _ = loc.shape
    return layout.pack(
        library().isa,
        torch.get_num_threads(),
        _POLICIES[policy],
        _DTYPES[value.dtype],
        _DTYPES[loc.dtype],
        *value.shape,
        q,
        v,
        p,
        weight.shape[5],
        value.data_ptr(),
        value_n,
        value_s,
        value_g,
        value_k,
        shapes.data_ptr(),
        shapes.itemsize,
        *shapes.stride(),
        starts.data_ptr(),
        starts.itemsize,
        *starts.stride(),
        loc.data_ptr(),
        *loc.stride(),
        weight.data_ptr(),
        *weight.stride(),
        *rest,
    )


def _strided(x: Tensor | None, rank: int) -> tuple[int, ...]:
    """Pointer and strides; all 0 if nobody asked for it."""
    return (0,) * (rank + 1) if x is None else (x.data_ptr(), *x.stride())


def _like(computed: Tensor | None, original: Tensor) -> Tensor | None:
    """A gradient in the dtype and with the strides of `torch.empty_like(original)`."""
    if computed is None or (
        computed.dtype == original.dtype and computed.stride() == original.stride()
    ):
        return computed
    return torch.empty_like(original).copy_(computed)


def _fail(status: int, value: Tensor, shapes: Tensor, starts: Tensor) -> NoReturn:
    code, number = status & (1 << _STATUS_BITS) - 1, status >> _STATUS_BITS
    if code == _NO_MEMORY:
        raise MemoryError("sample_sum: no memory for the scratch space of the CPU kernels")
    if code == _NO_SUCH_ISA:
        raise RuntimeError("sample_sum: this CPU or build has no such instruction set")
    v, r = divmod(number, shapes.shape[1])
    (height, width), start = shapes[v, r].tolist(), int(starts[v, r])
    what = f"sample_sum: map [{v}, {r}] of size (height, width) = ({height}, {width})"
    if code == _MAP_TOO_LARGE:
        raise NotImplementedError(f"{what}: the CPU kernels take sides of at most 2**30")
    if height < 0 or width < 0:
        raise ValueError(f"{what}: sizes must be >= 0")
    raise ValueError(
        f"{what} that starts at row {start} must lie within the {value.shape[1]} rows of value"
    )
