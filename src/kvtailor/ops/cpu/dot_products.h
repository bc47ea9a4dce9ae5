// Products of queries with packed codes in integers, on ARM's processors with dot products.
//
// A row's query becomes 16 bits of its own scale, as in integers.h, and these become bytes, as in bytes.h. Both factors
// of an operation have a sign or none: codes of 8 bits are taken 128 lower, and what that takes from a sum is put back.
#pragma once

#include "bytes.h"

// Of R rows with 8 / R tokens at a time; tokens past `count` repeat the last. `to` has BLOCK floats for each row.
template <int BITS, int R>
APART void products_of_bytes(const CutQuery* asked, int64_t bytes, const char* codes, int64_t stride, int64_t count,
                             float* to) {
  constexpr int T = 8 / R, KINDS = 8 / BITS, LOWER = BITS == 8 ? 128 : 0;
  for (int64_t first = 0; first < count; first += T) {
    const char* token[T];
    int32x4_t high[R][T]{}, low[R][T]{};
    UNROLLED for (int i = 0; i < T; i++) token[i] = codes + (first + i < count ? first + i : count - 1) * stride;
    for (int64_t c = 0; c < bytes; c += PART) {
      U words[T];
      UNROLLED for (int i = 0; i < T; i++) words[i] = load<U>(token[i] + c);
      if (c % 64 == 0) {
        UNROLLED for (int i = 0; i < T; i++) soon(token[i] + c);
      }
      UNROLLED for (int k = 0; k < KINDS; k++) {
        int8x16_t mine[T];
        UNROLLED for (int i = 0; i < T; i++) mine[i] = (int8x16_t)(kind_of<BITS>(words[i], k) ^ LOWER * 0x01010101u);
        UNROLLED for (int r = 0; r < R; r++) {
          const int8x16_t highs = vld1q_s8(asked[r].high + k * bytes + c), lows = vld1q_s8(asked[r].low + k * bytes + c);
          UNROLLED for (int i = 0; i < T; i++) {
            high[r][i] = vdotq_s32(high[r][i], mine[i], highs);
            low[r][i] = vdotq_s32(low[r][i], mine[i], lows);
          }
        }
      }
    }
    I all[8];
    float found[8];
    UNROLLED for (int i = 0; i < 8; i++) all[i] = (I)(((U)high[i / T][i % T] << 8) + (U)low[i / T][i % T]);
    UNROLLED for (int i = 0; i < 8; i += W) {
      I lower;
      F scale;
      UNROLLED for (int j = 0; j < W; j++) lower[j] = LOWER * asked[(i + j) / T].all, scale[j] = asked[(i + j) / T].scale;
      store(found + i, __builtin_convertvector(sums(all + i) + lower, F) * scale);
    }
    store_rows<R, T>(to + first, BLOCK, found, count - first);
  }
}

// Products of the rows' queries with `count` tokens from `codes` on; `to` has BLOCK floats for each row.
inline void products_in_integers(const CutQuery* asked, int64_t rows, const Side& side, const char* codes, int64_t count,
                                 float* to) {
  const int64_t bytes = side.size * side.bits / 8, stride = side.slot_bytes;
  in_rows(rows, [&](auto some, int64_t r) {
    constexpr int R = decltype(some)::ROWS;
    if (side.bits == 2) products_of_bytes<2, R>(asked + r, bytes, codes, stride, count, to + r * BLOCK);
    else if (side.bits == 4) products_of_bytes<4, R>(asked + r, bytes, codes, stride, count, to + r * BLOCK);
    else products_of_bytes<8, R>(asked + r, bytes, codes, stride, count, to + r * BLOCK);
  });
}

// Levels of 16 bits by their two bytes.
struct LevelTable {
  uint8x16_t low, high;

  explicit LevelTable(const int16_t* levels) {
    const uint8x16x2_t bytes = vld2q_u8((const uint8_t*)levels);
    low = bytes.val[0], high = bytes.val[1];
  }

  // Of 16 codes, the levels of the first 8, then those of the last.
  void pick(U codes, int16x8_t& first, int16x8_t& last) const {
    const uint8x16_t lows = vqtbl1q_u8(low, (uint8x16_t)codes), highs = vqtbl1q_u8(high, (uint8x16_t)codes);
    first = (int16x8_t)vzip1q_u8(lows, highs), last = (int16x8_t)vzip2q_u8(lows, highs);
  }
};

