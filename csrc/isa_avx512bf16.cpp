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

const Kernel avx512bf16_kernel = {"avx512bf16", &avx512_kernel, ROWS, VL, sizeof(Panel),
    sizeof(Statistics), run_item<bfloat16>, run_mass_item<bfloat16>, run_weights_item<bfloat16>};
}  // namespace clearhead
#pragma GCC pop_options
#endif
