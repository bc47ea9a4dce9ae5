// Levels of 16 bits for codes of 4, products with them and weighted sums of them, on processors with AVX2 and without VNNI and
// on those with AVX-512 VNNI.
//
// A byte shuffle is a table of 16 entries, and two of them make numbers of 16 bits. All that shuffles works within 32 bytes:
// of a vector of 64 each half is of another token.
#pragma once

#include "shorts.h"

typedef int16_t S __attribute__((vector_size(W * 4)));

constexpr int64_t HALF_VECTOR = 32;               // bytes within which tokens lie
constexpr int TOKENS = (int)sizeof(U) / HALF_VECTOR;  // that a vector has

// Adds to each lane two products of 16-bit codes with the same numbers, for T tokens. By name: GCC 12 adds products to one
// another before it adds them to sums, and puts most of them on the stack until then; where one operation does both, it copies
// the sum.
template <int T> INLINE inline void add_pairs_of(I* sum_of, const S* codes, const int16_t* numbers) {
#if defined(ADD_PAIRS)
  if constexpr (T == 1) {
    asm(ADD_PAIRS : "+v"(*sum_of) : "v"(*codes), "m"(*(const int16_t(*)[2 * W])numbers));
  } else {
    const S read = load<S>(numbers);
    UNROLLED for (int i = 0; i < T; i++) asm(ADD_PAIRS : "+v"(sum_of[i]) : "v"(codes[i]), "v"(read));
  }
#else
  if constexpr (T == 1) {
    S product;
    asm("vpmaddwd %2, %3, %1\n\tvpaddd %1, %0, %0"
        : "+x"(*sum_of), "=&x"(product)
        : "m"(*(const int16_t(*)[2 * W])numbers), "x"(*codes));
  } else if constexpr (T == 2) {
    S factor, product;
    asm("vmovdqu %4, %2\n\tvpmaddwd %2, %5, %3\n\tvpaddd %3, %0, %0\n\tvpmaddwd %2, %6, %2\n\tvpaddd %2, %1, %1"
        : "+x"(sum_of[0]), "+x"(sum_of[1]), "=&x"(factor), "=&x"(product)
        : "m"(*(const int16_t(*)[2 * W])numbers), "x"(codes[0]), "x"(codes[1]));
  } else {
    const S read = load<S>(numbers);
    // Not by `each_below`: Clang takes no local variable of a function in assembly within another.
    UNROLLED for (int i = 0; i < T; i++) {
      S product;
      asm("vpmaddwd %2, %3, %1\n\tvpaddd %1, %0, %0" : "+x"(sum_of[i]), "=&x"(product) : "x"(read), "x"(codes[i]));
    }
  }
#endif
}

// R vectors of R rows' numbers for W / R tokens each, as R rows of W tokens.
template <int R> INLINE inline void in_order(const F* from, F* to) {
#if defined(__AVX512F__)
  alignas(64) float rows[R][W];
  UNROLLED for (int i = 0; i < R; i++)
    UNROLLED for (int r = 0; r < R; r++) memcpy(rows[r] + i * (W / R), (const float*)(from + i) + r * (W / R), W / R * sizeof(float));
  UNROLLED for (int r = 0; r < R; r++) to[r] = load<F>(rows[r]);
#else
  if constexpr (R == 1) to[0] = from[0];
  if constexpr (R == 2) {
    const __m256i a = (__m256i)from[0], b = (__m256i)from[1];
    to[0] = (F)_mm256_permute2x128_si256(a, b, 0x20), to[1] = (F)_mm256_permute2x128_si256(a, b, 0x31);
  }
  if constexpr (R == 4) {
    const __m256i a = (__m256i)from[0], b = (__m256i)from[1], c = (__m256i)from[2], d = (__m256i)from[3];
    const __m256i even = _mm256_unpacklo_epi64(a, b), odd = _mm256_unpackhi_epi64(a, b);
    const __m256i more = _mm256_unpacklo_epi64(c, d), last = _mm256_unpackhi_epi64(c, d);
    to[0] = (F)_mm256_permute2x128_si256(even, more, 0x20), to[1] = (F)_mm256_permute2x128_si256(odd, last, 0x20);
    to[2] = (F)_mm256_permute2x128_si256(even, more, 0x31), to[3] = (F)_mm256_permute2x128_si256(odd, last, 0x31);
  }
#endif
}

