// Attention of a few queries over lanes in any of the layouts, in one pass over their bytes.
//
// A piece of work is a run of slots of one lane. Its tokens are taken a block at a time: logits of all query rows, a
// running softmax, weighted sums. What each piece found (its highest logit, its sum, its outputs) is merged by owner in
// the end. Sums are float32.
#include "codes.h"
#include "fitted.h"
#include "fitted_shorts.h"
#include "magnitudes.h"
#include "nibbles.h"
#include "numbers.h"
#include "offset.h"
#include "plain.h"
#include "signs.h"
#include "small_floats.h"
#include "threads.h"
#include "turned.h"

#if defined(__AVX512F__)
#include "blocks.h"
#include "half_levels.h"
#elif defined(SHORT_PRODUCTS)
#include "short_blocks.h"
#endif
#if defined(__ARM_FEATURE_DOTPROD) && defined(__linux__)
#include <sys/auxv.h>
#endif

// Mirrored field by field in library.py.
struct Call {
  const float* query;  // (owners, rows, keys.size)
  Side keys, values;
  const int64_t* owner;     // (m,) ascending; null: lane i belongs to owner i
  const int32_t* lengths;   // (m,) filled slots; null: all
  const uint8_t* visible;   // null: all slots are seen
  const float* log_weight;  // (m, s); null: none
  float* out;               // (owners, rows, values.size)
  float* lse;               // (owners, rows)
  float* found;             // kvtailor_found() floats
  float* scratch;              // kvtailor_scratch() floats
  ParallelFor parallel_for;
  int64_t visible_lane, visible_query, visible_slot;  // strides in bytes, 0 where it is broadcast
  int64_t owners, lanes, slots, rows, queries, chunk, threads;  // chunk: a multiple of BLOCK
  double scaling;
  float* kept;          // kvtailor_kept() floats: weights (m, rows, s), what they are relative to (m, rows, blocks)
  const float* counts;  // (owners, queries) of each query for the mass
  float* mass;          // (m, s)
  double softcap;       // logits are softcap * tanh(logit / softcap); 0: as they are
  const int32_t* firsts;  // (m,) slots of each lane that no query sees before all others; null: none
  const int64_t* starts;  // (m,) slots from the data to where each lane begins, of plain sides; null: as `lane_bytes` says
  const Turn* turn;       // keys were turned back before they were stored, and `query` has as many channels as it says
  const Magnitudes *key_magnitudes, *value_magnitudes;  // the sides have directions; null: they have the states
  const Offset* offset;  // a constant was taken off keys before they were stored; null: none was
};

namespace {

constexpr int64_t TILE = 16;  // tokens that are decoded at once
constexpr int64_t OF_DECODING = FITTED_ROWS > 3 ? FITTED_ROWS : 3;  // rows of a tile that decoding takes beside it

int64_t padded(int64_t size) { return (size + 2 * W - 1) / (2 * W) * (2 * W); }

// Whether logits of codes, or sums of coded values, are taken from the codes as they lie.
bool keys_fused(const Side& side) {
  const int64_t groups = groups_of(side);
  return whole_words(side) && (groups == 1 || (has_levels(side) && side.group % 4 == 0));
}

bool values_fused(const Side& side) {
  const int64_t groups = groups_of(side);
  return whole_words(side) && side.kind != CHANNEL_CODES && (groups == 1 || (groups <= W && side.group % 4 == 0));
}

// Whether codes are levels of a bell in a cache of 16 bits, for which whole numbers are exact enough.
[[maybe_unused]] bool bell_of_16_bits(const Side& side) {
  return keys_fused(side) && side.kind == LEVEL_CODES && side.scales != FLOAT32;
}

// Whether they are read as whole numbers: those of tokens that fill vectors.
bool levels_coarse(const Side& side) {
#if defined(INTEGER_PRODUCTS)
  return bell_of_16_bits(side) && folds(side) == 1;
#else
  return false;
#endif
}

// Or, as half_levels.h does it, of tokens that are half a vector.
[[maybe_unused]] bool halves_coarse([[maybe_unused]] const Side& side) {
#if defined(__AVX512F__)
  return bell_of_16_bits(side) && side.bits == 4 && side.size == HALF_LEVELS;
#else
  return false;
#endif
}

// Whether blocks of levels are read as blocks.h or short_blocks.h does it.
[[maybe_unused]] bool blocks_coarse([[maybe_unused]] const Side& side) {
#if defined(__AVX2__)
  return in_blocks(side);
#else
  return false;
#endif
}

// Whether keys' logits are taken in integers: where the cache has 16 bits, so that 16 bits of a query are enough.
bool keys_coarse(const Side& side) {
#if defined(__AVX512F__)
  if (has_levels(side))
    return blocks_coarse(side) || halves_coarse(side) || (levels_coarse(side) && side.size <= MOST_SHORT / 2);
  return keys_fused(side) && side.scales != FLOAT32 && side.size <= MOST_SHORT;
#elif defined(INTEGER_PRODUCTS)
  if (!keys_fused(side) || side.size > MOST_SHORT || folds(side) > 1) return false;
  return has_levels(side) ? levels_coarse(side) || blocks_coarse(side) : side.scales != FLOAT32;
#else
  return false;
#endif
}

// Whether codes of values may be summed in integers: where scales have 16 bits, and weights times steps no sign.
bool values_coarse(const Side& side) { return side.scales != FLOAT32 && !side.signed_steps; }

// Whether values are summed in the order of their channels: as bytes.h and blocks.h do, or without VNNI those of levels.
bool values_short(const Side& side) {
#if defined(BYTE_PRODUCTS)
  if (blocks_coarse(side) || halves_coarse(side)) return true;
#if defined(__ARM_FEATURE_DOTPROD)
  if (has_levels(side)) return values_fused(side) && levels_coarse(side);
#endif
  if (!values_fused(side) || has_levels(side) || !values_coarse(side) || groups_of(side) > MOST_GROUPS) return false;
  return in_short_tokens(side) && side.group % PART == 0;
#elif defined(INTEGER_PRODUCTS)
  return values_fused(side) && (levels_coarse(side) || blocks_coarse(side));
#else
  return false;
#endif
}

// A side as it is read: with codes of 4 bits in place of narrower ones, where these are then taken as they lie.
Side readable(const Side& side, bool (*fused)(const Side&)) {
  if (!becomes_nibbles(side)) return side;
  const Side nibbles = as_nibbles(side);
  return fused(nibbles) ? nibbles : side;
}

// Where channel c comes to lie when the side's tokens are read as they are; `placed`: in the order of words.h.
int64_t place(const Side& side, bool placed, int64_t c) {
  if (side.kind == GRID_CODES) {
    const int64_t pairs = codes_of(side), second = c >= pairs, pair = second ? side.size - 1 - c : c;
    return placed ? second * pairs + place_of_code(side, pair) : 2 * pair + second;
  }
  if (placed) return place_of_code(side, c);
  if (in_small_floats(side)) return place_of_small_float(c);
  if (side.kind != BFLOAT16 || side.size % (2 * W)) return c;
  return c / (2 * W) * (2 * W) + BF16::place((int)(c % (2 * W)));
}

// Whether slot s of lane i + 1 lies where slot `slots` + s of lane i would, scales included; with `starts` they tell.
bool in_one_row(const Side& side, int64_t slots, bool starts) {
  if (starts) return true;
  if (side.lane_bytes != slots * side.slot_bytes) return false;
  if (side.kind == SIGNED_LEVELS) {
    const Signs& own = *(const Signs*)side.low;
    return own.lane_bytes == slots * own.slot_bytes;
  }
  if (side.kind == CHANNEL_CODES || side.kind == FITTED_LEVELS) return side.row || side.runs * side.group == slots;
  if (side.kind != BLOCK_LEVELS) return true;
  const Blocks& blocks = *(const Blocks*)side.low;
  return !blocks.outer || side.row || side.runs * blocks.span == slots;
}

// Floats that a row's query takes as whole numbers.
#if defined(INTEGER_PRODUCTS)
constexpr int64_t OF_CUT = sizeof(CutQuery) / sizeof(float);
#else
constexpr int64_t OF_CUT = 0;
#endif

// Whether queries for runs of tokens are made of those for all runs of a block: see Shares.
bool shares_steps([[maybe_unused]] const Side& keys) {
#if defined(SHORT_PRODUCTS)
  return keys.kind == CHANNEL_CODES && keys.group < BLOCK;
#else
  return false;
#endif
}

// So many floats or more, which fill whole lines of a cache.
int64_t lines(int64_t floats) { return (floats + 15) / 16 * 16; }

// Words of scratch for the marks of a side.
int64_t marks_of(const Side& side, int64_t slots) { return side.kind == FITTED_LEVELS ? lines(slots / MARKED + 1) : 0; }

// Floats that a block of a side's tokens takes as codes of 4 bits.
int64_t of_nibbles(bool made, const Side& side) { return NIBBLES && made ? lines(BLOCK * side.size / 8) : 0; }

// Floats that a row of a side has, those of signs behind the others' of all rows.
int64_t room_of(const Side& side) { return halves_of(side) * padded(without_signs(side).size); }

// What all pieces of a call know, and how much scratch each thread has.
struct Tables {
  const Call& call;
  // Keys that are turned are decoded first.
  Side keys = call.turn ? without_signs(call.keys) : readable(without_signs(call.keys), keys_fused);
  Side values = readable(without_signs(call.values), values_fused);
  bool nibble_keys = NIBBLES && keys.bits != call.keys.bits, nibble_values = NIBBLES && values.bits != call.values.bits;
  // Those of keys that are turned have room for what is stored and for a head's channels, in their own order.
  int64_t wide_turned = call.turn ? padded(call.turn->size) : 0, wide_values = padded(values.size);
  int64_t wide_keys = padded(keys.size) > wide_turned ? padded(keys.size) : wide_turned;
  int64_t all_keys = halves_of(call.keys) * wide_keys, all_values = room_of(call.values);  // with those of signs
  bool signed_keys = all_keys > wide_keys, signed_values = all_values > wide_values;
  bool fused_keys = !call.turn && keys_fused(keys), fused_values = values_fused(values);
  bool small_keys = !call.turn && in_small_floats(keys), small_values = in_small_floats(values);
  bool coarse_keys = !call.turn && keys_coarse(keys), short_values = values_short(values);
  bool cut_keys = coarse_keys && !has_levels(keys);  // products of their codes are taken in integers
  // The same with `visible` as with `firsts`: a step and what it stands for must take the same blocks.
  bool joined = !call.kept && !(call.starts && call.log_weight) &&
                in_one_row(call.keys, call.slots, call.starts) && in_one_row(call.values, call.slots, call.starts);
  int32_t* key_place = (int32_t*)call.scratch;            // of each channel
  int32_t* key_channel = key_place + all_keys;        // at each place
  int32_t* value_place = key_channel + wide_keys;
  int32_t* scale_lanes = value_place + all_values;    // see Scales
  int32_t* key_lanes = scale_lanes + wide_values + W;  // the same of keys
  int64_t places = lines(all_keys + 2 * wide_keys + all_values + wide_values + 2 * W);
  int32_t* marks = key_place + places;  // of keys, and behind them of values
  int64_t marks_of_keys = marks_of(keys, call.lanes * call.slots);
  float* prepared = (float*)(marks + marks_of_keys + marks_of(values, call.lanes * call.slots));  // see turned.h
  bool coarse_map = maps_coarse(call.turn, keys), short_fitted_keys = keys_fitted_shortly(call.turn, keys);
  bool short_fitted_values = fitted_shortly(values, true);
  int64_t of_turn = call.turn ? lines(room_of(*call.turn, keys.size, wide_turned, coarse_map)) : 0;
  int64_t angles = call.turn ? 2 * turning_numbers(*call.turn) : 0;  // of a token
  float* scratches = prepared + of_turn;

