// Packed codes as vectors of 32-bit words hold them.
//
// A vector of 32-bit words holds 32 / BITS codes in each word. Code k of every word, shifted down and masked, is a vector
// of codes whose channels are far apart; which ones, `place_of_code` says. Queries are laid out in that order before, and
// outputs put back after. A token whose codes fill only a part of a vector is repeated FOLD times in it, and each
// repetition gives other codes.
#pragma once

#include "layouts.h"

// How often codes of a width may be repeated in a vector: sizes are multiples of two vectors, and narrow vectors leave
// tokens of a few bytes to be decoded.
constexpr int64_t most_folds(int64_t bits) { return W == 16 ? (bits == 8 ? 2 : 4) : W == 8 && bits < 8 ? 2 : 1; }

// Queries of a piece, as the products below want them.
struct Rows {
  const float* query;  // (rows, size), in the order of `place_of_code`, or where they become integers in their own
  int64_t size;
};

constexpr int64_t MOST_GROUPS = 4;  // of a token whose values are summed in integers

// Scales of the tokens of a block as floats, and which of them each lane of a vector uses.
struct Scales {
  const float *step, *low;  // (tokens, groups), and W floats of scratch behind; low null: codes are symmetric
  const int32_t* lanes;     // (vectors of words, KINDS, W)
  const float* levels;      // what codes stand for, where not for themselves
  int64_t tables;           // of levels: a code of a grid stands for a channel by each of two
  int64_t groups;
  float zero;
  bool coarse;  // the cache has 16 bits, and lanes that hold one kind of code use one scale
};

template <int BITS, int FOLD> struct Codes {
  static constexpr int BITS_OF = BITS;
  static constexpr bool LEVELS = false, OF_BLOCKS = false;
  static constexpr int N = 32 / (BITS * FOLD);           // vectors that a vector of words holds
  static constexpr int KINDS = 8 / BITS;                 // codes of a byte: of as many runs of channels
  static constexpr int BYTES = (int)sizeof(U) / FOLD;    // that are read

  static U words(const char* p) {
    if constexpr (FOLD == 1) return load<U>(p);
#if defined(__AVX512F__)
    if constexpr (FOLD == 2) return (U)_mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)p));
    if constexpr (FOLD == 4) return (U)_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)p));
#elif defined(__AVX2__)
    if constexpr (FOLD == 2) return (U)_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)p));
#endif
    U all;
    for (int i = 0; i < FOLD; i++) memcpy((char*)&all + i * BYTES, p, BYTES);
    return all;
  }

  static F at(U words, int k) {
    if constexpr (FOLD == 1) return __builtin_convertvector((I)((words >> (k * BITS)) & ((1u << BITS) - 1)), F);
    U down;
    UNROLLED for (int i = 0; i < W; i++) down[i] = (uint32_t)((k + i / (W / FOLD) * N) * BITS);
    return __builtin_convertvector((I)((words >> down) & ((1u << BITS) - 1)), F);
  }
};

#if defined(__AVX2__) || defined(__aarch64__)
constexpr bool LEVELS_PICKED = true;
#else
constexpr bool LEVELS_PICKED = false;
#endif

// Codes of 4 bits that stand for 16 levels, which registers hold. BLOCKS: each block of channels has a scale of its own.
template <int FOLD, bool BLOCKS> struct LevelCodes : Codes<4, FOLD> {
  static constexpr bool LEVELS = true, OF_BLOCKS = BLOCKS;

  static F at(U words, int k, const float* levels) {
    U down = words >> (k * 4);
    if constexpr (FOLD > 1) {
      UNROLLED for (int i = 0; i < W; i++) down[i] = (uint32_t)((k + i / (W / FOLD) * Codes<4, FOLD>::N) * 4);
      down = words >> down;
    }
#if defined(__AVX512F__)
    return (F)_mm512_permutexvar_ps((__m512i)down, _mm512_loadu_ps(levels));
#elif defined(__AVX2__)
    const __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(levels), (__m256i)down);
    const __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(levels + 8), (__m256i)down);
    return (F)_mm256_blendv_ps(low, high, (__m256)(down << 28));
#elif defined(__aarch64__)
    // The four bytes of each.
    const uint8x16x4_t table = vld1q_u8_x4((const uint8_t*)levels);
    return (F)vqtbl4q_u8(table, (uint8x16_t)((down & 15) * 0x04040404u + 0x03020100u));
#else
    return F{} + levels[0];
#endif
  }
};

// Whether vectors pick levels for the codes of a side as they lie; else they are decoded.
static inline bool picks_levels(const Side& side) {
  if (side.kind == GRID_CODES && side.size % 2) return false;
  return LEVELS_PICKED && has_levels(side) && side.bits == 4 && codes_of(side) >= 4 * W && groups_of(side) <= W;
}

// The bytes of a token's codes where one plane holds them all and vectors of words divide them; else 0.
static inline int64_t whole_words(const Side& side) {
  const int64_t codes = codes_of(side), bytes = codes * side.bits / 8;
  if (side.kind <= FLOAT16 || side.kind == FITTED_LEVELS || (has_levels(side) ? !picks_levels(side) : side.row != nullptr)) return 0;
  if (side.bits != 2 && side.bits != 4 && side.bits != 8) return 0;
  if (codes * side.bits % 8 || codes % (2 * W)) return 0;
  const int64_t full = (int64_t)sizeof(U), most = most_folds(side.bits);
  return bytes % full == 0 || (bytes * 2 == full && most >= 2) || (bytes * 4 == full && most >= 4) ? bytes : 0;
}

static inline int64_t folds(const Side& side) {
  const int64_t bytes = codes_of(side) * side.bits / 8;
  return bytes < (int64_t)sizeof(U) ? (int64_t)sizeof(U) / bytes : 1;
}

// Where channel c comes to lie in the vectors of a token.
static inline int64_t place_of_code(const Side& side, int64_t c) {
  const int64_t bits = side.bits, bytes = codes_of(side) * bits / 8, fold = folds(side), n = 32 / (bits * fold);
  const int64_t sub = c / bytes, byte = c % bytes, words = W / fold;
  const int64_t vector = byte / (4 * words), word = byte % (4 * words) / 4;
  const int64_t code = byte % 4 * (8 / bits) + sub;
  return (vector * n + code % n) * W + code / n * words + word;
}
