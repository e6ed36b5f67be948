/* Rows with few queries attend block by block: BLOCK positions of one KV head at a time.
 *
 *     PIECE positions    [ block ][ block ][ block ] ...    in turn, into the piece's partial results
 *
 * A partial result is, for each query, the largest score, the sum of the weights exp(score - largest), and the
 * weighted sum of values. A query's result depends only on the query and the block, not on which queries
 * attend to the block together.
 */
#ifndef ATTENTION_PIECE_H
#define ATTENTION_PIECE_H

#include "attention_rows.h"
#include "transpose.h"

#include <math.h>

#if VECTOR_BYTES == 64
#define TOGETHER 8 /* queries whose sums are held in registers while values are added */
#else
#define TOGETHER 4
#endif

/* With a bfloat16 product, queries and weights have that type. Otherwise they are floats, queries `Two` after
 * `Two`. */
#if defined(RAYDIX_BF16) && defined(__AVX512BF16__)
#define HAS_DOT
typedef elem prepared, weight;
#else
typedef float prepared, weight;
#endif

/* The partial results of some queries. */
typedef struct {
    float *best, *total; /* [queries] */
    float *sums;         /* [queries][value_dim], `Two` after `Two` (with a bfloat16 product: `Halves`) */
} Partial;

static inline size_t partial_floats(int queries, int value_dim)
{
    return ((size_t)queries * (value_dim + 2) + 15) / 16 * 16;
}

static inline Partial partial_at(float *floats, int queries)
{
    return (Partial){floats, floats + queries, floats + 2 * queries};
}

/* Return the partial result of the query numbered `first`. */
static inline Partial partial_from(const Partial *partial, int first, int dim)
{
    return (Partial){partial->best + first, partial->total + first, partial->sums + (size_t)first * dim};
}

static inline void clear(const Partial *partial, int queries, int dim)
{
    for (int q = 0; q < queries; q++) {
        partial->best[q] = NO_SCORE;
        partial->total[q] = 0;
    }
    memset(partial->sums, 0, sizeof(float) * queries * dim);
}

static inline void prepare_query(const elem *query, int dim, prepared *out)
{
#ifdef HAS_DOT
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
#ifdef HAS_DOT
    __m512i a = _mm512_loadu_si512(query), b = _mm512_loadu_si512(key);
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
    Two x = load_two(key);
    sum += x.a * vload(query);
    return sum + x.b * vload(query + LANES);
#endif
}

/* Compute one query's products with the keys of BLOCK positions. The next block is prefetched meanwhile, keys here
 * and values below: line by line, because too many outstanding lines would stall the core. */
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

static inline void store_weights(weight *to, vf a, vf b)
{
#ifdef HAS_DOT
    store_both(to, a, b);
#else
    vstore(to, a);
    vstore(to + LANES, b);
#endif
}

/* Turn a query's products into scores, and scores into weights. Lanes first .. last are visible; if one of them has
 * a larger score than `best`, the partial results are scaled down. */
static inline void weigh(const AttentionShape *shape, float *scores, int first, int last, const Partial *query,
                         int dim, weight *weights)
{
    vf largest = vset(*query->best);
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
    if (new_best > *query->best) {
        float factor = expf(*query->best - new_best);
        for (int d = 0; d < dim; d += LANES)
            vstore(query->sums + d, vload(query->sums + d) * factor);
        *query->total *= factor;
        *query->best = new_best;
    }
    vf sum = vset(0);
    for (int i = 0; i < BLOCK; i += 2 * LANES) {
        vf a = vexp(vload(scores + i) - new_best), b = vexp(vload(scores + i + LANES) - new_best);
        sum += a;
        sum += b;
        store_weights(weights + i, a, b);
    }
    *query->total += vtotal(sum);
}

#ifdef HAS_DOT
enum { STEP = 2 }; /* values that are added together */
static inline vf add_weighted(vf sum, const weight *weights, __m512i values)
{
    int32_t pair;
    memcpy(&pair, weights, sizeof pair);
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)values, (__m512bh)_mm512_set1_epi32(pair));
}
#else
enum { STEP = 1 };
static inline vf add_weighted(vf sum, const weight *weights, vf values) { return sum + *weights * values; }
#endif

/* Add the weighted values of the block's lanes first .. last, for a compile-time number of queries. */
static inline __attribute__((always_inline)) void add_values(const int queries, const weight *weights,
                                                             const elem *values, const int64_t *offsets,
                                                             int first, int last, float *sums, int dim)
{
    for (int d = 0; d < dim; d += 2 * LANES) {
        Two added[TOGETHER];
#pragma GCC unroll 8
        for (int q = 0; q < queries; q++)
            added[q] = (Two){vload(sums + q * dim + d), vload(sums + q * dim + d + LANES)};
        for (int k = first / STEP * STEP; k < last; k += STEP) {
#ifdef HAS_DOT
            static const elem nothing[2 * LANES]; /* Invisible values may be NaN, and 0 * NaN is not 0. */
            Halves x = load_halves(k < first ? nothing : values + offsets[k] + d,
                                   k + 1 < last ? values + offsets[k + 1] + d : nothing);
            __builtin_prefetch(values + offsets[k + 1 + BLOCK] + d);
#else
            Two x = load_two(values + offsets[k] + d);
#endif
            __builtin_prefetch(values + offsets[k + BLOCK] + d);
#pragma GCC unroll 8
            for (int q = 0; q < queries; q++) {
                added[q].a = add_weighted(added[q].a, weights + q * BLOCK + k, x.a);
                added[q].b = add_weighted(added[q].b, weights + q * BLOCK + k, x.b);
            }
        }
#pragma GCC unroll 8
        for (int q = 0; q < queries; q++) {
            vstore(sums + q * dim + d, added[q].a);
            vstore(sums + q * dim + d + LANES, added[q].b);
        }
    }
}

