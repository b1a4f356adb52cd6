// What moves numbers between the caller's tensors and the float32 tiles of the kernels.
//
//   panels   rows of query to lanes, and rows of the output back
//   blocks   keys and values to float32 rows, if they are not that already
//   tiles    a dense mask or bias, read in place by its strides, to the layout of the scores
//
// Nothing is read outside of the rows and keys that exist.

namespace {

// A row of a panel: its query head and number. Lanes beyond the last row repeat it.
struct Place {
  int32_t h, i;
};

template <class T>
NOINLINE void pack_rows(const T *const *row, float *to, int D) {
  for (int d = 0; d < D; d += VL) {
    vf x[VL];
    const int n = D - d;
    for (int r = 0; r < VL; r++) x[r] = load_as_float(row[r] + d, n);
    transpose(x);
    for (int c = 0; c < (n < VL ? n : VL); c++) store(to + (d + c) * ROWS, x[c]);
  }
}

// Rows times a factor, to the first n of the addresses.
template <class T>
NOINLINE void unpack_rows(const float *from, vf factor, T *const *row, int n, int Dv) {
  for (int d = 0; d < Dv; d += VL) {
    vf x[VL];
    const int left = Dv - d;
    for (int c = 0; c < VL; c++) x[c] = c < left ? load(from + (d + c) * ROWS) * factor : vf{};
    transpose(x);
    for (int r = 0; r < n; r++) store_from_float(x[r], row[r] + d, left);
  }
}

template <class T>
NOINLINE void copy_rows(const T *from, int64_t stride, int n, int D, float *to) {
  for (int j = 0; j < n; j++, from += stride, to += D) {
    int d = 0;
    for (; d + VL <= D; d += VL) convert(load_as_float(from + d), to + d);
    for (; d < D; d++) to[d] = one_as_float(from + d);
  }
}

INLINE bool in_place(const float *, int64_t stride, int n, int D) {
  return stride == D && n % TILE == 0;
}
template <class T>
INLINE bool in_place(const T *, int64_t, int, int) {
  return false;
}

// Rows j of a tensor as float32: in place if they are that, dense, and whole register tiles (a tile
// reads whatever stands behind the last row of a copy, and its sums are thrown away).
template <class T>
INLINE Rows float_rows(const T *from, int64_t stride, int n, int D, float *copy) {
  if (in_place(from, stride, n, D)) return {reinterpret_cast<const float *>(from), stride};
  copy_rows(from, stride, n, D, copy);
  return {copy, D};
}

// x * 0 is NaN for what is not finite, and stays so in the sum.
NOINLINE bool all_finite(Rows V, int n, int Dv) {
  vf found = {};
  float last = 0;
  for (int j = 0; j < n; j++) {
    const float *v_j = V.at + j * V.stride;
    int d = 0;
    for (; d + VL <= Dv; d += VL) found += load_as_float(v_j + d) * 0.f;
    for (; d < Dv; d++) last += v_j[d] * 0.f;
  }
  return last == 0 && !any(found != 0.f);
}

// Keys [j0, j1) of VL rows of a dense tensor; at[r] is where key 0 of row r stands.
template <class T>
NOINLINE void read_tile(const T *data, const int64_t *at, int64_t stride, int64_t j0, int64_t j1,
                        float *to) {
  bool same = true;
  for (int r = 1; r < VL; r++) same &= at[r] == at[0];
  if (same) {
    for (int64_t j = j0; j < j1; j++, to += ROWS)
      store(to, splat(one_as_float(data + at[0] + j * stride)));
  } else if (stride == 1) {
    for (int64_t j = j0; j < j1; j += VL, to += VL * ROWS) {
      vf x[VL];
      const int n = j1 - j < VL ? int(j1 - j) : VL;
      for (int r = 0; r < VL; r++) x[r] = load_as_float(data + at[r] + j, n);
      transpose(x);
      for (int c = 0; c < n; c++) store(to + c * ROWS, x[c]);
    }
  } else {
    for (int64_t j = j0; j < j1; j++, to += ROWS)
      for (int r = 0; r < VL; r++) to[r] = one_as_float(data + at[r] + j * stride);
  }
}

NOINLINE void read_dense(const clearhead_dense &dense, int64_t b, const Place *row, int64_t j0,
                         int64_t j1, float *to) {
  int64_t at[VL];
  for (int r = 0; r < VL; r++)
    at[r] = b * dense.strides[0] + row[r].h * dense.strides[1] + row[r].i * dense.strides[2];
  const int64_t stride = dense.strides[3];
  switch (dense.dtype) {
    case CLEARHEAD_FLOAT32:
      return read_tile((const float *)dense.data, at, stride, j0, j1, to);
    case CLEARHEAD_BFLOAT16:
      return read_tile((const bfloat16 *)dense.data, at, stride, j0, j1, to);
    case CLEARHEAD_FLOAT16:
      return read_tile((const float16 *)dense.data, at, stride, j0, j1, to);
    default:
      return read_tile((const boolean *)dense.data, at, stride, j0, j1, to);
  }
}

}  // namespace
