// An item of work and the blocks of keys that it passes over: which panels may see a block, and its
// keys and values as the products want them.

namespace {

struct Item {
  const Plan &plan;
  const clearhead_call &call;
  int64_t b, g;  // batch item and key/value head
  int panels;
  float *workspace;

  float *q(int n) const { return workspace + plan.at_q + n * plan.q_floats; }
  float *out(int n) const { return workspace + plan.at_out + n * plan.out_floats; }
  float *total(int n) const { return workspace + plan.at_total + n * plan.out_floats; }
  Panel &panel(int n) const {
    return *reinterpret_cast<Panel *>(workspace + plan.at_panels + n * plan.panel_floats);
  }
  Statistics &statistics(int n) const {
    return *reinterpret_cast<Statistics *>(workspace + plan.at_statistics +
                                           n * plan.statistics_floats);
  }
  float *scores() const { return workspace + plan.at_scores; }
  float *weights() const { return workspace + plan.at_weights; }
  float *cut() const { return workspace + plan.at_cut; }
  float *mask() const { return workspace + plan.at_mask; }
  float *added(int n) const { return workspace + plan.at_added[n]; }
  float *key() const { return workspace + plan.at_key; }
  float *value() const { return workspace + plan.at_value; }
};

// The output of a panel so far, which is 0 where nothing was seen.
INLINE float *sums_so_far(const Item &item, int n) {
  if (item.panel(n).fresh) memset(item.out(n), 0, item.plan.out_floats * sizeof(float));
  item.panel(n).fresh = false;
  return item.out(n);
}

// One block of keys, its rows brought in when the first panel asks.
struct Block {
  int64_t n0, n1;
  int keys;  // that are read: those that some row of the item sees, in whole tiles
  bool loaded, finite;  // all of V, as the caller has it: V here has 0 for what is not
  Rows K, V;
  Data data;
  int64_t number, next;  // of the blocks of this item, and of the item that foresee.inl.h looks at
};

// What a panel sees of a block.
struct Sight {
  Run runs[2 * NV + 1];
  int count;
  Data data;
};

// False if no row of the item may see the block.
NOINLINE bool start_block(const Item &item, int64_t n0, int64_t end, Block &block) {
  const clearhead_call &c = item.call;
  block.n0 = n0, block.n1 = least(n0 + BLOCK, c.S);
  block.keys = int(least(to_tile(least(end, block.n1) - n0), block.n1 - n0));
  block.loaded = false, block.finite = true;
  block.data = {};
  for (int n = 0; n < 2; n++)
    if (c.added[n].data) block.data.added[n] = item.added(n);
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
INLINE bool read_mask(const Item &item, const Panel &P, const Block &block, const Sight &sight) {
  vi seen = {};
  for (const Run *run = sight.runs; run < sight.runs + sight.count; run++)
    for (int v = run->v0; v < run->v1; v++) {
      float *to = item.mask() + run->j0 * ROWS + v * VL;
      read_dense(item.call.mask, item.b, P.place + v * VL, block.n0 + run->j0,
                 block.n0 + run->j1, to);
      for (int j = run->j0; j < run->j1; j++, to += ROWS) seen |= load(to) != 0.f;
    }
  return any(seen);
}

// False if the panel sees nothing of the block.
NOINLINE bool look(const Item &item, const Panel &P, const Block &block, Sight &sight) {
  sight.count = cut_runs(P, block.n0, block.keys, sight.runs);
  if (sight.count == 0) return false;
  sight.data = block.data;
  if (!shares_documents(P, block, sight.data)) return false;
  if (!item.call.mask.data) return true;
  sight.data.mask = item.mask();
  return read_mask(item, P, block, sight);
}

// -- keys and values -------------------------------------------------------------------------------

template <class T>
INLINE const T *key_of(const Item &item, int64_t j) {
  const clearhead_call &c = item.call;
  return static_cast<const T *>(c.key) + item.b * c.key_strides[0] + item.g * c.key_strides[1] +
         j * c.key_strides[2];
}

template <class T>
INLINE const T *value_of(const Item &item, int64_t j) {
  const clearhead_call &c = item.call;
  return static_cast<const T *>(c.value) + item.b * c.value_strides[0] +
         item.g * c.value_strides[1] + j * c.value_strides[2];
}

template <class T>
void load_keys(const Item &item, Block &block) {
  const clearhead_call &c = item.call;
  block.K = key_rows(key_of<T>(item, block.n0), c.key_strides[2], block.keys, int(c.D), item.key());
  const int64_t missing = to_tile(block.keys) - block.keys;  // as in copy_keys of decode.inl.h
  if (missing > 0)
    memset(item.key() + block.keys * block.K.stride, 0,
           size_t(missing * block.K.stride) * sizeof(float));
}

template <class T>
void load_values(const Item &item, Block &block) {
  const int Dv = int(item.call.Dv);
  if constexpr (MATRICES<T>)
    block.V = Matrices<T>::values(value_of<T>(item, block.n0), item.call.value_strides[2], block.keys,
                                  Dv, item.value(), block.finite);
  else
    block.V = value_rows(value_of<T>(item, block.n0), item.call.value_strides[2], block.keys, Dv,
                       item.value(), block.finite);
}

// Adds the values that are not finite to the sums of the rows that see them.
template <class T>
NOINLINE void spoil(const Item &item, const Block &block, const Run &run, float *o) {
  for (int j = run.j0; j < run.j1; j++) {
    const T *v_j = value_of<T>(item, block.n0 + j);
    for (int d = 0; d < item.call.Dv; d++) {
      const float v_jd = one_as_float(v_j + d);
      if (v_jd * 0 == 0) continue;
      for (int r = run.v0 * VL; r < run.v1 * VL; r++)
        if (item.scores()[j * ROWS + r] != -INFINITY) o[d * ROWS + r] += v_jd;
    }
  }
}

NOINLINE void add_spoilt(const float *cut, float *o, int Dv, int vectors) {
  for (int d = 0; d < Dv; d++)
    for (int v = 0; v < vectors; v++) {
      const vf bad = load(cut + d * ROWS + v * VL);
      float *o_id = o + d * ROWS + v * VL;
      store(o_id, bad == 0.f ? load(o_id) : load(o_id) + bad);
    }
}

// -- scores ----------------------------------------------------------------------------------------

// Steps 1 and 2 of one run; m is the maximum so far.
template <class T>
void score_run(const Item &item, const Panel &P, const Block &block, const Data &data,
               const Run &run, const float *q, float *m) {
  const clearhead_call &c = item.call;
  const int n0 = int(block.n0), v0 = run.v0 * VL;
  const bool last = item.plan.raw && !data.mask && !data.key_mask && !data.doc_k;
  if constexpr (MATRICES<T>) {
    Matrices<T>::scores(block.K, q, P, run, n0, last, item.scores(), m);
  } else {
    constexpr bool PAIRS = PAIRED<T>;
    const int words = PAIRS ? (int(c.D) + 1) / 2 : int(c.D);
    float *s = item.scores() + v0;
    switch (run.v1 - run.v0) {
      case 1: scores<PAIRS, 1>(block.K, q + v0, words, P, run, n0, last, s, m + v0); break;
      case 2: scores<PAIRS, 2>(block.K, q + v0, words, P, run, n0, last, s, m + v0); break;
      default: scores<PAIRS, 3>(block.K, q + v0, words, P, run, n0, last, s, m + v0);
    }
  }
  if (last) return;
  for (int n = 0; n < 2; n++)
    for (int v = run.v0; data.added[n] && v < run.v1; v++)
      read_dense(c.added[n], item.b, P.place + v * VL, n0 + run.j0, n0 + run.j1,
                 item.added(n) + run.j0 * ROWS + v * VL);
  rule_scores(item.plan, P, data, run, n0, item.scores(), m);
}

}  // namespace
