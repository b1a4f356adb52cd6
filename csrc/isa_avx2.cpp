#if defined(__x86_64__)
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "kernel.h"

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
namespace clearhead {
#include "vec_avx2.h"
#include "bodies.inl.h"
#include "entry.inl.h"

const Kernel avx2_kernel = {"avx2", nullptr, ROWS, VL, sizeof(Panel), sizeof(Statistics),
    run, run_mass, run_weights};
}  // namespace clearhead
#pragma GCC pop_options
#endif
