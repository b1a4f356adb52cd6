// Calls in bfloat16 only: all others are those of AVX-512.
#if defined(__x86_64__)
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "kernel.h"
#define BY_PAIRS
#define BY_MATRICES

#pragma GCC push_options
#pragma GCC target("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c,prefer-vector-width=512")
namespace clearhead {
#include "vec_amx.h"
#include "bodies.inl.h"

namespace {

// A thread has tiles only while it is at work: whoever else uses them sets them up as well.
template <void (*ITEM)(const Plan &, int64_t, float *)>
void with_tiles(const Plan &plan, int64_t number, float *workspace) {
  const unsigned mode = _mm_getcsr();
  start_tiles(plan.few);
  _mm_setcsr(mode | _MM_FLUSH_ZERO_ON | _MM_DENORMALS_ZERO_ON);
  ITEM(plan, number, workspace);
  _mm_setcsr(mode);
  end_tiles();
}

}  // namespace

const Kernel amx_kernel = {"amx", &avx512_kernel, ROWS, VL, sizeof(Panel), sizeof(Statistics),
    with_tiles<run_item<bfloat16>>, with_tiles<run_mass_item<bfloat16>>,
    with_tiles<run_weights_item<bfloat16>>};
}  // namespace clearhead
#pragma GCC pop_options
#endif
