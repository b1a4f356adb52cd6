// The two products of few rows (decoding with a cache): K and V are read once, where they lie, whole
// vectors at a time. It does not: walk the blocks, apply the rules, or make the weights
// (few.inl.h does). The second product is in decode_values.inl.h.
//
//   few_scores   s_ij = sum_d q_id k_jd              1: KL keys j in the lanes
//     for some vectors of keys j: for a quad of words d: load it of every key, transpose, multiply
//     with each row i
//   few_weigh    o_id = o_id a_i + sum_j p_ij v_jd   4, 5: VL columns d in the lanes
//     for a few vectors of columns d: for each key j of the block: load, multiply with each row i
//
// The sums are those of microkernel.inl.h, d and j upwards, one number after the other: a row has
// the same bits whichever of the two made it. A dot product with d in the lanes would be simpler,
// and would not. Where products go by PAIRS (pairs.inl.h), these are of neighbours d, or of keys j.
//
// Rows i of q, of the scores and of the output stand one behind the other, R of them: those of a
// panel, and then the last of these again.
//
// The first product asks the memory for keys that come next. Where rows of V are read in parts,
// which no processor foresees, it asks for the values of its block as well, and the second one for
// the keys of the next block: then memory and arithmetic wait less for each other. Four rows of 128
// float32 took 1.15 times as long without (an EPYC 9004, two threads; one 1.26, 2026-11). Values that
// are read row by row come in time as it is, and asking for them too took up to 1.1 times as long.

