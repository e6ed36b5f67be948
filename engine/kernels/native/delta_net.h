/* What one token's step of gated delta nets and their prompts share. */
#ifndef DELTA_NET_H
#define DELTA_NET_H

#include "thread_team.h"
#include "transpose.h"

#include <math.h>

#define UNIT_EPS 1e-6f

static inline vf silu(vf x) { return x / (1.0f + vexp(-x)); }

/* Make a vector's length 1, times `scale`. */
static inline void normalize(float *x, int n, float scale)
{
    vf squares = vset(0);
    for (int i = 0; i < n; i += LANES)
        squares += vload(x + i) * vload(x + i);
    float factor = scale / sqrtf(vtotal(squares) + UNIT_EPS);
    for (int i = 0; i < n; i += LANES)
        vstore(x + i, vload(x + i) * factor);
}

/* Add up what a compile-time number of vectors' columns of a state, [key_dim][..], know of a key. */
static inline __attribute__((always_inline)) void recall(const int vectors, const float *state, ptrdiff_t stride,
                                                         int key_dim, const float *key, vf *known)
{
    for (int v = 0; v < vectors; v++)
        known[v] = vset(0);
    for (int k = 0; k < key_dim; k++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++)
            known[v] += vload(state + k * stride + v * LANES) * key[k];
}

/* Let these columns forget, and learn `learned` of a key; return what its query then finds and, if there is a next key,
 * what they know of that. `from` and `to` may be the same. */
static inline __attribute__((always_inline)) void learn(const int vectors, const float *from, float *to,
                                                        ptrdiff_t stride, int key_dim, float decay, const float *key,
                                                        const vf *learned, const float *query, vf *found,
                                                        const float *next, vf *known)
{
    for (int v = 0; v < vectors; v++)
        found[v] = known[v] = vset(0);
    for (int k = 0; k < key_dim; k++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) {
            vf state = vload(from + k * stride + v * LANES) * decay + learned[v] * key[k];
            vstore(to + k * stride + v * LANES, state);
            found[v] += state * query[k];
            if (next)
                known[v] += state * next[k];
        }
}

/* Return what is learned of a value by a state that, before it forgets, knows this much of its key. */
static inline vf to_learn(vf value, vf known, float decay, float strength)
{
    return (value - known * decay) * strength;
}

/* Norm what a head's query found, and multiply it with its gate. */
static inline void finish_head(const DeltaNet *net, const float *found, const elem *z, elem *out)
{
    int dim = net->value_dim;
    vf squares = vset(0);
    for (int i = 0; i < dim; i += LANES)
        squares += vload(found + i) * vload(found + i);
    float factor = 1.0f / sqrtf(vtotal(squares) / dim + net->eps);
    for (int i = 0; i < dim; i += LANES)
        vstore_elem(out + i, vload(found + i) * factor * vload(net->norm + i) * silu(vload_elem(z + i)));
}

#endif
