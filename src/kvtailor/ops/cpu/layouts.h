// How keys or values of some lanes lie in memory, and how a run of their tokens becomes floats.
#pragma once

#include "vectors.h"

enum Kind { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2, TOKEN_CODES = 3, CHANNEL_CODES = 4, LEVEL_CODES = 5 };

// Mirrored field by field in library.py.
struct Side {
  const void* data;    // states (m, s, c), or codes (m, s, bytes) as ops.quant packs them
  const void* step;    // tables of codes, of the type `scales`: (m, s, c / group) or (m, runs, c) or (rows, c)
  const void* low;     // as step; null: codes are symmetric around 2^(bits - 1) - 1. LEVEL_CODES: float levels, W or more
  const int32_t* row;  // (m, s) row of the tables of each token; null: slot i is in run i / group
  int64_t lane_bytes, slot_bytes;
  int64_t kind, scales, bits, size, group, runs;
};

static inline float scale_at(const Side& side, const void* table, int64_t i) {
  if (side.scales == FLOAT32) return F32::one((const char*)table + 4 * i);
  if (side.scales == BFLOAT16) return BF16::one((const char*)table + 2 * i);
  return F16::one((const char*)table + 2 * i);
}

template <class T> static inline void widen_as(const void* from, int64_t size, float* to) {
  int64_t c = 0;
  for (; c + W <= size; c += W) store(to + c, T::at((const char*)from + c * T::BYTES));
  for (; c < size; c++) to[c] = T::one((const char*)from + c * T::BYTES);
}

static inline void widen(int64_t type, const void* from, int64_t size, float* to) {
  if (type == FLOAT32) widen_as<F32>(from, size, to);
  else if (type == BFLOAT16) widen_as<BF16>(from, size, to);
  else widen_as<F16>(from, size, to);
}

// Codes of one token from the planes of ops.quant.pack.
static inline void unpack(const uint8_t* bytes, int64_t bits, int64_t size, uint8_t* codes) {
  int shift = 0;
  for (int width = 8; width; width /= 2) {
    if (!(bits & width)) continue;
    const int64_t run = (size * width + 7) / 8;
    const uint8_t mask = (uint8_t)((1 << width) - 1);
    for (int64_t first = 0, i = 0; first < size; first += run, i++) {
      const int64_t count = size - first < run ? size - first : run;
      const int down = (int)i * width;
      uint8_t* to = codes + first;
      if (shift == 0)
        for (int64_t j = 0; j < count; j++) to[j] = (uint8_t)((bytes[j] >> down) & mask);
      else
        for (int64_t j = 0; j < count; j++) to[j] |= (uint8_t)(((bytes[j] >> down) & mask) << shift);
    }
    bytes += run;
    shift += width;
  }
}

// Floats of a token's codes by scales for runs of channels.
static inline void by_token(const Side& side, const uint8_t* codes, int64_t place, float* to) {
  const int64_t groups = side.size / side.group;
  const float zero = (float)((1 << (side.bits - 1)) - 1);
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

// Floats of a token's codes by a table of levels, times the token's scale.
static inline void by_level(const Side& side, const uint8_t* codes, int64_t place, float* to) {
  const float step = scale_at(side, side.step, place), *levels = (const float*)side.low;
  const F table = load<F>(levels) * step;
  int64_t c = 0;
  if (side.bits <= (W == 16 ? 4 : W == 8 ? 3 : 2))
    for (; c + W <= side.size; c += W) store(to + c, picked(table, ints_of(codes + c)));
  for (; c < side.size; c++) to[c] = levels[codes[c]] * step;
}

// Tokens first..first + count of a lane as floats, a token every `padded` floats, zeros behind its channels.
// `scratch`: 2 * padded floats and padded bytes.
static inline void decode(const Side& side, int64_t lane, int64_t slots, int64_t first, int64_t count,
                          int64_t padded, float* to, float* scratch) {
  const char* from = (const char*)side.data + lane * side.lane_bytes + first * side.slot_bytes;
  uint8_t* codes = (uint8_t*)(scratch + 2 * padded);
  int64_t known = -1;
  for (int64_t i = 0; i < count; i++, from += side.slot_bytes, to += padded) {
    for (int64_t c = side.size; c < padded; c++) to[c] = 0;
    if (side.kind <= FLOAT16) {
      widen(side.kind, from, side.size, to);
      continue;
    }
    const uint8_t* mine = (const uint8_t*)from;
    if (side.bits != 8) unpack(mine, side.bits, side.size, codes), mine = codes;
    if (side.kind != CHANNEL_CODES) {
      (side.kind == TOKEN_CODES ? by_token : by_level)(side, mine, lane * slots + first + i, to);
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
