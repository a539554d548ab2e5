"""What the operators promise, sentence by sentence; each test is named for the one it holds to.

Most of them look at a single sample. `at` takes one from an image at a pixel position, through any
of the bilinear operators, so that one hand-computed value serves all of them.
"""

import math
from typing import NamedTuple

import pytest
import torch
from torch.nn.functional import conv2d

import pliant
from pliant.testing import (
    CASES,
    DIFFERENTIABLE,
    POSITIONS,
    check,
    expect,
    incoming,
    loops,
    run,
    verify,
)
from pliant.testing.cases import aggregation, attention, columns, convolution, geometric

NAN, INF = math.nan, math.inf
ATTENTION, AGGREGATION = "multi_scale_deformable_attn", "deformable_aggregation"
GEOMETRIC, CONVOLUTION = "geometric_kernel_attention", "deform_conv2d"
BILINEAR = [ATTENTION, AGGREGATION, "deform_columns", CONVOLUTION]
GUARDED = [ATTENTION, "deform_columns", CONVOLUTION]  # count iff -1 < px < size
SMALL = {
    ATTENTION: attention(),
    AGGREGATION: aggregation(),
    GEOMETRIC: geometric(),
    CONVOLUTION: convolution(),
    "deform_columns": columns(convolution()),
}
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
HALVES = [torch.float16, torch.bfloat16]


class Sample(NamedTuple):
    """One sample, and its gradients by the pixels, the position in pixels and the weight."""

    out: float
    pixels: list[list[float]]
    x: float
    y: float
    weight: float


def at(operator, backend, image, x, y, weight=1.0, incoming=1.0, dtype=torch.float32):
    """Samples `image` (a list of rows) at pixel (x, y): a position exact in binary stays exact."""
    pixels = torch.tensor(image, dtype=dtype, device=backend.device)
    height, width = pixels.shape
    unit = torch.tensor([(x + 0.5) / width, (y + 0.5) / height], dtype=torch.float64)
    position = unit if operator in (ATTENTION, AGGREGATION) else torch.tensor([y, x])
    position = position.to(pixels.device, torch.promote_types(dtype, torch.float32))
    factor = torch.full((), weight, dtype=dtype, device=backend.device)
    if operator == ATTENTION:
        inputs = {
            "value": pixels.view(1, -1, 1, 1), "spatial_shapes": [[height, width]],
            "level_start_index": [0], "sampling_locations": position.view(1, 1, 1, 1, 1, 2),
            "attention_weights": factor.view(1, 1, 1, 1, 1),
        }  # fmt: skip
    elif operator == AGGREGATION:
        inputs = {
            "feature_maps": pixels.view(1, -1, 1), "spatial_shape": [[[height, width]]],
            "scale_start_index": [[0]], "sample_locations": position.view(1, 1, 1, 1, 2),
            "weight": factor.view(1, 1, 1, 1, 1, 1),
        }  # fmt: skip
    else:
        inputs = {
            "input": pixels.view(1, 1, height, width), "offset": position.view(1, 2, 1, 1),
            "mask": factor.view(1, 1, 1, 1),
            # One output pixel whatever the size of the image.
            "stride": (max(height, 1), max(width, 1)),
        }  # fmt: skip
        if operator == CONVOLUTION:
            inputs["weight"] = torch.ones(1, 1, 1, 1, dtype=dtype, device=backend.device)
        else:
            inputs["kernel_size"] = 1
    out, _ = run(operator, inputs, backend.impl, grad=False)
    out, grads = run(operator, inputs, backend.impl, grad_output=torch.full_like(out, incoming))
    features, positions = DIFFERENTIABLE[operator][:2]
    along = grads[positions].flatten().double().tolist()
    if operator in (ATTENTION, AGGREGATION):
        along = [along[0] / width, along[1] / height]
    else:
        along.reverse()
    factors = {ATTENTION: "attention_weights", AGGREGATION: "weight"}.get(operator, "mask")
    return Sample(
        out.double().item(), grads[features].view(height, width).double().tolist(), *along,
        grads[factors].double().item(),
    )  # fmt: skip


def assert_all_zero(out, grads):
    assert torch.equal(out, torch.zeros_like(out))
    for name, gradient in grads.items():
        assert torch.equal(gradient, torch.zeros_like(gradient)), name


# --- common rules --------------------------------------------------------------------------------


@pytest.mark.parametrize("operator", BILINEAR)
def test_bilinear(operator, backend):
    got = at(operator, backend, [[1, 2], [4, 8]], 0.75, 0.25, weight=3, incoming=10)
    assert got == Sample(9.1875, [[5.625, 16.875], [1.875, 5.625]], 52.5, 157.5, 30.625)


@pytest.mark.parametrize("operator", BILINEAR)
@pytest.mark.parametrize(
    ("x", "y", "expected"),
    [
        # The image is [[1, 2], [4, 8]]; a quarter of a pixel outside three quarters remain.
        (-0.25, 0.0, Sample(0.75, [[0.75, 0], [0, 0]], 1.0, 0.75 * 3, 0.75)),
        (1.25, 0.0, Sample(1.5, [[0, 0.75], [0, 0]], -2.0, 0.75 * 6, 1.5)),
        (0.0, -0.25, Sample(0.75, [[0.75, 0], [0, 0]], 0.75 * 1, 1.0, 0.75)),
        (0.0, 1.25, Sample(3.0, [[0, 0], [0.75, 0]], 0.75 * 4, -4.0, 3.0)),
        (1.25, 1.25, Sample(4.5, [[0, 0], [0, 0.5625]], -6.0, -6.0, 4.5)),
        (-0.25, 1.25, Sample(2.25, [[0, 0], [0.5625, 0]], 3.0, -3.0, 2.25)),
    ],
)
def test_a_corner_outside_the_map_contributes_zero_and_the_others_keep_their_weight(
    operator, backend, x, y, expected
):
    assert at(operator, backend, [[1, 2], [4, 8]], x, y) == expected


