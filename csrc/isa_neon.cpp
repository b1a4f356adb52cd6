#if defined(__aarch64__)
#include <arm_neon.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "kernel.h"

namespace clearhead {
#include "vec_neon.h"
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

const Kernel neon_kernel = {"neon", ROWS, VL, sizeof(Panel), sizeof(Statistics), run, run_mass, run_weights};
}  // namespace clearhead
#endif
