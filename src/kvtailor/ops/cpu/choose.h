// Which tokens one new token reads: those that a cheap guess of its logits puts first. And where they lie.
//
// The guess looks at few channels: of the greatest or least keys of chunks of adjacent tokens, and of the keys of tokens
// that are in no chunk. Tokens are counted by places among those that may be read, in time order, from 0 for each owner.
#pragma once

#include "numbers.h"

// Mirrored field by field in library.py.
struct Choice {
  const float* query;                        // (owners, rows, size)
  const char* bounds;                        // (owners, 2 * size, chunks) greatest, then least keys; null: no chunks
  const char *const *keys, *const *values;   // of each part, lane i of owner i
  const int64_t *key_lane, *key_slot, *value_lane, *value_slot, *slots;  // of each part; strides in bytes
  const int32_t* listed;                     // (owners, count_listed) slots of the first places, over all parts; null: none
  const int64_t *span, *channels, *covered;  // (owners) tokens of a chunk; channels that are looked at; tokens in chunks
  const float* sinks;                        // (owners, rows); null: none
  float* scores;                             // (owners, widest) of chunks, then of tokens without: what each receives
  const char **key_rows, **value_rows;       // (owners, budget) where the chosen tokens lie, in time order
  float* scratch;                            // kvtailor_choice_scratch() floats
  // Slots behind those that are listed begin at `after`. `tokens`: of each owner. `kind`: of bounds, keys and values.
  int64_t owners, rows, size, chunks, count_listed, after, tokens, budget, widest, kind, threads;
  double scaling, softcap;
};

// Which pages one new token reads, beside all of the parts that have no pages. Mirrored field by field in library.py.
struct Pages {
  const float* query;                                                 // (owners, rows, size)
  const char *const *keys, *const *values, *const *low, *const *high;  // of each part, lane i of owner i; bounds or null
  const int64_t *key_lane, *key_slot, *value_lane, *value_slot;        // of each part, in bytes
  int64_t* slots;                                                     // of each part
  const char **key_rows, **value_rows;                                // (owners, room) where the tokens lie
  int32_t* lengths;                                                   // (owners) so many are read
  float* scratch;                                                     // kvtailor_pages_scratch() floats
  int64_t owners, rows, size, parts, pages, page, wanted, room, kind, threads;  // pages: of an owner in all parts
};