  int64_t own() const { return scratches - (float*)call.scratch; }

  int64_t widest() const { return wide_keys > wide_values ? wide_keys : wide_values; }

  // Scaled queries in the order of channels, what tokens that are whole get or give, and sums of these.
  int64_t of_magnitudes() const {
    const int64_t queries = call.key_magnitudes ? call.rows * wide_keys : 0;
    const int64_t sums = call.value_magnitudes ? call.rows * wide_values : 0;
    return queries || sums ? lines(call.rows * BLOCK + queries + sums) : 0;
  }

  int64_t before_offset() const { return before_magnitudes() + of_magnitudes(); }

  int64_t each() const { return before_offset() + (call.offset ? lines(room_of(*call.offset, call.rows)) : 0); }

  // Of a row's queries as whole numbers, those for a run of tokens and those for a block.
  int64_t cuts() const { return shares_steps(keys) ? 2 : 1; }

  // Scaled queries, the same times scales, their sums; logits; hidden columns; decoded tokens; scales.
  int64_t before_magnitudes() const {
    const int64_t queries = call.rows * (all_keys + wide_keys) + padded(call.rows), logits = (call.rows + call.queries) * BLOCK;
    const int64_t of_keys = 4 * wide_keys + (1 + groups_of(keys)) * BLOCK + W, of_values = 2 * (BLOCK * groups_of(values) + W);
    const int64_t shorts = coarse_map ? TILE * (padded_to_chunks(keys.size) / 2 + 1) : 0;
    const int64_t turned = BLOCK * angles + TILE * wide_turned + shorts;
    return of_nibbles(nibble_keys, keys) + of_nibbles(nibble_values, values) + (cut_keys ? cuts() * call.rows * OF_CUT : 0) +
           lines(queries + logits + (TILE + OF_DECODING) * widest() + of_keys + of_values + W + turned);
  }

  SMALL_CODE void fill() const {
    const bool placed_keys = fused_keys && !coarse_keys, placed_values = fused_values && !short_values;
    for (int64_t c = 0; c < wide_keys; c++) key_channel[c] = 0;
    for (int64_t c = 0; c < wide_keys; c++)
      key_channel[key_place[c] = (int32_t)(c < keys.size ? place(keys, placed_keys, c) : c)] = (int32_t)c;
    for (int64_t c = 0; c < values.size; c++)
      value_place[c] = (int32_t)place(values, placed_values, c);
    if (signed_keys)
      for (int64_t c = 0; c < keys.size; c++) key_place[keys.size + c] = (int32_t)(wide_keys + place_of_sign(keys.size, c));
    if (signed_values)
      for (int64_t c = 0; c < values.size; c++)
        value_place[values.size + c] = (int32_t)(wide_values + place_of_sign(values.size, c));
    if (placed_values) fill_lanes(values, scale_lanes);
    if (placed_keys && has_levels(keys)) fill_lanes(keys, key_lanes);
    if (keys.kind == FITTED_LEVELS) mark(keys, call.lanes * call.slots, marks);
    if (values.kind == FITTED_LEVELS) mark(values, call.lanes * call.slots, marks + marks_of_keys);
    if (call.turn) prepare(*call.turn, keys.size, wide_turned, coarse_map, prepared);
  }

