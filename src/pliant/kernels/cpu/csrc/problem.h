// What the Python side passes, and what dispatch.cpp and the kernels of each instruction set say to each other.
//
// A call is an array of int64: pointers, sizes, strides in elements, codes. Axes are those of the canonical form:
//   value [N, S, G, K, D]   maps [V, R]   loc [N, Q, G, V, P, 2]   weight [N, Q, G, V, P, R, K]   out [N, Q, G, K, D]
// N batch, Q queries, S stored rows, G groups with own positions, K groups with own weights, D channels, V views,
// P points, R scales.
#pragma once

#include <cstdint>

namespace pliant {

enum Dtype : int64_t { FLOAT32, FLOAT64, FLOAT16, BFLOAT16 };
enum Policy : int64_t { UNIT_ZERO, UNIT_SKIP, PIXEL_ZERO, PIXEL_NEAREST };
enum Isa : int64_t { ISA_BASELINE, ISA_AVX2, ISA_AVX512 };

// Results of the entry points; for BAD_MAP, the map's number (v * R + r) is added, shifted by STATUS_BITS.
enum Status : int64_t { OK, NO_MEMORY, NO_SUCH_ISA, BAD_MAP, MAP_TOO_LARGE };
constexpr int STATUS_BITS = 8;

// The order of the fields is the order in which launch.py packs them: first what changes from call to call, then
// what a problem's sizes and strides fix. Channels of value and of its gradient are adjacent.
struct SumCall {
  int64_t isa, threads, value, shapes, starts, loc, weight, grad;  // weight in the accumulator's type
  int64_t policy, value_dtype, loc_dtype;
  int64_t N, S, G, K, D, Q, V, P, R;
  int64_t value_n, value_s, value_g, value_k;
  int64_t shapes_bytes, shapes_v, shapes_r, shapes_side;
  int64_t starts_bytes, starts_v, starts_r;
  int64_t loc_n, loc_q, loc_g, loc_v, loc_p, loc_xy;
  int64_t weight_n, weight_q, weight_g, weight_v, weight_p, weight_r, weight_k;
  int64_t grad_n, grad_q, grad_g, grad_k, grad_d;  // forward: where the result goes, in value's type
};
// Null pointers: nobody asked.
struct GradCall {
  int64_t value, loc, weight;
  int64_t value_n, value_s, value_g, value_k;
  int64_t loc_n, loc_q, loc_g, loc_v, loc_p, loc_xy;
  int64_t weight_n, weight_q, weight_g, weight_v, weight_p, weight_r, weight_k;
};

// Sides of maps are at most this, so that a position within a map converts to int32.
constexpr int64_t MAX_SIDE = int64_t{1} << 30;
struct Map { int64_t start; int32_t height, width; };

// Rows [first, end) of storage.
struct Band { int64_t first, end; };

// One call, with what dispatch.cpp has worked out. An item of work is
//   forward, grad_samples: a stretch of queries of one (n, g);
//   grad_value: one band of rows and `channels` of the K * D channels of one (n, g).
struct Sum {
  SumCall call;
  GradCall grads;
  const Map* maps;        // [V, R]
  const void* zeros;      // a row of D zeros in value's type: what a corner outside the map reads as
  char* scratch;          // worker_bytes for each worker
  int64_t worker_bytes;
  int64_t block;                // queries worked on together
  int64_t stretch, stretches;  // queries of an item, items of one (n, g)
  char* packed;           // null, or the slices (n * G + g) >= slice as [S, K, D] without gaps
  int64_t slice;
  bool looks_ahead;       // ask for the rows of samples before they are needed
  const Band* bands;
  int64_t band_count, channels, slabs;
  bool streams;           // grad_value is written past the caches
};

// Runs body(context, item, worker) for every item, worker < threads. Items must not depend on each other.
typedef void (*Body)(const void* context, int64_t item, int64_t worker);
void parallel(int64_t threads, int64_t items, Body body, const void* context);

// How many samples are prepared at a time: enough to fill vectors, few enough to stay in the first cache.
constexpr int TAPS = 128;
// How many rows of a slice an item of `pack` copies.
constexpr int64_t PACK_ROWS = 1024;

// The kernels of one instruction set; the context is a Sum.
#define PLIANT_KERNELS(isa)                                               \
  namespace isa {                                                         \
  void pack(const void* context, int64_t item, int64_t worker);           \
  void forward(const void* context, int64_t item, int64_t worker);        \
  void grad_samples(const void* context, int64_t item, int64_t worker);   \
  void grad_value(const void* context, int64_t item, int64_t worker);     \
  }
PLIANT_KERNELS(baseline)
PLIANT_KERNELS(avx2)
PLIANT_KERNELS(avx512)
#undef PLIANT_KERNELS

}  // namespace pliant
