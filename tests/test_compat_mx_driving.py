"""The vendor's mx_driving: its names, its keywords in both spellings, its warnings and errors."""

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import pliant
from pliant.compat import mx_driving
from pliant.compat.mx_driving.ops.geometric_kernel_attention import GeometricKernelAttentionFunc
from pliant.compat.mx_driving.ops.npu_deformable_aggregation import AdsDeformableAggregation

EMPTY = "Erorr! Input Tensor can not be a empty Tensor.\n"


class Context:
    """What a script passes where autograd would pass its own."""

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors


def attention(dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    shapes, starts = torch.tensor([[6, 5], [3, 4]]), torch.tensor([0, 30])
    value, locations, weights = (
        torch.rand(size, dtype=dtype)
        for size in ((2, 42, 3, 4), (2, 7, 3, 2, 4, 2), (2, 7, 3, 2, 4))
    )
    return value, shapes, starts, locations * 1.4 - 0.2, weights


def geometric(dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    value, shapes, starts, locations, weights = attention(dtype)
    return value, shapes.int(), starts.int(), locations * 6, weights


def aggregation(dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    shapes = torch.tensor([[[5, 6], [2, 3]]] * 2, dtype=torch.int32)
    starts = torch.tensor([[0, 30], [36, 66]], dtype=torch.int32)
    features, locations, weights = (
        torch.rand(size, dtype=dtype) for size in ((2, 72, 8), (2, 3, 5, 2, 2), (2, 3, 5, 2, 2, 4))
    )
    return features, shapes, starts, locations * 1.4 - 0.2, weights


def convolution(dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """x, offset, mask, weight, bias: 2 groups, 3 deformable groups, a 3x2 kernel, 5x4 outputs."""
    sizes = ((2, 12, 6, 5), (2, 2 * 3 * 6, 2, 4), (2, 3 * 6, 2, 4), (4, 6, 3, 2), (4,))
    return tuple(torch.randn(size, dtype=dtype) for size in sizes)


SETTINGS = {"stride": (2, 1), "padding": (1, 0), "dilation": (2, 1)}
GROUPS = {"groups": 2, "deformable_groups": 3}


def leaves(*tensors: Any) -> list[Any]:
    return [
        t.detach().requires_grad_() if isinstance(t, Tensor) and t.is_floating_point() else t
        for t in tensors
    ]


def with_gradients(function: Callable[..., Tensor], *args: Any) -> tuple[Tensor | None, ...]:
    """The result of `function` and its gradients with respect to each argument."""
    args = tuple(leaves(*args))
    output = function(*args)
    output.backward(torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output))
    return output.detach(), *(a.grad if isinstance(a, Tensor) else None for a in args)


def assert_same(got: tuple[Tensor | None, ...], expected: tuple[Tensor | None, ...]) -> None:
    assert [g is None for g in got] == [e is None for e in expected]
    for g, e in zip(got, expected, strict=True):
        if e is not None:
            torch.testing.assert_close(g, e, rtol=0, atol=0)


# Names

NAMES = {
    "": [
        "DeformConv2dFunction",
        "ModulatedDeformConv2dFunction",
        "MultiScaleDeformableAttnFunction",
        "deform_conv2d",
        "deformable_aggregation",
        "geometric_kernel_attention",
        "modulated_deform_conv2d",
        "multi_scale_deformable_attn",
        "npu_deformable_aggregation",
        "npu_multi_scale_deformable_attn_function",
    ],
    ".fused": [
        "DeformConv2dFunction",
        "ModulatedDeformConv2dFunction",
        "MultiScaleDeformableAttnFunction",
        "deform_conv2d",
        "modulated_deform_conv2d",
        "multi_scale_deformable_attn",
        "npu_deformable_aggregation",
        "npu_multi_scale_deformable_attn_function",
    ],
    ".point": ["npu_multi_scale_deformable_attn_function"],
    ".ops.npu_deformable_aggregation": [
        "AdsDeformableAggregation",
        "deformable_aggregation",
        "npu_deformable_aggregation",
    ],
    ".ops.geometric_kernel_attention": [
        "GeometricKernelAttentionFunc",
        "geometric_kernel_attention",
    ],
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("module", "name"), [(m, n) for m, names in NAMES.items() for n in names])
def test_every_name(module: str, name: str) -> None:
    found = getattr(importlib.import_module(f"pliant.compat.mx_driving{module}"), name)
    assert found is getattr(mx_driving, name, found)  # one object under all its names


@pytest.mark.parametrize("name", ["fused", "point"])
def test_an_import_of_an_old_module_warns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    full = f"pliant.compat.mx_driving.{name}"
    monkeypatch.delitem(sys.modules, full, raising=False)
    message = f"^mx_driving.{name} is deprecated: import its names from mx_driving$"
    with pytest.warns(DeprecationWarning, match=message):
        importlib.import_module(full)


@pytest.mark.parametrize("name", ["fused", "point"])
def test_an_old_module_is_reached_as_an_attribute(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(mx_driving, name, raising=False)  # which asks for it, hence imports it
    monkeypatch.delitem(sys.modules, f"pliant.compat.mx_driving.{name}", raising=False)
    with pytest.warns(DeprecationWarning, match=f"mx_driving.{name} is deprecated"):
        module = getattr(mx_driving, name)
    assert module.__name__ == f"pliant.compat.mx_driving.{name}"


def test_an_unknown_name_is_an_attribute_error() -> None:
    message = "^module 'pliant.compat.mx_driving' has no attribute 'sparse_conv'$"
    with pytest.raises(AttributeError, match=message):
        _ = mx_driving.sparse_conv


# Functions

FUNCTIONS = {
    "attention": (
        mx_driving.multi_scale_deformable_attn,
        pliant.multi_scale_deformable_attn,
        attention,
    ),
    "aggregation": (mx_driving.deformable_aggregation, pliant.deformable_aggregation, aggregation),
    "geometric": (
        mx_driving.geometric_kernel_attention,
        pliant.geometric_kernel_attention,
        geometric,
    ),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("compatible", "public", "make"), FUNCTIONS.values(), ids=FUNCTIONS)
def test_the_public_function_under_another_name(
    compatible: Callable[..., Tensor],
    public: Callable[..., Tensor],
    make: Callable[..., tuple[Tensor, ...]],
    dtype: torch.dtype,
) -> None:
    tensors = make(dtype)
    got = with_gradients(compatible, *tensors)
    assert got[0] is not None
    assert got[0].dtype == dtype
    assert_same(got, with_gradients(public, *tensors))


KEYWORDS = {
    "aggregation-documented": (
        mx_driving.deformable_aggregation,
        aggregation,
        "feature_maps spatial_shape scale_start_index sample_locations weight",
    ),
    "aggregation-coded": (
        mx_driving.npu_deformable_aggregation,
        aggregation,
        "mc_ms_feat spatial_shape scale_start_index sampling_location weights",
    ),
    "attention": (
        mx_driving.multi_scale_deformable_attn,
        attention,
        "value value_spatial_shapes value_level_start_index sampling_locations attention_weights",
    ),
    "attention-old-documented": (
        mx_driving.npu_multi_scale_deformable_attn_function,
        attention,
        "value value_spatial_shapes value_level_start_index sampling_locations attention_weights",
    ),
    "attention-old-coded": (
        mx_driving.npu_multi_scale_deformable_attn_function,
        attention,
        "value shape offset locations weight",
    ),
    "geometric-documented": (
        mx_driving.geometric_kernel_attention,
        geometric,
        "value spatial_shapes level_start_index sampling_locations attention_weights",
    ),
    "geometric-coded": (
        mx_driving.geometric_kernel_attention,
        geometric,
        "value spatial_shapes level_start_index sampling_locations attn_weights",
    ),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("function", "make", "names"), KEYWORDS.values(), ids=KEYWORDS)
def test_keywords(
    function: Callable[..., Tensor], make: Callable[[], tuple[Tensor, ...]], names: str
) -> None:
    tensors = make()
    got = function(**dict(zip(names.split(), tensors, strict=True)))
    assert torch.equal(got, function(*tensors))


def test_two_spellings_at_once_are_an_error() -> None:
    features, shapes, starts, locations, weights = aggregation()
    message = (
        r"^deformable_aggregation\(\) got 'weight' and 'weights', two spellings of one argument$"
    )
    with pytest.raises(TypeError, match=message):
        mx_driving.deformable_aggregation(
            features, shapes, starts, locations, weight=weights, weights=weights
        )
    with pytest.raises(TypeError, match="got multiple values for argument 'weight'"):
        mx_driving.deformable_aggregation(
            features, shapes, starts, locations, weights, weights=weights
        )


def test_the_old_attention_warns_its_caller() -> None:
    tensors = attention()
    message = (
        "^npu_multi_scale_deformable_attn_function is deprecated: use multi_scale_deformable_attn$"
    )
    with pytest.warns(DeprecationWarning, match=message) as warned:
        got = mx_driving.npu_multi_scale_deformable_attn_function(*tensors)
    assert [w.filename for w in warned] == [__file__]
    assert torch.equal(got, mx_driving.multi_scale_deformable_attn(*tensors))


EMPTIES = {
    "attention-batch": (mx_driving.multi_scale_deformable_attn, attention, (0, 3, 4), 0),
    "attention-queries": (mx_driving.multi_scale_deformable_attn, attention, (3, 4), 1),
    "attention-levels": (mx_driving.multi_scale_deformable_attn, attention, (1, 2), 0),
    "aggregation-batch": (mx_driving.deformable_aggregation, aggregation, (0, 3, 4), 0),
    "aggregation-anchors": (mx_driving.npu_deformable_aggregation, aggregation, (3, 4), 1),
}


@pytest.mark.parametrize(("function", "make", "which", "axis"), EMPTIES.values(), ids=EMPTIES)
def test_empty_tensors_raise_the_vendors_words(
    function: Callable[..., Tensor],
    make: Callable[[], tuple[Tensor, ...]],
    which: tuple[int, ...],
    axis: int,
) -> None:
    tensors = [t.narrow(axis, 0, 0) if i in which else t for i, t in enumerate(make())]
    with pytest.raises(Exception) as raised:  # noqa: PT011  the vendor raises no finer class
        function(*tensors)
    assert type(raised.value) is Exception
    assert str(raised.value) == EMPTY


def test_empty_tensors_by_hand_and_by_the_old_name_raise_too() -> None:
    value, *others = attention()
    with pytest.raises(Exception) as raised:  # noqa: PT011
        mx_driving.MultiScaleDeformableAttnFunction.forward(Context(), value[:0], *others)
    assert str(raised.value) == EMPTY
    with (
        pytest.warns(DeprecationWarning, match="deprecated"),
        pytest.raises(Exception) as raised,  # noqa: PT011
    ):
        mx_driving.npu_multi_scale_deformable_attn_function(value[:0], *others)
    assert str(raised.value) == EMPTY


def test_geometric_attention_accepts_an_empty_batch() -> None:
    value, shapes, starts, locations, weights = geometric()
    got = mx_driving.geometric_kernel_attention(
        value[:0], shapes, starts, locations[:0], weights[:0]
    )
    assert got.shape == (0, 7, 12)


@pytest.mark.parametrize("fill", [float("nan"), float("inf")])
def test_attention_that_sees_nothing_is_zero(fill: float) -> None:
    value, shapes, starts, locations, weights = attention(torch.float32)
    value, locations, weights = leaves(
        *(torch.full_like(t, fill) for t in (value, locations, weights))
    )
    output = mx_driving.multi_scale_deformable_attn(value, shapes, starts, locations, weights)
    output.backward(torch.full_like(output, fill))
    for x in (output, value.grad, locations.grad, weights.grad):
        assert torch.equal(x, torch.zeros_like(x))


# Precision of attention


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_attention_in_half_precision_rounds_once(dtype: torch.dtype) -> None:
    tensors = attention(dtype)
    got = mx_driving.multi_scale_deformable_attn(*tensors)
    exact = pliant.multi_scale_deformable_attn(
        *(t.double() if t.is_floating_point() else t for t in tensors)
    )
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_attention_leaves_autocast_for_float32(dtype: torch.dtype) -> None:
    tensors = attention(dtype)
    wide = dtype if dtype == torch.float64 else torch.float32
    expected = with_gradients(
        mx_driving.multi_scale_deformable_attn,
        *(t.to(wide) if t.is_floating_point() else t for t in tensors),
    )
    inputs = leaves(*tensors)
    with torch.autocast("cpu", torch.bfloat16):
        output = mx_driving.multi_scale_deformable_attn(*inputs)
    assert output.dtype == wide
    output.backward(torch.linspace(-1, 1, output.numel(), dtype=wide).view_as(output))
    assert torch.equal(output, expected[0])
    for x, grad in zip(inputs, expected[1:], strict=True):
        if grad is not None:
            assert torch.equal(x.grad, grad.to(dtype))


def test_attention_by_hand_under_autocast_keeps_float32_for_backward() -> None:
    ctx = Context()
    with torch.autocast("cpu", torch.bfloat16):
        output = mx_driving.MultiScaleDeformableAttnFunction.forward(ctx, *attention(torch.float16))
    assert output.dtype == torch.float32
    assert [t.dtype for t in ctx.saved_tensors if t.is_floating_point()] == [torch.float32] * 3


# Old-style functions

BY_HAND = {
    "MultiScaleDeformableAttnFunction": (
        mx_driving.MultiScaleDeformableAttnFunction,
        mx_driving.multi_scale_deformable_attn,
        attention,
    ),
    "AdsDeformableAggregation": (
        AdsDeformableAggregation,
        mx_driving.deformable_aggregation,
        aggregation,
    ),
    "GeometricKernelAttentionFunc": (
        GeometricKernelAttentionFunc,
        mx_driving.geometric_kernel_attention,
        geometric,
    ),
}


@pytest.mark.parametrize(("old", "function", "make"), BY_HAND.values(), ids=BY_HAND)
def test_forward_and_backward_by_hand(
    old: Any, function: Callable[..., Tensor], make: Callable[[], tuple[Tensor, ...]]
) -> None:
    tensors = make()
    expected = with_gradients(function, *tensors)
    ctx = Context()
    output = old.forward(ctx, *tensors)
    grad = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    assert_same((output, *old.backward(ctx, grad)), expected)
    # a context that never saw a forward
    ctx = Context()
    ctx.saved_tensors = tensors
    assert_same((output, *old.backward(ctx, grad)), expected)


@pytest.mark.parametrize(("old", "function", "make"), BY_HAND.values(), ids=BY_HAND)
def test_apply_is_the_function(
    old: Any, function: Callable[..., Tensor], make: Callable[[], tuple[Tensor, ...]]
) -> None:
    assert issubclass(old, torch.autograd.Function)
    assert old.apply is function
    tensors = make()
    assert_same(with_gradients(old.apply, *tensors), with_gradients(function, *tensors))


def deformable(x: Tensor, offset: Tensor, weight: Tensor) -> Tensor:
    return mx_driving.DeformConv2dFunction.apply(x, offset, weight, (2, 1), (1, 0), (2, 1), 2, 3)


def deformable_with_bias(x: Tensor, offset: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    steps = (2, 1), (1, 0), (2, 1)
    return mx_driving.DeformConv2dFunction.apply(x, offset, weight, *steps, 2, 3, bias)


def modulated(x: Tensor, offset: Tensor, mask: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    steps = (2, 1), (1, 0), (2, 1)
    return mx_driving.ModulatedDeformConv2dFunction.apply(
        x, offset, mask, weight, bias, *steps, 2, 3
    )


COMPILED = {
    **{
        name: (lambda *tensors, old=old: old.apply(*tensors), make())
        for name, (old, _, make) in BY_HAND.items()
    },
    "DeformConv2dFunction": (deformable, [convolution()[i] for i in (0, 1, 3)]),
    "DeformConv2dFunction-bias": (deformable_with_bias, [convolution()[i] for i in (0, 1, 3, 4)]),
    "ModulatedDeformConv2dFunction": (modulated, convolution()),
}


@pytest.mark.parametrize(("function", "tensors"), COMPILED.values(), ids=COMPILED)
def test_apply_compiles_in_one_graph_forward_and_backward(
    function: Callable[..., Tensor], tensors: Sequence[Tensor]
) -> None:
    """A compiler traces the class's own `forward` and `backward`."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda *args: function(*args), fullgraph=True, backend="aot_eager")
    got, expected = with_gradients(compiled, *tensors), with_gradients(function, *tensors)
    assert [g is None for g in got] == [e is None for e in expected]
    for g, e in zip(got, expected, strict=True):
        if e is not None:
            torch.testing.assert_close(g, e)


def test_forward_and_backward_serve_another_function() -> None:
    """As when a script puts them into a class of its own."""

    class Borrowed(torch.autograd.Function):
        forward = staticmethod(mx_driving.MultiScaleDeformableAttnFunction.forward)
        backward = staticmethod(mx_driving.MultiScaleDeformableAttnFunction.backward)

    tensors = attention()
    assert_same(
        with_gradients(Borrowed.apply, *tensors),
        with_gradients(mx_driving.multi_scale_deformable_attn, *tensors),
    )


# Convolutions


def test_modulated_deform_conv2d_is_the_public_function() -> None:
    x, offset, mask, weight, bias = convolution()
    got = with_gradients(
        lambda *t: mx_driving.modulated_deform_conv2d(*t, **SETTINGS, **GROUPS),
        x, offset, mask, weight, bias,
    )  # fmt: skip
    expected = with_gradients(
        lambda x, offset, mask, weight, bias: pliant.deform_conv2d(
            x, offset, weight, bias, mask=mask, **SETTINGS
        ),
        x, offset, mask, weight, bias,
    )  # fmt: skip
    assert_same(got, expected)


@pytest.mark.parametrize("with_bias", [False, True])
def test_deform_conv2d_is_the_public_function(with_bias: bool) -> None:
    x, offset, _, weight, bias = convolution()
    got = mx_driving.deform_conv2d(
        x, offset, weight, (2, 1), (1, 0), (2, 1), 2, 3, bias if with_bias else False, 64
    )
    expected = pliant.deform_conv2d(x, offset, weight, bias if with_bias else None, **SETTINGS)
    assert torch.equal(got, expected)


def test_convolutions_by_hand() -> None:
    x, offset, mask, weight, bias = convolution()
    steps = tuple(SETTINGS.values()) + tuple(GROUPS.values())
    expected = with_gradients(
        lambda *t: mx_driving.modulated_deform_conv2d(*t, *steps), x, offset, mask, weight, bias
    )
    ctx = Context()
    output = mx_driving.ModulatedDeformConv2dFunction.forward(
        ctx, x, offset, mask, weight, bias, *steps
    )
    grad = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    grads = mx_driving.ModulatedDeformConv2dFunction.backward(ctx, grad)
    assert_same((output, *grads), expected + (None,) * 5)

    for addend in (False, bias):
        expected = with_gradients(
            lambda x, offset, weight, b: mx_driving.deform_conv2d(x, offset, weight, *steps, b),
            x, offset, weight, addend,
        )  # fmt: skip
        ctx = Context()
        output = mx_driving.DeformConv2dFunction.forward(ctx, x, offset, weight, *steps, addend)
        *grads, grad_bias, last = mx_driving.DeformConv2dFunction.backward(ctx, grad)
        assert grads[3:] == [None] * 5
        assert last is None
        assert_same((output, *grads[:3], grad_bias), expected)


@pytest.mark.parametrize("old", ["DeformConv2dFunction", "ModulatedDeformConv2dFunction"])
def test_apply_of_a_convolution_is_the_function(old: str) -> None:
    name = "modulated_deform_conv2d" if old.startswith("Mod") else "deform_conv2d"
    assert getattr(mx_driving, old).apply is getattr(mx_driving, name)


BAD_CONVOLUTIONS = {
    "groups": (
        {"groups": 5},
        "deform_conv2d: groups must divide the channels C of x = 12, got 5",
    ),
    "stated-groups": (
        {"groups": 4},
        "deform_conv2d: weight must have shape [Co, C/groups, kh, kw] = [Co, 3, kh, kw], "
        "got [4, 6, 3, 2]",
    ),
    "deformable-groups": (
        {"deformable_groups": 5},
        "deform_conv2d: deformable_groups must divide the channels C of x = 12, got 5",
    ),
    "stated-deformable-groups": (
        {"deformable_groups": 2},
        "deform_conv2d: offset must have shape [N, 2*dg*kh*kw, Ho, Wo] = [2, 24, Ho, Wo], "
        "got [2, 36, 2, 4]",
    ),
}


@pytest.mark.parametrize(("change", "message"), BAD_CONVOLUTIONS.values(), ids=BAD_CONVOLUTIONS)
def test_stated_groups_must_fit_the_shapes(change: dict[str, int], message: str) -> None:
    x, offset, mask, weight, _ = convolution()
    with pytest.raises(ValueError) as raised:  # noqa: PT011  compared whole below
        mx_driving.deform_conv2d(x, offset, weight, **SETTINGS, **{**GROUPS, **change})
    assert str(raised.value) == message
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        mx_driving.modulated_deform_conv2d(
            x, offset, mask, weight, **SETTINGS, **{**GROUPS, **change}
        )
    assert str(raised.value) == f"modulated_{message}"


def test_deform_conv2d_wants_a_tensor_for_a_bias() -> None:
    x, offset, _, weight, _ = convolution()
    message = "^deform_conv2d: bias must be False, None or a torch.Tensor, got True$"
    with pytest.raises(TypeError, match=message):
        mx_driving.deform_conv2d(x, offset, weight, **SETTINGS, **GROUPS, bias=True)
