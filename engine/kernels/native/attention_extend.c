/* Attention of rows with many queries, which are bound by products. An item of work is a block of queries of one KV
 * head. A head's blocks follow each other, as they read the same KV; its last block, which sees the most, comes
 * first. Keys and values are packed into panels (gemm.h) once for all strips of a block:
 *
 *     positions of the row      0 ....... | ......... | ......... kv_len     chunks of CHUNK at multiples of it
 *     strip of STRIP queries    scores = queries x panels of 32 keys, online softmax -> weights
 *                               sums += weights x panels of 32 of the values' elements
 *
 * A strip multiplies only positions that one of its queries sees. As chunks lie at fixed positions and invisible
 * positions weigh exactly 0, a query's result depends on its position, keys and values, not on how its row is cut.
 */
#include "attention_pack.h"
#include "attention_rows.h"
#include "gemm.h"
#include "transpose.h"

#include <math.h>

#define CHUNK 256
#define STRIP 64
#define MOST_QUERIES 512 /* queries of a block at most: a multiple of STRIP */

/* A thread's buffers, for one block. */
typedef struct {
    elem *queries;       /* [MOST_QUERIES][head_dim] */
    float *sums;         /* [MOST_QUERIES][head_dim] */
    float *best, *total; /* [MOST_QUERIES] */
    float *scores;       /* [STRIP][CHUNK] */
    elem *weights;       /* [STRIP][CHUNK] */
    elem *keys;          /* [CHUNK / 32] panels of head_dim inputs */
    elem *values;        /* [head_dim / 32] panels of CHUNK inputs */
} Scratch;

/* Lay the buffers out from `at`, and return their end. Addresses are numbers, as there may be no memory yet. */
static uintptr_t lay_scratch(Scratch *scratch, int dim, uintptr_t at)
{
    scratch->sums = (float *)at, at += MOST_QUERIES * dim * sizeof(float);
    scratch->best = (float *)at, at += MOST_QUERIES * sizeof(float);
    scratch->total = (float *)at, at += MOST_QUERIES * sizeof(float);
    scratch->scores = (float *)at, at += STRIP * CHUNK * sizeof(float);
    scratch->queries = (elem *)at, at += MOST_QUERIES * dim * sizeof(elem);
    scratch->weights = (elem *)at, at += STRIP * CHUNK * sizeof(elem);
    scratch->keys = (elem *)at, at += CHUNK * dim * sizeof(elem);
    scratch->values = (elem *)at, at += CHUNK * dim * sizeof(elem);
    return at;
}

/* Some queries of a row: numbers first .. last of a KV head. */
typedef struct {
    const Attention *attention;
    const Row *row;
    int kv_head, first, last;
} Queries;

static int position_of_query(const Queries *queries, int query)
{
    return position_of(queries->row, query / queries->attention->group);
}

/* ---- packing ---- */

/* Pack the values from .. to of a chunk, those at `offsets`, into panels of CHUNK inputs. Inputs up to a multiple of
 * 32, and inputs before `first`, which no query sees, are zeros: their memory may hold NaN, and 0 * NaN is not 0. */
static void pack_values(const elem *values, const int64_t *offsets, int from, int first, int to, int dim,
                        elem *panels)
{
    static const elem zeros[PANEL];
    for (int k = from; k < round_up(to, 32); k += PAIR)
        for (int d = 0; d < dim; d += PANEL) {
            const elem *even = k >= first && k < to ? values + offsets[k] + d : zeros;
            elem *panel = panels + (size_t)d * CHUNK + k * PANEL;
#ifdef RAYDIX_BF16
            const elem *odd = k + 1 >= first && k + 1 < to ? values + offsets[k + 1] + d : zeros;
            for (int i = 0; i < PANEL; i += 2 * LANES)
                interleave(even + i, odd + i, panel + 2 * i);
#else
            memcpy(panel, even, sizeof(elem) * PANEL);
#endif
        }
}

/* ---- softmax ---- */