// Products of R rows with `count` tokens, times the rows' scales, `apart` floats from row to row: `each` gives those of
// W / R tokens from a number on, row by row. Tokens after them are asked for, `stride` bytes each from `codes` on.
template <int R, class Each>
INLINE inline void over_tokens(int64_t count, const float* scale, float* to, int64_t apart, const char* codes, int64_t stride,
                               Each each) {
  for (int64_t first = 0; first < count; first += W) {
    F found[R], rows[R];
    // Here, since GCC takes what is asked in a function that only gives a value for nothing.
    for (int64_t c = 0; c < W * stride; c += 64) soon(codes + first * stride + c);
    for (int64_t i = 0; i < R; i++) found[i] = each(first + i * (W / R));
    in_order<R>(found, rows);
    float all_of[R * W];
    UNROLLED for (int r = 0; r < R; r++) store(all_of + r * W, rows[r] * scale[r]);
    store_rows<R, W>(to + first, apart, all_of, count - first);
  }
}

// Bytes of a table by codes, within each 16.
inline U shuffled(U table, U codes) {
#if defined(__AVX512F__)
  return (U)_mm512_shuffle_epi8((__m512i)table, (__m512i)codes);
#else
  return (U)_mm256_shuffle_epi8((__m256i)table, (__m256i)codes);
#endif
}

// The first eight bytes of each 16 of two vectors in turn, or the last.
template <bool LAST> inline U bytes_of_both(U a, U b) {
#if defined(__AVX512F__)
  return LAST ? (U)_mm512_unpackhi_epi8((__m512i)a, (__m512i)b) : (U)_mm512_unpacklo_epi8((__m512i)a, (__m512i)b);
#else
  return LAST ? (U)_mm256_unpackhi_epi8((__m256i)a, (__m256i)b) : (U)_mm256_unpacklo_epi8((__m256i)a, (__m256i)b);
#endif
}

// Levels of 16 bits by their two bytes, for every 16 bytes of a vector.
struct ByteTables {
  U low, high;

  explicit ByteTables(const int16_t* levels) {
    alignas(16) uint8_t bytes[2][16];
    for (int i = 0; i < 16; i++) bytes[0][i] = (uint8_t)levels[i], bytes[1][i] = (uint8_t)(levels[i] >> 8);
    low = repeated(bytes[0], 16), high = repeated(bytes[1], 16);
  }

  // Of codes, one in a byte, the levels of the first 8 of each 16, then those of the last 8.
  void pick(U codes, S& first, S& last) const {
    const U lows = shuffled(low, codes), highs = shuffled(high, codes);
    first = (S)bytes_of_both<false>(lows, highs), last = (S)bytes_of_both<true>(lows, highs);
  }
};

// Of 32 bytes those of the first half in the lower eight bytes of each half, so that what is unpacked lies in order.
inline U in_turns(U bytes) {
#if defined(__AVX512F__)
  return (U)_mm512_permutex_epi64((__m512i)bytes, 0xd8);
#else
  return (U)_mm256_permute4x64_epi64((__m256i)bytes, 0xd8);
#endif
}

inline U four_bits(U bytes, int64_t kind) { return (kind ? bytes >> 4 : bytes) & 0x0f0f0f0fu; }

// 32 bytes of one token, or of TOKENS.
inline U of_tokens(const void* first, [[maybe_unused]] const void* other) {
#if defined(__AVX512F__)
  const __m512i one = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)first));
  return (U)_mm512_inserti64x4(one, _mm256_loadu_si256((const __m256i*)other), 1);
