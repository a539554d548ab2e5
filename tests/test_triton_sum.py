"""The GPU kernels of the weighted sum: named cases, tilings, lies, determinism, streams, graphs.

Without a GPU the kernels run in Triton's interpreter (TRITON_INTERPRET=1) on a choice of the cases.
"""

import contextlib
import os
from unittest import mock

import pytest
import torch

import pliant
from pliant.sampling import direct, ops, reference
from pliant.sampling.problem import Policy
from pliant.testing import CASES, DIFFERENTIABLE, incoming, run, verify
from pliant.testing.cases import aggregation, attention, geometric, spread, turned

GPU = torch.cuda.is_available()
if not GPU and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from pliant.kernels.triton import bins, launch, lists, sum as kernels, tuning  # noqa: E402

DEVICE = "cuda" if GPU else "cpu"
SUMS = ("multi_scale_deformable_attn", "deformable_aggregation", "geometric_kernel_attention")
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
ATTENTION = Policy("unit", "bilinear", "zero")
AGGREGATION = Policy("unit", "bilinear", "skip")
GEOMETRIC = Policy("pixel", "nearest", "clamp")
gpu_only = pytest.mark.skipif(not GPU, reason="needs a GPU")


@pytest.fixture(autouse=True)
def _plan_anew(monkeypatch):
    """Tests change the rules that plans are made by."""
    monkeypatch.setattr(launch, "_remembered", {})
    monkeypatch.setattr(direct, "plans", direct.Plans())


