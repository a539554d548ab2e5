"""The GPU kernels compile for NVIDIA GPUs, though none is present, and are launched as planned."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.slow

DEVICE = """
import sys
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

ARCH = int(sys.argv[1])


class Device:  # answers for a GPU that is not there: enough to compile for it
    def get_current_target(self):
        return GPUTarget("cuda", ARCH, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=0):
        return 0


driver.set_active(Device())
torch._C._cuda_getCurrentRawStream = lambda index: 0
compile_only, passed, compiled, shuffled = JITFunction.run, [], [], []


class Launcher:
    launch_cooperative_grid, launch_pdl = "cooperative", "early"
    profile_scratch_size = 0

    def __init__(self, scratch):
        self.global_scratch_size, self.short = scratch, False

    def __call__(self, x, y, z, stream, function, metadata, launch_metadata, enter, leave, *args):
        assert all(type(i) is int for i in (x, y, z, stream))
        assert (function, metadata, launch_metadata) == ("function", "metadata", None)
        assert enter is leave is None
        passed.append(args)

    def launch(self, x, y, z, stream, function, cooperative, early, scratch, profile, *others):
        assert (cooperative, early, scratch, profile) == ("cooperative", "early", None, None)
        self.short = True
        self(x, y, z, stream, function, *others)


class Compiled:
    function, packed_metadata = "function", "metadata"

    def __init__(self, scratch=0):
        self.run = Launcher(scratch)


def run(self, *args, grid, warmup, **kwargs):
    kernel = compile_only(self, *args, grid=grid, warmup=True, **kwargs)
    compiled.append((self.__name__, kernel))
    if kwargs.get("SHARE"):
        shuffled.append(kernel)
    binder = self.device_caches[0][4]
    bound, _, _ = binder(*args, **kwargs, debug=False, instrumentation_mode="")
    passed.append(tuple(bound.values()))
    return Compiled()


JITFunction.run = run


def shuffled_products(ptx):
    # Lanes that fuse their own with a sum get another last bit than the lane that it came from.
    products, found = set(), 0
    for line in ptx.splitlines():
        name, *registers = (*line.translate(str.maketrans(",{};|", "     ")).split(), "")
        apart = "{" in line.partition(",")[0]  # the halves of one register, put into two
        to, read = (registers[:2], registers[2:]) if apart else (registers[:1], registers[1:])
        if name in ("mul.f32", "mul.f64") or (name[:4] == "mov." and products & set(read)):
            products |= set(to)
        found += name.startswith("shfl.sync.bfly") and bool(products & set(read))
    return found


def lanes_agree(*names):
    summed = [(name, k.asm["ptx"]) for name, k in compiled if "shfl.sync.bfly" in k.asm["ptx"]]
    assert set(names) <= {name for name, _ in summed}
    assert [name for name, ptx in summed if shuffled_products(ptx)] == []
