// Linear maps between the coordinates in which states are stored and the model's: for queries and sums, of which there
// are few.
#pragma once

#include "vectors.h"

// A state of (blocks * wide) channels is scale * matrix @ x + mean, block by block, of x in (blocks * narrow) numbers.
// Mirrored field by field in library.py.
struct Map {
  const float *matrix, *mean;  // (heads, wide, narrow); (heads, blocks * wide), null: nothing is added
  const void* picked;          // (heads, narrow) channels that alone are stored, of one block; null: `matrix` says it
  int64_t picked_row, picked_bytes;  // numbers from one head's to the next one's; bytes of each
  int64_t heads, wide, narrow, blocks;
  double scale;
};

namespace {

const float* of_head(const Map& map, int64_t head) { return map.matrix + head % map.heads * map.wide * map.narrow; }

// Calls `each` with the place of a stored number and the channel that it is.
template <class Each> void over_picked(const Map& map, int64_t head, Each each) {
  const int64_t first = head % map.heads * map.picked_row;
  for (int64_t r = 0; r < map.narrow; r++)
    each(r, map.picked_bytes == 1 ? ((const uint8_t*)map.picked)[first + r] : ((const int16_t*)map.picked)[first + r]);
}

// What a query is for what is stored: its products with x are those of the query with scale * matrix @ x.
SMALL_CODE void of_query(const Map& map, int64_t head, const float* from, float* to) {
  if (map.picked) return over_picked(map, head, [&](int64_t r, int64_t c) { to[r] = from[c]; });
  // Plain vectors, so that little code is fast as well.
  const float* matrix = of_head(map, head);
  for (int64_t b = 0; b < map.blocks; b++, from += map.wide, to += map.narrow) {
    for (int64_t r = 0; r < map.narrow; r++) to[r] = 0;
    for (int64_t c = 0; c < map.wide; c++) {
      const float* row = matrix + c * map.narrow;
      const float mine = from[c] * (float)map.scale;
      int64_t r = 0;
      for (; r + W <= map.narrow; r += W) store(to + r, load<F>(to + r) + load<F>(row + r) * mine);
      for (; r < map.narrow; r++) to[r] += mine * row[r];
    }
  }
}

// What a sum of stored numbers is in the model's coordinates; the weights add up to 1 where something is seen.
SMALL_CODE void of_sum(const Map& map, int64_t head, bool seen, const float* from, float* to) {
  if (map.picked) {
    for (int64_t c = 0; c < map.wide; c++) to[c] = 0;
    return over_picked(map, head, [&](int64_t r, int64_t c) { to[c] = from[r]; });
  }
  const float* matrix = of_head(map, head);
  const float* mean = map.mean && seen ? map.mean + head % map.heads * map.wide * map.blocks : nullptr;
  for (int64_t b = 0; b < map.blocks; b++, from += map.narrow)
    for (int64_t c = 0; c < map.wide; c++) {
      const float* row = matrix + c * map.narrow;
      F sums{};
      int64_t r = 0;
      for (; r + W <= map.narrow; r += W) sums += load<F>(row + r) * load<F>(from + r);
      float all = sum(sums);
      for (; r < map.narrow; r++) all += row[r] * from[r];
      *to++ = all * (float)map.scale + (mean ? mean[b * map.wide + c] : 0.f);
    }
}

}  // namespace
