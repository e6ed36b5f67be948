/* Many tokens of gated delta nets, as engine/models/delta_net.py defines them. An item of work is a row's key head, with
 * the value heads that share it. It goes through the row's tokens, AT_ONCE at a time:
 *
 *     window   [ kernel - 1 inputs before | inputs ]   ─ convolution, SiLU ─▶ queries, keys, values
 *     states   [ strip | strip | ... ]                 a strip of columns takes all these tokens in turn
 *
 * The columns of a state advance independently, and a strip stays in the nearest cache. It is read once for a token:
 * the pass that writes one token's update also multiplies with the next key. Solving for many tokens together
 * (arXiv:2412.06464, section 3.3), which torch does, needs more operations; with vectors it is no faster.
 */
#include "delta_net.h"

#define AT_ONCE 32 /* tokens */
#define STATE_COLUMNS (4 * LANES) /* columns of a strip: their sums fit into registers */

/* A thread's memory. */
typedef struct {
    elem *window;   /* [kernel - 1 + AT_ONCE][width]: the item's channels: query, key, values */
    float *queries; /* [AT_ONCE][key_dim] */
    float *keys;    /* [AT_ONCE][key_dim] */
    float *values;  /* [AT_ONCE][value heads][value_dim] */
    float *found;   /* [AT_ONCE][value_dim] */
    float *states;  /* of each value head: [key_dim][columns] of each strip */
    int width, each;
} DeltaScratch;

/* Lay out a thread's memory from `at` on, and return its end. */
static char *lay_out_delta(DeltaScratch *scratch, const DeltaNet *net, char *at)
{
    size_t key = net->key_dim * sizeof(float), value = net->value_dim * sizeof(float);
    int each = net->num_value_heads / net->num_key_heads, width = 2 * net->key_dim + each * net->value_dim;
    *scratch = (DeltaScratch){.width = width, .each = each};
    scratch->window = (elem *)carve(&at, net->kernel - 1 + AT_ONCE, width * sizeof(elem));
    scratch->queries = (float *)carve(&at, AT_ONCE, key);
    scratch->keys = (float *)carve(&at, AT_ONCE, key);
    scratch->values = (float *)carve(&at, AT_ONCE * each, value);
    scratch->found = (float *)carve(&at, AT_ONCE, value);
    scratch->states = (float *)carve(&at, (size_t)each * net->key_dim, value);
    return at;
}

/* The places of an item's channels among all channels: those of its query, its key and its values. */
typedef struct {
    int from[3], count[3];
} Channels;

static Channels channels_of(const DeltaNet *net, int head)
{
    int keys = net->num_key_heads * net->key_dim, values = net->num_value_heads / net->num_key_heads * net->value_dim;
    return (Channels){{head * net->key_dim, keys + head * net->key_dim, 2 * keys + head * values},
                      {net->key_dim, net->key_dim, values}};
}

static void gather(const Channels *channels, const elem *all, elem *own)
{
    for (int i = 0; i < 3; own += channels->count[i++])
        memcpy(own, all + channels->from[i], channels->count[i] * sizeof(elem));
}

static void scatter(const Channels *channels, const elem *own, elem *all)
{
    for (int i = 0; i < 3; own += channels->count[i++])
        memcpy(all + channels->from[i], own, channels->count[i] * sizeof(elem));
}

/* Convolve `count` of the window's channels, from `channel` of the item and `all` of the layer on, for its token t. */
static void convolve_window(const DeltaNet *net, const DeltaScratch *scratch, int t, int channel, int all, int count,
                            float *out)
{
    const elem *inputs = scratch->window + (size_t)t * scratch->width + channel;
    const float *weights = net->conv + all;
    for (int c = 0; c < count; c += LANES) {
        vf sum = vset(0);
        for (int k = 0; k < net->kernel; k++)
            sum += vload_elem(inputs + (size_t)k * scratch->width + c) * vload(weights + (size_t)k * net->channels + c);
        vstore(out + c, silu(sum));
    }
}

