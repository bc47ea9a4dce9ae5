// Products with packed codes as they lie: no decoded token is ever written down.
//
// A vector of 32-bit words holds 32 / BITS codes in each word. Code k of every word, shifted down and masked, is a vector
// of codes whose channels are far apart; which ones, `place_of_code` says. Queries are laid out in that order before, and
// outputs put back after. A token whose codes fill only a part of a vector is repeated FOLD times in it, and each
// repetition gives other codes.
#pragma once

#include "layouts.h"

// Queries of a piece, as the products below want them.
struct Rows {
  const float* query;  // (rows, size), in the order of `place_of_code`
  int64_t size;
  bool coarse;  // the cache has 16 bits, so that 16 bits of a query are enough
};

template <int BITS, int FOLD> struct Codes {
  static constexpr int BITS_OF = BITS;
  static constexpr int N = 32 / (BITS * FOLD);           // vectors that a vector of words holds
  static constexpr int KINDS = 8 / BITS;                 // codes of a byte: of as many runs of channels
  static constexpr int BYTES = (int)sizeof(U) / FOLD;    // that are read

  static U words(const char* p) {
    if constexpr (FOLD == 1) return load<U>(p);
#if defined(__AVX512F__)
    if constexpr (FOLD == 2) return (U)_mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)p));
    if constexpr (FOLD == 4) return (U)_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)p));
#elif defined(__AVX2__)
    if constexpr (FOLD == 2) return (U)_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)p));
#endif
    U all;
    for (int i = 0; i < FOLD; i++) memcpy((char*)&all + i * BYTES, p, BYTES);
    return all;
  }

  static F at(U words, int k) {
    if constexpr (FOLD == 1) return __builtin_convertvector((I)((words >> (k * BITS)) & ((1u << BITS) - 1)), F);
    U down;
    UNROLLED for (int i = 0; i < W; i++) down[i] = (uint32_t)((k + i / (W / FOLD) * N) * BITS);
    return __builtin_convertvector((I)((words >> down) & ((1u << BITS) - 1)), F);
  }
};

// The bytes of a token's codes where one plane holds them all and vectors of words divide them; else 0.
static inline int64_t whole_words(const Side& side) {
  const int64_t bytes = side.size * side.bits / 8;
  if (side.kind < TOKEN_CODES || side.row || (side.bits != 2 && side.bits != 4 && side.bits != 8)) return 0;
  if (side.size * side.bits % 8 || side.size % (2 * W)) return 0;
  const int64_t full = (int64_t)sizeof(U);
  return bytes % full == 0 || bytes * 2 == full || bytes * 4 == full ? bytes : 0;
}

static inline int64_t folds(const Side& side) {
  const int64_t bytes = side.size * side.bits / 8;
  return bytes < (int64_t)sizeof(U) ? (int64_t)sizeof(U) / bytes : 1;
}

// Where channel c comes to lie in the vectors of a token.
static inline int64_t place_of_code(const Side& side, int64_t c) {
  const int64_t bits = side.bits, bytes = side.size * bits / 8, fold = folds(side), n = 32 / (bits * fold);
  const int64_t sub = c / bytes, byte = c % bytes, words = W / fold;
  const int64_t vector = byte / (4 * words), word = byte % (4 * words) / 4;
  const int64_t code = byte % 4 * (8 / bits) + sub;
  return (vector * n + code % n) * W + code / n * words + word;
}

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
  const int64_t filled = count < T ? count : T;
  UNROLLED for (int r = 0; r < R; r++) memcpy(to + r * apart, all_of + r * T, (size_t)filled * sizeof(float));
}

#if defined(__AVX512VNNI__)
// The same in integers: twice the products of an operation. A row's query becomes 16 bits of its own scale (an error of
// 2^-16 of its largest number), which is far below what the codes themselves have lost.
constexpr int64_t MOST_SHORT = 512;

template <class C> inline float shorten(const float* query, int64_t size, int64_t most, int32_t* to) {
  F top{};
  for (int64_t c = 0; c < size; c += W) {
    const F x = load<F>(query + c);
    top = larger(top, larger(x, -x));
  }
  const float high = highest(top);
  const float up = high > 0 ? (float)most / high : 0.f;
  const auto rounded = [&](int64_t c) { return (I)_mm512_cvtps_epi32((__m512)(load<F>(query + c) * up)); };
  for (int64_t v = 0; v < size; v += C::N * W)
    for (int k = 0; k < C::N / 2; k++, to += W)
      store(to, (rounded(v + (k + C::N / 2) * W) << 16) | (rounded(v + k * W) & 0xffff));
  return high / (float)most;
}

template <class C, int BITS, int R>
inline void short_products(Rows rows, const char* codes, int64_t stride, int64_t count, float* to, int64_t apart) {
  constexpr int T = W / R, HALF = C::N / 2;
  constexpr int32_t MASK = (1 << BITS) - 1;
  alignas(64) int32_t asked[R * MOST_SHORT / 2];
  float scale[R];
  const int64_t half = rows.size / 2, most = 0x7fffffff / (MASK * rows.size);
  for (int r = 0; r < R; r++)
    scale[r] = shorten<C>(rows.query + r * rows.size, rows.size, most < 32767 ? most : 32767, asked + r * half);
  for (int64_t first = 0; first < count; first += T) {
    const char* token[T];
    I sum_of[W];
    UNROLLED for (int i = 0; i < T; i++) token[i] = codes + (first + i < count ? first + i : count - 1) * stride;
    UNROLLED for (int i = 0; i < W; i++) sum_of[i] = I{};
    const int32_t* query = asked;
    for (int64_t c = 0; c < half; c += HALF * W, query += HALF * W) {
      U words[T];
      UNROLLED for (int i = 0; i < T; i++) words[i] = C::words(token[i]), soon(token[i]), token[i] += C::BYTES;
      UNROLLED for (int k = 0; k < HALF; k++)
        UNROLLED for (int i = 0; i < T; i++) {
          const U both = (words[i] >> (k * BITS)) & (uint32_t)(MASK | MASK << 16);
          UNROLLED for (int r = 0; r < R; r++)
            sum_of[r * T + i] = (I)_mm512_dpwssd_epi32((__m512i)sum_of[r * T + i], (__m512i)both,
                                                       _mm512_loadu_si512(query + r * half + k * W));
        }
    }
    float all_of[W];
    store(all_of, __builtin_convertvector(sums(sum_of), F));
    const int64_t filled = count - first < T ? count - first : T;
    UNROLLED for (int r = 0; r < R; r++)
      for (int64_t i = 0; i < filled; i++) to[r * apart + first + i] = all_of[r * T + i] * scale[r];
  }
}
#endif

