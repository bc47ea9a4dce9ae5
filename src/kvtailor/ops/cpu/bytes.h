// Numbers of 16 bits cut into bytes, and weighted sums of codes with them, for operations that add four products of bytes
// to a lane: with VNNI and with ARM's dot products.
//
// Codes are bytes without a sign. The high bytes of queries or weights and their low ones are multiplied apart. For sums
// 16 bytes of four tokens at a time are laid side by side while they are packed, so that a lane is a channel, nothing is
// summed across lanes, and channels keep their order.
#pragma once

#include "shorts.h"

constexpr int64_t PART = 16;

// Rows times kinds of codes whose sums registers hold.
#if defined(__ARM_FEATURE_DOTPROD)
constexpr int SUMS = 2;
#else
constexpr int SUMS = 8;
#endif

// 16-bit numbers of a query, cut into bytes.
struct CutQuery {
  alignas(64) int8_t high[MOST_SHORT], low[MOST_SHORT];
  float scale;
#if defined(__ARM_FEATURE_DOTPROD)
  int32_t all;  // the sum of the numbers
#endif

  // For codes of so many bits.
  APART void fill(const float* query, int64_t size, int64_t bits) { cut(query, size, scaled(query, size, most_for(size, bits))); }

  // The query times the steps of its channels. Gives the sum of the query times their minima.
  APART float fill_times(const float* query, const float* step, const float* low, int64_t size, int64_t bits) {
    float times[MOST_SHORT];
    I top{};
    const float lows = times_steps(query, step, low, size, times, top);
    cut(times, size, scaled_by(top, most_for(size, bits)));
    return lows;
  }

 private:
  void cut(const float* query, int64_t size, Scaled by) {
#if defined(__ARM_FEATURE_DOTPROD)
    I numbers{};
    for (int64_t c = 0; c < size; c += 2 * W) {
      const int32x4_t a = (int32x4_t)rounded(load<F>(query + c) * by.up), b = (int32x4_t)rounded(load<F>(query + c + W) * by.up);
      vst1_s8(low + c, vmovn_s16(vmovn_high_s32(vmovn_s32(a), b)));
      vst1_s8(high + c, vmovn_s16(vrshrn_high_n_s32(vrshrn_n_s32(a, 8), b, 8)));
      numbers += (I)a + (I)b;
    }
    all = vaddvq_s32((int32x4_t)numbers);
#else
    for (int64_t c = 0; c < size; c += W) {
      const I number = rounded(load<F>(query + c) * by.up);
      _mm_storeu_si128((__m128i*)(low + c), _mm512_maskz_cvtepi32_epi8(0xffff, (__m512i)number));
      _mm_storeu_si128((__m128i*)(high + c), _mm512_maskz_cvtepi32_epi8(0xffff, (__m512i)((number + 128) >> 8)));
    }
#endif
    scale = by.back;
  }
};

// 16-bit numbers of a row's weights, cut into bytes.
struct CutWeights {
  alignas(64) int8_t high[BLOCK], low[BLOCK];
  float scale, base;

  APART void fill(const Weights& whole, int64_t count) {
#if defined(__ARM_FEATURE_DOTPROD)
    // None is below 0: both bytes are without a sign.
    for (int64_t t = 0; t < count; t += 2 * W) {
      const uint16x8_t number = (uint16x8_t)vld1q_s16(whole.of_tokens + t);
      vst1_u8((uint8_t*)low + t, vmovn_u16(number));
      vst1_u8((uint8_t*)high + t, vshrn_n_u16(number, 8));
    }
#else
    for (int64_t t = 0; t < count; t += 2 * W) {
      const __m512i number = _mm512_load_si512(whole.of_tokens + t), half = _mm512_set1_epi16(128);
      const __m512i above = _mm512_srai_epi16(_mm512_add_epi16(number, half), 8);
      _mm256_store_si256((__m256i*)(low + t), _mm512_maskz_cvtepi16_epi8(~0u, number));
      _mm256_store_si256((__m256i*)(high + t), _mm512_maskz_cvtepi16_epi8(~0u, above));
    }
#endif
    scale = whole.scale, base = whole.base;
  }
};

template <int BITS> inline U kind_of(U words, int kind) {
  return (words >> (kind * BITS)) & ((1u << BITS) - 1) * 0x01010101u;
}

inline F joined(U high, U low) { return __builtin_convertvector((I)((high << 8) + low), F); }