/* Read the inputs of n tokens, and convolve them. */
static void begin_tokens(const DeltaNet *net, const DeltaScratch *scratch, const Channels *channels, const elem *mixed,
                         int64_t stride, int n)
{
    int dim = net->key_dim, values = channels->count[2], before = net->kernel - 1;
    for (int t = 0; t < n; t++)
        gather(channels, mixed + t * stride, scratch->window + (size_t)(before + t) * scratch->width);
    for (int t = 0; t < n; t++) {
        float *query = scratch->queries + (size_t)t * dim, *key = scratch->keys + (size_t)t * dim;
        convolve_window(net, scratch, t, 0, channels->from[0], dim, query);
        convolve_window(net, scratch, t, dim, channels->from[1], dim, key);
        normalize(query, dim, 1.0f / sqrtf((float)dim));
        normalize(key, dim, 1);
        convolve_window(net, scratch, t, 2 * dim, channels->from[2], values, scratch->values + (size_t)t * values);
    }
    memmove(scratch->window, scratch->window + (size_t)n * scratch->width, sizeof(elem) * before * scratch->width);
}

/* The inputs and results of n tokens for a value head. */
typedef struct {
    const float *values; /* [n] rows of all value heads of the item */
    float decay[AT_ONCE], strength[AT_ONCE];
    int n;
} HeadTokens;

/* Advance a strip of a compile-time number of vectors, from its head's column `first` on. */
static inline __attribute__((always_inline)) void advance_columns(const int vectors, const DeltaNet *net,
                                                                  const DeltaScratch *scratch, const HeadTokens *tokens,
                                                                  int first, float *state)
{
    vf known[4], learned[4], found[4];
    int dim = net->key_dim;
    ptrdiff_t stride = vectors * LANES;
    recall(vectors, state, stride, dim, scratch->keys, known);
    for (int t = 0; t < tokens->n; t++) {
        const float *query = scratch->queries + (size_t)t * dim, *key = scratch->keys + (size_t)t * dim;
        const float *value = tokens->values + (size_t)t * scratch->each * net->value_dim + first;
        for (int v = 0; v < vectors; v++)
            learned[v] = to_learn(vload(value + v * LANES), known[v], tokens->decay[t], tokens->strength[t]);
        if (t + 1 < tokens->n)
            learn(vectors, state, state, stride, dim, tokens->decay[t], key, learned, query, found, key + dim, known);
        else
            learn(vectors, state, state, stride, dim, tokens->decay[t], key, learned, query, found, NULL, known);
        for (int v = 0; v < vectors; v++)
            vstore(scratch->found + (size_t)t * net->value_dim + first + v * LANES, found[v]);
    }
}

/* Advance a value head's state, strip by strip. */
static void advance_state(const DeltaNet *net, const DeltaScratch *scratch, const HeadTokens *tokens, float *state)
{
    int column = 0;
    for (; column + STATE_COLUMNS <= net->value_dim; column += STATE_COLUMNS)
        advance_columns(STATE_COLUMNS / LANES, net, scratch, tokens, column, state + (size_t)column * net->key_dim);
#if STATE_COLUMNS > 32
    if (column < net->value_dim)
        advance_columns(32 / LANES, net, scratch, tokens, column, state + (size_t)column * net->key_dim);
#endif
}

/* Copy between a state and its strips. */
static void copy_state(const DeltaNet *net, float *state, float *strips, bool takes)
{
    for (int c = 0; c < net->value_dim; c += STATE_COLUMNS) {
        int columns = net->value_dim - c < STATE_COLUMNS ? net->value_dim - c : STATE_COLUMNS;
        for (int k = 0; k < net->key_dim; k++, strips += columns) {
            float *own = state + (size_t)k * net->value_dim + c;
            memcpy(takes ? strips : own, takes ? own : strips, columns * sizeof(float));
        }
    }
}

/* The item being computed: a row's key head. */
typedef struct {
    const DeltaNet *net;
    const DeltaRow *row;
    const DeltaScratch *scratch;
    Channels channels;
    int head;
} DeltaItem;

