// Levels that are fitted to runs of tokens, the numbers that are kept aside, and codes, in one pass over a run.
//
// Every number is made by the operations that ops/codes/nonuniform.py names, in their order, so that all bytes are the
// same. Sums of weights there and here are of few bits each, so they are exact in whatever order.
#pragma once

#include "packing.h"

// Mirrored field by field in library.py.
struct Fitting {
  const void* states;    // (lanes, slots, size), finite
  const uint8_t* dense;  // (lanes, slots) 1 where scales and levels are fitted to the token; null: everywhere
  const float* given;    // 2^bits levels of all runs; null: each run has its own fitted
  uint8_t* codes;        // (lanes, slots, bytes)
  void *low, *reach;     // of the states' type: (lanes, runs, size), or by token (lanes, slots)
  void* levels;          // of the states' type: (lanes, runs, 2^bits)
  uint8_t* far;          // (lanes, slots, size) 1 where a number is kept aside
  float* scratch;        // kvtailor_fitting_scratch() floats
  ParallelFor parallel_for;
  int64_t lane_bytes, slot_bytes, kind;
  int64_t lanes, slots, size, bits, group, by_token, threads;
  double share, largest;  // of a vector's numbers that are kept aside; the largest number of the states' type
};

namespace {

constexpr int64_t POINTS = 257, ROUNDS = 16;
constexpr int64_t PADDED_POINTS = POINTS + 7;

int64_t aside_of(double share, int64_t size) { return (int64_t)(share * (double)size + 0.5); }

int64_t padded_row(int64_t size) { return (size + W - 1) / W * W; }

int64_t longest_run(const Fitting& call) { return call.group < call.slots ? call.group : call.slots; }

// Floats of one thread: a run's states, distances and codes, three tables by channel, the histogram and its sums, levels.
int64_t scratch_of(const Fitting& call) {
  const int64_t wide = padded_row(call.size), many = (int64_t)1 << call.bits;
  const int64_t doubles = 8 * PADDED_POINTS + 4 * (many + 2);
  const int64_t floats = 2 * longest_run(call) * wide + 3 * wide + ceiling(wide + 8, 4) + 2 * many + 2;
  return ceiling(2 * doubles + floats, 16) * 16;
}

// Lloyd's rounds on a histogram of POINTS weights, from evenly spaced levels; see `fit_levels` of nonuniform.py. `sums`:
// 3 PADDED_POINTS doubles; `levels`: many, and room for 3 (many + 2) in all behind them.
EACH_ROUNDED void lloyd(const double* weights, int64_t many, double* sums, double* levels) {
  AS_WRITTEN
  double *moments = sums, *below = moments + PADDED_POINTS, *below_moments = below + PADDED_POINTS;
  double *held = levels + many + 2, *moment = held + many + 2;
  double total = 0, total_moment = 0;
  for (int64_t i = 0; i < POINTS; i++) {
    moments[i] = weights[i] * ((double)i / (POINTS - 1));
    total += weights[i], total_moment += moments[i];
    // A point's weight lies half on each side of it.
    below[i] = total - weights[i] / 2, below_moments[i] = total_moment - moments[i] / 2;
  }
  for (int64_t i = 0; i < many; i++) levels[i] = (double)i / (double)(many - 1);
  held[0] = moment[0] = 0, held[many] = total, moment[many] = total_moment;
  for (int64_t round = 0; round < ROUNDS; round++) {
    for (int64_t i = 1; i < many; i++) {
      const double border = (levels[i] + levels[i - 1]) / 2 * (POINTS - 1);
      const int64_t whole = (int64_t)border, left = whole < POINTS - 2 ? whole : POINTS - 2;
      const double rest = border - (double)left;
      held[i] = below[left] + rest * (below[left + 1] - below[left]);
      moment[i] = below_moments[left] + rest * (below_moments[left + 1] - below_moments[left]);
    }
    for (int64_t i = 0; i < many; i++) {
      const double mine = held[i + 1] - held[i];
      if (mine > 1e-6) levels[i] = (moment[i + 1] - moment[i]) / mine;
    }
  }
}

// Numbers of a tensor of the type `kind` become x; gives what it then is.
float keep_as(int64_t kind, void* table, int64_t i, float x) {
  if (kind == FLOAT32) return put<F32>(table, i, x);
  return kind == BFLOAT16 ? put<BF16>(table, i, x) : put<F16>(table, i, x);
}

// Of each vector the states of a run are (tokens, wide) floats, zeros behind the channels. A distance is that from the
// vector's mean; -1 of a token to which nothing is fitted, -2 of a number that is kept aside.
struct RunOfStates {
  const Fitting& call;
  const int64_t size = call.size, wide = padded_row(call.size), many = (int64_t)1 << call.bits;
  float *states, *distances, *means, *lows, *reaches;
  uint8_t* codes;
  double* weights;   // POINTS, then four times as many, and three for `lloyd`
  double* fitted;    // many, and thrice as many for `lloyd`
  float* levels;     // many, and the middles between them

