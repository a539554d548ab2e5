"""The GPU convolution: every named case, hostile numbers, layouts, scratch space, determinism.

Without a GPU the kernels run in Triton's interpreter (TRITON_INTERPRET=1), with fewer dtypes. On a
GPU all cases run in all dtypes, and there is what only a GPU has: streams, graphs, tensor cores.
"""

import itertools
import os
from unittest import mock

import pytest
import torch

import pliant
from pliant.sampling import direct, ops, reference
from pliant.testing import CASES, DIFFERENTIABLE, check, incoming, run, verify
from pliant.testing.cases import columns, convolution, spread

GPU = torch.cuda.is_available()
if not GPU and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from pliant.kernels.triton import (  # noqa: E402
    convolution as forward,
    convolution_backward as backward,
    launch,
    tuning,
)
from pliant.kernels.triton.transpose import transposition  # noqa: E402

DEVICE = "cuda" if GPU else "cpu"
CONV, COLUMNS = "deform_conv2d", "deform_columns"
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
gpu_only = pytest.mark.skipif(not GPU, reason="needs a GPU")


@pytest.fixture(autouse=True)
def nothing_is_remembered(monkeypatch):
    """So that what a test changes is seen, though another had the same signature."""
    monkeypatch.setattr(launch, "_remembered", {})
    monkeypatch.setattr(direct, "plans", direct.Plans())


# The interpreter takes seconds for each: those that differ most, and these in other dtypes too.
INTERPRETED = {
    "plain", "neither", "kernel-2x5", "stride-2x1", "dilation-2x1", "awkward", "depthwise",
    "channels-1", "one-pixel", "all-outside", "strided", "channels-last", "expanded",
    "positions-float32", "positions-float64", "mask-float32", "empty-batch", "no-out-channels",
    "no-output", "padding-unpaired", "no-channels", "no-image",
}  # fmt: skip
ALL_DTYPES = {"plain", "positions-float32"}


def chosen():
    return [
        pytest.param(case, dtype, id=f"{case}-{str(dtype).removeprefix('torch.')}")
        for case in CASES
        if case.operator in (CONV, COLUMNS) and (GPU or case.id in INTERPRETED)
        for dtype in (F32, F64, F16, BF16)
        if GPU or dtype == F32 or case.id in ALL_DTYPES
    ]


@pytest.mark.parametrize(("case", "dtype"), chosen())
def test_case(case, dtype):
    verify(case.operator, case.make(dtype, DEVICE, 0), "triton")


# More than one block of everything, and blocks that do not fit.
LARGER = {
    "blocks": convolution(
        batch=1, channels=70, size=(3, 50), out_channels=140, kernel=(1, 2), padding=0
    ),
    "wide-groups": convolution(
        batch=1, channels=102, size=(2, 5), out_channels=36, kernel=(2, 1), groups=3
    ),
    "runs": convolution(
        batch=1, channels=36, size=(3, 4), out_channels=6, kernel=(2, 1), groups=2,
        deformable_groups=3,
    ),
    "many-samples-a-pixel": convolution(batch=1, channels=3, size=(2, 2), padding=4, sigma=4.0),
}  # fmt: skip


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "sizes",
    [{}, {"channels": 6, "groups": 3, "deformable_groups": 2, "out_channels": 3, "batch": 1}],
    ids=str,
)
def test_an_infinite_gradient_reaches_the_weights_whose_samples_count(sizes, poison):
    """As the reference has it; the other taps of the position that it comes from lie outside."""
    inputs = convolution(**sizes)(F32, DEVICE, 0)
    inputs["offset"][0, 2:, 2, 1] = 1000
    grad = incoming(run(CONV, inputs, "triton", grad=False)[0])
    grad[0, 1, 2, 1] = poison
    _, got = run(CONV, inputs, "triton", grad_output=grad)
    _, expected = run(CONV, inputs, "reference", grad_output=grad)
    assert not got["weight"].isfinite().all()
    assert got["weight"][..., 1, 1].isfinite().all()
    torch.testing.assert_close(got["weight"], expected["weight"], equal_nan=True)