#else
  return load<U>(first);
#endif
}

// 16 numbers of one token, or of TOKENS: the other's first, so that where there is none the first one's stay.
inline void store_tokens(int16_t* first, [[maybe_unused]] int16_t* other, S numbers) {
#if defined(__AVX512F__)
  store(other, _mm512_extracti64x4_epi64((__m512i)numbers, 1)), store(first, _mm512_castsi512_si256((__m512i)numbers));
#else
  store(first, numbers);
#endif
}

// Sums and differences wrap: of what is no number they may be anything.
typedef uint16_t Wraps __attribute__((vector_size(W * 4)));
inline S plus(S a, S b) { return (S)((Wraps)a + (Wraps)b); }
inline S minus(S a, S b) { return (S)((Wraps)a - (Wraps)b); }

// Products over 32,768, rounded.
inline S rounded_product(S a, S b) {
#if defined(__AVX512F__)
  return (S)_mm512_mulhrs_epi16((__m512i)a, (__m512i)b);
#else
  return (S)_mm256_mulhrs_epi16((__m256i)a, (__m256i)b);
#endif
}

// Weights of a run of tokens as its codes are multiplied with them: two tokens to a lane, and to each half of a vector others.
struct PairedWeights {
#if defined(__AVX512F__)
  alignas(64) int32_t pairs[SHORT_RUN / 2 * (W / 2)];

  void take(const Weights& weights, int64_t count) {
    for (int64_t t = 0; t < (count + 3) / 4 * 4; t += 2)
      store(pairs + t / 2 * (W / 2), _mm256_set1_epi32(load<int32_t>(weights.of_tokens + t)));
  }

  void add(I& sum, S levels, int64_t t) const { add_pairs_of<1>(&sum, &levels, (const int16_t*)(pairs + t / 2 * (W / 2))); }
#else
  const int16_t* numbers;

  void take(const Weights& weights, int64_t) { numbers = weights.of_tokens; }

  void add(I& sum, S levels, int64_t t) const { add_pairs(sum, (__m256i)levels, numbers + t); }
#endif
};

// Calls `each` with 2 TOKENS tokens at a time, those that are multiplied with neighbouring weights in the same place of two
// vectors; tokens past the last repeat it. Asks for as many bytes for each two.
template <int BYTES, class Each>
INLINE inline void by_pairs_of_tokens(const char* codes, int64_t stride, int64_t count, const char*& next, Each each) {
#if defined(__AVX512F__)
  const auto at = [&](int64_t t) INLINE { return codes + (t < count ? t : count - 1) * stride; };
  int64_t t = 0;
  for (; t + 4 <= count; t += 4) {
    const char* mine = codes + t * stride;
    ask<2 * BYTES>(next);
    each(t, of_tokens(mine, mine + 2 * stride), of_tokens(mine + stride, mine + 3 * stride));
  }
  if (t < count) each(t, of_tokens(at(t), at(t + 2)), of_tokens(at(t + 1), at(t + 3)));
#else
  by_pairs<BYTES>(codes, stride, count, next, [&](int64_t t, __m256i a, __m256i b) INLINE { each(t, (U)a, (U)b); });
#endif
}

