// Products of queries with packed codes in integers, on processors with AVX2 and without VNNI.
//
// A row's query becomes 16 bits of its own scale, as in integers.h, and codes become 16 bits by a shift and a mask; two
// operations make and add 16 products, where floats take two, and as many again for every 8 codes to become numbers.
#pragma once

#include "shorts.h"

// A query in the order in which codes come out of 16-bit words: of each vector of bytes first those of even bytes, kind
// after kind, then those of odd ones.
struct CutQuery {
  alignas(32) int16_t numbers[MOST_SHORT];
  float scale;

  // For codes of so many bits.
  APART void fill(const float* query, int64_t size, int64_t bits) {
    cut(query, size, bits, scaled(query, size, most_for(size, bits)));
  }

  // The query times the steps of its channels. Gives the sum of the query times their minima.
  APART float fill_times(const float* query, const float* step, const float* low, int64_t size, int64_t bits) {
    float times[MOST_SHORT];
    I top{};
    const float lows = times_steps(query, step, low, size, times, top);
    cut(times, size, bits, scaled_by(top, most_for(size, bits)));
    return lows;
  }

 private:
  // Of 32 numbers those in even places, then those in odd ones.
  static void part(const int16_t* from, int16_t* even, int16_t* odd) {
    const __m256i order = _mm256_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15, 0, 1, 4, 5, 8, 9, 12, 13,
                                           2, 3, 6, 7, 10, 11, 14, 15);
    const __m256i a = _mm256_permute4x64_epi64(_mm256_shuffle_epi8(load<__m256i>(from), order), 0xd8);
    const __m256i b = _mm256_permute4x64_epi64(_mm256_shuffle_epi8(load<__m256i>(from + 16), order), 0xd8);
    store(even, _mm256_permute2x128_si256(a, b, 0x20)), store(odd, _mm256_permute2x128_si256(a, b, 0x31));
  }

  void cut(const float* query, int64_t size, int64_t bits, Scaled by) {
    alignas(32) int16_t natural[MOST_SHORT];
    shorten_to(query, size, by.up, natural);
    const int64_t kinds = 8 / bits, bytes = size / kinds;
    for (int64_t c = 0; c < bytes; c += sizeof(U))
      for (int64_t kind = 0; kind < kinds; kind++) {
        int16_t* to = numbers + c * kinds + kind * 16;
        part(natural + kind * bytes + c, to, to + kinds * 16);
      }
    scale = by.back;
  }
};

// Of R rows with W / R tokens; tokens past `count` repeat the last. `to` has BLOCK floats for each row.
template <int BITS, int R>
inline void products_of_words(const CutQuery* asked, int64_t bytes, const char* codes, int64_t stride, int64_t count, float* to) {
  constexpr int T = W / R, N = 16 / BITS;
  constexpr uint32_t MASK = (1u << BITS) - 1;
  const char* token[T];
  I sum_of[W];
  UNROLLED for (int i = 0; i < T; i++) token[i] = codes + (i < count ? i : count - 1) * stride;
  UNROLLED for (int i = 0; i < W; i++) sum_of[i] = I{};
  for (int64_t c = 0, at = 0; c < bytes; c += sizeof(U), at += N * 16) {
    U words[T];
    UNROLLED for (int i = 0; i < T; i++) words[i] = load<U>(token[i] + c), soon(token[i] + c);
    UNROLLED for (int k = 0; k < N; k++) {
      __m256i mine[T];
      UNROLLED for (int i = 0; i < T; i++)
        mine[i] = _mm256_and_si256(_mm256_srli_epi16((__m256i)words[i], k * BITS), _mm256_set1_epi32((int32_t)(MASK | MASK << 16)));
      UNROLLED for (int r = 0; r < R; r++) {
        const __m256i query = load<__m256i>(asked[r].numbers + at + k * 16);
        UNROLLED for (int i = 0; i < T; i++) sum_of[r * T + i] += (I)_mm256_madd_epi16(mine[i], query);
      }
    }
  }
  F scale;
  UNROLLED for (int i = 0; i < W; i++) scale[i] = asked[i / T].scale;
  float all_of[W];
  store(all_of, __builtin_convertvector(sums(sum_of), F) * scale);
  store_rows<R>(to, BLOCK, all_of, count);
}

