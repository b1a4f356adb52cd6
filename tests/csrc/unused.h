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

enum Rules { PLAIN, WINDOW, MASKED, RULE_KINDS };  // MASKED with statistics

// The values are no such numbers of float16 either.
inline void leave_unused(int64_t dtype, Rules rules, int64_t L, int64_t S, int64_t D) {
  constexpr uint32_t DENORMAL = 7;  // as float32, 1e-44
  constexpr unsigned MET = 2;       // of mxcsr: some operand was such a number
  const auto tensor = [](int64_t dtype, int64_t rows, int64_t columns) {
    Tensor t = make(dtype, {1, 1, rows, columns}, 4, false);
    fill(t, [] { return (chance(50) ? 1 : -1) * (0.5 + double(draw(0, 99)) / 64); });
    return t;
  };
  const Tensor query = tensor(dtype, L, D), key = tensor(dtype, S, D), value = tensor(dtype, S, D);
  const Tensor out = tensor(dtype, L, D), mask = tensor(CLEARHEAD_FLOAT32, L, S);
  const Tensor found = tensor(CLEARHEAD_FLOAT32, 4, L);
  clearhead_call c = {};
  c.B = c.H = c.Hkv = c.threads = 1, c.L = L, c.S = S, c.D = c.Dv = D, c.dtype = dtype;
  c.query = query.memory.data, c.key = key.memory.data, c.value = value.memory.data;
  c.out = out.memory.data;
  for (int64_t *strides : {c.query_strides, c.key_strides, c.value_strides, c.out_strides})
    strides[2] = D;
  c.scale = 1 / sqrt(double(D)), c.left = c.right = CLEARHEAD_NO_LIMIT;
  if (rules == WINDOW) c.left = 20, c.right = 0;
  if (rules == MASKED) {
    c.added[0] = {mask.memory.data, {0, 0, S, 1}, CLEARHEAD_FLOAT32};
    float *const at = reinterpret_cast<float *>(found.memory.data);
    c.lse = at, c.max_logit = at + L, c.entropy = at + 2 * L, c.distance = at + 3 * L;
  }
  clearhead_workspace(&c, &c.workspace_bytes);
  const Guarded workspace(size_t(c.workspace_bytes), true);
  for (size_t n = 0; n + 4 <= workspace.bytes; n += 4) memcpy(workspace.data + n, &DENORMAL, 4);
  c.workspace = workspace.data;
  _mm_setcsr(_mm_getcsr() & ~MET);
  const int32_t status = clearhead_forward(&c);
  const uint64_t sizes = uint64_t((dtype * 10 + rules) * 1000000000 + L * 1000000 + S * 1000 + D);
  if (status) fail(sizes, "the status of clearhead_forward", status, 0);
  if (_mm_getcsr() & MET) fail(sizes, "a denormal operand", 1, 0);
}

#endif

inline void leave_unused() {
#if defined(__x86_64__)
  for (int64_t dtype = 0; dtype < 3; dtype++)
    for (int rules = 0; rules < RULE_KINDS; rules++)
      for (const int64_t L : {1, 2, 3, 5, 12, 16, 50})
        for (const int64_t S : {1, 5, 16, 31, 33, 95, 97, 130})
          for (const int64_t D : {1, 5, 16, 64}) leave_unused(dtype, Rules(rules), L, S, D);
#endif
}
