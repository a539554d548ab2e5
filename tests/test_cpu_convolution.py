"""The CPU kernels of the deformable convolution: what the named cases are too small to reach.

Tiles, slabs of channels, panels of the products and their remainders; every instruction set; any
number of threads; memory.
"""

import subprocess
import sys
from contextlib import contextmanager
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch

import pliant
from pliant.kernels import cpu
from pliant.kernels.cpu import convolution as launcher
from pliant.kernels.cpu.library import ISAS, library
from pliant.sampling import ops, reference
from pliant.testing import check, incoming
from pliant.testing.cases import convolution, strided

pytestmark = pytest.mark.skipif(bool(cpu.missing()), reason="; ".join(cpu.missing()))

ORDER = ("input", "offset", "mask", "weight", "bias")
NAMES = ("result", *ORDER)
HALVES = (torch.float16, torch.bfloat16)
MiB = 2**20

# A tile of the backward has 252 positions and 96 columns, a slab 32 channels, a panel 32 columns of
# float32 on the widest instruction set and 4 of float64 on the narrowest; 128 samples are prepared
# at a time.
PROBLEMS = {
    "tiles": convolution(batch=2, channels=8, size=(19, 27), out_channels=5, sigma=3.0),
    "slabs": convolution(batch=1, channels=70, size=(6, 7), out_channels=9),
    "panels": convolution(batch=1, channels=33, size=(5, 6), out_channels=67),
    "few-channels": convolution(batch=2, channels=5, size=(8, 9), out_channels=3),
    "one-of-each": convolution(batch=1, channels=1, size=(7, 9), out_channels=1),
    "many-taps": convolution(batch=1, channels=3, size=(4, 5), kernel=(12, 11), padding=(6, 5)),
    "groups-across-slabs": convolution(channels=70, size=(5, 6), out_channels=6, groups=2),
    "groups-in-a-slab": convolution(channels=24, size=(5, 6), out_channels=16, groups=8),
    "depthwise": convolution(channels=40, size=(6, 5), out_channels=80, groups=40),
    "offset-groups": convolution(channels=105, size=(5, 6), out_channels=6, deformable_groups=3),
    "both-groups": convolution(
        channels=72, size=(6, 5), out_channels=4, groups=4, deformable_groups=3
    ),
    "awkward": convolution(
        channels=42, size=(11, 10), out_channels=10, kernel=(3, 2), stride=(2, 1), padding=(1, 0),
        dilation=(2, 1), groups=2, deformable_groups=3, mask=False, sigma=2.0,
    ),
}  # fmt: skip


@contextmanager
def threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.fixture(params=[isa for i, isa in enumerate(ISAS) if library().handle and
                        library().handle.pliant_isas() >> i & 1])  # fmt: skip
def isa(request, monkeypatch):
    """Every instruction set of this machine."""
    forced = library()._replace(isa=ISAS.index(request.param))
    monkeypatch.setattr(launcher, "library", lambda: forced)
    return request.param


def split(inputs):
    """The five operands and (stride, padding, dilation) of a deform_conv2d problem."""
    steps = (inputs["stride"], inputs["padding"], inputs["dilation"])
    return [inputs[n] for n in ORDER], [(s, s) if isinstance(s, int) else s for s in steps]


def convolve(backend, operands, steps, needs=(True,) * 5, dtype=None):
    """Result and gradients by the backend's own functions; what comes in is rounded to `dtype`."""
    out = backend.deform_conv(*operands, *steps)
    grad = incoming(out).to(dtype or out.dtype).to(out.dtype)
    return [out, *backend.deform_conv_backward(grad, *operands, *steps, needs)]


def resample(backend, operands, steps, needs=(True,) * 3, dtype=None):
    """The same for the columns alone."""
    kernel = operands[3].shape[2:]
    out = backend.deform_columns(*operands[:3], kernel, *steps)
    grad = incoming(out).to(dtype or out.dtype).to(out.dtype)
    return [out, *backend.deform_columns_backward(grad, *operands[:3], kernel, *steps, needs)]


def exact(operands):
    return [None if x is None else x.double() for x in operands]


def problem(id, dtype):
    """Features and weights in `dtype`, positions at least in float32."""
    operands, steps = split(PROBLEMS[id](torch.promote_types(dtype, torch.float32), "cpu", 0))
    return [x if i == 1 or x is None else x.to(dtype) for i, x in enumerate(operands)], steps


@cache
def expected_of(run, id, dtype):
    """By the reference: in float64 on the same numbers, and, for half precision, in that."""
    operands, steps = problem(id, dtype)
    expected = run(reference, exact(operands), steps, dtype=dtype)
    return expected, run(reference, operands, steps) if dtype in HALVES else [None] * len(expected)


