// Attention over codes of 4 bits with a scale for each block of channels (mxfp4, nvfp4) in integers.
//
// 16 bytes of a token at a time are moved as in token_lanes.h, so that no lane sees two blocks: of keys a lane is a
// token, of values a channel. Levels of E2M1, doubled, are whole numbers of 16 bits; two products go to a lane.
#pragma once

#include "token_lanes.h"

constexpr int64_t MOST_BLOCKS = W, RUN = 2 * W;  // scales of a token; tokens that are turned together

// Whether a side is read so.
inline bool in_blocks(const Side& side) {
  if (side.kind != BLOCK_LEVELS || !((const Blocks*)side.low)->coarse || side.size > MOST_SHORT) return false;
  return whole_words(side) && folds(side) == 1 && side.group % PART == 0 && side.size / 2 % side.group == 0;
}

// Four scales of each of 16 tokens, from number `first` on.
inline U four_scales(const uint8_t* from, int64_t groups, int64_t first) {
  if (groups == 4) return load<U>(from);
  if (groups == 8)
    return (U)_mm512_permutex2var_epi32(load<__m512i>(from), (__m512i)(numbered() * 2 + (int32_t)first / 4),
                                        load<__m512i>(from + sizeof(U)));
  U all{};
  const int64_t some = groups - first < 4 ? groups - first : 4;
  for (int i = 0; i < W; i++) memcpy((char*)&all + 4 * i, from + i * groups + first, (size_t)some);
  return all;
}

// Scales of a block's tokens, (groups, BLOCK), zeros behind them to a whole run.
APART PLAIN_LOOPS void steps_of_blocks(const Side& side, int64_t place, int64_t count, float* to) {
  const int64_t groups = groups_of(side), bytes = count * groups, wide = (count + RUN - 1) / RUN * RUN;
  alignas(64) uint8_t copies[BLOCK * MOST_BLOCKS];
  const uint8_t* from = (const uint8_t*)side.step + place * groups;
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + bytes + i, 0, 2);
  memcpy(copies, from, (size_t)bytes);
  memset(copies + bytes, 0, (size_t)((wide - count) * groups));
  const bool narrow = side.scales == E4M3;
  const F unit = all(narrow ? 1.329227995784916e36f : 1.f);  // see scales_of_levels
  for (int64_t t = 0; t < wide; t += W)
    for (int64_t g = 0; g < groups; g += 4) {
      const U four = four_scales(copies + t * groups, groups, g);
      UNROLLED for (int i = 0; i < 4; i++) {
        if (g + i >= groups) break;
        const F step = (F)((four >> (8 * i) & 0xff) << (narrow ? 20 : 23)) * unit;
        // See of_high_bits.
        store(to + (g + i) * BLOCK + t, step + (step - step));
      }
    }
}

// What scales of tokens are multiplied with, zeros behind them; false where there is nothing.
inline bool outer_of_blocks(const Side& side, int64_t lane, int64_t slots, int64_t first, int64_t count, float* to) {
  const Blocks& blocks = *(const Blocks*)side.low;
  if (!blocks.outer) return false;
  for (int64_t t = 0; t < BLOCK; t++) to[t] = 0;
  for (int64_t t = first, end; t < first + count; t = end) {
    end = side.row ? t + 1 : (t / blocks.span + 1) * blocks.span;
    if (end > first + count) end = first + count;
    const float outer = outer_at(side, lane, slots, t);
    for (int64_t i = t; i < end; i++) to[i - first] = outer;
  }
  return true;
}

// Tokens of a run, or copies of those that there are, of which the last is repeated.
struct Run {
  const char* from;
  int64_t apart;

  Run(const char* codes, int64_t stride, int64_t count, int64_t tokens, int64_t bytes, char* copies) {
    from = codes, apart = stride;
    if (count >= tokens) return;
    for (int64_t t = 0; t < tokens; t++)
      memcpy(copies + t * bytes, codes + (t < count ? t : count - 1) * stride, (size_t)bytes);
    from = copies, apart = bytes;
  }
};