  static void fill_lanes(const Side& side, int32_t* lanes) {
    const int64_t kinds = 8 / side.bits, bytes = codes_of(side) / kinds, words = W / folds(side);
    const int64_t group = groups_of(side) > 1 ? side.group : side.size;
    for (int64_t v = 0; v * 4 * words < bytes; v++)
      for (int64_t kind = 0; kind < kinds; kind++)
        for (int64_t i = 0; i < W; i++)
          lanes[(v * kinds + kind) * W + i] = (int32_t)((v * 4 * words + i % words * 4 + kind * bytes) / group);
  }
};

// Apart, since several functions begin with it.
SMALL_CODE Tables tables_of(const Call& call) { return Tables{call}; }

// Logits become weights relative to the highest so far; what was found before is scaled to it.
// `out` has so many runs of `size` numbers, `apart` from one another.
void soften(float* logits, int64_t count, float* top, float* total, float* out, int64_t size, int64_t runs, int64_t apart) {
  const int64_t wide = padded(count);
  for (int64_t t = count; t < wide; t++) logits[t] = NOTHING;
  F high = all(NOTHING);
  for (int64_t t = 0; t < wide; t += W) high = larger(load<F>(logits + t), high);
  const float now = highest(high);
  if (now > *top) {
    const float fade = *top == NOTHING ? 0.f : exponential(all(*top - now))[0];
    *total *= fade;
    for (int64_t i = 0; i < runs; i++, out += apart)
      for (int64_t c = 0; c < size; c += W) store(out + c, load<F>(out + c) * fade);
    *top = now;
  }
  const float shift = *top == NOTHING ? 0.f : *top;
  F added{};
  for (int64_t t = 0; t < wide; t += W) {
    const F weight = exponential(load<F>(logits + t) - shift);
    store(logits + t, weight);
    added += weight;
  }
  *total += sum(added);
}

int64_t blocks(const Call& call) { return (call.slots + BLOCK - 1) / BLOCK; }

// A row's softmax weights of a lane, and for each block the logit that they are relative to.
float* kept_weights(const Call& call, int64_t lane, int64_t row) {
  return call.kept + (lane * call.rows + row) * call.slots;
}

float* kept_tops(const Call& call, int64_t lane, int64_t row) {
  return call.kept + call.lanes * call.rows * call.slots + (lane * call.rows + row) * blocks(call);
}

struct Piece {
  const Call& call;
  const Tables& tables;
  int64_t lane, rows = call.rows;  // `lane` may become another of the same owner
  float *cut, *query, *folded, *sums_at, *logits_at, *hidden, *tile, *scales, *key_scales, *value_scales, *angles, *turned;
  float *of_whole, *whole_sums, *whole_query, *of_offset, *key_nibbles, *value_nibbles;
  float unit_of_keys = 1;     // what logits of keys in small floats are to be multiplied by
  bool knows_angles = false;  // those of the block are there

  // Apart, since several functions begin with it.
  APART Piece(const Call& call, const Tables& tables, int64_t lane, float* scratch) : call(call), tables(tables), lane(lane) {
    key_nibbles = scratch, value_nibbles = key_nibbles + of_nibbles(tables.nibble_keys, tables.keys);
    cut = value_nibbles + of_nibbles(tables.nibble_values, tables.values);
    query = cut + (tables.cut_keys ? tables.cuts() * rows * OF_CUT : 0);
    folded = query + rows * tables.all_keys, sums_at = folded + rows * tables.wide_keys;
    logits_at = sums_at + padded(rows), hidden = logits_at + rows * BLOCK, tile = hidden + call.queries * BLOCK;
    scales = tile + TILE * tables.widest(), key_scales = scales + OF_DECODING * tables.widest();
    value_scales = key_scales + 4 * tables.wide_keys + (1 + groups_of(tables.keys)) * BLOCK + W;
    angles = value_scales + 2 * (BLOCK * groups_of(tables.values) + W), turned = angles + BLOCK * tables.angles;
    of_whole = scratch + tables.before_magnitudes(), whole_sums = of_whole + rows * BLOCK;
    whole_query = whole_sums + (call.value_magnitudes ? rows * tables.wide_values : 0);
    of_offset = scratch + tables.before_offset();
    if (call.offset) Shift(*call.offset, rows, of_offset).ask(owner(), call.scaling);
    if (call.key_magnitudes) lay_out(call.keys.size, tables.wide_keys, whole_query);
    if (call.turn) {
      lay_out(call.turn->size, tables.wide_turned, query);
      return;
    }
    const int64_t size = call.keys.size, wide = tables.wide_keys;
    const float* from = call.query + (call.owner ? call.owner[lane] : lane) * rows * size;
    for (int64_t r = 0; r < rows; r++, from += size) {
      float *mine = query + r * wide, *of_signs = query + (rows + r - 1) * wide;
      sums_at[r] = 0;
      for (int64_t c = tables.keys.size; c < wide; c++) mine[c] = 0;
      if (tables.signed_keys)
        for (int64_t c = wide; c < 2 * wide; c++) of_signs[c] = 0;
      for (int64_t c = 0; c < size; c++) {
        const float scaled = from[c] * (float)call.scaling;
        const int64_t at = tables.key_place[c];
        (at < wide ? mine : of_signs)[at] = scaled;
        sums_at[r] += scaled;
      }
    }
    if (SMALL_FLOATS && tables.small_keys) {
      // Queries come to 2^100 where no power of two is too large for that.
      const float power = power_below(query, rows * wide, 7.4505805969238281e-9f), to_high = 1.2676506002282294e30f;
      times(query, rows * wide, to_high / power);
      unit_of_keys = UNIT / to_high * power;
    }
#if defined(INTEGER_PRODUCTS)
    if (tables.cut_keys && tables.keys.kind == TOKEN_CODES)
      for (int64_t r = 0; r < rows; r++) cut_query(r).fill(query + r * wide, wide, tables.keys.bits);
#endif
  }

  int64_t owner() const { return call.owner ? call.owner[lane] : lane; }

  // Queries in the order of their channels, for keys that are turned, or whole where others are directions.
  SMALL_CODE void lay_out(int64_t size, int64_t wide, float* to) const {
    const float* from = call.query + owner() * rows * size;
    for (int64_t r = 0; r < rows; r++, from += size, to += wide)
      for (int64_t c = 0; c < wide; c++) to[c] = c < size ? from[c] * (float)call.scaling : 0.f;
  }

  // Logits of directions become those of keys.
  SMALL_CODE void magnify_logits(int64_t first, int64_t count) const {
    const Magnitudes& own = *call.key_magnitudes;
    const int64_t place = lane * call.slots + first, wide = tables.wide_keys;
    widen(own.kind, (const char*)own.of + place * bytes_of(own), count, key_scales);
    times_scales(key_scales, count);
    over_whole(own, place, count, TILE, [&](int64_t i, int64_t n) {
      widen_whole(own, i, n, call.keys.size, wide, tile);
      logits<F32>(whole_query, rows, wide, (const char*)tile, wide * 4, n, of_whole);
      for (int64_t r = 0; r < rows; r++)
        for (int64_t t = 0; t < n; t++) logits_at[r * BLOCK + own.places[i + t] - place] = of_whole[r * BLOCK + t];
    });
  }

  // Weights of values become those of directions; values that are whole are summed, and have none of them.
  SMALL_CODE void magnify_weights(int64_t first, int64_t count, float* out) const {
    const Magnitudes& own = *call.value_magnitudes;
    const int64_t place = lane * call.slots + first, wide = tables.wide_values, size = call.values.size;
    for (int64_t i = 0; i < rows * wide; i++) whole_sums[i] = 0;
    over_whole(own, place, count, TILE, [&](int64_t i, int64_t n) {
      for (int64_t r = 0; r < rows; r++)
        for (int64_t t = 0; t < n; t++) {
          float* at = logits_at + r * BLOCK + own.places[i + t] - place;
          of_whole[r * BLOCK + t] = *at, *at = 0;
        }
      widen_whole(own, i, n, size, wide, tile);
      mix<F32>(of_whole, rows, (const char*)tile, wide * 4, n, whole_sums, wide);
    });
    for (int64_t r = 0; r < rows; r++)
      for (int64_t c = 0; c < size; c++) out[r * wide + tables.value_place[c]] += whole_sums[r * wide + c];
    widen(own.kind, (const char*)own.of + place * bytes_of(own), count, value_scales);
    times_scales(value_scales, count);
  }

  void fill_tile(const Side& side, int64_t first, int64_t count, int64_t wide) const {
    const auto as = side.kind == FITTED_LEVELS ? decode_fitted : decode;
    as(side, data(side, first), lane, call.slots, first, count, wide, tile, scales);
  }

  // Tokens of the tile in the channels of a head, of whose lane it is the first or not.
  void map_keys(const float* matrix, bool first, int64_t count) const {
    const int64_t stored = tables.keys.size, wide = tables.wide_turned;
#if defined(__AVX512F__)
    if (tables.coarse_map) {
      int32_t* shorts = (int32_t*)(turned + TILE * wide);
      if (first) shorten_tile(tile, tables.wide_keys, stored, count, TILE, shorts);
      return map_tile_shortly(matrix, shorts, TILE, stored, count, wide, turned);
    }
#endif
    map_tile(matrix, tile, tables.wide_keys, stored, count, wide, turned);
  }

