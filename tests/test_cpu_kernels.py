"""The CPU kernels of sample_sum: what the named cases are too small to reach.

Every instruction set, policy, dtype and layout; blocks, packing, bands and slabs and their
remainders; any number of threads; memory; addresses.
"""

from contextlib import contextmanager
from itertools import product
from pathlib import Path

import pytest
import torch

from pliant.kernels import cpu
from pliant.kernels.cpu import launch
from pliant.kernels.cpu.library import ISAS, library
from pliant.sampling import ops, reference
from pliant.sampling.problem import POLICIES
from pliant.testing import CASES, check, verify
from pliant.testing.cases import strided

pytestmark = pytest.mark.skipif(bool(cpu.missing()), reason="; ".join(cpu.missing()))

MiB = 2**20
NEEDS = (True, True, True)
NAMES = ("result", "gradient of value", "gradient of loc", "gradient of weight")
HALVES = (torch.float16, torch.bfloat16)
SUMS = [case for case in CASES if not case.operator.startswith("deform_co")]
AVAILABLE = [
    isa
    for i, isa in enumerate(ISAS)
    if library().handle and library().handle.pliant_isas() >> i & 1
]
POLICY_IDS = ["-".join(policy) for policy in POLICIES]


@pytest.fixture(params=AVAILABLE)
def isa(request, monkeypatch):
    """Every instruction set of this machine."""
    forced = library()._replace(isa=ISAS.index(request.param))
    monkeypatch.setattr(launch, "library", lambda: forced)
    return request.param


@pytest.fixture(params=POLICIES, ids=POLICY_IDS)
def policy(request):
    return request.param


@contextmanager
def threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def problem(policy, *, n=2, q=7, g=2, k=2, d=5, v=2, p=3, r=2, side=6, dtype=torch.float32):
    """Operands in the canonical form; a fifth of the positions is outside, none on a kink."""
    shapes = torch.randint(1, side + 1, (v, r, 2))
    areas = shapes.prod(-1).flatten()
    starts = (areas.cumsum(0) - areas).view(v, r)
    loc = torch.rand(n, q, g, v, p, 2, dtype=torch.float64) * 1.25 - 0.125
    if policy.position == "pixel":
        loc = loc * side
    value = torch.randn(n, int(areas.sum()), g, k, d, dtype=torch.float64)
    weight = torch.randn(n, q, g, v, p, r, k, dtype=torch.float64)
    return [value.to(dtype), shapes, starts, loc.to(dtype), weight.to(dtype)]


def run(backend, operands, policy, needs=NEEDS):
    """Result and gradients."""
    out = backend.sample_sum(*operands, policy)
    grad = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    return out, *backend.sample_sum_backward(grad.to(out.dtype), *operands, policy, needs)


def exact(operands, policy):
    """What `run` must give: the reference in float64 for the rounded operands."""
    doubles = [x.double() if x.is_floating_point() else x for x in operands]
    out = reference.sample_sum(*doubles, policy)
    grad = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    grad = grad.to(operands[0].dtype).double()
    return out, *reference.sample_sum_backward(grad, *doubles, policy, NEEDS)


def agree(operands, policy):
    got, wanted = run(cpu, operands, policy), exact(operands, policy)
    half = operands[0].dtype in HALVES
    same = run(reference, operands, policy) if half else (None,) * 4
    for name, one, other, baseline in zip(NAMES, got, wanted, same, strict=True):
        like = operands[{"result": 0, NAMES[1]: 0, NAMES[2]: 3, NAMES[3]: 4}[name]]
        baseline = baseline if one.dtype in HALVES else None
        check(
            one,
            other,
            baseline,
            working=torch.float32 if half else None,
            dtype=like.dtype,
            what=name,
        )


# --- right on every instruction set ---------------------------------------------------------------


@pytest.mark.parametrize("case", SUMS, ids=str)
def test_named_cases_on_every_instruction_set(case, isa):
    for dtype in (torch.float32, torch.bfloat16):
        verify(case.operator, case.make(dtype, "cpu", 0), "cpu")


