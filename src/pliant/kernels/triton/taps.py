"""The tap layer: from a position to the pixels it reads, their coefficients and derivatives.

The only Triton code with floor, borders and masks. All of it is elementwise: it serves tiles of any
shape. HONEST says that the map is known to lie within the features, so that rows need no check of
their own, and to have less than 2**22 pixels a side. ROW is the integer type of row numbers: int32
for HONEST maps, unless the features need more, and else int64, where none can come round.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

OUTSIDE = tl.constexpr(-2.0)  # a pixel position all of whose corners lie outside every map
SIDE = tl.constexpr(22)  # a map with longer sides than 2**SIDE is not HONEST

# 1.5 * 2**23. A float32 near it counts in steps of one: adding it, rounded down, is a floor, and
# the sum's bits less its own are the integer.
MAGIC = tl.constexpr(12582912.0)
MAGIC_BITS = tl.constexpr(0x4B400000)


@triton.jit
def all_honest(shapes, starts, MAPS: tl.constexpr, S):
    """Whether all maps are HONEST."""
    honest = S >= 0
    for first in range(0, MAPS, 4):
        for i in tl.static_range(4):
            m = tl.minimum(first + i, MAPS - 1)
            _, _, _, also = load_map(shapes, starts, m, None, S, True, tl.int64)
            honest = honest & also
    return honest


@triton.jit
def load_map(shapes, starts, m, live, S, HONEST: tl.constexpr, ROW: tl.constexpr):
    """Height, width, first row of map `m`, and whether it is HONEST, if that is not known.

    A map that no tensor can hold is empty.
    """
    h = tl.load(shapes + 2 * m, mask=live).to(tl.int64)
    w = tl.load(shapes + 2 * m + 1, mask=live).to(tl.int64)
    start = tl.load(starts + m, mask=live).to(tl.int64)
    honest = ((h | w) >> SIDE == 0) & (start >= 0) & (h * w <= S - start)
    if not HONEST:
        sane = both(live, ((h | w) >> 31 == 0) & (start >= -2147483648) & (start <= S))
        h = tl.where(sane, h, 0)
        w = tl.where(sane, w, 0)
        start = tl.where(sane, start, 0)
    return h.to(ROW), w.to(ROW), start.to(ROW), honest


@triton.jit
def load_position(at, l_c: tl.constexpr, live, PAIR: tl.constexpr, POS: tl.constexpr):
    """x and y, in one load where they lie side by side."""
    if PAIR:
        x, y = load_pair(at, live)
        return x.to(POS), y.to(POS)
    else:
        return tl.load(at, mask=live).to(POS), tl.load(at + l_c, mask=live).to(POS)


@triton.jit
def load_pair(at, live, i=0):
    """Pair `i` of numbers of 16 or 32 bits, as one integer: a request less to the cache."""
    element: tl.constexpr = at.dtype.element_ty
    narrow: tl.constexpr = tl.int16 if element.primitive_bitwidth == 16 else tl.int32
    wide: tl.constexpr = tl.int32 if element.primitive_bitwidth == 16 else tl.int64
    pair = tl.load(at.to(tl.pointer_type(wide)) + i, mask=live)
    first = pair.to(narrow).to(element, bitcast=True)
    return first, (pair >> element.primitive_bitwidth).to(narrow).to(element, bitcast=True)


@triton.jit
def both(live, condition):
    """`live & condition`, where `live` may be None: all are."""
    if live is None:
        return condition
    else:
        return live & condition


@triton.jit
def stored(row, S, live, HONEST: tl.constexpr):
    """Whether `row` is one of the S rows."""
    if HONEST:
        return live
    else:
        return _index(row, S.to(row.dtype)) & live


@triton.jit
def rounded_product(x, y, INTERPRET: tl.constexpr):
    """x * y, which no compiler fuses with a sum that it goes into."""
    if INTERPRET:
        return x * y
    else:
        return libdevice.mul_rn(x, y)


@triton.jit
def dot(x, y, axis: tl.constexpr, INTERPRET: tl.constexpr):
    """Sum of x * y. Lanes add what others hand them to their own: were that a product, and the sum
    fused, they would differ in the last bit, and each of them may write the result.
    """
    return tl.sum(rounded_product(x, y, INTERPRET), axis)


@triton.jit
def unit_to_pixel(x, size, INTERPRET: tl.constexpr):
    """x * size - 0.5, rounded twice as in PyTorch: a fused rounding moves points across borders."""
    return rounded_product(x, size.to(x.dtype), INTERPRET) - 0.5


@triton.jit
def inside(x, y):
    """The strict guard of the policy "skip"."""
    return (x > 0) & (x < 1) & (y > 0) & (y < 1)


@triton.jit
def bilinear(
    x, y, h, w, start, S, live,
    UNIT: tl.constexpr, SKIP: tl.constexpr, HONEST: tl.constexpr,
    ROW: tl.constexpr, ACC: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Row of the corner 00, fractions, and which of the corners 00, 01, 10, 11 (y, x) are read.

    Where none is read, the fractions may be anything.
    """
    tl.static_assert(HONEST or w.dtype == tl.int64)
    if SKIP:
        live = both(live, inside(x, y))
    if HONEST and x.dtype == tl.float32:
        row, fx, fy, up, down, left, right = sides(x, y, h, w, start, UNIT, ROW, ACC, INTERPRET)
        up = both(live, up)
        down = both(live, down)
        return row, fx, fy, up & left, up & right, down & left, down & right
    else:
        px, py = pixels(x, y, h, w, UNIT, INTERPRET)
        px = _guarded(px, w)
        py = _guarded(py, h)
        left = tl.floor(px)
        top = tl.floor(py)
        x0 = left.to(ROW)
        y0 = top.to(ROW)
        row = start + y0 * w + x0
        up = both(live, _index(y0, h))
        down = both(live, _index(y0 + 1, h))
        m00 = stored(row, S, up & _index(x0, w), HONEST)
        m01 = stored(row + 1, S, up & _index(x0 + 1, w), HONEST)
        m10 = stored(row + w, S, down & _index(x0, w), HONEST)
        m11 = stored(row + w + 1, S, down & _index(x0 + 1, w), HONEST)
        return row, (px - left).to(ACC), (py - top).to(ACC), m00, m01, m10, m11


