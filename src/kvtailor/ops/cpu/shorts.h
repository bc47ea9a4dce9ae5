// Weighted sums of packed codes in integers: weights of 16 bits, two products to a lane of an operation.
//
// On processors with VNNI one operation multiplies and adds, on those with AVX2 alone two do, which still spares a number
// in floating point for each code. What other integer products share stands here, too.
#pragma once

#include "plain.h"
#include "words.h"

#if defined(__AVX512F__)
typedef __m512i Words;
#elif defined(__AVX2__)
typedef __m256i Words;
#endif

constexpr int64_t MOST_SHORT = 512;
constexpr int64_t MOST_CUT = 32639;  // its high byte, rounded, is 127

// What makes a query's numbers at most `most`, and what makes them as large again.
struct Scaled {
  float up, back;
};

inline float float_of_bits(int32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

// Of the largest absolute value so far, of each lane, as whole numbers: what is no finite number is the largest of all.
inline I largest_bits(I so_far, F x) {
  const I mine = (I)x & 0x7fffffff;
  return so_far > mine ? so_far : mine;
}

inline Scaled scaled_by(I bits, int64_t most) {
#if defined(__AVX512F__)
  const int32_t most_bits = _mm512_reduce_max_epi32((__m512i)bits);
#elif defined(__aarch64__)
  const int32_t most_bits = vmaxvq_s32((int32x4_t)bits);
#else
  __m128i top = _mm_max_epi32(_mm256_castsi256_si128((__m256i)bits), _mm256_extracti128_si256((__m256i)bits, 1));
  top = _mm_max_epi32(top, _mm_shuffle_epi32(top, 0x4e));
  const int32_t most_bits = _mm_cvtsi128_si32(_mm_max_epi32(top, _mm_shuffle_epi32(top, 0xb1)));
#endif
  const float high = float_of_bits(most_bits);
  // Less itself it is 0, or no number.
  return {high > 0 ? (float)most / high : 0.f, high / (float)most + (high - high)};
}

inline Scaled scaled(const float* query, int64_t size, int64_t most) {
  I top{};
  for (int64_t c = 0; c < size; c += W) top = largest_bits(top, load<F>(query + c));
  return scaled_by(top, most);
}

// The most that a query's numbers may be, so that no sum over all channels of such codes overflows.
inline int64_t most_for(int64_t size, int64_t bits) {
  const int64_t all = 0x7fffffff / (((1 << bits) - 1) * size);
  return all < MOST_CUT ? all : MOST_CUT;
}

inline I numbered() {
  I each;
  UNROLLED for (int i = 0; i < W; i++) each[i] = i;
  return each;
}

// As whole numbers, the nearest.
inline I rounded(F x) {
#if defined(__AVX512F__)
  return (I)_mm512_maskz_cvtps_epi32(0xffff, (__m512)x);
#elif defined(__aarch64__)
  return (I)vcvtnq_s32_f32((float32x4_t)x);
#else
  return (I)_mm256_cvtps_epi32((__m256)x);
#endif
}

// W numbers of 16 bits.
inline void store_shorts(int16_t* to, I numbers) {
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i*)to, _mm512_maskz_cvtepi32_epi16(0xffff, (__m512i)numbers));
#elif defined(__aarch64__)
  vst1_s16(to, vmovn_s32((int32x4_t)numbers));
#else
  const __m256i both = _mm256_permute4x64_epi64(_mm256_packs_epi32((__m256i)numbers, (__m256i)numbers), 0x08);
  _mm_storeu_si128((__m128i*)to, _mm256_castsi256_si128(both));
#endif
}

#if !defined(__AVX512F__)
// 2 W of them, in half the operations.
inline void store_shorts(int16_t* to, I first, I last) {
#if defined(__aarch64__)
  vst1q_s16(to, vmovn_high_s32(vmovn_s32((int32x4_t)first), (int32x4_t)last));
#else
  store(to, _mm256_permute4x64_epi64(_mm256_packs_epi32((__m256i)first, (__m256i)last), 0xd8));
#endif
}
#endif