@pytest.mark.parametrize("operator", [ATTENTION, AGGREGATION])
def test_positions_are_computed_directly_and_never_by_way_of_minus_one_to_one(operator, backend):
    """Near 0 a float32 position is far finer than 2 * position - 1, which is 2e-3 pixels coarse on
    a map 65536 wide."""
    width = 65536
    image = [[float(x % 2) for x in range(width)]]
    for x in (2.3, 6.7, 14.1):
        got = at(operator, backend, image, x, 0)
        assert math.isclose(got.out, x % 2, abs_tol=4e-6)


def test_documented_example_lies_exactly_on_a_pixel(backend):
    """float32: 0.005 * 100 is 0.5 after rounding, so the sample is at pixel 0, not just left of it.

    Fused into one rounding the position would be -1e-8, and its derivative another one."""
    inputs = {
        "value": torch.arange(5.0, 10005.0, device=backend.device).view(1, 10000, 1, 1),
        "spatial_shapes": [[100, 100]],
        "level_start_index": [0],
        "sampling_locations": torch.full((1, 1, 1, 1, 1, 2), 0.005, device=backend.device),
        "attention_weights": torch.ones(1, 1, 1, 1, 1, device=backend.device),
    }
    out, grads = run(
        ATTENTION, inputs, backend.impl, grad_output=torch.ones(1, 1, 1, device=backend.device)
    )
    assert out.item() == 5
    assert grads["sampling_locations"].flatten().tolist() == [100.0, 10000.0]  # left: 500, 500


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("operator", BILINEAR)
def test_positions_are_at_least_float32_whatever_the_feature_dtype(operator, backend, dtype):
    """On an image of stripes the fraction of the position is the result: at x = 190 half precision
    of the position would be 0.06 pixels off in float16 and half a pixel in bfloat16."""
    image = [[float(x % 2) for x in range(200)]] * 2
    for x in (3.3, 150.37, 190.6, 197.81):
        got = at(operator, backend, image, x, 0.5, dtype=dtype)
        fraction = x % 2 if x % 2 <= 1 else 2 - x % 2
        assert math.isclose(got.out, fraction, abs_tol=2e-5, rel_tol=torch.finfo(dtype).eps / 2)
        assert got.weight == got.out


@pytest.mark.parametrize("dtype", HALVES)
def test_half_positions_are_computed_in_float32(backend, dtype):
    """A position given in half precision is exact; times 200 in half precision it would not be."""
    loc = torch.tensor([0.73, 0.123, 0.951, 0.5078], dtype=dtype)
    px = loc.float() * 200 - 0.5
    inputs = {
        "value": (torch.arange(200) % 2).view(1, 200, 1, 1),
        "spatial_shapes": [[1, 200]],
        "level_start_index": [0],
        "sampling_locations": torch.stack((loc, loc * 0 + 0.5), -1).view(1, 4, 1, 1, 1, 2),
        "attention_weights": torch.ones(1, 4, 1, 1, 1, dtype=dtype),
    }
    inputs = {n: t.to(backend.device) if hasattr(t, "to") else t for n, t in inputs.items()}
    inputs["value"] = inputs["value"].to(dtype)
    out, _ = run(ATTENTION, inputs, backend.impl)
    expected = torch.where(px % 2 <= 1, px % 2, 2 - px % 2).double()
    check(out.flatten().cpu(), expected, magnitude=torch.full_like(expected, 1 / 64))


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32, torch.float64])
@pytest.mark.parametrize("operator", [ATTENTION, AGGREGATION, GEOMETRIC])
def test_sums_accumulate_in_at_least_float32_and_round_once(operator, backend, dtype):
    """1 and then many terms too small to be added to it one by one in the dtype of the features."""
    info = torch.finfo(dtype if dtype == torch.float64 else torch.float32)
    tiny = torch.finfo(dtype).eps / 4 if dtype in HALVES else info.eps
    count = 65
    weight = torch.full((count,), tiny, dtype=dtype, device=backend.device)
    weight[0] = 1
    inputs = SMALL[operator](dtype, backend.device, 0)
    if operator == AGGREGATION:
        inputs |= {
            "feature_maps": weight.new_ones(1, 1, 1),
            "spatial_shape": [[[1, 1]]],
            "scale_start_index": [[0]],
            "sample_locations": weight.new_full((1, 1, count, 1, 2), 0.5),
            "weight": weight.view(1, 1, count, 1, 1, 1),
        }
    else:
        inputs |= {
            "value": weight.new_ones(1, 1, 1, 1),
            "spatial_shapes": [[1, 1]],
            "level_start_index": [0],
            "sampling_locations": weight.new_full((1, 1, 1, 1, count, 2), 0.5),
            "attention_weights": weight.view(1, 1, 1, 1, count),
        }
    out, grads = run(operator, inputs, backend.impl, grad_output=weight.new_ones(1, 1, 1))
    total = 1 + (count - 1) * tiny
    assert out.item() == total
    assert next(iter(grads.values())).item() == total  # of the one pixel


