// Causal attention of many queries over what is held, and how much of it each slot received, in one pass.
//
// torch's kernel keeps the shares to itself, and written down in torch they go through memory four times. A piece of
// work is a block of queries and the query heads that read one kv head. Keys are taken a tile at a time: logits, a
// running softmax, weighted sums, all in a core's own cache. The tile's weights stay, relative to what was highest by
// then, and once the block's sums are known they are added up by slot. All numbers are float32.
//
// Measured on AVX2 without AVX-512, and built for that alone.
#include "tall_products.h"
#include "threads.h"

// Mirrored field by field in library.py.
struct Prompt {
  const void *query, *keys, *values;  // (b, q, t, size), (b, h, n, size), (b, h, n, value_size)
  const float* weight;                // (b, t) of each query for the mass
  const float* sinks;                 // (q,) logits that belong to no slot; null: none
  float* out;                         // (b, t, q, value_size)
  float* mass;                        // (b, h, n)
  float* scratch;                     // kvtailor_prompt_scratch() floats
  ParallelFor parallel_for;
  int64_t query_row, query_head, query_slot;  // strides in bytes
  int64_t key_row, key_head, key_slot, value_row, value_head, value_slot;
  int64_t rows, heads, group, queries, slots, size, value_size, kind, threads;
  double scaling;
};

#if defined(__AVX2__) && !defined(__AVX512F__)
namespace {

constexpr int64_t TILE = 256;     // keys
constexpr int64_t ROWS = 96;      // query rows of a block, where a group is not larger
constexpr int64_t MOST = 1 << 21;  // weights of a block, where that leaves it a query
constexpr int64_t PARTS = 16;     // in which the blocks of a kv head add their mass up, whatever the threads

// How the work on one kv head is laid out.
struct Plan {
  const Prompt& call;
  const int64_t slots, new_queries, rows, blocks, channels;

  explicit Plan(const Prompt& call)
      : call(call),
        slots(up_to(call.slots, WIDE)),
        new_queries(queries_of(MOST / slots < ROWS ? MOST / slots : ROWS)),
        rows(up_to(call.group * new_queries, TALL)),
        blocks((call.queries + new_queries - 1) / new_queries),
        channels(up_to(call.value_size, WIDE)) {}

  int64_t queries_of(int64_t most) const { return call.group < most ? most / call.group : 1; }
  int64_t tiles() const { return (slots + TILE - 1) / TILE; }
  // Floats of keys and values as they are read, and of the sums of mass.
  int64_t packed_keys() const { return slots * call.size; }
  int64_t packed_values() const { return slots * channels; }
  int64_t masses() const { return PARTS * slots; }
  // Floats of one thread: queries, outputs, weights, what they are relative to, and three numbers of each row.
  int64_t each() const { return up_to(rows * (call.size + channels + slots + tiles() + 3), 16); }
  int64_t floats() const { return packed_keys() + packed_values() + masses() + call.threads * each(); }
};

// One block of queries over one kv head.
struct Block {
  const Plan& plan;
  const Prompt& call;
  const int64_t row, head, first, count, used;  // `used` rows of the plan's are queries: (group, count)
  float *queries, *out, *weights, *relative, *best, *total, *share;

  Block(const Plan& plan, int64_t row, int64_t head, int64_t index, float* scratch)
      : plan(plan),
        call(plan.call),
        row(row),
        head(head),
        first(index * plan.new_queries),
        count(call.queries - first < plan.new_queries ? call.queries - first : plan.new_queries),
        used(call.group * count) {
    queries = scratch, out = queries + plan.rows * call.size, weights = out + plan.rows * plan.channels;
    relative = weights + plan.rows * plan.slots, best = relative + plan.rows * plan.tiles();
    total = best + plan.rows, share = total + plan.rows;
  }

  // Slots that row r sees.
  int64_t sees(int64_t r) const { return call.slots - call.queries + first + r % count + 1; }

