// exp2, exp, log and tanh of vectors.
//
// exp2(x, factor) is 2^(x factor), of a factor over 0 and a product below 127; exp2(0) is exactly 1
// (else every block of keys would rescale the older ones), and what is 2^EXP2_LEAST or less exactly 0.
// NaN stays NaN. Numbers below the normal ones may be less, or 0.

namespace {

INLINE vf exp2(vf x) { return exp2(x, 1.f); }

INLINE vf exp(vf x) { return exp2(x * LOG2E); }

// Of a normal number: x = 2^n f with f from sqrt(1/2) to sqrt(2), and
// log f = 2 atanh((f - 1) / (f + 1)).
// Worst error 1 ulp; log(1) is exactly 0.
INLINE vf log(vf x) {
  const vi n = (vi(x) - 0x3f3504f3) >> 23;
  const vf f = vf(vi(x) - (n << 23)), t = (f - 1.f) / (f + 1.f), z = t * t;
  vf p = z * (2 / 9.f) + 2 / 7.f;
  p = p * z + 2 / 5.f;
  p = p * z + 2 / 3.f;
  p = p * z + 2.f;
  return __builtin_convertvector(n, vf) * LN2 + p * t;
}

// By a polynomial up to 0.625, where 1 - 2 / (exp(2 x) + 1) would lose digits.
INLINE vf tanh(vf x) {
  const vi sign = vi(x) & INT32_MIN;
  const vf y = vf(vi(x) & INT32_MAX), z = y * y;
  vf p = z * -0.0057050008326768875f + 0.020639101043343544f;
  p = p * z + -0.05373971909284592f;
  p = p * z + 0.13331441581249237f;
  p = p * z + -0.3333328068256378f;
  // Beyond 10 it is 1; the order lets NaN through.
  const vf far = y > 10.f ? splat(10.f) : y;
  const vf by_exp = 1.f - 2.f / (exp2(far * (2 * LOG2E)) + 1.f);
  return vf(vi(y < 0.625f ? y + y * z * p : by_exp) | sign);
}

}  // namespace
