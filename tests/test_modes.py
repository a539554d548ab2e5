"""One call must not spoil the next, whatever mode it ran in; odd tensors; direct calls."""

import itertools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import pliant
from pliant import testing
from pliant.sampling import checks, direct, maps

LEVELS = [(4, 4), (2, 2)]
IMPLS = [impl for impl in testing.impls("cpu") if impl != "triton"]
needs_kernels = pytest.mark.skipif("cpu" not in IMPLS, reason="the CPU kernels are not built")


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    return torch.rand(2, 20, 2, 3), torch.rand(2, 5, 2, 2, 3, 2), torch.rand(2, 5, 2, 2, 3)


def call(value: Tensor, impl: str) -> Tensor:
    return pliant.multi_scale_deformable_attn(value, LEVELS, None, *rest, impl=impl)


def backward(value: Tensor, impl: str) -> Tensor:
    leaf = value.detach().requires_grad_()
    return torch.autograd.grad(call(leaf, impl).sum(), leaf)[0]


def in_mode(mode: Callable[[], object]) -> Callable[[Tensor, str], Tensor]:
    def run(value: Tensor, impl: str) -> Tensor:
        with mode():  # type: ignore[attr-defined]
            return call(value, impl)

    return run


def twice(value: Tensor, impl: str) -> Tensor:
    def first(v: Tensor) -> Tensor:
        return torch.func.grad(lambda x: (call(x, impl) ** 2).sum())(v).sum()

    return torch.func.grad(first)(value)


