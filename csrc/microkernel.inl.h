// The two products, with query rows in the lanes and one register tile of sums.
//
//   dot       s_ij = sum_d q_id k_jd    for TILE_OF keys j and NV vectors of rows i
//   weigh     o_id = o_id a_i + sum_j p_ij v_jd    for as many columns d and NV vectors of rows i
//
// Rows are in lanes, so k_jd and v_jd are read where they stand, one number at a time, any head size
// works, and the order of every sum is j or d upwards whatever the tile: a row's bits do not know
// its neighbours. Panels hold ROWS rows, d (or j) major. Where products go by PAIRS (pairs.inl.h), a
// word is two neighbours d, or two neighbours j, and there are half as many.

namespace {

constexpr int ROWS = NV * VL;

// Words of a head, counted from its first, whose products have a sum of their own: the rounding of
// one long sum is most of a float32 result's error. That of pairs is nothing beside bfloat16's. By
// 32 a pass over D = 64 would be no shorter (an EPYC 9004, 2026-12), but the error of one row over
// 128 keys 1.2 times torch's; by 64 over D = 128 1.2 times as large.
// One of D = 16 by 8 has 0.9 times the error.
template <bool PAIRS>
INLINE int stretch_of(int words) {
  return PAIRS ? words : words > 64 ? 32 : words > 16 ? 16 : 8;
}

// Keys, or columns, of a tile. Where sums are made by stretches, it holds those of one stretch and
// those of the ones before.
template <bool PAIRS>
constexpr int TILE_OF = PAIRS ? TILE : STRETCH_TILE;

// A block of keys or values as rows of words: float32, or pairs.
struct Rows {
  const float *at;
  int64_t stride;
};

template <bool PAIRS, int KEYS, int N>
INLINE void dot(Rows K, const float *q, int words, vf (&s_ij)[KEYS][N]) {
  UNROLL for (int j = 0; j < KEYS; j++) UNROLL for (int v = 0; v < N; v++) s_ij[j][v] = vf{};
  const float *k[KEYS];
  UNROLL for (int j = 0; j < KEYS; j++) k[j] = K.at + j * K.stride;
  const auto add = [&](int d) __attribute__((always_inline)) {
    vf q_i[N];
    UNROLL for (int v = 0; v < N; v++) q_i[v] = load(q + d * ROWS + v * VL);
    UNROLL for (int j = 0; j < KEYS; j++) {
      const vf k_jd = splat_word<PAIRS>(k[j] + d);
      UNROLL for (int v = 0; v < N; v++)
        s_ij[j][v] = add_product<PAIRS>(s_ij[j][v], k_jd, q_i[v]);
    }
  };
  constexpr int AT_ONCE = STRETCH_WORDS;  // an iteration
  int d = 0;
  for (; d + AT_ONCE <= words; d += AT_ONCE) UNROLL for (int n = 0; n < AT_ONCE; n++) add(d + n);
  for (; AT_ONCE > 1 && d < words; d++) add(d);
}

// A stretch of keys that vectors [v0, v1) of a panel see: its weights, its values, and how many words.
struct Step {
  const float *p, *v;
  int words, v0, v1;
};

template <bool PAIRS, int V0, int V1, int COLUMNS, int N>
INLINE void gather(const Step &step, int64_t stride, int d0, vf (&sum)[COLUMNS][N]) {
  const float *p = step.p, *v_j = step.v + d0;
  for (int j = 0; j < step.words; j++, v_j += stride, p += ROWS) {
    vf p_ij[N];
    UNROLL for (int v = V0; v < V1; v++) p_ij[v] = load(p + v * VL);
    UNROLL for (int d = 0; d < COLUMNS; d++) {
      const vf v_jd = splat_word<PAIRS>(v_j + d);
      UNROLL for (int v = V0; v < V1; v++) sum[d][v] = add_product<PAIRS>(sum[d][v], v_jd, p_ij[v]);
    }
  }
}

// Those of a block's first stretch that has any, and those of the one after it.
struct Steps {
  const Step *first, *second, *end;
};

template <bool PAIRS, int COLUMNS, int N>
INLINE void gather_all(const Step *step, const Step *end, int64_t stride, int d0,
                       vf (&sum)[COLUMNS][N]) {
  UNROLL for (int d = 0; d < COLUMNS; d++) UNROLL for (int v = 0; v < N; v++) sum[d][v] = vf{};
  for (; step < end; step++) {
    if (step->v0 == 0 && step->v1 == N)
      gather<PAIRS, 0, N>(*step, stride, d0, sum);
    else if (N > 1 && step->v1 == N)
      step->v0 == 1 ? gather<PAIRS, 1, N>(*step, stride, d0, sum)
                    : gather<PAIRS, N - 1, N>(*step, stride, d0, sum);
    else if (N > 1 && step->v0 == 0)
      step->v1 == 1 ? gather<PAIRS, 0, 1>(*step, stride, d0, sum)
                    : gather<PAIRS, 0, N - 1>(*step, stride, d0, sum);
    else if (N > 2)
      gather<PAIRS, 1, N - 1>(*step, stride, d0, sum);
  }
}

// COLUMNS columns of `weigh`.
template <bool PAIRS, int COLUMNS, int N>
INLINE void weigh_tile(const Steps &steps, int64_t stride, int d0, float *o, const float *a,
                       bool fresh) {
  vf sum[COLUMNS][N], o_id[COLUMNS][N];
  gather_all<PAIRS>(steps.first, steps.second, stride, d0, sum);
  UNROLL for (int d = 0; d < COLUMNS; d++) UNROLL for (int v = 0; v < N; v++) {
    const float *at = o + (d0 + d) * ROWS + v * VL;
    // Rounded: compilers would fuse it with the sum in some tiles only.
    o_id[d][v] = (fresh ? vf{} : rounded(load(at) * load(a + v * VL))) + sum[d][v];
  }
  if (!PAIRS && steps.second < steps.end) {
    gather_all<PAIRS>(steps.second, steps.end, stride, d0, sum);
    UNROLL for (int d = 0; d < COLUMNS; d++) UNROLL for (int v = 0; v < N; v++)
      o_id[d][v] += sum[d][v];
  }
  UNROLL for (int d = 0; d < COLUMNS; d++) UNROLL for (int v = 0; v < N; v++)
    store(o + (d0 + d) * ROWS + v * VL, o_id[d][v]);
}

// All of V is finite here: a p of 0 must add 0.
template <bool PAIRS, int N>
NOINLINE void weigh(const Steps &steps, int64_t stride, float *o, const float *a, int Dv,
                    bool fresh) {
  constexpr int COLUMNS = TILE_OF<PAIRS>;
  int d = 0;
  if (N == 1)
    for (; d + TILE1 <= Dv; d += TILE1)
      weigh_tile<PAIRS, TILE1, N>(steps, stride, d, o, a, fresh);
  for (; d + COLUMNS <= Dv; d += COLUMNS)
    weigh_tile<PAIRS, COLUMNS, N>(steps, stride, d, o, a, fresh);
  for (; d + 2 <= Dv; d += 2)
    weigh_tile<PAIRS, 2, N>(steps, stride, d, o, a, fresh);
  if (d < Dv) weigh_tile<PAIRS, 1, N>(steps, stride, d, o, a, fresh);
}

}  // namespace
