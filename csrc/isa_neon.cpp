#if defined(__aarch64__)
#include <arm_neon.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "kernel.h"

namespace clearhead {
#include "vec_neon.h"
#include "bodies.inl.h"
#include "entry.inl.h"

const Kernel neon_kernel = {"neon", nullptr, ROWS, VL, sizeof(Panel), sizeof(Statistics),
    run, run_mass, run_weights};
}  // namespace clearhead
#endif
