// What clearhead.cpp plans and a kernel carries out. Plain data only: inline functions or templates
// here would be compiled once per instruction set, and the linker could hand the AVX-512 copy to an
// older processor.
#pragma once

#include "clearhead.h"

namespace clearhead {

constexpr int BLOCK = 96;      // keys per block, counted from key 0: what makes a row's bits its own
constexpr int KEY_STRETCH = 48;  // of these, whose weighed values are summed up from 0
constexpr int SPAN_BLOCKS = 16;  // blocks whose sums start afresh, counted from key 0
// Rows of a panel that decode.inl.h serves, and no more than lanes: 12 of them take 0.84 of the time
// that they take in the lanes, 16 take 1.25 (256 keys of 64 numbers, an EPYC 9004, 2026-11).
constexpr int MOST_FEW = 12;
constexpr int FEW_STRIDE = BLOCK + 32;  // floats of a row of its scores: a last step may go beyond
constexpr int MAX_PANELS = 8;  // panels of query rows that share a block of keys
constexpr int MASS_BLOCKS = 4;  // blocks of an item of the second pass, which makes key_mass

// What statistics a pass gathers, beside max_logit: bits of Plan::statistics.
enum { ENTROPY = 1, DISTANCE = 2, MASSES = 4, TOP = 8 };

// How one call is cut, and where each part of a worker's workspace starts, in floats.
struct Plan {
  const clearhead_call *call;
  int64_t G;
  bool merged;          // rows of a group follow each other in the panels, g * L + i
  int64_t panels;       // of one (b, key/value head)
  int64_t group;        // panels that share a block of keys: an item of work
  int64_t groups;       // items of one (b, key/value head)
  int few;              // by decode.inl.h 1, 2, 4, 6, 8 or 12 rows at a time; 0 is not
  int64_t pieces;       // items that the spans of few rows are, or 1
  int64_t first_span;   // of the first piece
  int64_t items;        // of the whole call
  int64_t workers;      // that share them
  bool foresees;        // each asks for what its next item will touch
  int64_t L_stored, S_stored;  // of the axes (B, H, L) and (B, H, S) of m, z and the statistics
  bool raw;             // scores stay q . k, and the scale goes into the exponent
  float scale, exponent;  // exp(s - m) = exp2((s - m) * exponent)
  int statistics;         // bits as above
  int64_t q_floats, out_floats, panel_floats, statistics_floats;  // of one panel
  int64_t at_q, at_out, at_total, at_panels, at_statistics, at_scores, at_weights, at_cut,
      at_mask, at_added[2], at_key, at_value, at_mass;
  int64_t worker_floats;
  int64_t few_floats, piece_floats;  // an output of few rows; it and its panel, of one piece
  float *shared;  // of all workers: how many pieces of each head have ended, then the pieces
  int64_t at_pieces, shared_floats;
};

struct Kernel {
  const char *name;
  const Kernel *wide;  // what serves float32 and float16, NULL if it does so itself
  int rows, lanes;     // of a panel, of a vector
  int panel_bytes, statistics_bytes;
  void (*item)(const Plan &plan, int64_t item, float *workspace);
  // When all rows ended: key_mass, and the weights.
  void (*mass)(const Plan &plan, int64_t item, float *workspace);
  void (*weights)(const Plan &plan, int64_t item, float *workspace);
};

extern const Kernel generic_kernel;
#if defined(__x86_64__)
extern const Kernel avx2_kernel;
extern const Kernel avx512_kernel;
extern const Kernel avx512bf16_kernel;
extern const Kernel amx_kernel;
#elif defined(__aarch64__)
extern const Kernel neon_kernel;
#endif

// A call and its parts: the sequences that are packed into it, or the call itself.
struct Job {
  const clearhead_call *whole;
  const Kernel *kernel;
  int64_t parts, workers;
  int64_t L_stored, S_stored;
  int64_t panels;  // of all parts
  int64_t worker_floats, start_floats, shared_floats, bytes;
};

Job make_job(const clearhead_call &call, const Kernel &kernel);
clearhead_call part_of(const Job &job, int64_t s);
Plan make_plan(const Job &job, const clearhead_call &part);
Plan make_mass_plan(const Job &job, const clearhead_call &part);
Plan make_weights_plan(const Job &job, const clearhead_call &part);

// The kernel in use for calls of an element type, or NULL and why not.
const Kernel *active_kernel(int64_t dtype, int32_t *status);

}  // namespace clearhead
