// The entries of a kernel: an item by the element type of its call.

namespace {

#define BY_DTYPE(f, plan, ...)                                      \
  switch ((plan).call->dtype) {                                     \
    case CLEARHEAD_FLOAT32: return f<float>(plan, __VA_ARGS__);     \
    case CLEARHEAD_BFLOAT16: return f<bfloat16>(plan, __VA_ARGS__); \
    default: return f<float16>(plan, __VA_ARGS__);                  \
  }

void run(const Plan &plan, int64_t number, float *workspace) {
  BY_DTYPE(run_item, plan, number, workspace)
}

void run_mass(const Plan &plan, int64_t number, float *workspace) {
  BY_DTYPE(run_mass_item, plan, number, workspace)
}

void run_weights(const Plan &plan, int64_t number, float *workspace) {
  BY_DTYPE(run_weights_item, plan, number, workspace)
}

}  // namespace
