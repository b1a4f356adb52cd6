// The second product of few rows (decode.inl.h has the first): columns of V in the lanes.
//
//   4, 5   l_i = l_i a_i + sum_j p_ij,   o_id = o_id a_i + sum_j p_ij v_jd

namespace {

// The output of few rows is a row of whole vectors for each. The last one ends with the last
// column, so it may hold columns of the one before it again. Products of matrices make two at a time
// (place_of in matrices_few_values.inl.h).
INLINE int64_t few_vectors(int64_t Dv) {
  constexpr int STEP = MATRICES<bfloat16> ? 2 : 1;
  return (Dv + STEP * VL - 1) / (STEP * VL) * STEP;
}
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

// Asks for as much of a key as lies in C vectors of columns.
template <class T, int C>
INLINE void expect_key(const FewRows<T> &K, int64_t c0, int64_t j) {
  const char *at = (const char *)(K.at + j * K.stride + c0 * VL);
  constexpr int BYTES = C * VL * int(sizeof(T)), LINE = 64;
  UNROLL for (int n = 0; n < BYTES; n += LINE) __builtin_prefetch(at + n, 0, 2);
}

// Two values as pairs.
INLINE vf paired(vf first, vf second) { return vf(vu(first) >> 16 | vu(second)); }

// C vectors of columns of value j and, if there are two, of the next one, as pairs. Whole ones come
// two vectors of halves at a time, which interleave within quads of words: of 2 VL columns the first
// vector has the even quads, the second one the odd ones. Converting them one by one, a call took
// 1.2 times as long (4 rows of 128, an EPYC 9004, 2026-11). W is a parameter so that compilers that
// lack the builtin, and have no pairs, do not look at it.
template <class T, int C, class W = vw>
INLINE void few_pairs(const FewRows<T> &V, int64_t c0, int64_t j, bool two, bool whole,
                      vf (&v_j)[C]) {
  if (!whole) {
    vf next[C] = {};
    few_value(V, c0, j, v_j);
    if (two) few_value(V, c0, j + 1, next);
    UNROLL for (int c = 0; c < C; c++) v_j[c] = paired(v_j[c], next[c]);
    return;
  }
  W even, odd;
  UNROLL for (int n = 0; n < 2 * VL; n++) {
    even[n] = uint16_t(n / 8 * 8 + n % 8 / 2 + n % 2 * 2 * VL);
    odd[n] = uint16_t(even[n] + 4);
  }
  UNROLL for (int c = 0; c + 1 < C; c += 2) {
    const T *at = V.at + j * V.stride + (c0 + c) * VL;
    const W x = load_bytes<W>(at), y = two ? load_bytes<W>(at + V.stride) : W{};
    v_j[c] = vf(pick(x, y, even)), v_j[c + 1] = vf(pick(x, y, odd));
  }
}

// Their sums in the order of the columns.
template <class V>
INLINE void sort_columns(V &even, V &odd) {
  vi first, second;
  UNROLL for (int n = 0; n < VL; n++) {
    const int quad = n / 4, after = quad + VL / 4;
    first[n] = quad % 2 * VL + quad / 2 * 4 + n % 4;
    second[n] = after % 2 * VL + after / 2 * 4 + n % 4;
  }
  const V a = pick(even, odd, first), b = pick(even, odd, second);
  even = a, odd = b;
}

// sum_j p_ij v_jd over keys [j0, j1), if all of V is finite; adds the sums of p_ij where COUNT. `next`
// are keys to come.
template <class T, int R, int C, bool COUNT>
INLINE void few_sums(const FewRows<T> &V, const FewRows<T> &next, int64_t c0,
                     const FewWeights &W, int j0, int j1, vf (&sum)[R][C], FewSums (&of_p)[R]) {
  constexpr bool PAIRS = PAIRED<T>;
  const bool in_parts = in_parts_of<R>(V.size);
  vf part[R] = {};  // of l, over TILE keys
  UNROLL for (int i = 0; i < R; i++) UNROLL for (int c = 0; c < C; c++) sum[i][c] = vf{};
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
  vf v_j[C];
  if constexpr (!PAIRS) {
    for (int j = j0; j < j1; j++) {
      if (in_parts) expect_key<T, C>(next, c0, j);
      few_value(V, c0, j, v_j), add(j, j, v_j);
    }
  } else {
    const bool whole = C % 2 == 0 && (c0 + C) * VL <= V.size;
    for (int j = j0; j < j1; j += 2) {
      if (in_parts) expect_key<T, C>(next, c0, j), expect_key<T, C>(next, c0, j + 1);
      few_pairs(V, c0, j, j + 1 < j1, whole, v_j), add(j, j / 2, v_j);
    }
    if (whole)
      UNROLL for (int i = 0; i < R; i++) UNROLL for (int c = 0; c + 1 < C; c += 2)
        sort_columns(sum[i][c], sum[i][c + 1]);
  }
  UNROLL for (int i = 0; i < R; i++) of_p[i].l += part[i];
}

// The same for one row and vector of columns, and any V: what is not finite is added, as it is, if
// the row sees its key.
template <class T>
NOINLINE vf few_sums_of_any(const FewRows<T> &V, int64_t c, const float *s, const float *words,
                            int j0, int j1) {
  constexpr bool PAIRS = PAIRED<T>;
  constexpr int STEP = PAIRS ? 2 : 1;
  vf sum = {};
  for (int j = j0; j < j1; j += STEP) {
    vf v[STEP][1] = {}, finite[STEP];
    for (int n = 0; n < STEP; n++) {
      if (j + n < j1) few_value(V, c, j + n, v[n]);
      finite[n] = v[n][0] * 0.f == 0.f ? v[n][0] : vf{};
    }
    const vf word = PAIRS ? paired(finite[0], finite[STEP - 1]) : finite[0];
    sum = add_product<PAIRS>(sum, word, splat_word<PAIRS>(words + j / STEP));
    for (int n = 0; n < STEP && j + n < j1; n++)
      if (s[j + n] != -INFINITY) sum += v[n][0] * 0.f == 0.f ? vf{} : v[n][0];
  }
  return sum;
}

// The keys of a run, and those of them in the first KEY_STRETCH of its block.
struct Stretches {
  int all, half;
};

// C vectors of columns from c0 on. A value that is not finite makes the sums of its column so, even
// where its p is 0: then they are made again with care.
template <class T, int R, int C, bool COUNT>
INLINE void few_weigh_tile(const FewRows<T> &V, const FewRows<T> &next, int64_t c0,
                           const FewWeights &W, Stretches keys, float *o, vf a, FewSums *sums) {
  FewSums of_p[R] = {};
  for (int n = 0; n < 2; n++) {
    const int j0 = n == 0 ? 0 : keys.half, j1 = n == 0 ? keys.half : keys.all;
    if (n == 1 && j0 == j1) break;
    vf sum[R][C], found = {};
    few_sums<T, R, C, COUNT>(V, next, c0, W, j0, j1, sum, of_p);
    UNROLL for (int i = 0; i < R; i++) UNROLL for (int c = 0; c < C; c++)
      found += sum[i][c] * 0.f;
    const bool again = any(found != 0.f);
    UNROLL for (int i = 0; i < R; i++) UNROLL for (int c = 0; c < C; c++) {
      const int at = i * FEW_STRIDE;
      float *o_id = o + (i * few_vectors(V.size) + c0 + c) * VL;
      if (again) sum[i][c] = few_sums_of_any(V, c0 + c, W.s + at, W.words + at, j0, j1);
      store(o_id, (n == 0 ? rounded(load(o_id) * a[i]) : load(o_id)) + sum[i][c]);
    }
  }
  UNROLL for (int i = 0; COUNT && i < R; i++) sums[i] = of_p[i];
}

template <class T, int R, int C>
INLINE void few_weigh_tiles(const FewRows<T> &V, const FewRows<T> &next, int64_t &c,
                            const FewWeights &W, Stretches keys, float *o, vf a, FewSums *sums) {
  const int64_t count = few_vectors(V.size);
  if (c == 0 && C <= count) few_weigh_tile<T, R, C, true>(V, next, 0, W, keys, o, a, sums), c = C;
  for (; c + C <= count; c += C) few_weigh_tile<T, R, C, false>(V, next, c, W, keys, o, a, sums);
}

// Steps 4 and 5.
template <class T, int R>
NOINLINE void few_weigh(const FewRows<T> &V, const FewRows<T> &next, const FewWeights &W,
                        Stretches keys, float *o, vf a, FewSums *sums) {
  constexpr int C = FEW_COLUMNS<R>;
  int64_t c = 0;
  few_weigh_tiles<T, R, C>(V, next, c, W, keys, o, a, sums);
  if constexpr (C > 4) few_weigh_tiles<T, R, 4>(V, next, c, W, keys, o, a, sums);
  if constexpr (C > 2) few_weigh_tiles<T, R, 2>(V, next, c, W, keys, o, a, sums);
  if constexpr (C > 1) few_weigh_tiles<T, R, 1>(V, next, c, W, keys, o, a, sums);
}

}  // namespace
