"""The GPU kernels under NVIDIA's compute-sanitizer: `make sanitize`.

memcheck sees hostile input, racecheck and initcheck ordinary input. Every tensor is an allocation
of its own: those that PyTorch cuts from larger ones, and uses again, would hide most errors. Where
memcheck or initcheck does not see what is `wrong`, it has failed, too. With a kind of input, the
name of an operator and the number of a part this runs problems themselves, so that a sanitizer can
be given it.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import product
from typing import Any
from unittest import mock

import torch
import triton.language as tl
from torch import Tensor

from pliant.kernels.triton import (
    convolution,
    convolution_backward,
    launch,
    refined,
    sum as sums,
    tuning,
)
from pliant.kernels.triton.transpose import transposition
from pliant.sampling import direct
from pliant.sampling.problem import accumulator
from pliant.testing import CASES, run
from pliant.testing.cases import (
    OPERATORS,
    POSITIONS,
    Case,
    aggregation,
    attention,
    columns,
    convolution as conv,
    geometric,
)

SUMS = OPERATORS[:3]
ATTENTION, AGGREGATION, GEOMETRIC, CONVOLUTION, COLUMNS = OPERATORS

# initcheck does not see cuBLAS's asynchronous stores: it gets products in memory that was written.
TOOLS = {"memcheck": "hostile", "racecheck": "ordinary", "initcheck": "written"}
OPTIONS = {"memcheck": ["--padding", "512"]}  # bytes behind each allocation that are nobody's
ALONE = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}

# Cases whose tiles differ: layouts are converted through shared memory in some of them.
NAMED = {
    "plain", "strided", "channels-last", "channels-apart", "mostly-outside", "far-outside",
    "far-offsets", "head-dim-37", "points-9", "points-13", "points-15", "int64-positions",
    "six-cameras", "groups-8", "channels-147", "channels-19", "awkward", "depthwise",
}  # fmt: skip
# Heads, channels and kernels of models, and blocks of everything that do not fit.
PYRAMID = ((9, 7), (5, 4), (3, 2), (1, 2))
MODELS = [
    Case(
        "encoder", ATTENTION,
        attention(queries=12, heads=8, channels=32, points=4, levels=PYRAMID),
    ),
    Case("cameras", AGGREGATION, aggregation(cameras=[PYRAMID] * 6, channels=256, groups=8)),
    Case("many-points", AGGREGATION, aggregation(anchors=2, points=150)),
    Case("map", GEOMETRIC, geometric(heads=8, channels=32, points=4, levels=PYRAMID[:1])),
    Case("small-images", CONVOLUTION, conv(channels=32, out_channels=32, kernel=(5, 5))),
    Case("wide", CONVOLUTION, conv(channels=64, out_channels=256, size=(9, 11))),
    Case("middle", CONVOLUTION, conv(channels=70, out_channels=140, size=(3, 50), kernel=(1, 2))),
    Case("blocks", COLUMNS, columns(conv(channels=70, size=(3, 50), kernel=(1, 2)))),
]  # fmt: skip
CHOSEN = [case for case in CASES if case.id in NAMED] + MODELS

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
# The backward as it comes, by lists, sorted, in parts of the batch or chunks of the columns; tiles
# of several queries, places of 64 bits, other tiles than those of the rules, products of tf32.
BOTH = (F32, F16)
WAYS = {  # the operators with such a way, dtypes of all cases, and of the plain ones and MODELS
    "plain": (OPERATORS, BOTH, (F32, F16, BF16, F64)),
    "deterministic": (OPERATORS, (F16,), BOTH),
    "lists": (SUMS, (F16,), BOTH),
    "parts": (SUMS, (), BOTH),
    "many": (SUMS, (), BOTH),
    "far": (OPERATORS, (), BOTH),
    "refined": (OPERATORS, (), BOTH),
    "chunks": ((CONVOLUTION, COLUMNS), (), BOTH),
    "tf32": ((CONVOLUTION,), (), (F32,)),
}

POSITION = [
    torch.nan, torch.inf, -torch.inf, 1e30, -1e30, 3e9, 2.0**31, -(2.0**31), 1e6, -1.0, -0.5, 0, 1,
]  # fmt: skip
MAPS = [
    ((4, 2**31 - 1), 0), ((2**31 - 1, 3), 0), ((2**62, 2**62), 2**62), ((-(2**63), 5), -(2**62)),
    ((3, 1_500_000_000), 0), ((3, 3), 10**6), ((9, 50), -7),
]  # fmt: skip


# Parts of an operator's problems, each for a process: of about as many kernels.
PARTS = {ATTENTION: 2, AGGREGATION: 2, GEOMETRIC: 2, CONVOLUTION: 6, COLUMNS: 3}


def wrong(tool: str) -> None:
    """A number too many is moved, for memcheck; for the other, numbers that nobody has written."""
    source, target = torch.zeros(100, device="cuda"), torch.zeros(100, device="cuda")
    if tool == "initcheck":
        source = torch.empty_like(source)
    transposition((1, 1, 100 + (tool == "memcheck")))(source, target)
    torch.cuda.synchronize()


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["wrong"]:
        wrong(arguments[1])
        return 0
    if arguments:
        kind, operator, part = arguments
        print(sum(1 for _ in work(kind, operator, "cuda", int(part))), "problems")
        return 0
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None or not torch.cuda.is_available():
        print("A CUDA device and compute-sanitizer are needed.", file=sys.stderr)
        return 2

    def start(command: list[str]) -> tuple[int, str]:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | ALONE,
        )  # fmt: skip
        return done.returncode, done.stdout

    tasks = [(operator, str(part)) for operator in OPERATORS for part in range(PARTS[operator])]
    failed, me = 0, [sys.executable, __file__]

    def check(tool: str, *arguments: str) -> list[str]:
        options = ["--error-exitcode", "1", *OPTIONS.get(tool, [])]
        return [sanitizer, "--tool", tool, *options, *me, *arguments]

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for kind in ("ordinary", "hostile"):  # compile, which would take longer under a sanitizer
            list(pool.map(start, [[*me, kind, *task] for task in tasks]))
        tools = ("memcheck", "initcheck")
        controls = {tool: pool.submit(start, check(tool, "wrong", tool)) for tool in tools}
        runs = {
            (tool, *task): pool.submit(start, check(tool, kind, *task))
            for tool, kind in TOOLS.items()
            for task in tasks
        }
        for tool, done in controls.items():
            status, said = done.result()
            found = status == 1 and "ERROR SUMMARY" in said and "ERROR SUMMARY: 0" not in said
            failed += not found
            print(f"{tool}, wrong:", "found" if found else f"FAILED to find it\n{said}", flush=True)
        for (tool, operator, part), done in runs.items():
            status, said = done.result()
            failed += status != 0
            brief = ", ".join(line.strip("= ") for line in said.splitlines()[1:])
            verdict = f"FAILED\n{said}" if status else f"clean: {brief}"
            print(f"{tool}, {TOOLS[tool]}, {operator} {part}: {verdict}", flush=True)
    return 1 if failed else 0


def work(kind: str, operator: str, device: str, part: int | None = None) -> Iterator[str]:
    """Run the problems, forward and backward, or a part of them; says of each what it was."""
    cases = [case for case in CHOSEN if case.operator == operator]
    # What differs in its dtype differs in its kernels.
    for i, (case, dtype) in enumerate(product(cases, (F32, F16, BF16, F64))):
        if part not in (None, i % PARTS[operator]):
            continue
        for way, (operators, dtypes, more) in WAYS.items():
            tried = more if case.id == "plain" or case in MODELS else dtypes
            if operator not in operators or dtype not in tried:
                continue
            for inputs, grad in problems(case, dtype, device, kind == "hostile"):
                with mode(way, kind == "written"):
                    run(operator, inputs, "triton", grad_output=grad)
                yield f"{case} {dtype} {way}"
    if device == "cuda":
        torch.cuda.synchronize()


def problems(
    case: Case, dtype: torch.dtype, device: str, hostile: bool
) -> Iterator[tuple[dict[str, Any], Tensor | None]]:
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
        # Rounded first: some of them are infinite in half precision.
        positions.view(-1)[i :: 2 * len(values)] = torch.tensor(x).to(positions.dtype)
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
def mode(way: str, written: bool = False) -> Iterator[None]:
    """What decides how a backward is computed, set to one of the ways; products of matrices, if
    asked for, in memory that was `written` before.
    """
    tile, options, summed = tuning.backward_tile, convolution.options, convolution_backward._summed
    rules: dict[str, list[tuple[Any, str, Any]]] = {
        "lists": [(tuning, "by_list", lambda value, *_: value.shape[3] == 1)],
        "parts": [(tuning, "batch_parts", lambda batch, *_: batch)],
        "many": [(tuning, "backward_tile", lambda programs, *sizes: tile(1 << 16, *sizes))],
        "far": [
            (sums, "_row_type", lambda *_: tl.int64),
            (convolution, "options", lambda *x: {**options(*x), "ROW": tl.int64}),
        ],
        "refined": [(tuning, name, _other(name)) for name in refined.CHOICES],
        "chunks": [
            (convolution_backward, "SCRATCH_BYTES", 20_000),
            (tuning, "filter_parts", lambda rows, *_: 2 - rows % 2),
        ],
    }

    def into_zeros(multiply: Callable[..., Tensor], factor: Tensor) -> Callable[..., Tensor]:
        product = summed(multiply, factor)

        def run(*factors: Tensor, out: Tensor | None = None) -> Tensor:
            *_, a, b = factors
            if out is None:
                out = a.new_empty(*a.shape[:-1], b.shape[-1], dtype=accumulator(factor.dtype))
            if out is not factors[0]:  # to which a product is added
                out.zero_()
            return product(*factors, out=out)

        return run

    precise = torch.backends.cuda.matmul.allow_tf32
    before = torch.are_deterministic_algorithms_enabled()
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(launch, "_remembered", {}))
        stack.enter_context(mock.patch.object(direct, "plans", direct.Plans()))
        if written:
            stack.enter_context(mock.patch.object(convolution_backward, "_summed", into_zeros))
        for rule in rules.get(way, []):
            stack.enter_context(mock.patch.object(*rule))
        torch.use_deterministic_algorithms(way == "deterministic", warn_only=True)
        stack.callback(torch.use_deterministic_algorithms, before)
        torch.backends.cuda.matmul.allow_tf32 = way == "tf32"
        stack.callback(setattr, torch.backends.cuda.matmul, "allow_tf32", precise)
        yield


def _other(rule: str) -> Callable[..., dict[str, int]]:
    """The rule with smaller blocks and more warps, where `pliant tune` may find such."""
    own, choose = getattr(tuning, rule), refined.CHOICES[rule]

    def other(*args: Any) -> dict[str, int]:
        tile, choices = own(*args), choose(*args)
        asked = refined.Asked(rule, {}, choices)
        steps = (("num_warps", 1), *((name, -1) for name in tile if name[0] == "B"))
        for name, step in steps:
            values = choices.get(name, [])
            at = values.index(tile[name]) + step if tile[name] in values else -1
            if 0 <= at < len(values):
                moved = {**tile, name: values[at]}
                if asked.allows({key: moved.get(key) for key in choices}):
                    tile = moved
        return tile

    return other


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
