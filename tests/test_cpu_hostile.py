"""The CPU kernels under AddressSanitizer and UndefinedBehaviorSanitizer, on hostile input.

Run as a script, this file calls the kernels of the library it is given with whatever a caller could
pass; a sanitizer ends the process at the first access outside of a tensor and at the first
undefined operation.
"""

import itertools
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
CMAKE, COMPILER = shutil.which("cmake"), shutil.which("c++")
HOSTILE = [
    0.0, -0.0, 0.5, 1.0, -1.0, 1e-45, -1e-45, 1e-38, 1e30, -1e30, 3.4e38,
    -3.4e38, 2.0**31, -(2.0**31), 2.0**63,
    torch.inf, -torch.inf, torch.nan,
]  # fmt: skip
EXTREME = [0, 1, -1, 2, 7, 40, 2**30, 2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1, -(2**31), -(2**63)]
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (CMAKE and COMPILER), reason="no CMake or no C++ compiler"),
]


def build(folder, *flags):
    configure = [
        CMAKE,
        "-S",
        ROOT,
        "-B",
        folder,
        f"-DPLIANT_OUTPUT={folder}",
        "-DCMAKE_BUILD_TYPE=None",
    ]
    configure.append("-DCMAKE_CXX_FLAGS=" + " ".join(flags))
    for command in (configure, [CMAKE, "--build", folder, "--parallel", "2"]):
        done = subprocess.run(
            [str(x) for x in command], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / "libpliant_cpu.so"


def call(library, *arguments):
    """This file as a script, with the sanitizer's runtime loaded first."""
    runtime = subprocess.run(
        [COMPILER, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    environment = {
        **os.environ,
        "LD_PRELOAD": runtime,
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0:exitcode=99",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1:exitcode=99",
    }
    command = [sys.executable, __file__, str(library), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory):
    flags = "-O0 -g1 -fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=all"
    return build(tmp_path_factory.mktemp("sanitized"), *flags.split())


@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512"])
def test_hostile_input_under_sanitizers(sanitized, isa):
    done = call(sanitized, isa)
    if done.returncode == 77:
        pytest.skip(f"this CPU does not run {isa}")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    assert done.stdout.endswith("unharmed\n")


def test_the_sanitizer_sees_an_access_outside(sanitized):
    """A row behind the last one, which the checks on entry would have refused."""
    done = call(sanitized, "baseline", "break")
    assert done.returncode == 99, done.stdout + done.stderr[-2000:]
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr


# --- the script -----------------------------------------------------------------------------------


def fill(generator, *shape, dtype):
    numbers = torch.tensor(HOSTILE, dtype=torch.float64)
    choice = torch.randint(len(HOSTILE), shape, generator=generator)
    near = torch.rand(shape, generator=generator, dtype=torch.float64) * 3 - 1
    wild = torch.rand(shape, generator=generator) < 0.5
    return torch.where(wild, numbers[choice], near).to(dtype)


def sums(cpu, policies):
    """Sizes that leave remainders everywhere, operands without a byte to spare."""
    generator = torch.Generator().manual_seed(0)
    sizes = [
        {"d": 1}, {"d": 3}, {"d": 17}, {"d": 37, "k": 1}, {"d": 64, "k": 3}, {"d": 147, "q": 2},
        {"p": 130, "q": 3}, {"q": 150, "k": 1, "d": 8}, {"n": 0}, {"q": 0}, {"p": 0},
        {"d": 0}, {"k": 0},
    ]  # fmt: skip
    for policy, dtype, loc_dtype, size in itertools.product(policies, DTYPES, DTYPES[:2], sizes):
        n, q, g, k, d, v, p, r = (
            {"n": 2, "q": 9, "g": 2, "k": 2, "d": 5, "v": 2, "p": 3, "r": 2} | size
        ).values()
        shapes = torch.tensor([[[4, 3], [1, 5]], [[0, 4], [2, 2]]])
        starts = torch.tensor([[0, 12], [17, 17]])
        value = fill(generator, n, 21, g, k, d, dtype=dtype)
        loc = fill(generator, n, q, g, v, p, 2, dtype=loc_dtype)
        weight = fill(generator, n, q, g, v, p, r, k, dtype=dtype)
        grad = fill(generator, n, q, g, k, d, dtype=dtype)
        cpu.sample_sum(value, shapes, starts, loc, weight, policy)
        cpu.sample_sum_backward(
            grad, value, shapes, starts, loc, weight, policy, (True, True, True)
        )


def metadata(cpu, policies):
    """Every extreme integer as a start and as a side: refused, or harmless."""
    value, loc = torch.rand(1, 40, 1, 1, 5), torch.rand(1, 50, 1, 1, 2, 2) * 2 - 0.5
    weight, grad = torch.rand(1, 50, 1, 1, 2, 1, 1), torch.rand(1, 50, 1, 1, 5)
    refused = 0
    for policy, start, height, width in itertools.product(policies[::3], EXTREME, EXTREME, EXTREME):
        operands = (
            value,
            torch.tensor([[[height, width]]]),
            torch.tensor([[start]]),
            loc,
            weight,
            policy,
        )
        try:
            cpu.sample_sum(*operands)
            cpu.sample_sum_backward(grad, *operands, (True, True, True))
        except (ValueError, NotImplementedError):
            refused += 1
    assert refused > 1000


def convolutions(cpu):
    generator = torch.Generator().manual_seed(0)
    for dtype, (c, co, h, w) in itertools.product(
        DTYPES, [(1, 1, 1, 1), (6, 5, 5, 4), (38, 7, 3, 9), (2, 2, 0, 3)]
    ):
        for kernel, stride, padding, dilation in (
            ((3, 3), (1, 1), (1, 1), (1, 1)),
            ((2, 3), (2, 1), (0, 2), (1, 2)),
            ((1, 1), (2**62, 1), (2**62, 0), (1, 2**62)),
        ):
            points = kernel[0] * kernel[1]
            image = fill(generator, 2, c, h, w, dtype=dtype)
            offset = fill(generator, 2, 2 * points, 4, 5, dtype=dtype)
            mask = fill(generator, 2, points, 4, 5, dtype=dtype)
            weight, bias = (
                fill(generator, co, c, *kernel, dtype=dtype),
                fill(generator, co, dtype=dtype),
            )
            steps = stride, padding, dilation
            columns = cpu.deform_columns(image, offset, mask, kernel, *steps)
            cpu.deform_columns_backward(columns, image, offset, mask, kernel, *steps, (True,) * 3)
            out = cpu.deform_conv(image, offset, mask, weight, bias, *steps)
            cpu.deform_conv_backward(out, image, offset, mask, weight, bias, *steps, (True,) * 5)


def main(path, isa, harm=""):
    os.environ["PLIANT_CPU_ISA"] = isa
    from pliant.kernels import cpu
    from pliant.kernels.cpu import launch, library as loader
    from pliant.sampling.problem import POLICIES

    loader._find = lambda: Path(path)
    if loader.missing():
        print(loader.missing())
        sys.exit(77)
    torch.set_num_threads(2)
    if harm:
        fixed = launch._fixed

        def lie(*operands):
            fields = list(struct.unpack("41q", fixed(*operands)))
            fields[4] = 41  # S: a row more than there is
            return struct.pack("41q", *fields)

        launch._fixed = lie
        shape, loc = torch.tensor([[[1, 41]]]), torch.tensor([40.0, 0.0]).view(1, 1, 1, 1, 1, 2)
        operands = shape, torch.tensor([[0]]), loc, torch.ones(1, 1, 1, 1, 1, 1, 1)
        launch.sample_sum(torch.rand(1, 40, 1, 1, 5), *operands, POLICIES[3])
        return
    sums(cpu, POLICIES)
    metadata(cpu, POLICIES)
    convolutions(cpu)
    print("unharmed")


if __name__ == "__main__":
    main(*sys.argv[1:])
