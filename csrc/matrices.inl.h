// bfloat16 for products of matrix tiles (AMX): what panels (matrices_panel.inl.h) and few rows
// (matrices_few.inl.h) share. What follows fixes the bits, beside tile_product:
//
//   d, keys   go in groups of 32, counted from the first of the head, or of the block; what is missing
//             in a group is 0
//   s_ij      from 0, a group of d after the other
//   p_ij      a sum of two numbers: it is cut after 8 bits, and what is left after 8 more
//   out_i     o_i a_i, then for each group of keys the product of its values with the first numbers of
//             the p_ij, and that with the second ones
//
// So a weight counts to 2^-16 of itself. Weights that are rounded to bfloat16 would take a third of
// the products less, but give the error of torch's kernel.
//
// Right-hand matrices are words of two neighbours d, or keys, as in pairs.inl.h: a panel of rows is
// what a tile wants. Denormal numbers count as 0, as the instruction has it.

namespace {

constexpr int GROUP = 2 * TILE_WORDS;  // numbers d, or keys, of one product of tiles
constexpr int KEY_WORDS = BLOCK / 2;   // of a row of V^T
constexpr int64_t ROW_BYTES = ROWS * sizeof(float);
static_assert(BLOCK == 3 * GROUP && TILE == TILE_WORDS && VL == TILE_WORDS, "whole tiles");

INLINE int to_group(int n) { return (n + GROUP - 1) / GROUP * GROUP; }

// f(Number<0>{}), f(Number<1>{}), ... up to N: tiles go by numbers that the compiler knows.
template <int N>
struct Number {
  static constexpr int value = N;
};
template <int N, int FROM = 0, class F>
INLINE void each(const F &f) {
  if constexpr (FROM < N) f(Number<FROM>{}), each<N, FROM + 1>(f);
}
#define VALUE(n) decltype(n)::value

// -- numbers ---------------------------------------------------------------------------------------

INLINE void make_finite(float *words) { convert(vf(finite_or_0(load_bytes<vw>(words))), words); }

// The 32 numbers of a row from d on, 0 beyond the last of n.
INLINE vu group_of(const bfloat16 *row, int d, int n) {
  if (n - d >= GROUP) return load_bytes<vu>(row + d);
  bfloat16 edge[GROUP] = {};
  memcpy(edge, row + d, size_t(n - d) * sizeof(bfloat16));
  return load_bytes<vu>(edge);
}

// -- values, turned --------------------------------------------------------------------------------

// 32 columns of 32 keys, as words of two keys, to rows of columns.
INLINE void turn_values(const bfloat16 *from, int64_t stride, float *to, vw &largest) {
  vf low[VL], high[VL];  // of each eight columns the first four, and the others
  UNROLL for (int w = 0; w < VL; w++, from += 2 * stride) {
    __asm__("" : "+r"(from));  // else the compiler keeps all addresses, on the stack
    const vw first = load_bytes<vw>(from), second = load_bytes<vw>(from + stride);
    largest = larger(larger(largest, first), second);
    low[w] = pairs_low(first, second), high[w] = pairs_high(first, second);
  }
  const auto column = [](int n) { return n / 4 * 8 + n % 4; };
  transpose(low);
  UNROLL for (int n = 0; n < VL; n++) store(to + column(n) * KEY_WORDS, low[n]);
  transpose(high);
  UNROLL for (int n = 0; n < VL; n++) store(to + (column(n) + 4) * KEY_WORDS, high[n]);
}

// V^T of n values, with 0 for what is not finite.
NOINLINE Rows value_columns(const bfloat16 *from, int64_t stride, int n, int Dv, float *copy,
                            bool &finite) {
  vw largest = {};
  for (int j = 0; j < n; j += GROUP)
    for (int d = 0; d < Dv; d += GROUP) {
      const bfloat16 *const at = from + j * stride;
      float *const to = copy + d * KEY_WORDS + j / 2;
      if (n - j >= GROUP && Dv - d >= GROUP) {
        turn_values(at + d, stride, to, largest);
        continue;
      }
      alignas(64) bfloat16 edge[GROUP * GROUP] = {};
      for (int r = 0; r < least(n - j, GROUP); r++)
        convert(vf(group_of(at + r * stride, d, Dv)), reinterpret_cast<float *>(edge + r * GROUP));
      turn_values(edge, GROUP, to, largest);
    }
  finite = all_finite(largest);
  for (int d = 0; !finite && d < Dv; d++)
    for (int w = 0; w < to_group(n) / 2; w += VL) make_finite(copy + d * KEY_WORDS + w);
  return {copy, KEY_WORDS};
}

}  // namespace
