// Products of queries with packed codes in integers, on processors with AVX2 and without VNNI.
//
// A row's query becomes 16 bits of its own scale, as in integers.h, and codes become 16 bits by a shift and a mask; two
// operations make and add 16 products, where floats take two, and as many again for every 8 codes to become numbers.
#pragma once

#include "short_levels.h"

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

  // Numbers in the order of their channels.
  static void put(const int16_t* natural, int64_t size, int64_t bits, int16_t* to) {
    const int64_t kinds = 8 / bits, bytes = size / kinds;
    for (int64_t c = 0; c < bytes; c += sizeof(U), to += kinds * 16)
      for (int64_t kind = 0; kind < kinds; kind++, to += 16) part(natural + kind * bytes + c, to, to + kinds * 16);
  }

  void cut(const float* query, int64_t size, int64_t bits, Scaled by) {
    alignas(32) int16_t natural[MOST_SHORT];
    shorten_to(query, size, by.up, natural);
    put(natural, size, bits, numbers);
    scale = by.back;
  }

  friend struct Shares;
};

// What the steps of a run of tokens are of the greatest ones of all runs of a block, in 16 bits, in the order of a query:
// queries become whole numbers times the greatest steps once for the block, and these times the shares for each run. A run
// with steps of 1 / k of the greatest has log2(k) bits less. Models' runs differ by 6 at most (SmolLM2, Qwen2.5); where one
// differs by more than `WIDEST`, each run has queries of its own.
struct Shares {
  static constexpr float WIDEST = 8;
  float greatest[MOST_SHORT], least[MOST_SHORT], up[MOST_SHORT];
  alignas(32) int16_t numbers[MOST_SHORT];

  void begin(int64_t size) {
    for (int64_t c = 0; c < size; c += W) store(greatest + c, F{}), store(least + c, F{} + __builtin_inff());
  }

  // Steps of one more run.
  void see(const float* step, int64_t size) {
    for (int64_t c = 0; c < size; c += W) {
      const F mine = load<F>(step + c), before = load<F>(least + c);
      store(greatest + c, largest_bits(load<I>(greatest + c), mine));
      // A step of 0 has a share of 0, which is right.
      store(least + c, mine > 0.f && mine < before ? mine : before);
    }
  }

  // Whether shares are near enough in all channels.
  bool end(int64_t size) {
    F near = F{} + 1.f;
    for (int64_t c = 0; c < size; c += W) {
      const F most = load<F>(greatest + c);
      store(up + c, most > 0.f ? 32767.f / most : F{});
      near = most <= WIDEST * load<F>(least + c) ? near : F{};
    }
    return sum(near) == (float)W;
  }

  void fill(const float* step, int64_t size, int64_t bits) {
    alignas(32) int16_t natural[MOST_SHORT];
    for (int64_t c = 0; c < size; c += 2 * W)
      store_shorts(natural + c, rounded(load<F>(step + c) * load<F>(up + c)), rounded(load<F>(step + c + W) * load<F>(up + c + W)));
    CutQuery::put(natural, size, bits, numbers);
  }

  // Makes a query that has the greatest steps one of the run. Gives the sum of the query as it was times the minima.
  float times(const CutQuery& whole, const float* query, const float* low, int64_t size, CutQuery& to) const {
    F lows{}, others{};
    for (int64_t c = 0; c < size; c += 2 * W) {
      store(to.numbers + c, _mm256_mulhrs_epi16(load<__m256i>(whole.numbers + c), load<__m256i>(numbers + c)));
      lows += load<F>(query + c) * load<F>(low + c), others += load<F>(query + c + W) * load<F>(low + c + W);
    }
    to.scale = whole.scale * (32768.f / 32767.f);
    return sum(lows + others);
  }
};

