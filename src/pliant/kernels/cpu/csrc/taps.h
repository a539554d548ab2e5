// From positions to pixels: the only place that knows floor, corners, masks and derivatives.
//
// A sample reads up to four corners of a map. Corner 0 is the pixel at (column, row), corner 1 its right neighbour,
// corner 2 the one below, corner 3 below and right. Bit i of `inside` says that corner i lies in the map; the others
// must be neither read nor multiplied. A sample that does not count has inside == 0.
#pragma once

#include <cstdint>

#include "problem.h"
#include "vector.h"

namespace pliant {
namespace {

constexpr int32_t ALL_CORNERS = 15;

template <class Real> struct Taps {
  int32_t column[TAPS], row[TAPS], inside[TAPS];
  Real fraction_x[TAPS], fraction_y[TAPS];  // bilinear only
  Real coefficient[4][TAPS];                // bilinear only; of nearest it is 1
};

// Positions are worked on a vector at a time; in integers there are as many lanes, of 32 bits.
template <class Loc> struct Lanes {
  typedef Vector<Loc> Position;
  typedef decltype(Position{} < Position{}) Mask;
  typedef int32_t Int __attribute__((vector_size(4 * LANES<Loc>)));
  template <class Real> struct Of { typedef Real type __attribute__((vector_size(sizeof(Real) * LANES<Loc>))); };
};

// Multiply, round, subtract: contraction is off, as the border of a map depends on these roundings.
template <bool UNIT, class Loc> PLIANT_INLINE Vector<Loc> pixel(Vector<Loc> loc, Loc size) {
  return UNIT ? loc * size - Loc(0.5) : loc;
}

// Whether a position counts under the policy "skip", at every scale of its view.
template <class Loc> PLIANT_INLINE bool strictly_inside(Loc x, Loc y) {
  return (x > Loc(0)) & (x < Loc(1)) & (y > Loc(0)) & (y < Loc(1));
}

// One axis of a bilinear sample: the lower pixel, the way from it, and masks of which of the two pixels are in the map.
template <class Loc> struct Axis {
  typename Lanes<Loc>::Int index, low, high;
  Vector<Loc> fraction;
};
template <class Loc> PLIANT_INLINE Axis<Loc> axis(Vector<Loc> position, int32_t size) {
  typedef typename Lanes<Loc>::Int Int;
  const Int truncated = __builtin_convertvector(position, Int);
  const auto above = __builtin_convertvector(truncated, Vector<Loc>) > position;
  const Int index = truncated + __builtin_convertvector(above, Int);  // a mask is -1 where it holds
  const Vector<Loc> fraction = position - __builtin_convertvector(index, Vector<Loc>);
  return {index, (index >= 0) & (index < size), index + 1 < size, fraction};
}

// SKIP: the caller has dropped the positions that are not strictly_inside. Whole vectors are read and written.
template <bool UNIT, bool SKIP, class Loc, class Real>
inline void bilinear(const Loc* xs, const Loc* ys, int count, int32_t height, int32_t width, Taps<Real>& taps) {
  typedef typename Lanes<Loc>::Int Int;
  typedef typename Lanes<Loc>::Mask Mask;
  typedef typename Lanes<Loc>::template Of<Real>::type Reals;
  const Loc w = static_cast<Loc>(width), h = static_cast<Loc>(height);
  for (int i = 0; i < count; i += LANES<Loc>) {
    Vector<Loc> x = pixel<UNIT>(load(xs + i), w), y = pixel<UNIT>(load(ys + i), h);
    const Mask counts = SKIP ? ~Mask{} : (x > Loc(-1)) & (x < w) & (y > Loc(-1)) & (y < h);  // not if NaN
    x = (Vector<Loc>)((Mask)x & counts);
    y = (Vector<Loc>)((Mask)y & counts);
    const Axis<Loc> across = axis<Loc>(x, width), down = axis<Loc>(y, height);
    const Int columns = ((across.low & 1) | (across.high & 2)) * 5, rows = (down.low & 3) | (down.high & 12);
    const Reals fx = __builtin_convertvector(across.fraction, Reals), fy = __builtin_convertvector(down.fraction, Reals);
    write(taps.column + i, across.index);
    write(taps.row + i, down.index);
    write(taps.inside + i, columns & rows & __builtin_convertvector(counts, Int));
    write(taps.fraction_x + i, fx);
    write(taps.fraction_y + i, fy);
    write(taps.coefficient[0] + i, (1 - fx) * (1 - fy));
    write(taps.coefficient[1] + i, fx * (1 - fy));
    write(taps.coefficient[2] + i, (1 - fx) * fy);
    write(taps.coefficient[3] + i, fx * fy);
  }
}

template <class Loc> PLIANT_INLINE typename Lanes<Loc>::Int clamped(Vector<Loc> position, int32_t size) {
  typedef typename Lanes<Loc>::Int Int;
  typedef typename Lanes<Loc>::Mask Mask;
  const Vector<Loc> end = broadcast(static_cast<Loc>(size));
  position = (Vector<Loc>)((Mask)position & (position > Loc(0)));  // 0 for NaN
  position = position < end ? position : end;
  const Int index = __builtin_convertvector(position, Int), last = size - 1 - Int{};
  return index < last ? index : last;
}

// Positions in pixels, truncated, clamped to the border. The one corner is corner 0.
template <class Loc, class Real>
inline void nearest(const Loc* xs, const Loc* ys, int count, int32_t height, int32_t width, Taps<Real>& taps) {
  typedef typename Lanes<Loc>::Int Int;
  const int32_t some = (height > 0) & (width > 0);
  for (int i = 0; i < count; i += LANES<Loc>) {
    const Vector<Loc> x = load(xs + i), y = load(ys + i);
    write(taps.column + i, clamped<Loc>(x, width));
    write(taps.row + i, clamped<Loc>(y, height));
    write(taps.inside + i, __builtin_convertvector((x == x) & (y == y), Int) & some);
  }
}

// Forgets the corners outside the pixels [first, end) of the map.
template <class Real> inline void keep_pixels(Taps<Real>& taps, int count, int64_t width, int64_t first, int64_t end) {
  for (int i = 0; i < count; ++i) {
    const int64_t pixel = taps.row[i] * width + taps.column[i];
    for (int j = 0; j < 4; ++j) {
      const int64_t at = pixel + (j & 1) + (j & 2 ? width : 0);
      if (at < first || at >= end) taps.inside[i] &= ~(1 << j);
    }
  }
}

// The weights of samples i, i + 1, ..., zero for one that does not count.
template <class Real> PLIANT_INLINE Vector<Real> counted(const Taps<Real>& taps, int i, const Real* weights) {
  typedef typename Lanes<Real>::Int Int;
  typedef typename Lanes<Real>::Mask Mask;
  Int inside;
  __builtin_memcpy(&inside, taps.inside + i, sizeof(inside));
  return (Vector<Real>)((Mask)load(weights + i) & __builtin_convertvector(inside != 0, Mask));
}

// What the gradients of samples i, i + 1, ... need of the products dots[j] = grad . corner j: the bilinear value and its
// derivatives by the position in pixels. A corner outside the map has no product, whatever stands in `dots`.
template <class Real> struct Slope { Vector<Real> value, by_x, by_y; };
template <class Real> PLIANT_INLINE Slope<Real> slope(const Taps<Real>& taps, int i, const Real (&dots)[4][TAPS]) {
  typedef typename Lanes<Real>::Int Int;
  typedef typename Lanes<Real>::Mask Mask;
  Int inside;
  __builtin_memcpy(&inside, taps.inside + i, sizeof(inside));
  Vector<Real> dot[4];
  for (int j = 0; j < 4; ++j) {
    const Mask in = __builtin_convertvector((inside & (1 << j)) != 0, Mask);
    dot[j] = (Vector<Real>)((Mask)load(dots[j] + i) & in);
  }
  const Vector<Real> fx = load(taps.fraction_x + i), fy = load(taps.fraction_y + i);
  Vector<Real> value = load(taps.coefficient[0] + i) * dot[0];
  for (int j = 1; j < 4; ++j) value = fma(load(taps.coefficient[j] + i), dot[j], value);
  return {value, (1 - fy) * (dot[1] - dot[0]) + fy * (dot[3] - dot[2]), (1 - fx) * (dot[2] - dot[0]) + fx * (dot[3] - dot[1])};
}

}  // namespace
}  // namespace pliant
