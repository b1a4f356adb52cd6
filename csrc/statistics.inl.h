// Statistics of the weights w_ij = exp(s_ij - m_i) / z_i of a row, gathered in the pass that makes
// its output:
//
//   entropy    -sum_j w_ij log w_ij, by the sum of p_ij log2 p_ij
//   distance   sum_j w_ij |own(i) - j|
//   masses     w_ij of the first, the previous and the own key: its score is caught in passing
//   top keys   the top_k best scores; one that only equals a kept one comes after it
//
// The first two are sums that a State carries. Scores are in the tile's units (Plan::exponent).

namespace {

constexpr int MARKED = 3;  // the first key, the previous one, the own one

struct Statistics {
  alignas(64) float marked[MARKED][ROWS];                  // its score, -inf until it is seen
  alignas(64) float least[ROWS];                           // the last of the top scores
  alignas(64) int32_t mark[MARKED][ROWS];                  // -1 where there is none
  int32_t mark_lo[MARKED], mark_hi[MARKED];                // of all rows, inclusive
  alignas(64) float top[CLEARHEAD_MAX_TOP_K][ROWS];        // falling
  int32_t top_key[CLEARHEAD_MAX_TOP_K][ROWS];
};

NOINLINE void start_statistics(const clearhead_call &c, int64_t b, const Panel &P, Statistics &X) {
  const bool wanted[MARKED] = {c.first_mass != nullptr, c.previous_mass != nullptr,
                               c.self_mass != nullptr};
  for (int t = 0; t < MARKED; t++) X.mark_lo[t] = INT32_MAX, X.mark_hi[t] = -1;
  for (int r = 0; r < P.vectors * VL; r++) {
    int64_t j[MARKED] = {0, int64_t(P.own[r]) - 1, P.own[r]};
    if (c.first_key)
      j[0] = c.first_key[b * c.first_key_strides[0] + P.place[r].i * c.first_key_strides[1]];
    for (int t = 0; t < MARKED; t++) {
      X.marked[t][r] = -INFINITY;
      X.mark[t][r] = -1;
      if (!wanted[t] || j[t] < 0 || j[t] >= c.S) continue;
      X.mark[t][r] = int32_t(j[t]);
      X.mark_lo[t] = int32_t(least(X.mark_lo[t], j[t]));
      X.mark_hi[t] = int32_t(most(X.mark_hi[t], j[t]));
    }
    X.least[r] = -INFINITY;
    for (int k = 0; k < c.top_k; k++) X.top[k][r] = -INFINITY, X.top_key[k][r] = -1;
  }
}

// Notes the scores of the marked keys that stand in a run.
NOINLINE void catch_marks(const Run &run, int n0, const float *s, Statistics &X) {
  for (int t = 0; t < MARKED; t++) {
    if (X.mark_hi[t] < n0 + run.j0 || X.mark_lo[t] >= n0 + run.j1) continue;
    for (int r = run.v0 * VL; r < run.v1 * VL; r++) {
      const int j = X.mark[t][r] - n0;
      if (j >= run.j0 && j < run.j1) X.marked[t][r] = s[j * ROWS + r];
    }
  }
}

INLINE void insert_top(Statistics &X, int top_k, int r, float s_ij, int32_t j) {
  int k = top_k - 1;
  for (; k > 0 && s_ij > X.top[k - 1][r]; k--) {
    X.top[k][r] = X.top[k - 1][r];
    X.top_key[k][r] = X.top_key[k - 1][r];
  }
  X.top[k][r] = s_ij, X.top_key[k][r] = j;
  X.least[r] = X.top[top_k - 1][r];
}

NOINLINE void take_top(const Run &run, int n0, const float *s, int top_k, Statistics &X) {
  for (int v = run.v0; v < run.v1; v++)
    for (int j = run.j0; j < run.j1; j++) {
      const float *s_j = s + j * ROWS;
      if (!any(load(s_j + v * VL) > load(X.least + v * VL))) continue;
      for (int r = v * VL; r < (v + 1) * VL; r++)
        if (s_j[r] > X.least[r]) insert_top(X, top_k, r, s_j[r], n0 + j);
    }
}

// What is known of a vector of rows when its keys have passed:
// w = exp2((s - m) * exponent) * factor, log w = log(exp(s - m)) + log_factor.
struct Ended {
  vf factor, log_factor;
  vi empty;
};

// A number of each row of a vector, to where it is wanted.
INLINE void store_rows(float *to, vf x, const Plan &plan, int64_t b, const Place *row, int rows) {
  if (!to) return;
  const int64_t first = row_number(plan, b, row[0]);
  if (row_number(plan, b, row[rows - 1]) - first == rows - 1)
    memcpy(to + first, &x, size_t(rows) * sizeof(float));
  else  // rows of packed heads
    for (int r = 0; r < rows; r++) to[row_number(plan, b, row[r])] = x[r];
}

NOINLINE void store_statistics(const Plan &plan, int64_t b, const Panel &P, int v, int rows,
                               const State &state, const Statistics &X, const Ended &end) {
  const clearhead_call &c = *plan.call;
  const vf log_p = state.entropy * (plan.raw ? plan.scale : 1.f) + state.l * end.log_factor;
  const vf entropy = end.empty ? vf{} : vmax(vf{}, log_p * -end.factor) + 0.f;
  const vf distance = state.distance * end.factor;
  const auto weight = [&](const float *s) {
    const vf w = exp2(load(s + v * VL) - state.m, plan.exponent) * end.factor;
    return end.empty ? vf{} : w;
  };
  const Place *row = P.place + v * VL;
  store_rows(c.entropy, entropy, plan, b, row, rows);
  store_rows(c.distance, distance, plan, b, row, rows);
  float *const masses[MARKED] = {c.first_mass, c.previous_mass, c.self_mass};
  for (int t = 0; t < MARKED; t++)
    if (masses[t]) store_rows(masses[t], weight(X.marked[t]), plan, b, row, rows);
  if (!c.top_weights) return;
  vf top[CLEARHEAD_MAX_TOP_K];
  for (int k = 0; k < c.top_k; k++) {
    top[k] = weight(X.top[k]);
    if (k > 0) top[k] = top[k] > top[k - 1] ? top[k - 1] : top[k];  // exp2 may be an ulp off
  }
  for (int r = 0; r < rows; r++)
    for (int k = 0; k < c.top_k; k++) {
      const int64_t at = row_number(plan, b, row[r]) * c.top_k + k;
      c.top_weights[at] = top[k][r];
      c.top_keys[at] = X.top_key[k][v * VL + r];
    }
}

}  // namespace
