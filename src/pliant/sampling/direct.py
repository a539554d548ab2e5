"""From a public function to `sample_sum`, the short way where nobody looks.

Views, the dispatcher and the autograd nodes of views take longer than a small problem. So what the
signature of a call fixes (backend, sizes, strides) is worked out once: a `Plan`, whose kernels read
the operator's own tensors. A call that somebody observes (a tracer, a transform, a mode, a tensor
subclass), and one for the reference, goes through views and the registered operator instead.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import checks, ops
from .layout import Layout

Operands = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # value, shapes, starts, loc, weight

_plans: dict[Hashable, "Plan"] = {}


def sample_sum(
    op: str,
    layout: Layout,
    operands: Operands,
    signatures: tuple[checks.Signature, checks.Signature, checks.Signature],
    impl: str | None,
) -> Tensor:
    """The sum that `op` is, [N, Q, G * K * D]; `signatures` are those of value, loc, weight."""
    value, shapes, starts, loc, weight = operands
    chosen = ops.implementation(op, impl, value, loc, weight)
    if (
        ops.in_transform()
        or ops.observed((value, loc, weight))
        or not (type(shapes) is type(starts) is Tensor)
    ):
        return _observed(layout, operands, chosen)
    key = (layout, signatures, chosen, shapes.dtype, starts.dtype)
    plan = _plans.get(key)
    if plan is None:
        plan = _remember(key, Plan(layout, operands, signatures, chosen))
    if plan.kernel is None:
        return _observed(layout, operands, chosen)
    if torch.is_grad_enabled() and (
        value.requires_grad or loc.requires_grad or weight.requires_grad
    ):
        return _apply(plan, *operands)  # type: ignore[no-any-return]
    return plan.forward(*operands)


def _observed(layout: Layout, operands: Operands, impl: str) -> Tensor:
    return ops.sample_sum(*layout.views(*operands), *layout.policy, impl).flatten(2)


def _remember(key: Hashable, plan: "Plan") -> "Plan":
    if len(_plans) >= 1024:
        _plans.clear()
    _plans[key] = plan
    return plan


class Plan:
    """The kernels for calls of one signature."""

    def __init__(
        self,
        layout: Layout,
        operands: Operands,
        signatures: tuple[checks.Signature, checks.Signature, checks.Signature],
        impl: str,
    ) -> None:
        value, shapes, starts, loc, weight = operands
        self.layout, self.signatures = layout, signatures
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
