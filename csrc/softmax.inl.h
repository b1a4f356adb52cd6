// From products to weights, for one piece of a block of keys (a Run) and N vectors of rows.
//
//   1   s_ij = scale * (q_i . k_j), softcap, ALiBi, what is added; -inf where blocked
//   2   m_i  = max(m_i, s_ij)
//   3   p_ij = exp(s_ij - m_i), exactly 0 where blocked
//   4   l_i += p_ij
//
// s - m comes first and is then scaled: rows whose scores are all about -3e38 are ordinary rows. A
// blocked score is replaced, never added to, so NaN under a block is inert.

namespace {

// The rules of one block that need a look at data, NULL where there is none.
struct Data {
  const float *mask;      // tile of 0 and 1
  const float *added[2];  // tiles
  const uint8_t *key_mask;
  int64_t key_mask_stride;
  const int64_t *doc_k;
  int64_t doc_k_stride;
};

INLINE vi blocked_by_position(const Panel &P, int v, vi j) {
  return (j < load(P.first + v * VL)) | (j >= load(P.end + v * VL));
}

// Step 1, the product. `last` says that nothing else is done to the scores: then also the keys that
// a row does not see by its position, and step 2.
template <bool PAIRS, int KEYS, int N>
INLINE void score_tile(Rows K, const float *q, int words, const Panel &P, int v0, int n, bool last,
                       bool cut, float *s, float *m) {
  const int stretch = stretch_of<PAIRS>(words);
  vf s_ij[KEYS][N];
  dot<PAIRS, KEYS, N>(K, q, int(least(stretch, words)), s_ij);
  for (int d = stretch; d < words; d += stretch) {
    vf part[KEYS][N];
    dot<PAIRS, KEYS, N>({K.at + d, K.stride}, q + d * ROWS, int(least(stretch, words - d)), part);
    UNROLL for (int j = 0; j < KEYS; j++) UNROLL for (int v = 0; v < N; v++)
      s_ij[j][v] += part[j][v];
  }
  if (last && cut)
    UNROLL for (int j = 0; j < KEYS; j++) UNROLL for (int v = 0; v < N; v++)
      s_ij[j][v] = blocked_by_position(P, v0 + v, splat(n + j)) ? splat(-INFINITY) : s_ij[j][v];
  UNROLL for (int j = 0; j < KEYS; j++) UNROLL for (int v = 0; v < N; v++)
    store(s + j * ROWS + v * VL, s_ij[j][v]);
  if (!last) return;
  UNROLL for (int v = 0; v < N; v++) {
    vf top = load(m + v * VL);
    UNROLL for (int j = 0; j < KEYS; j++) top = vmax(s_ij[j][v], top);
    store(m + v * VL, top);
  }
}

template <bool PAIRS, int N>
NOINLINE void scores(Rows K, const float *q, int words, const Panel &P, const Run &run, int n0,
                     bool last, float *s, float *m) {
  int j = run.j0;
  if (N == 1)
    for (; j + TILE1 <= run.j1; j += TILE1)
      score_tile<PAIRS, TILE1, N>({K.at + j * K.stride, K.stride}, q, words, P, run.v0, n0 + j, last,
                                  run.cut, s + j * ROWS, m);
  constexpr int KEYS = TILE_OF<PAIRS>;
  for (; j < run.j1; j += KEYS)
    score_tile<PAIRS, KEYS, N>({K.at + j * K.stride, K.stride}, q, words, P, run.v0, n0 + j, last,
                               run.cut, s + j * ROWS, m);
}

INLINE vf magnitude(vi x) { return __builtin_convertvector(x < 0 ? -x : x, vf); }

// What one block of a call needs done to its products. The usual dense masks have loops of their
// own, which ask nothing for every vector.
constexpr int SCALE = 1, ADD = 2, DENSE = 4, OTHER = 8;

// Step 1, what a scale that is not folded, a softcap and ALiBi make of the product. Rounded, so that
// what is added later gives the same bits in every loop.
template <int RULES>
INLINE vf shaped(const clearhead_call &c, float scale, float per_cap, vf x, vf slope, vi apart) {
  x *= scale;
  if ((RULES & OTHER) && c.softcap != 0) x = tanh(x * per_cap) * float(c.softcap);
  if ((RULES & OTHER) && c.slopes) x -= slope * magnitude(apart);
  return rounded(x);
}

template <int RULES>
NOINLINE void rule_scores_by(const Plan &plan, const Panel &P, const Data &data, const Run &run,
                             int n0, float *s, float *m) {
  const clearhead_call &c = *plan.call;
  constexpr bool all = RULES & OTHER;
  const float per_cap = c.softcap != 0 ? 1 / float(c.softcap) : 0;
  const vf never = splat(-INFINITY);
  for (int v = run.v0; v < run.v1; v++) {
    const int lane = v * VL;
    const vi first = load(P.first + lane), end = load(P.end + lane), own = load(P.own + lane);
    const vi low = load(P.doc_low + lane), high = load(P.doc_high + lane);
    const vf slope = load(P.slope + lane);
    vf top = load(m + lane);
    for (int j = run.j0; j < run.j1; j++) {
      const int at = j * ROWS + lane;
      vf x = load(s + at);
      if (all ? !plan.raw : (RULES & SCALE) != 0)
        x = shaped<RULES>(c, plan.scale, per_cap, x, slope, own - (n0 + j));
      vi blocked = {};
      for (int n = 0; n < (all ? 2 : 1); n++) {
        if (all ? !data.added[n] : (RULES & ADD) == 0) continue;
        const vf y = load(data.added[n] + at);
        x += y;
        blocked |= y == never;
      }
      if (run.cut) blocked |= (n0 + j < first) | (n0 + j >= end);
      if (all ? data.mask != nullptr : (RULES & DENSE) != 0) blocked |= load(data.mask + at) == 0.f;
      if (all && data.key_mask && !data.key_mask[j * data.key_mask_stride]) blocked |= -1;
      if (all && data.doc_k) {
        const int64_t doc = data.doc_k[j * data.doc_k_stride];
        blocked |= (low != int32_t(doc)) | (high != int32_t(doc >> 32));
      }
      x = blocked ? never : x;
      store(s + at, x);
      top = vmax(x, top);
    }
    store(m + lane, top);
  }
}

// Steps 1 and 2, what needs more than the product and the positions.
INLINE void rule_scores(const Plan &plan, const Panel &P, const Data &data, const Run &run, int n0,
                        float *s, float *m) {
  const clearhead_call &c = *plan.call;
  const bool other = data.key_mask || data.doc_k || data.added[1] || c.softcap != 0 || c.slopes;
  if (!other && plan.raw && data.mask)
    return rule_scores_by<DENSE>(plan, P, data, run, n0, s, m);
  if (!other && !plan.raw && !data.mask && data.added[0])
    return rule_scores_by<SCALE | ADD>(plan, P, data, run, n0, s, m);
  rule_scores_by<SCALE | ADD | DENSE | OTHER>(plan, P, data, run, n0, s, m);
}

// Steps 3 and 4 of one vector: p_ij, and the sums that statistics want.
template <int WANTED>
INLINE vf weight(vf s_ij, vf base, float exponent, vi apart, vf &l, vf &entropy, vf &distance) {
  const vf above = s_ij - base, p_ij = exp2(above, exponent);
  l += p_ij;
  // 0 times the least where blocked
  if (WANTED & ENTROPY) entropy += p_ij * vmax(splat(EXP2_LEAST / exponent), above);
  if (WANTED & DISTANCE) distance += p_ij * magnitude(apart);
  return p_ij;
}

// Steps 3 and 4 of a run: its p_ij as words for `weigh`, which may stand where the scores do. base
// is m, and 0 for a row that has seen nothing; own counts from the first of the keys.
template <bool PAIRS, int N, int WANTED>
NOINLINE void exponentials(const float *s, float *words, int keys, const float *base,
                           float exponent, const vi *own, Sums *sums) {
  vf b[N], e[N], d[N], used[N];
  UNROLL for (int v = 0; v < N; v++)
    b[v] = load(base + v * VL), e[v] = sums[v].entropy, d[v] = sums[v].distance,
    used[v] = sums[v].used;
  for (int j0 = 0; j0 < keys; j0 += TILE) {
    const int end = keys < j0 + TILE ? keys : j0 + TILE;
    vf part[N] = {};
    const auto p = [&](int j, int v) __attribute__((always_inline)) {
      const vf s_ij = load(s + j * ROWS + v * VL);
      return weight<WANTED>(s_ij, b[v], exponent, own[v] - j, part[v], e[v], d[v]);
    };
    if constexpr (!PAIRS) {
      for (int j = j0; j < end; j++)
        UNROLL for (int v = 0; v < N; v++) store(words + j * ROWS + v * VL, p(j, v));
    } else {
      for (int j = j0; j < end; j += 2)
        UNROLL for (int v = 0; v < N; v++) {
          const vf first = p(j, v), second = j + 1 < end ? p(j + 1, v) : vf{};
          const vf word = pair_of<PAIRS>(first, second);
          used[v] = add_product<PAIRS>(used[v], word, pair_of<PAIRS>(splat(1.f), splat(1.f)));
          store(words + j / 2 * ROWS + v * VL, word);
        }
    }
    UNROLL for (int v = 0; v < N; v++) sums[v].l += part[v];
  }
  UNROLL for (int v = 0; v < N; v++) sums[v] = {sums[v].l, used[v], e[v], d[v]};
}

}  // namespace
