// Keys from which a constant was taken before they were stored: what it adds to a logit follows from the query and the
// token's position alone. Of a plane that turns by f it is A cos p f + B sin p f. Within a span of positions these are,
// to 1e-6, sums of a few functions, so a span's tokens are multiplied with these and no sine is taken for a token.
#pragma once

#include "plain.h"
#include "turned.h"

// Mirrored field by field in library.py.
struct Offset {
  const float* query;         // (owners, rows, size) in the model's channels
  const float* vectors;       // (heads, size) the constant at position 0
  const double* frequencies;  // (planes) radians per position
  const float* weights;       // (2 planes, wide) of each cosine, then of each sine: what it has of each function
  const float* functions;     // (rank, SPAN), and a row behind
  const int32_t* positions;   // (lanes, slots) columns; null: start + slot
  const int64_t* first;       // (lanes) column from which positions count; null: 0
  int64_t planes, interleaved;  // interleaved: plane i is channels 2 i and 2 i + 1; else i and i + planes
  int64_t start, size, heads, rank, wide;  // wide: a multiple of 32
};

namespace {

constexpr int N_TOKENS = W == 16 ? 4 : 2;  // vectors of tokens that are taken at once
constexpr int64_t SPAN = BLOCK, AT_A_TIME = N_TOKENS * W;

int64_t whole_planes(const Offset& offset) { return (offset.planes + W - 1) / W * W; }

// A row of A and B once they are turned: stores of whole vectors go past them.
int64_t turned_row(const Offset& offset) { return 2 * offset.planes + 2 * W; }

// Floats of a piece of work: A and B of each row, its constant, cosines and sines, the same turned, factors of the
// functions; tokens that are gathered, and their logits.
SMALL_CODE int64_t room_of(const Offset& offset, int64_t rows) {
  const int64_t planes = whole_planes(offset), of_rows = 2 * planes + 1 + turned_row(offset) + offset.wide + BLOCK;
  return rows * of_rows + 2 * planes + AT_A_TIME * offset.rank;
}

// So many rows' factors of the functions.
template <int R>
APART PLAIN_LOOPS void factors_of(const float* terms, int64_t apart, int64_t count, const float* weights, int64_t wide, float* to) {
  for (int64_t k = 0; k < wide; k += 2 * W) {
    F sum_of[R][2]{};
    for (int64_t j = 0; j < count; j++) {
      const F first = load<F>(weights + j * wide + k), second = load<F>(weights + j * wide + k + W);
      UNROLLED for (int r = 0; r < R; r++) sum_of[r][0] += first * terms[r * apart + j], sum_of[r][1] += second * terms[r * apart + j];
    }
    UNROLLED for (int r = 0; r < R; r++) store(to + r * wide + k, sum_of[r][0]), store(to + r * wide + k + W, sum_of[r][1]);
  }
}

// Adds to the logits of R rows what the functions from `from` on give N vectors of tokens.
template <int R, int N>
APART PLAIN_LOOPS void add_tokens(const float* factors, const float* constants, int64_t wide, int64_t rank, const float* from,
                                  int64_t apart, float* to) {
  F sum_of[R][N];
  UNROLLED for (int r = 0; r < R; r++)
    UNROLLED for (int i = 0; i < N; i++) sum_of[r][i] = all(constants[r]);
  for (int64_t k = 0; k < rank; k++, from += apart) {
    F value[N];
    UNROLLED for (int i = 0; i < N; i++) value[i] = load<F>(from + i * W);
    UNROLLED for (int r = 0; r < R; r++)
      UNROLLED for (int i = 0; i < N; i++) sum_of[r][i] += value[i] * factors[r * wide + k];
  }
  UNROLLED for (int r = 0; r < R; r++)
    UNROLLED for (int i = 0; i < N; i++) {
      float* at = to + r * BLOCK + i * W;
      store(at, load<F>(at) + sum_of[r][i]);
    }
}

// One piece's part of it.
struct Shift {
  const Offset& offset;
  int64_t rows;
  float *terms, *constants, *cosines, *sines, *turned, *factors, *tile, *gathered;

  int64_t at_once(int64_t row) const { return rows - row < 4 ? 1 : 4; }

  SMALL_CODE Shift(const Offset& offset, int64_t rows, float* scratch) : offset(offset), rows(rows) {
    const int64_t planes = whole_planes(offset);
    terms = scratch, constants = terms + rows * 2 * planes, cosines = constants + rows, sines = cosines + planes;
    turned = sines + planes, factors = turned + rows * turned_row(offset), tile = factors + rows * offset.wide;
    gathered = tile + AT_A_TIME * offset.rank;
  }

  // A and B of an owner's queries, and what channels that are not turned give.
  SMALL_CODE void ask(int64_t owner, double scaling) const {
    const int64_t size = offset.size, planes = offset.planes, wide = whole_planes(offset);
    const float scale = (float)scaling;
    const float *query = offset.query + owner * rows * size, *vector = offset.vectors + owner % offset.heads * size;
    memset(gathered, 0, (size_t)(rows * BLOCK) * sizeof(float));
    for (int64_t r = 0; r < rows; r++, query += size) {
      float *a = terms + r * 2 * wide, *b = a + wide;
      memset(a, 0, (size_t)(2 * wide) * sizeof(float));
      for (int64_t i = 0; i < planes; i++) {
        const int64_t one = offset.interleaved ? 2 * i : i, other = one + (offset.interleaved ? 1 : planes);
        a[i] = (query[one] * vector[one] + query[other] * vector[other]) * scale;
        b[i] = (query[other] * vector[one] - query[one] * vector[other]) * scale;
      }
      constants[r] = 0;
      for (int64_t c = 2 * planes; c < size; c++) constants[r] += query[c] * vector[c] * scale;
    }
  }

