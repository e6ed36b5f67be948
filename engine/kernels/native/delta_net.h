/* Functions that gated delta nets use both for one token and for prompts. */
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

/* Multiply a compile-time number of vectors' columns of a state, [key_dim][..], with a key: their prediction. */
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

/* Let these columns decay, and add `learned` for a key. Return their product with its query and, if there is a next
 * key, their product with that. `from` and `to` may be the same. */
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

/* Return the update for a value of a state whose product with the key, before it decays, is given. */
static inline vf to_learn(vf value, vf known, float decay, float strength)
{
    return (value - known * decay) * strength;
}

/* Norm the result of a head's query, and multiply it with its gate. */
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
