// Codes of a byte each, and the bytes they are packed in.
#pragma once

#include "layouts.h"
#include "numbers.h"
#include "threads.h"

namespace {

constexpr int64_t SOON = 8;     // the token after so many is asked for before it is read
constexpr int64_t TOKENS = 64;  // that are a piece of work, where scales are those of a token

int64_t ceiling(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Tokens of a lane whose codes are one piece of work.
struct RunOfTokens {
  int64_t count, place, number;  // place: of the first among the tokens of all lanes; number: among the runs of all lanes
  const char* states;
};

// Does a piece of work for every run of so many tokens of a call that has states by lanes and slots.
template <class Call, class Each> int32_t over_runs(const Call& call, int64_t length, const Each& each) {
  const int64_t runs = ceiling(call.slots, length);
  return share_out(call.lanes * runs, call.threads, call.parallel_for, [&](int64_t number, int64_t thread) {
    const int64_t lane = number / runs, first = number % runs * length, left = call.slots - first;
    const char* states = (const char*)call.states + lane * call.lane_bytes + first * call.slot_bytes;
    each(RunOfTokens{left < length ? left : length, lane * call.slots + first, number, states}, thread);
  });
}

// A head's tokens in a model's own tensor lie too far apart for a core to look ahead by itself.
template <class T, class Call> void ask_after(const Call& call, const char* token) {
  for (int64_t i = 0; i < call.size * T::BYTES; i += 64) __builtin_prefetch(token + SOON * call.slot_bytes + i);
}

// Number i of a table becomes x; gives what it then is.
template <class T> float put(void* table, int64_t i, float x) {
  const auto kept = rounded(T(), x);
  char* at = (char*)table + i * T::BYTES;
  memcpy(at, &kept, T::BYTES);
  return T::one(at);
}

static inline void store_bytes(uint8_t* to, F codes) {
  const I numbers = __builtin_convertvector(codes, I);
#if defined(__AVX512F__)
  _mm_storeu_si128((__m128i*)to, _mm512_maskz_cvtepi32_epi8(0xffff, (__m512i)numbers));
#elif defined(__AVX2__)
  const __m256i all = (__m256i)numbers;
  const __m128i shorts = _mm_packus_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
  _mm_storel_epi64((__m128i*)to, _mm_packus_epi16(shorts, shorts));
#else
  store(to, __builtin_convertvector(numbers, B));
#endif
}

// How many of `many` - 1 ascending borders lie below each number.
static inline I borders_below(F z, const float* borders, int64_t many) {
  I code{};
  if (many <= 16) {
    for (int64_t i = 0; i + 1 < many; i++) code -= borders[i] < z;
  } else {
    // 2^bits - 1 borders: each step of a search halves what is left.
    for (int64_t half = many / 2; half; half /= 2)
      for (int j = 0; j < W; j++) code[j] += borders[code[j] + half - 1] < z[j] ? (int32_t)half : 0;
  }
  return code;
}

// Bits `shift` to `shift` + WIDTH of all codes; `codes` goes on with zeros as far as the last byte does.
template <int WIDTH> void pack_plane(const uint8_t* __restrict codes, int shift, int64_t bytes, uint8_t* __restrict to) {
  for (int64_t j = 0; j < bytes; j++) {
    uint8_t byte = 0;
    for (int i = 0; i < 8 / WIDTH; i++)
      byte |= (uint8_t)((codes[i * bytes + j] >> shift & ((1 << WIDTH) - 1)) << (i * WIDTH));
    to[j] = byte;
  }
}

// As ops.quant.pack.
APART void pack(const uint8_t* codes, int64_t bits, int64_t size, uint8_t* to) {
  int shift = 0;
  for (int width = 8; width; width /= 2) {
    if (!(bits & width)) continue;
    const int64_t bytes = ceiling(size * width, 8);
    if (width == 8) memcpy(to, codes, (size_t)size);
    else if (width == 4) pack_plane<4>(codes, shift, bytes, to);
    else if (width == 2) pack_plane<2>(codes, shift, bytes, to);
    else pack_plane<1>(codes, shift, bytes, to);
    to += bytes, shift += width;
  }
}

// Bytes of a token's codes, as `pack` writes them.
int64_t packed_bytes(int64_t size, int64_t bits) {
  int64_t bytes = 0;
  for (int64_t width = 8; width; width /= 2)
    if (bits & width) bytes += ceiling(size * width, 8);
  return bytes;
}

}  // namespace
