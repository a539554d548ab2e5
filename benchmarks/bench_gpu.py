"""GPU kernels on the problems of real models: device time, host time, error, memory.

Device time is that of a CUDA graph's replay, so it is what a captured model gets: of the forward,
of the backward, and of both in turns, where each finds less of its own in the caches. Host time is
that until one eager call with gradients returns, and its backward; behind them what Triton itself
takes to launch the call's largest kernel, by its arguments, and to allocate the result, in turns
with the call: what a loaded machine adds to one it adds to the other. Peers' figures were measured
on one NVIDIA H200 and are ratios worth only there, with positions of the features' dtype; in
float16 a row more has them in float32. torchvision runs beside the convolution where it can be
imported. An operator whose named cases fail is not timed.

With --apart the features of a sum lie channel by channel, as a convolution leaves them; the peers'
kernels take them pixel by pixel.
"""

import argparse
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from common import errors, failures, save
from rich.console import Console
from rich.table import Table

import pliant
from pliant import testing
from pliant.compat.torch_npu import npu_deformable_conv2d
from pliant.kernels.triton.launch import Launch
from pliant.testing import DIFFERENTIABLE, WORKLOADS
from pliant.testing.cases import turned
from pliant.testing.timing import Replay

Times = tuple[float, float]  # microseconds, forward and backward
PRECISE = "float32"  # what is said of positions that are more precise than the features


class Figure(NamedTuple):
    """What is known of a case on an NVIDIA H200.

    The floor is the traffic of memory, or of all in-map corners at the rate of the second-level
    cache (read in the forward, summed atomically in float32 in the backward) if that takes longer.
    It is not a hard limit: neighbours share lines of the first-level cache.
    """

    id: str
    dtype: (
        str  # tf32: float32 tensors, products as `torch.backends.cuda.matmul.allow_tf32` has them
    )
    peers: str = ""  # the best ones, forward / backward
    peer: Times | None = None
    floor: Times | None = None
    aim: Times | None = None
    aim_last: float | None = None  # of a forward whose input is channels-last
    uniform: Times | None = None  # the peer's with uniform positions


NPU = "npu_deformable_conv2d"
FLASH = "FlashDeformAttn / Deformable-DETR"
FIGURES = [
    Figure("detr-enc-b1", "float32", FLASH, (111, 767), (101, 243), (80, 290)),
    Figure("detr-enc-b1", "float16", "FlashDeformAttn", (75, 1154), (51, 243), (50, 290)),
    Figure("detr-enc-b8", "float32", FLASH, (819, 6046), (810, 1947), (575, 2250)),
    Figure("detr-enc-b8", "float16", "FlashDeformAttn", (509, 8902), (405, 1947), (400, 2250)),
    Figure("rtdetr-dec-b16", "float32", FLASH, (45, 229), (35, 69), (30, 120)),
    Figure("rtdetr-dec-b16", "float16", "FlashDeformAttn", (31, 359), (17, 50), (19, 150)),
    Figure("bev-sca", "float32", FLASH, (751, 5047), (720, 1731), (500, 1980)),
    Figure("bev-sca", "float16", "FlashDeformAttn", (462, 8759), (360, 1731), (380, 1980)),
    Figure("msda-doc", "float32"),
    Figure("sparse4d-b1", "float32", "Sparse4D", (551, 2060), (24, 59), (55, 145)),
    Figure(
        "sparse4d-b8", "float32", "Sparse4D", (4386, 16583), (197, 475), (390, 1050),
        uniform=(6854, 163657),
    ),
    Figure("da-doc", "float32"),
    Figure("gkt-doc", "float32", "MapTR", (379, 1840), (107, 257), (130, 400)),
    Figure("maptr-tiny", "float32"),
    Figure("dcn-256", "float16", "mmcv / torchvision", (563, 7480), (70, 335), (190, 1200), 150),
    Figure("dcn-256", "tf32", "torchvision", (620, 6047), (139, 335), (320, 1200)),
    Figure("dcn-256", "float32"),
    Figure("dcn-128", "float16", "mmcv / torchvision", (1014, 12514), (139, 670), (300, 2400), 230),
    Figure("dcn-doc", "float32", "torchvision", (183, 1285), (24, 57), (60, 200)),
]  # fmt: skip
HOST = 45, 28  # microseconds: the aim of a call with gradients, where Triton's launch takes 28
KNOWN = {(figure.id, figure.dtype): figure for figure in FIGURES}

Row = dict[str, Any]


