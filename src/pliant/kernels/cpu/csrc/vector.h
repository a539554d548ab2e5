// Vectors of the instruction set that this file is compiled for, and features read into them.
//
// Everything here and in the kernels has internal linkage, and no standard library template is used: a function with
// external linkage would be merged by the linker across instruction sets, and baseline code could end in AVX-512.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define PLIANT_INLINE static inline __attribute__((always_inline))

namespace pliant {
namespace {

#if defined(__AVX512F__)
constexpr int VECTOR_BYTES = 64;
#elif defined(__AVX2__)
constexpr int VECTOR_BYTES = 32;
#else
constexpr int VECTOR_BYTES = 16;
#endif

struct Half { uint16_t bits; };
struct BFloat16 { uint16_t bits; };

template <class Real> struct VectorOf;
template <> struct VectorOf<float> { typedef float type __attribute__((vector_size(VECTOR_BYTES))); };
template <> struct VectorOf<double> { typedef double type __attribute__((vector_size(VECTOR_BYTES))); };
template <class Real> using Vector = typename VectorOf<Real>::type;
template <class Real> constexpr int LANES = VECTOR_BYTES / static_cast<int>(sizeof(Real));

// The type in which sums over features of type T run.
template <class T> struct AccumulatorOf { typedef float type; };
template <> struct AccumulatorOf<double> { typedef double type; };
template <class T> using Accumulator = typename AccumulatorOf<T>::type;

template <class To, class From> PLIANT_INLINE To bit_copy(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  __builtin_memcpy(&to, &from, sizeof(To));
  return to;
}

// Scalars

PLIANT_INLINE float widen(float x) { return x; }
PLIANT_INLINE double widen(double x) { return x; }
PLIANT_INLINE float widen(BFloat16 x) { return bit_copy<float>(static_cast<uint32_t>(x.bits) << 16); }
PLIANT_INLINE float widen(Half x) {
#if defined(__F16C__)
  return _cvtsh_ss(x.bits);
#else
  const uint32_t magnitude = static_cast<uint32_t>(x.bits & 0x7fff) << 13, sign = static_cast<uint32_t>(x.bits & 0x8000) << 16;
  // 2^112 moves the exponent's bias from 15 to 127, and makes a subnormal half a normal float.
  const float finite = bit_copy<float>(magnitude) * 0x1p112f;
  const uint32_t special = magnitude >= 0x0f800000u ? 0x7f800000u : 0u;
  return bit_copy<float>(bit_copy<uint32_t>(finite) | special | sign);
#endif
}

// Rounding is to nearest, ties to even, once.
PLIANT_INLINE void narrow(float x, float* to) { *to = x; }
PLIANT_INLINE void narrow(double x, double* to) { *to = x; }
PLIANT_INLINE void narrow(float x, BFloat16* to) {
  const uint32_t bits = bit_copy<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  to->bits = static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16) | 0x40u : rounded);
}
PLIANT_INLINE void narrow(float x, Half* to) {
#if defined(__F16C__)
  to->bits = static_cast<uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT));
#else
  const uint32_t bits = bit_copy<uint32_t>(x), magnitude = bits & 0x7fffffffu;
  uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u;
  } else if (magnitude >= 0x477ff000u) {  // rounds past the largest half
    half = 0x7c00u;
  } else if (magnitude < 0x38800000u) {  // subnormal: adding 0.5 leaves the rounded bits at the end
    half = bit_copy<uint32_t>(bit_copy<float>(magnitude) + 0.5f) - 0x3f000000u;
  } else {
    half = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  }
  to->bits = static_cast<uint16_t>(half | ((bits >> 16) & 0x8000u));
#endif
}

// Vectors

template <class Real> PLIANT_INLINE Vector<Real> broadcast(Real x) { return x - Vector<Real>{}; }

PLIANT_INLINE Vector<float> load(const float* p) {
  Vector<float> v;
  __builtin_memcpy(&v, p, sizeof(v));
  return v;
}
PLIANT_INLINE Vector<double> load(const double* p) {
  Vector<double> v;
  __builtin_memcpy(&v, p, sizeof(v));
  return v;
}
PLIANT_INLINE Vector<float> load(const BFloat16* p) {
#if defined(__AVX512F__)
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return (Vector<float>)_mm512_slli_epi32(wide, 16);
#elif defined(__AVX2__)
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return (Vector<float>)_mm256_slli_epi32(wide, 16);
#else
  Vector<float> v;
  for (int i = 0; i < LANES<float>; ++i) v[i] = widen(p[i]);
  return v;
#endif
}
PLIANT_INLINE Vector<float> load(const Half* p) {
#if defined(__AVX512F__)
  return (Vector<float>)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__)
  return (Vector<float>)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  Vector<float> v;
  for (int i = 0; i < LANES<float>; ++i) v[i] = widen(p[i]);
  return v;
#endif
}

template <class Real> PLIANT_INLINE void store(Real* p, Vector<Real> v) { __builtin_memcpy(p, &v, sizeof(v)); }

