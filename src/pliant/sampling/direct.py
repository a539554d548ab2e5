"""From a public function to `sample_sum` and `deform_conv`, the short way where nobody looks.

Checks, views, the dispatcher and the autograd nodes of views take longer than a small problem. So
what the signature of a call fixes (whether it is right, backend, sizes, strides) is worked out
once: a `Plan`, whose kernels read the operator's own tensors, or a `Convolution`. A call that
somebody observes (a tracer, a transform, a mode, a tensor subclass), and one for the reference,
goes through views and the registered operator instead.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards
from torch.autograd import forward_ad
from torch.nn import Parameter

from . import checks, ops
from .layout import Layout
from .maps import Metadata, Names, resolve, taken_as_given

Given = tuple[Tensor, Metadata, Metadata | None, Tensor, Tensor]
Operands = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # value, shapes, starts, loc, weight

# Every call asks these: an attribute's look-up takes as long as the answer.
_is_compiling, _modes = torch.compiler.is_compiling, torch._C._len_torch_dispatch_stack
_is_profiled = torch._C._autograd._profiler_enabled
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


class Plans:
    """What was worked out for tensors, by a key: found again for others like them.

    These have the same types, dtypes, devices, sizes, strides and flags, which the guards of
    PyTorch's compiler compare in a tenth of the time that it takes here to ask for them.
    """

    ALIKE = 16  # guards to a key: they are asked one by one

    def __init__(self, most: int = 1024) -> None:
        self.kept: dict[Hashable, list[tuple[TensorGuards, Any]]] = {}
        self.most = most

    def recall(self, key: Hashable, *tensors: Any) -> Any:
        """None, or what was kept; the tensors must be `ordinary`. A guard finds none that are not
        `plannable`, since it compares dispatch keys, too.
        """
        for guard, kept in self.kept.get(key, ()):
            if guard.check(*tensors):
                return kept
        return None

    def keep(self, key: Hashable, what: Any, *tensors: Tensor) -> None:
        if len(self.kept) >= self.most:
            self.kept.clear()
        sizes: Any = [list(x.shape) for x in tensors]
        strides: Any = [list(x.stride()) for x in tensors]
        guard = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        alike = self.kept.setdefault(key, [])
        del alike[: 1 - self.ALIKE]
        alike.append((guard, what))


def ordinary(*tensors: Any) -> bool:
    """Whether a guard may look at them: a nested one, which has no sizes, would end the process."""
    for x in tensors:
        kind = type(x)
        if not (kind is Tensor or kind is Parameter) or x.is_nested or _is_wrapped(x):
            return False
    return True


def unguarded() -> bool:
    """Whether something is at work that no guard sees, and so has to be asked for at each call.

    Guards compare dispatch keys as this thread has them, where functional transforms, `jit.trace`,
    pre-dispatch tracing, inference mode and autocast show.
    """
    return _is_compiling() or _modes() > 0 or _is_profiled() or forward_ad._current_level >= 0


def plannable(*tensors: Any) -> bool:
    """Whether one plan serves all tensors that a guard finds like these, and it finds these: nobody
    observes them, they hide nothing, and no two are one. What a transform sees is not kept: it
    would be found in others.
    """
    if ops.in_transform() or ops.observed(tensors) or len({*map(id, tensors)}) < len(tensors):
        return False
    return all(x.layout is torch.strided and (x.is_cuda or x.is_cpu) for x in tensors)


# Of a convolution its plan; of a sum the sizes of the maps' axes, and its plans by `impl` and maps.
plans = Plans()


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
    value, shapes, starts, loc, weight = given
    known = key = None
    if not unguarded() and ordinary(value, loc, weight):
        key = (names.op, value.shape, loc.shape)
        known = plans.recall(key, value, loc, weight)
        named = impl is None or type(impl) is str
        if known is not None and named and taken_as_given(value) and ordinary(shapes, starts):
            plan = known[1].recall(impl, shapes, starts)
            if plan is not None:
                return plan(*given)  # type: ignore[no-any-return]
    expected, by_maps = known or _checked(names, check, key, value, loc, weight)
    tracing = by_maps is None and checks.tracing()
    shapes, starts = resolve(names, value, shapes, starts, expected, tracing)
    operands = (value, shapes, starts, loc, weight)
    chosen = ops.implementation(names.op, impl, value, loc, weight)
    if by_maps is None or not plannable(shapes, starts):
        return _observed(layout, operands, chosen)
    plan = by_maps.recall(impl, shapes, starts)
    if plan is None:
        plan = Plan(layout, operands, chosen)
        by_maps.keep(impl, plan, shapes, starts)
    return plan(*operands)  # type: ignore[no-any-return]


def _checked(
    names: Names,
    check: Callable[..., tuple[int, ...]],
    key: Hashable,
    value: Any,
    loc: Any,
    weight: Any,
) -> tuple[tuple[int, ...], Plans | None]:
    """The sizes of the maps' axes, and where to keep plans; nowhere if the call is observed."""
    expected = check(
        checks.signature(names.op, names.value, value),
        checks.signature(names.op, names.loc, loc),
        checks.signature(names.op, names.weight, weight),
    )
    if key is None or not plannable(value, loc, weight):
        return expected, None
    known = (expected, Plans())
    plans.keep(key, known, value, loc, weight)
    return known


def _signature(x: Tensor) -> Hashable:
    return x.shape, x.stride(), x.dtype, x.device


def _observed(layout: Layout, operands: Sequence[Any], impl: str) -> Tensor:
    return ops.sample_sum(*layout.views(*operands), *layout.policy, impl).flatten(2)


