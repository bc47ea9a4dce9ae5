// One decoded token of each row at one layer, in one call: it joins the tail, and one softmax goes over all parts.
#pragma once

#include "choose.h"
#include "coordinates.h"

// The coordinates of one part, the model's side first. Mirrored field by field in library.py.
struct Coordinates {
  const Map* const *keys, *const *values;
  float *query, *between;  // (b * h, q / h, r) for the part; two rows of the widest state
  float *sums, *out;       // (b * h, q / h, r) that the part gives; (b * h, q / h, dv)
  int64_t keys_count, values_count;
};

// A tail that drops its middle at each token: its first tokens stay, and move up over the oldest behind them. Their keys
// may have to be turned to be read, by what is missing behind them. Mirrored field by field in library.py.
struct Ends {
  const float *cosines, *sines;  // (planes) of what the first keys are turned by
  char* turned;                  // (b * h, first, d), of the type `kind`: the keys of the first of the parts
  // Planes: 0 where the keys are read as they lie. Interleaved: plane i is channels 2 i and 2 i + 1; else i and i + planes.
  int64_t first, planes, interleaved;
};

// Mirrored field by field in library.py. Strides are in bytes, but for that of positions.
struct Step {
  const char *query, *key, *value;  // (b, q, 1, d), (b, h, 1, d), (b, h, 1, dv), of the type `given`
  char* out;                        // (b, 1, q, dv), of the type `given`
  Call* const* parts;               // in time order; the last is the tail, whose lane i belongs to owner i
  char *tail_keys, *tail_values;
  int32_t* positions;  // (b * h, slots) of the tail; null: its columns are consecutive
  float* asked;        // (b * h, q / h, d)
  float* merged;       // (dv) and (count); (d), too, where first keys are turned
  const float* sinks;  // (q); null: none
  ParallelFor parallel_for;
  float* lse;                 // (b * h, q / h) over all parts; null: no mass is wanted
  const float* counts;        // (b * h) ones
  float* const* masses;       // of each part (m, s): what its slots have received with this token
  const float* const* before;  // of each part (m, slots_before): what they had received; null: nothing
  const int64_t* slots_before;
  const Coordinates* coordinates;  // of each part
  const Ends* ends;                // null: nothing is dropped
  int64_t query_row, query_head, key_row, key_head, value_row, value_head;
  int64_t tail_key_lane, tail_key_slot, tail_value_lane, tail_value_slot, position_lane;
  int64_t count, rows, heads, group, size, value_size, kind, threads, widest;
  int64_t slot, column;  // of the tail, where the token goes; of the token
  Pages* pages;          // the best of which are read, and all of what has none: `parts` is one call, over these; or null
  int64_t* tokens_read;  // (b * h), where pages are chosen
  int64_t given;         // `kind`, that of the tail, or FLOAT32 above a tail of 16 bits
};

// Disjoint parts that were read one by one. Mirrored field by field in library.py.
struct Union {
  Call* const* parts;  // `out` and `lse` alone are read
  const float* sinks;  // (rows); null: none
  float* merged;       // (size) and (count)
  float *out, *lse;    // (rows, size), (rows)
  int64_t count, rows, size;
};