def compare(run, id, dtype):
    got = run(cpu, *problem(id, dtype))
    expected, baseline = expected_of(run, id, dtype)
    assert len(got) == len(expected)
    for name, actual, wanted, base in zip(NAMES, got, expected, baseline, strict=False):
        assert (actual is None) == (wanted is None)
        if actual is not None:
            like_dtype = base is not None and base.dtype in HALVES
            check(actual, wanted, base if like_dtype else None, dtype=actual.dtype, what=name)


@pytest.mark.parametrize("run", [convolve, resample])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("id", PROBLEMS)
def test_every_shape_on_every_instruction_set(id, dtype, run, isa):
    compare(run, id, dtype)


@pytest.mark.parametrize("run", [convolve, resample])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("id", ["tiles", "slabs", "awkward"])
def test_half_precision_on_every_instruction_set(id, dtype, run, isa):
    compare(run, id, dtype)


@pytest.mark.parametrize("offsets", [torch.float64, torch.float16])
@pytest.mark.parametrize("masks", [torch.float64, torch.bfloat16])
def test_offsets_and_masks_of_other_dtypes(offsets, masks):
    operands, steps = split(PROBLEMS["few-channels"](torch.float32, "cpu", 0))
    operands[1], operands[2] = operands[1].to(offsets), operands[2].to(masks)
    got = convolve(cpu, operands, steps)
    expected = convolve(reference, exact(operands), steps)
    for name, actual, wanted in zip(NAMES, got, expected, strict=True):
        like = operands[0] if name == "result" else operands[ORDER.index(name)]
        assert actual.dtype == like.dtype, name
        check(actual, wanted, working=torch.float32, what=name)


def test_half_features_are_summed_in_float32_and_rounded_once():
    """A product of 2304 terms: rounding the columns to half before it would be ten times as bad."""
    make = convolution(batch=1, channels=256, size=(8, 9), out_channels=16, sigma=2.0)
    operands, steps = split(make(torch.float32, "cpu", 0))
    operands = [x if i == 1 else x.bfloat16() for i, x in enumerate(operands)]
    got = cpu.deform_conv(*operands, *steps)
    expected = reference.deform_conv(*exact(operands), *steps)
    wrong = (got.double() - expected).abs() - torch.finfo(torch.bfloat16).eps / 2 * expected.abs()
    assert wrong.max() < 1e-4 * expected.abs().max()


# --- layouts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("layout", ["channels-last", "strided", "expanded", "sliced"])
def test_any_layout_gives_the_bits_of_the_contiguous_one(layout, dtype):
    change = {
        "channels-last": lambda x: (
            x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x
        ),
        "strided": strided,
        "expanded": lambda x: x[:1].expand(x.shape),
        "sliced": lambda x: x.repeat_interleave(2, 0)[::2],
    }[layout]
    operands, steps = split(PROBLEMS["slabs"](dtype, "cpu", 0))
    changed = [change(x) for x in operands]
    same = [x.contiguous() for x in changed]
    for run in (convolve, resample):
        for one, other in zip(run(cpu, changed, steps), run(cpu, same, steps), strict=True):
            assert torch.equal(one, other)
    out, *grads = convolve(cpu, changed, steps)
    args = (*changed, *steps, "cpu")
    assert out.stride() == ops.deform_conv.fake(*args).stride()
    for gradient, operand in zip(grads, changed, strict=True):
        assert gradient.stride() == torch.empty_like(operand).stride()


def test_channels_last_images_are_not_copied(monkeypatch):
    operands, steps = split(PROBLEMS["slabs"](torch.float32, "cpu", 0))
    channels_first = operands[0]
    operands[0] = channels_first.contiguous(memory_format=torch.channels_last)

    def refuse(*args, **kwargs):
        raise AssertionError("copied")

    monkeypatch.setattr(torch.Tensor, "contiguous", refuse)
    out = cpu.deform_conv(*operands, *steps)
    assert out.is_contiguous(memory_format=torch.channels_last)
    operands[0] = channels_first
    with pytest.raises(AssertionError, match="copied"):
        cpu.deform_conv(*operands, *steps)


def test_batches_are_packed_in_parts(monkeypatch):
    operands, steps = split(convolution(batch=5, channels=6)(torch.float32, "cpu", 0))
    whole = cpu.deform_conv(*operands, *steps)
    two_images = 2 * operands[0][0].numel() * 4
    monkeypatch.setattr(launcher, "PACKED_BYTES", two_images)
    assert torch.equal(cpu.deform_conv(*operands, *steps), whole)