class Plan:
    """The kernels for calls of one signature."""

    def __init__(self, layout: Layout, operands: Operands, impl: str) -> None:
        value, shapes, starts, loc, weight = operands
        self.layout = layout
        self.signatures = [_signature(x) for x in (value, loc, weight)]
        self.maps = (shapes.shape, shapes.dtype, starts.dtype)
        self.impl, self.backend = impl, ops.choose(impl, value, loc, weight)
        self.differentiable = ops.wants_gradient((value, loc, weight))
        self.kernel: Any = None  # none: the long way
        self.backwards = Plans(64)
        if self.backend != "reference":
            views = layout.views(*operands)
            self.channels = views[0].shape[2:]
            size = (value.shape[0], loc.shape[1], math.prod(self.channels))
            self.kernel = ops.backend(self.backend).plan_sum(*views, layout.policy, size)

    def __call__(self, *operands: Any) -> Tensor:
        if self.kernel is None:
            return _observed(self.layout, operands, self.impl)
        if self.differentiable and torch.is_grad_enabled():
            return _apply(self, *operands)  # type: ignore[no-any-return]
        return self.forward(*operands)

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
        grads = _by_plan(
            self.backwards,
            (needs, grad.stride()),
            (grad, *operands),
            lambda: self._plan_backward(grad, operands, needs) if self._fits(*operands) else None,
        )
        if grads is not None:
            ops.note("sample_sum_backward", self.backend)
            return grads
        views = self.layout.views(*operands)
        canonical = ops.sample_sum.gradients(
            *(self._unflattened(grad), *views, *self.layout.policy, self.impl, list(needs)),
            checked=self._fits(*operands),
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
            all(_signature(x) == known for x, known in floats)
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


def _by_plan(
    plans: Plans,
    key: Hashable,
    args: Sequence[Tensor | None],
    make: Callable[[], Callable[..., Any] | None],
) -> Sequence[Tensor | None] | None:
    """The gradients by a kernel that was planned for such tensors, or that `make` gives now.

    None where the long way is the right one.
    """
    given = [x for x in args if x is not None]
    if unguarded() or ops.transformed(given) or not ordinary(*given):
        return None
    kernel = plans.recall(key, *given)
    if kernel is None and plannable(*given):
        kernel = make() or _no_kernel
        plans.keep(key, kernel, *given)
    return None if kernel is None else kernel(*args)


def _no_kernel(*args: Tensor | None) -> None:
    """In place of one, where there is none."""


@ops.uncompiled
class SampleSum(torch.autograd.Function):
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
_apply: Any = super(torch.autograd.Function, SampleSum).apply


Steps = tuple[tuple[int, int], tuple[int, int], tuple[int, int]]  # stride, padding, dilation
Filtered = tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None]


def convolution_key(
    input: Any, offset: Any, mask: Any, weight: Any, bias: Any, steps: Sequence[Any], impl: Any
) -> tuple[Hashable, Sequence[Any]]:
    """What two calls of `deform_conv2d` have in common if one plan serves both (None if no plan
    may serve this one, or its steps are not plain integers), and the tensors that must be alike.
    """
    given = [input, offset, weight]
    if mask is not None:
        given.append(mask)
    if bias is not None:
        given.append(bias)
    if unguarded() or not ordinary(*given) or not (impl is None or type(impl) is str):
        return None, given
    for step in steps:
        if type(step) is not int and not (
            type(step) is tuple and len(step) == 2 and type(step[0]) is type(step[1]) is int
        ):
            return None, given
    shapes = (input.shape, weight.shape)
    return ("deform_conv2d", *shapes, mask is None, bias is None, *steps, impl), given


class Convolution:
    """The kernels for convolutions of one signature."""

    def __init__(self, tensors: Filtered, steps: Steps, impl: str) -> None:
        self.signatures = [None if x is None else _signature(x) for x in tensors]
        self.rest, self.backend = (*steps, impl), ops.choose(impl, *tensors[:3])
        self.differentiable = ops.wants_gradient(tensors)
        self.kernel: Any = None  # none: the long way
        self.backwards = Plans(64)
        if self.backend != "reference":
            self.kernel = ops.backend(self.backend).plan_conv(*tensors, *steps)

    def __call__(self, *tensors: Tensor | None) -> Tensor:
        if self.differentiable and torch.is_grad_enabled():
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
        args = (grad, *tensors)
        if self.kernel is not None and not checks.autocast(grad.device.type):
            key = (*needs, *grad.stride())
            known = _by_plan(self.backwards, key, args, lambda: self._plan_backward(args, needs))
            if known is not None:
                ops.note("deform_conv_backward", self.backend)
                return known
        checked = self._fits(tensors)
        grads = ops.deform_conv.gradients(*args, *self.rest, needs, checked=checked)
        return [g if need else None for g, need in zip(grads, needs, strict=True)]

    def _fits(self, tensors: Sequence[Tensor | None]) -> bool:
        """Whether saved tensors are what they were, as those of a `Plan`."""
        known = zip(tensors, self.signatures, strict=True)
        return all(x is None or _signature(x) == one for x, one in known)

    def _plan_backward(
        self, args: Sequence[Tensor | None], needs: list[bool]
    ) -> Callable[..., Any] | None:
        if not self._fits(args[1:]):
            return None
        *steps, _ = self.rest
        return ops.backend(self.backend).plan_conv_backward(*args, *steps, needs)  # type: ignore[no-any-return]


@ops.uncompiled
class DeformConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: Convolution, *tensors: Tensor | None) -> Tensor:
        ctx.plan = plan
        ctx.save_for_backward(*tensors)
        return plan.forward(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        needs = list(ctx.needs_input_grad[1:])
        return None, *ctx.plan.gradients(grad, ctx.saved_tensors, needs)


_apply_convolution: Any = super(torch.autograd.Function, DeformConv).apply
