// What the kernels of sample_sum share: reading a block of positions and weights, and finding the rows of a sample.
#pragma once

#include "problem.h"
#include "taps.h"

namespace pliant {
namespace {

// Calls `kernel<T, Loc>` with the types of this call.
#define PLIANT_DISPATCH(call, kernel, ...)                                                             \
  do {                                                                                                 \
    const bool wide = (call).loc_dtype == FLOAT64;                                                     \
    switch ((call).value_dtype) {                                                                      \
      case FLOAT32: return wide ? kernel<float, double>(__VA_ARGS__) : kernel<float, float>(__VA_ARGS__);            \
      case FLOAT64: return wide ? kernel<double, double>(__VA_ARGS__) : kernel<double, float>(__VA_ARGS__);          \
      case FLOAT16: return wide ? kernel<Half, double>(__VA_ARGS__) : kernel<Half, float>(__VA_ARGS__);              \
      case BFLOAT16: return wide ? kernel<BFloat16, double>(__VA_ARGS__) : kernel<BFloat16, float>(__VA_ARGS__);     \
    }                                                                                                  \
  } while (0)

template <class T> PLIANT_INLINE T* pointer(int64_t address) { return reinterpret_cast<T*>(address); }

// Some queries x points of one view: those that may count, in order of query, then point.
template <class Loc> struct Positions {
  int count;
  bool all;               // whether every point may count: `point` is not filled then
  int64_t first;          // the first of the points
  int end[TAPS];          // where the positions of each query end
  Loc x[TAPS], y[TAPS];
  int32_t point[TAPS];

  // Calls work(query, point, i) for every position.
  template <class Work> inline __attribute__((always_inline)) void for_each(int64_t queries, Work work) const {
    int i = 0;
    for (int64_t q = 0; q < queries; ++q) {
      if (all) {
        for (int64_t p = first; i < end[q]; ++i, ++p) work(q, p, i);
      } else {
        for (; i < end[q]; ++i) work(q, point[i], i);
      }
    }
  }
};

struct Span { int64_t first, count; };

// To the second cache, for what is needed much later: it waits for more lines at a time than the first one does.
PLIANT_INLINE void prefetch_far(uintptr_t from, int64_t bytes) {
  for (int64_t b = 0; b < bytes; b += 64)
    __builtin_prefetch(reinterpret_cast<const void*>(from + static_cast<uintptr_t>(b)), 0, 2);
}

// How many rows before its turn a row of value or of its gradient is asked for, where rows are worked off one after
// another: they lie too far apart for the hardware to foresee.
constexpr int64_t ROWS_AHEAD = 128;

PLIANT_INLINE Span part(Span whole, int64_t at, int64_t most) {
  return {whole.first + at, whole.count - at < most ? whole.count - at : most};
}

// Calls work(queries, points) for parts of at most TAPS positions: all points of some queries or some of one query.
template <class Work> PLIANT_INLINE void for_each_part(Span queries, int64_t points, Work work) {
  const int64_t together = points < TAPS ? TAPS / (points > 0 ? points : 1) : 1;
  for (int64_t q = 0; q < queries.count; q += together)
    for (int64_t p = 0; p < points; p += TAPS) work(part(queries, q, together), part({0, points}, p, TAPS));
}

// (x, y) pairs that lie `stride` apart, to x and y. Four at a time, if adjacent, become vector instructions.
template <class Loc> PLIANT_INLINE void split_pairs(const Loc* from, int64_t stride, int64_t by_axis, int64_t count, Loc* x, Loc* y) {
  int64_t p = 0;
  if (stride == 2 && by_axis == 1) {
    for (; p + 4 <= count; p += 4)
      for (int j = 0; j < 4; ++j) {
        x[p + j] = from[2 * (p + j)];
        y[p + j] = from[2 * (p + j) + 1];
      }
  }
  for (; p < count; ++p) {
    x[p] = from[p * stride];
    y[p] = from[p * stride + by_axis];
  }
}

template <class Loc>
inline void read_positions(const SumCall& c, int64_t n, int64_t g, int64_t v, Span queries, Span points, Positions<Loc>& to) {
  const Loc* from = pointer<const Loc>(c.loc) + n * c.loc_n + queries.first * c.loc_q + g * c.loc_g + v * c.loc_v +
                    points.first * c.loc_p;
  const int64_t by_query = c.loc_q, by_point = c.loc_p, by_axis = c.loc_xy;
  int count = 0;
  to.first = points.first;
  to.all = c.policy != UNIT_SKIP;
  if (to.all) {
    for (int64_t q = 0; q < queries.count; ++q) {
      split_pairs(from + q * by_query, by_point, by_axis, points.count, to.x + count, to.y + count);
      to.end[q] = count += static_cast<int>(points.count);
    }
  } else {
    for (int64_t q = 0; q < queries.count; ++q) {
      for (int64_t p = 0; p < points.count; ++p) {
        const Loc *at = from + q * by_query + p * by_point, x = at[0], y = at[by_axis];
        to.x[count] = x;
        to.y[count] = y;
        to.point[count] = static_cast<int32_t>(points.first + p);
        count += strictly_inside(x, y);
      }
      to.end[q] = count;
    }
  }
  to.count = count;
  for (int i = count; i < TAPS && i % 16; ++i) to.x[i] = to.y[i] = 0;  // taps are found by whole vectors
}

template <class Loc, class Real>
inline void find_taps(const SumCall& c, const Positions<Loc>& at, const Map& map, Taps<Real>& taps) {
  switch (c.policy) {
    case UNIT_ZERO: return bilinear<true, false>(at.x, at.y, at.count, map.height, map.width, taps);
    case UNIT_SKIP: return bilinear<true, true>(at.x, at.y, at.count, map.height, map.width, taps);
    case PIXEL_ZERO: return bilinear<false, false>(at.x, at.y, at.count, map.height, map.width, taps);
    case PIXEL_NEAREST: return nearest(at.x, at.y, at.count, map.height, map.width, taps);
  }
}

template <class Real> PLIANT_INLINE const Real* weight_at(const SumCall& c, int64_t n, int64_t q, int64_t g, int64_t v, int64_t r) {
  return pointer<const Real>(c.weight) + n * c.weight_n + q * c.weight_q + g * c.weight_g + v * c.weight_v + r * c.weight_r;
}

// weights[k * TAPS + i] of the groups k in [first, end); `from` is weight_at the first query.
template <class Loc, class Real>
inline void read_weights(const SumCall& c, const Positions<Loc>& at, int64_t queries, const Real* from, int64_t first,
                         int64_t end, Real* weights) {
  const int64_t by_query = c.weight_q, by_point = c.weight_p, by_group = c.weight_k;
  if (end - first == 1) {
    from += first * by_group;
    at.for_each(queries, [&](int64_t q, int64_t p, int i) { weights[i] = from[q * by_query + p * by_point]; });
  } else {
    at.for_each(queries, [&](int64_t q, int64_t p, int i) {
      for (int64_t k = first; k < end; ++k) weights[(k - first) * TAPS + i] = from[q * by_query + p * by_point + k * by_group];
    });
  }
}

// The rows of one map. Addresses are integers: a corner outside the map has one too, but never becomes a pointer.
struct Rows {
  uintptr_t first, zeros;
  int64_t column_bytes, row_bytes;
};

template <class T> PLIANT_INLINE Rows rows_of(const T* stored, int64_t stride, const Map& map, const void* zeros) {
  const int64_t column = stride * static_cast<int64_t>(sizeof(T));
  return {reinterpret_cast<uintptr_t>(stored) + static_cast<uintptr_t>(map.start * column),
          reinterpret_cast<uintptr_t>(zeros), column, column * map.width};
}

template <class Real> PLIANT_INLINE uintptr_t corner(const Rows& rows, const Taps<Real>& taps, int i) {
  return rows.first + static_cast<uintptr_t>(taps.row[i] * rows.row_bytes + taps.column[i] * rows.column_bytes);
}

// The four corners, those outside the map replaced by the row of zeros.
template <class T, class Real>
PLIANT_INLINE void corners(const Rows& rows, const Taps<Real>& taps, int i, const T* (&to)[4]) {
  const uintptr_t first = corner(rows, taps, i);
  uintptr_t a[4] = {first, first + static_cast<uintptr_t>(rows.column_bytes), first + static_cast<uintptr_t>(rows.row_bytes),
                    first + static_cast<uintptr_t>(rows.row_bytes + rows.column_bytes)};
  const int32_t inside = taps.inside[i];
  if (inside != ALL_CORNERS)
    for (int j = 0; j < 4; ++j) a[j] = inside >> j & 1 ? a[j] : rows.zeros;
  for (int j = 0; j < 4; ++j) to[j] = reinterpret_cast<const T*>(a[j]);
}

// The queries of one item of `forward` or `grad_samples`, and the features they read.
template <class T> struct Item {
  int64_t n, g;
  Span queries;
  const T* stored;
  int64_t row_stride, group_stride;
};

template <class T> inline Item<T> item_of(const Sum& s, int64_t item) {
  const SumCall& c = s.call;
  // Packed slices are worked off one after another, to stay in the cache; unpacked ones query by query, as they lie.
  const int64_t slice = s.packed ? s.slice + item / s.stretches : item / (s.stretches * c.G) * c.G + item % c.G;
  const int64_t stretch = s.packed ? item % s.stretches : item / c.G % s.stretches;
  const int64_t n = slice / c.G, g = slice % c.G;
  const Span queries = part({0, c.Q}, stretch * s.stretch, s.stretch);
  if (s.packed) {
    const T* stored = reinterpret_cast<const T*>(s.packed) + (slice - s.slice) * c.S * c.K * c.D;
    return {n, g, queries, stored, c.K * c.D, c.D};
  }
  return {n, g, queries, pointer<const T>(c.value) + n * c.value_n + g * c.value_g, c.value_s, c.value_k};
}

// Asks for the positions and weights of some queries in one view before they are needed: from query to query they lie
// apart, which the hardware does not foresee.
template <class Loc, class Real> inline void prefetch_samples(const SumCall& c, int64_t n, Span queries, int64_t g, int64_t v) {
  const Loc* loc = pointer<const Loc>(c.loc) + n * c.loc_n + queries.first * c.loc_q + g * c.loc_g + v * c.loc_v;
  const Real* weight = weight_at<Real>(c, n, queries.first, g, v, 0);
  for (int64_t q = 0; q < queries.count; ++q) {
    prefetch_far(reinterpret_cast<uintptr_t>(loc + q * c.loc_q), c.P * 2 * static_cast<int64_t>(sizeof(Loc)));
    prefetch_far(reinterpret_cast<uintptr_t>(weight + q * c.weight_q), c.P * c.R * c.K * static_cast<int64_t>(sizeof(Real)));
  }
}

// Where the samples of the next block or view will read. Rows that lie apart are asked for while this one is worked on,
// query by query: the processor by itself looks only a few samples ahead, and a burst would wait for the memory.
struct Ahead {
  uintptr_t first[TAPS];  // corner 0
  int64_t column_bytes, row_bytes;
};

// Looks into view v of some queries, if there are any and that pays.
template <class T, class Loc>
inline const Ahead* look_ahead(const Sum& s, const Item<T>& item, Span queries, int64_t v, Ahead& ahead) {
  typedef Accumulator<T> Real;
  const SumCall& c = s.call;
  if (!s.looks_ahead || queries.count <= 0) return nullptr;
  const Map& map = s.maps[v * c.R];
  const Rows rows = rows_of(item.stored, item.row_stride, map, s.zeros);
  Positions<Loc> at;
  Taps<Real> taps;
  read_positions(c, item.n, item.g, v, queries, {0, c.P}, at);
  find_taps(c, at, map, taps);
  for (int i = 0; i < TAPS; ++i) ahead.first[i] = i < at.count ? corner(rows, taps, i) : rows.zeros;
  ahead.column_bytes = rows.column_bytes;
  ahead.row_bytes = rows.row_bytes;
  return &ahead;
}

// Asks for the rows of the samples [begin, end): `bytes` of each, from byte `first` on.
template <bool NEAREST>
PLIANT_INLINE void prefetch_rows(const Ahead& ahead, int begin, int end, int64_t first, int64_t bytes) {
  const int64_t corners[4] = {0, ahead.column_bytes, ahead.row_bytes, ahead.row_bytes + ahead.column_bytes};
  for (int i = begin; i < end; ++i)
    for (int j = 0; j < (NEAREST ? 1 : 4); ++j)
      prefetch_far(ahead.first[i] + static_cast<uintptr_t>(corners[j] + first), bytes);
}

PLIANT_INLINE int64_t padded(int64_t count, int64_t to) { return (count + to - 1) / to * to; }

}  // namespace
}  // namespace pliant
