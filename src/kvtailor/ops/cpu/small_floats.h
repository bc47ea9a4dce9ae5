// Products with keys and values in 8-bit floats (E4M3), as they lie.
//
// A byte moved to where a float has its sign and the last bits of its exponent is the same number over 2^120. What brings
// that back is in the queries, the scales and the sums, in parts that depend on how large these are, so that no product on
// the way to a number becomes endless or loses bits.
#pragma once

#include "layouts.h"
#include "plain.h"

// The variant for any machine would be a tenth larger by them, and would gain little.
#if defined(__AVX2__) || defined(__aarch64__)
constexpr bool SMALL_FLOATS = true;
#else
constexpr bool SMALL_FLOATS = false;
#endif

constexpr float UNIT = 1.329227995784916e36f;  // 2^120

// The power of two at or below the greatest of some numbers that are not endless, or below `least` where that is more;
// zeros fill the last vector.
SMALL_CODE static float power_below(float* numbers, int64_t count, float least) {
  F most = all(least);
  for (int64_t i = count; i % W; i++) numbers[i] = 0;
  for (int64_t i = 0; i < count; i += W) {
    const F size = (F)((I)load<F>(numbers + i) & 0x7fffffff);
    most = larger(size < __builtin_inff() ? size : F{}, most);
  }
  const float top = highest(most);
  uint32_t bits;
  memcpy(&bits, &top, 4);
  bits &= 0x7f800000;
  float power;
  memcpy(&power, &bits, 4);
  return power;
}

static inline void times(float* numbers, int64_t count, float factor) {
  for (int64_t i = 0; i < count; i++) numbers[i] *= factor;
}

// Bytes of four vectors, each with every fourth channel.
struct Eights {
  I bytes;
  INLINE F at(int j) const { return (F)((bytes << (24 - 8 * j)) >> 4 & (int32_t)0x87f00000); }
};

constexpr int64_t BLOCK_OF_FLOATS = 32;  // channels that share a scale, where a token has several

// Scales of the blocks of a token of which the four vectors from channel c on are.
INLINE static inline F scale_of_four(const float* scales, int64_t c) {
  scales += c / BLOCK_OF_FLOATS;
#if defined(__AVX512F__)
  // Two blocks: every vector has half of its numbers of either.
  I which;
  UNROLLED for (int i = 0; i < W; i++) which[i] = i / (W / 2);
  return picked((F)_mm512_set1_pd(load<double>(scales)), which);
#else
  return all(*scales);
#endif
}

// Whether tokens are read so: they fill vectors, and have one scale or one for each 32 channels.
static inline bool in_small_floats(const Side& side) {
  if (!SMALL_FLOATS || side.kind != BLOCK_LEVELS || side.bits != 8 || ((const Blocks*)side.low)->shift != 20) return false;
  return side.size % (4 * W) == 0 && (side.group >= side.size || side.group == BLOCK_OF_FLOATS);
}

// Where channel c comes to lie.
static inline int64_t place_of_small_float(int64_t c) { return c / (4 * W) * (4 * W) + c % (4 * W) / 4 + c % 4 * W; }

// Tokens in 8-bit floats; `scales`: of each token's blocks.
struct SmallFloats {
  const char* tokens;
  int64_t stride, count, groups;
  const float* scales;
};

