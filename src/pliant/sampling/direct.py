"""From a public function to `sample_sum` and `deform_conv`, the short way where nobody looks.

Checks, views, the dispatcher and the autograd nodes of views take longer than a small problem. So
what the signature of a call fixes (whether it is right, backend, sizes, strides) is worked out
once: a `Plan`, whose kernels read the operator's own tensors, or a `Convolution`. A call that
somebody observes (a tracer, a transform, a mode, a tensor subclass), and one for the reference,
goes through views and the registered operator instead.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from . import checks, ops
from .layout import Layout
from .maps import Metadata, Names, resolve

Given = tuple[Tensor, Metadata, Metadata | None, Tensor, Tensor]
Operands = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # value, shapes, starts, loc, weight

T = TypeVar("T")
_Plans = dict[Hashable, "Plan"]

# By operator and signatures, for those that passed: the plan of a convolution; of a sum, the sizes
# of the maps' axes, and the plans by backend and dtypes of the maps.
_plans: dict[Hashable, Any] = {}
_strided = torch.strided


def remember(key: Hashable, plan: T) -> T:
    if len(_plans) >= 1024:
        _plans.clear()
    _plans[key] = plan
    return plan


def recall(key: Hashable) -> Any:
    return _plans.get(key)


def sample_sum(
    names: Names,
    layout: Layout,
    check: Callable[..., tuple[int, ...]],
    given: Given,
    impl: str | None,
) -> Tensor:
    """The sum that the operator of these `names` is, [N, Q, G * K * D].

    `check` raises if the signatures of value, loc and weight do not fit together, and gives the
    sizes of the maps' axes.
    """
    value, given_shapes, given_starts, loc, weight = given
    known = key = None
    if not (ops.observed(()) or ops.in_transform()):
        key = (names.op, _signature(value), _signature(loc), _signature(weight))
        known = _plans.get(key)
    expected, plans = known or _checked(names, check, key, value, loc, weight)
    tracing = plans is None and checks.tracing()
    shapes, starts = resolve(names, value, given_shapes, given_starts, expected, tracing)
    operands = (value, shapes, starts, loc, weight)
    chosen = ops.implementation(names.op, impl, value, loc, weight)
    if plans is None or not (type(shapes) is type(starts) is Tensor):
        return _observed(layout, operands, chosen)
    kind = (chosen, shapes.dtype, starts.dtype)
    plan = plans.get(kind)
    if plan is None:
        plan = plans[kind] = Plan(layout, operands, chosen)
    if plan.kernel is None:
        return _observed(layout, operands, chosen)
    if torch.is_grad_enabled() and (
        value.requires_grad or loc.requires_grad or weight.requires_grad
    ):
        return _apply(plan, *operands)  # type: ignore[no-any-return]
    return plan.forward(*operands)


def _signature(x: Any) -> Hashable:
    """That of a tensor in which nothing is hidden; None for anything else."""
    if ops.plain(x) and x.layout is _strided and not x.is_nested:
        return x.shape, x.stride(), x.dtype, x.device
    return None


def _checked(
    names: Names,
    check: Callable[..., tuple[int, ...]],
    key: tuple[Hashable, ...] | None,
    value: Any,
    loc: Any,
    weight: Any,
) -> tuple[tuple[int, ...], _Plans | None]:
    """The sizes of the maps' axes, and where to keep plans; nowhere if the call is observed."""
    expected = check(
        checks.signature(names.op, names.value, value),
        checks.signature(names.op, names.loc, loc),
        checks.signature(names.op, names.weight, weight),
    )
    if key is None or None in key:
        return expected, None
    return remember(key, (expected, {}))


def _observed(layout: Layout, operands: Operands, impl: str) -> Tensor:
    return ops.sample_sum(*layout.views(*operands), *layout.policy, impl).flatten(2)


