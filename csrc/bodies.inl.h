// All that is written once, for the vocabulary that was included before, in the order of reading.

#include "functions.inl.h"
#include "microkernel.inl.h"
#include "state.inl.h"
#include "panel.inl.h"
#include "tiles.inl.h"
#ifdef BY_PAIRS
#include "pairs.inl.h"
#endif
#include "statistics.inl.h"
#ifdef BY_MATRICES
#include "matrices.inl.h"
#endif
#include "softmax.inl.h"
#ifdef BY_MATRICES
#include "matrices_panel.inl.h"
#endif
#include "decode.inl.h"
#include "decode_values.inl.h"
#ifdef BY_MATRICES
#include "matrices_few.inl.h"
#include "matrices_few_values.inl.h"
#endif
#include "block.inl.h"
#include "few.inl.h"
#include "finish.inl.h"
#include "foresee.inl.h"
#include "forward.inl.h"
#include "again.inl.h"
#include "mass.inl.h"
#include "weights.inl.h"