// Products of the rows' queries with `count` tokens from `codes` on; `to` has BLOCK floats for each row.
APART void products_in_integers(const CutQuery* asked, int64_t rows, const Side& side, const char* codes, int64_t count,
                                 float* to) {
  const int64_t bytes = side.size * side.bits / 8, stride = side.slot_bytes;
  in_rows(rows, [&](auto some, int64_t r) {
    constexpr int R = decltype(some)::ROWS;
    for (int64_t t = 0; t < count; t += W / R) {
      const char* from = codes + t * stride;
      float* at = to + r * BLOCK + t;
      if (side.bits == 2) products_of_words<2, R>(asked + r, bytes, from, stride, count - t, at);
      else if (side.bits == 4) products_of_words<4, R>(asked + r, bytes, from, stride, count - t, at);
      else products_of_words<8, R>(asked + r, bytes, from, stride, count - t, at);
    }
  });
}

// Levels of 16 bits by their two bytes, in both halves of a vector.
struct ByteTables {
  __m256i low, high;

  explicit ByteTables(const int16_t* levels) {
    alignas(16) uint8_t bytes[2][16];
    for (int i = 0; i < 16; i++) bytes[0][i] = (uint8_t)levels[i], bytes[1][i] = (uint8_t)(levels[i] >> 8);
    low = _mm256_broadcastsi128_si256(load<__m128i>(bytes[0])), high = _mm256_broadcastsi128_si256(load<__m128i>(bytes[1]));
  }

  // Of 32 codes, one in a byte, the levels of the first 8 of each half, then those of the last 8.
  void pick(__m256i codes, __m256i& first, __m256i& last) const {
    const __m256i lows = _mm256_shuffle_epi8(low, codes), highs = _mm256_shuffle_epi8(high, codes);
    first = _mm256_unpacklo_epi8(lows, highs), last = _mm256_unpackhi_epi8(lows, highs);
  }
};

inline __m256i four_bits(const char* from, int64_t kind) {
  const __m256i bytes = load<__m256i>(from);
  return _mm256_and_si256(kind ? _mm256_srli_epi16(bytes, 4) : bytes, _mm256_set1_epi8(15));
}

// Products of R rows with codes of 4 bits that stand for levels, W / R tokens at a time; queries in the order of their
// channels. A token's scale is left to the caller.
template <int R>
APART void short_level_products(Rows rows, const char* codes, int64_t stride, int64_t count, const Scales& scales, float* to,
                                int64_t apart) {
  constexpr int T = W / R;
  const int64_t bytes = rows.size / 2, most = 0x7fffffff / (MOST_OF_KEYS * rows.size / W);
  alignas(32) int16_t asked[R][MOST_SHORT], levels[32], natural[MOST_SHORT];
  float scale[R];
  const float unit = whole_levels(scales.levels, OF_KEYS, levels);
  const ByteTables table(levels);
  for (int r = 0; r < R; r++) {
    const float* query = rows.query + r * rows.size;
    const Scaled by = scaled(query, rows.size, most < 32767 ? most : 32767);
    shorten_to(query, rows.size, by.up, natural);
    for (int64_t c = 0; c < rows.size; c += 32) {
      const __m256i a = load<__m256i>(natural + c), b = load<__m256i>(natural + c + 16);
      store(asked[r] + c, _mm256_permute2x128_si256(a, b, 0x20)), store(asked[r] + c + 16, _mm256_permute2x128_si256(a, b, 0x31));
    }
    scale[r] = unit * by.back;
  }
  for (int64_t first = 0; first < count; first += T) {
    const char* token[T];
    I sum_of[W];
    UNROLLED for (int i = 0; i < T; i++) token[i] = codes + (first + i < count ? first + i : count - 1) * stride;
    UNROLLED for (int i = 0; i < W; i++) sum_of[i] = I{};
    for (int64_t c = 0; c < bytes; c += 32) {
      UNROLLED for (int i = 0; i < T; i++) soon(token[i] + c);
      for (int64_t kind = 0; kind < 2; kind++) {
        __m256i a[T], b[T];
        UNROLLED for (int i = 0; i < T; i++) table.pick(four_bits(token[i] + c, kind), a[i], b[i]);
        UNROLLED for (int r = 0; r < R; r++) {
          const int16_t* query = asked[r] + kind * bytes + c;
          UNROLLED for (int i = 0; i < T; i++)
            sum_of[r * T + i] += (I)_mm256_madd_epi16(a[i], load<__m256i>(query)) + (I)_mm256_madd_epi16(b[i], load<__m256i>(query + 16));
        }
      }
    }
    float all_of[W];
    // As floats, since all lanes together may be more than 32 bits hold.
    F found[W];
    UNROLLED for (int i = 0; i < W; i++) found[i] = __builtin_convertvector(sum_of[i], F);
    F by;
    UNROLLED for (int i = 0; i < W; i++) by[i] = scale[i / T];
    store(all_of, sums(found) * by);
    store_rows<R>(to + first, apart, all_of, count - first);
  }
}

