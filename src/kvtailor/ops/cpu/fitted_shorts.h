// Fitted levels in 16 bits, on processors with AVX2, or with AVX-512 VNNI: twice as many numbers to an operation as floats.
//
// Of keys a tile of tokens becomes whole numbers, which are turned by the tokens' positions, where they were stored before
// their rotary embedding, and multiplied as such. In each plane, which is two channels that are turned together, they are
// parts of the most that a token of the block can have there. Queries are multiplied by that most before they become whole
// numbers, once for a block. A number is off by 5 of 16,000 parts of its plane's most at the most, where a code of 4 bits
// whose levels go as far is off by 500. Values are summed as levels of a bell are, with a table for each run of tokens.
// Tokens that were moved stay floats.
#pragma once

#include "codes.h"
#include "fitted.h"
#include "numbers.h"
#include "turned.h"

#if defined(__AVX2__)
#include "short_levels.h"
#endif

namespace {

// Whether a side's levels become whole numbers: of a cache of 16 bits, whose tokens fill vectors.
[[maybe_unused]] bool fitted_shortly([[maybe_unused]] const Side& side, [[maybe_unused]] bool by_token) {
#if defined(__AVX2__)
  if (side.kind != FITTED_LEVELS || ((const Fitted*)side.low)->by_token != by_token || side.scales == FLOAT32) return false;
  return !side.row && side.size % 64 == 0 && side.size <= MOST_SHORT && fitted_in_nibbles(side);
#else
  return false;
#endif
}

// Whether a call's keys are read so, turned or not.
bool keys_fitted_shortly(const Turn* turn, const Side& keys) {
  if (!fitted_shortly(keys, false)) return false;
  return !turn || (!turn->map && turn->joined == 1 && !turn->interleaved && turn->size == keys.size && keys.size == 2 * turn->planes);
}

#if defined(__AVX2__)
// What a plane's numbers may be: the two of a token add up to so much, and rounding adds 5 at most. Half of what 16 bits
// hold, so that queries, whose error is the same for all tokens of a block, have a bit more.
constexpr int64_t MOST_OF_PLANE = 16000;

// The middle of a run's levels, and how far the others are from it. No number where one of them is none.
struct Interval {
  float middle, half;
};

// Whole numbers in place of a run's levels, so many at most.
inline void whole_levels_of(const float* levels, Interval interval, int64_t most, int16_t* to) {
  const float up = interval.half > 0 ? (float)most / interval.half : 0.f;
  for (int64_t i = 0; i < 16; i += W) store_shorts(to + i, rounded((load<F>(levels + i) - interval.middle) * up));
}

inline Interval interval_of(const float* levels, int64_t many) {
  float least = levels[0], most = levels[0], all_of = 0;
  for (int64_t i = 0; i < many; i++) {
    least = levels[i] < least ? levels[i] : least, most = levels[i] > most ? levels[i] : most;
    all_of += levels[i];
  }
  const float none = all_of - all_of;
  return {(least + most) / 2 + none, (most - least) / 2};
}

// A run's levels, and of its channels the step and the lowest number, where these are no token's.
struct RunTables {
  float levels[16], step[MOST_SHORT], low[MOST_SHORT];
  Interval interval;

  void read_levels(const Side& side, int64_t row) {
    const int64_t many = (int64_t)1 << side.bits;
    widen(side.scales, (const char*)((const Fitted*)side.low)->levels + row * many * 2, many, levels);
    for (int64_t i = many; i < 16; i++) levels[i] = levels[i - many];
    interval = interval_of(levels, many);
  }

  APART void read(const Side& side, int64_t row) {
    read_levels(side, row);
    widen(side.scales, (const char*)side.step + row * side.size * 2, side.size, step);
    widen(side.scales, (const char*)((const Fitted*)side.low)->low + row * side.size * 2, side.size, low);
  }
};

// What a block's keys are as whole numbers: how many are one, by channel, and of a run of them the levels, and by channel the
// step and the middle.
struct ShortKeys {
  float up[MOST_SHORT], unit[MOST_SHORT];
  alignas(64) int16_t levels[16], step[MOST_SHORT], middle[MOST_SHORT];