# A part has 128 samples, a block of queries at most 128 / P queries and 16 KiB of sums.
SIZES = {
    "plain": {},
    "one-of-each": {"n": 1, "q": 1, "g": 1, "k": 1, "d": 1, "v": 1, "p": 1, "r": 1},
    "channels-3": {"d": 3},
    "channels-16": {"d": 16},
    "channels-37": {"d": 37, "k": 1, "r": 1},
    "channels-64": {"d": 64, "k": 1},
    "channels-147": {"d": 147, "n": 1, "g": 1},
    "channels-256": {"d": 256, "n": 1, "g": 1, "k": 1},
    "channels-1100": {"d": 1100, "n": 1, "g": 1, "k": 1, "q": 3},  # sums of a query over 4 KiB
    "groups-8": {"k": 8, "g": 1, "d": 32},
    "groups-of-1": {"k": 40, "g": 1, "d": 1},
    "points-128": {"p": 128, "q": 3, "v": 1},
    "points-300": {"p": 300, "q": 2, "v": 1, "n": 1},
    "blocks": {"q": 700, "n": 1, "k": 1, "r": 1, "d": 8, "p": 4},
    "few-samples": {"q": 2, "p": 1, "side": 40, "n": 1, "k": 1, "r": 1},
    "scattered": {"q": 70, "n": 1, "k": 1, "r": 1, "d": 8, "p": 4, "side": 60},
    "many-slices": {"n": 3, "g": 5, "q": 60, "k": 1, "r": 1},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALVES], ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_every_size_and_policy_on_every_instruction_set(size, dtype, policy, isa):
    agree(problem(policy, **SIZES[size], dtype=dtype), policy)


@pytest.mark.parametrize("zero", ["n", "q", "g", "k", "d", "p", "v", "r"])
def test_empty_sizes(zero, policy):
    operands = problem(policy, **{zero: 0})
    for name, one, other in zip(
        NAMES, run(cpu, operands, policy), exact(operands, policy), strict=True
    ):
        assert torch.equal(one.double(), other), name


DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("dtypes", list(product(DTYPES, DTYPES, DTYPES)), ids=str)
def test_mixed_dtypes(dtypes):
    policy = POLICIES[0]
    operands = problem(policy)
    for i, dtype in zip((0, 3, 4), dtypes, strict=True):
        operands[i] = operands[i].to(dtype)
    for name, one, other in zip(
        NAMES, run(cpu, operands, policy), run(reference, operands, policy), strict=True
    ):
        assert one.dtype == other.dtype, name
        # Both accumulate in float32 at least and round once.
        tolerance = max(2.0**-14, 2 * torch.finfo(one.dtype).eps)
        torch.testing.assert_close(
            one, other, rtol=tolerance, atol=tolerance * other.abs().max().item()
        )


def test_positions_in_float64_are_computed_in_float64_for_float32_features(isa):
    """Between two pixels of a wide map float32 has no third position."""
    width = 2**24
    value = torch.zeros(1, width, 1, 1, 1)
    value[0, width - 3] = 1.0
    loc = torch.tensor([(width - 3 + 0.5 + 0.25) / width, 0.5], dtype=torch.float64)
    operands = [
        value, torch.tensor([[[1, width]]]), torch.tensor([[0]]), loc.view(1, 1, 1, 1, 1, 2),
        torch.ones(1, 1, 1, 1, 1, 1, 1),
    ]  # fmt: skip
    assert cpu.sample_sum(*operands, POLICIES[0]).item() == pytest.approx(0.75, abs=1e-6)


def test_half_features_are_summed_in_float32_and_rounded_once():
    """2048 + 1 is 2048 in float16: sums of halves would stand still."""
    policy = POLICIES[3]
    value = torch.ones(1, 1, 1, 1, 4, dtype=torch.float16)
    value[..., 0] = 2048.0
    loc, weight = torch.zeros(1, 1, 1, 1, 3000, 2), torch.ones(1, 1, 1, 1, 3000, 1, 1)
    metadata = torch.tensor([[[1, 1]]]), torch.tensor([[0]])
    out = cpu.sample_sum(value, *metadata, loc, weight, policy)
    assert out.flatten().tolist() == [float("inf"), 3000.0, 3000.0, 3000.0]
    grad = torch.ones_like(out)
    grad_value, _, _ = cpu.sample_sum_backward(grad, value, *metadata, loc, weight, policy, NEEDS)
    assert (grad_value == 3000).all()


def test_location_gradients_of_many_scales_and_groups_are_summed_exactly_enough():
    """Within 2**-11 absolute where they reach the hundreds. The positions are in float64: what
    float32 leaves open of a position on a wide map is not the sum's fault."""
    policy = POLICIES[1]
    operands = problem(policy, n=1, q=40, g=1, k=8, d=32, v=1, p=13, r=4, side=200)
    operands[3], operands[4] = operands[3].double(), operands[4] / 16
    _, _, got, _ = run(cpu, operands, policy)
    _, _, wanted, _ = exact(operands, policy)
    assert wanted.abs().max() > 500
    assert (got - wanted).abs().max() < 2**-11


