// What the C interface must refuse, each with its own code.
#pragma once

#include <math.h>

#include "guarded.h"

namespace {

[[noreturn]] void fail(uint64_t seed, const char *what, double got, double wanted) {
  fprintf(stderr, "call with seed %llu: %s is %.9g, not %.9g\n", (unsigned long long)seed, what, got,
          wanted);
  exit(1);
}

void refuse() {
  struct Wrong {
    int32_t status;
    void (*change)(clearhead_call &);
  };
  const Wrong wrong[] = {
      {CLEARHEAD_BAD_SIZE, [](clearhead_call &c) { c.B = 0; }},
      {CLEARHEAD_BAD_SIZE, [](clearhead_call &c) { c.L = -1; }},
      {CLEARHEAD_BAD_SIZE, [](clearhead_call &c) { c.S = INT64_C(1) << 31; }},
      {CLEARHEAD_BAD_SIZE, [](clearhead_call &c) { c.H = 3, c.Hkv = 2; }},
      {CLEARHEAD_BAD_HEAD_SIZE, [](clearhead_call &c) { c.D = CLEARHEAD_MAX_HEAD_SIZE + 1; }},
      {CLEARHEAD_BAD_HEAD_SIZE, [](clearhead_call &c) { c.Dv = CLEARHEAD_MAX_HEAD_SIZE + 1; }},
      {CLEARHEAD_BAD_DTYPE, [](clearhead_call &c) { c.dtype = CLEARHEAD_BOOL; }},
      {CLEARHEAD_BAD_DTYPE, [](clearhead_call &c) { c.mask = {c.key, {}, CLEARHEAD_FLOAT32}; }},
      {CLEARHEAD_BAD_DTYPE, [](clearhead_call &c) { c.added[1] = {c.key, {}, 9}; }},
      {CLEARHEAD_BAD_POINTER, [](clearhead_call &c) { c.query = nullptr; }},
      {CLEARHEAD_BAD_POINTER, [](clearhead_call &c) { c.value = nullptr; }},
      {CLEARHEAD_BAD_POINTER, [](clearhead_call &c) { c.out = nullptr, c.key = nullptr; }},
      {CLEARHEAD_BAD_POINTER, [](clearhead_call &c) { c.m = nullptr, c.key_mass = c.z; }},
      {CLEARHEAD_BAD_POINTER, [](clearhead_call &c) { c.z = nullptr, c.weights = c.m; }},
      {CLEARHEAD_BAD_POINTER, [](clearhead_call &c) { c.workspace = nullptr; }},
      {CLEARHEAD_BAD_POINTER, [](clearhead_call &c) { c.doc_q = (const int64_t *)c.key; }},
      {CLEARHEAD_BAD_POINTER,
       [](clearhead_call &c) {
         static const int64_t offsets[2] = {0, 1};
         c.cu_q = c.cu_k = offsets, c.weights = c.m;
       }},
      {CLEARHEAD_BAD_RULE, [](clearhead_call &c) { c.left = -1; }},
      {CLEARHEAD_BAD_RULE, [](clearhead_call &c) { c.scale = NAN; }},
      {CLEARHEAD_BAD_RULE, [](clearhead_call &c) { c.softcap = -1; }},
      {CLEARHEAD_SMALL_WORKSPACE, [](clearhead_call &c) { c.workspace_bytes -= 1; }},
  };
  for (const Wrong &w : wrong) {
    state = 5;
    float x[4] = {}, m[1], z[1], out[4];
    clearhead_call c = {};
    c.B = c.H = c.Hkv = c.L = c.S = 1, c.D = c.Dv = 4;
    c.query = c.key = c.value = x, c.out = out, c.m = m, c.z = z, c.scale = 1;
    c.left = c.right = CLEARHEAD_NO_LIMIT, c.threads = 1;
    int64_t bytes = 0;
    if (clearhead_workspace(&c, &bytes) != CLEARHEAD_OK) fail(0, "the workspace's status", 1, 0);
    std::vector<char> workspace(static_cast<size_t>(bytes));
    c.workspace = workspace.data(), c.workspace_bytes = bytes;
    if (clearhead_forward(&c) != CLEARHEAD_OK) fail(0, "the status of a good call", 1, 0);
    w.change(c);
    const int32_t status = clearhead_forward(&c);
    if (status != w.status) fail(uint64_t(&w - wrong), "the status of a wrong call", status, w.status);
  }
}

}  // namespace