WAYS: dict[str, Callable[[Tensor, str], Tensor]] = {
    "plain": call,
    "no_grad": in_mode(torch.no_grad),
    "inference": in_mode(torch.inference_mode),
    "backward": backward,
    "func_grad": lambda v, impl: torch.func.grad(lambda x: call(x, impl).sum())(v),
    "func_grad_twice": twice,
    "vmap": lambda v, impl: torch.vmap(lambda x: call(x, impl))(torch.stack([v, v])),
    "jacrev": lambda v, impl: torch.func.jacrev(lambda x: call(x, impl).sum())(v),
}
rest = tensors()[1:]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("pair", list(itertools.permutations(WAYS, 2)), ids="-then-".join)
def test_a_mode_leaves_nothing_to_the_next_call(pair: tuple[str, str], impl: str) -> None:
    """What is remembered of the first call (the maps' metadata) serves the second."""
    value = tensors()[0]
    maps._remembered.cache_clear()
    expected = WAYS[pair[1]](value, impl)
    maps._remembered.cache_clear()
    WAYS[pair[0]](value, impl)
    got = WAYS[pair[1]](value, impl)
    with torch.inference_mode():
        torch.testing.assert_close(got, expected)


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("operator", ["sample_sum", "deform_conv"])
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_observers_see_the_operator_of_a_call_that_was_planned(
    operator: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if operator == "sample_sum":
        shapes, starts = torch.tensor(LEVELS, device=device), torch.tensor([0, 16], device=device)
        value, *others = (x.to(device) for x in tensors())
        call = lambda: pliant.multi_scale_deformable_attn(value, shapes, starts, *others)  # noqa: E731
    else:
        sizes = (2, 4, 6, 6), (2, 18, 6, 6), (3, 4, 3, 3)
        x, offset, weight = (torch.rand(*size, device=device) for size in sizes)
        call = lambda: pliant.deform_conv2d(x, offset, weight, padding=1)  # noqa: E731
    ones = torch.ones(2, device=device)[:, None, None]
    with monkeypatch.context() as patch:
        patch.setattr(direct, "plans", direct.Plans())
        torch.vmap(lambda y: call() * y)(ones)
        assert not direct.plans.kept
    for _ in range(2):
        expected = call()
        with Seen() as seen:
            assert torch.equal(call(), expected)
        assert f"pliant::{operator}" in seen.names
        with torch.profiler.profile() as profile:
            call()
        assert f"pliant::{operator}" in {event.key for event in profile.key_averages()}
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert type(call()) is FakeTensor
        with torch.inference_mode():
            assert call().is_inference()
        assert not call().is_inference()
        torch.testing.assert_close(torch.vmap(lambda y: call() * y)(ones)[1], expected)
        recorded = torch.jit.trace(lambda y: call() * y, ones[0])
        assert f"pliant::{operator}" in str(recorded.graph)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("impl", [None, *IMPLS])
def test_a_convolution_leaves_nothing_to_the_next_one(impl: str | None, device: str) -> None:
    """What a plain call has planned serves none that is not plain."""
    if device == "cuda" and impl is not None:
        pytest.skip("only one plans on a GPU: the automatic choice there")
    sizes = (2, 4, 6, 6), (2, 18, 6, 6), (3, 4, 3, 3)
    x, offset, weight = (torch.rand(*size, device=device) for size in sizes)

    def convolve(x: Tensor, padding: Any = 1, **others: Any) -> Tensor:
        given: Any = {"padding": padding, "impl": impl, **others}
        return pliant.deform_conv2d(x, offset, weight, **given)

    def gradient(x: Tensor) -> Tensor:
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(convolve(leaf).sum(), leaf)[0]

    expected, slope = convolve(x), gradient(x)
    for _ in range(2):
        assert torch.equal(convolve(x), expected)
        assert torch.equal(convolve(x, padding=(1, 1)), expected)
        assert torch.equal(convolve(x, padding=[1, 1]), expected)
        torch.testing.assert_close(gradient(x), slope)
        with torch.inference_mode():
            assert torch.equal(convolve(x), expected)
        both = torch.stack([x, x])
        torch.testing.assert_close(torch.vmap(convolve)(both), torch.stack([expected] * 2))
        torch.testing.assert_close(torch.func.grad(lambda x: convolve(x).sum())(x), slope)
        with torch.autocast(device, torch.bfloat16):
            assert convolve(x).dtype == torch.bfloat16
        before_dispatch = make_fx(lambda x: convolve(x), pre_dispatch=True)(x)
        for recorded in (
            make_fx(lambda x: convolve(x))(x),
            before_dispatch,
            torch.jit.trace(convolve, x),
        ):
            assert "deform_conv" in str(getattr(recorded, "graph", ""))
            assert torch.equal(recorded(x), expected)
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward"):
            convolve(forward_ad.make_dual(x, x))
    with_bias = convolve(x, bias=torch.ones(3, device=device))
    torch.testing.assert_close(with_bias, expected + 1)
    for wrong in (True, (True, 1), (1, 1, 1), 1.0):
        with pytest.raises(TypeError, match="padding must be an int or two ints"):
            convolve(x, padding=wrong)
    with pytest.raises(ValueError, match="impl must be None"):
        convolve(x, impl=["cpu"])
    with pytest.raises(ValueError, match=r"the output's size \[Ho, Wo\] = \[8, 8\]"):
        convolve(x, padding=2)


def test_autocast_is_that_of_the_operands_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's own question about any autocast leaves out some devices."""
    x, offset, weight = torch.rand(2, 4, 6, 6), torch.rand(2, 18, 6, 6), torch.rand(3, 4, 3, 3)
    monkeypatch.setattr(direct, "plans", direct.Plans())
    monkeypatch.setattr(checks, "autocast", lambda device: True)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda device: torch.float16)
    for _ in range(2):
        assert pliant.deform_conv2d(x, offset, weight, padding=1).dtype == torch.float16
    monkeypatch.undo()
    with pytest.raises(TypeError, match="weight must have the dtype of input"):
        pliant.deform_conv2d(x.half(), offset, weight, padding=1)


@pytest.mark.parametrize("operator", ["attention", "convolution"])
def test_compiled_autograd_sees_one_graph(operator: str) -> None:
    if operator == "attention":
        leaf = tensors()[0].requires_grad_()
        out = pliant.multi_scale_deformable_attn(leaf, LEVELS, None, *rest)
    else:
        leaf = torch.rand(2, 4, 6, 6, requires_grad=True)
        others = torch.rand(2, 18, 6, 6), torch.rand(3, 4, 3, 3)
        out = pliant.deform_conv2d(leaf, *others, padding=1)
    expected = torch.autograd.grad(out.sum(), leaf, retain_graph=True)[0]
    with compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        out.sum().backward()
    torch.testing.assert_close(leaf.grad, expected)


