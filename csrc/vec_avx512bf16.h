// The vocabulary of AVX-512 with BF16: that of AVX-512, and products of bfloat16 by pairs.
#pragma once

#include "vec_avx512.h"

namespace {

template <>
constexpr bool PAIRED<bfloat16> = true;

constexpr int WORDS_AT_ONCE = 1;  // of a head, by a product

template <>
INLINE vf add_product<true>(vf sum, vf x, vf y) {
  return vf(_mm512_dpbf16_ps(__m512(sum), __m512bh(x), __m512bh(y)));
}
template <>
INLINE vk add_product<true>(vk sum, vk x, vk y) {
  return vk(_mm256_dpbf16_ps(__m256(sum), __m256bh(x), __m256bh(y)));
}

template <>
INLINE vf pairs_of<true>(vf low, vf high) {
  return vf(_mm512_cvtne2ps_pbh(__m512(high), __m512(low)));
}

template <>
INLINE vf pair_of<true>(vf first, vf second) {
  const vw halves = vw(pairs_of<true>(first, second));
  return vf(pick(halves, halves, vw{0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23,
                                         8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15,
                                         31}));
}

}  // namespace
