"""What the benchmarks of every device share: is it right, how far off, on what machine.

Nothing is timed before the operator's named cases have passed in the implementation to be timed.
"""

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pliant import info, testing
from pliant.testing.exact import exact


class Errors(NamedTuple):
    """Largest differences from float64, as parts of the largest value of their tensor."""

    forward: float
    backward: float  # the worst gradient
    share: float  # of the error budget that is used: above 1 the result is wrong


@functools.cache
def failures(operator: str, impl: str, device: str = "cpu") -> list[str]:
    """What is wrong with the operator's named cases in this implementation."""
    failed = []
    for case in testing.CASES:
        if case.operator == operator:
            try:
                testing.verify(operator, case.make(torch.float32, device, 0), impl)
            except (AssertionError, NotImplementedError) as error:
                failed.append(f"{case}: {error}")
    return failed


def errors(
    operator: str, inputs: dict[str, Any], impl: str, grad: Tensor, *, coarse: bool = False
) -> Errors:
    """How far `impl` is from the reference in float64 on this very problem.

    Products that are `coarse`, of 16 bits or tf32, have the budget of plain PyTorch in the same.
    """
    wanted, wanted_grads = exact(operator, inputs, grad)
    got, got_grads = testing.run(operator, inputs, impl, grad_output=grad)
    pairs = [(got, wanted), *((got_grads[name], wanted_grads[name]) for name in wanted_grads)]
    forward, *backward = (_relative(*pair) for pair in pairs)
    plain: list[Tensor | None] = [None] * len(pairs)
    if coarse:
        base, base_grads = testing.run(operator, inputs, "reference", grad_output=grad)
        plain = [base, *(base_grads[name] for name in wanted_grads)]
    shares = [testing.worst(*pair, base).share for pair, base in zip(pairs, plain, strict=True)]
    return Errors(forward, max(backward), max(shares))


def _relative(got: Tensor, wanted: Tensor) -> float:
    largest = float(wanted.abs().max())
    return float((got.double() - wanted).abs().max()) / largest if largest else 0.0


def save(path: Path, report: dict[str, Any]) -> None:
    """Keep the figures, with what they were measured on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": info.collect(), **report}, indent=2) + "\n")


def duration(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"
