// The vocabulary of kernels for any processor: four lanes, by the compiler's own vectors.
//
// Another instruction set is another file with these names, a line of table in dispatch.cpp, and
// an isa_*.cpp. What is the same for all of them is in lanes.inl.h.
#pragma once

constexpr int VL = 4;     // float32 lanes of a vector
constexpr int KL = 4;     // keys in lanes: no more than two quads, which loads can fill
constexpr int NV = 3;     // vectors of rows in a panel
constexpr int TILE = 4;   // keys (or value columns) of a register tile: 4 x 3 sums + 3 + 1 = 16
constexpr int TILE1 = 8;  // the same where one vector of rows is left: 8 sums + 1 + 1
constexpr int STRETCH_TILE = TILE, STRETCH_WORDS = 1;
constexpr float EXP2_LEAST = -127;  // from here down exp2 is 0

#include "lanes.inl.h"

namespace {

// a if a > b, else b: so b where either is NaN.
INLINE vf vmax(vf a, vf b) { return a > b ? a : b; }

INLINE bool any(vi mask) { return any_by_lanes(mask); }

// p * 2^n, n a whole number from -250 to 250. In two steps, for a result that is denormal.
INLINE vf exp2(vf x, float factor) { return exp2_by_adding(x * factor); }

// x, which the compiler may not fuse with what it is added to.
INLINE vf rounded(vf x) {
  __asm__("" : "+m"(x));
  return x;
}

// Of each quad of lanes of a and b, its lower or its upper half: lane by lane in turns, or one
// after the other.
INLINE vf interleave_low(vf a, vf b) { return __builtin_shufflevector(a, b, 0, 4, 1, 5); }
INLINE vf interleave_high(vf a, vf b) { return __builtin_shufflevector(a, b, 2, 6, 3, 7); }
INLINE vf join_low(vf a, vf b) { return __builtin_shufflevector(a, b, 0, 1, 4, 5); }
INLINE vf join_high(vf a, vf b) { return __builtin_shufflevector(a, b, 2, 3, 6, 7); }

// Quad c of vector r goes to quad r of vector c.
INLINE void transpose_quads(vf (&)[1]) {}

INLINE vk load_quads(const char *from, int64_t) { return load_bytes<vk>(from); }

INLINE vf from_float16(vh h) { return from_float16_by_bits(h); }
INLINE vh to_float16(vf x) { return to_float16_by_bits(x); }

}  // namespace
