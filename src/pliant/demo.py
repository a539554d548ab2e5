"""`pliant demo`: the four operators at the sizes that the vendor documents, checked, timed, drawn.

Every result and gradient, under our name and under the vendor's, is compared with the float64
reference. Anything off makes the command fail.
"""

from __future__ import annotations

import functools
import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich import box, progress
from rich.console import Console
from rich.table import Table
from torch import Tensor

import pliant
from pliant import plot
from pliant.compat import mx_driving, torch_npu
from pliant.sampling import ops
from pliant.testing import DIFFERENTIABLE, compare, composite, run as run_operator, timing
from pliant.testing.exact import exact

SEED = 7
STEPS = ("float64 reference", "our name", "Huawei's name", "timing", "comparison")


class Job(NamedTuple):
    """One operator with its operands. `name` is both our function and the plain composite."""

    name: str
    vendor_name: str
    vendor: Callable[[dict[str, Any]], Tensor]
    shape: str
    arguments: dict[str, Any]
    grad: Tensor  # the gradient that arrives at the result
    note: str  # what the picture shows
    draw: Callable[..., None]


class Deviation(NamedTuple):
    """How far one tensor is from what it should be, at its worst element."""

    what: str
    found: compare.Worst

    def __str__(self) -> str:
        return f"{self.what}: error {self.found.error:.1e}, allowed {self.found.budget:.1e}"


class Row(NamedTuple):
    """What came of a job."""

    job: Job
    kernels: list[str]
    times: timing.Times
    plain_times: timing.Times
    deviations: list[Deviation]

    @property
    def wrong(self) -> list[Deviation]:
        return [d for d in self.deviations if not d.found.share <= 1]


def run(
    *,
    device: str | None = None,
    operators: Sequence[str] = (),
    picture: Path | None = None,
    console: Console | None = None,
) -> int:
    """Run the jobs (all, or those named), show the table, save the picture; the exit status."""
    console = console or Console()
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    names = [name for name in JOBS if not operators or name in operators]
    jobs: dict[str, Job] = {}
    rows: list[Row] = []
    columns = (
        progress.TextColumn("{task.description:48}"),
        progress.BarColumn(),
        progress.TimeElapsedColumn(),
    )
    with progress.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=len(STEPS) * len(names))
        for name in names:
            jobs[name] = _on(place, JOBS[name](torch.Generator().manual_seed(SEED)))
            work = _work(jobs[name], rows)
            for step in STEPS:
                bar.update(task, description=f"{jobs[name].name}: {step}")
                next(work)
                bar.advance(task)
    console.print(_table(rows, place))
    if any("reference" in kernel for row in rows for kernel in row.kernels):
        console.print("Plain PyTorch served: `pliant info` tells why no faster kernel could.")
    if picture is not None:
        _draw(jobs, picture)
        console.print(f"Where they read: {picture}", highlight=False, soft_wrap=True)
    wrong = [f"{row.job.name}: {deviation}" for row in rows for deviation in row.wrong]
    for line in wrong:
        console.print(f"[bold red]wrong[/] {line}", highlight=False, soft_wrap=True)
    if not wrong:
        agreed = "Every result and gradient agrees with float64"
        console.print(f"{agreed}, under our names and Huawei's.")
    return 1 if wrong else 0


def _work(job: Job, rows: list[Row]) -> Iterator[None]:
    """The work of one job, paused after each of STEPS."""
    expected = exact(job.name, job.arguments, job.grad)
    yield
    with ops.record() as calls:
        ours = run_operator(job.name, job.arguments, grad_output=job.grad)
    yield
    vendors = _vendors(job)
    yield
    leaves = _leaves(job)
    functions = getattr(pliant, job.name), getattr(composite, job.name)
    candidates = [functools.partial(function, **leaves) for function in functions]
    wanted = [leaves[name] for name in DIFFERENTIABLE[job.name]]
    times, plain_times = timing.in_turns(candidates, wanted, job.grad, rounds=1)
    yield
    deviations = [
        *_compare("", ours, expected),
        *_compare(f" of {job.vendor_name}", vendors, expected),
        *_compare(f" of {job.vendor_name} against {job.name}", vendors, ours),
    ]
    forward = [(name, backend) for name, backend in calls if not name.endswith("_backward")]
    kernels = [f"{backend}\n{name}" for name, backend in dict.fromkeys(forward)]
    rows.append(Row(job, kernels, times, plain_times, deviations))
    yield