  // Cosines and sines of a block's tokens.
  void fill_angles_of(int64_t first, int64_t count) const {
#if defined(__AVX2__)
    if (tables.short_fitted_keys) return fill_short_angles(*call.turn, tables.prepared, lane, call.slots, first, count, (int16_t*)angles);
#endif
    fill_angles(*call.turn, tables.prepared, lane, call.slots, first, count, angles);
  }

#if defined(__AVX2__)
  // Queries as whole numbers are where those times scales are, of which there are none.
  APART void logits_of_short_fitted(int64_t first, int64_t count) const {
    const Side& keys = tables.keys;
    const int64_t size = keys.size, planes = size / 2, apart = 2 * tables.wide_keys;
    const int64_t wide = call.turn ? tables.wide_turned : tables.wide_keys;
    RunTables run;
    ShortKeys shorts;
    shorts.begin(keys, lane, call.slots, first, count, run);
    int16_t *asked = (int16_t*)folded, *own = (int16_t*)tile;
    for (int64_t r = 0; r < rows; r++) sums_at[r] = shorts.cut(query + r * wide, size, call.turn != nullptr, asked + r * apart);
    if (call.turn && !knows_angles) fill_angles_of(first, count);
    int64_t known = -1;
    for (int64_t t = first, next; t < first + count; t = next) {
      const int64_t number = t / keys.group, end = (number + 1) * keys.group;
      next = t + TILE < end ? t + TILE : end, next = next < first + count ? next : first + count;
      if (number != known) {
        run.read(keys, lane * keys.runs + number), shorts.take(run, size);
        known = number;
      }
      const Nibbles codes = nibbles_of(keys, data(keys, t), next - t, scales);
      shorts.decode(codes.codes, codes.apart, size, next - t, own);
      shorts.put_aside(keys, lane * call.slots + t, next - t, own);
      const int16_t* turns = (const int16_t*)angles + (t - first) * size;
      in_rows(rows, [&](auto some, int64_t r) {
        constexpr int R = decltype(some)::ROWS;
        const auto products = call.turn ? fitted_products<R, true> : fitted_products<R, false>;
        products(asked + r * apart, apart, sums_at + r, planes, own, turns, next - t, logits_at + r * BLOCK + t - first);
      });
    }
  }
#endif

  SMALL_CODE void logits_of_turned(int64_t first, int64_t count) const {
    const Turn& turn = *call.turn;
    const Side& keys = tables.keys;
    const int64_t wide = tables.wide_turned, stored = tables.wide_keys, each = rows / turn.joined;
    if (!knows_angles) fill_angles_of(first, count);
    const float* matrices = tables.prepared + tables.angles;
    for (int64_t i = 0; i < count; i += TILE) {
      const int64_t part = count - i < TILE ? count - i : TILE;
      fill_tile(keys, first + i, part, stored);
      for (int64_t head = 0; head < turn.joined; head++) {
        float* own = tile;
        int64_t stride = stored;
        if (turn.map) {
          const int64_t number = (owner() * turn.joined + head) % heads_of(turn);
          const float* matrix = matrices + number * of_matrix(keys.size, wide, tables.coarse_map);
          own = turned, stride = wide;
          map_keys(matrix, head == 0, part);
        }
        turn_tile(turn, angles + i * tables.angles, part, stride, own);
        logits<F32>(query + head * each * wide, each, wide, (const char*)own, stride * 4, part, logits_at + head * each * BLOCK + i);
      }
    }
  }

  const char* data(const Side& side, int64_t first) const {
    if (NIBBLES && tables.nibble_keys && &side == &tables.keys) return (const char*)key_nibbles + first % BLOCK * side.slot_bytes;
    if (NIBBLES && tables.nibble_values && &side == &tables.values) return (const char*)value_nibbles + first % BLOCK * side.slot_bytes;
    if (call.starts) return (const char*)side.data + (call.starts[lane] + first) * side.slot_bytes;
    return (const char*)side.data + lane * side.lane_bytes + first * side.slot_bytes;
  }

  // What follows, `further` numbers behind, is asked for: a block has too few scales for a core to see by itself how it goes on.
  static void widen_table(const Side& side, const void* table, int64_t at, int64_t size, float* to, int64_t further) {
    const int64_t each = side.scales == FLOAT32 ? 4 : 2;
    const char* from = (const char*)table + at * each;
    ask_scales(from + further * each, size * each);
    widen(side.scales, from, size, to);
  }

  static void widen_table(const Side& side, const void* table, int64_t at, int64_t size, float* to) {
    widen_table(side, table, at, size, to, size);
  }

  // Whether any of the block's tokens is seen; `hidden` then is what their logits are to be raised by. Slots past those of
  // the lane are those of the lanes behind it.
  bool look(int64_t first, int64_t count) const {
    if (!call.firsts && !call.visible) return true;
    bool any = false;
    for (int64_t i = 0; i < call.queries; i++) {
      int64_t at = lane + first / call.slots, slot = first % call.slots;
      for (int64_t t = 0; t < count; t++) {
        const bool sees = call.firsts ? slot >= call.firsts[at]
                                      : call.visible[at * call.visible_lane + i * call.visible_query + slot * call.visible_slot] != 0;
        hidden[i * BLOCK + t] = sees ? 0.f : NOTHING;
        any |= sees;
        if (++slot == call.slots) slot = 0, at++;
      }
    }
    return any;
  }

  // What stands past `count` in a row is its own to fill.
  void cap(int64_t count) const {
    const F inverse = all((float)(1 / call.softcap)), most = all((float)call.softcap);
    for (int64_t r = 0; r < rows; r++)
      for (int64_t t = 0; t < count; t += W) {
        float* at = logits_at + r * BLOCK + t;
        store(at, tangent(load<F>(at) * inverse) * most);
      }
  }

  void raise(int64_t first, int64_t count) const {
    for (int64_t r = 0; r < rows; r++) {
      float* mine = logits_at + r * BLOCK;
      const float* blind = hidden + r % call.queries * BLOCK;
      if (call.visible || call.firsts)
        for (int64_t t = 0; t < count; t++) mine[t] += blind[t];
      if (call.log_weight)
        for (int64_t t = 0; t < count; t++) mine[t] += call.log_weight[lane * call.slots + first + t];
    }
  }

  // Brings tokens that lie anywhere together, and asks for the next ones.
  SMALL_CODE void gather(const Side& side, int64_t bytes, int64_t first, int64_t count, int64_t more) const {
    const char* const* at = (const char* const*)side.low + lane * call.slots + first;
    for (int64_t i = 0; i < count; i++) {
      for (int64_t c = 0; count + i < more && c < bytes; c += 64) __builtin_prefetch(at[count + i] + c, 0, 2);
      memcpy((char*)tile + i * bytes, at[i], (size_t)bytes);
    }
  }

  // Calls `each` with tokens of one plain type, their stride, their place and number, until all were seen.
  template <class Each> void over(const Side& side, int64_t wide, int64_t first, int64_t count, Each each) const {
    if (side.size == wide && side.kind <= FLOAT16) {
      const int64_t bytes = wide * (side.kind == FLOAT32 ? 4 : 2), most = side.low ? TILE : count;
      for (int64_t i = 0; i < count; i += most) {
        const int64_t part = count - i < most ? count - i : most, stride = side.low ? bytes : side.slot_bytes;
        const char* from = side.low ? (const char*)tile : data(side, first);
        if (side.low) gather(side, bytes, first + i, part, count - i);
        if (side.kind == FLOAT32) each(F32(), from, stride, i, part);
        else if (side.kind == BFLOAT16) each(BF16(), from, stride, i, part);
        else each(F16(), from, stride, i, part);
      }
      return;
    }
    for (int64_t i = 0; i < count; i += TILE) {
      const int64_t part = count - i < TILE ? count - i : TILE;
      fill_tile(side, first + i, part, wide);
      each(F32(), (const char*)tile, wide * 4, i, part);
    }
  }

  const uint8_t* signs_at(const Side& side, int64_t first) const {
    const Signs& own = *(const Signs*)side.low;
    return own.signs + lane * own.lane_bytes + first * own.slot_bytes;
  }