// Products of R rows' queries with keys; `to` has BLOCK floats for each row.
template <int R>
APART PLAIN_LOOPS void block_products(const float* query, const Side& side, const char* codes, const float* steps,
                                      int64_t count, float* to) {
  constexpr int SETS = R == 4 ? 1 : 2;
  constexpr int64_t TOKENS = SETS * W;
  const int64_t size = side.size, bytes = size / 2, stride = side.slot_bytes;
  alignas(64) int32_t asked[R * MOST_SHORT / 2];
  alignas(64) int16_t levels[2 * W];
  alignas(64) char copies[TOKENS * MOST_SHORT / 2];
  float scale[R];
  const float unit = whole_levels(levels_of(side), DOUBLED, levels);
  for (int r = 0; r < R; r++) scale[r] = unit * shorten(query + r * size, size, 2, 32767, asked + r * bytes);
  const __m512i table = load<__m512i>(levels);
  for (int64_t first = 0; first < count; first += TOKENS) {
    const int64_t filled = count - first < TOKENS ? count - first : TOKENS;
    const Run run(codes + first * stride, stride, filled, TOKENS, bytes, copies);
    F found[R][SETS]{};
    I mine[R][2][SETS]{};
    for (int64_t c = 0; c < bytes; c += PART) {
      if (c % 64 == 0)
        for (int64_t t = 0; t < TOKENS; t++) soon(run.from + t * run.apart + c);
      U words[SETS][4];
      UNROLLED for (int b = 0; b < SETS; b++) words_of_tokens(run.from + b * W * run.apart + c, run.apart, words[b]);
      const int32_t* numbers = asked + c / 64 * 64 + c % 64 / 4;
      UNROLLED for (int j = 0; j < 4; j++)
        UNROLLED for (int k = 0; k < 4; k++)
          UNROLLED for (int b = 0; b < SETS; b++) {
            const __m512i both = _mm512_permutexvar_epi16((__m512i)(words[b][j] >> (k * 4)), table);
            UNROLLED for (int r = 0; r < R; r++) add_pairs(mine[r][k % 2][b], both, numbers + r * bytes + k * W + j);
          }
      if ((c + PART) % side.group) continue;
      UNROLLED for (int kind = 0; kind < 2; kind++) {
        const float* step = steps + (kind * bytes + c) / side.group * BLOCK + first;
        UNROLLED for (int b = 0; b < SETS; b++)
          UNROLLED for (int r = 0; r < R; r++) {
            found[r][b] += __builtin_convertvector(mine[r][kind][b], F) * load<F>(step + b * W);
            mine[r][kind][b] = I{};
          }
      }
    }
    UNROLLED for (int r = 0; r < R; r++) {
      float all_of[TOKENS];
      UNROLLED for (int b = 0; b < SETS; b++) store(all_of + b * W, found[r][b] * scale[r]);
      memcpy(to + r * BLOCK + first, all_of, (size_t)filled * sizeof(float));
    }
  }
}

// Weights of R rows times scales as whole numbers: those of the tokens t and t + W of a run are a pair.
template <int R> struct BlockWeights {
  alignas(64) int32_t pairs[R * MOST_BLOCKS * BLOCK / 2];  // (R, groups, BLOCK / 2)
  float back[R * MOST_BLOCKS];                              // what makes them as large again, (R, MOST_BLOCKS)

  // The high halves of floats of a run are about their logarithms.
  static __m512i high_halves(const float* from) {
    return _mm512_mask_mov_epi16((__m512i)(load<U>(from) >> 16), 0xaaaaaaaau, load<__m512i>(from + W));
  }

  template <int I> static __m256i half_of(__m512i v) { return _mm512_maskz_extracti64x4_epi64(0xff, v, I); }

  static int32_t highest_of(__m512i v) {
    const __m256i half = _mm256_max_epu16(half_of<0>(v), half_of<1>(v));
    const __m128i quarter = _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    return 0xffff - _mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(quarter, _mm_set1_epi8(-1))), 0);
  }

  APART PLAIN_LOOPS void fill(const float* weights, int64_t apart, const float* steps, int64_t groups, int64_t count) {
    constexpr int32_t ONE = 0x3f80, ENDLESS = 0x7f80, LEAST = 0x0b80;  // 1, infinity, 2^-104
    constexpr float MOST = 28700;  // times 1.14, by which a product may be more than its logarithm says: 15 bits
    __m512i high[R][BLOCK / RUN];
    alignas(64) float up[R * MOST_BLOCKS];
    bool finite[R];
    UNROLLED for (int r = 0; r < R; r++) {
      __m512i top{};
      for (int64_t t = 0; t < count; t += RUN)
        top = _mm512_max_epu16(top, high[r][t / RUN] = high_halves(weights + r * apart + t));
      finite[r] = highest_of(top) < ENDLESS;
    }
    for (int64_t g = 0; g < groups; g++) {
      __m512i most[R]{}, top{};
      for (int64_t t = 0; t < count; t += RUN) {
        const __m512i step = high_halves(steps + g * BLOCK + t);
        top = _mm512_max_epu16(top, step);
        UNROLLED for (int r = 0; r < R; r++)
          most[r] = _mm512_max_epu16(most[r], _mm512_adds_epu16(high[r][t / RUN], step));
      }
      const bool all_finite = highest_of(top) < ENDLESS;
      UNROLLED for (int r = 0; r < R; r++) {
        const int32_t sum = highest_of(most[r]) - ONE, bits = (sum < LEAST ? LEAST : sum < ENDLESS ? sum : ENDLESS) << 16;
        float bound;
        memcpy(&bound, &bits, 4);
        up[r * MOST_BLOCKS + g] = MOST / bound;
        back[r * MOST_BLOCKS + g] = all_finite && finite[r] ? bound / MOST : __builtin_nanf("");
      }
    }
    const __m512 whole = _mm512_set1_ps(12582912.f);  // 1.5 * 2^23: sums have whole numbers as their low bits
    for (int64_t g = 0; g < groups; g++)
      for (int64_t t = 0; t < count; t += RUN) {
        const __m512 a = load<__m512>(steps + g * BLOCK + t), b = load<__m512>(steps + g * BLOCK + t + W);
        UNROLLED for (int r = 0; r < R; r++) {
          const float* from = weights + r * apart + t;
          const __m512 by = _mm512_set1_ps(up[r * MOST_BLOCKS + g]);
          const __m512i first = (__m512i)_mm512_fmadd_ps(load<__m512>(from) * by, a, whole);
          const __m512i second = (__m512i)_mm512_fmadd_ps(load<__m512>(from + W) * by, b, whole);
          store(pairs + (r * groups + g) * (BLOCK / 2) + t / 2,
                _mm512_mask_mov_epi16(first, 0xaaaaaaaau, (__m512i)((U)second << 16)));
        }
      }
  }
};