def chosen():
    """All cases in all dtypes; in the interpreter every third of them, in one dtype each (but from
    float64 to bfloat16 it cannot round).
    """
    cases = [case for case in CASES if case.operator in SUMS]
    dtypes = (F32, F64, F16, BF16)
    return [
        pytest.param(case, dtype, id=f"{case}-{str(dtype).removeprefix('torch.')}")
        for i, case in enumerate(cases)
        for j, dtype in enumerate(dtypes)
        if GPU or (i % 3 == 0 and (i // 3) % 4 == j)
        if GPU or (case.id, dtype) != ("positions-bfloat16", F64)
    ]


@pytest.mark.parametrize(("case", "dtype"), chosen())
def test_case(case, dtype):
    verify(case.operator, case.make(dtype, DEVICE, 0), "triton")


def problem(
    policy, dtype=F32, *, batch=2, groups=2, weights=1, channels=8, points=3, queries=3, seed=0
):
    """A canonical problem: two views of one or two scales, positions inside and outside."""
    generator = torch.Generator().manual_seed(seed)
    scales = 2 if policy == AGGREGATION else 1

    def draw(*size):
        return torch.randn(*size, generator=generator, dtype=F64)

    spread = 5.0 if policy.position == "pixel" else 1.0
    shapes = torch.tensor([[[4, 5], [2, 3]], [[3, 3], [1, 2]]])[:, :scales]
    starts = torch.tensor([[0, 20], [26, 35]])[:, :scales]
    loc = torch.rand(batch, queries, groups, 2, points, 2, generator=generator, dtype=F64)
    loc = loc * 1.6 - 0.3
    value = draw(batch, 37, groups, weights, channels)
    weight = draw(batch, queries, groups, 2, points, scales, weights)
    return [
        value.to(DEVICE, dtype),
        shapes.to(DEVICE),
        starts.to(DEVICE),
        (loc * spread).to(DEVICE, F64 if dtype == F64 else F32),
        weight.to(DEVICE, dtype),
        policy,
    ]


def compare(args, *, tolerance, tolerance_of_positions=None):
    """Forward and backward of the kernels against the reference in float64."""
    exact = [a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() and i != 3 else a
             for i, a in enumerate(args)]  # fmt: skip
    out = kernels.sample_sum(*args)
    grad = torch.linspace(-1, 1, out.numel()).view(out.shape).to(out)
    got = [out, *kernels.sample_sum_backward(grad, *args, [True] * 3)]
    expected = [
        reference.sample_sum(*exact),
        *reference.sample_sum_backward(grad.double(), *exact, [True] * 3),
    ]
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        rtol = tolerance_of_positions or tolerance if i == 2 else tolerance
        scale = b.abs().max().clamp(min=1.0).item()
        torch.testing.assert_close(a.double(), b.double(), rtol=rtol, atol=rtol * scale)
    return got


SIZES = {
    "attention-37": (ATTENTION, {"channels": 37}),
    "attention-one-point": (ATTENTION, {"points": 1, "channels": 16}),
    "attention-seven-points": (ATTENTION, {"points": 7}),
    "attention-two-blocks": (ATTENTION, {"channels": 1100, "queries": 1, "groups": 1, "batch": 1}),
    "attention-weight-groups": (ATTENTION, {"weights": 3, "channels": 5}),
    "aggregation-147": (AGGREGATION, {"channels": 49, "weights": 3, "groups": 1}),
    "aggregation-many-points": (AGGREGATION, {"points": 21, "groups": 1, "queries": 1}),
    "geometric-256": (GEOMETRIC, {"channels": 256, "groups": 1}),
}


@pytest.mark.parametrize("id", SIZES)
def test_any_size(id):
    policy, sizes = SIZES[id]
    compare(problem(policy, **sizes), tolerance=3e-6)


@pytest.mark.parametrize("splits", [2, 5, 64])
@pytest.mark.parametrize("dtype", [F32, F16, F64], ids=str)
def test_programs_that_share_the_points_of_a_query(dtype, splits, monkeypatch):
    """As many as there are blocks of points, and fewer, and more."""
    monkeypatch.setattr(tuning, "point_splits", lambda *_: splits)
    args = problem(AGGREGATION, dtype, points=19, groups=1, channels=7, weights=3)
    compare(args, tolerance={F32: 3e-6, F16: 2e-3, F64: 1e-12}[dtype])
    whole, launched, call = kernels.sample_sum(*args), [], launch.Launch.__call__

    def counted(self, *tensors):
        launched.append((self.kernel.__name__, tensors[0].dtype))
        return call(self, *tensors)

    start = kernels.plan_sum(*args, (2, 3, 21))
    with mock.patch.object(launch.Launch, "__call__", counted):
        assert torch.equal(start(*args[:5]).view(whole.shape), whole)
    assert launched == [("by_point", dtype), ("merge", F64 if dtype == F64 else F32)]


@pytest.mark.parametrize("policy", [ATTENTION, AGGREGATION], ids=str)
@pytest.mark.parametrize("positions", [BF16, F16, F32, F64], ids=str)
@pytest.mark.parametrize("features", [F64, F16], ids=str)
def test_features_and_positions_of_any_two_dtypes(features, positions, policy):
    if (features, positions) == (F64, BF16) and not GPU:
        pytest.skip("Triton's interpreter cannot round float64 to bfloat16")
    args = problem(policy, features)
    args[3] = args[3].to(positions)
    rounding = {F64: 1e-12, F32: 3e-6, F16: 2e-3, BF16: 2e-2}
    got = compare(
        args, tolerance=rounding[features],
        tolerance_of_positions=max(rounding[features], rounding[positions]),
    )  # fmt: skip
    assert [x.dtype for x in got] == [features, features, positions, features]


@pytest.mark.parametrize("policy", [ATTENTION, AGGREGATION, GEOMETRIC], ids=str)
def test_wide_rows_use_wide_integers(policy, monkeypatch):
    monkeypatch.setattr(kernels, "_row_type", lambda *x: tl.int64)
    compare(problem(policy), tolerance=3e-6)


def test_extents_decide_the_integers():
    near = torch.empty(4, 2**20, 1, 1, 8, device="meta")
    far = torch.empty(1, 2**28, 1, 1, 8, device="meta")
    assert kernels._row_type(near) == tl.int32
    assert kernels._row_type(near, far) == tl.int64
    # The sum of all offsets fits, but not the width of a map that is one line of all rows.
    line = torch.empty_strided((1, 2**14, 1, 1, 8), (2**31, 2**17, 8, 8, 1), device="meta")
    assert kernels._row_type(line) == tl.int64


@pytest.mark.parametrize("way", ["added", "sorted", "listed"])
@pytest.mark.parametrize("policy", [ATTENTION, AGGREGATION, GEOMETRIC], ids=str)
def test_places_more_than_32_bits_apart(policy, way, monkeypatch):
    """Along every axis of every operand, one after another, forward and backward; where only the
    gradient of the features is computed another way, that alone.
    """
    monkeypatch.setattr(tuning, "apart", lambda *_: False)
    monkeypatch.setattr(tuning, "by_list", few_samples if way == "listed" else lambda *_: False)
    weights = 1 if policy != AGGREGATION or way == "listed" else 3
    value, _, _, loc, weight, _ = problem(
        policy, F16, batch=1, groups=3 if GPU else 1, weights=weights, channels=3
    )
    shapes = torch.tensor([[[2, 3], [2, 1], [1, 1]]] * 3, device=DEVICE)
    starts = torch.tensor([[0, 6, 8], [0, 3, 2], [2, 7, 0]], device=DEVICE)
    value, loc = value[:, :9], loc[:, :, :, [0, 1, 0]].to(F16)
    weight = weight[:, :, :, [0, 1, 0]][..., [0] * 3, :].contiguous()
    operands = {"value": value, "loc": loc, "weight": weight}
    operands["grad"] = torch.randn(1, *weight.shape[1:3], weights, 3, dtype=F16).to(DEVICE)
    maps, needs = (shapes, starts), [True, way == "added" and policy != GEOMETRIC, way == "added"]

    def results(value, loc, weight, grad):
        args = (value, *maps, loc, weight, policy)
        torch.use_deterministic_algorithms(way == "sorted")
        try:
            grads = kernels.sample_sum_backward(grad, *args, needs)
        finally:
            torch.use_deterministic_algorithms(False)
        return [kernels.sample_sum(*args) if way == "added" else None, *grads]

    expected = results(**operands)
    for name, x in operands.items():
        for axis in (axis for axis in range(1, x.dim()) if x.shape[axis] > 2):
            got = results(**operands | {name: spread(x, axis)})
            for a, b in zip(got, expected, strict=True):
                assert a is b is None or torch.allclose(a, b, rtol=2e-3, atol=2e-3), (name, axis)


LAYOUTS = {
    "turned": turned,
    "every-other": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "outermost": lambda x: x.movedim((2, 1), (0, -1)).contiguous().movedim((0, -1), (2, 1)),
    "batch-last": lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0),
}


@pytest.mark.parametrize("copied", [False, True], ids=["in-place", "copied"])
@pytest.mark.parametrize("dtype", [F32, F16], ids=["float32", "float16"])
@pytest.mark.parametrize("policy", [ATTENTION, AGGREGATION, GEOMETRIC], ids=str)
def test_features_whose_channels_lie_apart(policy, dtype, copied, monkeypatch):
    monkeypatch.setattr(tuning, "apart", lambda value, _: copied and value.stride(4) != 1)
    args = problem(policy, dtype, weights=2 if policy == AGGREGATION else 1)
    expected = kernels.sample_sum(*args)
    for layout in LAYOUTS.values():
        far = layout(args[0])
        assert torch.equal(far, args[0])
        assert far.stride(4) > 1
        with mock.patch.object(kernels, "_join", wraps=kernels._join) as joined:
            out, grad, *_ = compare([far, *args[1:]], tolerance=3e-6 if dtype == F32 else 2e-3)
        assert joined.called == copied
        assert (grad.dtype, grad.stride()) == (dtype, torch.empty_like(far).stride())
        if copied:
            assert torch.equal(out, expected)


@pytest.mark.parametrize("queries", [1, 12])
@pytest.mark.parametrize("dtype", [F32, F16], ids=["float32", "float16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_features_whose_channels_lie_apart_in_planned_calls(layout, dtype, queries):
    maps, sizes = ((11, 9), (5, 4)), {"batch": 3, "channels": 8}
    for operator, make in (
        (SUMS[0], attention(queries=queries, levels=maps, points=2, **sizes)),
        (SUMS[1], aggregation(anchors=queries, cameras=[maps], points=2, **sizes)),
        (SUMS[2], geometric(queries=queries, levels=maps, points=2, **sizes)),
    ):
        inputs = make(dtype, DEVICE, 0)
        features = DIFFERENTIABLE[operator][0]
        inputs[features] = LAYOUTS[layout](inputs[features])
        verify(operator, inputs, "triton")


def test_where_channels_are_brought_together():
    def asked(*size, samples, layout=turned):
        return tuning.apart(layout(torch.empty(size, device="meta")), samples)

    assert asked(1, 600, 8, 1, 32, samples=100)
    assert asked(1, 600, 1, 8, 32, samples=100)
    assert not asked(1, 600, 8, 1, 32, samples=99)
    assert not asked(1, 600, 8, 1, 32, samples=100, layout=torch.empty_like)
    assert not asked(1, 600, 8, 1, 1, samples=100)  # one channel lies beside itself
    same = torch.empty(1, 600, 8, 1, 1, device="meta").expand(-1, -1, -1, -1, 32)
    assert not tuning.apart(same, 100)
    batch = turned(torch.empty(1, 600, 8, 1, 32, device="meta")).expand(4, -1, -1, -1, -1)
    assert not tuning.apart(batch, 100)


def test_gradients_of_copied_features_have_the_strides_that_were_promised():
    """Along axes of length 1, too."""
    args = problem(ATTENTION, batch=1, groups=1)
    far = args[0].repeat_interleave(2, -1)
    args[0] = far.as_strided((1, 37, 1, 1, 8), (2, 16, 16, 4, 2))
    _, grad, *_ = compare(args, tolerance=3e-6)
    promised = torch.empty_like(args[0]).stride()
    assert grad.stride() == promised != torch.empty(args[0].shape).stride()


def test_pairs_in_every_item_of_a_batch(monkeypatch):
    """Items at odd distances, one at a time: of the first alone, pairs could be loaded."""
    monkeypatch.setattr(tuning, "batch_parts", lambda *args: 3)
    args = problem(ATTENTION, batch=3)
    odd = torch.empty(3, args[3][0].numel() + 1, device=DEVICE)[:, :-1].view(args[3].shape)
    assert kernels._paired(args[3], 5)
    assert not kernels._paired(odd, 5)
    assert not kernels._paired(odd[:1], 5)
    args[3] = odd.copy_(args[3])
    compare(args, tolerance=3e-6)


LIES = {
    "past-the-end": ([[4, 5], [3, 3]], [0, 30]),
    "before-the-start": ([[4, 5], [3, 3]], [-7, 26]),
    "far-too-wide": ([[4, 2**31 - 1], [3, 3]], [0, 26]),
    "impossible": ([[2**62, 2**62], [-(2**63), 5]], [2**62, -(2**62)]),
    "tall": ([[2**31 - 1, 3], [3, 3]], [0, 26]),
}


@pytest.mark.parametrize("policy", [ATTENTION, GEOMETRIC], ids=["attention", "geometric"])
@pytest.mark.parametrize("lie", LIES)
def test_lying_metadata_read_nothing_outside(lie, policy):
    args = problem(policy)
    shapes, starts = LIES[lie]
    args[1] = torch.tensor(shapes, device=DEVICE).view(2, 1, 2)
    args[2] = torch.tensor(starts, device=DEVICE).view(2, 1)
    room = torch.full((3, *args[0].shape[1:]), torch.nan, device=DEVICE)  # NaN on both sides
    room[1] = args[0][0]
    args[0] = room[1:2]
    args[3:5] = [x[:1] for x in args[3:5]]
    got = compare(args, tolerance=3e-6)
    assert all(x.isfinite().all() for x in got)


@pytest.mark.parametrize("policy", [ATTENTION, GEOMETRIC], ids=["attention", "geometric"])
def test_sides_too_long_for_the_quick_floor(policy):
    """From 2**22 pixels on, float32 no longer counts in steps below a half."""
    side = 2**22 + 40
    x = torch.tensor([0.0, 0.3, 0.5, 1.0, 1.0 + 1e-6, 2.0, -1.0, torch.inf, torch.nan])
    loc = torch.stack([x * (side if policy == GEOMETRIC else 1), torch.full_like(x, 0.4)], -1)
    args = [
        torch.randn(1, side, 1, 1, 1, device=DEVICE),
        torch.tensor([[[1, side]]], device=DEVICE),
        torch.tensor([[0]], device=DEVICE),
        loc.view(1, 3, 1, 1, 3, 2).to(DEVICE),
        torch.rand(1, 3, 1, 1, 3, 1, 1, device=DEVICE),
        policy,
    ]
    compare(args, tolerance=3e-6)


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("policy", [ATTENTION, AGGREGATION, GEOMETRIC], ids=str)
def test_deterministic_mode_repeats_to_the_bit(policy, monkeypatch, deterministic):
    monkeypatch.setattr(bins, "AT_ONCE", 40)  # several rounds
    args = problem(policy, queries=6)
    args[3][:, 1:] = args[3][:, :1]  # many samples meet in a pixel
    first = compare(args, tolerance=3e-6)
    for _ in range(3 if GPU else 1):
        for a, b in zip(first, compare(args, tolerance=3e-6), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("id", [*SIZES, *("float64", "float16", "wide")])
def test_deterministic_mode_of_any_size(id, monkeypatch, deterministic):
    policy, sizes = SIZES.get(id, (ATTENTION, {}))
    if id == "wide":
        monkeypatch.setattr(bins, "MANY", 0)
    dtype = {"float64": F64, "float16": F16}.get(id, F32)
    compare(problem(policy, dtype, **sizes), tolerance={F64: 1e-12, F16: 2e-3}.get(dtype, 3e-6))


MAPS = {
    **LIES,
    "one-in-another": ([[4, 5], [3, 3]], [0, 6]),
    "the-same": ([[4, 5], [4, 5]], [3, 3]),
    "not-in-order": ([[3, 3], [4, 5]], [28, 5]),
    "wider-than-before": ([[5, 2], [3, 9]], [0, 10]),
    "one-line": ([[1, 7], [9, 1]], [0, 7]),
    "all-in-one": ([[1, 37], [37, 1]], [0, 0]),
}


@pytest.mark.parametrize("policy", [ATTENTION, GEOMETRIC][: 1 + GPU], ids=str)
@pytest.mark.parametrize("id", MAPS)
def test_deterministic_mode_finds_the_samples_of_any_maps(id, policy, deterministic):
    """Bins go by rows, which say neither line nor map."""
    args = problem(policy, queries=5, groups=1)
    shapes, starts = (torch.tensor(x, device=DEVICE) for x in MAPS[id])
    args[1], args[2] = shapes.unsqueeze(1), starts.unsqueeze(1)
    compare(args, tolerance=3e-6)


@pytest.mark.parametrize("policy", [ATTENTION, AGGREGATION], ids=str)
def test_a_map_so_wide_that_its_width_times_a_stride_exceeds_32_bits(policy):
    """Of the second line, which starts within the features, nothing else may be touched."""
    args = problem(policy, queries=1, groups=1)  # 2**28 rows of 8 channels: -2**31 in 32 bits
    args[1][0, 0] = torch.tensor([4, 2**28], device=DEVICE)
    args[3][:] = torch.tensor([3e-8, 0.05], device=DEVICE)  # between the lines -1 and 0
    compare(args, tolerance=3e-6)


@pytest.mark.parametrize("lists", [False, True], ids=["deterministic", "lists"])
def test_rows_of_a_map_so_wide_that_they_come_round_in_32_bits(lists, monkeypatch):
    """The pixel below the position is row 2**32 and a few, which nobody stores."""
    monkeypatch.setattr(tuning, "by_list", lambda *args: lists)
    args = problem(ATTENTION, F16 if lists else F32, queries=1, groups=1)
    args[3] = args[3].float()
    x, around = torch.tensor(0.8633), int(2**32 / 2.8633)
    widths = torch.arange(around - 500, around + 500)
    rows = 2 * widths + (x * widths.float() - 0.5).long() - 2**32
    width = widths[(rows >= 0) & (rows < 30)][0].item()
    args[1][0, 0] = torch.tensor([3, width], device=DEVICE)
    args[3][:] = torch.stack([x, torch.tensor(0.5833)]).to(DEVICE)
    torch.use_deterministic_algorithms(not lists)
    try:
        compare(args, tolerance=2e-3 if lists else 3e-6)
    finally:
        torch.use_deterministic_algorithms(False)


def test_rows_are_counted_in_64_bits_if_a_gradient_needs_them():
    """That of features which all heads share is larger than they are."""
    value = torch.empty(1, 1 << 20, 1, 1, 256, device="meta").expand(-1, -1, 8, -1, -1)
    loc = torch.empty(1, 1, 8, 1, 1, 2, device="meta")
    weight, grad = loc[..., :1, None], loc.new_empty(1, 1, 8, 1, 256)
    maps = torch.empty(1, 1, 2, device="meta"), torch.empty(1, 1, device="meta")
    launch = kernels._launch_backward(
        grad, value, *maps, loc, weight, torch.empty_like(value), loc, weight, ATTENTION, [True] * 3
    )
    assert launch.constants["ROW"] == tl.int64


@pytest.mark.parametrize(("queries", "tile"), [(1, 4), (20, 8), (40, 16), (80, 32)])
def test_deterministic_mode_with_tiles_of_as_many_samples_as_a_pixel_has(
    queries, tile, deterministic
):
    args = problem(ATTENTION, queries=queries, groups=1, points=2, channels=4)
    samples = 4 * args[3][0].numel() // 2 // args[0].shape[1]
    assert tuning.bins_tile(4, 2, samples)["BE"] == tile
    compare(args, tolerance=3e-6)


def test_deterministic_mode_with_more_maps_than_are_looked_at_together(deterministic):
    """Of one pixel each but for the last, which holds the pixels of all others, too."""
    maps = 40
    assert tuning.bins_tile(8, maps, 1)["BM"] < maps
    args = problem(ATTENTION, groups=1)
    args[0] = torch.randn(2, maps, 1, 1, 8, device=DEVICE)
    args[1] = torch.ones(maps, 1, 2, dtype=torch.int64, device=DEVICE)
    args[1][-1, 0, 1] = maps
    args[2] = torch.arange(maps, device=DEVICE).unsqueeze(1)
    args[2][-1] = 0
    args[3] = torch.rand(2, 3, 1, maps, 2, 2, device=DEVICE)
    args[4] = torch.randn(2, 3, 1, maps, 2, 1, 1, device=DEVICE)
    compare(args, tolerance=3e-6)


def test_deterministic_mode_with_maps_of_another_size(deterministic):
    """The same queries over fewer pixels, and over more: what was planned before does not fit."""
    for height in (4, 2, 5):
        args = problem(ATTENTION)
        args[0] = args[0][:, : 17 + 5 * height].contiguous()
        args[1] = torch.tensor([[[height, 5]], [[3, 3]]], device=DEVICE)
        args[2] = torch.tensor([[0], [5 * height]], device=DEVICE)
        compare(args, tolerance=3e-6)


def test_sparse_batches_larger_than_the_cache_are_computed_in_parts(monkeypatch):
    monkeypatch.setattr(tuning, "CACHED", 1)
    assert tuning.batch_parts(2, 1000, 10, 100) == 2
    assert tuning.batch_parts(2, 1000, 200, 100) == 1
    monkeypatch.setattr(tuning, "CACHED", 32)
    assert tuning.batch_parts(16, 131, 10, 100) == 5  # four items, 33 bytes, at most
    assert tuning.batch_parts(11, 320, 10, 100) == 11  # two items would be 58
    monkeypatch.setattr(tuning, "CACHED", 1)
    compare(problem(ATTENTION, queries=1), tolerance=3e-6)
    compare(problem(ATTENTION, F16, queries=1, weights=2), tolerance=2e-3)


@pytest.mark.parametrize("dtype", [F32, F16], ids=["float32", "float16"])
@pytest.mark.parametrize("policy", [ATTENTION, AGGREGATION, GEOMETRIC], ids=str)
@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
def test_parts_of_a_batch(strided, policy, dtype, monkeypatch):
    """Five items, two at a time: the first part is smaller."""
    monkeypatch.setattr(tuning, "batch_parts", lambda *args: 3)
    args = problem(policy, dtype, groups=1)
    for i in (0, 3, 4):
        args[i] = torch.cat([args[i], args[i].flip(0), args[i][:1] * 0.5])
    if strided:
        args[0] = args[0].transpose(0, 1).contiguous().transpose(0, 1)
    compare(args, tolerance=3e-6 if dtype == F32 else 2e-3)


@pytest.mark.parametrize(("dtype", "strided"), [(F32, False), (F16, True)], ids=str)
def test_parts_of_a_batch_in_planned_calls(dtype, strided, monkeypatch):
    monkeypatch.setattr(tuning, "batch_parts", lambda *args: 3)
    makers = (attention(batch=5), aggregation(batch=5), geometric(batch=5))
    for operator, make in zip(SUMS, makers, strict=True):
        inputs = make(dtype, DEVICE, 0)
        features = DIFFERENTIABLE[operator][0]
        if strided:
            inputs[features] = inputs[features].transpose(0, 1).contiguous().transpose(0, 1)
        verify(operator, inputs, "triton")


@triton.jit
def clear_slowly(sums, N, BACKWARDS: tl.constexpr, EARLY: tl.constexpr, B: tl.constexpr):  # noqa: N803
    launch.wait(EARLY)
    i = tl.program_id(0) * B + tl.arange(0, B)
    zero = i.to(tl.float32)
    for _ in range(N):  # half of a half of a half, until nothing is left
        zero *= 0.5
    tl.store(sums + i, zero, mask=i < N)


def test_the_slow_way_takes_what_the_other_takes():
    """A GPU alone would tell: the interpreter leaves out what a kernel does not know."""
    assert clear_slowly.arg_names == kernels.backward.clear.arg_names


@gpu_only
@pytest.mark.parametrize("outside", [False, True], ids=["some", "none"])
def test_adding_waits_until_the_sums_are_clear(outside, monkeypatch):
    """Also where the kernel that would add has nothing to add, and could end before."""
    monkeypatch.setattr(kernels.backward, "clear", clear_slowly)
    args = problem(AGGREGATION, batch=1, groups=1)
    args[0] = torch.ones(1, 1 << 10, 1, 1, 32, device=DEVICE)
    args[3] = args[3] + 2 * outside
    grad = torch.ones_like(kernels.sample_sum(*args))
    expected = reference.sample_sum_backward(grad, *args, [True] * 3)[0]
    assert expected.any() == (not outside)
    kernels.sample_sum_backward(grad, *args, [True] * 3)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.full_like(args[0], torch.nan)  # what is found in the memory of the gradient
        got = kernels.sample_sum_backward(grad, *args, [True] * 3)[0].clone()
    graph.replay()
    torch.testing.assert_close(got, expected)


def few_samples(value, *_):
    return value.shape[3] == 1 and value.dtype != F64


@pytest.fixture
def by_list(monkeypatch):
    """In any dtype, any number of samples is few; the test fails if no lists are made of them."""
    monkeypatch.setattr(tuning, "by_list", few_samples)
    plan, planned = lists.grad_value, []
    monkeypatch.setattr(lists, "grad_value", lambda *args: planned.append(args) or plan(*args))
    yield
    assert planned


def large_problem(policy, dtype=F32, channels=5):
    """Lines longer and shorter than what a program sums, of 185 rows."""
    args = problem(policy, dtype, channels=channels, queries=9)
    args[0] = torch.randn(2, 185, 2, 1, channels).to(args[0])
    args[1] = torch.tensor([[[2, 70]], [[9, 5]]], device=DEVICE)
    args[2] = torch.tensor([[0], [140]], device=DEVICE)
    if policy.position == "pixel":
        args[3] = args[3] * torch.tensor([14.0, 0.4], device=DEVICE)
    return args


def test_where_samples_are_listed():
    def asked(*size, dtype=F16, samples=3600, copied=False):
        value = torch.empty(size, dtype=dtype, device="meta")
        return tuning.by_list(value, value.numel() * 4, samples, copied)

    assert asked(16, 8400, 8, 1, 32)
    assert asked(16, 8400, 8, 1, 64, dtype=BF16)
    assert not asked(16, 8400, 8, 1, 32, samples=2 * 8400)  # clearing takes less time than adding
    assert not asked(1, 8400, 8, 1, 32)  # little to clear
    assert not asked(16, 8400, 8, 1, 65)
    assert not asked(16, 8400, 8, 2, 32)
    assert asked(128, 8400, 8, 1, 5)
    assert not asked(128, 8400, 8, 1, 4)  # the lists would be larger than the gradients
    assert asked(16, 8400, 8, 1, 32, copied=True)
    assert not asked(128, 8400, 8, 1, 8, copied=True)  # or than half of them
    assert asked(128, 8400, 8, 1, 8)
    assert not asked(16, 8400, 8, 1, 32, dtype=F32)  # nothing is rounded
    assert asked(2**14, 8400, 8, 1, 32)
    assert not asked(2**14, 8400, 8, 1, 32, samples=4200)  # more entries than 32 bits count


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
def test_lists_in_planned_calls(strided, dtype, by_list):
    for operator, make in ((SUMS[0], attention(batch=3)), (SUMS[2], geometric(batch=3))):
        inputs = make(dtype, DEVICE, 0)
        features = DIFFERENTIABLE[operator][0]
        if strided:
            inputs[features] = inputs[features].transpose(0, 1).contiguous().transpose(0, 1)
        verify(operator, inputs, "triton")


@pytest.mark.parametrize("channels", [5, 32, 64])
@pytest.mark.parametrize("policy", [ATTENTION, AGGREGATION, GEOMETRIC], ids=str)
def test_lists_any_size(policy, channels, by_list):
    if policy == AGGREGATION:  # more samples than a program enters
        compare(problem(policy, channels=channels, queries=12), tolerance=3e-6)
    else:
        compare(large_problem(policy, channels=channels), tolerance=3e-6)


@pytest.mark.parametrize("policy", [ATTENTION, GEOMETRIC], ids=["attention", "geometric"])
def test_lists_a_crowd(policy, by_list):
    """All samples of a map in one place: one long chain."""
    args = large_problem(policy)
    args[3][:] = 0.3
    compare(args, tolerance=3e-6)


def test_lists_what_is_expanded(by_list):
    args = large_problem(ATTENTION)
    args[0] = args[0][:, :, :1].expand(-1, -1, 2, -1, -1)
    args[3] = args[3].repeat_interleave(2, -1)[..., ::2][:, :1].expand(-1, 9, -1, -1, -1, -1)
    args[4] = args[4][:1].expand(2, *args[4].shape[1:])
    compare(args, tolerance=3e-6)
    grad = torch.ones(1, device=DEVICE).expand(2, 9, 2, 1, 5)
    got, _, _ = kernels.sample_sum_backward(grad, *args, [True, False, False])
    expected, _, _ = reference.sample_sum_backward(grad, *args, [True, False, False])
    torch.testing.assert_close(got, expected)
    assert got.stride() == torch.empty_like(args[0]).stride()


@pytest.mark.parametrize("policy", [ATTENTION, GEOMETRIC], ids=["attention", "geometric"])
@pytest.mark.parametrize("id", MAPS)
def test_lists_the_samples_of_any_maps(id, policy, by_list):
    args = problem(policy, queries=5)
    shapes, starts = (torch.tensor(x, device=DEVICE) for x in MAPS[id])
    args[1], args[2] = shapes.unsqueeze(1), starts.unsqueeze(1)
    compare(args, tolerance=3e-6)


@pytest.mark.parametrize("dtype", [F32, F16], ids=["float32", "float16"])
@pytest.mark.parametrize("policy", [ATTENTION, GEOMETRIC], ids=["attention", "geometric"])
def test_lists_infinities_where_they_are_read(policy, dtype, by_list):
    args = large_problem(policy, dtype)
    args[3][0, 0, 0, 0, 0] = torch.tensor([0.5 / 70, 0.25], device=DEVICE)  # on a pixel: zeros
    args[3][0, 1, 0, 0, 0] = torch.tensor([torch.nan, torch.inf], device=DEVICE)
    args[4][1, 2, 1, 1, 0], args[4][1, 3, 0, 0, 1] = torch.inf, torch.nan
    grad = torch.randn(2, 9, 2, 1, 5).to(args[0])
    grad[0, 0, 0, 0, 1], grad[0, 4, 1, 0, 2], grad[1, 5, 0, 0, 4] = torch.inf, torch.nan, -torch.inf
    got, _, _ = kernels.sample_sum_backward(grad, *args, [True, False, False])
    expected, _, _ = reference.sample_sum_backward(grad, *args, [True, False, False])
    assert expected.isinf().any()
    assert expected.isnan().any()
    tolerance = 1e-5 if dtype == F32 else 4e-3
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.fixture
def shared(monkeypatch):
    """The test fails if lanes do not share what they find."""
    rule, asked = tuning.shared, []
    monkeypatch.setattr(tuning, "shared", lambda *args: asked.append(rule(*args)) or asked[-1])
    yield
    assert asked
    assert all(asked)


def test_where_lanes_share():
    def ask(policy=ATTENTION, *, dtype=F32, queries=9, heads=8, channels=32, maps=(4, 1),
            points=4, of=lambda *x: x):  # fmt: skip
        value = torch.empty(1, 9, heads, 1, channels, dtype=dtype, device="meta")
        loc = torch.empty(1, queries, heads, maps[0], points, 2, device="meta")
        weight = torch.empty(1, queries, heads, maps[0], points, maps[1], 1, device="meta")
        tile = tuning.query_tile(channels, queries, heads, points, dtype)
        return tuning.shared(tile, *of(value, loc, weight), policy)

    def twice(x, axis):
        """`x` in steps twice as long before `axis`."""
        return torch.cat([x, x], axis).narrow(axis, 0, x.shape[axis])

    assert ask() == 8
    assert ask(dtype=F16) == 4
    assert ask(maps=(3, 1)) == 4
    assert ask(maps=(3, 1), dtype=BF16) == 4
    assert ask(channels=128, points=8) == 16
    assert ask(Policy("pixel", "bilinear", "zero"), maps=(1, 1)) == 4
    assert ask(of=lambda *x: [twice(x[0], 3), twice(x[1], 3), twice(x[2], 3)])
    assert not ask(GEOMETRIC)
    assert not ask(
        maps=(4, 2), of=lambda v, x, w: (v, x, w.movedim(5, 0).contiguous().movedim(0, 5))
    )
    assert not ask(channels=31, of=lambda v, x, w: (v.new_empty(1, 9, 8, 1, 32)[..., :31], x, w))
    assert not ask(channels=256)  # more lanes than a warp has
    assert not ask(channels=16, dtype=F16)  # two lanes
    assert not ask(channels=4, dtype=F16)  # half a lane
    assert not ask(maps=(2, 1), points=11)  # two samples at a time
    assert not ask(queries=4, heads=2)  # a smaller tile
    assert not ask(of=lambda v, x, w: (twice(v[..., None], 5)[..., 0], x, w))
    assert not ask(of=lambda v, x, w: (v.new_empty(1, 9, 264)[..., 8:].view(v.shape), x, w))
    assert not ask(of=lambda v, x, w: (v.new_empty(1, 9, 8, 1, 40)[..., 8:], x, w))
    assert not ask(of=lambda v, x, w: (v, twice(x, 4), w))
    assert not ask(of=lambda v, x, w: (v, twice(x, 5), w))
    assert not ask(of=lambda v, x, w: (v, x, twice(w, 4)))
    assert not ask(of=lambda v, x, w: (v, x, w[:, :, :, :, :1].expand((*x.shape[:-1], 1, 1))))


def compare_shared(args):
    """The sum of the kernel against the reference in float64, NaN and Inf too."""
    exact = [a.double() if i in (0, 4) else a for i, a in enumerate(args)]
    got, expected = kernels.sample_sum(*args), reference.sample_sum(*exact)
    tolerance = {F32: 3e-6, F16: 2e-3, BF16: 2e-2, F64: 1e-12}[args[0].dtype]
    scale = expected.nan_to_num(0, 0, 0).abs().max().clamp(min=1.0).item()
    torch.testing.assert_close(
        got.double(), expected, rtol=tolerance, atol=tolerance * scale, equal_nan=True
    )
    return got


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    ("groups", "channels", "points"), [(1, 32, 4), (2, 32, 8), (2, 64, 2), (3, 64, 6), (2, 128, 10)]
)
def test_shared_any_size(groups, channels, points, dtype, shared):
    for policy in (ATTENTION, Policy("pixel", "bilinear", "zero")):
        args = problem(policy, dtype, groups=groups, channels=channels, points=points, queries=17)
        compare_shared(args)
        compare_shared([*args[:3], args[3].to(dtype), *args[4:]])
        if channels < 128:  # of 128 in float64 a pixel takes two warps
            compare_shared([args[0].double(), *args[1:4], args[4].double(), policy])


@pytest.mark.parametrize("wide", [False, True], ids=["int32", "int64"])
def test_shared_of_strided_tensors(wide, shared, monkeypatch):
    if wide:
        monkeypatch.setattr(kernels, "_row_type", lambda *x: tl.int64)
    args = problem(ATTENTION, channels=32, points=4, queries=9)
    args[0] = torch.cat([args[0], args[0].flip(0)], 4)[..., 32:].transpose(0, 1)
    args[0] = args[0].contiguous().transpose(0, 1)
    args[3:5] = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in args[3:5]]
    compare_shared(args)
    args[0] = args[0][:, :, :1].expand(-1, -1, 2, -1, -1)
    args[3:5] = args[3][:, :1].expand(-1, 9, -1, -1, -1, -1), args[4][:1].expand(2, *[-1] * 6)
    compare_shared(args)


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=["float32", "float16", "bfloat16"])
def test_shared_of_what_is_not_finite(dtype, shared):
    """What is not read adds nothing, be it NaN; what is read does."""
    args = problem(ATTENTION, dtype, channels=64, points=4, queries=12)
    args[0][:, 20:26] = args[0][:, 35:] = torch.nan  # before and after the maps
    compare_shared(args)
    away = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e38, -1e38, 3.0, -2.0], device=DEVICE)
    args[3][:, :7, ..., 0] = away.view(7, 1, 1, 1)
    args[3][:, 5:9, ..., 1] = torch.nan
    args[4][:, :4], args[4][:, 4:8], args[4][:, 9, 0, 0, 2] = torch.nan, torch.inf, torch.nan
    args[0][0, 7, 0], args[0][1, 28, 1] = torch.inf, torch.nan
    got = compare_shared(args)
    assert (got[:, :9] == 0).all()
    assert got.isinf().any()
    assert got.isnan().any()


