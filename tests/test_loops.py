"""The scalar loops, judged by what does not share a line with them: values worked out by hand,
finite differences, and the plain PyTorch composites."""

import math

import pytest
import torch

from pliant.testing import CASES, DIFFERENTIABLE, check, composite, expect, incoming, loops, run
from pliant.testing.cases import convolution

F64 = torch.float64

# grid_sample takes no empty map, multiplies by what it does not count, and has no other dtypes.
_NOT_FOR_COMPOSITES = ("empty", "no-", "gaps", "positions-", "weights-")
PAIRS = [case for case in CASES if not case.id.startswith(_NOT_FOR_COMPOSITES)]
PAIRS += [c for c in CASES if c.id in ("no-mask", "no-bias", "no-starts")]
PAIRS = [case for case in PAIRS if "empty" not in case.id]


@pytest.mark.parametrize("case", PAIRS, ids=str)
def test_loops_equal_composite(case):
    inputs = case.make(F64, "cpu", 0)
    expected = expect(case.operator, inputs)
    out, grads = run(case.operator, inputs, "composite")
    check(out, expected.out, magnitude=expected.out_magnitude, what="out")
    assert grads.keys() == expected.grads.keys()
    for name, gradient in grads.items():
        magnitude = expected.grad_magnitudes[name]
        check(gradient, expected.grads[name], magnitude=magnitude, what=name)


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.id in ("plain", "awkward", "gaps", "same-map")], ids=str
)
def test_loop_gradients_are_derivatives(case):
    """Central differences along a random direction in each argument, where it is finite."""
    inputs = case.make(F64, "cpu", 3)
    loop = getattr(loops, case.operator)
    grad_output = incoming(loop(**inputs))
    _, grads = loop(**inputs, grad_output=grad_output)
    step = 1e-6
    for name in DIFFERENTIABLE[case.operator]:
        direction = incoming(inputs[name], seed=7)
        above, below = (
            (loop(**{**inputs, name: inputs[name] + sign * step * direction}) * grad_output).sum()
            for sign in (1, -1)
        )
        slope = (grads[name] * direction).sum()
        assert math.isclose((above - below) / (2 * step), slope, rel_tol=1e-7), name


def test_attention_by_hand():
    """One map 2x2 = [[1, 2], [4, 8]] at px = 0.75, py = 0.25, weight 3, incoming gradient 10."""
    out, grads = loops.multi_scale_deformable_attn(
        torch.tensor([1.0, 2, 4, 8], dtype=F64).view(1, 4, 1, 1),
        [[2, 2]],
        [0],
        torch.tensor([(0.75 + 0.5) / 2, (0.25 + 0.5) / 2], dtype=F64).view(1, 1, 1, 1, 1, 2),
        torch.full((1, 1, 1, 1, 1), 3.0),
        torch.full((1, 1, 1), 10.0),
    )
    # Rows: 1 + 0.75 = 1.75 and 4 + 3 = 7; between them 1.75 + 0.25 * 5.25 = 3.0625.
    assert out.tolist() == [[[9.1875]]]
    assert grads["attention_weights"].item() == 30.625
    assert grads["value"].flatten().tolist() == [5.625, 16.875, 1.875, 5.625]
    # d/dpx = 0.75 * 1 + 0.25 * 4 = 1.75, d/dpy = 5.25; times 2 (size), 3 and 10.
    assert grads["sampling_locations"].flatten().tolist() == [105.0, 315.0]


def test_aggregation_by_hand():
    """Two scales, 1x1 = [5] and 1x2 = [1, 2], two groups of one channel; x = y = 0.5."""
    features = torch.tensor([[[5.0, 50.0], [1.0, 10.0], [2.0, 20.0]]], dtype=F64)
    out, grads = loops.deformable_aggregation(
        features,
        [[[1, 1], [1, 2]]],
        [[0, 1]],
        torch.full((1, 1, 1, 1, 2), 0.5, dtype=F64),
        torch.tensor([2.0, 3.0, 7.0, 11.0], dtype=F64).view(1, 1, 1, 1, 2, 2),
        torch.tensor([[[1.0, 100.0]]]),
    )
    # Scale 0 samples 5 and 50, scale 1 the middle of 1 and 2: 1.5 and 15.
    assert out.tolist() == [[[2 * 5 + 7 * 1.5, 3 * 50 + 11 * 15.0]]]
    assert grads["weight"].flatten().tolist() == [5.0, 5000.0, 1.5, 1500.0]
    assert grads["feature_maps"].tolist() == [[[2.0, 300.0], [3.5, 550.0], [3.5, 550.0]]]
    # x: scale 0 at its only pixel from the right, (0 - 5) * 2 and (0 - 50) * 300; scale 1 is twice
    # as wide, 2 * 1 * 7 and 2 * 10 * 1100. y: the row below is outside in both.
    along_x = -5 * 2 - 50 * 300 + 2 * 7 + 2 * 10 * 1100
    along_y = -5 * 2 - 50 * 300 - 1.5 * 7 - 15 * 1100
    assert grads["sample_locations"].flatten().tolist() == [along_x, along_y]


