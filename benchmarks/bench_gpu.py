"""GPU kernels on the problems of real models: device time, host time, error, memory.

Device time is that of a CUDA graph's replay, so it is what a captured model gets; host time is that
of one eager call. Peers' figures were measured on one NVIDIA H200 and are ratios worth only there.
torchvision runs beside the convolution where it can be imported. An operator whose named cases fail
is not timed.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import errors, failures, save
from rich.console import Console
from rich.table import Table

import pliant
from pliant import testing
from pliant.testing import DIFFERENTIABLE, WORKLOADS

F32, F16 = torch.float32, torch.float16

# id, dtype -> microseconds forward and backward: best peer on an H200, and what we aim at.
FIGURES: dict[tuple[str, torch.dtype], tuple[str, tuple[float, float], tuple[float, float]]] = {
    ("detr-enc-b1", F32): ("FlashDeformAttn / Deformable-DETR", (111, 767), (80, 290)),
    ("detr-enc-b1", F16): ("FlashDeformAttn", (75, 1154), (50, 290)),
    ("detr-enc-b8", F32): ("FlashDeformAttn / Deformable-DETR", (819, 6046), (575, 2250)),
    ("detr-enc-b8", F16): ("FlashDeformAttn", (509, 8902), (400, 2250)),
    ("rtdetr-dec-b16", F32): ("FlashDeformAttn / Deformable-DETR", (45, 229), (30, 120)),
    ("rtdetr-dec-b16", F16): ("FlashDeformAttn", (31, 359), (19, 150)),
    ("bev-sca", F32): ("FlashDeformAttn / Deformable-DETR", (751, 5047), (500, 1980)),
    ("bev-sca", F16): ("FlashDeformAttn", (462, 8759), (380, 1980)),
    ("sparse4d-b1", F32): ("Sparse4D", (551, 2060), (55, 145)),
    ("sparse4d-b8", F32): ("Sparse4D", (4386, 16583), (390, 1050)),
    ("gkt-doc", F32): ("MapTR", (379, 1840), (130, 400)),
    ("dcn-256", F16): ("mmcv / torchvision", (563, 7480), (190, 1200)),
    ("dcn-256", F32): ("torchvision", (620, 6047), (320, 1200)),
    ("dcn-128", F16): ("mmcv / torchvision", (1014, 12514), (300, 2400)),
    ("dcn-doc", F32): ("torchvision", (183, 1285), (60, 200)),
}

Row = dict[str, Any]


def main() -> int:
    arguments = _arguments()
    if not torch.cuda.is_available():
        print("No CUDA device is available.", file=sys.stderr)
        return 2
    console = Console(width=None if sys.stdout.isatty() else 160)
    torch.backends.cuda.matmul.allow_tf32 = True  # as the peers' figures of the convolution
    rows: list[Row] = []
    refused: dict[str, list[str]] = {}
    for id, dtype in FIGURES:
        operator = WORKLOADS[id].operator
        if arguments.case and id not in arguments.case:
            continue
        if failed := failures(operator, "triton", "cuda"):
            refused[operator] = failed
            continue
        own = WORKLOADS[id].positions
        spread = [own] if operator == "deform_conv2d" or own == "uniform" else [own, "uniform"]
        for positions in spread:
            rows.append(_row(id, dtype, positions))
            console.print(_line(rows[-1]))
    console.print(_table(rows))
    for operator, failed in refused.items():
        console.print(f"[red]{operator} was not timed: {len(failed)} of its cases fail[/]")
    if arguments.json:
        save(arguments.json, {"rows": rows, "refused": refused})
    return 1 if refused else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", action="append", choices=sorted({id for id, _ in FIGURES}))
    parser.add_argument("--json", type=Path, help="keep the figures in this file")
    return parser.parse_args()


def _row(id: str, dtype: torch.dtype, positions: str) -> Row:
    operator = WORKLOADS[id].operator
    inputs = testing.workload(id, dtype, "cuda", positions=positions)
    for name, x in inputs.items():  # metadata on the device, as models hold them
        if isinstance(x, torch.Tensor):
            inputs[name] = x.cuda()
    names = [n for n in DIFFERENTIABLE[operator] if inputs.get(n) is not None]
    leaves = [inputs[name].requires_grad_() for name in names]
    function = getattr(pliant, operator)
    grad = testing.incoming(function(**inputs).detach())

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return function(**inputs)  # type: ignore[no-any-return]

    def both() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(function(**inputs), leaves, grad)

    ahead = device_time(forward)
    row: Row = {
        "id": id,
        "dtype": str(dtype).removeprefix("torch."),
        "positions": positions,
        "forward": ahead,
        "backward": device_time(both) - ahead,
        "host": host_time(lambda: function(**inputs)),
        "extra_memory": _extra_memory(both, leaves),
        "error": errors(operator, inputs, "triton", grad)._asdict(),
    }
    row["deterministic_backward"] = _deterministic(both) - ahead
    if operator == "deform_conv2d":
        row |= _beside(inputs, leaves, grad)
    return row


def device_time(step: Callable[[], Any], repeats: int = 5, replays: int = 9) -> float:
    """Microseconds of one step, by replaying a graph of several."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            step()
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / repeats)
    return statistics.median(times)


