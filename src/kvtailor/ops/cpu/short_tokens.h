// Products with codes of tokens that are too short to fill vectors, and weighted sums of them, in integers.
//
// 16 bytes of a token at a time are moved while they are packed, so that no lane stays empty, and channels keep their
// order. An operation adds four products of unsigned bytes, which codes are, with signed ones to each lane: the high
// bytes of 16-bit queries or weights and their low ones are multiplied apart.
#pragma once

#include "integers.h"
#include "layouts.h"

constexpr int64_t PART = 16;

inline __m128i part(const char* p) { return _mm_loadu_si128((const __m128i*)p); }

// A quarter of the vector each.
inline __m512i four_parts(const char* a, const char* b, const char* c, const char* d) {
  __m512i all = _mm512_maskz_broadcast_i32x4(0x000f, part(a));
  all = _mm512_mask_broadcast_i32x4(all, 0x00f0, part(b));
  all = _mm512_mask_broadcast_i32x4(all, 0x0f00, part(c));
  return _mm512_mask_broadcast_i32x4(all, 0xf000, part(d));
}

// The same four numbers for every lane. By name: GCC 12 loads them apart, and copies the sum twice.
inline void add_products(U& sum, U codes, const int8_t* numbers) {
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(codes), "m"(*(const int32_t(*)[1])numbers));
}

template <int BITS> inline U kind_of(U words, int kind) {
  return (words >> (kind * BITS)) & ((1u << BITS) - 1) * 0x01010101u;
}

inline F joined(U high, U low) { return __builtin_convertvector((I)((high << 8) + low), F); }

// Lane t of vector j is word j of a part of token t, of 16 tokens.
inline void words_of_tokens(const char* from, int64_t stride, U* to) {
  __m512i mixed[4];
  UNROLLED for (int i = 0; i < 4; i++, from += stride)
    mixed[i] = four_parts(from, from + 4 * stride, from + 8 * stride, from + 12 * stride);
  const __m512i a = _mm512_unpacklo_epi32(mixed[0], mixed[1]), b = _mm512_unpacklo_epi32(mixed[2], mixed[3]);
  const __m512i c = _mm512_unpackhi_epi32(mixed[0], mixed[1]), d = _mm512_unpackhi_epi32(mixed[2], mixed[3]);
  to[0] = (U)_mm512_unpacklo_epi64(a, b), to[1] = (U)_mm512_unpackhi_epi64(a, b);
  to[2] = (U)_mm512_unpacklo_epi64(c, d), to[3] = (U)_mm512_unpackhi_epi64(c, d);
}

// Tokens are lanes, so that nothing is summed across them.
template <int BITS, int R>
void products_of_rows(const float* query, int64_t size, const char* codes, int64_t stride, int64_t count, float* to) {
  constexpr int KINDS = 8 / BITS, SETS = R == 1 ? 2 : 1;
  constexpr int64_t TOKENS = 2 * W;
  const int64_t bytes = size / KINDS, most = 0x7fffffff / (((1 << BITS) - 1) * size);
  CutQuery asked[R];
  for (int r = 0; r < R; r++) asked[r].fill(query + r * size, size, most);
  for (int64_t first = 0; first < count; first += TOKENS) {
    const int64_t filled = count - first < TOKENS ? count - first : TOKENS;
    const char* from = codes + first * stride;
    int64_t apart = stride;
    char copies[TOKENS * MOST_SHORT / KINDS];
    if (filled < TOKENS) {
      for (int64_t t = 0; t < TOKENS; t++)
        memcpy(copies + t * bytes, from + (t < filled ? t : filled - 1) * stride, (size_t)bytes);
      from = copies, apart = bytes;
    }
    U high[SETS][R][2]{}, low[SETS][R][2]{};
    for (int64_t c = 0; c < bytes; c += PART) {
      if (c % 64 == 0)
        for (int64_t t = 0; t < TOKENS; t++) soon(from + t * apart + c);
      U words[2][4];
      UNROLLED for (int b = 0; b < 2; b++) words_of_tokens(from + b * W * apart + c, apart, words[b]);
      UNROLLED for (int j = 0; j < 4; j++)
        UNROLLED for (int kind = 0; kind < KINDS; kind++)
          UNROLLED for (int b = 0; b < 2; b++) {
            const U mine = kind_of<BITS>(words[b][j], kind);
            UNROLLED for (int r = 0; r < R; r++) {
              const int64_t at = kind * bytes + c + 4 * j;
              add_products(high[kind % SETS][r][b], mine, asked[r].high + at);
              add_products(low[kind % SETS][r][b], mine, asked[r].low + at);
            }
          }
    }
    UNROLLED for (int r = 0; r < R; r++) {
      float found[TOKENS];
      UNROLLED for (int b = 0; b < 2; b++) {
        UNROLLED for (int i = 1; i < SETS; i++) high[0][r][b] += high[i][r][b], low[0][r][b] += low[i][r][b];
        store(found + b * W, joined(high[0][r][b], low[0][r][b]) * asked[r].scale);
      }
      memcpy(to + r * BLOCK + first, found, (size_t)filled * sizeof(float));
    }
  }
}