@pytest.mark.parametrize("dtype", [F32, F16], ids=["float32", "float16"])
@pytest.mark.parametrize("id", LARGER)
def test_larger(id, dtype):
    inputs = LARGER[id](dtype, DEVICE, 0)
    exact = {n: x.double() if isinstance(x, torch.Tensor) else x for n, x in inputs.items()}
    with ops.record() as calls:
        out, grads = run(CONV, inputs, "triton")
    assert calls == [("deform_conv", "triton"), ("deform_conv_backward", "triton")]
    expected, expected_grads = run(CONV, exact, "reference", grad_output=incoming(out).double())
    base, base_grads = run(CONV, inputs, "reference")
    half = dtype == F16
    check(out, expected, base if half else None, what="result")
    for name, gradient in grads.items():
        check(gradient, expected_grads[name], base_grads[name] if half else None, what=name)


def operands(dtype=F32, device=DEVICE, **changes):
    """Operands of deform_conv in the operators' order, steps, and the size of the kernel."""
    sizes = {"channels": 6, "out_channels": 4, "size": (4, 5), "kernel": (2, 1), "padding": (1, 0)}
    i = convolution(**{**sizes, **changes})(dtype, device, 0)
    steps = [i[name] for name in ("stride", "padding", "dilation")]
    steps = [[x, x] if isinstance(x, int) else list(x) for x in steps]
    tensors = [i[name] for name in ("input", "offset", "mask", "weight", "bias")]
    return tensors, steps, i["weight"].shape[2:]


def exactly(tensors):
    return [None if x is None else x.double() for x in tensors]


def assert_close(got, expected, dtype):
    tolerance = {F64: 1e-12, F32: 2e-6, F16: 2e-3, BF16: 2e-2}[dtype]
    for g, e in zip(got, expected, strict=True):
        assert (g is None) == (e is None)
        if g is not None:
            assert g.isfinite().all()
            assert (g.double() - e).abs().max() <= tolerance * max(1, e.abs().max())


def test_products_are_exact_where_gradients_are_asked_for_in_autocast():
    """The backward's own products must not be cast, in a plan's first call and in later ones."""
    tensors, steps, _ = operands(F32)
    grad = incoming(reference.deform_conv(*tensors, *steps))
    expected = reference.deform_conv_backward(grad.double(), *exactly(tensors), *steps, [True] * 5)
    input, offset, mask, weight, bias = leaves = [x.requires_grad_() for x in tensors]
    steps = [tuple(step) for step in steps]
    out = pliant.deform_conv2d(input, offset, weight, bias, *steps, mask, impl="triton")
    for autocast in (True, False, True):
        with torch.autocast(DEVICE, enabled=autocast):
            got = torch.autograd.grad(out, leaves, grad, retain_graph=True)
        assert_close(got, expected, F32)


def test_a_planned_backward_obeys_what_it_is_told_later(monkeypatch):
    made, init = [], backward.Gradients.__init__

    def told(self, *args):
        made.append(args[-2:])  # whether to sort, how to multiply
        init(self, *args)

    monkeypatch.setattr(backward.Gradients, "__init__", told)
    tensors, _, _ = operands()
    leaves = [x.requires_grad_() for x in tensors]
    names = ("input", "offset", "mask", "weight", "bias")
    out = pliant.deform_conv2d(
        **dict(zip(names, leaves, strict=True)), padding=(1, 0), impl="triton"
    )
    grad, results = incoming(out.detach()), []
    for sort, exact in ((False, "tf32x3"), (True, "tf32x3"), (False, "ieee"), (False, "tf32x3")):
        monkeypatch.setattr(forward, "precision", lambda dtype, exact=exact: exact)
        torch.use_deterministic_algorithms(sort)
        try:
            results.append(torch.autograd.grad(out, leaves, grad, retain_graph=True))
        finally:
            torch.use_deterministic_algorithms(False)
    assert made == [(False, "tf32x3"), (True, "tf32x3"), (False, "ieee")]
    for got in results[1:]:
        assert_close(got, [x.double() for x in results[0]], F32)


def test_lists_that_change_later_are_not_those_of_a_plan():
    """It makes its launches when they are needed first: in the deterministic mode, later."""
    tensors, steps, kernel = operands()
    grad = incoming(reference.deform_conv(*tensors, *steps))
    columns = incoming(reference.deform_columns(*tensors[:3], kernel, *steps))

    def gradients(by, tensors, grad, columns, steps, *needs):
        of_columns, needs = needs or ([True] * 3, [True] * 5)
        return [
            *by.deform_conv_backward(grad, *tensors, *steps, needs),
            *by.deform_columns_backward(columns, *tensors[:3], kernel, *steps, of_columns),
        ]

    mine, *needs = [list(step) for step in steps], [True] * 3, [True] * 5
    gradients(backward, tensors, grad, columns, mine, *needs)
    mine[1][0] += 1
    for need in needs:
        need[0] = False
    torch.use_deterministic_algorithms(True)
    try:
        got = gradients(backward, tensors, grad, columns, steps)
    finally:
        torch.use_deterministic_algorithms(False)
    expected = gradients(reference, exactly(tensors), grad.double(), columns.double(), steps)
    assert_close(got, expected, F32)


