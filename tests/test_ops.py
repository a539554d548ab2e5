"""The operators as PyTorch sees them: registration, transforms, compilation, choice of kernel."""

import copy
import enum
import gc
import itertools
import logging
import weakref
from pathlib import Path

import numpy
import pytest
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import pliant
from pliant.sampling import direct, ops
from pliant.testing import impls

SIZES = [(4, 5), (2, 3)]
IMPLS = impls("cpu")


def _problem(
    operator: str, dtype: torch.dtype = torch.float64, kernel: tuple[int, int] = (3, 2)
) -> tuple[list[torch.Tensor], object]:
    """Differentiable tensors of a small problem, and a function of them that takes `impl`."""
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> torch.Tensor:
        return torch.rand(*size, generator=generator, dtype=torch.float64).to(dtype)

    if operator == "deformable_aggregation":
        tensors = [draw(2, 26, 12), draw(2, 5, 3, 1, 2), draw(2, 5, 3, 1, 2, 4)]
        return tensors, lambda f, x, w, impl=None: pliant.deformable_aggregation(
            f, [SIZES], None, x, w, impl=impl
        )
    if operator in ("multi_scale_deformable_attn", "geometric_kernel_attention"):
        function = getattr(pliant, operator)
        tensors = [draw(2, 26, 3, 4), draw(2, 5, 3, 2, 2, 2), draw(2, 5, 3, 2, 2)]
        return tensors, lambda v, x, w, impl=None: function(v, SIZES, None, x, w, impl=impl)
    out, taps = ((7 - kernel[0]) // 2 + 1, 8 - 2 * kernel[1]), 3 * kernel[0] * kernel[1]
    tensors = [draw(2, 6, 5, 4), draw(2, 2 * taps, *out) * 4 - 2, draw(2, taps, *out)]
    if operator == "deform_columns":
        return tensors, lambda x, o, m, impl=None: pliant.deform_columns(
            x, o, kernel, (2, 1), 1, (1, 2), m, impl=impl
        )
    tensors += [draw(4, 3, *kernel), draw(4)]
    return tensors, lambda x, o, m, w, b, impl=None: pliant.deform_conv2d(
        x, o, w, b, (2, 1), 1, (1, 2), m, impl=impl
    )


OPERATORS = [
    "multi_scale_deformable_attn",
    "deformable_aggregation",
    "geometric_kernel_attention",
    "deform_columns",
    "deform_conv2d",
]


def _gradients(function, tensors, grad=None):  # type: ignore[no-untyped-def]
    leaves = [t.detach().requires_grad_() for t in tensors]
    out = function(*leaves)
    grad = torch.ones_like(out) if grad is None else grad
    return out.detach(), torch.autograd.grad(out, leaves, grad, allow_unused=True)


def _registered_calls(
    operator: str, impl: str, **sizes: tuple[int, int]
) -> list[tuple[object, tuple[object, ...]]]:
    """The registered operator and its backward with the arguments of a public function's call."""
    tensors, function = _problem(operator, **sizes)
    calls: list[tuple[object, tuple[object, ...]]] = []
    known = {"deform_columns": ops.deform_columns, "deform_conv2d": ops.deform_conv}
    op = known.get(operator, ops.sample_sum)
    original = type(op).__call__

    def spy(self, *args):  # type: ignore[no-untyped-def]
        fresh = [
            a.detach().requires_grad_(a.is_floating_point()) if isinstance(a, torch.Tensor) else a
            for a in args
        ]
        out = original(self, *args)
        needs = [args[i] is not None for i in self.differentiable]
        calls.append((self.forward, tuple(fresh)))
        calls.append((self.backward, (torch.ones_like(out), *fresh, needs)))
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(op), "__call__", spy)
        patch.setattr(ops, "observed", lambda args: True)  # the way through the dispatcher
        patch.setattr(direct, "unguarded", lambda: True)
        function(*tensors, impl=impl)  # type: ignore[operator]
    return calls


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("operator", OPERATORS)
def test_opcheck_passes_for_every_registered_operator(operator: str, impl: str) -> None:
    calls = _registered_calls(operator, impl)
    assert len(calls) == 2
    checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
    for op, args in calls:
        assert set(torch.library.opcheck(op, args, test_utils=checks).values()) == {"SUCCESS"}


