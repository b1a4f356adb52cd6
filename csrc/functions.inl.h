// exp2, exp, log and tanh of vectors.
//
// exp2(0) is exactly 1 (else every block of keys would rescale the older ones), 2^EXP2_LEAST is
// exactly 0 and NaN stays NaN. Numbers below the normal ones may be 0 as well.

namespace {

// Worst relative error 1.2e-7, of which 2e-9 is the polynomial's (a least-squares fit, reweighted
// to even the relative error out, on [-1/2, 1/2]).
INLINE vf exp2(vf x) {
  vf f;
  const vf n = whole_of(x, f);
  vf p = f * 0.00015353325579781085f + 0.0013398876180872321f;
  p = p * f + 0.009618437848985195f;
  p = p * f + 0.055503323674201965f;
  p = p * f + 0.24022647738456726f;
  p = p * f + 0.6931471824645996f;
  p = p * f + 1.f;
  return times_power_of_two(p, n);
}

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
