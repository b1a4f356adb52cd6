// The second pass:  key_mass_j = sum_i w_ij,  from the m and z that the first one left.
//
//   for an item of work: MASS_BLOCKS blocks of keys j of one (b, key/value head)
//     for panels of its query heads h, in groups
//       for each block, for each panel: scores, and exp(s_ij - m_i) / z_i added up lane by lane
//     the lanes of each (h, j) added up
//
// Sums run over the panels in their order, so they do not know the threads.

namespace {

NOINLINE void add_masses(const float *s, int keys, vf m_i, vf factor, float scale, float *mass) {
  for (int j = 0; j < keys; j++, s += ROWS, mass += VL)
    store(mass, load(mass) + exp(load(s) * scale - m_i) * factor);
}

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

template <class T>
void add_block(const Item &item, Block &block, int n, float *mass) {
  const Plan &plan = item.plan;
  const Panel &P = item.panel(n);
  Sight sight;
  if (!look(item, P, block, sight)) return;
  if (!block.loaded) load_keys<T>(item, block);
  block.loaded = true;
  alignas(64) float m[ROWS], factor[ROWS], top[ROWS];
  read_rows(plan, item.b, P, m, factor);
  for (int v = 0; v < P.vectors; v++) store(top + v * VL, splat(-INFINITY));
  for (const Run *run = sight.runs; run < sight.runs + sight.count; run++) {
    score_run<T>(item, P, block, sight.data, *run, item.q(n), top);
    for (int v = run->v0; v < run->v1; v++)
      add_masses(item.scores() + run->j0 * ROWS + v * VL, run->j1 - run->j0, load(m + v * VL),
                 load(factor + v * VL), plan.raw ? plan.scale : 1.f, mass + run->j0 * VL);
  }
}

template <class T>
void run_mass_item(const Plan &plan, int64_t number, float *workspace) {
  const clearhead_call &c = *plan.call;
  const int64_t parts = plan.items / (c.B * c.Hkv), head = number / parts;
  const int64_t start = number % parts * MASS_BLOCKS * BLOCK;
  const int64_t stop = least(start + MASS_BLOCKS * BLOCK, c.S);
  constexpr int64_t FLOATS = MASS_BLOCKS * BLOCK * VL;  // of a query head
  float *const masses = workspace + plan.at_mass;
  memset(masses, 0, plan.G * FLOATS * sizeof(float));
  for (int64_t p = 0; p < plan.panels; p += plan.group) {
    const int panels = int(least(plan.group, plan.panels - p));
    const Item item = {plan, c, head / c.Hkv, head % c.Hkv, panels, workspace};
    int64_t first = c.S, end = 0;
    for (int n = 0; n < panels; n++) {
      const Panel &P = item.panel(n);
      start_panel<T>(item, p + n, n);
      for (int v = 0; v < P.vectors; v++) first = least(first, P.lo[v]), end = most(end, P.hi[v]);
    }
    for (int64_t n0 = most(start, first / BLOCK * BLOCK); n0 < least(stop, end); n0 += BLOCK) {
      Block block;
      if (!start_block(item, n0, end, block)) continue;
      for (int n = 0; n < panels; n++)
        add_block<T>(item, block, n, masses + (p + n) % plan.G * FLOATS + (n0 - start) * VL);
    }
  }
  for (int64_t g = 0; g < plan.G; g++)
    for (int64_t j = start; j < stop; j++) {
      const float *lanes = masses + g * FLOATS + (j - start) * VL;
      float sum = 0;
      for (int r = 0; r < VL; r++) sum += lanes[r];
      c.key_mass[((head / c.Hkv * c.H) + head % c.Hkv * plan.G + g) * plan.S_stored + j] = sum;
    }
}

}  // namespace
