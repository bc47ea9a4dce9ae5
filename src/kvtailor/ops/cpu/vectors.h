// Vectors of floats as GCC and Clang have them on every machine; how wide they are is all that the variants differ in.
#pragma once

#include <stdint.h>
#include <string.h>

#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

// Which form of products in integers there is: see integers.h, short_products.h and dot_products.h.
#if defined(__AVX2__) || defined(__ARM_FEATURE_DOTPROD)
#define INTEGER_PRODUCTS
#endif
// Of them those that add four products of bytes to a lane.
#if defined(__AVX512F__) || defined(__ARM_FEATURE_DOTPROD)
#define BYTE_PRODUCTS
#endif
#if defined(INTEGER_PRODUCTS) && !defined(BYTE_PRODUCTS)
#define SHORT_PRODUCTS
#endif

typedef float F __attribute__((vector_size(W * 4)));
typedef int32_t I __attribute__((vector_size(W * 4)));
typedef uint32_t U __attribute__((vector_size(W * 4)));
typedef uint16_t H __attribute__((vector_size(W * 2)));
typedef uint8_t B __attribute__((vector_size(W)));

constexpr float NOTHING = -__builtin_inff();

// Arrays of vectors become registers only where loops over them are taken apart.
#define UNROLLED _Pragma("GCC unroll 16")

// GCC takes loops apart after it has given arrays their place. Where an array of sums is new every few tokens, each number
// of it is a constant from the beginning, or all of them would go to the stack and back.
#define INLINE __attribute__((always_inline))
template <int N> struct Number {
  constexpr operator int() const { return N; }
};
template <class Each, int... N> INLINE static inline void each_of(const Each& each, std::integer_sequence<int, N...>) {
  (each(Number<N>()), ...);
}
template <int N, class Each> INLINE static inline void each_below(const Each& each) {
  each_of(each, std::make_integer_sequence<int, N>());
}

template <int R> struct Some {
  static constexpr int ROWS = R;
};

// Calls `each` with a few rows and the first of them, 4 at a time while there are as many, until all were seen.
template <class Each> static inline void in_rows(int64_t rows, Each each) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) each(Some<4>(), r);
  for (; r + 2 <= rows; r += 2) each(Some<2>(), r);
  if (r < rows) each(Some<1>(), r);
}

// Large, and called too seldom for copies of it to be worth their bytes.
#define APART __attribute__((noinline))
// Vectors are written out, and loops over what is left of them are not worth other copies.
#if defined(__clang__)
#define PLAIN_LOOPS
#else
#define PLAIN_LOOPS __attribute__((optimize("no-tree-loop-vectorize")))
#endif
// Called once a token: its bytes matter more than its time.
#if defined(__clang__)
#define SMALL_CODE __attribute__((noinline, minsize))
#else
#define SMALL_CODE __attribute__((noinline, optimize("Os")))
#endif

// Products are rounded before they are added, where the bits of torch's own operations are wanted; of a function whose body
// begins with AS_WRITTEN. Small, too.
#if defined(__clang__)
#define EACH_ROUNDED __attribute__((noinline, minsize))
#define AS_WRITTEN _Pragma("clang fp contract(off)")
#else
#define EACH_ROUNDED __attribute__((noinline, optimize("Os", "fp-contract=off")))
#define AS_WRITTEN
#endif

template <class V> static inline V load(const void* from) {
  V v;
  memcpy(&v, from, sizeof v);
  return v;
}
template <class V> static inline void store(void* to, V v) { memcpy(to, &v, sizeof v); }

static inline F all(float x) { return F{} + x; }
static inline F larger(F a, F b) { return a > b ? a : b; }

// Lane i of the result is the lane i + by of v.
static inline F turned(F v, int by) {
  F to;
  UNROLLED for (int i = 0; i < W; i++) to[i] = v[(i + by) % W];
  return to;
}

static inline float highest(F v) {
  UNROLLED for (int by = W / 2; by; by /= 2) v = larger(v, turned(v, by));
  return v[0];
}

static inline float sum(F v) {
  UNROLLED for (int by = W / 2; by; by /= 2) v += turned(v, by);
  return v[0];
}

// Lane i of the result is the lane from[i] of v.
static inline F picked(F v, I from) {
#if defined(__aarch64__)
  // The four bytes of each.
  const U bytes = ((U)from & (W - 1)) * 0x04040404u + 0x03020100u;
  return (F)vqtbl1q_u8((uint8x16_t)v, (uint8x16_t)bytes);
#elif defined(__clang__)
  F to;
  for (int i = 0; i < W; i++) to[i] = v[from[i]];
  return to;
#else
  return __builtin_shuffle(v, from);
#endif
}

