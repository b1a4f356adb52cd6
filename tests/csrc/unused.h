// Memory that was not written is not even multiplied: numbers below the normal ones, which it may hold,
// take Intel's processors a hundred times as long.
#pragma once

#include <math.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "guarded.h"
#include "refusals.h"

#if defined(__x86_64__)

inline void leave_unused(int64_t L, int64_t S, int64_t D) {
  constexpr uint32_t DENORMAL = 7;  // as float32, 1e-44
  constexpr unsigned MET = 2;       // of mxcsr: some operand was such a number
  const auto floats = [](int64_t n) {
    Guarded memory(size_t(n) * 4, true);
    for (int64_t i = 0; i < n; i++) reinterpret_cast<float *>(memory.data)[i] = float(normal());
    return memory;
  };
  const Guarded query = floats(L * D), key = floats(S * D), value = floats(S * D), out = floats(L * D);
  clearhead_call c = {};
  c.B = c.H = c.Hkv = c.threads = 1, c.L = L, c.S = S, c.D = c.Dv = D;
  c.query = query.data, c.key = key.data, c.value = value.data, c.out = out.data;
  c.query_strides[2] = c.key_strides[2] = c.value_strides[2] = c.out_strides[2] = D;
  c.scale = 1 / sqrt(double(D)), c.left = c.right = CLEARHEAD_NO_LIMIT;
  clearhead_workspace(&c, &c.workspace_bytes);
  const Guarded workspace(size_t(c.workspace_bytes), true);
  for (size_t n = 0; n + 4 <= workspace.bytes; n += 4) memcpy(workspace.data + n, &DENORMAL, 4);
  c.workspace = workspace.data;
  _mm_setcsr(_mm_getcsr() & ~MET);
  const int32_t status = clearhead_forward(&c);
  const uint64_t sizes = uint64_t(L * 1000000 + S * 1000 + D);
  if (status) fail(sizes, "the status of clearhead_forward", status, 0);
  if (_mm_getcsr() & MET) fail(sizes, "a denormal operand", 1, 0);
}

#endif

inline void leave_unused() {
#if defined(__x86_64__)
  for (const int64_t L : {1, 2, 3, 5, 12, 16, 50})
    for (const int64_t S : {1, 5, 16, 31, 33, 95, 97, 130})
      for (const int64_t D : {1, 5, 16, 64}) leave_unused(L, S, D);
#endif
}
