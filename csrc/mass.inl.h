// A second pass:  key_mass_j = sum_i w_ij,  from the m and z that the first one left.
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
    int64_t first, end;
    start_panels<T>(item, p, first, end);
    for (int64_t n0 = most(start, first / BLOCK * BLOCK); n0 < least(stop, end); n0 += BLOCK) {
      Block block;
      if (!start_block(item, n0, end, block)) continue;
      for (int n = 0; n < panels; n++) {
        float *mass = masses + (p + n) % plan.G * FLOATS + (n0 - start) * VL;
        see_again<T>(item, block, n, [=](int, int j0, int keys, float *s, vf m_i, vf factor) {
          add_masses(s, keys, m_i, factor, plan.raw ? plan.scale : 1.f, mass + j0 * VL);
        });
      }
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
