// The vocabulary of AMX with BF16: that of AVX-512, and tiles of 16 rows of 16 words.
//
// The instructions are named as text: compilers know them as intrinsics that say nothing of the
// memory they read, or not at all.
#pragma once

#include "vec_avx512.h"

namespace {

template <>
constexpr bool MATRICES<bfloat16> = true;

constexpr int TILE_WORDS = 16;  // of a row, and rows
constexpr int WORDS_AT_ONCE = TILE_WORDS;

struct TileShapes {
  uint8_t palette, start, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

// All tiles of 16 x 16 words, or for `few` rows of a panel FEW_SUMS and FEW_ROWS with a column for
// each of them, FEW_OUT and FEW_WEIGHTS with a row.
enum { FEW_SUMS = 0, FEW_KEYS = 1, FEW_ROWS = 2, FEW_OUT = 4, FEW_WEIGHTS = 5, FEW_VALUES = 7 };
INLINE void start_tiles(int few) {
  alignas(64) TileShapes shapes = {};
  shapes.palette = 1;
  for (int t = 0; t < 8; t++) {
    const bool sums = t == FEW_SUMS || t == FEW_ROWS || t == FEW_ROWS + 1;
    const bool out = t == FEW_OUT || t == FEW_WEIGHTS || t == FEW_WEIGHTS + 1;
    shapes.row_bytes[t] = uint16_t((few && sums ? few : TILE_WORDS) * sizeof(float));
    shapes.rows[t] = uint8_t(few && out ? few : TILE_WORDS);
  }
  __asm__ volatile("ldtilecfg %0" : : "m"(shapes));
}
INLINE void end_tiles() { __asm__ volatile("tilerelease" : : : "memory"); }

// Tile T, whose rows are so many bytes apart.
template <int T>
INLINE void tile_zero() {
  __asm__ volatile("tilezero %%tmm%c0" : : "i"(T));
}
template <int T>
INLINE void tile_load(const void *from, int64_t bytes) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(bytes), "i"(T) : "memory");
}
template <int T>
INLINE void tile_store(float *to, int64_t bytes) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(bytes), "i"(T) : "memory");
}

// C_rn += sum_k A_rk B_kn over pairs k: the first numbers of the 16 pairs from 0, the second ones
// from 0, both added up, and that to C.
template <int C, int A, int B>
INLINE void tile_product() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}

// The upper halves of two words as one, the first below.
INLINE vf upper_halves(vf first, vf second) {
  const __m512i below = _mm512_srli_epi32(__m512i(first), 16);
  return vf(_mm512_mask_blend_epi16(0xaaaaaaaa, below, __m512i(second)));
}

// The halves of bfloat16 from two vectors of 16-bit numbers, in turns: of each eight the first four,
// and the last four.
INLINE vf pairs_low(vw first, vw second) {
  return vf(_mm512_unpacklo_epi16(__m512i(first), __m512i(second)));
}
INLINE vf pairs_high(vw first, vw second) {
  return vf(_mm512_unpackhi_epi16(__m512i(first), __m512i(second)));
}

}  // namespace
