#include <math.h>
#include <stdint.h>
#include <string.h>

#include "kernel.h"

namespace clearhead {
#include "vec_generic.h"
#include "bodies.inl.h"
#include "entry.inl.h"

const Kernel generic_kernel = {"generic", nullptr, ROWS, VL, sizeof(Panel), sizeof(Statistics),
    run, run_mass, run_weights};
}  // namespace clearhead
