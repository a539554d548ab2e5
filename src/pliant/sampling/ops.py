"""The registered operators: which kernel runs, and how gradients flow.

Three operators, `pliant::sample_sum`, `pliant::deform_columns` and `pliant::deform_conv`, each
with a backward operator that is differentiable itself. A public function ends in one of them:

    call -> autograd.Function (if a gradient may be asked for) -> registered operator -> kernel of
    that device

(and there is a shorter way for calls that nobody observes, direct.py).

A Function around the operator costs half of what `torch.library.register_autograd` does and works
under `torch.func`. The operator's own Autograd key leads to the same Function, so a direct call of
`torch.ops.pliant.*`, and a compiler that traces one, see the same gradients (but for `torch.func`'s
transforms with gradients, which PyTorch does not let a direct call take part in). An operator that
nobody observes (no tracer, mode, tensor subclass or profiler) is called without the dispatcher,
which takes longer than a small problem.
"""

import contextlib
import functools
import importlib
import logging
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C._dynamo import eval_frame
from torch._functorch.utils import unwrap_dead_wrappers
from torch.autograd import forward_ad

from . import checks, reference
from .problem import POLICIES

log = logging.getLogger("pliant")
library = torch.library.Library("pliant", "DEF")

# Which kernel runs

# The backend of choice by type of device; on any other the reference runs.
AUTOMATIC = {"cpu": "cpu", "cuda": "triton"}
_records: list[list[tuple[str, str]]] = []


@functools.cache
def backend(name: str) -> Any:
    """The module with a backend's kernels, imported on first use."""
    return reference if name == "reference" else importlib.import_module(f"pliant.kernels.{name}")


def implementation(op: str, impl: str | None, *operands: Tensor | None) -> str:
    """The `impl` argument of `op` as the operators take it; "" is the automatic choice."""
    if impl is None:
        return ""
    names = ("reference", "cpu", "triton")
    if impl not in names:
        raise ValueError(f"{op}: impl must be None, 'reference', 'cpu' or 'triton', got {impl!r}")
    impl = names[names.index(impl)]  # one that is equal may be an enumeration's
    if impl == "reference" or checks.tracing():  # the operator will ask when it runs
        return impl
    if reasons := backend(impl).supports(*operands):
        raise NotImplementedError(f"{op}: impl={impl!r} cannot run this: " + "; ".join(reasons))
    return impl


def choose(impl: str, value: Tensor, loc: Tensor, weight: Tensor | None) -> str:
    """The backend for these operands. An explicit one that cannot run raises with every reason."""
    name = impl or AUTOMATIC.get(value.device.type, "reference")
    if name == "reference":
        return name
    reasons = backend(name).supports(value, loc, weight)
    if not reasons:
        return name
    if impl:
        raise NotImplementedError(f"impl={impl!r} cannot run this: " + "; ".join(reasons))
    log.debug("the reference runs instead of %s: %s", name, "; ".join(reasons))
    return "reference"


def note(operator: str, name: str) -> None:
    """Tell those who record that the backend `name` runs `operator`."""
    for calls in _records:
        calls.append((operator, name))


@contextlib.contextmanager
def record() -> Iterator[list[tuple[str, str]]]:
    """Collect (operator, backend) of every kernel that runs in this context."""
    calls: list[tuple[str, str]] = []
    _records.append(calls)
    try:
        yield calls
    finally:
        _records.remove(calls)


T = TypeVar("T")
_SKIP = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)


def uncompiled(x: T) -> T:
    """Have torch.compile leave a function, or a class's, alone, and all that it calls.

    It is for what PyTorch enters by itself: kernels of registered operators, and autograd's
    Functions. While a compiled program runs below a functional transform, or in pieces, the
    compiler looks at every frame that is entered, and would compile what launches a kernel as if it
    were a user's. What it traces from a user's own function is not affected.
    """
    for function in vars(x).values() if isinstance(x, type) else [x]:
        function = getattr(function, "__func__", function)
        if isinstance(function, FunctionType):
            eval_frame.set_code_exec_strategy(function.__code__, _SKIP)
    return x


