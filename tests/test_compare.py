"""Every guard of the comparison, of the poison and of the case helpers is seen to fail."""

import pytest
import torch

import pliant
from pliant.testing import (
    CASES,
    WORKLOADS,
    check,
    expect,
    incoming,
    run,
    running,
    verify,
    workload,
    worst,
)
from pliant.testing.cases import OPERATORS, away_from_kinks, expanded, strided

EXPECTED = torch.tensor([[1.0, -2.0, 0.0], [4.0, 8.0, -16.0]], dtype=torch.float64)
HALVES = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALVES])
def test_equal_passes(dtype):
    assert check(EXPECTED.to(dtype), EXPECTED, dtype=dtype) == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_budget_is_sixteen_roundings_of_the_magnitude(dtype):
    magnitude = torch.full_like(EXPECTED, 64.0)
    step = 64 * torch.finfo(dtype).eps
    for roundings, passes in [(15, True), (17, False)]:
        actual = EXPECTED.to(dtype, copy=True)
        actual[0, 0] += roundings * step
        if passes:
            share = check(actual, EXPECTED, magnitude=magnitude)
            assert 0.9 < share <= 1
        else:
            with pytest.raises(AssertionError, match=r"element \[0, 0\]"):
                check(actual, EXPECTED, magnitude=magnitude)


def test_message_names_the_worst_element():
    actual = EXPECTED.float()
    actual[0, 1] += 0.25
    actual[1, 2] += 0.5
    with pytest.raises(AssertionError) as caught:
        check(actual, EXPECTED, what="grad_value")
    assert str(caught.value) == (
        "grad_value: element [1, 2] is -15.5, expected -16.0: the error 5.000e-01 is 512 times "
        "the budget 9.775e-04 of torch.float32"
    )


def test_each_element_has_its_own_magnitude():
    magnitude = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1e6, 1.0]], dtype=torch.float64)
    actual = EXPECTED.float()
    actual[1, 1] += 0.5
    check(actual, EXPECTED, magnitude=magnitude)
    actual = EXPECTED.float()
    actual[1, 0] += 0.5
    with pytest.raises(AssertionError, match=r"element \[1, 0\]"):
        check(actual, EXPECTED, magnitude=magnitude)


def test_magnitude_zero_means_exactly_zero():
    expected = torch.zeros(3, dtype=torch.float64)
    check(torch.zeros(3), expected, magnitude=expected)
    with pytest.raises(AssertionError, match="element"):
        check(torch.tensor([0.0, 1e-30, 0.0]), expected, magnitude=expected)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
def test_a_baseline_allows_twice_its_error_and_one_rounding(dtype):
    expected = torch.tensor([1.0, 3.0], dtype=torch.float64)
    eps = torch.finfo(dtype).eps
    baseline = torch.tensor([1.0 + 2 * eps, 3.0], dtype=dtype)
    check(torch.tensor([1.0 + 4 * eps, 3.0], dtype=dtype), expected, baseline)
    check(torch.tensor([1.0, 3.0 + 4 * eps], dtype=dtype), expected, baseline)
    with pytest.raises(AssertionError, match=r"element \[0\]"):
        check(torch.tensor([1.0 + 5 * eps, 3.0], dtype=dtype), expected, baseline)
    with pytest.raises(AssertionError, match=r"element \[1\]"):
        check(torch.tensor([1.0, 3.0 + 8 * eps], dtype=dtype), expected, baseline)


def test_only_gradients_in_half_precision_are_measured_by_a_baseline(monkeypatch):
    """Those of float32 positions are not rounded to it, though the features are."""
    given, compare = {}, running.check

    def noted(got, expected, baseline, *, what, **options):
        given[what] = (got.dtype, baseline)
        return compare(got, expected, baseline, what=what, **options)

    monkeypatch.setattr(running, "check", noted)
    case = next(c for c in CASES if str(c) == "deform_conv2d-positions-float32")
    verify(case.operator, case.make(torch.float16, "cpu", 0))
    assert {dtype for dtype, _ in given.values()} == {torch.float16, torch.float32}
    for dtype, baseline in given.values():
        assert (baseline is not None) == (dtype == torch.float16)


@pytest.mark.parametrize("dtype", HALVES)
def test_half_without_a_baseline_is_rounded_once(dtype):
    expected = torch.tensor([1.0 / 3.0], dtype=torch.float64)
    rounded = expected.to(dtype)
    check(rounded, expected, magnitude=expected)
    neighbour = (rounded.double() * (1 + torch.finfo(dtype).eps)).to(dtype)
    with pytest.raises(AssertionError, match=r"element \[0\]"):
        check(neighbour, expected, magnitude=expected)


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_a_number_that_should_be_finite(wrong):
    actual = EXPECTED.float()
    actual[1, 0] = wrong
    with pytest.raises(AssertionError, match=r"element \[1, 0\]"):
        check(actual, EXPECTED, magnitude=torch.full_like(EXPECTED, torch.inf))


