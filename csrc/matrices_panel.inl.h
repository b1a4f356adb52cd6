// The two products by matrix tiles for panels of query rows, which stand in the lanes:
//
//   matrix_scores    S^T = K Q^T       16 keys x 16 rows at a time
//   Weighing         p_ij, as words of two keys
//   matrix_weigh     O^T += V^T P^T    16 columns x 16 rows at a time

namespace {

// -- scores ----------------------------------------------------------------------------------------

// Adds the products of TILES tiles of words to the scores of some keys and of N vectors of rows.
// Tiles: 0 and 1 are sums, 2 and 3 keys, the others rows, which stay.
template <int N, int TILES>
NOINLINE void score_tiles(Rows K, const float *q, int keys, float *s, bool first) {
  static_assert(N <= 2 && N * TILES <= 4, "eight tiles");
  each<TILES>([&](auto t) {
    each<N>([&](auto v) {
      constexpr int T = VALUE(t), V = VALUE(v);
      tile_load<4 + T * N + V>(q + T * TILE_WORDS * ROWS + V * VL, ROW_BYTES);
    });
  });
  for (int j = 0; j < keys; j += TILE, K.at += TILE * K.stride, s += TILE * ROWS) {
    each<N>([&](auto v) {
      first ? tile_zero<VALUE(v)>() : tile_load<VALUE(v)>(s + VALUE(v) * VL, ROW_BYTES);
    });
    each<TILES>([&](auto t) {
      constexpr int T = VALUE(t), KEYS = 2 + T % 2;
      tile_load<KEYS>(K.at + T * TILE_WORDS, K.stride * int64_t(sizeof(float)));
      each<N>([&](auto v) { tile_product<VALUE(v), KEYS, 4 + VALUE(t) * N + VALUE(v)>(); });
    });
    each<N>([&](auto v) { tile_store<VALUE(v)>(s + VALUE(v) * VL, ROW_BYTES); });
  }
}

NOINLINE void block_keys(const Panel &P, int v, int j0, int keys, float *s) {
  for (int j = 0; j < keys; j++, s += ROWS)
    store(s, blocked_by_position(P, v, splat(j0 + j)) ? splat(-INFINITY) : load(s));
}

// In four chains: each maximum waits for the one before it.
NOINLINE vf maximum(const float *s, int keys, vf m) {
  vf top[4] = {m, m, m, m};
  int j = 0;
  for (; j + 4 <= keys; j += 4)
    UNROLL for (int n = 0; n < 4; n++) top[n] = vmax(load(s + (j + n) * ROWS), top[n]);
  for (; j < keys; j++) top[0] = vmax(load(s + j * ROWS), top[0]);
  return vmax(vmax(top[0], top[1]), vmax(top[2], top[3]));
}

// Step 1 of softmax.inl.h, the product, and if `last` the keys blocked by position and step 2.
NOINLINE void matrix_scores(Rows K, const float *q, const Panel &P, const Run &run, int n0,
                            bool last, float *s, float *m) {
  const int keys = run.j1 - run.j0, words = int(K.stride);
  K.at += run.j0 * K.stride, s += run.j0 * ROWS;
  // Two vectors share the keys that a tile holds; but one whose words fill the tiles that stay needs
  // no sums in between (D = 128: 0.93 to 0.98 of the time).
  const int vectors = words % (4 * TILE_WORDS) == 0 ? 1 : 2;
  for (int v = run.v0; v < run.v1; v += vectors)
    for (int w = 0; w < words;) {
      const Rows K_w = {K.at + w, K.stride};
      const float *q_w = q + w * ROWS + v * VL;
      const int tiles = (words - w) / TILE_WORDS;
      const bool one = vectors == 1 || v + 1 == run.v1, first = w == 0;
      if (!one && tiles > 1)
        score_tiles<2, 2>(K_w, q_w, keys, s + v * VL, first), w += 2 * TILE_WORDS;
      else if (!one)
        score_tiles<2, 1>(K_w, q_w, keys, s + v * VL, first), w += TILE_WORDS;
      else if (tiles > 3)
        score_tiles<1, 4>(K_w, q_w, keys, s + v * VL, first), w += 4 * TILE_WORDS;
      else if (tiles > 1)
        score_tiles<1, 2>(K_w, q_w, keys, s + v * VL, first), w += 2 * TILE_WORDS;
      else
        score_tiles<1, 1>(K_w, q_w, keys, s + v * VL, first), w += TILE_WORDS;
    }
  for (int v = run.v0; last && v < run.v1; v++) {
    if (run.cut) block_keys(P, v, n0 + run.j0, keys, s + v * VL);
    store(m + v * VL, maximum(s + v * VL, keys, load(m + v * VL)));
  }
}

// -- weights ---------------------------------------------------------------------------------------

// Two neighbours as words: what the first 8 bits are, and the next 8.
INLINE void split(vf first, vf second, float *high, float *low) {
  store(high, upper_halves(first, second));
  store(low, upper_halves(first - vf(vu(first) & UPPER), second - vf(vu(second) & UPPER)));
}

// What a panel sees of a block, and what its weights count from.
struct Weights {
  const Run *runs, *end;
  const Panel &P;
  int n0;  // where the block starts
  float exponent;
  const float *base;
  float *s;
};

// Steps 3 and 4 of a vector of rows, a few keys after each product of the vector before it, since
// tiles and vectors work side by side: full calls take 0.87 to 0.95 of the time (a Xeon, 2026-12). By
// eight keys they take 1.12 to 1.18 times as long as by four, by two 1.02 to 1.09 times.
//
// The words of two keys stand where their scores did, those of the first parts before those of the
// second ones.
template <int WANTED>
struct Weighing {
  static constexpr int AT_ONCE = 4;
  int v = 0, j = 0, j1 = 0;  // keys [j, j1) are left of a run
  const Run *run = nullptr, *last = nullptr;  // the runs after it
  float exponent = 0, *s = nullptr;
  vf base = {}, part = {};
  vi own = {};
  Sums sums = {};