# Registration


class Operator:
    """A registered operator and its gradient.

    `schema` lists the arguments before the last, `impl`. `verify` raises if they do not fit
    together. Those at `differentiable` have gradients,
    and the first three of them (features, positions, weights) decide which kernel can run. Those
    at `shared` are the same for every item of the batch. `kernel_args` turns the arguments into
    those of the backends' functions.
    """

    def __init__(
        self,
        name: str,
        schema: str,
        *,
        differentiable: tuple[int, ...],
        shared: tuple[int, ...],
        fake: Callable[..., Tensor],
        verify: Callable[..., None],
        kernel_args: Callable[..., tuple[Any, ...]],
    ) -> None:
        self.name, self.differentiable, self.shared = name, differentiable, shared
        self.fake, self.kernel_args = fake, kernel_args
        grads = ", ".join(["Tensor"] * len(differentiable))
        library.define(f"{name}({schema}, str impl) -> Tensor")
        library.define(
            f"{name}_backward(Tensor grad, {schema}, str impl, bool[] needs) -> ({grads})"
        )
        self.forward = getattr(torch.ops.pliant, name).default
        self.backward = getattr(torch.ops.pliant, f"{name}_backward").default
        self.function, eager, self.backward_function = _functions(self)
        # Past the preparations of `apply` for functional transforms, which take longer than a call.
        self.eager: Any = super(torch.autograd.Function, eager).apply  # type: ignore[misc]
        self.verify = verify
        for operator, kernel, fakes, function, vmap in (
            (self.forward, self._called, fake, self.function, self.vmap),
            (
                self.backward,
                self._backward_called,
                self._backward_fake,
                self.backward_function,
                self.backward_vmap,
            ),
        ):
            full = operator.name()
            library.impl(full, kernel, "CompositeExplicitAutograd")
            library.impl(full, _autograd(operator, function), "Autograd")
            torch.library.register_fake(full, fakes, lib=library)
            torch.library.register_vmap(full, functools.partial(vmap, operator), lib=library)

    def __call__(self, *args: Any) -> Tensor:
        """Run the operator; the way of every public function."""
        if torch.compiler.is_compiling() or _jit_trace() is not None:
            out = self.forward(*args)
        elif in_transform():
            out = self.function.apply(*args)
        elif torch.is_grad_enabled() and wants_gradient(args):
            out = self.eager(*unwrap_dead_wrappers(args))
        elif observed(args):
            out = self.forward(*args)
        else:
            out = self.run(*args)
        return out  # type: ignore[no-any-return]

    def gradients(self, *args: Any, checked: bool) -> tuple[Tensor, ...]:
        """Run the backward operator; an empty tensor for each gradient that is not needed."""
        run: Any
        if transformed(args):
            run = self.backward_function.apply
        else:
            run = self._backward if checked and not observed(args) else self.backward
        return run(*args)  # type: ignore[no-any-return]

    @uncompiled
    def _called(self, *args: Any) -> Tensor:
        """The operator as anybody may call it: the public functions have checked before."""
        self.verify(*args)
        return self.run(*args)

    @uncompiled
    def _backward_called(self, grad: Tensor, *args: Any) -> tuple[Tensor, ...]:
        self.verify(*args[:-1])
        shape = self.fake(*(a.to("meta") if isinstance(a, Tensor) else a for a in args[:-1])).shape
        checks.expect(
            grad.shape == shape, f"{self.name}_backward: grad", list(shape), list(grad.shape)
        )
        return self._backward(grad, *args)

    def run(self, *args: Any) -> Tensor:
        """The kernel for operands that were checked."""
        name = self._choose(self.name, args)
        kernel = getattr(backend(name), self.name)
        out: Tensor = _full_precision(kernel, *self.kernel_args(*args[:-1]))
        return _like(out, self.fake(*args)) if name == "reference" else out

    def _backward(self, grad: Tensor, *args: Any) -> tuple[Tensor, ...]:
        *args, needs = args  # type: ignore[assignment]
        operator = f"{self.name}_backward"
        name = self._choose(operator, args)
        kernel = getattr(backend(name), operator)
        grads = _full_precision(kernel, grad, *self.kernel_args(*args[:-1]), needs)
        inputs = [args[i] for i in self.differentiable]
        if name == "reference":
            grads = [
                g if g is None else _like(g, torch.empty_like(x))
                for g, x in zip(grads, inputs, strict=True)
            ]
        return tuple(grad.new_empty(0) if g is None else g for g in grads)

    def _backward_fake(self, grad: Tensor, *args: Any) -> tuple[Tensor, ...]:
        inputs = [args[i] for i in self.differentiable]
        return tuple(
            torch.empty_like(x) if need and x is not None else grad.new_empty(0)
            for x, need in zip(inputs, args[-1], strict=True)
        )

    def vmap(self, call: Any, info: Any, dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
        """`call`, the operator or a Function of it, for tensors with a mapped axis at `dims`."""
        fold = all(dims[i] is None for i in self.shared)
        (out,) = _vmap(call, info.batch_size, dims, args, self.shared, fold)
        return out, 0

    def backward_vmap(self, call: Any, info: Any, dims: tuple[Any, ...], *args: Any) -> Any:
        """The same of the backward operator."""
        # A shared argument's gradient is a sum over the batch: a joined batch would mix them.
        needs = zip(self.differentiable, args[-1], strict=True)
        mixed = any(need for i, need in needs if i in self.shared)
        fold = not mixed and all(dims[i + 1] is None for i in self.shared)
        shared = tuple(i + 1 for i in self.shared)
        grads = _vmap(call, info.batch_size, dims, args, shared, fold)
        return tuple(grads), (0,) * len(grads)

    def adjoint(self, grad: Tensor, *args: Any) -> Sequence[Tensor | None]:
        """The backward operator in differentiable PyTorch, from which its own gradient is taken."""
        *args, _, needs = args  # type: ignore[assignment]
        grads = getattr(reference, f"{self.name}_backward")(grad, *self.kernel_args(*args), needs)
        return grads  # type: ignore[no-any-return]

    def _choose(self, operator: str, args: Sequence[Any]) -> str:
        value, loc, weight = (args[i] for i in self.differentiable[:3])
        name = choose(args[-1], value, loc, weight)
        note(operator, name)
        return name


def _like(x: Tensor, model: Tensor) -> Tensor:
    """`x` with the strides of `model`, which the fake has promised."""
    return x if x.stride() == model.stride() else model.copy_(x)


def _full_precision(kernel: Callable[..., Any], first: Tensor, *rest: Any) -> Any:
    """Autocast chose the operator's dtypes already; the products inside must keep them."""
    if checks.autocast(first.device.type):
        with torch.autocast(first.device.type, enabled=False):
            return kernel(first, *rest)
    return kernel(first, *rest)


def wants_gradient(args: Sequence[Any]) -> bool:
    for a in args:  # noqa: SIM110 - any() is slower
        if isinstance(a, Tensor) and a.requires_grad:
            return True
    return False


def in_transform() -> bool:
    """Whether forward-mode differentiation or a functional transform is at work."""
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


def transformed(args: Sequence[Any]) -> bool:
    return in_transform() or (torch.is_grad_enabled() and wants_gradient(args))


def observed(args: Sequence[Any]) -> bool:
    """Whether a mode, a profiler or a tensor's own nature needs the dispatcher."""
    if checks.tracing() or _is_profiled():
        return True
    for a in args:  # noqa: SIM110 - any() is slower
        if isinstance(a, Tensor) and not plain(a):
            return True
    return False


_is_profiled, _jit_trace = torch._C._autograd._profiler_enabled, torch._C._get_tracing_state
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_is_batched = torch._C._functorch.is_legacy_batchedtensor
_is_functional = torch._is_functional_tensor


def plain(x: Any) -> bool:
    """Whether a tensor's memory is what it seems: no subclass, wrapper, lazy sign or lazy zero."""
    kind = type(x)
    return (kind is Tensor or kind is torch.nn.Parameter) and not (
        x.is_neg() or x._is_zerotensor() or _is_wrapped(x) or _is_batched(x) or _is_functional(x)
    )


def _autograd(operator: Any, function: type[torch.autograd.Function]) -> Callable[..., Any]:
    @uncompiled
    def kernel(*args: Any) -> Any:
        if transformed(args):
            return function.apply(*args)
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*args)

    return kernel


