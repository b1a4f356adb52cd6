// The forward pass:  out_i = sum_j exp(s_ij - m_i) v_j / sum_j exp(s_ij - m_i),  with no matrix of
// scores in memory. It does not: drop weights, return them, or split the keys of a row over threads.
//
//   for an item of work: up to MAX_PANELS panels of rows i of one (b, key/value head)
//     for each block of BLOCK keys j, from key 0 upwards, that some row of these may see
//       for each panel: the runs of the block that its vectors of rows see
//         1, 2   scores and their maximum       (softmax.inl.h)
//         3, 4   weights and their sum
//         5      o_i = o_i exp(m_old - m_i) + sum_j p_ij v_j     (microkernel.inl.h)
//     6   out_i = o_i / l_i, with the sink of the head joined in
//
// A row's bits depend on its own keys only. Lanes do not mix; sums run over the keys of a block in
// their order, and over blocks in theirs; a block in which a row sees nothing multiplies its sums by
// exp2(0) = 1 and adds 0.

namespace {

// Calls f<N> for N = vectors.
#define BY_VECTORS(vectors, f, ...)      \
  switch (vectors) {                     \
    case 1: f<1>(__VA_ARGS__); break;    \
    case 2: f<2>(__VA_ARGS__); break;    \
    default: f<3>(__VA_ARGS__);          \
  }

struct Item {
  const Plan &plan;
  const clearhead_call &call;
  int64_t b, g;  // batch item and key/value head
  int panels;
  float *q, *out, *scores, *cut, *mask, *added[2], *key, *value;
  float *panel_floats;