def main() -> int:
    arguments = _arguments()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or cuBLAS is not deterministic
    if not torch.cuda.is_available():
        print("No CUDA device is available.", file=sys.stderr)
        return 2
    console = Console(width=None if sys.stdout.isatty() else 190)
    console.print(import_module("pliant.kernels.triton").describe())  # whose tiles they are
    torch.cuda.set_stream(torch.cuda.Stream())  # for graphs
    rows: list[Row] = []
    refused: dict[str, list[str]] = {}
    for figure in FIGURES:
        operator = WORKLOADS[figure.id].operator
        if arguments.case and figure.id not in arguments.case:
            continue
        if failed := failures(operator, "triton", "cuda"):
            refused[operator] = failed
            continue
        own = WORKLOADS[figure.id].positions
        kinds = [own]
        if own in ("local", "proj") and "dcn" not in figure.id:
            kinds += ["uniform"]
        if figure.dtype == "float16":
            kinds += [f"{own} {PRECISE}"]
        for positions in kinds:
            rows.append(_row(figure, positions, arguments.apart))
            console.print(_line(rows[-1]))
            if arguments.json:  # so far, should the rest be cut off
                save(arguments.json, {"rows": rows, "refused": refused})
    console.print(_table(rows))
    met, missed = _verdicts(rows)
    console.print(f"{met} of {met + len(missed)} aims met", *missed, sep="\n  missed: ")
    console.print(*_host_verdicts(rows), sep="\n")
    for operator, failed in refused.items():
        console.print(f"[red]{operator} was not timed: {len(failed)} of its cases fail[/]")
    wrong = [row for row in rows if not row["error"]["share"] <= 1]
    for row in wrong:
        share = row["error"]["share"]
        console.print(f"[red]{row['id']} {row['dtype']}: {share:.2g} times the error budget[/]")
    return 1 if refused or wrong else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--case", action="append", choices=sorted({figure.id for figure in FIGURES})
    )
    parser.add_argument("--apart", action="store_true", help="features [N, C, pixels] in memory")
    parser.add_argument("--json", type=Path, help="keep the figures in this file")
    return parser.parse_args()


def _row(figure: Figure, positions: str, apart: bool) -> Row:
    operator = WORKLOADS[figure.id].operator
    dtype = torch.float32 if figure.dtype == "tf32" else getattr(torch, figure.dtype)
    where = torch.float32 if PRECISE in positions else dtype
    drawn = positions.removesuffix(f" {PRECISE}")
    inputs = testing.workload(figure.id, dtype, "cuda", positions=drawn, position_dtype=where)
    for name, x in inputs.items():  # metadata on the device, as models hold them
        if isinstance(x, torch.Tensor):
            inputs[name] = x.cuda()
    names = [n for n in DIFFERENTIABLE[operator] if inputs.get(n) is not None]
    if apart and operator != "deform_conv2d":
        inputs[names[0]], positions = turned(inputs[names[0]]), f"{positions}, apart"
    leaves = [inputs[name].requires_grad_() for name in names]
    function = functools.partial(getattr(pliant, operator), **inputs)
    coarse = operator == "deform_conv2d" and figure.dtype != "float32"
    grad = testing.incoming(function().detach())
    torch.backends.cuda.matmul.allow_tf32 = figure.dtype == "tf32"
    torch.backends.cudnn.allow_tf32 = figure.dtype == "tf32"  # of the ordinary convolution
    try:
        forward, backward = _times(function, leaves, grad)
        steps = function, torch.no_grad()(function), launch_by_triton(function)
        host, without, launch_only = host_times(*steps)
        out, differentiate = function(), functools.partial(torch.autograd.grad, retain_graph=True)
        [host_backward] = host_times(lambda: differentiate(out, leaves, grad), calls=20)
        row: Row = {
            "id": figure.id,
            "dtype": figure.dtype,
            "positions": positions,
            "forward": forward,
            "backward": backward,
            "both": device_time(lambda: torch.autograd.grad(function(), leaves, grad)),
            "deterministic_backward": _deterministic(function, leaves, grad),
            "host": host,
            "host_backward": host_backward,
            "host_without_gradients": without,
            "launch_by_triton": launch_only,
            "extra_memory": _extra_memory(function, leaves, grad),
            "error": errors(operator, inputs, "triton", grad, coarse=coarse)._asdict(),
        }
        return row | (_beside(inputs, leaves, grad) if operator == "deform_conv2d" else {})
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = True


def _times(
    function: Callable[[], torch.Tensor],
    leaves: list[torch.Tensor],
    grad: torch.Tensor,
    clock: Callable[[Callable[[], Any]], float] | None = None,
) -> Times:
    """Device time, forward without gradients and backward."""
    clock = clock or device_time
    out = function()
    backward = functools.partial(torch.autograd.grad, out, leaves, grad, retain_graph=True)
    return clock(torch.no_grad()(function)), clock(backward)