// 16-bit numbers of a row's weights, cut into bytes.
struct CutWeights {
  alignas(64) int8_t high[BLOCK], low[BLOCK];
  float scale, base;

  APART void fill(const Weights& whole, int64_t count) {
    for (int64_t t = 0; t < count; t += 2 * W) {
      const __m512i number = _mm512_load_si512(whole.of_tokens + t), half = _mm512_set1_epi16(128);
      const __m512i above = _mm512_srai_epi16(_mm512_add_epi16(number, half), 8);
      _mm256_store_si256((__m256i*)(low + t), _mm512_maskz_cvtepi16_epi8(~0u, number));
      _mm256_store_si256((__m256i*)(high + t), _mm512_maskz_cvtepi16_epi8(~0u, above));
    }
    scale = whole.scale, base = whole.base;
  }
};

// Lane i of vector t / 4 is byte i of a part of each of the tokens t to t + 3; tokens past `count` repeat the last.
APART void turn(const char* from, int64_t stride, int64_t count, const char*& next, U* to) {
  const __m512i words = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
  const __m512i bytes = _mm512_set4_epi32(0x0f0b0703, 0x0e0a0602, 0x0d090501, 0x0c080400);
  for (int64_t t = 0; t < count; t += 4, from += 4 * stride, to++) {
    const int64_t last = count - 1 - t < 3 ? count - 1 - t : 3;
    const int64_t second = last < 1 ? last : 1, third = last < 2 ? last : 2;
    const char *b = from + second * stride, *c = from + third * stride, *d = from + last * stride;
    ask<4 * PART>(next);
    *to = (U)_mm512_shuffle_epi8(_mm512_permutexvar_epi32(words, four_parts(from, b, c, d)), bytes);
  }
  for (int64_t t = (count + 3) / 4; t % 4; t++, to++) *to = U{};
}

// Of R rows and the kinds FIRST to FIRST + K of codes.
template <int BITS, int R, int K, int FIRST>
inline void sums_of_turned(const U* turned, int64_t count, const CutWeights* const* of, int64_t bytes, float* out,
                           int64_t size) {
  constexpr int KINDS = 8 / BITS, SETS = 8 / (R * K);
  U high[SETS][R][K]{}, low[SETS][R][K]{};
  for (int64_t t = 0; t < count; t += 4 * SETS)
    UNROLLED for (int i = 0; i < SETS; i++)
      UNROLLED for (int k = 0; k < K; k++) {
        const U codes = kind_of<BITS>(turned[t / 4 + i], FIRST + k);
        UNROLLED for (int r = 0; r < R; r++) {
          add_products(high[i][r][k], codes, of[r * KINDS + FIRST + k]->high + t + 4 * i);
          add_products(low[i][r][k], codes, of[r * KINDS + FIRST + k]->low + t + 4 * i);
        }
      }
  UNROLLED for (int r = 0; r < R; r++)
    UNROLLED for (int k = 0; k < K; k++) {
      UNROLLED for (int i = 1; i < SETS; i++) high[0][r][k] += high[i][r][k], low[0][r][k] += low[i][r][k];
      const CutWeights& mine = *of[r * KINDS + FIRST + k];
      float* to = out + r * size + (FIRST + k) * bytes;
      store(to, load<F>(to) + (joined(high[0][r][k], low[0][r][k]) * mine.scale + mine.base));
    }
}

