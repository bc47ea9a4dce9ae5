// Products with packed codes as they lie, and weighted sums of them: no decoded token is ever written down.
#pragma once

#include "words.h"

#if defined(__AVX512F__)
#include "integers.h"
#elif defined(BYTE_PRODUCTS)
#include "dot_products.h"
#elif defined(SHORT_PRODUCTS)
#include "short_products.h"
#endif

// Sums of R rows' queries times the codes of W / R tokens; tokens past `count` repeat the last.
template <class C, int R>
inline void products_of(Rows rows, const char* codes, int64_t stride, int64_t count, float* to, int64_t apart) {
  constexpr int T = W / R;
  const char* token[T];
  F sum_of[W];
  UNROLLED for (int i = 0; i < T; i++) token[i] = codes + (i < count ? i : count - 1) * stride;
  UNROLLED for (int i = 0; i < W; i++) sum_of[i] = F{};
  const float* query = rows.query;
  for (int64_t c = 0; c < rows.size; c += C::N * W, query += C::N * W) {
    U words[T];
    UNROLLED for (int i = 0; i < T; i++) words[i] = C::words(token[i]), soon(token[i]), token[i] += C::BYTES;
    UNROLLED for (int k = 0; k < C::N; k++)
      UNROLLED for (int i = 0; i < T; i++) {
        const F code = C::at(words[i], k);
        UNROLLED for (int r = 0; r < R; r++) sum_of[r * T + i] += load<F>(query + r * rows.size + k * W) * code;
      }
  }
  float all_of[W];
  store(all_of, sums(sum_of));
#if !defined(__AVX512F__)
  store_rows<R>(to, apart, all_of, count);
#else
  const int64_t filled = count < T ? count : T;
  UNROLLED for (int r = 0; r < R; r++) memcpy(to + r * apart, all_of + r * T, (size_t)filled * sizeof(float));
#endif
}

// As `products_of`, of codes that stand for levels. Where scales are of blocks, those of each kind of codes go in before
// lanes are summed; else they are left to the caller.
template <class C, int R>
void level_products(Rows rows, const char* codes, int64_t stride, int64_t count, const Scales& scales, float* to,
                    int64_t apart) {
#if defined(__AVX512F__)
  if constexpr (C::BYTES == sizeof(U) && !C::OF_BLOCKS)
    if (scales.coarse) return short_level_products<C, R>(rows, codes, stride, count, scales, to, apart);
#elif defined(INTEGER_PRODUCTS)
  if constexpr (C::BYTES == sizeof(U) && !C::OF_BLOCKS)
    if (scales.coarse) return short_level_products<R>(rows, codes, stride, count, scales, to, apart);
#endif
  constexpr int T = W / R;
  const int64_t channels = rows.size / scales.tables;
  for (int64_t first = 0; first < count; first += T) {
    F sum_of[W];
    for (int i = 0; i < T; i++) {
      const int64_t t = first + i < count ? first + i : count - 1;
      const float *query = rows.query, *levels = scales.levels;
      F all_kinds[R]{};
      for (int64_t table = 0; table < scales.tables; table++, levels += 16) {
        const char* token = codes + t * stride;
        const int32_t* lanes = scales.lanes;
        for (int64_t c = 0; c < channels; c += C::N * W, token += C::BYTES, lanes += C::KINDS * W, query += C::N * W) {
          const U words = C::words(token);
          soon(token);
          F mine[R][C::KINDS]{};
          UNROLLED for (int k = 0; k < C::N; k++) {
            const F value = C::at(words, k, levels);
            UNROLLED for (int r = 0; r < R; r++) mine[r][k % C::KINDS] += load<F>(query + r * rows.size + k * W) * value;
          }
          F step[C::KINDS];
          if constexpr (C::OF_BLOCKS) {
            const F steps = load<F>(scales.step + t * scales.groups);
            UNROLLED for (int i = 0; i < C::KINDS; i++) step[i] = picked(steps, load<I>(lanes + i * W));
          }
          UNROLLED for (int r = 0; r < R; r++)
            UNROLLED for (int i = 0; i < C::KINDS; i++) {
              if constexpr (C::OF_BLOCKS) all_kinds[r] += mine[r][i] * step[i];
              else all_kinds[r] += mine[r][i];
            }
        }
      }
      UNROLLED for (int r = 0; r < R; r++) sum_of[r * T + i] = all_kinds[r];
    }
    float all_of[W];
    store(all_of, sums(sum_of));
#if !defined(__AVX512F__)
    store_rows<R>(to + first, apart, all_of, count - first);
#else
    const int64_t filled = count - first < T ? count - first : T;
    UNROLLED for (int r = 0; r < R; r++) memcpy(to + r * apart + first, all_of + r * T, (size_t)filled * sizeof(float));
#endif
  }
}

