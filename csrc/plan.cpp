// How a call is cut into items of work, and what of a worker's workspace is for what. Packed
// sequences are calls of their own, each with its own plan.
#include <initializer_list>

#include "kernel.h"

namespace clearhead {
namespace {

constexpr double LOG2E = 1.4426950408889634;
constexpr int64_t LINE = 64 / sizeof(float);  // floats of a cache line
// Panels in flight stay within half of a 1 MB second-level cache.
constexpr int64_t PANEL_FLOATS = (512 << 10) / sizeof(float);

constexpr int64_t FORESEEN_BYTES = 1 << 20, FORESEEING_LANES = 16;  // see foresee.inl.h

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
int64_t whole_lines(int64_t floats) { return ceil_div(floats, LINE) * LINE; }

int64_t panels_of(const clearhead_call &c, const Kernel &kernel) {
  const int64_t G = c.H / c.Hkv, rows = kernel.rows;
  return c.L < rows && G > 1 ? ceil_div(G * c.L, rows) : G * ceil_div(c.L, rows);
}

int64_t bytes_of(int64_t dtype) {
  return dtype == CLEARHEAD_FLOAT32 ? 4 : dtype == CLEARHEAD_BOOL ? 1 : 2;
}

template <class P>
void move_on(P *&pointer, int64_t elements) {
  if (pointer) pointer += elements;
}

template <class P>
void move_on(P *&pointer, int64_t elements, int64_t dtype) {
  if (pointer) pointer = (P *)((char *)pointer + elements * bytes_of(dtype));
}

// Sequence b of a packed call, as a call of its own: only how m, z and the statistics are stored
// (Plan::L_stored, S_stored) knows of the others.
clearhead_call sequence(const clearhead_call &whole, int64_t b) {
  const int64_t i = whole.cu_q[b], j = whole.cu_k[b];
  clearhead_call c = whole;
  c.cu_q = c.cu_k = nullptr;
  c.B = 1, c.L = whole.cu_q[b + 1] - i, c.S = whole.cu_k[b + 1] - j;
  move_on(c.query, i * c.query_strides[2], c.dtype);
  move_on(c.key, j * c.key_strides[2], c.dtype);
  move_on(c.value, j * c.value_strides[2], c.dtype);
  move_on(c.out, i * c.out_strides[2], c.dtype);
  for (clearhead_dense *dense : {&c.mask, &c.added[0], &c.added[1]})
    move_on(dense->data, i * dense->strides[2] + j * dense->strides[3], dense->dtype);
  move_on(c.key_mask, j * c.key_mask_strides[1]);
  move_on(c.doc_q, i * c.doc_q_strides[1]);
  move_on(c.doc_k, j * c.doc_k_strides[1]);
  move_on(c.first_key, i * c.first_key_strides[1]);
  move_on(c.slopes, b * c.slopes_strides[0]);
  move_on(c.head_mask, b * c.head_mask_strides[0]);
  for (float **rows : {&c.m, &c.z, &c.lse, &c.max_logit, &c.entropy, &c.first_mass,
                       &c.previous_mass, &c.self_mass, &c.distance})
    move_on(*rows, i);
  move_on(c.top_weights, i * c.top_k);
  move_on(c.top_keys, i * c.top_k);
  move_on(c.key_mass, j);
  return c;
}

// Few rows of few heads leave threads idle: then every span of keys is an item. Not where something
// is caught in passing (masses, top keys), which goes from one span to the next.
int64_t pieces_of(const Job &job, const Plan &p, int64_t heads, int64_t &first_span) {
  const clearhead_call &c = *p.call;
  const bool caught = c.first_mass || c.previous_mass || c.self_mass || c.top_weights;
  const bool packed = job.whole->cu_q != nullptr;
  if (!p.few || caught || packed || job.workers == 1 || heads >= job.workers * 8) return 1;
  const int64_t span = SPAN_BLOCKS * BLOCK, past = c.S - c.L;
  first_span = c.left < past ? (past - c.left) / span : 0;
  return ceil_div(c.S, span) - first_span;
}

}  // namespace

Plan make_plan(const Job &job, const clearhead_call &c) {
  const Kernel &kernel = *job.kernel;
  Plan p = {};
  p.call = &c;
  const int64_t rows = kernel.rows;
  p.G = c.H / c.Hkv;
  p.merged = c.L < rows && p.G > 1;
  p.panels = panels_of(c, kernel);
  p.L_stored = job.L_stored, p.S_stored = job.S_stored;

  // Eight items per thread even out what causal rows and other programs do to the load.
  const int64_t heads = c.B * c.Hkv;
  const int64_t few = p.G * c.L, most_few = kernel.lanes < MOST_FEW ? kernel.lanes : MOST_FEW;
  if (c.out && few <= most_few)
    p.few = few > 8 ? MOST_FEW : few > 4 ? int(few + few % 2) : few > 2 ? 4 : int(few);
  p.few_floats = p.few * 2 * LINE * ceil_div(c.Dv, 2 * LINE);  // tiles have columns by twice 16
  p.q_floats = whole_lines(c.D) * most(rows, p.few);
  p.out_floats = most(whole_lines(c.Dv) * rows, p.few_floats);
  int64_t group = job.panels / (job.workers * 8);
  const int64_t fits = PANEL_FLOATS / (p.q_floats + p.out_floats);
  group = group < fits ? group : fits;
  group = group < MAX_PANELS ? group : MAX_PANELS;
  group = group > 1 ? group : 1;
  p.groups = ceil_div(p.panels, group);
  p.group = p.groups ? ceil_div(p.panels, p.groups) : 1;
  p.pieces = pieces_of(job, p, heads, p.first_span);
  p.items = heads * p.groups * p.pieces;
  p.workers = job.workers;
  const int64_t rows_of_all = (job.whole->cu_q ? 1 : c.B) * (c.H * p.L_stored + c.Hkv * p.S_stored);
  p.foresees = kernel.lanes >= FORESEEING_LANES &&
               rows_of_all * (c.D + c.Dv) * bytes_of(c.dtype) > FORESEEN_BYTES;

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
  p.at_weights = place(p.few ? 3 * MOST_FEW * FEW_STRIDE : 0);
  p.at_cut = place(p.out_floats);
  p.at_mask = place(c.mask.data ? tile : 0);
  for (int n = 0; n < 2; n++) p.at_added[n] = place(c.added[n].data ? tile : 0);
  p.at_key = place(BLOCK * whole_lines(c.D + 3));
  p.at_value = place(BLOCK * whole_lines(c.Dv));
  p.at_mass = place(c.key_mass ? p.G * MASS_BLOCKS * BLOCK * kernel.lanes : 0);
  p.worker_floats = at;

  p.piece_floats = p.few_floats + p.panel_floats;
  p.at_pieces = whole_lines(heads);
  p.shared_floats = p.pieces > 1 ? p.at_pieces + heads * p.pieces * p.piece_floats : 0;
  return p;
}

// The second pass: its panels hold one query head each, its items are cut by keys.
Plan make_mass_plan(const Job &job, const clearhead_call &c) {
  Plan p = make_plan(job, c);
  p.merged = false;
  p.few = 0;
  p.panels = p.G * ceil_div(c.L, job.kernel->rows);
  p.items = c.B * c.Hkv * ceil_div(c.S, MASS_BLOCKS * BLOCK);
  return p;
}

// The pass of the weights: rows as in the first one, whose spans need no items of their own.
Plan make_weights_plan(const Job &job, const clearhead_call &c) {
  Plan p = make_plan(job, c);
  p.items /= p.pieces;
  p.pieces = 1;
  p.few = 0;
  return p;
}

// Without an output the values have no columns: whatever goes over these has nothing to do, and what
// is left does the same in the same order.
clearhead_call part_of(const Job &job, int64_t s) {
  clearhead_call part = job.whole->cu_q ? sequence(*job.whole, s) : *job.whole;
  if (!part.out) {
    part.value = nullptr, part.Dv = 0;
    for (int n = 0; n < 3; n++) part.value_strides[n] = part.out_strides[n] = 0;
  }
  return part;
}

Job make_job(const clearhead_call &c, const Kernel &kernel) {
  Job job = {&c, &kernel, c.cu_q ? c.B : 1, c.threads > 1 ? c.threads : 1, c.L, c.S, 0, 0, 0, 0, 0};
  if (c.cu_q) job.L_stored = c.cu_q[c.B], job.S_stored = c.cu_k[c.B];
  for (int64_t s = 0; s < job.parts; s++) {
    const clearhead_call part = part_of(job, s);
    job.panels += panels_of(part, kernel) * part.B * part.Hkv;
  }
  for (int64_t s = 0; s < job.parts; s++) {
    const clearhead_call part = part_of(job, s);
    const Plan plan = make_plan(job, part);
    if (plan.worker_floats > job.worker_floats) job.worker_floats = plan.worker_floats;
    job.shared_floats = plan.shared_floats;  // 0 for sequences
  }
  job.start_floats = whole_lines((job.parts + 1) * sizeof(int64_t) / sizeof(float));
  const int64_t floats = job.start_floats + job.shared_floats + job.workers * job.worker_floats;
  job.bytes = (floats + LINE) * int64_t(sizeof(float));
  return job;
}

}  // namespace clearhead
