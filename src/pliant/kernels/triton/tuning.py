"""Block sizes, splits and parts: rules on sizes, dtype and device, as they were measured.

Their tiles are what launches take through refined.py, where `pliant tune` may have put better ones.
"""

import functools
import math

import torch
import triton
from torch import Tensor

from pliant.sampling.problem import Policy

# Bytes of gradients that stay in a GPU's cache while they are summed.
CACHED = 32 << 20


@functools.cache
def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


# The weighted sum


def apart(value: Tensor, samples: int) -> bool:
    """Whether features [N, S, G, K, D] are copied before that many samples read them.

    A channel that lies by itself costs a sample eight times the traffic of one among others. With
    a sample to six pixels that takes as long as copies do, of the features and of their gradient.
    """
    n, pixels, *_, channels = value.shape
    expanded = n > 1 and value.stride(0) == 0
    return channels > 1 and value.stride(4) > 1 and not expanded and 6 * samples >= pixels


def query_tile(
    channels: int, queries: int, groups: int, points: int, dtype: torch.dtype
) -> dict[str, int]:
    """Queries, heads, channels, unrolled points of a tile: 128 threads that load 16 bytes each.

    A compiler that is told how many registers it may use keeps more loads on their way.
    """
    bd = min(triton.next_power_of_2(channels), 1024)
    rows = max(1, 128 * 16 // dtype.itemsize // bd)
    # Heads of a pixel lie side by side: a tile takes 256 bytes of them.
    bg = math.gcd(groups, rows, max(1, 256 // (bd * dtype.itemsize)))
    bq = min(rows // bg, triton.next_power_of_2(queries))
    unrolled = max(i for i in range(1, 5) if points % i == 0)
    tile = {"BQ": bq, "BG": bg, "BD": bd, "BP": unrolled, "num_warps": 4}
    registers = {4: 72, 2: 96}.get(dtype.itemsize)
    return tile if registers is None else {**tile, "maxnreg": registers}


def shared(tile: dict[str, int], value: Tensor, loc: Tensor, weight: Tensor, policy: Policy) -> int:
    """Samples of a query whose corners its lanes find for each other; 0 if each finds its own.

    Of positions in pairs. Shuffles join lanes of one warp, which load all of a pixel's channels, 16
    bytes each.
    """
    points, samples = loc.shape[4], loc.shape[3] * loc.shape[4]
    lanes = triton.cdiv(tile["BD"] * value.element_size(), 16)
    share = math.gcd(samples, lanes, 16)
    simple = policy.interpolation == "bilinear" and weight.shape[5] == 1
    beside = loc.stride()[3:] == (2 * points, 2, 1) and weight.stride()[3:5] == (points, 1)
    whole = value.shape[4] == tile["BD"] and value.stride(4) == 1
    aligned = all(stride % 16 == 0 for stride in value.stride()[:3])
    fits = lanes <= 32 and tile["BQ"] * tile["BG"] * lanes == 32 * tile["num_warps"]
    return share if share >= 4 and simple and beside and whole and aligned and fits else 0


def cache_hint(pixels: int, samples: int) -> str:
    """Triton's hint to the caches: where samples are too few to share pixels, features give way to
    positions, of which a line is read several times.
    """
    return "evict_first" if samples < 2 * pixels else ""


def point_tile(channels: int, points: int) -> dict[str, int]:
    """Points and channels of a tile."""
    bp, bc = min(triton.next_power_of_2(points), 8), min(triton.next_power_of_2(channels), 64)
    return {"BP": bp, "BC": bc, "num_warps": 1, "maxnreg": 128}


def point_splits(queries: int, channels: int, places: int, device: torch.device) -> int:
    """Programs that share a tile: as many as keep the GPU busy, with 64 points each at least."""
    programs: int = queries * triton.cdiv(channels, point_tile(channels, places)["BC"])
    return max(1, min(16 * multiprocessors(device) // programs, places // 64, 64))


def sum_tile(splits: int) -> dict[str, int]:
    """Results that are added up, and numbers of each, in a tile."""
    return {"BS": triton.next_power_of_2(splits), "B": 32, "num_warps": 4}


def backward_tile(
    programs: int,
    groups: int,
    channels: int,
    points: int,
    policy: Policy,
    dtype: torch.dtype,
    adds: bool,
) -> dict[str, int]:
    """Queries that a program goes through, and points, groups and channels of a tile; `adds` says
    whether it adds to the gradient of the features.
    """
    bk = triton.next_power_of_2(groups)
    bd = min(triton.next_power_of_2(channels), max(1024 // bk, 1))
    short = dtype.itemsize <= 4
    many = short and programs >= 1 << 16
    tile = {"BQ": 4 if many else 1, "BK": bk, "BD": bd}
    places = triton.next_power_of_2(points)
    if policy.outside == "skip":
        return {"BJ": min(16, places), **tile, "num_warps": 4}
    # One warp: no barrier. A nearest pixel needs a quarter of the registers of four corners.
    elements = 256 if many else 128 if adds or not short else 512
    if policy.interpolation == "nearest":
        elements = 512
    tile |= {"BJ": min(max(elements // (bk * bd), 1), places), "num_warps": 1}
    return {**tile, "maxnreg": 96} if many or dtype == torch.float32 else tile


def clear_tile(parts: int) -> dict[str, int]:
    """Elements of gradients that a program sets to zero, and whether the first ones, to which the
    next kernel adds first, come last: of a whole batch, which may exceed the cache.
    """
    return {"B": 4096, "BACKWARDS": parts == 1, "num_warps": 8}


@functools.cache
def early(device: torch.device) -> bool:
    """Whether a kernel can be launched to begin before the one that it waits for has ended."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def batch_parts(batch: int, size: int, samples: int, pixels: int) -> int:
    """Parts of a batch whose gradients, of `size` bytes in all, are computed one after another: if
    samples are few, so many that a part stays in the cache between clearing and adding, or all but
    an eighth of it.
    """
    if not _sparse(size, samples, pixels):
        return 1
    longest = max(1, batch * (CACHED + CACHED // 8) // size)
    parts: int = max(triton.cdiv(size, CACHED), triton.cdiv(batch, longest))
    return min(batch, parts)


def _sparse(size: int, samples: int, pixels: int) -> bool:
    """Whether clearing gradients of `size` bytes takes as long as adding to them."""
    return samples < 2 * pixels and size > 2 * CACHED


def by_list(value: Tensor, size: int, samples: int, copied: bool) -> bool:
    """Whether pixels sum over lists of their samples, for gradients of `size` bytes in all: in 16
    bits, where sums in float32 would have to be cleared and rounded, too. Lists are at most as
    large as these, and half as large beside a copy of the features.
    """
    n, pixels, g, k, d = value.shape
    fits = value.dtype.itemsize == 2 and k == 1 and d <= 64
    small = (8 * samples + pixels) * (1 + copied) <= pixels * d
    counted = n * g * 4 * samples < 2**31
    return fits and small and counted and _sparse(size, samples, pixels)


def enter_tile() -> dict[str, int]:
    """Samples that a program writes down."""
    return {"B": 256, "num_warps": 4}


def list_tile(channels: int) -> dict[str, int]:
    """Rows and channels: one warp, no barrier."""
    bd = triton.next_power_of_2(channels)
    return {"BR": 32 if bd <= 32 else 16, "BD": bd, "num_warps": 1}


def bins_tile(channels: int, maps: int, samples: int) -> dict[str, int]:
    """Maps that a pixel is looked for in at a time, samples of it, of which `samples` are expected,
    and channels: one warp, no barrier.
    """
    be = min(max(triton.next_power_of_2(samples + 1) // 2, 4), 32)
    bc = min(triton.next_power_of_2(channels), 2048 // be)
    return {"BM": min(triton.next_power_of_2(maps), 32), "BE": be, "BC": bc, "num_warps": 1}


# Convolution


def forward_tile(outputs: int, run: int, precision: str, dtype: torch.dtype) -> dict[str, int]:
    """Positions, output channels of a group, and summed channels of a run, in a tile.

    As many outputs as registers hold, because every tile gathers anew.
    """
    outputs, run = triton.next_power_of_2(outputs), triton.next_power_of_2(run)
    bm, bn, bk = 64, min(max(outputs, 16), 256), max(run, 16)
    if precision == "tf32x3":  # of both factors twice the registers
        bn = min(bn, 128)
        bk = min(bk, 32 if bn <= 32 else 16)
        launch = {"num_warps": 4, "num_stages": 1 if bn <= 32 else 2}
        if bn > 32:
            launch["maxnreg"] = 168
    elif dtype == torch.float64:
        bn, bk = min(bn, 64), 16
        launch = {"num_warps": bn // 16, "num_stages": 2}
    else:
        bk, wide = min(bk, 128 // dtype.itemsize), bn > 128
        launch = {"num_warps": 8 if wide else 4, "num_stages": 3 if wide else 2}
        launch["maxnreg"] = 168 if bn == 128 else 128
    return {"BM": bm, "BN": bn, "BK": bk, **launch}


def forward_splits(
    tile: dict[str, int],
    images: int,
    positions: int,
    taps: int,
    sizes: dict[str, int],
    precision: str,
    dtype: torch.dtype,
    device: torch.device,
) -> int:
    """Programs that share a tile: as many as keep the GPU busy, with four steps of the sum each."""
    exact = precision == "tf32x3"
    resident = 1 if exact else 4 if dtype == torch.float64 else max(2, min(384 // tile["BN"], 4))
    programs = triton.cdiv(positions, tile["BM"]) * images * triton.cdiv(sizes["COG"], tile["BN"])
    programs *= sizes["C"] // sizes["CG"]
    steps = sizes["CG"] // sizes["RUN"] * triton.cdiv(sizes["RUN"], tile["BK"]) * taps
    splits = max(1, min(resident * multiprocessors(device) // programs, steps // 4, 8))
    return int(triton.cdiv(steps, triton.cdiv(steps, splits)))  # none without a step


def merge_tile(outputs: int) -> dict[str, int]:
    """Positions and output channels."""
    return {"BM": 32, "BN": min(triton.next_power_of_2(outputs), 64), "num_warps": 4}


def columns_tile(width: int, channels: int, element: int) -> dict[str, int]:
    """Places in a line of the columns, and channels: 128 bytes of a pixel."""
    bc = min(triton.next_power_of_2(channels), 128 // element)
    # Triton 3.6 fails to compile some narrower tiles of float64.
    return {"BJ": max(32, min(triton.next_power_of_2(width), 64)), "BC": bc, "num_warps": 4}


def transpose_tile() -> dict[str, int]:
    return {"BR": 64, "BS": 64, "num_warps": 4}


def product_tile(outputs: int, row: int) -> dict[str, int]:
    """Rows and columns of a tile, and channels that are multiplied at a time."""
    bn, bk = (
        min(max(triton.next_power_of_2(x), 16), most) for x, most in ((row, 64), (outputs, 32))
    )
    return {"BM": 128, "BN": bn, "BK": bk, "num_warps": 4, "num_stages": 3}


def filter_parts(rows: int, row: int, outputs: int, device: torch.device) -> int:
    """Parts of equal length in which `rows` are summed to [row, outputs], where such a result has
    too few tiles to keep the GPU busy.
    """
    tiles, parts = triton.cdiv(row, 128) * triton.cdiv(outputs, 32), 1
    if 8 * tiles <= multiprocessors(device):
        while (
            rows % (2 * parts) == 0
            and rows >= 512 * parts
            and parts * tiles < multiprocessors(device)
        ):
            parts *= 2
    return parts


def settle_tile(channels: int, outputs: int) -> dict[str, int]:
    """Channels and outputs, and positions where they are summed again."""
    bc, bo = (min(triton.next_power_of_2(x), most) for x, most in ((channels, 16), (outputs, 32)))
    return {"BQ": 16, "BC": bc, "BO": bo, "num_warps": 4}


def differentiate_tile(channels: int, element: int) -> dict[str, int]:
    """Positions and channels: 128 bytes of a pixel, 16 for each of 128 threads; of positions that
    need no second block of channels, four times as many. With more blocks smaller tiles, of so few
    registers that a multiprocessor is filled with threads.
    """
    bc = min(triton.next_power_of_2(channels), 128 // element)
    if channels > bc and element <= 4:
        tile = {"BC": 32, "num_warps": 1} if element == 2 else {"BC": 64, "num_warps": 4}
        return {"BM": 8, **tile, "maxnreg": 64}
    positions = 2048 // (bc * element) * (4 if channels <= bc else 1)
    return {"BM": min(positions, 128), "BC": bc, "num_warps": 4}


def collect_tile(channels: int, element: int, pixels: int) -> dict[str, int]:
    """Pixels that a program goes through: one, unless a grid cannot have so many programs. Samples
    and channels that it adds at a time: eight of long rows, up to 32 of short ones.
    """
    bc = min(triton.next_power_of_2(channels), 256, 1024 // element)
    programs = pixels * triton.cdiv(channels, bc)
    bp = triton.next_power_of_2(triton.cdiv(programs, 2**31 - 1))
    return {"BP": bp, "BE": min(max(1024 // bc, 8), 32), "BC": bc, "num_warps": 1}