@pytest.mark.parametrize("dtype", [F32, F16], ids=["float32", "float16"])
def test_only_the_gradients_that_are_asked_for(dtype):
    launched, call = set(), launch.Launch.__call__

    def counted(self, *tensors):
        launched.add(self.kernel.__name__)
        return call(self, *tensors)

    tensors, steps, kernel = operands(dtype)
    grad = incoming(reference.deform_conv(*tensors, *steps))
    expected = reference.deform_conv_backward(grad.double(), *exactly(tensors), *steps, [True] * 5)
    for asked in ("10000", "01000", "00100", "00010", "00001", "10010", "00000"):
        needs = [n == "1" for n in asked]
        with mock.patch.object(launch.Launch, "__call__", counted):
            launched.clear()
            got = backward.deform_conv_backward(grad, *tensors, *steps, needs)
        assert_close(got, [e if n else None for n, e in zip(needs, expected, strict=True)], dtype)
        to_input = {"locate", "fill", "collect"}
        assert launched & to_input == (to_input if needs[0] else set())
        assert ("differentiate" in launched) == any(needs[1:4])
        assert ("settle" in launched) == needs[3]
        assert any(needs[:4]) or not launched
    grad = incoming(reference.deform_columns(*tensors[:3], kernel, *steps))
    expected = reference.deform_columns_backward(
        grad.double(), *exactly(tensors[:3]), kernel, *steps, [True] * 3
    )
    for asked in ("100", "010", "001", "000"):
        needs = [n == "1" for n in asked]
        got = backward.deform_columns_backward(grad, *tensors[:3], kernel, *steps, needs)
        assert_close(got, [e if n else None for n, e in zip(needs, expected, strict=True)], dtype)


@pytest.mark.parametrize("dtype", [F32, F16], ids=["float32", "float16"])
@pytest.mark.parametrize("positions", [4, 7, 20, 45])
def test_scratch_space_of_any_size(dtype, positions, monkeypatch):
    """Parts of an image, one image, two: chunks of `positions` positions of three images of 20."""
    tensors, steps, kernel = operands(dtype, batch=3, size=(3, 5))
    grad = incoming(reference.deform_conv(*tensors, *steps))
    expected = reference.deform_conv_backward(grad.double(), *exactly(tensors), *steps, [True] * 5)
    per_column = 4 if dtype == F32 else 6  # a float32 gradient, and half a float32 beside it
    monkeypatch.setattr(backward, "SCRATCH_BYTES", positions * 2 * 6 * per_column)
    assert_close(backward.deform_conv_backward(grad, *tensors, *steps, [True] * 5), expected, dtype)
    grad = incoming(reference.deform_columns(*tensors[:3], kernel, *steps))
    expected = reference.deform_columns_backward(
        grad.double(), *exactly(tensors[:3]), kernel, *steps, [True] * 3
    )
    got = backward.deform_columns_backward(grad, *tensors[:3], kernel, *steps, [True] * 3)
    assert_close(got, expected, dtype)


@pytest.mark.parametrize("positions", [20, 60])
def test_rows_that_are_summed_in_parts(positions, monkeypatch):
    """Five parts of the rows of each chunk: of one image, of two."""
    tensors, steps, _ = operands(batch=3, size=(3, 5))
    grad = incoming(reference.deform_conv(*tensors, *steps))
    expected = reference.deform_conv_backward(grad.double(), *exactly(tensors), *steps, [True] * 5)
    monkeypatch.setattr(backward, "SCRATCH_BYTES", positions * 2 * 6 * 4)
    monkeypatch.setattr(tuning, "filter_parts", lambda *_: 5)
    assert_close(backward.deform_conv_backward(grad, *tensors, *steps, [True] * 5), expected, F32)


def test_parts_divide_the_rows(monkeypatch):
    monkeypatch.setattr(tuning, "multiprocessors", lambda _: 132)
    for rows in (1, 511, 512, 1000, 16128, 16384, 2**20 + 2):
        for row, outputs in ((800, 32), (9, 1), (2304, 256)):
            parts = tuning.filter_parts(rows, row, outputs, torch.device("cpu"))
            assert rows % parts == 0
            assert parts == 1 or rows // parts >= 256
    assert tuning.filter_parts(16384, 800, 32, torch.device("cpu")) == 32
    assert tuning.filter_parts(16384, 2304, 256, torch.device("cpu")) == 1


