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
// Of sums by stretches: 4 x 3 of one, and 4 x 3 of those before; and the numbers of a head that a loop
// takes at once. By TILE and one by one the latter go through memory, and whole float32 calls take
// 1.04 to 1.06 times as long (an EPYC 9004, 2026-12).
constexpr int STRETCH_TILE = 4, STRETCH_WORDS = 4;
constexpr float EXP2_LEAST = -127;  // from here down exp2 is 0

#include "lanes.inl.h"

namespace {

INLINE vf vmax(vf a, vf b) { return vf(_mm512_max_ps(__m512(a), __m512(b))); }

INLINE bool any(vi mask) { return _mm512_movepi32_mask(__m512i(mask)) != 0; }

// 2^y = 2^n 2^(k/16) 2^r with y = n + k/16 + r, r from -1/32 to 1/32: the last bits of z are 16 n + k,
// and added to the bits of a float from bit 19 on they raise its exponent by n. So the table has the
// bits of 2^(k/16) less k << 19; the sum is 0 at -127. No rounding of the product itself gets into r.
// Worst relative error 1.0e-7, of which 2e-9 is the polynomial's (of r, a least-squares fit as in
// lanes.inl.h). A polynomial of six degrees takes 1.01 times as long in whole calls (an EPYC 9004).
INLINE vf exp2(vf x, float factor) {
  constexpr float TO_SIXTEENTH = 786432.f;  // 1.5 * 2^19: adding it rounds to 1/16
  constexpr vi TABLE = {0x3f800000, 0x3f7daac3, 0x3f7b95c2, 0x3f79c3d3, 0x3f7837f0, 0x3f76f532,
                        0x3f75fed7, 0x3f75583f, 0x3f7504f3, 0x3f7508a4, 0x3f75672a, 0x3f76248c,
                        0x3f7744fd, 0x3f78ccdf, 0x3f7ac0c7, 0x3f7d257d};
  const vf least = splat(EXP2_LEAST / factor), f = splat(factor);
  const __m512 y = __m512(vmax(least, x));
  const vf z = vf(_mm512_fmadd_ps(y, __m512(f), __m512(splat(TO_SIXTEENTH))));
  const vf r = vf(_mm512_fmsub_ps(y, __m512(f), __m512(z - TO_SIXTEENTH)));
  const vi power = vi(_mm512_permutexvar_epi32(__m512i(z), __m512i(TABLE))) + (vi(z) << 19);
  vf p = r * 0.05550595000386238f + 0.24023428559303284f;
  p = p * r + 0.6931471824645996f;
  return vf(power) * (p * r) + vf(power);
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