def negative(x: Tensor) -> Tensor:
    """The same numbers, with their sign in a bit of the tensor's instead of in memory."""
    return torch.complex(torch.zeros_like(x), -x).conj().imag


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("which", [0, 1, 2, 3], ids=["value", "locations", "weights", "gradient"])
def test_tensors_with_the_negative_bit(which: int, impl: str) -> None:
    plain = [x.requires_grad_() for x in tensors()]
    odd = [x.detach().requires_grad_() for x in plain]
    grad = torch.rand(2, 5, 6)
    if which < 3:
        odd[which] = negative(plain[which].detach()).requires_grad_()
        assert odd[which].is_neg()
    results = []
    for given, incoming in ((plain, grad), (odd, negative(grad) if which == 3 else grad)):
        value, locations, weights = given
        out = pliant.multi_scale_deformable_attn(value, LEVELS, None, locations, weights, impl=impl)
        with torch.no_grad():
            again = pliant.multi_scale_deformable_attn(
                value, LEVELS, None, locations, weights, impl=impl
            )
        results.append([out, again, *torch.autograd.grad(out, given, incoming)])
    for got, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_tensor_without_memory(impl: str) -> None:
    zero = torch._efficientzerotensor(2, 20, 2, 3)
    with torch.no_grad():
        assert call(zero, impl).count_nonzero() == 0


def test_meta_tensors_have_shapes() -> None:
    value, locations, weights = (x.to("meta") for x in tensors())
    out = pliant.multi_scale_deformable_attn(value, LEVELS, None, locations, weights)
    assert (out.shape, out.device.type) == ((2, 5, 6), "meta")
    x, weight = torch.rand(1, 4, 6, 6, device="meta"), torch.rand(4, 4, 3, 3, device="meta")
    assert pliant.deform_conv2d(x, torch.rand(1, 18, 4, 4, device="meta"), weight).is_meta


@pytest.mark.parametrize("impl", IMPLS)
def test_maps_that_overrun_are_found_by_a_tracer(impl: str) -> None:
    value = tensors()[0]

    def lying(v: Tensor) -> Tensor:
        return pliant.multi_scale_deformable_attn(v, [(4, 4), (9, 9)], [0, 16], *rest, impl=impl)

    with pytest.raises(Exception, match=r"must end within the 20 rows of value, got 97"):
        torch.compile(lying, fullgraph=True, backend="eager")(value)


def test_float64_stays_under_autocast() -> None:
    x, offset, weight = torch.rand(1, 4, 6, 6), torch.rand(1, 18, 4, 4), torch.rand(4, 4, 3, 3)
    with torch.autocast("cpu", torch.bfloat16):
        assert pliant.deform_conv2d(x, offset, weight).dtype == torch.bfloat16
        assert pliant.deform_conv2d(x.double(), offset, weight.double()).dtype == torch.float64
        with pytest.raises(TypeError, match="weight must have the dtype of input"):
            pliant.deform_conv2d(x.double(), offset, weight)


@pytest.mark.parametrize("impl", IMPLS)
def test_vmap_over_metadata(impl: str) -> None:
    value, locations, weights = tensors()
    shapes = torch.tensor([[(4, 4), (2, 2)], [(2, 8), (1, 4)]])
    starts = torch.tensor([0, 16])
    function = pliant.multi_scale_deformable_attn
    got = torch.vmap(lambda s: function(value, s, starts, locations, weights, impl=impl))(shapes)
    for one, s in zip(got, shapes, strict=True):
        torch.testing.assert_close(one, function(value, s, starts, locations, weights, impl=impl))


