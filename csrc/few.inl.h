// A block of keys for a panel of few rows: steps 1 to 5 of forward.inl.h, by the products of
// decode.inl.h. Scores and weights are rows of keys here, so exp2 takes VL keys of a row at a time.
// What looks at data or gathers statistics (softmax.inl.h, statistics.inl.h) wants the rows in the
// lanes: where there is such, the scores make a detour by a tile.

namespace {

INLINE float *few_scores_of(const Item &item) { return item.weights(); }
INLINE float *few_weights_of(const Item &item) { return item.weights() + FEW * FEW_STRIDE; }
INLINE float *few_words_of(const Item &item) { return item.weights() + 2 * FEW * FEW_STRIDE; }

template <class T>
NOINLINE void start_few(const Item &item, const Panel &P) {
  const clearhead_call &c = item.call;
  const int64_t few = item.plan.few, stride = few_stride(int(c.D));
  memset(item.q(0), 0, size_t(few * stride) * sizeof(float));
  for (int64_t i = 0; i < few; i++) {
    const Place &at = P.place[i];
    const T *q_i = static_cast<const T *>(c.query) + item.b * c.query_strides[0] +
                   at.h * c.query_strides[1] + at.i * c.query_strides[2];
    key_rows(q_i, 0, 1, int(c.D), item.q(0) + i * stride);
  }
}

// Rows of scores to lanes, and back.
NOINLINE void few_to_tile(const float *s, int few, const Run &run, float *tile) {
  for (int j = run.j0; j < run.j1; j += VL) {
    vf x[VL] = {};
    for (int i = 0; i < few; i++) x[i] = load_as_float(s + i * FEW_STRIDE + j);
    transpose(x);
    for (int r = 0; r < least(run.j1 - j, VL); r++) store(tile + (j + r) * ROWS, x[r]);
  }
}

NOINLINE void few_from_tile(const float *tile, int few, const Run &run, float *s) {
  for (int j = run.j0; j < run.j1; j += VL) {
    vf x[VL];
    for (int r = 0; r < VL; r++)
      x[r] = j + r < run.j1 ? load(tile + (j + r) * ROWS) : splat(-INFINITY);
    transpose(x);
    for (int i = 0; i < few; i++) convert(x[i], s + i * FEW_STRIDE + j);
  }
}

// Blocks the keys that a row does not see by its position.
NOINLINE void cut_few(const Panel &P, int few, const Run &run, int n0, float *s) {
  vi lanes = {};
  for (int r = 0; r < VL; r++) lanes[r] = r;
  for (int i = 0; i < few; i++, s += FEW_STRIDE)
    for (int j = run.j0; j < run.j1; j += VL) {
      const vi n = lanes + (n0 + j);
      const vf s_i = load_as_float(s + j);
      const vi blocked = (n < P.first[i]) | (n >= P.end[i]);
      convert(blocked ? splat(-INFINITY) : s_i, s + j);
    }
}

// The rest of step 1, and what statistics want of the scores.
NOINLINE void detour(const Item &item, const Block &block, const Sight &sight, bool ruled) {
  const clearhead_call &c = item.call;
  const Plan &plan = item.plan;
  const Panel &P = item.panel(0);
  const Run &run = sight.runs[0];
  const int n0 = int(block.n0);
  float *const s = few_scores_of(item), *const tile = item.scores();
  few_to_tile(s, plan.few, run, tile);
  if (ruled) {
    alignas(64) float m[VL] = {};  // step 2 is taken later
    for (int n = 0; n < 2; n++)
      if (sight.data.added[n])
        read_dense(c.added[n], item.b, P.place, n0 + run.j0, n0 + run.j1,
                   item.added(n) + run.j0 * ROWS);
    rule_scores(plan, P, sight.data, run, n0, tile, m);
    few_from_tile(tile, plan.few, run, s);
  }
  if (plan.statistics & MASSES) catch_marks(run, n0, tile, item.statistics(0));
  if (plan.statistics & TOP) take_top(run, n0, tile, int(c.top_k), item.statistics(0));
}

// Step 2.
NOINLINE vf few_maxima(const float *s, int few, const Run &run, vf m) {
  for (int i = 0; i < few; i++, s += FEW_STRIDE) {
    vf top = splat(m[i]);
    for (int j = run.j0; j < run.j1; j += VL) top = vmax(load_as_float(s + j), top);
    m[i] = greatest(top);
  }
  return m;
}

// Step 3: p_ij and, if these are others, its words.
template <bool PAIRS>
NOINLINE void few_exponentials(const float *s, int few, const Run &run, vf base, float exponent,
                               float *p, float *words) {
  for (int i = 0; i < few; i++, s += FEW_STRIDE, p += FEW_STRIDE, words += FEW_STRIDE) {
    const vf base_i = splat(base[i]);
    for (int j = run.j0; j < run.j1; j += VL)
      convert(exp2(load_as_float(s + j) - base_i, exponent), p + j);
    if constexpr (PAIRS)
      for (int j = run.j0; j < run.j1; j += 2 * VL)
        convert(pairs_of<true>(load_as_float(p + j), load_as_float(p + j + VL)), words + j / 2);
  }
}

// Entropy and distance.
NOINLINE void few_statistics(const Item &item, const Block &block, const Run &run, vf base,
                             Sums &sums) {
  const Plan &plan = item.plan;
  alignas(64) float base_i[VL];
  store(base_i, base);
  const vi own = load(item.panel(0).own) - (int(block.n0) + run.j0);
  float *const s = item.scores() + run.j0 * ROWS;
  const auto f = plan.statistics & DISTANCE ? exponentials<false, 1, ENTROPY | DISTANCE>
                                            : exponentials<false, 1, ENTROPY>;
  f(s, s, run.j1 - run.j0, base_i, plan.exponent, &own, &sums);
}

template <class T>
void see_few(const Item &item, const Block &block) {
  constexpr bool PAIRS = PAIRED<T>;
  const clearhead_call &c = item.call;
  const Plan &plan = item.plan;
  const int few = plan.few;
  Panel &P = item.panel(0);
  Sight sight;
  if (!look(item, P, block, sight)) return;
  const Run &run = sight.runs[0];  // one vector of rows has no other
  const Data &data = sight.data;
  float *const s = few_scores_of(item), *const p = few_weights_of(item);
  float *const words = PAIRS ? few_words_of(item) : p;

  const FewRows<T> K = {key_of<T>(item, block.n0), c.key_strides[2], int(c.D)};
  const FewRows<T> values = {value_of<T>(item, block.n0), c.value_strides[2], int(c.Dv)};
  if constexpr (MATRICES<T>)
    Matrices<T>::few_scores(K, values, item.q(0), few, run, item.key(), item.scores(), s);
  else
    BY_FEW(few, few_scores, K, values, item.q(0), run, item.key(), s)
  for (int i = 0; i < few; i++) convert(splat(-INFINITY), s + i * FEW_STRIDE + run.j1);
  const bool ruled = !plan.raw || data.mask || data.key_mask || data.doc_k;
  if (run.cut && !ruled) cut_few(P, few, run, int(block.n0), s);
  if (ruled || plan.statistics) detour(item, block, sight, ruled);

  const vf m = few_maxima(s, few, run, P.state[0].m), base = base_of(m);
  const Move old = move(P.state[0].m, base, plan.exponent);
  few_exponentials<PAIRS>(s, few, run, base, plan.exponent, p, words);
  Sums sums = {};
  if (plan.statistics & (ENTROPY | DISTANCE)) few_statistics(item, block, run, base, sums);

  if constexpr (MATRICES<T>) {
    sums.l = Matrices<T>::few_weigh(values, K, run, s, p, few_words_of(item), few, item.value(),
                                    item.out(0), old.a);
    return add_sums(P.state[0], m, old, sums);
  }
  const FewRows<T> V = {values.at + run.j0 * values.stride, values.stride, values.size};
  const FewRows<T> next = {K.at + (BLOCK + run.j0) * K.stride, K.stride, K.size};
  const FewWeights W = {s + run.j0, p + run.j0, words + run.j0 / (PAIRS ? 2 : 1)};
  FewSums of_p[FEW];
  const int stretch = PAIRS ? BLOCK : KEY_STRETCH;
  const Stretches keys = {run.j1 - run.j0, int(most(least(run.j1, stretch) - run.j0, 0))};
  BY_FEW(few, few_weigh, V, next, W, keys, item.out(0), old.a, of_p)
  for (int i = 0; i < few; i++) sums.l[i] = of_p[i].l[0], sums.used[i] = of_p[i].used[0];
  add_sums(P.state[0], m, old, sums);
}

// The end of a span.
NOINLINE void join_few(const Item &item, vf a, vf c) {
  float *o = item.out(0), *total = item.total(0);
  const int64_t vectors = few_vectors(item.call.Dv);
  for (int i = 0; i < item.plan.few; i++)
    for (int64_t n = 0; n < vectors; n++, o += VL, total += VL) {
      store(total, joined(load(total), load(o), splat(a[i]), splat(c[i])));
      store(o, vf{});
    }
}

// Rows times a factor, to the first n of the addresses.
template <class T>
NOINLINE void unpack_few(const float *o, vf factor, T *const *row, int n, int Dv) {
  if constexpr (MATRICES<T>) {
    for (int i = 0; i < n; i++)
      Matrices<T>::few_unpack(o + i * few_vectors(Dv) * VL, splat(factor[i]), row[i], Dv);
    return;
  }
  for (int i = 0; i < n; i++)
    for (int64_t c = 0; c < few_vectors(Dv); c++, o += VL)
      store_from_float(load(o) * splat(factor[i]), row[i] + first_column(c, Dv), Dv);
}

}  // namespace
