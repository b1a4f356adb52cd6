// The two products, with query rows in the lanes and one register tile of sums.
//
//   dot       s_ij = sum_d q_id k_jd    for TILE keys j and NV vectors of rows i
//   weigh     o_id = o_id a_i + sum_j p_ij v_jd    for TILE columns d and NV vectors of rows i
//
// Rows are in lanes, so k_jd and v_jd are read where they stand, one number at a time, any head size
// works, and the order of every sum is j or d upwards whatever the tile: a row's bits do not know
// its neighbours. Panels hold ROWS rows, d (or j) major. Where products go by PAIRS (pairs.inl.h), a
// word is two neighbours d, or two neighbours j, and there are half as many.

namespace {

constexpr int NV = 3;  // vectors of rows in a panel
constexpr int ROWS = NV * VL;

// Words of a head, counted from its first, whose products have a sum of their own: the rounding of
// one long sum is most of a float32 result's error. That of pairs is nothing beside bfloat16's. By
// 32 a pass over D = 64 would be 1 % shorter, but the error of one row over 128 keys 1.2 times
// torch's; by 64 one over D = 128 1 % shorter, the error 1.2 times as large (an EPYC 9004, 2026-11).
template <bool PAIRS>
INLINE int stretch_of(int words) {
  return PAIRS ? words : words > 64 ? 32 : 16;
}

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
  for (int d = 0; d < words; d++) {
    vf q_i[N];
    UNROLL for (int v = 0; v < N; v++) q_i[v] = load(q + d * ROWS + v * VL);
    UNROLL for (int j = 0; j < KEYS; j++) {
      const vf k_jd = splat_word<PAIRS>(k[j] + d);
      UNROLL for (int v = 0; v < N; v++)
        s_ij[j][v] = add_product<PAIRS>(s_ij[j][v], k_jd, q_i[v]);
    }
  }
}

// COLUMNS columns of `weigh`. A block whose keys are cut (see Run) gathers its sum in o piece by
// piece (whole = false) and is added to the output by `merge`, which makes the same sums.
template <bool PAIRS, int COLUMNS, int N>
INLINE void weigh_tile(const float *v_j, int64_t stride, const float *p, int words, float *o,
                       const float *a, bool whole) {
  vf sum[COLUMNS][N];
  UNROLL for (int d = 0; d < COLUMNS; d++) UNROLL for (int v = 0; v < N; v++)
    sum[d][v] = whole ? vf{} : load(o + d * ROWS + v * VL);
  for (int j = 0; j < words; j++, v_j += stride, p += ROWS) {
    vf p_ij[N];
    UNROLL for (int v = 0; v < N; v++) p_ij[v] = load(p + v * VL);
    UNROLL for (int d = 0; d < COLUMNS; d++) {
      const vf v_jd = splat_word<PAIRS>(v_j + d);
      UNROLL for (int v = 0; v < N; v++) sum[d][v] = add_product<PAIRS>(sum[d][v], v_jd, p_ij[v]);
    }
  }
  UNROLL for (int d = 0; d < COLUMNS; d++) UNROLL for (int v = 0; v < N; v++) {
    float *o_id = o + d * ROWS + v * VL;
    store(o_id, whole ? load(o_id) * load(a + v * VL) + sum[d][v] : sum[d][v]);
  }
}

// All of V is finite here: a p of 0 must add 0.
template <bool PAIRS, int N>
NOINLINE void weigh(Rows V, const float *p, int words, float *o, const float *a, int Dv,
                    bool whole) {
  int d = 0;
  if (N == 1)
    for (; d + TILE1 <= Dv; d += TILE1)
      weigh_tile<PAIRS, TILE1, N>(V.at + d, V.stride, p, words, o + d * ROWS, a, whole);
  for (; d + TILE <= Dv; d += TILE)
    weigh_tile<PAIRS, TILE, N>(V.at + d, V.stride, p, words, o + d * ROWS, a, whole);
  for (; d + 2 <= Dv; d += 2)
    weigh_tile<PAIRS, 2, N>(V.at + d, V.stride, p, words, o + d * ROWS, a, whole);
  if (d < Dv) weigh_tile<PAIRS, 1, N>(V.at + d, V.stride, p, words, o + d * ROWS, a, whole);
}

// o_id = o_id a_i + cut_id: the end of a block that was summed in pieces.
NOINLINE void merge(const float *cut, float *o, const float *a, int Dv, int vectors) {
  for (int d = 0; d < Dv; d++)
    for (int v = 0; v < vectors; v++) {
      float *o_id = o + d * ROWS + v * VL;
      store(o_id, load(o_id) * load(a + v * VL) + load(cut + d * ROWS + v * VL));
    }
}

}  // namespace