@pytest.mark.parametrize("impl", IMPLS)
def test_vmap_over_nothing(impl: str) -> None:
    value, locations, weights = tensors()
    shapes = torch.tensor([(4, 4), (2, 2)])
    none = [x.new_empty(0, *x.shape).requires_grad_() for x in (value, locations, weights)]

    def function(s: Any, *args: Any) -> Any:
        return pliant.multi_scale_deformable_attn(args[0], s, None, *args[1:], impl=impl)

    size = function(shapes, value, locations, weights).shape
    out = torch.vmap(function, (None, 0, 0, 0))(shapes, *none)
    assert out.shape == (0, *size)
    assert [g.shape for g in torch.autograd.grad(out.sum(), none)] == [x.shape for x in none]
    maps = shapes.new_empty(0, *shapes.shape)
    out = torch.vmap(function, (0, None, None, None))(maps, value, locations, weights)
    assert out.shape == (0, *size)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_registered_operator_takes_only_what_fits_together(impl: str) -> None:
    """Called past the public functions, too, it never reads outside."""
    args = [
        torch.rand(1, 9, 2, 1, 4), torch.tensor([[[3, 3]]]), torch.tensor([[0]]),
        torch.rand(1, 5, 2, 1, 3, 2), torch.rand(1, 5, 2, 1, 3, 1, 1), "unit", "bilinear", "zero",
    ]  # fmt: skip
    operator = torch.ops.pliant
    out = operator.sample_sum(*args, impl)
    for i, worse in (
        (0, torch.rand(1, 9, 1, 1, 4)), (1, torch.tensor([[3, 3]])), (2, torch.tensor([0])),
        (3, torch.rand(1, 5, 2, 1, 9, 2)), (4, torch.rand(1, 1, 1, 1, 1, 1, 1)), (5, "polar"),
        (1, torch.tensor([[[3.0, 3.0]]])),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"^sample_sum: .* must .* got"):
            operator.sample_sum(*args[:i], worse, *args[i + 1 :], impl)
    for i, name in ((1, "shapes"), (2, "starts")):  # a CPU kernel cannot read a GPU's memory
        with pytest.raises(ValueError, match=rf"^sample_sum: {name} must be on cpu, got meta$"):
            checks.direct_sum(*args[:i], args[i].to("meta"), *args[i + 1 :], impl)
    with pytest.raises(ValueError, match=r"^sample_sum_backward: grad must be"):
        operator.sample_sum_backward(out[:, :1], *args, impl, [True] * 3)
    with pytest.raises(ValueError, match="impl must be a backend, got 'gpu'"):
        operator.sample_sum(*args, "gpu")

    x, offset, mask = torch.rand(1, 4, 6, 6), torch.rand(1, 18, 4, 4), torch.rand(1, 9, 4, 4)
    weight, bias, steps = torch.rand(2, 4, 3, 3), torch.rand(2), ([1, 1], [0, 0], [1, 1])
    good = [x, offset, mask, weight, bias, *steps]
    out = operator.deform_conv(*good, impl)
    for i, worse in (
        (1, offset[:, :17]), (2, mask[:, :8]), (2, mask[..., :3]), (3, weight[:, :3]),
        (4, bias[:1]), (5, [0, 1]), (5, [1]), (3, weight.double()),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"^deform_(conv|columns): .* must .* got"):
            operator.deform_conv(*good[:i], worse, *good[i + 1 :], impl)
    with pytest.raises(ValueError, match=r"^deform_conv_backward: grad must be"):
        operator.deform_conv_backward(out[..., :1], *good, impl, [True] * 5)


def test_sizes_of_numpy() -> None:
    numpy = pytest.importorskip("numpy")
    value, locations, weights = tensors()
    sizes = [tuple(row) for row in numpy.array(LEVELS)]
    got = pliant.multi_scale_deformable_attn(value, sizes, None, locations, weights)
    expected = pliant.multi_scale_deformable_attn(value, LEVELS, None, locations, weights)
    assert torch.equal(got, expected)


def test_sizes_that_no_map_has() -> None:
    value, locations, weights = tensors()
    text = r"^multi_scale_deformable_attn: spatial_shapes\[0\] must be .* below 2\*\*31, got"
    with pytest.raises(ValueError, match=text):
        pliant.multi_scale_deformable_attn(value, [(2**70, 0), (1, 1)], None, locations, weights)


# Saved tensors that are not what they were

