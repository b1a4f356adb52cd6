// The weights themselves, in a pass of their own:  w_ij = exp(s_ij - m_i) / z_i,  from the m and z that
// the first one left.
//
//   for an item of work: panels of rows i of one (b, key/value head), as in forward.inl.h
//     for each block of keys j, for each panel: 0 for what no row sees,
//       scores, weights in their place, and these from lanes to rows
//
// A key that a row does not see weighs 0, also where the row's own maximum is NaN.

namespace {

// Where the weights of row r of a panel stand, from key j on.
INLINE float *weights_of(const Item &item, const Panel &P, int r, int64_t j) {
  return item.call.weights + row_number(item.plan, item.b, P.place[r]) * item.call.S + j;
}

NOINLINE void scores_to_weights(float *s, int keys, vf m_i, vf factor, float scale) {
  for (int j = 0; j < keys; j++, s += ROWS) {
    const vf s_ij = load(s), w_ij = exp(s_ij * scale - m_i) * factor;
    store(s, s_ij == -INFINITY ? vf{} : w_ij);
  }
}

template <class T>
void fill_block(const Item &item, Block &block, int n) {
  const Plan &plan = item.plan;
  const Panel &P = item.panel(n);
  see_again<T>(item, block, n, [&](int v, int j0, int keys, float *s, vf m_i, vf factor) {
    const int rows = int(least(P.rows - v * VL, VL));
    float *row[VL];
    scores_to_weights(s, keys, m_i, factor, plan.raw ? plan.scale : 1.f);
    for (int r = 0; r < rows; r++) row[r] = weights_of(item, P, v * VL + r, block.n0 + j0);
    unpack_rows(s, splat(1.f), row, rows, keys);
  });
}

template <class T>
void run_weights_item(const Plan &plan, int64_t number, float *workspace) {
  const clearhead_call &c = *plan.call;
  const int64_t head = number / plan.groups, start = number % plan.groups * plan.group;
  const int panels = int(least(plan.group, plan.panels - start));
  const Item item = {plan, c, head / c.Hkv, head % c.Hkv, panels, workspace};
  int64_t first, end;
  start_panels<T>(item, start, first, end);
  for (int64_t n0 = 0; n0 < c.S; n0 += BLOCK) {
    for (int n = 0; n < panels; n++)
      for (int r = 0; r < item.panel(n).rows; r++)
        memset(weights_of(item, item.panel(n), r, n0), 0, least(BLOCK, c.S - n0) * sizeof(float));
    Block block;
    if (n0 + BLOCK <= first || n0 >= end || !start_block(item, n0, end, block)) continue;
    for (int n = 0; n < panels; n++) fill_block<T>(item, block, n);
  }
}

}  // namespace