template <int BITS, int R>
void sums_of_rows(const float* weights, const float* step, const float* low, const Side& side, const char* codes,
                  int64_t count, float* out) {
  constexpr int KINDS = 8 / BITS, K = KINDS < 8 / R ? KINDS : 8 / R;
  const int64_t groups = side.size / side.group, bytes = side.size / KINDS;
  const float zero = (float)((1 << (BITS - 1)) - 1);
  CutWeights all_of[R * MOST_GROUPS];
  for (int64_t i = 0; i < groups; i++) {
    float steps[BLOCK + W], lows[BLOCK + W];
    of_group(step, groups, i, count, steps);
    if (low) of_group(low, groups, i, count, lows);
    for (int r = 0; r < R; r++) {
      Weights whole;
      whole.fill(weights + r * BLOCK, steps, low ? lows : nullptr, zero, count);
      all_of[r * groups + i].fill(whole, count);
    }
  }
  const char* next = codes + VALUES_AHEAD;
  for (int64_t c = 0; c < bytes; c += PART) {
    U turned[BLOCK / 4];
    const CutWeights* of[R * KINDS];
    turn(codes + c, side.slot_bytes, count, next, turned);
    for (int r = 0; r < R; r++)
      for (int kind = 0; kind < KINDS; kind++)
        of[r * KINDS + kind] = all_of + r * groups + (kind * bytes + c) / side.group;
    sums_of_turned<BITS, R, K, 0>(turned, count, of, bytes, out + c, side.size);
    if constexpr (K < KINDS) sums_of_turned<BITS, R, K, K>(turned, count, of, bytes, out + c, side.size);
  }
}

// Codes that are read so: of 2 bits, or of 4 in tokens of less than 64 bytes.
inline bool in_short_tokens(const Side& side) { return side.bits == 2 || (side.bits == 4 && folds(side) > 1); }

template <class Each> void with_short_codes(const Side& side, int64_t rows, Each each) {
  in_rows(rows, [&](auto some, int64_t r) {
    if (side.bits == 2) each(Some<2>(), some, r);
    else each(Some<4>(), some, r);
  });
}

// Of the rows' queries with `count` tokens from `codes` on; `to` has BLOCK floats for each row.
inline void products_of_short_tokens(const float* query, int64_t rows, const Side& side, const char* codes,
                                     int64_t count, float* to) {
  with_short_codes(side, rows, [&](auto bits, auto some, int64_t r) {
    products_of_rows<decltype(bits)::ROWS, decltype(some)::ROWS>(query + r * side.size, side.size, codes,
                                                                 side.slot_bytes, count, to + r * BLOCK);
  });
}

// Adds weighted values; `weights` as `to` above; step and low are (tokens, groups), low null as in `Side`.
inline void sums_of_short_tokens(const float* weights, int64_t rows, const float* step, const float* low,
                                 const Side& side, const char* codes, int64_t count, float* out) {
  with_short_codes(side, rows, [&](auto bits, auto some, int64_t r) {
    sums_of_rows<decltype(bits)::ROWS, decltype(some)::ROWS>(weights + r * BLOCK, step, low, side, codes, count,
                                                             out + r * side.size);
  });
}
