// Products of a few rows with rows that lie side by side: both factors come from a core's own caches.
#pragma once

#include "layouts.h"

#if defined(__AVX2__) && !defined(__AVX512F__)
namespace {

constexpr int64_t WIDE = 2 * W;  // numbers that lie side by side
constexpr int64_t TALL = 6;      // rows that are multiplied at once: 12 sums leave 4 of the 16 registers

int64_t up_to(int64_t count, int64_t step) { return (count + step - 1) / step * step; }

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
      const F factor = (F)_mm256_broadcast_ss(factors + r * factor_row + i);
      a[r] += factor * x, b[r] += factor * y;
    });
  }
  each_below<TALL>([&](auto r) INLINE { store(to + r * to_row, a[r]), store(to + r * to_row + W, b[r]); });
}

}  // namespace
#endif
