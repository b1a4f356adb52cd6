// The forward pass:  out_i = sum_j exp(s_ij - m_i) v_j / sum_j exp(s_ij - m_i),  with no matrix of
// scores in memory. It does not: drop weights, return them, or split the keys of a row over threads.
//
//   for an item of work: up to MAX_PANELS panels of rows i of one (b, key/value head)
//     for each block of BLOCK keys j, from key 0 upwards, that some row of these may see
//       for each panel: the runs of the block that its vectors of rows see
//         1, 2   scores and their maximum       (softmax.inl.h)
//         3, 4   weights and their sum
//         5      o_i = o_i exp(m_old - m_i) + sum_j p_ij v_j     (microkernel.inl.h)
//       after each SPAN_BLOCKS blocks, counted from key 0: the sums join those of the spans before
//     6   out_i = o_i / l_i, with the sink of the head joined in
//
// A row's bits depend on its own keys only. Lanes do not mix; sums run over the keys of a block in
// their order, over the blocks of a span and over spans in theirs; a block in which a row sees nothing multiplies its sums by
// exp2(0) = 1 and adds 0.

namespace {

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
    pack_rows(row, item.q(n) + v * VL, int(c.D));
    P.state[v] = P.total[v] = NOTHING;
  }
}

// -- blocks ----------------------------------------------------------------------------------------

template <class T, int WANTED>
void weigh_run(const Item &item, const Block &block, const Panel &P, const Run &run, float *o,
               const float *a, const float *base, Sums &sums, bool whole) {
  const int v0 = run.v0 * VL, keys = run.j1 - run.j0, Dv = int(item.call.Dv);
  const int n = int(block.n0) + run.j0;
  float *s = item.scores() + run.j0 * ROWS + v0;
  const float exponent = item.plan.exponent;
  if (item.plan.few) {
    const clearhead_call &c = item.call;
    const FewRows<T> values = {value_of<T>(item, n), c.value_strides[2], Dv};
    const int64_t next = least(n + BLOCK, c.S - keys);
    const FewRows<T> after = {key_of<T>(item, next), c.key_strides[2], int(c.D)};
    exponentials<1, WANTED>(s, item.weights(), keys, base, exponent, P.own, n, sums, 0);
    BY_FEW(item.plan.few, few_weigh, values, after, s, item.weights(), keys, item.few_out(), a)
    return;
  }
  const Rows V = {block.V.at + run.j0 * block.V.stride, block.V.stride};
  switch (run.v1 - run.v0) {
    case 1:
      exponentials<1, WANTED>(s, s, keys, base + v0, exponent, P.own + v0, n, sums, v0);
      return weigh<1>(V, s, keys, o + v0, a + v0, Dv, whole);
    case 2:
      exponentials<2, WANTED>(s, s, keys, base + v0, exponent, P.own + v0, n, sums, v0);
      return weigh<2>(V, s, keys, o + v0, a + v0, Dv, whole);
    default:
      exponentials<3, WANTED>(s, s, keys, base + v0, exponent, P.own + v0, n, sums, v0);
      return weigh<3>(V, s, keys, o + v0, a + v0, Dv, whole);
  }
}

