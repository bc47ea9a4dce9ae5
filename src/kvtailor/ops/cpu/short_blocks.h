// Attention over codes of 4 bits with a scale for each block of channels (mxfp4, nvfp4) in integers, on processors with AVX2
// and without VNNI.
//
// Levels of E2M1, doubled, are whole numbers of 16 bits, two products to a lane. Of keys a vector's products are of one
// block of channels, become floats and are multiplied by the token's scale for it. Of values each block has weights of its
// own, which have the tokens' scales for it.
#pragma once

#include "short_products.h"

constexpr int64_t PART = 16, MOST_BLOCKS = W;  // channels that are never of two blocks; scales of a token

// Whether a side is read so.
inline bool in_blocks(const Side& side) {
  if (side.kind != BLOCK_LEVELS || !((const Blocks*)side.low)->coarse || side.size > MOST_SHORT || side.size % 64) return false;
  return whole_words(side) && side.bits == 4 && groups_of(side) <= MOST_BLOCKS && (side.group == PART || side.group % 32 == 0) && side.size / 2 % side.group == 0;
}

// Of R rows with W / R tokens, row by row; tokens past the last repeat it. NARROW: blocks of PART channels, else of 32 or more.
template <int R, bool NARROW>
INLINE inline F block_products_of(const int16_t* asked, const ByteTables& table, const Side& side, int64_t groups, const char* codes,
                                  const float* steps, int64_t first, int64_t count) {
  constexpr int T = W / R;
  const int64_t bytes = side.size / 2;
  const char* token[T];
  const float* step[T];
  F sum_of[W]{};
  each_below<T>([&](auto i) INLINE {
    const int64_t t = first + i < count ? first + i : count - 1;
    token[i] = codes + t * side.slot_bytes, step[i] = steps + t * groups;
  });
  for (int64_t c = 0; c < bytes; c += (int64_t)sizeof(U))
    each_below<2>([&](auto kind) INLINE {
      const int64_t channel = kind * bytes + c, group = channel / side.group;
      const int16_t* query = asked + channel;
      each_below<T>([&](auto i) INLINE {
        S a, b;
        table.pick(four_bits(in_turns(load<U>(token[i] + c)), kind), a, b);
        const F one = all(step[i][group]), other = NARROW ? all(step[i][group + 1]) : one;
        each_below<R>([&](auto r) INLINE {
          const int16_t* mine = query + r * MOST_SHORT;
          const __m256i before = _mm256_madd_epi16((__m256i)a, load<__m256i>(mine)), behind = _mm256_madd_epi16((__m256i)b, load<__m256i>(mine + PART));
          F& to = sum_of[r * T + i];
          if (NARROW) {
            to += (F)_mm256_cvtepi32_ps(before) * one;
            to += (F)_mm256_cvtepi32_ps(behind) * other;
          } else {
            to += (F)_mm256_cvtepi32_ps(_mm256_add_epi32(before, behind)) * one;
          }
        });
      });
    });
  return sums(sum_of);
}

// Products of R rows' queries with keys; `steps` are (count, groups), and `to` has BLOCK floats for each row.
template <int R, bool NARROW>
APART void block_products(const float* query, const Side& side, const char* codes, const float* steps, int64_t count, float* to) {
  alignas(32) int16_t asked[R][MOST_SHORT], levels[32];
  float scale[R];
  const float unit = whole_levels(levels_of(side), DOUBLED, levels);
  const ByteTables table(levels);
  for (int r = 0; r < R; r++) {
    const Scaled by = scaled(query + r * side.size, side.size, 32767);
    shorten_to(query + r * side.size, side.size, by.up, asked[r]);
    scale[r] = unit * by.back;
  }
  const int64_t groups = groups_of(side);
  over_tokens<R>(count, scale, to, BLOCK, codes, side.slot_bytes, [&](int64_t first) INLINE {
    return block_products_of<R, NARROW>(asked[0], table, side, groups, codes, steps, first, count);
  });
}

