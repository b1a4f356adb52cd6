// What moves numbers between the caller's tensors and the float32 tiles of the kernels.
//
//   panels   rows of query to lanes, and rows of the output back
//   blocks   keys and values to float32 rows, if they are not that already
//   tiles    a dense mask or bias, read in place by its strides, to the layout of the scores
//
// Nothing is read outside of the rows and keys that exist.

namespace {

constexpr uint32_t UPPER = 0xffff0000u;  // of a word: the second of two bfloat16

// VL rows from d on, n of their numbers, to lanes. A full tile stays in registers.
template <class T>
INLINE void rows_to_lanes(const T *const *row, int64_t d, int n, float *to) {
  vf x[VL];
  if (n >= VL) {
    UNROLL for (int r = 0; r < VL; r++) x[r] = load_as_float(row[r] + d);
    transpose(x);
    UNROLL for (int c = 0; c < VL; c++) store(to + c * ROWS, x[c]);
  } else {
    for (int r = 0; r < VL; r++) x[r] = load_as_float(row[r] + d, n);
    transpose(x);
    for (int c = 0; c < n; c++) store(to + c * ROWS, x[c]);
  }
}

template <class T>
NOINLINE void pack_query(const T *const *row, float *to, int D) {
  for (int d = 0; d < D; d += VL) rows_to_lanes(row, d, D - d, to + d * ROWS);
}

// Rows times a factor, to the first n of the addresses.
template <class T>
NOINLINE void unpack_rows(const float *from, vf factor, T *const *row, int n, int Dv) {
  int d = 0;
  vf x[VL];
  for (; d + VL <= Dv; d += VL) {
    UNROLL for (int c = 0; c < VL; c++) x[c] = load(from + (d + c) * ROWS) * factor;
    transpose(x);
    if (n == VL)
      UNROLL for (int r = 0; r < VL; r++) convert(x[r], row[r] + d);
    else
      for (int r = 0; r < n; r++) convert(x[r], row[r] + d);
  }
  if (d == Dv) return;
  for (int c = 0; c < VL; c++) x[c] = d + c < Dv ? load(from + (d + c) * ROWS) * factor : vf{};
  transpose(x);
  for (int r = 0; r < n; r++) store_from_float(x[r], row[r] + d, Dv - d);
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
INLINE Rows key_rows(const T *from, int64_t stride, int n, int D, float *copy) {
  if (in_place(from, stride, n, D)) return {reinterpret_cast<const float *>(from), stride};
  copy_rows(from, stride, n, D, copy);
  return {copy, D};
}

// x * 0 is NaN for what is not finite, and stays so in the sum.
NOINLINE bool all_finite(Rows V, int n, int Dv) {
  vf found[4] = {};  // independent sums, or each addition would wait for the last
  float last = 0;
  for (int j = 0; j < n; j++) {
    const float *v_j = V.at + j * V.stride;
    int d = 0;
    for (; d + 4 * VL <= Dv; d += 4 * VL)
      UNROLL for (int c = 0; c < 4; c++) found[c] += load_as_float(v_j + d + c * VL) * 0.f;
    for (; d + VL <= Dv; d += VL) found[0] += load_as_float(v_j + d) * 0.f;
    for (; d < Dv; d++) last += v_j[d] * 0.f;
  }
  return last == 0 && !any(found[0] + found[1] + found[2] + found[3] != 0.f);
}

// A copy with 0 for what is not finite; `to` may be where V stands.
NOINLINE void copy_finite(Rows V, int n, int Dv, float *to) {
  for (int j = 0; j < n; j++, to += Dv) {
    const float *v_j = V.at + j * V.stride;
    int d = 0;
    for (; d + VL <= Dv; d += VL) {
      const vf x = load_as_float(v_j + d);
      convert(x * 0.f == 0.f ? x : vf{}, to + d);
    }
    for (; d < Dv; d++) to[d] = v_j[d] * 0.f == 0.f ? v_j[d] : 0.f;
  }
}

// Rows j of the values as float32, with 0 for what is not finite.
template <class T>
INLINE Rows value_rows(const T *from, int64_t stride, int n, int Dv, float *copy, bool &finite) {
  const Rows V = key_rows(from, stride, n, Dv, copy);
  finite = all_finite(V, n, Dv);
  if (finite) return V;
  copy_finite(V, n, Dv, copy);
  return {copy, Dv};
}

// Asks for what the next block of a panel will read of these rows: 12 heads of 1024 rows under a mask
// take 0.93 to 0.96 of the time (a Xeon, 2026-12).
template <class T>
INLINE void expect_keys(const T *const *row, int64_t j) {
  UNROLL for (int r = 0; r < VL; r++) __builtin_prefetch(row[r] + j + BLOCK, 0, 2);
}

// The same for keys [j0, j1) of rows of a block.
template <class T>
NOINLINE void keys_to_lanes(const T *const *row, int64_t j0, int64_t j1, float *to) {
  for (int64_t j = j0; j < j1; j += VL, to += VL * ROWS)
    expect_keys(row, j), rows_to_lanes(row, j, int(j1 - j), to);
}

// Two keys share a word on the way, which halves the transposing (0.9 of the time of such a call).
NOINLINE void keys_to_lanes(const bfloat16 *const *row, int64_t j0, int64_t j1, float *to) {
  int64_t j = j0;
  for (; j + 2 * VL <= j1; j += 2 * VL) {
    vf x[VL];
    UNROLL for (int r = 0; r < VL; r++) x[r] = load_bytes<vf>(row[r] + j);
    expect_keys(row, j);
    transpose(x);
    UNROLL for (int c = 0; c < VL; c++, to += 2 * ROWS)
      store(to, vf(vu(x[c]) << 16)), store(to + ROWS, vf(vu(x[c]) & UPPER));
  }
  for (; j < j1; j += VL, to += VL * ROWS) rows_to_lanes(row, j, int(j1 - j), to);
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
    const T *row[VL];
    for (int r = 0; r < VL; r++) row[r] = data + at[r];
    keys_to_lanes(row, j0, j1, to);
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