  INLINE void start(const Weights &W, int vector) {
    v = vector, run = W.runs, last = W.end, exponent = W.exponent, s = W.s + v * VL;
    base = load(W.base + v * VL), own = load(W.P.own + v * VL) - W.n0;
    find_keys();
  }

  // The next run that this vector sees; false if there is none.
  INLINE bool find_keys() {
    for (; j == j1 && run < last; run++)
      if (run->v0 <= v && v < run->v1) j = run->j0, j1 = run->j1;
    return j < j1;
  }

  INLINE vf weight_of(int key) {
    return weight<WANTED>(load(s + key * ROWS), base, exponent, own - key, part, sums.entropy,
                          sums.distance);
  }

  // Keys from j on, COUNT of them or one less.
  template <int COUNT>
  INLINE void make(int keys) {
    UNROLL for (int n = 0; n < COUNT; n += 2) {
      float *const at = s + (j + n) * ROWS;
      const vf first = weight_of(j + n), second = n + 1 < keys ? weight_of(j + n + 1) : vf{};
      split(first, second, at, at + ROWS);
    }
    j += keys;
    if (j % TILE == 0 || j == j1) sums.l += part, part = vf{};
  }

  INLINE void after_product() {
    if (j + AT_ONCE <= j1) make<AT_ONCE>(AT_ONCE);
  }
};

// What is left of the keys.
template <int WANTED>
NOINLINE void finish(Weighing<WANTED> *left) {
  Weighing<WANTED> W = *left;  // a copy can stand in registers
  while (W.find_keys()) {
    while (W.j + W.AT_ONCE <= W.j1) W.template make<W.AT_ONCE>(W.AT_ONCE);
    while (W.j < W.j1) W.template make<2>(int(least(2, W.j1 - W.j)));
  }
  left->sums = W.sums;
}

// -- values ----------------------------------------------------------------------------------------

// Step 5 of one vector of rows and COUNT groups of keys.
// Tiles: 0 are sums, 1 values, the others weights, which stay.
template <int COUNT, int WANTED>
NOINLINE void weigh_groups(const float *values, const float *p, float *o, int Dv, bool fresh,
                           Weighing<WANTED> *beside) {
  Weighing<WANTED> other = *beside;  // as in finish
  each<COUNT>([&](auto g) {
    constexpr int G = VALUE(g);
    tile_load<2 + 2 * G>(p + G * GROUP * ROWS, 2 * ROW_BYTES);
    tile_load<3 + 2 * G>(p + G * GROUP * ROWS + ROWS, 2 * ROW_BYTES);
  });
  for (int d = 0; d < Dv; d += TILE, o += TILE * ROWS, values += TILE * KEY_WORDS) {
    fresh ? tile_zero<0>() : tile_load<0>(o, ROW_BYTES);
    each<COUNT>([&](auto g) __attribute__((always_inline)) {
      constexpr int G = VALUE(g);
      tile_load<1>(values + G * TILE_WORDS, KEY_WORDS * sizeof(float));
      tile_product<0, 1, 2 + 2 * G>(), other.after_product();
      tile_product<0, 1, 3 + 2 * G>(), other.after_product();
    });
    tile_store<0>(o, ROW_BYTES);
  }
  beside->j = other.j, beside->part = other.part, beside->sums = other.sums;
}

NOINLINE void rescale(float *o, vf a, int Dv) {
  if (!any(a != 1.f)) return;
  for (int d = 0; d < Dv; d++) store(o + d * ROWS, load(o + d * ROWS) * a);
}

// The keys of a block that a vector of rows sees, in whole groups; their weights are 0 where only
// others see them.
struct Keys {
  int first, end;
};
INLINE Keys fill_groups(const Weights &W, int v) {
  Keys seen = {0, 0};
  const auto fill = [&](int j, int end) {
    for (; j < end; j++) store(W.s + j * ROWS + v * VL, vf{});
  };
  for (const Run *run = W.runs; run < W.end; run++) {
    if (v < run->v0 || v >= run->v1) continue;
    if (seen.end == 0) seen.first = seen.end = run->j0 / GROUP * GROUP;
    fill(seen.end, run->j0);
    seen.end = run->j1 + run->j1 % 2;
  }
  fill(seen.end, to_group(seen.end));
  return {seen.first, to_group(seen.end)};
}

// Steps 3 to 5 of a panel and a block.
template <int WANTED>
NOINLINE void matrix_weigh(const Weights &W, Rows V, float *o, const float *a, int Dv, bool fresh,
                           Sums *sums) {
  const int vectors = W.P.vectors;
  Weighing<WANTED> next = {};
  next.start(W, 0);
  for (int v = 0; v < vectors; v++) {
    if (next.find_keys()) finish(&next);
    sums[v] = next.sums;
    next = {};
    if (v + 1 < vectors) next.start(W, v + 1);
    const Keys seen = fill_groups(W, v);
    const float *values = V.at + seen.first / 2, *p = W.s + seen.first * ROWS + v * VL;
    float *const o_v = o + v * VL;
    if (!fresh) rescale(o_v, load(a + v * VL), Dv);
    switch ((seen.end - seen.first) / GROUP) {
      case 0: if (fresh) weigh_groups<0>(values, p, o_v, Dv, true, &next); break;
      case 1: weigh_groups<1>(values, p, o_v, Dv, fresh, &next); break;
      case 2: weigh_groups<2>(values, p, o_v, Dv, fresh, &next); break;
      default: weigh_groups<3>(values, p, o_v, Dv, fresh, &next);
    }
  }
}

}  // namespace
