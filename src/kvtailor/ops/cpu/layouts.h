// How keys or values of some lanes lie in memory, and how a run of their tokens becomes floats.
#pragma once

#include "vectors.h"

// Raised, here and in library.py, with each change of a structure that Python fills, or of what a function takes or means.
constexpr int32_t ABI = 7;

enum Kind {
  FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2, TOKEN_CODES = 3, CHANNEL_CODES = 4, LEVEL_CODES = 5, BLOCK_LEVELS = 6,
  GRID_CODES = 7, SIGNED_LEVELS = 8, FITTED_LEVELS = 9
};

// Types of the scales of BLOCK_LEVELS: 8-bit floats without a sign, and powers of two.
enum { E4M3 = 3, E8M0 = 4 };

// Mirrored field by field in library.py.
struct Side {
  const void* data;    // states (m, s, c), or codes (m, s, bytes) as ops.quant packs them
  const void* step;    // tables of codes, of the type `scales`: (m, s, c / group) or (m, runs, c) or (rows, c)
  const void* low;     // as step; null: the code `zero` stands for 0. LEVEL_CODES: see padded_levels.
                       // GRID_CODES: float points (2^bits, 2), behind them all first numbers and all second ones
  const int32_t* row;  // (m, s) row of the tables of each token; null: slot i is in run i / group
  int64_t lane_bytes, slot_bytes;
  int64_t kind, scales, bits, size, group, runs, zero;
  int64_t signed_steps;  // of TOKEN_CODES: a step may be negative
};

// What `low` of BLOCK_LEVELS points to: codes of levels with a scale for each `group` channels of a token. attention.py
// writes it as six whole numbers.
struct Blocks {
  const float* levels;  // 2^bits
  const void* outer;    // (m, runs) or (rows): what the scales of a run of tokens are multiplied by; null: nothing
  int64_t kind;         // of these
  int64_t span;         // slots of such a run
  int64_t shift;        // of 8-bit floats: bits by which theirs become those of a float; 0: levels are looked up
  int64_t coarse;       // the cache has 16 bits
};

// What `low` of SIGNED_LEVELS points to. Such a state has half of its numbers as LEVEL_CODES, and behind them the signs of
// as many more, times a number for each token. attention.py writes it as five whole numbers.
struct Signs {
  const float* levels;
  const uint8_t* signs;  // (m, s, bytes) codes of one bit: 1 is positive
  const void* rest;      // (m, s), of the type `scales`
  int64_t lane_bytes, slot_bytes;
};

static inline int64_t halves_of(const Side& side) { return side.kind == SIGNED_LEVELS ? 2 : 1; }

// The side without its signs.
static inline Side without_signs(const Side& side) {
  Side levels = side;
  if (side.kind == SIGNED_LEVELS) levels.kind = LEVEL_CODES, levels.low = ((const Signs*)side.low)->levels, levels.size /= 2;
  return levels;
}

static inline bool has_levels(const Side& side) { return side.kind >= LEVEL_CODES && side.kind != FITTED_LEVELS; }

// Codes that a token has. Those of a grid stand for two channels each, i and size - 1 - i; of an odd size the last for one.
static inline int64_t codes_of(const Side& side) { return side.kind == GRID_CODES ? (side.size + 1) / 2 : side.size; }

static inline int64_t tables_of(const Side& side) { return side.kind == GRID_CODES ? 2 : 1; }

// Levels; of a grid those of first numbers, and behind them those of second ones.
static inline const float* levels_of(const Side& side) {
  if (side.kind == GRID_CODES) return (const float*)side.low + ((int64_t)2 << side.bits);
  return side.kind == LEVEL_CODES ? (const float*)side.low : ((const Blocks*)side.low)->levels;
}

// Scales that a token has: of runs of its channels, the last of which may be shorter.
static inline int64_t groups_of(const Side& side) {
  if (side.kind == TOKEN_CODES) return side.size / side.group;
  return side.kind == BLOCK_LEVELS ? (side.size + side.group - 1) / side.group : 1;
}