// Of R rows with W / R tokens, row by row; tokens past the last repeat it.
template <int BITS, int R>
INLINE inline I products_of_words(const CutQuery* asked, int64_t bytes, const char* codes, int64_t stride, const char* last) {
  constexpr int T = W / R, N = 16 / BITS;
  constexpr uint32_t MASK = (1u << BITS) - 1;
  const char* token[T];
  I sum_of[W]{};
  each_below<T>([&](auto i) INLINE { token[i] = codes + i * stride < last ? codes + i * stride : last; });
  const int16_t* query = asked->numbers;
  for (int64_t c = 0; c < bytes; c += sizeof(U), query += N * 16) {
    __m256i words[T];
    each_below<T>([&](auto i) INLINE { words[i] = load<__m256i>(token[i] + c); });
    each_below<N>([&](auto k) INLINE {
      S mine[T];
      each_below<T>([&](auto i) INLINE {
        mine[i] = (S)_mm256_srli_epi16(words[i], k * BITS);
        if constexpr (k + 1 < N) mine[i] &= (int16_t)MASK;
      });
      each_below<R>([&](auto r) INLINE { add_pairs_of<T>(sum_of + r * T, mine, query + r * (int64_t)(sizeof(CutQuery) / 2) + k * 16); });
    });
  }
  return sums(sum_of);
}

// Of R rows with `count` tokens.
template <int BITS, int R>
APART void products_of_rows(const CutQuery* asked, int64_t bytes, const char* codes, int64_t stride, int64_t count, float* to) {
  const char* last = codes + (count - 1) * stride;
  float scale[R];
  for (int r = 0; r < R; r++) scale[r] = asked[r].scale;
  over_tokens<R>(count, scale, to, BLOCK, codes, stride, [&](int64_t first) INLINE {
    return __builtin_convertvector((products_of_words<BITS, R>(asked, bytes, codes + first * stride, stride, last)), F);
  });
}

// Products of the rows' queries with `count` tokens from `codes` on; `to` has BLOCK floats for each row.
inline void products_in_integers(const CutQuery* asked, int64_t rows, const Side& side, const char* codes, int64_t count,
                                 float* to) {
  const int64_t bytes = side.size * side.bits / 8, stride = side.slot_bytes;
  in_rows(rows, [&](auto some, int64_t r) {
    constexpr int R = decltype(some)::ROWS;
    if (side.bits == 2) products_of_rows<2, R>(asked + r, bytes, codes, stride, count, to + r * BLOCK);
    else if (side.bits == 4) products_of_rows<4, R>(asked + r, bytes, codes, stride, count, to + r * BLOCK);
    else products_of_rows<8, R>(asked + r, bytes, codes, stride, count, to + r * BLOCK);
  });
}

// As `products_of_words`; queries stand in the order in which levels are picked, MOST_SHORT numbers from one another.
template <int R>
INLINE inline F level_products_of(const int16_t* asked, const ByteTables& table, int64_t bytes, const char* codes, int64_t stride,
                                  const char* last) {
  constexpr int T = W / R;
  const char* token[T];
  I sum_of[W]{};
  each_below<T>([&](auto i) INLINE { token[i] = codes + i * stride < last ? codes + i * stride : last; });
  for (int64_t c = 0; c < bytes; c += sizeof(U))
    each_below<2>([&](auto kind) INLINE {
      const int16_t* query = asked + kind * bytes + c;
      S a[T], b[T];
      each_below<T>([&](auto i) INLINE { table.pick(four_bits(load<U>(token[i] + c), kind), a[i], b[i]); });
      each_below<R>([&](auto r) INLINE {
        add_pairs_of<T>(sum_of + r * T, a, query + r * MOST_SHORT), add_pairs_of<T>(sum_of + r * T, b, query + r * MOST_SHORT + 16);
      });
    });
  // As floats, since all lanes together may be more than 32 bits hold.
  F found[W];
  each_below<W>([&](auto i) INLINE { found[i] = __builtin_convertvector(sum_of[i], F); });
  return sums(found);
}

// Products of R rows with codes of 4 bits that stand for levels; queries in the order of their channels. A token's scale
// is left to the caller.
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
  const char* last = codes + (count - 1) * stride;
  over_tokens<R>(count, scale, to, apart, codes, stride, [&](int64_t first) INLINE {
    return level_products_of<R>(asked[0], table, bytes, codes + first * stride, stride, last);
  });
}
