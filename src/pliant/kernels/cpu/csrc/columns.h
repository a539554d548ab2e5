// Tiles of a deformable convolution's columns, columns[q, p, :] = mask * sample, and their adjoint.
#pragma once

#include <cstring>

#include "convolution.h"
#include "sum.h"

namespace pliant {
namespace {

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
  char *grad_out, *wild, *slopes, *grad_filters;
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

// Calls work(r, q, count) for positions r, r + 1, ... of `positions` that lie in a row of the output, q the first of them.
template <class Work> PLIANT_INLINE void for_each_run(const Plan& plan, Span positions, Work work) {
  for (int64_t r = 0, count; r < positions.count; r += count) {
    const Position q(plan, positions.first + r);
    count = least(positions.count - r, q.width - q.x);
    work(r, q, count);
  }
}

template <class T> PLIANT_INLINE void convert(T x, T* to) { *to = x; }
PLIANT_INLINE void convert(Half x, float* to) { *to = widen(x); }
PLIANT_INLINE void convert(BFloat16 x, float* to) { *to = widen(x); }
PLIANT_INLINE void convert(float x, Half* to) { narrow(x, to); }
PLIANT_INLINE void convert(float x, BFloat16* to) { narrow(x, to); }

constexpr int64_t CORNER = 4;  // rows and columns that are transposed together
template <class From, class To> PLIANT_INLINE void transpose(const From* from, int64_t from_row, To* to, int64_t to_row) {
  for (int64_t i = 0; i < CORNER; ++i)
    for (int64_t j = 0; j < CORNER; ++j) convert(from[i * from_row + j], to + j * to_row + i);
}
#if defined(__x86_64__)
PLIANT_INLINE void transpose(const float* from, int64_t from_row, float* to, int64_t to_row) {
  __m128 rows[CORNER];
  for (int64_t i = 0; i < CORNER; ++i) rows[i] = _mm_loadu_ps(from + i * from_row);
  _MM_TRANSPOSE4_PS(rows[0], rows[1], rows[2], rows[3]);
  for (int64_t i = 0; i < CORNER; ++i) _mm_storeu_ps(to + i * to_row, rows[i]);
}
#endif

template <class T> struct Matrix {
  T* at;
  int64_t row, column;  // strides
};

// Copies in strips, so that what is read or written a line of the cache apart is soon read or written again.
template <class From, class To>
inline void copy(const Matrix<const From>& from, const Matrix<To>& to, int64_t rows, int64_t columns) {
  if (from.row == 1 && from.column != 1)
    return copy<From, To>({from.at, from.column, 1}, {to.at, to.column, to.row}, columns, rows);
  if (from.column == 1 && to.column == 1) {
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < columns; ++j) convert(from.at[i * from.row + j], to.at + i * to.row + j);
    return;
  }
  const bool transposed = from.column == 1 && to.row == 1;
  for (int64_t strip = 0; strip < columns; strip += 4 * CORNER) {
    const int64_t end = least(columns, strip + 4 * CORNER), corners = transposed ? (end - strip) / CORNER * CORNER : 0;
    const int64_t below = transposed ? rows / CORNER * CORNER : 0;
    for (int64_t i = 0; i < below; i += CORNER)
      for (int64_t j = strip; j < strip + corners; j += CORNER)
        transpose(from.at + i * from.row + j, from.row, to.at + j * to.column + i, to.column);
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = i < below ? strip + corners : strip; j < end; ++j)
        convert(from.at[i * from.row + j * from.column], to.at + i * to.row + j * to.column);
  }
}

// Some positions x taps of one offset group, in order of position, then tap.
template <class Loc, class Real> struct Batch {
  int count;
  Loc x[TAPS], y[TAPS];
  Real mask[TAPS];
};

// `count` steps from -padding. Wraps around instead of overflowing.
PLIANT_INLINE uint64_t base(int64_t count, int64_t step, int64_t padding) {
  return static_cast<uint64_t>(count) * static_cast<uint64_t>(step) - static_cast<uint64_t>(padding);
}

