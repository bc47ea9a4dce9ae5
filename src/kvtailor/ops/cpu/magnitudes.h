// Sides that have directions: a state is its token's direction times its magnitude, but for some tokens that are whole.
#pragma once

#include "layouts.h"

// Mirrored field by field in library.py.
struct Magnitudes {
  const void* of;         // (m, s)
  const int32_t* places;  // (count) ascending: lane * s + slot of the tokens that are whole
  const void* whole;      // (count, c)
  int64_t count, kind;    // tokens that are whole; type of these and of the magnitudes
};

namespace {

int64_t bytes_of(const Magnitudes& own) { return own.kind == FLOAT32 ? 4 : 2; }

// The number of the first token that is whole and has this place, or a later one.
SMALL_CODE int64_t whole_from(const Magnitudes& own, int64_t place) {
  int64_t first = 0, end = own.count;
  while (first < end) {
    const int64_t middle = (first + end) / 2;
    if (own.places[middle] < place) first = middle + 1;
    else end = middle;
  }
  return first;
}

// Calls `each` with the number of the first and the count of so many whole tokens at a time, whose places are in a run.
template <class Each> void over_whole(const Magnitudes& own, int64_t place, int64_t count, int64_t most, Each each) {
  for (int64_t i = whole_from(own, place), n; i < own.count && own.places[i] < place + count; i += n) {
    for (n = 1; n < most && i + n < own.count && own.places[i + n] < place + count;) n++;
    each(i, n);
  }
}

// Whole tokens as floats of `size` channels, `wide` apart, and zeros behind.
SMALL_CODE void widen_whole(const Magnitudes& own, int64_t first, int64_t count, int64_t size, int64_t wide, float* to) {
  for (int64_t i = first; i < first + count; i++, to += wide) {
    widen(own.kind, (const char*)own.whole + i * size * bytes_of(own), size, to);
    for (int64_t c = size; c < wide; c++) to[c] = 0;
  }
}

}  // namespace