def test_operators_hold_to_their_fakes():
    operands, steps = split(convolution(batch=1, channels=3, size=(3, 4))(torch.float32, "cpu", 0))
    channels_last = operands[0].contiguous(memory_format=torch.channels_last)
    for input, with_all in product((operands[0], channels_last), (True, False)):
        _, offset, mask, weight, bias = operands
        tensors = (input, offset, mask if with_all else None, weight, bias if with_all else None)
        tensors = [x if x is None else x.detach().requires_grad_() for x in tensors]
        conv = torch.ops.pliant.deform_conv.default
        torch.library.opcheck(conv, (*tensors, *steps, "cpu"))
        columns = torch.ops.pliant.deform_columns.default
        torch.library.opcheck(columns, (*tensors[:3], [3, 3], *steps, "cpu"))


def test_these_kernels_run():
    inputs = convolution()(torch.float32, "cpu", 0)
    inputs["input"].requires_grad_()
    with ops.record() as calls:
        pliant.deform_conv2d(**inputs).sum().backward()
        pliant.deform_columns(inputs["input"], inputs["offset"], 3, padding=1).sum().backward()
    operators = ("deform_conv", "deform_conv_backward", "deform_columns", "deform_columns_backward")
    assert calls == [(operator, "cpu") for operator in operators]


# --- reproducibility ------------------------------------------------------------------------------


@pytest.mark.parametrize("run", [convolve, resample])
@pytest.mark.parametrize("id", ["tiles", "slabs", "both-groups"])
def test_same_bits_for_any_number_of_threads(id, run):
    operands, steps = split(PROBLEMS[id](torch.float32, "cpu", 0))
    with threads(1):
        expected = run(cpu, operands, steps)
    for count in (1, 2, 3, 8):
        with threads(count):
            for one, other in zip(run(cpu, operands, steps), expected, strict=True):
                assert torch.equal(one, other), count


@pytest.mark.parametrize("run", [convolve, resample])
def test_gradients_that_nobody_asked_for_are_not_given_and_change_nothing(run):
    operands, steps = split(PROBLEMS["slabs"](torch.float32, "cpu", 0))
    _, *full = run(cpu, operands, steps)
    for needs in product((False, True), repeat=len(full)):
        _, *some = run(cpu, operands, steps, needs)
        for need, one, other in zip(needs, some, full, strict=True):
            assert torch.equal(one, other) if need else one is None


# --- memory ---------------------------------------------------------------------------------------


def peak_bytes(function):
    """How much resident memory `function` needs at its peak beyond what is there now."""

    def status(field):
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith(field))) * 1024

    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = status("VmRSS")
    result = function()
    return status("VmHWM") - before, result


def size_of(tensors):
    return sum(x.numel() * x.element_size() for x in tensors if x is not None)


def test_the_column_matrix_is_never_whole_in_memory():
    """In a process of its own: memory that an earlier test has freed would hide a peak."""
    script = "import test_cpu_convolution as tests; tests.measure_memory()"
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def measure_memory():
    """Extra memory stays under 64 MiB, forward and backward; the columns would be 117 MiB."""
    make = convolution(
        batch=1, channels=48, size=(160, 160), out_channels=8, kernel=(5, 5), padding=2
    )
    operands, steps = split(make(torch.float32, "cpu", 0))
    columns = 48 * 25 * 160 * 160 * 4
    with threads(2):
        small = split(convolution()(torch.float32, "cpu", 0))
        convolve(cpu, *small)  # the threads themselves take memory
        extra, out = peak_bytes(lambda: cpu.deform_conv(*operands, *steps))
        assert extra - size_of([out]) < 64 * MiB
        grad = torch.ones_like(out)
        extra, grads = peak_bytes(
            lambda: cpu.deform_conv_backward(grad, *operands, *steps, (True,) * 5)
        )
        assert extra - size_of(grads) < 64 * MiB
        # The measure can see a column matrix.
        extra, _ = peak_bytes(lambda: cpu.deform_columns(*operands[:3], (5, 5), *steps))
        assert extra > columns


# --- what must not happen -------------------------------------------------------------------------