// A few vectors are copied before a call of memcpy would have begun.
PLIANT_INLINE void copy_bytes(const void* from, void* to, int64_t count) {
  int64_t i = 0;
  for (; i + VECTOR_BYTES <= count; i += VECTOR_BYTES)
    __builtin_memcpy(static_cast<char*>(to) + i, static_cast<const char*>(from) + i, VECTOR_BYTES);
  if (i < count) __builtin_memcpy(static_cast<char*>(to) + i, static_cast<const char*>(from) + i, static_cast<size_t>(count - i));
}

template <class T, class Lanes> PLIANT_INLINE void write(T* p, Lanes v) { __builtin_memcpy(p, &v, sizeof(v)); }

// The first `count` < LANES elements; nothing behind them is touched. Other lanes are zero.
template <class T> PLIANT_INLINE Vector<Accumulator<T>> load_first(const T* p, int count) {
  T padded[LANES<Accumulator<T>>] = {};
  for (int i = 0; i < count; ++i) padded[i] = p[i];
  return load(padded);
}
template <class Real> PLIANT_INLINE void store_first(Real* p, Vector<Real> v, int count) {
  for (int i = 0; i < count; ++i) p[i] = v[i];
}
#if defined(__AVX512F__)
PLIANT_INLINE uint32_t first(int count) { return (1u << count) - 1u; }
template <> inline __attribute__((always_inline)) Vector<float> load_first(const float* p, int count) {
  return (Vector<float>)_mm512_maskz_loadu_ps(static_cast<__mmask16>(first(count)), p);
}
template <> inline __attribute__((always_inline)) Vector<double> load_first(const double* p, int count) {
  return (Vector<double>)_mm512_maskz_loadu_pd(static_cast<__mmask8>(first(count)), p);
}
template <> inline __attribute__((always_inline)) Vector<float> load_first(const BFloat16* p, int count) {
  const __m256i bits = _mm256_maskz_loadu_epi16(static_cast<__mmask16>(first(count)), p);
  return (Vector<float>)_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16);
}
template <> inline __attribute__((always_inline)) Vector<float> load_first(const Half* p, int count) {
  return (Vector<float>)_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(static_cast<__mmask16>(first(count)), p));
}
PLIANT_INLINE void store_first(float* p, Vector<float> v, int count) {
  _mm512_mask_storeu_ps(p, static_cast<__mmask16>(first(count)), (__m512)v);
}
PLIANT_INLINE void store_first(double* p, Vector<double> v, int count) {
  _mm512_mask_storeu_pd(p, static_cast<__mmask8>(first(count)), (__m512d)v);
}
#elif defined(__AVX2__)
PLIANT_INLINE __m256i first32(int count) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
PLIANT_INLINE __m256i first64(int count) {
  return _mm256_cmpgt_epi64(_mm256_set1_epi64x(count), _mm256_setr_epi64x(0, 1, 2, 3));
}
template <> inline __attribute__((always_inline)) Vector<float> load_first(const float* p, int count) {
  return (Vector<float>)_mm256_maskload_ps(p, first32(count));
}
template <> inline __attribute__((always_inline)) Vector<double> load_first(const double* p, int count) {
  return (Vector<double>)_mm256_maskload_pd(p, first64(count));
}
PLIANT_INLINE void store_first(float* p, Vector<float> v, int count) {
  _mm256_maskstore_ps(p, first32(count), (__m256)v);
}
PLIANT_INLINE void store_first(double* p, Vector<double> v, int count) {
  _mm256_maskstore_pd(p, first64(count), (__m256d)v);
}
#endif

// a * b + c, fused where the instruction set has it: contraction is off everywhere else.
PLIANT_INLINE Vector<float> fma(Vector<float> a, Vector<float> b, Vector<float> c) {
#if defined(__AVX512F__)
  return (Vector<float>)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (Vector<float>)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}
PLIANT_INLINE Vector<double> fma(Vector<double> a, Vector<double> b, Vector<double> c) {
#if defined(__AVX512F__)
  return (Vector<double>)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#elif defined(__AVX2__)
  return (Vector<double>)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#else
  return a * b + c;
#endif
}

