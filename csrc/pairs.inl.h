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
// this file products of matrices (matrices.inl.h) share the words of query and key.

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

constexpr uint16_t NOT_FINITE = 0x7f80;  // all bits of the exponent

INLINE bfloat16 finite_or_0(bfloat16 x) {
  return (x.bits & NOT_FINITE) == NOT_FINITE ? bfloat16{0} : x;
}

// Pairs of rows j, with 0 for what is not finite.
INLINE Rows value_rows(const bfloat16 *from, int64_t stride, int n, int Dv, float *copy,
                       bool &finite) {
  vi bad = {};
  bool bad_one = false;
  float *to = copy;
  for (int j = 0; j < n; j += 2, to += Dv) {
    const bfloat16 *one = from + j * stride, *two = j + 1 < n ? one + stride : nullptr;
    int d = 0;
    for (; d + VL <= Dv; d += VL) {
      vu x = __builtin_convertvector(load_bytes<vh>(one + d), vu), y = {};
      if (two) y = __builtin_convertvector(load_bytes<vh>(two + d), vu);
      const vi bad_x = (x & NOT_FINITE) == NOT_FINITE, bad_y = (y & NOT_FINITE) == NOT_FINITE;
      bad |= bad_x | bad_y;
      convert(vf((x & ~vu(bad_x)) | (y & ~vu(bad_y)) << 16), to + d);
    }
    for (; d < Dv; d++) {
      const bfloat16 x = one[d], y = two ? two[d] : bfloat16{0};
      bad_one |= finite_or_0(x).bits != x.bits || finite_or_0(y).bits != y.bits;
      to[d] = word_of(finite_or_0(x), finite_or_0(y));
    }
  }
  finite = !bad_one && !any(bad);
  return {copy, Dv};
}

}  // namespace
