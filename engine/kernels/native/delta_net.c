/* One token's step of gated delta nets, as engine/models/delta_net.py defines it. An item of work is a row's key head,
 * with the value heads that share it:
 *
 *     queries, keys, values ─ convolution, SiLU ─▶ q, k, v ─▶ S: forgets, learns ─▶ S q
 *
 * A state is read from memory once and written once: a strip of its columns stays in the nearest cache between what it
 * knows of the key and what it learns.
 */
#include "thread_team.h"
#include "transpose.h"

#include <math.h>

#define UNIT_EPS 1e-6f
#define MOST_DIM 512 /* engine/models/native_delta_net.py has the same limit */

/* Convolve the channels first .. first + count over time, and keep what the next token's convolution sees. `past` and
 * `kept` [kernel - 1][channels] may be the same. */
static void convolve(const DeltaNet *net, const elem *past, const elem *now, elem *kept, int first, int count,
                     float *out)
{
    int channels = net->channels, last = net->kernel - 1;
    for (int c = first; c < first + count; c += LANES) {
        vf newest = vload_elem(now + c), sum = vset(0);
        for (int t = 0; t < last; t++) {
            vf x = vload_elem(past + t * channels + c);
            sum += x * vload(net->conv + t * channels + c);
            if (t)
                vstore_elem(kept + (t - 1) * channels + c, x);
        }
        if (last)
            vstore_elem(kept + (last - 1) * channels + c, newest);
        sum += newest * vload(net->conv + last * channels + c);
        vstore(out + c - first, sum / (1.0f + vexp(-sum)));
    }
}

/* Make a vector's length 1, times `scale`. */
static void normalize(float *x, int n, float scale)
{
    vf squares = vset(0);
    for (int i = 0; i < n; i += LANES)
        squares += vload(x + i) * vload(x + i);
    float factor = scale / sqrtf(vtotal(squares) + UNIT_EPS);
    for (int i = 0; i < n; i += LANES)
        vstore(x + i, vload(x + i) * factor);
}

/* Advance a compile-time number of vectors' columns of a state, [key_dim][value_dim]; `from` and `to` may be the same. */
static inline __attribute__((always_inline)) void advance_strip(const int vectors, const DeltaNet *net,
                                                                const float *from, float *to, const float *query,
                                                                const float *key, const float *value, float decay,
                                                                float strength, float *out)
{
    vf known[8], learned[8], found[8];
    ptrdiff_t stride = net->value_dim;
    for (int v = 0; v < vectors; v++)
        known[v] = found[v] = vset(0);
    for (int k = 0; k < net->key_dim; k++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++)
            known[v] += vload(from + k * stride + v * LANES) * key[k];
    for (int v = 0; v < vectors; v++)
        learned[v] = (vload(value + v * LANES) - known[v] * decay) * strength;
    for (int k = 0; k < net->key_dim; k++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) {
            vf state = vload(from + k * stride + v * LANES) * decay + learned[v] * key[k];
            vstore(to + k * stride + v * LANES, state);
            found[v] += state * query[k];
        }
    for (int v = 0; v < vectors; v++)
        vstore(out + v * LANES, found[v]);
}

/* Advance one row's state of one key head and its value heads. */
static void advance_head(const DeltaNet *net, const DeltaRows *rows, int row, int head)
{
    enum { COLUMNS = 32, VECTORS = COLUMNS / LANES };
    float query[MOST_DIM], key[MOST_DIM], value[MOST_DIM];
    int key_dim = net->key_dim, dim = net->value_dim, each = net->num_value_heads / net->num_key_heads;
    int keys = net->num_key_heads * key_dim;
    size_t inputs = (size_t)(net->kernel - 1) * net->channels, matrix = (size_t)key_dim * dim;
    const elem *past = rows->inputs + rows->sources[row] * inputs, *now = rows->mixed + row * rows->mixed_stride;
    elem *kept = rows->inputs + rows->targets[row] * inputs;
    convolve(net, past, now, kept, head * key_dim, key_dim, query);
    convolve(net, past, now, kept, keys + head * key_dim, key_dim, key);
    normalize(query, key_dim, 1.0f / sqrtf((float)key_dim));
    normalize(key, key_dim, 1);
    for (int h = head * each; h < (head + 1) * each; h++) {
        size_t gate = (size_t)row * net->num_value_heads + h;
        const float *from = rows->matrices + (rows->sources[row] * net->num_value_heads + h) * matrix;
        float *to = rows->matrices + (rows->targets[row] * net->num_value_heads + h) * matrix;
        float *out = rows->out + gate * dim, decay = expf(rows->decay[gate]), strength = rows->strength[gate];
        convolve(net, past, now, kept, 2 * keys + h * dim, dim, value);
        int c = 0;
#if VECTOR_BYTES >= 32
        for (; c + 2 * COLUMNS <= dim; c += 2 * COLUMNS)
            advance_strip(2 * VECTORS, net, from + c, to + c, query, key, value + c, decay, strength, out + c);
#endif
        for (; c < dim; c += COLUMNS)
            advance_strip(VECTORS, net, from + c, to + c, query, key, value + c, decay, strength, out + c);
    }
}

/* Advance the states of rows by one token each. No row's target is another's source. */
EXPORT void NAME(raydix_delta_step)(const DeltaNet *net, const DeltaRows *rows, int threads)
{
    SharedWork work;
    work_begin(&work);
#pragma omp parallel num_threads(threads)
    {
        ThreadTeam team = team_join(&work);
        int items = rows->num_rows * net->num_key_heads;
        for (int item; (item = team_take(&team, items)) < items;)
            advance_head(net, rows, item / net->num_key_heads, item % net->num_key_heads);
    }
}