# One that stands for the three sums, which are one registered operator.
@pytest.mark.slow
@pytest.mark.parametrize("operator", [OPERATORS[0], *OPERATORS[3:]])
def test_opcheck_passes_for_a_compilers_trace(operator: str) -> None:
    """The same for every kernel, and slow: a backward is traced with its own gradient, where a
    convolution has one tap, so that there are fewer symbols to reason about."""
    (forward, args), _ = _registered_calls(operator, "reference")
    _, (backward, short) = _registered_calls(operator, "reference", kernel=(1, 1))
    checks = ["test_aot_dispatch_dynamic"]
    for op, given in ((forward, args), (backward, short)):
        assert set(torch.library.opcheck(op, given, test_utils=checks).values()) == {"SUCCESS"}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("operator", OPERATORS)
def test_compile_fullgraph_forward_and_backward(operator: str, dynamic: bool) -> None:
    torch._dynamo.reset()
    tensors, function = _problem(operator, torch.float32)
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    out, grads = _gradients(function, tensors)
    got, got_grads = _gradients(compiled, tensors)
    torch.testing.assert_close(got, out)
    for a, b in zip(got_grads, grads, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("starts", ["tensor", "none"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_fullgraph_with_shapes_as_tensors(starts: str, dynamic: bool) -> None:
    torch._dynamo.reset()
    tensors, function = _problem("multi_scale_deformable_attn", torch.float32)
    shapes = torch.tensor(SIZES)
    first = torch.tensor([0, 20]) if starts == "tensor" else None

    def model(value, locations, weights):  # type: ignore[no-untyped-def]
        return pliant.multi_scale_deformable_attn(value, shapes, first, locations, weights)

    out, grads = _gradients(function, tensors)
    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    got, got_grads = _gradients(compiled, tensors)
    torch.testing.assert_close(got, out)
    torch.testing.assert_close(got_grads, grads)


def test_compile_with_inductor_and_changing_sizes() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda v, h, w, x, a: pliant.multi_scale_deformable_attn(v, [(h, w)], None, x, a).relu(),
        fullgraph=True,
        dynamic=True,
    )
    for h, w in ((4, 5), (6, 3), (7, 7)):
        value = torch.rand(1, h * w, 2, 8, requires_grad=True)
        locations, weights = torch.rand(1, 3, 2, 1, 4, 2), torch.rand(1, 3, 2, 1, 4)
        out = compiled(value, h, w, locations, weights)
        expected = pliant.multi_scale_deformable_attn(value, [(h, w)], None, locations, weights)
        torch.testing.assert_close(out, expected.relu())
        grads = [torch.autograd.grad(y.sum(), value)[0] for y in (out, expected.relu())]
        torch.testing.assert_close(*grads)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("operator", OPERATORS)
def test_func_grad_and_vmap(operator: str, impl: str) -> None:
    tensors, function = _problem(operator)
    total = lambda *args: function(*args, impl=impl).pow(2).sum()  # noqa: E731
    places = [i for i in range(len(tensors)) if (operator, i) != ("geometric_kernel_attention", 1)]
    leaves = [t.clone().requires_grad_() for t in tensors]
    expected = torch.autograd.grad(total(*leaves), [leaves[i] for i in places])
    got = torch.func.grad(total, argnums=tuple(places))(*tensors)
    torch.testing.assert_close(got, expected)

    for mapped in range(len(tensors)):  # one argument at a time
        many = torch.stack([tensors[mapped], tensors[mapped] * 0.9, tensors[mapped] * 0.8])
        dims = tuple(0 if i == mapped else None for i in range(len(tensors)))
        args = [many if i == mapped else t for i, t in enumerate(tensors)]
        each = [[many[j] if i == mapped else t for i, t in enumerate(tensors)] for j in range(3)]
        out = torch.func.vmap(lambda *a: function(*a, impl=impl), in_dims=dims)(*args)
        torch.testing.assert_close(out, torch.stack([function(*a, impl=impl) for a in each]))
        grad = torch.func.grad(total, argnums=tuple(places))
        per_item = torch.func.vmap(grad, in_dims=dims)(*args)
        for k in range(len(places)):
            torch.testing.assert_close(per_item[k], torch.stack([grad(*a)[k] for a in each]))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("operator", OPERATORS)
def test_vmap_of_a_registered_operator(operator: str, impl: str) -> None:
    """By an argument each, by all, and by all twice, as a loop would have it. The kernel runs once,
    unless filters differ or have a gradient."""
    for op, args in _registered_calls(operator, impl):
        plain = [a.detach() if isinstance(a, torch.Tensor) else a for a in args]
        floats = [
            i for i, a in enumerate(plain) if isinstance(a, torch.Tensor) and a.is_floating_point()
        ]
        filters = {"pliant::deform_conv": {3, 4}, "pliant::deform_conv_backward": set(floats)}
        for places in (*([i] for i in floats), floats):
            dims = tuple(0 if i in places else None for i in range(len(plain)))
            batch = [torch.stack([a, 0.9 * a]) if i in places else a for i, a in enumerate(plain)]
            with ops.record() as calls:
                got = torch.func.vmap(op, in_dims=dims)(*batch)
            assert len(calls) == (2 if filters.get(op.name(), set()) & set(places) else 1)
            each = [op(*(a[j] if i in places else a for i, a in enumerate(batch))) for j in (0, 1)]
            torch.testing.assert_close(got, _stacked(each))
        once = torch.func.vmap(op, in_dims=dims)
        batches = [torch.stack([a, 0.8 * a], 1) if i in floats else a for i, a in enumerate(batch)]
        outer = tuple(1 if i in floats else None for i in range(len(plain)))
        got = torch.func.vmap(once, in_dims=outer)(*batches)
        each = [
            once(*(a[:, j] if i in floats else a for i, a in enumerate(batches))) for j in (0, 1)
        ]
        torch.testing.assert_close(got, _stacked(each))


def _stacked(results):  # type: ignore[no-untyped-def]
    if isinstance(results[0], torch.Tensor):
        return torch.stack(results)
    return tuple(map(torch.stack, zip(*results, strict=True)))


COMPOSED = {
    "compile-grad": lambda f, total, n: torch.compile(torch.func.grad(total, argnums=n)),
    "grad-compile": lambda f, total, n: torch.func.grad(torch.compile(total), argnums=n),
    "compile-vmap": lambda f, total, n: torch.compile(torch.func.vmap(f)),
    "vmap-compile": lambda f, total, n: torch.func.vmap(torch.compile(f)),
    "compile-vmap-grad": lambda f, total, n: torch.compile(
        torch.func.vmap(torch.func.grad(total, argnums=n))
    ),
    "vmap-grad-compile": lambda f, total, n: torch.func.vmap(
        torch.func.grad(torch.compile(total), argnums=n)
    ),
}


@pytest.mark.parametrize("composed", COMPOSED)
@pytest.mark.parametrize("operator", [OPERATORS[0], *OPERATORS[3:]])
def test_compilation_and_transforms_of_functions(operator: str, composed: str) -> None:
    """In either order; and what is compiled afterwards is one graph as before."""
    torch._dynamo.reset()
    tensors, function = _problem(operator, torch.float32)
    if "vmap" in composed:
        tensors = [torch.stack([t, 0.9 * t]) for t in tensors]
    places = tuple(range(len(tensors)))

    def total(*args):  # type: ignore[no-untyped-def]
        return function(*args).sin().sum()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda f: f)
        expected = COMPOSED[composed](function, total, places)(*tensors)
    got = COMPOSED[composed](function, total, places)(*tensors)
    torch.testing.assert_close(got, expected)
    tensors, _ = _problem(operator, torch.float32)
    one_graph = torch.compile(lambda *args: function(*args), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(one_graph(*tensors), function(*tensors))


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("twice", [False, True])
def test_the_compiler_does_not_follow_gradients_into_kernels(operator: str, twice: bool) -> None:
    """A function that asks for gradients of something outside is compiled as for another."""
    tensors, function = _problem(operator)
    leaf = tensors[0].requires_grad_()

    def frames(total: torch.Tensor) -> int:
        def differentiate() -> None:
            (grad,) = torch.autograd.grad(total, leaf, create_graph=twice)
            if twice:
                torch.autograd.grad(grad.sin().sum(), leaf)

        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        torch.compile(differentiate, backend="eager")()
        return int(torch._dynamo.utils.counters["frames"]["total"])

    frames(leaf.sin().sum())  # a process's first has more of them, the compiler's own
    assert frames(function(*tensors).sin().sum()) == frames(leaf.sin().sum())  # type: ignore[operator]


def test_sizes_of_numpy_compile_in_one_graph() -> None:
    (value, *rest), _ = _problem("multi_scale_deformable_attn")
    sizes, starts = numpy.array(SIZES), numpy.array([0, 20])
    call = lambda v, *a: pliant.multi_scale_deformable_attn(v, sizes, starts, *a)  # noqa: E731
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(value, *rest), call(value, *rest))


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("operator", OPERATORS[2:])
def test_the_compiler_does_not_follow_registered_operators(operator: str, mode: type) -> None:
    """Where it passes over the function that calls one, it would look at what that calls."""
    calls = _registered_calls(operator, "reference")

    def frames(op, args) -> int:  # type: ignore[no-untyped-def]
        outer = torch.compiler.disable(lambda: op(*args), recursive=False)
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        with mode():
            torch.compile(lambda: outer(), backend="eager")()
        return int(torch._dynamo.utils.counters["frames"]["total"])

    plain = frames(torch.ops.aten.sin.default, calls[0][1][:1])
    assert [frames(*call) for call in calls] == [plain] * len(calls)


def test_hessian_by_reverse_over_reverse() -> None:
    (value, locations, weights), function = _problem("multi_scale_deformable_attn")
    energy = lambda w: function(value, locations, w).pow(2).sum()  # noqa: E731
    hessian = torch.func.jacrev(torch.func.grad(energy))(weights)
    expected = torch.autograd.functional.hessian(energy, weights)
    torch.testing.assert_close(hessian, expected)
    assert hessian.abs().sum() > 0


@pytest.mark.parametrize("operator", OPERATORS)
def test_forward_mode_raises_and_never_drops_a_tangent(operator: str) -> None:
    tensors, function = _problem(operator)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        function(forward_ad.make_dual(tensors[0], torch.ones_like(tensors[0])), *tensors[1:])
    with pytest.raises(NotImplementedError, match="jvp"):
        torch.func.jvp(lambda x: function(x, *tensors[1:]), (tensors[0],), (tensors[0],))


def test_forward_mode_raises_for_a_direct_call_of_the_operator() -> None:
    op, args = _registered_calls("multi_scale_deformable_attn", "reference")[0]
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        op(forward_ad.make_dual(args[0].detach(), torch.ones_like(args[0])), *args[1:])


@pytest.mark.parametrize("operator", OPERATORS)
def test_checkpoint_and_deepcopy_of_a_module(operator: str) -> None:
    from torch.utils.checkpoint import checkpoint

    tensors, function = _problem(operator)
    _, expected = _gradients(function, tensors)
    _, got = _gradients(lambda *a: checkpoint(function, *a, use_reentrant=False), tensors)
    for a, b in zip(got, expected, strict=True):
        if b is not None:
            torch.testing.assert_close(a, b)
    assert copy.deepcopy(pliant.deform_conv2d) is pliant.deform_conv2d


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_runs_convolution_in_its_dtype_and_keeps_positions(dtype: torch.dtype) -> None:
    (x, offset, mask, weight, bias), function = _problem("deform_conv2d", torch.float32)
    expected = function(x.to(dtype), offset, mask, weight.to(dtype), bias.to(dtype))
    with torch.autocast("cpu", dtype=dtype):
        out = function(x, offset, mask, weight, bias)
        half = function(x.to(dtype), offset, mask, weight, bias)
    assert out.dtype == dtype
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(half, expected)


def test_autocast_does_not_reach_inside_an_operator() -> None:
    (value, locations, weights), function = _problem("multi_scale_deformable_attn", torch.float32)
    tensors, conv = _problem("deform_conv2d", torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(
            function(value, locations, weights), function(value, locations, weights), rtol=0, atol=0
        )
        args = [[2, 1], [1, 1], [1, 2], "reference"]
        inside = torch.ops.pliant.deform_conv(*tensors, *args)
    torch.testing.assert_close(inside, conv(*tensors, impl="reference"), rtol=0, atol=0)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("operator", OPERATORS)
def test_the_intended_kernel_runs(operator: str, impl: str) -> None:
    tensors, function = _problem(operator)
    with ops.record() as calls:
        _gradients(lambda *a: function(*a, impl=impl), tensors)
    name = {"deform_columns": "deform_columns", "deform_conv2d": "deform_conv"}.get(
        operator, "sample_sum"
    )
    assert calls == [(name, impl), (f"{name}_backward", impl)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("parameters", [False, True])
@pytest.mark.parametrize("operator", OPERATORS)
def test_a_jit_trace_holds_the_operator_and_not_its_result(
    operator: str, parameters: bool, tmp_path: Path
) -> None:
    """Also where gradients may be asked for, as of a module's parameters; and it can be saved."""
    tensors, function = _problem(operator)
    given = tuple(t.requires_grad_(parameters) for t in tensors)
    file = str(tmp_path / "traced")
    torch.jit.trace(lambda *a: function(*a), given).save(file)  # type: ignore[operator]
    traced = torch.jit.load(file)
    others = [t.detach() * 0.9 for t in tensors]
    out, grads = _gradients(function, others)
    got, got_grads = _gradients(traced, others)
    assert torch.equal(got, out)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(got_grads, grads, strict=True))


@pytest.mark.filterwarnings("error:There is a performance drop:UserWarning")
@pytest.mark.parametrize("operator", OPERATORS)
def test_batched_gradients(operator: str) -> None:
    tensors, function = _problem(operator)
    leaves = [t.requires_grad_() for t in tensors]
    if operator == "geometric_kernel_attention":
        leaves[1].requires_grad_(False)
    wanted = [x for x in leaves if x.requires_grad]
    out = function(*leaves)  # type: ignore[operator]
    grads = torch.stack([torch.ones_like(out), 2 * torch.ones_like(out)])
    got = torch.autograd.grad(out, wanted, grads, is_grads_batched=True, retain_graph=True)
    once = torch.autograd.grad(out, wanted, grads[0])
    for batched, g in zip(got, once, strict=True):
        torch.testing.assert_close(batched, torch.stack([g, 2 * g]), rtol=1e-12, atol=1e-12)


PLANNED = [*OPERATORS[:3], "deform_conv2d"]


@pytest.mark.skipif("cpu" not in IMPLS, reason="the reference knows only the long way")
@pytest.mark.parametrize("operator", PLANNED)
def test_the_short_way_is_the_long_one(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit by bit, for each set of gradients; also where the operands are strided or a slice."""
    tensors, function = _problem(operator, torch.float32)
    strided, slices = [], []
    for t in tensors:
        whole = t.repeat(*[2] * (t.dim() - 1), 1)
        strided.append(whole[(slice(1, None, 2),) * (t.dim() - 1)].copy_(t))
        slices.append(torch.cat([t.new_empty(1), t.flatten()])[1:].view(t.shape))
    moves = [False] if operator == "geometric_kernel_attention" else [True, False]

    def step(operands, needs):  # type: ignore[no-untyped-def]
        leaves = [t.detach().requires_grad_(n) for t, n in zip(operands, needs, strict=True)]
        out = function(*leaves)  # type: ignore[operator]
        grad = torch.arange(out.numel(), dtype=out.dtype).view(out.shape)
        return out, *torch.autograd.grad(out, [x for x in leaves if x.requires_grad], grad)

    others = [[True, False]] if len(tensors) == 3 else [[True, False], [False], [True]]
    for operands in (tensors, strided, slices):
        for needs in itertools.product([True, False], moves, *others):
            if not any(needs):
                continue
            short = step(operands, needs)
            with monkeypatch.context() as patch:
                patch.setattr(ops, "observed", lambda args: True)
                patch.setattr(direct, "unguarded", lambda: True)
                long = step(operands, needs)
            assert type(short[0].grad_fn) is not type(long[0].grad_fn)
            assert all(map(torch.equal, short, long))


@pytest.mark.parametrize("operator", PLANNED)
def test_gradients_asked_for_in_autocast_are_those_asked_for_outside(operator: str) -> None:
    tensors, function = _problem(operator, torch.float32)
    moves = operator != "geometric_kernel_attention"
    leaves = [t.requires_grad_(moves or t.dim() != 6) for t in tensors]
    out = function(*leaves)  # type: ignore[operator]
    wanted, grad = [t for t in leaves if t.requires_grad], torch.rand_like(out)
    outside = torch.autograd.grad(out, wanted, grad, retain_graph=True)
    for _ in range(2):
        with torch.autocast("cpu"):
            inside = torch.autograd.grad(out, wanted, grad, retain_graph=True)
        assert all(map(torch.equal, inside, outside))


@pytest.mark.parametrize("operator", PLANNED)
def test_a_plan_serves_tensors_like_those_it_was_made_for(
    operator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[object] = []
    for kind in (direct.Plan, direct.Convolution):
        make = kind.__init__
        counted = lambda self, *args, make=make: (made.append(self), make(self, *args))[1]  # noqa: E731
        monkeypatch.setattr(kind, "__init__", counted)
    monkeypatch.setattr(direct, "plans", direct.Plans())
    tensors, function = _problem(operator, torch.float32)
    expected = function(*tensors)  # type: ignore[operator]
    assert torch.equal(function(*(t.clone() for t in tensors)), expected)  # type: ignore[operator]
    assert len(made) == 1
    with torch.no_grad():
        function(*tensors)  # type: ignore[operator]
    assert len(made) == 1
    function(*(t.double() for t in tensors))  # type: ignore[operator]
    function(*(torch.cat([t, t]) if t.shape[0] == 2 else t for t in tensors))  # type: ignore[operator]
    turned = [t.transpose(0, -1).contiguous().transpose(0, -1) for t in tensors]
    torch.testing.assert_close(function(*turned), expected)  # type: ignore[operator]
    assert len(made) == 4


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested", "ignore:Sparse CSR")
@pytest.mark.parametrize("operator", PLANNED)
@pytest.mark.parametrize("form", ["nested", "sparse", "csr", "mkldnn"])
def test_tensors_without_strides_are_refused_where_a_plan_exists(operator: str, form: str) -> None:
    """A guard that looks at them ends the process."""
    tensors, function = _problem(operator, torch.float32)
    function(*tensors)  # type: ignore[operator]
    changed = {
        "nested": lambda x: torch.nested.nested_tensor(list(x)),
        "sparse": lambda x: x.to_sparse(),
        "csr": lambda x: x.to_sparse_csr(),
        "mkldnn": lambda x: x.to_mkldnn(),
    }[form]
    for i, x in enumerate(tensors):
        bad = [*tensors[:i], changed(x.reshape(len(x), -1)), *tensors[i + 1 :]]
        with pytest.raises(TypeError, match=f"^{operator}: .* must be a dense tensor, got"):
            function(*bad)  # type: ignore[operator]


def test_tensors_without_sizes_are_refused_where_a_plan_exists() -> None:
    """The same, of tensors that are nested or symbolic in secret."""
    (value, loc, weights), function = _problem("multi_scale_deformable_attn", torch.float32)
    function(value, loc, weights)  # type: ignore[operator]
    escaped = []
    nested = torch.nested.nested_tensor(list(weights))
    torch.vmap(lambda t: (escaped.append(t), t * 1)[1])(nested)
    with pytest.raises(RuntimeError):
        function(value, loc, escaped[0])  # type: ignore[operator]
    meta = [t.to("meta") for t in (value, loc, weights)]
    function(*meta)  # type: ignore[operator]
    unknown = torch.empty([ShapeEnv().create_unbacked_symint(), 5, 3, 2, 2], device="meta")
    with pytest.raises(TypeError):
        function(*meta[:2], unknown)  # type: ignore[operator]


def test_a_tensor_in_two_places_is_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "plans", direct.Plans())
    x, offset, weight = torch.rand(1, 9, 4, 4), torch.rand(1, 18, 4, 4), torch.rand(4, 9, 3, 3)
    once = pliant.deform_conv2d(x, offset, weight, None, 1, 1, 1, x)
    kept = [len(alike) for alike in direct.plans.kept.values()]
    twice = pliant.deform_conv2d(x, offset, weight, None, 1, 1, 1, x)
    assert [len(alike) for alike in direct.plans.kept.values()] == kept
    expected = pliant.deform_conv2d(x, offset, weight, None, 1, 1, 1, x.clone())
    assert torch.equal(once, expected)
    assert torch.equal(twice, expected)


@pytest.mark.parametrize("operator", PLANNED)
@pytest.mark.parametrize("impl", IMPLS)
def test_a_plan_keeps_no_tensor_alive(operator: str, impl: str) -> None:
    tensors, function = _problem(operator, torch.float32)
    leaves = [t.clone().requires_grad_(t.dim() != 6) for t in tensors]
    function(*leaves, impl=impl).sum().backward()  # type: ignore[operator]
    known = [weakref.ref(t) for t in leaves]
    del leaves
    gc.collect()
    assert [ref() for ref in known] == [None] * len(known)


def test_the_name_of_an_implementation_may_be_an_enumeration() -> None:
    class Kind(str, enum.Enum):
        LAST = IMPLS[-1]

    tensors, function = _problem("multi_scale_deformable_attn")
    with ops.record() as calls:
        function(*tensors, impl=Kind.LAST)  # type: ignore[operator]
    assert calls == [("sample_sum", IMPLS[-1])]


def test_plans_of_ever_new_layouts_are_not_all_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "plans", direct.Plans())
    (value, loc, weights), function = _problem("multi_scale_deformable_attn", torch.float32)
    for more in range(40):  # the same sizes, other strides
        wide = torch.cat([value, torch.ones(2, more, 3, 4)], 1)[:, :26]
        function(wide, loc, weights)  # type: ignore[operator]
    [alike] = direct.plans.kept.values()
    assert len(alike) == direct.Plans.ALIKE
    for more in range(1100):
        direct.plans.keep(more, None, value)
    assert len(direct.plans.kept) <= 1024


def test_automatic_choice_falls_back_and_says_why(caplog, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    tensors, function = _problem("multi_scale_deformable_attn")
    monkeypatch.setattr(direct, "plans", direct.Plans())
    monkeypatch.setattr(ops.backend("cpu"), "supports", lambda *a: ["it is Sunday", "it rains"])
    with caplog.at_level(logging.DEBUG, logger="pliant"), ops.record() as calls:
        function(*tensors)
    assert calls == [("sample_sum", "reference")]
    assert set(caplog.messages) == {"the reference runs instead of cpu: it is Sunday; it rains"}
    with pytest.raises(
        NotImplementedError, match=r"_attn: impl='cpu' cannot run this: it is Sunday; it rains$"
    ):
        function(*tensors, impl="cpu")


def test_triton_without_a_gpu_raises_with_every_reason() -> None:
    if "triton" in IMPLS or torch.cuda.is_available():
        pytest.skip("Triton can run here")
    tensors, function = _problem("multi_scale_deformable_attn")
    with pytest.raises(NotImplementedError) as error:
        function(*tensors, impl="triton")
    assert str(error.value) == (
        "multi_scale_deformable_attn: impl='triton' cannot run this: no CUDA device is available, "
        "and TRITON_INTERPRET=1 is not set; Triton kernels need CUDA tensors, got cpu"
    )


def test_what_each_backend_supports(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    triton, value = ops.backend("triton"), torch.zeros(2)
    monkeypatch.setattr(triton, "missing", lambda: ["no wind"])
    monkeypatch.setattr(triton, "INTERPRET", False)
    device = "Triton kernels need CUDA tensors, got cpu"
    assert triton.supports(value, value, None) == ["no wind", device]
    odd = value.to(torch.complex64)
    assert triton.supports(odd, value, None) == ["no wind", device, "features of torch.complex64"]
    assert ops.AUTOMATIC == {"cpu": "cpu", "cuda": "triton"}


def test_a_problem_is_checked_once_and_maps_are_remembered() -> None:
    from pliant.sampling import maps

    (value, locations, weights), function = _problem("multi_scale_deformable_attn")
    function(value, locations, weights)
    before = maps._remembered.cache_info().hits
    function(value, locations, weights)
    assert maps._remembered.cache_info().hits == before + 1
