// The C interface: arguments checked as return codes, a call cut into items of work, and the items
// handed to the threads by one counter. Who computes an item changes nothing in it.
#include "clearhead.h"

#include <math.h>
#include <string.h>

#include <atomic>
#include <initializer_list>

#include "kernel.h"

namespace clearhead {
namespace {

constexpr double LOG2E = 1.4426950408889634;
constexpr int64_t LINE = 64 / sizeof(float);  // floats of a cache line
constexpr int64_t SIZE_LIMIT = INT64_C(1) << 31;
// Panels in flight stay within half of a 1 MB second-level cache.
constexpr int64_t PANEL_FLOATS = (512 << 10) / sizeof(float);

bool is_float(int64_t dtype) { return dtype >= CLEARHEAD_FLOAT32 && dtype <= CLEARHEAD_FLOAT16; }

int32_t check_sizes(const clearhead_call &c) {
  for (int64_t size : {c.B, c.H, c.Hkv, c.L, c.S, c.D, c.Dv})
    if (size < 1 || size >= SIZE_LIMIT) return CLEARHEAD_BAD_SIZE;
  if (c.H % c.Hkv) return CLEARHEAD_BAD_SIZE;
  if (c.D > CLEARHEAD_MAX_HEAD_SIZE || c.Dv > CLEARHEAD_MAX_HEAD_SIZE)
    return CLEARHEAD_BAD_HEAD_SIZE;
  if (c.top_k < 0 || c.top_k > CLEARHEAD_MAX_TOP_K) return CLEARHEAD_BAD_SIZE;
  return is_float(c.dtype) ? CLEARHEAD_OK : CLEARHEAD_BAD_DTYPE;
}

int32_t check_all(const clearhead_call &c) {
  if (int32_t status = check_sizes(c)) return status;
  for (const void *needed : {c.query, c.key, c.value, (const void *)c.out, (const void *)c.m,
                             (const void *)c.z, (const void *)c.workspace})
    if (!needed) return CLEARHEAD_BAD_POINTER;
  if (!c.doc_q != !c.doc_k) return CLEARHEAD_BAD_POINTER;
  if (c.mask.data && c.mask.dtype != CLEARHEAD_BOOL) return CLEARHEAD_BAD_DTYPE;
  for (const clearhead_dense &added : c.added)
    if (added.data && !is_float(added.dtype)) return CLEARHEAD_BAD_DTYPE;
  if (c.top_weights && (!c.top_keys || c.top_k < 1)) return CLEARHEAD_BAD_POINTER;
  if (c.left < 0 || c.right < 0 || !isfinite(c.scale) || !isfinite(c.softcap) || c.softcap < 0)
    return CLEARHEAD_BAD_RULE;
  return CLEARHEAD_OK;
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t whole_lines(int64_t floats) { return ceil_div(floats, LINE) * LINE; }

int64_t workers(const clearhead_call &c) { return c.threads > 1 ? c.threads : 1; }

Plan make_plan(const clearhead_call &c, const Kernel &kernel) {
  Plan p = {};
  p.call = &c;
  const int64_t rows = kernel.rows;
  p.G = c.H / c.Hkv;
  p.merged = p.G > 1 && c.L < rows;
  p.panels = p.merged ? ceil_div(p.G * c.L, rows) : p.G * ceil_div(c.L, rows);

  // Eight items per thread even out what causal rows and other programs do to the load.
  const int64_t heads = c.B * c.Hkv;
  p.q_floats = c.D * rows;
  p.out_floats = c.Dv * rows;
  const int64_t few = p.G * c.L, most_few = kernel.lanes < MOST_FEW ? kernel.lanes : MOST_FEW;
  p.few = few > most_few ? 0 : few > 4 ? MOST_FEW : few > 2 ? 4 : int(few);
  p.few_floats = p.few * whole_lines(c.Dv);
  int64_t group = p.panels * heads / (workers(c) * 8);
  const int64_t fits = PANEL_FLOATS / (p.q_floats + p.out_floats);
  group = group < fits ? group : fits;
  group = group < MAX_PANELS ? group : MAX_PANELS;
  group = group > 1 ? group : 1;
  p.groups = ceil_div(p.panels, group);
  p.group = ceil_div(p.panels, p.groups);
  // What is caught in passing (masses, top keys) goes from one span to the next.
  const int64_t span = SPAN_BLOCKS * BLOCK, past = c.S - c.L;
  p.first_span = c.left < past ? (past - c.left) / span : 0;
  p.parts = ceil_div(c.S, span) - p.first_span;
  const bool caught = c.first_mass || c.previous_mass || c.self_mass || c.top_weights;
  if (!p.few || caught || workers(c) == 1 || heads >= workers(c) * 8) p.parts = 1;
  p.items = heads * p.groups * p.parts;

  // Folding the scale needs a positive factor that is a normal float32; a score of -inf times 0
  // would be NaN.
  const bool plain = c.softcap == 0 && !c.added[0].data && !c.added[1].data && !c.slopes;
  p.raw = plain && c.scale > 1e-30 && c.scale < 1e30;
  p.scale = float(c.scale);
  p.exponent = float(p.raw ? c.scale * LOG2E : LOG2E);

  p.statistics = (c.entropy ? ENTROPY : 0) | (c.distance ? DISTANCE : 0) |
                 (c.first_mass || c.previous_mass || c.self_mass ? MASSES : 0) |
                 (c.top_weights ? TOP : 0);

  p.statistics_floats = whole_lines(ceil_div(kernel.statistics_bytes, sizeof(float)));
  p.panel_floats = whole_lines(ceil_div(kernel.panel_bytes, sizeof(float)));
  const int64_t tile = BLOCK * rows;
  int64_t at = 0;
  auto place = [&at](int64_t floats) {
    const int64_t start = at;
    at += whole_lines(floats);
    return start;
  };
  p.at_q = place(p.group * p.q_floats);
  p.at_out = place(p.group * p.out_floats);
  p.at_total = place(c.S > SPAN_BLOCKS * BLOCK ? p.group * p.out_floats : 0);
  p.at_panels = place(p.group * p.panel_floats);
  p.at_statistics = place(p.statistics ? p.group * p.statistics_floats : 0);
  p.at_scores = place(tile);
  p.at_few = place(p.few_floats);
  p.at_weights = place(p.few ? tile : 0);
  p.at_cut = place(p.out_floats);
  p.at_mask = place(c.mask.data ? tile : 0);
  for (int n = 0; n < 2; n++) p.at_added[n] = place(c.added[n].data ? tile : 0);
  p.at_key = place(BLOCK * c.D);
  p.at_value = place(BLOCK * c.Dv);
  p.at_mass = place(c.key_mass ? p.G * MASS_BLOCKS * BLOCK * kernel.lanes : 0);
  p.worker_floats = at;

  p.part_floats = p.few_floats + p.panel_floats;
  p.at_parts = whole_lines(heads);
  p.shared_floats = p.parts > 1 ? p.at_parts + heads * p.parts * p.part_floats : 0;
  return p;
}

// The second pass: its panels hold one query head each, its items are cut by keys.
Plan make_mass_plan(const Plan &first, const Kernel &kernel) {
  const clearhead_call &c = *first.call;
  Plan p = first;
  p.merged = false;
  p.few = 0;
  p.panels = p.G * ceil_div(c.L, kernel.rows);
  p.items = c.B * c.Hkv * ceil_div(c.S, MASS_BLOCKS * BLOCK);
  return p;
}

int64_t bytes_needed(const clearhead_call &c, const Plan &plan) {
  return (workers(c) * plan.worker_floats + plan.shared_floats + LINE) * int64_t(sizeof(float));
}

struct Work {
  const Plan &plan;
  void (*item)(const Plan &plan, int64_t item, float *workspace);
  float *workspace;
  std::atomic<int64_t> next{0};
};

void work(int64_t first, int64_t end, void *context) {
  Work &w = *static_cast<Work *>(context);
  for (int64_t worker = first; worker < end; worker++)
    for (;;) {
      const int64_t item = w.next.fetch_add(1, std::memory_order_relaxed);
      if (item >= w.plan.items) break;
      w.item(w.plan, item, w.workspace + worker * w.plan.worker_floats);
    }
}

void run_all(const Plan &plan, void (*item)(const Plan &, int64_t, float *), float *workspace) {
  const clearhead_call &c = *plan.call;
  Work shared{plan, item, workspace};
  const int64_t n = workers(c) < plan.items ? workers(c) : plan.items;
  if (n > 1 && c.parallel_for)
    c.parallel_for(0, n, 1, work, &shared);
  else
    work(0, 1, &shared);
}

}  // namespace
}  // namespace clearhead

using namespace clearhead;

int64_t clearhead_call_bytes() { return sizeof(clearhead_call); }

int32_t clearhead_isa(const char **name) {
  int32_t status;
  const Kernel *kernel = active_kernel(&status);
  if (kernel) *name = kernel->name;
  return status;
}

int32_t clearhead_workspace(const clearhead_call *call, int64_t *bytes) {
  int32_t status = check_sizes(*call);
  if (status) return status;
  const Kernel *kernel = active_kernel(&status);
  if (kernel) *bytes = bytes_needed(*call, make_plan(*call, *kernel));
  return status;
}

int32_t clearhead_forward(const clearhead_call *call) {
  int32_t status = check_all(*call);
  if (status) return status;
  const Kernel *kernel = active_kernel(&status);
  if (!kernel) return status;
  Plan plan = make_plan(*call, *kernel);
  if (call->workspace_bytes < bytes_needed(*call, plan)) return CLEARHEAD_SMALL_WORKSPACE;

  const uintptr_t start = reinterpret_cast<uintptr_t>(call->workspace);
  float *const workspace = reinterpret_cast<float *>((start + 63) / 64 * 64);
  plan.shared = workspace + workers(*call) * plan.worker_floats;
  if (plan.parts > 1) memset(plan.shared, 0, plan.at_parts * sizeof(float));
  run_all(plan, kernel->item, workspace);
  if (call->key_mass) run_all(make_mass_plan(plan, *kernel), kernel->mass, workspace);
  return CLEARHEAD_OK;
}