@pytest.mark.parametrize("id", MAPS)
def test_shared_of_any_maps(id, shared):
    """Where they lie, nothing is shared."""
    args = problem(ATTENTION, channels=32, points=4, queries=9)
    shapes, starts = (torch.tensor(x, device=DEVICE) for x in MAPS[id])
    args[1], args[2] = shapes.unsqueeze(1), starts.unsqueeze(1)
    room = torch.full((3, *args[0].shape[1:]), torch.nan, device=DEVICE)  # NaN on both sides
    room[1] = args[0][0]
    args[0] = room[1:2]
    args[3:5] = [x[:1] for x in args[3:5]]
    assert compare_shared(args).isfinite().all()


def test_positions_that_cannot_be_read_in_pairs_are_not_shared():
    args = problem(ATTENTION, channels=32, points=4, queries=9)
    sliced = torch.empty(args[3].numel() + 1, device=DEVICE)[1:].view(args[3].shape)
    for loc, share in ((args[3], 8), (sliced, 0)):
        launch = kernels._launch(*args[:3], loc, args[4], args[0], ATTENTION, 1)
        assert launch.constants["SHARE"] == share


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=["float32", "float16", "bfloat16"])
def test_shared_in_planned_calls(dtype, shared):
    verify(SUMS[0], attention(channels=32, queries=9, points=4)(dtype, DEVICE, 0), "triton")