// Adds levels times weights of 16 bits, which have the tokens' scales, for 16 PARTS of the 32 channels of a token's bytes.
template <int R, int PARTS, int KIND, int FIRST>
inline void level_sums_of(const PairedWeights* pairs, const Weights* all_of, const ByteTables& table, const char* codes,
                          int64_t stride, int64_t count, const char*& next, float unit, float* out, int64_t size) {
  I sum_of[R][2 * PARTS];
  each_below<2 * R * PARTS>([&](auto i) INLINE { sum_of[i / (2 * PARTS)][i % (2 * PARTS)] = I{}; });
  // The first of the passes over a vector asks for all of them.
  by_pairs_of_tokens<KIND == 0 && FIRST == 0 ? 64 : 0>(codes, stride, count, next, [&](int64_t t, U a, U b) INLINE {
    each_below<PARTS>([&](auto i) INLINE {
      // Levels of two tokens side by side.
      S low, high;
      table.pick(four_bits(bytes_of_both<(FIRST + i > 0)>(a, b), KIND), low, high);
      each_below<R>([&](auto r) INLINE { pairs[r].add(sum_of[r][2 * i], low, t), pairs[r].add(sum_of[r][2 * i + 1], high, t); });
    });
  });
  each_below<2 * R * PARTS>([&](auto i) INLINE {
    constexpr int r = i / (2 * PARTS), part = i % (2 * PARTS);
    // Of whole numbers, whose sum over all tokens is one of 32 bits.
#if defined(__AVX512F__)
    const __m512i both = (__m512i)sum_of[r][part];
    const __m256i sums_of_all = _mm256_add_epi32(_mm512_castsi512_si256(both), _mm512_extracti64x4_epi64(both, 1));
#else
    const __m256i sums_of_all = (__m256i)sum_of[r][part];
#endif
    const __m256 found = _mm256_cvtepi32_ps(sums_of_all) * _mm256_set1_ps(all_of[r].scale * unit);
    each_below<2>([&](auto half) INLINE {
      typedef float Half __attribute__((vector_size(16)));
      float* to = out + r * size + 16 * half + 8 * FIRST + 4 * part;
      store(to, load<Half>(to) + (Half)_mm256_extractf128_ps(found, half));
    });
  });
}

// The same for all channels, in their order, of SHORT_RUN tokens at most; a level is `unit` of a whole number. `low`: what
// each of a token's numbers is more than its level; null: nothing.
template <int R>
APART void short_table_sums(const float* weights, int64_t apart, const char* codes, int64_t stride, int64_t count,
                            const ByteTables& table, float unit, const float* step, const float* low, const char*& next,
                            float* out, int64_t size) {
  // Registers hold so many sums.
  constexpr int PARTS = R * 4 <= W ? 2 : 1;
  Weights all_of[R];
  PairedWeights pairs[R];
#if defined(__AVX512F__)
  for (int r = 0; r < R; r++) all_of[r].fill(weights + r * apart, step, low, 0, count, ROOM);
#else
  fill_rows<R>(all_of, 1, weights, apart, step, low, 0, count, ROOM);
#endif
  for (int r = 0; r < R; r++) pairs[r].take(all_of[r], count);
  for (int64_t c = 0; c < size / 2; c += HALF_VECTOR)
    each_below<2 * (3 - PARTS)>([&](auto i) INLINE {
      constexpr int KIND = i / (3 - PARTS), FIRST = i % (3 - PARTS);
      float* to = out + KIND * (size / 2) + c;
      level_sums_of<R, PARTS, KIND, FIRST>(pairs, all_of, table, codes + c, stride, count, next, unit, to, size);
    });
  if (!low) return;
  for (int r = 0; r < R; r++)
    for (int64_t c = 0; c < size; c += W) store(out + r * size + c, load<F>(out + r * size + c) + all_of[r].base);
}

// Of codes that stand for levels of a bell.
template <int R>
APART void short_level_sums(const float* weights, int64_t apart, const char* codes, int64_t stride, int64_t count,
                            const Scales& scales, float* out, int64_t size) {
  alignas(32) int16_t levels[32];
  const float unit = whole_levels(scales.levels, OF_VALUES, levels);
  const ByteTables table(levels);
  const char* next = codes + VALUES_AHEAD;
  for (int64_t first = 0; first < count; first += SHORT_RUN, codes += SHORT_RUN * stride) {
    const int64_t some = count - first < SHORT_RUN ? count - first : SHORT_RUN;
    short_table_sums<R>(weights + first, apart, codes, stride, some, table, unit, scales.step + first, nullptr, next, out, size);
  }
}
