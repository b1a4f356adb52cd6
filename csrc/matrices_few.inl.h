// The first product of few rows (few.inl.h) and their sums, as in matrices.inl.h. The second product is
// in matrices_few_values.inl.h.
//
//   matrix_few_scores   S^T = K Q^T   16 keys at a time, where they lie; a column for each row
//
// Each product asks for what the other one will read, so that memory and arithmetic wait less for each
// other.

namespace {

// Asks for n rows.
INLINE void expect_rows(const FewRows<bfloat16> &rows, int64_t j, int n) {
  constexpr int LINE = 64 / sizeof(bfloat16);
  for (const bfloat16 *row = rows.at + j * rows.stride; n > 0; n--, row += rows.stride)
    for (int d = 0; d < rows.size; d += LINE) __builtin_prefetch(row + d, 0, 3);
}

// Step 1. Where a row of keys does not fill its tiles, or the keys theirs, they are copied.
NOINLINE void matrix_few_scores(const FewRows<bfloat16> &K, const FewRows<bfloat16> &V,
                                const float *q, int few, const Run &run, float *copy, float *tile,
                                float *s) {
  const int words = head_words(K.size), tiles = words / TILE_WORDS;
  constexpr int Q_TILE = TILE_WORDS * ROWS;  // of the panel's numbers
  tile_load<FEW_ROWS>(q, ROW_BYTES);
  if (tiles == 2) tile_load<FEW_ROWS + 1>(q + Q_TILE, ROW_BYTES);
  for (int j = run.j0; j < run.j1; j += TILE) {
    const int keys = int(least(run.j1 - j, TILE));
    const char *at = (const char *)(K.at + j * K.stride);
    int64_t bytes = K.stride * int64_t(sizeof(bfloat16));
    if (keys < TILE || K.size % GROUP) {
      key_rows(K.at + j * K.stride, K.stride, keys, K.size, copy);
      at = (const char *)copy, bytes = words * int64_t(sizeof(float));
    }
    expect_rows(V, j, TILE);
    tile_zero<FEW_SUMS>();
    for (int t = 0; t < tiles; t++, at += GROUP * sizeof(bfloat16)) {
      tile_load<FEW_KEYS>(at, bytes);
      if (tiles > 2) tile_load<FEW_ROWS>(q + t * Q_TILE, ROW_BYTES);
      if (tiles == 2 && t == 1)
        tile_product<FEW_SUMS, FEW_KEYS, FEW_ROWS + 1>();
      else
        tile_product<FEW_SUMS, FEW_KEYS, FEW_ROWS>();
    }
    if (few == 1) {
      tile_store<FEW_SUMS>(s + j, sizeof(float));
      continue;
    }
    vf x[VL];
    tile_store<FEW_SUMS>(tile, sizeof(vf));
    UNROLL for (int r = 0; r < VL; r++) x[r] = load(tile + r * VL);
    transpose(x);
    for (int i = 0; i < few; i++) convert(x[i], s + i * FEW_STRIDE + j);
  }
}

// Step 4: the sums of TILE weights from the first to the last, then over these. A sum goes lane by
// lane, for VL pieces at a time.
NOINLINE vf few_sums_of_tiles(const float *p, int few, const Run &run) {
  const int tiles = (run.j1 - run.j0 + TILE - 1) / TILE, pieces = few * tiles;
  alignas(64) float sums[(FEW * BLOCK / TILE + VL - 1) / VL * VL];
  for (int first = 0; first < pieces; first += VL) {
    vf x[VL];
    for (int n = 0; n < VL; n++) {
      const int piece = int(least(first + n, pieces - 1)), t = piece % tiles;
      x[n] = load_as_float(p + piece / tiles * FEW_STRIDE + run.j0 + t * TILE);
    }
    transpose(x);
    vf sum = x[0];
    UNROLL for (int n = 1; n < VL; n++) sum += x[n];
    store(sums + first, sum);
  }
  vf l = {};
  for (int i = 0; i < few; i++)
    for (int t = 0; t < tiles; t++) l[i] += sums[i * tiles + t];
  return l;
}

}  // namespace