# --- layouts --------------------------------------------------------------------------------------

LAYOUTS = {
    "strided": strided,
    "channels-apart": lambda x: x.transpose(-1, 1).contiguous().transpose(-1, 1),
    "batch-last": lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0),
    "shifted": lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALVES], ids=str)
def test_any_layout_gives_the_bits_of_the_contiguous_one(layout, dtype, policy):
    operands = problem(policy, d=37, dtype=dtype)
    expected = run(cpu, operands, policy)
    changed = [LAYOUTS[layout](x) if x.is_floating_point() else strided(x) for x in operands]
    got = run(cpu, changed, policy)
    for name, one, other in zip(NAMES, got, expected, strict=True):
        assert torch.equal(one, other), name
    for one, x in zip(got[1:], (changed[i] for i in (0, 3, 4)), strict=True):
        assert one.stride() == torch.empty_like(x).stride()


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_features_whose_rows_overlap(axis, policy):
    """A sliding window over one signal, along batch, rows or groups: the gradient of such features
    has their channels nowhere side by side."""
    operands = problem(policy, k=1)
    size = operands[0].shape
    strides = [7 * size[1] * size[2], 7 * size[2], 7, 0, 1]
    strides[axis] = 1
    signal = torch.randn(sum((n - 1) * s for n, s in zip(size, strides, strict=True)) + 1)
    operands[0] = signal.as_strided(size, strides)
    agree(operands, policy)


def test_expanded_operands_and_gradient(policy):
    operands = problem(policy, n=1, g=1)
    wide = [operands[0].expand(3, -1, 4, -1, -1), *operands[1:3]]
    wide += [operands[3].expand(3, -1, 4, -1, -1, -1), operands[4].expand(3, -1, 4, -1, -1, -1, -1)]
    full = [x.contiguous() for x in wide]
    grad = torch.ones(()).expand(3, 7, 4, 2, 5)
    for one, other in zip(
        cpu.sample_sum_backward(grad, *wide, policy, NEEDS),
        cpu.sample_sum_backward(grad.contiguous(), *full, policy, NEEDS),
        strict=True,
    ):
        assert torch.equal(one, other)
    assert torch.equal(cpu.sample_sum(*wide, policy), cpu.sample_sum(*full, policy))


def test_int32_metadata(policy):
    operands = problem(policy)
    narrow = [operands[0], operands[1].int(), operands[2].int(), *operands[3:]]
    for one, other in zip(run(cpu, narrow, policy), run(cpu, operands, policy), strict=True):
        assert torch.equal(one, other)


def test_maps_that_share_rows_and_rows_of_no_map(policy):
    """Two maps overlap, two are the same, one is empty; rows before, between and behind them."""
    value = torch.randn(2, 60, 2, 3, 4)
    shapes = torch.tensor([[[3, 4], [2, 5]], [[3, 4], [0, 7]], [[4, 2], [4, 2]]])
    starts = torch.tensor([[5, 12], [30, 60], [45, 45]])
    _, _, _, loc, weight = problem(policy, v=3, k=3, q=90, side=4)
    agree([value, shapes, starts, loc, weight], policy)


# --- threads --------------------------------------------------------------------------------------