OUTSIDE = [
    torch.nan, torch.inf, -torch.inf, 1e30, -1e30, 3.4e38, 2.0**31, -(2.0**31), 2.0**63, -(2.0**63),
    -1.0,
]  # fmt: skip
TINY = [1e-45, -1e-45, 1e-38, -1e-38]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_hostile_offsets(dtype, isa):
    """Each number is the position of a sample of its own, in x, in y and in both.

    A sample that does not count is weighted with infinity, and gives zeros all the same."""
    numbers = torch.tensor([*OUTSIDE, *TINY], dtype=dtype)
    count = len(numbers)
    image, weight = torch.randn(1, 19, 3, count, dtype=dtype), torch.randn(5, 19, 1, 1, dtype=dtype)
    steps = [(3, 1), (0, 0), (1, 1)]
    mask = torch.ones(1, 1, 1, count, dtype=dtype)
    mask[..., : len(OUTSIDE)] = torch.inf
    for hostile in ("x", "y", "both"):
        offset = torch.full((1, 2, 1, count), 0.5, dtype=dtype)
        if hostile != "x":
            offset[0, 0, 0] = numbers
        offset[0, 1, 0] = (numbers if hostile != "y" else 0.5) - torch.arange(count)
        operands, needs = [image, offset, mask, weight, None], (True, True, True, True, False)
        got = convolve(cpu, operands, steps, needs)
        wanted = convolve(reference, exact(operands), steps, needs)
        for name, one, other in zip(NAMES, got, wanted, strict=True):
            if one is not None:
                assert one.isfinite().all()
                check(one, other, what=name)
        assert (got[0][..., : len(OUTSIDE)] == 0).all()
        assert (got[2][..., : len(OUTSIDE)] == 0).all()
        assert (got[3][..., : len(OUTSIDE)] == 0).all()


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_all_nan_and_all_inf_give_zeros(number):
    operands, steps = split(PROBLEMS["awkward"](torch.float32, "cpu", 0))
    operands[:2] = [torch.full_like(x, number) for x in operands[:2]]
    out, *grads = resample(cpu, operands, steps)
    for x in (out, *grads):
        assert x is None or torch.equal(x, torch.zeros_like(x))


def test_an_infinity_stays_where_it_is():
    """It reaches the results that read it, and no other image or group."""
    operands, steps = split(PROBLEMS["groups-across-slabs"](torch.float32, "cpu", 0))
    clean = convolve(cpu, operands, steps)
    operands[0] = operands[0].clone()
    operands[0][0, 3, 2, 2] = torch.inf
    out, grad_input, *_ = convolve(cpu, operands, steps)
    assert torch.equal(out[1], clean[0][1])
    assert torch.equal(out[0, 3:], clean[0][0, 3:])  # the second group
    assert not torch.equal(out[0, :3], clean[0][0, :3])
    assert torch.equal(grad_input, clean[1])


def test_geometry_that_overflows_wraps_around():
    operands, _ = split(convolution(batch=1, channels=2, size=(3, 3))(torch.float32, "cpu", 0))
    huge = 2**62
    columns = cpu.deform_columns(*operands[:3], (3, 3), (huge, 3), (huge, 1), (huge, huge))
    expected = reference.deform_columns(*operands[:3], (3, 3), (huge, 3), (huge, 1), (huge, huge))
    assert torch.equal(columns != 0, expected != 0)


def test_sides_past_the_limit_are_refused():
    image = torch.zeros(1, 1, 1, 1).expand(1, 1, 2**30 + 1, 1)
    with pytest.raises(NotImplementedError, match=r"at most 2\*\*30"):
        cpu.deform_columns(image, torch.zeros(1, 2, 1, 1), None, (1, 1), (1, 1), (0, 0), (1, 1))


@pytest.mark.parametrize("far", ["input", "offset", "mask", "weight"])
def test_elements_past_two_to_the_31_are_addressed(far):
    """The second of two slices lies 2**31 elements behind the first; what lies between is free."""
    numpy = pytest.importorskip("numpy")
    operands, steps = split(
        convolution(batch=2, channels=2, size=(3, 4), out_channels=2)(torch.float16, "cpu", 0)
    )
    expected = convolve(cpu, operands, steps)
    at = ORDER.index(far)
    near = operands[at]
    storage = torch.from_numpy(numpy.zeros(2**31 + near[0].numel(), dtype=numpy.float16))
    apart = storage.as_strided(near.shape, (2**31, *near[0].stride()))
    operands[at] = apart.copy_(near)
    for one, other in zip(convolve(cpu, operands, steps), expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("batch", "channels", "size", "out"),
    [(0, 4, (5, 6), 3), (2, 0, (5, 6), 3), (2, 4, (0, 6), 3), (2, 4, (5, 0), 3), (2, 4, (5, 6), 0)],
)
def test_empty_sizes(batch, channels, size, out):
    dtype = torch.float64
    operands = [
        torch.randn(batch, channels, *size, dtype=dtype),
        torch.randn(batch, 18, 2, 3, dtype=dtype),
        torch.rand(batch, 9, 2, 3, dtype=dtype),
        torch.randn(out, channels, 3, 3, dtype=dtype),
        torch.randn(out, dtype=dtype),
    ]
    steps = [(1, 1), (1, 1), (1, 1)]
    for run in (convolve, resample):
        results = run(cpu, operands, steps), run(reference, operands, steps)
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
