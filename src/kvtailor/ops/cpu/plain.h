// Products with keys and values of a plain type, as they lie.
#pragma once

#include "vectors.h"

constexpr int64_t BLOCK = 256;  // tokens whose logits are at hand at once

// Logits of R rows with W / R tokens, `stride` bytes apart; tokens past `count` repeat the last.
template <class T, int R>
inline void logits_of(const float* query, int64_t size, const char* keys, int64_t stride, int64_t count, float* to) {
  constexpr int N = W / R;
  const char* token[N];
  F sum_of[W];
  UNROLLED for (int i = 0; i < N; i++) token[i] = keys + (i < count ? i : count - 1) * stride;
  UNROLLED for (int i = 0; i < W; i++) sum_of[i] = F{};
#if defined(__AVX2__) && !defined(__AVX512F__)
  // 16 registers hold all but the queries of four rows and two tokens, and each is read once for both.
  if constexpr (R == 4) {
    for (int64_t c = 0; c < size; c += 2 * W) {
      F first[N], second[N];
      UNROLLED for (int i = 0; i < N; i++) {
        T::pair(token[i] + c * T::BYTES, first[i], second[i]);
        soon(token[i] + c * T::BYTES);
      }
      UNROLLED for (int r = 0; r < R; r++) {
        F &one = sum_of[r * N], &other = sum_of[r * N + 1];
        add_two_products(one, other, first[0], first[1], query + r * size + c);
        add_two_products(one, other, second[0], second[1], query + r * size + c + W);
      }
    }
    float all_of[W];
    store(all_of, sums(sum_of));
    return store_rows<R>(to, BLOCK, all_of, count);
  }
#endif
  for (int64_t c = 0; c < size; c += 2 * W)
    UNROLLED for (int i = 0; i < N; i++) {
      F first, second;
      T::pair(token[i] + c * T::BYTES, first, second);
      soon(token[i] + c * T::BYTES);
      UNROLLED for (int r = 0; r < R; r++) {
        sum_of[r * N + i] += load<F>(query + r * size + c) * first;
        sum_of[r * N + i] += load<F>(query + r * size + c + W) * second;
      }
    }
  float all_of[W];
  store(all_of, sums(sum_of));
#if !defined(__AVX512F__)
  store_rows<R>(to, BLOCK, all_of, count);
#else
  const int64_t filled = count < N ? count : N;
  for (int r = 0; r < R; r++) memcpy(to + r * BLOCK, all_of + r * N, (size_t)filled * sizeof(float));
#endif
}

template <class T, int R>
inline void logits_rows(const float* query, int64_t size, const char* keys, int64_t stride, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i += W / R)
    logits_of<T, R>(query, size, keys + i * stride, stride, count - i, to + i);
}

// Apart, since it is called from several places.
template <class T>
APART void logits(const float* query, int64_t rows, int64_t size, const char* keys, int64_t stride, int64_t count,
            float* to) {
  in_rows(rows, [&](auto some, int64_t r) {
    logits_rows<T, decltype(some)::ROWS>(query + r * size, size, keys, stride, count, to + r * BLOCK);
  });
}

// Adds the weighted values of `count` tokens to 2 N vectors of channels of R rows.
template <class T, int R, int N>
inline void mix_of(const float* weights, const char* values, int64_t stride, int64_t count, float* out, int64_t size,
                   const char*& next) {
  F sum_of[R][2 * N];
  UNROLLED for (int r = 0; r < R; r++)
    UNROLLED for (int i = 0; i < 2 * N; i++) sum_of[r][i] = load<F>(out + r * size + i * W);
  for (int64_t t = 0; t < count; t++, values += stride) {
    F value[2 * N];
    ask<2 * N * W * T::BYTES>(next);
    UNROLLED for (int i = 0; i < N; i++) T::pair(values + 2 * i * W * T::BYTES, value[2 * i], value[2 * i + 1]);
    UNROLLED for (int r = 0; r < R; r++)
      UNROLLED for (int i = 0; i < 2 * N; i++) sum_of[r][i] += weights[r * BLOCK + t] * value[i];
  }
  UNROLLED for (int r = 0; r < R; r++)
    UNROLLED for (int i = 0; i < 2 * N; i++) store(out + r * size + i * W, sum_of[r][i]);
}

template <class T, int R>
void mix_rows(const float* weights, const char* values, int64_t stride, int64_t count, float* out, int64_t size) {
  // As many sums as leave registers free: 16 of 32, or 8 of 16.
  constexpr int N = W / R >= 8 ? 4 : W / R / 2 > 0 ? W / R / 2 : 1;
  const char* next = values + VALUES_AHEAD;
  int64_t c = 0;
  for (; c + 2 * N * W <= size; c += 2 * N * W)
    mix_of<T, R, N>(weights, values + c * T::BYTES, stride, count, out + c, size, next);
  for (; c < size; c += 2 * W) mix_of<T, R, 1>(weights, values + c * T::BYTES, stride, count, out + c, size, next);
}

// Apart for the same reason.
template <class T>
APART void mix(const float* weights, int64_t rows, const char* values, int64_t stride, int64_t count, float* out,
         int64_t size) {
  in_rows(rows, [&](auto some, int64_t r) {
    mix_rows<T, decltype(some)::ROWS>(weights + r * BLOCK, values, stride, count, out + r * size, size);
  });
}