@triton.jit
def sides(
    x, y, h, w, start,
    UNIT: tl.constexpr, ROW: tl.constexpr, ACC: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """As `bilinear`, for float32 and HONEST: which lines y, y + 1, columns x, x + 1 are read."""
    px, py = pixels(x, y, h, w, UNIT, INTERPRET)
    # A position far outside, infinite or NaN gives bits far outside too.
    floor_x = floor_plus_magic(px, INTERPRET)
    floor_y = floor_plus_magic(py, INTERPRET)
    x0 = floor_x.to(tl.int32, bitcast=True) - MAGIC_BITS
    y0 = floor_y.to(tl.int32, bitcast=True) - MAGIC_BITS
    up, down = _index(y0, h), _index(y0 + 1, h) & (py > -1)
    left, right = _index(x0, w), _index(x0 + 1, w) & (px > -1)
    row = start + y0.to(ROW) * w + x0
    fx, fy = (px - (floor_x - MAGIC)).to(ACC), (py - (floor_y - MAGIC)).to(ACC)
    return row, fx, fy, up, down, left, right


@triton.jit
def pixels(x, y, h, w, UNIT: tl.constexpr, INTERPRET: tl.constexpr):
    if UNIT:
        return unit_to_pixel(x, w, INTERPRET), unit_to_pixel(y, h, INTERPRET)
    else:
        return x, y


@triton.jit
def floor_plus_magic(x, INTERPRET: tl.constexpr):
    """x + MAGIC, rounded down."""
    if INTERPRET:
        total = x + MAGIC
        return tl.where(total - MAGIC > x, total - 1, total)
    else:
        return tl.inline_asm_elementwise(
            "add.rm.f32 $0, $1, 0f4B400000;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def _guarded(pixel, size):
    """The pixel position if -1 < pixel < size; otherwise, NaN too, one outside."""
    pixel = tl.minimum(pixel, size.to(pixel.dtype))
    return tl.where(pixel > -1, pixel, OUTSIDE)


@triton.jit
def _index(i, size):
    """0 <= i < size, in one comparison."""
    if i.dtype == tl.int32:
        return i.to(tl.uint32) < size.to(tl.uint32)
    else:
        return i.to(tl.uint64) < size.to(tl.uint64)


@triton.jit
def nearest(x, y, h, w, start, S, live, HONEST: tl.constexpr, ROW: tl.constexpr):
    """Row of the pixel reached by truncation and clamping, and whether it is read."""
    tl.static_assert(HONEST or w.dtype == tl.int64)
    counts = both(live, (tl.minimum(h, w) > 0) & (x == x) & (y == y))
    xi = _clamped(tl.where(counts, x, 0), w, ROW)
    yi = _clamped(tl.where(counts, y, 0), h, ROW)
    row = start + yi * w + xi
    return row, stored(row, S, counts, HONEST)


@triton.jit
def _clamped(x, size, ROW: tl.constexpr):
    """trunc(x) in [0, size): clamped in x's own type first, so that no conversion overflows."""
    last = (size - 1).to(x.dtype)
    return tl.minimum(tl.minimum(tl.maximum(x, 0), last).to(ROW), size - 1)


@triton.jit
def coefficients(fx, fy):
    """Of the corners 00, 01, 10, 11."""
    return (1 - fx) * (1 - fy), fx * (1 - fy), (1 - fx) * fy, fx * fy


@triton.jit
def scaled(fx, fy, a, m00, m01, m10, m11):
    """Coefficients times `a`; zero for a corner that is not read, whatever `a` or fractions."""
    top = a * (1 - fy)
    bottom = a * fy
    c00 = tl.where(m00, top * (1 - fx), 0)
    c01 = tl.where(m01, top * fx, 0)
    c10 = tl.where(m10, bottom * (1 - fx), 0)
    c11 = tl.where(m11, bottom * fx, 0)
    return c00, c01, c10, c11
