// Memory between two pages that may not be touched: one element too far ends the program.
#pragma once

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <vector>

#include "clearhead.h"

struct Guarded {
  char *pages = nullptr, *data = nullptr;
  size_t mapped = 0, bytes = 0;

  // The data ends where the second page begins, or starts where the first one ends.
  Guarded(size_t bytes, bool at_end) : bytes(bytes) {
    const size_t page = size_t(sysconf(_SC_PAGESIZE)), whole = (bytes + page - 1) / page * page;
    mapped = whole + 2 * page;
    pages = static_cast<char *>(
        mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (pages == MAP_FAILED) abort();
    mprotect(pages, page, PROT_NONE);
    mprotect(pages + page + whole, page, PROT_NONE);
    data = pages + page + (at_end ? whole - bytes : 0);
  }
  ~Guarded() {
    if (pages) munmap(pages, mapped);
  }
  Guarded(Guarded &&other) : pages(other.pages), data(other.data), mapped(other.mapped), bytes(other.bytes) {
    other.pages = nullptr;
  }
  Guarded(const Guarded &) = delete;
};

inline uint64_t state = 1;

// splitmix64 (Steele, Lea and Flood 2014).
inline uint64_t draw() {
  uint64_t x = (state += 0x9e3779b97f4a7c15u);
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}
inline int64_t draw(int64_t least, int64_t most) {
  return least + int64_t(draw() % uint64_t(most - least + 1));
}
inline bool chance(int percent) { return draw(0, 99) < percent; }
inline double normal() {  // near enough: a sum of twelve
  double sum = -6;
  for (int n = 0; n < 12; n++) sum += double(draw() >> 11) * 0x1p-53;
  return sum;
}

inline uint16_t to_bfloat16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float from_bfloat16(uint16_t h) {
  const uint32_t bits = uint32_t(h) << 16;
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
#if defined(__aarch64__)
typedef __fp16 half;  // g++ 12 has no _Float16 there
#else
typedef _Float16 half;
#endif

inline uint16_t to_float16(float x) {
  const half h = half(x);
  uint16_t bits;
  memcpy(&bits, &h, 2);
  return bits;
}
inline float from_float16(uint16_t bits) {
  half h;
  memcpy(&h, &bits, 2);
  return float(h);
}

inline size_t bytes_of(int64_t dtype) {
  return dtype == CLEARHEAD_FLOAT32 ? 4 : dtype == CLEARHEAD_BOOL ? 1 : 2;
}

// A tensor of up to four axes, its strides drawn: dense, with gaps, broadcast or reversed in order.
// Gaps hold NaN, or 255 in a mask.
struct Tensor {
  Guarded memory;
  int64_t dtype;
  int64_t sizes[4], strides[4];

  char *at(int64_t a, int64_t b, int64_t c, int64_t d) const {
    return memory.data +
           (a * strides[0] + b * strides[1] + c * strides[2] + d * strides[3]) * int64_t(bytes_of(dtype));
  }
  double get(int64_t a, int64_t b, int64_t c, int64_t d) const {
    const char *p = at(a, b, c, d);
    uint16_t h;
    float x;
    switch (dtype) {
      case CLEARHEAD_FLOAT32: memcpy(&x, p, 4); return x;
      case CLEARHEAD_BFLOAT16: memcpy(&h, p, 2); return from_bfloat16(h);
      case CLEARHEAD_FLOAT16: memcpy(&h, p, 2); return from_float16(h);
      default: return double(*p);
    }
  }
  void set(int64_t a, int64_t b, int64_t c, int64_t d, double x) const {
    char *p = at(a, b, c, d);
    uint16_t h;
    const float f = float(x);
    switch (dtype) {
      case CLEARHEAD_FLOAT32: memcpy(p, &f, 4); break;
      case CLEARHEAD_BFLOAT16: h = to_bfloat16(f), memcpy(p, &h, 2); break;
      case CLEARHEAD_FLOAT16: h = to_float16(f), memcpy(p, &h, 2); break;
      default: *p = char(x != 0);
    }
  }
};

// `inner` axes at the end stay dense (1 for query, key, value and out); the others may be swapped,
// padded, or broadcast with stride 0 where `may_share`.
inline Tensor make(int64_t dtype, const int64_t (&sizes)[4], int inner, bool may_share) {
  int order[4] = {0, 1, 2, 3};
  for (int n = 0; n < 3 - inner; n++) {
    const int other = int(draw(n, 3 - inner)), kept = order[n];
    order[n] = order[other], order[other] = kept;
  }
  int64_t strides[4], size = 1;
  for (int n = 3; n >= 0; n--) {
    const int axis = order[n];
    strides[axis] = size;
    if (may_share && axis < 4 - inner && chance(30)) {
      strides[axis] = 0;
      continue;
    }
    size *= sizes[axis];
    if (n < 4 - inner && chance(25)) size += draw(1, 5);
  }
  int64_t last = 0;
  for (int n = 0; n < 4; n++) last += strides[n] * (sizes[n] - 1);
  Tensor t{Guarded(size_t(last + 1) * bytes_of(dtype), chance(70)), dtype, {}, {}};
  memset(t.memory.data, 0xff, t.memory.bytes);  // NaN in every float type
  memcpy(t.sizes, sizes, sizeof sizes);
  memcpy(t.strides, strides, sizeof strides);
  return t;
}

template <class Fill>
void fill(const Tensor &t, Fill value) {
  for (int64_t a = 0; a < t.sizes[0]; a++)
    for (int64_t b = 0; b < t.sizes[1]; b++)
      for (int64_t c = 0; c < t.sizes[2]; c++)
        for (int64_t d = 0; d < t.sizes[3]; d++) t.set(a, b, c, d, value());
}