def test_geometric_by_hand():
    """The map [[1, 2, 3], [4, 5, 6]] at (1.9, 0.9) and, clamped, at (-7, 9)."""
    out, grads = loops.geometric_kernel_attention(
        torch.arange(1.0, 7.0).view(1, 6, 1, 1),
        [[2, 3]],
        None,
        torch.tensor([[1.9, 0.9], [-7.0, 9.0]]).view(1, 1, 1, 1, 2, 2),
        torch.tensor([10.0, 100.0]).view(1, 1, 1, 1, 2),
        torch.full((1, 1, 1), 2.0),
    )
    assert out.item() == 10 * 2 + 100 * 4
    assert grads["value"].flatten().tolist() == [0, 20, 0, 200, 0, 0]
    assert grads["attention_weights"].flatten().tolist() == [4, 8]


def test_convolution_by_hand():
    """A 1x2 kernel [10, 100] on [[1, 2, 4]]; offsets x 0.5 and y -0.25, masks 1 and 3."""
    offset = torch.zeros(1, 4, 1, 2, dtype=F64)
    offset[0, 1, 0, 0] = 0.5  # x of the first tap at the first output
    offset[0, 2, 0, 1] = -0.25  # y of the second tap at the second output
    mask = torch.ones(1, 2, 1, 2, dtype=F64)
    mask[0, 1, 0, 1] = 3.0
    image = torch.tensor([[[[1.0, 2.0, 4.0]]]], dtype=F64)
    weight = torch.tensor([[[[10.0, 100.0]]]], dtype=F64)
    columns = loops.deform_columns(image, offset, (1, 2), mask=mask)
    # Taps: 1.5 (between 1 and 2), 2; then 2, and 0.75 * 4 * 3 (a quarter above the map).
    assert columns.tolist() == [[[[1.5, 2.0, 2.0, 9.0]]]]
    out, grads = loops.deform_conv2d(
        image, offset, weight, torch.ones(1), mask=mask, grad_output=torch.ones(1, 1, 1, 2)
    )
    assert out.tolist() == [[[[1 + 15 + 200, 1 + 20 + 900]]]]
    assert grads["weight"].flatten().tolist() == [3.5, 11.0]
    assert grads["bias"].tolist() == [2.0]
    assert grads["input"].flatten().tolist() == [5.0, 5.0 + 100.0 + 10.0, 225.0]
    assert grads["mask"].flatten().tolist() == [15.0, 20.0, 200.0, 300.0]
    by_channel = grads["offset"].view(4, 2).tolist()
    # From the right the last column falls to 0; downwards every pixel of the only row does.
    assert by_channel[0] == [-15.0, -20.0]  # y of the first tap
    assert by_channel[1] == [10.0, 20.0]  # x of the first tap
    assert by_channel[2] == [-200.0, 1200.0]  # y of the second tap
    assert by_channel[3] == [200.0, 100 * 3 * 0.75 * -4.0]  # x of the second tap


def test_float32_positions_round_as_float32():
    """0.7 * 3 - 0.5: the loops give what float32 arithmetic gives, operation by operation."""
    loc = torch.tensor([0.7, 1 / 3, 0.005, 0.123456789], dtype=torch.float32)
    expected = loc * 97 - 0.5
    rounded = loops._precision(loc)
    got = [rounded(rounded(x * 97) - 0.5) for x in loc.double().tolist()]
    assert got == expected.double().tolist()
    assert got != (loc.double() * 97 - 0.5).tolist()
    assert loops._precision(loc.double())(0.1) == 0.1
    assert rounded(1e300) == math.inf


@pytest.mark.parametrize("operator", ["multi_scale_deformable_attn", "deform_columns"])
def test_magnitude_bounds_what_a_rounded_position_changes(operator):
    """Float32 instead of float64 positions move every result by less than its budget."""
    case = next(c for c in CASES if c.operator == operator and c.id == "plain")
    inputs = case.make(torch.float32, "cpu", 0)
    expected = expect(operator, inputs)
    name = "sampling_locations" if operator.startswith("multi") else "offset"
    exact = expect(operator, {**inputs, name: inputs[name].double()})
    assert not torch.equal(exact.out, expected.out)
    eps = torch.finfo(torch.float32).eps
    for got, wanted, magnitude in (
        (exact.out, expected.out, expected.out_magnitude),
        *((exact.grads[n], expected.grads[n], expected.grad_magnitudes[n]) for n in exact.grads),
    ):
        assert ((got - wanted).abs() <= loops.ROUNDINGS * eps * magnitude).all()
        assert (magnitude >= wanted.abs()).all()


@pytest.mark.parametrize("deformable_groups", [1, 2])
def test_loops_equal_torchvision(deformable_groups):
    ops = pytest.importorskip("torchvision.ops", exc_type=(ImportError, RuntimeError))
    make = convolution(deformable_groups=deformable_groups, groups=2, stride=(2, 1))
    inputs = make(F64, "cpu", 0)
    expected = expect("deform_conv2d", inputs)
    out = ops.deform_conv2d(**inputs)
    check(out, expected.out, magnitude=expected.out_magnitude)


def test_composites_honour_start_indices():
    inputs = next(
        c for c in CASES if str(c) == "multi_scale_deformable_attn-gaps"
    ).make(F64, "cpu", 0)  # fmt: skip
    inputs["value"] = inputs["value"].nan_to_num()
    expected = expect("multi_scale_deformable_attn", inputs)
    out = composite.multi_scale_deformable_attn(**inputs)
    check(out, expected.out, magnitude=expected.out_magnitude)
