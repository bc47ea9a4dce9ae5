// Keys that were stored as they were before their rotary embedding: a tile of tokens at a time becomes the model's
// channels again, where they are coordinates, and is turned by the tokens' positions.
#pragma once

#include "coordinates.h"
#include "layouts.h"

#if defined(__AVX512F__)
#include "integers.h"
#endif

// Mirrored field by field in library.py.
struct Turn {
  const float* frequencies;  // (planes) radians per position; plane i is channels i and i + planes
  const int32_t* positions;  // (lanes, slots) columns; null: start + slot
  const int64_t* first;      // (lanes) column from which positions count; null: 0
  const Map* map;            // of what is stored to a head's channels, or the last on this way; null: it is these
  int64_t planes, interleaved;  // interleaved: plane i is channels 2 i and 2 i + 1
  int64_t start, joined;     // heads that share a lane: so many runs of a lane's rows have a matrix each
  int64_t size, alike;       // channels of a query; neighbouring lanes whose tokens have the same positions
  const Map* const* before;  // the maps that come before `map`, the last of them first
  int64_t count_before;
};

namespace {

constexpr int MAPPED = W == 16 ? 8 : 4;  // tokens that are mapped at once

// Numbers of a token in a table of cosines, and of sines.
int64_t turning_numbers(const Turn& turn) {
  return ((turn.interleaved ? 2 * turn.planes : turn.planes) + W - 1) / W * W;
}

// Heads with a matrix of their own, over all maps.
int64_t heads_of(const Turn& turn) {
  int64_t heads = turn.map ? turn.map->heads : 0;
  for (int64_t i = 0; i < turn.count_before; i++) heads = turn.before[i]->heads > heads ? turn.before[i]->heads : heads;
  return heads;
}

// Whole numbers of keys that are mapped are summed so many at once; what of a chunk they and those of a channel's row add
// up to is below 2^31.
constexpr int64_t AT_ONCE = 32, MOST_MAPPED = 16383, MOST_OF_ROW = 131071;

int64_t padded_to_chunks(int64_t stored) { return (stored + AT_ONCE - 1) / AT_ONCE * AT_ONCE; }

// Floats of a head's matrix as `prepare` writes it, for keys of `stored` numbers whose channels are padded to `wide`.
int64_t of_matrix(int64_t stored, int64_t wide, bool coarse) {
  return coarse ? wide * (padded_to_chunks(stored) / 2 + 2) : wide * (stored + 1);
}

// Floats of a row of matrices, whichever map it has come through.
SMALL_CODE int64_t row_room(const Turn& turn, int64_t stored) {
  int64_t most = padded_to_chunks(stored);
  for (int64_t i = 0; i < turn.count_before; i++) {
    const int64_t before = padded_to_chunks(turn.before[i]->blocks * turn.before[i]->wide);
    most = before > most ? before : most;
  }
  return most;
}

// Floats of all that `prepare` writes.
SMALL_CODE int64_t room_of(const Turn& turn, int64_t stored, int64_t wide, bool coarse) {
  const int64_t matrices = heads_of(turn) * of_matrix(stored, wide, coarse);
  return 2 * turning_numbers(turn) + matrices + 2 * MAPPED * row_room(turn, stored);
}

// Whether the cache has 16 bits, so that so many bits of what is mapped are enough.
bool maps_coarse(const Turn* turn, const Side& keys) {
#if defined(__AVX512F__)
  if (!turn || !turn->map || keys.kind == FLOAT32) return false;
  if (keys.kind == BLOCK_LEVELS) return ((const Blocks*)keys.low)->coarse;
  return keys.kind <= FLOAT16 || keys.scales != FLOAT32;
#else
  return false;
#endif
}

#if defined(__AVX512F__)
// A channel's row (stored, zeros behind) as whole numbers of 16 bits, two to a word, 2 W words apart; gives what they are
// worth. `row` is lost.
SMALL_CODE float shorten_row(float* row, int64_t stored, int32_t* to) {
  F top{};
  float most = 0;
  for (int64_t k = 0; k < stored; k += AT_ONCE) {
    F both{};
    for (int64_t i = k; i < k + AT_ONCE; i += W) {
      const F x = load<F>(row + i), size = larger(x, -x);
      top = larger(top, size), both += size;
    }
    const float chunk = sum(both);
    most = chunk > most ? chunk : most;
  }
  // Rounding adds half to each.
  const float high = highest(top) / 32767, wide = most / (MOST_OF_ROW - AT_ONCE / 2), unit = high > wide ? high : wide;
  const float up = unit > 0 ? 1 / unit : 0.f;
  for (int64_t k = 0; k < stored; k += W) {
    int32_t pairs[W / 2];
    const __m512i whole = _mm512_maskz_cvtps_epi32(0xffff, (__m512)(load<F>(row + k) * up));
    _mm256_storeu_si256((__m256i*)pairs, _mm512_maskz_cvtepi32_epi16(0xffff, whole));
    for (int i = 0; i < W / 2; i++, to += 2 * W) *to = pairs[i];
  }
  return unit;
}
#endif

// What rows of a matrix are once a further map comes before it: as many as fill `MAPPED`, `apart` floats apart.
APART PLAIN_LOOPS void rows_before(const Map& map, int64_t head, const float* rows, int64_t apart, float* to) {
  const float* matrix = of_head(map, head);
  const float scale = (float)map.scale;
  for (int64_t b = 0; b < map.blocks; b++, rows += map.wide, to += map.narrow) {
    int64_t c = 0;
    for (; c + W <= map.narrow; c += W) {
      F sum_of[MAPPED]{};
      for (int64_t k = 0; k < map.wide; k++) {
        const F line = load<F>(matrix + k * map.narrow + c);
        UNROLLED for (int i = 0; i < MAPPED; i++) sum_of[i] += line * rows[i * apart + k];
      }
      UNROLLED for (int i = 0; i < MAPPED; i++) store(to + i * apart + c, sum_of[i] * scale);
    }
    for (; c < map.narrow; c++)
      for (int i = 0; i < MAPPED; i++) {
        float total = 0;
        for (int64_t k = 0; k < map.wide; k++) total += matrix[k * map.narrow + c] * rows[i * apart + k];
        to[i * apart + c] = total * scale;
      }
  }
}

// Rows of a head's channels from `first` on, over all maps, `apart` floats apart and with zeros behind, and their means:
// as many as fill `MAPPED`, zeros past the last channel. Gives where they are, which is one of two places.
SMALL_CODE float* rows_of(const Turn& turn, int64_t head, int64_t first, int64_t apart, float* rows, float* mean_of) {
  const Map& map = *turn.map;
  const float *matrix = of_head(map, head), *mean = map.mean ? map.mean + head % map.heads * turn.size : nullptr;
  float* other = rows + MAPPED * apart;
  for (int64_t k = 0; k < MAPPED * apart; k++) rows[k] = other[k] = 0;
  for (int i = 0; i < MAPPED; i++) mean_of[i] = 0;
  for (int64_t c = first; c < turn.size && c < first + MAPPED; c++) {
    float* to = rows + (c - first) * apart + c / map.wide * map.narrow;
    for (int64_t k = 0; k < map.narrow; k++) to[k] = matrix[c % map.wide * map.narrow + k] * (float)map.scale;
    if (mean) mean_of[c - first] = mean[c];
  }
  for (int64_t i = 0; i < turn.count_before; i++) {
    const Map& next = *turn.before[i];
    const int64_t wide = next.blocks * next.wide, narrow = next.blocks * next.narrow;
    const float* shift = next.mean ? next.mean + head % next.heads * wide : nullptr;
    for (int r = 0; shift && r < MAPPED; r++)
      for (int64_t k = 0; k < wide; k++) mean_of[r] += rows[r * apart + k] * shift[k];
    rows_before(next, head, rows, apart, other);
    for (int r = 0; r < MAPPED; r++)
      for (int64_t k = narrow; k < apart; k++) other[r * apart + k] = 0;
    float* mine = rows;
    rows = other, other = mine;
  }
  return rows;
}

// Frequencies as tables of angles have them, the signs of sines, and of each head's matrix panels of 2 W channels: a row
// for each number that is stored, and behind them the means.
SMALL_CODE void prepare(const Turn& turn, int64_t stored, int64_t wide, bool coarse, float* to) {
  const int64_t numbers = turning_numbers(turn), each = of_matrix(stored, wide, coarse), heads = heads_of(turn);
  for (int64_t i = 0; i < numbers; i++) {
    const int64_t plane = turn.interleaved ? i / 2 : i;
    to[i] = plane < turn.planes ? turn.frequencies[plane] : 0;
    to[numbers + i] = turn.interleaved && i % 2 == 0 ? -1.f : 1.f;
  }
  to += 2 * numbers;
  float *room = to + heads * each, means[MAPPED];
  const int64_t apart = row_room(turn, stored);
  for (int64_t head = 0; head < heads; head++, to += each) {
    for (int64_t i = 0; i < each; i++) to[i] = 0;
    float* rows = nullptr;
    for (int64_t c = 0; c < turn.size; c++) {
      if (c % MAPPED == 0) rows = rows_of(turn, head, c, apart, room, means);
      float* row = rows + c % MAPPED * apart;
      to[each - wide + c] = means[c % MAPPED];
#if defined(__AVX512F__)
      if (coarse) {
        const int64_t chunks = padded_to_chunks(stored);
        to[each - 2 * wide + c] = shorten_row(row, chunks, (int32_t*)to + c / (2 * W) * W * chunks + c % (2 * W));
        continue;
      }
#endif
      float* at = to + c / (2 * W) * (2 * W) * stored + c % (2 * W);
      for (int64_t k = 0; k < stored; k++, at += 2 * W) *at = row[k];
    }
  }
}

// x less so many quarters of a turn, |x| < 2^22; within 1e-7 of what it is exactly.
inline F less_quarters(F x, F quarters) {
#if defined(__AVX512F__)
  const __m512 most = _mm512_fnmadd_ps((__m512)quarters, _mm512_set1_ps(1.57079637f), (__m512)x);
  return (F)_mm512_fnmadd_ps((__m512)quarters, _mm512_set1_ps(-4.37113883e-8f), most);
#elif defined(__FMA__)
  const __m256 most = _mm256_fnmadd_ps((__m256)quarters, _mm256_set1_ps(1.57079637f), (__m256)x);
  return (F)_mm256_fnmadd_ps((__m256)quarters, _mm256_set1_ps(-4.37113883e-8f), most);
#elif defined(__aarch64__)
  const float32x4_t most = vfmsq_n_f32((float32x4_t)x, (float32x4_t)quarters, 1.57079637f);
  return (F)vfmsq_n_f32(most, (float32x4_t)quarters, -4.37113883e-8f);
#else
  for (int i = 0; i < W; i++) x[i] = (float)((double)x[i] - (double)quarters[i] * 1.5707963267948966);
  return x;
#endif
}

// Absolute errors below 2e-7. Polynomials of Cephes' sinf and cosf within an eighth of a turn.
inline void cosine_and_sine(F x, F& cosine, F& sine) {
  const F whole = (F)(x * 0.636619772f + 12582912.f);
  const F r = less_quarters(x, whole - 12582912.f), z = r * r;
  const F s = ((z * -1.9515295891e-4f + 8.3321608736e-3f) * z - 1.6666654611e-1f) * z * r + r;
  const F c = ((z * 2.443315711809948e-5f - 1.388731625493765e-3f) * z + 4.166664568298827e-2f) * z * z - z * 0.5f + 1.f;
  const I quarter = (I)whole, swaps = (quarter & 1) == 1;
  sine = (F)((I)(swaps ? c : s) ^ (quarter & 2) << 30);
  cosine = (F)((I)(swaps ? s : c) ^ ((quarter + 1) & 2) << 30);
}

// Calls `each` with cosines and sines of a run of tokens, a vector at a time, and of which token and from which number on
// they are. Angles are products in float32, as where keys were turned back.
template <class Each>
INLINE static inline void over_angles(const Turn& turn, const float* prepared, int64_t lane, int64_t slots, int64_t slot,
                                      int64_t count, Each each) {
  const int64_t numbers = turning_numbers(turn);
  for (int64_t t = 0; t < count; t++) {
    const int64_t column = turn.positions ? turn.positions[lane * slots + slot + t] : turn.start + slot + t;
    const F place = all((float)(column - (turn.first ? turn.first[lane] : 0)));
    for (int64_t i = 0; i < numbers; i += W) {
      F cosine, sine;
      cosine_and_sine(load<F>(prepared + i) * place, cosine, sine);
      each(t, i, cosine, sine);
    }
  }
}

// Cosines and sines of a run of tokens, one behind the other for each of them.
SMALL_CODE void fill_angles(const Turn& turn, const float* prepared, int64_t lane, int64_t slots, int64_t slot,
                                   int64_t count, float* to) {
  const int64_t numbers = turning_numbers(turn);
  over_angles(turn, prepared, lane, slots, slot, count, [&](int64_t t, int64_t i, F cosine, F sine) INLINE {
    float* mine = to + 2 * t * numbers + i;
    store(mine, cosine), store(mine + numbers, sine * load<F>(prepared + numbers + i));
  });
}

// Tokens `wide` floats apart, turned where they are.
SMALL_CODE void turn_tile(const Turn& turn, const float* angles, int64_t count, int64_t wide, float* tile) {
  const int64_t numbers = turning_numbers(turn), planes = turn.planes;
  for (int64_t t = 0; t < count; t++, tile += wide, angles += 2 * numbers) {
    const float *cosine = angles, *sine = angles + numbers;
    int64_t i = 0;
    if (turn.interleaved) {
      I other;
      UNROLLED for (int j = 0; j < W; j++) other[j] = j ^ 1;
      for (; i + W <= 2 * planes; i += W) {
        const F x = load<F>(tile + i);
        store(tile + i, x * load<F>(cosine + i) + picked(x, other) * load<F>(sine + i));
      }
      for (; i < 2 * planes; i += 2) {
        const float a = tile[i], b = tile[i + 1];
        tile[i] = a * cosine[i] + b * sine[i], tile[i + 1] = b * cosine[i] - a * sine[i];
      }
    } else {
      float* behind = tile + planes;
      for (; i + W <= planes; i += W) {
        const F a = load<F>(tile + i), b = load<F>(behind + i), c = load<F>(cosine + i), s = load<F>(sine + i);
        store(tile + i, a * c - b * s);
        store(behind + i, b * c + a * s);
      }
      for (; i < planes; i++) {
        const float a = tile[i], b = behind[i];
        tile[i] = a * cosine[i] - b * sine[i], behind[i] = b * cosine[i] + a * sine[i];
      }
    }
  }
}

// Tokens `apart` floats apart, in a head's channels, `wide` floats apart: as many as fill `MAPPED`, a multiple of which
// there is room for.
APART PLAIN_LOOPS void map_tile(const float* matrix, const float* tile, int64_t apart, int64_t stored, int64_t count,
                                int64_t wide, float* to) {
  const float* mean = matrix + wide * stored;
  for (int64_t c = 0; c < wide; c += 2 * W, matrix += 2 * W * stored)
    for (int64_t t = 0; t < count; t += MAPPED) {
      const float *from = tile + t * apart, *row = matrix;
      F sum_of[MAPPED][2];
      UNROLLED for (int i = 0; i < MAPPED; i++) sum_of[i][0] = load<F>(mean + c), sum_of[i][1] = load<F>(mean + c + W);
      for (int64_t k = 0; k < stored; k++, row += 2 * W) {
        const F first = load<F>(row), second = load<F>(row + W);
        UNROLLED for (int i = 0; i < MAPPED; i++) {
          const float mine = from[i * apart + k];
          sum_of[i][0] += first * mine, sum_of[i][1] += second * mine;
        }
      }
      UNROLLED for (int i = 0; i < MAPPED; i++) {
        store(to + (t + i) * wide + c, sum_of[i][0]);
        store(to + (t + i) * wide + c + W, sum_of[i][1]);
      }
    }
}

#if defined(__AVX512F__)
// Tokens `apart` floats apart as whole numbers of 16 bits, and behind all of a tile what they are worth.
SMALL_CODE void shorten_tile(const float* tile, int64_t apart, int64_t stored, int64_t count, int64_t room, int32_t* to) {
  const int64_t words = padded_to_chunks(stored) / 2, whole = (stored + W - 1) / W * W;
  float* back = (float*)(to + room * words);
  for (int64_t t = 0; t < count; t++, tile += apart, to += words) {
    const Scaled by = scaled(tile, whole, MOST_MAPPED);
    back[t] = by.back;
    for (int64_t k = 0; k < 2 * words; k += W) {
      const F x = k < whole ? load<F>(tile + k) * by.up : F{};
      _mm256_storeu_si256((__m256i*)(to + k / 2),
                          _mm512_maskz_cvtepi32_epi16(0xffff, _mm512_maskz_cvtps_epi32(0xffff, (__m512)x)));
    }
  }
}

// Two products to a lane. The compiler's own form of it copies the sum.
inline void add_two(__m512i& sum, __m512i a, __m512i b) { asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b)); }

