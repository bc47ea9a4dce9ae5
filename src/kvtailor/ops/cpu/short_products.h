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
  APART void fill(const float* query, int64_t size, int64_t bits) { cut(query, size, bits, scaled(query, size, MOST_CUT)); }

  // The query times the steps of its channels. Gives the sum of the query times their minima.
  APART float fill_times(const float* query, const float* step, const float* low, int64_t size, int64_t bits) {
    float times[MOST_SHORT];
    I top{};
    F lows{};
    for (int64_t c = 0; c < size; c += W) {
      const F mine = load<F>(query + c), x = mine * load<F>(step + c);
      store(times + c, x);
      top = largest_bits(top, x), lows += mine * load<F>(low + c);
    }
    cut(times, size, bits, scaled_by(top, MOST_CUT));
    return sum(lows);
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
    for (int64_t c = 0; c < size; c += W) store_shorts(natural + c, rounded(load<F>(query + c) * by.up));
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
  float all_of[W];
  store(all_of, __builtin_convertvector(sums(sum_of), F));
  const int64_t filled = count < T ? count : T;
  UNROLLED for (int r = 0; r < R; r++)
    for (int64_t i = 0; i < filled; i++) to[r * BLOCK + i] = all_of[r * T + i] * asked[r].scale;
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
