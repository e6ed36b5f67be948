/* A layer's mixture of experts: its computation, and its intermediate results. */
#ifndef EXPERTS_H
#define EXPERTS_H

#include "gemm.h"

/* A pair is a token and one of its experts: N * per_token pairs, which are sorted by expert. */
typedef struct {
    float *logits;      /* [N][num_experts] */
    int32_t *chosen;    /* [N][per_token] experts */
    float *weights;     /* [N][per_token] */
    int32_t *places;    /* [N][per_token] a pair's place among the sorted pairs */
    int32_t *which;     /* [num_experts] the experts that have pairs */
    int32_t *first;     /* [num_experts + 1] the first pair of each of these */
    int32_t *next;      /* [num_experts] the place of each expert's next pair */
    int32_t *num_used;  /* number of experts that have pairs */
    elem *gathered;     /* [pairs][hidden], sorted */
    elem *inner;        /* [pairs][intermediate] */
    float *outputs;     /* [pairs][hidden] */
    elem *shared_inner; /* [N][shared_intermediate] */
    float *sum;         /* [N][hidden]: the layer's output, added to the stream */
} ExpertBuffers;

/* Compute buffers->sum of normed[rows][hidden], in several phases of a team. Ends with a barrier. */
void NAME(experts)(ThreadTeam *team, const Experts *experts, const elem *normed, int hidden, int rows,
                   ExpertBuffers *buffers);

#endif