// As `map_tile`, of what `shorten_tile` gave.
APART PLAIN_LOOPS void map_tile_shortly(const float* matrix, const int32_t* shorts, int64_t room, int64_t stored,
                                        int64_t count, int64_t wide, float* to) {
  const int64_t chunks = padded_to_chunks(stored), words = chunks / 2;
  const float *unit = matrix + of_matrix(stored, wide, true) - 2 * wide, *mean = unit + wide;
  const float* back = (const float*)(shorts + room * words);
  for (int64_t c = 0; c < wide; c += 2 * W)
    for (int64_t t = 0; t < count; t += MAPPED) {
      const int32_t *row = (const int32_t*)matrix + c / (2 * W) * W * chunks, *from = shorts + t * words;
      float* out = to + t * wide + c;
      for (int64_t k = 0; k < words; k += AT_ONCE / 2, from += AT_ONCE / 2) {
        __m512i sum_of[MAPPED][2];
        UNROLLED for (int i = 0; i < MAPPED; i++) sum_of[i][0] = sum_of[i][1] = __m512i{};
        for (int64_t j = 0; j < AT_ONCE / 2; j++, row += 2 * W) {
          const __m512i first = load<__m512i>(row), second = load<__m512i>(row + W);
          UNROLLED for (int i = 0; i < MAPPED; i++) {
            const __m512i mine = _mm512_set1_epi32(from[i * words + j]);
            add_two(sum_of[i][0], first, mine), add_two(sum_of[i][1], second, mine);
          }
        }
        UNROLLED for (int i = 0; i < MAPPED; i++)
          UNROLLED for (int half = 0; half < 2; half++) {
            float* at = out + i * wide + half * W;
            const F mine = __builtin_convertvector((I)sum_of[i][half], F);
            store(at, k ? load<F>(at) + mine : mine);
          }
      }
      const F units[] = {load<F>(unit + c), load<F>(unit + c + W)}, means[] = {load<F>(mean + c), load<F>(mean + c + W)};
      for (int64_t i = 0; i < MAPPED && t + i < count; i++)
        UNROLLED for (int half = 0; half < 2; half++) {
          float* at = out + i * wide + half * W;
          store(at, load<F>(at) * (units[half] * back[t + i]) + means[half]);
        }
    }
}
#endif

}  // namespace