// Logits of R rows with W / R tokens from `t` on; tokens past the last repeat it.
template <int R, bool BLOCKS>
inline void small_float_logits_of(const float* query, int64_t size, const SmallFloats& keys, int64_t t, float* to) {
  // So many tokens at once: more would be more code, and no faster.
  constexpr int N = W / R, PART = N > 4 ? 4 : N;
  F sum_of[W];
  for (int first = 0; first < N; first += PART) {
    const char* token[PART];
    const float* scale[PART];
    F own[R * PART];
    UNROLLED for (int i = 0; i < PART; i++) {
      const int64_t mine = t + first + i < keys.count ? t + first + i : keys.count - 1;
      token[i] = keys.tokens + mine * keys.stride, scale[i] = keys.scales + mine * keys.groups;
    }
    UNROLLED for (int i = 0; i < R * PART; i++) own[i] = F{};
    for (int64_t c = 0; c < size; c += 4 * W) {
#if defined(__AVX2__) && !defined(__AVX512F__)
      // Each query is read once for both tokens: see logits_of.
      if constexpr (R == 4) {
        const Eights one_bytes{load<I>(token[0] + c)}, other_bytes{load<I>(token[1] + c)};
        UNROLLED for (int j = 0; j < 4; j++) {
          F one = one_bytes.at(j), other = other_bytes.at(j);
          if (BLOCKS) one *= scale_of_four(scale[0], c), other *= scale_of_four(scale[1], c);
          UNROLLED for (int r = 0; r < R; r++)
            add_two_products(own[r * N], own[r * N + 1], one, other, query + r * size + c + j * W);
        }
        UNROLLED for (int i = 0; i < N; i++) soon(token[i] + c);
        continue;
      }
#endif
      UNROLLED for (int i = 0; i < PART; i++) {
        const Eights bytes{load<I>(token[i] + c)};
        soon(token[i] + c);
        UNROLLED for (int j = 0; j < 4; j++) {
          F number = bytes.at(j);
          if (BLOCKS) number *= scale_of_four(scale[i], c);
          UNROLLED for (int r = 0; r < R; r++) own[r * PART + i] += load<F>(query + r * size + c + j * W) * number;
        }
      }
    }
    UNROLLED for (int r = 0; r < R; r++)
      UNROLLED for (int i = 0; i < PART; i++) sum_of[r * N + first + i] = own[r * PART + i];
  }
  float all_of[W];
  store(all_of, sums(sum_of));
  store_rows<R>(to + t, BLOCK, all_of, keys.count - t);
}

template <bool BLOCKS>
APART void small_float_logits(const float* query, int64_t rows, int64_t size, const SmallFloats& keys, float* to) {
  in_rows(rows, [&](auto some, int64_t r) {
    constexpr int R = decltype(some)::ROWS;
    for (int64_t t = 0; t < keys.count; t += W / R)
      small_float_logits_of<R, BLOCKS>(query + r * size, size, keys, t, to + r * BLOCK);
  });
}

// Adds the weighted values of all tokens, times `unit`, to vectors FIRST to FIRST + N of four from channel c on, of R rows.
template <int R, int FIRST, int N, bool BLOCKS>
inline void mix_small_floats_of(const float* weights, const SmallFloats& values, int64_t c, float unit, float* out,
                                int64_t size, const char*& next) {
  F sum_of[R][N];
  UNROLLED for (int r = 0; r < R; r++)
    UNROLLED for (int j = 0; j < N; j++) sum_of[r][j] = F{};
  const char* from = values.tokens + c;
  const float* scales = values.scales;
  for (int64_t t = 0; t < values.count; t++, from += values.stride, scales += values.groups) {
    if (N == 4) ask<4 * W>(next);
    else if (t % 2) ask<4 * W>(next);
    const Eights bytes{load<I>(from)};
    F value[N];
    UNROLLED for (int j = 0; j < N; j++) value[j] = bytes.at(FIRST + j);
    if (BLOCKS) {
      const F scale = scale_of_four(scales, c);
      UNROLLED for (int j = 0; j < N; j++) value[j] *= scale;
    }
    UNROLLED for (int r = 0; r < R; r++)
      UNROLLED for (int j = 0; j < N; j++) sum_of[r][j] += weights[r * BLOCK + t] * value[j];
  }
  UNROLLED for (int r = 0; r < R; r++)
    UNROLLED for (int j = 0; j < N; j++) {
      float* at = out + r * size + c + (FIRST + j) * W;
      store(at, load<F>(at) + sum_of[r][j] * unit);
    }
}

template <bool BLOCKS>
APART void mix_small_floats(const float* weights, int64_t rows, const SmallFloats& values, float unit, float* out,
                            int64_t size) {
  in_rows(rows, [&](auto some, int64_t r) {
    constexpr int R = decltype(some)::ROWS;
    // As many sums as leave registers free: 16 of 32, or 8 of 16.
    constexpr int N = R * 4 <= (W == 8 ? 8 : 16) ? 4 : 2;
    const char* next = values.tokens + VALUES_AHEAD;
    for (int64_t c = 0; c < size; c += 4 * W) {
      mix_small_floats_of<R, 0, N, BLOCKS>(weights + r * BLOCK, values, c, unit, out + r * size, size, next);
      if constexpr (N == 2)
        mix_small_floats_of<R, 2, N, BLOCKS>(weights + r * BLOCK, values, c, unit, out + r * size, size, next);
    }
  });
}