HOOKS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": Tensor.contiguous,
    "permuted": lambda x: x if x.dim() < 2 else x.transpose(0, 1).contiguous().transpose(0, 1),
    "float64": lambda x: x.double() if x.is_floating_point() else x,
}


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("operator", ["attention", "aggregation", "convolution"])
def test_hooks_may_change_what_was_saved(operator: str, hook: str) -> None:
    """Before and after ordinary calls of the same signature, which they leave alone."""
    wide = torch.rand(2, 20, 4, 6)
    if operator == "attention":
        leaves = [wide[..., :3], torch.rand(2, 5, 4, 1, 3, 2), torch.rand(2, 5, 4, 1, 3)]
        function = lambda v, x, w: pliant.multi_scale_deformable_attn(v, [(4, 5)], None, x, w)  # noqa: E731
    elif operator == "aggregation":
        leaves = [wide[:, :, 0], torch.rand(2, 5, 3, 1, 2), torch.rand(2, 5, 3, 1, 1, 2)]
        function = lambda v, x, w: pliant.deformable_aggregation(v, [[(4, 5)]], None, x, w)  # noqa: E731
    else:
        leaves = [wide.movedim(1, 2)[..., :5, :5], torch.rand(2, 18, 5, 5), torch.rand(3, 4, 3, 3)]
        function = lambda v, x, w: pliant.deform_conv2d(v, x, w, padding=1)  # noqa: E731
    leaves = [x.requires_grad_() for x in leaves]

    def step(hooked: bool) -> tuple[Tensor, ...]:
        pack = HOOKS[hook] if hooked else lambda x: x
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            out = function(*leaves)
        return torch.autograd.grad(out, leaves, torch.ones_like(out))

    first, plain, last = step(True), step(False), step(True)
    exact = [x.double().detach().requires_grad_() for x in leaves]
    out = function(*exact)
    for g, *others in zip(
        torch.autograd.grad(out, exact, torch.ones_like(out)), first, plain, last, strict=True
    ):
        for other in others:
            torch.testing.assert_close(other.double(), g, rtol=1e-4, atol=1e-4)


@needs_kernels
def test_saved_operands_of_another_size_raise() -> None:
    value, locations, weights = (x.requires_grad_() for x in tensors())
    out = pliant.multi_scale_deformable_attn(value, LEVELS, None, locations, weights)
    value.data = torch.rand(2, 1, 2, 3)
    with pytest.raises(ValueError, match="must lie within the 1 rows of value"):
        torch.autograd.grad(out.sum(), (locations, weights))
    image, offset = torch.rand(8, 4, 9, 9), torch.rand(8, 18, 9, 9, requires_grad=True)
    weight = torch.rand(4, 4, 3, 3, requires_grad=True)
    out = pliant.deform_conv2d(image, offset, weight, padding=1)
    offset.data = torch.rand(1, 18, 9, 9)
    with pytest.raises(ValueError, match=r"offset must have shape .* got \[1, 18, 9, 9\]"):
        torch.autograd.grad(out.sum(), weight)