  // What signs of a run of tokens are multiplied by, and zeros behind.
  void rest_of(const Side& side, int64_t first, int64_t count, float* to) const {
    for (int64_t t = 0; t < BLOCK; t++) to[t] = 0;
    widen_table(side, ((const Signs*)side.low)->rest, lane * call.slots + first, count, to);
  }

  void add_products_of_signs(int64_t first, int64_t count) const {
    const Side& keys = call.keys;
    const int64_t wide = tables.wide_keys, stride = ((const Signs*)keys.low)->slot_bytes, bytes = (tables.keys.size + 7) / 8;
    rest_of(keys, first, count, key_scales);
    rows_by_four(rows, [&](auto some, int64_t r) {
      sign_products<decltype(some)::ROWS>(query + (rows + r) * wide, wide, signs_at(keys, first), stride, bytes, count,
                                          key_scales, logits_at + r * BLOCK, BLOCK);
    });
  }

  void add_sums_of_signs(int64_t first, int64_t count, float* out) const {
    const Side& values = call.values;
    const int64_t wide = tables.wide_values, stride = ((const Signs*)values.low)->slot_bytes;
    rest_of(values, first, count, value_scales);
    rows_by_four(rows, [&](auto some, int64_t r) {
      sign_sums<decltype(some)::ROWS>(logits_at + r * BLOCK, BLOCK, value_scales, signs_at(values, first), stride,
                                      (tables.values.size + 7) / 8, count, out + r * wide, wide);
    });
  }

#if defined(INTEGER_PRODUCTS)
  CutQuery& cut_query(int64_t r) const { return ((CutQuery*)cut)[r]; }
#endif

  // Products of rows with codes as they lie. Where they are taken in integers, `cut_query` has the rows.
  void products_of_codes(const float* asked, int64_t first, int64_t count, float* to) const {
    const Side& keys = tables.keys;
#if defined(INTEGER_PRODUCTS)
    if (tables.cut_keys) return products_in_integers(&cut_query(0), rows, keys, data(keys, first), count, to);
#endif
    with_codes(keys, [&](auto codes) {
      products<decltype(codes)>(Rows{asked, tables.wide_keys}, rows, data(keys, first), keys.slot_bytes, count, to, BLOCK);
    });
  }

  // Makes codes of 4 bits of a block's keys or values.
  void nibbles(const Side& side, int64_t first, int64_t count, float* to) const {
    to_nibbles(without_signs(side), data(side, first), count, (char*)to);
  }

  // Scales of a run of tokens, in the order of what is multiplied with them.
  void table_of_run(const void* table, int64_t at, float* to) const {
    const Side& keys = tables.keys;
    if (tables.cut_keys) return widen_table(keys, table, at, keys.size, to);
    float* natural = key_scales + 2 * tables.wide_keys;
    widen_table(keys, table, at, keys.size, natural);
    for (int64_t c = 0; c < tables.wide_keys; c++) to[c] = natural[tables.key_channel[c]];
  }

  // Makes queries for a run of tokens. Gives the sum of row r times the minima.
  float fold(int64_t r, const float* step, const float* low) const {
    const int64_t wide = tables.wide_keys;
#if defined(INTEGER_PRODUCTS)
    if (tables.cut_keys) return cut_query(r).fill_times(query + r * wide, step, low, wide, tables.keys.bits);
#endif
    F added{};
    for (int64_t c = 0; c < wide; c += W) {
      const F mine = load<F>(query + r * wide + c);
      store(folded + r * wide + c, mine * load<F>(step + c));
      added += mine * load<F>(low + c);
    }
    return sum(added);
  }

#if defined(SHORT_PRODUCTS)
  // Makes queries times the greatest steps of a block's runs; false where these differ too much.
  bool share(int64_t first, int64_t count, Shares& shares) const {
    const Side& keys = tables.keys;
    shares.begin(keys.size);
    for (int64_t run = first / keys.group; run * keys.group < first + count; run++) {
      // At once those of the next block: all of this one's are read here.
      widen_table(keys, keys.step, (lane * keys.runs + run) * keys.size, keys.size, key_scales, count / keys.group * keys.size);
      shares.see(key_scales, keys.size);
    }
    if (!shares.end(keys.size)) return false;
    for (int64_t r = 0; r < rows; r++)
      cut_query(rows + r).fill_times(query + r * tables.wide_keys, shares.greatest, shares.greatest, keys.size, keys.bits);
    return true;
  }
#endif

  // Scales of a run of tokens go into the queries, minima into what is added to its logits.
  APART void logits_by_run(int64_t first, int64_t count) const {
    const Side& keys = tables.keys;
    float *step = key_scales, *low = step + tables.wide_keys;
#if defined(SHORT_PRODUCTS)
    Shares shares;
    const bool shared = tables.cut_keys && shares_steps(keys) && share(first, count, shares);
#endif
    for (int64_t t = first; t < first + count;) {
      const int64_t run = t / keys.group, end = (run + 1) * keys.group < first + count ? (run + 1) * keys.group : first + count;
      const int64_t at = (lane * keys.runs + run) * keys.size;
      table_of_run(keys.step, at, step);
      table_of_run(keys.low, at, low);
#if defined(SHORT_PRODUCTS)
      if (shared) {
        shares.fill(step, keys.size, keys.bits);
        for (int64_t r = 0; r < rows; r++)
          sums_at[r] = shares.times(cut_query(rows + r), query + r * tables.wide_keys, low, keys.size, cut_query(r));
      } else
#endif
        for (int64_t r = 0; r < rows; r++) sums_at[r] = fold(r, step, low);
      float* to = logits_at + (t - first);
      products_of_codes(folded, t, end - t, to);
      for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < end - t; i++) to[r * BLOCK + i] += sums_at[r];
      t = end;
    }
  }

  APART void logits_by_token(int64_t first, int64_t count) const {
    const Side& keys = tables.keys;
    products_of_codes(query, first, count, logits_at);
    float *step = key_scales, *low = step + BLOCK;
    widen_table(keys, keys.step, lane * call.slots + first, count, step);
    const float zero = zero_of(call.keys);
    if (keys.low) widen_table(keys, keys.low, lane * call.slots + first, count, low);
    // A step less itself: of one that is endless no logit is a number.
    for (int64_t t = 0; t < count; t++) low[t] = (keys.low ? low[t] : step[t] * -zero) + (step[t] - step[t]);
    for (int64_t r = 0; r < rows; r++)
      for (int64_t t = 0; t < count; t++)
        logits_at[r * BLOCK + t] = logits_at[r * BLOCK + t] * step[t] + sums_at[r] * low[t];
  }

  APART void logits_by_level(int64_t first, int64_t count) const {
    const Side& keys = tables.keys;
#if defined(__AVX512F__)
    if (tables.coarse_keys && keys.kind == BLOCK_LEVELS) {
      float* outer = key_scales + groups_of(keys) * BLOCK;
      steps_of_blocks(keys, lane * call.slots + first, count, key_scales);
      products_of_blocks(query, rows, keys, data(keys, first), key_scales, count, logits_at);
      if (outer_of_blocks(keys, lane, call.slots, first, count, outer)) times_scales(outer, count);
      return;
    }
#endif
    scales_of_levels(keys, lane, call.slots, first, count, key_scales);
#if defined(__AVX512F__)
    if (tables.coarse_keys && halves_coarse(keys)) {
      in_rows(rows, [&](auto some, int64_t r) {
        half_level_products<decltype(some)::ROWS>(query + r * tables.wide_keys, tables.wide_keys, data(keys, first),
                                                  keys.slot_bytes, count, levels_of(keys), logits_at + r * BLOCK, BLOCK);
      });
      return times_scales(key_scales, count);
    }
#endif
#if defined(SHORT_PRODUCTS)
    if (tables.coarse_keys && keys.kind == BLOCK_LEVELS)
      return products_of_blocks(query, rows, keys, data(keys, first), key_scales, count, logits_at);
#endif
    const Scales found{key_scales, nullptr, tables.key_lanes, levels_of(keys), tables_of(keys), groups_of(keys), 0, tables.coarse_keys};
    with_levels(keys, [&](auto codes) {
      in_rows(rows, [&](auto some, int64_t r) {
        const Rows mine{query + r * tables.wide_keys, tables.wide_keys};
        level_products<decltype(codes), decltype(some)::ROWS>(mine, data(keys, first), keys.slot_bytes, count, found,
                                                              logits_at + r * BLOCK, BLOCK);
      });
    });
    if (scales_apart(keys)) times_scales(key_scales, count);
  }

