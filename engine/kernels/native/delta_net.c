/* One token's step of gated delta nets, as engine/models/delta_net.py defines it. An item of work is a row's key head,
 * with the value heads that share it:
 *
 *     queries, keys, values ─ convolution, SiLU ─▶ q, k, v ─▶ S: forgets, learns ─▶ S q ─▶ gated norm
 *
 * A state is read from memory once and written once: a strip of its columns stays in the nearest cache between the
 * product with the key and the update.
 */
#include "delta_net.h"

#define MOST_DIM 512 /* engine/models/native_delta_net.py has the same limit */

/* Convolve the channels first .. first + count over time, and keep the inputs that the next token's
 * convolution reads. `past` and `kept` [kernel - 1][channels] may be the same. */
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
        vstore(out + c - first, silu(sum));
    }
}

/* Advance a compile-time number of vectors' columns of a state, [key_dim][value_dim]; `from` and `to` may be the same. */
static inline __attribute__((always_inline)) void advance_strip(const int vectors, const DeltaNet *net,
                                                                const float *from, float *to, const float *query,
                                                                const float *key, const float *value, float decay,
                                                                float strength, float *out)
{
    vf known[8], learned[8], found[8];
    recall(vectors, from, net->value_dim, net->key_dim, key, known);
    for (int v = 0; v < vectors; v++)
        learned[v] = to_learn(vload(value + v * LANES), known[v], decay, strength);
    learn(vectors, from, to, net->value_dim, net->key_dim, decay, key, learned, query, found, NULL, known);
    for (int v = 0; v < vectors; v++)
        vstore(out + v * LANES, found[v]);
}

/* Advance one row's state of one key head and its value heads. */
static void advance_head(const DeltaNet *net, const DeltaStates *states, const DeltaSteps *rows, int row, int head)
{
    enum { COLUMNS = 32, VECTORS = COLUMNS / LANES };
    float query[MOST_DIM], key[MOST_DIM], value[MOST_DIM], found[MOST_DIM];
    int key_dim = net->key_dim, dim = net->value_dim, each = net->num_value_heads / net->num_key_heads;
    int keys = net->num_key_heads * key_dim;
    size_t inputs = (size_t)(net->kernel - 1) * net->channels, matrix = (size_t)key_dim * dim;
    const elem *past = states->inputs + rows->sources[row] * inputs, *now = rows->mixed + row * rows->mixed_stride;
    elem *kept = states->inputs + rows->targets[row] * inputs;
    convolve(net, past, now, kept, head * key_dim, key_dim, query);
    convolve(net, past, now, kept, keys + head * key_dim, key_dim, key);
    normalize(query, key_dim, 1.0f / sqrtf((float)key_dim));
    normalize(key, key_dim, 1);
    for (int h = head * each; h < (head + 1) * each; h++) {
        size_t gate = (size_t)row * net->num_value_heads + h;
        const float *from = states->matrices + (rows->sources[row] * net->num_value_heads + h) * matrix;
        float *to = states->matrices + (rows->targets[row] * net->num_value_heads + h) * matrix;
        float decay = expf(rows->decay[gate]), strength = rows->strength[gate];
        convolve(net, past, now, kept, 2 * keys + h * dim, dim, value);
        int c = 0;
#if VECTOR_BYTES >= 32
        for (; c + 2 * COLUMNS <= dim; c += 2 * COLUMNS)
            advance_strip(2 * VECTORS, net, from + c, to + c, query, key, value + c, decay, strength,
                          found + c);
#endif
        for (; c < dim; c += COLUMNS)
            advance_strip(VECTORS, net, from + c, to + c, query, key, value + c, decay, strength,
                          found + c);
        finish_head(net, found, rows->z + row * rows->z_stride + h * dim, rows->out + gate * dim);
    }
}

/* Advance the states of rows by one token each. No row's target is another's source. */
EXPORT void NAME(raydix_delta_step)(const DeltaNet *net, const DeltaStates *states, const DeltaSteps *rows, int threads)
{
    SharedWork work;
    work_begin(&work);
#pragma omp parallel num_threads(threads)
    {
        ThreadTeam team = team_join(&work);
        int items = rows->num_rows * net->num_key_heads;
        for (int item; (item = team_take(&team, items)) < items;)
            advance_head(net, states, rows, item / net->num_key_heads, item % net->num_key_heads);
    }
}

#undef MOST_DIM