template <class C, int R>
inline void products_rows(Rows rows, const char* codes, int64_t stride, int64_t count, float* to, int64_t apart) {
#if defined(__AVX512VNNI__)
  // A single row gains nothing: its time goes into adding up lanes.
  if constexpr (C::BYTES == sizeof(U) && R > 1)
    if (rows.coarse && rows.size <= MOST_SHORT) return short_products<C, C::BITS_OF, R>(rows, codes, stride, count, to, apart);
#endif
  for (int64_t i = 0; i < count; i += W / R)
    products_of<C, R>(rows, codes + i * stride, stride, count - i, to + i, apart);
}

template <class C>
void products(Rows rows, int64_t number, const char* codes, int64_t stride, int64_t count, float* to, int64_t apart) {
  in_rows(number, [&](auto some, int64_t r) {
    const Rows mine{rows.query + r * rows.size, rows.size, rows.coarse};
    products_rows<C, decltype(some)::ROWS>(mine, codes, stride, count, to + r * apart, apart);
  });
}

// Scales of the tokens of a block as floats, and which of them each lane of a vector uses.
struct Scales {
  const float *step, *low;  // (tokens, groups), and W floats of room behind; low null: codes are symmetric
  const int32_t* lanes;     // (vectors of words, KINDS, W)
  int64_t groups;
  float zero;
};

// Adds weighted values to M vectors of the N that one vector of words holds, of R rows.
template <class C, int R, int M>
inline void sums_of(const float* weights, int64_t apart, const char* codes, int64_t stride, int64_t count,
                    const Scales& scales, const int32_t* lanes, int first, float* out, int64_t size) {
  F sum_of[R][M];
  UNROLLED for (int r = 0; r < R; r++) UNROLLED for (int i = 0; i < M; i++) sum_of[r][i] = load<F>(out + r * size + i * W);
  constexpr int KINDS = C::KINDS < M ? C::KINDS : M;
  for (int64_t t = 0; t < count; t++, codes += stride) {
    const U words = C::words(codes);
    soon(codes);
    F step[KINDS], low[KINDS];
    if (scales.groups == 1) {
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
    UNROLLED for (int i = 0; i < M; i++) value[i] = C::at(words, first + i) * step[i % KINDS] + low[i % KINDS];
    UNROLLED for (int r = 0; r < R; r++) UNROLLED for (int i = 0; i < M; i++) sum_of[r][i] += weights[r * apart + t] * value[i];
  }
  UNROLLED for (int r = 0; r < R; r++) UNROLLED for (int i = 0; i < M; i++) store(out + r * size + i * W, sum_of[r][i]);
}

template <class C, int R, int FIRST = 0>
inline void sums_from(const float* weights, int64_t apart, const char* codes, int64_t stride, int64_t count,
                      const Scales& scales, const int32_t* lanes, float* out, int64_t size) {
  constexpr int FREE = W / R > 8 ? 8 : W / R;
  constexpr int M = C::N - FIRST < FREE ? C::N - FIRST : FREE;
  sums_of<C, R, M>(weights, apart, codes, stride, count, scales, lanes, FIRST, out + FIRST * W, size);
  if constexpr (FIRST + M < C::N) sums_from<C, R, FIRST + M>(weights, apart, codes, stride, count, scales, lanes, out, size);
}

template <class C, int R>
void sums_rows(const float* weights, int64_t apart, const char* codes, int64_t stride, int64_t count,
               const Scales& scales, float* out, int64_t size) {
  for (int64_t c = 0, v = 0; c < size; c += C::N * W, v++)
    sums_from<C, R>(weights, apart, codes + v * C::BYTES, stride, count, scales, scales.lanes + v * C::KINDS * W, out + c, size);
}

template <class C>
void weighted(const float* weights, int64_t apart, int64_t number, const char* codes, int64_t stride, int64_t count,
              const Scales& scales, float* out, int64_t size) {
  in_rows(number, [&](auto some, int64_t r) {
    sums_rows<C, decltype(some)::ROWS>(weights + r * apart, apart, codes, stride, count, scales, out + r * size, size);
  });
}

// Calls `each` with the type of a side's codes.
template <class Each> void with_codes(const Side& side, Each each) {
  const int64_t fold = folds(side);
  if (side.bits == 8) return fold == 1 ? each(Codes<8, 1>()) : fold == 2 ? each(Codes<8, 2>()) : each(Codes<8, 4>());
  if (side.bits == 4) return fold == 1 ? each(Codes<4, 1>()) : fold == 2 ? each(Codes<4, 2>()) : each(Codes<4, 4>());
  return fold == 1 ? each(Codes<2, 1>()) : fold == 2 ? each(Codes<2, 2>()) : each(Codes<2, 4>());
}
