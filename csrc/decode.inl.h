// The two products for a panel of few rows (decoding with a cache): K and V are read once, where
// they lie, whole vectors at a time. It does not: walk the blocks, apply the rules, or make the
// weights (forward.inl.h does, the same for any panel).
//
//   few_scores   s_ij = sum_d q_id k_jd              1, 2: VL keys j in the lanes, for R rows i
//     for VL keys j: for VL (or VL pairs of) numbers d: load, transpose, multiply with each row
//   few_weigh    o_id = o_id a_i + sum_j p_ij v_jd   5: VL columns d in the lanes, for R rows i
//     for a few vectors of columns d: for each key j of the block: load, multiply with each row
//
// The sums are those of microkernel.inl.h, d and j upwards, one number after the other: a row has
// the same bits whichever of the two made it. A dot product with d in the lanes would be simpler,
// and would not. Where products go by PAIRS (pairs.inl.h), these are of neighbours d, or of keys j.

namespace {

constexpr int FEW = VL < MOST_FEW ? VL : MOST_FEW;
constexpr bool LOW_FIRST = __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__;

// Calls f<T, R> for R = few: the rows of a panel, and lanes beyond them, which repeat the last.
#define BY_FEW(few, f, ...)                   \
  switch (few) {                              \
    case 1: f<T, 1>(__VA_ARGS__); break;      \
    case 2: f<T, 2>(__VA_ARGS__); break;      \
    case 4: f<T, 4>(__VA_ARGS__); break;      \
    default: f<T, FEW>(__VA_ARGS__);          \
  }

// Rows j of a tensor where they lie.
template <class T>
struct FewRows {
  const T *at;
  int64_t stride;
  int size;  // of a row