static inline float number_at(int64_t type, const void* table, int64_t i) {
  if (type == FLOAT32) return F32::one((const char*)table + 4 * i);
  if (type == BFLOAT16) return BF16::one((const char*)table + 2 * i);
  return F16::one((const char*)table + 2 * i);
}

static inline float scale_at(const Side& side, const void* table, int64_t i) { return number_at(side.scales, table, i); }

// What the scales of the run of token `t` of a lane are multiplied by, where there is anything.
static inline float outer_at(const Side& side, int64_t lane, int64_t slots, int64_t t) {
  const Blocks& blocks = *(const Blocks*)side.low;
  return number_at(blocks.kind, blocks.outer, side.row ? side.row[lane * slots + t] : lane * side.runs + t / blocks.span);
}

template <class T> static inline void widen_as(const void* from, int64_t size, float* to) {
  int64_t c = 0;
  for (; c + W <= size; c += W) store(to + c, T::at((const char*)from + c * T::BYTES));
  for (; c < size; c++) to[c] = T::one((const char*)from + c * T::BYTES);
}

[[maybe_unused]] static APART PLAIN_LOOPS void widen(int64_t type, const void* from, int64_t size, float* to) {
  if (type == FLOAT32) widen_as<F32>(from, size, to);
  else if (type == BFLOAT16) widen_as<BF16>(from, size, to);
  else widen_as<F16>(from, size, to);
}

typedef uint64_t Pair __attribute__((vector_size(16)));

// As many codes as T has bytes at once, the last of which may be those before once more: `count` is at least that.
template <class T>
static inline void unpack_as(const uint8_t* bytes, int64_t count, int down, int shift, uint64_t mask, uint8_t* to) {
  for (int64_t j = 0; j < count; j += (int64_t)sizeof(T)) {
    const int64_t at = j + (int64_t)sizeof(T) < count ? j : count - (int64_t)sizeof(T);
    const T before = shift ? load<T>(to + at) : T{};
    store(to + at, before | ((load<T>(bytes + at) >> down) & (T{} + mask * 0x0101010101010101u)) << shift);
  }
}

#if defined(__AVX2__)
// A vector of `run` bytes again and again; of more than fill it, those at `p` alone.
static inline U repeated(const uint8_t* p, int64_t run) {
#if defined(__AVX512F__)
  if (run == 32) return (U)_mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)p));
  if (run == 16) return (U)_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)p));
  if (run == 8) return (U)_mm512_set1_epi64(load<int64_t>(p));
#else
  if (run == 16) return (U)_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)p));
  if (run == 8) return (U)_mm256_set1_epi64x(load<int64_t>(p));
  if (run == 4) return U{} + load<uint32_t>(p);
#endif
  return load<U>(p);
}
#endif

// Codes of one token from the planes of ops.quant.pack.
[[maybe_unused]] static APART PLAIN_LOOPS void unpack(const uint8_t* bytes, int64_t bits, int64_t size, uint8_t* codes) {
  int shift = 0;
#if defined(__AVX2__)
  if (size >= (int64_t)sizeof(U) && (size & (size - 1)) == 0) {
    U byte;
    UNROLLED for (int i = 0; i < W; i++) byte[i] = (uint32_t)(4 * i);
    for (int width = 8; width; width /= 2) {
      if (!(bits & width)) continue;
      const int64_t run = size * width / 8;
      const int places = __builtin_ctzll((uint64_t)run);
      const uint32_t mask = ((1u << width) - 1) * 0x01010101u;
      for (int64_t j = 0; j < size; j += (int64_t)sizeof(U)) {
        const U down = ((byte + (uint32_t)j) >> places) * (uint32_t)width;
        const U mine = ((repeated(bytes + (j & (run - 1)), run) >> down) & mask) << shift;
        store(codes + j, shift ? mine | load<U>(codes + j) : mine);
      }
      bytes += run;
      shift += width;
    }
    return;
  }
#endif
  for (int width = 8; width; width /= 2) {
    if (!(bits & width)) continue;
    const int64_t run = (size * width + 7) / 8;
    const uint64_t mask = (1u << width) - 1;
    for (int64_t first = 0, i = 0; first < size; first += run, i++) {
      const int64_t count = size - first < run ? size - first : run;
      const int down = (int)i * width;
      uint8_t* to = codes + first;
      if (count >= 16) unpack_as<Pair>(bytes, count, down, shift, mask, to);
      else if (count >= 8) unpack_as<uint64_t>(bytes, count, down, shift, mask, to);
      else
        for (int64_t j = 0; j < count; j++) to[j] = (uint8_t)((shift ? to[j] : 0) | ((bytes[j] >> down) & mask) << shift);
    }
    bytes += run;
    shift += width;
  }
}

