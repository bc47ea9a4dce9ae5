// Levels that were fitted to runs of tokens, and numbers that were kept aside, as floats.
#pragma once

#include "nibbles.h"

// What `low` of FITTED_LEVELS points to: levels that were fitted to runs of tokens, each number times `step`, plus `low`,
// and numbers that were kept aside. Counts and channels are bytes, or of 16 bits where there are more than 255 channels.
struct Fitted {
  const void *low, *levels;      // as step; (rows of the tables, 2^bits)
  const void *counts, *channels; // (m, s) numbers of a token that were kept aside; (n) of which channel each is
  const void* exact;             // (n), of the type `scales`
  int32_t* marks;                // scratch: how many there are before every 16th slot
  int64_t by_token;              // step and low are those of a token, not of the channels of a run
};

namespace {

// Every how many slots a mark says how many numbers were kept aside before.
constexpr int64_t MARKED = 16;

int64_t whole_at(const Side& side, const void* table, int64_t i) {
  return side.size > 255 ? (int64_t)((const int16_t*)table)[i] : (int64_t)((const uint8_t*)table)[i];
}

// How many numbers MARKED tokens from slot i on have kept aside.
int64_t marked_at(const Side& side, const void* counts, int64_t i) {
#if defined(__AVX2__)
  if (side.size <= 255) {
    const __m128i both = _mm_sad_epu8(load<__m128i>((const uint8_t*)counts + i), _mm_setzero_si128());
    return _mm_cvtsi128_si64(both) + _mm_extract_epi64(both, 1);
  }
#elif defined(__aarch64__)
  if (side.size <= 255) return vaddlvq_u8(vld1q_u8((const uint8_t*)counts + i));
#endif
  int64_t found = 0;
  for (int64_t j = i; j < i + MARKED; j++) found += whole_at(side, counts, j);
  return found;
}

// Writes the marks of a side, those of `slots` slots of all lanes together, and of what comes after a last whole run of them.
SMALL_CODE void mark(const Side& side, int64_t slots, int32_t* marks) {
  Fitted& fitted = *(Fitted*)side.low;
  fitted.marks = marks;
  int64_t before = 0;
  for (int64_t i = 0;; i += MARKED) {
    marks[i / MARKED] = (int32_t)before;
    if (i + MARKED > slots) return;
    before += marked_at(side, fitted.counts, i);
  }
}

// Levels of a table in two registers, W each, by the low bits of codes; `MORE`: codes of W and above are of the second.
template <bool MORE> INLINE static inline F level_of(F few, F more, I code) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  // Lanes are picked by three bits, and blended by the sign.
  const __m256 level = _mm256_permutevar8x32_ps((__m256)few, (__m256i)code);
  if (!MORE) return (F)level;
  const __m256 other = _mm256_permutevar8x32_ps((__m256)more, (__m256i)code);
  return (F)_mm256_blendv_ps(level, other, (__m256)(code << 28));
#else
  const F level = picked(few, code);
  return MORE ? (code < W ? level : picked(more, code - W)) : level;
#endif
}

// Levels of a run, and of all its channels the step and the lowest, or those of a token.
struct FittedRun {
  F few, more;
  const float *step, *low;
};

// Tokens of one run, whose codes of 4 bits lie `apart` bytes apart: of channel c in the low bits of a byte, of channel
// half + c in its high ones, as ops.quant.pack has them. Channels in the outer loop, so that their tables stay in
// registers.
template <bool MORE>
APART PLAIN_LOOPS void nibbles_by_channel(const FittedRun& run, const uint8_t* codes, int64_t apart, int64_t half, int64_t count,
                                          int64_t padded, float* to) {
  const F few = run.few, more = run.more;
  for (int64_t c = 0; c < half; c += W) {
    const F step = load<F>(run.step + c), above = load<F>(run.step + half + c);
    const F low = load<F>(run.low + c), lowest = load<F>(run.low + half + c);
    const uint8_t* from = codes + c;
    float* out = to + c;
    for (int64_t i = 0; i < count; i++, from += apart, out += padded) {
      const I code = ints_of(from);
      store(out, level_of<MORE>(few, more, code) * step + low);
      store(out + half, level_of<MORE>(few, more, (I)((U)code >> 4)) * above + lowest);
    }
  }
}