"""

SIZES = """
def twice(step):
    passed.clear()
    step()  # through Triton, which compiles
    step()  # the compiled kernel, with arguments of our own making
    by_triton, by_us = passed[: len(passed) // 2], passed[len(passed) // 2 :]
    assert [len(args) for args in by_triton] == [len(args) for args in by_us] != []
    for theirs, ours in zip(sum(by_triton, ()), sum(by_us, ())):
        if isinstance(theirs, torch.Tensor):  # results are made anew
            assert type(ours) is int and ours % 16 == theirs.data_ptr() % 16
        else:
            assert theirs == ours, (theirs, ours)


from pliant.kernels.triton import launch, sum as kernels, tuning
from pliant.sampling.problem import Policy

tuning.early = lambda device: ARCH >= 90

SUMS = (
    (Policy("unit", "bilinear", "zero"), torch.float32, 8, 1, 32, 4, 1, 4),
    (Policy("unit", "bilinear", "zero"), torch.float16, 8, 1, 37, 2, 1, 3),
    (Policy("unit", "bilinear", "zero"), torch.float64, 2, 1, 16, 1, 1, 1),
    (Policy("unit", "bilinear", "skip"), torch.bfloat16, 1, 8, 32, 6, 4, 13),
    (Policy("pixel", "nearest", "clamp"), torch.float32, 4, 1, 64, 1, 1, 15),
    (Policy("unit", "bilinear", "zero"), torch.float16, 8, 1, 32, 3, 1, 4),
)
# Without matrix products kernels are the same on all of these GPUs, but for their registers.
for policy, dtype, g, k, d, v, r, p in SUMS if ARCH == 90 else SUMS[::3]:
    value, loc = torch.zeros(1, 400, g, k, d, dtype=dtype), torch.zeros(1, 30, g, v, p, 2)
    weight = torch.zeros(1, 30, g, v, p, r, k, dtype=dtype)
    maps = torch.zeros(v, r, 2, dtype=torch.int64), torch.zeros(v, r, dtype=torch.int64)
    args, grad = (value, *maps, loc, weight, policy), torch.zeros(1, 30, g, k, d, dtype=dtype)
    needs, strides = (True, policy.interpolation != "nearest", True), [x.stride() for x in args[:5]]
    by_size = kernels.plan_sum(*args, (1, 30, g * k * d))
    back = kernels.plan_sum_backward(grad, *args, needs, (strides[0], *strides[3:]))
    for step in (
        lambda: kernels.sample_sum(*args),
        lambda: kernels.sample_sum_backward(grad, *args, [True] * 3),
        lambda: by_size(*args[:5]),
        lambda: back(grad, *args[:5]),
    ):
        twice(step)
    torch.use_deterministic_algorithms(True)
    twice(lambda: kernels.sample_sum_backward(grad, *args, [True] * 3))
    torch.use_deterministic_algorithms(False)
    rule, tuning.by_list = tuning.by_list, lambda value, *_: k == 1 and dtype != torch.float64
    launch._remembered.clear()
    twice(lambda: kernels.sample_sum_backward(grad, *args, [True] * 3))
    tuning.by_list = rule
    rule, tuning.point_splits = tuning.point_splits, lambda *_: 3
    if policy.outside == "skip":
        launch._remembered.clear()
        twice(lambda: kernels.sample_sum(*args))
    tuning.point_splits = rule

expected = {"by_query", "by_point", "merge"}
expected |= {"clear", "locate", "fill", "collect", "enter", "gather"}
assert {name for name, _ in compiled} == expected
sums = len(compiled)
assert shuffled
assert all("shfl" in kernel.asm["ptx"] and kernel.metadata.shared == 0 for kernel in shuffled)
for name, kernel in compiled:
    assert kernel.metadata.launch_pdl == ("griddepcontrol.wait" in kernel.asm["ptx"]), name
    assert kernel.metadata.launch_pdl == (ARCH >= 90) or name != "clear"
from pliant.kernels.triton import convolution, convolution_backward

steps = ((1, 1), (1, 1), (1, 1))
CONVOLUTIONS = (
    (torch.float16, 256, (3, 3)), (torch.float32, 32, (3, 3)), (torch.float64, 6, (3, 2)),
    (torch.float32, 19, (1, 1)),
)
for dtype, c, kernel in CONVOLUTIONS if ARCH == 90 else CONVOLUTIONS[:3]:
    input, weight = torch.zeros(1, c, 5, 6, dtype=dtype), torch.zeros(c, c, *kernel, dtype=dtype)
    k, wide = kernel[0] * kernel[1], 8 - kernel[1] + 1
    offset, mask = torch.zeros(1, 2 * k, 5, wide), torch.zeros(1, k, 5, wide, dtype=dtype)
    args = (input, offset, mask, weight, None, *steps)
    columns = (input, offset.to(dtype), mask, kernel, *steps)
    twice(lambda: convolution.deform_conv(*args))
    twice(lambda: convolution.deform_columns(*columns))
    if dtype != torch.float64:
        grad, grad_columns = convolution.deform_conv(*args), convolution.deform_columns(*columns)
        twice(lambda: convolution_backward.deform_conv_backward(grad, *args, [True] * 5))
        twice(
            lambda: convolution_backward.deform_columns_backward(grad_columns, *columns, [True] * 3)
        )
from pliant.kernels.triton.transpose import transposition

turn, x = transposition((1, 1, 4)), torch.zeros(4)
turn(x, x)
for narrow in (torch.float16, torch.bfloat16):  # rounded on its way
    transposition((2, 40, 48))(torch.zeros(3840), torch.zeros(3840, dtype=narrow))
    assert "cvt.rn" in compiled[-1][1].asm["ptx"]
for scratch in (0, 64):  # which Triton's own launch provides
    turn.compiled[0] = (None, *launch._starter(ready := Compiled(scratch)))
    turn(x, x)
    assert ready.run.short == (scratch == 0 and triton.__version__.startswith("3.6."))
size = 2**31 + 16  # and factors that are passed apart
long, x = (1, 1, size), torch.zeros(4)
once, three = transposition(long), transposition(long, long, long)
twice(lambda: once(x, x))
twice(lambda: three(*[x] * 6))
image, pixel = torch.zeros(1, 6, 1, 1), torch.zeros(1, 2, 1, 1).expand(1, 2, 1, size)
steps = convolution.Geometry((1, 1), (1, 1), (0, 0), (1, 1))
plan = convolution.Convolution(image, pixel, None, image, None, steps, "ieee", True)
twice(lambda: plan.convolve(*[image] * 6))
twice(lambda: plan.merge(*[image] * 3))
expected = {"convolve", "resample", "transpose", "unfold", "product", "locate", "fill", "collect"}
expected |= {"differentiate", "transpose_three"}
assert expected <= {name for name, _ in compiled[sums:]}
least = 101376  # bytes of shared memory on the smallest of these GPUs
assert all(kernel.metadata.shared <= least or ARCH >= 90 for _, kernel in compiled)
assert all(f".target sm_{ARCH}" in kernel.asm["ptx"] for _, kernel in compiled)
fast = next(kernel for name, kernel in compiled if name == "by_point")
assert "red.global" in fast.asm["ptx"] or "atom.global" in fast.asm["ptx"]
lanes_agree("by_point", *["differentiate"] * (ARCH == 90))
print(len(compiled), "kernels")
"""


CASES = """
import pliant
from pliant.kernels import triton
from pliant.testing import CASES, run as run_case

triton.supports = lambda *operands: []
dtypes = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
sums = [case for case in CASES if not case.operator.startswith("deform_")]
for i, case in enumerate(sums[::2]):
    run_case(case.operator, case.make(dtypes[i % 4], "cpu", 0), "triton")
lanes_agree("by_point")
print(len(compiled), "kernels")
"""


def compiles(script, arch, folder):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder)
    path = folder / "compile.py"
    path.write_text(DEVICE + script)
    done = subprocess.run(
        [sys.executable, str(path), str(arch)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith("kernels\n")


def test_the_kernels_of_many_sums_compile(tmp_path):
    """Every second named case, in one dtype: the compiler fails on a few tiles and types."""
    compiles(CASES, 90, tmp_path)


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_kernels_compile_and_are_launched_as_triton_would(arch, tmp_path):
    compiles(SIZES, arch, tmp_path)
