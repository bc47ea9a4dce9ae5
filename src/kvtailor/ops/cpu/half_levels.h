// Products with levels of a bell in tokens of 64 channels, on processors with AVX-512 VNNI: such a token's codes of 4 bits are
// half a vector, so that two tokens are read at once. Values of theirs are summed by `short_level_sums`.
#pragma once

#include "integers.h"
#include "short_levels.h"

constexpr int64_t HALF_LEVELS = 64;  // channels of such a token

// Lane 4 j + i of each half of the result is the sum of the first or of the second half of v[4 j + i]: of four vectors first
// halves come first.
inline F sums_of_halves(const F* v) {
  F four[2];
  each_below<2>([&](auto j) INLINE {
    const auto two = [&](int i) INLINE {
      const __m512 a = (__m512)v[4 * j + i], b = (__m512)v[4 * j + i + 1];
      return (__m512d)(_mm512_unpacklo_ps(a, b) + _mm512_unpackhi_ps(a, b));
    };
    const __m512d a = two(0), b = two(2);
    four[j] = (F)_mm512_unpacklo_pd(a, b) + (F)_mm512_unpackhi_pd(a, b);
  });
  const __m512 a = (__m512)four[0], b = (__m512)four[1];
  return (F)_mm512_shuffle_f32x4(a, b, 0x88) + (F)_mm512_shuffle_f32x4(a, b, 0xdd);
}

// Of R rows with `count` tokens; queries in the order of their channels. A token's scale is left to the caller.
template <int R>
APART void half_level_products(const float* query, int64_t wide, const char* codes, int64_t stride, int64_t count,
                               const float* of_levels, float* to, int64_t apart) {
  // Vectors of two tokens that a row has at once: eight of them are all rows'.
  constexpr int PAIRS = W / R / 2;
  // A lane has 8 products of a token, and its sum 64, as floats.
  constexpr int64_t MOST = 0x7fffffff / (MOST_OF_KEYS * HALF_LEVELS / 8);
  alignas(64) int16_t asked[R][4][2 * W], levels[32], natural[2 * HALF_LEVELS];
  float scale[R];
  const float unit = whole_levels(of_levels, OF_KEYS, levels);
  const ByteTables table(levels);
  for (int r = 0; r < R; r++) {
    const Scaled by = scaled(query + r * wide, HALF_LEVELS, MOST < 32767 ? MOST : 32767);
    shorten_to(query + r * wide, HALF_LEVELS, by.up, natural);
    // Of each 16 channels, for both tokens.
    for (int i = 0; i < 4; i++) store(asked[r][i], (S)of_tokens(natural + 16 * i, natural + 16 * i));
    scale[r] = unit * by.back;
  }
  const char* last = codes + (count - 1) * stride;
  over_tokens<R>(count, scale, to, apart, codes, stride, [&](int64_t first) INLINE {
    I sum_of[8]{};
    each_below<PAIRS>([&](auto p) INLINE {
      // Which two tokens: so that `sums_of_halves` gives a row's tokens one behind the other.
      constexpr int ONE = p + p / 4 * 4, OTHER = ONE + (PAIRS < 4 ? PAIRS : 4);
      const char *one = codes + (first + ONE) * stride, *other = codes + (first + OTHER) * stride;
      const U bytes = in_turns(of_tokens(one < last ? one : last, other < last ? other : last));
      each_below<2>([&](auto kind) INLINE {
        S levels_of[2];
        table.pick(four_bits(bytes, kind), levels_of[0], levels_of[1]);
        each_below<2 * R>([&](auto i) INLINE {
          add_pairs_of<1>(sum_of + i / 2 * PAIRS + p, levels_of + i % 2, asked[i / 2][2 * kind + i % 2]);
        });
      });
    });
    F found[8];
    each_below<8>([&](auto i) INLINE { found[i] = __builtin_convertvector(sum_of[i], F); });
    const F sums_of_all = sums_of_halves(found);
    if constexpr (R < 4) return sums_of_all;
    // Rows have two vectors each, so that first halves of two rows stand side by side.
    const __m512i order = _mm512_setr_epi32(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
    return (F)_mm512_permutexvar_ps(order, (__m512)sums_of_all);
  });
}