  APART PLAIN_LOOPS void begin() const {
    memset(queries, 0, (size_t)(plan.rows * call.size) * 4);
    memset(out, 0, (size_t)(plan.rows * plan.channels) * 4);
    for (int64_t r = 0; r < used; r++) {
      const int64_t of = head * call.group + r / count;
      const char* from = (const char*)call.query + row * call.query_row + of * call.query_head +
                         (first + r % count) * call.query_slot;
      float* to = queries + r * call.size;
      widen(call.kind, from, call.size, to);
      for (int64_t c = 0; c < call.size; c++) to[c] *= (float)call.scaling;
      best[r] = NOTHING, total[r] = 0;
    }
  }

  // Logits of a tile's row become weights, relative to the highest logit so far; what was summed up before follows.
  APART PLAIN_LOOPS void soften(float* mine, int64_t wide, int64_t seen, int64_t r) const {
    for (int64_t j = seen; j < wide; j++) mine[j] = NOTHING;
    F most = all(best[r]);
    for (int64_t j = 0; j < wide; j += W) most = larger(load<F>(mine + j), most);
    const float now = highest(most);
    if (now > best[r]) {
      const float before = exponential(all(best[r] - now))[0];
      best[r] = now, total[r] *= before;
      float* sums = out + r * plan.channels;
      for (int64_t c = 0; c < plan.channels; c += W) store(sums + c, load<F>(sums + c) * before);
    }
    F sums{};
    for (int64_t j = 0; j < wide; j += W) {
      const F weight = exponential(load<F>(mine + j) - now);
      sums += weight;
      store(mine + j, weight);
    }
    total[r] += sum(sums);
  }

  APART void attend(const float* keys, const float* values) const {
    const int64_t end = sees(count - 1);
    for (int64_t slot = 0; slot < end; slot += TILE) {
      const int64_t wide = plan.slots - slot < TILE ? plan.slots - slot : TILE;
      float* mine = weights + slot * plan.rows;
      for (int64_t j = 0; j < wide; j += WIDE)
        for (int64_t r = 0; r < plan.rows; r += TALL)
          multiply<false>(queries + r * call.size, call.size, keys + (slot + j) * call.size, call.size,
                          mine + r * wide + j, wide);
      for (int64_t r = 0; r < plan.rows; r++) {
        const int64_t seen = r < used ? sees(r) - slot : 0;
        if (seen > 0) soften(mine + r * wide, wide, seen < wide ? seen : wide, r);
        else memset(mine + r * wide, 0, (size_t)wide * 4);
        relative[slot / TILE * plan.rows + r] = r < used ? best[r] : 0;
      }
      for (int64_t c = 0; c < plan.channels; c += WIDE)
        for (int64_t r = 0; r < plan.rows; r += TALL)
          multiply<true>(mine + r * wide, wide, values + c * plan.slots + slot * WIDE, wide,
                         out + r * plan.channels + c, plan.channels);
    }
  }

