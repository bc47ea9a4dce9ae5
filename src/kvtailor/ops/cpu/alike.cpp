// Of each vector the last one, or the last before it, whose product with it is above a bound.
//
// A piece of work is a band of vectors that look. A panel of others is multiplied with a few of the band at a time, the
// last panel first, and those that have their answer look no further.
//
// Built for AVX2 and AVX-512, on which it was measured.
#include "tall_products.h"
#include "threads.h"

// Mirrored field by field in library.py.
struct Alike {
  const float* vectors;    // (n, size)
  const int64_t* rows;     // ascending numbers of those that look
  const int64_t* columns;  // ascending numbers of those that are looked at
  int64_t* newest;         // (rows) zeros, and then 1 + the number of the last one
  float* scratch;          // kvtailor_alike_scratch() floats
  ParallelFor parallel_for;
  int64_t size, row_count, column_count, newer, threads;  // newer: only later ones count, else only earlier ones
  double above;
};

#if defined(__AVX2__)
namespace {

constexpr int64_t BAND = 8 * TALL;

struct Band {
  const Alike& call;
  const int64_t first, count, size = call.size;
  const float* panels;
  float* mine;  // (BAND, size)

  Band(const Alike& call, int64_t index, const float* panels, float* scratch)
      : call(call),
        first(index * BAND),
        count(call.row_count - first < BAND ? call.row_count - first : BAND),
        panels(panels),
        mine(scratch) {
    memset(mine, 0, (size_t)(BAND * size) * 4);
    for (int64_t r = 0; r < count; r++)
      memcpy(mine + r * size, call.vectors + call.rows[first + r] * size, (size_t)size * 4);
  }

  // A bit for each number that is above the bound.
  uint32_t above(F products) const {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)products, _mm512_set1_ps((float)call.above), _CMP_GT_OQ);
#else
    return (uint32_t)_mm256_movemask_ps((__m256)(products > (float)call.above));
#endif
  }

  bool counts(int64_t column, int64_t row) const { return call.newer ? column > row : column < row; }

  // Looks at the panel from so many columns on; whether all rows of the few at r have their answer.
  bool look(int64_t r, int64_t from) const {
    const int64_t few = count - r < TALL ? count - r : TALL;
    const int64_t last = from + WIDE < call.column_count ? from + WIDE - 1 : call.column_count - 1;
    const int64_t *rows = call.rows + first + r, *columns = call.columns;
    int64_t* newest = call.newest + first + r;
    bool waits = false;
    for (int64_t i = 0; i < few; i++) waits |= !newest[i];
    if (!waits) return true;
    // None of these is later, or earlier, than any of the rows.
    if (call.newer ? columns[last] <= rows[0] : columns[from] >= rows[few - 1]) return false;
    float products[TALL * WIDE];
    multiply<false>(mine + r * size, size, panels + from * size, size, products, WIDE);
    waits = false;
    for (int64_t i = 0; i < few; i++) {
      if (newest[i]) continue;
      const float* its = products + i * WIDE;
      uint32_t hits = above(load<F>(its)) | above(load<F>(its + W)) << W;
      for (; hits && !newest[i]; hits &= ~(1u << (31 - __builtin_clz(hits)))) {
        const int64_t at = from + 31 - __builtin_clz(hits);
        if (at <= last && counts(columns[at], rows[i])) newest[i] = columns[at] + 1;
      }
      waits |= !newest[i];
    }
    return !waits;
  }

  void look_at_all() const {
    for (int64_t from = up_to(call.column_count, WIDE) - WIDE; from >= 0; from -= WIDE) {
      bool done = true;
      for (int64_t r = 0; r < count; r += TALL) done &= look(r, from);
      if (done) return;
    }
  }
};

// Columns side by side, with zeros behind them.
SMALL_CODE void pack(const Alike& call, float* to) {
  for (int64_t i = 0; i < up_to(call.column_count, WIDE); i++)
    put_beside(i < call.column_count ? call.vectors + call.columns[i] * call.size : nullptr, call.size, i, to);
}

}  // namespace
#endif

extern "C" {

// Floats; 0 where this variant has no such kernel.
int64_t kvtailor_alike_scratch([[maybe_unused]] const Alike* call) {
#if defined(__AVX2__)
  return (up_to(call->column_count, WIDE) + call->threads * BAND) * call->size;
#else
  return 0;
#endif
}

int32_t kvtailor_alike([[maybe_unused]] const Alike* call) {
#if defined(__AVX2__)
  pack(*call, call->scratch);
  float* own = call->scratch + up_to(call->column_count, WIDE) * call->size;
  const int64_t bands = (call->row_count + BAND - 1) / BAND;
  return share_out(bands, call->threads, call->parallel_for, [&](int64_t index, int64_t thread) {
    Band(*call, index, call->scratch, own + thread * BAND * call->size).look_at_all();
  });
#else
  return 1;
#endif
}
}