/* Return 2^x for x <= 0, to a relative error of 4e-5, less than rounding to bfloat16 adds; 0 below -126. */
static inline vf vexp2_bf16(vf x)
{
    vi tiny = x < -126.0f;
    x = vmax(x, vset(-126.0f));
    vf shifted = x + 12582912.0f; /* 1.5 * 2^23: rounds to an integer */
    vf r = x - (shifted - 12582912.0f);
    vf p = r * 0.0096181291f + 0.0555041087f; /* e^(r ln 2), Taylor */
    p = p * r + 0.2402265070f;
    p = p * r + 0.6931471806f;
    p = p * r + 1.0f;
    vf power = (vf)((vi)p + ((vi)shifted << 23));
    return vselect(tiny, vset(0), power);
}

#ifdef RAYDIX_BF16
#define LOG_BASE 1.44269504088896341f /* Scores are exponents of 2. */
#define raised vexp2_bf16
#else
#define LOG_BASE 1.0f
#define raised vexp
#endif

/* Turn one query's scores from .. to of a chunk into weights; first .. last are visible. If one of them is larger
 * than `best`, the partial results are scaled down. */
static inline void soften(float *scores, int from, int to, int first, int last, float scale, float *best,
                          float *total, float *sums, int dim, elem *weights)
{
    vf largest = vset(NO_SCORE);
    if (first > from || last < to)
        for (int i = from; i < to; i += LANES) {
            vi lanes = vlanes() + i;
            vi seen = (lanes >= first) & (lanes < last);
            vstore(scores + i, vselect(seen, vload(scores + i), vset(-INFINITY)));
        }
    for (int i = from; i < to; i += LANES)
        largest = vmax(largest, vload(scores + i));
    float new_best = fmaxf(*best, vlargest(largest) * scale);
    if (new_best > *best) {
        float factor = raised(vset(*best - new_best))[0];
        for (int d = 0; d < dim; d += LANES)
            vstore(sums + d, vload(sums + d) * factor);
        *total *= factor;
        *best = new_best;
    }
    vf added = vset(0);
    for (int i = from; i < to; i += 2 * LANES) {
        vf a = raised(vload(scores + i) * scale - new_best);
        vf b = raised(vload(scores + i + LANES) * scale - new_best);
        added += a + b;
        store_both(weights + i, a, b);
    }
    *total += vtotal(added);
}

/* ---- one block ---- */

/* Attend a strip of a block to the chunk's packed positions start .. start + count. */
static void attend_strip(const Queries *block, int first, int last, int start, int count,
                         const Scratch *scratch)
{
    const AttentionShape *shape = block->attention->shape;
    int dim = shape->head_dim, at = first - block->first, rows = last - first;
    int earliest = first_seen(position_of_query(block, first), shape->window) - start;
    int latest = position_of_query(block, last - 1) + 1 - start;
    int from = earliest > 0 ? earliest / PANEL * PANEL : 0;
    int to = round_up(latest < count ? latest : count, PANEL);
    if (from >= to)
        return;
    for (int k = from; k < to; k += PANEL)
        NAME(panel_multiply)(scratch->queries + at * dim, dim, rows, scratch->keys + k * dim, dim,
                             scratch->scores + k, CHUNK, false);
    for (int q = 0; q < rows; q++) {
        int position = position_of_query(block, first + q) - start;
        int seen = position + 1 < count ? position + 1 : count;
        if (shape->soft_cap > 0)
            for (int k = from; k < to; k += LANES) {
                float *at_k = scratch->scores + q * CHUNK + k;
                vstore(at_k, soft_capped(vload(at_k) * shape->scale, shape->soft_cap) / shape->scale);
            }
        soften(scratch->scores + q * CHUNK, from, to, first_seen(position + start, shape->window) - start, seen,
               shape->scale * LOG_BASE, scratch->best + at + q, scratch->total + at + q,
               scratch->sums + (at + q) * dim, dim, scratch->weights + q * CHUNK);
    }
    for (int d = 0; d < dim; d += PANEL)
        NAME(panel_multiply)(scratch->weights + from, CHUNK, rows,
                             scratch->values + (size_t)d * CHUNK + from * PANEL, to - from,
                             scratch->sums + at * dim + d, dim, true);
}

