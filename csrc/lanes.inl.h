// What every vocabulary shares: vectors of VL lanes as the compiler's own, their conversions from
// and to the element types, and transpositions.

#define INLINE inline __attribute__((always_inline))
#define NOINLINE static __attribute__((noinline))
#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

namespace {

typedef float vf __attribute__((vector_size(VL * 4)));
typedef int32_t vi __attribute__((vector_size(VL * 4)));
typedef uint32_t vu __attribute__((vector_size(VL * 4)));
typedef uint16_t vh __attribute__((vector_size(VL * 2)));
typedef uint16_t vw __attribute__((vector_size(VL * 4)));
typedef uint8_t vb __attribute__((vector_size(VL)));

// Of KL keys, which decode.inl.h has in lanes.
typedef float vk __attribute__((vector_size(KL * 4)));
typedef uint32_t vku __attribute__((vector_size(KL * 4)));
typedef uint16_t vkh __attribute__((vector_size(KL * 2)));

struct bfloat16 {
  uint16_t bits;
};
struct float16 {
  uint16_t bits;
};
struct boolean {
  uint8_t bits;
};

// Whether the products of a type go by pairs: 32-bit words that hold two numbers, the first one in
// the lower half.
template <class T>
constexpr bool PAIRED = false;
// Whether the products of a type are those of matrices, and these (matrices_few_values.inl.h).
template <class T>
constexpr bool MATRICES = false;
template <class T>
struct Matrices;

constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;

INLINE vf splat(float x) { return x - vf{}; }
INLINE vi splat(int32_t x) { return x - vi{}; }

// Of two vectors one behind the other, the lanes with these numbers, which the compiler knows.
template <class V, class N>
INLINE V pick(V a, V b, N numbers) {
#ifdef __clang__
  constexpr int LANES = int(sizeof(V) / sizeof(a[0]));
  V v;
  UNROLL for (int n = 0; n < LANES; n++)
    v[n] = numbers[n] < LANES ? a[numbers[n]] : b[numbers[n] - LANES];
  return v;
#else
  return __builtin_shuffle(a, b, numbers);
#endif
}

template <class V>
INLINE V load_bytes(const void *from) {
  V v;
  memcpy(&v, from, sizeof v);
  return v;
}

// Of panels and tiles, which start on a cache line.
INLINE vf load(const float *from) { return *reinterpret_cast<const vf *>(from); }
INLINE vi load(const int32_t *from) { return *reinterpret_cast<const vi *>(from); }
INLINE void store(float *to, vf x) { *reinterpret_cast<vf *>(to) = x; }

INLINE bool any_by_lanes(vi mask) {
  int32_t found = 0;
  UNROLL for (int r = 0; r < VL; r++) found |= mask[r];
  return found != 0;
}

// -- element types ---------------------------------------------------------------------------------

INLINE vf from_float16_by_bits(vh h) {
  const vu bits = __builtin_convertvector(h, vu), rest = bits & 0x7fffu;
  const vu normal = (rest << 13) + (112u << 23);
  const vf denormal = __builtin_convertvector(vi(rest), vf) * 0x1p-24f;
  vu x = rest < 0x400u ? vu(denormal) : rest < 0x7c00u ? normal : (rest << 13 | 0x7f800000u);
  return vf(x | (bits & 0x8000u) << 16);
}

INLINE vh to_float16_by_bits(vf x) {
  const vu bits = vu(x), sign = bits >> 16 & 0x8000u, rest = bits & 0x7fffffffu;
  const vu rounded = (rest + 0xfffu + (rest >> 13 & 1u) - (112u << 23)) >> 13;
  const vu denormal = vu(vf(rest) + 0.5f) - 0x3f000000u;  // 0.5 + x rounds x to a multiple of 2^-24
  vu h = rest < (113u << 23) ? denormal : rest < 0x477ff000u ? rounded : (rest & 0u) + 0x7c00u;
  h = rest > 0x7f800000u ? (rest & 0u) + 0x7e00u : h;
  return __builtin_convertvector(h | sign, vh);
}

}  // namespace

