// The C interface: arguments checked as return codes, and the items of work handed to the threads by
// one counter. Who computes an item changes nothing in it.
#include "clearhead.h"

#include <math.h>
#include <string.h>

#include <atomic>
#include <initializer_list>

#include "kernel.h"

namespace clearhead {
namespace {

constexpr int64_t SIZE_LIMIT = INT64_C(1) << 31;

bool is_float(int64_t dtype) { return dtype >= CLEARHEAD_FLOAT32 && dtype <= CLEARHEAD_FLOAT16; }

// Packed sequences: offsets that do not fall, with no sequence longer than the sizes say.
int32_t check_offsets(const int64_t *cu, int64_t B, int64_t longest) {
  if (cu[0] < 0 || cu[B] >= SIZE_LIMIT) return CLEARHEAD_BAD_SIZE;
  for (int64_t b = 0; b < B; b++)
    if (cu[b + 1] < cu[b] || cu[b + 1] - cu[b] > longest) return CLEARHEAD_BAD_SIZE;
  return CLEARHEAD_OK;
}

int32_t check_sizes(const clearhead_call &c) {
  const int64_t Dv = c.out ? c.Dv : 1;
  for (int64_t size : {c.B, c.H, c.Hkv, c.L, c.S, c.D, Dv})
    if (size < 1 || size >= SIZE_LIMIT) return CLEARHEAD_BAD_SIZE;
  if (c.H % c.Hkv) return CLEARHEAD_BAD_SIZE;
  if (c.D > CLEARHEAD_MAX_HEAD_SIZE || Dv > CLEARHEAD_MAX_HEAD_SIZE)
    return CLEARHEAD_BAD_HEAD_SIZE;
  if (c.top_k < 0 || c.top_k > CLEARHEAD_MAX_TOP_K) return CLEARHEAD_BAD_SIZE;
  if (!c.cu_q != !c.cu_k) return CLEARHEAD_BAD_POINTER;
  if (c.cu_q && (check_offsets(c.cu_q, c.B, c.L) || check_offsets(c.cu_k, c.B, c.S)))
    return CLEARHEAD_BAD_SIZE;
  return is_float(c.dtype) ? CLEARHEAD_OK : CLEARHEAD_BAD_DTYPE;
}

int32_t check_all(const clearhead_call &c) {
  if (int32_t status = check_sizes(c)) return status;
  if (!c.query || !c.key || !c.workspace || (c.out && !c.value)) return CLEARHEAD_BAD_POINTER;
  if ((c.key_mass || c.weights) && !(c.m && c.z)) return CLEARHEAD_BAD_POINTER;
  if (!c.doc_q != !c.doc_k) return CLEARHEAD_BAD_POINTER;
  if (c.mask.data && c.mask.dtype != CLEARHEAD_BOOL) return CLEARHEAD_BAD_DTYPE;
  for (const clearhead_dense &added : c.added)
    if (added.data && !is_float(added.dtype)) return CLEARHEAD_BAD_DTYPE;
  if (c.top_weights && (!c.top_keys || c.top_k < 1)) return CLEARHEAD_BAD_POINTER;
  if (c.weights && c.cu_q) return CLEARHEAD_BAD_POINTER;
  if (c.left < 0 || c.right < 0 || !isfinite(c.scale) || !isfinite(c.softcap) || c.softcap < 0)
    return CLEARHEAD_BAD_RULE;
  return CLEARHEAD_OK;
}

// One pass over all parts of a job. Items are numbered through: those of part s are starts[s] up to
// starts[s + 1].
struct Pass {
  const Job &job;
  Plan (*plan)(const Job &job, const clearhead_call &part);
  void (*item)(const Plan &plan, int64_t item, float *workspace);
  int64_t *starts;
  float *shared, *workspace;
  std::atomic<int64_t> next{0};
};

int64_t part_with(const Pass &pass, int64_t item) {
  int64_t low = 0, high = pass.job.parts;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (pass.starts[middle] <= item ? low : high) = middle;
  }
  return low;
}

void work(int64_t first, int64_t end, void *context) {
  Pass &pass = *static_cast<Pass *>(context);
  const int64_t items = pass.starts[pass.job.parts];
  for (int64_t worker = first; worker < end; worker++) {
    int64_t item = pass.next.fetch_add(1, std::memory_order_relaxed);
    while (item < items) {
      const int64_t s = part_with(pass, item);
      const clearhead_call part = part_of(pass.job, s);
      Plan plan = pass.plan(pass.job, part);
      plan.shared = pass.shared;
      for (; item < pass.starts[s + 1]; item = pass.next.fetch_add(1, std::memory_order_relaxed))
        pass.item(plan, item - pass.starts[s],
                  pass.workspace + worker * pass.job.worker_floats);
    }
  }
}

void run_pass(const Job &job, Plan (*plan)(const Job &, const clearhead_call &),
              void (*item)(const Plan &, int64_t, float *)) {
  const clearhead_call &c = *job.whole;
  const uintptr_t start = (reinterpret_cast<uintptr_t>(c.workspace) + 63) / 64 * 64;
  int64_t *const starts = reinterpret_cast<int64_t *>(start);
  float *const shared = reinterpret_cast<float *>(start) + job.start_floats;
  Pass pass{job, plan, item, starts, shared, shared + job.shared_floats};
  starts[0] = 0;
  for (int64_t s = 0; s < job.parts; s++) {
    const clearhead_call part = part_of(job, s);
    const Plan p = plan(job, part);
    starts[s + 1] = starts[s] + p.items;
    if (job.shared_floats) memset(shared, 0, size_t(p.at_pieces) * sizeof(float));
  }
  const int64_t items = starts[job.parts], n = job.workers < items ? job.workers : items;
  if (n > 1 && c.parallel_for)
    c.parallel_for(0, n, 1, work, &pass);
  else
    work(0, 1, &pass);
}

}  // namespace
}  // namespace clearhead

using namespace clearhead;

int64_t clearhead_call_bytes() { return sizeof(clearhead_call); }

int32_t clearhead_isa(int64_t dtype, const char **name) {
  int32_t status;
  const Kernel *kernel = active_kernel(dtype, &status);
  if (kernel) *name = kernel->name;
  return status;
}

int32_t clearhead_workspace(const clearhead_call *call, int64_t *bytes) {
  int32_t status = check_sizes(*call);
  if (status) return status;
  const Kernel *kernel = active_kernel(call->dtype, &status);
  if (kernel) *bytes = make_job(*call, *kernel).bytes;
  return status;
}

int32_t clearhead_forward(const clearhead_call *call) {
  int32_t status = check_all(*call);
  if (status) return status;
  const Kernel *kernel = active_kernel(call->dtype, &status);
  if (!kernel) return status;
  const Job job = make_job(*call, *kernel);
  if (call->workspace_bytes < job.bytes) return CLEARHEAD_SMALL_WORKSPACE;
  run_pass(job, make_plan, kernel->item);
  if (call->key_mass) run_pass(job, make_mass_plan, kernel->mass);
  if (call->weights) run_pass(job, make_weights_plan, kernel->weights);
  return CLEARHEAD_OK;
}
