// Products of queries with packed codes in integers, where the machine has VNNI: several products of an operation's lane.
//
// A row's query becomes 16 bits of its own scale (an error of 2^-16 of its largest number), which is far below what the
// codes themselves have lost. A sum less itself is 0, and NaN where something was no number: so it stays none.
#pragma once

#include "bytes.h"

// Adds to each lane two products of 16-bit numbers. By name: of the intrinsic GCC 12 copies the sum at every product, and
// puts some on the stack.
inline void add_pairs(__m512i& sum, __m512i codes, __m512i numbers) {
  asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(numbers));
}

// Several rows: codes as 16 bits, two products to a lane of an operation. Of each kind of codes those of even bytes of a
// vector of words come first, then those of odd ones.
APART float shorten(const float* query, int64_t size, int64_t kinds, int64_t most, int32_t* to) {
  alignas(64) int16_t numbers[MOST_SHORT];
  const Scaled by = scaled(query, size, most);
  shorten_to(query, size, by.up, numbers);
  for (int64_t c = 0; c < size / kinds; c += sizeof(U))
    for (int odd = 0; odd < 2; odd++)
      for (int64_t kind = 0; kind < kinds; kind++, to += W) {
        const int16_t* from = numbers + kind * (size / kinds) + c;
        const I every = numbered() * 0x40004 + (odd ? 0x30001 : 0x20000);
        store(to, _mm512_permutex2var_epi16(load<__m512i>(from), (__m512i)every, load<__m512i>(from + 2 * W)));
      }
  return by.back;
}

// Lane i of the result is the sum of v[i]'s lanes: as `sums`, of whole numbers, whose order is free.
INLINE inline __m512i whole_sums(const __m512i* v) {
  __m512i four[4];
  each_below<4>([&](auto i) INLINE {
    const auto two = [&](int j) INLINE {
      const __m512i a = v[4 * i + j], b = v[4 * i + j + 1];
      return _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    };
    const __m512i a = two(0), b = two(2);
    // Each 128 bits have parts of the four sums.
    four[i] = _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
  });
  const auto halved = [](__m512i a, __m512i b) INLINE {
    return _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd));
  };
  return halved(halved(four[0], four[1]), halved(four[2], four[3]));
}

// One row: codes as they are, four products to a lane, with the high bytes of a query and with its low ones. It spares
// the widening of codes, which several rows share, and costs a second sum.
template <int BITS>
inline void byte_products(const CutQuery& asked, int64_t bytes, const char* codes, int64_t stride, int64_t count,
                          float* to) {
  typedef Codes<BITS, 1> C;
  constexpr int HALF = W / 2;
  constexpr uint32_t MASK = (1u << BITS) - 1;
  for (int64_t first = 0; first < count; first += W) {
    __m512i sum_of[W];
    each_below<2>([&](auto half) INLINE {
      const char* token[HALF];
      __m512i high[HALF], low[HALF];
      each_below<HALF>([&](auto i) INLINE {
        const int64_t mine = first + half * HALF + i;
        token[i] = codes + (mine < count ? mine : count - 1) * stride;
        high[i] = low[i] = __m512i{};
      });
      for (int64_t c = 0; c < bytes; c += sizeof(U)) {
        U words[HALF];
        each_below<HALF>([&](auto i) INLINE { words[i] = C::words(token[i]), soon(token[i]), token[i] += C::BYTES; });
        each_below<C::KINDS>([&](auto k) INLINE {
          const __m512i highs = load<__m512i>(asked.high + k * bytes + c), lows = load<__m512i>(asked.low + k * bytes + c);
          each_below<HALF>([&](auto i) INLINE {
            const __m512i mine = (__m512i)((words[i] >> (k * BITS)) & MASK * 0x01010101u);
            high[i] = _mm512_dpbusd_epi32(high[i], mine, highs);
            low[i] = _mm512_dpbusd_epi32(low[i], mine, lows);
          });
        });
      }
      each_below<HALF>([&](auto i) INLINE { sum_of[half * HALF + i] = (__m512i)(((U)high[i] << 8) + (U)low[i]); });
    });
    const F found = __builtin_convertvector((I)whole_sums(sum_of), F) * asked.scale;
    memcpy(to + first, &found, (size_t)(count - first < W ? count - first : W) * sizeof(float));
  }
}

// As `level_products`, of queries in the order of their channels.
template <class C, int R>
APART PLAIN_LOOPS void short_level_products(Rows rows, const char* codes, int64_t stride, int64_t count,
                                            const Scales& scales, float* to, int64_t apart) {
  constexpr int T = W / R, HALF = C::N / 2;
  alignas(64) int32_t asked[R * MOST_SHORT / 2];
  alignas(64) int16_t levels[2 * W];
  float scale[R];
  const int64_t half = rows.size / 2, most = 0x7fffffff / (MOST_OF_KEYS * rows.size / W);
  const float unit = whole_levels(scales.levels, OF_KEYS, levels);
  for (int r = 0; r < R; r++)
    scale[r] = unit * shorten(rows.query + r * rows.size, rows.size, C::KINDS, most < 32767 ? most : 32767, asked + r * half);
  const __m512i table = load<__m512i>(levels);
  for (int64_t first = 0; first < count; first += T) {
    F sum_of[W];
    for (int i = 0; i < T; i++) {
      const int64_t t = first + i < count ? first + i : count - 1;
      const char* token = codes + t * stride;
      const int32_t* query = asked;
      __m512i mine[R]{};
      for (int64_t c = 0; c < half; c += HALF * W, query += HALF * W, token += C::BYTES) {
        const U words = C::words(token);
        soon(token);
        UNROLLED for (int k = 0; k < HALF; k++) {
          const __m512i both = _mm512_permutexvar_epi16((__m512i)(words >> (k * 4)), table);
          UNROLLED for (int r = 0; r < R; r++) add_pairs(mine[r], both, _mm512_loadu_si512(query + r * half + k * W));
        }
      }
      UNROLLED for (int r = 0; r < R; r++) sum_of[r * T + i] = __builtin_convertvector((I)mine[r], F);
    }
    float all_of[W];
    store(all_of, sums(sum_of));
    const int64_t filled = count - first < T ? count - first : T;
    UNROLLED for (int r = 0; r < R; r++)
      for (int64_t i = 0; i < filled; i++) to[r * apart + first + i] = all_of[r * T + i] * scale[r];
  }
}

// Adds levels times the tokens' scales and weights.
template <class C, int R>
APART PLAIN_LOOPS void short_level_sums(const float* weights, int64_t apart, const char* codes, int64_t stride,
                                        int64_t count, const Scales& scales, float* out, int64_t size) {
  alignas(64) int16_t levels[2 * W];
  const float unit = whole_levels(scales.levels, OF_VALUES, levels);
  const char* next = codes + VALUES_AHEAD;
  for (int64_t first = 0; first < count; first += SHORT_RUN, codes += SHORT_RUN * stride) {
    Weights all_of[R];
    const Weights* of[R * C::KINDS];
    const int64_t some = count - first < SHORT_RUN ? count - first : SHORT_RUN;
    for (int r = 0; r < R; r++) {
      all_of[r].fill(weights + r * apart + first, scales.step + first, nullptr, 0, some, ROOM);
      all_of[r].scale *= unit;
      for (int kind = 0; kind < C::KINDS; kind++) of[r * C::KINDS + kind] = all_of + r;
    }
    for (int64_t c = 0, v = 0; c < size; c += C::N * W, v++) {
      short_sums_from<C, R>(of, codes + v * C::BYTES, stride, some, next, out + c, size, levels);
    }
  }
}
