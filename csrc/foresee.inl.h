// Asks for what the next item of a worker will touch, a part with each block that passes a panel of
// this one: in a short call every item begins with rows that are in no near cache. Which item is
// next is a guess, that all take about as long; a wrong one costs nothing but the time to ask.
// Inlined throughout: a call of a function that only prefetches is one that GCC leaves out.
//
// 8 x 12 heads of 128 causal rows, D = 64, took 0.89 of the time on one thread, and 1.04 of it where
// all was in the second-level cache (an EPYC 9004, 2026-11): so calls that are no larger than one do
// without (Plan::foresees). With AVX2, whose panels are half as large, so do all: 12 heads of 64 rows
// took 1.13 times as long with it, 512 rows 1.02 times, and no call was shorter (an EPYC 7003).

namespace {

constexpr int FORESEEN_BLOCKS = 4;  // of keys and values; others come while these are at work

template <class T>
INLINE void foresee_rows(const void *data, const int64_t *strides, int64_t b, int64_t h, int64_t i,
                         int64_t end, int64_t D) {
  constexpr int LINE = 64 / sizeof(T);
  const T *row = static_cast<const T *>(data) + b * strides[0] + h * strides[1] + i * strides[2];
  for (; i < end; i++, row += strides[2])
    for (int64_t d = 0; d < D; d += LINE) __builtin_prefetch(row + d, 0, 2);
}

// While a block of this item passes panel n: one of so many parts of what the next item will touch
// with its block of the same number. These are the rows of its panel n, with the first block, and the
// n-th share of the keys and values, if they are of another head.
template <class T>
INLINE void foresee(const Item &item, const Block &block, int n, int part, int parts) {
  const Plan &plan = item.plan;
  const clearhead_call &c = item.call;
  if (block.next >= plan.items || block.number >= FORESEEN_BLOCKS) return;
  const int64_t head = block.next / plan.groups, b = head / c.Hkv, g = head % c.Hkv;
  const int64_t panel = (plan.groups - 1 - block.next % plan.groups) * plan.group + n;
  if (block.number == 0 && panel < plan.panels && !plan.merged) {
    const int64_t h = g * plan.G + panel % plan.G, i = panel / plan.G * ROWS;
    const int64_t start = i + ROWS * part / parts, end = least(i + ROWS * (part + 1) / parts, c.L);
    foresee_rows<T>(c.query, c.query_strides, b, h, start, end, c.D);
    if (c.out) foresee_rows<T>(c.out, c.out_strides, b, h, start, end, c.Dv);
  }
  if (b == item.b && g == item.g) return;
  parts *= item.panels, part += n * (parts / item.panels);
  const int64_t j = block.number * BLOCK, start = j + BLOCK * part / parts;
  const int64_t end = least(j + BLOCK * (part + 1) / parts, c.S);
  foresee_rows<T>(c.key, c.key_strides, b, g, start, end, c.D);
  if (c.out) foresee_rows<T>(c.value, c.value_strides, b, g, start, end, c.Dv);
}

}  // namespace
