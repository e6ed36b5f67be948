/* Attention of rows with few queries, which are bound by reading keys and values. Items of work are pieces of PIECE
 * positions at multiples of PIECE, so that a row's result depends on nothing but the row:
 *
 *     row 0   [ piece 0 | piece 1 | pie ]     each for all KV heads, or for some of them if there are few items:
 *     row 1   [ pie ]                         pages are read about in the order in which they lie in memory
 *
 * A piece yields, for each query, the largest score, the sum of the weights exp(score - largest), and the weighted
 * sum of values. A second phase adds up the pieces of a row; the result of a single piece is written at once.
 */
#include "attention_rows.h"
#include "transpose.h"

#include <math.h>

#define PIECE 512
#define BLOCK 32 /* positions whose scores are computed together; PIECE is a multiple of it */

/* A query in the form that `dot` takes: floats, `Two` after `Two`, unless there is a bfloat16 product. */
#if defined(RAYDIX_BF16) && defined(__AVX512BF16__)
typedef elem prepared;
#else
typedef float prepared;
#endif

/* The partial results of a row's queries for a piece: queries of the first KV head, then of the next and so on. */
typedef struct {
    float *best, *total; /* [queries] */
    float *sums;         /* [queries][head_dim], `Two` after `Two` */
} Partial;

static int queries_of(const Attention *attention, const Row *row)
{
    return row->num_tokens * attention->shape->num_heads;
}

static size_t partial_floats(int queries, int head_dim)
{
    return ((size_t)queries * (head_dim + 2) + 15) / 16 * 16;
}

static Partial partial_at(float *floats, int queries)
{
    return (Partial){floats, floats + queries, floats + 2 * queries};
}

static int first_piece(const Attention *attention, const Row *row)
{
    return first_seen(position_of(row, 0), attention->shape->window) / PIECE;
}

/* Return the pieces of a row; 0 for a row that extend computes. */
static int num_pieces(const Attention *attention, const Row *row)
{
    if (!has_few(attention, row))
        return 0;
    return (row->kv_len - 1) / PIECE + 1 - first_piece(attention, row);
}

/* ---- one block of positions of one KV head ---- */

static void prepare_query(const elem *query, int dim, prepared *out)
{
#if defined(RAYDIX_BF16) && defined(__AVX512BF16__)
    memcpy(out, query, sizeof(elem) * dim);
#else
    for (int d = 0; d < dim; d += 2 * LANES) {
        Two x = load_two(query + d);
        vstore(out + d, x.a);
        vstore(out + d + LANES, x.b);
    }
#endif
}

/* Add the products of 2 * LANES elements of a query and a key to `sum`. */
static inline vf dot(vf sum, const prepared *query, const elem *key)
{
#if defined(RAYDIX_BF16) && defined(__AVX512BF16__)
    __m512i a = _mm512_loadu_si512(query), b = _mm512_loadu_si512(key);
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
    Two x = load_two(key);
    sum += x.a * vload(query);
    return sum + x.b * vload(query + LANES);
#endif
}

/* Compute one query's products with the keys of BLOCK positions. The next block is prefetched meanwhile, keys here
 * and values below: line by line, as too many outstanding lines would stall the core. */
static inline __attribute__((always_inline)) void score(const prepared *query, const elem *keys,
                                                        const int64_t *offsets, int dim, const bool fetches,
                                                        float *scores)
{
    for (int first = 0; first < BLOCK; first += LANES) {
        vf sums[LANES];
#pragma GCC unroll 16
        for (int k = 0; k < LANES; k++)
            sums[k] = vset(0);
        for (int d = 0; d < dim; d += 2 * LANES)
#pragma GCC unroll 16
            for (int k = 0; k < LANES; k++) {
                sums[k] = dot(sums[k], query + d, keys + offsets[first + k] + d);
                if (fetches)
                    __builtin_prefetch(keys + offsets[first + k + BLOCK] + d);
            }
        vstore(scores + first, vsums(sums));
    }
}

/* Turn products into scores and these into weights. Lanes first .. last are visible; if one of them has a larger
 * score than `best`, the partial results are scaled down. */
static inline void weigh(const AttentionShape *shape, float *scores, int first, int last, float *best, float *total,
                         float *sums, int dim)
{
    vf largest = vset(*best);
    for (int i = 0; i < BLOCK; i += LANES) {
        vi lanes = vlanes() + i;
        vf score = vload(scores + i) * shape->scale;
        if (shape->soft_cap > 0)
            score = soft_capped(score, shape->soft_cap);
        vf seen = vselect((lanes >= first) & (lanes < last), score, vset(-INFINITY));
        largest = vmax(largest, seen);
        vstore(scores + i, seen);
    }
    float new_best = vlargest(largest);
    if (new_best > *best) {
        float factor = expf(*best - new_best);
        for (int d = 0; d < dim; d += LANES)
            vstore(sums + d, vload(sums + d) * factor);
        *total *= factor;
        *best = new_best;
    }
    vf weights = vset(0);
    for (int i = 0; i < BLOCK; i += LANES) {
        vf weight = vexp(vload(scores + i) - new_best);
        weights += weight;
        vstore(scores + i, weight);
    }
    *total += vtotal(weights);
}