// Tap by tap, as offsets and masks of neighbouring positions lie side by side.
template <class Loc, class Real>
inline void read_batch(const Plan& plan, int64_t n, int64_t g, Span positions, Span points, Batch<Loc, Real>& to) {
  const ConvolutionCall& c = plan.call;
  const int64_t first = g * plan.points + points.first;
  const Loc* offset = pointer<const Loc>(c.offset.at) + n * c.offset.n + 2 * first * c.offset.c;
  const Real* mask = c.mask.at ? pointer<const Real>(c.mask.at) + n * c.mask.n + first * c.mask.c : nullptr;
  int64_t ky = points.first / c.kernel_w, kx = points.first % c.kernel_w;
  for (int64_t p = 0; p < points.count; ++p, offset += 2 * c.offset.c) {
    const uint64_t down = base(ky, c.dilation_h, c.padding_h), across = base(kx, c.dilation_w, c.padding_w);
    Position q(plan, positions.first);
    for (int64_t i = p; i < positions.count * points.count; i += points.count, ++q) {
      const Loc* at = offset + q.y * c.offset.h + q.x * c.offset.w;
      to.y[i] = static_cast<Loc>(static_cast<int64_t>(down + base(q.y, c.stride_h, 0))) + at[0];
      to.x[i] = static_cast<Loc>(static_cast<int64_t>(across + base(q.x, c.stride_w, 0))) + at[c.offset.c];
      to.mask[i] = mask ? mask[p * c.mask.c + q.y * c.mask.h + q.x * c.mask.w] : Real(1);
    }
    if (++kx == c.kernel_w) kx = 0, ++ky;
  }
  int64_t i = positions.count * points.count;
  to.count = static_cast<int>(i);
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

// What is wanted of samples: their columns, all that a Slab can hold, or what it does hold. Only the last one asks.
enum Task { COLUMNS, EVERYTHING, SOME };

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

// A vector of a sample's channels from d on, or with REST the last `rest` channels: the column, the products of the
// corners with the column's gradient, lane by lane, and the gradients of the corners.
template <class T, Task TASK, bool REST>
PLIANT_INLINE void work_vector(const Sample<T>& s, int64_t d, int rest, Vector<Accumulator<T>> (&dots)[4]) {
  typedef Accumulator<T> Real;
  const bool column = TASK != SOME || s.column, dot = TASK == EVERYTHING || (TASK == SOME && s.dots);
  const bool scatter = TASK == EVERYTHING || (TASK == SOME && s.scatter);
  Vector<Real> x[4], g = {};
  if (column || dot)
    for (int k = 0; k < 4; ++k) x[k] = REST ? load_first(s.corners[k] + d, rest) : load(s.corners[k] + d);
  if (column) {
    Vector<Real> sum = s.coefficients[0] * x[0];
    for (int k = 1; k < 4; ++k) sum = fma(s.coefficients[k], x[k], sum);
    REST ? store_first(s.column + d, s.mask * sum, rest) : store(s.column + d, s.mask * sum);
  }
  if (dot || scatter) g = REST ? load_first(s.grad + d, rest) : load(s.grad + d);
  if (dot)
    for (int k = 0; k < 4; ++k) dots[k] = fma(g, x[k], dots[k]);
  if (scatter)
    for (int k = 0; k < 4; ++k) {
      Real* to = const_cast<Real*>(s.grad_corners[k]) + d;
      if (REST) {
        store_first(to, fma(s.weights[k], g, load_first(to, rest)), rest);
      } else {
        store(to, fma(s.weights[k], g, load(to)));
      }
    }
}

template <class T, Task TASK>
PLIANT_INLINE void work_sample(const Slab<T>& slab, const Taps<Accumulator<T>>& taps, int i, Accumulator<T> mask, int64_t at,
                               Accumulator<T> (&sums)[4]) {
  typedef Accumulator<T> Real;
  constexpr int64_t L = LANES<Real>;
  Sample<T> s;
  corners(slab.pixels, taps, i, s.corners);
  s.dots = TASK != COLUMNS && slab.slopes;
  s.scatter = TASK != COLUMNS && slab.grad_pixels.first;
  s.column = TASK != SOME || slab.columns ? slab.columns + at : nullptr;
  s.grad = TASK != COLUMNS ? slab.grads + at : nullptr;
  s.mask = broadcast(mask);
  for (int k = 0; k < 4; ++k) s.coefficients[k] = broadcast(taps.coefficient[k][i]);
  if (s.scatter) {
    corners(slab.grad_pixels, taps, i, s.grad_corners);
    for (int k = 0; k < 4; ++k) s.weights[k] = broadcast(mask * taps.coefficient[k][i]);
  }
  Vector<Real> dots[4] = {};
  int64_t d = 0;
#pragma GCC unroll 2
  for (; slab.count - d >= L; d += L) work_vector<T, TASK, false>(s, d, 0, dots);
  const int rest = static_cast<int>(slab.count - d);
  if (rest > 0) work_vector<T, TASK, true>(s, d, rest, dots);
  if (TASK != COLUMNS) sum_lanes(dots, sums);
}

template <class Loc, class Real>
inline void write_slopes(const Plan& plan, Span positions, Span points, const Batch<Loc, Real>& batch, const Taps<Real>& taps,
                         const Real (*sums)[4], Real* to) {
  Real dots[4][TAPS], by_y[TAPS], by_x[TAPS], by_mask[TAPS];
  for (int i = 0; i < TAPS; ++i)
    for (int k = 0; k < 4; ++k) dots[k][i] = sums[i][k];
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
template <class T, class Loc, Task TASK>
inline void work_samples(const Plan& plan, const Slab<T>& slab, Span positions, Span points) {
  typedef Accumulator<T> Real;
  const int32_t height = static_cast<int32_t>(plan.call.H), width = static_cast<int32_t>(plan.call.W);
  for_each_part(positions, points.count, [&](Span some, Span part_of_points) {
    const Span taken = {points.first + part_of_points.first, part_of_points.count};
    Batch<Loc, Real> batch;
    Taps<Real> taps;
    Real sums[TASK == COLUMNS ? 1 : TAPS][4] = {};
    read_batch(plan, slab.image, slab.group, some, taken, batch);
    bilinear<false, false>(batch.x, batch.y, batch.count, height, width, taps);
    int i = 0;
    for (int64_t q = some.first - positions.first; q < some.first - positions.first + some.count; ++q)
      for (int64_t p = taken.first - points.first; p < taken.first - points.first + taken.count; ++p, ++i) {
        const int64_t at = q * slab.by_position + p * slab.by_point;
        if (taps.inside[i]) {
          work_sample<T, TASK>(slab, taps, i, batch.mask[i], at, sums[TASK == COLUMNS ? 0 : i]);
        } else if (slab.columns) {
          std::memset(slab.columns + at, 0, static_cast<size_t>(slab.count) * sizeof(Real));
        }
      }
    if (TASK != COLUMNS && slab.slopes) write_slopes(plan, some, taken, batch, taps, sums, slab.slopes);
  });
}

// Calls work(first, count) for stretches of `positions` whose samples by one tap count, `first` from the first of them on.
template <class Real, class Loc, class Work>
inline void for_each_counting(const Plan& plan, int64_t n, int64_t g, Span positions, int64_t point, Work work) {
  const int32_t height = static_cast<int32_t>(plan.call.H), width = static_cast<int32_t>(plan.call.W);
  for (int64_t first = 0; first < positions.count; first += TAPS) {
    const Span some = part(positions, first, TAPS);
    Batch<Loc, Real> batch;
    Taps<Real> taps;
    read_batch(plan, n, g, some, {point, 1}, batch);
    bilinear<false, false>(batch.x, batch.y, batch.count, height, width, taps);
    for (int64_t i = 0, end; i < some.count; i = end + 1) {
      for (end = i; end < some.count && taps.inside[end];) ++end;
      if (end > i) work(first + i, end - i);
    }
  }
}

// Zero, or NaN if there is a NaN or an infinity among the numbers.
template <class Real> PLIANT_INLINE Real sum_of_zeros(const Real* numbers, int64_t count) {
  Vector<Real> sum = {};
  for (; count >= LANES<Real>; count -= LANES<Real>, numbers += LANES<Real>) sum += load(numbers) * Real(0);
  if (count) sum += load_first(numbers, static_cast<int>(count)) * Real(0);
  Real lanes[LANES<Real>], total = 0;
  store(lanes, sum);
  for (int i = 0; i < LANES<Real>; ++i) total += lanes[i];
  return total;
}

// Calls work(in the window, in the columns, positions, channels) for parts of a tile's columns, where the window is
// [channels, Ho*kh, Wo*kw] of one image: from one position to the next it is kernel_w further. Few channels at a time, as
// the taps of a position share lines of the cache.
template <class T, class Work>
PLIANT_INLINE void for_each_column(const Plan& plan, const Slab<T>& slab, int64_t channels, Span positions, Span points,
                                   Work work) {
  const ConvolutionCall& c = plan.call;
  for (int64_t first = 0; first < channels; first += 2 * CORNER)
    for (int64_t p = 0; p < points.count; ++p) {
      const int64_t ky = (points.first + p) / c.kernel_w, kx = (points.first + p) % c.kernel_w;
      for_each_run(plan, positions, [&](int64_t r, const Position& q, int64_t count) {
        const int64_t window = (q.y * c.kernel_h + ky) * c.out.h + (q.x * c.kernel_w + kx) * c.out.w + first * c.out.c;
        const int64_t column = r * slab.by_position + p * slab.by_point + first;
        work(window, column, count, least(channels - first, 2 * CORNER));
      });
    }
}

}  // namespace
}  // namespace pliant
