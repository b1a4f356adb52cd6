// Where the sums of a panel end: a span joins those before it, and step 6 of forward.inl.h. Where
// the spans of few rows are items of their own, whoever ends last joins them.

namespace {

// Joins what a panel has of a span into its total, and starts afresh.
NOINLINE void end_span(const Item &item, int n) {
  Panel &P = item.panel(n);
  float *o = sums_so_far(item, n), *total = item.total(n);
  for (int v = 0; v < P.vectors; v++) {
    vf a, c;
    join(P.total[v], P.state[v], item.plan.exponent, a, c);
    P.state[v] = NOTHING;
    if (item.plan.few) return join_few(item, a, c);
    for (int64_t d = 0; d < item.call.Dv; d++) {
      const int64_t at = d * ROWS + v * VL;
      store(total + at, joined(load(total + at), load(o + at), a, c));
    }
  }
  P.fresh = true;
}

// Step 6: out and the statistics of a panel. A sink is one more score, without a value.
template <class T>
void finish_panel(const Item &item, int n, const State *states, const float *o) {
  const Plan &plan = item.plan;
  const clearhead_call &c = item.call;
  const Panel &P = item.panel(n);
  for (int v = 0; v < P.vectors; v++) {
    const Place *row = P.place + v * VL;
    const State &state = states[v];
    const vf l_i = state.l + state.l_lost;
    vf m_i = state.m, z_i = l_i, z_used = PAIRED<T> ? state.used : l_i;
    vf factor = splat(1.f), apart = {};
    const vi empty = l_i == 0.f;
    if (plan.raw) m_i *= plan.scale;
    const vf max_logit = empty ? splat(-INFINITY) : l_i == l_i ? m_i : l_i;
    if (c.sinks) {
      vf sink;
      for (int r = 0; r < VL; r++) sink[r] = c.sinks[row[r].h];
      const vf joint = vmax(sink, m_i);
      apart = vmax(splat(EXP2_LEAST), m_i - joint);
      factor = exp(m_i - joint);
      const vf of_sink = exp(sink - joint);
      z_i = z_i * factor + of_sink;
      z_used = z_used * factor + of_sink;
      m_i = joint;
    }
    m_i = empty ? splat(-INFINITY) : z_i == z_i ? m_i : z_i;
    z_i = empty ? vf{} : z_i;
    vf out_factor = empty ? vf{} : factor / z_used;
    factor = empty ? vf{} : factor / z_i;
    if (c.head_mask)
      for (int r = 0; r < VL; r++)
        out_factor[r] *= c.head_mask[item.b * c.head_mask_strides[0] +
                                     row[r].h * c.head_mask_strides[1]];

    const vf log_z = c.lse || plan.statistics ? log(z_i) : vf{};
    const vf lse = empty ? m_i : m_i + log_z;

    T *to[VL];
    const int rows = int(least(P.rows - v * VL, VL));
    store_rows(c.m, m_i, plan, item.b, row, rows);
    store_rows(c.z, z_i, plan, item.b, row, rows);
    store_rows(c.lse, lse, plan, item.b, row, rows);
    store_rows(c.max_logit, max_logit, plan, item.b, row, rows);
    for (int r = 0; r < rows; r++)
      to[r] = static_cast<T *>(c.out) + item.b * c.out_strides[0] + row[r].h * c.out_strides[1] +
              row[r].i * c.out_strides[2];
    if (plan.few)
      unpack_few(o, out_factor, to, rows, int(c.Dv));
    else
      unpack_rows(o + v * VL, out_factor, to, rows, int(c.Dv));
    if (!plan.statistics) continue;
    const Ended end = {factor, apart - log_z, empty};
    store_statistics(plan, item.b, P, v, rows, state, item.statistics(n), end);
  }
}

// Few rows: the end of a span that is an item of its own. The last one to end joins them all, in
// their order, whoever made them.
template <class T>
void end_piece(const Item &item, int64_t number) {
  const Plan &plan = item.plan;
  const int64_t head = number / plan.pieces;
  float *const pieces = plan.shared + plan.at_pieces;
  const auto piece = [&](int64_t n) { return pieces + n * plan.piece_floats; };
  Panel &P = item.panel(0);
  memcpy(piece(number), item.out(0), plan.few_floats * sizeof(float));
  memcpy(piece(number) + plan.few_floats, &P, sizeof P);
  int32_t *const ended = reinterpret_cast<int32_t *>(plan.shared) + head;
  if (__atomic_add_fetch(ended, 1, __ATOMIC_ACQ_REL) < plan.pieces) return;
  memset(item.total(0), 0, plan.out_floats * sizeof(float));
  for (int64_t n = head * plan.pieces; n < (head + 1) * plan.pieces; n++) {
    P.state[0] = reinterpret_cast<const Panel *>(piece(n) + plan.few_floats)->state[0];
    memcpy(item.out(0), piece(n), plan.few_floats * sizeof(float));
    end_span(item, 0);
  }
  finish_panel<T>(item, 0, P.total, item.total(0));
}

}  // namespace