WORK = {
    "attention": (POLICIES[0], {"g": 3, "k": 1, "r": 1, "q": 300, "p": 4, "d": 33, "side": 20}),
    "few-samples": (POLICIES[0], {"k": 1, "r": 1, "q": 9, "p": 2, "side": 40}),
    "scattered": (POLICIES[0], {"k": 1, "r": 1, "q": 300, "p": 4, "d": 33, "side": 120}),
    "aggregation": (POLICIES[1], {"n": 1, "g": 1, "k": 8, "q": 100, "p": 13, "d": 32, "side": 20}),
    "one-map": (
        POLICIES[1],
        {"n": 1, "g": 1, "k": 1, "v": 1, "r": 1, "q": 300, "d": 64, "side": 9},
    ),
    "geometric": (POLICIES[3], {"k": 1, "r": 1, "q": 300, "p": 15, "d": 64, "side": 20}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("work", WORK)
def test_same_bits_on_every_run_and_for_any_number_of_threads(work, dtype):
    policy, sizes = WORK[work]
    operands = problem(policy, **sizes, dtype=dtype)
    with threads(1):
        expected = run(cpu, operands, policy)
    for count in (1, 2, 3, 4, 4, 32):
        with threads(count):
            for name, one, other in zip(NAMES, run(cpu, operands, policy), expected, strict=True):
                assert torch.equal(one, other), f"{name} with {count} threads"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gradient_too_large_for_caches_has_the_same_bits(dtype, isa):
    """It is written past them; those of its parts, each on its own, are not."""
    policy, groups = POLICIES[0], 16 // dtype.itemsize
    value = torch.randn(1, 128 * 132, groups, 1, 128).to(dtype)
    shapes, starts = torch.tensor([[[128, 132]]]), torch.tensor([[0]])
    loc, weight = torch.rand(1, 5000, groups, 1, 2, 2), torch.rand(1, 5000, groups, 1, 2, 1, 1)
    grad = torch.randn(1, 5000, groups, 1, 128).to(dtype)
    assert value.nbytes > 32 * MiB

    def backward(*tensors):
        grad, value, loc, weight = (x.contiguous() for x in tensors)
        needs = (True, False, False)
        return cpu.sample_sum_backward(grad, value, shapes, starts, loc, weight, policy, needs)[0]

    whole = backward(grad, value, loc, weight)
    for g in range(groups):
        part = (x[:, :, g : g + 1] for x in (grad, value, loc, weight))
        assert torch.equal(whole[:, :, g : g + 1], backward(*part))


# --- what is asked for ----------------------------------------------------------------------------


@pytest.mark.parametrize("needs", list(product((False, True), repeat=3)), ids=str)
def test_gradients_that_nobody_asked_for_are_not_given_and_change_nothing(needs, policy):
    operands = problem(policy)
    full = run(cpu, operands, policy)[1:]
    for need, one, other in zip(needs, run(cpu, operands, policy, needs)[1:], full, strict=True):
        assert torch.equal(one, other) if need else one is None


def test_gradients_that_nobody_asked_for_are_not_computed(monkeypatch):
    """The library is given nowhere to write them."""
    calls = []

    class Spy:
        def pack(self, *call):
            calls.append(call)
            return launch.struct.pack("3q", *call)

    monkeypatch.setattr(launch, "_GRAD", Spy())
    for needs in product((False, True), repeat=3):
        run(cpu, problem(POLICIES[0]), POLICIES[0], needs)
        assert [pointer != 0 for pointer in calls[-1]] == list(needs)


def test_these_kernels_run():
    policy = POLICIES[0]
    value, shapes, starts, loc, weight = problem(policy)
    value.requires_grad_()
    with ops.record() as calls:
        out = torch.ops.pliant.sample_sum(value, shapes, starts, loc, weight, *policy, "cpu")
        out.sum().backward()
    assert calls == [("sample_sum", "cpu"), ("sample_sum_backward", "cpu")]


# --- memory ---------------------------------------------------------------------------------------


def peak_bytes(function):
    """How much resident memory `function` needs at its peak beyond what is there now."""

    def status(field):
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith(field))) * 1024

    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pytest.skip("the peak of resident memory cannot be reset here")
    before = status("VmRSS")
    result = function()
    return status("VmHWM") - before, result


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_extra_memory_is_at_most_64_mib_or_a_copy_of_the_features(dtype):
    """Features of 100 MiB in one map, which is packed in both directions."""
    policy = POLICIES[0]
    d = 50 * MiB // 2 // 40 // 4000 * (4 // dtype.itemsize) * 2
    value = torch.randn(1, 40 * 100, 40, 1, d).to(dtype)
    shapes, starts = torch.tensor([[[40, 100]]]), torch.tensor([[0]])
    loc, weight = torch.rand(1, 5000, 40, 1, 1, 2), torch.rand(1, 5000, 40, 1, 1, 1, 1)
    with threads(2):
        run(cpu, problem(policy), policy)  # the threads themselves take memory
        grad = torch.randn(1, 5000, 40, 1, d).to(dtype)
        extra, out = peak_bytes(lambda: cpu.sample_sum(value, shapes, starts, loc, weight, policy))
        assert extra - out.nbytes < 66 * MiB
        extra, (grad_value, _, _) = peak_bytes(
            lambda: cpu.sample_sum_backward(
                grad, value, shapes, starts, loc, weight, policy, (True, False, False)
            )
        )
        assert extra - grad_value.nbytes < 66 * MiB
        # The measure can see a copy of the features.
        extra, _ = peak_bytes(lambda: value.clone())
        assert extra > 0.9 * value.nbytes