def test_a_default_device_is_for_others() -> None:
    """In a process of its own, whose `torch.empty` is torch's."""
    code = """
import torch, pliant
image, offset, weight = torch.rand(1, 4, 6, 6), torch.rand(1, 18, 6, 6), torch.rand(4, 4, 3, 3)
value, loc, by = torch.rand(1, 20, 2, 3), torch.rand(1, 5, 2, 1, 3, 2), torch.rand(1, 5, 2, 1, 3)
conv = lambda: pliant.deform_conv2d(image, offset, weight, padding=1)
attend = lambda: pliant.multi_scale_deformable_attn(value, [(4, 5)], None, loc, by)
with torch.device("meta"):
    got = conv(), attend()
print(all(map(torch.equal, got, (conv(), attend()))))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr[-1000:]


def test_tracing_before_dispatch_records_the_operators() -> None:
    def model(value: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
        conv = pliant.deform_conv2d(image, offset, weight, padding=1)
        return pliant.multi_scale_deformable_attn(value, LEVELS, None, *rest), conv

    offset, weight = torch.rand(1, 18, 6, 6), torch.rand(4, 4, 3, 3)
    traced = make_fx(model, pre_dispatch=True)(tensors()[0], torch.rand(1, 4, 6, 6))
    others = tensors()[0], torch.rand(1, 4, 6, 6)
    for got, expected in zip(traced(*others), model(*others), strict=True):
        assert torch.equal(got, expected)


def test_a_call_like_one_that_passed_is_checked_all_the_same() -> None:
    value, locations, weights = tensors()
    given = torch.tensor(LEVELS)
    for _ in range(2):
        pliant.multi_scale_deformable_attn(value, given, None, locations, weights)
    attend = pliant.multi_scale_deformable_attn
    with pytest.raises(ValueError, match="spatial_shapes must have L = 2 as sampling_locations"):
        attend(value, given[:1], None, locations, weights)
    with pytest.raises(TypeError, match="spatial_shapes must be int32 or int64, got float32"):
        attend(value, given.float(), None, locations, weights)
    with pytest.raises(ValueError, match="impl must be None, 'reference', 'cpu' or 'triton'"):
        attend(value, given, None, locations, weights, impl="gpu")
    given[1] = 9  # in place: its values are read at each call
    with pytest.raises(ValueError, match="must end within the 20 rows of value, got 97"):
        attend(value, given, None, locations, weights)


@pytest.mark.parametrize("strided", [False, True], ids=["dense", "strided"])
@pytest.mark.parametrize("positions", [torch.int64, torch.int32, torch.float16])
def test_operands_that_the_kernels_convert(positions: torch.dtype, strided: bool) -> None:
    """The CPU kernels read neither integers nor half precision but in features."""
    locations = torch.randint(0, 4, (2, 5, 2, 2, 3, 4 if strided else 2)).to(positions)
    weights = torch.rand(2, 5, 2, 2, 6 if strided else 3).half()
    given = (locations[..., ::2], weights[..., ::2]) if strided else (locations, weights)
    value = tensors()[0].half().requires_grad_()
    outs = []
    for impl in (None, "reference"):
        out = pliant.geometric_kernel_attention(value, LEVELS, None, *given, impl=impl)
        outs.append((out, *torch.autograd.grad(out.sum(), value)))
    for got, expected in zip(*outs, strict=True):
        torch.testing.assert_close(got, expected)


@needs_kernels
def test_incoming_gradients_of_ever_new_layouts_are_not_all_remembered() -> None:
    value, loc = torch.rand(2, 20, 2, 3, requires_grad=True), torch.rand(2, 6, 2, 1, 4, 2)
    weights = torch.rand(2, 6, 2, 1, 4)
    direct.plans.kept.clear()
    for more in range(100):
        out = pliant.multi_scale_deformable_attn(value, [(4, 5)], None, loc, weights)
        torch.cat([out, torch.ones(2, more, 6)], 1).square().sum().backward()
    [[(_, (_, by_maps))]] = direct.plans.kept.values()
    [[(_, plan)]] = by_maps.kept.values()
    assert 1 <= len(plan.backwards.kept) <= 64


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_starts_of_maps_too_large_for_32_bits(dtype: torch.dtype) -> None:
    """The first map claims 2**32 pixels, so that the second lies outside of the features."""
    shapes = torch.tensor([[65536, 65536], [4, 5]], dtype=dtype)
    value, loc = torch.rand(1, 20, 1, 2), torch.rand(1, 3, 1, 2, 2, 2)
    loc[..., 0, :, :] = 5  # nothing of the first map is read

    def attention(shapes: Tensor) -> Tensor:
        weights = torch.ones(1, 3, 1, 2, 2)
        return pliant.multi_scale_deformable_attn(
            value, shapes, None, loc, weights, impl="reference"
        )

    assert make_fx(attention)(shapes)(shapes).count_nonzero() == 0


@pytest.mark.parametrize("impl", IMPLS)
def test_no_cameras_as_a_list(impl: str) -> None:
    """An empty list says nothing of the scales: the weights do."""
    features, locations = torch.rand(1, 0, 4), torch.rand(1, 2, 3, 0, 2)
    weights = torch.rand(1, 2, 3, 0, 3, 2)
    for shapes, starts in (([], None), ([], []), (torch.zeros(0, 3, 2, dtype=torch.int64), None)):
        out = pliant.deformable_aggregation(features, shapes, starts, locations, weights, impl=impl)
        assert torch.equal(out, torch.zeros(1, 2, 4))