namespace {

// The order of numbers is that of these, from 0 on.
uint32_t rank_of(float x) {
  const uint32_t bits = bits_of(x);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

SMALL_CODE int64_t reach(const float* x, int64_t count, uint32_t least) {
  I above{};
  int64_t t = 0, found = 0;
  for (; t + W <= count; t += W) {
    const U bits = load<U>(x + t);
    above -= (I)(((U)((I)bits < 0) ? ~bits : bits | 0x80000000u) >= least);
  }
  UNROLLED for (int i = 0; i < W; i++) found += above[i];
  for (; t < count; t++) found += rank_of(x[t]) >= least;
  return found;
}

// The highest rank that so many reach.
template <class Reach> SMALL_CODE uint32_t level_of(int64_t wanted, const Reach& reach) {
  uint32_t level = 0;
  for (int bit = 31; bit >= 0; bit--)
    if (reach(level | 1u << bit) >= wanted) level |= 1u << bit;
  return level;
}

// Products of rows with states one behind the other.
SMALL_CODE void products_with(int64_t kind, const float* query, int64_t rows, int64_t size, const char* from, int64_t n, float* to) {
  if (kind == FLOAT32) logits<F32>(query, rows, size, from, size * 4, n, to);
  else if (kind == BFLOAT16) logits<BF16>(query, rows, size, from, size * 2, n, to);
  else logits<F16>(query, rows, size, from, size * 2, n, to);
}

constexpr int64_t LINES = 4, LONG = 1024;  // rows of bounds, and chunks, that are looked at together

struct Chooser {
  const Choice& all;
  int64_t owner, rows = all.rows, size = all.size, element = all.kind == FLOAT32 ? 4 : 2, wide = padded(all.widest);
  int64_t span = all.span[owner], covered = all.covered[owner], filled = covered ? (covered + span - 1) / span : 0;
  int64_t count = filled + all.tokens - covered, part = 0, before = 0;
  float *amounts, *reduced, *placed, *lines, *found, *tile, *logits_at, *scores = all.scores + owner * all.widest;
  int32_t* row_at;

  static int64_t room(const Choice& all) {
    return all.size * (2 + 2 * all.rows + TILE) + LINES * LONG + BLOCK * all.rows + all.rows * padded(all.widest);
  }

  Chooser(const Choice& all, int64_t owner, float* scratch) : all(all), owner(owner) {
    amounts = scratch, reduced = amounts + size, placed = reduced + rows * size, row_at = (int32_t*)(placed + rows * size);
    lines = (float*)row_at + size, found = lines + LINES * LONG, tile = found + rows * BLOCK, logits_at = tile + TILE * size;
  }

  // The channels in which the queries are largest, and the queries in these, each as large as it was over all.
  SMALL_CODE void reduce() const {
    const float* query = all.query + owner * rows * size;
    for (int64_t c = 0; c < size; c++) {
      amounts[c] = 0;
      for (int64_t r = 0; r < rows; r++) amounts[c] += __builtin_fabsf(query[r * size + c]);
    }
    const int64_t wanted = all.channels[owner];
    const uint32_t level = level_of(wanted, [&](uint32_t least) { return reach(amounts, size, least); });
    int64_t spare = wanted - reach(amounts, size, level + 1), at = 0;
    Side side{};
    side.kind = all.kind, side.size = size;
    for (int64_t c = 0; c < rows * size; c++) placed[c] = 0;
    for (int64_t c = 0; c < size; c++) {
      const uint32_t amount = rank_of(amounts[c]);
      if (amount < level || (amount == level && spare-- <= 0)) continue;
      float total = 0;
      for (int64_t r = 0; r < rows; r++) {
        const float mine = query[r * size + c];
        total += mine;
        reduced[r * size + at] = placed[r * size + place(side, false, c)] = mine;
      }
      row_at[at++] = (int32_t)(total < 0 ? size + c : c);
    }
    for (int64_t r = 0; r < rows; r++) {
      float whole = 0, left = 0;
      for (int64_t c = 0; c < size; c++) whole += __builtin_fabsf(query[r * size + c]);
      for (int64_t i = 0; i < at; i++) left += __builtin_fabsf(reduced[r * size + i]);
      const float share = left / (whole < 1.17549435e-38f ? 1.17549435e-38f : whole);
      const float factor = (float)all.scaling / __builtin_sqrtf(share < 1.1920929e-7f ? 1.1920929e-7f : share);
      for (int64_t c = 0; c < size; c++) {
        reduced[r * size + c] = c < at ? reduced[r * size + c] * factor : 0.f;
        placed[r * size + c] *= factor;
      }
    }
    // What is looked at beside them counts for nothing.
    for (int64_t i = at; i < size; i++) row_at[i] = row_at[at - 1];
  }

  // Some rows of bounds at a time, which are read once and in the order of memory.
  APART PLAIN_LOOPS void logits_of_chunks() const {
    const char* bounds = all.bounds + owner * 2 * size * all.chunks * element;
    const int64_t channels = all.channels[owner];
    for (int64_t first = 0; first < filled; first += LONG) {
      const int64_t n = filled - first < LONG ? filled - first : LONG;
      for (int64_t i = 0; i < channels; i += LINES) {
        for (int64_t l = 0; l < LINES; l++) {
          if (first == 0 && i + LINES + l < channels)
            for (int64_t c = 0; c < n * element; c += 64)
              __builtin_prefetch(bounds + row_at[i + LINES + l] * all.chunks * element + c, 0, 2);
          widen(all.kind, bounds + (row_at[i + l] * all.chunks + first) * element, n, lines + l * LONG);
        }
        for (int64_t r = 0; r < rows; r++) {
          const float* mine = reduced + r * size + i;
          float* to = logits_at + r * wide + first;
          for (int64_t t = 0; t < n; t += W) {
            F sum_of = i ? load<F>(to + t) : F{};
            UNROLLED for (int l = 0; l < LINES; l++) sum_of += mine[l] * load<F>(lines + l * LONG + t);
            store(to + t, sum_of);
          }
        }
      }
    }
  }

  static F all_of(float x) { return F{} + x; }

  // The slot of a place, over all parts; and in which of them it lies, of places that do not fall.
  int64_t slot_of(int64_t at) {
    const int64_t slot = at < all.count_listed ? all.listed[owner * all.count_listed + at] : all.after + at - all.count_listed;
    while (slot - before >= all.slots[part]) before += all.slots[part++];
    return slot - before;
  }

  SMALL_CODE void logits_of_tokens() {
    part = before = 0;
    for (int64_t first = covered; first < all.tokens; first += TILE) {
      const int64_t n = all.tokens - first < TILE ? all.tokens - first : TILE, bytes = size * element;
      for (int64_t i = 0; i < n; i++) {
        const int64_t slot = slot_of(first + i);
        memcpy((char*)tile + i * bytes, all.keys[part] + owner * all.key_lane[part] + slot * all.key_slot[part], (size_t)bytes);
      }
      products_with(all.kind, placed, rows, size, (const char*)tile, n, found);
      for (int64_t r = 0; r < rows; r++)
        memcpy(logits_at + r * wide + filled + first - covered, found + r * BLOCK, (size_t)n * 4);
    }
  }

  // What each receives, the mean over the queries; false where that is no number.
  SMALL_CODE bool soften_all() const {
    const float inverse = all.softcap > 0 ? (float)(1 / all.softcap) : 0.f, most = (float)all.softcap;
    const int64_t end = padded(count);
    for (int64_t t = 0; t < all.widest; t++) scores[t] = 0;
    for (int64_t r = 0; r < rows; r++) {
      float* mine = logits_at + r * wide;
      for (int64_t t = count; t < end; t++) mine[t] = NOTHING;
      F high = all_of(NOTHING), added{};
      for (int64_t t = 0; t < end; t += W) {
        F logit = load<F>(mine + t);
        if (inverse > 0) {
          const F capped = tangent(logit * inverse) * most;
          logit = logit > all_of(NOTHING) ? capped : logit;
          store(mine + t, logit);
        }
        high = larger(logit, high);
      }
      const float sink = all.sinks ? all.sinks[owner * rows + r] : NOTHING, at = highest(high), top = sink > at ? sink : at;
      for (int64_t t = 0; t < end; t += W) {
        const F weight = exponential(load<F>(mine + t) - top);
        store(mine + t, weight);
        added += weight;
      }
      const float total = sum(added) + (all.sinks ? exponential(all_of(sink - top))[0] : 0.f);
      const float share = 1 / (total * (float)rows);
      for (int64_t t = 0; t < count; t++) scores[t] += mine[t] * share;
    }
    float whole = 0;
    for (int64_t t = 0; t < count; t++) whole += scores[t];
    return whole == whole;
  }

  // Those that receive most, the earliest among equals.
  SMALL_CODE void pick() {
    const int64_t full = span ? covered / span : 0, rest = covered - full * span;
    const auto tokens = [&](uint32_t least) {
      const int64_t of_last = rest ? reach(scores + full, 1, least) * rest : 0;
      return span * reach(scores, full, least) + of_last + reach(scores + filled, count - filled, least);
    };
    const uint32_t level = level_of(all.budget, tokens);
    int64_t spare = all.budget - tokens(level + 1), next = owner * all.budget;
    part = before = 0;
    for (int64_t i = 0, at = 0; i < count; i++) {
      const int64_t n = i < full ? span : i < filled ? rest : 1;
      const uint32_t mine = rank_of(scores[i]);
      int64_t taken = mine > level ? n : 0;
      if (mine == level) taken = n < spare ? n : spare, spare -= taken;
      for (int64_t t = at; t < at + taken; t++, next++) {
        const int64_t slot = slot_of(t);
        all.key_rows[next] = all.keys[part] + owner * all.key_lane[part] + slot * all.key_slot[part];
        all.value_rows[next] = all.values[part] + owner * all.value_lane[part] + slot * all.value_slot[part];
      }
      at += n;
    }
  }

  bool run() {
    reduce();
    if (filled) logits_of_chunks();
    logits_of_tokens();
    if (!soften_all()) return false;
    pick();
    return true;
  }
};

struct PageChooser {
  const Pages& all;
  int64_t owner, rows = all.rows, size = all.size, element = all.kind == FLOAT32 ? 4 : 2;
  float *above, *below, *found, *other, *bounds;

  // Room for `above` and `below`, for products, and for the bounds.
  static int64_t room(const Pages& all) { return 2 * all.rows * (all.size + BLOCK) + all.pages; }

  PageChooser(const Pages& all, int64_t owner, float* scratch) : all(all), owner(owner) {
    above = scratch, below = above + rows * size, found = below + rows * size, other = found + rows * BLOCK;
    bounds = other + rows * BLOCK;
  }

  int64_t pages_of(int64_t part) const { return all.low[part] ? (all.slots[part] + all.page - 1) / all.page : 0; }

  // The greatest product that any query can have with a key of each page. What is no number is above all others.
  SMALL_CODE void bound() const {
    Side side{};
    side.kind = all.kind, side.size = size;
    for (int64_t r = 0; r < rows; r++)
      for (int64_t c = 0; c < size; c++) {
        const float mine = all.query[(owner * rows + r) * size + c];
        const int64_t at = r * size + place(side, false, c);
        above[at] = mine < 0 ? 0.f : mine, below[at] = mine > 0 ? 0.f : mine;
      }
    float* to = bounds;
    for (int64_t i = 0; i < all.parts; i++) {
      const int64_t count = pages_of(i), begin = owner * count * size * element;
      for (int64_t first = 0; first < count; first += BLOCK) {
        const int64_t n = count - first < BLOCK ? count - first : BLOCK, at = begin + first * size * element;
        products_with(all.kind, above, rows, size, all.high[i] + at, n, found);
        products_with(all.kind, below, rows, size, all.low[i] + at, n, other);
        for (int64_t t = 0; t < n; t++, to++) {
          *to = found[t] + other[t];
          for (int64_t r = 1; r < rows; r++) {
            const float mine = found[r * BLOCK + t] + other[r * BLOCK + t];
            *to = mine > *to || mine != mine ? mine : *to;
          }
          // Of one sign.
          if (*to != *to) *to = __builtin_nanf("");
        }
      }
    }
  }

  // The pages with the highest bounds, and all of the parts that have none. What is chosen by no finite number is not
  // read, as where torch chooses.
  SMALL_CODE void pick() const {
    const uint32_t level = level_of(all.wanted, [&](uint32_t least) { return reach(bounds, all.pages, least); });
    int64_t spare = all.wanted - reach(bounds, all.pages, level + 1), next = owner * all.room, page = 0;
    for (int64_t i = 0; i < all.parts; i++) {
      const char *key = all.keys[i] + owner * all.key_lane[i], *value = all.values[i] + owner * all.value_lane[i];
      const int64_t step = all.low[i] ? all.page : all.slots[i];
      for (int64_t first = 0; first < all.slots[i]; first += step) {
        if (all.low[i]) {
          const float bound = bounds[page++];
          const uint32_t mine = rank_of(bound);
          if (mine < level || (mine == level && spare-- <= 0) || bound - bound != 0) continue;
        }
        for (int64_t t = first; t < first + step && t < all.slots[i]; t++, next++)
          all.key_rows[next] = key + t * all.key_slot[i], all.value_rows[next] = value + t * all.value_slot[i];
      }
    }
    all.lengths[owner] = (int32_t)(next - owner * all.room);
  }

  bool run() const {
    bound();
    pick();
    return true;
  }
};

template <class Chosen, class All> bool choose_of(const void* all, int64_t owner, float* scratch) {
  return Chosen(*(const All*)all, owner, scratch).run();
}

// Lets all owners choose, then reads what they chose; -1 where one could not.
SMALL_CODE int32_t choose_and_read(bool (*of_owner)(const void*, int64_t, float*), const void* all, float* scratch,
                                   int64_t room, const Call& call) {
  int32_t good = 1;
  const int32_t wrong = share_out(call.owners, call.threads, call.parallel_for, [&](int64_t owner, int64_t thread) {
    if (!of_owner(all, owner, scratch + thread * room)) __atomic_store_n(&good, 0, __ATOMIC_RELAXED);
  });
  return wrong ? wrong : good ? attend(call) : -1;
}

}  // namespace