// Adds levels times weights of 16 bits, which have the tokens' scales, for 16 PARTS of the 32 channels of a vector.
template <int R, int PARTS>
inline void level_sums_of(const Weights* all_of, const ByteTables& table, const char* codes, int64_t stride, int64_t count,
                          int64_t kind, int part, bool asks, const char*& next, float unit, float* out, int64_t size) {
  I sum_of[R][2 * PARTS];
  UNROLLED for (int r = 0; r < R; r++) UNROLLED for (int i = 0; i < 2 * PARTS; i++) sum_of[r][i] = I{};
  for (int64_t t = 0; t < count; t += 2, codes += 2 * stride) {
    __m256i a[2], b[2];
    if (asks) ask<64>(next);
    table.pick(four_bits(codes, kind), a[0], a[1]), table.pick(four_bits(t + 1 < count ? codes + stride : codes, kind), b[0], b[1]);
    UNROLLED for (int i = 0; i < PARTS; i++) {
      const __m256i mine = PARTS == 2 ? a[i] : part ? a[1] : a[0], other = PARTS == 2 ? b[i] : part ? b[1] : b[0];
      const __m256i low = _mm256_unpacklo_epi16(mine, other), high = _mm256_unpackhi_epi16(mine, other);
      UNROLLED for (int r = 0; r < R; r++)
        add_pairs(sum_of[r][2 * i], low, all_of[r].of_tokens + t), add_pairs(sum_of[r][2 * i + 1], high, all_of[r].of_tokens + t);
    }
  }
  for (int r = 0; r < R; r++)
    UNROLLED for (int i = 0; i < 2 * PARTS; i++)
      for (int half = 0; half < 2; half++)
        for (int j = 0; j < 4; j++)
          out[r * size + 16 * half + 8 * part + 4 * i + j] += (float)sum_of[r][i][4 * half + j] * (all_of[r].scale * unit);
}

// The same for all channels, in their order.
template <int R>
APART void short_level_sums(const float* weights, int64_t apart, const char* codes, int64_t stride, int64_t count,
                            const Scales& scales, float* out, int64_t size) {
  constexpr int PARTS = R == 4 ? 1 : 2;
  alignas(32) int16_t levels[32];
  const float unit = whole_levels(scales.levels, OF_VALUES, levels);
  const ByteTables table(levels);
  const char* next = codes + VALUES_AHEAD;
  for (int64_t first = 0; first < count; first += SHORT_RUN, codes += SHORT_RUN * stride) {
    Weights all_of[R];
    const int64_t some = count - first < SHORT_RUN ? count - first : SHORT_RUN;
    for (int r = 0; r < R; r++) all_of[r].fill(weights + r * apart + first, scales.step + first, nullptr, 0, some, ROOM);
    for (int64_t c = 0; c < size / 2; c += 32)
      for (int64_t kind = 0; kind < 2; kind++)
        UNROLLED for (int part = 0; part < 3 - PARTS; part++)
          level_sums_of<R, PARTS>(all_of, table, codes + c, stride, some, kind, part, kind == 0 && part == 0, next, unit,
                                  out + kind * (size / 2) + c, size);
  }
}