template <class T>
void see_block(const Item &item, Block &block, int n) {
  Panel &P = item.panel(n);
  const int statistics = item.plan.statistics;
  Sight sight;
  if (!look(item, P, block, sight)) return;
  if (!block.loaded && !item.plan.few) load_keys<T>(item, block), load_values<T>(item, block);
  block.loaded = true;

  alignas(64) float m[ROWS], base[ROWS], a[ROWS];
  Move old[NV];
  Sums sums;
  for (int v = 0; v < P.vectors; v++) store(m + v * VL, P.state[v].m);
  for (const Run *run = sight.runs; run < sight.runs + sight.count; run++)
    score_run<T>(item, P, block, sight.data, *run, item.q(n), m);
  for (int v = 0; v < P.vectors; v++) {
    const vf base_i = base_of(load(m + v * VL));
    old[v] = move(P.state[v].m, base_i, item.plan.exponent);
    store(base + v * VL, base_i);
    store(a + v * VL, old[v].a);
    store(sums.l + v * VL, vf{});
    store(sums.entropy + v * VL, vf{});
    store(sums.distance + v * VL, vf{});
  }

  float *o = item.out(n), *sum = o;
  const bool whole = sight.count == 1 && block.finite;
  if (!whole) memset(sum = item.cut(), 0, item.plan.out_floats * sizeof(float));
  for (const Run *run = sight.runs; run < sight.runs + sight.count; run++) {
    if (statistics & MASSES) catch_marks(*run, int(block.n0), item.scores(), item.statistics(n));
    if (statistics & TOP)
      take_top(*run, int(block.n0), item.scores(), int(item.call.top_k), item.statistics(n));
    if (!block.finite) spoil<T>(item, block, *run, sum);
    switch (statistics & (ENTROPY | DISTANCE)) {
      case 0: weigh_run<T, 0>(item, block, P, *run, sum, a, base, sums, whole); break;
      case ENTROPY: weigh_run<T, ENTROPY>(item, block, P, *run, sum, a, base, sums, whole); break;
      default: weigh_run<T, ENTROPY | DISTANCE>(item, block, P, *run, sum, a, base, sums, whole);
    }
  }
  if (!whole) merge(sum, o, a, int(item.call.Dv), P.vectors);
  for (int v = 0; v < P.vectors; v++)
    add_sums(P.state[v], load(m + v * VL), old[v], load(sums.l + v * VL),
             load(sums.entropy + v * VL), load(sums.distance + v * VL));
}

// Joins what a panel has of a span into its total, and starts afresh.
NOINLINE void end_span(const Item &item, int n) {
  Panel &P = item.panel(n);
  float *o = item.out(n), *total = item.total(n);
  for (int v = 0; v < P.vectors; v++) {
    vf a, c;
    join(P.total[v], P.state[v], item.plan.exponent, a, c);
    P.state[v] = NOTHING;
    for (int64_t d = 0; d < item.call.Dv; d++) {
      const int64_t at = d * ROWS + v * VL;
      store(total + at, joined(load(total + at), load(o + at), a, c));
      store(o + at, vf{});
    }
  }
}

// -- the end ---------------------------------------------------------------------------------------

// Step 6: m, z, out and the statistics of a panel. A sink is one more score, without a value.
template <class T>
void finish_panel(const Item &item, int n, const State *states, const float *o) {
  const Plan &plan = item.plan;
  const clearhead_call &c = item.call;
  const Panel &P = item.panel(n);
  for (int v = 0; v < P.vectors; v++) {
    const Place *row = P.place + v * VL;
    const State &state = states[v];
    const vf l_i = state.l + state.l_lost;
    vf m_i = state.m, z_i = l_i, factor = splat(1.f), apart = {};
    const vi empty = l_i == 0.f;
    if (plan.raw) m_i *= plan.scale;
    const vf max_logit = empty ? splat(-INFINITY) : l_i == l_i ? m_i : l_i;
    if (c.sinks) {
      vf sink;
      for (int r = 0; r < VL; r++) sink[r] = c.sinks[row[r].h];
      const vf joint = vmax(sink, m_i);
      apart = vmax(splat(EXP2_LEAST), m_i - joint);
      factor = exp(m_i - joint);
      z_i = z_i * factor + exp(sink - joint);
      m_i = joint;
    }
    m_i = empty ? splat(-INFINITY) : z_i == z_i ? m_i : z_i;
    z_i = empty ? vf{} : z_i;
    factor = empty ? vf{} : factor / z_i;
    vf out_factor = factor;
    if (c.head_mask)
      for (int r = 0; r < VL; r++)
        out_factor[r] *= c.head_mask[item.b * c.head_mask_strides[0] +
                                     row[r].h * c.head_mask_strides[1]];

    T *to[VL];
    const int rows = int(least(P.rows - v * VL, VL));
    for (int r = 0; r < rows; r++) {
      const int64_t at = row_number(plan, item.b, row[r]);
      c.m[at] = m_i[r], c.z[at] = z_i[r];
      if (c.max_logit) c.max_logit[at] = max_logit[r];
      to[r] = static_cast<T *>(c.out) + item.b * c.out_strides[0] + row[r].h * c.out_strides[1] +
              row[r].i * c.out_strides[2];
    }
    unpack_rows(o + v * VL, out_factor, to, rows, int(c.Dv));
    if (!plan.statistics) continue;
    const Ended end = {factor, apart - log(z_i), empty};
    store_statistics(plan, item.b, P, v, rows, state, item.statistics(n), end);
  }
}

