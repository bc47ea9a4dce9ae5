// Codes of fixed levels for vectors that are brought to one length, and what gives them their own back.
//
// Every number is made by the operations that ops/codes/gaussian.py names, in their order. Lengths are summed in double
// in eight parts, whatever the width of a vector, so that all bytes are the same but where a sum lies between two floats.
#pragma once

#include "packing.h"

// Mirrored field by field in library.py.
struct Bell {
  const void* states;     // (lanes, slots, size), finite
  const float* borders;   // 2^bits - 1 ascending ones between the levels
  const double* squares;  // of the 2^bits levels; null: the decoded vectors have the length that levels were made for
  uint8_t* codes;         // (lanes, slots, bytes)
  void* scale;            // of the states' type: (lanes, slots)
  float* scratch;         // kvtailor_bell_scratch() floats
  ParallelFor parallel_for;
  int64_t lane_bytes, slot_bytes, kind;
  int64_t lanes, slots, size, bits, threads;
  double largest;  // number of the states' type
};

namespace {

constexpr int64_t PARTS = 8;

int64_t padded_vector(int64_t size) { return ceiling(size, 16) * 16; }

// Floats of one thread: a vector; codes and what fills their last byte.
int64_t scratch_of(const Bell& call) {
  const int64_t wide = padded_vector(call.size);
  return ceiling(wide + ceiling(wide + 8, 4), 16) * 16;
}

struct Parts {
  double sums[PARTS] = {};

  float length() const {
    return (float)__builtin_sqrt(((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7])));
  }
};

template <class T> struct BellPiece {
  const Bell& call;
  const int64_t size = call.size, wide = padded_vector(size), many = (int64_t)1 << call.bits, bytes;
  const float root = (float)__builtin_sqrt((double)size);
  float* vector;
  uint8_t* codes;

  BellPiece(const Bell& call, int64_t bytes, float* scratch) : call(call), bytes(bytes) {
    vector = scratch, codes = (uint8_t*)(vector + wide);
    memset(codes + wide, 0, 8);
  }

  APART float length() const {
    Parts parts;
    for (int64_t c = 0; c < wide; c += PARTS)
      for (int64_t j = 0; j < PARTS; j++) parts.sums[j] += (double)vector[c + j] * (double)vector[c + j];
    return parts.length();
  }

  // Of the levels that the codes stand for.
  APART float made() const {
    Parts parts;
    for (int64_t c = 0; c < size; c++) parts.sums[c % PARTS] += call.squares[codes[c]];
    return parts.length();
  }

  APART PLAIN_LOOPS void take(const char* from, int64_t place) const {
    ask_after<T>(call, from);
    widen(call.kind, from, size, vector);
    for (int64_t c = size; c < wide; c++) vector[c] = 0;
    F high{};
    for (int64_t c = 0; c < wide; c += W) {
      const F z = load<F>(vector + c), size_of = z < 0 ? -z : z;
      high = high < size_of ? size_of : high;
    }
    // The largest number first: the squares of large states overflow a float.
    const float most = highest(high), top = most > 0 ? most : 1;
    for (int64_t c = 0; c < wide; c += W) store(vector + c, load<F>(vector + c) / all(top));
    // A number over a tensor is torch's reciprocal, times the number.
    const float norm = length(), factor = 1 / (norm > 0 ? norm : 1) * root;
    for (int64_t c = 0; c < wide; c += W)
      store_bytes(codes + c, __builtin_convertvector(borders_below(load<F>(vector + c) * all(factor), call.borders, many), F));
    const float limit = (float)call.largest, asked = norm / (call.squares ? made() : root) * top;
    put<T>(call.scale, place, asked > limit ? limit : asked);
    for (int64_t c = size; c < wide; c++) codes[c] = 0;
    pack(codes, call.bits, size, call.codes + place * bytes);
  }
};

template <class T> int32_t by_bell(const Bell& call) {
  const int64_t bytes = packed_bytes(call.size, call.bits);
  return over_runs(call, TOKENS, [&](const RunOfTokens& run, int64_t thread) {
    const BellPiece<T> piece(call, bytes, call.scratch + thread * scratch_of(call));
    for (int64_t t = 0; t < run.count; t++) piece.take(run.states + t * call.slot_bytes, run.place + t);
  });
}

}  // namespace