// As above, of a token whose channels have one step and one lowest number.
template <bool MORE>
INLINE static inline void nibbles_of_token(F few, F more, F step, F low, const uint8_t* codes, int64_t half, float* to) {
  for (int64_t c = 0; c < half; c += W) {
    const I code = ints_of(codes + c);
    store(to + c, level_of<MORE>(few, more, code) * step + low);
    store(to + half + c, level_of<MORE>(few, more, (I)((U)code >> 4)) * step + low);
  }
}

// The run's channels of one token from codes that are a byte each.
inline void bytes_of_token(const FittedRun& run, const float* levels, int64_t many, const uint8_t* codes, int64_t size,
                           int64_t every, float* to) {
  int64_t c = 0;
  if (many <= 2 * W)
    for (; c + W <= size; c += W) {
      const I code = ints_of(codes + c);
      const F level = many > W ? level_of<true>(run.few, run.more, code) : level_of<false>(run.few, run.more, code);
      store(to + c, level * load<F>(run.step + (c & every)) + load<F>(run.low + (c & every)));
    }
  for (; c < size; c++) to[c] = levels[codes[c]] * run.step[c & every] + run.low[c & every];
}

// Whether codes lie, or are laid, in 4 bits that whole vectors read.
bool fitted_in_nibbles(const Side& side) {
  return NIBBLES && ((side.bits == 4 && side.size % (2 * W) == 0) || becomes_nibbles(side));
}

// Tokens' codes of 4 bits, `apart` bytes from one another.
struct Nibbles {
  const uint8_t* codes;
  int64_t apart;
};

// Those of tokens of a side that are `fitted_in_nibbles`, from `from` on; made in `room` where they have fewer bits.
inline Nibbles nibbles_of(const Side& side, const char* from, int64_t count, void* room) {
  if (side.bits == 4) return {(const uint8_t*)from, side.slot_bytes};
  to_nibbles(side, from, count, (char*)room);
  return {(const uint8_t*)room, side.size / 2};
}

// So many numbers that were kept aside become floats at once.
constexpr int64_t ASIDE = 256;

void widen_aside(const Side& side, int64_t at, int64_t count, float* to) {
  widen(side.scales, (const char*)((const Fitted*)side.low)->exact + at * (side.scales == FLOAT32 ? 4 : 2), count, to);
}

// The first number that was kept aside of slot i of all lanes, or of what comes after it.
int64_t first_aside(const Side& side, int64_t i) {
  const Fitted& fitted = *(const Fitted*)side.low;
  int64_t at = fitted.marks[i / MARKED];
  for (int64_t j = i / MARKED * MARKED; j < i; j++) at += whole_at(side, fitted.counts, j);
  return at;
}

// Calls `each` with numbers that were kept aside of tokens `begin`.. of all lanes: where the token's row begins, `apart` from
// the one before, the channel and the number. How many a token has is chance, which no processor foresees: so a list says of
// which token each is, and one loop goes over it.
template <class Each>
INLINE static inline void over_aside(const Side& side, int64_t begin, int64_t count, int64_t apart, Each each) {
  const Fitted& fitted = *(const Fitted*)side.low;
  int32_t rows[ASIDE + W];
  float exact[ASIDE];
  int64_t at = first_aside(side, begin), listed = 0;
  const auto take = [&](auto wide) INLINE {
    for (int64_t j = 0; j < listed; j++, at++)
      each(rows[j], wide ? ((const int16_t*)fitted.channels)[at] : ((const uint8_t*)fitted.channels)[at], exact[j]);
  };
  const auto empty = [&]() INLINE {
    widen_aside(side, at, listed, exact);
    if (side.size > 255) take(Number<1>());
    else take(Number<0>());
    listed = 0;
  };
  for (int64_t i = 0; i < count; i++) {
    int64_t left = whole_at(side, fitted.counts, begin + i);
    do {
      if (listed + W > ASIDE) empty();
      store(rows + listed, I{} + (int32_t)(i * apart));
      listed += left < W ? left : W, left -= W;
    } while (left > 0);
  }
  empty();
}

