// The adjoint of sample_sum, without atomics: `grad_samples` owns the gradients of loc and weight of some queries,
// `grad_value` those of some rows and channels of value. Each number is summed by one item, over the queries in their
// order, so no result depends on how many threads share the items.
#include "sum.h"

namespace pliant {
namespace {

// A row of grad in the type of sums: itself if it can be read as it is, else a copy in `buffer`.
template <class T>
PLIANT_INLINE const Accumulator<T>* read_grad(const T* from, int64_t stride, int64_t count, Accumulator<T>* buffer) {
  if (sizeof(T) == sizeof(Accumulator<T>) && stride == 1) return reinterpret_cast<const Accumulator<T>*>(from);
  widen_row(from, stride, buffer, count);
  return buffer;
}

// Gradients of loc and weight

// The products of grad with four rows. VECTORS: how many vectors of channels there are, 0 if that is no whole number or
// too many to unroll.
template <int VECTORS, class T>
PLIANT_INLINE void dot_rows(const T* const (&at)[4], const Accumulator<T>* grad, int64_t channels, Accumulator<T> (&dots)[4]) {
  typedef Accumulator<T> Real;
  constexpr int64_t L = LANES<Real>;
  Vector<Real> sum[4] = {};
  if (VECTORS) {
    for (int v = 0; v < VECTORS; ++v)
      for (int j = 0; j < 4; ++j) sum[j] = fma(load(grad + v * L), load(at[j] + v * L), sum[j]);
  } else {
    int64_t d = 0;
    for (; d + L <= channels; d += L)
      for (int j = 0; j < 4; ++j) sum[j] = fma(load(grad + d), load(at[j] + d), sum[j]);
    const int rest = static_cast<int>(channels - d);
    if (rest)
      for (int j = 0; j < 4; ++j) sum[j] = fma(load_first(grad + d, rest), load_first(at[j] + d, rest), sum[j]);
  }
  sum_lanes<Real>(sum, dots);
}

// dots[j][i] = grad . corner j of sample i for the samples [begin, end) of one query; of nearest, only j = 0.
template <int VECTORS, bool NEAREST, class T>
PLIANT_INLINE void dot_samples(const Rows& rows, const Taps<Accumulator<T>>& taps, int begin, int end,
                               const Accumulator<T>* grad, int64_t channels, Accumulator<T> (&dots)[4][TAPS]) {
  const T* at[4];
  Accumulator<T> four[4];
  if (NEAREST) {  // four samples at a time
    for (int i = begin; i < end; i += 4) {
      for (int j = 0; j < 4; ++j) {
        const bool reads = i + j < end && taps.inside[i + j];
        at[j] = reinterpret_cast<const T*>(reads ? corner(rows, taps, i + j) : rows.zeros);
      }
      dot_rows<VECTORS, T>(at, grad, channels, four);
      for (int j = 0; j < 4 && i + j < end; ++j) dots[0][i + j] = four[j];
    }
  } else {
    for (int i = begin; i < end; ++i) {
      if (!taps.inside[i]) continue;
      corners(rows, taps, i, at);
      dot_rows<VECTORS, T>(at, grad, channels, four);
      for (int j = 0; j < 4; ++j) dots[j][i] = four[j];
    }
  }
}

// The same for all queries; `grads` is the grad of the first.
template <int VECTORS, bool NEAREST, class T, class Loc>
inline void dot_queries(const SumCall& c, const Rows& rows, const Taps<Accumulator<T>>& taps, const Ahead* ahead,
                        const Positions<Loc>& at, int64_t queries, const T* grads, Accumulator<T>* buffer, Accumulator<T> (&dots)[4][TAPS]) {
  const int64_t channels = VECTORS ? VECTORS * LANES<Accumulator<T>> : c.D, bytes = channels * static_cast<int64_t>(sizeof(T));
  for (int64_t q = 0, begin = 0; q < queries; begin = at.end[q++]) {
    if (begin == at.end[q]) continue;
    if (ahead) prefetch_rows<NEAREST>(*ahead, static_cast<int>(begin), at.end[q], 0, bytes);
    const Accumulator<T>* grad = read_grad(grads + q * c.grad_q, c.grad_d, c.D, buffer);
    dot_samples<VECTORS, NEAREST, T>(rows, taps, static_cast<int>(begin), at.end[q], grad, channels, dots);
  }
}

template <bool NEAREST, class T, class Loc>
inline void dot_map(const SumCall& c, const Rows& rows, const Taps<Accumulator<T>>& taps, const Ahead* ahead,
                    const Positions<Loc>& at, int64_t queries, const T* grads, Accumulator<T>* buffer, Accumulator<T> (&dots)[4][TAPS]) {
  constexpr int64_t L = LANES<Accumulator<T>>;
  switch (c.D % L ? 0 : c.D / L) {
    case 1: return dot_queries<1, NEAREST>(c, rows, taps, ahead, at, queries, grads, buffer, dots);
    case 2: return dot_queries<2, NEAREST>(c, rows, taps, ahead, at, queries, grads, buffer, dots);
    case 4: return dot_queries<4, NEAREST>(c, rows, taps, ahead, at, queries, grads, buffer, dots);
    default: return dot_queries<0, NEAREST>(c, rows, taps, ahead, at, queries, grads, buffer, dots);
  }
}

// Gradients of the positions of a part, summed over maps and weight groups. In double: they grow with the size of a map,
// while what is asked of them is absolute.
struct Pull { double x[TAPS], y[TAPS]; };

// Adds scale * slope to the `sums` of as many samples as there are lanes.
template <class Real> PLIANT_INLINE void add_scaled(Vector<Real> slope, double scale, double* sums) {
  typedef double Doubles __attribute__((vector_size(sizeof(double) * LANES<Real>)));
  Doubles sum;
  __builtin_memcpy(&sum, sums, sizeof(sum));
  sum += __builtin_convertvector(slope, Doubles) * scale;
  __builtin_memcpy(sums, &sum, sizeof(sum));
}

// One map: writes the gradients of its weights and adds those of the positions to `pull`.
template <class T, class Loc>
inline void pull_map(const Sum& s, const Item<T>& item, const Positions<Loc>& at, Span queries, int64_t v, int64_t r,
                     const Ahead* ahead, Accumulator<T>* weights, Pull& pull) {
  typedef Accumulator<T> Real;
  const SumCall& c = s.call;
  const GradCall& to = s.grads;
  const Map& map = s.maps[v * c.R + r];
  const bool unit = c.policy != PIXEL_ZERO;
  Taps<Real> taps;
  find_taps(c, at, map, taps);
  if (to.loc) read_weights(c, at, queries.count, weight_at<Real>(c, item.n, queries.first, item.g, v, r), 0, c.K, weights);
  for (int64_t k = 0; k < c.K; ++k) {
    const Rows rows = rows_of(item.stored + k * item.group_stride, item.row_stride, map, s.zeros);
    const T* grads = pointer<const T>(c.grad) + item.n * c.grad_n + queries.first * c.grad_q + item.g * c.grad_g + k * c.grad_k;
    Real dots[4][TAPS], by_weight[TAPS];
    if (c.policy == PIXEL_NEAREST) {
      dot_map<true>(c, rows, taps, ahead, at, queries.count, grads, weights + c.K * TAPS, dots);
      for (int i = 0; i < at.count; ++i) by_weight[i] = taps.inside[i] ? dots[0][i] : Real(0);
    } else {
      dot_map<false>(c, rows, taps, ahead, at, queries.count, grads, weights + c.K * TAPS, dots);
      for (int i = 0; i < at.count; i += LANES<Real>) {
        const Slope<Real> one = slope(taps, i, dots);
        store(by_weight + i, one.value);
        if (!to.loc) continue;
        const Vector<Real> weight = counted(taps, i, weights + k * TAPS);
        add_scaled<Real>(weight * one.by_x, unit ? map.width : 1, pull.x + i);
        add_scaled<Real>(weight * one.by_y, unit ? map.height : 1, pull.y + i);
      }
    }
    if (to.weight) {
      Real* first = pointer<Real>(to.weight) + item.n * to.weight_n + queries.first * to.weight_q + item.g * to.weight_g +
                    v * to.weight_v + r * to.weight_r + k * to.weight_k;
      at.for_each(queries.count, [&](int64_t q, int64_t p, int i) { first[q * to.weight_q + p * to.weight_p] = by_weight[i]; });
    }
  }
}

// All positions of a part in one view.
template <class T, class Loc>
inline void pull_view(const Sum& s, const Item<T>& item, Span queries, Span points, int64_t v, const Ahead* ahead,
                      Accumulator<T>* weights) {
  const SumCall& c = s.call;
  const GradCall& to = s.grads;
  Positions<Loc> at;
  read_positions(c, item.n, item.g, v, queries, points, at);
  if (!at.count) return;
  Pull pull = {};
  for (int64_t r = 0; r < c.R; ++r) pull_map<T>(s, item, at, queries, v, r, ahead, weights, pull);
  if (!to.loc) return;
  Loc* first = pointer<Loc>(to.loc) + item.n * to.loc_n + queries.first * to.loc_q + item.g * to.loc_g + v * to.loc_v;
  at.for_each(queries.count, [&](int64_t q, int64_t p, int i) {
    Loc* x = first + q * to.loc_q + p * to.loc_p;
    x[0] = static_cast<Loc>(pull.x[i]);
    x[to.loc_xy] = static_cast<Loc>(pull.y[i]);
  });
}

template <class T, class Loc> void grad_samples(const Sum& s, int64_t number, int64_t worker) {
  typedef Accumulator<T> Real;
  const SumCall& c = s.call;
  const Item<T> item = item_of<T>(s, number);
  Real* weights = reinterpret_cast<Real*>(s.scratch + worker * s.worker_bytes);  // [K, TAPS], and a row of grad
  for (int64_t q = 0; q < item.queries.count; q += s.block) {
    const Span block = part(item.queries, q, s.block), next = part(item.queries, q + s.block, s.block);
    for (int64_t v = 0; v < c.V; ++v) {
      Ahead memory;
      const bool last = v + 1 == c.V;
      prefetch_samples<Loc, Real>(c, item.n, next, item.g, v);
      const Ahead* ahead = look_ahead<T, Loc>(s, item, last ? next : block, last ? 0 : v + 1, memory);
      for_each_part(block, c.P, [&](Span queries, Span points) {
        pull_view<T, Loc>(s, item, queries, points, v, ahead, weights);
      });
    }
  }
}

// Gradient of value

// row += c * grad
template <int VECTORS, bool REST, class Real>
PLIANT_INLINE void add_row(Real* row, Real c, const Vector<Real> (&grad)[VECTORS], int rest) {
  for (int j = 0; j < VECTORS; ++j) {
    if (REST) {
      store_first(row, fma(broadcast(c), grad[j], load_first(row, rest)), rest);
    } else {
      store(row + j * LANES<Real>, fma(broadcast(c), grad[j], load(row + j * LANES<Real>)));
    }
  }
}

// What scatter_queries reads: the samples of some queries in one map, for one weight group.
template <class T> struct Scatter {
  Rows rows;  // to add to
  const Taps<Accumulator<T>>& taps;
  const Accumulator<T>* weights;
  const int* end;  // where each query's samples end
  const T* grads;  // of the first query
  int64_t by_query, by_channel;
};

// Adds coefficient * weight * grad to the rows that the samples of the queries read: VECTORS vectors of channels from
// channel d on, or the `rest` last channels.
template <class T, int VECTORS, bool REST, bool NEAREST>
inline void scatter_queries(const Scatter<T>& work, int64_t queries, int64_t d, int rest) {
  typedef Accumulator<T> Real;
  const Rows rows = work.rows;
  const Taps<Real>& taps = work.taps;
  const int64_t at_d = d * static_cast<int64_t>(sizeof(Real));
  for (int64_t q = 0, i = 0; q < queries; ++q) {
    const int end = work.end[q];
    if (i == end) continue;
    Real buffer[VECTORS * LANES<Real>];
    const Real* from = read_grad(work.grads + q * work.by_query + d * work.by_channel, work.by_channel, REST ? rest : VECTORS * LANES<Real>, buffer);
    Vector<Real> grad[VECTORS];
    for (int j = 0; j < VECTORS; ++j) grad[j] = REST ? load_first(from, rest) : load(from + j * LANES<Real>);
    for (; i < end; ++i) {
      const int32_t inside = taps.inside[i];
      const Real weight = work.weights[i];
      const uintptr_t first = corner(rows, taps, static_cast<int>(i)) + static_cast<uintptr_t>(at_d);
      if (NEAREST) {
        if (inside) add_row<VECTORS, REST>(reinterpret_cast<Real*>(first), weight, grad, rest);
        continue;
      }
      const uintptr_t to[4] = {first, first + static_cast<uintptr_t>(rows.column_bytes), first + static_cast<uintptr_t>(rows.row_bytes),
                               first + static_cast<uintptr_t>(rows.row_bytes + rows.column_bytes)};
      if (inside == ALL_CORNERS) {
        for (int n = 0; n < 4; ++n) add_row<VECTORS, REST>(reinterpret_cast<Real*>(to[n]), weight * taps.coefficient[n][i], grad, rest);
      } else if (inside) {
        for (int n = 0; n < 4; ++n)
          if (inside >> n & 1) add_row<VECTORS, REST>(reinterpret_cast<Real*>(to[n]), weight * taps.coefficient[n][i], grad, rest);
      }
    }
  }
}

// All channels.
template <bool NEAREST, class T> inline void scatter_channels(const Scatter<T>& work, int64_t queries, int64_t channels) {
  constexpr int64_t L = LANES<Accumulator<T>>;
  int64_t d = 0;
  for (; channels - d >= 4 * L; d += 4 * L) scatter_queries<T, 4, false, NEAREST>(work, queries, d, 0);
  if (channels - d >= 2 * L) {
    scatter_queries<T, 2, false, NEAREST>(work, queries, d, 0);
    d += 2 * L;
  }
  if (channels - d >= L) {
    scatter_queries<T, 1, false, NEAREST>(work, queries, d, 0);
    d += L;
  }
  if (channels > d) scatter_queries<T, 1, true, NEAREST>(work, queries, d, static_cast<int>(channels - d));
}

// What one item of grad_value owns: rows `band` and channels [first, end) of K * D of one (n, g).
struct Owned {
  int64_t n, g;
  Band band;
  int64_t first, end;
};

PLIANT_INLINE Owned owned_by(const Sum& s, int64_t item) {
  const SumCall& c = s.call;
  const int64_t slice = item / (s.band_count * s.slabs), first = item % s.slabs * s.channels, channels = c.K * c.D;
  return {slice / c.G, slice % c.G, s.bands[item / s.slabs % s.band_count], first,
          first + s.channels < channels ? first + s.channels : channels};
}

// The gradient of the first owned row, from channel d of weight group k on.
template <class T> PLIANT_INLINE T* grad_value_at(const Sum& s, const Owned& owned, int64_t k, int64_t d) {
  const GradCall& to = s.grads;
  return pointer<T>(to.value) + owned.n * to.value_n + owned.band.first * to.value_s + owned.g * to.value_g + k * to.value_k + d;
}

PLIANT_INLINE bool meets(const Map& map, const Band& band) {
  return map.start < band.end && band.first < map.start + static_cast<int64_t>(map.height) * map.width;
}

// The owned channels of one weight group, and where their gradient is summed: rows from the band's first on.
template <class Real> struct Target {
  int64_t k, first, count;
  Real* sums;
  int64_t stride;
};

// Calls work(target) for each weight group. `sums` is [rows, channels], or null: then the result itself is added to.
template <class T, class Work>
PLIANT_INLINE void for_each_target(const Sum& s, const Owned& owned, Accumulator<T>* sums, Work work) {
  typedef Accumulator<T> Real;
  const int64_t D = s.call.D;
  for (int64_t channel = owned.first, next; channel < owned.end; channel = next) {
    const int64_t k = channel / D, first = channel - k * D;
    next = (k + 1) * D < owned.end ? (k + 1) * D : owned.end;
    Real* result = reinterpret_cast<Real*>(grad_value_at<T>(s, owned, k, first));
    work(Target<Real>{k, first, next - channel, sums ? sums + (channel - owned.first) : result,
                      sums ? owned.end - owned.first : s.grads.value_s});
  }
}

// Adds what a part of the queries and points sends to the owned rows of a map.
template <class T, class Loc>
inline void scatter_part(const Sum& s, const Owned& owned, int64_t v, int64_t r, Span queries, Span points,
                         Accumulator<T>* weights, Accumulator<T>* sums) {
  typedef Accumulator<T> Real;
  const SumCall& c = s.call;
  const Map& map = s.maps[v * c.R + r];
  Positions<Loc> at;
  Taps<Real> taps;
  read_positions(c, owned.n, owned.g, v, queries, points, at);
  if (!at.count) return;
  find_taps(c, at, map, taps);
  const int64_t first = owned.band.first - map.start, end = owned.band.end - map.start;
  if (first > 0 || end < static_cast<int64_t>(map.height) * map.width) keep_pixels(taps, at.count, map.width, first, end);
  for_each_target<T>(s, owned, sums, [&](const Target<Real>& to) {
    read_weights(c, at, queries.count, weight_at<Real>(c, owned.n, queries.first, owned.g, v, r), to.k, to.k + 1, weights);
    const Rows rows = rows_of(to.sums, to.stride, {-first, map.height, map.width}, nullptr);
    const T* grads = pointer<const T>(c.grad) + owned.n * c.grad_n + queries.first * c.grad_q + owned.g * c.grad_g +
                     to.k * c.grad_k + to.first * c.grad_d;
    const Scatter<T> work = {rows, taps, weights, at.end, grads, c.grad_q, c.grad_d};
    if (c.policy == PIXEL_NEAREST) {
      scatter_channels<true>(work, queries.count, to.count);
    } else {
      scatter_channels<false>(work, queries.count, to.count);
    }
  });
}

// Calls work(pointer, number) for each row of the result, asked for long before.
template <class T, class Work>
PLIANT_INLINE void for_each_row(T* first, int64_t stride, int64_t channels, int64_t rows, Work work) {
  const int64_t bytes = channels * static_cast<int64_t>(sizeof(T));
  for (int64_t row = 0; row < rows; ++row) {
    T* at = first + row * stride;
    if (row + ROWS_AHEAD < rows) prefetch_far(reinterpret_cast<uintptr_t>(at + ROWS_AHEAD * stride), bytes);
    work(at, row);
  }
}

template <class T, class Loc> void grad_value(const Sum& s, int64_t item, int64_t worker) {
  typedef Accumulator<T> Real;
  const SumCall& c = s.call;
  const Owned owned = owned_by(s, item);
  const int64_t rows = owned.band.end - owned.band.first;
  int64_t maps = 0;
  for (int64_t m = 0; m < c.V * c.R; ++m) maps += meets(s.maps[m], owned.band);

  // Samples are summed in rows that lie together. For few, the way from there to the result costs more than that saves.
  const bool few = sizeof(T) == sizeof(Real) && 2 * c.Q * c.P * maps <= rows;
  Real* weights = reinterpret_cast<Real*>(s.scratch + worker * s.worker_bytes);  // [TAPS]
  Real* sums = few ? nullptr : weights + TAPS;
  const int64_t width = owned.end - owned.first;
  if (sums) {
    __builtin_memset(sums, 0, static_cast<size_t>(rows * width) * sizeof(Real));
  } else {
    for_each_target<T>(s, owned, sums, [&](const Target<Real>& to) {
      for_each_row(to.sums, to.stride, to.count, rows, [&](Real* row, int64_t) { zero_row(row, to.count); });
    });
  }

  const int64_t block = c.P < TAPS ? TAPS / (c.P > 0 ? c.P : 1) : 1;
  for (int64_t v = 0; v < c.V; ++v)
    for (int64_t r = 0; r < c.R; ++r)
      if (meets(s.maps[v * c.R + r], owned.band))
        for_each_part({0, c.Q}, c.P, [&](Span queries, Span points) {
          prefetch_samples<Loc, Real>(c, owned.n, part({0, c.Q}, queries.first + block, block), owned.g, v);
          scatter_part<T, Loc>(s, owned, v, r, queries, points, weights, sums);
        });

  if (few) return;
  for_each_target<T>(s, owned, sums, [&](const Target<Real>& from) {
    T* result = grad_value_at<T>(s, owned, from.k, from.first);
    if (s.streams) {
      for (int64_t row = 0; row < rows; ++row)
        stream_row(from.sums + row * from.stride, result + row * s.grads.value_s, from.count);
    } else {
      for_each_row(result, s.grads.value_s, from.count, rows, [&](T* to, int64_t row) {
        narrow_row(from.sums + row * from.stride, to, from.count);
      });
    }
  });
  streamed();
}

}  // namespace

void PLIANT_ISA::grad_samples(const void* context, int64_t item, int64_t worker) {
  const Sum& s = *static_cast<const Sum*>(context);
  PLIANT_DISPATCH(s.call, pliant::grad_samples, s, item, worker);
}

void PLIANT_ISA::grad_value(const void* context, int64_t item, int64_t worker) {
  const Sum& s = *static_cast<const Sum*>(context);
  PLIANT_DISPATCH(s.call, pliant::grad_value, s, item, worker);
}

}  // namespace pliant