  // Asks for what is read next, V while K is and K of the next block while V is, so that the memory
  // is never idle: keys are read in too many places at a time for the processor to foresee.
  INLINE void expect(int64_t j, int64_t d) const {
    if (d < size) __builtin_prefetch(at + j * stride + d, 0, 2);
  }
};

// -- scores ----------------------------------------------------------------------------------------

INLINE vf low_half(vu pair, bfloat16) { return vf(pair << 16); }
INLINE vf high_half(vu pair, bfloat16) { return vf(pair & 0xffff0000u); }
INLINE vf low_half(vu pair, float16) {
  return from_float16(__builtin_convertvector(pair & 0xffffu, vh));
}
INLINE vf high_half(vu pair, float16) {
  return from_float16(__builtin_convertvector(pair >> 16, vh));
}

template <bool PAIRS, int R>
INLINE void add_products(vf k_d, const float *q, vf (&s)[R]) {
  UNROLL for (int i = 0; i < R; i++) s[i] = add_product<PAIRS>(s[i], k_d, splat_word<PAIRS>(q + i));
}

// From d on 2 VL numbers of VL keys, as pairs: half the shuffles that they would need one by one.
template <class T, int R>
INLINE void dot_pairs(const T *const *k, const FewRows<T> &next, const float *q, int d,
                      vf (&s)[R]) {
  vf x[VL];
  UNROLL for (int j = 0; j < VL; j++) x[j] = load_bytes<vf>(k[j] + d), next.expect(j, d);
  transpose(x);
  if constexpr (PAIRED<T>) {
    UNROLL for (int c = 0; c < VL; c++) add_products<true>(x[c], q + (d / 2 + c) * ROWS, s);
    return;
  }
  UNROLL for (int c = 0; c < VL; c++) {
    const vf low = low_half(vu(x[c]), T{}), high = high_half(vu(x[c]), T{});
    add_products<false>(LOW_FIRST ? low : high, q + (d + 2 * c) * ROWS, s);
    add_products<false>(LOW_FIRST ? high : low, q + (d + 2 * c + 1) * ROWS, s);
  }
}
template <int R>
INLINE void dot_pairs(const float *const *, const FewRows<float> &, const float *, int,
                      vf (&)[R]) {}

INLINE vf load_words(const void *from, size_t bytes) {
  vf x = {};
  memcpy(&x, from, bytes);
  return x;
}

// Of s_ij for VL keys j, what one stretch [d, D) adds.
template <class T, int R>
INLINE void few_dot(const T *const *k, const FewRows<T> &next, const float *q, int d, int D,
                    vf (&s)[R]) {
  vf x[VL];
  if (sizeof(T) == 2)
    for (; d + 2 * VL <= D; d += 2 * VL) dot_pairs(k, next, q, d, s);
  if constexpr (PAIRED<T>) {
    if (d == D) return;
    for (int j = 0; j < VL; j++)
      x[j] = load_words(k[j] + d, size_t(D - d) * sizeof(T)), next.expect(j, d);
    transpose(x);
    for (int c = 0; d < D; d += 2, c++) add_products<true>(x[c], q + d / 2 * ROWS, s);
    return;
  }
  for (; d + VL <= D; d += VL) {
    UNROLL for (int j = 0; j < VL; j++) x[j] = load_as_float(k[j] + d), next.expect(j, d);
    transpose(x);
    UNROLL for (int c = 0; c < VL; c++) add_products<false>(x[c], q + (d + c) * ROWS, s);
  }
  if (d == D) return;
  const int start = int(most(D - VL, 0));  // the last VL, of which those before d were had
  for (int j = 0; j < VL; j++) x[j] = load_as_float(k[j] + start, D);
  transpose(x);
  for (; d < D; d++) add_products<false>(x[d - start], q + d * ROWS, s);
}

// Steps 1 and 2, as `scores` of softmax.inl.h.
template <class T, int R>
NOINLINE void few_scores(const FewRows<T> &K, const FewRows<T> &V, const float *q, const Panel &P,
                         const Run &run, int n0, bool last, float *s, float *m) {
  vf top = load(m);
  const int stretch = stretch_of<PAIRED<T>>(K.size);
  for (int j = run.j0; j < run.j1; j += VL) {
    const T *k[VL];
    const int keys = int(least(run.j1 - j, VL));
    UNROLL for (int r = 0; r < VL; r++) k[r] = K.at + least(j + r, run.j1 - 1) * K.stride;
    vf s_j[VL] = {};
    for (int d = 0; d < K.size; d += stretch) {
      vf part[R] = {};
      const int end = int(least(K.size, d + stretch));
      few_dot<T, R>(k, {V.at + j * V.stride, V.stride, V.size}, q, d, end, part);
      UNROLL for (int i = 0; i < R; i++) s_j[i] += part[i];
    }
    transpose(s_j);
    for (int r = 0; r < keys; r++) {
      if (last && run.cut && any(blocked_by_position(P, 0, splat(n0 + j + r))))
        s_j[r] = blocked_by_position(P, 0, splat(n0 + j + r)) ? splat(-INFINITY) : s_j[r];
      store(s + (j + r) * ROWS, s_j[r]);
      if (last) top = vmax(s_j[r], top);
    }
  }
  store(m, top);
}

// -- values ----------------------------------------------------------------------------------------

// The output of few rows is a row of whole vectors for each. The last one ends with the last
// column, so it may hold columns of the one before it again.
INLINE int64_t few_vectors(int64_t Dv) { return (Dv + VL - 1) / VL; }
INLINE int64_t first_column(int64_t c, int64_t Dv) { return least(c * VL, most(Dv - VL, 0)); }

template <bool FINITE>
INLINE vf finite_only(vf v) {
  return FINITE ? v : v * 0.f == 0.f ? v : vf{};
}

// Adds what is not finite, as it is, if the row sees its key.
INLINE vf spoiled(vf sum, vf v, float s) {
  return s == -INFINITY ? sum : sum + (v * 0.f == 0.f ? vf{} : v);
}

// sum_j p_ij v_jd. FINITE = false holds for any values.
template <class T, int R, int C, bool FINITE>
INLINE void few_sums(const FewRows<T> &V, const FewRows<T> &next, int64_t c0, const float *s,
                     const float *p, int keys, vf (&sum)[R][C]) {
  constexpr bool PAIRS = PAIRED<T>;
  constexpr int STEP = PAIRS ? 2 : 1;
  const T *v[C];
  const int width = int(least(V.size, VL));
  UNROLL for (int c = 0; c < C; c++) v[c] = V.at + first_column(c0 + c, V.size);
  UNROLL for (int i = 0; i < R; i++) UNROLL for (int c = 0; c < C; c++) sum[i][c] = vf{};
  for (int j = 0; j < keys; j += STEP, s += STEP * ROWS, p += ROWS) {
    vf v_j[C], v_next[C] = {}, word[C];
    UNROLL for (int c = 0; c < C; c++) {
      word[c] = finite_only<FINITE>(v_j[c] = load_as_float(v[c] + j * V.stride, width));
      next.expect(j, (c0 + c) * VL);
      if (!PAIRS) continue;
      if (j + 1 < keys) v_next[c] = load_as_float(v[c] + (j + 1) * V.stride, width);
      next.expect(j + 1, (c0 + c) * VL);
      word[c] = vf(vu(word[c]) >> 16 | vu(finite_only<FINITE>(v_next[c])));
    }
    UNROLL for (int i = 0; i < R; i++) UNROLL for (int c = 0; c < C; c++) {
      vf &o = sum[i][c] = add_product<PAIRS>(sum[i][c], word[c], splat_word<PAIRS>(p + i));
      if (!FINITE) o = spoiled(o, v_j[c], s[i]);
      if (!FINITE && PAIRS) o = spoiled(o, v_next[c], s[ROWS + i]);
    }
  }
}

// C vectors of columns from c0 on. A value that is not finite makes the sums of its column so, even
// where its p is 0: then they are made again with care.
template <class T, int R, int C>
INLINE void few_weigh_tile(const FewRows<T> &V, const FewRows<T> &next, int64_t c0, const float *s,
                           const float *p, int keys, float *o, const float *a) {
  vf sum[R][C], found = {};
  few_sums<T, R, C, true>(V, next, c0, s, p, keys, sum);
  UNROLL for (int i = 0; i < R; i++) UNROLL for (int c = 0; c < C; c++)
    found += sum[i][c] * 0.f;
  if (any(found != 0.f)) few_sums<T, R, C, false>(V, next, c0, s, p, keys, sum);
  UNROLL for (int i = 0; i < R; i++) UNROLL for (int c = 0; c < C; c++) {
    float *o_id = o + (i * few_vectors(V.size) + c0 + c) * VL;
    store(o_id, load(o_id) * a[i] + sum[i][c]);
  }
}

// Step 5, as `weigh` of microkernel.inl.h.
template <class T, int R>
NOINLINE void few_weigh(const FewRows<T> &V, const FewRows<T> &next, const float *s, const float *p,
                        int keys, float *o, const float *a) {
  constexpr int C = TILE1 / R < 8 ? TILE1 / R : 8;  // of TILE1 sums
  const int64_t count = few_vectors(V.size);
  int64_t c = 0;
  for (; c + C <= count; c += C) few_weigh_tile<T, R, C>(V, next, c, s, p, keys, o, a);
  if constexpr (C > 4)
    for (; c + 4 <= count; c += 4) few_weigh_tile<T, R, 4>(V, next, c, s, p, keys, o, a);
  if constexpr (C > 2)
    for (; c + 2 <= count; c += 2) few_weigh_tile<T, R, 2>(V, next, c, s, p, keys, o, a);
  for (; c < count; c++) few_weigh_tile<T, R, 1>(V, next, c, s, p, keys, o, a);
}

// The output of few rows to the lanes of a panel.
NOINLINE void few_to_lanes(const float *o, int rows, int Dv, float *to) {
  const float *row[VL];
  for (int r = 0; r < VL; r++) row[r] = o + least(r, rows - 1) * few_vectors(Dv) * VL;
  for (int64_t c = 0; c < few_vectors(Dv); c++)
    rows_to_lanes(row, c * VL, Dv, to + first_column(c, Dv) * ROWS);
}

}  // namespace