// Of codes by scales for runs of channels the one that stands for 0, or where there are minima the one amid all.
static inline float zero_of(const Side& side) { return (float)(side.low ? (1 << (side.bits - 1)) - 1 : side.zero); }

// Floats of a token's codes by scales for runs of channels.
static inline void by_token(const Side& side, const uint8_t* codes, int64_t place, float* to) {
  const int64_t groups = side.size / side.group;
  const float zero = zero_of(side);
  for (int64_t i = 0; i < groups; i++) {
    const float step = scale_at(side, side.step, place * groups + i);
    const float low = side.low ? scale_at(side, side.low, place * groups + i) : -zero * step;
    const uint8_t* from = codes + i * side.group;
    float* out = to + i * side.group;
    int64_t c = 0;
    for (; c + W <= side.group; c += W) store(out + c, floats_of(from + c) * step + low);
    for (; c < side.group; c++) out[c] = (float)from[c] * step + low;
  }
}

// Bytes as the high bits of floats below their sign, times a power of two, times a number.
[[maybe_unused]] static APART PLAIN_LOOPS void of_high_bits(const uint8_t* from, int64_t count, int shift, float unit,
                                                            float times, float* to) {
  int64_t i = 0;
  // 255 of E8M0 is no number, and an endless scale times a sum below 0 would pass for a token that is not seen.
  for (; i + W <= count; i += W) {
    const F scale = (F)(ints_of(from + i) << shift) * unit;
    store(to + i, scale * times + (scale - scale));
  }
  for (; i < count; i++) {
    const uint32_t bits = (uint32_t)from[i] << shift;
    float scale;
    memcpy(&scale, &bits, 4);
    to[i] = scale * unit * times + (scale - scale);
  }
}

// Scales of `count` tokens whose codes are levels, (count, groups).
[[maybe_unused]] static SMALL_CODE void scales_of_levels(const Side& side, int64_t lane, int64_t slots, int64_t first,
                                                         int64_t count, float* to) {
  const int64_t groups = groups_of(side), at = (lane * slots + first) * groups;
  if (side.kind != BLOCK_LEVELS) {
    const int64_t each = side.scales == FLOAT32 ? 4 : 2;
    ask_scales((const char*)side.step + (at + count) * each, count * each);
    widen(side.scales, (const char*)side.step + at * each, count, to);
    return;
  }
  const Blocks& blocks = *(const Blocks*)side.low;
  const uint8_t* from = (const uint8_t*)side.step + at;
  // As the high bits of a float the byte of E4M3 is the same number over 2^120; one of E8M0 is its exponent. The least
  // power of two, 2^-127, becomes 0: no logit and no sum can tell it from that.
  const int shift = side.scales == E4M3 ? 20 : 23;
  const float unit = side.scales == E4M3 ? 1.329227995784916e36f : 1.f;
  for (int64_t t = first, end; t < first + count; t = end) {
    end = !blocks.outer ? first + count : side.row ? t + 1 : (t / blocks.span + 1) * blocks.span;
    if (end > first + count) end = first + count;
    const float outer = blocks.outer ? outer_at(side, lane, slots, t) : 1;
    of_high_bits(from + (t - first) * groups, (end - t) * groups, shift, unit, outer, to + (t - first) * groups);
  }
}