inline void add_sums(float* to, U high, U low, float scale, float base) {
  store(to, load<F>(to) + (joined(high, low) * scale + base));
}

#if defined(__ARM_FEATURE_DOTPROD)
// A part of a token of codes, each a lane of four tokens.
struct Lanes {
  U of[4];

  void operator+=(const Lanes& other) { UNROLLED for (int i = 0; i < 4; i++) of[i] += other.of[i]; }
};

// The same four numbers for every lane.
inline void add_products(Lanes& sum, const Lanes& codes, const int8_t* numbers) {
  const uint8x16_t all = (uint8x16_t)vdupq_n_u32(load<uint32_t>(numbers));
  UNROLLED for (int i = 0; i < 4; i++)
    sum.of[i] = (U)vdotq_u32((uint32x4_t)sum.of[i], (uint8x16_t)codes.of[i], all);
}

template <int BITS> inline Lanes kind_of(Lanes words, int kind) {
  UNROLLED for (int i = 0; i < 4; i++) words.of[i] = kind_of<BITS>(words.of[i], kind);
  return words;
}

inline void add_sums(float* to, const Lanes& high, const Lanes& low, float scale, float base) {
  UNROLLED for (int i = 0; i < 4; i++) add_sums(to + i * W, high.of[i], low.of[i], scale, base);
}

// Bytes of four tokens side by side.
inline Lanes side_by_side(const char* a, const char* b, const char* c, const char* d) {
  const uint8x16_t first = load<uint8x16_t>(a), second = load<uint8x16_t>(b), third = load<uint8x16_t>(c);
  const uint8x16_t fourth = load<uint8x16_t>(d);
  const uint16x8_t two = (uint16x8_t)vzip1q_u8(first, second), others = (uint16x8_t)vzip1q_u8(third, fourth);
  const uint16x8_t last = (uint16x8_t)vzip2q_u8(first, second), last_others = (uint16x8_t)vzip2q_u8(third, fourth);
  return {{(U)vzip1q_u16(two, others), (U)vzip2q_u16(two, others), (U)vzip1q_u16(last, last_others), (U)vzip2q_u16(last, last_others)}};
}
#else
typedef U Lanes;

// The same four numbers for every lane. By name: GCC 12 loads them apart, and copies the sum twice.
inline void add_products(U& sum, U codes, const int8_t* numbers) {
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(codes), "m"(*(const int32_t(*)[1])numbers));
}

inline __m128i part(const char* p) { return _mm_loadu_si128((const __m128i*)p); }

// A quarter of the vector each.
inline __m512i four_parts(const char* a, const char* b, const char* c, const char* d) {
  __m512i all = _mm512_maskz_broadcast_i32x4(0x000f, part(a));
  all = _mm512_mask_broadcast_i32x4(all, 0x00f0, part(b));
  all = _mm512_mask_broadcast_i32x4(all, 0x0f00, part(c));
  return _mm512_mask_broadcast_i32x4(all, 0xf000, part(d));
}

// Bytes of four tokens side by side.
inline Lanes side_by_side(const char* a, const char* b, const char* c, const char* d) {
  const __m512i words = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
  const __m512i bytes = _mm512_set4_epi32(0x0f0b0703, 0x0e0a0602, 0x0d090501, 0x0c080400);
  return (U)_mm512_shuffle_epi8(_mm512_permutexvar_epi32(words, four_parts(a, b, c, d)), bytes);
}
#endif

// Lane i of vector t / 4 is byte i of a part of each of the tokens t to t + 3; tokens past `count` repeat the last.
APART void turn(const char* from, int64_t stride, int64_t count, const char*& next, Lanes* to) {
  for (int64_t t = 0; t < count; t += 4, from += 4 * stride, to++) {
    const int64_t last = count - 1 - t < 3 ? count - 1 - t : 3;
    const int64_t second = last < 1 ? last : 1, third = last < 2 ? last : 2;
    const char *b = from + second * stride, *c = from + third * stride, *d = from + last * stride;
    ask<4 * PART>(next);
    *to = side_by_side(from, b, c, d);
  }
  for (int64_t t = (count + 3) / 4; t % 4; t++, to++) *to = Lanes{};
}