/* Add the weighted values of the block's lanes first .. last, for a compile-time number of queries. */
static inline __attribute__((always_inline)) void add_values(const int queries, const float *weights,
                                                             const elem *values, const int64_t *offsets,
                                                             int first, int last, float *sums, int dim)
{
    for (int d = 0; d < dim; d += 2 * LANES) {
        Two added[4];
#pragma GCC unroll 4
        for (int q = 0; q < queries; q++)
            added[q] = (Two){vload(sums + q * dim + d), vload(sums + q * dim + d + LANES)};
        for (int k = first; k < last; k++) {
            Two x = load_two(values + offsets[k] + d);
            __builtin_prefetch(values + offsets[k + BLOCK] + d);
#pragma GCC unroll 4
            for (int q = 0; q < queries; q++) {
                added[q].a += weights[q * BLOCK + k] * x.a;
                added[q].b += weights[q * BLOCK + k] * x.b;
            }
        }
#pragma GCC unroll 4
        for (int q = 0; q < queries; q++) {
            vstore(sums + q * dim + d, added[q].a);
            vstore(sums + q * dim + d + LANES, added[q].b);
        }
    }
}

static void add_all_values(int queries, const float *weights, const elem *values, const int64_t *offsets,
                           int first, int last, float *sums, int dim)
{
    for (; queries >= 4; queries -= 4, weights += 4 * BLOCK, sums += 4 * dim)
        add_values(4, weights, values, offsets, first, last, sums, dim);
    for (; queries >= 2; queries -= 2, weights += 2 * BLOCK, sums += 2 * dim)
        add_values(2, weights, values, offsets, first, last, sums, dim);
    if (queries)
        add_values(1, weights, values, offsets, first, last, sums, dim);
}

/* ---- one piece ---- */

/* Attend to a block: positions first .. last, at most BLOCK, of one KV head. The next block's offsets must follow. */
static void attend_block(const Attention *attention, const Row *row, int kv_head, const prepared *queries,
                         int first, int last, const int64_t *offsets, Partial *partial)
{
    const AttentionShape *shape = attention->shape;
    int dim = shape->head_dim, count = row->num_tokens * attention->group, at = kv_head * count;
    int unseen = first_seen(position_of(row, 0), shape->window) - first; /* These may hold anything, even NaN. */
    const elem *keys = attention->pages->keys + kv_head * attention->pages->head_stride;
    const elem *values = attention->pages->values + kv_head * attention->pages->head_stride;
    _Alignas(64) float weights[FEW_QUERIES * BLOCK];
    for (int q = 0; q < count; q++) {
        int position = position_of(row, q / attention->group), end = position < last ? position + 1 : last;
        if (q == 0)
            score(queries + at * dim, keys, offsets, dim, true, weights);
        else
            score(queries + (at + q) * dim, keys, offsets, dim, false, weights + q * BLOCK);
        weigh(shape, weights + q * BLOCK, first_seen(position, shape->window) - first, end - first,
              partial->best + at + q, partial->total + at + q, partial->sums + (at + q) * dim, dim);
    }
    add_all_values(count, weights, values, offsets, unseen > 0 ? unseen : 0, last - first,
                   partial->sums + at * dim, dim);
}

/* Attend to a piece's positions for the KV heads first_head .. last_head. */
static void attend_piece(const Attention *attention, const Row *row, int piece, int first_head, int last_head,
                         prepared *queries, Partial *partial)
{
    int dim = attention->shape->head_dim, count = row->num_tokens * attention->group;
    for (int q = first_head * count; q < last_head * count; q++) {
        prepare_query(query_of(attention, row, q / count, q % count), dim, queries + q * dim);
        partial->best[q] = NO_SCORE;
        partial->total[q] = 0;
    }
    int of_head = count * dim;
    memset(partial->sums + first_head * of_head, 0, sizeof(float) * (last_head - first_head) * of_head);

    int start = first_seen(position_of(row, 0), attention->shape->window);
    int end = row->kv_len < (piece + 1) * PIECE ? row->kv_len : (piece + 1) * PIECE;
    int first = start / BLOCK * BLOCK > piece * PIECE ? start / BLOCK * BLOCK : piece * PIECE;
    int64_t offsets[PIECE + 2 * BLOCK];
    locate(attention->pages, row->table, first, end - first, offsets);
    for (int i = end - first; i < round_up(end - first, BLOCK) + BLOCK; i++)
        offsets[i] = offsets[end - first - 1]; /* not visible, but readable */
    for (const int64_t *at = offsets; first < end; first += BLOCK, at += BLOCK) {
        int last = first + BLOCK < end ? first + BLOCK : end;
        for (int head = first_head; head < last_head; head++)
            attend_block(attention, row, head, queries, first, last, at, partial);
    }
}

