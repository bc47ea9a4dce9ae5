// Products of a few rows with rows that lie side by side: both factors come from a core's own caches.
#pragma once

#include "layouts.h"

#if defined(__AVX2__)
namespace {

constexpr int64_t WIDE = 2 * W;  // numbers that lie side by side
// Rows that are multiplied at once: 12 sums leave 4 of 16 registers, 24 leave 8 of 32.
constexpr int64_t TALL = W == 16 ? 12 : 6;

int64_t up_to(int64_t count, int64_t step) { return (count + step - 1) / step * step; }

// Puts row number `at` of `size` numbers beside others, as `multiply` reads them: in runs of WIDE rows, channel after
// channel. Null: zeros.
INLINE static inline void put_beside(const float* row, int64_t size, int64_t at, float* to) {
  to += at / WIDE * size * WIDE + at % WIDE;
  for (int64_t c = 0; c < size; c++) to[c * WIDE] = row ? row[c] : 0.f;
}

// Sums of products of TALL rows with `count` rows of WIDE numbers, added to what `to` holds or in its place. Rows of
// factors lie `factor_row` numbers from one another, rows of sums `to_row`.
template <bool ADDS>
INLINE static inline void multiply(const float* factors, int64_t factor_row, const float* with, int64_t count,
                                   float* to, int64_t to_row) {
  F a[TALL], b[TALL];
  each_below<TALL>([&](auto r) INLINE {
    a[r] = ADDS ? load<F>(to + r * to_row) : F{};
    b[r] = ADDS ? load<F>(to + r * to_row + W) : F{};
  });
  for (int64_t i = 0; i < count; i++) {
    const F x = load<F>(with + i * WIDE), y = load<F>(with + i * WIDE + W);
    each_below<TALL>([&](auto r) INLINE {
      // Straight from memory: a number that is in a register takes a unit that products want.
#if defined(__AVX512F__)
      const F factor = (F)_mm512_set1_ps(factors[r * factor_row + i]);
#else
      const F factor = (F)_mm256_broadcast_ss(factors + r * factor_row + i);
#endif
      a[r] += factor * x, b[r] += factor * y;
    });
  }
  each_below<TALL>([&](auto r) INLINE { store(to + r * to_row, a[r]), store(to + r * to_row + W, b[r]); });
}

}  // namespace
#endif