# --- what must not happen -------------------------------------------------------------------------

BAD = {
    "negative-start": ([[-1, 3]], [[[2, 2], [2, 2]]], r"map \[0, 0\] .*starts at row -1"),
    "negative-size": ([[0, 3]], [[[2, 2], [2, -2]]], r"map \[0, 1\] .*\(2, -2\).*must be >= 0"),
    "past-the-end": (
        [[0, 7]],
        [[[2, 2], [2, 2]]],
        r"map \[0, 1\] .*row 7 must lie within the 10 rows",
    ),
    "huge-start": ([[2**63 - 1, 0]], [[[2, 2], [2, 2]]], r"map \[0, 0\] .*must lie within"),
    "huge-sides": ([[0, 0]], [[[2**62, 2**62], [2, 2]]], r"map \[0, 0\] .*must lie within"),
    "huge-empty": ([[0, 11]], [[[2, 2], [0, 2]]], r"map \[0, 1\] .*must lie within"),
}


@pytest.mark.parametrize("bad", BAD)
def test_metadata_that_lie_are_refused(bad, policy):
    starts, shapes, message = BAD[bad]
    operands = problem(policy, v=1)
    operands[:3] = [torch.randn(2, 10, 2, 2, 5), torch.tensor(shapes), torch.tensor(starts)]
    grad = torch.randn(2, 7, 2, 2, 5)
    with pytest.raises(ValueError, match=message):
        cpu.sample_sum(*operands, policy)
    with pytest.raises(ValueError, match=message):
        cpu.sample_sum_backward(grad, *operands, policy, NEEDS)


def test_sides_past_the_limit_are_refused():
    operands = problem(POLICIES[0], n=1, g=1, k=1, v=1, r=1)
    operands[0] = torch.zeros(1, 1, 1, 1, 5).expand(1, 2**30 + 1, 1, 1, 5)
    operands[1] = torch.tensor([[[1, 2**30 + 1]]])
    with pytest.raises(NotImplementedError, match=r"at most 2\*\*30"):
        cpu.sample_sum(*operands, POLICIES[0])


@pytest.mark.parametrize("side", [2**30 + 1, 2**31 - 1, 2**40])
def test_sides_of_an_empty_map_have_no_limit(side, policy):
    """Beside another map, and as if it were not there."""
    operands = problem(policy, n=1, g=1, k=1, v=1, r=2)
    operands[:3] = [
        torch.randn(1, 30, 1, 1, 5),
        torch.tensor([[[5, 6], [0, side]]]),
        torch.zeros(1, 2, dtype=torch.int64),
    ]
    small = [*operands[:1], torch.tensor([[[5, 6], [0, 0]]]), *operands[2:]]
    out = cpu.sample_sum(*operands, policy)
    assert torch.equal(out, cpu.sample_sum(*small, policy))
    grads = cpu.sample_sum_backward(out, *operands, policy, NEEDS)
    for a, b in zip(grads, cpu.sample_sum_backward(out, *small, policy, NEEDS), strict=True):
        assert torch.equal(a, b)