class Plan:
    """The kernels for calls of one signature."""

    def __init__(self, layout: Layout, operands: Operands, impl: str) -> None:
        value, shapes, starts, loc, weight = operands
        self.layout = layout
        self.signatures = [_signature(x) for x in (value, loc, weight)]
        self.maps = (shapes.shape, shapes.dtype, starts.dtype)
        self.impl, self.backend = impl, ops.choose(impl, value, loc, weight)
        self.kernel: Any = None  # none: the long way
        self.backwards: dict[Hashable, Callable[..., Any] | None] = {}
        if self.backend != "reference":
            views = layout.views(*operands)
            self.channels = views[0].shape[2:]
            size = (value.shape[0], loc.shape[1], math.prod(self.channels))
            self.kernel = ops.backend(self.backend).plan_sum(*views, layout.policy, size)

    def forward(self, *operands: Tensor) -> Tensor:
        out: Tensor | None = self.kernel(*operands)
        if out is None:  # tensors of this signature, but not where the kernel needs them
            views = self.layout.views(*operands)
            return ops.sample_sum.run(*views, *self.layout.policy, self.impl).flatten(2)
        ops.note("sample_sum", self.backend)
        return out

    def gradients(
        self, grad: Tensor, operands: Operands, needs: tuple[bool, bool, bool]
    ) -> Sequence[Tensor | None]:
        """Those of value, loc and weight that are needed, in the operator's own shapes."""
        args = (grad, *operands)
        unchanged = self._fits(*operands)
        if unchanged and not ops.transformed(args) and not ops.observed(args):
            key = (grad.stride(), grad.dtype, needs)
            if key not in self.backwards:
                if len(self.backwards) >= 64:
                    self.backwards.clear()
                self.backwards[key] = self._plan_backward(grad, operands, needs)
            kernel = self.backwards[key]
            grads: Sequence[Tensor | None] | None = None if kernel is None else kernel(*args)
            if grads is not None:
                ops.note("sample_sum_backward", self.backend)
                return grads
        views = self.layout.views(*operands)
        canonical = ops.sample_sum.gradients(
            *(self._unflattened(grad), *views, *self.layout.policy, self.impl, list(needs)),
            checked=unchanged,
        )
        like = (views[i] for i in (0, 3, 4))
        full = [g if need else x for g, x, need in zip(canonical, like, needs, strict=True)]
        own = self.layout.undo(*full)
        return [g if need else None for g, need in zip(own, needs, strict=True)]

    def _fits(
        self, value: Tensor, shapes: Tensor, starts: Tensor, loc: Tensor, weight: Tensor
    ) -> bool:
        """Whether saved tensors are what they were: hooks on them and `x.data = ...` may have put
        others in their place.
        """
        floats = zip((value, loc, weight), self.signatures, strict=True)
        return (
            all((x.shape, x.stride(), x.dtype, x.device) == known for x, known in floats)
            and self.maps == (shapes.shape, shapes.dtype, starts.dtype)
            and starts.shape == shapes.shape[:-1]
            and shapes.device == starts.device == value.device
            and shapes.is_contiguous()
            and starts.is_contiguous()
        )

    def _plan_backward(
        self, grad: Tensor, operands: Operands, needs: tuple[bool, ...]
    ) -> Callable[..., Any] | None:
        value, shapes, starts, loc, weight = operands
        made = [torch.empty_like(x, device="meta") for x in (value, loc, weight)]
        views = self.layout.views(made[0], shapes, starts, made[1], made[2])
        return ops.backend(self.backend).plan_sum_backward(  # type: ignore[no-any-return]
            self._unflattened(grad),
            *self.layout.views(*operands),
            self.layout.policy,
            needs,
            tuple(views[i].stride() for i in (0, 3, 4)),
        )

    def _unflattened(self, grad: Tensor) -> Tensor:
        return grad.reshape(*grad.shape[:2], *self.channels)


class _Direct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: Plan, *operands: Tensor) -> Tensor:
        ctx.plan = plan
        ctx.save_for_backward(*operands)
        return plan.forward(*operands)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        _, value, _, _, loc, weight = ctx.needs_input_grad
        grads = ctx.plan.gradients(grad, ctx.saved_tensors, (value, loc, weight))
        return None, grads[0], None, None, grads[1], grads[2]


# Past the preparations of `apply` for functional transforms, which take longer than a call.
_apply: Any = super(torch.autograd.Function, _Direct).apply


Steps = tuple[tuple[int, int], tuple[int, int], tuple[int, int]]  # stride, padding, dilation
Filtered = tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None]


def convolution_key(
    input: Any, offset: Any, mask: Any, weight: Any, bias: Any, steps: Sequence[Any], impl: Any
) -> Hashable:
    """What two calls of `deform_conv2d` have in common if one plan serves both; None if this one is
    observed, or in autocast, or its steps are not plain integers.
    """
    if ops.observed(()) or ops.in_transform() or not (impl is None or type(impl) is str):
        return None
    signatures = [_signature(x) for x in (input, offset, weight)]
    signatures += [() if x is None else _signature(x) for x in (mask, bias)]
    if None in signatures or checks.autocast(input.device.type):
        return None
    for step in steps:
        pair = type(step) is tuple and len(step) == 2 and type(step[0]) is type(step[1]) is int
        if not (pair or type(step) is int):
            return None
    return ("deform_conv2d", *signatures, *steps, impl)


class Convolution:
    """The kernels for convolutions of one signature."""

    def __init__(self, tensors: Filtered, steps: Steps, impl: str) -> None:
        self.signatures = [None if x is None else _signature(x) for x in tensors]
        self.rest, self.backend = (*steps, impl), ops.choose(impl, *tensors[:3])
        self.kernel: Any = None  # none: the long way
        if self.backend != "reference":
            self.kernel = ops.backend(self.backend).plan_conv(*tensors, *steps)

    def __call__(self, *tensors: Tensor | None) -> Tensor:
        if torch.is_grad_enabled() and ops.wants_gradient(tensors):
            return _apply_convolution(self, *tensors)  # type: ignore[no-any-return]
        return self.forward(*tensors)

    def forward(self, *tensors: Tensor | None) -> Tensor:
        if self.kernel is None:
            return ops.deform_conv.run(*tensors, *self.rest)
        ops.note("deform_conv", self.backend)
        return self.kernel(*tensors)  # type: ignore[no-any-return]

    def gradients(
        self, grad: Tensor, tensors: Sequence[Tensor | None], needs: list[bool]
    ) -> Sequence[Tensor | None]:
        known = zip(tensors, self.signatures, strict=True)
        unchanged = all(
            x is None or (x.shape, x.stride(), x.dtype, x.device) == one for x, one in known
        )
        grads = ops.deform_conv.gradients(grad, *tensors, *self.rest, needs, checked=unchanged)
        return [g if need else None for g, need in zip(grads, needs, strict=True)]


class _DirectConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: Convolution, *tensors: Tensor | None) -> Tensor:
        ctx.plan = plan
        ctx.save_for_backward(*tensors)
        return plan.forward(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        needs = list(ctx.needs_input_grad[1:])
        return None, *ctx.plan.gradients(grad, ctx.saved_tensors, needs)


_apply_convolution: Any = super(torch.autograd.Function, _DirectConvolution).apply
