// Calls in bfloat16 only: all others are those of AVX-512.
#if defined(__x86_64__)
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "kernel.h"
#define BY_PAIRS

#pragma GCC push_options
#pragma GCC target("avx512bf16,avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c")
#pragma GCC target("prefer-vector-width=512")
namespace clearhead {
#include "vec_avx512bf16.h"
#include "bodies.inl.h"

namespace {

void run(const Plan &plan, int64_t number, float *workspace) {
  if (plan.call->dtype != CLEARHEAD_BFLOAT16) return avx512_kernel.item(plan, number, workspace);
  run_item<bfloat16>(plan, number, workspace);
}

void run_mass(const Plan &plan, int64_t number, float *workspace) {
  if (plan.call->dtype != CLEARHEAD_BFLOAT16) return avx512_kernel.mass(plan, number, workspace);
  run_mass_item<bfloat16>(plan, number, workspace);
}

void run_weights(const Plan &plan, int64_t number, float *workspace) {
  if (plan.call->dtype != CLEARHEAD_BFLOAT16) return avx512_kernel.weights(plan, number, workspace);
  run_weights_item<bfloat16>(plan, number, workspace);
}

}  // namespace

const Kernel avx512bf16_kernel = {"avx512bf16", ROWS, VL, sizeof(Panel), sizeof(Statistics),
    run, run_mass, run_weights};
}  // namespace clearhead
#pragma GCC pop_options
#endif
