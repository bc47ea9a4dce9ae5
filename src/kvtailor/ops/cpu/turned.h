// Keys that were stored as they were before their rotary embedding: a tile of tokens at a time becomes the model's
// channels again, where they are coordinates, and is turned by the tokens' positions.
#pragma once

#include "coordinates.h"
#include "layouts.h"

// Mirrored field by field in library.py.
struct Turn {
  const float* frequencies;  // (planes) radians per position; plane i is channels i and i + planes
  const int32_t* positions;  // (lanes, slots) columns; null: start + slot
  const int64_t* first;      // (lanes) column from which positions count; null: 0
  const Map* map;            // of what is stored to a head's channels; null: it is these
  int64_t planes, interleaved;  // interleaved: plane i is channels 2 i and 2 i + 1
  int64_t start, joined;     // heads that share a lane: so many runs of a lane's rows have a matrix each
  int64_t size, alike;       // channels of a query; neighbouring lanes whose tokens have the same positions
};

namespace {

constexpr int MAPPED = W == 16 ? 8 : 4;  // tokens that are mapped at once

// Numbers of a token in a table of cosines, and of sines.
int64_t turning_numbers(const Turn& turn) {
  return ((turn.interleaved ? 2 * turn.planes : turn.planes) + W - 1) / W * W;
}

int64_t heads_of(const Turn& turn) { return turn.map ? turn.map->heads : 0; }

// Floats of what `prepare` writes, of keys of `stored` numbers whose channels are padded to `wide`.
int64_t room_of(const Turn& turn, int64_t stored, int64_t wide) {
  return 2 * turning_numbers(turn) + heads_of(turn) * wide * (stored + 1);
}

// Frequencies as tables of angles have them, the signs of sines, and of each head's matrix panels of 2 W channels: a row
// for each number that is stored, and behind them the means.
SMALL_CODE void prepare(const Turn& turn, int64_t stored, int64_t wide, float* to) {
  const int64_t numbers = turning_numbers(turn);
  for (int64_t i = 0; i < numbers; i++) {
    const int64_t plane = turn.interleaved ? i / 2 : i;
    to[i] = plane < turn.planes ? turn.frequencies[plane] : 0;
    to[numbers + i] = turn.interleaved && i % 2 == 0 ? -1.f : 1.f;
  }
  to += 2 * numbers;
  for (int64_t head = 0; head < heads_of(turn); head++) {
    const Map& map = *turn.map;
    const float *matrix = of_head(map, head), *mean = map.mean ? map.mean + head * turn.size : nullptr;
    for (int64_t i = 0; i < wide * (stored + 1); i++) to[i] = 0;
    for (int64_t c = 0; c < turn.size; c++) {
      const float* row = matrix + c % map.wide * map.narrow;
      float* at = to + (c / (2 * W) * stored + c / map.wide * map.narrow) * (2 * W) + c % (2 * W);
      for (int64_t k = 0; k < map.narrow; k++, at += 2 * W) *at = row[k] * (float)map.scale;
      if (mean) to[wide * stored + c] = mean[c];
    }
    to += wide * (stored + 1);
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

// Cosines and sines of a run of tokens, one behind the other for each of them. Angles are products in float32, as
// where keys were turned back.
SMALL_CODE void fill_angles(const Turn& turn, const float* prepared, int64_t lane, int64_t slots, int64_t slot,
                                   int64_t count, float* to) {
  const int64_t numbers = turning_numbers(turn);
  for (int64_t t = slot; t < slot + count; t++, to += 2 * numbers) {
    const int64_t column = turn.positions ? turn.positions[lane * slots + t] : turn.start + t;
    const F place = all((float)(column - (turn.first ? turn.first[lane] : 0)));
    for (int64_t i = 0; i < numbers; i += W) {
      F cosine, sine;
      cosine_and_sine(load<F>(prepared + i) * place, cosine, sine);
      store(to + i, cosine);
      store(to + numbers + i, sine * load<F>(prepared + numbers + i));
    }
  }
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

}  // namespace
