// The C interface: checks what a call says of memory, divides it into items, and runs them with the kernels of the
// instruction set that was asked for.
#include <cstdint>
#include <cstdlib>
#include <cstring>

#if defined(__linux__)
#include <sys/mman.h>
#endif
#if defined(_OPENMP)
#include <omp.h>
#endif
#if defined(PLIANT_HAS_avx2)
#include <cpuid.h>
#endif

#include "convolution.h"
#include "problem.h"

#define PLIANT_EXPORT extern "C" __attribute__((visibility("default")))

namespace pliant {

void parallel(int64_t threads, int64_t items, Body body, const void* context) {
  threads = threads < items ? threads : items;
#if defined(_OPENMP)
  if (threads > 1 && !omp_in_parallel()) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(static_cast<int>(threads))
    for (int64_t item = 0; item < items; ++item) body(context, item, omp_get_thread_num());
    return;
  }
#endif
  for (int64_t item = 0; item < items; ++item) body(context, item, 0);
}

namespace {

// What "64 MiB or one packed copy of value" allows beyond inputs and outputs.
constexpr int64_t SCRATCH_BYTES = int64_t{64} << 20;
constexpr int64_t HUGE_FROM = int64_t{4} << 20, HUGE_TO = int64_t{64} << 20;
constexpr int64_t STREAM_FROM = int64_t{32} << 20;  // more than a cache would keep until somebody reads it
constexpr int64_t TILE_BYTES = 16 << 10;  // of the first cache, for the sums of a block of queries

int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t padded(int64_t a, int64_t to) { return ceil_div(a, to) * to; }

// Instruction sets

struct Kernels {
  bool (*runs)();
  Body pack, forward, grad_samples, grad_value;
  int64_t (*convolution)(const ConvolutionCall& call);
};

bool always() { return true; }
#if defined(PLIANT_HAS_avx2)
bool has_f16c() {
  // Asked once: a virtual machine takes microseconds to answer.
  static const bool known = [] {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c >> 29 & 1);
  }();
  return known;
}
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c(); }
#endif
#if defined(PLIANT_HAS_avx512)
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw");
}
#endif

constexpr Kernels NONE = {nullptr, nullptr, nullptr, nullptr, nullptr, nullptr};
#define PLIANT_TABLE(runs, isa) {runs, isa::pack, isa::forward, isa::grad_samples, isa::grad_value, isa::convolution}
const Kernels KERNELS[] = {  // in the order of Isa
    PLIANT_TABLE(always, baseline),
#if defined(PLIANT_HAS_avx2)
    PLIANT_TABLE(has_avx2, avx2),
#else
    NONE,
#endif
#if defined(PLIANT_HAS_avx512)
    PLIANT_TABLE(has_avx512, avx512),
#else
    NONE,
#endif
};

const Kernels* kernels_of(int64_t isa) {
  if (isa < ISA_BASELINE || isa > ISA_AVX512 || !KERNELS[isa].runs || !KERNELS[isa].runs()) return nullptr;
  return &KERNELS[isa];
}

// Large fresh memory costs a page fault every 4 KiB, which for a large result is as much as the computation: ask for
// huge pages. Only advice: it may fail. Not for the largest results: among a model's other allocations the system
// takes longer to gather so many huge pages than the small ones would cost.
void expect_writes(int64_t memory, int64_t bytes) {
#if defined(__linux__)
  constexpr uintptr_t PAGE = 4096;
  const uintptr_t first = (static_cast<uintptr_t>(memory) + PAGE - 1) / PAGE * PAGE;
  const uintptr_t end = static_cast<uintptr_t>(memory + bytes) / PAGE * PAGE;
  if (bytes >= HUGE_FROM && bytes <= HUGE_TO) madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
#else
  (void)memory, (void)bytes;
#endif
}

// Memory that is given back at the end of the scope.
struct Memory {
  char* bytes = nullptr;
  Memory() = default;
  Memory(const Memory&) = delete;
  ~Memory() { std::free(bytes); }
  bool reserve(int64_t size) {
    std::free(bytes);
    bytes = static_cast<char*>(std::aligned_alloc(64, static_cast<size_t>(padded(larger(size, 1), 64))));
    if (bytes) expect_writes(reinterpret_cast<int64_t>(bytes), size);
    return bytes != nullptr;
  }
};

