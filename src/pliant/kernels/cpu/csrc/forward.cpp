// sample_sum: out[n,q,g,k,:] = sum over v, p, r of weight * sample. An item is a block of queries of one (n, g).
//
// A block is worked off map by map: the positions of its queries in that map are turned into taps together, then each
// query adds its samples to its row of a tile of sums, which is written out at the end.
#include "sum.h"

namespace pliant {
namespace {

// What add_queries reads and adds to: the samples of some queries in one map, for one weight group.
template <class T> struct Work {
  Rows rows;
  const Taps<Accumulator<T>>& taps;
  const Accumulator<T>* weights;
  const int* end;  // where each query's samples end
  Accumulator<T>* sums;
  int64_t sums_stride;
  const Ahead* ahead;  // null: nothing to ask for
};

// Adds the samples of the queries [first, last), whose samples start at `begin`: VECTORS vectors of channels from
// channel d on, or the `rest` last channels.
template <class T, int VECTORS, bool REST, bool NEAREST>
inline void add_queries(const Work<T>& work, int64_t first, int64_t last, int begin, int64_t d, int rest) {
  typedef Accumulator<T> Real;
  constexpr int64_t SIZE = sizeof(T);
  const Rows rows = work.rows;
  const Taps<Real>& taps = work.taps;
  for (int64_t q = first; q < last; ++q) {
    const int end = work.end[q];
    if (work.ahead) prefetch_rows<NEAREST>(*work.ahead, begin, end, d * SIZE, REST ? SIZE : VECTORS * LANES<Real> * SIZE);
    Real* sums = work.sums + q * work.sums_stride + d;
    Vector<Real> sum[VECTORS];
    for (int j = 0; j < VECTORS; ++j) sum[j] = load(sums + j * LANES<Real>);
    for (int i = begin; i < end; ++i) {
      if (!taps.inside[i]) continue;
      const Vector<Real> weight = broadcast(work.weights[i]);
      if (NEAREST) {
        const T* at = reinterpret_cast<const T*>(corner(rows, taps, i)) + d;
        for (int j = 0; j < VECTORS; ++j) {
          const Vector<Real> sample = REST ? load_first(at, rest) : load(at + j * LANES<Real>);
          sum[j] = fma(weight, sample, sum[j]);
        }
      } else {
        const T* at[4];
        corners(rows, taps, i, at);
        Vector<Real> c[4];
        for (int n = 0; n < 4; ++n) c[n] = broadcast(taps.coefficient[n][i]);
        for (int j = 0; j < VECTORS; ++j) {
          Vector<Real> x[4];
          for (int n = 0; n < 4; ++n) x[n] = REST ? load_first(at[n] + d, rest) : load(at[n] + d + j * LANES<Real>);
          const Vector<Real> sample = fma(c[3], x[3], fma(c[2], x[2], fma(c[1], x[1], c[0] * x[0])));
          sum[j] = fma(weight, sample, sum[j]);
        }
      }
    }
    for (int j = 0; j < VECTORS; ++j) store(sums + j * LANES<Real>, sum[j]);
    begin = end;
  }
}

// All channels.
template <class T, bool NEAREST>
inline void add_channels(const Work<T>& work, int64_t first, int64_t last, int begin, int64_t channels) {
  constexpr int64_t L = LANES<Accumulator<T>>;
  int64_t d = 0;
  for (; channels - d >= 4 * L; d += 4 * L) add_queries<T, 4, false, NEAREST>(work, first, last, begin, d, 0);
  if (channels - d >= 2 * L) {
    add_queries<T, 2, false, NEAREST>(work, first, last, begin, d, 0);
    d += 2 * L;
  }
  if (channels - d >= L) {
    add_queries<T, 1, false, NEAREST>(work, first, last, begin, d, 0);
    d += L;
  }
  if (channels > d) add_queries<T, 1, true, NEAREST>(work, first, last, begin, d, static_cast<int>(channels - d));
}

// All samples of some queries in one map.
template <class T, bool NEAREST, class Loc>
inline void add_map(const Sum& s, const Item<T>& item, const Map& map, const Positions<Loc>& at, int64_t queries,
                    const Accumulator<T>* weights, Accumulator<T>* tile, const Ahead* ahead) {
  typedef Accumulator<T> Real;
  const SumCall& c = s.call;
  const int64_t width = padded(c.D, LANES<Real>);
  Taps<Real> taps;
  find_taps(c, at, map, taps);
  const auto group = [&](int64_t k) {
    const Rows rows = rows_of(item.stored + k * item.group_stride, item.row_stride, map, s.zeros);
    return Work<T>{rows, taps, weights + k * TAPS, at.end, tile + k * width, c.K * width, ahead};
  };
  if (c.K == 1) {
    add_channels<T, NEAREST>(group(0), 0, queries, 0, c.D);
  } else {  // query by query: the groups of a sample lie next to each other
    for (int64_t q = 0, begin = 0; q < queries; begin = at.end[q++])
      for (int64_t k = 0; k < c.K && begin < at.end[q]; ++k)
        add_channels<T, NEAREST>(group(k), q, q + 1, static_cast<int>(begin), c.D);
  }
}

// One block: its sums are kept in `tile` [queries, K, width]. `next` is the block after it.
template <class T, class Loc>
inline void add_block(const Sum& s, const Item<T>& item, Span block, Span next, Accumulator<T>* tile) {
  typedef Accumulator<T> Real;
  const SumCall& c = s.call;
  const int64_t width = padded(c.D, LANES<Real>);
  Real* weights = tile + s.block * c.K * width;
  __builtin_memset(tile, 0, static_cast<size_t>(block.count * c.K * width) * sizeof(Real));
  for (int64_t v = 0; v < c.V; ++v) {
    Ahead memory;
    const bool last = v + 1 == c.V;
    prefetch_samples<Loc, Real>(c, item.n, next, item.g, v);
    const Ahead* ahead = look_ahead<T, Loc>(s, item, last ? next : block, last ? 0 : v + 1, memory);
    for_each_part(block, c.P, [&](Span queries, Span points) {
      Positions<Loc> at;
      read_positions(c, item.n, item.g, v, queries, points, at);
      Real* sums = tile + (queries.first - block.first) * c.K * width;
      for (int64_t r = 0; r < c.R && at.count; ++r) {
        const Map& map = s.maps[v * c.R + r];
        read_weights(c, at, queries.count, weight_at<Real>(c, item.n, queries.first, item.g, v, r), 0, c.K, weights);
        if (c.policy == PIXEL_NEAREST) {
          add_map<T, true>(s, item, map, at, queries.count, weights, sums, ahead);
        } else {
          add_map<T, false>(s, item, map, at, queries.count, weights, sums, ahead);
        }
      }
    });
  }
  T* out = pointer<T>(c.grad) + item.n * c.grad_n + block.first * c.grad_q + item.g * c.grad_g;
  for (int64_t q = 0; q < block.count; ++q)
    for (int64_t k = 0; k < c.K; ++k) narrow_row(tile + (q * c.K + k) * width, out + q * c.grad_q + k * c.grad_k, c.D);
}

template <class T, class Loc> void forward(const Sum& s, int64_t number, int64_t worker) {
  typedef Accumulator<T> Real;
  const Item<T> item = item_of<T>(s, number);
  Real* tile = reinterpret_cast<Real*>(s.scratch + worker * s.worker_bytes);
  for (int64_t q = 0; q < item.queries.count; q += s.block) {
    const Span next = part(item.queries, q + s.block, s.block);
    add_block<T, Loc>(s, item, part(item.queries, q, s.block), next, tile);
  }
}

// Item: some rows of one slice. Copies them without gaps.
template <class T, class> void pack(const Sum& s, int64_t item) {
  const SumCall& c = s.call;
  const int64_t chunks = (c.S + PACK_ROWS - 1) / PACK_ROWS, slice = s.slice + item / chunks, first = item % chunks * PACK_ROWS;
  const int64_t end = c.S - first < PACK_ROWS ? c.S : first + PACK_ROWS, bytes = c.D * static_cast<int64_t>(sizeof(T));
  const T* from = pointer<const T>(c.value) + slice / c.G * c.value_n + slice % c.G * c.value_g;
  T* to = reinterpret_cast<T*>(s.packed) + (slice - s.slice) * c.S * c.K * c.D;
  for (int64_t row = first; row < end; ++row)
    for (int64_t k = 0; k < c.K; ++k) {
      const T* at = from + row * c.value_s + k * c.value_k;
      if (row + ROWS_AHEAD < c.S) prefetch_far(reinterpret_cast<uintptr_t>(at + ROWS_AHEAD * c.value_s), bytes);
      copy_bytes(at, to + (row * c.K + k) * c.D, bytes);
    }
}

}  // namespace

void PLIANT_ISA::forward(const void* context, int64_t item, int64_t worker) {
  const Sum& s = *static_cast<const Sum*>(context);
  PLIANT_DISPATCH(s.call, pliant::forward, s, item, worker);
}

void PLIANT_ISA::pack(const void* context, int64_t item, int64_t) {
  const Sum& s = *static_cast<const Sum*>(context);
  PLIANT_DISPATCH(s.call, pliant::pack, s, item);
}

}  // namespace pliant