@pytest.mark.parametrize("dtype", HALVES)
def test_gradients_of_features_accumulate_in_float32(backend, dtype):
    """4096 samples of one pixel: adding ones in half precision stops at 2048 or 256."""
    for operator in (ATTENTION, GEOMETRIC):
        inputs = {
            "value": torch.ones(1, 1, 1, 1, dtype=dtype, device=backend.device),
            "spatial_shapes": [[1, 1]],
            "level_start_index": [0],
            "sampling_locations": torch.full((1, 1024, 1, 1, 4, 2), 0.5, device=backend.device),
            "attention_weights": torch.ones(1, 1024, 1, 1, 4, device=backend.device),
        }
        ones = torch.ones(1, 1024, 1, dtype=dtype, device=backend.device)
        _, grads = run(operator, inputs, backend.impl, grad_output=ones)
        assert grads["value"].item() == 4096


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize("operator", [ATTENTION, AGGREGATION, CONVOLUTION, "deform_columns"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_sample_that_does_not_count_contributes_exactly_zero(operator, backend, poison, dtype):
    """All positions outside; features, weights and incoming gradient are all NaN or infinite."""
    inputs = SMALL[operator](dtype, backend.device, 0)
    if operator == CONVOLUTION:  # its output multiplies zeros, so its own weight stays finite
        inputs["bias"] = None
    for name in DIFFERENTIABLE[operator]:
        if inputs.get(name) is None or (operator == CONVOLUTION and name == "weight"):
            continue
        value = 1000.0 if name == POSITIONS[operator] else poison
        inputs[name] = torch.full_like(inputs[name], value)
    out, _ = run(operator, inputs, backend.impl, grad=False)
    assert torch.equal(out, torch.zeros_like(out))
    out, grads = run(operator, inputs, backend.impl, grad_output=torch.full_like(out, poison))
    assert_all_zero(out, grads)


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"channels": 6, "groups": 3, "deformable_groups": 2, "out_channels": 3},
        {"channels": 70, "out_channels": 40, "kernel": (2, 1), "size": (3, 4), "mask": False},
        {"channels": 2, "size": (20, 20), "kernel": (2, 1), "batch": 1},  # several tiles
    ],
    ids=str,
)
def test_an_infinite_gradient_reaches_the_weights_whose_samples_count(
    backend, sizes, dtype, poison
):
    """The taps of one position lie outside but for every third: only those may be infinite."""
    inputs = convolution(**sizes)(dtype, backend.device, 0)
    for tap, offset in enumerate([-0.25, 1000, NAN]):
        inputs["offset"].unflatten(1, (-1, 2))[0, tap::3, :, 2, 1] = offset
    out, _ = run(CONVOLUTION, inputs, backend.impl, grad=False)
    grad_output = incoming(out)
    grad_output[0, 1, 2, 1] = poison
    expected = expect(CONVOLUTION, inputs, grad_output)
    assert not expected.grads["weight"][1].isfinite().all()
    assert expected.grads["weight"][1].isfinite().any()
    baseline = None  # in half precision a kernel may be off by twice what the reference is
    if dtype == torch.float16 and backend.impl != "reference":
        _, grads = run(CONVOLUTION, inputs, "reference", grad_output=grad_output)
        baseline = grads["weight"].cpu()
    given = [name for name in DIFFERENTIABLE[CONVOLUTION] if inputs[name] is not None]
    for needs in (["weight"], given):
        leaves = {name: inputs[name].detach().requires_grad_() for name in needs}
        out = pliant.deform_conv2d(**{**inputs, **leaves}, impl=backend.impl)
        (got,) = torch.autograd.grad(out, [leaves["weight"]], grad_output)
        check(
            got.cpu(), expected.grads["weight"], baseline, dtype=dtype, working=expected.working,
            magnitude=expected.grad_magnitudes["weight"], what="gradient of weight",
        )  # fmt: skip


@pytest.mark.parametrize("where", ["x", "y", "both"])
@pytest.mark.parametrize("position", [NAN, INF, -INF])
@pytest.mark.parametrize("operator", BILINEAR)
def test_a_nan_or_infinite_position_never_counts(operator, backend, position, where):
    x = position if where in ("x", "both") else 0.5
    y = position if where in ("y", "both") else 0.5
    got = at(operator, backend, [[1, 2], [4, 8]], x, y)
    assert got == Sample(0, [[0, 0], [0, 0]], 0, 0, 0)


