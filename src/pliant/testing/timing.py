"""How long things take: candidates in turns, so that a slow moment hits all of them alike."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

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
