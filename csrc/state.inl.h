// What is known of a vector of rows while their keys pass, and how two such states become one.
//
//   m         the greatest score                     sums of p_ij = exp2((s_ij - m_i) * exponent):
//   l         sum_j p_ij; l_lost is what rounding took from it
//   used      sum_j of the p_ij that the values were weighed with, where these are rounded to pairs
//   entropy   sum_j p_ij (s_ij - m_i)
//   distance  sum_j p_ij |own(i) - j|
//
// Every kernel goes through these functions, so that a row has the same bits in all: products are
// rounded where the compiler could fuse either of two.

namespace {

struct State {
  vf m, l, l_lost, used, entropy, distance;
};

const State NOTHING = {-INFINITY - vf{}, {}, {}, {}, {}, {}};

// The sums over one block, whose p count from the m that it ends with.
struct Sums {
  vf l, used, entropy, distance;
};

// What becomes of older p when m moves.
struct Move {
  vf shift, a;  // p a counts from the new m, which is -shift above the old one
};

// What of m the exponents count from: 0 for a row that has seen nothing.
INLINE vf base_of(vf m) { return m == -INFINITY ? vf{} : m; }

INLINE Move move(vf m_old, vf base, float exponent) {
  const vf shift = m_old - base;
  return {vmax(splat(EXP2_LEAST / exponent), shift), exp2(shift, exponent)};
}

// l = old + more. The sum keeps what it rounds away (Knuth's exact addition): z is the one number
// that all of a row hangs on, and over 170 blocks its error grew to twice that of its terms.
INLINE vf add_exactly(vf old, vf more, vf &l) {
  l = old + more;
  const vf part = l - old;
  return (old - (l - part)) + (more - part);
}

INLINE void add_sums(State &T, vf m, const Move &old, const Sums &sums) {
  T.m = m;
  T.used = T.used * old.a + sums.used;
  T.entropy = (T.entropy + old.shift * T.l) * old.a + sums.entropy;
  T.distance = T.distance * old.a + sums.distance;
  const vf lost = add_exactly(rounded(T.l * old.a), sums.l, T.l);
  T.l_lost = T.l_lost * old.a + lost;
}

// Joins the state of a span into the total of those before it; o_T = joined(o_T, o_P, a, c) goes
// with it. Into NOTHING a state is taken over as it is, and NOTHING changes no state.
INLINE void join(State &T, const State &P, float exponent, vf &a, vf &c) {
  const vf m = vmax(T.m, P.m), base = base_of(m);
  const Move old = move(T.m, base, exponent), more = move(P.m, base, exponent);
  a = old.a, c = more.a;
  T.used = T.used * a + rounded(P.used * c);
  T.entropy = (T.entropy + old.shift * T.l) * a + rounded((P.entropy + more.shift * P.l) * c);
  T.distance = T.distance * a + rounded(P.distance * c);
  const vf lost = add_exactly(rounded(T.l * a), rounded(P.l * c), T.l);
  T.l_lost = T.l_lost * a + rounded(P.l_lost * c) + lost;
  T.m = m;
}

INLINE vf joined(vf o_T, vf o_P, vf a, vf c) { return o_T * a + rounded(o_P * c); }

}  // namespace
