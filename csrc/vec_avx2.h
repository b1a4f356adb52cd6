// The vocabulary of AVX2 with FMA and F16C: eight lanes, sixteen registers.
#pragma once

constexpr int VL = 8;
constexpr int KL = 8;
constexpr int NV = 3;     // vectors of rows in a panel
constexpr int TILE = 4;   // 4 x 3 sums + 3 rows + 1 broadcast = 16 registers
constexpr int TILE1 = 8;  // 8 sums + 1 + 1
constexpr int STRETCH_TILE = TILE, STRETCH_WORDS = 1;
constexpr float EXP2_LEAST = -127;  // from here down exp2 is 0

#include "lanes.inl.h"

namespace {

INLINE vf vmax(vf a, vf b) { return vf(_mm256_max_ps(__m256(a), __m256(b))); }

INLINE bool any(vi mask) { return _mm256_movemask_ps(__m256(mask)) != 0; }

INLINE vf exp2(vf x, float factor) { return exp2_by_adding(x * factor); }

INLINE vf rounded(vf x) {
  __asm__("" : "+x"(x));
  return x;
}

INLINE vf interleave_low(vf a, vf b) { return vf(_mm256_unpacklo_ps(__m256(a), __m256(b))); }
INLINE vf interleave_high(vf a, vf b) { return vf(_mm256_unpackhi_ps(__m256(a), __m256(b))); }
INLINE vf join_low(vf a, vf b) { return vf(_mm256_unpacklo_pd(__m256d(a), __m256d(b))); }
INLINE vf join_high(vf a, vf b) { return vf(_mm256_unpackhi_pd(__m256d(a), __m256d(b))); }

INLINE void transpose_quads(vf (&x)[2]) {
  const __m256 a = __m256(x[0]), b = __m256(x[1]);
  x[0] = vf(_mm256_permute2f128_ps(a, b, 0x20));
  x[1] = vf(_mm256_permute2f128_ps(a, b, 0x31));
}

// vinsertf128 from memory needs no shuffle; the compiler's own vectors make one.
INLINE vk load_quads(const char *from, int64_t step) {
  const __m128 first = _mm_loadu_ps((const float *)from);
  const __m128 second = _mm_loadu_ps((const float *)(from + step));
  return vk(_mm256_insertf128_ps(_mm256_castps128_ps256(first), second, 1));
}

INLINE vf from_float16(vh h) { return vf(_mm256_cvtph_ps(__m128i(h))); }
INLINE vh to_float16(vf x) {
  return vh(_mm256_cvtps_ph(__m256(x), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

}  // namespace