/* Load the state from a slot, or store it in one. */
static void copy_slot(const DeltaItem *item, const DeltaStates *states, int64_t slot, bool takes)
{
    const DeltaNet *net = item->net;
    const DeltaScratch *scratch = item->scratch;
    size_t matrix = (size_t)net->key_dim * net->value_dim;
    for (int i = 0; i < net->kernel - 1; i++) {
        elem *all = states->inputs + ((size_t)slot * (net->kernel - 1) + i) * net->channels;
        elem *own = scratch->window + (size_t)i * scratch->width;
        takes ? gather(&item->channels, all, own) : scatter(&item->channels, own, all);
    }
    float *own = states->matrices + ((size_t)slot * net->num_value_heads + item->head * scratch->each) * matrix;
    for (int v = 0; v < scratch->each; v++)
        copy_state(net, own + v * matrix, scratch->states + v * matrix, takes);
}

/* Compute the tokens first .. first + n. */
static void compute_tokens(const DeltaItem *item, int first, int n)
{
    const DeltaNet *net = item->net;
    const DeltaRow *row = item->row;
    const DeltaScratch *scratch = item->scratch;
    int dim = net->value_dim, heads = net->num_value_heads;
    begin_tokens(net, scratch, &item->channels, row->mixed + first * row->mixed_stride, row->mixed_stride, n);
    for (int v = 0; v < scratch->each; v++) {
        int head = item->head * scratch->each + v;
        HeadTokens tokens = {.values = scratch->values + v * dim, .n = n};
        for (int t = 0; t < n; t++) {
            size_t at = (size_t)(first + t) * heads + head;
            tokens.decay[t] = expf(row->decay[at]);
            tokens.strength[t] = row->strength[at];
        }
        advance_state(net, scratch, &tokens, scratch->states + (size_t)v * net->key_dim * dim);
        for (int t = 0; t < n; t++)
            if (first + t >= row->num_replayed) {
                size_t token = first + t - row->num_replayed;
                finish_head(net, scratch->found + (size_t)t * dim, row->z + token * row->z_stride + head * dim,
                            row->out + (token * heads + head) * dim);
            }
    }
}

static void advance_row(const DeltaItem *item, const DeltaStates *states)
{
    const DeltaRow *row = item->row;
    copy_slot(item, states, row->source, true);
    int first = 0;
    for (int i = 0; i <= row->num_kept; i++) {
        int end = i < row->num_kept ? row->kept[i].end : row->num_tokens;
        while (first < end) {
            int n = end - first < AT_ONCE ? end - first : AT_ONCE;
            compute_tokens(item, first, n);
            first += n;
        }
        if (i < row->num_kept)
            copy_slot(item, states, row->kept[i].slot, false);
    }
}

/* Return the bytes of memory that `raydix_delta_rows` needs. */
EXPORT int64_t NAME(raydix_delta_rows_bytes)(const DeltaNet *net, int threads)
{
    DeltaScratch scratch;
    return (lay_out_delta(&scratch, net, NULL) - (char *)NULL) * threads;
}

/* Compute rows of many tokens. No row keeps a state in a slot that another begins with. */
EXPORT void NAME(raydix_delta_rows)(const DeltaNet *net, const DeltaStates *states, const DeltaRow *rows, int num_rows,
                                    char *memory, int threads)
{
    SharedWork work;
    work_begin(&work);
#pragma omp parallel num_threads(threads)
    {
        ThreadTeam team = team_join(&work);
        DeltaScratch scratch;
        lay_out_delta(&scratch, net, memory + team.thread * NAME(raydix_delta_rows_bytes)(net, 1));
        int items = num_rows * net->num_key_heads;
        for (int next; (next = team_take(&team, items)) < items;) {
            int head = next % net->num_key_heads;
            DeltaItem item = {net, rows + next / net->num_key_heads, &scratch, channels_of(net, head), head};
            advance_row(&item, states);
        }
    }
}

#undef STATE_COLUMNS
#undef AT_ONCE
