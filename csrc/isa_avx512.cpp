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
#include "microkernel.inl.h"
#include "state.inl.h"
#include "panel.inl.h"
#include "tiles.inl.h"
#include "statistics.inl.h"
#include "softmax.inl.h"
#include "decode.inl.h"
#include "block.inl.h"
#include "few.inl.h"
#include "finish.inl.h"
#include "forward.inl.h"
#include "mass.inl.h"
#include "weights.inl.h"
#include "entry.inl.h"

const Kernel avx512_kernel = {"avx512", ROWS, VL, sizeof(Panel), sizeof(Statistics), run,
                                      run_mass, run_weights};
}  // namespace clearhead
#pragma GCC pop_options
#endif