# Gradients


def _functions(op: Operator) -> tuple[type[torch.autograd.Function], ...]:
    """The operator, the same for eager calls, and its backward. None has a jvp: forward AD
    raises.
    """

    @uncompiled
    class Forward(torch.autograd.Function):
        @staticmethod
        def forward(*args: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                return op.forward(*args)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            _save(ctx, inputs)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            needs = [ctx.needs_input_grad[i] for i in op.differentiable]
            args, unchanged = _saved(ctx)
            grads = op.gradients(grad, *args, needs, checked=unchanged)
            result: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
            for i, need, g in zip(op.differentiable, needs, grads, strict=True):
                result[i] = g if need else None
            return tuple(result)

        @staticmethod
        def vmap(info: Any, dims: tuple[Any, ...], *args: Any) -> Any:
            return op.vmap(Forward.apply, info, dims, *args)

    class Eager(Forward):
        """Outside of functional transforms: without setup_context a call is 30 us shorter."""

        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            _save(ctx, args)
            if not observed(args):
                return op.run(*args)
            with torch._C._AutoDispatchBelowAutograd():
                return op.forward(*args)

        setup_context = staticmethod(torch.autograd.Function.setup_context)

    @uncompiled
    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(*args: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                return op.backward(*args)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            _save(ctx, inputs)
            ctx.set_materialize_grads(False)

        @staticmethod
        def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
            args, _ = _saved(ctx)
            result: list[Tensor | None] = [None] * len(args)
            asked = [
                c for c, need in zip(cotangents, args[-1], strict=True) if need and c is not None
            ]
            if not asked:
                return tuple(result)
            floats = (i + 1 for i in op.differentiable if _differentiable(args[i + 1]))
            places = [0, *floats]

            def adjoint(*tensors: Tensor) -> tuple[Tensor, ...]:
                full = list(args)
                for i, x in zip(places, tensors, strict=True):
                    full[i] = x
                grads = zip(op.adjoint(*full), cotangents, strict=True)
                return tuple(g for g, c in grads if g is not None and c is not None)

            vjp: Any = torch.func.vjp(adjoint, *(args[i] for i in places))[1]
            for i, g in zip(places, vjp(tuple(asked)), strict=True):
                result[i] = g
            return tuple(result)

        @staticmethod
        def vmap(info: Any, dims: tuple[Any, ...], *args: Any) -> Any:
            return op.backward_vmap(Backward.apply, info, dims, *args)

    return Forward, Eager, Backward


def _differentiable(x: Tensor | None) -> bool:
    """Whether it is there, and no integers: positions may be some."""
    return x is not None and x.is_floating_point()


def _save(ctx: Any, args: tuple[Any, ...]) -> None:
    tensors = [a for a in args if isinstance(a, Tensor)]
    ctx.save_for_backward(*tensors)
    ctx.others = [None if isinstance(a, Tensor) else (a,) for a in args]
    ctx.kinds = [(x.shape, x.dtype, x.device) for x in tensors]


def _saved(ctx: Any) -> tuple[list[Any], bool]:
    """The arguments, and whether their tensors are what they were: hooks on saved tensors and
    `x.data = ...` may have put others in their place, which must be checked again.
    """
    tensors = ctx.saved_tensors
    unchanged = ctx.kinds == [(x.shape, x.dtype, x.device) for x in tensors]
    left = iter(tensors)
    return [next(left) if other is None else other[0] for other in ctx.others], unchanged


def _vmap(
    call: Callable[..., Any],
    size: int,
    dims: Sequence[int | None],
    args: Sequence[Any],
    shared: tuple[int, ...],
    fold: bool,
) -> list[Tensor]:
    """The results, mapped at their first axis. The axis joins the batch where it can; otherwise it
    takes one call an item.
    """
    dims = [d if isinstance(a, Tensor) else None for a, d in zip(args, dims, strict=True)]
    pairs = list(enumerate(zip(args, dims, strict=True)))
    if size == 0:  # nothing to compute: an item of zeros shows the shapes
        zeros = (a if d is None else a.sum(d, dtype=a.dtype) for _, (a, d) in pairs)
        return [x.unsqueeze(0)[:0] for x in _several(call(*zeros))]
    if fold:
        out = call(*(a if i in shared else _join(a, d, size) for i, (a, d) in pairs))
        return [x.reshape(size, x.shape[0] // size, *x.shape[1:]) for x in _several(out)]
    items = [
        _several(call(*(a if d is None else a.select(d, item) for _, (a, d) in pairs)))
        for item in range(size)
    ]
    return [torch.stack(same) for same in zip(*items, strict=True)]


def _several(out: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (out,) if isinstance(out, Tensor) else out


def _join(x: Any, dim: int | None, size: int) -> Any:
    """[N, ...] mapped at `dim` (or not at all) as [size * N, ...]."""
    if not isinstance(x, Tensor):
        return x
    x = x.unsqueeze(0).expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.reshape(size * x.shape[1], *x.shape[2:])


# The three operators


def _sample_sum_fake(
    value: Tensor, shapes: Tensor, starts: Tensor, loc: Tensor, *rest: Any
) -> Tensor:
    n, _, g, k, d = value.shape
    return value.new_empty(n, loc.shape[1], g, k, d)


def _deform_columns_fake(
    input: Tensor, offset: Tensor, mask: Any, kernel: Sequence[int], *rest: Any
) -> Tensor:
    (kh, kw), (ho, wo) = kernel, offset.shape[2:]
    return input.new_empty(input.shape[0], input.shape[1], ho * kh, wo * kw)


def _deform_conv_fake(
    input: Tensor, offset: Tensor, mask: Any, weight: Tensor, *rest: Any
) -> Tensor:
    last = input.is_contiguous(memory_format=torch.channels_last) and not input.is_contiguous()
    form = torch.channels_last if last else torch.contiguous_format
    size = (input.shape[0], weight.shape[0], offset.shape[2], offset.shape[3])
    return torch.empty(size, dtype=input.dtype, device=input.device, memory_format=form)


_POLICIES = {tuple(policy): policy for policy in POLICIES}


def _with_policy(
    value: Tensor, shapes: Tensor, starts: Tensor, loc: Tensor, weight: Tensor, *policy: str
) -> tuple[Any, ...]:
    return value, shapes, starts, loc, weight, _POLICIES[policy]


def _as_they_are(*args: Any) -> tuple[Any, ...]:
    return args


sample_sum = Operator(
    "sample_sum",
    "Tensor value, Tensor shapes, Tensor starts, Tensor loc, Tensor weight, "
    "str position, str interpolation, str outside",
    differentiable=(0, 3, 4),
    shared=(1, 2),
    fake=_sample_sum_fake,
    verify=checks.direct_sum,
    kernel_args=_with_policy,
)
deform_columns = Operator(
    "deform_columns",
    "Tensor input, Tensor offset, Tensor? mask, SymInt[] kernel, "
    "SymInt[] stride, SymInt[] padding, SymInt[] dilation",
    differentiable=(0, 1, 2),
    shared=(),
    fake=_deform_columns_fake,
    verify=checks.direct_columns,
    kernel_args=_as_they_are,
)
deform_conv = Operator(
    "deform_conv",
    "Tensor input, Tensor offset, Tensor? mask, Tensor weight, Tensor? bias, "
    "SymInt[] stride, SymInt[] padding, SymInt[] dilation",
    differentiable=(0, 1, 2, 3, 4),
    shared=(3, 4),
    fake=_deform_conv_fake,
    verify=checks.direct_conv,
    kernel_args=_as_they_are,
)