  RunOfStates(const Fitting& call, float* scratch) : call(call) {
    const int64_t run = longest_run(call) * wide;
    weights = (double*)scratch, fitted = weights + 8 * PADDED_POINTS;
    levels = (float*)(fitted + 4 * (many + 2)), states = levels + 2 * many + 2;
    distances = states + run, means = distances + run, lows = means + wide, reaches = lows + wide;
    codes = (uint8_t*)(reaches + wide);
    memset(codes, 0, (size_t)(wide + 8));
  }

  const uint8_t* dense(int64_t place) const { return call.dense ? call.dense + place : nullptr; }

  // Of each channel the float32 nearest to its mean over the tokens that count, of which there are so many.
  APART void mean_of_channels(const uint8_t* used, int64_t count, int64_t tokens) const {
    typedef double D __attribute__((vector_size(W * 8)));
    for (int64_t c = 0; c < wide; c += W) {
      D total{};
      for (int64_t t = 0; t < count; t++)
        if (!used || used[t]) total += __builtin_convertvector(load<F>(states + t * wide + c), D);
      store(means + c, __builtin_convertvector(total / (double)(tokens > 1 ? tokens : 1), F));
    }
  }

  float mean_of_token(const float* state) const {
    double total = 0;
    for (int64_t c = 0; c < size; c++) total += (double)state[c];
    return (float)(total / (double)size);
  }

  int64_t wanted(int64_t most, int64_t counted) const {
    const int64_t mine = (int64_t)((float)call.share * (float)counted + 0.5f);
    return mine < most ? mine : most;
  }

  // Marks the farthest number of each of W channels, the earliest of equal ones.
  APART PLAIN_LOOPS void mark_channels(int64_t c, int64_t count, int64_t times) const {
    for (int64_t i = 0; i < times; i++) {
      F best = all(-3.f);
      I at{};
      for (int64_t t = 0; t < count; t++) {
        const F mine = load<F>(distances + t * wide + c);
        at = mine > best ? I{} + (int32_t)t : at, best = larger(mine, best);
      }
      for (int j = 0; j < W; j++) distances[at[j] * wide + c + j] = -2;
    }
  }

  APART PLAIN_LOOPS void mark_token(float* mine, int64_t times) const {
    for (int64_t i = 0; i < times; i++) {
      float best = -3;
      int64_t at = 0;
      for (int64_t c = 0; c < size; c++)
        if (mine[c] > best) best = mine[c], at = c;
      mine[at] = -2;
    }
  }

  // A vector's lowest number and reach as they are kept, at `place` of their tables.
  void keep_scale(float least, float greatest, int64_t place, float& low, float& reach) const {
    if (least > greatest) least = greatest = 0;
    low = keep_as(call.kind, call.low, place, least);
    const float asked = greatest - low, most = (float)call.largest;
    reach = keep_as(call.kind, call.reach, place, asked > most ? most : asked);
    if (!(reach > 0)) reach = keep_as(call.kind, call.reach, place, 1);
  }

  // Distances, marks, scales, and states as shares of their vector's reach.
  APART PLAIN_LOOPS void scale_channels(const uint8_t* used, int64_t count, int64_t row) const {
    const int64_t most = aside_of(call.share, count);
    int64_t tokens = 0;
    for (int64_t t = 0; t < count; t++) tokens += !used || used[t];
    if (most) mean_of_channels(used, count, tokens);
    for (int64_t c = 0; c < wide; c += W) {
      const F mean = most ? load<F>(means + c) : F{};
      for (int64_t t = 0; t < count; t++) {
        const F apart = load<F>(states + t * wide + c) - mean;
        store(distances + t * wide + c, used && !used[t] ? all(-1.f) : larger(apart, -apart));
      }
      mark_channels(c, count, most ? wanted(most, tokens) : 0);
      F least = all(-NOTHING), greatest = all(NOTHING);
      for (int64_t t = 0; t < count; t++) {
        const F x = load<F>(states + t * wide + c), mine = load<F>(distances + t * wide + c);
        least = mine >= 0.f && x < least ? x : least, greatest = mine >= 0.f && x > greatest ? x : greatest;
      }
      for (int j = 0; j < W; j++) {
        lows[c + j] = 0, reaches[c + j] = 1;
        if (c + j < size) keep_scale(least[j], greatest[j], row * size + c + j, lows[c + j], reaches[c + j]);
      }
      const F low = load<F>(lows + c), reach = load<F>(reaches + c);
      for (int64_t t = 0; t < count; t++) to_share(states + t * wide + c, low, reach);
    }
  }