// A query times what makes its numbers fit, as 16 bits; whole vectors of these.
inline void shorten_to(const float* query, int64_t size, float up, int16_t* to) {
#if !defined(__AVX512F__)
  for (int64_t c = 0; c < size; c += 2 * W)
    store_shorts(to + c, rounded(load<F>(query + c) * up), rounded(load<F>(query + c + W) * up));
  return;
#endif
  for (int64_t c = 0; c < size; c += W) store_shorts(to + c, rounded(load<F>(query + c) * up));
}

// A query times the steps of its channels, and of its absolute values the largest of each lane; gives the sum of the query
// times their minima.
inline float times_steps(const float* query, const float* step, const float* low, int64_t size, float* to, I& top) {
  F lows{};
  for (int64_t c = 0; c < size; c += W) {
    const F mine = load<F>(query + c), x = mine * load<F>(step + c);
    store(to + c, x);
    top = largest_bits(top, x), lows += mine * load<F>(low + c);
  }
  return sum(lows);
}

// Adds two products to each lane, where one operation does. A test runs AVX-VNNI's code on processors with AVX-512, which
// write it otherwise.
#if defined(__AVX512F__) || defined(ADD_PAIRS_OF_AVX512)
#define ADD_PAIRS "vpdpwssd %2, %1, %0"
#elif defined(__AVXVNNI__)
#define ADD_PAIRS "%{vex%} vpdpwssd %2, %1, %0"
#endif