// Adds weighted values of R rows.
template <int R>
APART PLAIN_LOOPS void block_sums(const float* weights, const Side& side, const char* codes, const float* steps,
                                  int64_t count, float* out) {
  constexpr int SETS = R == 4 ? 1 : 2;
  const int64_t size = side.size, bytes = size / 2, stride = side.slot_bytes, groups = groups_of(side);
  BlockWeights<R> numbers;
  alignas(64) int16_t levels[2 * W];
  alignas(64) char copies[RUN * MOST_SHORT / 2];
  const float unit = whole_levels(levels_of(side), DOUBLED, levels);
  const __m512i table = load<__m512i>(levels);
  const __m512i across = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
  const __m512i within = _mm512_set4_epi32(0x0f0b0703, 0x0e0a0602, 0x0d090501, 0x0c080400);
  numbers.fill(weights, BLOCK, steps, groups, count);
  const int64_t last = count / RUN * RUN;
  const Run rest(codes + last * stride, stride, count - last, RUN, bytes, copies);
  const char* next = codes + VALUES_AHEAD;
  for (int64_t c = 0; c < bytes; c += PART) {
    I sum_of[R][2][SETS]{};
    const int32_t* pairs[2];
    for (int kind = 0; kind < 2; kind++) pairs[kind] = numbers.pairs + (kind * bytes + c) / side.group * (BLOCK / 2);
    for (int64_t t = 0; t < count; t += RUN) {
      const int64_t apart = t < last ? stride : rest.apart;
      const char* from = (t < last ? codes + t * stride : rest.from) + c;
      for (int64_t i = 0; i < W; i += 2, from += 2 * apart) {
        ask<4 * PART>(next);
        const __m512i four = four_parts(from, from + apart, from + W * apart, from + (W + 1) * apart);
        const U turned = (U)_mm512_shuffle_epi8(_mm512_permutexvar_epi32(across, four), within);
        UNROLLED for (int k = 0; k < 4; k++) {
          const __m512i both = _mm512_permutexvar_epi16((__m512i)(turned >> (k * 4)), table);
          UNROLLED for (int r = 0; r < R; r++)
            add_pairs(sum_of[r][k % 2][k / 2 % SETS], both, pairs[k % 2] + r * groups * (BLOCK / 2) + t / 2 + i + k / 2);
        }
      }
    }
    UNROLLED for (int r = 0; r < R; r++)
      UNROLLED for (int kind = 0; kind < 2; kind++) {
        UNROLLED for (int i = 1; i < SETS; i++) sum_of[r][kind][0] += sum_of[r][kind][i];
        const float scale = unit * numbers.back[r * MOST_BLOCKS + (kind * bytes + c) / side.group];
        float* to = out + r * size + kind * bytes + c;
        store(to, load<F>(to) + __builtin_convertvector(sum_of[r][kind][0], F) * scale);
      }
  }
}

// Products of all rows' queries; `to` has BLOCK floats for each row.
inline void products_of_blocks(const float* query, int64_t rows, const Side& side, const char* codes,
                               const float* steps, int64_t count, float* to) {
  in_rows(rows, [&](auto some, int64_t r) {
    block_products<decltype(some)::ROWS>(query + r * side.size, side, codes, steps, count, to + r * BLOCK);
  });
}

// Adds weighted values of all rows; `weights` as `to` above, zeros behind them to a whole run.
inline void sums_of_blocks(const float* weights, int64_t rows, const Side& side, const char* codes, const float* steps,
                           int64_t count, float* out) {
  in_rows(rows, [&](auto some, int64_t r) {
    block_sums<decltype(some)::ROWS>(weights + r * BLOCK, side, codes, steps, count, out + r * side.size);
  });
}
