// The forward pass:  out_i = sum_j exp(s_ij - m_i) v_j / sum_j exp(s_ij - m_i),  with no matrix of
// scores in memory. It does not drop weights or return them.
//
//   for an item of work: up to MAX_PANELS panels of rows i of one (b, key/value head)
//     for each block of BLOCK keys j, from key 0 upwards, that some row of these may see
//       for each panel: the runs of the block that its vectors of rows see
//         1, 2   scores and their maximum       (softmax.inl.h)
//         3, 4   weights and their sum
//         5      o_i = o_i exp(m_old - m_i) + sum_j p_ij v_j     (microkernel.inl.h)
//       after each SPAN_BLOCKS blocks, counted from key 0: the sums join those of the spans before
//     6   out_i = o_i / l_i, with the sink of the head joined in            (finish.inl.h)
//
// The products of few rows (Plan::few) are those of decode.inl.h, and where their heads are few as
// well, each span is an item of its own.
//
// A row's bits depend on its own keys only. Lanes do not mix; sums run over the keys of a block in
// their order, over the blocks of a span and over spans in theirs; a block in which a row sees
// nothing multiplies its sums by exp2(0) = 1 and adds 0.

namespace {

// -- panels ----------------------------------------------------------------------------------------

template <class T>
void start_panel(const Item &item, int64_t number, int n) {
  const clearhead_call &c = item.call;
  Panel &P = item.panel(n);
  place_rows(item.plan, item.g, number, P);
  find_ranges(c, P);
  P.fresh = !item.plan.few;
  if (c.slopes || c.doc_q) read_row_rules(c, item.b, P);
  if (item.plan.few && !MATRICES<T>) start_few<T>(item, P);
  for (int v = 0; v < P.vectors; v++) {
    P.state[v] = P.total[v] = NOTHING;
    if (item.plan.few && !MATRICES<T>) continue;
    const T *row[VL];
    for (int r = 0; r < VL; r++) {
      const Place &at = P.place[v * VL + r];
      row[r] = static_cast<const T *>(c.query) + item.b * c.query_strides[0] +
               at.h * c.query_strides[1] + at.i * c.query_strides[2];
    }
    pack_query(row, item.q(n) + v * VL, int(c.D));
  }
}

// -- blocks ----------------------------------------------------------------------------------------

// Steps 3 and 4 of one run.
template <class T, int WANTED>
void weights_of_run(const Item &item, const Block &block, const Panel &P, const Run &run,
                    const float *base, Sums *sums) {
  constexpr bool PAIRS = PAIRED<T>;
  const int v0 = run.v0 * VL, keys = run.j1 - run.j0;
  float *s = item.scores() + run.j0 * ROWS + v0;
  const float exponent = item.plan.exponent;
  vi own[NV];
  for (int v = run.v0; v < run.v1; v++)
    own[v - run.v0] = load(P.own + v * VL) - (int(block.n0) + run.j0);
  base += v0, sums += run.v0;
  switch (run.v1 - run.v0) {
    case 1: return exponentials<PAIRS, 1, WANTED>(s, s, keys, base, exponent, own, sums);
    case 2: return exponentials<PAIRS, 2, WANTED>(s, s, keys, base, exponent, own, sums);
    default: return exponentials<PAIRS, 3, WANTED>(s, s, keys, base, exponent, own, sums);
  }
}

// Steps 3 to 5 of a panel and a block.
template <class T, int WANTED>
void weigh_block(const Item &item, const Block &block, const Sight &sight, int n, const float *base,
                 const float *a, Sums *sums) {
  constexpr bool PAIRS = PAIRED<T>;
  constexpr int A_WORD = PAIRS ? 2 : 1;  // keys
  Panel &P = item.panel(n);
  const int Dv = int(item.call.Dv), count = sight.count;
  if constexpr (MATRICES<T>) {
    foresee<T>(item, block, n, 1, 2);
    const bool fresh = P.fresh;
    P.fresh = false;
    return Matrices<T>::template weigh<WANTED>(
        {sight.runs, sight.runs + count, P, int(block.n0), item.plan.exponent, base, item.scores()},
        block.V, item.out(n), a, Dv, fresh, sums);
  }
  for (int r = 0; r < count; r++) {
    weights_of_run<T, WANTED>(item, block, P, sight.runs[r], base, sums);
    foresee<T>(item, block, n, count + r, 2 * count);
  }
  int v0 = NV, v1 = 0;
  for (const Run *run = sight.runs; run < sight.runs + sight.count; run++)
    v0 = int(least(v0, run->v0)), v1 = int(most(v1, run->v1));
  if (v1 - v0 < P.vectors) sums_so_far(item, n);
  constexpr int STRETCH = PAIRS ? BLOCK : KEY_STRETCH;
  static_assert(2 * KEY_STRETCH >= BLOCK, "Steps knows of two stretches");
  Step all[2 * (2 * NV + 1)], *end = all;
  Steps steps = {all, all, all};
  for (int start = 0; start < BLOCK; start += STRETCH) {
    for (const Run *run = sight.runs; run < sight.runs + sight.count; run++) {
      const int j0 = int(most(run->j0, start)), j1 = int(least(run->j1, start + STRETCH));
      if (j0 >= j1) continue;
      *end++ = {item.scores() + (run->j0 + (j0 - run->j0) / A_WORD) * ROWS + v0 * VL,
                block.V.at + j0 / A_WORD * block.V.stride, (j1 - j0 + A_WORD - 1) / A_WORD,
                run->v0 - v0, run->v1 - v0};
    }
    if (steps.second == all) steps.second = end;
  }
  steps.end = end;
  const bool fresh = P.fresh;
  P.fresh = false;
  float *const o = item.out(n) + v0 * VL;
  a += v0 * VL;
  switch (v1 - v0) {
    case 1: return weigh<PAIRS, 1>(steps, block.V.stride, o, a, Dv, fresh);
    case 2: return weigh<PAIRS, 2>(steps, block.V.stride, o, a, Dv, fresh);
    default: return weigh<PAIRS, 3>(steps, block.V.stride, o, a, Dv, fresh);
  }
}

template <class T>
void see_block(const Item &item, Block &block, int n) {
  Panel &P = item.panel(n);
  constexpr int BOTH = ENTROPY | DISTANCE;
  const int statistics = item.plan.statistics;
  Sight sight;
  if (!look(item, P, block, sight)) return;
  if (!block.loaded) load_keys<T>(item, block), load_values<T>(item, block);
  block.loaded = true;

  alignas(64) float m[ROWS], base[ROWS], a[ROWS];
  Move old[NV];
  Sums sums[NV];
  for (int v = 0; v < P.vectors; v++) sums[v] = Sums{}, store(m + v * VL, P.state[v].m);
  for (const Run *run = sight.runs; run < sight.runs + sight.count; run++) {
    foresee<T>(item, block, n, int(run - sight.runs), sight.count * 2);
    score_run<T>(item, P, block, sight.data, *run, item.q(n), m);
  }
  for (int v = 0; v < P.vectors; v++) {
    const vf base_i = base_of(load(m + v * VL));
    old[v] = move(P.state[v].m, base_i, item.plan.exponent);
    store(base + v * VL, base_i);
    store(a + v * VL, old[v].a);
  }

  if (!block.finite) memset(item.cut(), 0, item.plan.out_floats * sizeof(float));
  for (const Run *run = sight.runs; run < sight.runs + sight.count; run++) {
    if (statistics & MASSES) catch_marks(*run, int(block.n0), item.scores(), item.statistics(n));
    if (statistics & TOP)
      take_top(*run, int(block.n0), item.scores(), int(item.call.top_k), item.statistics(n));
    if (!block.finite) spoil<T>(item, block, *run, item.cut());
  }
  const int wanted = statistics & BOTH;
  const auto weigh_by = wanted == 0         ? weigh_block<T, 0>
                        : wanted == ENTROPY ? weigh_block<T, ENTROPY>
                                            : weigh_block<T, BOTH>;
  weigh_by(item, block, sight, n, base, a, sums);
  if (!block.finite) add_spoilt(item.cut(), item.out(n), int(item.call.Dv), P.vectors);
  for (int v = 0; v < P.vectors; v++)
    add_sums(P.state[v], load(m + v * VL), old[v], sums[v]);
}

// -- items -----------------------------------------------------------------------------------------

// Starts the panels of an item from `start` on; the keys that some row of them sees by its position.
template <class T>
INLINE void start_panels(const Item &item, int64_t start, int64_t &first, int64_t &end) {
  first = item.call.S, end = 0;
  for (int n = 0; n < item.panels; n++) {
    const Panel &P = item.panel(n);
    start_panel<T>(item, start + n, n);
    for (int v = 0; v < P.vectors; v++) first = least(first, P.lo[v]), end = most(end, P.hi[v]);
  }
}

template <class T>
void run_item(const Plan &plan, int64_t number, float *workspace) {
  const clearhead_call &c = *plan.call;
  const int64_t head = number / (plan.groups * plan.pieces);
  // The last rows see most when causal: a long item at the end would keep the others waiting.
  const int64_t start = (plan.groups - 1 - number % plan.groups) * plan.group;
  const int panels = int(least(plan.group, plan.panels - start));
  const Item item = {plan, c, head / c.Hkv, head % c.Hkv, panels, workspace};
  int64_t first, end;
  start_panels<T>(item, start, first, end);
  for (int n = 0; n < panels; n++) {
    if (plan.few) memset(item.out(n), 0, plan.few_floats * sizeof(float));
    if (plan.statistics & (MASSES | TOP))
      start_statistics(c, item.b, item.panel(n), item.statistics(n));
  }
  constexpr int64_t SPAN = SPAN_BLOCKS * BLOCK;
  if (plan.pieces > 1) {
    const int64_t span = (plan.first_span + number % plan.pieces) * SPAN;
    first = most(first, span), end = least(end, span + SPAN);
  }
  const bool spans = end > first / SPAN * SPAN + SPAN;
  for (int n = 0; spans && n < panels; n++)
    memset(item.total(n), 0, plan.out_floats * sizeof(float));
  for (int64_t n0 = first / BLOCK * BLOCK; n0 < end; n0 += BLOCK) {
    Block block;
    block.number = (n0 - first) / BLOCK;
    block.next = plan.foresees ? number + plan.workers : plan.items;
    if (start_block(item, n0, end, block))
      for (int n = 0; n < panels; n++)
        plan.few ? see_few<T>(item, block) : see_block<T>(item, block, n);
    if (spans && ((n0 + BLOCK) % SPAN == 0 || n0 + BLOCK >= end))
      for (int n = 0; n < panels; n++) end_span(item, n);
  }
  if (plan.pieces > 1) return end_piece<T>(item, number);
  for (int n = 0; n < panels; n++)
    finish_panel<T>(item, n, spans ? item.panel(n).total : item.panel(n).state,
                    spans ? item.total(n) : sums_so_far(item, n));
}

}  // namespace
