// Codes of states, their steps and minima, and the bytes they are packed in, in one pass over the states.
//
// Every number is made by the operations that ops.quant names, in their order and in float32, so that all bytes are the
// same. Only the sign of a minimum that is zero is left open, there as well as here.
#include "bell.h"
#include "fitting.h"
#include "packing.h"

// Mirrored field by field in library.py.
struct Coding {
  const void* states;  // (lanes, slots, size)
  uint8_t* codes;      // (lanes, slots, bytes)
  void* step;          // of the states' type: (lanes, slots, size / group), or by run (lanes, runs, size)
  void* low;           // as step; null: codes are symmetric around 2^(bits - 1) - 1
  float* scratch;         // kvtailor_coding_scratch() floats
  ParallelFor parallel_for;
  int64_t lane_bytes, slot_bytes, kind;
  int64_t lanes, slots, size, bits, group, by_run, threads;
  double limit;  // the largest step of symmetric codes
};

namespace {

// Floats of one thread: a token's states, or a vector; steps and minima by channel; codes and what fills their last byte.
int64_t scratch_of(const Coding& call) { return 3 * call.size + W + ceiling(call.size + 8, 4); }

// What FLAT of ops/quant.py says.
const float FLAT = 0x1p-14f;

template <class V> V smaller(V a, V b) { return a < b ? a : b; }
template <class V> V greater(V a, V b) { return a > b ? a : b; }

// Least and greatest of some states; both NaN where one of them is.
template <class V> struct Range {
  V low = V{} - NOTHING, high = V{} + NOTHING, wrong{};

  void take(V x) {
    low = smaller(x, low), high = greater(x, high);
    wrong = x != x ? x : wrong;
  }
  void close() { low += wrong, high += wrong; }
};

// How codes are made of states: rounded (x - low) / step, between `least` and `most`.
struct Making {
  float least, most;

  explicit Making(const Coding& call) {
    const float half = (float)((1 << (call.bits - 1)) - 1);
    least = call.low ? 0 : -half, most = call.low ? (float)((1 << call.bits) - 1) : half;
  }

  template <class V> V code(V x, V low, V step) const {
    // The sum has no bits left below 1, and is rounded as a float is.
    const V number = ((x - low) / step + 12582912.f) - 12582912.f;
    return smaller(greater(number, V{} + least), V{} + most) - least;
  }
};

template <class T> struct Piece {
  const Coding& call;
  const Making making;
  const int64_t size = call.size, bytes;
  float *states, *step, *low;
  uint8_t* codes;

  Piece(const Coding& call, int64_t bytes, float* scratch) : call(call), making(call), bytes(bytes) {
    states = scratch, step = states + size + W, low = step + size;
    codes = (uint8_t*)(low + size);
    memset(codes + size, 0, 8);
  }

  // The step of a range as it is kept.
  APART float step_of(float least, float greatest, int64_t place) const {
    float asked;
    if (call.low) {
      asked = (greatest - least) / making.most;
    } else {
      asked = greater(-least, greatest) / making.most;
      asked = asked > (float)call.limit ? (float)call.limit : asked;
    }
    const float kept = put<T>(call.step, place, asked);
    return kept > 0 ? kept : put<T>(call.step, place, FLAT);
  }

  APART PLAIN_LOOPS void by_token(const char* from, int64_t place) const {
    ask_after<T>(call, from);
    widen(call.kind, from, size, states);
    const int64_t groups = size / call.group;
    for (int64_t i = 0; i < groups; i++) {
      const float* mine = states + i * call.group;
      uint8_t* to = codes + i * call.group;
      Range<F> wide;
      Range<float> range;
      int64_t c = 0;
      for (; c + W <= call.group; c += W) wide.take(load<F>(mine + c));
      if (c) range.low = -highest(-wide.low), range.high = highest(wide.high), range.wrong = sum(wide.wrong);
      for (; c < call.group; c++) range.take(mine[c]);
      range.close();
      const float step = step_of(range.low, range.high, place * groups + i);
      const float low = call.low ? put<T>(call.low, place * groups + i, range.low) : 0.f;
      for (c = 0; c + W <= call.group; c += W) store_bytes(to + c, making.code(load<F>(mine + c), all(low), all(step)));
      for (; c < call.group; c++) to[c] = (uint8_t)making.code(mine[c], low, step);
    }
    pack(codes, call.bits, size, call.codes + place * bytes);
  }

  APART PLAIN_LOOPS void by_run(const char* from, int64_t count, int64_t place, int64_t run) const {
    for (int64_t c = 0; c < size; c += W) {
      const int64_t some = size - c < W ? size - c : W;
      Range<F> range;
      for (int64_t t = 0; t < count; t++) {
        if (c == 0) ask_after<T>(call, from + t * call.slot_bytes);
        const char* at = from + t * call.slot_bytes + c * T::BYTES;
        if (some < W) widen(call.kind, at, some, states), at = (const char*)states;
        range.take(some < W ? load<F>(at) : T::at(at));
      }
      range.close();
      for (int64_t i = 0; i < some; i++) {
        step[c + i] = step_of(range.low[i], range.high[i], run * size + c + i);
        low[c + i] = put<T>(call.low, run * size + c + i, range.low[i]);
      }
    }
    for (int64_t t = 0; t < count; t++) {
      const char* at = from + t * call.slot_bytes;
      int64_t c = 0;
      for (; c + W <= size; c += W)
        store_bytes(codes + c, making.code(T::at(at + c * T::BYTES), load<F>(low + c), load<F>(step + c)));
      for (; c < size; c++) codes[c] = (uint8_t)making.code(T::one(at + c * T::BYTES), low[c], step[c]);
      pack(codes, call.bits, size, call.codes + (place + t) * bytes);
    }
  }
};

template <class T> int32_t code(const Coding& call) {
  const int64_t bytes = packed_bytes(call.size, call.bits);
  return over_runs(call, call.by_run ? call.group : TOKENS, [&](const RunOfTokens& run, int64_t thread) {
    const Piece<T> piece(call, bytes, call.scratch + thread * scratch_of(call));
    if (call.by_run) return piece.by_run(run.states, run.count, run.place, run.number);
    for (int64_t t = 0; t < run.count; t++) piece.by_token(run.states + t * call.slot_bytes, run.place + t);
  });
}

}  // namespace

extern "C" {

int64_t kvtailor_coding_scratch(const Coding* call) { return call->threads * scratch_of(*call); }

int32_t kvtailor_code(const Coding* call) {
  if (call->kind == FLOAT32) return code<F32>(*call);
  if (call->kind == BFLOAT16) return code<BF16>(*call);
  return code<F16>(*call);
}

int64_t kvtailor_fitting_scratch(const Fitting* call) { return call->threads * scratch_of(*call); }

int32_t kvtailor_fit(const Fitting* call) { return fit(*call); }

int64_t kvtailor_bell_scratch(const Bell* call) { return call->threads * scratch_of(*call); }

int32_t kvtailor_bell(const Bell* call) {
  if (call->kind == FLOAT32) return by_bell<F32>(*call);
  if (call->kind == BFLOAT16) return by_bell<BF16>(*call);
  return by_bell<F16>(*call);
}
}
