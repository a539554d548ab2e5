"""CPU kernels against the plain PyTorch composites, on the problems of real models.

Both take turns in the same process; medians are shown, with the error against float64 beside them.
Extra memory is measured in a process of its own: the peak over what was there before, less the
result or the gradients. An operator whose named cases fail is not timed.
"""

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import Errors, duration, errors, failures, save
from rich.console import Console
from rich.table import Table

import pliant
from pliant import testing
from pliant.testing import DIFFERENTIABLE, WORKLOADS, composite, timing

# Times faster than the composite on one thread, forward and backward; None: shown only.
TARGETS: dict[str, tuple[float, float] | None] = {
    "detr-enc-b1": (25, 15),
    "rtdetr-dec-b1": (11, 9),
    "bev-sca": (20, 9),
    "msda-doc": None,
    "sparse4d-b1": (15, 10),
    "da-doc": None,
    "gkt-doc": (10, 8),
    "maptr-tiny": (10, 8),
    "dcn-256": (3, 3),
    "dcn-128": None,
    "dcn-doc": None,
}
LARGE = ("detr-enc-b1", "bev-sca", "sparse4d-b1", "gkt-doc", "maptr-tiny", "dcn-256")
SCALING = 1.7  # two threads over one, on the large cases
OVERHEAD = 15e-6  # seconds of a tiny call without gradients
MEMORY = 64 * 2**20  # bytes beyond inputs and outputs, or one copy of the features if that is more

Row = dict[str, Any]


def main() -> int:
    arguments = _arguments()
    if arguments.memory:
        print(json.dumps(_extra_memory(arguments.memory, arguments.impl)))
        return 0
    console = Console(width=None if sys.stdout.isatty() else 120)
    rows: list[Row] = []
    refused: dict[str, list[str]] = {}
    overhead = _overhead(arguments.impl)  # before large problems take the caches
    for id in arguments.case or TARGETS:
        operator = WORKLOADS[id].operator
        with console.status(f"{id}: named cases of {operator}"):
            failed = failures(operator, arguments.impl)
        if failed:
            refused[operator] = failed
            continue
        with console.status(f"{id}: error against float64"):
            problem = _problem(id)
            error = errors(operator, problem[0], arguments.impl, problem[1])
            memory = _measure_memory(id, arguments.impl)
        for threads in arguments.threads:
            with console.status(f"{id}: timing with {threads} threads"):
                rows.append(_row(id, problem, threads, error, memory, arguments))
    console.print(_table(rows))
    console.print(
        f"A tiny call: {', '.join(f'{duration(t)} {how}' for how, t in overhead.items())}"
    )
    met, missed = _verdicts(rows, overhead)
    console.print(
        f"{len(met)} of {len(met) + len(missed)} targets met", *missed, sep="\n  missed: "
    )
    for operator, failed in refused.items():
        console.print(
            f"[bold red]not timed[/] {operator}: its named cases fail", *failed, sep="\n  "
        )
    if arguments.json:
        save(arguments.json, {"rows": rows, "overhead": overhead, "missed": missed})
    wrong = [row for row in rows if not row["share"] <= 1]
    return 1 if refused or wrong else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="CPU kernels against plain PyTorch.")
    cores = os.cpu_count() or 1
    parser.add_argument("--case", action="append", choices=list(TARGETS), help="repeatable")
    parser.add_argument("--threads", type=int, nargs="+", default=[n for n in (1, 2) if n <= cores])
    parser.add_argument("--impl", default="cpu", choices=["cpu", "reference"])
    parser.add_argument("--rounds", type=int, default=5, help="at least so many of each")
    parser.add_argument("--seconds", type=float, default=8.0, help="at least so long each case")
    parser.add_argument("--json", type=Path, help="keep the figures in this file")
    parser.add_argument("--memory", choices=list(TARGETS), help=argparse.SUPPRESS)
    return parser.parse_args()


def _problem(id: str) -> tuple[dict[str, Any], torch.Tensor]:
    """The arguments and the gradient that arrives at the result."""
    inputs = testing.workload(id)
    with torch.no_grad():
        return inputs, testing.incoming(getattr(composite, WORKLOADS[id].operator)(**inputs))


def _row(
    id: str,
    problem: tuple[dict[str, Any], torch.Tensor],
    threads: int,
    error: Errors,
    memory: dict[str, int],
    arguments: argparse.Namespace,
) -> Row:
    operator, (inputs, grad) = WORKLOADS[id].operator, problem
    torch.set_num_threads(threads)
    names = [name for name in DIFFERENTIABLE[operator] if inputs[name] is not None]
    leaves = {name: inputs[name].detach().clone().requires_grad_() for name in names}
    ours = functools.partial(getattr(pliant, operator), **{**inputs, **leaves}, impl=arguments.impl)
    plain = functools.partial(getattr(composite, operator), **{**inputs, **leaves})
    ours_times, plain_times = timing.in_turns(
        [ours, plain],
        list(leaves.values()),
        grad,
        rounds=arguments.rounds,
        seconds=arguments.seconds,
    )
    features = inputs[DIFFERENTIABLE[operator][0]]
    return {
        "case": id,
        "operator": operator,
        "threads": threads,
        "seconds": ours_times._asdict(),
        "plain_seconds": plain_times._asdict(),
        "faster": {k: plain_times._asdict()[k] / t for k, t in ours_times._asdict().items()},
        "error": {"forward": error.forward, "backward": error.backward},
        "share": error.share,
        "extra_memory": memory,
        "allowed_memory": max(MEMORY, features.numel() * features.element_size()),
    }


