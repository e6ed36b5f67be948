/* Attention of rows with many queries, which are bound by products. An item of work is a block of queries of one KV
 * head. A head's blocks follow each other, because they read the same KV; its last block, which sees the most, comes
 * first. Keys and values are packed into panels (gemm.h) once for all strips of a block:
 *
 *     positions of the row      0 ....... | ......... | ......... kv_len     chunks of CHUNK at multiples of it
 *     strip of STRIP queries    scores = queries x panels of 32 keys, online softmax -> weights
 *                               sums += weights x panels of 32 of the values' elements
 *
 * A strip multiplies only positions that one of its queries sees. New partial results begin at each multiple of PIECE
 * positions. They are added up in the pieces' order: by the thread that computes a block, or, if there are few blocks,
 * in a second phase, for which each piece of a row with a single block is an item. Pieces and chunks are at fixed
 * positions, and invisible positions have a weight of exactly 0. So a query's result depends on its position, keys and
 * values, and not on how its row is divided or which thread adds up.
 */
#include "attention_pack.h"
#include "attention_piece.h"
#include "gemm.h"
#include "transpose.h"

#include <math.h>

#define CHUNK 256 /* PIECE is a multiple of it */
#define STRIP 64
#define MOST_QUERIES 512 /* most queries of a block: a multiple of STRIP */
#define ADDED 16         /* queries of an item of the second phase */
#define MOST_KEPT (4 << 20) /* floats of partial results for each thread: the memory bound of a second phase */

/* A thread's buffers, for one block. */
typedef struct {
    elem *queries;  /* [MOST_QUERIES][head_dim] */
    Partial all;    /* of MOST_QUERIES: the sum of the pieces so far */
    Partial piece;  /* of MOST_QUERIES: one more piece. The sums of both are in the elements' order. */
    float *scores;  /* [STRIP][CHUNK] */
    elem *weights;  /* [STRIP][CHUNK] */
    elem *keys;     /* [CHUNK / 32] panels of head_dim inputs */
    elem *values;   /* [value_dim / 32] panels of CHUNK inputs */
} Scratch;

/* Lay the buffers out from `at`, and return their end. Addresses are numbers, because there may be no memory yet. */
static uintptr_t lay_scratch(Scratch *scratch, const AttentionShape *shape, uintptr_t at)
{
    int dim = shape->head_dim, value_dim = shape->value_dim;
    size_t partial = partial_floats(MOST_QUERIES, value_dim) * sizeof(float);
    scratch->all = partial_at((float *)at, MOST_QUERIES), at += partial;
    scratch->piece = partial_at((float *)at, MOST_QUERIES), at += partial;
    scratch->scores = (float *)at, at += STRIP * CHUNK * sizeof(float);
    scratch->queries = (elem *)at, at += MOST_QUERIES * dim * sizeof(elem);
    scratch->weights = (elem *)at, at += STRIP * CHUNK * sizeof(elem);
    scratch->keys = (elem *)at, at += CHUNK * dim * sizeof(elem);
    scratch->values = (elem *)at, at += CHUNK * value_dim * sizeof(elem);
    return at;
}

/* Some queries of a row: those with the numbers first .. last of a KV head. */
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
 * 32, and inputs before `first`, which no query sees, are zeros: memory there may hold NaN, and 0 * NaN is not 0. */
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
                         const Scratch *scratch, const Partial *partial)
{
    const AttentionShape *shape = block->attention->shape;
    int dim = shape->head_dim, value_dim = shape->value_dim, at = first - block->first, rows = last - first;
    Partial strip = partial_from(partial, at, value_dim);
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
               shape->scale * LOG_BASE, strip.best + q, strip.total + q, strip.sums + q * value_dim, value_dim,
               scratch->weights + q * CHUNK);
    }
    for (int d = 0; d < value_dim; d += PANEL)
        NAME(panel_multiply)(scratch->weights + from, CHUNK, rows,
                             scratch->values + (size_t)d * CHUNK + from * PANEL, to - from, strip.sums + d, value_dim,
                             true);
}

/* Attend a block to the positions first .. end, a piece or less of it. */
static void attend_positions(const Queries *block, int start, int end, const Scratch *scratch, const Partial *partial)
{
    const Attention *attention = block->attention;
    int dim = attention->shape->head_dim, value_dim = attention->shape->value_dim;
    const elem *keys = attention->pages->keys + block->kv_head * attention->pages->head_stride;
    const elem *values = attention->pages->values + block->kv_head * attention->pages->head_stride;
    for (int chunk = start / CHUNK * CHUNK; chunk < end; chunk += CHUNK) {
        int skipped = start > chunk ? (start - chunk) / PANEL * PANEL : 0; /* panels that no query sees */
        int held = end - chunk < CHUNK ? end - chunk : CHUNK;
        int64_t offsets[CHUNK];
        locate(attention->pages, block->row->table, chunk + skipped, held - skipped, offsets + skipped);
        for (int k = skipped; k < held; k += PANEL)
            pack_keys(keys, offsets + k, held - k, dim, scratch->keys + k * dim);
        pack_values(values, offsets, skipped, start - chunk, held, value_dim, scratch->values);
        for (int first = block->first; first < block->last; first += STRIP) {
            int last = first + STRIP < block->last ? first + STRIP : block->last;
            attend_strip(block, first, last, chunk, held, scratch, partial);
        }
    }
}