  // Angles of a position less whole turns, as exact as a float can tell them.
  SMALL_CODE void angles_at(int64_t base) const {
    constexpr double WHOLE = 6.283185307179586477;
    for (int64_t i = 0; i < whole_planes(offset); i++) {
      const double angle = i < offset.planes ? (double)base * offset.frequencies[i] : 0;
      cosines[i] = (float)(angle - WHOLE * (double)(int64_t)(angle * (1 / WHOLE)));
    }
  }

  // Factors of the functions in the span that begins at a position.
  SMALL_CODE void begin(int64_t base) const {
    const int64_t planes = offset.planes, wide = whole_planes(offset), row = turned_row(offset);
    angles_at(base);
    for (int64_t i = 0; i < wide; i += W) {
      F cosine, sine;
      cosine_and_sine(load<F>(cosines + i), cosine, sine);
      store(cosines + i, cosine), store(sines + i, sine);
    }
    for (int64_t r = 0; r < rows; r++) {
      const float *a = terms + r * 2 * wide, *b = a + wide;
      float* to = turned + r * row;
      for (int64_t i = 0; i < wide; i += W)
        store(to + i, load<F>(a + i) * load<F>(cosines + i) + load<F>(b + i) * load<F>(sines + i));
      for (int64_t i = 0; i < wide; i += W)
        store(to + planes + i, load<F>(b + i) * load<F>(cosines + i) - load<F>(a + i) * load<F>(sines + i));
    }
    for (int64_t r = 0, some; r < rows; r += some) {
      some = at_once(r);
      (some == 4 ? factors_of<4> : factors_of<1>)(turned + r * row, row, 2 * planes, offset.weights, offset.wide,
                                                  factors + r * offset.wide);
    }
  }

  // Adds so many tokens' logits, and leaves none.
  SMALL_CODE void take_gathered(int64_t count, int64_t tokens, float* to) const {
    for (int64_t r = 0; r < count; r++)
      for (int64_t t = 0; t < AT_A_TIME; t++) {
        if (t < tokens) to[r * BLOCK + t] += gathered[r * BLOCK + t];
        gathered[r * BLOCK + t] = 0;
      }
  }

  // Tokens of which each function is a row, `apart` floats behind the one before.
  SMALL_CODE void add_run(const float* from, int64_t apart, int64_t count, float* to) const {
    for (int64_t r = 0, some; r < rows; r += some) {
      some = at_once(r);
      const auto add = some == 4 ? add_tokens<4, N_TOKENS> : add_tokens<1, N_TOKENS>;
      for (int64_t t = 0; t < count; t += AT_A_TIME) {
        // What stands past the last of them belongs to other tokens.
        const int64_t part = count - t < AT_A_TIME ? count - t : AT_A_TIME;
        float *there = to + r * BLOCK + t, *into = part < AT_A_TIME ? gathered : there;
        add(factors + r * offset.wide, constants + r, offset.wide, offset.rank, from + t, apart, into);
        if (into != there) take_gathered(some, part, there);
      }
    }
  }

  // Tokens at any positions of the span, whose columns these are.
  SMALL_CODE void add_gathered(const int32_t* columns, int64_t less, int64_t count, float* to) const {
    for (int64_t t = 0; t < count; t += AT_A_TIME) {
      const int64_t part = count - t < AT_A_TIME ? count - t : AT_A_TIME;
      for (int64_t i = 0; i < AT_A_TIME; i++) {
        const float* from = offset.functions + ((columns[t + (i < part ? i : 0)] - less) & (SPAN - 1));
        for (int64_t k = 0; k < offset.rank; k++) tile[k * AT_A_TIME + i] = from[k * SPAN];
      }
      add_run(tile, AT_A_TIME, part, to + t);
    }
  }

  // What the constant adds to the logits (rows, BLOCK) of a lane's tokens from the slot `slot` on.
  SMALL_CODE void add(int64_t lane, int64_t slots, int64_t slot, int64_t count, float* to) const {
    const int64_t less = offset.first ? offset.first[lane] : 0;
    const int32_t* columns = offset.positions ? offset.positions + lane * slots + slot : nullptr;
    for (int64_t t = 0; t < count;) {
      const int64_t place = (columns ? columns[t] : offset.start + slot + t) - less, base = place & ~(SPAN - 1);
      int64_t end = t + 1;
      bool neighbours = true;
      if (!columns) end = base + SPAN - place < count - t ? t + base + SPAN - place : count;
      else
        for (; end < count && ((columns[end] - less) & ~(SPAN - 1)) == base; end++) neighbours &= columns[end] == columns[end - 1] + 1;
      begin(base);
      if (neighbours) add_run(offset.functions + place - base, SPAN, end - t, to + t);
      else add_gathered(columns + t, less, end - t, to + t);
      t = end;
    }
  }
};

}  // namespace