// Bytes that are asked for before they are read, into the second level of caches. Keys and values of a block are read in
// turns, and the memory must be busy with the next values while keys are multiplied: hence tens of KiB.
constexpr int64_t KEYS_AHEAD = 1 << 15, VALUES_AHEAD = 1 << 16;

static inline void soon(const void* at) { __builtin_prefetch((const char*)at + KEYS_AHEAD, 0, 2); }

// The same, and for the first level of caches what comes next: where tokens are few vectors, a core that has only begun to
// look at the next ones would wait for the second level.
static inline void ahead(const void* at) { soon(at), __builtin_prefetch((const char*)at + (1 << 12), 0, 3); }

// Where several loops go over the same tokens, each over a part of their channels, they ask together for what comes
// later, in the order of memory. If each asked for its own part of later tokens, lines would come with holes between
// them, at half the rate.
template <int BYTES> static inline void ask(const char*& next) {
  UNROLLED for (int i = 0; i < BYTES; i += 64) __builtin_prefetch(next + i, 0, 2);
  next += BYTES;
}

// Scales of later tokens. Measured on AVX2 alone.
static inline void ask_scales([[maybe_unused]] const char* from, [[maybe_unused]] int64_t bytes) {
#if defined(SHORT_PRODUCTS)
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i, 0, 2);
#endif
}

// Sums of two vectors' neighbours: those of a, then those of b.
template <class V> static inline V paired(V a, V b) {
#if defined(__clang__)
  V even, odd;
  for (int j = 0; j < W; j++) {
    even[j] = j < W / 2 ? a[2 * j] : b[2 * j - W];
    odd[j] = j < W / 2 ? a[2 * j + 1] : b[2 * j + 1 - W];
  }
  return even + odd;
#else
  I even, odd;
  UNROLLED for (int i = 0; i < W; i++) even[i] = 2 * i, odd[i] = 2 * i + 1;
  return __builtin_shuffle(a, b, even) + __builtin_shuffle(a, b, odd);
#endif
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// Sums of lanes 0 and 2, and of 1 and 3, of each half of 128 bits: of a and of b in turn.
template <class V> static inline V crossed(V a, V b) {
  return (V)_mm256_unpacklo_ps((__m256)a, (__m256)b) + (V)_mm256_unpackhi_ps((__m256)a, (__m256)b);
}

// Of four vectors, in each half of 128 bits.
template <class V> static inline V quarters(const V* v) {
  const V a = crossed(v[0], v[1]), b = crossed(v[2], v[3]);
  return (V)_mm256_unpacklo_pd((__m256d)a, (__m256d)b) + (V)_mm256_unpackhi_pd((__m256d)a, (__m256d)b);
}
#endif

// Lane j of the result is the sum of the vector v[j]; v is lost.
template <int N = W, class V> INLINE static inline V sums(const V* v) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  // Lanes leave their half of 128 bits once, since that takes twice as long.
  const __m256 a = (__m256)quarters(v), b = (__m256)quarters(v + 4);
  return (V)_mm256_permute2f128_ps(a, b, 0x20) + (V)_mm256_permute2f128_ps(a, b, 0x31);
#else
  if constexpr (N == 2) return paired(v[0], v[1]);
  else return paired(sums<N / 2>(v), sums<N / 2>(v + N / 2));
#endif
}