@pytest.mark.parametrize("queries", [1, 5])
def test_several_queries_to_a_program(queries, monkeypatch):
    tile = tuning.backward_tile
    monkeypatch.setattr(tuning, "backward_tile", lambda *args: {**tile(*args), "BQ": 4})
    for policy in (ATTENTION, AGGREGATION, GEOMETRIC):
        compare(problem(policy, queries=queries), tolerance=3e-6)


@pytest.mark.parametrize(
    "wanted", [(True, False, False), (False, True, False), (False, False, True)]
)
@pytest.mark.parametrize("few", [False, True], ids=["many", "few"])
def test_only_what_is_asked_for_is_computed(wanted, few, monkeypatch):
    monkeypatch.setattr(tuning, "by_list", few_samples if few else lambda *_: False)
    args = problem(ATTENTION)
    grad = torch.ones_like(kernels.sample_sum(*args))
    full = kernels.sample_sum_backward(grad, *args, [True] * 3)
    with mock.patch.object(kernels, "_launch_backward", wraps=kernels._launch_backward) as launched:
        some = kernels.sample_sum_backward(grad, *args, wanted)
    computed = (wanted[0] and not few, *wanted[1:])
    assert {call.args[-1] for call in launched.call_args_list} == ({computed} - {(False,) * 3})
    for a, b, need in zip(some, full, wanted, strict=True):
        assert (a is not None) == need
        if a is not None:
            torch.testing.assert_close(a, b)