def host_time(step: Callable[[], Any], calls: int = 50) -> float:
    """Microseconds until one eager call returns, the device left to itself."""
    times = []
    for _ in range(5):
        step()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            step()
        times.append((time.perf_counter() - start) / calls * 1e6)
        torch.cuda.synchronize()
    return statistics.median(times)


def _deterministic(step: Callable[[], Any]) -> float:
    torch.use_deterministic_algorithms(True)
    try:
        step()
        times = []
        for _ in range(3):
            torch.cuda.synchronize()
            start = time.perf_counter()
            step()
            torch.cuda.synchronize()
            times.append((time.perf_counter() - start) * 1e6)
        return statistics.median(times)
    finally:
        torch.use_deterministic_algorithms(False)


def _extra_memory(step: Callable[[], Any], leaves: list[torch.Tensor]) -> int:
    """Bytes at the peak beyond inputs, result and gradients."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    grads = step()
    torch.cuda.synchronize()
    kept = sum(g.numel() * g.element_size() for g in grads)
    return torch.cuda.max_memory_allocated() - before - kept


def _beside(inputs: dict[str, Any], leaves: list[torch.Tensor], grad: torch.Tensor) -> Row:
    """torchvision's operator and an ordinary convolution of the same size."""
    x, weight = inputs["input"], inputs["weight"]
    padding = inputs["padding"]
    ordinary = lambda: torch.nn.functional.conv2d(x, weight, padding=padding)  # noqa: E731
    last = x.detach().contiguous(memory_format=torch.channels_last)

    def channels_last() -> torch.Tensor:
        with torch.no_grad():
            return pliant.deform_conv2d(**{**inputs, "input": last})

    row: Row = {
        "ordinary_forward": device_time(lambda: ordinary().detach()),
        "forward_channels_last": device_time(channels_last),
    }
    try:
        from torchvision.ops import deform_conv2d
    except (ImportError, RuntimeError):
        return row

    def theirs() -> torch.Tensor:
        return deform_conv2d(  # type: ignore[no-any-return]
            x, inputs["offset"].to(x.dtype), weight, padding=padding, mask=inputs["mask"]
        )

    with torch.no_grad():
        row["torchvision_forward"] = device_time(theirs)
    return row


def _line(row: Row) -> str:
    return (
        f"{row['id']} {row['dtype']} {row['positions']}: "
        f"{row['forward']:.1f} / {row['backward']:.1f} us, host {row['host']:.0f} us"
    )


def _table(rows: list[Row]) -> Table:
    table = Table(title="device time in microseconds, forward / backward")
    names = "case,dtype,positions,ours,deterministic,host,peer,over peer,aim,error,extra MiB"
    for name in names.split(","):
        table.add_column(name, justify="left" if name in ("case", "dtype") else "right")
    for row in rows:
        dtype = getattr(torch, row["dtype"])
        _, peer, aim = FIGURES[row["id"], dtype]
        own = row["positions"] == WORKLOADS[row["id"]].positions
        ratios = f"{peer[0] / row['forward']:.1f}x / {peer[1] / row['backward']:.1f}x"
        table.add_row(
            row["id"], row["dtype"], row["positions"],
            f"{row['forward']:.0f} / {row['backward']:.0f}", f"{row['deterministic_backward']:.0f}",
            f"{row['host']:.0f}", f"{peer[0]} / {peer[1]}" if own else "", ratios if own else "",
            f"{aim[0]} / {aim[1]}" if own else "",
            f"{row['error']['forward']:.0e} / {row['error']['backward']:.0e}",
            f"{row['extra_memory'] / 2**20:.0f}",
        )  # fmt: skip
    return table


if __name__ == "__main__":
    sys.exit(main())