  // Logits or weights of a block's tokens, times a number for each token; none is a number where that one is endless, since
  // an endless scale times a sum below 0 would pass for a token that is not seen. What stands past `count` is scratch.
  SMALL_CODE void times_scales(const float* scales, int64_t count) const {
    for (int64_t r = 0; r < rows; r++)
      for (int64_t t = 0; t < count; t += W) {
        float* at = logits_at + r * BLOCK + t;
        const F scale = load<F>(scales + t);
        store(at, load<F>(at) * scale + (scale - scale));
      }
  }

  APART void logits_of_codes(int64_t first, int64_t count) const {
    if (NIBBLES && tables.nibble_keys) nibbles(call.keys, first, count, key_nibbles);
    if (tables.keys.kind == CHANNEL_CODES) logits_by_run(first, count);
    else if (has_levels(tables.keys)) logits_by_level(first, count);
    else logits_by_token(first, count);
  }

  // Tokens of a side in 8-bit floats; `to`: their scales.
  SmallFloats small_floats(const Side& side, int64_t first, int64_t count, float* to) const {
    scales_of_levels(side, lane, call.slots, first, count, to);
    return {data(side, first), side.slot_bytes, count, groups_of(side), to};
  }

  APART void logits_of_small_floats(int64_t first, int64_t count) const {
    const SmallFloats keys = small_floats(tables.keys, first, count, key_scales);
    times(key_scales, count * keys.groups, unit_of_keys);
    if (keys.groups > 1) return small_float_logits<true>(query, rows, tables.wide_keys, keys, logits_at);
    small_float_logits<false>(query, rows, tables.wide_keys, keys, logits_at);
    times_scales(key_scales, count);
  }

  APART void sum_small_floats(int64_t first, int64_t count, float* out) const {
    const SmallFloats values = small_floats(tables.values, first, count, value_scales);
    const int64_t scales = count * values.groups, width = tables.wide_values;
    const float power = power_below(value_scales, scales, 1);
    times(value_scales, scales, UNIT / power);
    if (values.groups > 1) return mix_small_floats<true>(logits_at, rows, values, power, out, width);
    times_scales(value_scales, count);
    mix_small_floats<false>(logits_at, rows, values, power, out, width);
  }

  APART void sum_levels(int64_t first, int64_t count, float* out) const {
    const Side& values = tables.values;
#if defined(__AVX512F__)
    if (tables.short_values && halves_coarse(values)) {
      scales_of_levels(values, lane, call.slots, first, count, value_scales);
      const Scales found{value_scales, nullptr, nullptr, levels_of(values), 1, 1, 0, true};
      return in_rows(rows, [&](auto some, int64_t r) {
        short_level_sums<decltype(some)::ROWS>(logits_at + r * BLOCK, BLOCK, data(values, first), values.slot_bytes, count,
                                               found, out + r * tables.wide_values, values.size);
      });
    }
    if (tables.short_values) {
      float* outer = value_scales + groups_of(values) * BLOCK;
      steps_of_blocks(values, lane * call.slots + first, count, value_scales);
      if (outer_of_blocks(values, lane, call.slots, first, count, outer)) times_scales(outer, count);
      return sums_of_blocks(logits_at, rows, values, data(values, first), value_scales, count, out);
    }
#endif
    scales_of_levels(values, lane, call.slots, first, count, value_scales);
#if defined(SHORT_PRODUCTS)
    if (tables.short_values && values.kind == BLOCK_LEVELS) {
      float* steps = value_scales + BLOCK * groups_of(values) + W;
      steps_by_group(value_scales, groups_of(values), count, steps);
      return sums_of_blocks(logits_at, rows, values, data(values, first), steps, count, out);
    }
#endif
    const bool coarse = levels_coarse(values);
    if (scales_apart(values) && !coarse) times_scales(value_scales, count);
    const Scales found{value_scales, nullptr, tables.scale_lanes, levels_of(values), tables_of(values), groups_of(values), 0, coarse};
    with_levels(values, [&](auto codes) {
      weighted<decltype(codes)>(logits_at, BLOCK, rows, data(values, first), values.slot_bytes, count, found, out,
                                tables.wide_values);
    });
  }

  APART void sum_codes(int64_t first, int64_t count, float* out) const {
    const Side& values = tables.values;
    if (NIBBLES && tables.nibble_values) nibbles(call.values, first, count, value_nibbles);
    if (has_levels(values)) return sum_levels(first, count, out);
    const int64_t groups = groups_of(values), at = (lane * call.slots + first) * groups;
    float *step = value_scales, *low = step + BLOCK * groups + W;
    widen_table(values, values.step, at, count * groups, step);
    if (values.low) widen_table(values, values.low, at, count * groups, low);
    const char* from = data(values, first);
    const float zero = zero_of(call.values);
#if defined(BYTE_PRODUCTS)
    if (tables.short_values)
      return sums_of_short_tokens(logits_at, rows, step, values.low ? low : nullptr, zero, values, from, count, out);
#endif
    const bool uniform = groups == 1 || (groups <= MOST_GROUPS && values.group % sizeof(U) == 0);
    const bool coarse = uniform && values_coarse(call.values);
    const Scales found{step, values.low ? low : nullptr, tables.scale_lanes, nullptr, 1, groups, zero, coarse};
    with_codes(values, [&](auto codes) {
      weighted<decltype(codes)>(logits_at, BLOCK, rows, from, values.slot_bytes, count, found, out, tables.wide_values);
    });
  }

#if defined(__AVX2__)
  APART void sum_short_fitted(int64_t first, int64_t count, float* out) const {
    const Side& values = tables.values;
    const int64_t size = values.size, half = size / 2, wide = tables.wide_values, place = lane * call.slots;
    float *step = value_scales, *low = step + BLOCK + W;
    widen_table(values, values.step, place + first, count, step);
    widen_table(values, ((const Fitted*)values.low)->low, place + first, count, low);
    // The codes of a token that is whole say nothing: its weight is to take nothing from those of its run.
    for (int64_t t = 0; t < count; t++)
      if (whole_at(values, ((const Fitted*)values.low)->counts, place + first + t) == size) step[t] = low[t] = 0;
    const char* ahead = data(values, first) + VALUES_AHEAD;
    RunTables run;
    for (int64_t t = first, next; t < first + count; t = next) {
      const int64_t number = t / values.group, end = (number + 1) * values.group;
      next = t + SHORT_RUN < end ? t + SHORT_RUN : end, next = next < first + count ? next : first + count;
      run.read_levels(values, lane * values.runs + number);
      const auto [codes, apart] = nibbles_of(values, data(values, t), next - t, tile);
      const float *weights = logits_at + (t - first), *steps = step + (t - first), *lows = low + (t - first);
      fitted_sums(weights, rows, (const char*)codes, apart, next - t, run, steps, lows, out, size, wide, ahead);
      over_aside(values, place + t, next - t, 1, [&](int64_t i, int64_t c, float x) {
        const int byte = codes[i * apart + c % half], code = c < half ? byte & 15 : byte >> 4;
        const float more = x - (run.levels[code] * steps[i] + lows[i]);
        for (int64_t r = 0; r < rows; r++) out[r * wide + c] += weights[r * BLOCK + i] * more;
      });
    }
  }
#endif

  void keep(int64_t first, int64_t count, const float* tops) const {
    for (int64_t r = 0; r < rows; r++) {
      kept_tops(call, lane, r)[first / BLOCK] = tops ? tops[r] : NOTHING;
      if (tops) memcpy(kept_weights(call, lane, r) + first, logits_at + r * BLOCK, (size_t)count * sizeof(float));
    }
  }

