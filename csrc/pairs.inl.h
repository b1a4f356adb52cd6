// bfloat16 for products that take two of them at a time (dpbf16): words of two neighbours, the first
// in the lower half. What follows fixes the bits:
//
//   query, key   neighbours d: (0, 1), (2, 3), ... of a head; an odd D ends with a pair (x, 0)
//   p, value     neighbours j, counted from the start of the block; an odd end is a pair (x, 0)
//   s_ij         from 0, a pair after the other; within one, the instruction's own order
//   p_ij         rounded to bfloat16, nearest even; `used` is the sum of these, in the same order
//                and by the same instruction, with ones for values
//   out_i        o_i over `used`; m, z and the statistics are of the p_ij before they are rounded
//
// Products are exact, sums are float32. Denormal numbers count as 0, as the instruction has it. Of
// this file products of matrices (matrices.inl.h) share the words of query and key, and what is
// finite.

namespace {

struct Pair {
  bfloat16 first, second;
};

INLINE vf load_as_float(const Pair *from) { return load_bytes<vf>(from); }

INLINE float word_of(bfloat16 first, bfloat16 second) {
  const Pair pair = {first, second};
  float word;
  memcpy(&word, &pair, sizeof word);
  return word;
}

// Words of a head: whole steps of them, the last ones 0.
INLINE int head_words(int D) {
  return ((D + 1) / 2 + WORDS_AT_ONCE - 1) / WORDS_AT_ONCE * WORDS_AT_ONCE;
}

// The words of VL rows to lanes.
INLINE void pack_query(const bfloat16 *const *row, float *to, int D) {
  const Pair *pairs[VL];
  for (int r = 0; r < VL; r++) pairs[r] = reinterpret_cast<const Pair *>(row[r]);
  pack_query(pairs, to, D / 2);
  for (int d = D / 2; d < head_words(D); d++) store(to + d * ROWS, vf{});
  for (int r = 0; D % 2 && r < VL; r++) to[D / 2 * ROWS + r] = word_of(row[r][D - 1], {0});
}

INLINE Rows key_rows(const bfloat16 *from, int64_t stride, int n, int D, float *copy) {
  const int words = head_words(D);
  float *to = copy;
  for (int j = 0; j < n; j++, from += stride, to += words) {
    int d = 0;
    for (; d + 2 * VL <= D; d += 2 * VL) convert(load_bytes<vf>(from + d), to + d / 2);
    for (; d < D; d += 2) to[d / 2] = word_of(from[d], d + 1 < D ? from[d + 1] : bfloat16{0});
    for (d = (D + 1) / 2; d < words; d++) to[d] = 0;
  }
  return {copy, words};
}

constexpr uint16_t NOT_FINITE_DOUBLED = 2 * 0x7f80;  // all bits of the exponent

// The larger ones of numbers whose bits count doubled, without their sign.
INLINE vw larger(vw largest, vw x) { return largest > x + x ? largest : x + x; }
INLINE bool all_finite(vw largest) { return !any(vi(largest >= NOT_FINITE_DOUBLED) != 0); }

INLINE vw finite_or_0(vw x) { return x + x >= NOT_FINITE_DOUBLED ? vw{} : x; }

// Which numbers of two rows of 2 VL are the words of their first VL columns.
constexpr vw FIRST_WORDS = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                            8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
static_assert(VL == 16, "the numbers are of sixteen lanes");

// Pairs of rows j, with 0 for what is not finite.
INLINE Rows value_rows(const bfloat16 *from, int64_t stride, int n, int Dv, float *copy,
                       bool &finite) {
  vw largest = {};
  const auto checked = [&](vw x) __attribute__((always_inline)) {
    largest = larger(largest, x);
    return finite_or_0(x);
  };
  float *to = copy;
  for (int j = 0; j < n; j += 2, to += Dv) {
    const bfloat16 *one = from + j * stride, *two = j + 1 < n ? one + stride : nullptr;
    int d = 0;
    for (; d + 2 * VL <= Dv; d += 2 * VL) {
      const vw x = checked(load_bytes<vw>(one + d));
      const vw y = checked(two ? load_bytes<vw>(two + d) : vw{});
      convert(vf(pick(x, y, FIRST_WORDS)), to + d);
      convert(vf(pick(x, y, FIRST_WORDS + uint16_t(VL))), to + d + VL);
    }
    if (d == Dv) continue;
    vw x = {}, y = {};
    memcpy(&x, one + d, (Dv - d) * sizeof *one);
    if (two) memcpy(&y, two + d, (Dv - d) * sizeof *two);
    x = checked(x), y = checked(y);
    const vw words[2] = {pick(x, y, FIRST_WORDS), pick(x, y, FIRST_WORDS + uint16_t(VL))};
    memcpy(to + d, words, (Dv - d) * sizeof *to);
  }
  finite = all_finite(largest);
  return {copy, Dv};
}

}  // namespace
