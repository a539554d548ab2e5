"""The change of layout before and after a kernel, in less time than PyTorch's own copy takes.

On the way it may round factors of a product in tf32.
"""

import math
from collections.abc import Callable

import triton
import triton.language as tl

from . import tuning
from .launch import Launch, cover


@triton.jit
def to_tf32(x):
    """float32 rounded to the nearest. A product cuts bits off, so that its sums are too small."""
    bits = (x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
    return tl.where(tl.abs(x) < float("inf"), bits.to(tl.float32, bitcast=True), x)


@triton.jit
def _turn(source, target, tile, R, S, ROUND: tl.constexpr, BR: tl.constexpr, BS: tl.constexpr):
    """A tile of [batch, R, S] to [batch, S, R]."""
    across = cover(S, BS)
    blocks = cover(R, BR) * across
    r = tile % blocks // across * BR + tl.arange(0, BR)
    s = tile % across * BS + tl.arange(0, BS)
    start = (tile // blocks).to(tl.int64) * R * S
    counts = (r < R)[:, None] & (s < S)[None, :]
    x = tl.load(source + start + r.to(tl.int64)[:, None] * S + s[None, :], mask=counts)
    if ROUND:
        x = to_tf32(x)
    at = target + start + s.to(tl.int64)[:, None] * R + r[None, :]
    tl.store(at, tl.trans(x), mask=tl.trans(counts))


@triton.jit(do_not_specialize=["R_UNITS", "S_UNITS"])
def transpose(
    source, target, R_UNITS, S_UNITS,
    R_ALIGN: tl.constexpr, S_ALIGN: tl.constexpr,
    ROUNDED: tl.constexpr, BR: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    tile, R, S = tl.program_id(0), R_UNITS * R_ALIGN, S_UNITS * S_ALIGN
    _turn(source, target, tile, R, S, ROUNDED == 0, BR, BS)


@triton.jit(
    do_not_specialize=[
        "FIRST", "SECOND", "R_UNITS", "S_UNITS", "R2_UNITS", "S2_UNITS", "R3_UNITS", "S3_UNITS",
    ]
)  # fmt: skip
def transpose_three(
    source, source2, source3, target, target2, target3,
    FIRST, SECOND, R_UNITS, S_UNITS, R2_UNITS, S2_UNITS, R3_UNITS, S3_UNITS,
    R_ALIGN: tl.constexpr, S_ALIGN: tl.constexpr, R2_ALIGN: tl.constexpr, S2_ALIGN: tl.constexpr,
    R3_ALIGN: tl.constexpr, S3_ALIGN: tl.constexpr,
    ROUNDED: tl.constexpr, BR: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Of the tiles, FIRST are the first tensor's, and SECOND the second's."""
    tile = tl.program_id(0)
    if tile < FIRST:
        R, S = R_UNITS * R_ALIGN, S_UNITS * S_ALIGN
        _turn(source, target, tile, R, S, ROUNDED == 0, BR, BS)
    elif tile - FIRST < SECOND:
        R2, S2 = R2_UNITS * R2_ALIGN, S2_UNITS * S2_ALIGN
        _turn(source2, target2, tile - FIRST, R2, S2, ROUNDED == 1, BR, BS)
    else:
        tile -= FIRST + SECOND
        R3, S3 = R3_UNITS * R3_ALIGN, S3_UNITS * S3_ALIGN
        _turn(source3, target3, tile, R3, S3, ROUNDED == 2, BR, BS)


Size = tuple[int, int, int]


def transposition(*sizes: Size, rounded: int = -1) -> Callable[..., None]:
    """The way from [batch, rows, columns] in one tensor to [batch, columns, rows] in another, or
    from up to three in one launch; it takes them all, and then the others. The one of the number
    `rounded` is rounded to tf32.
    """
    tiles, tile = [_tiles(size) for size in sizes], tuning.transpose_tile()
    aligned = [(alignment(rows), alignment(columns)) for _, rows, columns in sizes]
    both = zip(sizes, aligned, strict=True)
    units = [(rows // r, columns // s) for (_, rows, columns), (r, s) in both]
    if len(sizes) == 1:
        r, s = aligned[0]
        return Launch(
            transpose, (tiles[0],), units[0], R_ALIGN=r, S_ALIGN=s, ROUNDED=rounded, **tile
        )
    (r, s), (r2, s2), (r3, s3) = (*aligned, aligned[-1])[:3]
    launch = Launch(
        transpose_three, (sum(tiles),), (*tiles[:2], *sum((*units, units[-1])[:3], ())),
        R_ALIGN=r, S_ALIGN=s, R2_ALIGN=r2, S2_ALIGN=s2, R3_ALIGN=r3, S3_ALIGN=s3,
        ROUNDED=rounded, **tile,
    )  # fmt: skip
    # Of two, the second stands for the third, which has no tiles.
    return launch if len(sizes) == 3 else lambda a, b, c, d: launch(a, b, b, c, d, d)


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