/* Add up a KV head's pieces, `stride` floats apart, and the sinks, and write its queries' results. Overwrites the
 * first piece. */
static void combine(const Attention *attention, const Row *row, int kv_head, float *pieces, int num,
                    size_t stride)
{
    int queries = queries_of(attention, row), dim = attention->shape->head_dim;
    int count = row->num_tokens * attention->group;
    bool has_sinks = attention->shape->sinks != NULL;
    for (int q = kv_head * count; q < (kv_head + 1) * count; q++) {
        float sink = has_sinks ? sink_of(attention, kv_head, q % count) : NO_SCORE, best = sink;
        for (int p = 0; p < num; p++)
            best = fmaxf(best, partial_at(pieces + p * stride, queries).best[q]);
        float total = has_sinks ? expf(sink - best) : 0;
        float *sums = partial_at(pieces, queries).sums + q * dim;
        for (int p = 0; p < num; p++) {
            Partial piece = partial_at(pieces + p * stride, queries);
            float factor = num == 1 && !has_sinks ? 1 : expf(piece.best[q] - best);
            total += piece.total[q] * factor;
            for (int d = 0; d < dim; d += LANES) {
                vf added = vload(piece.sums + q * dim + d) * factor;
                vstore(sums + d, p ? vload(sums + d) + added : added);
            }
        }
        elem *out = out_of(attention, row, kv_head, q % count);
        for (int d = 0; d < dim; d += 2 * LANES)
            store_two(out + d, (Two){vload(sums + d) / total, vload(sums + d + LANES) / total});
    }
}

/* ---- phases ---- */

int NAME(decode_pieces)(const Attention *attention)
{
    int pieces = 0;
    for (int index = 0; index < attention->batch->num_rows; index++) {
        Row row = row_of(attention->batch, index);
        pieces += num_pieces(attention, &row);
    }
    return pieces;
}

void NAME(decode)(const Attention *attention, Walk *walk, char *shared, char *own)
{
    int kv_heads = attention->shape->num_kv_heads, parts = attention->parts;
    float *partials = (float *)shared, *local = (float *)own;
    for (int index = 0; index < attention->batch->num_rows; index++) {
        Row row = row_of(attention->batch, index);
        int num = num_pieces(attention, &row), queries = queries_of(attention, &row);
        size_t stride = partial_floats(queries, attention->shape->head_dim);
        for (int item; (item = walk->next - walk->done) < num * parts; walk_on(walk)) {
            int piece = item / parts, part = item % parts;
            int first_head = part * kv_heads / parts, last_head = (part + 1) * kv_heads / parts;
            Partial partial = partial_at(num > 1 ? partials + piece * stride : local, queries);
            attend_piece(attention, &row, first_piece(attention, &row) + piece, first_head, last_head,
                         (prepared *)(local + stride), &partial);
            for (int head = first_head; num == 1 && head < last_head; head++)
                combine(attention, &row, head, local, 1, stride);
        }
        partials += num > 1 ? num * stride : 0;
        walk->done += num * parts;
    }
}

void NAME(decode_combine)(const Attention *attention, ThreadTeam *team, char *shared)
{
    int kv_heads = attention->shape->num_kv_heads, split = 0;
    for (int index = 0; index < attention->batch->num_rows; index++) {
        Row row = row_of(attention->batch, index);
        split += num_pieces(attention, &row) > 1;
    }
    Walk walk = walk_begin(team, split * kv_heads);
    float *partials = (float *)shared;
    for (int index = 0; index < attention->batch->num_rows; index++) {
        Row row = row_of(attention->batch, index);
        int num = num_pieces(attention, &row);
        if (num <= 1)
            continue;
        size_t stride = partial_floats(queries_of(attention, &row), attention->shape->head_dim);
        for (int head; (head = walk.next - walk.done) < kv_heads; walk_on(&walk))
            combine(attention, &row, head, partials, num, stride);
        partials += num * stride;
        walk.done += kv_heads;
    }
}

size_t NAME(decode_shared_bytes)(const Attention *attention)
{
    size_t floats = 0;
    for (int index = 0; index < attention->batch->num_rows; index++) {
        Row row = row_of(attention->batch, index);
        int num = num_pieces(attention, &row);
        floats += num > 1 ? num * partial_floats(queries_of(attention, &row), attention->shape->head_dim) : 0;
    }
    return floats * sizeof(float);
}

size_t NAME(decode_own_bytes)(const Attention *attention)
{
    int queries = attention->shape->num_kv_heads * FEW_QUERIES, dim = attention->shape->head_dim;
    return partial_floats(queries, dim) * sizeof(float) + (size_t)queries * dim * sizeof(prepared);
}
