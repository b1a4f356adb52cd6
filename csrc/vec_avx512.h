// The vocabulary of AVX-512 (F, DQ, BW, VL): sixteen lanes, thirty-two registers.
#pragma once

constexpr int VL = 16;
constexpr int KL = 8;
#ifdef BY_MATRICES
constexpr int NV = 4;      // vectors of rows in a panel, two pairs
constexpr int TILE = 16;   // keys of a tile
#else
constexpr int NV = 3;      // vectors of rows in a panel
constexpr int TILE = 8;    // 8 x 3 sums + 3 rows + 1 broadcast = 28 registers
#endif
constexpr int TILE1 = 16;  // 16 sums + 1 + 1
// Of scores whose products are summed by stretches: 4 x 3 sums of one, and as many of those before.
// By TILE keys, and a number at a time, these go through memory: whole float32 calls then take 1.03
// to 1.05 times as long (an EPYC 9004, 2026-12).
constexpr int SCORE_TILE = 4, SCORE_WORDS = 4;
constexpr float EXP2_LEAST = -200;  // from here down exp2 is 0

#include "lanes.inl.h"

namespace {

INLINE vf vmax(vf a, vf b) { return vf(_mm512_max_ps(__m512(a), __m512(b))); }

INLINE bool any(vi mask) { return _mm512_movepi32_mask(__m512i(mask)) != 0; }

INLINE vf times_power_of_two(vf p, vf n) {
  return vf(_mm512_scalef_ps(__m512(p), __m512(n)));
}

// Any x: the rest of -inf is 0.
INLINE vf whole_of(vf x, vf &rest) {
  constexpr int TO_NEAREST = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  rest = vf(_mm512_reduce_ps(__m512(x), TO_NEAREST));
  return x - rest;
}

INLINE vf rounded(vf x) {
  __asm__("" : "+v"(x));
  return x;
}

INLINE vf interleave_low(vf a, vf b) { return vf(_mm512_unpacklo_ps(__m512(a), __m512(b))); }
INLINE vf interleave_high(vf a, vf b) { return vf(_mm512_unpackhi_ps(__m512(a), __m512(b))); }
INLINE vf join_low(vf a, vf b) { return vf(_mm512_unpacklo_pd(__m512d(a), __m512d(b))); }
INLINE vf join_high(vf a, vf b) { return vf(_mm512_unpackhi_pd(__m512d(a), __m512d(b))); }

INLINE vk interleave_low(vk a, vk b) { return vk(_mm256_unpacklo_ps(__m256(a), __m256(b))); }
INLINE vk interleave_high(vk a, vk b) { return vk(_mm256_unpackhi_ps(__m256(a), __m256(b))); }
INLINE vk join_low(vk a, vk b) { return vk(_mm256_unpacklo_pd(__m256d(a), __m256d(b))); }
INLINE vk join_high(vk a, vk b) { return vk(_mm256_unpackhi_pd(__m256d(a), __m256d(b))); }

template <int QUADS>
INLINE vf pick_quads(vf a, vf b) {
  return vf(_mm512_shuffle_f32x4(__m512(a), __m512(b), QUADS));
}
INLINE void transpose_quads(vf (&x)[4]) {
  const vf a = pick_quads<0x44>(x[0], x[1]), b = pick_quads<0x44>(x[2], x[3]);  // 0 and 1 of both
  const vf c = pick_quads<0xee>(x[0], x[1]), d = pick_quads<0xee>(x[2], x[3]);  // 2 and 3
  x[0] = pick_quads<0x88>(a, b), x[1] = pick_quads<0xdd>(a, b);
  x[2] = pick_quads<0x88>(c, d), x[3] = pick_quads<0xdd>(c, d);
}

// vinsertf128 from memory needs no shuffle; the compiler's own vectors make one.
INLINE vk load_quads(const char *from, int64_t step) {
  const __m128 first = _mm_loadu_ps((const float *)from);
  const __m128 second = _mm_loadu_ps((const float *)(from + step));
  return vk(_mm256_insertf128_ps(_mm256_castps128_ps256(first), second, 1));
}

INLINE vk from_float16(vkh h) { return vk(_mm256_cvtph_ps(__m128i(h))); }
INLINE vf from_float16(vh h) { return vf(_mm512_cvtph_ps(__m256i(h))); }
INLINE vh to_float16(vf x) {
  return vh(_mm512_cvtps_ph(__m512(x), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

}  // namespace