// The sums of the lanes of four vectors, each by a tree.
template <class Real> PLIANT_INLINE void sum_lanes(const Vector<Real> (&v)[4], Real* sums) {
  for (int i = 0; i < 4; ++i) {
    Real lanes[LANES<Real>];
    store(lanes, v[i]);
    for (int half = LANES<Real> / 2; half > 0; half /= 2)
      for (int j = 0; j < half; ++j) lanes[j] += lanes[j + half];
    sums[i] = lanes[0];
  }
}
#if defined(__AVX2__)
template <> inline __attribute__((always_inline)) void sum_lanes(const Vector<float> (&v)[4], float* sums) {
  __m256 x[4];
  for (int i = 0; i < 4; ++i) {
#if defined(__AVX512F__)
    const __m512 wide = (__m512)v[i];
    x[i] = _mm256_add_ps(_mm512_castps512_ps256(wide), _mm512_extractf32x8_ps(wide, 1));
#else
    x[i] = (__m256)v[i];
#endif
  }
  const __m256 low = _mm256_add_ps(_mm256_unpacklo_ps(x[0], x[1]), _mm256_unpackhi_ps(x[0], x[1]));
  const __m256 high = _mm256_add_ps(_mm256_unpacklo_ps(x[2], x[3]), _mm256_unpackhi_ps(x[2], x[3]));
  const __m256 all = _mm256_add_ps(_mm256_shuffle_ps(low, high, 0x44), _mm256_shuffle_ps(low, high, 0xee));
  _mm_storeu_ps(sums, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
}
template <> inline __attribute__((always_inline)) void sum_lanes(const Vector<double> (&v)[4], double* sums) {
  __m256d x[4];
  for (int i = 0; i < 4; ++i) {
#if defined(__AVX512F__)
    const __m512d wide = (__m512d)v[i];
    x[i] = _mm256_add_pd(_mm512_castpd512_pd256(wide), _mm512_extractf64x4_pd(wide, 1));
#else
    x[i] = (__m256d)v[i];
#endif
  }
  const __m256d low = _mm256_add_pd(_mm256_unpacklo_pd(x[0], x[1]), _mm256_unpackhi_pd(x[0], x[1]));
  const __m256d high = _mm256_add_pd(_mm256_unpacklo_pd(x[2], x[3]), _mm256_unpackhi_pd(x[2], x[3]));
  const __m256d swapped = _mm256_permute2f128_pd(low, high, 0x21), kept = _mm256_blend_pd(low, high, 0xc);
  _mm256_storeu_pd(sums, _mm256_add_pd(kept, swapped));
}
#endif

// Rounded to nearest, ties to even.
PLIANT_INLINE void store_narrow(float* p, Vector<float> v) { store(p, v); }
PLIANT_INLINE void store_narrow(double* p, Vector<double> v) { store(p, v); }
PLIANT_INLINE void store_narrow(BFloat16* p, Vector<float> v) {
  typedef uint32_t Bits __attribute__((vector_size(VECTOR_BYTES)));
  typedef uint16_t Halves __attribute__((vector_size(VECTOR_BYTES / 2)));
  const Bits bits = (Bits)v, rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16, quiet = (bits >> 16) | 0x40u;
  const Bits nan = (Bits)((bits & 0x7fffffffu) > 0x7f800000u);
  write(p, __builtin_convertvector((nan & quiet) | (~nan & rounded), Halves));
}
PLIANT_INLINE void store_narrow(Half* p, Vector<float> v) {
#if defined(__AVX512F__)
  write(p, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX2__)
  write(p, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int i = 0; i < LANES<float>; ++i) narrow(v[i], p + i);
#endif
}

// `count` sums rounded into features.
template <class T> PLIANT_INLINE void narrow_row(const Accumulator<T>* from, T* to, int64_t count) {
  constexpr int64_t L = LANES<Accumulator<T>>;
  int64_t i = 0;
  for (; i + L <= count; i += L) store_narrow(to + i, load(from + i));
  for (; i < count; ++i) narrow(from[i], to + i);
}
PLIANT_INLINE void stream_line(const void* from, void* to) {
#if defined(__AVX512F__)
  _mm512_stream_si512(static_cast<__m512i*>(to), _mm512_loadu_si512(from));
#elif defined(__AVX2__)
  for (int i = 0; i < 2; ++i)
    _mm256_stream_si256(static_cast<__m256i*>(to) + i, _mm256_loadu_si256(static_cast<const __m256i*>(from) + i));
#elif defined(__SSE2__)
  for (int i = 0; i < 4; ++i)
    _mm_stream_si128(static_cast<__m128i*>(to) + i, _mm_loadu_si128(static_cast<const __m128i*>(from) + i));
#else
  __builtin_memcpy(to, from, 64);
#endif
}

// The same past the caches, for what is too large to stay there: they would read it first. Whole lines of 64 bytes;
// `streamed` ends it.
template <class T> PLIANT_INLINE void stream_row(const Accumulator<T>* from, T* to, int64_t count) {
  constexpr int64_t LINE = 64 / static_cast<int64_t>(sizeof(T));
  for (int64_t i = 0; i < count; i += LINE) {
    T line[LINE];
    narrow_row(from + i, line, LINE);
    stream_line(line, to + i);
  }
}
PLIANT_INLINE void streamed() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

template <class Real> PLIANT_INLINE void zero_row(Real* to, int64_t count) {
  constexpr int64_t L = LANES<Real>;
  int64_t i = 0;
  for (; i + L <= count; i += L) store(to + i, Vector<Real>{});
  for (; i < count; ++i) to[i] = 0;
}

template <class T> PLIANT_INLINE void widen_row(const T* from, int64_t stride, Accumulator<T>* to, int64_t count) {
  constexpr int64_t L = LANES<Accumulator<T>>;
  int64_t i = 0;
  if (stride == 1)
    for (; i + L <= count; i += L) store(to + i, load(from + i));
  for (; i < count; ++i) to[i] = widen(from[i * stride]);
}

}  // namespace
}  // namespace pliant
