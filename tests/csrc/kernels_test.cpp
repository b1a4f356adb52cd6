// The C interface under sanitizers: random calls with every buffer between guard pages, held against
// a loop in double that gathers the visible keys; and what it must refuse.
//
//   kernels_test SEED CALLS     CLEARHEAD_ISA chooses the instruction set
//   kernels_test beyond         reads behind a buffer on purpose: has to be caught
//   kernels_test wrong          computes with another scale on purpose: has to be caught
//
// Prints one line, and returns 0 if all is well. A mistake names the seed of its call.
#include <math.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <optional>
#include <thread>

#include "guarded.h"
#include "refusals.h"
#include "unused.h"

namespace {

constexpr double INF = std::numeric_limits<double>::infinity();

// Pieces on threads of their own, as torch_parallel_for hands them out.
int32_t parallel_for(int64_t begin, int64_t end, int64_t, void (*body)(int64_t, int64_t, void *),
                     void *context) {
  std::vector<std::thread> threads;
  for (int64_t n = begin; n < end; n++) threads.emplace_back(body, n, n + 1, context);
  for (std::thread &thread : threads) thread.join();
  return 0;
}

void near(uint64_t seed, const char *what, double got, double wanted, double tolerance) {
  if (wanted == got || (wanted != wanted && got != got)) return;
  if (!(fabs(got - wanted) <= tolerance)) fail(seed, what, got, wanted);
}

struct Problem {
  clearhead_call c = {};
  Tensor query, key, value, out;
  std::optional<Tensor> mask, added[2], key_mask, doc_q, doc_k, slopes, head_mask, first_key;
  std::optional<Guarded> sinks, cu_q, cu_k;
  std::vector<Guarded> results;
};

Tensor whole_numbers(int64_t B, int64_t n, int64_t most, bool rising) {
  // Eight bytes each: kept as pairs of floats' room, written below by address.
  int64_t sizes[4] = {B, n, 1, 2};
  Tensor t{Guarded(size_t(B * n) * 8, chance(70)), CLEARHEAD_FLOAT32, {}, {}};
  memcpy(t.sizes, sizes, sizeof sizes);
  int64_t *at = reinterpret_cast<int64_t *>(t.memory.data);
  for (int64_t b = 0; b < B; b++) {
    int64_t number = INT64_C(1) << 40;
    for (int64_t i = 0; i < n; i++) {
      if (rising) number += chance(15);
      at[b * n + i] = rising ? number : draw(0, most);
    }
  }
  return t;
}

float *result(Problem &p, int64_t floats) {
  p.results.emplace_back(size_t(floats) * 4, chance(70));
  memset(p.results.back().data, 0xff, p.results.back().bytes);
  return reinterpret_cast<float *>(p.results.back().data);
}

// -- one random call -------------------------------------------------------------------------------

int64_t size_near(std::initializer_list<int64_t> edges, int64_t most) {
  const int64_t edge = edges.begin()[draw(0, int64_t(edges.size()) - 1)];
  return std::max<int64_t>(1, chance(50) ? draw(1, most) : edge + draw(-1, 1));
}

Problem make_problem() {
  const int64_t G = draw(1, 4), Hkv = draw(1, 3), H = G * Hkv;
  const int64_t S = chance(4) ? draw(1500, 1700) : size_near({1, 8, 16, 48, 96, 192}, 130);
  int64_t L = chance(35) ? draw(1, 3) : size_near({1, 16, 48}, 60);
  const int64_t D = size_near({1, 8, 16, 64}, 70), Dv = chance(70) ? D : size_near({1, 16}, 70);
  const bool packed = chance(12);
  const int64_t B = draw(1, 3), rows_b = packed ? 1 : B;
  const int64_t dtype = draw(0, 2);

  std::vector<int64_t> cu_q(1, 0), cu_k(1, 0);
  int64_t total_q = L, total_k = S, longest_q = L, longest_k = S;
  if (packed) {
    longest_q = longest_k = 1;
    for (int64_t b = 0; b < B; b++) {
      const int64_t rows = chance(10) ? 0 : draw(1, L), keys = chance(10) ? 0 : draw(1, S);
      cu_q.push_back(cu_q.back() + rows), cu_k.push_back(cu_k.back() + keys);
      longest_q = std::max(longest_q, rows), longest_k = std::max(longest_k, keys);
    }
    total_q = std::max<int64_t>(cu_q.back(), 1), total_k = std::max<int64_t>(cu_k.back(), 1);
  }

  Problem p{{},
            make(dtype, {rows_b, H, total_q, D}, 1, false),
            make(dtype, {rows_b, Hkv, total_k, D}, 1, true),
            make(dtype, {rows_b, Hkv, total_k, Dv}, 1, true),
            make(dtype, {rows_b, H, total_q, Dv}, 1, false),
            {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}};
  clearhead_call &c = p.c;
  const double size = chance(20) ? 8 : 1;
  fill(p.query, [&] { return normal() * size; });
  fill(p.key, [&] { return normal(); });
  fill(p.value, [&] { return normal(); });
  c.B = B, c.H = H, c.Hkv = Hkv, c.L = longest_q, c.S = longest_k, c.D = D, c.Dv = Dv;
  c.dtype = dtype;
  c.query = p.query.memory.data, c.key = p.key.memory.data, c.value = p.value.memory.data;
  c.out = p.out.memory.data;
  memcpy(c.query_strides, p.query.strides, sizeof c.query_strides);
  memcpy(c.key_strides, p.key.strides, sizeof c.key_strides);
  memcpy(c.value_strides, p.value.strides, sizeof c.value_strides);
  memcpy(c.out_strides, p.out.strides, sizeof c.out_strides);
  const int64_t rows = rows_b * H * total_q;

  c.scale = chance(20) ? normal() : 1 / sqrt(double(D));
  c.softcap = chance(15) ? 0.5 + double(draw(0, 20)) : 0;
  c.left = chance(25) ? draw(0, S) : CLEARHEAD_NO_LIMIT;
  c.right = chance(50) ? chance(80) ? 0 : draw(0, S) : CLEARHEAD_NO_LIMIT;
  if (chance(20)) {
    p.sinks.emplace(size_t(H) * 4, chance(70));
    for (int64_t h = 0; h < H; h++)
      reinterpret_cast<float *>(p.sinks->data)[h] = float(normal() * 2);
    c.sinks = reinterpret_cast<const float *>(p.sinks->data);
  }
  auto per_head = [&](std::optional<Tensor> &to, const float *&field, int64_t *strides) {
    to.emplace(make(CLEARHEAD_FLOAT32, {B, H, 1, 1}, 2, true));
    fill(*to, [] { return fabs(normal()); });
    field = reinterpret_cast<const float *>(to->memory.data);
    strides[0] = to->strides[0], strides[1] = to->strides[1];
  };
  if (chance(20)) per_head(p.slopes, c.slopes, c.slopes_strides);
  if (chance(15)) per_head(p.head_mask, c.head_mask, c.head_mask_strides);

  if (packed) {
    for (auto [to, from, field] : {std::tuple{&p.cu_q, &cu_q, &c.cu_q}, {&p.cu_k, &cu_k, &c.cu_k}}) {
      to->emplace(from->size() * 8, chance(70));
      memcpy((*to)->data, from->data(), from->size() * 8);
      *field = reinterpret_cast<const int64_t *>((*to)->data);
    }
  } else {
    if (chance(20)) {
      p.mask.emplace(make(CLEARHEAD_BOOL, {B, H, L, S}, 0, true));
      fill(*p.mask, [] { return chance(70); });
      c.mask = {p.mask->memory.data, {}, CLEARHEAD_BOOL};
      memcpy(c.mask.strides, p.mask->strides, sizeof p.mask->strides);
    }
    for (int n = 0; n < 2; n++)
      if (chance(15)) {
        const int64_t kind = chance(60) ? int64_t(CLEARHEAD_FLOAT32) : dtype;
        p.added[n].emplace(make(kind, {B, H, L, S}, 0, true));
        fill(*p.added[n], [] { return chance(10) ? -INF : normal() * 2; });
        c.added[n] = {p.added[n]->memory.data, {}, kind};
        memcpy(c.added[n].strides, p.added[n]->strides, sizeof p.added[n]->strides);
      }
    if (chance(25)) {
      p.key_mask.emplace(make(CLEARHEAD_BOOL, {B, S, 1, 1}, 2, true));
      fill(*p.key_mask, [] { return chance(75); });
      c.key_mask = reinterpret_cast<const uint8_t *>(p.key_mask->memory.data);
      memcpy(c.key_mask_strides, p.key_mask->strides, sizeof c.key_mask_strides);
    }
    if (chance(20)) {
      p.doc_q.emplace(whole_numbers(B, L, 0, true)), p.doc_k.emplace(whole_numbers(B, S, 0, true));
      c.doc_q = reinterpret_cast<const int64_t *>(p.doc_q->memory.data);
      c.doc_k = reinterpret_cast<const int64_t *>(p.doc_k->memory.data);
      c.doc_q_strides[0] = L, c.doc_k_strides[0] = S;
      c.doc_q_strides[1] = c.doc_k_strides[1] = 1;
    }
    if (chance(15)) {
      p.first_key.emplace(whole_numbers(B, L, S - 1, false));
      c.first_key = reinterpret_cast<const int64_t *>(p.first_key->memory.data);
      c.first_key_strides[0] = L, c.first_key_strides[1] = 1;
    }
  }
  if (chance(40))
    for (float **field : {&c.m, &c.z, &c.lse, &c.max_logit, &c.entropy, &c.first_mass, &c.previous_mass, &c.self_mass,
                          &c.distance})
      if (chance(60)) *field = result(p, rows);
  if (chance(20)) {
    c.top_k = draw(1, CLEARHEAD_MAX_TOP_K);
    c.top_weights = result(p, rows * c.top_k);
    c.top_keys = reinterpret_cast<int64_t *>(result(p, rows * c.top_k * 2));
  }
  if (chance(15)) c.key_mass = result(p, rows_b * H * total_k);
  if (!packed && chance(25)) c.weights = result(p, rows * S);
  if (c.key_mass || c.weights)
    for (float **field : {&c.m, &c.z})
      if (!*field) *field = result(p, rows);
  c.threads = draw(1, 4);
  if (chance(70)) c.parallel_for = parallel_for;
  return p;
}

// -- the judge -------------------------------------------------------------------------------------

double dense(const std::optional<Tensor> &t, int64_t b, int64_t h, int64_t i, int64_t j, double none) {
  return t ? t->get(b, h, i, j) : none;
}

int64_t whole(const std::optional<Tensor> &t, int64_t b, int64_t i) {
  return reinterpret_cast<const int64_t *>(t->memory.data)[b * t->sizes[1] + i];
}

struct Key {
  int64_t j;
  double s, w;
};

void judge(const Problem &p, uint64_t seed) {
  const clearhead_call &c = p.c;
  const double eps = c.dtype == CLEARHEAD_FLOAT32 ? 2e-6 : c.dtype == CLEARHEAD_BFLOAT16 ? 1.6e-2 : 2e-3;
  const int64_t rows_b = p.query.sizes[0], total = p.query.sizes[2], total_k = p.key.sizes[2];
  std::vector<double> key_mass(size_t(rows_b * c.H * total_k), 0.0);
  for (int64_t b = 0; b < c.B; b++) {
    const int64_t q0 = c.cu_q ? c.cu_q[b] : 0, k0 = c.cu_k ? c.cu_k[b] : 0;
    const int64_t L = c.cu_q ? c.cu_q[b + 1] - q0 : c.L, S = c.cu_k ? c.cu_k[b + 1] - k0 : c.S;
    const int64_t pb = c.cu_q ? 0 : b;
    for (int64_t h = 0; h < c.H; h++)
      for (int64_t i = 0; i < L; i++) {
        const int64_t own = i + S - L, g = h / (c.H / c.Hkv);
        std::vector<Key> seen;
        double largest = 0;
        for (int64_t j = 0; j < S; j++) {
          if (c.left != CLEARHEAD_NO_LIMIT && j < own - c.left) continue;
          if (c.right != CLEARHEAD_NO_LIMIT && j > own + c.right) continue;
          if (p.key_mask && p.key_mask->get(b, j, 0, 0) == 0) continue;
          if (p.doc_q && whole(p.doc_q, b, i) != whole(p.doc_k, b, j)) continue;
          if (dense(p.mask, b, h, i, j, 1) == 0) continue;
          const double added = dense(p.added[0], b, h, i, j, 0) + dense(p.added[1], b, h, i, j, 0);
          if (added == -INF) continue;
          double s = 0, size = 0;
          for (int64_t d = 0; d < c.D; d++) {
            const double product = p.query.get(pb, h, q0 + i, d) * p.key.get(pb, g, k0 + j, d);
            s += product, size += fabs(product);
          }
          s *= c.scale;
          if (c.softcap != 0) s = c.softcap * tanh(s / c.softcap);
          s += added;
          if (p.slopes) s -= p.slopes->get(b, h, 0, 0) * double(std::abs(own - j));
          largest = std::max({largest, fabs(s), fabs(c.scale) * size});
          seen.push_back({j, s, 0});
        }
        // A score's error is relative to the products that it sums, and these may cancel out; the
        // weights' is the score's.
        const double loose = 4e-6 * (1 + largest) + (c.dtype == CLEARHEAD_FLOAT32 ? 0 : 1e-6);
        double m = -INF, top = -INF, z = 0;
        for (const Key &key : seen) top = std::max(top, key.s);
        if (!seen.empty()) m = c.sinks ? std::max(top, double(c.sinks[h])) : top;
        for (Key &key : seen) z += key.w = exp(key.s - m);
        if (!seen.empty() && c.sinks) z += exp(double(c.sinks[h]) - m);
        const int64_t row = (pb * c.H + h) * total + q0 + i;
        if (c.m) near(seed, "m", c.m[row], m, 1e-5 * (1 + largest));
        if (c.z) near(seed, "z", c.z[row], z, 2e-5 * (1 + largest) * (1 + z));
        if (c.lse) near(seed, "lse", c.lse[row], m + log(z), 1e-5 * (1 + largest));
        double entropy = 0, distance = 0, first = 0, previous = 0, self = 0;
        const int64_t first_key = p.first_key ? whole(p.first_key, b, i) : 0;
        for (Key &key : seen) {
          key.w /= z;
          if (key.w > 0) entropy -= key.w * log(key.w);
          distance += key.w * double(std::abs(own - key.j));
          if (key.j == first_key) first = key.w;
          if (key.j == own - 1) previous = key.w;
          if (key.j == own) self = key.w;
          key_mass[size_t((pb * c.H + h) * total_k + k0 + key.j)] += key.w;
        }
        if (c.max_logit) near(seed, "max_logit", c.max_logit[row], top, 1e-5 * (1 + largest));
        if (c.entropy) near(seed, "entropy", c.entropy[row], entropy, 10 * loose * (1 + entropy));
        if (c.distance) near(seed, "distance", c.distance[row], distance, 5 * loose * (1 + double(S)));
        if (c.first_mass) near(seed, "first_mass", c.first_mass[row], first, 2 * loose);
        if (c.previous_mass) near(seed, "previous_mass", c.previous_mass[row], previous, 2 * loose);
        if (c.self_mass) near(seed, "self_mass", c.self_mass[row], self, 2 * loose);
        if (c.weights) {
          std::vector<double> w(size_t(S), 0.0);
          for (const Key &key : seen) w[size_t(key.j)] = key.w;
          for (int64_t j = 0; j < S; j++)
            near(seed, "a weight", c.weights[row * S + j], w[size_t(j)], 2 * loose * (w[size_t(j)] > 0));
        }
        if (c.top_k) {
          std::vector<Key> order = seen;
          std::stable_sort(order.begin(), order.end(), [](const Key &a, const Key &b) { return a.w > b.w; });
          for (int64_t k = 0; k < c.top_k; k++) {
            const int64_t at = row * c.top_k + k, j = c.top_keys[at];
            const bool there = k < int64_t(order.size());
            near(seed, "a top weight", c.top_weights[at], there ? order[size_t(k)].w : 0, 2 * loose);
            if ((j >= 0) != there) fail(seed, "a top key", double(j), there ? 0 : -1);
            if (!there) continue;
            // Rounding may swap two that are nearly equal: the key must have that weight.
            const auto key = std::find_if(seen.begin(), seen.end(), [&](const Key &x) { return x.j == j; });
            if (key == seen.end()) fail(seed, "a top key that the row does not see", double(j), -1);
            near(seed, "the weight of a top key", key->w, order[size_t(k)].w, 4 * loose);
          }
        }
        const double factor = p.head_mask ? p.head_mask->get(b, h, 0, 0) : 1;
        for (int64_t d = 0; d < c.Dv; d++) {
          double o = 0, most = 0;
          for (const Key &key : seen) {
            const double v = p.value.get(pb, g, k0 + key.j, d);
            o += key.w * v, most = std::max(most, fabs(v));
          }
          near(seed, "out", p.out.get(pb, h, q0 + i, d), o * factor,
               (eps + 2 * loose) * (most + 1e-3) * std::max(1.0, factor));
        }
      }
  }
  const bool no_keys = c.cu_k && c.cu_k[c.B] == 0;  // then the one in memory is nobody's
  if (c.key_mass && !no_keys)
    for (size_t n = 0; n < key_mass.size(); n++)
      near(seed, "key_mass", c.key_mass[n], key_mass[n], 1e-3 * (1 + key_mass[n]));
}

void forward(clearhead_call c, uint64_t seed) {
  int64_t bytes = 0;
  int32_t status = clearhead_workspace(&c, &bytes);
  if (status) fail(seed, "the status of clearhead_workspace", status, 0);
  Guarded workspace{size_t(bytes), chance(50)};
  memset(workspace.data, 0xff, workspace.bytes);  // what is not written first is NaN
  c.workspace = workspace.data, c.workspace_bytes = bytes;
  status = clearhead_forward(&c);
  if (status) fail(seed, "the status of clearhead_forward", status, 0);
}

// Without an output everything else has the bits that it has beside one.
void without_values(Problem &p, uint64_t seed) {
  std::vector<std::vector<char>> beside;
  for (Guarded &found : p.results) {
    beside.emplace_back(found.data, found.data + found.bytes);
    memset(found.data, 0xff, found.bytes);
  }
  clearhead_call c = p.c;
  c.out = nullptr, c.value = nullptr;
  c.Dv = chance(50) ? 0 : -1, c.value_strides[2] = c.out_strides[2] = draw(-9, 9);
  forward(c, seed);
  for (size_t n = 0; n < beside.size(); n++)
    for (size_t byte = 0; byte < beside[n].size(); byte++)
      if (p.results[n].data[byte] != beside[n][byte])
        fail(seed, "a byte of what is found without values", double(p.results[n].data[byte]),
             double(beside[n][byte]));
}

void run(uint64_t seed, double wrong_scale = 1) {
  state = seed;
  Problem p = make_problem();
  clearhead_call c = p.c;
  c.scale *= wrong_scale;
  forward(c, seed);
  judge(p, seed);
  without_values(p, seed);
}

// One key more than there is memory for.
void read_beyond() {
  Guarded key(7 * 16 * 4, true), value(8 * 16 * 4, true), workspace(1 << 20, true);
  memset(key.data, 0, key.bytes), memset(value.data, 0, value.bytes);
  float query[16] = {}, out[16];
  clearhead_call c = {};
  c.B = c.H = c.Hkv = c.L = 1, c.S = 8, c.D = c.Dv = 16;
  c.query = query, c.key = key.data, c.value = value.data, c.out = out;
  c.key_strides[2] = c.value_strides[2] = 16;
  c.scale = 1, c.left = c.right = CLEARHEAD_NO_LIMIT, c.threads = 1;
  c.workspace = workspace.data, c.workspace_bytes = int64_t(workspace.bytes);
  clearhead_forward(&c);
}

}  // namespace

int main(int count, char **words) {
  if (count == 2 && !strcmp(words[1], "beyond")) return read_beyond(), 0;
  if (count == 2 && !strcmp(words[1], "wrong")) {
    for (uint64_t seed = 1; seed < 20; seed++) run(seed, 1.01);
    return 0;
  }
  if (count != 3) {
    fprintf(stderr, "usage: kernels_test SEED CALLS\n");
    return 2;
  }
  if (clearhead_call_bytes() != sizeof(clearhead_call)) fail(0, "the size of a call", 0, 1);
  const char *isa = nullptr;
  if (int32_t status = clearhead_isa(CLEARHEAD_BFLOAT16, &isa)) {
    fprintf(stderr, "clearhead_isa: status %d\n", int(status));
    return 3;
  }
  refuse(), leave_unused();
  const uint64_t first = strtoull(words[1], nullptr, 10), calls = strtoull(words[2], nullptr, 10);
  for (uint64_t n = 0; n < calls; n++) run(first + n);
  printf("%s: %llu calls\n", isa, (unsigned long long)calls);
  return 0;
}