  // For `count` tokens from `first` on.
  APART PLAIN_LOOPS void begin(const Side& side, int64_t lane, int64_t slots, int64_t first, int64_t count, RunTables& run) {
    const int64_t planes = side.size / 2;
    int32_t most[MOST_SHORT];  // of each channel, the bits of the largest absolute value
    for (int64_t c = 0; c < side.size; c += W) store(most + c, I{});
    for (int64_t i = first / side.group; i * side.group < first + count; i++) {
      run.read(side, lane * side.runs + i);
      for (int64_t c = 0; c < side.size; c += W) {
        const F step = load<F>(run.step + c), middle = load<F>(run.low + c) + step * run.interval.middle, far = step * run.interval.half;
        store(most + c, largest_bits(largest_bits(load<I>(most + c), middle - far), middle + far));
      }
    }
    see_aside(side, lane * slots + first, count, most);
    for (int64_t c = 0; c < planes; c += W) {
      const F top = (F)load<I>(most + c) + (F)load<I>(most + planes + c);
      // What is less is nothing beside any other number.
      const F ups = top > 1e-30f ? (float)MOST_OF_PLANE / top : F{}, units = top * (1.f / MOST_OF_PLANE);
      store(up + c, ups), store(up + planes + c, ups);
      store(unit + c, units), store(unit + planes + c, units);
    }
  }

  // Numbers of tokens `begin`.. of all lanes that were kept aside, whichever token each is of.
  static void see_aside(const Side& side, int64_t begin, int64_t count, int32_t* most) {
    const void* channels = ((const Fitted*)side.low)->channels;
    const int64_t end = first_aside(side, begin + count);
    for (int64_t at = first_aside(side, begin); at < end; at += ASIDE) {
      float exact[ASIDE];
      const int64_t some = end - at < ASIDE ? end - at : ASIDE;
      widen_aside(side, at, some, exact);
      for (int64_t j = 0; j < some; j++) {
        int32_t* to = most + whole_at(side, channels, at + j);
        const int32_t mine = (int32_t)(bits_of(exact[j]) & 0x7fffffff);
        *to = mine > *to ? mine : *to;
      }
    }
  }

  APART void take(const RunTables& run, int64_t size) {
    whole_levels_of(run.levels, run.interval, 32767, levels);
    for (int64_t c = 0; c < size; c += W) {
      const F ups = load<F>(up + c), steps = load<F>(run.step + c);
      store_shorts(step + c, rounded(steps * run.interval.half * ups));
      store_shorts(middle + c, rounded((load<F>(run.low + c) + steps * run.interval.middle) * ups));
    }
  }

  // A query as whole numbers; gives what they are worth. No sum of a lane, of two numbers of 16, overflows.
  float cut(const float* query, int64_t size, bool turned, int16_t* to) const {
    float times[MOST_SHORT];
    I top{};
    F sum_of[2]{};
    for (int64_t c = 0; c < size; c += 2 * W)
      each_below<2>([&](auto i) INLINE {
        const F x = load<F>(query + c + i * W) * load<F>(unit + c + i * W);
        store(times + c + i * W, x), top = largest_bits(top, x);
        sum_of[i] += (F)((I)x & 0x7fffffff);
      });
    const F lanes = paired(sum_of[0], sum_of[1]);
    const float most = (float)(0x7fffffff / (MOST_OF_PLANE + 5) - size / 16), high = highest(lanes) * (32767 / most);
    const Scaled by = scaled_by(largest_bits(top, all(high)), 32767);
    shorten_to(times, size, by.up, to);
    // Cosines are parts of 32,767, and products are of 32,768.
    return turned ? by.back * (32768.f / 32767.f) : by.back;
  }

  // Tokens of a run, whose codes of 4 bits lie `apart` bytes apart, channel c with channel size / 2 + c, as whole numbers.
  APART void decode(const uint8_t* codes, int64_t apart, int64_t size, int64_t count, int16_t* to) const {
    const ByteTables table(levels);
    const int64_t planes = size / 2;
    for (int64_t c = 0; c < planes; c += HALF_VECTOR) {
      S steps[4], middles[4];
      each_below<4>([&](auto i) INLINE {
        const int64_t at = i / 2 * planes + c + i % 2 * 16;
        steps[i] = (S)of_tokens(step + at, step + at), middles[i] = (S)of_tokens(middle + at, middle + at);
      });
      const uint8_t* from = codes + c;
      int16_t* out = to + c;
      for (int64_t t = 0; t < count; t += TOKENS, from += TOKENS * apart, out += TOKENS * size) {
        const bool more = TOKENS > 1 && t + 1 < count;
        if (c == 0) soon(from);
        if (c == 0 && more) soon(from + apart);
        // So that levels come out in the order of their channels.
        const U bytes = in_turns(of_tokens(from, more ? from + apart : from));
        each_below<2>([&](auto kind) INLINE {
          S first, last;
          table.pick(four_bits(bytes, kind), first, last);
          int16_t *mine = out + kind * planes, *other = more ? mine + size : mine;
          store_tokens(mine, other, plus(rounded_product(first, steps[2 * kind]), middles[2 * kind]));
          store_tokens(mine + 16, other + 16, plus(rounded_product(last, steps[2 * kind + 1]), middles[2 * kind + 1]));
        });
      }
    }
  }

