/* Attention on a CPU, as a plain C interface: the only header that is seen from outside.

   For b in B, h in H, i in L, over the keys j in S that row i may see (docs/spec.md, section 2):

       s_ij  = softcap(scale * q_i . k_j) + added_ij - slope_h * |own(i) - j|
       m_i   = max_j s_ij                              and the sink of h
       z_i   = sum_j exp(s_ij - m_i)                   and the sink's exp(sink_h - m_i)
       out_i = sum_j exp(s_ij - m_i) v_j / z_i         own(i) = i + (S - L)

   A row that sees no key gives out = 0. Without `out` nothing is done with values, and the
   statistics have the bits that they have with it. Arithmetic is float32; on some processors calls
   in bfloat16 round exp(s_ij - m_i) to it before it weighs v_j (and in the sum that divides
   out_i, not in z_i). head_mask multiplies out_i.
   Strides count elements. Everything belongs to the caller, the workspace included; nothing is
   allocated, printed or thrown here. */
#ifndef CLEARHEAD_H
#define CLEARHEAD_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(_WIN32)
#define CLEARHEAD_API __declspec(dllexport)
#else
#define CLEARHEAD_API __attribute__((visibility("default")))
#endif

#define CLEARHEAD_MAX_HEAD_SIZE 512
#define CLEARHEAD_NO_LIMIT INT64_MAX
#define CLEARHEAD_MAX_TOP_K 16

enum clearhead_dtype {
  CLEARHEAD_FLOAT32,
  CLEARHEAD_BFLOAT16,
  CLEARHEAD_FLOAT16,
  CLEARHEAD_BOOL /* one byte, 0 or 1 */
};

enum clearhead_status {
  CLEARHEAD_OK,
  CLEARHEAD_BAD_SIZE,      /* an axis is 0 or negative, 2^31 or more, or H is no multiple of Hkv */
  CLEARHEAD_BAD_HEAD_SIZE, /* D or Dv is over CLEARHEAD_MAX_HEAD_SIZE */
  CLEARHEAD_BAD_DTYPE,
  CLEARHEAD_BAD_POINTER, /* something that is needed is NULL, or must be NULL and is not */
  CLEARHEAD_BAD_RULE,    /* a window is negative, a scale or softcap is not finite */
  CLEARHEAD_SMALL_WORKSPACE,
  CLEARHEAD_UNKNOWN_ISA,    /* CLEARHEAD_ISA names no instruction set of this library */
  CLEARHEAD_UNSUPPORTED_ISA /* CLEARHEAD_ISA names one that this processor does not have */
};

/* Runs body(first, end, context) over [begin, end) in pieces of at least `grain`, and waits. */
typedef int32_t (*clearhead_parallel_for)(int64_t begin, int64_t end, int64_t grain,
                                          void (*body)(int64_t first, int64_t end, void *context),
                                          void *context);

/* (B, H, L, S) by strides; 0 where it is broadcast. data is NULL where there is none. */
typedef struct {
  const void *data;
  int64_t strides[4];
  int64_t dtype;
} clearhead_dense;

typedef struct {
  const void *query; /* (B, H, L, D) */
  const void *key;   /* (B, Hkv, S, D) */
  const void *value; /* (B, Hkv, S, Dv) */
  void *out;         /* (B, H, L, Dv), or NULL: then value, Dv and strides are not read */

  clearhead_parallel_for parallel_for; /* NULL runs on the calling thread alone */
  int64_t threads;
  void *workspace;
  int64_t workspace_bytes;

  int64_t B, H, Hkv, L, S, D, Dv;
  int64_t dtype;            /* of query, key, value and out */
  int64_t query_strides[3]; /* the last axis has stride 1, here and below */
  int64_t key_strides[3];
  int64_t value_strides[3];
  int64_t out_strides[3];

  double scale;
  double softcap;      /* 0 for none */
  int64_t left, right; /* neighbours beside the own key; CLEARHEAD_NO_LIMIT; causal is right = 0 */

  clearhead_dense mask;     /* bool, 1 = may attend */
  clearhead_dense added[2]; /* floats; -inf blocks */

  const uint8_t *key_mask; /* (B, S), 1 = may be attended, or NULL */
  int64_t key_mask_strides[2];
  const int64_t *doc_q, *doc_k; /* (B, L) and (B, S), or NULL */
  int64_t doc_q_strides[2], doc_k_strides[2];
  const float *sinks;  /* (H,), dense, or NULL */
  const float *slopes; /* (B, H), or NULL */
  int64_t slopes_strides[2];

  const float *head_mask; /* (B, H), multiplies out, or NULL */
  int64_t head_mask_strides[2];

  /* Packed sequences, or NULL: sequence b of B has query rows [cu_q[b], cu_q[b + 1]) and keys
     [cu_k[b], cu_k[b + 1]) of the one batch item that there is, and L and S are the longest. Rules
     with rows or keys lie along these as query and key do, and the strides of their axis b are not
     used; slopes and head_mask have a row for each sequence. Below, (B, H, L) has one batch item,
     and as L all rows. */
  const int64_t *cu_q, *cu_k;

  /* What else is wanted, of the weights w_ij = exp(s_ij - m_i) / z_i; dense, NULL where it is not. A
     row that sees no key gives -inf for m, lse and max_logit, top_keys = -1 and 0 elsewhere. */
  float *m, *z;                                  /* (B, H, L) */
  float *lse;                                    /* (B, H, L): m_i + log z_i */
  float *max_logit;                              /* (B, H, L): max_j s_ij, without the sink */
  float *entropy;                                /* (B, H, L): -sum_j w_ij log w_ij */
  float *first_mass, *previous_mass, *self_mass; /* (B, H, L): w_ij of one key j, 0 if not seen */
  float *distance;                               /* (B, H, L): sum_j w_ij |own(i) - j| */
  const int64_t *first_key;                      /* (B, L): the j of first_mass; NULL is key 0 */
  int64_t first_key_strides[2];
  float *top_weights; /* (B, H, L, top_k), falling; of equal ones the lower key first */
  int64_t *top_keys;  /* (B, H, L, top_k); -1, with weight 0, where fewer keys are seen */
  int64_t top_k;      /* at most CLEARHEAD_MAX_TOP_K */
  /* In passes of their own, which need m and z. */
  float *key_mass; /* (B, H, S): sum_i w_ij */
  float *weights;  /* (B, H, L, S): w_ij; NULL with packed sequences */
} clearhead_call;

/* What a library and its caller must agree on: sizeof(clearhead_call). */
CLEARHEAD_API int64_t clearhead_call_bytes(void);

/* The instruction set in use for calls of a dtype: the best one here, or the one that CLEARHEAD_ISA
   names. Some serve bfloat16 alone, and leave the others to avx512. *name is set on success only. */
CLEARHEAD_API int32_t clearhead_isa(int64_t dtype, const char **name);

/* The workspace that a call needs, from its sizes, dtype and threads, and from which of its pointers
   are NULL. */
CLEARHEAD_API int32_t clearhead_workspace(const clearhead_call *call, int64_t *bytes);

CLEARHEAD_API int32_t clearhead_forward(const clearhead_call *call);

#ifdef __cplusplus
}
#endif
#endif
