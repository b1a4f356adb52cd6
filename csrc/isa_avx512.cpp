#if defined(__x86_64__)
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "kernel.h"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c,prefer-vector-width=512")
namespace clearhead {
#include "vec_avx512.h"
#include "bodies.inl.h"
#include "entry.inl.h"

const Kernel avx512_kernel = {"avx512", nullptr, ROWS, VL, sizeof(Panel), sizeof(Statistics),
    run, run_mass, run_weights};
}  // namespace clearhead
#pragma GCC pop_options
#endif
