/* The structs that Python passes to the native library through ctypes, and what all kernels share.
 *
 * Every kernel file is compiled once per element type and instruction set; NAME() gives each copy its own names,
 * such as raydix_forward_bf16_avx512. A file reads as if there were one type, `elem`, of weights, activations and KV.
 */
#ifndef RAYDIX_H
#define RAYDIX_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define RAYDIX_ABI 14 /* engine/kernels/native.py expects the same: raise both when a struct or a call changes. */

#ifdef RAYDIX_BF16
typedef uint16_t elem; /* bfloat16: the upper half of a float */
#define TYPE_NAME bf16
#else
typedef float elem;
#define TYPE_NAME f32
#endif

#define JOIN_(a, b, c) a##_##b##_##c
#define JOIN(a, b, c) JOIN_(a, b, c)
#define NAME(f) JOIN(f, TYPE_NAME, ISA)
#define EXPORT __attribute__((visibility("default")))

/* Take memory for an array from `at` on, in whole lines of 64 bytes. */
static inline char *carve(char **at, size_t rows, size_t row_bytes)
{
    char *start = *at;
    *at += (rows * row_bytes + 63) / 64 * 64;
    return start;
}

/* The storage of a matrix whose inputs have scales in groups (blocks.c). */
typedef struct {
    int32_t bits;        /* of a code: 4 or 8; 0: there are no groups */
    int32_t inputs;      /* of a group: 16 or 32 */
    int32_t scale_bytes; /* of a scale or a least value: 2 in float16, 4 in float32 */
    int32_t has_leasts;  /* a number is scale * code + least; without, it is scale * code */
} Grouping;

/* A matrix [outputs, inputs], packed into panels of 32 outputs (gemm.h). */
typedef struct {
    const void *packed;  /* elem, or int8 where there are scales, or blocks where there are groups */
    const float *scales; /* [outputs] of int8 weights, or NULL */
    const float *bias;   /* [outputs] or NULL */
    int32_t outputs, inputs;
    float alpha, limit; /* of CLAMPED_SWIGLU (gemm.h) */
    Grouping groups;
} Linear;

/* A mixture of experts instead of an MLP, as engine/models/experts.py defines it. */
typedef struct {
    Linear router;                      /* [num_experts, hidden] */
    const float *correction;            /* [num_experts], added to scores for the choice, or NULL */
    const Linear *gate_up, *down;       /* [num_experts], all of the same shape */
    Linear shared_gate_up, shared_down; /* of the MLP that all tokens share; without outputs there is none */
    int32_t num_experts, per_token, intermediate, shared_intermediate, num_groups, groups_per_token;
    float scaling; /* factor of the weights, where scores are sigmoids */
    bool is_sigmoid, renormalizes, is_clamped;
} Experts;

typedef struct {
    const float *input_norm, *post_norm;      /* [hidden], of the inputs of attention and MLP, or NULL */
    const float *attended_norm, *output_norm; /* [hidden], of the outputs of both, or NULL */
    const float *qk_norm;                     /* [num_heads + num_kv_heads, head_dim] or NULL */
    const float *sinks;                       /* [num_heads] as in AttentionShape, or NULL */
    const Experts *experts;                   /* instead of gate_up and down, or NULL */
    Linear qkv, output, gate_up, down;        /* gate_up: panels of 16 gates and the 16 ups that belong to them */
    int32_t window;                           /* a query at p sees p - window + 1 .. p; 0: 0 .. p */
    int32_t rope;                             /* number of its rotation */
    int32_t table;                            /* number of the batch with its block table and slots */
    int32_t number;                           /* its pages begin at layer_stride times this */
    float *before;                            /* [num_tokens][hidden] gets the stream before the layer, or NULL */
} Layer;

typedef struct {
    int32_t num_layers, hidden, intermediate, num_heads, num_kv_heads, head_dim, num_ropes, num_tables;
    float norm_eps, own_eps; /* of norms of the stream, and of all others */
    float attention_scale, soft_cap;
    const float *inv_freq;     /* [num_ropes][head_dim / 2] radians per position */
    const float *rope_factors; /* [num_ropes][head_dim / 2] factors of cosines and sines */
    const elem *embed;     /* [vocabulary, hidden], not packed; NULL: the table below has the embeddings */
    Linear table;          /* [vocabulary, hidden] in groups */
    float embedding_scale; /* of the table's embeddings */
    const Layer *layers;
    const float *norm; /* [hidden] */
    Linear head;
    bool is_gelu;         /* gates get GELU in its tanh form, not SiLU */
    bool norms_all_heads; /* qk_norm is of all of a token's queries together, and of its keys */
} Model;

/* Rows whose block tables begin alike: the rows members[first .. first + rows] of a batch attend together to the
 * first `positions` positions. */