def _measure_memory(id: str, impl: str) -> dict[str, int]:
    """Every large block is returned to the system when freed, so that the peak tells."""
    thresholds = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    child = subprocess.run(
        [sys.executable, __file__, "--memory", id, "--impl", impl],
        env={**os.environ, **thresholds},
        capture_output=True,
        text=True,
        check=True,
    )
    memory: dict[str, int] = json.loads(child.stdout)
    return memory


def _extra_memory(id: str, impl: str) -> dict[str, int]:
    operator = WORKLOADS[id].operator
    inputs, grad = _problem(id)
    plain = next(case for case in testing.CASES if case.operator == operator)
    testing.run(operator, plain.make(torch.float32, "cpu", 0), impl)  # loads what there is to load
    names = [name for name in DIFFERENTIABLE[operator] if inputs[name] is not None]
    leaves = {name: inputs[name].requires_grad_() for name in names}
    function = functools.partial(getattr(pliant, operator), **{**inputs, **leaves}, impl=impl)
    out: list[torch.Tensor] = []

    def forward() -> list[torch.Tensor]:
        out.append(function())
        return out

    def backward() -> list[torch.Tensor]:
        return list(torch.autograd.grad(out[0], list(leaves.values()), grad))

    return {"forward": _peak(forward), "backward": _peak(backward)}


def _peak(step: Callable[[], list[torch.Tensor]]) -> int:
    """Bytes at the peak of `step`, beyond those before it and those of its results."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = _status("VmRSS")
    results = step()
    made = sum(x.numel() * x.element_size() for x in results)
    return max(0, _status("VmHWM") - before - made)


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def _overhead(impl: str) -> dict[str, float]:
    """Seconds a call of an attention so small that only the way to the kernel costs."""
    torch.set_num_threads(1)
    value = torch.randn(1, 4, 1, 8)
    shapes, starts = torch.tensor([[2, 2]]), torch.tensor([0])
    loc, weight = torch.rand(1, 1, 1, 1, 1, 2), torch.ones(1, 1, 1, 1, 1)

    def call() -> torch.Tensor:
        return pliant.multi_scale_deformable_attn(value, shapes, starts, loc, weight, impl=impl)

    def a_call() -> float:
        return statistics.median(timeit.repeat(call, repeat=15, number=100)) / 100

    with torch.no_grad():
        without = a_call()
    value.requires_grad_()
    return {"without gradients": without, "with gradients": a_call()}


def _verdicts(rows: list[Row], overhead: dict[str, float]) -> tuple[list[str], list[str]]:
    """The targets that were met and those that were missed, in words."""
    results: list[tuple[bool, str]] = []
    by_key = {(row["case"], row["threads"]): row for row in rows}
    for (id, threads), row in by_key.items():
        targets = TARGETS[id] if threads == 1 else None
        for way, target in zip(("forward", "backward"), targets or (), strict=False):
            got = row["faster"][way]
            results.append((got >= target, f"{id} {way}: {got:.1f}x, target {target}x"))
        if threads == 1:
            for way, extra in row["extra_memory"].items():
                text = (
                    f"{id} {way}: {extra / 2**20:.0f} MiB, {row['allowed_memory'] / 2**20:.0f} MiB"
                )
                results.append((extra <= row["allowed_memory"], f"{text} allowed"))
        one = by_key.get((id, 1))
        if threads == 2 and one and id in LARGE:
            for way, seconds in row["seconds"].items():
                gain = one["seconds"][way] / seconds
                text = f"{id} {way}: two threads {gain:.2f}x of one, target {SCALING}x"
                results.append((gain >= SCALING, text))
    call = overhead["without gradients"]
    results.append(
        (call <= OVERHEAD, f"a tiny call: {duration(call)}, {duration(OVERHEAD)} allowed")
    )
    return [text for met, text in results if met], [text for met, text in results if not met]


def _table(rows: list[Row]) -> Table:
    table = Table(title=f"Times faster than plain PyTorch, float32, torch {torch.__version__}")
    for title in ("case", "threads", "forward", "backward", "error", "extra memory"):
        table.add_column(title, justify="left" if title == "case" else "right", no_wrap=True)
    for row in rows:
        targets = TARGETS[row["case"]] if row["threads"] == 1 else None
        cells = []
        for way, target in zip(("forward", "backward"), targets or (None, None), strict=True):
            faster = row["faster"][way]
            colour = "bold" if target is None else "green" if faster >= target else "red"
            aim = "" if target is None else f" [dim]of {target}x[/]"
            cells.append(f"{duration(row['seconds'][way])} [{colour}]{faster:.1f}x[/]{aim}")
        error = " / ".join(f"{x:.0e}" for x in row["error"].values())
        memory = " / ".join(f"{x / 2**20:.0f}" for x in row["extra_memory"].values())
        verdict = "" if row["share"] <= 1 else " [bold red]wrong[/]"
        table.add_row(row["case"], str(row["threads"]), *cells, error + verdict, f"{memory} MiB")
    return table


if __name__ == "__main__":
    raise SystemExit(main())