def _leaves(job: Job) -> dict[str, Any]:
    """The arguments, differentiable ones as fresh leaves of the graph."""
    return {
        name: x.detach().clone().requires_grad_() if name in DIFFERENTIABLE[job.name] else x
        for name, x in job.arguments.items()
    }


def _vendors(job: Job) -> tuple[Tensor, dict[str, Tensor]]:
    """The result and the gradients under the vendor's name."""
    leaves, names = _leaves(job), DIFFERENTIABLE[job.name]
    out = job.vendor(leaves)
    grads = torch.autograd.grad(out, [leaves[name] for name in names], job.grad)
    return out.detach(), dict(zip(names, grads, strict=True))


def _compare(
    suffix: str, got: tuple[Tensor, dict[str, Tensor]], wanted: tuple[Tensor, dict[str, Tensor]]
) -> list[Deviation]:
    (out, grads), (wanted_out, wanted_grads) = got, wanted
    pairs = {"result": (out, wanted_out)}
    pairs |= {f"gradient of {n}": (grads[n], grad) for n, grad in wanted_grads.items()}
    return [
        Deviation(what + suffix, compare.worst(actual, expected.double()))
        for what, (actual, expected) in pairs.items()
    ]


def _on(device: torch.device, job: Job) -> Job:
    tensors = {name: x.to(device) for name, x in job.arguments.items() if isinstance(x, Tensor)}
    return job._replace(arguments={**job.arguments, **tensors}, grad=job.grad.to(device))


# The jobs: the sizes of the vendor's documents, positions and weights as networks have them


def aggregation(g: torch.Generator) -> Job:
    height, width, channels, anchors, points, groups = 32, 88, 256, 10, 2000, 8
    middle = torch.rand(1, anchors, 1, 1, 2, generator=g) * torch.tensor([84, 26])
    extent = torch.rand(1, anchors, 1, 1, 2, generator=g) * torch.tensor([4, 2]) + 1
    pixels = middle + 2.5 + extent * torch.randn(1, anchors, points, 1, 2, generator=g)
    arguments: dict[str, Any] = {
        "feature_maps": _features(1, height, width, channels, g),
        "spatial_shape": torch.tensor([[[height, width]]], dtype=torch.int32),
        "scale_start_index": torch.tensor([[0]], dtype=torch.int32),
        "sample_locations": (_off_lines(pixels) + 0.5) / torch.tensor([width, height]),
        "weight": torch.randn(1, anchors, points, 1, 1, groups, generator=g),
    }
    return Job(
        name="deformable_aggregation",
        vendor_name="mx_driving.deformable_aggregation",
        vendor=lambda arguments: mx_driving.deformable_aggregation(*arguments.values()),
        shape="1x2816x256\nmap 32x88\n10 anchors\n2000 points\n8 groups",
        arguments=arguments,
        grad=torch.randn(1, anchors, channels, generator=g),
        note="key points of ten anchors; crosses lie outside and do not count",
        draw=plot.aggregation,
    )