// Writes the numbers that were kept aside of tokens `begin`.. of all lanes over what their codes say.
APART PLAIN_LOOPS void put_aside(const Side& side, int64_t begin, int64_t count, int64_t padded, float* to) {
  over_aside(side, begin, count, padded, [&](int64_t row, int64_t channel, float x) INLINE { to[row + channel] = x; });
}

// Floats of scratch, in rows of a tile, that `decode_fitted` takes.
constexpr int64_t FITTED_ROWS = 4;

// As `decode`, of FITTED_LEVELS and at most `TILE` tokens. `scratch`: FITTED_ROWS * padded floats.
APART PLAIN_LOOPS void decode_fitted(const Side& side, const char* from, int64_t lane, int64_t slots, int64_t first,
                                     int64_t count, int64_t padded, float* to, float* scratch) {
  const Fitted& fitted = *(const Fitted*)side.low;
  const int64_t each = side.scales == FLOAT32 ? 4 : 2, many = (int64_t)1 << side.bits, size = side.size, half = size / 2;
  float *step = scratch, *low = scratch + padded, levels[256], *out = to;
  uint8_t* codes = (uint8_t*)(scratch + 2 * padded);
  const bool nibbles = fitted_in_nibbles(side);
  const Nibbles packed = nibbles ? nibbles_of(side, from, count, codes) : Nibbles{};
  const int64_t begin = lane * slots + first;
  FittedRun run{F{}, F{}, step, low};
  for (int64_t i = 0, until; i < count; i = until) {
    const int64_t row = side.row ? side.row[begin + i] : lane * side.runs + (first + i) / side.group;
    until = side.row ? i + 1 : ((first + i) / side.group + 1) * side.group - first;
    while (side.row && until < count && side.row[begin + until] == row) until++;
    if (until > count) until = count;
    widen(side.scales, (const char*)fitted.levels + row * many * each, many, levels);
    // Registers pick by the low bits of codes alone.
    for (int64_t j = many; j < 2 * W; j++) levels[j] = levels[j - many];
    run.few = load<F>(levels), run.more = load<F>(levels + W);
    if (!fitted.by_token) {
      widen(side.scales, (const char*)side.step + row * size * each, size, step);
      widen(side.scales, (const char*)fitted.low + row * size * each, size, low);
      if (nibbles) {
        const uint8_t* mine = packed.codes + i * packed.apart;
        if (many > W) nibbles_by_channel<true>(run, mine, packed.apart, half, until - i, padded, out);
        else nibbles_by_channel<false>(run, mine, packed.apart, half, until - i, padded, out);
        out += (until - i) * padded;
        continue;
      }
    }
    for (int64_t t = i; t < until; t++, out += padded) {
      if (fitted.by_token) {
        const F up = all(scale_at(side, side.step, begin + t)), least = all(scale_at(side, fitted.low, begin + t));
        if (nibbles) {
          const uint8_t* mine = packed.codes + t * packed.apart;
          if (many > W) nibbles_of_token<true>(run.few, run.more, up, least, mine, half, out);
          else nibbles_of_token<false>(run.few, run.more, up, least, mine, half, out);
          continue;
        }
        store(step, up), store(low, least);
      }
      const uint8_t* mine = (const uint8_t*)from + t * side.slot_bytes;
      if (side.bits != 8) unpack(mine, side.bits, size, codes), mine = codes;
      // The same numbers for all channels of a token.
      bytes_of_token(run, levels, many, mine, size, fitted.by_token ? 0 : -1, out);
    }
  }
  for (int64_t i = 0; size < padded && i < count; i++)
    for (int64_t c = size; c < padded; c++) to[i * padded + c] = 0;
  put_aside(side, begin, count, padded, to);
}

}  // namespace