def test_a_first_call_on_a_slice_does_not_spoil_those_that_follow():
    """Slices may start where positions cannot be read in pairs."""
    args = problem(ATTENTION)
    args[1:3] = [x.contiguous() for x in args[1:3]]
    whole = torch.empty(args[3].numel() + 1, device=DEVICE)[1:].view(args[3].shape)
    sliced = [*args[:3], whole.copy_(args[3]), *args[4:]]
    plan = kernels.plan_sum(*sliced, (2, 3, 16))
    assert plan(*sliced[:5]) is None
    torch.testing.assert_close(plan(*args[:5]).view(2, 3, 2, 1, 8), kernels.sample_sum(*args))


def test_a_problem_is_planned_once():
    args = problem(ATTENTION)
    launch._remembered.clear()
    for _ in range(3):
        kernels.sample_sum(*args)
    assert len(launch._remembered) == 1
    args[4] = torch.cat([args[4], args[4]], -1)[..., :1]  # other strides
    compare(args, tolerance=3e-6)


@pytest.mark.parametrize("operator", SUMS)
def test_metadata_of_which_some_lie_on_the_host(operator):
    inputs = next(c for c in CASES if c.operator == operator).make(F32, DEVICE, 0)
    names = list(inputs)[1:3]
    expected, _ = run(operator, inputs, "triton")
    for name in names:
        there = {n: inputs[n].to(DEVICE) for n in names} | {name: inputs[name].tolist()}
        assert torch.equal(run(operator, inputs | there, "triton")[0], expected)


