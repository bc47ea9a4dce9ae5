// Products with codes of one bit that are signs, and weighted sums of them, of any number of channels.
//
// Channels come in the order of the bits in memory, so that a vector takes as many bits as it has lanes. A sum of signed
// numbers is twice that of those whose bit is set, less that of all: so what is no number stays none.
#pragma once

#include "layouts.h"

// Where the sign of channel c of `size` lies among the bits of a token.
static inline int64_t place_of_sign(int64_t size, int64_t c) {
  const int64_t bytes = (size + 7) / 8;
  return c % bytes * 8 + c / bytes;
}

// The bits of vector v of a token of so many bytes.
static inline uint32_t bits_at(const uint8_t* signs, int64_t v, int64_t bytes) {
  if (W == 4) return (uint32_t)signs[v / 2] >> (v % 2 * 4) & 15;
  if (W == 8) return signs[v];
  return (uint32_t)signs[2 * v] | (2 * v + 1 < bytes ? (uint32_t)signs[2 * v + 1] << 8 : 0u);
}

struct Bits {
#if defined(__AVX512F__)
  __mmask16 set;
  Bits(uint32_t bits) : set((__mmask16)bits) {}
  F added(F sum, F x) const { return (F)_mm512_mask_add_ps((__m512)sum, set, (__m512)sum, (__m512)x); }
#else
  I set;
  Bits(uint32_t bits) {
    I each;
    UNROLLED for (int i = 0; i < W; i++) each[i] = 1 << i;
    set = ((I{} + (int32_t)bits) & each) != 0;
  }
  F added(F sum, F x) const { return sum + (F)((I)x & set); }
#endif
};

// As `in_rows`, with less code.
template <class Each> static inline void rows_by_four(int64_t rows, Each each) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) each(Some<4>(), r);
  for (; r < rows; r++) each(Some<1>(), r);
}

// Adds to `to` (R, BLOCK) the products of the queries (R, wide) with the signs of `count` tokens, times `rest` of each.
template <int R>
APART PLAIN_LOOPS void sign_products(const float* query, int64_t wide, const uint8_t* signs, int64_t stride,
                                     int64_t bytes, int64_t count, const float* rest, float* to, int64_t apart) {
  constexpr int T = W / R;
  const int64_t vectors = (8 * bytes + W - 1) / W;
  float total[R];
  for (int r = 0; r < R; r++) {
    F whole{};
    for (int64_t v = 0; v < vectors; v++) whole += load<F>(query + r * wide + v * W);
    total[r] = sum(whole);
  }
  for (int64_t first = 0; first < count; first += T) {
    const uint8_t* token[T];
    F sum_of[W];
    UNROLLED for (int i = 0; i < T; i++) token[i] = signs + (first + i < count ? first + i : count - 1) * stride;
    UNROLLED for (int i = 0; i < W; i++) sum_of[i] = F{};
    for (int64_t v = 0; v < vectors; v++)
      UNROLLED for (int i = 0; i < T; i++) {
        const Bits mine(bits_at(token[i], v, bytes));
        UNROLLED for (int r = 0; r < R; r++)
          sum_of[r * T + i] = mine.added(sum_of[r * T + i], load<F>(query + r * wide + v * W));
      }
    float all_of[W];
    store(all_of, sums(sum_of));
    const int64_t filled = count - first < T ? count - first : T;
    for (int r = 0; r < R; r++)
      for (int64_t i = 0; i < filled; i++)
        to[r * apart + first + i] += rest[first + i] * (2 * all_of[r * T + i] - total[r]);
  }
}

// Adds the signs of `count` tokens, times `rest` of each and the rows' weights (R, apart), to `out` (R, wide). Weights
// and `rest` are 0 behind `count` up to whole vectors.
template <int R>
APART PLAIN_LOOPS void sign_sums(const float* weights, int64_t apart, const float* rest, const uint8_t* signs,
                                 int64_t stride, int64_t bytes, int64_t count, float* out, int64_t wide) {
  constexpr int M = W / R > 4 ? 4 : W / R;
  const int64_t vectors = (8 * bytes + W - 1) / W;
  float total[R];
  for (int r = 0; r < R; r++) {
    F whole{};
    for (int64_t t = 0; t < count; t += W) whole += load<F>(weights + r * apart + t) * load<F>(rest + t);
    total[r] = sum(whole);
  }
  for (int64_t first = 0; first < vectors; first += M) {
    const int64_t filled = vectors - first < M ? vectors - first : M;
    const uint8_t* token = signs;
    F sum_of[R][M]{};
    for (int64_t t = 0; t < count; t++, token += stride) {
      float weight[R];
      UNROLLED for (int r = 0; r < R; r++) weight[r] = weights[r * apart + t] * rest[t];
      UNROLLED for (int i = 0; i < M; i++) {
        // Past the last vector the same once more, which is not written.
        const Bits mine(bits_at(token, first + (i < filled ? i : 0), bytes));
        UNROLLED for (int r = 0; r < R; r++) sum_of[r][i] = mine.added(sum_of[r][i], all(weight[r]));
      }
    }
    for (int r = 0; r < R; r++)
      for (int64_t i = 0; i < filled; i++) {
        float* to = out + r * wide + (first + i) * W;
        store(to, load<F>(to) + (sum_of[r][i] * 2.f - total[r]));
      }
  }
}