// Threads that are worth waking: each for tens of microseconds at least.
int64_t threads_for(const SumCall& c, int64_t items) {
  constexpr int64_t LEAST = 1 << 16;  // channels of samples
  const int64_t work = c.N * c.Q * c.G * c.V * c.P * c.R * c.K * c.D;
  return larger(1, smaller(c.threads, smaller(items, work / LEAST)));
}

int64_t bytes_of(int64_t dtype) { return dtype == FLOAT64 ? 8 : dtype == FLOAT32 ? 4 : 2; }
int64_t sum_bytes(int64_t dtype) { return dtype == FLOAT64 ? 8 : 4; }

int64_t index_at(int64_t address, int64_t bytes, int64_t at) {
  return bytes == 8 ? reinterpret_cast<const int64_t*>(address)[at] : reinterpret_cast<const int32_t*>(address)[at];
}

// Reads the maps and checks that each lies within the S rows of value.
int64_t read_maps(const SumCall& c, Map* maps) {
  for (int64_t v = 0; v < c.V; ++v)
    for (int64_t r = 0; r < c.R; ++r) {
      const int64_t at = v * c.shapes_v + r * c.shapes_r, number = (v * c.R + r) << STATUS_BITS;
      const int64_t height = index_at(c.shapes, c.shapes_bytes, at), width = index_at(c.shapes, c.shapes_bytes, at + c.shapes_side);
      const int64_t start = index_at(c.starts, c.starts_bytes, v * c.starts_v + r * c.starts_r);
      if (height < 0 || width < 0 || start < 0 || start > c.S) return BAD_MAP | number;
      if (height > 0 && width > (c.S - start) / height) return BAD_MAP | number;
      const bool empty = height == 0 || width == 0;
      if (!empty && (height > MAX_SIDE || width > MAX_SIDE)) return MAP_TOO_LARGE | number;
      maps[v * c.R + r] = empty ? Map{start, 0, 0} : Map{start, static_cast<int32_t>(height), static_cast<int32_t>(width)};
    }
  return OK;
}

// Whether copying each slice [S, K, D] of a (n, g) together pays: its rows lie apart, and most are read more than once.
bool packing_pays(const SumCall& c) {
  return c.G > 1 && c.Q * c.V * c.P * c.R > c.S;
}

// One slice by one worker: packed into memory of its own, and used while it is in its cache.
struct OwnSlices {
  const Sum& s;
  Body pack, body;
  int64_t bytes;
};
void run_slice(const void* context, int64_t slice, int64_t worker) {
  const OwnSlices& own = *static_cast<const OwnSlices*>(context);
  Sum s = own.s;
  s.slice = slice;
  s.packed += worker * own.bytes;
  for (int64_t item = 0; item < ceil_div(s.call.S, PACK_ROWS); ++item) own.pack(&s, item, worker);
  for (int64_t item = 0; item < s.stretches; ++item) own.body(&s, item, worker);
}

// Runs `body` over the blocks of queries, with slices of value packed if that pays.
int64_t run_queries(Sum& s, const Kernels& kernels, Body body, int64_t worker_bytes) {
  const SumCall& c = s.call;
  Memory scratch, zeros, packed;
  const int64_t slices = c.N * c.G, slice_bytes = c.S * c.K * c.D * bytes_of(c.value_dtype);
  const int64_t threads = threads_for(c, slices * s.stretches);
  s.worker_bytes = padded(worker_bytes, 64);
  if (!scratch.reserve(s.worker_bytes * threads) || !zeros.reserve(c.D * 8)) return NO_MEMORY;
  std::memset(zeros.bytes, 0, static_cast<size_t>(c.D * 8));
  s.scratch = scratch.bytes;
  s.zeros = zeros.bytes;
  s.looks_ahead = false;
  if (!packing_pays(c)) {
    s.looks_ahead = c.K == 1 && c.R == 1 && c.P <= TAPS;
    parallel(threads, slices * s.stretches, body, &s);
    return OK;
  }
  const int64_t most = larger(1, SCRATCH_BYTES / larger(slice_bytes, 1));
  const int64_t together = smaller(most, smaller(slices, threads));
  const bool even = 10 * slices >= 9 * threads * ceil_div(slices, threads);  // nobody would wait long for the last
  if (!packed.reserve(together * slice_bytes)) return NO_MEMORY;
  s.packed = packed.bytes;
  if (even && together == smaller(slices, threads)) {
    const OwnSlices own = {s, kernels.pack, body, slice_bytes};
    parallel(threads, slices, run_slice, &own);
  } else {
    for (s.slice = 0; s.slice < slices; s.slice += together) {
      const int64_t count = smaller(together, slices - s.slice);
      parallel(threads, count * ceil_div(c.S, PACK_ROWS), kernels.pack, &s);
      parallel(threads, count * s.stretches, body, &s);
    }
  }
  s.packed = nullptr;
  return OK;
}