def test_chunks_cover_every_position_once_and_stay_within_the_scratch_space(monkeypatch):
    monkeypatch.setattr(backward, "SCRATCH_BYTES", 1000)
    for images, positions, size in (
        (1, 1, 1), (2, 1, 1), (7, 2, 1), (5, 7, 30), (3, 40, 30), (4, 33, 31), (2, 5, 5000),
        (9, 33, 30),
    ):  # fmt: skip
        seen = torch.zeros(images, positions, dtype=torch.int64)
        for chunk in backward.chunked(images, positions, size):
            assert chunk.rows * size <= 1000 or chunk.rows == 1
            assert chunk.images == 1 or chunk.part == positions
            assert images == 1 or chunk.images < images
            here = slice(chunk.first, chunk.first + chunk.part)
            seen[chunk.image : chunk.image + chunk.images, here] += 1
        assert (seen == 1).all()


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", [F32, F16], ids=["float32", "float16"])
def test_deterministic(dtype, deterministic):
    many = {"batch": 4, "channels": 64, "size": (20, 30)} if GPU else {}
    tensors, steps, _ = operands(dtype, deformable_groups=2, **many)
    grad = incoming(reference.deform_conv(*tensors, *steps))
    results = [
        backward.deform_conv_backward(grad, *tensors, *steps, [True] * 5)
        for _ in range(20 if GPU else 1)
    ]
    expected = reference.deform_conv_backward(grad.double(), *exactly(tensors), *steps, [True] * 5)
    assert_close(results[0], expected, dtype)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
    torch.use_deterministic_algorithms(False)
    if GPU and dtype == F32:  # that it is not so by itself
        results = [
            backward.deform_conv_backward(grad, *tensors, *steps, [True] * 5)[0] for _ in range(20)
        ]
        assert not all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels-last"])
def test_layouts_are_those_that_were_promised(last):
    tensors, steps, kernel = operands(deformable_groups=2)
    if last:
        tensors = [
            x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x for x in tensors
        ]
    out = forward.deform_conv(*tensors, *steps)
    assert out.stride() == ops.deform_conv.fake(*tensors, *steps, "").stride()
    assert_close([out], [reference.deform_conv(*exactly(tensors), *steps)], F32)
    got = forward.deform_columns(*tensors[:3], kernel, *steps)
    assert got.stride() == ops.deform_columns.fake(*tensors[:3], kernel, *steps, "").stride()
    grads = backward.deform_conv_backward(out, *tensors, *steps, [True] * 5)
    for x, g in zip(tensors, grads, strict=True):
        assert g.stride() == torch.empty_like(x).stride()


@pytest.mark.parametrize("where", ["mask", "input", "grad"])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", [F32, F16], ids=["float32", "float16"])
def test_what_does_not_count_cannot_leak_in(poison, where, dtype):
    """Samples of tap 1 lie outside, those of tap 0 all within the first four pixels."""
    make = columns(convolution(batch=1, channels=3, size=(4, 4), kernel=(1, 2), padding=0))
    i = make(dtype, DEVICE, 0)
    i["offset"][:, 0] = 0.25 - torch.arange(4).view(1, 4, 1)
    i["offset"][:, 1] = 0.5 - torch.arange(3).view(1, 1, 3)
    i["offset"][:, 2:] = -1000.0
    clean = {n: x.clone() if isinstance(x, torch.Tensor) else x for n, x in i.items()}
    out, _ = run(COLUMNS, i, "triton", grad=False)
    grad = incoming(out)
    dirty = grad.clone()
    if where == "mask":
        i["mask"][:, 1] = poison
    elif where == "input":
        i["input"][:, :, 2:] = poison
        i["input"][:, :, :, 2:] = poison
    else:
        dirty[:, :, :, 1::2] = poison
    got, grads = run(COLUMNS, i, "triton", grad_output=dirty)
    expected, expected_grads = run(COLUMNS, clean, "triton", grad_output=grad)
    assert torch.equal(got, expected)
    for name, gradient in grads.items():
        assert torch.equal(gradient, expected_grads[name])


