// The second product of few rows, as in matrices.inl.h:
//
//   matrix_few_weigh    O += P V      16 columns at a time; a row for each row. One or two rows go by
//                                     vectors: V need not be made to words, and 12 heads of one row
//                                     over 1500 keys took 0.75 of the time (a Xeon, 2026-12)

namespace {

// Where column d stands in a row of the output: of 32 first the even ones, then the odd ones.
INLINE int place_of(int d) { return d / GROUP * GROUP + d % 2 * VL + d % GROUP / 2; }

// A row of the output in that order, times a factor, to where it is wanted.
NOINLINE void matrix_few_unpack(const float *o, vf factor, bfloat16 *row, int Dv) {
  vi low, high;
  UNROLL for (int n = 0; n < VL; n++) low[n] = n / 2 + n % 2 * VL, high[n] = low[n] + VL / 2;
  for (int d = 0; d < Dv; d += 2 * VL) {
    const vf even = load(o + d) * factor, odd = load(o + d + VL) * factor;
    store_from_float(pick(even, odd, low), row + d, Dv - d);
    if (d + VL < Dv) store_from_float(pick(even, odd, high), row + d + VL, Dv - d - VL);
  }
}

// Adds the values that are not finite to the sums of the rows that see them.
NOINLINE void spoil_few(const FewRows<bfloat16> &V, const Run &run, const float *s, int few,
                        float *o) {
  const int64_t stride = few_vectors(V.size) * VL;
  for (int j = run.j0; j < run.j1; j++)
    for (int d = 0; d < V.size; d++) {
      const float v_jd = one_as_float(V.at + j * V.stride + d);
      if (v_jd * 0 == 0) continue;
      for (int i = 0; i < few; i++)
        if (s[i * FEW_STRIDE + j] != -INFINITY) o[i * stride + place_of(d)] += v_jd;
    }
}

// One or two rows: by vectors, with the sums of tile_product. COLUMNS times 32 columns from d on, all
// of them there and finite, or with CARE any; false if some are not finite, or may be so.
template <int R, int COLUMNS, bool CARE>
INLINE bool weigh_by_vectors(const FewRows<bfloat16> &V, const FewRows<bfloat16> &K, const Run &run,
                             const float *parts, int d, float *o, int64_t stride) {
  constexpr int N = 2 * COLUMNS;  // vectors of a row
  typedef vf Part[R][2][N];       // by the first and the second part of a weight
  vw largest = {};
  const auto add = [&](int j, Part &sum) __attribute__((always_inline)) {
    UNROLL for (int c = 0; c < COLUMNS; c++) {
      const bfloat16 *const row = V.at + j * V.stride;
      vu x = CARE ? group_of(row, d + c * GROUP, V.size) : load_bytes<vu>(row + d + c * GROUP);
      if (CARE) largest = larger(largest, vw(x)), x = vu(finite_or_0(vw(x)));
      const vf even = vf(x << 16), odd = vf(x & UPPER);
      UNROLL for (int i = 0; i < R; i++) UNROLL for (int part = 0; part < 2; part++) {
        const vf p = splat(parts[(2 * i + part) * FEW_STRIDE + j]);
        sum[i][part][2 * c] += p * even, sum[i][part][2 * c + 1] += p * odd;
      }
    }
  };
  vf out[R][N], bad = {};
  UNROLL for (int i = 0; i < R; i++) UNROLL for (int n = 0; n < N; n++)
    out[i][n] = load(o + i * stride + d + n * VL);
  for (int j = run.j0, end; j < run.j1; j = end) {
    Part first = {}, second = {};  // of even and odd keys
    end = int(least(run.j1, (j / GROUP + 1) * GROUP));
    for (; j + 1 < end; j += 2) {
      if (d == 0) expect_rows(K, BLOCK + j, 2);
      add(j, first), add(j + 1, second);
    }
    if (j < end) add(j, first);
    UNROLL for (int i = 0; i < R; i++) UNROLL for (int part = 0; part < 2; part++)
      UNROLL for (int n = 0; n < N; n++) out[i][n] += first[i][part][n] + second[i][part][n];
  }
  UNROLL for (int i = 0; i < R; i++) UNROLL for (int n = 0; n < N; n++) bad += out[i][n] * 0.f;
  const bool finite = CARE ? all_finite(largest) : !any(bad != 0.f);
  if (finite || CARE)
    UNROLL for (int i = 0; i < R; i++) UNROLL for (int n = 0; n < N; n++)
      store(o + i * stride + d + n * VL, out[i][n]);
  return finite;
}

// False if some value is not finite.
template <int R>
NOINLINE bool weigh_rows(const FewRows<bfloat16> &V, const FewRows<bfloat16> &K, const Run &run,
                         const float *p, float *parts, float *o, int64_t stride) {
  for (int i = 0; i < R; i++)
    for (int j = run.j0; j < run.j1; j += VL) {
      const vf p_ij = load_as_float(p + i * FEW_STRIDE + j), first = vf(vu(p_ij) & UPPER);
      store(parts + 2 * i * FEW_STRIDE + j, first);
      store(parts + (2 * i + 1) * FEW_STRIDE + j, vf(vu(p_ij - first) & UPPER));
    }
  constexpr int COLUMNS = 2 / R, STEP = COLUMNS * GROUP;
  bool finite = true;
  for (int d = 0; d < V.size; d += STEP) {
    if (d + STEP <= V.size && weigh_by_vectors<R, COLUMNS, false>(V, K, run, parts, d, o, stride))
      continue;
    for (int n = d; n < d + STEP && n < V.size; n += GROUP)
      finite &= weigh_by_vectors<R, 1, true>(V, K, run, parts, n, o, stride);
  }
  return finite;
}

// The weights as rows of the first 8 bits of each, and of the next 8 half a FEW_STRIDE behind.
NOINLINE void cut_weights(const float *p, int few, int first, int end, float *words) {
  for (int i = 0; i < few; i++, p += FEW_STRIDE, words += FEW_STRIDE) {
    uint16_t *const high = reinterpret_cast<uint16_t *>(words), *const low = high + FEW_STRIDE;
    for (int j = first; j < end; j += VL) {
      const vf p_ij = load_as_float(p + j), part = vf(vu(p_ij) & UPPER);
      const vh x = __builtin_convertvector(vu(part) >> 16, vh);
      const vh y = __builtin_convertvector(vu(p_ij - part) >> 16, vh);
      memcpy(high + j, &x, sizeof x), memcpy(low + j, &y, sizeof y);
    }
  }
}

// More rows: by tiles. False if some value is not finite. `words` are for the weights, `copy` for
// the values.
NOINLINE bool weigh_by_tiles(const FewRows<bfloat16> &V, const FewRows<bfloat16> &K, const Run &run,
                             float *p, int few, float *words, float *copy, float *o,
                             int64_t stride) {
  constexpr int COLUMN = BLOCK / 2 * VL;  // floats of 16 columns
  const int first = run.j0 / GROUP * GROUP, end = to_group(run.j1);
  for (int i = 0; i < few; i++)
    for (int j = first; j < end; j++)
      if (j < run.j0 || j >= run.j1) p[i * FEW_STRIDE + j] = 0;
  cut_weights(p, few, first, end, words);
  vw largest = {};
  for (int j = first; j < end; j += 2) {
    const bfloat16 *const row = V.at + j * V.stride;
    expect_rows(K, BLOCK + j, 2);
    for (int d = 0; d < V.size; d += GROUP) {
      const vu x = j < run.j1 ? group_of(row, d, V.size) : vu{};
      const vu y = j + 1 < run.j1 ? group_of(row + V.stride, d, V.size) : vu{};
      largest = larger(larger(largest, vw(x)), vw(y));
      float *const to = copy + d / VL * COLUMN + j / 2 * VL;
      store(to, vf((x & ~UPPER) | y << 16)), store(to + COLUMN, vf(x >> 16 | (y & UPPER)));
    }
  }
  const bool finite = all_finite(largest);
  for (int d = 0; !finite && d < V.size; d += GROUP)
    for (int n = first / 2 * VL; n < end / 2 * VL; n += VL) {
      float *const at = copy + d / VL * COLUMN + n;
      make_finite(at), make_finite(at + COLUMN);
    }
  for (int c = 0; c < stride / VL; c++) {
    tile_load<FEW_OUT>(o + c * VL, stride * sizeof(float));
    for (int j = first; j < end; j += GROUP) {
      tile_load<FEW_WEIGHTS>(words + j / 2, FEW_STRIDE * sizeof(float));
      tile_load<FEW_WEIGHTS + 1>(words + FEW_STRIDE / 2 + j / 2, FEW_STRIDE * sizeof(float));
      tile_load<FEW_VALUES>(copy + c * COLUMN + j / 2 * VL, sizeof(vf));
      tile_product<FEW_OUT, FEW_WEIGHTS, FEW_VALUES>();
      tile_product<FEW_OUT, FEW_WEIGHTS + 1, FEW_VALUES>();
    }
    tile_store<FEW_OUT>(o + c * VL, stride * sizeof(float));
  }
  return finite;
}

// Steps 4 and 5; V are the values of the block, K its keys.
NOINLINE vf matrix_few_weigh(const FewRows<bfloat16> &V, const FewRows<bfloat16> &K,
                             const Run &run, const float *s, float *p, float *words, int few,
                             float *copy, float *o, vf a) {
  const int64_t stride = few_vectors(V.size) * VL;
  for (int i = 0; i < few; i++)
    for (float *o_i = o + i * stride, *end = o_i + stride; o_i < end; o_i += VL)
      store(o_i, load(o_i) * splat(a[i]));
  const bool finite = few == 1   ? weigh_rows<1>(V, K, run, p, words, o, stride)
                      : few == 2 ? weigh_rows<2>(V, K, run, p, words, o, stride)
                                 : weigh_by_tiles(V, K, run, p, few, words, copy, o, stride);
  if (!finite) spoil_few(V, run, s, few, o);
  return few_sums_of_tiles(p, few, run);
}

template <>
struct Matrices<bfloat16> {
  static constexpr auto &values = value_columns;
  static constexpr auto &scores = matrix_scores;
  template <int WANTED>
  INLINE static void weigh(const Weights &W, Rows V, float *o, const float *a, int Dv, bool fresh,
                           Sums *sums) {
    matrix_weigh<WANTED>(W, V, o, a, Dv, fresh, sums);
  }
  static constexpr auto &few_scores = matrix_few_scores;
  static constexpr auto &few_weigh = matrix_few_weigh;
  static constexpr auto &few_unpack = matrix_few_unpack;
};

}  // namespace