static inline void add_all_values(int queries, const weight *weights, const elem *values, const int64_t *offsets,
                                  int first, int last, float *sums, int dim)
{
    for (; queries >= TOGETHER; queries -= TOGETHER, weights += TOGETHER * BLOCK, sums += TOGETHER * dim)
        add_values(TOGETHER, weights, values, offsets, first, last, sums, dim);
    for (; queries >= 4; queries -= 4, weights += 4 * BLOCK, sums += 4 * dim)
        add_values(4, weights, values, offsets, first, last, sums, dim);
    for (; queries >= 2; queries -= 2, weights += 2 * BLOCK, sums += 2 * dim)
        add_values(2, weights, values, offsets, first, last, sums, dim);
    if (queries)
        add_values(1, weights, values, offsets, first, last, sums, dim);
}

/* Write a query's result: its sums divided by `total`. */
static inline void store_result(const float *sums, float total, int dim, elem *out)
{
    for (int d = 0; d < dim; d += 2 * LANES) {
        Two x = {vload(sums + d) / total, vload(sums + d + LANES) / total};
#ifdef HAS_DOT
        store_halves(out + d, x);
#else
        store_two(out + d, x);
#endif
    }
}

/* ---- a row's pieces ---- */

static inline int queries_of(const Attention *attention, const Row *row)
{
    return row->num_tokens * attention->shape->num_heads;
}

static inline int first_piece(const Attention *attention, const Row *row)
{
    return first_seen(position_of(row, 0), attention->shape->window) / PIECE;
}

/* Return the pieces of a row; 0 for a row that extend computes. */
static inline int num_pieces(const Attention *attention, const Row *row)
{
    if (!has_few(attention, row))
        return 0;
    return (row->kv_len - 1) / PIECE + 1 - first_piece(attention, row);
}

/* Return the floats of the partial results of a row's pieces; those of a single piece are not kept. */
static inline size_t kept_floats(const Attention *attention, const Row *row)
{
    int num = num_pieces(attention, row);
    return num > 1 ? num * partial_floats(queries_of(attention, row), attention->shape->value_dim) : 0;
}

/* Prepare a row's queries of one KV head. */
static inline void prepare_queries(const Attention *attention, const Row *row, int kv_head, prepared *queries)
{
    int dim = attention->shape->head_dim, count = row->num_tokens * attention->group;
    for (int q = 0; q < count; q++)
        prepare_query(query_of(attention, row, kv_head, q), dim, queries + (size_t)q * dim);
}

/* Compute the offsets of positions first .. end, and of some positions after them, which are invisible but readable. */
static inline void locate_blocks(const Attention *attention, const Row *row, int first, int end,
                                 int64_t offsets[PIECE + 2 * BLOCK])
{
    locate(attention->pages, row->table, first, end - first, offsets);
    for (int i = end - first; i < round_up(end - first, BLOCK) + BLOCK; i++)
        offsets[i] = offsets[end - first - 1];
}

/* Attend to a block, positions first .. last, for a row's queries of one KV head. `partial` is that head's. The
 * next block's offsets must follow. */
static inline void attend_block(const Attention *attention, const Row *row, int kv_head, const prepared *queries,
                                int first, int last, const int64_t *offsets, const Partial *partial)
{
    const AttentionShape *shape = attention->shape;
    int dim = shape->head_dim, value_dim = shape->value_dim, count = row->num_tokens * attention->group;
    int unseen = first_seen(position_of(row, 0), shape->window) - first; /* These may hold anything, even NaN. */
    const elem *keys = attention->pages->keys + kv_head * attention->pages->head_stride;
    const elem *values = attention->pages->values + kv_head * attention->pages->head_stride;
    _Alignas(64) float scores[BLOCK];
    _Alignas(64) weight weights[FEW_QUERIES * BLOCK];
    for (int q = 0; q < count; q++) {
        int position = position_of(row, q / attention->group), end = position < last ? position + 1 : last;
        if (q == 0)
            score(queries, keys, offsets, dim, true, scores);
        else
            score(queries + (size_t)q * dim, keys, offsets, dim, false, scores);
        Partial query = partial_from(partial, q, value_dim);
        weigh(shape, scores, first_seen(position, shape->window) - first, end - first, &query,
              value_dim, weights + q * BLOCK);
    }
    add_all_values(count, weights, values, offsets, unseen > 0 ? unseen : 0, last - first, partial->sums,
                   value_dim);
}

#endif
