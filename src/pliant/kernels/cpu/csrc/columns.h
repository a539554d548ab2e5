// Tiles of a deformable convolution's columns, columns[q, p, :] = mask * sample, and their adjoint.
#pragma once

#include <cstring>

#include "convolution.h"
#include "sum.h"

namespace pliant {
namespace {

constexpr int64_t STREAMS = 8;  // channels that are copied together between channels-first and channels-last

// Channels of one offset group and one group of the product, all in one slab.
struct Piece {
  int64_t channel, count, group;
  int64_t filters, grad_filters;  // where its weights and their gradients are
};

struct Plan {
  ConvolutionCall call;
  int64_t points, positions;  // taps of the kernel, outputs of an image
  int64_t inputs, outputs;    // channels of a group of the product
  int64_t together;           // taps whose columns are multiplied at a time
  int64_t tile, tiles;        // positions of a tile, tiles of an image
  int64_t row;                // forward: numbers from the columns of one position to those of the next
  char* scratch;              // worker_bytes for each worker
  int64_t worker_bytes;
  char* zeros;                // what a corner outside the map reads as
  char* filters;              // the weights, packed as the products read them

  // Backward
  int64_t image, images;      // the images that are worked on at once: the first, how many
  int64_t slab, slabs;        // channels of a slab, slabs of an offset group
  const Piece* pieces;        // those of slab s are [first_piece[s], first_piece[s + 1])
  const int64_t* first_piece;
  char *grad_out, *slopes, *grad_filters;
  int64_t filter_count;       // numbers of grad_filters for an image
};

template <class Real> PLIANT_INLINE Real* reals(char* p) { return reinterpret_cast<Real*>(p); }
PLIANT_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
PLIANT_INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
PLIANT_INLINE int64_t parts(int64_t whole, int64_t size) { return (whole + size - 1) / size; }

// An output position, advanced in the order of the positions.
struct Position {
  int64_t y, x, width;
  Position(const Plan& plan, int64_t q) : y(q / plan.call.out_w), x(q % plan.call.out_w), width(plan.call.out_w) {}
  void operator++() {
    if (++x == width) x = 0, ++y;
  }
};

// Calls copy(i) for i in [first, first + STREAMS), less at the end. What it copies it should copy from or to as many
// places, one line of the cache each.
template <class Copy> PLIANT_INLINE void for_each_stream(int64_t first, int64_t end, Copy copy) {
  if (end - first >= STREAMS) {
    for (int64_t i = first; i < first + STREAMS; ++i) copy(i);
  } else {
    for (int64_t i = first; i < end; ++i) copy(i);
  }
}

// Some positions x taps of one offset group, in order of position, then tap.
template <class Loc, class Real> struct Batch {
  int count;
  Loc x[TAPS], y[TAPS];
  Real mask[TAPS];
};

// Where the first tap looks without its offset. Wraps around instead of overflowing.
PLIANT_INLINE uint64_t base(int64_t out, int64_t stride, int64_t padding) {
  return static_cast<uint64_t>(out) * static_cast<uint64_t>(stride) - static_cast<uint64_t>(padding);
}

template <class Loc, class Real>
inline void read_batch(const Plan& plan, int64_t n, int64_t g, Span positions, Span points, Batch<Loc, Real>& to) {
  const ConvolutionCall& c = plan.call;
  const int64_t first = g * plan.points + points.first, first_y = points.first / c.kernel_w, first_x = points.first % c.kernel_w;
  const Loc* offset = pointer<const Loc>(c.offset.at) + n * c.offset.n + 2 * first * c.offset.c;
  const Real* mask = c.mask.at ? pointer<const Real>(c.mask.at) + n * c.mask.n + first * c.mask.c : nullptr;
  Position q(plan, positions.first);
  int i = 0;
  for (int64_t r = 0; r < positions.count; ++r, ++q) {
    const uint64_t y = base(q.y, c.stride_h, c.padding_h), x = base(q.x, c.stride_w, c.padding_w);
    const Loc* by = offset + q.y * c.offset.h + q.x * c.offset.w;
    const int64_t in_mask = q.y * c.mask.h + q.x * c.mask.w;
    int64_t ky = first_y, kx = first_x;
    for (int64_t p = 0; p < points.count; ++p, ++i) {
      const uint64_t down = static_cast<uint64_t>(ky) * static_cast<uint64_t>(c.dilation_h);
      const uint64_t across = static_cast<uint64_t>(kx) * static_cast<uint64_t>(c.dilation_w);
      to.y[i] = static_cast<Loc>(static_cast<int64_t>(y + down)) + by[2 * p * c.offset.c];
      to.x[i] = static_cast<Loc>(static_cast<int64_t>(x + across)) + by[(2 * p + 1) * c.offset.c];
      to.mask[i] = mask ? mask[in_mask + p * c.mask.c] : Real(1);
      if (++kx == c.kernel_w) kx = 0, ++ky;
    }
  }
  to.count = i;
  for (; i < TAPS && i % 16; ++i) to.x[i] = to.y[i] = 0, to.mask[i] = 0;  // taps are found by whole vectors
}

// Some channels of one offset group for a tile: the pixels they are read from, and what is wanted of their samples.
// Columns and their gradients have strides, counted from the tile's first position and point.
template <class T> struct Slab {
  typedef Accumulator<T> Real;
  int64_t image, group, count;
  Rows pixels;
  int64_t by_position, by_point;
  Real* columns;      // null: they are not wanted
  const Real* grads;  // of the columns, if any of the following is wanted
  Real* slopes;       // [positions, points, 3] of the image: the gradients of y, x and mask by these channels; or null
  Rows grad_pixels;   // to which the samples' gradients are added; `first` is 0 if they are not wanted
};

template <class T> PLIANT_INLINE Rows rows_of_pixels(const T* first, int64_t by_row, int64_t by_column, const void* outside) {
  const int64_t size = static_cast<int64_t>(sizeof(T));
  return {reinterpret_cast<uintptr_t>(first), reinterpret_cast<uintptr_t>(outside), by_column * size, by_row * size};
}

// One sample: its corners, and among them those whose gradients are added to.
template <class T> struct Sample {
  typedef Accumulator<T> Real;
  const T* corners[4];
  const Real* grad_corners[4];
  Vector<Real> coefficients[4], weights[4];  // weights: with the mask
  Vector<Real> mask;
  Real* column;
  const Real* grad;
  bool dots, scatter;
};

// VECTORS vectors of a sample's channels from d on, or the last `rest` channels: the column and, BACKWARD, the products
// of the corners with the column's gradient, lane by lane, and the gradients of the corners.
template <class T, int VECTORS, bool REST, bool BACKWARD>
PLIANT_INLINE void work_vectors(const Sample<T>& s, int64_t d, int rest, Vector<Accumulator<T>> (&dots)[VECTORS][4]) {
  typedef Accumulator<T> Real;
  for (int j = 0; j < VECTORS; ++j, d += LANES<Real>) {
    Vector<Real> x[4], g = {};
    if (!BACKWARD || s.column || s.dots)
      for (int k = 0; k < 4; ++k) x[k] = REST ? load_first(s.corners[k] + d, rest) : load(s.corners[k] + d);
    if (!BACKWARD || s.column) {
      Vector<Real> sum = s.coefficients[0] * x[0];
      for (int k = 1; k < 4; ++k) sum = fma(s.coefficients[k], x[k], sum);
      REST ? store_first(s.column + d, s.mask * sum, rest) : store(s.column + d, s.mask * sum);
    }
    if (BACKWARD) g = REST ? load_first(s.grad + d, rest) : load(s.grad + d);
    if (BACKWARD && s.dots)
      for (int k = 0; k < 4; ++k) dots[j][k] = fma(g, x[k], dots[j][k]);
    if (BACKWARD && s.scatter)
      for (int k = 0; k < 4; ++k) {
        Real* to = const_cast<Real*>(s.grad_corners[k]) + d;
        if (REST) {
          store_first(to, fma(s.weights[k], g, load_first(to, rest)), rest);
        } else {
          store(to, fma(s.weights[k], g, load(to)));
        }
      }
  }
}

template <class T, bool BACKWARD>
PLIANT_INLINE void work_sample(const Slab<T>& slab, const Taps<Accumulator<T>>& taps, int i, Accumulator<T> mask, int64_t at,
                               Accumulator<T> (&sums)[4]) {
  typedef Accumulator<T> Real;
  constexpr int64_t L = LANES<Real>;
  Sample<T> s;
  corners(slab.pixels, taps, i, s.corners);
  s.dots = slab.slopes;
  s.scatter = slab.grad_pixels.first;
  s.column = slab.columns ? slab.columns + at : nullptr;
  s.grad = BACKWARD ? slab.grads + at : nullptr;
  s.mask = broadcast(mask);
  for (int k = 0; k < 4; ++k) s.coefficients[k] = broadcast(taps.coefficient[k][i]);
  if (BACKWARD && s.scatter) {
    corners(slab.grad_pixels, taps, i, s.grad_corners);
    for (int k = 0; k < 4; ++k) s.weights[k] = broadcast(mask * taps.coefficient[k][i]);
  }
  Vector<Real> dots[2][4] = {}, last[1][4] = {};
  int64_t d = 0;
  for (; slab.count - d >= 2 * L; d += 2 * L) work_vectors<T, 2, false, BACKWARD>(s, d, 0, dots);
  if (slab.count - d >= L) {
    work_vectors<T, 1, false, BACKWARD>(s, d, 0, last);
    d += L;
  }
  const int rest = static_cast<int>(slab.count - d);
  if (rest > 0) work_vectors<T, 1, true, BACKWARD>(s, d, rest, last);
  if (BACKWARD && s.dots) {
    for (int k = 0; k < 4; ++k) last[0][k] += dots[0][k] + dots[1][k];
    sum_lanes(last[0], sums);
  }
}

template <class Loc, class Real>
inline void write_slopes(const Plan& plan, Span positions, Span points, const Batch<Loc, Real>& batch, const Taps<Real>& taps,
                         const Real (&dots)[4][TAPS], Real* to) {
  Real by_y[TAPS], by_x[TAPS], by_mask[TAPS];
  for (int i = 0; i < batch.count; i += LANES<Real>) {
    const Slope<Real> slopes = slope(taps, i, dots);
    const Vector<Real> mask = counted(taps, i, batch.mask);
    store(by_y + i, mask * slopes.by_y);
    store(by_x + i, mask * slopes.by_x);
    store(by_mask + i, slopes.value);
  }
  int i = 0;
  for (int64_t q = positions.first; q < positions.first + positions.count; ++q)
    for (int64_t p = points.first; p < points.first + points.count; ++p, ++i) {
      Real* at = to + (q * plan.points + p) * 3;
      at[0] = by_y[i];
      at[1] = by_x[i];
      at[2] = by_mask[i];
    }
}

// All samples of a tile and some of its points, in order of the positions.
template <class T, class Loc, bool BACKWARD>
inline void work_samples(const Plan& plan, const Slab<T>& slab, Span positions, Span points) {
  typedef Accumulator<T> Real;
  const int32_t height = static_cast<int32_t>(plan.call.H), width = static_cast<int32_t>(plan.call.W);
  for_each_part(positions, points.count, [&](Span some, Span part_of_points) {
    const Span taken = {points.first + part_of_points.first, part_of_points.count};
    Batch<Loc, Real> batch;
    Taps<Real> taps;
    Real dots[4][TAPS];
    read_batch(plan, slab.image, slab.group, some, taken, batch);
    bilinear<false, false>(batch.x, batch.y, batch.count, height, width, taps);
    int i = 0;
    for (int64_t q = some.first - positions.first; q < some.first - positions.first + some.count; ++q)
      for (int64_t p = taken.first - points.first; p < taken.first - points.first + taken.count; ++p, ++i) {
        const int64_t at = q * slab.by_position + p * slab.by_point;
        Real sums[4] = {};
        if (taps.inside[i]) {
          work_sample<T, BACKWARD>(slab, taps, i, batch.mask[i], at, sums);
        } else if (slab.columns) {
          std::memset(slab.columns + at, 0, static_cast<size_t>(slab.count) * sizeof(Real));
        }
        if (BACKWARD)
          for (int k = 0; k < 4; ++k) dots[k][i] = sums[k];
      }
    if (BACKWARD && slab.slopes) write_slopes(plan, some, taken, batch, taps, dots, slab.slopes);
  });
}

// Calls copy(in the window, in the columns) for each number of a tile's columns, where the window is [C, Ho*kh, Wo*kw]
// of one image and the slab begins with channel `channel`.
template <class T, class Copy>
PLIANT_INLINE void for_each_column(const Plan& plan, const Slab<T>& slab, int64_t channel, Span positions, Span points,
                                   Copy copy) {
  const ConvolutionCall& c = plan.call;
  for (int64_t first = 0; first < slab.count; first += STREAMS)
    for (int64_t p = 0; p < points.count; ++p) {
      const int64_t ky = (points.first + p) / c.kernel_w, kx = (points.first + p) % c.kernel_w;
      Position q(plan, positions.first);
      for (int64_t r = 0; r < positions.count; ++r, ++q) {
        const int64_t window = (q.y * c.kernel_h + ky) * c.out.h + (q.x * c.kernel_w + kx) * c.out.w + channel * c.out.c;
        const int64_t column = r * slab.by_position + p * slab.by_point;
        for_each_stream(first, slab.count, [&](int64_t d) { copy(window + d * c.out.c, column + d); });
      }
    }
}

}  // namespace
}  // namespace pliant