OUTSIDE = [
    torch.nan, torch.inf, -torch.inf, 1e30, -1e30, 3.4e38, 2.0**31, -(2.0**31), 2.0**63, -(2.0**63),
]  # fmt: skip
TINY = [1e-45, -1e-45, 1e-38, -1e-38, 0.0, -0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_hostile_positions(dtype, policy, isa):
    """Each number is the position of a sample of its own, in x, in y and in both. A sample that
    does not count is weighted with infinity, and gives zeros all the same."""
    numbers = torch.tensor([*OUTSIDE, *TINY], dtype=dtype)
    value, shapes, starts = torch.randn(1, 30, 1, 1, 19, dtype=dtype), [[[5, 6]]], [[0]]
    metadata = torch.tensor(shapes), torch.tensor(starts)
    for hostile in ("x", "y", "both"):
        loc = torch.full((1, len(numbers), 1, 1, 1, 2), 0.4, dtype=dtype)
        if hostile != "y":
            loc[..., 0] = numbers.view(1, -1, 1, 1, 1)
        if hostile != "x":
            loc[..., 1] = numbers.view(1, -1, 1, 1, 1)
        counts = reference.sample_sum(
            torch.ones_like(value), *metadata, loc, torch.ones(*loc.shape[:-1], 1, 1), policy
        )[..., 0]  # [N, Q, G, K]
        skipped = counts.view(1, -1, 1, 1, 1, 1, 1) == 0
        weight = torch.where(skipped, torch.inf, torch.ones(()).to(dtype))
        operands = [value, *metadata, loc, weight]
        agree(operands, policy)
        out, _, grad_loc, grad_weight = run(cpu, operands, policy)
        assert (out[skipped.view(1, -1, 1, 1)] == 0).all()
        assert (grad_loc[skipped.view(1, -1, 1, 1, 1)] == 0).all()
        assert (grad_weight[skipped] == 0).all()


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_all_nan_and_all_inf_give_zeros(number, isa):
    for policy in POLICIES[:3]:
        operands = problem(policy, q=40, d=37)
        for i in (0, 3, 4):
            operands[i] = torch.full_like(operands[i], number)
        out = cpu.sample_sum(*operands, policy)
        grads = cpu.sample_sum_backward(torch.full_like(out, number), *operands, policy, NEEDS)
        for x in (out, *grads):
            assert torch.equal(x, torch.zeros_like(x))


def test_an_infinity_outside_of_the_corners_is_not_read(isa):
    """The sample sits in the upper left corner of a map whose other pixels, and whose neighbours in
    storage, are infinite; and its own weight is."""
    value = torch.full((1, 40, 1, 1, 19), torch.inf)
    value[0, 10] = 2.0
    loc = torch.tensor([0.25 / 5, 0.25 / 4]).view(1, 1, 1, 1, 1, 2)  # pixel (-0.25, -0.25)
    weight = torch.full((1, 1, 1, 1, 1, 1, 1), 3.0)
    metadata = torch.tensor([[[4, 5]]]), torch.tensor([[10]])
    out = cpu.sample_sum(value, *metadata, loc, weight, POLICIES[0])
    torch.testing.assert_close(out, torch.full_like(out, 3 * 2 * 0.75**2))
    grads = cpu.sample_sum_backward(
        torch.ones_like(out), value, *metadata, loc, weight, POLICIES[0], NEEDS
    )
    assert all(g.isfinite().all() for g in grads)
    assert grads[0].count_nonzero() == 19
    weight = torch.full_like(weight, torch.inf)
    assert (cpu.sample_sum(value, *metadata, loc, weight, POLICIES[0]) == torch.inf).all()
    grads = cpu.sample_sum_backward(
        torch.ones_like(out), value, *metadata, loc, weight, POLICIES[0], NEEDS
    )
    assert not grads[0].isnan().any()


@pytest.mark.parametrize("far", ["value", "loc", "weight", "grad"])
def test_elements_past_two_to_the_31_are_addressed(far):
    """The second of two slices lies 2**31 elements behind the first; what lies between is free."""
    numpy = pytest.importorskip("numpy")
    policy = POLICIES[0]
    operands = problem(policy, dtype=torch.float16)
    for i in (3, 4):
        operands[i] = operands[i].float()
    out = cpu.sample_sum(*operands, policy)
    grad = torch.randn_like(out)
    expected = cpu.sample_sum_backward(grad, *operands, policy, NEEDS)

    def apart(near):
        kind = {torch.float16: numpy.float16, torch.float32: numpy.float32}[near.dtype]
        storage = torch.from_numpy(numpy.zeros(2**31 + near[0].numel(), dtype=kind))
        return storage.as_strided(near.shape, (2**31, *near[0].stride())).copy_(near)

    if far == "grad":
        grad = apart(grad)
    else:
        at = {"value": 0, "loc": 3, "weight": 4}[far]
        operands[at] = apart(operands[at])
    assert torch.equal(cpu.sample_sum(*operands, policy), out)
    for one, other in zip(
        cpu.sample_sum_backward(grad, *operands, policy, NEEDS), expected, strict=True
    ):
        assert torch.equal(one, other)


def test_rows_past_two_to_the_31_elements_are_addressed(policy):
    """The rows of one map lie 2**30 elements apart."""
    numpy = pytest.importorskip("numpy")
    near = torch.randn(1, 6, 1, 1, 4).half()
    storage = torch.from_numpy(numpy.zeros(5 * 2**30 + 4, dtype=numpy.float16))
    far = storage.as_strided(near.shape, (0, 2**30, 0, 0, 1)).copy_(near)
    _, _, _, loc, weight = problem(policy, n=1, g=1, k=1, v=1, r=1, side=3)
    rest = torch.tensor([[[3, 2]]]), torch.tensor([[0]]), loc, weight
    for one, other in zip(
        run(cpu, [far, *rest], policy), run(cpu, [near, *rest], policy), strict=True
    ):
        assert torch.equal(one, other)
