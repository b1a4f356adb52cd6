// The vocabulary of AVX-512 (F, DQ, BW, VL): sixteen lanes, thirty-two registers.
#pragma once

constexpr int VL = 16;
constexpr int TILE = 8;    // 8 x 3 sums + 3 rows + 1 broadcast = 28 registers
constexpr int TILE1 = 16;  // 16 sums + 1 + 1

#include "lanes.inl.h"

namespace {

INLINE vf vmax(vf a, vf b) { return vf(_mm512_max_ps(__m512(a), __m512(b))); }

INLINE vf times_power_of_two(vf p, vf n) {
  return vf(_mm512_scalef_ps(__m512(p), __m512(n)));
}

INLINE vf rounded(vf x) {
  __asm__("" : "+v"(x));
  return x;
}

INLINE vf interleave_low(vf a, vf b) {
  return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}
INLINE vf interleave_high(vf a, vf b) {
  return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15,
                                 31);
}

INLINE vf from_float16(vh h) { return vf(_mm512_cvtph_ps(__m256i(h))); }
INLINE vh to_float16(vf x) {
  return vh(_mm512_cvtps_ph(__m512(x), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

}  // namespace
