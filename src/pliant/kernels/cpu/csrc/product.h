// Products of matrices that fit in a cache. A block of the result stays in registers while the depth runs, so a number
// of the result is one sum in order of the depth, however the rows and columns are shared out.
#pragma once

#include "vector.h"

namespace pliant {
namespace {

// Rows of a block that is two vectors wide: its sums, two vectors of b and a number of a just fill the registers.
constexpr int BLOCK_ROWS = VECTOR_BYTES == 64 ? 14 : 6;
template <class Real> constexpr int64_t PANEL = 2 * LANES<Real>;

// to[rows, columns] = a[rows, depth] * b[depth, columns], or added to what is there. The columns of b come in panels
// of PANEL columns, those of `to` lie side by side.
template <class Real> struct Product {
  const Real* a;
  int64_t a_row, a_depth;
  const Real* b;
  int64_t b_depth, b_panel;
  Real* to;
  int64_t to_row;
  int64_t depth;
  bool add;
};

// With REST, the last vector has only `rest` columns. Loops over the block are unrolled early, or the compiler keeps the
// sums in memory.
template <class Real, int ROWS, int VECTORS, bool REST> inline void multiply_block(const Product<Real>& p, int rest) {
  constexpr int64_t L = LANES<Real>;
  constexpr int LAST = REST ? VECTORS - 1 : VECTORS;
  const Real *a = p.a, *b = p.b;
  const int64_t a_row = p.a_row;
  Vector<Real> sums[ROWS][VECTORS] = {};
  if (p.add) {
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 2
      for (int j = 0; j < VECTORS; ++j) {
        const Real* at = p.to + i * p.to_row + j * L;
        sums[i][j] = j == LAST ? load_first(at, rest) : load(at);
      }
  }
#pragma GCC unroll 2
  for (int64_t k = 0; k < p.depth; ++k, a += p.a_depth, b += p.b_depth) {
    Vector<Real> y[VECTORS];
#pragma GCC unroll 2
    for (int j = 0; j < VECTORS; ++j) y[j] = j == LAST ? load_first(b + j * L, rest) : load(b + j * L);
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; ++i) {
      const Vector<Real> x = broadcast(a[i * a_row]);
#pragma GCC unroll 2
      for (int j = 0; j < VECTORS; ++j) sums[i][j] = fma(x, y[j], sums[i][j]);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 2
    for (int j = 0; j < VECTORS; ++j) {
      Real* at = p.to + i * p.to_row + j * L;
      j == LAST ? store_first(at, sums[i][j], rest) : store(at, sums[i][j]);
    }
}

// ROWS rows, up to PANEL columns.
template <class Real, int ROWS> inline void multiply_rows(Product<Real>& p, int64_t columns) {
  constexpr int64_t L = LANES<Real>;
  if (columns >= 2 * L) {
    multiply_block<Real, ROWS, 2, false>(p, 0);
  } else if (columns > L) {
    multiply_block<Real, ROWS, 2, true>(p, static_cast<int>(columns - L));
  } else if (columns == L) {
    multiply_block<Real, ROWS, 1, false>(p, 0);
  } else {
    multiply_block<Real, ROWS, 1, true>(p, static_cast<int>(columns));
  }
  p.a += ROWS * p.a_row;
  p.to += ROWS * p.to_row;
}

template <class Real> inline void multiply(const Product<Real>& whole, int64_t rows, int64_t columns) {
  Product<Real> p = whole;
  for (int64_t n = 0; n < columns; n += PANEL<Real>, p.b += p.b_panel) {
    p.a = whole.a;
    p.to = whole.to + n;
    int64_t m = rows;
    for (; m >= BLOCK_ROWS; m -= BLOCK_ROWS) multiply_rows<Real, BLOCK_ROWS>(p, columns - n);
    for (; m >= 4; m -= 4) multiply_rows<Real, 4>(p, columns - n);
    for (; m > 0; --m) multiply_rows<Real, 1>(p, columns - n);
  }
}

}  // namespace
}  // namespace pliant