// Adds to each lane two products of 16-bit codes with the same two numbers.
#if defined(__AVX512F__)
template <class V> inline void add_pairs(V& sum, __m512i codes, const void* numbers) {
  asm("vpdpwssd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(codes), "m"(*(const int32_t(*)[1])numbers));
}
#elif defined(ADD_PAIRS)
inline void add_pairs(I& sum, __m256i codes, const void* numbers) {
  asm(ADD_PAIRS : "+x"(sum) : "x"(codes), "x"(_mm256_set1_epi32(load<int32_t>(numbers))));
}
#elif defined(__AVX2__)
inline void add_pairs(I& sum, __m256i codes, const void* numbers) {
  __m256i product;
  asm("vpmaddwd %2, %3, %1\n\tvpaddd %1, %0, %0"
      : "+x"(sum), "=&x"(product)
      : "x"(_mm256_set1_epi32(load<int32_t>(numbers))), "x"(codes));
}
#endif

// Weighted sums of codes: a lane takes the same channel of two tokens. A row's weights, times the steps of their tokens,
// become 15 bits of their own scale for each block, so that no sum over a block can overflow.
struct Weights {
  alignas(64) int16_t of_tokens[BLOCK];
  float scale, base;  // a sum of codes times `scale`, plus `base`, is the sum of values

#if defined(__AVX512F__)
  // As `fill_rows`.
  APART void fill(const float* weights, const float* step, const float* low, float zero, int64_t count,
                  float room = 1e9f) {
    float stepped[BLOCK];
    F top{}, total{}, lows{};
    int64_t t = 0;
    for (; t < count; t += W) {
      const I inside = numbered() < (int32_t)(count - t);
      const F weight = load<F>(weights + t), x = inside ? weight * load<F>(step + t) : F{};
      store(stepped + t, x);
      top = larger(x, top), total += x;
      if (low) lows += inside ? weight * load<F>(low + t) + x * zero : F{};
    }
    const float high = highest(top), whole = sum(total), least = whole / room * (float)MOST_CUT;
    const float most = high > least ? high : least, up = high > 0 ? (float)MOST_CUT / most : 0.f;
    U numbers{};
    for (t = 0; t < count; t += W) {
      const I mine = rounded(load<F>(stepped + t) * up);
      store_shorts(of_tokens + t, mine);
      numbers += (U)mine;
    }
    scale = most / (float)MOST_CUT + (whole - whole);
    base = sum(lows) - zero * scale * sum(__builtin_convertvector((I)numbers, F));
  }
#endif
};

// Of R rows, whose numbers stand `apart` from one another and become `of[r * every]`. `step` and `low` by token; low null:
// the code `zero` stands for 0. Rounding is counted from it in any case. Steps are not negative. Numbers of a row add up to
// at most `room`.
#if !defined(__AVX512F__)
template <int R>
APART void fill_rows(Weights* of, int64_t every, const float* weights, int64_t apart, const float* step, const float* low,
                     float zero, int64_t count, float room = 1e9f) {
  float stepped[R][BLOCK];
  F top[R], total[W]{}, lows[W]{};
  // Without a sign: of NaN each is the least number there is, and two of those have no sum.
  U numbers[R];
  each_below<R>([&](auto r) INLINE { top[r] = F{}, numbers[r] = U{}; });
  const auto take = [&](int64_t t, auto whole) INLINE {
    const I inside = numbered() < (int32_t)(count - t);
    F steps = load<F>(step + t), least = low ? load<F>(low + t) : F{};
    if (!whole) steps = inside ? steps : F{}, least = inside ? least : F{};
    each_below<R>([&](auto r) INLINE {
      F weight = load<F>(weights + r * apart + t);
      if (!whole) weight = inside ? weight : F{};
      const F x = weight * steps;
      store(stepped[r] + t, x);
      top[r] = larger(x, top[r]), total[r] += x, lows[r] += weight * least;
    });
  };
  int64_t t = 0;
  for (; t + W <= count; t += W) take(t, Number<1>());
  if (t < count) take(t, Number<0>()), t += W;
  // Vectors are taken by two below.
  if (t % (2 * W)) each_below<R>([&](auto r) INLINE { store(stepped[r] + t, F{}); });
  const F wholes = sums(total), all_lows = sums(lows);
  float up[R];
  UNROLLED for (int r = 0; r < R; r++) {
    const float high = highest(top[r]), least = wholes[r] / room * (float)MOST_CUT, most = high > least ? high : least;
    up[r] = high > 0 ? (float)MOST_CUT / most : 0.f;
    of[r * every].scale = most / (float)MOST_CUT + (wholes[r] - wholes[r]);
  }
  for (t = 0; t < count; t += 2 * W)
    each_below<R>([&](auto r) INLINE {
      const I mine = rounded(load<F>(stepped[r] + t) * up[r]), other = rounded(load<F>(stepped[r] + t + W) * up[r]);
      store_shorts(of[r * every].of_tokens + t, mine, other);
      numbers[r] += (U)mine + (U)other;
    });
  F counted[W]{};
  each_below<R>([&](auto r) INLINE { counted[r] = __builtin_convertvector((I)numbers[r], F); });
  const F all_numbers = sums(counted);
  UNROLLED for (int r = 0; r < R; r++) {
    const float rounding = (low ? wholes[r] : 0.f) - of[r * every].scale * all_numbers[r];
    of[r * every].base = all_lows[r] + zero * rounding;
  }
}
#endif

// Whole numbers in place of levels: those of E2M1 twice as large, those of a bell as they stand behind the levels (see
// padded_levels in gaussian.py).
enum Whole { DOUBLED = 0, OF_KEYS = 1, OF_VALUES = 2 };

// Each twice, so that a permutation of 16-bit lanes may see a bit too many. Gives what a whole number is worth.
APART float whole_levels(const float* levels, Whole which, int16_t* to) {
  for (int i = 0; i < 32; i++) to[i] = (int16_t)(which == DOUBLED ? 2 * levels[i % 16] : levels[16 * which + i % 16]);
  return which == DOUBLED ? 0.5f : levels[47 + which];
}

// The most that whole levels of a bell are (MOST_WHOLE in gaussian.py). Queries have 16 bits, and fewer where lanes hold
// more than 8 products, those of 128 channels.
constexpr int64_t MOST_OF_KEYS = 8191;

// Whole levels of values, and tokens at once: so many numbers of 16 bits, or fewer, that no sum can overflow.
constexpr int64_t MOST_OF_VALUES = 4096, SHORT_RUN = 128;
constexpr float ROOM = (float)(0x7fffffff / MOST_OF_VALUES - SHORT_RUN);

// Steps or minima of one group of each token. W floats behind what is written, and behind what is read, are scratch.
APART void of_group(const float* from, int64_t groups, int64_t group, int64_t count, float* to) {
#if defined(__AVX512F__)
  if (groups == 2 || groups == 4) {
    const I every = numbered() * (int32_t)groups + (int32_t)group;
    for (int64_t t = 0; t < count; t += groups == 2 ? W : W / 2, from += 2 * W)
      store(to + t, (F)_mm512_permutex2var_ps((__m512)load<F>(from), (__m512i)every, (__m512)load<F>(from + W)));
    return;
  }
#endif
#if defined(__aarch64__)
  if (groups == 2) {
    for (int64_t t = 0; t < count; t += W, from += 2 * W) {
      const float32x4x2_t both = vld2q_f32(from);
      vst1q_f32(to + t, group ? both.val[1] : both.val[0]);
    }
    return;
  }
  if (groups == 4) {
    each_below<4>([&](auto mine) INLINE {
      if (group != mine) return;
      for (int64_t t = 0; t < count; t += W, from += 4 * W) vst1q_f32(to + t, vld4q_f32(from).val[mine]);
    });
    return;
  }
#elif !defined(__AVX512F__)
  if (groups == 2) {
    for (int64_t t = 0; t < count; t += W, from += 2 * W) {
      const __m256 a = (__m256)load<F>(from), b = (__m256)load<F>(from + W);
      const __m256 mine = group ? _mm256_shuffle_ps(a, b, 0xdd) : _mm256_shuffle_ps(a, b, 0x88);
      store(to + t, _mm256_permute4x64_pd((__m256d)mine, 0xd8));
    }
    return;
  }
  if (groups == 4) {
    // Each half of a vector has the four numbers of a token.
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    each_below<4>([&](auto mine) INLINE {
      constexpr int PICK = decltype(mine)() * 0x55;
      if (group != mine) return;
      for (int64_t t = 0; t < count; t += W, from += 4 * W) {
        const __m256 a = _mm256_shuffle_ps((__m256)load<F>(from), (__m256)load<F>(from + W), PICK);
        const __m256 b = _mm256_shuffle_ps((__m256)load<F>(from + 2 * W), (__m256)load<F>(from + 3 * W), PICK);
        store(to + t, _mm256_permutevar8x32_ps(_mm256_shuffle_ps(a, b, 0x88), order));
      }
    });
    return;
  }
#endif
  for (int64_t t = 0; t < count; t++) to[t] = from[t * groups + group];
}

#if defined(__AVX2__)
#if !defined(__AVX512F__)
// Calls `each` with a vector of words of two tokens at a time, of the last with itself where it is alone, and asks for as
// many bytes for each two.
template <int BYTES, class Each>
INLINE inline void by_pairs(const char* codes, int64_t stride, int64_t count, const char*& next, Each each) {
  int64_t t = 0;
  for (; t + 4 <= count; t += 4, codes += 4 * stride) {
    ask<2 * BYTES>(next);
    each(t, load<__m256i>(codes), load<__m256i>(codes + stride));
    each(t + 2, load<__m256i>(codes + 2 * stride), load<__m256i>(codes + 3 * stride));
  }
  for (; t < count; t += 2, codes += 2 * stride)
    each(t, load<__m256i>(codes), load<__m256i>(t + 1 < count ? codes + stride : codes));
}
#endif

// M vectors of the sums that one vector of words gives, of R rows. `words` is what registers hold: two tokens' codes of
// 16 bits side by side are a word.
template <class C, int R, int M, int FIRST>
inline void short_sums_of(const Weights* const* of, const char* codes, int64_t stride, int64_t count,
                          const char*& next, float* out, int64_t size, [[maybe_unused]] const int16_t* levels = nullptr) {
  constexpr int HALF = C::N / 2, KINDS = C::KINDS;
  constexpr uint32_t MASK = (1u << C::BITS_OF) - 1;
  I sum_of[R][M];
#if defined(__AVX512F__)
  UNROLLED for (int r = 0; r < R; r++) UNROLLED for (int i = 0; i < M; i++) sum_of[r][i] = I{};
  for (int64_t t = 0; t < count; t += 2, codes += 2 * stride) {
    const char* other = t + 1 < count ? codes + stride : codes;
    const U a = C::words(codes), b = C::words(other);
    ask<2 * C::BYTES * M / C::N>(next);
    const U low = (a & 0xffff) | (b << 16), high = (a >> 16) | (b & 0xffff0000u);
    UNROLLED for (int i = 0; i < M; i++) {
      const int k = FIRST + i;
      U both = (k < HALF ? low : high) >> (k % HALF * C::BITS_OF);
      if constexpr (C::LEVELS) both = (U)_mm512_permutexvar_epi16((__m512i)both, _mm512_load_si512(levels));
      else both &= MASK | MASK << 16;
      UNROLLED for (int r = 0; r < R; r++)
        add_pairs(sum_of[r][i], (Words)both, of[r * KINDS + k % KINDS]->of_tokens + t);
    }
  }
  UNROLLED for (int r = 0; r < R; r++)
    UNROLLED for (int i = 0; i < M; i++) {
      const Weights& mine = *of[r * KINDS + (FIRST + i) % KINDS];
      float* to = out + r * size + (FIRST + i) * W;
      store(to, load<F>(to) + (__builtin_convertvector(sum_of[r][i], F) * mine.scale + mine.base));
    }
#else
  // Of each half of a word kind after kind, so that vectors that are summed at once share their weights.
  const auto place = [](int i) constexpr { return i / HALF * HALF + i % 2 * KINDS + i % HALF / 2; };
  each_below<R * M>([&](auto i) INLINE { sum_of[i / M][i % M] = I{}; });
  by_pairs<2 * C::BYTES * M / C::N>(codes, stride, count, next, [&](int64_t t, __m256i a, __m256i b) INLINE {
    const __m256i low = _mm256_blend_epi16(a, _mm256_slli_epi32(b, 16), 0xaa);
    const __m256i high = _mm256_blend_epi16(_mm256_srli_epi32(a, 16), b, 0xaa);
    each_below<M>([&](auto i) INLINE {
      constexpr int k = place(FIRST + i), SHIFT = k % HALF * C::BITS_OF;
      __m256i both = k < HALF ? low : high;
      if constexpr (SHIFT > 0) both = _mm256_srli_epi16(both, SHIFT);
      if constexpr (SHIFT + C::BITS_OF < 16) both = _mm256_and_si256(both, _mm256_set1_epi32((int32_t)(MASK | MASK << 16)));
      each_below<R>([&](auto r) INLINE { add_pairs(sum_of[r][i], both, of[r * KINDS + k % KINDS]->of_tokens + t); });
    });
  });
  each_below<R * M>([&](auto i) INLINE {
    constexpr int r = i / M, k = place(FIRST + i % M);
    const Weights& mine = *of[r * KINDS + k % KINDS];
    float* to = out + r * size + k * W;
    store(to, load<F>(to) + (__builtin_convertvector(sum_of[r][i % M], F) * mine.scale + mine.base));
  });
#endif
}

// All of them, as many at once as registers hold.
template <class C, int R, int FIRST = 0>
inline void short_sums_from(const Weights* const* of, const char* codes, int64_t stride, int64_t count, const char*& next,
                            float* out, int64_t size, const int16_t* levels = nullptr) {
  constexpr int M = C::N < W / R ? C::N : W / R;
  short_sums_of<C, R, M, FIRST>(of, codes, stride, count, next, out, size, levels);
  if constexpr (FIRST + M < C::N) short_sums_from<C, R, FIRST + M>(of, codes, stride, count, next, out, size, levels);
}

template <class C, int R>
void short_sums(const float* weights, int64_t apart, const char* codes, int64_t stride, int64_t count,
                const Scales& scales, float* out, int64_t size) {
  Weights all_of[R * MOST_GROUPS];
  float step[BLOCK + W], low[BLOCK + W];
  for (int64_t i = 0; i < scales.groups; i++) {
    of_group(scales.step, scales.groups, i, count, step);
    if (scales.low) of_group(scales.low, scales.groups, i, count, low);
#if defined(__AVX512F__)
    for (int r = 0; r < R; r++)
      all_of[r * scales.groups + i].fill(weights + r * apart, step, scales.low ? low : nullptr, scales.zero, count);
#else
    fill_rows<R>(all_of + i, scales.groups, weights, apart, step, scales.low ? low : nullptr, scales.zero, count);
#endif
  }
  const char* next = codes + VALUES_AHEAD;
  for (int64_t c = 0, v = 0; c < size; c += C::N * W, v++, codes += C::BYTES) {
    const Weights* of[R * C::KINDS];
    for (int r = 0; r < R; r++)
      for (int kind = 0; kind < C::KINDS; kind++)
        of[r * C::KINDS + kind] = all_of + r * scales.groups + (scales.groups > 1 ? scales.lanes[(v * C::KINDS + kind) * W] : 0);
    short_sums_from<C, R>(of, codes, stride, count, next, out + c, size);
  }
}
#endif
