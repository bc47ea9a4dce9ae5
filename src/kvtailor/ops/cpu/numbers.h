// Nearest numbers of 16 bits, halfway to even, as torch rounds.
#pragma once

#include "vectors.h"

static inline uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

static inline uint16_t rounded(BF16, float x) {
  const uint32_t bits = bits_of(x);
  return x != x ? 0x7fc0 : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static inline uint16_t rounded(F16, float x) {
  const uint32_t bits = bits_of(x), size = bits & 0x7fffffff;
  const uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
  if (size > 0x7f800000) return 0x7e00;
  if (size >= 0x477ff000) return sign | 0x7c00;
  if (size >= 0x38800000) return sign | (uint16_t)((size + 0xfff + (size >> 13 & 1) - 0x38000000) >> 13);
  // The last bit of a number from 0.5 to 1 is worth what that of the smallest halves is.
  return sign | (uint16_t)(bits_of(__builtin_fabsf(x) + 0.5f) - 0x3f000000);
}

static inline float rounded(F32, float x) { return x; }