def attention(g: torch.Generator) -> Job:
    side, heads, channels, queries, points = 100, 4, 32, 16, 8
    cells = torch.cartesian_prod(torch.arange(4), torch.arange(4)).view(1, queries, 1, 1, 1, 2)
    middle = 25 * cells + 12 + 4 * torch.randn(cells.shape, generator=g)
    turns = (torch.arange(heads) + 0.5) / heads * 2 * math.pi
    ways = torch.stack([turns.cos(), turns.sin()], -1).view(1, 1, heads, 1, 1, 2)
    reach = 1.2 * torch.arange(1, points + 1).view(1, 1, 1, 1, points, 1)
    noise = 0.9 * torch.randn(1, queries, heads, 1, points, 2, generator=g)
    arguments: dict[str, Any] = {
        "value": _features(1, side, side, heads * channels, g).view(1, -1, heads, channels),
        "spatial_shapes": torch.tensor([[side, side]]),
        "level_start_index": torch.tensor([0]),
        "sampling_locations": (_off_lines(middle + ways * reach + noise) + 0.5) / side,
        "attention_weights": torch.randn(1, queries, heads, 1, points, generator=g).softmax(-1),
    }
    return Job(
        name="multi_scale_deformable_attn",
        vendor_name="mx_driving.multi_scale_deformable_attn",
        vendor=lambda arguments: mx_driving.multi_scale_deformable_attn(*arguments.values()),
        shape="1x10000x4x32\nmap 100x100\n16 queries\n8 points",
        arguments=arguments,
        grad=torch.randn(1, queries, heads * channels, generator=g),
        note="sixteen queries; a colour a head, area by weight",
        draw=plot.attention,
    )


def geometric(g: torch.Generator) -> Job:
    batch, heads, channels, queries, levels, points, height, width = 6, 8, 32, 9680, 4, 4, 60, 40
    middle = torch.rand(batch, queries, 1, 1, 1, 2, generator=g) * torch.tensor([width, height])
    spread = 3 * torch.randn(batch, queries, heads, levels, points, 2, generator=g)
    value = _features(batch * levels, height, width, heads * channels, g)
    arguments: dict[str, Any] = {
        "value": value.view(batch, -1, heads, channels),
        "spatial_shapes": torch.tensor([[height, width]] * levels, dtype=torch.int32),
        "level_start_index": torch.arange(levels, dtype=torch.int32) * height * width,
        "sampling_locations": _off_lines(middle + spread),
        "attention_weights": torch.rand(batch, queries, heads, levels, points, generator=g) + 1e-5,
    }
    return Job(
        name="geometric_kernel_attention",
        vendor_name="mx_driving.geometric_kernel_attention",
        vendor=lambda arguments: mx_driving.geometric_kernel_attention(*arguments.values()),
        shape="6x9600x8x32\n4 maps 60x40\n9680 queries\n4 points",
        arguments=arguments,
        grad=torch.randn(batch, queries, heads * channels, generator=g),
        note="dots: positions; squares: the pixels read",
        draw=plot.geometric,
    )


def convolution(g: torch.Generator) -> Job:
    batch, channels, side, kernel = 16, 32, 32, 5
    # Windows bent and moved by a map that varies slowly over the image, and a little noise.
    sizes = torch.tensor([0.4, 0.4, 0.4, 0.4, 1.5, 1.5]).view(6, 1, 1)
    coarse = torch.randn(batch, 6, 5, 5, generator=g) * sizes
    field = torch.nn.functional.interpolate(coarse, (side, side), mode="bicubic")
    bend, move = field[:, :4].view(batch, 2, 2, side, side), field[:, None, 4:]
    taps = torch.cartesian_prod(torch.arange(-2.0, 3), torch.arange(-2.0, 3))  # [K, 2], (y, x)
    noise = 0.15 * torch.randn(batch, len(taps), 2, side, side, generator=g)
    offset = torch.einsum("nijyx,kj->nkiyx", bend, taps) + move + noise
    features = _features(batch, side, side, channels, g)
    scale = 1 / math.sqrt(channels * len(taps))
    arguments: dict[str, Any] = {
        "input": features.view(batch, side, side, channels).permute(0, 3, 1, 2).contiguous(),
        "offset": _off_lines(offset).flatten(1, 2),
        "weight": scale * torch.randn(channels, channels, kernel, kernel, generator=g),
        "bias": torch.randn(channels, generator=g),
        "stride": 1,
        "padding": 2,
        "dilation": 1,
        "mask": torch.rand(batch, len(taps), side, side, generator=g),
    }

    def vendor(a: dict[str, Any]) -> Tensor:
        blocks = torch.cat([a["offset"][:, 1::2], a["offset"][:, 0::2], a["mask"]], 1)  # x, y, mask
        output, _ = torch_npu.npu_deformable_conv2d(
            a["input"], a["weight"], blocks, a["bias"], [kernel, kernel], [1, 1, 1, 1], [2, 2, 2, 2]
        )
        return output

    return Job(
        name="deform_conv2d",
        vendor_name="torch_npu.npu_deformable_conv2d",
        vendor=vendor,
        shape="16x32x32x32\nkernel 5x5\npadding 2",
        arguments=arguments,
        grad=torch.randn(batch, channels, side, side, generator=g),
        note="five windows, dotted, and where the offsets move them",
        draw=plot.convolution,
    )


