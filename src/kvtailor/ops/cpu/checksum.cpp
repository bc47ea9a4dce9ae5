// CRC-32 as zlib has it (polynomial 0xedb88320, bits reflected), by products without carries: 64 bytes are folded onto
// the next 64 at a time, so that it runs at the speed of memory. Gopal et al., "Fast CRC Computation for Generic
// Polynomials Using PCLMULQDQ Instruction", Intel 2009; constants are its powers of x modulo the polynomial.
#include <stdint.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define CARRYLESS __attribute__((target("pclmul,sse4.1")))

namespace {

typedef __m128i V;

CARRYLESS inline V folded(V onto, V x, V by) {
  return _mm_xor_si128(onto, _mm_xor_si128(_mm_clmulepi64_si128(x, by, 0x00), _mm_clmulepi64_si128(x, by, 0x11)));
}

inline V at(const uint8_t* p) { return _mm_loadu_si128((const V*)p); }

}  // namespace

// Bytes that are taken at once, and the least that `kvtailor_crc32` takes; 0: not on this machine.
extern "C" int32_t kvtailor_crc32_step() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1") ? 64 : 0;
}

// The checksum so far, and then that of `size` more bytes, a multiple of 64 and not 0.
extern "C" CARRYLESS uint32_t kvtailor_crc32(uint32_t sum, const uint8_t* p, int64_t size) {
  const V by512 = _mm_set_epi64x(0x01c6e41596, 0x0154442bd4), by128 = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);
  const V by64 = _mm_set_epi64x(0, 0x0163cd6124), barrett = _mm_set_epi64x(0x01f7011641, 0x01db710641);
  const V low = _mm_setr_epi32(-1, 0, -1, 0);
  V a = _mm_xor_si128(at(p), _mm_cvtsi32_si128((int)~sum)), b = at(p + 16), c = at(p + 32), d = at(p + 48);
  for (const uint8_t* end = p + size; (p += 64) < end;) {
    _mm_prefetch((const char*)p + 1024, _MM_HINT_T0);
    a = folded(at(p), a, by512), b = folded(at(p + 16), b, by512);
    c = folded(at(p + 32), c, by512), d = folded(at(p + 48), d, by512);
  }
  a = folded(d, folded(c, folded(b, a, by128), by128), by128);
  a = _mm_xor_si128(_mm_srli_si128(a, 8), _mm_clmulepi64_si128(a, by128, 0x10));
  a = _mm_xor_si128(_mm_srli_si128(a, 4), _mm_clmulepi64_si128(_mm_and_si128(a, low), by64, 0x00));
  V q = _mm_clmulepi64_si128(_mm_and_si128(a, low), barrett, 0x10);
  q = _mm_clmulepi64_si128(_mm_and_si128(q, low), barrett, 0x00);
  return ~(uint32_t)_mm_extract_epi32(_mm_xor_si128(a, q), 1);
}
#else
extern "C" int32_t kvtailor_crc32_step() { return 0; }
extern "C" uint32_t kvtailor_crc32(uint32_t sum, const uint8_t*, int64_t) { return sum; }
#endif
