// Products with codes whose tokens are lanes, and weighted sums of tokens that are too short to fill vectors, in integers.
//
// 16 bytes of a token at a time are moved while they are packed, so that no lane stays empty, nothing is summed across
// lanes, and channels keep their order. An operation adds four products of unsigned bytes, which codes are, with signed
// ones to each lane: the high bytes of 16-bit queries or weights and their low ones are multiplied apart.
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

// The words of a part of 16 tokens: lane t of vector j is word j of token t. In steps, so that a loop may move the next
// part while it multiplies one: a core looks ahead too few operations to do so by itself.
struct WordsOfTokens {
  __m512i mixed[4];

  // Reads four of the tokens; `step` is 0 to 3.
  void read(const char* from, int64_t stride, int step) {
    from += step * stride;
    mixed[step] = four_parts(from, from + 4 * stride, from + 8 * stride, from + 12 * stride);
  }

  void turn(U* to) const {
    const __m512i a = _mm512_maskz_unpacklo_epi32(0xffff, mixed[0], mixed[1]);
    const __m512i b = _mm512_maskz_unpacklo_epi32(0xffff, mixed[2], mixed[3]);
    const __m512i c = _mm512_maskz_unpackhi_epi32(0xffff, mixed[0], mixed[1]);
    const __m512i d = _mm512_maskz_unpackhi_epi32(0xffff, mixed[2], mixed[3]);
    to[0] = (U)_mm512_maskz_unpacklo_epi64(0xff, a, b), to[1] = (U)_mm512_maskz_unpackhi_epi64(0xff, a, b);
    to[2] = (U)_mm512_maskz_unpacklo_epi64(0xff, c, d), to[3] = (U)_mm512_maskz_unpackhi_epi64(0xff, c, d);
  }
};

// All of them at once.
inline void words_of_tokens(const char* from, int64_t stride, U* to) {
  WordsOfTokens words;
  UNROLLED for (int i = 0; i < 4; i++) words.read(from, stride, i);
  words.turn(to);
}

// Of R rows with 16 tokens of `bytes` bytes at a time, `blocks` times; `to` has BLOCK floats for each row.
template <int BITS, int R>
APART void products_of_lanes(const CutQuery* asked, int64_t bytes, const char* codes, int64_t stride, int64_t blocks,
                              float* to) {
  // A sum takes a product every fourth cycle: where rows are few, each has several.
  constexpr int KINDS = 8 / BITS, SETS = R >= 4 ? 1 : 4 / R;
  WordsOfTokens words;
  U now[4];
  UNROLLED for (int i = 0; i < 4; i++) words.read(codes, stride, i);
  words.turn(now);
  for (int64_t block = 0; block < blocks; block++, codes += W * stride, to += W) {
    U high[SETS][R]{}, low[SETS][R]{};
    for (int64_t c = 0; c < bytes; c += PART) {
      const char* behind = block + 1 < blocks ? codes + W * stride : codes;
      const char* next = c + PART < bytes ? codes + c + PART : behind;
      if (c % 64 == 0)
        for (int64_t t = 0; t < W; t++) soon(codes + t * stride + c);
      each_below<4>([&](auto j) INLINE {
        words.read(next, stride, j);
        each_below<KINDS>([&](auto kind) INLINE {
          constexpr int SET = (j * KINDS + kind) % SETS;
          const U mine = kind_of<BITS>(now[j], kind);
          const int64_t at = kind * bytes + c + 4 * j;
          each_below<R>([&](auto r) INLINE {
            add_products(high[SET][r], mine, asked[r].high + at);
            add_products(low[SET][r], mine, asked[r].low + at);
          });
        });
      });
      words.turn(now);
    }
    each_below<R>([&](auto r) INLINE {
      UNROLLED for (int i = 1; i < SETS; i++) high[0][r] += high[i][r], low[0][r] += low[i][r];
      store(to + r * BLOCK, joined(high[0][r], low[0][r]) * asked[r].scale);
    });
  }
}

template <int BITS, int R>
void products_of_rows(const CutQuery* asked, int64_t bytes, const char* codes, int64_t stride, int64_t count, float* to) {
  const int64_t whole = count / W * W;
  if (whole) products_of_lanes<BITS, R>(asked, bytes, codes, stride, whole / W, to);
  if (whole == count) return;
  // The last tokens are fewer than lanes: the last of them is repeated.
  char copies[W * MOST_SHORT / (8 / BITS)];
  float found[R * BLOCK];
  for (int64_t t = 0; t < W; t++)
    memcpy(copies + t * bytes, codes + (whole + t < count ? whole + t : count - 1) * stride, (size_t)bytes);
  products_of_lanes<BITS, R>(asked, bytes, copies, bytes, 1, found);
  for (int r = 0; r < R; r++) memcpy(to + r * BLOCK + whole, found + r * BLOCK, (size_t)(count - whole) * sizeof(float));
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

// Tokens whose values are summed so: codes of 2 bits, or of 4 in less than 64 bytes.
inline bool in_short_tokens(const Side& side) { return side.bits == 2 || (side.bits == 4 && folds(side) > 1); }

template <int BITS, int R>
inline void products_of_tokens(const CutQuery* asked, const Side& side, const char* codes, int64_t count, float* to) {
  const int64_t bytes = side.size * BITS / 8;
  // A single row has too few products to pay for moving a token of whole vectors.
  if constexpr (R == 1 && BITS > 2)
    if (folds(side) == 1) return byte_products<BITS>(*asked, bytes, codes, side.slot_bytes, count, to);
  products_of_rows<BITS, R>(asked, bytes, codes, side.slot_bytes, count, to);
}

// Products of the rows' queries with `count` tokens from `codes` on; `to` has BLOCK floats for each row.
inline void products_in_integers(const CutQuery* asked, int64_t rows, const Side& side, const char* codes, int64_t count,
                              float* to) {
  in_rows(rows, [&](auto some, int64_t r) {
    constexpr int R = decltype(some)::ROWS;
    if (side.bits == 2) products_of_tokens<2, R>(asked + r, side, codes, count, to + r * BLOCK);
    else if (side.bits == 4) products_of_tokens<4, R>(asked + r, side, codes, count, to + r * BLOCK);
    else products_of_tokens<8, R>(asked + r, side, codes, count, to + r * BLOCK);
  });
}

// Adds weighted values; `weights` as `to` above; step and low are (tokens, groups), low null as in `Side`.
inline void sums_of_short_tokens(const float* weights, int64_t rows, const float* step, const float* low,
                                 const Side& side, const char* codes, int64_t count, float* out) {
  in_rows(rows, [&](auto some, int64_t r) {
    constexpr int R = decltype(some)::ROWS;
    const float* mine = weights + r * BLOCK;
    if (side.bits == 2) sums_of_rows<2, R>(mine, step, low, side, codes, count, out + r * side.size);
    else sums_of_rows<4, R>(mine, step, low, side, codes, count, out + r * side.size);
  });
}