JOBS = {
    "aggregation": aggregation,
    "attention": attention,
    "geometric": geometric,
    "convolution": convolution,
}


def _features(batch: int, height: int, width: int, channels: int, g: torch.Generator) -> Tensor:
    """[batch, height * width, channels]: smooth blobs, a channel pattern each, some noise."""
    blobs = 40
    x = torch.arange(width).view(1, 1, width, 1) / height
    y = torch.arange(height).view(1, height, 1, 1) / height
    at_x, at_y, spread = (torch.rand(batch, 1, 1, blobs, generator=g) for _ in range(3))
    distance = (x - at_x * width / height) ** 2 + (y - at_y) ** 2
    bells = torch.exp(-distance / (0.03 + 0.12 * spread) ** 2).flatten(1, 2)
    noise = 0.08 * torch.randn(batch, height * width, channels, generator=g)
    return bells @ torch.randn(batch, blobs, channels, generator=g) + noise


def _off_lines(pixels: Tensor) -> Tensor:
    """The positions, moved off the lines where a derivative or a counting rule jumps (pixel centres
    and borders): there float32 and float64 may rightly fall on different sides."""
    part = pixels - pixels.floor()
    return pixels.floor() + torch.where(part < 0.5, part.clamp(0.02, 0.48), part.clamp(0.52, 0.98))


# What the user sees


def _table(rows: list[Row], device: torch.device) -> Table:
    cuda = device.type == "cuda"
    place = (
        torch.cuda.get_device_name(device) if cuda else f"CPU, {torch.get_num_threads()} threads"
    )
    table = Table(
        title=f"pliant {pliant.__version__} on {place}, float32",
        caption="x: times faster than plain PyTorch on the same device",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_lines=True,
        title_justify="left",
        caption_justify="left",
    )
    for title in ("operator", "shape", "kernel"):
        table.add_column(title)
    for title in ("forward", "backward", "largest error\n/ tolerance"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        name = textwrap.fill(row.job.name.replace("_", "_ "), 18).replace("_ ", "_")
        times = zip(row.times, row.plain_times, strict=True)
        speed = [f"{_duration(ours)}\n[bold]{plain / ours:.1f}x[/]" for ours, plain in times]
        worst = max((d.found for d in row.deviations), key=lambda found: found.share)
        verdict = "[bold red]wrong[/]" if row.wrong else "[bold green]right[/]"
        error = f"{worst.error:.1e}\n/ {worst.budget:.1e}\n{verdict}"
        table.add_row(f"[bold]{name}[/]", row.job.shape, "\n".join(row.kernels), *speed, error)
    return table


def _duration(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.0f} µs"


def _draw(jobs: dict[str, Job], path: Path) -> None:
    if len(jobs) == len(JOBS):  # the wide map above, the others side by side
        mosaic = [["aggregation"] * 3, ["attention", "geometric", "convolution"]]
        canvas, axes = plot.figure("Where the operators read", mosaic, (13, 12), (1, 0.72, 1))
    else:
        canvas, axes = plot.figure("Where the operators read", [list(jobs)], (7.5 * len(jobs), 8))
    for name, job in jobs.items():
        job.draw(axes[name], **job.arguments)
        plot.label(axes[name], job.name, job.note)
    plot.save(canvas, path)
