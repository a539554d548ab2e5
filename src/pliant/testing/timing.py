"""How long things take: candidates in turns, so that a slow moment hits all of them alike.

`in_turns` asks the clock of the machine, `Replay` that of the GPU.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Times(NamedTuple):
    """Seconds, median over the rounds."""

    forward: float
    backward: float


def in_turns(
    candidates: Sequence[Callable[[], Tensor]],
    inputs: Sequence[Tensor],
    grad: Tensor,
    *,
    seconds: float = 1.0,
    rounds: int = 3,
    most: int = 1000,
) -> list[Times]:
    """Time each candidate's forward, then its gradients of `inputs`, in rounds of one turn each.

    Forwards follow forwards; a backward follows its own forward.

    A first round is not measured. Then at least `rounds`, until half of the `seconds` have been
    measured or `most` rounds are done.
    """

    def forward(candidate: Callable[[], Tensor]) -> float:
        start = _now(grad)
        candidate()
        return _now(grad) - start

    def backward(candidate: Callable[[], Tensor]) -> float:
        out = candidate()
        start = _now(grad)
        torch.autograd.grad(out, inputs, grad)
        return _now(grad) - start

    def medians(step: Callable[[Callable[[], Tensor]], float]) -> list[float]:
        clocks: list[list[float]] = []
        while len(clocks) < most and (len(clocks) < rounds or sum(map(sum, clocks)) < seconds / 2):
            clocks.append([step(candidate) for candidate in candidates])
        return [statistics.median(clock) for clock in zip(*clocks, strict=True)]

    for candidate in candidates:
        backward(candidate)
    return [Times(*pair) for pair in zip(medians(forward), medians(backward), strict=True)]


def _now(on: Tensor) -> float:
    """What a GPU has queued is waited for."""
    if on.is_cuda:
        torch.cuda.synchronize(on.device)
    return time.perf_counter()


class Replay:
    """A step in a CUDA graph, so often that the graph's own start counts little: what it takes the
    device, whatever it takes the host. The current stream must not be the default one, on which no
    graph can be captured.
    """

    def __init__(self, step: Callable[[], Any]) -> None:
        self.step = step  # a graph does not keep what it reads
        for _ in range(3):
            step()
        self._capture(step, 1)
        once = max(self.microseconds(), 0.1)
        self._capture(step, min(max(5, int(5000 / once)), 50))

    def _capture(self, step: Callable[[], Any], repeats: int) -> None:
        # Where the step ran before: autograd's backward runs where its forward did.
        self.graph, self.repeats = torch.cuda.CUDAGraph(), repeats
        stream = torch.cuda.current_stream()
        with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(repeats):
                step()
        self.graph.replay()

    def microseconds(self, rounds: int = 9) -> float:
        """Of one step, the median over the rounds."""
        return replayed(self, rounds=rounds)[0]


def replayed(*steps: Replay, rounds: int = 9) -> list[float]:
    """Microseconds of each of the steps, in turns; medians over the rounds."""
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(rounds):
        for step, mine in zip(steps, times, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            step.graph.replay()
            end.record()
            end.synchronize()
            mine.append(start.elapsed_time(end) * 1e3 / step.repeats)
    return [statistics.median(mine) for mine in times]