/* Find a piece's partial results for a block, whose queries are prepared. Sinks count as scores
 * before all others. */
static void attend_piece_of(const Queries *block, int piece, const Scratch *scratch, const Partial *partial)
{
    const Attention *attention = block->attention;
    int start = first_seen(position_of_query(block, block->first), attention->shape->window);
    int end = position_of_query(block, block->last - 1) + 1, count = block->last - block->first;
    clear(partial, count, attention->shape->value_dim);
    if (attention->shape->sinks && piece == start / PIECE)
        for (int q = 0; q < count; q++) {
            partial->best[q] = sink_of(attention, block->kv_head, block->first + q) * LOG_BASE;
            partial->total[q] = 1;
        }
    attend_positions(block, start > piece * PIECE ? start : piece * PIECE,
                     end < (piece + 1) * PIECE ? end : (piece + 1) * PIECE, scratch, partial);
}

/* Add one query's next piece to its pieces so far. Not inlined, so that it rounds in the same way for all callers. */
static __attribute__((noinline)) void add_piece(const Partial *all, const Partial *piece, int dim)
{
    float best = fmaxf(*all->best, *piece->best);
    float before = raised(vset(*all->best - best))[0], added = raised(vset(*piece->best - best))[0];
    *all->best = best;
    *all->total = *all->total * before + *piece->total * added;
    for (int d = 0; d < dim; d += LANES)
        vstore(all->sums + d, vload(all->sums + d) * before + vload(piece->sums + d) * added);
}

static void store_query(const Partial *query, int dim, elem *out)
{
    for (int d = 0; d < dim; d += LANES)
        vstore_elem(out + d, vload(query->sums + d) / *query->total);
}

static void copy_queries(const Queries *block, elem *to)
{
    int dim = block->attention->shape->head_dim;
    for (int q = block->first; q < block->last; q++, to += dim)
        memcpy(to, query_of(block->attention, block->row, block->kv_head, q), sizeof(elem) * dim);
}

/* Attend a block to all positions that it sees. */
static void attend_block_of(const Queries *block, const Scratch *scratch)
{
    const Attention *attention = block->attention;
    int dim = attention->shape->value_dim, count = block->last - block->first;
    int first = first_seen(position_of_query(block, block->first), attention->shape->window) / PIECE;
    int last = position_of_query(block, block->last - 1) / PIECE;
    copy_queries(block, scratch->queries);
    attend_piece_of(block, first, scratch, &scratch->all);
    for (int piece = first + 1; piece <= last; piece++) {
        attend_piece_of(block, piece, scratch, &scratch->piece);
        for (int q = 0; q < count; q++) {
            Partial all = partial_from(&scratch->all, q, dim), next = partial_from(&scratch->piece, q, dim);
            add_piece(&all, &next, dim);
        }
    }
    for (int q = 0; q < count; q++) {
        Partial query = partial_from(&scratch->all, q, dim);
        store_query(&query, dim, out_of(attention, block->row, block->kv_head, block->first + q));
    }
}

/* ---- phases ---- */

static int queries_of_head(const Attention *attention, const Row *row) { return row->num_tokens * attention->group; }

/* Return the blocks of a row; 0 for a row that decode computes. */
static int num_blocks(const Attention *attention, const Row *row)
{
    int queries = has_few(attention, row) ? 0 : queries_of_head(attention, row);
    return round_up(queries, MOST_QUERIES) / MOST_QUERIES;
}

/* Return the pieces of a row whose pieces may be items; 0 for any other row. */
static int pieces_to_split(const Attention *attention, const Row *row)
{
    int pieces = (row->kv_len - 1) / PIECE + 1 - first_piece(attention, row);
    return num_blocks(attention, row) == 1 && pieces > 1 ? pieces : 0;
}

static size_t split_floats(const Attention *attention, const Row *row)
{
    int queries = queries_of_head(attention, row), kv_heads = attention->shape->num_kv_heads;
    return pieces_to_split(attention, row) * kv_heads * partial_floats(queries, attention->shape->value_dim);
}