// Defined by the vocabulary that includes this file.
namespace {
INLINE vf from_float16(vh h);
INLINE vh to_float16(vf x);
INLINE vf exp2(vf x, float factor);  // of their product (functions.inl.h)
INLINE vf vmax(vf a, vf b);
INLINE bool any(vi mask);  // whose lanes are 0 or -1
INLINE vf rounded(vf x);
INLINE vf interleave_low(vf a, vf b);
INLINE vf interleave_high(vf a, vf b);
INLINE vf join_low(vf a, vf b);
INLINE vf join_high(vf a, vf b);
// The same of keys, and from_float16(vkh), which are others where KL is not VL.
INLINE vk interleave_low(vk a, vk b);
INLINE vk interleave_high(vk a, vk b);
INLINE vk join_low(vk a, vk b);
INLINE vk join_high(vk a, vk b);
INLINE vk from_float16(vkh h);
INLINE vk load_quads(const char *from, int64_t step);
INLINE void transpose_quads(vf (&x)[VL / 4]);

INLINE vf load_as_float(const float *from) { return load_bytes<vf>(from); }
INLINE vf load_as_float(const bfloat16 *from) {
  return vf(__builtin_convertvector(load_bytes<vh>(from), vu) << 16);
}
INLINE vf load_as_float(const float16 *from) { return from_float16(load_bytes<vh>(from)); }
// By two doublings of the width: GCC 12 makes of one step from 8 to 32 bits VL scalar ones.
INLINE vf load_as_float(const boolean *from) {
  const vh half = __builtin_convertvector(load_bytes<vb>(from), vh);
  return __builtin_convertvector(vi(__builtin_convertvector(half, vu)), vf);
}

// The first n of VL elements, and 0: nothing is read beyond them.
template <class T>
INLINE vf load_as_float(const T *from, int n) {
  if (n >= VL) return load_as_float(from);
  T part[VL] = {};
  for (int r = 0; r < n; r++) part[r] = from[r];
  return load_as_float(part);
}

template <class T>
INLINE float one_as_float(const T *from) {
  return load_as_float(from, 1)[0];
}
INLINE float one_as_float(const float *from) { return *from; }

INLINE void convert(vf x, float *to) { memcpy(to, &x, sizeof x); }
INLINE void convert(vf x, bfloat16 *to) {
  const vu bits = vu(x), even = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  const vh h = __builtin_convertvector(x == x ? even : (even & 0u) + 0x7fc0u, vh);
  memcpy(to, &h, sizeof h);
}
INLINE void convert(vf x, float16 *to) {
  const vh h = to_float16(x);
  memcpy(to, &h, sizeof h);
}

template <class T>
INLINE void store_from_float(vf x, T *to, int n) {
  if (n >= VL) return convert(x, to);
  T part[VL];
  convert(x, part);
  for (int r = 0; r < n; r++) to[r] = part[r];
}

// sum + x y, where words are numbers, or pairs.
template <bool PAIRS, class V>
INLINE V add_product(V sum, V x, V y) {
  static_assert(!PAIRS, "of pairs the vocabulary knows");
  return sum + x * y;
}

// Rounded to the nearest even ones: a pair of each lane, and pairs of neighbours.
template <bool PAIRS>
INLINE vf pair_of(vf first, vf second);
template <bool PAIRS>
INLINE vf pairs_of(vf low, vf high);

// A word to all lanes. A pair is moved as a whole number: as one of floating point it could look
// like a NaN that arithmetic alters.
template <bool PAIRS, class V = vf>
INLINE V splat_word(const float *word) {
  if (!PAIRS) return *word - V{};
  typedef int32_t whole __attribute__((vector_size(sizeof(V))));
  int32_t bits;
  memcpy(&bits, word, sizeof bits);
  return V(bits - whole{});
}

constexpr float TO_WHOLE = 12582912.f;  // 1.5 * 2^23: adding it rounds to a whole number

// 2^x. Worst relative error 1.2e-7, of which 2e-9 is the polynomial's (a least-squares fit, reweighted
// to even the relative error out, on [-1/2, 1/2]). The last bits of a sum with TO_WHOLE hold the
// exponent; it is 0 for -127, which is none of a normal number.
INLINE vf exp2_by_adding(vf x) {
  const vf y = vmax(splat(EXP2_LEAST), x), n = (y + TO_WHOLE) - TO_WHOLE, f = y - n;
  vf p = f * 0.00015353325579781085f + 0.0013398876180872321f;
  p = p * f + 0.009618437848985195f;
  p = p * f + 0.055503323674201965f;
  p = p * f + 0.24022647738456726f;
  p = p * f + 0.6931471824645996f;
  p = p * f + 1.f;
  return p * vf((vu(n + TO_WHOLE) << 23) + (127u << 23));
}

// -- moves -----------------------------------------------------------------------------------------

// Within each quad of lanes: lane c of vector r goes to lane r of vector c.
template <class V>
INLINE void transpose_in_quads(V &x0, V &x1, V &x2, V &x3) {
  const V a = interleave_low(x0, x1), b = interleave_high(x0, x1);
  const V c = interleave_low(x2, x3), d = interleave_high(x2, x3);
  x0 = join_low(a, c), x1 = join_high(a, c);
  x2 = join_low(b, d), x3 = join_high(b, d);
}

// The greatest lane; none is NaN.
INLINE float greatest(vf x) {
  x = vmax(interleave_low(x, x), interleave_high(x, x));
  x = vmax(join_low(x, x), join_high(x, x));
  vf quads[VL / 4];
  UNROLL for (vf &quad : quads) quad = x;
  transpose_quads(quads);
  UNROLL for (vf quad : quads) x = vmax(quad, x);
  return x[0];
}

// VL vectors of VL lanes: lane c of vector r goes to lane r of vector c. First within quads of
// lanes, since what crosses them takes longer (a tile of 16 x 16 and its products 121 cycles instead
// of 163 on an EPYC 9004, 2026-11), then the quads as they are.
INLINE void transpose(vf (&x)[VL]) {
  UNROLL for (int r = 0; r < VL; r += 4) transpose_in_quads(x[r], x[r + 1], x[r + 2], x[r + 3]);
  UNROLL for (int c = 0; c < 4; c++) {
    vf quads[VL / 4];
    UNROLL for (int r = 0; r < VL / 4; r++) quads[r] = x[4 * r + c];
    transpose_quads(quads);
    UNROLL for (int r = 0; r < VL / 4; r++) x[4 * r + c] = quads[r];
  }
}

}  // namespace