def device_time(step: Callable[[], Any]) -> float:
    """Microseconds of one step."""
    return Replay(step).microseconds()


def queued_time(step: Callable[[], Any], repeats: int = 20) -> float:
    """Microseconds of one step of many in a queue, for kernels that a graph does not capture."""
    times = []
    for _ in range(5):
        step()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            step()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / repeats)
    return statistics.median(times)


def host_times(*steps: Callable[[], Any], calls: int = 50) -> list[float]:
    """Microseconds until one eager call of each returns, the device left to itself; in turns."""
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(9):
        for step, mine in zip(steps, times, strict=True):
            step()
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                step()
            mine.append((time.perf_counter() - start) / calls * 1e6)
            torch.cuda.synchronize()
    return [statistics.median(mine) for mine in times]


def launch_by_triton(function: Callable[[], torch.Tensor]) -> Callable[[], None]:
    """The kernel with most arguments of a call, as Triton launches it, and room for the result."""
    launches: list[tuple[Launch, tuple[torch.Tensor, ...]]] = []
    own = Launch.__call__

    def noted(self: Launch, *tensors: torch.Tensor) -> None:
        launches.append((self, tensors))
        own(self, *tensors)

    with mock.patch.object(Launch, "__call__", noted), torch.no_grad():
        out = function()
    launch, tensors = max(launches, key=lambda one: len(one[0].kernel.arg_names))
    kernel, constants = launch.kernel[launch.grid], {"enable_fp_fusion": True, **launch.constants}

    def step() -> None:
        torch.empty_like(out)
        kernel(*tensors, *launch.integers, **constants)

    return step


def _deterministic(
    function: Callable[[], torch.Tensor], leaves: list[torch.Tensor], grad: torch.Tensor
) -> float:
    """Microseconds of an eager backward in the deterministic mode."""
    torch.use_deterministic_algorithms(True)
    try:
        out, times = function(), []
        for _ in range(4):
            torch.cuda.synchronize()
            start = time.perf_counter()
            torch.autograd.grad(out, leaves, grad, retain_graph=True)
            torch.cuda.synchronize()
            times.append((time.perf_counter() - start) * 1e6)
        return statistics.median(times[1:])
    finally:
        torch.use_deterministic_algorithms(False)


def _extra_memory(
    function: Callable[[], torch.Tensor], leaves: list[torch.Tensor], grad: torch.Tensor
) -> int:
    """Bytes at the peak of a step beyond inputs, result and gradients."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = function()
    grads = torch.autograd.grad(out, leaves, grad)
    torch.cuda.synchronize()
    made = sum(x.numel() * x.element_size() for x in (out, *grads))
    return torch.cuda.max_memory_allocated() - before - made


def _beside(inputs: dict[str, Any], leaves: list[torch.Tensor], grad: torch.Tensor) -> Row:
    """Ours on a channels-last input, an ordinary convolution of the size, the columns alone and
    with the output, and torchvision's."""
    x, offset, weight, mask = (inputs[name] for name in ("input", "offset", "weight", "mask"))
    padding, last = inputs["padding"], torch.channels_last
    pixels, filters = (
        t.detach().contiguous(memory_format=last).requires_grad_() for t in (x, weight)
    )
    ours = functools.partial(pliant.deform_conv2d, **{**inputs, "input": pixels, "weight": filters})
    known = [pixels if t is x else filters if t is weight else t for t in leaves]
    conv = functools.partial(torch.nn.functional.conv2d, pixels, filters, padding=padding)
    grad_last = grad.contiguous(memory_format=last)
    host, ordinary_host = host_times(ours, conv)
    row: Row = {
        "channels_last": _times(ours, known, grad_last),
        "ordinary": _times(conv, [pixels, filters], grad_last),
        "host_beside": {"channels_last": host, "ordinary": ordinary_host},
    }
    mine, moved, _, factor = (t.detach().requires_grad_() for t in (x, offset, weight, mask))
    kernel = tuple(weight.shape[2:])
    columns = functools.partial(
        pliant.deform_columns, mine, moved, kernel, padding=padding, mask=factor
    )
    grad_columns = testing.incoming(columns().detach())
    row["columns"] = _times(columns, [mine, moved, factor], grad_columns)
    # The vendor's function returns the columns as well; its offsets come in blocks.
    (down, across), pad = offset.detach().unflatten(1, (-1, 2)).unbind(2), [padding] * 4
    blocks = torch.cat((across, down, mask.detach().to(offset.dtype)), 1).requires_grad_()
    ones = [1, 1, 1, 1]
    vendor = functools.partial(
        npu_deformable_conv2d, mine, weight, blocks, None, kernel, ones, pad, ones
    )
    row[NPU] = _times(lambda: vendor()[0], [mine, weight, blocks], grad)
    try:
        from torchvision.ops import deform_conv2d
    except (ImportError, RuntimeError):
        return row
    shifts = offset.detach().to(x.dtype).requires_grad_()
    theirs = functools.partial(deform_conv2d, x, shifts, weight, padding=padding, mask=mask)
    known = [shifts if t is offset else t for t in leaves]
    # Its kernels run on the default stream, whatever stream is the current one.
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.default_stream()):
        row["torchvision"] = _times(theirs, known, grad, queued_time)
        [row["host_beside"]["torchvision"]] = host_times(theirs)
        torch.cuda.synchronize()
    return row


