"""The GPU kernels under NVIDIA's compute-sanitizer: `make sanitize`.

memcheck sees hostile input, racecheck and initcheck ordinary input. With the word "hostile" or
"ordinary" this runs the problems themselves, so that a sanitizer can be given it.
"""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from pliant.kernels.triton import launch, tuning
from pliant.sampling import direct
from pliant.testing import CASES, run
from pliant.testing.cases import POSITIONS, Case

SUMS = ("multi_scale_deformable_attn", "deformable_aggregation", "geometric_kernel_attention")
TOOLS = {"memcheck": "hostile", "racecheck": "ordinary", "initcheck": "ordinary"}

# Cases whose tiles differ: layouts are converted through shared memory in some of them.
CHOSEN = {
    "plain", "strided", "channels-last", "mostly-outside", "far-outside", "far-offsets",
    "head-dim-37", "points-9", "points-13", "points-15", "int64-positions", "six-cameras",
    "groups-8", "channels-147", "channels-19", "awkward", "depthwise",
}  # fmt: skip
MODES = ("plain", "parts", "lists", "deterministic")
DTYPES = (torch.float32, torch.float16)

POSITION = [
    torch.nan, torch.inf, -torch.inf, 1e30, -1e30, 3e9, 2.0**31, -(2.0**31), 1e6, -1.0, -0.5, 0, 1,
]  # fmt: skip
MAPS = [
    ((4, 2**31 - 1), 0), ((2**31 - 1, 3), 0), ((2**62, 2**62), 2**62), ((-(2**63), 5), -(2**62)),
    ((3, 1_500_000_000), 0), ((3, 3), 10**6), ((9, 50), -7),
]  # fmt: skip


def main(arguments: list[str]) -> int:
    if arguments:
        print(sum(1 for _ in work(arguments[0] == "hostile", "cuda")), "problems")
        return 0
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None or not torch.cuda.is_available():
        print("A CUDA device and compute-sanitizer are needed.", file=sys.stderr)
        return 2
    command = [sys.executable, __file__]
    for kind in set(TOOLS.values()):  # compile, which would take longer under a sanitizer
        subprocess.run([*command, kind], check=True)
    started = {
        tool: subprocess.Popen(
            [sanitizer, "--tool", tool, "--error-exitcode", "1", *command, kind],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for tool, kind in TOOLS.items()
    }  # fmt: skip
    failed = 0
    for tool, process in started.items():
        said, _ = process.communicate()
        print(f"== {tool}, {TOOLS[tool]}: {'FAILED' if process.returncode else 'clean'}\n{said}")
        failed += process.returncode != 0
    return 1 if failed else 0


def work(hostile: bool, device: str) -> Iterator[str]:
    """Run the problems, forward and backward; says of each what it was."""
    for case in CASES:
        if str(case).removeprefix(f"{case.operator}-") not in CHOSEN:
            continue
        for dtype in DTYPES:
            for kind in MODES if case.operator in SUMS else ("plain", "deterministic"):
                for inputs, grad in problems(case, dtype, device, hostile):
                    with mode(kind):
                        run(case.operator, inputs, "triton", grad_output=grad)
                    yield f"{case} {dtype} {kind}"
    if device == "cuda":
        torch.cuda.synchronize()


def problems(
    case: Case, dtype: torch.dtype, device: str, hostile: bool
) -> Iterator[tuple[dict[str, Any], torch.Tensor | None]]:
    """Inputs and an incoming gradient; hostile ones with lies about the first map, too."""
    inputs = case.make(dtype, device, 0)
    if not hostile:
        yield inputs, None
        return
    positions = inputs[POSITIONS[case.operator]].clone(memory_format=torch.contiguous_format)
    values = POSITION
    if not positions.is_floating_point():
        values = [torch.iinfo(positions.dtype).min, torch.iinfo(positions.dtype).max]
    for i, x in enumerate(values):
        positions.view(-1)[i :: 2 * len(values)] = x
    inputs[POSITIONS[case.operator]] = positions
    out, _ = run(case.operator, inputs, "triton", grad=False)
    grad = torch.ones_like(out, memory_format=torch.contiguous_format)
    grad.view(-1)[::7] = torch.inf
    yield inputs, grad
    if case.operator in SUMS and device == "cuda":  # the host's metadata are read, and refused
        shapes, starts = list(inputs)[1:3]
        for size, start in MAPS if str(case).endswith("-plain") else MAPS[:1]:
            lie = {
                name: inputs[name].to(device, torch.int64, copy=True) for name in (shapes, starts)
            }
            lie[shapes][(0,) * (lie[shapes].dim() - 1)] = torch.tensor(size)
            lie[starts][(0,) * lie[starts].dim()] = start
            yield inputs | lie, grad


@contextmanager
def mode(kind: str) -> Iterator[None]:
    """The backward in parts of one item, by lists, in the deterministic mode, or as it comes."""
    with ExitStack() as stack:
        for module, name in ((launch, "_remembered"), (direct, "_plans")):
            stack.enter_context(mock.patch.object(module, name, {}))
        rules = {
            "parts": ("batch_parts", lambda batch, *_: batch),
            "lists": ("by_list", lambda value, *_: value.shape[3] == 1),
        }
        if kind in rules:
            stack.enter_context(mock.patch.object(tuning, *rules[kind]))
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(kind == "deterministic", warn_only=True)
        stack.callback(torch.use_deterministic_algorithms, before)
        yield


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