  Panel &panel(int n) const {
    return *reinterpret_cast<Panel *>(panel_floats + n * plan.panel_floats);
  }
};

// One block of keys, its rows brought in when the first panel asks.
struct Block {
  int64_t n0, n1;
  int keys;  // that are read: those that some row of the item sees, in whole tiles
  bool loaded, clean;
  Rows K, V;
  Data data;
};

// -- panels ----------------------------------------------------------------------------------------

template <class T>
void start_panel(const Item &item, int64_t number, int n) {
  const clearhead_call &c = item.call;
  Panel &P = item.panel(n);
  place_rows(item.plan, item.g, number, P);
  find_ranges(c, P);
  if (c.slopes || c.doc_q) read_row_rules(c, item.b, P);
  for (int v = 0; v < P.vectors; v++) {
    const T *row[VL];
    for (int r = 0; r < VL; r++) {
      const Place &at = P.place[v * VL + r];
      row[r] = static_cast<const T *>(c.query) + item.b * c.query_strides[0] +
               at.h * c.query_strides[1] + at.i * c.query_strides[2];
    }
    pack_rows(row, item.q + n * item.plan.q_floats + v * VL, int(c.D));
    store(P.m + v * VL, splat(-INFINITY));
    store(P.l + v * VL, vf{});
    store(P.l_lost + v * VL, vf{});
  }
  memset(item.out + n * item.plan.out_floats, 0, item.plan.out_floats * sizeof(float));
}

// -- blocks ----------------------------------------------------------------------------------------

// False if no row of the item may see the block.
NOINLINE bool start_block(const Item &item, int64_t n0, int64_t end, Block &block) {
  const clearhead_call &c = item.call;
  block.n0 = n0, block.n1 = least(n0 + BLOCK, c.S);
  block.keys = int(least(to_tile(least(end, block.n1) - n0), block.n1 - n0));
  block.loaded = false;
  block.data = {};
  for (int n = 0; n < 2; n++)
    if (c.added[n].data) block.data.added[n] = item.added[n];
  if (c.key_mask) {
    const uint8_t *at = c.key_mask + item.b * c.key_mask_strides[0] + n0 * c.key_mask_strides[1];
    int seen = 0;
    for (int j = 0; j < block.keys; j++) seen += at[j * c.key_mask_strides[1]] != 0;
    if (seen == 0) return false;
    if (seen < block.keys) block.data.key_mask = at;
    block.data.key_mask_stride = c.key_mask_strides[1];
  }
  if (c.doc_k) {
    block.data.doc_k = c.doc_k + item.b * c.doc_k_strides[0] + n0 * c.doc_k_strides[1];
    block.data.doc_k_stride = c.doc_k_strides[1];
  }
  return true;
}

// Whether some document of the panel may be in the block; none of `data` where all are one.
INLINE bool shares_documents(const Panel &P, const Block &block, Data &data) {
  if (!data.doc_k) return true;
  int64_t low = INT64_MAX, high = INT64_MIN;
  for (int j = 0; j < block.keys; j++) {
    low = least(low, data.doc_k[j * data.doc_k_stride]);
    high = most(high, data.doc_k[j * data.doc_k_stride]);
  }
  if (low > P.doc_most || high < P.doc_least) return false;
  if (low == high && P.doc_least == P.doc_most) data.doc_k = nullptr;
  return true;
}

// False if the dense mask lets no row of the panel see anything in these runs.
INLINE bool read_mask(const Item &item, const Panel &P, const Block &block, const Run *runs,
                      int count) {
  vi seen = {};
  for (const Run *run = runs; run < runs + count; run++)
    for (int v = run->v0; v < run->v1; v++) {
      float *to = item.mask + run->j0 * ROWS + v * VL;
      read_dense(item.call.mask, item.b, P.place + v * VL, block.n0 + run->j0,
                 block.n0 + run->j1, to);
      for (int j = run->j0; j < run->j1; j++, to += ROWS) seen |= load(to) != 0.f;
    }
  return any(seen);
}

template <class T>
void load_block(const Item &item, Block &block) {
  const clearhead_call &c = item.call;
  const T *k = static_cast<const T *>(c.key) + item.b * c.key_strides[0] +
               item.g * c.key_strides[1] + block.n0 * c.key_strides[2];
  const T *v = static_cast<const T *>(c.value) + item.b * c.value_strides[0] +
               item.g * c.value_strides[1] + block.n0 * c.value_strides[2];
  block.K = float_rows(k, c.key_strides[2], block.keys, int(c.D), item.key);
  block.V = float_rows(v, c.value_strides[2], block.keys, int(c.Dv), item.value);
  block.clean = all_finite(block.V, block.keys, int(c.Dv));
  block.loaded = true;
}

// Steps 1 and 2 of one run; m is the maximum so far.
void score_run(const Item &item, const Panel &P, const Block &block, const Data &data,
               const Run &run, const float *q, float *m) {
  const clearhead_call &c = item.call;
  const int n0 = int(block.n0), v0 = run.v0 * VL;
  const bool last = item.plan.raw && !data.mask && !data.key_mask && !data.doc_k;
  BY_VECTORS(run.v1 - run.v0, scores, block.K, q + v0, int(c.D), P, run, n0, last,
             item.scores + v0, m + v0)
  if (last) return;
  for (int n = 0; n < 2; n++)
    for (int v = run.v0; data.added[n] && v < run.v1; v++)
      read_dense(c.added[n], item.b, P.place + v * VL, n0 + run.j0, n0 + run.j1,
                 item.added[n] + run.j0 * ROWS + v * VL);
  rule_scores(item.plan, P, data, run, n0, item.scores, m);
}

template <bool CLEAN>
void weigh_run(const Item &item, const Block &block, const Run &run, float *o, const float *a,
               const float *base, float *l, bool whole) {
  const int v0 = run.v0 * VL, keys = run.j1 - run.j0, Dv = int(item.call.Dv);
  float *s = item.scores + run.j0 * ROWS + v0;
  const float exponent = item.plan.exponent;
  const Rows V = {block.V.at + run.j0 * block.V.stride, block.V.stride};
  switch (run.v1 - run.v0) {
    case 1:
      exponentials<1, CLEAN>(s, keys, base + v0, exponent, l + v0);
      return weigh<1, CLEAN>(V, s, keys, o + v0, a + v0, Dv, whole);
    case 2:
      exponentials<2, CLEAN>(s, keys, base + v0, exponent, l + v0);
      return weigh<2, CLEAN>(V, s, keys, o + v0, a + v0, Dv, whole);
    default:
      exponentials<3, CLEAN>(s, keys, base + v0, exponent, l + v0);
      return weigh<3, CLEAN>(V, s, keys, o + v0, a + v0, Dv, whole);
  }
}

template <class T>
void see_block(const Item &item, Block &block, int n) {
  Panel &P = item.panel(n);
  Run runs[2 * NV + 1];
  const int count = cut_runs(P, block.n0, block.keys, runs);
  if (count == 0) return;
  Data data = block.data;
  if (!shares_documents(P, block, data)) return;
  if (item.call.mask.data) {
    if (!read_mask(item, P, block, runs, count)) return;
    data.mask = item.mask;
  }
  if (!block.loaded) load_block<T>(item, block);

  alignas(64) float m[ROWS], base[ROWS], a[ROWS], l[ROWS];
  for (int v = 0; v < P.vectors; v++) store(m + v * VL, load(P.m + v * VL));
  for (int r = 0; r < count; r++)
    score_run(item, P, block, data, runs[r], item.q + n * item.plan.q_floats, m);
  for (int v = 0; v < P.vectors; v++) {
    const vf m_i = load(m + v * VL), base_i = m_i == -INFINITY ? vf{} : m_i;
    store(base + v * VL, base_i);
    store(a + v * VL, exp2((load(P.m + v * VL) - base_i) * item.plan.exponent));
    store(P.m + v * VL, m_i);
    store(l + v * VL, vf{});
  }

  float *o = item.out + n * item.plan.out_floats, *sum = count == 1 ? o : item.cut;
  const bool whole = count == 1;
  if (!whole) memset(sum, 0, item.plan.out_floats * sizeof(float));
  for (int r = 0; r < count; r++)
    if (block.clean)
      weigh_run<true>(item, block, runs[r], sum, a, base, l, whole);
    else
      weigh_run<false>(item, block, runs[r], sum, a, base, l, whole);
  if (!whole) merge(sum, o, a, int(item.call.Dv), P.vectors);
  for (int v = 0; v < P.vectors; v++) {
    // The sum over blocks keeps what it rounds away (Knuth's exact addition): z is the one number
    // that all of a row hangs on, and over 170 blocks its error grew to twice that of its terms.
    const vf a_i = load(a + v * VL), old = load(P.l + v * VL) * a_i, more = load(l + v * VL);
    const vf l_i = old + more, part = l_i - old;
    const vf lost = (old - (l_i - part)) + (more - part);
    store(P.l + v * VL, l_i);
    store(P.l_lost + v * VL, load(P.l_lost + v * VL) * a_i + lost);
  }
}

// -- the end ---------------------------------------------------------------------------------------

// Step 6: m, z and out of a panel. A sink is one more score, without a value.
template <class T>
void finish_panel(const Item &item, int n) {
  const clearhead_call &c = item.call;
  const Panel &P = item.panel(n);
  for (int v = 0; v < P.vectors; v++) {
    const Place *row = P.place + v * VL;
    vf m_i = load(P.m + v * VL), z_i = load(P.l + v * VL) + load(P.l_lost + v * VL);
    vf factor = splat(1.f);
    const vi empty = z_i == 0.f;
    if (item.plan.raw) m_i *= item.plan.scale;
    if (c.sinks) {
      vf sink;
      for (int r = 0; r < VL; r++) sink[r] = c.sinks[row[r].h];
      const vf joint = vmax(sink, m_i);
      factor = exp(m_i - joint);
      z_i = z_i * factor + exp(sink - joint);
      m_i = joint;
    }
    m_i = empty ? splat(-INFINITY) : z_i == z_i ? m_i : z_i;
    z_i = empty ? vf{} : z_i;
    factor = empty ? vf{} : factor / z_i;

    T *to[VL];
    const int rows = int(least(P.rows - v * VL, VL));
    for (int r = 0; r < rows; r++) {
      const int64_t at = (item.b * c.H + row[r].h) * c.L + row[r].i;
      c.m[at] = m_i[r], c.z[at] = z_i[r];
      to[r] = static_cast<T *>(c.out) + item.b * c.out_strides[0] + row[r].h * c.out_strides[1] +
              row[r].i * c.out_strides[2];
    }
    unpack_rows(item.out + n * item.plan.out_floats + v * VL, factor, to, rows, int(c.Dv));
  }
}

template <class T>
void run_item(const Plan &plan, int64_t number, float *at) {
  const clearhead_call &c = *plan.call;
  const int64_t head = number / plan.groups;
  // The last rows see most when causal: a long item at the end would keep the others waiting.
  const int64_t start = (plan.groups - 1 - number % plan.groups) * plan.group;
  const Item item = {plan, c, head / c.Hkv, head % c.Hkv,
                     int(least(plan.group, plan.panels - start)), at + plan.at_q,
                     at + plan.at_out, at + plan.at_scores, at + plan.at_cut, at + plan.at_mask,
                     {at + plan.at_added[0], at + plan.at_added[1]}, at + plan.at_key,
                     at + plan.at_value, at + plan.at_panels};
  int64_t first = c.S, end = 0;
  for (int n = 0; n < item.panels; n++) {
    start_panel<T>(item, start + n, n);
    const Panel &P = item.panel(n);
    for (int v = 0; v < P.vectors; v++) first = least(first, P.lo[v]), end = most(end, P.hi[v]);
  }
  for (int64_t n0 = first / BLOCK * BLOCK; n0 < end; n0 += BLOCK) {
    Block block;
    if (!start_block(item, n0, end, block)) continue;
    for (int n = 0; n < item.panels; n++) see_block<T>(item, block, n);
  }
  for (int n = 0; n < item.panels; n++) finish_panel<T>(item, n);
}

void run(const Plan &plan, int64_t number, float *workspace) {
  switch (plan.call->dtype) {
    case CLEARHEAD_FLOAT32: return run_item<float>(plan, number, workspace);
    case CLEARHEAD_BFLOAT16: return run_item<bfloat16>(plan, number, workspace);
    default: return run_item<float16>(plan, number, workspace);
  }
}

}  // namespace
