"""Comparison within an error budget, against a result that is exact for the purpose.

`expected` is a float64 tensor. What an element of `actual` may differ from it by is

    float64, float32     ROUNDINGS * eps * magnitude + one rounding of the expected value
    float16, bfloat16    the budget of float32 + one rounding
    with a baseline      2 * (its largest error) + one rounding: what plain PyTorch gives in half
                         precision, or where float32 is multiplied in tf32

`magnitude` is the sum of the absolute values of the terms that make up the element (the loops give
it, `absolute=True`), and eps that of `working`, the dtype of the arithmetic: a result in float64 is
no better than float32 features or positions let it be. Where no magnitude is known, the largest
expected value of the whole tensor stands in, with a coarser tolerance: 2**-14 of it in float32,
2**-40 in float64.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from pliant.testing.loops import ROUNDINGS

HALVES = (torch.float16, torch.bfloat16)
# Without magnitudes: positions hundreds of pixels wide lose eight bits, sums a few more.
COARSE = {torch.float64: 2.0**-40, torch.float32: 2.0**-14}


class Worst(NamedTuple):
    """The element that uses most of its budget."""

    share: float  # error / budget: 1 is the limit
    error: float
    budget: float
    where: tuple[int, ...]
    actual: float
    expected: float


def check(
    actual: Tensor,
    expected: Tensor,
    baseline: Tensor | None = None,
    *,
    magnitude: Tensor | None = None,
    working: torch.dtype | None = None,
    dtype: torch.dtype | None = None,
    what: str = "result",
) -> float:
    """Raises AssertionError unless `actual` is `expected` within the budget; returns its share.

    `dtype` is the dtype that `actual` must have; a baseline must have the dtype of `actual`.
    NaN and infinities must stand where rounding `expected` to the dtype of `actual` puts them.
    """
    found = worst(
        actual, expected, baseline, magnitude=magnitude, working=working, dtype=dtype, what=what
    )
    if not found.share <= 1:
        raise AssertionError(
            f"{what}: element {list(found.where)} is {found.actual!r}, expected "
            f"{found.expected!r}: the error {found.error:.3e} is {found.share:.3g} times the "
            f"budget {found.budget:.3e} of {actual.dtype}"
        )
    return found.share


def worst(
    actual: Tensor,
    expected: Tensor,
    baseline: Tensor | None = None,
    *,
    magnitude: Tensor | None = None,
    working: torch.dtype | None = None,
    dtype: torch.dtype | None = None,
    what: str = "result",
) -> Worst:
    """The element of `actual` that uses most of its budget; the arguments are those of `check`."""
    if expected.dtype != torch.float64:
        raise TypeError(f"{what}: expected must be float64, got {expected.dtype}")
    if actual.shape != expected.shape:
        raise AssertionError(f"{what}: shape {list(actual.shape)}, expected {list(expected.shape)}")
    if actual.dtype != (dtype or actual.dtype):
        raise AssertionError(f"{what}: dtype {actual.dtype}, expected {dtype}")
    for name, other in (("baseline", baseline), ("magnitude", magnitude)):
        if other is not None and other.shape != expected.shape:
            raise AssertionError(
                f"{what}: {name} has shape {list(other.shape)}, expected {list(expected.shape)}"
            )
    if baseline is not None and baseline.dtype != actual.dtype:
        raise AssertionError(f"{what}: the baseline is {baseline.dtype}, the result {actual.dtype}")
    if actual.numel() == 0:
        return Worst(0.0, 0.0, 0.0, (), 0.0, 0.0)

    expected, got = expected.detach(), actual.detach().to(expected.device, torch.float64)
    stored = expected.to(actual.dtype).double()  # what a correct rounding can hold
    same = (got == stored) | (got.isnan() & stored.isnan())
    finite = got.isfinite() & stored.isfinite()
    error = torch.where(finite, (got - expected).abs(), torch.where(same, 0.0, torch.inf))
    allowed = budget(expected, actual.dtype, baseline, magnitude, working)
    share = torch.where(error == 0, 0.0, error / allowed).reshape(-1)
    flat = int(share.argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), actual.shape))
    return Worst(
        share[flat].item(), error[index].item(), allowed[index].item(), index,
        got[index].item(), expected[index].item(),
    )  # fmt: skip


def budget(
    expected: Tensor,
    dtype: torch.dtype,
    baseline: Tensor | None = None,
    magnitude: Tensor | None = None,
    working: torch.dtype | None = None,
) -> Tensor:
    """What each element may be off by, by the rules at the top of this file."""
    info = torch.finfo(dtype)
    # Half the distance to the next number, also where numbers are subnormal.
    exponent = torch.frexp(expected.abs().clamp(min=info.tiny)).exponent - 1
    rounding = torch.exp2(exponent.double()) * (info.eps / 2)
    if baseline is not None:
        off = (baseline.detach().to(expected) - expected).abs()
        finite = off[off.isfinite()]
        largest = finite.max() if finite.numel() else torch.zeros((), device=expected.device)
        return 2 * largest + rounding
    working = working or (torch.float32 if dtype in HALVES else dtype)
    if magnitude is not None:
        arithmetic = ROUNDINGS * torch.finfo(working).eps * magnitude.to(expected)
    else:
        finite = expected[expected.isfinite()].abs()
        arithmetic = COARSE[working] * (finite.max() if finite.numel() else expected.new_zeros(()))
    return torch.where(arithmetic.isfinite(), arithmetic, 0.0) + rounding