@pytest.mark.parametrize("operator", [ATTENTION, AGGREGATION, GEOMETRIC, "deform_columns"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_samples_beside_one_that_does_not_count_are_untouched(operator, backend, dtype):
    """Every other sample gets a NaN position and an infinite weight: results are as without it."""
    inputs = SMALL[operator](dtype, backend.device, 0)
    name = POSITIONS[operator]
    factor = {AGGREGATION: "weight", "deform_columns": "mask"}.get(operator, "attention_weights")
    if operator == "deform_columns":
        inputs[name][:, 0::4] = NAN
        inputs[factor][:, 0::2] = INF
        without = inputs[factor].clone()
        without[:, 0::2] = 0
    else:
        axis = 4 if operator != AGGREGATION else 2  # points
        inputs[name].select(axis, 1).fill_(NAN)
        inputs[factor].select(axis, 1).fill_(INF)
        without = inputs[factor].clone()
        without.select(axis, 1).fill_(0)
    verify(operator, inputs, backend.impl)
    out, _ = run(operator, inputs, backend.impl)
    base, _ = run(operator, {**inputs, factor: without}, backend.impl)
    assert torch.equal(out, base)
    assert out.isfinite().all()


@pytest.mark.parametrize("operator", BILINEAR)
@pytest.mark.parametrize(
    ("x", "y"),
    [(-0.25, 1.0), (3.25, 1.0), (1.0, -0.25), (1.0, 3.25), (-0.25, -0.25), (3.25, 3.25),
     (-0.25, 3.25), (3.25, -0.25), (-0.25, 1.25), (3.25, 1.25), (1.25, -0.25), (1.25, 3.25)],
)  # fmt: skip
@pytest.mark.parametrize("poison", [NAN, INF])
def test_a_corner_outside_is_not_read_and_an_inf_elsewhere_cannot_leak_in(
    operator, backend, x, y, poison
):
    """Only the corners of the position that lie in the map are finite."""
    x0, y0 = math.floor(x), math.floor(y)
    image = [
        [1.0 if x0 <= column <= x0 + 1 and y0 <= row <= y0 + 1 else poison for column in range(4)]
        for row in range(4)
    ]
    along_x = (1 - abs(x - min(max(x, 0), 3)), 1 - abs(y - min(max(y, 0), 3)))
    got = at(operator, backend, image, x, y)
    assert got.out == got.weight == along_x[0] * along_x[1]
    assert math.isfinite(got.x)
    assert math.isfinite(got.y)
    for row in range(4):
        for column in range(4):
            inside = x0 <= column <= x0 + 1 and y0 <= row <= y0 + 1
            assert inside or got.pixels[row][column] == 0


@pytest.mark.parametrize("operator", [ATTENTION, AGGREGATION, GEOMETRIC])
def test_pixels_of_other_maps_heads_and_batches_cannot_leak_in(operator, backend):
    """The first map of each camera or level holds NaN, and no position looks into it."""
    inputs = SMALL[operator](torch.float32, backend.device, 0)
    features = DIFFERENTIABLE[operator][0]
    shapes = inputs["spatial_shape" if operator == AGGREGATION else "spatial_shapes"]
    first = int(shapes.view(-1, 2)[0].prod())
    inputs[features][:, :first] = NAN
    loc = inputs[POSITIONS[operator]]
    if operator == AGGREGATION:
        inputs["spatial_shape"], inputs["scale_start_index"] = (
            inputs[name][:, 1:] for name in ("spatial_shape", "scale_start_index")
        )
        inputs["weight"] = inputs["weight"][..., 1:, :]
        inputs[features][:, first + 6 : 2 * first + 6] = NAN
    else:
        loc[:, :, :, 0] = NAN
    out, grads = run(operator, inputs, backend.impl)
    assert out.isfinite().all()
    assert torch.count_nonzero(grads[features][:, :first]) == 0
    verify(operator, inputs, backend.impl)


@pytest.mark.parametrize("operator", BILINEAR)
def test_at_a_kink_the_right_hand_side_is_taken(operator, backend):
    """On pixel (1, 1) of [[1, 2, 4], [8, 16, 32], [64, 128, 256]] (with a margin to four rows):
    the slope to the right is 32 - 16, downwards 128 - 16; to the left and upwards 8 and 14."""
    image = [[1, 2, 4, 0], [8, 16, 32, 0], [64, 128, 256, 0], [0, 0, 0, 0]]
    got = at(operator, backend, image, 1, 1)
    assert (got.out, got.x, got.y) == (16, 16, 112)
    # On the last pixel the right-hand neighbour is outside, hence zero; on the first it is not.
    image = [[1, 2], [4, 8]]
    assert at(operator, backend, image, 1, 1)[0::2] == (8, -8, 8)
    assert at(operator, backend, image, 1, 1)[2:4] == (-8, -8)
    assert at(operator, backend, image, 0, 0)[2:4] == (1, 3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("operator", GUARDED)
@pytest.mark.parametrize("axis", ["x", "y"])
def test_counts_iff_between_minus_one_and_size(operator, backend, axis, dtype):
    """On both sides of both borders of a 4x4 map of eights; the step is exact in the position."""
    image = [[8.0] * 4] * 4
    step = 2.0**-20

    def sample(position):
        x, y = (position, 1) if axis == "x" else (1, position)
        got = at(operator, backend, image, x, y, dtype=dtype)
        return got.out, got.x if axis == "x" else got.y, got.weight

    assert sample(-1 - step) == (0, 0, 0)
    assert sample(-1) == (0, 0, 0)
    assert sample(-1 + step) == (8 * step, 8, 8 * step)
    assert sample(4 - step) == (8 * step, -8, 8 * step)
    assert sample(4) == (0, 0, 0)
    assert sample(4 + step) == (0, 0, 0)


@pytest.mark.parametrize("operator", GUARDED)
@pytest.mark.parametrize(("x", "y"), [(-1, 0.5), (0.5, -1), (-1, -1), (2, 0.5), (0.5, 2)])
def test_where_the_guard_fails_all_gradients_are_zero(operator, backend, x, y):
    got = at(operator, backend, [[1, 2], [4, 8]], x, y)
    assert got == Sample(0, [[0, 0], [0, 0]], 0, 0, 0)


@pytest.mark.parametrize("operator", [ATTENTION, AGGREGATION, GEOMETRIC])
def test_indices_may_be_int32_int64_python_ints_numpys_or_absent(operator, backend):
    inputs = SMALL[operator](torch.float32, backend.device, 0)
    shapes, starts = list(inputs)[1:3]
    out, grads = run(operator, inputs, backend.impl)
    for form in (
        {name: inputs[name].int() for name in (shapes, starts)},
        {shapes: inputs[shapes].int()},
        {name: inputs[name].tolist() for name in (shapes, starts)},
        {name: inputs[name].cpu() for name in (shapes, starts)},
        {name: inputs[name].cpu().numpy() for name in (shapes, starts)},
        {starts: None},
        {shapes: inputs[shapes].tolist(), starts: None},
        {shapes: tuple(map(tuple, inputs[shapes].view(-1, 2).tolist()))}
        if operator != AGGREGATION
        else {shapes: [[tuple(size) for size in camera] for camera in inputs[shapes].tolist()]},
    ):
        again, again_grads = run(operator, {**inputs, **form}, backend.impl)
        torch.testing.assert_close(again, out, rtol=1e-6, atol=1e-6)
        for name, gradient in again_grads.items():
            torch.testing.assert_close(gradient, grads[name], rtol=1e-5, atol=1e-5)


# Axis by axis; what is left decides the shape.
EMPTY = [
    (ATTENTION, attention(batch=0), (0, 4, 8)),
    (ATTENTION, attention(queries=0), (2, 0, 8)),
    (ATTENTION, attention(heads=0), (2, 4, 0)),
    (ATTENTION, attention(channels=0), (2, 4, 0)),
    (ATTENTION, attention(levels=[]), (2, 4, 8)),
    (ATTENTION, attention(points=0), (2, 4, 8)),
    (ATTENTION, attention(levels=[(0, 5)]), (2, 4, 8)),
    (AGGREGATION, aggregation(batch=0), (0, 3, 8)),
    (AGGREGATION, aggregation(anchors=0), (2, 0, 8)),
    (AGGREGATION, aggregation(points=0), (2, 3, 8)),
    (AGGREGATION, aggregation(cameras=[]), (2, 3, 8)),
    (AGGREGATION, aggregation(cameras=[[], []]), (2, 3, 8)),
    (AGGREGATION, aggregation(channels=0), (2, 3, 0)),
    (AGGREGATION, aggregation(cameras=[[(3, 0)]]), (2, 3, 8)),
    (GEOMETRIC, geometric(batch=0), (0, 4, 8)),
    (GEOMETRIC, geometric(queries=0), (2, 0, 8)),
    (GEOMETRIC, geometric(heads=0), (2, 4, 0)),
    (GEOMETRIC, geometric(channels=0), (2, 4, 0)),
    (GEOMETRIC, geometric(levels=[]), (2, 4, 8)),
    (GEOMETRIC, geometric(points=0), (2, 4, 8)),
    (GEOMETRIC, geometric(levels=[(5, 0)]), (2, 4, 8)),
    (CONVOLUTION, convolution(batch=0), (0, 4, 5, 6)),
    (CONVOLUTION, convolution(out_channels=0), (2, 0, 5, 6)),
    (CONVOLUTION, convolution(size=(2, 6), padding=(0, 1)), (2, 4, 0, 6)),
    (CONVOLUTION, convolution(size=(0, 6), bias=False), (2, 4, 0, 6)),
    ("deform_columns", columns(convolution(batch=0)), (0, 4, 15, 18)),
    ("deform_columns", columns(convolution(channels=0)), (2, 0, 15, 18)),
    ("deform_columns", columns(convolution(size=(2, 6), padding=(0, 1))), (2, 4, 0, 18)),
    ("deform_columns", columns(convolution(size=(0, 6), padding=2)), (2, 4, 6, 24)),
]


@pytest.mark.parametrize(
    ("operator", "make", "shape"), EMPTY, ids=[f"{o}-{i}" for i, (o, _, _) in enumerate(EMPTY)]
)
def test_any_size_is_legal_zero_included(operator, make, shape, backend):
    inputs = make(torch.float32, backend.device, 0)
    out, grads = run(operator, inputs, backend.impl)
    assert out.shape == shape
    assert_all_zero(out, grads)
    for name, gradient in grads.items():
        assert gradient.shape == inputs[name].shape


@pytest.mark.parametrize("operator", [ATTENTION, AGGREGATION, GEOMETRIC])
@pytest.mark.parametrize("index", ["int64", "int32", "python"])
@pytest.mark.parametrize("lie", ["start", "negative start", "height", "width", "negative height"])
def test_metadata_that_lie_on_the_host_raise_value_error(operator, backend, lie, index):
    inputs = SMALL[operator](torch.float32, backend.device, 0)
    shapes, starts = list(inputs)[1:3]
    shape, start = inputs[shapes].cpu(), inputs[starts].cpu()
    if lie.endswith("start"):
        start.view(-1)[-1] = -1 if lie.startswith("negative") else start.view(-1)[-1] + 1
    elif lie == "negative height":
        shape.view(-1, 2)[-1, 0] = -1
    else:
        shape.view(-1, 2)[-1, 0 if lie == "height" else 1] += 1
    convert = {"int64": torch.Tensor.long, "int32": torch.Tensor.int, "python": torch.Tensor.tolist}
    inputs |= {shapes: convert[index](shape), starts: convert[index](start)}
    with pytest.raises(ValueError, match=operator):
        run(operator, inputs, backend.impl)


LIES = {
    "start beyond": (lambda shapes, starts: starts.view(-1).__setitem__(-1, 10**6)),
    "start in the last row": (lambda shapes, starts: starts.view(-1).__setitem__(-1, 39)),
    "start negative": (lambda shapes, starts: starts.view(-1).__setitem__(0, -7)),
    "start extreme": (lambda shapes, starts: starts.view(-1).__setitem__(0, 2**62)),
    "start extremely negative": (lambda shapes, starts: starts.view(-1).__setitem__(0, -(2**62))),
    "height beyond": (lambda shapes, starts: shapes.view(-1, 2)[-1].__setitem__(0, 9)),
    "width beyond": (lambda shapes, starts: shapes.view(-1, 2)[-1].__setitem__(1, 50)),
    "height negative": (lambda shapes, starts: shapes.view(-1, 2)[-1].__setitem__(0, -3)),
    "width negative": (lambda shapes, starts: shapes.view(-1, 2)[-1].__setitem__(1, -3)),
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("operator", [ATTENTION, AGGREGATION, GEOMETRIC])
def test_metadata_that_lie_on_a_device_count_as_outside(operator, backend, lie):
    """Below the checks, where a device's metadata arrive unread: the registered operator itself.
    A kernel of the host, which can read them, may refuse.

    The features are a window into memory that is NaN on both sides, so a stray read shows."""
    inputs = SMALL[operator](torch.float32, backend.device, 0)
    shapes, starts = list(inputs)[1:3]
    LIES[lie](inputs[shapes], inputs[starts])
    features, positions, factor = (list(inputs)[i] for i in (0, 3, 4))
    value, loc, weight = inputs[features], inputs[positions], inputs[factor]
    batch, stored = value.shape[:2]
    if batch:
        memory = value.new_full((stored + 200, batch, *value.shape[2:]), NAN)
        memory[100 : 100 + stored] = value.transpose(0, 1)
        value = inputs[features] = memory[100 : 100 + stored].transpose(0, 1)
    expected = expect(operator, inputs)
    if operator == AGGREGATION:
        groups = weight.shape[-1]
        canonical = (
            value.unflatten(2, (groups, -1)).unsqueeze(2), inputs[shapes], inputs[starts],
            loc.transpose(2, 3).unsqueeze(2), weight.transpose(2, 3).unsqueeze(2),
        )  # fmt: skip
        policy = ("unit", "bilinear", "skip")
    else:
        canonical = (
            value.unsqueeze(3), inputs[shapes].unsqueeze(1), inputs[starts].unsqueeze(1), loc,
            weight[..., None, None],
        )  # fmt: skip
        policy = (
            ("unit", "bilinear", "zero") if operator == ATTENTION else ("pixel", "nearest", "clamp")
        )
    try:
        out = torch.ops.pliant.sample_sum(*canonical, *policy, backend.impl)
    except ValueError:
        assert backend.device == "cpu", "a device's metadata must not be read"
        return
    check(
        out.flatten(2).cpu(), expected.out, magnitude=expected.out_magnitude, what=f"{lie}: result"
    )
    grad_output = torch.ones_like(out)
    grads = torch.ops.pliant.sample_sum_backward(
        grad_output, *canonical, *policy, backend.impl, [True, operator != GEOMETRIC, True]
    )
    expected = expect(operator, inputs, torch.ones_like(expected.out))
    for name, gradient in zip((features, positions, factor), grads, strict=True):
        if name not in expected.grads:
            continue
        if operator == AGGREGATION and name != features:
            gradient = gradient.squeeze(2).transpose(2, 3)
        wanted = expected.grads[name]
        check(
            gradient.reshape(wanted.shape).cpu(), wanted,
            magnitude=expected.grad_magnitudes[name], what=f"{lie}: {name}",
        )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("other", DTYPES)
@pytest.mark.parametrize("operator", [ATTENTION, AGGREGATION, GEOMETRIC, "deform_columns"])
def test_the_result_has_the_dtype_of_the_features_and_gradients_that_of_their_argument(
    operator, backend, dtype, other
):
    inputs = SMALL[operator](dtype, backend.device, 0)
    names = [n for n in inputs if n in (*DIFFERENTIABLE[operator][1:], POSITIONS[operator])]
    inputs |= {name: inputs[name].to(other) for name in names}
    verify(operator, inputs, backend.impl)  # checks dtypes too


@pytest.mark.parametrize("case", [c for c in CASES if c.id in ("strided", "expanded")], ids=str)
def test_strided_and_expanded_arguments_equal_contiguous_ones(case, backend):
    inputs = case.make(torch.float32, backend.device, 0)
    plain = {n: t.contiguous() if hasattr(t, "contiguous") else t for n, t in inputs.items()}
    out, grads = run(case.operator, inputs, backend.impl)
    base, base_grads = run(case.operator, plain, backend.impl)
    torch.testing.assert_close(out, base, rtol=1e-6, atol=1e-6)
    for name, gradient in grads.items():
        torch.testing.assert_close(gradient, base_grads[name], rtol=1e-5, atol=1e-5)


# --- multi_scale_deformable_attn -----------------------------------------------------------------


@pytest.mark.parametrize("poison", [NAN, INF])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_attention_everything_nan_or_inf_gives_exactly_zero(backend, poison, dtype):
    inputs = SMALL[ATTENTION](dtype, backend.device, 0)
    for name in DIFFERENTIABLE[ATTENTION]:
        inputs[name] = torch.full_like(inputs[name], poison)
    out, _ = run(ATTENTION, inputs, backend.impl, grad=False)
    out, grads = run(ATTENTION, inputs, backend.impl, grad_output=torch.full_like(out, poison))
    assert_all_zero(out, grads)


def test_attention_of_an_infinite_incoming_gradient_touches_only_what_counts(backend):
    """One head of one query receives an infinite gradient: its own four pixels, weight and position
    show it, nothing else does."""
    inputs = attention(low=0.3, high=0.6)(torch.float32, backend.device, 0)
    out, _ = run(ATTENTION, inputs, backend.impl, grad=False)
    grad_output = torch.zeros_like(out)
    grad_output[1, 2, :4] = INF  # head 0 has channels 0 to 3
    _, grads = run(ATTENTION, inputs, backend.impl, grad_output=grad_output)
    assert grads["value"][0].isfinite().all()
    assert grads["value"][1, :, 1].isfinite().all()
    touched = ~grads["attention_weights"].isfinite()
    assert touched[1, 2, 0].all()
    assert touched.sum() == touched[1, 2, 0].numel()


def test_attention_is_ordered_x_then_y_and_height_then_width(backend):
    """The one bright pixel of a 2x4 map is in column 3 of row 1."""
    value = torch.zeros(1, 8, 1, 1, device=backend.device)
    value[0, 1 * 4 + 3] = 1
    inputs = {
        "value": value,
        "spatial_shapes": [[2, 4]],
        "level_start_index": [0],
        "sampling_locations": torch.tensor([3.5 / 4, 1.5 / 2]).view(1, 1, 1, 1, 1, 2),
        "attention_weights": torch.ones(1, 1, 1, 1, 1, device=backend.device),
    }
    inputs["sampling_locations"] = inputs["sampling_locations"].to(backend.device)
    assert run(ATTENTION, inputs, backend.impl, grad=False)[0].item() == 1


def test_attention_returns_heads_then_channels(backend):
    inputs = attention(heads=3, channels=2, batch=1, queries=1)(torch.float32, backend.device, 0)
    value = inputs["value"] * 0 + torch.arange(6.0, device=backend.device).view(1, 1, 3, 2)
    inputs |= {
        "value": value,
        "sampling_locations": torch.full_like(inputs["sampling_locations"], 0.5),
        "attention_weights": torch.full_like(inputs["attention_weights"], 1 / 6),
    }
    out, _ = run(ATTENTION, inputs, backend.impl, grad=False)
    torch.testing.assert_close(out.flatten().cpu(), torch.arange(6.0))


# --- deformable_aggregation ----------------------------------------------------------------------


@pytest.mark.parametrize("axis", ["x", "y"])
def test_aggregation_counts_iff_strictly_inside_the_unit_square(backend, axis):
    """On a 4x4 map of eights half a pixel remains at the border itself: 4, if it counted."""
    image = [[8.0] * 4] * 4
    step = 2.0**-20

    def sample(position):
        x, y = (position, 1) if axis == "x" else (1, position)
        got = at(AGGREGATION, backend, image, x, y)
        return got.out, got.x if axis == "x" else got.y, got.weight

    assert sample(-0.5 - step) == (0, 0, 0)
    assert sample(-0.5) == (0, 0, 0)
    assert sample(-0.5 + step) == (4 + 8 * step, 8, 4 + 8 * step)
    assert sample(3.5 - step) == (4 + 8 * step, -8, 4 + 8 * step)
    assert sample(3.5) == (0, 0, 0)
    assert sample(3.5 + step) == (0, 0, 0)


def test_aggregation_one_position_decides_at_every_scale(backend):
    """Seen by camera 1 alone, a point takes all of its scales and none of camera 0's."""
    ones = torch.ones(1, 12, 1, device=backend.device)
    loc = torch.tensor([[1.0, 0.5], [0.5, 0.5]], device=backend.device).view(1, 1, 1, 2, 2)
    out = pliant.deformable_aggregation(
        ones * torch.tensor([1.0] * 6 + [10.0] * 6, device=backend.device).view(1, 12, 1),
        [[[2, 2], [1, 2]], [[2, 2], [1, 2]]],
        None,
        loc,
        torch.tensor([1.0, 1.0, 1.0, 2.0], device=backend.device).view(1, 1, 1, 2, 2, 1),
        impl=backend.impl,
    )
    assert out.item() == 30


def test_aggregation_weight_group_of_a_channel(backend):
    """Six channels in three groups: channel c takes the weight of group c // 2."""
    out = pliant.deformable_aggregation(
        torch.ones(1, 4, 6, device=backend.device),
        [[[2, 2]]],
        [[0]],
        torch.full((1, 1, 1, 1, 2), 0.5, device=backend.device),
        torch.tensor([1.0, 10.0, 100.0], device=backend.device).view(1, 1, 1, 1, 1, 3),
        impl=backend.impl,
    )
    assert out.flatten().tolist() == [1, 1, 10, 10, 100, 100]


def test_aggregation_position_gradient_is_summed_over_scales_and_channels(backend):
    """Two scales as wide as 2 and 4 with slopes 1 and 10 a pixel, three channels: 3 * (2 + 40)."""
    maps = torch.tensor([0.0, 1, 0, 10, 20, 30], device=backend.device)
    loc = torch.full((1, 1, 1, 1, 2), 0.5, device=backend.device).requires_grad_()
    out = pliant.deformable_aggregation(
        maps.view(1, 6, 1).expand(1, 6, 3),
        [[[1, 2], [1, 4]]],
        [[0, 2]],
        loc,
        torch.ones(1, 1, 1, 1, 2, 1, device=backend.device),
        impl=backend.impl,
    )
    (gradient,) = torch.autograd.grad(out.sum(), loc)
    # Downwards the only row falls to zero: -(0.5 + 15) a channel.
    assert gradient.flatten().tolist() == [126, -46.5]


def test_aggregation_position_gradients_in_the_hundreds_keep_an_absolute_precision(backend):
    """The vendor allows 2**-11, whatever the size."""
    make = aggregation(
        batch=1, cameras=[[(64, 176), (32, 88), (16, 44), (8, 22)]], anchors=8, points=8,
        channels=256, groups=8, low=0.0, high=1.0,
    )  # fmt: skip
    inputs = make(torch.float32, backend.device, 0)
    inputs["feature_maps"] = inputs["feature_maps"] / 8
    exact = {n: inputs[n].double() for n in ("feature_maps", "weight")}
    out, _ = run(AGGREGATION, inputs, backend.impl, grad=False)
    ones = torch.ones_like(out)
    _, grads = run(AGGREGATION, inputs, backend.impl, grad_output=ones)
    _, wanted = run(AGGREGATION, {**inputs, **exact}, "reference", grad_output=ones.double())
    expected = wanted["sample_locations"].double()
    assert 300 < expected.abs().max() < 3000
    assert (grads["sample_locations"].double() - expected).abs().max() < 2**-11


# --- geometric_kernel_attention ------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("x", "y", "row"),
    [
        (0, 0, 0), (1, 1, 4), (2, 1, 5),  # whole pixels of a 2x3 map
        (1.5, 0, 1), (0.5, 0, 0), (1.9999, 0.9999, 1), (2.5, 1.5, 5),  # truncated, never rounded
        (-0.9, 0, 0), (-1, 0, 0), (-7.5, 1, 3), (3, 0, 2), (99, 1, 5), (1, -5, 1), (1, 2, 4),
        (1e30, 0, 2), (-1e30, 1e30, 3), (INF, 0, 2), (-INF, 1, 3), (0, INF, 3), (1, -INF, 1),
    ],
)  # fmt: skip
def test_geometric_truncates_then_clamps_to_the_border(backend, x, y, row, dtype):
    value = torch.tensor([1.0, 2, 4, 8, 16, 32], dtype=dtype, device=backend.device)
    inputs = {
        "value": value.view(1, 6, 1, 1),
        "spatial_shapes": [[2, 3]],
        "level_start_index": [0],
        "sampling_locations": value.new_tensor([x, y]).view(1, 1, 1, 1, 1, 2),
        "attention_weights": value.new_full((1, 1, 1, 1, 1), 3.0),
    }
    out, grads = run(GEOMETRIC, inputs, backend.impl, grad_output=value.new_full((1, 1, 1), 5.0))
    assert out.item() == 3 * 2**row
    # The gradient falls on the very pixel that was read.
    assert grads["value"].flatten().tolist() == [15.0 if r == row else 0.0 for r in range(6)]
    assert grads["attention_weights"].item() == 5 * 2**row


@pytest.mark.parametrize(("x", "y"), [(NAN, 0.0), (0.0, NAN), (NAN, NAN), (NAN, INF)])
@pytest.mark.parametrize("poison", [1.0, NAN, INF])
def test_geometric_nan_does_not_count(backend, x, y, poison):
    inputs = SMALL[GEOMETRIC](torch.float32, backend.device, 0)
    loc = inputs["sampling_locations"]
    loc[..., 0], loc[..., 1] = x, y
    for name in DIFFERENTIABLE[GEOMETRIC]:
        inputs[name] = torch.full_like(inputs[name], poison)
    out, _ = run(GEOMETRIC, inputs, backend.impl, grad=False)
    out, grads = run(GEOMETRIC, inputs, backend.impl, grad_output=torch.full_like(out, poison))
    assert_all_zero(out, grads)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_geometric_integer_positions_are_accepted(backend, dtype):
    inputs = SMALL[GEOMETRIC](torch.float32, backend.device, 0)
    whole = inputs["sampling_locations"].floor()
    out, grads = run(GEOMETRIC, {**inputs, "sampling_locations": whole.to(dtype)}, backend.impl)
    base, base_grads = run(GEOMETRIC, {**inputs, "sampling_locations": whole}, backend.impl)
    assert torch.equal(out, base)
    assert grads.keys() == base_grads.keys()
    for name in grads:
        torch.testing.assert_close(grads[name], base_grads[name])


# --- deformable convolution ----------------------------------------------------------------------


def convolutions(*ids):
    return [case for case in CASES if case.operator == CONVOLUTION and case.id in ids]


@pytest.mark.parametrize("case", convolutions("awkward", "depthwise", "neither"), ids=str)
def test_convolution_without_offsets_is_conv2d(case, backend):
    inputs = case.make(torch.float64, backend.device, 0)
    inputs["offset"] = torch.zeros_like(inputs["offset"])
    inputs["mask"] = None
    out, _ = run(CONVOLUTION, inputs, backend.impl, grad=False)
    groups = inputs["input"].shape[1] // inputs["weight"].shape[1]
    expected = conv2d(
        inputs["input"], inputs["weight"], inputs["bias"], inputs["stride"], inputs["padding"],
        inputs["dilation"], groups,
    )  # fmt: skip
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("case", convolutions("awkward", "groups-2", "no-mask"), ids=str)
def test_convolution_is_conv2d_of_the_columns(case, backend):
    inputs = case.make(torch.float64, backend.device, 0)
    out, _ = run(CONVOLUTION, inputs, backend.impl, grad=False)
    weight, bias = inputs.pop("weight"), inputs.pop("bias")
    kernel = tuple(weight.shape[2:])
    cols = pliant.deform_columns(**inputs, kernel_size=kernel, impl=backend.impl)
    groups = inputs["input"].shape[1] // weight.shape[1]
    expected = conv2d(cols, weight, bias, stride=kernel, groups=groups)
    torch.testing.assert_close(out, expected)


def test_columns_stand_at_output_times_kernel_plus_tap(backend):
    """Whole-pixel offsets: column (oy * kh + ky, ox * kw + kx) is the pixel that tap looks at."""
    kh, kw, height, width = 3, 2, 5, 4
    stride, padding, dilation = (2, 1), (1, 2), (1, 2)
    image = torch.arange(1.0, 1 + height * width, device=backend.device).view(1, 1, height, width)
    out_h, out_w = 3, 5
    offset = torch.randint(-2, 3, (1, 2 * kh * kw, out_h, out_w)).float().to(backend.device)
    got = pliant.deform_columns(
        image, offset, (kh, kw), stride, padding, dilation, impl=backend.impl
    )
    assert got.shape == (1, 1, out_h * kh, out_w * kw)
    for oy in range(out_h):
        for ox in range(out_w):
            for ky in range(kh):
                for kx in range(kw):
                    tap = 2 * (ky * kw + kx)
                    y = oy * 2 - 1 + ky * 1 + int(offset[0, tap, oy, ox])
                    x = ox * 1 - 2 + kx * 2 + int(offset[0, tap + 1, oy, ox])
                    inside = 0 <= y < height and 0 <= x < width
                    pixel = 1 + y * width + x if inside else 0
                    assert got[0, 0, oy * kh + ky, ox * kw + kx] == pixel


def test_columns_channel_belongs_to_its_deformable_group(backend):
    """Four channels, two groups: the first two move by one column, the last two by one row."""
    image = torch.arange(1.0, 10.0, device=backend.device).view(1, 1, 3, 3).expand(1, 4, 3, 3)
    offset = torch.zeros(1, 4, 3, 3, device=backend.device)
    offset[:, 1] = 1  # x of group 0
    offset[:, 2] = 1  # y of group 1
    mask = torch.ones(1, 2, 3, 3, device=backend.device)
    mask[:, 1] = 10
    got = pliant.deform_columns(image, offset, 1, mask=mask, impl=backend.impl)
    right = torch.tensor([[2.0, 3, 0], [5, 6, 0], [8, 9, 0]], device=backend.device)
    below = torch.tensor([[4.0, 5, 6], [7, 8, 9], [0, 0, 0]], device=backend.device)
    assert torch.equal(got[0], torch.stack((right, right, 10 * below, 10 * below)))


def test_convolution_at_initialisation_gets_no_offset_gradient_from_the_padding(backend):
    """Zero offsets and padding 1 put samples exactly at -1: their gradients are 0, on all sides.

    The others, of a map of ones, have the right-hand slope: 0, or -1 on the last row or column."""
    ones = torch.ones(1, 1, 3, 3, device=backend.device)
    offset = torch.zeros(1, 18, 3, 3, device=backend.device)
    inputs = {"input": ones, "offset": offset, "kernel_size": 3, "padding": 1, "mask": None}
    _, grads = run(
        "deform_columns", inputs, backend.impl,
        grad_output=torch.ones(1, 1, 9, 9, device=backend.device),
    )  # fmt: skip
    for ky in range(3):
        for kx in range(3):
            for oy in range(3):
                for ox in range(3):
                    y, x = oy - 1 + ky, ox - 1 + kx
                    counts = 0 <= y < 3 and 0 <= x < 3
                    got = grads["offset"][0, 2 * (ky * 3 + kx) :][:2, oy, ox].tolist()
                    assert got == [-float(counts and y == 2), -float(counts and x == 2)]


def test_loops_are_what_all_of_this_was_compared_with():
    """The sentences above bind the loops too: a few of them, straight."""
    value = torch.tensor([1.0, 2, 4, 8]).view(1, 4, 1, 1)

    def sampled(x, y, weight=1.0):
        loc = torch.tensor([(x + 0.5) / 2, (y + 0.5) / 2]).view(1, 1, 1, 1, 1, 2)
        weights = torch.full((1, 1, 1, 1, 1), weight)
        out, grads = loops.multi_scale_deformable_attn(
            value, [[2, 2]], [0], loc, weights, torch.ones(1, 1, 1)
        )
        return out.item(), *grads["sampling_locations"].flatten().tolist()

    assert sampled(-1, 0) == (0, 0, 0)
    assert sampled(2, 0, NAN) == (0, 0, 0)
    assert sampled(NAN, 0, INF) == (0, 0, 0)
    assert sampled(1, 1) == (8, -16, -16)
    assert sampled(0, 0) == (1, 2, 6)