@gpu_only
@pytest.mark.parametrize("operator", SUMS)
@pytest.mark.parametrize("way", ["added", "listed", "sorted", "apart"])
@pytest.mark.parametrize("on_host", [0, 1, 2], ids=["device", "mixed", "host"])
def test_no_synchronisation_and_graph_capture(operator, way, on_host, monkeypatch):
    monkeypatch.setattr(tuning, "by_list", few_samples if way == "listed" else lambda *_: False)
    torch.use_deterministic_algorithms(way == "sorted")
    case = next(c for c in CASES if c.operator == operator)
    inputs = case.make(F16, "cuda", 0)
    if way == "apart":
        name = DIFFERENTIABLE[operator][0]
        inputs[name] = turned(inputs[name])
    for i, name in enumerate(list(inputs)[1:3]):
        inputs[name] = inputs[name].tolist() if i < on_host else inputs[name].cuda()
    try:
        _no_synchronisation_and_graph_capture(operator, inputs)
    finally:
        torch.use_deterministic_algorithms(False)


def _no_synchronisation_and_graph_capture(operator, inputs):
    out, grads = run(operator, inputs)
    leaves = [inputs[name].requires_grad_() for name in grads]
    grad = torch.ones_like(out)
    function = getattr(pliant, operator)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        once = torch.autograd.grad(function(**inputs), leaves, grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = torch.autograd.grad(function(**inputs), leaves, grad)
    graph.replay()
    torch.cuda.synchronize()
    for a, b in zip(captured, once, strict=True):
        torch.testing.assert_close(a, b)


@gpu_only
@pytest.mark.parametrize("dtype", [F32, F16], ids=["float32", "float16"])
@pytest.mark.parametrize("policy", [ATTENTION, AGGREGATION, GEOMETRIC], ids=str)
def test_what_repeats_to_the_bit_where_atomic_sums_do_not(policy, dtype):
    args = problem(policy, dtype, groups=4, channels=32, points=4, queries=3000)
    grad = torch.randn_like(kernels.sample_sum(*args))
    needs = [True, policy != GEOMETRIC, True]

    def results():
        return kernels.sample_sum(*args), *kernels.sample_sum_backward(grad, *args, needs)

    first, *others = (results() for _ in range(10))
    for i, (a, *rest) in enumerate(zip(first, *others, strict=True)):
        if i == 1:
            assert dtype == F16 or not all(torch.equal(a, b) for b in rest)
        elif a is not None:
            assert all(torch.equal(a, b) for b in rest)
    torch.use_deterministic_algorithms(True)
    try:
        first, *others = (results() for _ in range(10))
    finally:
        torch.use_deterministic_algorithms(False)
    for a, *rest in zip(first, *others, strict=True):
        assert a is None or all(torch.equal(a, b) for b in rest)


@gpu_only
@pytest.mark.parametrize("way", ["added", "listed", "apart"])
@pytest.mark.parametrize("dtype", [F32, F16], ids=["float32", "float16"])
def test_memory_of_the_backward_is_a_copy_of_the_features_in_float32_at_most(
    dtype, way, monkeypatch
):
    monkeypatch.setattr(tuning, "by_list", lambda *_: way == "listed")
    make = attention(batch=4, levels=((200, 200),), queries=900, heads=8, channels=32, points=4)
    inputs = make(dtype, "cuda", 0)
    if way == "apart":
        inputs["value"] = turned(inputs["value"])
        monkeypatch.setattr(tuning, "apart", lambda value, _: value.stride(4) > 1)
    out, _ = run(SUMS[0], inputs)
    leaves = [inputs[name].requires_grad_() for name in DIFFERENTIABLE[SUMS[0]]]
    out = pliant.multi_scale_deformable_attn(**inputs)
    grad = torch.randn_like(out)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    grads = torch.autograd.grad(out, leaves, grad)
    extra = torch.cuda.max_memory_allocated() - before
    extra -= sum(x.numel() * x.element_size() for x in grads)
    copy = 0 if dtype == F32 and way == "added" else 4 * leaves[0].numel()
    assert extra <= copy + (2 << 20)


@gpu_only
@pytest.mark.parametrize("operator", SUMS)
def test_runs_on_the_current_stream(operator):
    """Forward and backward see what the stream has queued before: inputs that come late."""
    inputs = next(c for c in CASES if c.operator == operator).make(F32, "cuda", 0)
    expected = run(operator, inputs)
    floats = {n: x for n, x in inputs.items() if torch.is_tensor(x) and x.is_floating_point()}
    late = inputs | {name: torch.zeros_like(x) for name, x in floats.items()}
    grad = torch.zeros_like(expected[0])
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        for name, x in floats.items():
            late[name].copy_(x)
        grad.copy_(incoming(expected[0]))
        got = run(operator, late, grad_output=grad)
    stream.synchronize()
    torch.testing.assert_close(got, expected)


def test_another_device_than_the_current_one_becomes_it(monkeypatch):
    class Far:
        def get_device(self):
            return 5

        def data_ptr(self):
            return 256

        def new_empty_strided(self, *form, dtype):
            return "far", *form, dtype

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **how: launched.append((current[-1], args))

    @contextlib.contextmanager
    def device(index):
        current.append(index)
        yield
        current.pop()

    current, launched, far = [4], [], Far()
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[-1], raising=False)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(launch, "INTERPRET", True)
    launch.Launch(Kernel(), (1,), (7,))(far)
    assert launched == [(5, (far, 7))]
    known = launch.Launch(Kernel(), (1, 1, 1), (7,))
    known.compiled[0] = (None, lambda *args: launched.append((current[-1], args[3])), ())
    stream = "_cuda_getCurrentRawStream"
    monkeypatch.setattr(torch._C, stream, lambda index: f"stream of {index}", raising=False)
    known(far)
    assert launched[1:] == [(5, "stream of 5")]
    assert current == [4]
    assert launch.empty(far, (2, 3), (3, 1), F16) == ("far", (2, 3), (3, 1), F16)


