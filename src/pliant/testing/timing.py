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
    """Time each candidate's forward and its gradients of `inputs`, in rounds of one turn each.

    A first round is not measured. Then at least `rounds`, until `seconds` have been measured or
    `most` rounds are done.
    """
    clocks: list[list[Times]] = [[] for _ in candidates]
    for candidate in candidates:
        once(candidate, inputs, grad)
    spent = 0.0
    while len(clocks[0]) < most and (len(clocks[0]) < rounds or spent < seconds):
        for candidate, clock in zip(candidates, clocks, strict=True):
            clock.append(once(candidate, inputs, grad))
            spent += sum(clock[-1])
    medians = [[statistics.median(part) for part in zip(*clock, strict=True)] for clock in clocks]
    return [Times(forward, backward) for forward, backward in medians]


def once(candidate: Callable[[], Tensor], inputs: Sequence[Tensor], grad: Tensor) -> Times:
    """One forward and one backward. What a GPU has queued is waited for."""
    start = _now(grad)
    out = candidate()
    between = _now(grad)
    torch.autograd.grad(out, inputs, grad)
    return Times(between - start, _now(grad) - between)


def _now(on: Tensor) -> float:
    if on.is_cuda:
        torch.cuda.synchronize(on.device)
    return time.perf_counter()
