// The second product of few rows (decode.inl.h has the first): columns of V in the lanes.
//
//   4, 5   l_i = l_i a_i + sum_j p_ij,   o_id = o_id a_i + sum_j p_ij v_jd

namespace {

// The output of few rows is a row of whole vectors for each. The last one ends with the last
// column, so it may hold columns of the one before it again.
INLINE int64_t few_vectors(int64_t Dv) { return (Dv + VL - 1) / VL; }
INLINE int64_t first_column(int64_t c, int64_t Dv) { return least(c * VL, most(Dv - VL, 0)); }

// The weights of R rows: s_ij, p_ij, and these as words.
struct FewWeights {
  const float *s, *p, *words;
};

// Sums over keys of a row: of p, and of p as they weigh (State).
struct FewSums {
  vf l, used;
};

// C vectors of columns of a value from c0 on.
template <class T, int C>
INLINE void few_value(const FewRows<T> &V, int64_t c0, int64_t j, vf (&v_j)[C]) {
  UNROLL for (int c = 0; c < C; c++) {
    const T *at = V.at + j * V.stride + first_column(c0 + c, V.size);
    v_j[c] = C > 1 || V.size >= VL ? load_as_float(at) : load_as_float(at, V.size);
  }
}

// Two values as pairs.
INLINE vf paired(vf first, vf second) { return vf(vu(first) >> 16 | vu(second)); }

// sum_j p_ij v_jd, if all of V is finite; the sums of p_ij where COUNT.
template <class T, int R, int C, bool COUNT>
INLINE void few_sums(const FewRows<T> &V, int64_t c0, const FewWeights &W, int keys,
                     vf (&sum)[R][C], FewSums (&of_p)[R]) {
  constexpr bool PAIRS = PAIRED<T>;
  vf part[R] = {};  // of l, over TILE keys
  UNROLL for (int i = 0; i < R; i++) {
    of_p[i].l = of_p[i].used = vf{};
    UNROLL for (int c = 0; c < C; c++) sum[i][c] = vf{};
  }
  const auto add = [&](int j, int n, const vf(&v_j)[C]) __attribute__((always_inline)) {
    UNROLL for (int i = 0; i < R; i++) {
      const int at = i * FEW_STRIDE + j;
      const vf word = splat_word<PAIRS>(W.words + i * FEW_STRIDE + n);
      UNROLL for (int c = 0; c < C; c++)
        sum[i][c] = add_product<PAIRS>(sum[i][c], v_j[c], word);
      if (!COUNT) continue;
      part[i] += splat(W.p[at]);
      if constexpr (PAIRS) {
        part[i] += splat(W.p[at + 1]);  // 0 beyond the last key
        of_p[i].used = add_product<true>(of_p[i].used, word,
                                         pairs_of<true>(splat(1.f), splat(1.f)));
      }
      if ((j + (PAIRS ? 2 : 1)) % TILE == 0) of_p[i].l += part[i], part[i] = vf{};
    }
  };
  vf first[C], second[C];
  if constexpr (!PAIRS) {
    for (int j = 0; j < keys; j++) few_value(V, c0, j, first), add(j, j, first);
  } else {
    int j = 0;
    for (; j + 2 <= keys; j += 2) {
      few_value(V, c0, j, first), few_value(V, c0, j + 1, second);
      UNROLL for (int c = 0; c < C; c++) first[c] = paired(first[c], second[c]);
      add(j, j / 2, first);
    }
    if (j < keys) {
      few_value(V, c0, j, first);
      UNROLL for (int c = 0; c < C; c++) first[c] = paired(first[c], vf{});
      add(j, j / 2, first);
    }
  }
  UNROLL for (int i = 0; i < R; i++) of_p[i].l += part[i];
}

// The same for one row and vector of columns, and any V: what is not finite is added, as it is, if
// the row sees its key.
template <class T>
NOINLINE vf few_sums_of_any(const FewRows<T> &V, int64_t c, const float *s, const float *words,
                            int keys) {
  constexpr bool PAIRS = PAIRED<T>;
  constexpr int STEP = PAIRS ? 2 : 1;
  vf sum = {};
  for (int j = 0; j < keys; j += STEP) {
    vf v[STEP][1] = {}, finite[STEP];
    for (int n = 0; n < STEP; n++) {
      if (j + n < keys) few_value(V, c, j + n, v[n]);
      finite[n] = v[n][0] * 0.f == 0.f ? v[n][0] : vf{};
    }
    const vf word = PAIRS ? paired(finite[0], finite[STEP - 1]) : finite[0];
    sum = add_product<PAIRS>(sum, word, splat_word<PAIRS>(words + j / STEP));
    for (int n = 0; n < STEP && j + n < keys; n++)
      if (s[j + n] != -INFINITY) sum += v[n][0] * 0.f == 0.f ? vf{} : v[n][0];
  }
  return sum;
}

// C vectors of columns from c0 on. A value that is not finite makes the sums of its column so, even
// where its p is 0: then they are made again with care.
template <class T, int R, int C, bool COUNT>
INLINE void few_weigh_tile(const FewRows<T> &V, int64_t c0, const FewWeights &W, int keys, float *o,
                           vf a, FewSums *sums) {
  vf sum[R][C], found = {};
  FewSums of_p[R];
  few_sums<T, R, C, COUNT>(V, c0, W, keys, sum, of_p);
  UNROLL for (int i = 0; i < R; i++) {
    if (COUNT) sums[i] = of_p[i];
    UNROLL for (int c = 0; c < C; c++) found += sum[i][c] * 0.f;
  }
  const bool again = any(found != 0.f);
  UNROLL for (int i = 0; i < R; i++) UNROLL for (int c = 0; c < C; c++) {
    const int at = i * FEW_STRIDE;
    float *o_id = o + (i * few_vectors(V.size) + c0 + c) * VL;
    if (again) sum[i][c] = few_sums_of_any(V, c0 + c, W.s + at, W.words + at, keys);
    store(o_id, load(o_id) * a[i] + sum[i][c]);
  }
}

template <class T, int R, int C>
INLINE void few_weigh_tiles(const FewRows<T> &V, int64_t &c, const FewWeights &W, int keys,
                            float *o, vf a, FewSums *sums) {
  const int64_t count = few_vectors(V.size);
  if (c == 0 && C <= count) few_weigh_tile<T, R, C, true>(V, 0, W, keys, o, a, sums), c = C;
  for (; c + C <= count; c += C) few_weigh_tile<T, R, C, false>(V, c, W, keys, o, a, sums);
}

// Steps 4 and 5.
template <class T, int R>
NOINLINE void few_weigh(const FewRows<T> &V, const FewWeights &W, int keys, float *o, vf a,
                        FewSums *sums) {
  constexpr int C = TILE1 / R < 8 ? TILE1 / R : 8;  // of TILE1 sums
  int64_t c = 0;
  few_weigh_tiles<T, R, C>(V, c, W, keys, o, a, sums);
  if constexpr (C > 4) few_weigh_tiles<T, R, 4>(V, c, W, keys, o, a, sums);
  if constexpr (C > 2) few_weigh_tiles<T, R, 2>(V, c, W, keys, o, a, sums);
  if constexpr (C > 1) few_weigh_tiles<T, R, 1>(V, c, W, keys, o, a, sums);
}

}  // namespace
