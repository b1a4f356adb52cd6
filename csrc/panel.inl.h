// Panels of query rows: which rows stand in which lanes, which keys these see by their position
// (causal, window), and how that cuts a block of keys.

namespace {

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t to_tile(int64_t n) { return (n + TILE - 1) / TILE * TILE; }

// A row of a panel: its query head and number. Lanes beyond the last row repeat it.
struct Place {
  int32_t h, i;
};

// Keys [j0, j1) of a block, counted from its start n0, seen by vectors [v0, v1) of a panel. It is cut
// when some row of these does not see all of these keys.
struct Run {
  int j0, j1, v0, v1;
  bool cut;
};

struct Panel {
  int rows, vectors;
  bool fresh;                    // its output holds nothing so far, and is not even 0
  int lo[NV], hi[NV];            // keys that some row of a vector sees by its position
  int all_lo[NV], all_hi[NV];    // keys that every row of it sees
  int64_t doc_least, doc_most;   // documents of the rows
  alignas(64) int32_t first[ROWS], end[ROWS];  // keys that a row sees by its position
  alignas(64) int32_t own[ROWS];
  alignas(64) int32_t doc_low[ROWS], doc_high[ROWS];  // halves of the number of its document
  alignas(64) float slope[ROWS];
  State state[NV], total[NV];  // of the span so far, of the spans before
  Place place[ROWS];
};

// The rows of panel `number` of key/value head kv.
NOINLINE void place_rows(const Plan &plan, int64_t kv, int64_t number, Panel &P) {
  const int64_t L = plan.call->L, G = plan.G;
  const int64_t start = plan.merged ? number * ROWS : number / G * ROWS;
  const int64_t rows = (plan.merged ? G * L : L) - start;
  P.rows = int(least(rows, ROWS));
  P.vectors = (P.rows + VL - 1) / VL;
  for (int r = 0; r < P.vectors * VL; r++) {
    const int64_t row = start + (r < P.rows ? r : P.rows - 1);
    const int64_t g = plan.merged ? row / L : number % G;
    P.place[r] = {int32_t(kv * G + g), int32_t(plan.merged ? row - g * L : row)};
  }
}

// Where a row stands in m, z and the statistics.
INLINE int64_t row_number(const Plan &plan, int64_t b, Place row) {
  return (b * plan.call->H + row.h) * plan.L_stored + row.i;
}

// The keys that each row sees by its position, and per vector those that some and that all see.
NOINLINE void find_ranges(const clearhead_call &c, Panel &P) {
  for (int v = 0; v < P.vectors; v++) {
    int lo = INT32_MAX, hi = 0, all_lo = 0, all_hi = INT32_MAX;
    for (int r = v * VL; r < (v + 1) * VL; r++) {
      const int64_t own = P.place[r].i + c.S - c.L;
      const int64_t first = c.left > own ? 0 : own - c.left;
      const int64_t end = c.right >= c.S - own ? c.S : own + c.right + 1;
      P.own[r] = int32_t(own);
      P.first[r] = int32_t(least(first, c.S));
      P.end[r] = int32_t(most(end, 0));
      all_lo = int(most(all_lo, P.first[r]));
      all_hi = int(least(all_hi, P.end[r]));
      if (P.first[r] >= P.end[r]) continue;
      lo = int(least(lo, P.first[r]));
      hi = int(most(hi, P.end[r]));
    }
    P.lo[v] = lo, P.hi[v] = hi, P.all_lo[v] = all_lo, P.all_hi[v] = all_hi;
  }
}

NOINLINE void read_row_rules(const clearhead_call &c, int64_t b, Panel &P) {
  P.doc_least = INT64_MAX, P.doc_most = INT64_MIN;
  for (int r = 0; r < P.vectors * VL; r++) {
    if (c.slopes)
      P.slope[r] = c.slopes[b * c.slopes_strides[0] + P.place[r].h * c.slopes_strides[1]];
    if (c.doc_q) {
      const int64_t doc = c.doc_q[b * c.doc_q_strides[0] + P.place[r].i * c.doc_q_strides[1]];
      P.doc_least = least(P.doc_least, doc), P.doc_most = most(P.doc_most, doc);
      P.doc_low[r] = int32_t(doc), P.doc_high[r] = int32_t(doc >> 32);
    }
  }
}

// Cuts what a panel sees of a block into runs, in the order of the keys. Limits go to whole tiles:
// a key too many is blocked later.
NOINLINE int cut_runs(const Panel &P, int64_t n0, int keys, Run *runs) {
  int lo[NV], hi[NV], count = 0;
  for (int v = 0; v < P.vectors; v++) {
    lo[v] = int(most(P.lo[v] - n0, 0)) / TILE * TILE;
    hi[v] = int(least(to_tile(most(P.hi[v] - n0, 0)), keys));
  }
  for (int j = 0, next; j < keys; j = next) {
    next = keys;
    Run run = {j, 0, NV, 0, false};
    for (int v = 0; v < P.vectors; v++) {
      if (lo[v] >= hi[v]) continue;
      if (lo[v] <= j && j < hi[v]) run.v0 = int(least(run.v0, v)), run.v1 = v + 1;
      if (lo[v] > j) next = int(least(next, lo[v]));
      if (hi[v] > j) next = int(least(next, hi[v]));
    }
    if (run.v1 == 0) continue;
    run.j1 = next;
    run.cut = (next - j) % TILE != 0;  // what a tile computes beyond the last key is thrown away
    for (int v = run.v0; v < run.v1; v++)
      run.cut |= n0 + run.j0 < P.all_lo[v] || n0 + run.j1 > P.all_hi[v];
    runs[count++] = run;
  }
  return count;
}

}  // namespace