// Scales of tokens (count, groups) as (groups, BLOCK). Behind a last whole vector of tokens there is what is never read.
APART PLAIN_LOOPS void steps_by_group(const float* from, int64_t groups, int64_t count, float* to) {
  if (groups != 8) {
    for (int64_t g = 0; g < groups; g++) of_group(from, groups, g, count, to + g * BLOCK);
    return;
  }
  for (int64_t t = 0; t < count; t += W, from += W * W) {
    __m256 pairs[W], fours[W];
    each_below<W / 2>([&](auto i) INLINE {
      const __m256 a = _mm256_loadu_ps(from + 2 * i * W), b = _mm256_loadu_ps(from + (2 * i + 1) * W);
      pairs[2 * i] = _mm256_unpacklo_ps(a, b), pairs[2 * i + 1] = _mm256_unpackhi_ps(a, b);
    });
    each_below<W>([&](auto i) INLINE {
      constexpr int half = i / 4 * 4, low = half + i % 4 / 2, which = i % 2;
      fours[i] = _mm256_shuffle_ps(pairs[low], pairs[low + 2], which ? 0xee : 0x44);
    });
    each_below<4>([&](auto i) INLINE {
      _mm256_storeu_ps(to + i * BLOCK + t, _mm256_permute2f128_ps(fours[i], fours[4 + i], 0x20));
      _mm256_storeu_ps(to + (4 + i) * BLOCK + t, _mm256_permute2f128_ps(fours[i], fours[4 + i], 0x31));
    });
  }
}

// Adds weighted levels of PART channels: those of the low or the high bits (KIND) of bytes PLACE * PART.. of 32.
template <int R, int KIND, int PLACE>
inline void block_sums_of(const Weights* of, int64_t apart, const ByteTables& table, const char* codes, int64_t stride, int64_t count,
                          const char*& next, float unit, float* out, int64_t size) {
  I sum_of[R][2];
  each_below<2 * R>([&](auto i) INLINE { sum_of[i / 2][i % 2] = I{}; });
  // The first of the passes over a vector asks for all of them.
  by_pairs<KIND == 0 && PLACE == 0 ? 64 : 0>(codes, stride, count, next, [&](int64_t t, __m256i a, __m256i b) INLINE {
    const U one = in_turns((U)a), other = in_turns((U)b);
    S low, high;  // of two tokens side by side
    table.pick(four_bits(bytes_of_both<(PLACE > 0)>(one, other), KIND), low, high);
    each_below<R>([&](auto r) INLINE {
      const int16_t* weights = of[r * apart].of_tokens + t;
      add_pairs(sum_of[r][0], (__m256i)low, weights), add_pairs(sum_of[r][1], (__m256i)high, weights);
    });
  });
  // Channels 0 to 3 and 8 to 11 in the first, 4 to 7 and 12 to 15 in the second.
  each_below<2 * R>([&](auto i) INLINE {
    constexpr int r = i / 2, part = i % 2;
    const F found = __builtin_convertvector(sum_of[r][part], F) * (of[r * apart].scale * unit);
    each_below<2>([&](auto half) INLINE {
      typedef float Half __attribute__((vector_size(16)));
      float* to = out + r * size + PLACE * PART + 8 * half + 4 * part;
      store(to, load<Half>(to) + (Half)_mm256_extractf128_ps((__m256)found, half));
    });
  });
}

// Adds weighted values of R rows; `steps` are (groups, BLOCK).
template <int R>
APART void block_sums(const float* weights, const Side& side, const char* codes, const float* steps, int64_t count, float* out) {
  Weights all_of[R * MOST_BLOCKS];
  alignas(32) int16_t levels[32];
  const int64_t bytes = side.size / 2, groups = groups_of(side);
  const float unit = whole_levels(levels_of(side), DOUBLED, levels);
  const ByteTables table(levels);
  for (int64_t g = 0; g < groups; g++) fill_rows<R>(all_of + g, groups, weights, BLOCK, steps + g * BLOCK, nullptr, 0, count);
  const char* next = codes + VALUES_AHEAD;
  for (int64_t c = 0; c < bytes; c += (int64_t)sizeof(U))
    each_below<4>([&](auto i) INLINE {
      constexpr int KIND = i / 2, PLACE = i % 2;
      const int64_t channel = KIND * bytes + c;
      block_sums_of<R, KIND, PLACE>(all_of + (channel + PLACE * PART) / side.group, groups, table, codes + c, side.slot_bytes, count,
                                    next, unit, out + channel, side.size);
    });
}

// Products of all rows' queries.
inline void products_of_blocks(const float* query, int64_t rows, const Side& side, const char* codes, const float* steps,
                               int64_t count, float* to) {
  in_rows(rows, [&](auto some, int64_t r) {
    constexpr int R = decltype(some)::ROWS;
    const auto products = side.group == PART ? block_products<R, true> : block_products<R, false>;
    products(query + r * side.size, side, codes, steps, count, to + r * BLOCK);
  });
}

// Adds weighted values of all rows.
inline void sums_of_blocks(const float* weights, int64_t rows, const Side& side, const char* codes, const float* steps,
                           int64_t count, float* out) {
  in_rows(rows, [&](auto some, int64_t r) {
    block_sums<decltype(some)::ROWS>(weights + r * BLOCK, side, codes, steps, count, out + r * side.size);
  });
}