/* Return the partial results of a split row's piece; the row's results begin at `at`. */
static Partial split_piece(const Attention *attention, const Row *row, int kv_head, int piece, float *at)
{
    int queries = queries_of_head(attention, row);
    size_t stride = partial_floats(queries, attention->shape->value_dim);
    return partial_at(at + (kv_head * pieces_to_split(attention, row) + piece) * stride, queries);
}

/* Return the bytes of the partial results of split rows. No row is split if there are enough blocks for all threads, or
 * if the results would take too much memory. */
size_t NAME(extend_shared_bytes)(const Attention *attention, int threads)
{
    size_t floats = 0, blocks = 0;
    for (int index = 0; index < attention->batch->num_rows; index++) {
        Row row = row_of(attention->batch, index);
        blocks += num_blocks(attention, &row) * attention->shape->num_kv_heads;
        floats += split_floats(attention, &row);
    }
    return blocks < 2 * (size_t)threads && floats <= (size_t)threads * MOST_KEPT ? floats * sizeof(float) : 0;
}

/* Return the number of a row's items. */
static int items_of_row(const Attention *attention, const Row *row)
{
    int pieces = attention->splits ? pieces_to_split(attention, row) : 0;
    return (pieces ? pieces : num_blocks(attention, row)) * attention->shape->num_kv_heads;
}

int NAME(extend_items)(const Attention *attention)
{
    int items = 0;
    for (int index = 0; index < attention->batch->num_rows; index++) {
        Row row = row_of(attention->batch, index);
        items += items_of_row(attention, &row);
    }
    return items;
}

void NAME(extend)(const Attention *attention, Walk *walk, char *shared, char *own)
{
    float *kept = (float *)shared;
    Scratch scratch;
    lay_scratch(&scratch, attention->shape, (uintptr_t)own);
    for (int index = 0; index < attention->batch->num_rows; index++) {
        Row row = row_of(attention->batch, index);
        int queries = queries_of_head(attention, &row), blocks = num_blocks(attention, &row);
        int pieces = attention->splits ? pieces_to_split(attention, &row) : 0, items = items_of_row(attention, &row);
        for (int item; (item = walk->next - walk->done) < items; walk_on(walk)) {
            if (pieces) {
                Queries block = {attention, &row, item / pieces, 0, queries};
                Partial partial = split_piece(attention, &row, block.kv_head, item % pieces, kept);
                copy_queries(&block, scratch.queries);
                attend_piece_of(&block, first_piece(attention, &row) + item % pieces, &scratch, &partial);
                continue;
            }
            int first = (blocks - 1 - item % blocks) * MOST_QUERIES;
            int last = first + MOST_QUERIES < queries ? first + MOST_QUERIES : queries;
            Queries block = {attention, &row, item / blocks, first, last};
            attend_block_of(&block, &scratch);
        }
        kept += pieces ? split_floats(attention, &row) : 0;
        walk->done += items;
    }
}

/* Return the items of a row in the second phase. */
static int added_items(const Attention *attention, const Row *row)
{
    int parts = round_up(queries_of_head(attention, row), ADDED) / ADDED;
    return attention->splits && pieces_to_split(attention, row) ? parts * attention->shape->num_kv_heads : 0;
}

int NAME(extend_added)(const Attention *attention)
{
    int items = 0;
    for (int index = 0; index < attention->batch->num_rows; index++) {
        Row row = row_of(attention->batch, index);
        items += added_items(attention, &row);
    }
    return items;
}

void NAME(extend_combine)(const Attention *attention, Walk *walk, char *shared)
{
    float *kept = (float *)shared;
    int kv_heads = attention->shape->num_kv_heads, dim = attention->shape->value_dim;
    for (int index = 0; index < attention->batch->num_rows; index++) {
        Row row = row_of(attention->batch, index);
        int queries = queries_of_head(attention, &row), pieces = pieces_to_split(attention, &row);
        int items = added_items(attention, &row);
        for (int item; (item = walk->next - walk->done) < items; walk_on(walk)) {
            int head = item % kv_heads, first = item / kv_heads * ADDED;
            for (int q = first; q < queries && q < first + ADDED; q++) {
                Partial start = split_piece(attention, &row, head, 0, kept), all = partial_from(&start, q, dim);
                for (int piece = 1; piece < pieces; piece++) {
                    Partial next = split_piece(attention, &row, head, piece, kept);
                    next = partial_from(&next, q, dim);
                    add_piece(&all, &next, dim);
                }
                store_query(&all, dim, out_of(attention, &row, head, q));
            }
        }
        kept += items ? split_floats(attention, &row) : 0;
        walk->done += items;
    }
}

size_t NAME(extend_own_bytes)(const Attention *attention)
{
    Scratch scratch;
    return NAME(extend_items)(attention) ? lay_scratch(&scratch, attention->shape, 0) : 0;
}