  APART PLAIN_LOOPS void scale_tokens(const uint8_t* used, int64_t count, int64_t place) const {
    const int64_t most = aside_of(call.share, size);
    for (int64_t t = 0; t < count; t++) {
      float *state = states + t * wide, *mine = distances + t * wide;
      const bool counts = !used || used[t];
      const F mean = all(most && counts ? mean_of_token(state) : 0.f);
      F least = all(-NOTHING), greatest = all(NOTHING);
      for (int64_t c = 0; c < wide; c += W) {
        const F apart = load<F>(state + c) - mean;
        store(mine + c, counts ? larger(apart, -apart) : all(-1.f));
      }
      for (int64_t c = size; c < wide; c++) mine[c] = -1;
      if (counts && most) mark_token(mine, wanted(most, size));
      for (int64_t c = 0; c < wide; c += W) {
        const F x = load<F>(state + c), apart = load<F>(mine + c);
        least = apart >= 0.f && x < least ? x : least, greatest = apart >= 0.f && x > greatest ? x : greatest;
      }
      float low, reach;
      keep_scale(-highest(-least), highest(greatest), place + t, low, reach);
      for (int64_t c = 0; c < wide; c += W) to_share(state + c, all(low), all(reach));
    }
  }

  static void to_share(float* at, F low, F reach) {
    const F z = (load<F>(at) - low) / reach, least = F{} > z ? F{} : z;
    store(at, least > 1.f ? all(1.f) : least);
  }

  // Each number is shared by the two points beside it: the weights of those below, and of those above.
  APART PLAIN_LOOPS void count_points(int64_t count) const {
    double *below = weights + PADDED_POINTS, *above = below + 2 * PADDED_POINTS;
    for (int64_t i = 0; i < 5 * PADDED_POINTS; i++) weights[i] = 0;
    float parts[W];
    int32_t lefts[W];
    for (int64_t t = 0; t < count; t++)
      for (int64_t c = 0; c < wide; c += W) {
        const F place = load<F>(states + t * wide + c) * (float)(POINTS - 1), mine = load<F>(distances + t * wide + c);
        I left = __builtin_convertvector(place, I);
        left = left > (int32_t)(POINTS - 2) ? I{} + (int32_t)(POINTS - 2) : left;
        store(parts, place - __builtin_convertvector(left, F));
        store(lefts, left);
        const int64_t some = size - c < W ? size - c : W;
        for (int64_t j = 0; j < some; j++)
          if (mine[j] >= 0) {
            // Neighbours often share a point, and a sum waits for the one before: so there are two of each.
            const int64_t at = lefts[j] + (j & 1) * PADDED_POINTS;
            below[at] += (double)(1.f - parts[j]), above[at] += (double)parts[j];
          }
      }
    for (int64_t i = 0; i < POINTS; i++) {
      const double before = i ? above[i - 1] + above[PADDED_POINTS + i - 1] : 0;
      weights[i] = below[i] + below[PADDED_POINTS + i] + before;
    }
  }

  // How many middles lie below each number.
  APART PLAIN_LOOPS void code_token(const float* state, const float* middles) const {
    for (int64_t c = 0; c < wide; c += W)
      store_bytes(codes + c, __builtin_convertvector(borders_below(load<F>(state + c), middles, many), F));
  }

  APART void take(const RunOfTokens& tokens, int64_t bytes) const {
    const int64_t place = tokens.place, count = tokens.count, row = tokens.number;
    for (int64_t t = 0; t < count; t++) {
      widen(call.kind, tokens.states + t * call.slot_bytes, size, states + t * wide);
      for (int64_t c = size; c < wide; c++) states[t * wide + c] = 0;
    }
    if (call.by_token) scale_tokens(dense(place), count, place);
    else scale_channels(dense(place), count, row);
    if (!call.given) {
      count_points(count);
      lloyd(weights, many, weights + 5 * PADDED_POINTS, fitted);
    }
    for (int64_t i = 0; i < many; i++)
      levels[i] = keep_as(call.kind, call.levels, row * many + i, call.given ? call.given[i] : (float)fitted[i]);
    float* middles = levels + many + 1;
    for (int64_t i = 0; i + 1 < many; i++) middles[i] = (levels[i + 1] + levels[i]) / 2;
    for (int64_t t = 0; t < count; t++) {
      uint8_t* far = call.far + (place + t) * size;
      for (int64_t c = 0; c < size; c++) far[c] = distances[t * wide + c] == -2;
      code_token(states + t * wide, middles);
      for (int64_t c = size; c < wide; c++) codes[c] = 0;
      pack(codes, call.bits, size, call.codes + (place + t) * bytes);
    }
  }
};

int32_t fit(const Fitting& call) {
  const int64_t bytes = packed_bytes(call.size, call.bits);
  return over_runs(call, call.group, [&](const RunOfTokens& tokens, int64_t thread) {
    RunOfStates(call, call.scratch + thread * scratch_of(call)).take(tokens, bytes);
  });
}

}  // namespace