// Queries of a block: as many as TAPS samples hold, while their sums fit in the first cache.
void divide_queries(Sum& s) {
  const SumCall& c = s.call;
  const int64_t row = larger(1, c.K * padded(c.D, 16) * sum_bytes(c.value_dtype));
  s.block = larger(1, smaller(TAPS / larger(c.P, 1), TILE_BYTES / row));
  // Long enough to know what comes next, short enough to share among threads.
  const int64_t blocks = ceil_div(c.Q, s.block), shares = ceil_div(8 * c.threads, c.N * c.G);
  s.stretch = s.block * larger(1, smaller(16, blocks / shares));
  s.stretches = ceil_div(c.Q, s.stretch);
}

int64_t sample_sum(Sum& s, const Kernels& kernels) {
  const SumCall& c = s.call;
  if (c.N * c.Q * c.G * c.K * c.D == 0) return OK;
  divide_queries(s);
  expect_writes(c.grad, c.N * c.Q * c.G * c.K * c.D * bytes_of(c.value_dtype));
  const int64_t row = padded(c.D, 16) * sum_bytes(c.value_dtype);
  return run_queries(s, kernels, kernels.forward, s.block * c.K * row + c.K * TAPS * sum_bytes(c.value_dtype));
}

int64_t grad_samples(Sum& s, const Kernels& kernels) {
  const SumCall& c = s.call;
  if (c.N * c.Q * c.G * c.V * c.P * c.S * c.K * c.D == 0) return OK;
  divide_queries(s);
  const int64_t samples = c.N * c.Q * c.G * c.V * c.P;
  if (s.grads.loc) expect_writes(s.grads.loc, samples * 2 * bytes_of(c.loc_dtype));
  if (s.grads.weight) expect_writes(s.grads.weight, samples * c.R * c.K * sum_bytes(c.value_dtype));
  return run_queries(s, kernels, kernels.grad_samples, (padded(c.D, 16) + c.K * TAPS) * sum_bytes(c.value_dtype));
}

int64_t end_of(const Map& map) { return map.start + static_cast<int64_t>(map.height) * map.width; }

// The next row after `row` at which storage can be cut: where a map starts or ends, and within no map.
int64_t next_cut(const Sum& s, int64_t row) {
  const Map *maps = s.maps, *last = maps + s.call.V * s.call.R;
  int64_t cut = s.call.S;
  for (const Map* m = maps; m < last; ++m) {
    if (m->start > row) cut = smaller(cut, m->start);
    if (end_of(*m) > row) cut = smaller(cut, end_of(*m));
  }
  for (const Map* m = maps; m < last; ++m)
    if (m->start < cut && cut < end_of(*m)) return next_cut(s, cut);
  return cut;
}

// Cuts the stored rows into bands of at most `most` rows, at first between maps. Maps that overlap share their bands.
int64_t cut_bands(const Sum& s, int64_t most, Band* bands) {
  int64_t count = 0;
  for (int64_t first = 0, end; first < s.call.S; first = end) {
    end = next_cut(s, first);
    for (int64_t at = first; at < end; at += most, ++count)
      if (bands) bands[count] = {at, smaller(at + most, end)};
  }
  return count;
}

// Whether the channels of every row of grad_value are whole lines of the cache.
bool whole_lines(const Sum& s) {
  const GradCall& to = s.grads;
  return (to.value | (s.call.D | to.value_n | to.value_s | to.value_g | to.value_k) * bytes_of(s.call.value_dtype)) % 64 == 0;
}

