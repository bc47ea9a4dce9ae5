// Products in integers with codes whose tokens are lanes, where the machine has VNNI.
//
// 16 bytes of a token at a time are moved while they are packed, so that no lane stays empty, nothing is summed across
// lanes, and channels keep their order.
#pragma once

#include "integers.h"
#include "layouts.h"

// The words of a part of 16 tokens: lane t of vector j is word j of token t. In steps, so that a loop may move the next
// part while it multiplies one: a core looks ahead too few operations to do so by itself.
struct WordsOfTokens {
  __m512i mixed[4];

  // Reads four of the tokens; `step` is 0 to 3.
  void read(const char* from, int64_t stride, int step) {
    from += step * stride;
    mixed[step] = four_parts(from, from + 4 * stride, from + 8 * stride, from + 12 * stride);
  }

  void turn(U* to) const {
    const __m512i a = _mm512_maskz_unpacklo_epi32(0xffff, mixed[0], mixed[1]);
    const __m512i b = _mm512_maskz_unpacklo_epi32(0xffff, mixed[2], mixed[3]);
    const __m512i c = _mm512_maskz_unpackhi_epi32(0xffff, mixed[0], mixed[1]);
    const __m512i d = _mm512_maskz_unpackhi_epi32(0xffff, mixed[2], mixed[3]);
    to[0] = (U)_mm512_maskz_unpacklo_epi64(0xff, a, b), to[1] = (U)_mm512_maskz_unpackhi_epi64(0xff, a, b);
    to[2] = (U)_mm512_maskz_unpacklo_epi64(0xff, c, d), to[3] = (U)_mm512_maskz_unpackhi_epi64(0xff, c, d);
  }
};

// All of them at once.
inline void words_of_tokens(const char* from, int64_t stride, U* to) {
  WordsOfTokens words;
  UNROLLED for (int i = 0; i < 4; i++) words.read(from, stride, i);
  words.turn(to);
}

// Of R rows with 16 tokens of `bytes` bytes at a time, `blocks` times; `to` has BLOCK floats for each row.
template <int BITS, int R>
APART void products_of_lanes(const CutQuery* asked, int64_t bytes, const char* codes, int64_t stride, int64_t blocks,
                              float* to) {
  // A sum takes a product every fourth cycle: where rows are few, each has several.
  constexpr int KINDS = 8 / BITS, SETS = R >= 4 ? 1 : 4 / R;
  WordsOfTokens words;
  U now[4];
  UNROLLED for (int i = 0; i < 4; i++) words.read(codes, stride, i);
  words.turn(now);
  for (int64_t block = 0; block < blocks; block++, codes += W * stride, to += W) {
    U high[SETS][R]{}, low[SETS][R]{};
    for (int64_t c = 0; c < bytes; c += PART) {
      const char* behind = block + 1 < blocks ? codes + W * stride : codes;
      const char* next = c + PART < bytes ? codes + c + PART : behind;
      if (c % 64 == 0)
        for (int64_t t = 0; t < W; t++) soon(codes + t * stride + c);
      each_below<4>([&](auto j) INLINE {
        words.read(next, stride, j);
        each_below<KINDS>([&](auto kind) INLINE {
          constexpr int SET = (j * KINDS + kind) % SETS;
          const U mine = kind_of<BITS>(now[j], kind);
          const int64_t at = kind * bytes + c + 4 * j;
          each_below<R>([&](auto r) INLINE {
            add_products(high[SET][r], mine, asked[r].high + at);
            add_products(low[SET][r], mine, asked[r].low + at);
          });
        });
      });
      words.turn(now);
    }
    each_below<R>([&](auto r) INLINE {
      UNROLLED for (int i = 1; i < SETS; i++) high[0][r] += high[i][r], low[0][r] += low[i][r];
      store(to + r * BLOCK, joined(high[0][r], low[0][r]) * asked[r].scale);
    });
  }
}

template <int BITS, int R>
void products_of_rows(const CutQuery* asked, int64_t bytes, const char* codes, int64_t stride, int64_t count, float* to) {
  const int64_t whole = count / W * W;
  if (whole) products_of_lanes<BITS, R>(asked, bytes, codes, stride, whole / W, to);
  if (whole == count) return;
  // The last tokens are fewer than lanes: the last of them is repeated.
  char copies[W * MOST_SHORT / (8 / BITS)];
  float found[R * BLOCK];
  for (int64_t t = 0; t < W; t++)
    memcpy(copies + t * bytes, codes + (whole + t < count ? whole + t : count - 1) * stride, (size_t)bytes);
  products_of_lanes<BITS, R>(asked, bytes, copies, bytes, 1, found);
  for (int r = 0; r < R; r++) memcpy(to + r * BLOCK + whole, found + r * BLOCK, (size_t)(count - whole) * sizeof(float));
}

template <int BITS, int R>
inline void products_of_tokens(const CutQuery* asked, const Side& side, const char* codes, int64_t count, float* to) {
  const int64_t bytes = side.size * BITS / 8;
  // A single row has too few products to pay for moving a token of whole vectors.
  if constexpr (R == 1 && BITS > 2)
    if (folds(side) == 1) return byte_products<BITS>(*asked, bytes, codes, side.slot_bytes, count, to);
  products_of_rows<BITS, R>(asked, bytes, codes, side.slot_bytes, count, to);
}

// Products of the rows' queries with `count` tokens from `codes` on; `to` has BLOCK floats for each row.
inline void products_in_integers(const CutQuery* asked, int64_t rows, const Side& side, const char* codes, int64_t count,
                              float* to) {
  in_rows(rows, [&](auto some, int64_t r) {
    constexpr int R = decltype(some)::ROWS;
    if (side.bits == 2) products_of_tokens<2, R>(asked + r, side, codes, count, to + r * BLOCK);
    else if (side.bits == 4) products_of_tokens<4, R>(asked + r, side, codes, count, to + r * BLOCK);
    else products_of_tokens<8, R>(asked + r, side, codes, count, to + r * BLOCK);
  });
}
