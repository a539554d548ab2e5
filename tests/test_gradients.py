"""Derivatives through the public functions: first and second order, any subset of the arguments."""

from itertools import combinations

import pytest
import torch

import pliant
from pliant.testing import DIFFERENTIABLE, OPERATORS, run
from pliant.testing.cases import aggregation, attention, columns, convolution, geometric

F64 = torch.float64

# As small as they can be with more than one of everything.
SMALL = {
    "multi_scale_deformable_attn": attention(
        batch=2, levels=[(3, 2), (2, 3)], queries=2, heads=2, channels=2, points=2
    ),
    "deformable_aggregation": aggregation(
        batch=2, cameras=[[(3, 4), (2, 3)]] * 2, anchors=2, points=2, channels=4, groups=2
    ),
    "geometric_kernel_attention": geometric(
        batch=2, levels=[(3, 2), (2, 3)], queries=2, heads=2, channels=2, points=2
    ),
    "deform_conv2d": convolution(
        batch=2, channels=4, size=(3, 3), out_channels=2, kernel=(2, 1), padding=(1, 0), groups=2,
        deformable_groups=2,
    ),
    "deform_columns": columns(
        convolution(batch=2, channels=4, size=(3, 3), kernel=(2, 1), padding=(1, 0),
                    deformable_groups=2)
    ),
}  # fmt: skip

# Entry by entry the cost of a second derivative is the square of the size.
SMALLER = {
    "multi_scale_deformable_attn": attention(
        batch=1, levels=[(3, 2)], queries=2, heads=1, channels=2, points=2
    ),
    "deform_columns": columns(convolution(batch=1, channels=2, size=(3, 2), kernel=(2, 1))),
}


def problem(operator, backend, dtype=F64, make=None):
    """The operator as a function of its differentiable arguments alone, and these."""
    inputs = (make or SMALL[operator])(dtype, backend.device, 0)
    names = DIFFERENTIABLE[operator]

    def function(*tensors):
        named = dict(zip(names, tensors, strict=True))
        return getattr(pliant, operator)(**{**inputs, **named}, impl=backend.impl)

    return function, [inputs[name].requires_grad_() for name in names]


@pytest.mark.parametrize("operator", OPERATORS)
def test_first_derivatives(operator, backend):
    function, tensors = problem(operator, backend)
    assert torch.autograd.gradcheck(function, tensors, eps=1e-6, atol=1e-6)


@pytest.mark.parametrize("operator", OPERATORS)
def test_second_derivatives(operator, backend):
    function, tensors = problem(operator, backend)
    assert torch.autograd.gradgradcheck(function, tensors, eps=1e-6, atol=1e-6, fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_second_derivatives_where_positions_are_integers(dtype, backend):
    inputs = SMALL["geometric_kernel_attention"](F64, backend.device, 0)
    inputs["sampling_locations"] = inputs["sampling_locations"].to(dtype)
    names = ("value", "attention_weights")

    def function(*tensors):
        named = dict(zip(names, tensors, strict=True))
        return pliant.geometric_kernel_attention(**{**inputs, **named}, impl=backend.impl)

    tensors = [inputs[name].requires_grad_() for name in names]
    assert torch.autograd.gradgradcheck(function, tensors, eps=1e-6, atol=1e-6, fast_mode=True)


@pytest.mark.parametrize("operator", ["multi_scale_deformable_attn", "deform_columns"])
def test_second_derivatives_entry_by_entry(operator, backend):
    function, tensors = problem(operator, backend, make=SMALLER[operator])
    assert torch.autograd.gradgradcheck(function, tensors, eps=1e-6, atol=1e-6)


@pytest.mark.parametrize("operator", OPERATORS)
def test_any_subset_of_gradients(operator, backend):
    """Each subset of requires_grad gives the gradients that all together give, and no others."""
    function, tensors = problem(operator, backend)
    weights = torch.randn_like(function(*tensors))
    all_grads = torch.autograd.grad(function(*tensors), tensors, weights)
    for count in range(len(tensors)):
        for wanted in combinations(range(len(tensors)), count):
            leaves = [t.detach().requires_grad_(index in wanted) for index, t in enumerate(tensors)]
            out = function(*leaves)
            assert out.requires_grad == (count > 0)
            if count:
                out.backward(weights)
            for index, leaf in enumerate(leaves):
                if index in wanted:
                    torch.testing.assert_close(leaf.grad, all_grads[index], rtol=1e-12, atol=1e-12)
                else:
                    assert leaf.grad is None


@pytest.mark.parametrize("operator", OPERATORS)
def test_no_grad(operator, backend):
    function, tensors = problem(operator, backend)
    with torch.no_grad():
        assert not function(*tensors).requires_grad


def test_geometric_positions_get_no_gradient(backend):
    inputs = SMALL["geometric_kernel_attention"](torch.float32, backend.device, 0)
    loc = inputs["sampling_locations"].requires_grad_()
    inputs["value"].requires_grad_()
    out = pliant.geometric_kernel_attention(**inputs, impl=backend.impl)
    out.sum().backward()
    assert loc.grad is None
    assert inputs["value"].grad is not None
    with torch.no_grad():
        inputs["value"].requires_grad_(False)
    assert not pliant.geometric_kernel_attention(**inputs, impl=backend.impl).requires_grad


@pytest.mark.parametrize("operator", OPERATORS)
def test_inputs_are_left_alone(operator, backend):
    """Neither the forward nor the backward writes into an argument or the incoming gradient."""
    inputs = SMALL[operator](torch.float32, backend.device, 0)
    before = {n: t.clone() for n, t in inputs.items() if isinstance(t, torch.Tensor)}
    out, _ = run(operator, inputs, backend.impl, grad=False)
    grad_output = torch.randn_like(out)
    kept = grad_output.clone()
    run(operator, inputs, backend.impl, grad_output=grad_output)
    assert torch.equal(grad_output, kept)
    for name, tensor in before.items():
        assert torch.equal(inputs[name], tensor), name


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("layout", ["expanded", "transposed"])
def test_incoming_gradient_of_any_layout(operator, backend, layout):
    """`sum().backward()` hands over a gradient with stride 0, a transpose one out of order."""
    inputs = SMALL[operator](torch.float32, backend.device, 0)
    out, _ = run(operator, inputs, backend.impl, grad=False)
    if layout == "expanded":
        grad_output = out.new_ones(()).expand_as(out)
    else:
        grad_output = torch.randn(tuple(reversed(out.shape)), device=out.device)
        grad_output = grad_output.permute(tuple(reversed(range(out.dim()))))
    _, expected = run(operator, inputs, backend.impl, grad_output=grad_output.contiguous())
    _, grads = run(operator, inputs, backend.impl, grad_output=grad_output)
    for name, gradient in grads.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("operator", OPERATORS)
def test_backward_twice_over_a_kept_graph(operator, backend):
    function, tensors = problem(operator, backend, torch.float32)
    out = function(*tensors)
    weights = torch.randn_like(out)
    first = torch.autograd.grad(out, tensors, weights, retain_graph=True)
    second = torch.autograd.grad(out, tensors, weights)
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other)