// Few rows: the end of a span that is an item of its own. The last one to end joins them all, in their
// order, whoever made them.
template <class T>
void end_part(const Item &item, int64_t number) {
  const Plan &plan = item.plan;
  const int64_t head = number / plan.parts, Dv = item.call.Dv;
  const auto part = [&](int64_t n) { return plan.shared + plan.at_parts + n * plan.part_floats; };
  Panel &P = item.panel(0);
  memcpy(part(number), item.few_out(), plan.few_floats * sizeof(float));
  memcpy(part(number) + plan.few_floats, &P, sizeof P);
  int32_t *const ended = reinterpret_cast<int32_t *>(plan.shared) + head;
  if (__atomic_add_fetch(ended, 1, __ATOMIC_ACQ_REL) < plan.parts) return;
  memset(item.total(0), 0, plan.out_floats * sizeof(float));
  for (int64_t n = head * plan.parts; n < (head + 1) * plan.parts; n++) {
    P.state[0] = reinterpret_cast<const Panel *>(part(n) + plan.few_floats)->state[0];
    few_to_lanes(part(n), plan.few, int(Dv), item.out(0));
    end_span(item, 0);
  }
  finish_panel<T>(item, 0, P.total, item.total(0));
}

template <class T>
void run_item(const Plan &plan, int64_t number, float *workspace) {
  const clearhead_call &c = *plan.call;
  const int64_t head = number / (plan.groups * plan.parts);
  // The last rows see most when causal: a long item at the end would keep the others waiting.
  const int64_t start = (plan.groups - 1 - number % plan.groups) * plan.group;
  const int panels = int(least(plan.group, plan.panels - start));
  const Item item = {plan, c, head / c.Hkv, head % c.Hkv, panels, workspace};
  int64_t first = c.S, end = 0;
  for (int n = 0; n < panels; n++) {
    const Panel &P = item.panel(n);
    start_panel<T>(item, start + n, n);
    if (!plan.few) memset(item.out(n), 0, plan.out_floats * sizeof(float));
    if (plan.statistics) start_statistics(c, item.b, P, item.statistics(n));
    for (int v = 0; v < P.vectors; v++) first = least(first, P.lo[v]), end = most(end, P.hi[v]);
  }
  constexpr int64_t SPAN = SPAN_BLOCKS * BLOCK;
  if (plan.parts > 1) {
    const int64_t span = (plan.first_span + number % plan.parts) * SPAN;
    first = most(first, span), end = least(end, span + SPAN);
  }
  memset(item.few_out(), 0, plan.few_floats * sizeof(float));
  const bool spans = end > first / SPAN * SPAN + SPAN;
  for (int n = 0; spans && n < panels; n++)
    memset(item.total(n), 0, plan.out_floats * sizeof(float));
  for (int64_t n0 = first / BLOCK * BLOCK; n0 < end; n0 += BLOCK) {
    Block block;
    if (start_block(item, n0, end, block))
      for (int n = 0; n < panels; n++) see_block<T>(item, block, n);
    if (spans && ((n0 + BLOCK) % SPAN == 0 || n0 + BLOCK >= end)) {
      if (plan.few) few_to_lanes(item.few_out(), plan.few, int(c.Dv), item.out(0));
      memset(item.few_out(), 0, plan.few_floats * sizeof(float));
      for (int n = 0; n < panels; n++) end_span(item, n);
    }
  }
  if (plan.parts > 1) return end_part<T>(item, number);
  if (plan.few && !spans) few_to_lanes(item.few_out(), plan.few, int(c.Dv), item.out(0));
  for (int n = 0; n < panels; n++)
    finish_panel<T>(item, n, spans ? item.panel(n).total : item.panel(n).state,
                    spans ? item.total(n) : item.out(n));
}

// Calls f<T> for the element type of a call.
#define BY_DTYPE(f, plan, ...)                                         \
  switch ((plan).call->dtype) {                                        \
    case CLEARHEAD_FLOAT32: return f<float>(plan, __VA_ARGS__);        \
    case CLEARHEAD_BFLOAT16: return f<bfloat16>(plan, __VA_ARGS__);    \
    default: return f<float16>(plan, __VA_ARGS__);                     \
  }

void run(const Plan &plan, int64_t number, float *workspace) {
  BY_DTYPE(run_item, plan, number, workspace)
}

}  // namespace
