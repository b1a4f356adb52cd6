// The vocabulary of NEON on AArch64: four lanes, thirty-two registers.
//
// Held to the tests of tests/csrc under an emulator (qemu 7.2, 2026-11); its speed is not measured.
#pragma once

constexpr int VL = 4;
constexpr int KL = 4;
constexpr int NV = 3;      // vectors of rows in a panel
constexpr int TILE = 8;    // 8 x 3 sums + 3 rows + 1 broadcast = 28 registers
constexpr int TILE1 = 16;  // 16 sums + 1 + 1
constexpr int STRETCH_TILE = TILE, STRETCH_WORDS = 1;
constexpr float EXP2_LEAST = -127;  // from here down exp2 is 0

#include "lanes.inl.h"

namespace {

// vmaxq_f32 would give NaN where either is NaN; wanted is b.
INLINE vf vmax(vf a, vf b) { return a > b ? a : b; }

INLINE bool any(vi mask) { return any_by_lanes(mask); }

INLINE vf exp2(vf x, float factor) { return exp2_by_adding(x * factor); }

// x, which the compiler may not fuse with what it is added to.
INLINE vf rounded(vf x) {
  __asm__("" : "+w"(x));
  return x;
}

INLINE vf interleave_low(vf a, vf b) { return vf(vzip1q_f32(float32x4_t(a), float32x4_t(b))); }
INLINE vf interleave_high(vf a, vf b) { return vf(vzip2q_f32(float32x4_t(a), float32x4_t(b))); }

INLINE vf join_low(vf a, vf b) {
  return vf(vzip1q_f64(float64x2_t(a), float64x2_t(b)));
}
INLINE vf join_high(vf a, vf b) {
  return vf(vzip2q_f64(float64x2_t(a), float64x2_t(b)));
}
INLINE void transpose_quads(vf (&)[1]) {}

INLINE vk load_quads(const char *from, int64_t) { return load_bytes<vk>(from); }

INLINE vf from_float16(vh h) { return vf(vcvt_f32_f16(vreinterpret_f16_u16(uint16x4_t(h)))); }
INLINE vh to_float16(vf x) { return vh(vreinterpret_u16_f16(vcvt_f16_f32(float32x4_t(x)))); }

}  // namespace
