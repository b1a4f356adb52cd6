#include <math.h>
#include <stdint.h>
#include <string.h>

#include "kernel.h"

namespace clearhead {
#include "vec_generic.h"
#include "microkernel.inl.h"
#include "panel.inl.h"
#include "tiles.inl.h"
#include "softmax.inl.h"
#include "forward.inl.h"

const Kernel generic_kernel = {"generic", ROWS, sizeof(Panel), run};
}  // namespace clearhead