@gpu_only
def test_a_launch_that_fails_raises():
    """Through Triton, and of a compiled kernel."""
    x, too_many = torch.empty(4, device="cuda"), (1, 1 << 17)
    tile = {"EARLY": False, **tuning.clear_tile(1)}
    with pytest.raises(RuntimeError, match="CUDA"):
        launch.Launch(kernels.backward.clear, too_many, (4,), **tile)(x)
    known = launch.Launch(kernels.backward.clear, (1,), (4,), **tile)
    known(x)
    known.grid = (*too_many, 1)
    with pytest.raises(RuntimeError, match="CUDA"):
        known(x)
    known.grid = (1, 1, 1)
    known(x.fill_(1))
    assert x.tolist() == [0] * 4


@gpu_only
def test_runs_on_the_device_of_its_tensors():
    """Not the current one, if there is another."""
    args = problem(ATTENTION)
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    there = [a.to(device) if torch.is_tensor(a) else a for a in args]
    for _ in range(2):  # the second of a kernel that is compiled
        out = kernels.sample_sum(*there)
        grads = kernels.sample_sum_backward(out, *there, [True] * 3)
        assert {x.device for x in (out, *grads)} == {device}
    here = kernels.sample_sum(*args)
    expected = (here, *kernels.sample_sum_backward(here, *args, [True] * 3))
    torch.testing.assert_close([x.to(DEVICE) for x in (out, *grads)], list(expected))


def test_the_public_function_reaches_these_kernels():
    inputs = next(c for c in CASES if c.operator == SUMS[0]).make(F32, DEVICE, 0)
    with ops.record() as calls:
        run(SUMS[0], inputs, "triton")
    assert calls == [("sample_sum", "triton"), ("sample_sum_backward", "triton")]