namespace {

// Small beside what is read: plain loops, so that each variant of it stays small as well.
template <class T> SMALL_CODE void write_as(const float* from, int64_t size, char* to) {
  for (int64_t c = 0; c < size; c++) {
    const auto kept = rounded(T(), from[c]);
    memcpy(to + c * T::BYTES, &kept, T::BYTES);
  }
}

void write(int64_t kind, const float* from, int64_t size, char* to) {
  if (kind == FLOAT32) memcpy(to, from, (size_t)size * 4);
  else if (kind == BFLOAT16) write_as<BF16>(from, size, to);
  else write_as<F16>(from, size, to);
}

// A state of the new token, as the tail holds it.
void keep(const Step& step, const char* from, int64_t size, char* to) {
  if (step.given == step.kind) memcpy(to, from, (size_t)(size * (step.kind == FLOAT32 ? 4 : 2)));
  else write(step.kind, (const float*)from, size, to);
}

SMALL_CODE void join_tail(const Step& step) {
  for (int64_t b = 0; b < step.rows; b++)
    for (int64_t h = 0; h < step.heads; h++) {
      const int64_t lane = b * step.heads + h;
      keep(step, step.key + b * step.key_row + h * step.key_head, step.size,
           step.tail_keys + lane * step.tail_key_lane + step.slot * step.tail_key_slot);
      keep(step, step.value + b * step.value_row + h * step.value_head, step.value_size,
           step.tail_values + lane * step.tail_value_lane + step.slot * step.tail_value_slot);
      if (step.positions) step.positions[lane * step.position_lane + step.slot] = (int32_t)step.column;
    }
}

SMALL_CODE void widen_queries(const Step& step) {
  const int64_t heads = step.heads * step.group;
  for (int64_t b = 0; b < step.rows; b++)
    for (int64_t q = 0; q < heads; q++)
      widen(step.given, step.query + b * step.query_row + q * step.query_head, step.size,
            step.asked + (b * heads + q) * step.size);
}

// Queries of all heads for a part, whose `query` they then are.
SMALL_CODE void ask(const Step& step, const Coordinates& in) {
  const int64_t last = in.keys_count - 1;
  float *between = in.between, *next = between + step.widest;
  int64_t size = step.size;
  if (last >= 0) size = in.keys[last]->blocks * in.keys[last]->narrow;
  for (int64_t row = 0; row < step.rows * step.heads * step.group; row++) {
    const float* from = step.asked + row * step.size;
    for (int64_t i = 0; i <= last; i++) {
      float* to = i == last ? in.query + row * size : i % 2 ? next : between;
      of_query(*in.keys[i], row / step.group, from, to);
      from = to;
    }
  }
}

// What a part gave for all heads, in the model's coordinates.
SMALL_CODE void give(const Step& step, const Coordinates& in, const float* lse) {
  const int64_t last = in.values_count - 1, size = in.values[last]->blocks * in.values[last]->narrow;
  float *between = in.between, *next = between + step.widest;
  for (int64_t row = 0; row < step.rows * step.heads * step.group; row++) {
    const float* from = in.sums + row * size;
    for (int64_t i = last; i >= 0; i--) {
      float* to = i == 0 ? in.out + row * step.value_size : i % 2 ? next : between;
      of_sum(*in.values[i], row / step.group, lse[row] != NOTHING, from, to);
      from = to;
    }
  }
}

// One query row: outputs of disjoint parts, of which `out` and `lse` are read, by their shares of one softmax. Gives where
// they are: in `merged`, room for (size) and (count) floats, or where the only part has them.
SMALL_CODE const float* over_parts(Call* const* parts, int64_t count, int64_t size, int64_t row, const float* sink,
                                   float* merged, float* lse) {
  if (count == 1 && !sink) {
    if (lse) *lse = parts[0]->lse[row];
    return parts[0]->out + row * size;
  }
  float *to = merged, *share = to + size, top = sink ? *sink : NOTHING;
  for (int64_t i = 0; i < count; i++) {
    // Not `larger`: what is no number must stay.
    const float mine = share[i] = parts[i]->lse[row];
    top = mine > top || mine != mine ? mine : top;
  }
  float total = sink ? __builtin_expf(*sink - top) : 0.f;
  for (int64_t i = 0; i < count; i++) total += share[i] = share[i] == NOTHING ? 0.f : __builtin_expf(share[i] - top);
  if (lse) *lse = total == 0 ? NOTHING : top + __builtin_logf(total);
  for (int64_t c = 0; c < size; c++) to[c] = 0;
  for (int64_t i = 0; i < count; i++) {
    if (share[i] == 0) continue;
    const float* from = parts[i]->out + row * size;
    const float part = share[i] / total;
    for (int64_t c = 0; c < size; c++) to[c] += part * from[c];
  }
  return to;
}

SMALL_CODE void merge_parts(const Union& all) {
  for (int64_t row = 0; row < all.rows; row++) {
    const float* sink = all.sinks ? all.sinks + row : nullptr;
    const float* from = over_parts(all.parts, all.count, all.size, row, sink, all.merged, all.lse + row);
    memcpy(all.out + row * all.size, from, (size_t)all.size * sizeof(float));
  }
}

// What the slots of a part have received, this token included. Slots that have joined since had received nothing.
SMALL_CODE int32_t add_mass(const Step& step, int64_t i) {
  Call& part = *step.parts[i];
  float* own = part.lse;
  part.lse = step.lse, part.counts = step.counts, part.mass = step.masses[i];
  const int32_t wrong = sum_mass(part);
  part.lse = own;
  if (wrong || !step.before[i]) return wrong;
  for (int64_t lane = 0; lane < part.lanes; lane++)
    for (int64_t t = 0; t < step.slots_before[i]; t++)
      part.mass[lane * part.slots + t] += step.before[i][lane * step.slots_before[i] + t];
  return 0;
}

// The best pages, and all of the parts that have none, of which the tail is the last.
SMALL_CODE int32_t read_best_pages(Step& step) {
  Pages& all = *step.pages;
  Call& call = *step.parts[0];
  all.slots[all.parts - 1] = step.slot + 1;
  all.room = all.wanted * all.page;
  for (int64_t i = 0; i < all.parts; i++) all.room += all.low[i] ? 0 : all.slots[i];
  call.slots = all.room;
  divide(call, step.threads, step.parallel_for);
  const int32_t wrong =
      choose_and_read(choose_of<PageChooser, Pages>, &all, all.scratch, PageChooser::room(all), call);
  for (int64_t owner = 0; owner < all.owners; owner++) step.tokens_read[owner] = all.lengths[owner];
  return wrong;
}

// A key as it is read. Each product and each sum is rounded, as in ops.lanes.rotate.
EACH_ROUNDED void turn_key(const Ends& ends, float* key) {
  AS_WRITTEN
  for (int64_t i = 0; i < ends.planes; i++) {
    float *one = key + (ends.interleaved ? 2 * i : i), *other = one + (ends.interleaved ? 1 : ends.planes);
    const float a = *one, b = *other, cosine = ends.cosines[i], sine = ends.sines[i];
    *one = a * cosine - b * sine, *other = b * cosine + a * sine;
  }
}

// The first keys of all lanes, on their way through `merged`.
SMALL_CODE void turn_first(const Step& step, const Ends& ends) {
  const int64_t bytes = step.size * (step.kind == FLOAT32 ? 4 : 2);
  char* to = ends.turned;
  for (int64_t lane = 0; lane < step.rows * step.heads; lane++)
    for (int64_t t = 0; t < ends.first; t++, to += bytes) {
      widen(step.kind, step.tail_keys + lane * step.tail_key_lane + t * step.tail_key_slot, step.size, step.merged);
      turn_key(ends, step.merged);
      write(step.kind, step.merged, step.size, to);
    }
}

// The first tokens of all lanes move up by a slot, and all that is read begins a slot later.
SMALL_CODE void drop_middle(Step& step, const Ends& ends) {
  const int64_t element = step.kind == FLOAT32 ? 4 : 2;
  for (int64_t lane = 0; lane < step.rows * step.heads; lane++)
    for (int64_t t = ends.first; t > 0; t--) {
      char* key = step.tail_keys + lane * step.tail_key_lane + t * step.tail_key_slot;
      char* value = step.tail_values + lane * step.tail_value_lane + t * step.tail_value_slot;
      memcpy(key, key - step.tail_key_slot, (size_t)(step.size * element));
      memcpy(value, value - step.tail_value_slot, (size_t)(step.value_size * element));
      if (!step.positions) continue;
      int32_t* position = step.positions + lane * step.position_lane + t;
      *position = position[-1];
    }
  step.tail_keys += step.tail_key_slot, step.tail_values += step.tail_value_slot;
  if (step.positions) step.positions++;
  for (int64_t i = 0; i < step.count; i++) {
    Side &keys = step.parts[i]->keys, &values = step.parts[i]->values;
    if (keys.data != ends.turned) keys.data = (const char*)keys.data + keys.slot_bytes;
    values.data = (const char*)values.data + values.slot_bytes;
  }
}

SMALL_CODE int32_t read_parts(Step& step) {
  const bool turns = step.ends && step.ends->planes;
  if (turns) turn_first(step, *step.ends);
  step.parts[step.count - 1]->slots = step.slot + 1 - (turns ? step.ends->first : 0);
  for (int64_t i = 0; i < step.count; i++) {
    Call& part = *step.parts[i];
    const Coordinates& in = step.coordinates[i];
    if (in.keys_count) ask(step, in);
    if (in.values_count) part.out = in.sums;
    divide(part, step.threads, step.parallel_for);
    const int32_t wrong = attend(part);
    if (wrong) return wrong;
    if (in.values_count) give(step, in, part.lse), part.out = in.out;
  }
  return 0;
}

SMALL_CODE int32_t take(Step& step) {
  join_tail(step);
  widen_queries(step);
  if (const int32_t wrong = step.pages ? read_best_pages(step) : read_parts(step)) return wrong;
  const int64_t element = step.given == FLOAT32 ? 4 : 2, queries = step.rows * step.heads * step.group;
  for (int64_t row = 0; row < queries; row++) {
    const float* sink = step.sinks ? step.sinks + row % (step.heads * step.group) : nullptr;
    float* lse = step.lse ? step.lse + row : nullptr;
    const float* from = over_parts(step.parts, step.count, step.value_size, row, sink, step.merged, lse);
    write(step.given, from, step.value_size, step.out + row * step.value_size * element);
  }
  for (int64_t i = 0; step.lse && i < step.count; i++)
    if (const int32_t wrong = add_mass(step, i)) return wrong;
  if (step.ends) drop_middle(step, *step.ends);
  return 0;
}

}  // namespace