// Floats of a token's codes by a table of levels, times the scales of its runs of channels.
static inline void by_level(const Side& side, const uint8_t* codes, const float* scales, float* to) {
  const float* levels = levels_of(side);
  const int64_t run = side.kind == BLOCK_LEVELS ? side.group : side.size;
  const bool picks = side.bits <= (W == 16 ? 4 : W == 8 ? 3 : 2);
  const int shift = side.kind == BLOCK_LEVELS ? (int)((const Blocks*)side.low)->shift : 0;
  // 2^120 for the 4 bits of exponent of E4M3, 2^112 for the 5 of E5M2.
  const float unit = shift == 20 ? 1.329227995784916e36f : 5.192296858534828e33f;
  for (int64_t c = 0; c < side.size; scales++) {
    const int64_t end = c + run < side.size ? c + run : side.size;
    const F table = picks ? load<F>(levels) * *scales : F{};
    if (picks)
      for (; c + W <= end; c += W) store(to + c, picked(table, ints_of(codes + c)));
    if (shift)
      for (; c + W <= end; c += W) {
        const I code = ints_of(codes + c);
        store(to + c, (F)((code & 0x7f) << shift | (code & 0x80) << 24) * unit * *scales);
      }
    for (; c < end; c++) to[c] = levels[codes[c]] * *scales;
  }
}

// Floats of a token's codes by a table of points, times a scale: both numbers of each point side by side.
static inline void by_point(const Side& side, const uint8_t* codes, float scale, float* to) {
  typedef float Two __attribute__((vector_size(16)));
  typedef double Points __attribute__((vector_size(16)));
  const double* points = (const double*)side.low;  // a point each
  const int64_t pairs = codes_of(side);
  int64_t i = 0;
  for (; i + 2 <= pairs; i += 2) store(to + 2 * i, (Two)Points{points[codes[i]], points[codes[i + 1]]} * scale);
  if (i < pairs) to[2 * i] = load<Two>(points + codes[i])[0] * scale;
}

// Tokens first..first + count of a lane, which lie at `from`, as floats, a token every `padded` floats, zeros behind its
// channels; those of a grid in the order of its points. Not of FITTED_LEVELS. `scratch`: 2 * padded floats and padded bytes.
[[maybe_unused]] static APART PLAIN_LOOPS void decode(const Side& side, const char* from, int64_t lane, int64_t slots,
                                                      int64_t first, int64_t count, int64_t padded, float* to,
                                                      float* scratch) {
  uint8_t* codes = (uint8_t*)(scratch + 2 * padded);
  int64_t known = -1;
  for (int64_t i = 0; i < count; i++, from += side.slot_bytes, to += padded) {
    for (int64_t c = side.size; c < padded; c++) to[c] = 0;
    if (side.kind <= FLOAT16) {
      widen(side.kind, from, side.size, to);
      continue;
    }
    const uint8_t* mine = (const uint8_t*)from;
    if (side.bits != 8) unpack(mine, side.bits, codes_of(side), codes), mine = codes;
    if (side.kind != CHANNEL_CODES) {
      if (has_levels(side)) {
        scales_of_levels(side, lane, slots, first + i, 1, scratch);
        if (side.kind == GRID_CODES) by_point(side, mine, *scratch, to);
        else by_level(side, mine, scratch, to);
      } else {
        by_token(side, mine, lane * slots + first + i, to);
      }
      continue;
    }
    const int64_t place = first + i;
    const int64_t row = side.row ? side.row[lane * slots + place] : lane * side.runs + place / side.group;
    float *step = scratch, *low = scratch + padded;
    if (row != known) {
      const int64_t at = row * side.size * (side.scales == FLOAT32 ? 4 : 2);
      widen(side.scales, (const char*)side.step + at, side.size, step);
      widen(side.scales, (const char*)side.low + at, side.size, low);
      known = row;
    }
    int64_t c = 0;
    for (; c + W <= side.size; c += W) store(to + c, floats_of(mine + c) * load<F>(step + c) + load<F>(low + c));
    for (; c < side.size; c++) to[c] = (float)mine[c] * step[c] + low[c];
  }
}
