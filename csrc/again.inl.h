// What the passes after the first share: the scores of a block once more, with the m and z that the
// first one left.

namespace {

// m and 1 / z of the rows, with which a row that does not count adds 0.
INLINE void read_rows(const Plan &plan, int64_t b, const Panel &P, float *m, float *factor) {
  for (int r = 0; r < P.vectors * VL; r++) {
    const int64_t at = row_number(plan, b, P.place[r]);
    const float z_i = plan.call->z[at];
    const bool counts = r < P.rows && z_i != 0;
    m[r] = counts ? plan.call->m[at] : INFINITY;  // not 0: exp(s) may be infinite, and times 0 NaN
    factor[r] = counts ? 1 / z_i : 0;
  }
}

// Hands on the scores of what a panel sees of a block, a vector v of rows at a time:
// use(v, first key of the block, keys, scores, m_i, 1 / z_i).
template <class T, class Use>
INLINE void see_again(const Item &item, Block &block, int n, Use use) {
  const Panel &P = item.panel(n);
  Sight sight;
  if (!look(item, P, block, sight)) return;
  if (!block.loaded) load_keys<T>(item, block);
  block.loaded = true;
  alignas(64) float m[ROWS], factor[ROWS], top[ROWS];
  read_rows(item.plan, item.b, P, m, factor);
  for (int v = 0; v < P.vectors; v++) store(top + v * VL, splat(-INFINITY));
  for (const Run *run = sight.runs; run < sight.runs + sight.count; run++) {
    score_run<T>(item, P, block, sight.data, *run, item.q(n), top);
    for (int v = run->v0; v < run->v1; v++)
      use(v, run->j0, run->j1 - run->j0, item.scores() + run->j0 * ROWS + v * VL,
          load(m + v * VL), load(factor + v * VL));
  }
}

}  // namespace