def test_rows_beyond_32_bits(monkeypatch):
    """The kernels for larger tensors, on a small one."""
    narrow = forward.options
    offset = torch.empty(1, 18, 1, 1, device="meta")
    for channels, rows in ((1, tl.int32), (2**18, tl.int64)):  # a pixel before the first, too
        input = torch.empty(1, channels, 1, (2**31 - 2**18) // channels, device="meta")
        assert narrow(input, offset, None)["ROW"] == rows
    monkeypatch.setattr(forward, "options", lambda *x: {**narrow(*x), "ROW": tl.int64})
    tensors, steps, kernel = operands(deformable_groups=2)
    out = forward.deform_conv(*tensors, *steps)
    assert_close([out], [reference.deform_conv(*exactly(tensors), *steps)], F32)
    got = forward.deform_columns(*tensors[:3], kernel, *steps)
    assert_close([got], [reference.deform_columns(*exactly(tensors[:3]), kernel, *steps)], F32)
    got = backward.deform_conv_backward(out, *tensors, *steps, [True] * 5)
    expected = reference.deform_conv_backward(out.double(), *exactly(tensors), *steps, [True] * 5)
    assert_close(got, expected, F32)


SIZES = [100, 2**31 - 64, 2**31 - 1, 2**31, 2**31 + 48]  # the last ones have factors of 16


@pytest.mark.parametrize("size", SIZES)
def test_lines_beyond_32_bits(size):
    """Of a tensor that long, the first tiles."""
    source = torch.arange(64.0, device=DEVICE)
    for sizes in ([(1, 1, size)], [(1, 1, size), (1, 1, 3), (1, 1, 4)]):
        turn, target = transposition(*sizes), torch.zeros_like(source)
        turn.grid = (1,)
        more = [torch.zeros_like(source)] * (len(sizes) - 1)
        turn(source, *more, target, *more)
        assert torch.equal(target, source)


@pytest.mark.parametrize(("count", "rounded"), [(1, -1), (1, 0), (2, -1), (2, 1), (3, -1), (3, 2)])
def test_transposes_in_one_launch(count, rounded):
    sizes = [(2, 3, 70), (1, 130, 66), (3, 5, 1)][:count]
    sources = [torch.randn(size, device=DEVICE) for size in sizes]
    targets = [torch.empty_like(x.mT, memory_format=torch.contiguous_format) for x in sources]
    transposition(*sizes, rounded=rounded)(*sources, *targets)
    for i, (source, target) in enumerate(zip(sources, targets, strict=True)):
        if i == rounded:
            assert target.view(torch.int32).bitwise_and(0x1FFF).count_nonzero() == 0
            torch.testing.assert_close(target, source.mT, rtol=2.0**-11, atol=0)
        else:
            assert torch.equal(target, source.mT)


@pytest.mark.parametrize("size", SIZES)
def test_outputs_beyond_32_bits(size, monkeypatch):
    """Of outputs that many, the first tile, and the sum of the only part."""
    monkeypatch.setattr(tuning, "multiprocessors", lambda device: 1)
    input = torch.arange(1.0, 6.0, device=DEVICE).view(1, 5, 1, 1)
    weight = torch.ones(1, 5, 1, 1, device=DEVICE)
    offset = torch.zeros(1, 2, 1, 1, device=DEVICE).expand(1, 2, 1, size)
    geometry = forward.Geometry((1, 1), (1, 1), (0, 0), (1, 1))
    plan = forward.Convolution(input, offset, None, weight, None, geometry, "ieee", True)
    plan.convolve.grid = plan.merge.grid = (1, 1)
    part, out, shifts = *torch.zeros(2, 64, device=DEVICE), offset.flatten(2)
    plan.convolve(input, shifts, shifts, weight, weight, part)
    plan.merge(part, weight, out)
    assert part[0] == 15  # at the only pixel; the others lie outside
    assert not part[1:].any()
    assert torch.equal(out[:32], part[:32])


@pytest.mark.parametrize("exact", ["tf32x3", "ieee"])
def test_either_product_gives_the_gradient_of_the_columns(exact, monkeypatch):
    """Ours, or PyTorch's own."""
    monkeypatch.setattr(forward, "precision", lambda dtype: exact)
    case = next(c for c in CASES if c.operator == CONV and str(c).endswith("awkward"))
    verify(CONV, case.make(F32, DEVICE, 0), "triton")


def test_a_program_goes_through_several_pixels(monkeypatch):
    """As where there are many of them."""
    tile = tuning.collect_tile
    monkeypatch.setattr(tuning, "collect_tile", lambda *args: {**tile(*args), "BP": 4})
    case = next(c for c in CASES if c.operator == CONV and str(c).endswith("awkward"))
    verify(CONV, case.make(F32, DEVICE, 0), "triton")


def test_no_grid_has_more_programs_than_fit():
    for channels, element in itertools.product((1, 32, 100, 3000), (2, 4, 8)):
        for pixels in (1, 2**20, 2**31 - 1, 2**31, 2**33 + 1):
            tile = tuning.collect_tile(channels, element, pixels)
            blocks = triton.cdiv(channels, tile["BC"])
            assert triton.cdiv(pixels, tile["BP"]) * blocks < 2**31
            assert tile["BP"] == 1 or pixels * blocks >= 2**31


@pytest.mark.parametrize("dtype", [F32, F16], ids=["float32", "float16"])
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels-last"])
def test_programs_that_share_a_tile(dtype, last, monkeypatch):
    """As where there are more multiprocessors than tiles."""
    monkeypatch.setattr(tuning, "multiprocessors", lambda device: 1000)
    tensors, steps, _ = operands(dtype, channels=35, kernel=(3, 3), size=(3, 4))
    if last:
        tensors[0] = tensors[0].contiguous(memory_format=torch.channels_last)
    merged = []
    monkeypatch.setattr(forward, "merge", spied(forward.merge, merged))
    out = forward.deform_conv(*tensors, *steps)
    assert merged
    assert merged[0]["SPLITS"] > 1
    assert_close([out], [reference.deform_conv(*exactly(tensors), *steps)], dtype)


def spied(kernel, calls):
    """`kernel` that notes the options of its launches."""

    class Spied:
        arg_names = kernel.arg_names

        def __getitem__(self, grid):
            def launch(*args, **options):
                calls.append(options)
                return kernel[grid](*args, **options)

            return launch

    return Spied()


def test_no_program_is_left_without_a_step(monkeypatch):
    """Of those that share a tile: it would read past the end of offsets and weights."""
    monkeypatch.setattr(tuning, "multiprocessors", lambda device: 1000)
    for taps in (1, 2, 9, 25):
        for per_group in (1, 16, 35, 64, 256):
            sizes = forward.channel_sizes(per_group, 32, per_group, 1)
            for dtype in (F16, F32):
                how = (forward.precision(dtype), dtype)
                tile = tuning.forward_tile(sizes["COG"], sizes["RUN"], *how)
                for block in (tile["BK"], 16, 128):
                    tile["BK"] = block
                    splits = tuning.forward_splits(tile, 1, 10, taps, sizes, *how, DEVICE)
                    steps = -(-per_group // block) * taps
                    assert (splits - 1) * -(-steps // splits) < steps


def test_float32_products_obey_pytorch():
    assert forward.precision(F32) == "tf32x3"
    try:
        for allowed in ("high", "medium"):
            torch.set_float32_matmul_precision(allowed)
            assert forward.precision(F32) == "tf32"
            assert forward.precision(F64) == "ieee"
    finally:
        torch.set_float32_matmul_precision("highest")
    matmul = torch.backends.cuda.matmul
    for name, on, off in (("allow_tf32", True, False), ("fp32_precision", "tf32", "ieee")):
        try:
            setattr(matmul, name, on)
            assert forward.precision(F32) == "tf32"
        finally:
            setattr(matmul, name, off)
    assert forward.precision(F32) == "tf32x3"


@pytest.mark.parametrize("taps", [1, 2])
@pytest.mark.parametrize("filters_last", [False, True], ids=["contiguous", "channels-last"])
@pytest.mark.parametrize("pixels_last", [False, True], ids=["contiguous", "channels-last"])
def test_factors_of_a_product_in_tf32_are_rounded_not_cut_off(
    pixels_last, filters_last, taps, monkeypatch
):
    """The product of many would be smaller by a thousandth. Those of the weight, on their way to
    another layout, if they have one.
    """
    monkeypatch.setattr(forward, "precision", lambda dtype: "tf32")
    launched, call = [], launch.Launch.__call__

    def counted(self, *tensors):
        launched.append(self.kernel.__name__)
        return call(self, *tensors)

    monkeypatch.setattr(launch.Launch, "__call__", counted)
    step = 2.0**-10
    numbers = {  # and what tf32 has of them
        1 + 0.49 * step: 1, 1 + 0.5 * step: 1 + step, 1 + 0.51 * step: 1 + step,
        -1 - 0.49 * step: -1, -1 - 0.5 * step: -1 - step, 2 - 0.25 * step: 2, 2.0**127: 2.0**127,
        2.0**-99: 2.0**-99, 0.0: 0.0,
        **{x: x for x in (torch.inf, -torch.inf, torch.nan)},
    }  # fmt: skip
    x, wanted = torch.tensor([[*numbers], [*numbers.values()]], device=DEVICE)
    one, many = (torch.zeros(n, 2, 1, taps, device=DEVICE) for n in (1, len(x)))
    one[0, 0, 0, 0], many[:, 0, 0, 0] = 1, x
    turned = [] if taps == 1 else [not pixels_last, not filters_last]
    expected = ([], ["transpose"], ["transpose_three"])[sum(turned)]
    expected = [*expected, *["round_to_tf32"] * (taps == 1 or filters_last), "convolve"]
    forms = torch.contiguous_format, torch.channels_last
    for pixels, weight in ((many, one), (one, many)):  # images of one pixel, or as many filters
        pixels = pixels.contiguous(memory_format=forms[pixels_last])
        weight = weight.contiguous(memory_format=forms[filters_last])
        offset = torch.zeros(len(pixels), 2 * taps, 1, 1, device=DEVICE)
        out = forward.deform_conv(pixels, offset, None, weight, None, (1, 1), (0, 0), (1, 1))
        torch.testing.assert_close(out.flatten(), wanted, rtol=step / 4, atol=0, equal_nan=True)
    assert launched == expected * 2


@pytest.mark.parametrize("operator", ["deform_conv2d", "deform_columns"])
def test_places_more_than_32_bits_apart(operator):
    """Of offsets, modulations and a gradient, which are read where they are, and of the input."""
    inputs = next(c for c in CASES if str(c) == f"{operator}-plain").make(F16, DEVICE, 0)
    expected, grads = run(operator, inputs, "triton")
    grad = incoming(expected)
    for name, axis in (("input", 1), ("offset", 1), ("mask", 1), ("mask", 3), ("grad", 1)):
        far = {} if name == "grad" else {name: spread(inputs[name], axis)}
        come = spread(grad, axis) if name == "grad" else grad
        got = run(operator, inputs | far, "triton", grad_output=come)
        torch.testing.assert_close(got, (expected, grads), rtol=5e-3, atol=5e-3)


# Only with a GPU


WAYS = ["float16", "float32", "tf32", "groups", "chunks", "deterministic"]


@pytest.fixture(params=[(op, way) for op in (CONV, COLUMNS) for way in WAYS], ids="-".join)
def layer(request, monkeypatch):
    """The inputs of a small layer, and a function that runs it forward and backward."""
    operator, way = request.param
    groups = {"groups": 2, "deformable_groups": 2} if way == "groups" else {}
    make = convolution(batch=2, channels=64, size=(20, 30), out_channels=48, **groups)
    make = make if operator == CONV else columns(make)
    i = make(F32 if way in ("float32", "tf32") else F16, "cuda", 0)
    i["offset"] = i["offset"].float()
    if way == "groups":
        i["input"] = i["input"].contiguous(memory_format=torch.channels_last)
    if way == "chunks":
        monkeypatch.setattr(backward, "SCRATCH_BYTES", 1 << 19)
    leaves = {n: i[n].requires_grad_() for n in DIFFERENTIABLE[operator]}

    def step():
        out = getattr(pliant, operator)(**{**i, **leaves}, impl="triton")
        return out, torch.autograd.grad(out, list(leaves.values()), torch.ones_like(out))

    torch.backends.cuda.matmul.allow_tf32 = way == "tf32"
    torch.use_deterministic_algorithms(way == "deterministic")
    yield i, step
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.use_deterministic_algorithms(False)


def same(one, other):
    """The outputs bit by bit, the gradients up to the order of sums."""
    assert torch.equal(one[0], other[0])
    for a, b in zip(one[1], other[1], strict=True):
        torch.testing.assert_close(a, b)


@gpu_only
def test_no_synchronisation(layer):
    _, step = layer
    step()
    try:
        torch.cuda.set_sync_debug_mode("error")
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@gpu_only
def test_capture_in_a_graph(layer):
    i, step = layer
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        i["input"].copy_(torch.randn_like(i["input"]))
        i["offset"].add_(0.3)
    graph.replay()
    same(captured, step())


@gpu_only
def test_runs_on_the_current_stream(layer):
    """What the stream of the call has queued before must be seen."""
    i, step = layer
    expected = step()
    with torch.no_grad():
        kept = i["input"].clone()
        i["input"].zero_()
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side), torch.no_grad():
        torch.cuda._sleep(50_000_000)
        i["input"].copy_(kept)
        with torch.enable_grad():
            got = step()
    side.synchronize()
    same(got, expected)


@gpu_only
def test_runs_on_the_device_of_its_tensors():
    """Not the current one, if there is another."""
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    tensors, steps, _ = operands(F32, device)
    out = forward.deform_conv(*tensors, *steps)
    grads = backward.deform_conv_backward(out, *tensors, *steps, [True] * 5)
    expected = reference.deform_conv_backward(out.double(), *exactly(tensors), *steps, [True] * 5)
    assert {x.device for x in (out, *grads)} == {device}
    assert_close([out], [reference.deform_conv(*exactly(tensors), *steps)], F32)
    assert_close(grads, expected, F32)


@gpu_only
def test_tf32_is_used_where_it_is_allowed():
    """As PyTorch uses it: errors are those of its own products, and no less."""
    tensors, steps, _ = operands(F32, channels=64, out_channels=64, size=(16, 16))
    expected = [reference.deform_conv(*exactly(tensors), *steps)]
    grad = incoming(expected[0]).float()
    expected += reference.deform_conv_backward(grad.double(), *exactly(tensors), *steps, [True] * 5)

    def computed(by, to_grads):
        grads = to_grads.deform_conv_backward(grad, *tensors, *steps, [True] * 5)
        return [by.deform_conv(*tensors, *steps), *grads]

    exact = computed(forward, backward)
    try:
        torch.set_float32_matmul_precision("high")
        fast, plain = computed(forward, backward), computed(reference, reference)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert_close(exact, expected, F32)
    for got, wanted, base in zip(fast[:-1], expected, plain, strict=False):  # a bias has no product
        assert (got - wanted).abs().max() > 3e-5 * wanted.abs().max()
        check(got, wanted, base)


@gpu_only
def test_memory_of_the_backward_is_bounded(monkeypatch):
    """Columns of this problem would take 113 MB a copy; a few of them are there at a time."""
    monkeypatch.setattr(backward, "SCRATCH_BYTES", 8 << 20)
    i = convolution(batch=16, channels=128, size=(50, 61), out_channels=32)(F16, "cuda", 0)
    steps = [[1, 1]] * 3
    tensors = [i[n] for n in ("input", "offset", "mask", "weight", "bias")]
    grad = torch.randn_like(forward.deform_conv(*tensors, *steps))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    backward.deform_conv_backward(grad, *tensors, *steps, [True] * 5)
    extra = torch.cuda.max_memory_allocated() - before
    samples = i["mask"].numel()
    results = sum(x.numel() * x.element_size() for x in tensors)
    copies = 2 * (i["input"].numel() * 4 + grad.numel() * 2)
    assert extra < (8 << 20) + 24 * samples + results + copies + (32 << 20)


@gpu_only
def test_the_forward_keeps_no_columns():
    """Which would take 113 MB: beyond the result it takes the input in another order."""
    i = convolution(batch=16, channels=128, size=(50, 61), out_channels=32)(F16, "cuda", 0)
    pliant.deform_conv2d(**i)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = pliant.deform_conv2d(**i)
    extra = torch.cuda.max_memory_allocated() - before - out.numel() * 2
    assert extra < i["input"].numel() * 2 + (4 << 20)


@gpu_only
@pytest.mark.parametrize("dtype", [F32, F64, F16], ids=["float32", "float64", "float16"])
@pytest.mark.parametrize("id", ["plain", "awkward", "no-mask", "groups-2", "deformable-groups-3"])
def test_agrees_with_torchvision(id, dtype):
    """Forward and gradients; positions at -1, where the two differ, do not occur.

    torchvision rounds positions to half precision, so there its float64 is the one to agree with.
    """
    torchvision = pytest.importorskip("torchvision", exc_type=(ImportError, RuntimeError))
    (case,) = (c for c in CASES if (c.operator, c.id) == (CONV, id))
    i = case.make(dtype, "cuda", 0)
    out, grads = run(CONV, i, "triton")
    theirs_in = F64 if dtype == F16 else dtype
    leaves = {n: i[n].detach().to(theirs_in).requires_grad_() for n in grads}
    theirs = torchvision.ops.deform_conv2d(**{**i, **leaves})
    grad = incoming(out).to(theirs_in)
    their_grads = torch.autograd.grad(theirs, list(leaves.values()), grad)
    assert_close([out], [theirs.double()], dtype)
    for name, gradient in zip(leaves, their_grads, strict=True):
        assert_close([grads[name]], [gradient.double()], dtype)