int64_t grad_value(Sum& s, const Kernels& kernels) {
  const SumCall& c = s.call;
  const int64_t channels = c.K * c.D, bytes = sum_bytes(c.value_dtype);
  if (c.N * c.S * c.G * channels == 0) return OK;
  Memory scratch, bands;
  s.channels = smaller(channels, larger(c.D, 32));
  s.slabs = ceil_div(channels, s.channels);
  const int64_t budget = larger(SCRATCH_BYTES, c.N * c.S * c.G * channels * bytes_of(c.value_dtype));
  const int64_t most = larger(1, budget / c.threads / (s.channels * bytes));
  s.band_count = cut_bands(s, most, nullptr);
  if (!bands.reserve(s.band_count * static_cast<int64_t>(sizeof(Band)))) return NO_MEMORY;
  s.bands = reinterpret_cast<Band*>(bands.bytes);
  cut_bands(s, most, reinterpret_cast<Band*>(bands.bytes));
  int64_t rows = 0;
  for (int64_t b = 0; b < s.band_count; ++b) rows = larger(rows, s.bands[b].end - s.bands[b].first);
  const int64_t items = c.N * c.G * s.band_count * s.slabs, threads = smaller(c.threads, items);
  s.worker_bytes = padded((TAPS + rows * s.channels) * bytes, 64);
  if (!scratch.reserve(threads * s.worker_bytes)) return NO_MEMORY;
  s.scratch = scratch.bytes;
  const int64_t result_bytes = c.N * c.S * c.G * channels * bytes_of(c.value_dtype);
  expect_writes(s.grads.value, result_bytes);
  s.streams = result_bytes >= STREAM_FROM && whole_lines(s);
  parallel(threads, items, kernels.grad_value, &s);
  return OK;
}

int64_t run(Sum& s, bool backward) {
  const Kernels* kernels = kernels_of(s.call.isa);
  Memory maps;
  if (!kernels) return NO_SUCH_ISA;
  if (!maps.reserve(s.call.V * s.call.R * static_cast<int64_t>(sizeof(Map)))) return NO_MEMORY;
  s.maps = reinterpret_cast<Map*>(maps.bytes);
  int64_t status = read_maps(s.call, reinterpret_cast<Map*>(maps.bytes));
  if (status == OK && !backward) return sample_sum(s, *kernels);
  if (status == OK && (s.grads.loc || s.grads.weight)) status = grad_samples(s, *kernels);
  if (status == OK && s.grads.value) status = grad_value(s, *kernels);
  return status;
}

}  // namespace
}  // namespace pliant

// Which instruction sets this machine can run: bit i for Isa i.
PLIANT_EXPORT int64_t pliant_isas() {
  int64_t bits = 0;
  for (int64_t isa = 0; isa <= pliant::ISA_AVX512; ++isa) bits |= static_cast<int64_t>(pliant::kernels_of(isa) != nullptr) << isa;
  return bits;
}

// Changes with every change of the calls' layout: a library from another build is refused.
PLIANT_EXPORT int64_t pliant_abi() { return 2; }

PLIANT_EXPORT int64_t pliant_has_threads() {
#if defined(_OPENMP)
  return 1;
#else
  return 0;
#endif
}

PLIANT_EXPORT int64_t pliant_sample_sum(const int64_t* call) {
  pliant::Sum s = {};
  std::memcpy(&s.call, call, sizeof(s.call));
  return pliant::run(s, false);
}

PLIANT_EXPORT int64_t pliant_sample_sum_backward(const int64_t* call) {
  pliant::Sum s = {};
  std::memcpy(&s.call, call, sizeof(s.call));
  std::memcpy(&s.grads, reinterpret_cast<const char*>(call) + sizeof(s.call), sizeof(s.grads));
  return pliant::run(s, true);
}

PLIANT_EXPORT int64_t pliant_convolution(const int64_t* call) {
  pliant::ConvolutionCall c;
  std::memcpy(&c, call, sizeof(c));
  const pliant::Kernels* kernels = pliant::kernels_of(c.isa);
  if (!kernels) return pliant::NO_SUCH_ISA;
  if (c.H > pliant::MAX_SIDE || c.W > pliant::MAX_SIDE) return pliant::MAP_TOO_LARGE;
  const int64_t channels = c.groups ? c.out_channels : c.C * c.kernel_h * c.kernel_w;
  const int64_t bytes = c.N * channels * c.out_h * c.out_w * pliant::bytes_of(c.value_dtype);
  if (!c.backward) pliant::expect_writes(c.out.at, bytes);
  return kernels->convolution(c);
}