// Writes N numbers of each of R rows, `apart` from one another, or as many as there are: a copy of a number that is not
// known is a call.
template <int R, int N = W / R>
INLINE static inline void store_rows(float* to, int64_t apart, const float* from, int64_t count) {
  if (count >= N) {
    UNROLLED for (int r = 0; r < R; r++) memcpy(to + r * apart, from + r * N, N * sizeof(float));
  } else {
    for (int r = 0; r < R; r++)
      for (int64_t i = 0; i < count; i++) to[r * apart + i] = from[r * N + i];
  }
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// Adds the same numbers times a, and times b. By name: GCC 12 reads factors long before they are multiplied, has too few
// registers then, and puts what it read on the stack.
INLINE static inline void add_two_products(F& sum_of_a, F& sum_of_b, F a, F b, const float* factors) {
  F read;
  asm("vmovups %3, %2\n\tvfmadd231ps %4, %2, %0\n\tvfmadd231ps %5, %2, %1"
      : "+x"(sum_of_a), "+x"(sum_of_b), "=&x"(read)
      : "m"(*(const float(*)[W])factors), "x"(a), "x"(b));
}
#endif

// e^x for x <= 0, 0 below -87: relative error below 2e-7, as Cephes' expf (range reduction in two steps, degree 6).
static inline F exponential(F x) {
  const F whole = (F)(x * 1.44269504f + 12582912.f);
  const F n = whole - 12582912.f;
  const F f = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  F p = all(1.9875691500e-4f);
  p = p * f + 1.3981999507e-3f;
  p = p * f + 8.3334519073e-3f;
  p = p * f + 4.1665795894e-2f;
  p = p * f + 1.6666665459e-1f;
  p = p * f + 5.0000001201e-1f;
  p = p * f * f + f + 1.f;
  const F power = (F)((((I)whole - (I)all(12582912.f)) + 127) << 23);
  return x < -87.f ? F{} : p * power;
}

// tanh x: relative error below 4e-7. x P(x^2) / Q(x^2), least in its greatest relative error up to 8.5, where tanh is 1
// in single precision (fitted by kvtailor: 1.2e-8 before rounding).
static inline F tangent(F x) {
  x = x > 8.5f ? all(8.5f) : x;
  x = x < -8.5f ? all(-8.5f) : x;
  const F z = x * x;
  F p = all(1.426920611e-08f), q = all(8.145113913e-07f);
  p = p * z + 2.125102670e-05f, q = q * z + 3.348862986e-04f;
  p = p * z + 3.534025717e-03f, q = q * z + 2.602274694e-02f;
  p = p * z + 1.341324594e-01f, q = q * z + 4.674656868e-01f;
  p = p * z + 1.f, q = q * z + 1.f;
  return x * p / q;
}

// GCC 12 takes __builtin_convertvector apart into halves, or into single numbers, hence the instructions by name.
static inline U widened(H h) {
#if defined(__AVX512F__)
  return (U)_mm512_cvtepu16_epi32((__m256i)h);
#elif defined(__AVX2__)
  return (U)_mm256_cvtepu16_epi32((__m128i)h);
#elif defined(__aarch64__)
  return (U)vmovl_u16((uint16x4_t)h);
#else
  return __builtin_convertvector(h, U);
#endif
}

static inline I ints_of(const uint8_t* codes) {
#if defined(__AVX512F__)
  return (I)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)codes));
#elif defined(__AVX2__)
  return (I)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)codes));
#elif defined(__aarch64__)
  return (I)vmovl_u16(vget_low_u16(vmovl_u8((uint8x8_t)vdup_n_u32(load<uint32_t>(codes)))));
#else
  return __builtin_convertvector(load<B>(codes), I);
#endif
}

static inline F floats_of(const uint8_t* codes) {
#if defined(__AVX512F__)
  return (F)_mm512_cvtepi32_ps((__m512i)ints_of(codes));
#elif defined(__AVX2__)
  return (F)_mm256_cvtepi32_ps((__m256i)ints_of(codes));
#else
  return __builtin_convertvector(ints_of(codes), F);
#endif
}

// Plain types. `pair` reads 2 W numbers in an order of its own, which `place` says: where number i of them comes to lie.
struct F32 {
  static constexpr int BYTES = 4;
  static F at(const void* p) { return load<F>(p); }
  static float one(const void* p) { return *(const float*)p; }
  static void pair(const void* p, F& a, F& b) { a = at(p), b = at((const float*)p + W); }
  static int place(int i) { return i; }
};

struct BF16 {
  static constexpr int BYTES = 2;
  static F at(const void* p) { return (F)(widened(load<H>(p)) << 16); }
  static float one(const void* p) {
    const uint32_t bits = (uint32_t) * (const uint16_t*)p << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
  }
  // Two in each 32 bits: one operation a vector, and none of those that only one unit of the core can do.
  static void pair(const void* p, F& a, F& b) {
    const U both = load<U>(p);
    a = (F)(both << 16), b = (F)(both & 0xffff0000u);
  }
  static int place(int i) { return i / 2 + i % 2 * W; }
};

struct F16 {
  static constexpr int BYTES = 2;
  static float one(const void* p) {
    const uint16_t h = *(const uint16_t*)p;
    const uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = (uint32_t)(h & 0x7fff) << 13;
    // Infinities and NaNs have the largest exponent in both formats; all else is the same number over 2^112.
    const uint32_t bits = (h & 0x7c00) == 0x7c00 ? rest | 0x7f800000 : rest;
    float x;
    memcpy(&x, &bits, 4);
    if ((h & 0x7c00) != 0x7c00) x *= 5.192296858534828e33f;
    return sign ? -x : x;
  }
  static F at(const void* p) {
#if defined(__AVX512F__)
    return (F)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
    return (F)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#elif defined(__aarch64__)
    return (F)vcvt_f32_f16((float16x4_t)load<H>(p));
#else
    F v;
    for (int i = 0; i < W; i++) v[i] = one((const uint16_t*)p + i);
    return v;
#endif
  }
  static void pair(const void* p, F& a, F& b) { a = at(p), b = at((const uint16_t*)p + W); }
  static int place(int i) { return i; }
};