  // Writes the outputs, and adds the shares of each slot to `mass`.
  APART PLAIN_LOOPS void end(float* mass) const {
    for (int64_t r = 0; r < plan.rows; r++) {
      share[r] = 0;
      if (r >= used) continue;
      const int64_t of = head * call.group + r / count, query = first + r % count;
      float most = best[r], sums = total[r];
      if (call.sinks) {
        most = most < call.sinks[of] ? call.sinks[of] : most;
        sums = sums * exponential(all(best[r] - most))[0] + exponential(all(call.sinks[of] - most))[0];
      }
      const float scale = exponential(all(best[r] - most))[0] / sums;
      float* to = call.out + ((row * call.queries + query) * call.heads * call.group + of) * call.value_size;
      for (int64_t c = 0; c < call.value_size; c++) to[c] = out[r * plan.channels + c] * scale;
      share[r] = scale * call.weight[row * call.queries + query];
    }
    for (int64_t slot = 0; slot < sees(count - 1); slot += TILE) {
      const int64_t wide = plan.slots - slot < TILE ? plan.slots - slot : TILE;
      for (int64_t r = 0; r < plan.rows; r += TALL) {
        F factors[TALL];
        for (int64_t i = 0; i < TALL; i++) {
          const float since = r + i < used ? relative[slot / TILE * plan.rows + r + i] - best[r + i] : 0;
          factors[i] = exponential(all(since)) * share[r + i];
        }
        const float* mine = weights + slot * plan.rows + r * wide;
        for (int64_t j = 0; j < wide; j += W) {
          F sums = load<F>(mass + slot + j);
          UNROLLED for (int i = 0; i < TALL; i++) sums += factors[i] * load<F>(mine + i * wide + j);
          store(mass + slot + j, sums);
        }
      }
    }
  }
};

// The keys and values of one kv head, as blocks read them: slots of keys side by side, and channels of values in runs of
// WIDE, slot after slot. Zeros stand where there is nothing.
struct Head {
  const Plan& plan;
  const Prompt& call;
  float *keys, *values, *masses, *own;
  const char *key, *value;

  Head(const Plan& plan, int64_t row, int64_t head) : plan(plan), call(plan.call) {
    keys = call.scratch, values = keys + plan.packed_keys(), masses = values + plan.packed_values();
    own = masses + plan.masses();
    key = (const char*)call.keys + row * call.key_row + head * call.key_head;
    value = (const char*)call.values + row * call.value_row + head * call.value_head;
  }

  SMALL_CODE void pack(int64_t first, float* state) const {
    for (int64_t slot = first; slot < first + WIDE; slot++) {
      const bool there = slot < call.slots;
      if (there) widen(call.kind, key + slot * call.key_slot, call.size, state);
      put_beside(there ? state : nullptr, call.size, slot, keys);
      if (there) widen(call.kind, value + slot * call.value_slot, call.value_size, state);
      for (int64_t c = 0; c < plan.channels; c++)
        values[(c / WIDE * plan.slots + slot) * WIDE + c % WIDE] = there && c < call.value_size ? state[c] : 0.f;
    }
  }

  SMALL_CODE void sum_parts(float* to) const {
    for (int64_t i = 0; i < call.slots; i++) {
      to[i] = 0;
      for (int64_t part = 0; part < PARTS; part++) to[i] += masses[part * plan.slots + i];
    }
  }
};

int32_t attend_head(const Plan& plan, int64_t row, int64_t index) {
  const Prompt& call = plan.call;
  const Head head(plan, row, index);
  int32_t failed = share_out(plan.slots / WIDE, call.threads, call.parallel_for, [&](int64_t run, int64_t thread) {
    head.pack(run * WIDE, head.own + thread * plan.each());
  });
  if (failed) return failed;
  memset(head.masses, 0, (size_t)plan.masses() * 4);
  failed = share_out(PARTS, call.threads, call.parallel_for, [&](int64_t part, int64_t thread) {
    for (int64_t i = part; i < plan.blocks; i += PARTS) {
      const Block block(plan, row, index, i, head.own + thread * plan.each());
      block.begin();
      block.attend(head.keys, head.values);
      block.end(head.masses + part * plan.slots);
    }
  });
  head.sum_parts(call.mass + (row * call.heads + index) * call.slots);
  return failed;
}

}  // namespace
#endif

extern "C" {

// Floats; 0 where this variant has no such kernel.
int64_t kvtailor_prompt_scratch([[maybe_unused]] const Prompt* call) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  return Plan(*call).floats();
#else
  return 0;
#endif
}

int32_t kvtailor_prompt([[maybe_unused]] const Prompt* call) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  const Plan plan(*call);
  for (int64_t row = 0; row < call->rows; row++)
    for (int64_t head = 0; head < call->heads; head++)
      if (const int32_t failed = attend_head(plan, row, head)) return failed;
  return 0;
#else
  return 1;
#endif
}
}