static void attend_block_of(const Queries *block, const Scratch *scratch)
{
    const Attention *attention = block->attention;
    int dim = attention->shape->head_dim, count = block->last - block->first;
    for (int q = 0; q < count; q++) {
        memcpy(scratch->queries + q * dim, query_of(attention, block->row, block->kv_head, block->first + q),
               sizeof(elem) * dim);
        bool has_sink = attention->shape->sinks != NULL; /* It counts as a score that was seen before all others. */
        scratch->best[q] =
            has_sink ? sink_of(attention, block->kv_head, block->first + q) * LOG_BASE : NO_SCORE;
        scratch->total[q] = has_sink;
    }
    memset(scratch->sums, 0, sizeof(float) * count * dim);

    const elem *keys = attention->pages->keys + block->kv_head * attention->pages->head_stride;
    const elem *values = attention->pages->values + block->kv_head * attention->pages->head_stride;
    int start = first_seen(position_of_query(block, block->first), attention->shape->window);
    int end = position_of_query(block, block->last - 1) + 1;
    for (int chunk = start / CHUNK * CHUNK; chunk < end; chunk += CHUNK) {
        int skipped = start > chunk ? (start - chunk) / PANEL * PANEL : 0; /* panels that no query sees */
        int held = end - chunk < CHUNK ? end - chunk : CHUNK;
        int64_t offsets[CHUNK];
        locate(attention->pages, block->row->table, chunk + skipped, held - skipped, offsets + skipped);
        for (int k = skipped; k < held; k += PANEL)
            pack_keys(keys, offsets + k, held - k, dim, scratch->keys + k * dim);
        pack_values(values, offsets, skipped, start - chunk, held, dim, scratch->values);
        for (int first = block->first; first < block->last; first += STRIP) {
            int last = first + STRIP < block->last ? first + STRIP : block->last;
            attend_strip(block, first, last, chunk, held, scratch);
        }
    }
    for (int q = 0; q < count; q++) {
        elem *out = out_of(attention, block->row, block->kv_head, block->first + q);
        for (int d = 0; d < dim; d += LANES)
            vstore_elem(out + d, vload(scratch->sums + q * dim + d) / scratch->total[q]);
    }
}

/* ---- the phase ---- */

/* Return the blocks of a row; 0 for a row that decode computes. */
static int num_blocks(const Attention *attention, const Row *row)
{
    int queries = has_few(attention, row) ? 0 : row->num_tokens * attention->group;
    return round_up(queries, MOST_QUERIES) / MOST_QUERIES;
}

int NAME(extend_items)(const Attention *attention)
{
    int items = 0;
    for (int index = 0; index < attention->batch->num_rows; index++) {
        Row row = row_of(attention->batch, index);
        items += num_blocks(attention, &row) * attention->shape->num_kv_heads;
    }
    return items;
}

void NAME(extend)(const Attention *attention, Walk *walk, char *own)
{
    int kv_heads = attention->shape->num_kv_heads;
    Scratch scratch;
    lay_scratch(&scratch, attention->shape->head_dim, (uintptr_t)own);
    for (int index = 0; index < attention->batch->num_rows; index++) {
        Row row = row_of(attention->batch, index);
        int queries = row.num_tokens * attention->group, blocks = num_blocks(attention, &row);
        for (int item; (item = walk->next - walk->done) < blocks * kv_heads; walk_on(walk)) {
            int first = (blocks - 1 - item % blocks) * MOST_QUERIES;
            int last = first + MOST_QUERIES < queries ? first + MOST_QUERIES : queries;
            Queries block = {attention, &row, item / blocks, first, last};
            attend_block_of(&block, &scratch);
        }
        walk->done += blocks * kv_heads;
    }
}

size_t NAME(extend_own_bytes)(const Attention *attention)
{
    Scratch scratch;
    return NAME(extend_items)(attention) ? lay_scratch(&scratch, attention->shape->head_dim, 0) : 0;
}
