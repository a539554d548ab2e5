"""Every named case in every dtype: the reference against the loops, each kernel against both."""

from functools import cache

import pytest
import torch

from pliant.testing import CASES, Case, Expected, check, expect, incoming, run, verify
from pliant.testing.cases import aggregation, attention, convolution, geometric

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@cache
def expected_of(case: Case, dtype: torch.dtype) -> Expected:
    return expect(case.operator, case.make(dtype, "cpu", 0))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(case, dtype, backend):
    inputs = case.make(dtype, backend.device, 0)
    verify(case.operator, inputs, backend.impl, expected=expected_of(case, dtype))


# Large enough for blocks, threads and packed copies; against the composites in float64, which are
# independent of all kernels, on the very same numbers.
LARGER = {
    "encoder": Case(
        "encoder",
        "multi_scale_deformable_attn",
        attention(levels=[(24, 31), (12, 16), (6, 8)], queries=984, heads=3, channels=32, points=4),
    ),
    "decoder": Case(
        "decoder",
        "multi_scale_deformable_attn",
        attention(batch=3, levels=[(40, 40), (20, 20)], queries=50, heads=8, channels=24),
    ),
    "odd": Case(
        "odd",
        "multi_scale_deformable_attn",
        attention(batch=1, levels=[(33, 17)], queries=301, heads=5, channels=13, points=5),
    ),
    "cameras": Case(
        "cameras",
        "deformable_aggregation",
        aggregation(
            batch=2, cameras=[[(16, 44), (8, 22), (4, 11)]] * 6, anchors=90, points=13,
            channels=64, groups=8, low=-2.0, high=3.0,
        ),
    ),
    "many-points": Case(
        "many-points",
        "deformable_aggregation",
        aggregation(
            batch=1, cameras=[[(32, 88)]], anchors=3, points=700, channels=40, groups=5, low=0.0,
            high=1.0,
        ),
    ),
    "geometric": Case(
        "geometric",
        "geometric_kernel_attention",
        geometric(
            batch=3, levels=[(15, 25), (30, 20)], queries=400, heads=4, channels=32, points=5,
            high=32.0,
        ),
    ),
    "convolution": Case(
        "convolution",
        "deform_conv2d",
        convolution(batch=3, channels=24, size=(29, 37), out_channels=40, sigma=2.0),
    ),
    "grouped": Case(
        "grouped",
        "deform_conv2d",
        convolution(
            channels=48, size=(31, 20), out_channels=32, kernel=(5, 3), stride=2, padding=(2, 1),
            groups=4, deformable_groups=3, sigma=2.0,
        ),
    ),
}  # fmt: skip


@cache
def composite_of(id: str, dtype: torch.dtype) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    case = LARGER[id]
    inputs = case.make(dtype, "cpu", 0)
    exact = {
        name: tensor.double() if isinstance(tensor, torch.Tensor) and tensor.is_floating_point()
        else tensor
        for name, tensor in inputs.items()
    }  # fmt: skip
    out, _ = run(case.operator, exact, "composite", grad=False)
    return run(case.operator, exact, "composite", grad_output=incoming(out).to(dtype).double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("id", LARGER)
def test_larger_problem(id, dtype, backend):
    case = LARGER[id]
    inputs = case.make(dtype, backend.device, 0)
    expected, expected_grads = composite_of(id, dtype)
    out, grads = run(case.operator, inputs, backend.impl)
    half = dtype == torch.bfloat16 and backend.impl != "reference"
    base, base_grads = run(case.operator, inputs, "reference") if half else (out, grads)
    check(out.cpu(), expected, base.cpu() if half else None, dtype=dtype, what="result")
    assert grads.keys() == expected_grads.keys()
    for name, gradient in grads.items():
        baseline = base_grads[name].cpu() if half else None
        check(gradient.cpu(), expected_grads[name], baseline, dtype=dtype, what=name)