// Of R rows and the kinds FIRST to FIRST + K of codes.
template <int BITS, int R, int K, int FIRST>
inline void sums_of_turned(const Lanes* turned, int64_t count, const CutWeights* const* of, int64_t bytes, float* out,
                           int64_t size) {
  constexpr int KINDS = 8 / BITS, SETS = SUMS / (R * K);
  Lanes high[SETS][R][K]{}, low[SETS][R][K]{};
  for (int64_t t = 0; t < count; t += 4 * SETS)
    UNROLLED for (int i = 0; i < SETS; i++)
      UNROLLED for (int k = 0; k < K; k++) {
        const Lanes codes = kind_of<BITS>(turned[t / 4 + i], FIRST + k);
        UNROLLED for (int r = 0; r < R; r++) {
          add_products(high[i][r][k], codes, of[r * KINDS + FIRST + k]->high + t + 4 * i);
          add_products(low[i][r][k], codes, of[r * KINDS + FIRST + k]->low + t + 4 * i);
        }
      }
  UNROLLED for (int r = 0; r < R; r++)
    UNROLLED for (int k = 0; k < K; k++) {
      UNROLLED for (int i = 1; i < SETS; i++) high[0][r][k] += high[i][r][k], low[0][r][k] += low[i][r][k];
      const CutWeights& mine = *of[r * KINDS + FIRST + k];
      add_sums(out + r * size + (FIRST + k) * bytes, high[0][r][k], low[0][r][k], mine.scale, mine.base);
    }
}

template <int BITS, int R>
void sums_of_rows(const float* weights, const float* step, const float* low, float zero, const Side& side,
                  const char* codes, int64_t count, float* out) {
  constexpr int KINDS = 8 / BITS, SOME = R < SUMS ? R : SUMS, K = KINDS < SUMS / SOME ? KINDS : SUMS / SOME;
  const int64_t groups = side.size / side.group, bytes = side.size / KINDS;
  CutWeights all_of[R * MOST_GROUPS];
  for (int64_t i = 0; i < groups; i++) {
    float steps[BLOCK + W], lows[BLOCK + W];
    of_group(step, groups, i, count, steps);
    if (low) of_group(low, groups, i, count, lows);
    for (int r = 0; r < R; r++) {
      Weights whole;
#if defined(__AVX512F__)
      whole.fill(weights + r * BLOCK, steps, low ? lows : nullptr, zero, count);
#else
      fill_rows<1>(&whole, 1, weights + r * BLOCK, BLOCK, steps, low ? lows : nullptr, zero, count);
#endif
      all_of[r * groups + i].fill(whole, count);
    }
  }
  const char* next = codes + VALUES_AHEAD;
  for (int64_t c = 0; c < bytes; c += PART) {
    Lanes turned[BLOCK / 4];
    const CutWeights* of[R * KINDS];
    turn(codes + c, side.slot_bytes, count, next, turned);
    for (int r = 0; r < R; r++)
      for (int kind = 0; kind < KINDS; kind++)
        of[r * KINDS + kind] = all_of + r * groups + (kind * bytes + c) / side.group;
    each_below<R / SOME>([&](auto part) INLINE {
      constexpr int FIRST = decltype(part)() * SOME;
      each_below<KINDS / K>([&](auto kinds) INLINE {
        sums_of_turned<BITS, SOME, K, decltype(kinds)() * K>(turned, count, of + FIRST * KINDS, bytes,
                                                             out + c + FIRST * side.size, side.size);
      });
    });
  }
}

// Tokens whose values are summed so: with VNNI codes of 2 bits, or of 4 in less than 64 bytes.
inline bool in_short_tokens(const Side& side) { return W == 4 || side.bits == 2 || (side.bits == 4 && folds(side) > 1); }

// Adds weighted values; `weights` as `to` above; step and low are (tokens, groups), low null: codes are symmetric around
// `zero`.
inline void sums_of_short_tokens(const float* weights, int64_t rows, const float* step, const float* low, float zero,
                                 const Side& side, const char* codes, int64_t count, float* out) {
  in_rows(rows, [&](auto some, int64_t r) {
    constexpr int R = decltype(some)::ROWS;
    const float* mine = weights + r * BLOCK;
    if (side.bits == 2) sums_of_rows<2, R>(mine, step, low, zero, side, codes, count, out + r * side.size);
    else if (W > 4 || side.bits == 4) sums_of_rows<4, R>(mine, step, low, zero, side, codes, count, out + r * side.size);
    else if constexpr (W == 4) sums_of_rows<8, R>(mine, step, low, zero, side, codes, count, out + r * side.size);
  });
}
