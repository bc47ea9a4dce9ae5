// Codes of 3 bits, and of 2 that stand for levels, as codes of 4, a block of tokens at a time, for the products that read
// 4 bits as they lie.
//
// A code of 3 bits lies in two planes (see ops.quant.pack), and no vector of words holds it. In planes of 2 bits and of 1
// the codes of channels i and i + size / 2 stand four bits apart, as they do in a plane of 4 bits: so a shift and a mask
// make two codes of each byte, and no code is taken out by itself.
#pragma once

#include "layouts.h"

// A constant, asked before all that depends on it, so that other processors' code has nothing of it.
#if defined(__AVX2__)
constexpr bool NIBBLES = true;
#else
constexpr bool NIBBLES = false;
#endif

// Whether tokens of a side become codes of 4 bits before they are read.
static inline bool becomes_nibbles(const Side& side) {
  if (!NIBBLES) return false;
  if (side.size < 64 || (side.size & (side.size - 1))) return false;
  if (side.kind == LEVEL_CODES || side.kind == FITTED_LEVELS) return side.bits == 2 || side.bits == 3;
  if (side.kind != TOKEN_CODES && side.kind != CHANNEL_CODES) return false;
  // Codes of 2 bits are read as they lie where they fill a vector, by VNNI, or where they are floats in any case.
  return side.bits == 3 || (W == 8 && side.bits == 2 && side.size == 64 && side.scales != FLOAT32);
}

// The side as it is read then; `data` is left.
static inline Side as_nibbles(Side side) {
  side.bits = 4, side.slot_bytes = side.size / 2;
  return side;
}

// Tokens of a side that `becomes_nibbles`, from `codes` on, size / 2 bytes each.
[[maybe_unused]] static APART void to_nibbles(const Side& side, const char* codes, int64_t count, char* to) {
#if defined(__AVX2__)
  const int64_t half = side.size / 2, twos = side.size / 4, ones = side.size / 8;
  U byte;
  UNROLLED for (int i = 0; i < W; i++) byte[i] = (uint32_t)(4 * i);
  for (int64_t j = 0; j < half; j += (int64_t)sizeof(U)) {
    // Bit pairs j / twos of the first plane's bytes, and bits j / ones of the second's.
    const U down = ((byte + (uint32_t)j) >> __builtin_ctzll((uint64_t)twos)) * 2u;
    const U under = (byte + (uint32_t)j) >> __builtin_ctzll((uint64_t)ones);
    const char* from = codes;
    for (int64_t t = 0; t < count; t++, from += side.slot_bytes) {
      if (j == 0) __builtin_prefetch(from + KEYS_AHEAD, 0, 2);
      U mine = (repeated((const uint8_t*)from + (j & (twos - 1)), twos) >> down) & 0x33333333u;
      if (side.bits == 3) mine |= ((repeated((const uint8_t*)from + twos + (j & (ones - 1)), ones) >> under) & 0x11111111u) << 2;
      if (half >= (int64_t)sizeof(U)) store(to + t * half + j, mine);
      else memcpy(to + t * half, &mine, sizeof(U) / 2);
    }
  }
#endif
}