// Apart, since it is called from two places.
template <class C, int R>
APART void products_rows(Rows rows, const char* codes, int64_t stride, int64_t count, float* to, int64_t apart) {
  for (int64_t i = 0; i < count; i += W / R)
    products_of<C, R>(rows, codes + i * stride, stride, count - i, to + i, apart);
}

template <class C>
void products(Rows rows, int64_t number, const char* codes, int64_t stride, int64_t count, float* to, int64_t apart) {
  in_rows(number, [&](auto some, int64_t r) {
    const Rows mine{rows.query + r * rows.size, rows.size};
    products_rows<C, decltype(some)::ROWS>(mine, codes, stride, count, to + r * apart, apart);
  });
}

// Adds weighted values to M vectors of the N that one vector of words holds, of R rows.
template <class C, int R, int M>
inline void sums_of(const float* weights, int64_t apart, const char* codes, int64_t stride, int64_t count,
                    const Scales& scales, const int32_t* lanes, int first, const char*& next, float* out, int64_t size) {
  F sum_of[R][M];
  UNROLLED for (int r = 0; r < R; r++) UNROLLED for (int i = 0; i < M; i++) sum_of[r][i] = load<F>(out + r * size + i * W);
  constexpr int KINDS = C::KINDS < M ? C::KINDS : M;
  for (int64_t t = 0; t < count; t++, codes += stride) {
    const U words = C::words(codes);
    ask<C::BYTES * M / C::N>(next);
    F step[KINDS], low[KINDS];
    if constexpr (C::LEVELS && !C::OF_BLOCKS) {
      // Scales were multiplied with the weights.
    } else if (!C::LEVELS && scales.groups == 1) {
      step[0] = all(scales.step[t]);
      low[0] = scales.low ? all(scales.low[t]) : step[0] * -scales.zero;
      UNROLLED for (int i = 1; i < KINDS; i++) step[i] = step[0], low[i] = low[0];
    } else {
      const F steps = load<F>(scales.step + t * scales.groups);
      UNROLLED for (int i = 0; i < KINDS; i++) step[i] = picked(steps, load<I>(lanes + (i + first % C::KINDS) * W));
      if (scales.low) {
        const F lows = load<F>(scales.low + t * scales.groups);
        UNROLLED for (int i = 0; i < KINDS; i++) low[i] = picked(lows, load<I>(lanes + (i + first % C::KINDS) * W));
      } else {
        UNROLLED for (int i = 0; i < KINDS; i++) low[i] = step[i] * -scales.zero;
      }
    }
    F value[M];
    UNROLLED for (int i = 0; i < M; i++) {
      if constexpr (C::OF_BLOCKS) value[i] = C::at(words, first + i, scales.levels) * step[i % KINDS];
      else if constexpr (C::LEVELS) value[i] = C::at(words, first + i, scales.levels);
      else value[i] = C::at(words, first + i) * step[i % KINDS] + low[i % KINDS];
    }
    UNROLLED for (int r = 0; r < R; r++) UNROLLED for (int i = 0; i < M; i++) sum_of[r][i] += weights[r * apart + t] * value[i];
  }
  UNROLLED for (int r = 0; r < R; r++) UNROLLED for (int i = 0; i < M; i++) store(out + r * size + i * W, sum_of[r][i]);
}