  void block(int64_t first, int64_t count, float* tops, float* totals, float* out) const {
    if (!look(first, count)) return call.kept ? keep(first, count, nullptr) : void();
    const int64_t wide = tables.wide_keys, width = tables.wide_values;
#if defined(__AVX2__)
    if (tables.short_fitted_keys) logits_of_short_fitted(first, count);
    else
#endif
    if (call.turn) logits_of_turned(first, count);
    else if (tables.fused_keys) logits_of_codes(first, count);
    else if (SMALL_FLOATS && tables.small_keys) logits_of_small_floats(first, count);
    else
      over(tables.keys, wide, first, count, [&](auto type, const char* keys, int64_t stride, int64_t at, int64_t n) {
        logits<decltype(type)>(query, rows, wide, keys, stride, n, logits_at + at);
      });
    if (tables.signed_keys) add_products_of_signs(first, count);
    if (call.key_magnitudes) magnify_logits(first, count);
    if (call.offset) Shift(*call.offset, rows, of_offset).add(lane, call.slots, first, count, logits_at);
    if (call.softcap > 0) cap(count);
    raise(first, count);
    for (int64_t r = 0; r < rows; r++)
      soften(logits_at + r * BLOCK, count, tops + r, totals + r, out + r * width, width, halves_of(call.values), rows * width);
    if (call.kept) keep(first, count, tops);
    if (tables.signed_values) add_sums_of_signs(first, count, out + rows * width);
    if (call.value_magnitudes) magnify_weights(first, count, out);
    if (tables.fused_values) return sum_codes(first, count, out);
    if (SMALL_FLOATS && tables.small_values) return sum_small_floats(first, count, out);
#if defined(__AVX2__)
    if (tables.short_fitted_values) return sum_short_fitted(first, count, out);
#endif
    over(tables.values, width, first, count, [&](auto type, const char* values, int64_t stride, int64_t at, int64_t n) {
      mix<decltype(type)>(logits_at + at, rows, values, stride, n, out, width);
    });
  }
};

int64_t chunks(const Call& call) { return (call.slots + call.chunk - 1) / call.chunk; }

int64_t filled_of(const Call& call, int64_t lane) { return call.lengths ? call.lengths[lane] : call.slots; }

// What a piece has found so far: nothing.
SMALL_CODE float* found_nothing(const Call& call, const Tables& tables, int64_t index) {
  float* tops = call.found + index * call.rows * (2 + tables.all_values);
  for (int64_t r = 0; r < call.rows; r++) tops[r] = NOTHING, tops[call.rows + r] = 0;
  return tops;
}

APART void read_slots(const Piece& work, int64_t first, int64_t end, float* tops) {
  float *totals = tops + work.rows, *out = totals + work.rows;
  for (int64_t t = first; t < end; t += BLOCK)
    work.block(t, end - t < BLOCK ? end - t : BLOCK, tops, totals, out);
}

// Whether lane `next` lies behind the full lanes from `lane` on.
bool follows(const Call& call, int64_t lane, int64_t next) {
  return !call.starts || call.starts[next] == call.starts[lane] + (next - lane) * call.slots;
}

// Lanes of one owner, each of one chunk, are one piece: what they find stands with the first of them, and its queries are
// laid out once. Full lanes that lie one behind the other are read as a single long one.
void lanes_of_owner(const Call& call, const Tables& tables, int64_t begin, int64_t end, float* scratch) {
  float *tops = found_nothing(call, tables, begin), *out = tops + 2 * call.rows;
  for (int64_t i = begin + 1; i < end; i++) found_nothing(call, tables, i);
  for (int64_t i = 0; i < call.rows * tables.all_values; i++) out[i] = 0;
  Piece work(call, tables, begin, scratch);
  for (int64_t lane = begin; lane < end;) {
    int64_t next = lane + 1, filled = filled_of(call, lane);
    for (; tables.joined && next < end && filled == (next - lane) * call.slots && follows(call, lane, next); next++)
      filled += filled_of(call, next);
    work.lane = lane;
    read_slots(work, 0, filled, tops);
    lane = next;
  }
}

void chunk_of_lane(const Call& call, const Tables& tables, int64_t index, float* scratch) {
  const int64_t lane = index / chunks(call), first = index % chunks(call) * call.chunk, filled = filled_of(call, lane);
  const int64_t end = first + call.chunk < filled ? first + call.chunk : filled;
  float *tops = found_nothing(call, tables, index), *out = tops + 2 * call.rows;
  for (int64_t i = 0; i < call.rows * tables.all_values; i++) out[i] = 0;
  if (first < end) read_slots(Piece(call, tables, lane, scratch), first, end, tops);
}

// Lanes that have a call's pieces together: where tokens of several have the same positions, blocks are taken in turns,
// so that angles are worked out once.
int64_t together(const Call& call) { return call.turn ? call.turn->alike : 1; }

SMALL_CODE void chunk_of_lanes(const Call& call, const Tables& tables, int64_t index, float* scratch) {
  const int64_t each = chunks(call), begin = index / each * together(call), end = begin + together(call);
  const int64_t first = index % each * call.chunk, last = first + call.chunk < call.slots ? first + call.chunk : call.slots;
  for (int64_t lane = begin; lane < end; lane++) {
    float* out = found_nothing(call, tables, lane * each + index % each) + 2 * call.rows;
    for (int64_t i = 0; i < call.rows * tables.all_values; i++) out[i] = 0;
  }
  for (int64_t t = first; t < last; t += BLOCK) {
    bool known = false;
    for (int64_t lane = begin; lane < end; lane++) {
      const int64_t filled = filled_of(call, lane), stop = filled < last ? filled : last, next = t + BLOCK;
      if (t >= stop) continue;
      Piece work(call, tables, lane, scratch);
      const int64_t count = (next < stop ? next : stop) - t, most = (next < last ? next : last) - t;
      if (!known) work.fill_angles_of(t, most);
      work.knows_angles = known = true;
      float* tops = call.found + (lane * each + index % each) * call.rows * (2 + tables.all_values);
      read_slots(work, t, t + count, tops);
    }
  }
}

void pieces(const Call& call, const Tables& tables, int64_t begin, int64_t end, float* scratch) {
  if (together(call) > 1) {
    for (int64_t i = begin; i < end; i++) chunk_of_lanes(call, tables, i, scratch);
    return;
  }
  if (!call.owner || chunks(call) > 1) {
    for (int64_t i = begin; i < end; i++) chunk_of_lane(call, tables, i, scratch);
    return;
  }
  for (int64_t first = begin, next; first < end; first = next) {
    for (next = first + 1; next < end && call.owner[next] == call.owner[first];) next++;
    lanes_of_owner(call, tables, first, next, scratch);
  }
}

// The greatest that any row's product with a state between two others, channel by channel, can be: keys are the least
// ones and values the greatest ones, both plain and of one type, and `mass` takes the bounds (m, s).
SMALL_CODE void bounds_of(const Call& call, const Tables& tables, int64_t index, float* scratch) {
  const int64_t lane = index / blocks(call), first = index % blocks(call) * BLOCK, wide = tables.wide_keys;
  const int64_t count = call.slots - first < BLOCK ? call.slots - first : BLOCK;
  const Piece work(call, tables, lane, scratch);
  for (int64_t i = 0; i < call.rows * wide; i++) {
    work.folded[i] = work.query[i] > 0 ? 0.f : work.query[i];
    work.query[i] = work.query[i] < 0 ? 0.f : work.query[i];
  }
  for (int64_t half = 0; half < 2; half++)
    work.over(half ? call.values : call.keys, wide, first, count,
              [&](auto type, const char* states, int64_t stride, int64_t at, int64_t n) {
                logits<decltype(type)>(half ? work.query : work.folded, call.rows, wide, states, stride, n,
                                       (half ? work.logits_at : work.hidden) + at);
              });
  float* to = call.mass + lane * call.slots + first;
  for (int64_t t = 0; t < count; t++) to[t] = work.logits_at[t] + work.hidden[t];
  for (int64_t r = 1; r < call.rows; r++)
    for (int64_t t = 0; t < count; t++) {
      const float mine = work.logits_at[r * BLOCK + t] + work.hidden[r * BLOCK + t];
      to[t] = mine > to[t] || mine != mine ? mine : to[t];
    }
}