typedef struct {
    int32_t first, rows, positions;
} Group;

/* A ragged batch, as engine/attention/batch.py describes it. */
typedef struct {
    int32_t num_rows, num_tokens, num_decodes, table_width;
    const int32_t *qo_indptr;    /* [num_rows + 1] */
    const int32_t *kv_lens;      /* [num_rows] */
    const int32_t *block_table;  /* [num_rows, table_width] */
    const int64_t *slot_mapping; /* [num_tokens] */
    const int64_t *positions;    /* [num_tokens] */
    const int64_t *token_ids;    /* [num_tokens] or NULL */
    const Group *groups;         /* [num_groups] */
    const int32_t *members;      /* rows of the groups */
    const int32_t *shared;       /* [num_rows] positions that the row's group shares; 0: no group. NULL: no groups */
    int32_t num_groups;
} Batch;

/* Keys and values of one layer, or of the first of several: element (page, slot, head, d) of the keys lies at
 * keys + page * page_stride + slot * slot_stride + head * head_stride + d. Strides count elements. Where a value is the
 * first numbers of its key (latent KV), both addresses are the same. */
typedef struct {
    elem *keys, *values;
    int64_t layer_stride, page_stride, slot_stride, head_stride;
    int32_t page_size;
} Pages;

typedef struct {
    int32_t num_heads, num_kv_heads, window;
    int32_t head_dim, value_dim; /* numbers of a query and a key; of a value and a result */
    float scale;
    float soft_cap;     /* scores, times scale, become cap * tanh(score / cap) (arXiv:2408.00118); 0: no cap */
    const float *sinks; /* [num_heads] a further score of each query that has no value (gpt-oss), or NULL */
} AttentionShape;

/* A gated delta net, as engine/models/delta_net.py defines it. Each dimension of heads is a multiple of 32. */
typedef struct {
    const float *conv; /* [kernel][channels], the newest position last */
    const float *norm; /* [value_dim] */
    int32_t num_key_heads, num_value_heads, key_dim, value_dim, kernel, channels;
    float eps; /* of the norm */
} DeltaNet;

/* All slots of one layer. */
typedef struct {
    elem *inputs;    /* [slots][kernel - 1][channels] */
    float *matrices; /* [slots][num_value_heads][key_dim][value_dim] */
} DeltaStates;

/* Rows that advance by one token. */
typedef struct {
    const elem *mixed;                /* [num_rows][channels], rows mixed_stride apart */
    const float *decay, *strength;    /* [num_rows][num_value_heads]; decay is a logarithm */
    const elem *z;                    /* [num_rows][num_value_heads][value_dim], rows z_stride apart */
    elem *out;                        /* [num_rows][num_value_heads][value_dim] */
    const int64_t *sources, *targets; /* [num_rows] slots */
    int64_t mixed_stride, z_stride;
    int32_t num_rows;
} DeltaSteps;

/* The number of a row's tokens after which its state is kept, and the slot. */
typedef struct {
    int64_t end, slot;
} DeltaKept;

/* A row of many tokens; the first num_replayed of them have no result. */
typedef struct {
    const elem *mixed;             /* [num_tokens][channels], tokens mixed_stride apart */
    const float *decay, *strength; /* [num_tokens][num_value_heads] as above */
    const elem *z;                 /* [num_tokens - num_replayed][num_value_heads][value_dim], tokens z_stride apart */
    elem *out;                     /* [num_tokens - num_replayed][num_value_heads][value_dim] */
    const DeltaKept *kept;         /* [num_kept], ends ascending */
    int64_t mixed_stride, z_stride, source;
    int32_t num_tokens, num_replayed, num_kept;
} DeltaRow;

/* How to choose a row's token: the parameters of engine/values/sampling_params.py, and state of the request. */
typedef struct {
    uint64_t seed;
    int64_t position;                        /* in the noise */
    double temperature, top_p, min_p;        /* temperature 0: the most likely token */
    double presence, frequency;              /* penalties */
    const int32_t *counts;                   /* [vocabulary]: engine/sampling/token_counts.py; NULL: no penalties */
    const int64_t *tail;                     /* [num_tail]: tokens of the output that `counts` lacks; at most 256 */
    const int32_t *edited;                   /* [num_edits] tokens; those outside the vocabulary are ignored */
    const float *edits;                      /* [num_edits]: added; -INFINITY forbids */
    const uint32_t *mask;                    /* [mask_words]: bits of the allowed tokens; NULL: all */
    float repetition;                        /* penalty */
    int32_t top_k;                           /* 0: all */
    int32_t num_tail, num_edits, mask_words;
    int32_t num_top;                         /* alternatives to report; -1: nothing is reported */
} SampledRow;

#endif