  // Writes the numbers that were kept aside over what the codes of a tile say.
  APART PLAIN_LOOPS void put_aside(const Side& side, int64_t begin, int64_t count, int16_t* tile) const {
    over_aside(side, begin, count, side.size, [&](int64_t row, int64_t channel, float x) INLINE {
      tile[row + channel] = (int16_t)_mm_cvtss_si32(_mm_set_ss(x * up[channel]));
    });
  }
};

// As `fill_angles`, as parts of 32,767.
APART PLAIN_LOOPS void fill_short_angles(const Turn& turn, const float* prepared, int64_t lane, int64_t slots, int64_t slot,
                                  int64_t count, int16_t* to) {
  over_angles(turn, prepared, lane, slots, slot, count, [&](int64_t t, int64_t i, F cosine, F sine) INLINE {
    int16_t* mine = to + (t * 2) * turn.planes + i;
    store_shorts(mine, rounded(cosine * 32767.f)), store_shorts(mine + turn.planes, rounded(sine * 32767.f));
  });
}

// Of R rows with W / R tokens from `first` on, row by row; tokens past the last repeat it.
template <int R, bool TURNED>
INLINE inline F fitted_products_of(const int16_t* asked, int64_t apart, int64_t planes, const int16_t* tile, const int16_t* angles,
                                   int64_t first, int64_t count) {
  constexpr int T = W / R;
  int64_t at[T];
  I sum_of[W]{};
  each_below<T>([&](auto i) INLINE { at[i] = (first + i < count ? first + i : count - 1) * 2 * planes; });
  const auto numbers = [&](int64_t place, S& x, S& y) INLINE {
    const S a = load<S>(tile + place), b = load<S>(tile + planes + place);
    if (!TURNED) {
      x = a, y = b;
      return;
    }
    const S cosine = load<S>(angles + place), sine = load<S>(angles + planes + place);
    x = minus(rounded_product(a, cosine), rounded_product(b, sine)), y = plus(rounded_product(b, cosine), rounded_product(a, sine));
  };
  for (int64_t c = 0; c < planes; c += 2 * W) {
    // Few rows read their queries for each token: registers do not hold more tokens.
    constexpr int ONCE = R == 4 ? T : 1;
    each_below<T / ONCE>([&](auto i) INLINE {
      S x[ONCE], y[ONCE];
      each_below<ONCE>([&](auto j) INLINE { numbers(at[i * ONCE + j] + c, x[j], y[j]); });
      each_below<R>([&](auto r) INLINE {
        add_pairs_of<ONCE>(sum_of + r * T + i * ONCE, x, asked + r * apart + c);
        add_pairs_of<ONCE>(sum_of + r * T + i * ONCE, y, asked + r * apart + planes + c);
      });
    });
  }
  // As floats, since all lanes together may be more than 32 bits hold.
  F found[W];
  each_below<W>([&](auto i) INLINE { found[i] = __builtin_convertvector(sum_of[i], F); });
  return sums(found);
}

// Products of R rows' queries, `apart` numbers from one another, with a tile of tokens, once these are turned.
template <int R, bool TURNED>
APART void fitted_products(const int16_t* asked, int64_t apart, const float* scale, int64_t planes, const int16_t* tile,
                           const int16_t* angles, int64_t count, float* to) {
  // Codes were asked for when the tile was made of them.
  over_tokens<R>(count, scale, to, BLOCK, nullptr, 0, [&](int64_t first) INLINE {
    return fitted_products_of<R, TURNED>(asked, apart, planes, tile, angles, first, count);
  });
}

// Adds weights of rows, BLOCK from one another, times `count` tokens of a run, whose codes of 4 bits lie `stride` bytes apart.
// `step` and `low` are those of the tokens. What was kept aside is left out.
APART void fitted_sums(const float* weights, int64_t rows, const char* codes, int64_t stride, int64_t count, const RunTables& run,
                       const float* step, const float* low, float* out, int64_t size, int64_t wide, const char*& next) {
  alignas(64) int16_t levels[16];
  float halves[SHORT_RUN + W], middles[SHORT_RUN + W];
  whole_levels_of(run.levels, run.interval, MOST_OF_VALUES, levels);
  const ByteTables table(levels);
  for (int64_t t = 0; t < count; t += W) {
    const F steps = load<F>(step + t);
    store(halves + t, steps * run.interval.half), store(middles + t, load<F>(low + t) + steps * run.interval.middle);
  }
  in_rows(rows, [&](auto some, int64_t r) {
    short_table_sums<decltype(some)::ROWS>(weights + r * BLOCK, BLOCK, codes, stride, count, table, 1.f / MOST_OF_VALUES, halves,
                                           middles, next, out + r * wide, size);
  });
}
#endif

}  // namespace