void merge(const Call& call, const Tables& tables, int64_t owner, int64_t first, int64_t last) {
  const int64_t rows = call.rows, size = call.values.size, wide = tables.wide_values, each = rows * (2 + tables.all_values);
  for (int64_t r = 0; r < rows; r++) {
    float top = NOTHING, total = 0;
    for (int64_t i = first; i < last; i++) top = call.found[i * each + r] > top ? call.found[i * each + r] : top;
    float* out = call.out + (owner * rows + r) * size;
    for (int64_t c = 0; c < size; c++) out[c] = 0;
    for (int64_t i = first; i < last; i++) {
      const float* tops = call.found + i * each;
      if (tops[rows + r] == 0) continue;
      const float share = exponential(all(tops[r] - top))[0];
      total += share * tops[rows + r];
      const float *mine = tops + 2 * rows + r * wide, *of_signs = mine + (rows - 1) * wide;
      for (int64_t c = 0; c < size; c++) {
        const int64_t at = tables.value_place[c];
        out[c] += share * (at < wide ? mine : of_signs)[at];
      }
    }
    // Not `total > 0`: where something was no number, so are these.
    call.lse[owner * rows + r] = total == 0 ? NOTHING : top + __builtin_logf(total);
    if (total != 0)
      for (int64_t c = 0; c < size; c++) out[c] /= total;
  }
}

// What all rows together gave each slot of a block, from weights that were kept and the lse over all parts.
void mass_of(const Call& call, int64_t lane, int64_t first) {
  const int64_t owner = call.owner ? call.owner[lane] : lane, filled = filled_of(call, lane);
  const int64_t count = call.slots - first < BLOCK ? call.slots - first : BLOCK;
  const int64_t read = filled - first < count ? filled - first : count;
  float* to = call.mass + lane * call.slots + first;
  memset(to, 0, (size_t)count * sizeof(float));
  if (read <= 0) return;
  for (int64_t r = 0; r < call.rows; r++) {
    const float top = kept_tops(call, lane, r)[first / BLOCK], lse = call.lse[owner * call.rows + r];
    const float counts = call.counts[owner * call.queries + r % call.queries];
    if (top == NOTHING || counts == 0) continue;
    const float share = counts * exponential(all(top - lse))[0];
    const float* weights = kept_weights(call, lane, r) + first;
    for (int64_t t = 0; t < read; t++) to[t] += share * weights[t];
  }
}

SMALL_CODE int32_t sum_mass(const Call& call) {
  const int64_t each = blocks(call);
  return share_out(call.lanes * each, call.threads, call.parallel_for, [&](int64_t index, int64_t) {
    mass_of(call, index / each, index % each * BLOCK);
  });
}

// So that a piece is no smaller than what it finds, and threads come only where they bring more than their barrier costs.
// The same numbers as in attention.py.
constexpr int64_t LEAST_CHUNK = 256, SMALL = 1 << 19;

// How a call's slots are parted, now that there are so many of them.
SMALL_CODE void divide(Call& call, int64_t most_threads, ParallelFor parallel_for) {
  const bool many = parallel_for && call.lanes * call.slots * call.rows * call.keys.size > SMALL;
  call.threads = many ? most_threads : 1;
  call.parallel_for = many ? parallel_for : nullptr;
  const int64_t slots = call.lanes / together(call) * call.slots;
  const int64_t share = (slots + PIECES * call.threads - 1) / (PIECES * call.threads);
  const int64_t each = share < call.slots ? share : call.slots;
  const int64_t chunk = (each + LEAST_CHUNK - 1) / LEAST_CHUNK * LEAST_CHUNK;
  call.chunk = chunk > LEAST_CHUNK ? chunk : LEAST_CHUNK;
}

APART int32_t attend(const Call& call) {
  const Tables tables = tables_of(call);
  tables.fill();
  const int64_t each = chunks(call);
  const int32_t wrong =
      share_out_runs(call.lanes / together(call) * each, call.threads, call.parallel_for, [&](int64_t begin, int64_t end, int64_t thread) {
        pieces(call, tables, begin, end, tables.scratches + thread * tables.each());
      });
  if (wrong) return wrong;
  for (int64_t owner = 0, lane = 0; owner < call.owners; owner++) {
    const int64_t first = lane;
    while (lane < call.lanes && (call.owner ? call.owner[lane] : lane) == owner) lane++;
    merge(call, tables, owner, first * each, lane * each);
  }
  return 0;
}

}  // namespace

#include "choose.h"
#include "step.h"

extern "C" {

int64_t kvtailor_scratch(const Call* call) {
  const Tables tables = tables_of(*call);
  return tables.own() + call->threads * tables.each();
}

int64_t kvtailor_found(const Call* call) {
  return call->lanes * chunks(*call) * call->rows * (2 + room_of(call->values));
}

int32_t kvtailor_attend(const Call* call) { return attend(*call); }

int32_t kvtailor_step(Step* step) { return take(*step); }

// See bounds_of. `queries` must be `rows`, for which there is room then.
int32_t kvtailor_bounds(const Call* call) {
  const Tables tables = tables_of(*call);
  tables.fill();
  return share_out(call->lanes * blocks(*call), call->threads, call->parallel_for, [&](int64_t index, int64_t thread) {
    bounds_of(*call, tables, index, tables.scratches + thread * tables.each());
  });
}

int64_t kvtailor_choice_scratch(const Choice* all) { return all->threads * Chooser::room(*all); }

int64_t kvtailor_pages_scratch(const Pages* all) { return all->threads * PageChooser::room(*all); }

// Chooses tokens for each owner, then reads them: the sides of `call` are plain, and `low` is where the rows are told.
// -1 where a score is no number.
int32_t kvtailor_choose(const Choice* all, const Call* call) {
  return choose_and_read(choose_of<Chooser, Choice>, all, all->scratch, Chooser::room(*all), *call);
}

// The same with pages, of which the best can always be told.
int32_t kvtailor_choose_pages(const Pages* all, const Call* call) {
  return choose_and_read(choose_of<PageChooser, Pages>, all, all->scratch, PageChooser::room(*all), *call);
}

// One softmax over parts that were read one by one.
int32_t kvtailor_merge(const Union* all) {
  merge_parts(*all);
  return 0;
}

// Queries for what is stored, (count, wide) to (count, narrow), or sums of it, the other way round; rows in turn are of
// one head.
int32_t kvtailor_map(const Map* map, const float* from, const float* lse, float* to, int64_t count, int64_t rows) {
  for (int64_t i = 0; i < count; i++) {
    const int64_t wide = map->blocks * map->wide, narrow = map->blocks * map->narrow;
    if (lse) of_sum(*map, i / rows, lse[i] != NOTHING, from + i * narrow, to + i * wide);
    else of_query(*map, i / rows, from + i * wide, to + i * narrow);
  }
  return 0;
}

// Floats of `found` that are enough for a part of a step however many slots it has.
int64_t kvtailor_found_of_any(const Call* call, int64_t threads) {
  return (PIECES * threads * together(*call) + call->lanes) * call->rows * (2 + room_of(call->values));
}

int64_t kvtailor_kept(const Call* call) { return call->lanes * call->rows * (call->slots + blocks(*call)); }

// The mass of the slots, after kvtailor_attend with scratch to keep weights; `lse` may now be that of more parts.
int32_t kvtailor_mass(const Call* call) { return sum_mass(*call); }

// What Python compares with its own: see `ABI` of library.py.
int32_t kvtailor_abi() { return ABI; }

// Whether this machine has the instructions that this variant was compiled for.
int32_t kvtailor_runs() {
#if defined(__ARM_FEATURE_DOTPROD) && defined(__linux__)
  if (!(getauxval(AT_HWCAP) & HWCAP_ASIMDDP)) return 0;
#elif defined(__ARM_FEATURE_DOTPROD) && !defined(__APPLE__)
  return 0;
#endif
#if defined(__x86_64__) || defined(__i386__)
  __builtin_cpu_init();
#if defined(__AVX512F__)
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512dq") ||
      !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512vnni"))
    return 0;
#endif
#if defined(ADD_PAIRS_OF_AVX512)
  if (!__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512vnni")) return 0;
#elif defined(__AVXVNNI__)
  if (!__builtin_cpu_supports("avxvnni")) return 0;
#endif
#if defined(__AVX2__)
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 0;
#endif
#endif
  return 1;
}
}