// Products of R rows with codes of 4 bits that stand for levels, W / R tokens at a time; queries in the order of their
// channels. A token's scale is left to the caller. Levels have more than 8 bits, so that two products of 16 bits go to a
// lane where four of bytes do above.
template <int R>
APART void short_level_products(Rows rows, const char* codes, int64_t stride, int64_t count, const Scales& scales, float* to,
                                int64_t apart) {
  constexpr int T = W / R;
  const int64_t bytes = rows.size / 2, most = 0x7fffffff / (MOST_OF_KEYS * rows.size / (2 * W));
  alignas(16) int16_t asked[R][MOST_SHORT], levels[32];
  float scale[W];
  const float unit = whole_levels(scales.levels, OF_KEYS, levels);
  const LevelTable table(levels);
  for (int r = 0; r < R; r++) {
    const float* query = rows.query + r * rows.size;
    const Scaled by = scaled(query, rows.size, most < 32767 ? most : 32767);
    shorten_to(query, rows.size, by.up, asked[r]);
    for (int i = 0; i < T; i++) scale[r * T + i] = by.back * unit;
  }
  for (int64_t first = 0; first < count; first += T) {
    const char* token[T];
    int32x4_t even[W]{}, odd[W]{};
    UNROLLED for (int i = 0; i < T; i++) token[i] = codes + (first + i < count ? first + i : count - 1) * stride;
    for (int64_t c = 0; c < bytes; c += PART) {
      U words[T];
      UNROLLED for (int i = 0; i < T; i++) words[i] = load<U>(token[i] + c);
      if (c % 64 == 0) {
        UNROLLED for (int i = 0; i < T; i++) soon(token[i] + c);
      }
      UNROLLED for (int kind = 0; kind < 2; kind++) {
        int16x8_t a[T], b[T];
        UNROLLED for (int i = 0; i < T; i++) table.pick(kind_of<4>(words[i], kind), a[i], b[i]);
        UNROLLED for (int r = 0; r < R; r++) {
          const int16_t* query = asked[r] + kind * bytes + c;
          const int16x8_t x = vld1q_s16(query), y = vld1q_s16(query + 8);
          UNROLLED for (int i = 0; i < T; i++) {
            int32x4_t &one = even[r * T + i], &other = odd[r * T + i];
            one = vmlal_s16(one, vget_low_s16(a[i]), vget_low_s16(x)), other = vmlal_high_s16(other, a[i], x);
            one = vmlal_s16(one, vget_low_s16(b[i]), vget_low_s16(y)), other = vmlal_high_s16(other, b[i], y);
          }
        }
      }
    }
    // As floats, since all lanes together may be more than 32 bits hold.
    F found[W];
    UNROLLED for (int i = 0; i < W; i++) found[i] = __builtin_convertvector((I)even[i], F) + __builtin_convertvector((I)odd[i], F);
    float all_of[W];
    store(all_of, sums(found) * load<F>(scale));
    store_rows<R>(to + first, apart, all_of, count - first);
  }
}

// Adds levels times weights of 16 bits, which have the tokens' scales, in the order of channels.
template <int R>
APART void short_level_sums(const float* weights, int64_t apart, const char* codes, int64_t stride, int64_t count,
                            const Scales& scales, float* out, int64_t size) {
  alignas(16) int16_t levels[32];
  const float unit = whole_levels(scales.levels, OF_VALUES, levels);
  const LevelTable table(levels);
  const char* next = codes + VALUES_AHEAD;
  for (int64_t first = 0; first < count; first += SHORT_RUN, codes += SHORT_RUN * stride) {
    Weights all_of[R];
    const int64_t some = count - first < SHORT_RUN ? count - first : SHORT_RUN;
    fill_rows<R>(all_of, 1, weights + first, apart, scales.step + first, nullptr, 0, some, ROOM);
    for (int64_t c = 0; c < size / 2; c += PART)
      for (int kind = 0; kind < 2; kind++) {
        int32x4_t sum_of[R][4]{};
        for (int64_t t = 0; t < some; t += 4) {
          int16x4_t numbers[R];
          if (kind == 0) ask<4 * PART>(next);
          UNROLLED for (int r = 0; r < R; r++) numbers[r] = vld1_s16(all_of[r].of_tokens + t);
          each_below<4>([&](auto each) INLINE {
            constexpr int i = decltype(each)();
            int16x8_t a, b;
            table.pick(kind_of<4>(load<U>(codes + (t + i < some ? t + i : some - 1) * stride + c), kind), a, b);
            UNROLLED for (int r = 0; r < R; r++) {
              sum_of[r][0] = vmlal_lane_s16(sum_of[r][0], vget_low_s16(a), numbers[r], i);
              sum_of[r][1] = vmlal_high_lane_s16(sum_of[r][1], a, numbers[r], i);
              sum_of[r][2] = vmlal_lane_s16(sum_of[r][2], vget_low_s16(b), numbers[r], i);
              sum_of[r][3] = vmlal_high_lane_s16(sum_of[r][3], b, numbers[r], i);
            }
          });
        }
        UNROLLED for (int r = 0; r < R; r++)
          UNROLLED for (int i = 0; i < 4; i++) {
            float* at = out + r * size + kind * (size / 2) + c + i * W;
            store(at, load<F>(at) + __builtin_convertvector((I)sum_of[r][i], F) * (all_of[r].scale * unit));
          }
      }
  }
}