def _line(row: Row) -> str:
    return (
        f"{row['id']} {row['dtype']} {row['positions']}: "
        f"{row['forward']:.1f} / {row['backward']:.1f} us, in turns {row['both']:.1f} us, "
        f"host {row['host']:.0f} / {row['host_backward']:.0f} us, "
        f"launch by Triton {row['launch_by_triton']:.0f} us"
    )


def _verdicts(rows: list[Row]) -> tuple[int, list[str]]:
    """How many aims of device time are met, and those that are missed, in words."""
    met, missed = 0, []
    for row in rows:
        figure = KNOWN[row["id"], row["dtype"]]
        if row["positions"] != WORKLOADS[row["id"]].positions or figure.aim is None:
            continue
        got = [("forward", row["forward"], figure.aim[0])]
        got.append(("backward", row["backward"], figure.aim[1]))
        if figure.aim_last is not None:
            got.append(("channels-last forward", row["channels_last"][0], figure.aim_last))
        for way, took, aim in got:
            met += took <= aim
            if took > aim:
                missed.append(f"{figure.id} {figure.dtype} {way}: {took:.1f} us, aim {aim}")
    return met, missed


def _host_verdicts(rows: list[Row]) -> list[str]:
    """How many calls with gradients returned in time, and by the scale of Triton's own launch."""
    aim, launch = HOST
    hosts = [(row["host"], row["launch_by_triton"]) for row in rows]
    within = sum(host <= aim for host, _ in hosts)
    scaled = sum(host <= aim * max(1, own / launch) for host, own in hosts)
    took = [own for _, own in hosts] or [0]
    return [
        f"{within} of {len(rows)} calls with gradients returned within {aim} us, "
        f"where Triton took {min(took):.0f} to {max(took):.0f} to launch a kernel",
        f"{scaled} within {aim / launch:.1f} times its launch where that took over {launch} us",
    ]


def _table(rows: list[Row]) -> Table:
    title = "device time in microseconds, forward / backward; memory beyond inputs and results"
    table = Table(title=title)
    names = "case,dtype,positions,ours,in turns,peer,over peer,of floor,aim,determ."
    names += ",host / Triton's launch,error,MiB"
    for name in names.split(","):
        table.add_column(name, justify="left" if name in ("case", "dtype") else "right")
    for row in rows:
        figure, ours = KNOWN[row["id"], row["dtype"]], (row["forward"], row["backward"])
        own = row["positions"] == WORKLOADS[row["id"]].positions
        peer, floor, aim = (t if own else None for t in (figure.peer, figure.floor, figure.aim))
        if row["positions"] == "uniform" and not own:
            peer = figure.uniform
        table.add_row(
            row["id"], row["dtype"], row["positions"], _pair(ours), f"{row['both']:.0f}",
            _pair(peer), _pair(peer and (peer[0] / ours[0], peer[1] / ours[1]), "{:.1f}x"),
            _pair(floor and (ours[0] / floor[0], ours[1] / floor[1]), "{:.1f}"), _pair(aim),
            f"{row['deterministic_backward']:.0f}",
            _pair((row["host"], row["host_backward"])) + f" / {row['launch_by_triton']:.0f}",
            _pair((row["error"]["forward"], row["error"]["backward"]), "{:.0e}"),
            f"{row['extra_memory'] / 2**20:.0f}",
        )  # fmt: skip
        for beside in ("channels_last", "torchvision", "ordinary", "columns", NPU):
            if beside in row:
                theirs = row[beside]
                ratio = _pair((theirs[0] / ours[0], theirs[1] / ours[1]), "{:.1f}x")
                host = row["host_beside"].get(beside)
                table.add_row(
                    "", beside.replace("_", "-"), "", _pair(theirs), "", "", ratio, "", "", "",
                    "" if host is None else f"{host:.0f}",
                )  # fmt: skip
    return table


def _pair(times: Times | None, form: str = "{:.0f}") -> str:
    return "" if times is None else " / ".join(form.format(t) for t in times)


if __name__ == "__main__":
    sys.exit(main())