namespace {

constexpr int FEW = VL < MOST_FEW ? VL : MOST_FEW;
constexpr int QUAD = 4;  // words that are transposed at once

// Calls f<T, R> for R = few, which is no more than FEW.
#define BY_FEW(few, f, ...)                                  \
  switch (few) {                                             \
    case 1: f<T, 1>(__VA_ARGS__); break;                     \
    case 2: f<T, 2>(__VA_ARGS__); break;                     \
    case 4: f<T, 4>(__VA_ARGS__); break;                     \
    case 6: f<T, (FEW < 6 ? FEW : 6)>(__VA_ARGS__); break;   \
    case 8: f<T, (FEW < 8 ? FEW : 8)>(__VA_ARGS__); break;   \
    default: f<T, FEW>(__VA_ARGS__);                         \
  }

// Vectors of columns of V that R rows take at a time, of TILE1 sums.
template <int R>
constexpr int FEW_COLUMNS = TILE1 / R < 8 ? TILE1 / R : 8;

// Whether rows of V are read in parts. For one or two rows the code that could ask, though it did
// not, cost a tenth where keys and values came from memory.
template <int R>
INLINE bool in_parts_of(int64_t Dv) {
  return R > 2 && Dv > FEW_COLUMNS<R> * VL;
}

// Rows j of a tensor where they lie.
template <class T>
struct FewRows {
  const T *at;
  int64_t stride;
  int size;  // of a row
};

template <class T>
constexpr int IN_WORD = int(4 / sizeof(T));  // numbers that a word of a key holds

// Words of a row of keys, with zeros to whole quads; floats of a row of q, which may hold as many
// numbers.
template <class T>
INLINE int64_t few_words(int D) {
  constexpr int IN_QUAD = QUAD * IN_WORD<T>;
  return (D + IN_QUAD - 1) / IN_QUAD * QUAD;
}
INLINE int64_t few_stride(int D) { return (D + 15) / 16 * 16; }

// Number n of each word.
template <class V>
INLINE V number(V words, int, float) {
  return words;
}
INLINE vk number(vk words, int n, bfloat16) {
  return vk(n == 0 ? vku(words) << 16 : vku(words) & 0xffff0000u);
}
INLINE vk number(vk words, int n, float16) {
  return from_float16(__builtin_convertvector(n == 0 ? vku(words) & 0xffffu : vku(words) >> 16, vkh));
}

// Adds the products of a quad of words of U KL keys.
template <class T, int R, int U>
INLINE void dot_quad(const char *k, int64_t stride, const float *q, int64_t q_stride,
                     vk (&s)[R][U]) {
  __asm__("" : "+r"(stride));  // else the compiler keeps the addresses of all keys, on the stack
  constexpr bool PAIRS = PAIRED<T>;
  constexpr int NUMBERS = PAIRS ? 1 : IN_WORD<T>;  // of a word, by products
  UNROLL for (int u = 0; u < U; u++) {
    vk x[QUAD];
    UNROLL for (int r = 0; r < QUAD; r++)
      x[r] = load_quads(k + (u * KL + r) * stride, QUAD * stride);
    transpose_in_quads(x[0], x[1], x[2], x[3]);
    UNROLL for (int d = 0; d < QUAD * NUMBERS; d++) {
      const vk k_d = PAIRS ? x[d / NUMBERS] : number(x[d / NUMBERS], d % NUMBERS, T{});
      UNROLL for (int i = 0; i < R; i++)
        s[i][u] = add_product<PAIRS>(s[i][u], k_d, splat_word<PAIRS, vk>(q + i * q_stride + d));
    }
  }
}

// Asks for a part of U KL rows, while a quad of as many keys is used: these are read in too many
// places at a time for the processor to foresee. Row by row, which it can take up: a column of the
// rows at a time, tokens over 4096 keys took 1.15 to 1.2 times as long (a Xeon, 2026-12).
template <int U, class T>
INLINE void expect_rows(const FewRows<T> &rows, int64_t j, int64_t quad) {
  constexpr int LINE = 64, QUADS = LINE / (QUAD * 4), COUNT = (U * KL + QUADS - 1) / QUADS;
  const unsigned lines = (unsigned(rows.size) * unsigned(sizeof(T)) + LINE - 1) / LINE;
  const unsigned first = unsigned(quad) * COUNT;
  unsigned line = first % lines;
  const char *row = (const char *)(rows.at + (j + first / lines) * rows.stride);
  for (int n = 0; n < COUNT; n++) {
    __builtin_prefetch(row + line * LINE, 0, 2);
    if (++line == lines) line = 0, row += rows.stride * int64_t(sizeof(T));
  }
}

// Rows of which the ends, or some of `rows`, are missing, with 0 for these: what stood there could be
// numbers below the normal ones, whose products take Intel's processors a hundred times as long.
template <class T>
NOINLINE const T *copy_keys(const T *k, int64_t stride, int keys, int rows, int D, int64_t words,
                            float *to) {
  memset(to, 0, size_t(rows * words) * sizeof(float));
  for (int j = 0; j < keys; j++) memcpy(to + j * words, k + j * stride, size_t(D) * sizeof(T));
  return reinterpret_cast<const T *>(to);
}

// Step 1 of U KL keys from j on, the last of which may be missing.
template <class T, int R, int U>
INLINE void score_few(const FewRows<T> &K, const FewRows<T> &V, const float *q, int j, int j1,
                      float *copy, float *s) {
  constexpr int KEYS = U * KL, NUMBERS = PAIRED<T> ? 1 : IN_WORD<T>;
  const bool in_parts = in_parts_of<R>(V.size);
  const int64_t words = few_words<T>(K.size), q_stride = few_stride(K.size);
  const int64_t stretch = PAIRED<T> ? words : stretch_of<false>(K.size) / IN_WORD<T>;
  const int keys = int(least(j1 - j, KEYS));
  const T *k = K.at + j * K.stride;
  int64_t stride = K.stride;
  if (keys < KEYS || words * IN_WORD<T> != K.size)
    k = copy_keys(k, stride, keys, KEYS, K.size, words, copy), stride = words * IN_WORD<T>;
  vk sum[R][U] = {};
  for (int64_t start = 0; start < words; start += stretch) {
    const int64_t end = least(words, start + stretch);
    vk part[R][U] = {};
    for (int64_t w = start; w < end; w += QUAD) {
      expect_rows<U>(K, j + KEYS, w / QUAD);
      if (in_parts) expect_rows<U>(V, j, w / QUAD);
      dot_quad<T, R, U>((const char *)k + w * 4, stride * int64_t(sizeof(T)), q + w * NUMBERS,
                        q_stride, part);
    }
    UNROLL for (int i = 0; i < R; i++) UNROLL for (int u = 0; u < U; u++) sum[i][u] += part[i][u];
  }
  UNROLL for (int i = 0; i < R; i++) UNROLL for (int u = 0; u < U; u++)
    memcpy(s + i * FEW_STRIDE + j + u * KL, &sum[i][u], sizeof(vk));
}

// Step 1. What stands in s beyond the last key of the run is of no row.
template <class T, int R>
NOINLINE void few_scores(const FewRows<T> &K, const FewRows<T> &V, const float *q, const Run &run,
                         float *copy, float *s) {
  constexpr int U = TILE1 / R < 1 ? 1 : TILE1 / R < 4 ? TILE1 / R : 4;
  int j = run.j0;
  for (; U > 1 && j + U * KL <= run.j1; j += U * KL)
    score_few<T, R, U>(K, V, q, j, run.j1, copy, s);
  for (; j < run.j1; j += KL) score_few<T, R, 1>(K, V, q, j, run.j1, copy, s);
}

}  // namespace