template <class C, int R, int FIRST = 0>
inline void sums_from(const float* weights, int64_t apart, const char* codes, int64_t stride, int64_t count,
                      const Scales& scales, const int32_t* lanes, const char*& next, float* out, int64_t size) {
  constexpr int FREE = W / R > 8 ? 8 : W / R;
  constexpr int M = C::N - FIRST < FREE ? C::N - FIRST : FREE;
  sums_of<C, R, M>(weights, apart, codes, stride, count, scales, lanes, FIRST, next, out + FIRST * W, size);
  if constexpr (FIRST + M < C::N) sums_from<C, R, FIRST + M>(weights, apart, codes, stride, count, scales, lanes, next, out, size);
}

template <class C, int R>
void sums_rows(const float* weights, int64_t apart, const char* codes, int64_t stride, int64_t count,
               const Scales& scales, float* out, int64_t size) {
#if defined(INTEGER_PRODUCTS) && defined(__AVX2__)
  // With VNNI, codes of 2 bits are summed as bytes.h does it.
  if constexpr (C::BYTES == sizeof(U) && (C::BITS_OF > 2 || W == 8) && !C::LEVELS)
    if (scales.coarse) return short_sums<C, R>(weights, apart, codes, stride, count, scales, out, size);
#endif
#if defined(__AVX512F__)
  if constexpr (C::BYTES == sizeof(U) && C::LEVELS && !C::OF_BLOCKS)
    if (scales.coarse) return short_level_sums<C, R>(weights, apart, codes, stride, count, scales, out, size);
#elif defined(INTEGER_PRODUCTS)
  if constexpr (C::BYTES == sizeof(U) && C::LEVELS && !C::OF_BLOCKS)
    if (scales.coarse) return short_level_sums<R>(weights, apart, codes, stride, count, scales, out, size);
#endif
  const char* next = codes + VALUES_AHEAD;
  if constexpr (C::LEVELS) {
    Scales mine = scales;
    const int64_t channels = size / scales.tables;
    for (int64_t table = 0; table < scales.tables; table++, mine.levels += 16, out += channels)
      for (int64_t c = 0, v = 0; c < channels; c += C::N * W, v++)
        sums_from<C, R>(weights, apart, codes + v * C::BYTES, stride, count, mine, scales.lanes + v * C::KINDS * W, next, out + c, size);
    return;
  }
  for (int64_t c = 0, v = 0; c < size; c += C::N * W, v++)
    sums_from<C, R>(weights, apart, codes + v * C::BYTES, stride, count, scales, scales.lanes + v * C::KINDS * W, next, out + c, size);
}

template <class C>
void weighted(const float* weights, int64_t apart, int64_t number, const char* codes, int64_t stride, int64_t count,
              const Scales& scales, float* out, int64_t size) {
  in_rows(number, [&](auto some, int64_t r) {
    sums_rows<C, decltype(some)::ROWS>(weights + r * apart, apart, codes, stride, count, scales, out + r * size, size);
  });
}

// Calls `each` with the type of a side's codes.
template <int BITS, class Each> void with_folds(int64_t fold, Each each) {
  if (fold == 1) return each(Codes<BITS, 1>());
  if constexpr (most_folds(BITS) >= 2)
    if (fold == 2) return each(Codes<BITS, 2>());
  if constexpr (most_folds(BITS) >= 4) each(Codes<BITS, 4>());
}

template <class Each> void with_codes(const Side& side, Each each) {
  const int64_t fold = folds(side);
  if (side.bits == 8) return with_folds<8>(fold, each);
  if (side.bits == 4) return with_folds<4>(fold, each);
  with_folds<2>(fold, each);
}

// Whether the scales of tokens are multiplied with logits and weights, and not where codes are read. Tokens that are
// repeated in a vector have but one form of code, which takes both.
inline bool scales_apart(const Side& side) { return groups_of(side) == 1 && folds(side) == 1; }

template <class Each> void with_levels(const Side& side, Each each) {
  if constexpr (LEVELS_PICKED) {
    if (scales_apart(side)) return each(LevelCodes<1, false>());
    if (most_folds(4) == 1 || folds(side) == 1) return each(LevelCodes<1, true>());
    if constexpr (most_folds(4) > 1) each(LevelCodes<2, true>());
  }
}
