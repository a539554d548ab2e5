"""The change of layout before and after a kernel, in less time than PyTorch's own copy takes."""

import math
from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from . import tuning
from .launch import Launch, cover


@triton.jit
def _turn(source, target, tile, R, S, BR: tl.constexpr, BS: tl.constexpr):
    """A tile of [batch, R, S] to [batch, S, R]."""
    across = cover(S, BS)
    blocks = cover(R, BR) * across
    r = tile % blocks // across * BR + tl.arange(0, BR)
    s = tile % across * BS + tl.arange(0, BS)
    start = (tile // blocks).to(tl.int64) * R * S
    counts = (r < R)[:, None] & (s < S)[None, :]
    x = tl.load(source + start + r.to(tl.int64)[:, None] * S + s[None, :], mask=counts)
    at = target + start + s.to(tl.int64)[:, None] * R + r[None, :]
    tl.store(at, tl.trans(x), mask=tl.trans(counts))


@triton.jit(do_not_specialize=["R_UNITS", "S_UNITS"])
def transpose(
    source, target, R_UNITS, S_UNITS,
    R_ALIGN: tl.constexpr, S_ALIGN: tl.constexpr, BR: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    _turn(source, target, tl.program_id(0), R_UNITS * R_ALIGN, S_UNITS * S_ALIGN, BR, BS)


@triton.jit(do_not_specialize=["FIRST", "R_UNITS", "S_UNITS", "R2_UNITS", "S2_UNITS"])
def transpose_two(
    source, target, source2, target2, FIRST, R_UNITS, S_UNITS, R2_UNITS, S2_UNITS,
    R_ALIGN: tl.constexpr, S_ALIGN: tl.constexpr, R2_ALIGN: tl.constexpr, S2_ALIGN: tl.constexpr,
    BR: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """The first tensor has FIRST tiles."""
    tile = tl.program_id(0)
    if tile < FIRST:
        _turn(source, target, tile, R_UNITS * R_ALIGN, S_UNITS * S_ALIGN, BR, BS)
    else:
        _turn(source2, target2, tile - FIRST, R2_UNITS * R2_ALIGN, S2_UNITS * S2_ALIGN, BR, BS)


Size = tuple[int, int, int]


def transposition(size: Size) -> Callable[[Tensor, Tensor], None]:
    """The way from [batch, rows, columns] in one tensor to [batch, columns, rows] in another."""
    r, s = map(alignment, size[1:])
    return Launch(
        transpose, (_tiles(size),), (size[1] // r, size[2] // s),
        R_ALIGN=r, S_ALIGN=s, **tuning.transpose_tile(),
    )  # fmt: skip


def transpositions(one: Size, two: Size) -> Callable[[Tensor, Tensor, Tensor, Tensor], None]:
    """Two in one launch: source and target of the one, then of the other."""
    (r, s), (r2, s2) = (map(alignment, size[1:]) for size in (one, two))
    first = _tiles(one)
    return Launch(
        transpose_two, (first + _tiles(two),),
        (first, one[1] // r, one[2] // s, two[1] // r2, two[2] // s2),
        R_ALIGN=r, S_ALIGN=s, R2_ALIGN=r2, S2_ALIGN=s2, **tuning.transpose_tile(),
    )  # fmt: skip


def _tiles(size: Size) -> int:
    batch, rows, columns = size
    tile = tuning.transpose_tile()
    tiles: int = batch * triton.cdiv(rows, tile["BR"]) * triton.cdiv(columns, tile["BS"])
    return tiles


def alignment(size: int) -> int:
    """The largest power of two, up to 16, that divides `size`: so far vector accesses can reach.

    A kernel multiplies with it, so it is 1 where the product needs the 64 bits of `size` itself.
    """
    return math.gcd(size, 16) if size < 2**31 else 1