@pytest.mark.parametrize("right", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("wrong", [0.0, torch.nan, torch.inf, -torch.inf])
def test_a_number_that_should_not_be_finite(right, wrong):
    expected = EXPECTED.clone()
    expected[0, 2] = right
    actual = expected.float()
    assert check(actual, expected) == 0
    actual[0, 2] = wrong
    if str(wrong) != str(right):
        with pytest.raises(AssertionError, match=r"element \[0, 2\]"):
            check(actual, expected)


def test_half_overflows_to_infinity():
    expected = torch.tensor([1e6], dtype=torch.float64)
    assert check(torch.tensor([torch.inf], dtype=torch.float16), expected) == 0
    with pytest.raises(AssertionError, match="65504"):
        check(torch.tensor([65504.0], dtype=torch.float16), expected)


def test_shape_dtype_and_baseline_must_match():
    with pytest.raises(AssertionError, match=r"shape \[3, 2\], expected \[2, 3\]"):
        check(EXPECTED.T, EXPECTED)
    with pytest.raises(AssertionError, match=r"shape \[1, 3\], expected \[2, 3\]"):
        check(EXPECTED[:1], EXPECTED)
    with pytest.raises(AssertionError, match=r"dtype torch.float32, expected torch.float16"):
        check(EXPECTED.float(), EXPECTED, dtype=torch.float16)
    with pytest.raises(AssertionError, match=r"the baseline is torch.float32"):
        check(EXPECTED.half(), EXPECTED, EXPECTED.float())
    with pytest.raises(AssertionError, match=r"baseline has shape \[3\]"):
        check(EXPECTED.half(), EXPECTED, EXPECTED[0].half())
    with pytest.raises(AssertionError, match=r"magnitude has shape \[3\]"):
        check(EXPECTED, EXPECTED, magnitude=EXPECTED[0])
    with pytest.raises(TypeError, match=r"expected must be float64, got torch\.float32"):
        check(EXPECTED.float(), EXPECTED.float())
    with pytest.raises(AssertionError, match=r"shape \[0, 2\], expected \[0, 3\]"):
        check(torch.zeros(0, 2), torch.zeros(0, 3, dtype=torch.float64))


def test_empty_results_use_no_budget():
    assert worst(torch.zeros(0, 3), torch.zeros(0, 3, dtype=torch.float64)).share == 0


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_wrong_operator_is_noticed(operator):
    """A small fault in one element of the features shows in the result, and one in the incoming
    gradient in every gradient."""
    case = next(c for c in CASES if c.operator == operator and c.id == "plain")
    inputs = case.make(torch.float32, "cpu", 0)
    expected = expect(operator, inputs)
    name = next(iter(expected.grads))
    faulty = inputs[name].clone()
    faulty.view(-1)[:16] *= 1.0001
    out, _ = run(operator, {**inputs, name: faulty}, "composite")
    with pytest.raises(AssertionError, match="element"):
        check(out, expected.out, magnitude=expected.out_magnitude)
    _, grads = run(operator, inputs, "composite", grad_output=incoming(out) * 1.0001)
    for name, gradient in grads.items():
        with pytest.raises(AssertionError, match="element"):
            check(gradient, expected.grads[name], magnitude=expected.grad_magnitudes[name])


def test_away_from_kinks():
    generator = torch.Generator().manual_seed(0)
    sizes = [32, 16, 7]
    positions = torch.rand(500, generator=generator, dtype=torch.float64)
    moved = away_from_kinks(positions, sizes, generator)
    fractions = (moved.unsqueeze(-1) * torch.tensor(sizes) - 0.5) % 1
    assert ((fractions >= 0.1) & (fractions <= 0.9)).all()
    assert (moved != positions).any()
    with pytest.raises(ValueError, match=r"no position keeps 0\.6 away"):
        away_from_kinks(positions, sizes, generator, margin=0.6)


def test_case_ids_are_unique():
    assert len({str(case) for case in CASES}) == len(CASES)


def test_cases_are_reproducible_and_depend_on_the_seed():
    for case in CASES:
        first, again, other = (case.make(torch.float32, "cpu", seed) for seed in (0, 0, 1))
        floats = [n for n, t in first.items() if isinstance(t, torch.Tensor) and t.numel() > 1
                  and t.is_floating_point()]  # fmt: skip
        for name in floats:
            assert torch.equal(first[name].nan_to_num(), again[name].nan_to_num())
        if floats:
            assert any(not torch.equal(first[name], other[name]) for name in floats)


def test_strided_and_expanded_are_what_they_say():
    tensor = torch.randn(3, 4, 5)
    assert torch.equal(strided(tensor), tensor)
    assert not strided(tensor).is_contiguous()
    assert expanded(tensor).stride(0) == 0
    assert expanded(tensor).shape == tensor.shape


def test_projections_are_seen_by_about_one_camera_in_five():
    loc = workload("sparse4d-b1")["sample_locations"]
    seen = ((loc > 0) & (loc < 1)).all(-1)
    assert 0.15 < seen.float().mean() < 0.25
    assert seen.any(-1).float().mean() > 0.9


@pytest.mark.parametrize("id", ["rtdetr-dec-b1", "msda-doc", "da-doc", "dcn-doc"])
def test_workloads_fit_their_operators(id):
    inputs = workload(id, torch.float16)
    operator = WORKLOADS[id].operator
    out = getattr(pliant, operator)(**inputs, impl="reference")
    assert out.dtype == torch.float16
    assert out.isfinite().all()


def test_memory_is_poisoned():
    like = torch.zeros(2, 3)
    for made in (
        torch.empty(2, 3),
        torch.empty((2, 3), dtype=torch.float16),
        torch.empty_like(like),
        torch.empty_strided((2, 3), (1, 2)),
        like.new_empty(2, 3),
        like.new_empty_strided((2, 3), (1, 2)),
        torch.empty(2, requires_grad=True),
    ):
        assert made.isnan().all()
    assert (torch.empty(3, dtype=torch.int32) == torch.iinfo(torch.int32).max).all()
    assert torch.empty(3, dtype=torch.bool).all()


def test_poison_leaves_traced_programs_alone():
    def program(tensor):
        return torch.empty_like(tensor).fill_(2.0) + tensor

    compiled = torch.compile(program, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 3.0))
    with torch._subclasses.FakeTensorMode():
        assert torch.empty(3).shape == (3,)
