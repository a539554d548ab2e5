"""The change of layout before and after a kernel, in less time than PyTorch's own copy takes."""

import math
from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from . import tuning
from .launch import Launch


@triton.jit(do_not_specialize=["R_UNITS", "S_UNITS"])
def transpose(
    source, target, R_UNITS, S_UNITS,
    R_ALIGN: tl.constexpr, S_ALIGN: tl.constexpr, BR: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """[batch, R, S] to [batch, S, R]."""
    R = R_UNITS * R_ALIGN
    S = S_UNITS * S_ALIGN
    pid = tl.program_id(0)
    r = pid // tl.cdiv(S, BS) * BR + tl.arange(0, BR)
    s = pid % tl.cdiv(S, BS) * BS + tl.arange(0, BS)
    start = tl.program_id(1).to(tl.int64) * R * S
    counts = (r < R)[:, None] & (s < S)[None, :]
    x = tl.load(source + start + r.to(tl.int64)[:, None] * S + s[None, :], mask=counts)
    at = target + start + s.to(tl.int64)[:, None] * R + r[None, :]
    tl.store(at, tl.trans(x), mask=tl.trans(counts))


def transposition(batch: int, rows: int, columns: int) -> Callable[[Tensor, Tensor], None]:
    """The way from [batch, rows, columns] in one tensor to [batch, columns, rows] in another."""
    tile = tuning.transpose_tile(rows, columns)
    r, s = alignment(rows), alignment(columns)
    blocks = triton.cdiv(rows, tile["BR"]) * triton.cdiv(columns, tile["BS"])
    most = 65535  # that a grid's second axis holds
    launches = [
        Launch(
            transpose, (blocks, min(batch - first, most)), (rows // r, columns // s),
            R_ALIGN=r, S_ALIGN=s, **tile,
        )
        for first in range(0, batch, most)
    ]  # fmt: skip

    def run(source: Tensor, target: Tensor) -> None:
        for i, launch in enumerate(launches):
            if i > 0:
                source, target = source[most:], target[most:]
            launch(source, target)

    return run


def alignment(size: int) -> int:
    """The largest power of two, up to 16, that divides `size`: so far vector accesses can reach."""
    return math.gcd(size, 16)
