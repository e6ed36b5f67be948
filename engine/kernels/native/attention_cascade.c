/* Attention of rows with few queries to a prefix that they share (cascade attention): a block of keys and values
 * is read once, into the nearest cache, for the queries of all rows of a group.
 *
 *     row 0   [ shared pages          | own ]
 *     row 1   [ the same              | own pages ]        an item: a piece of a group, for one KV head
 *     row 2   [ the same              | ow ]
 *             piece 0  | piece 1  | piece 2                piece 2: shared blocks together, then each row's own
 *
 * Pieces, blocks and their computation are the same as in attention_decode.c, so a row's result is the same, bit by
 * bit, in any group and without a group.
 */
#include "attention_pack.h"
#include "attention_piece.h"

_Static_assert(BLOCK == PANEL, "a block's keys are a panel");
#if VECTOR_BYTES == 64
#define SCORED 4 /* queries whose products are held in registers */
#else
#define SCORED 2
#endif

/* A thread's buffers, for one item. */
typedef struct {
    float *partial;    /* results of the group's queries of one KV head */
    weight *weights;   /* [queries][BLOCK] */
    prepared *queries; /* [queries][head_dim] */
    elem *keys;        /* a packed block */
    float **kept;      /* [rows]: where the row's piece keeps its partial results */
} GroupScratch;

static int queries_of_group(const Attention *attention, const Group *group)
{
    int queries = 0;
    for (int member = 0; member < group->rows; member++)
        queries += member_of(attention->batch, group, member).num_tokens * attention->group;
    return queries;
}

/* Lay the buffers out from `at`, and return their end. Addresses are numbers, because there may be no memory yet. */
static uintptr_t lay_group_scratch(GroupScratch *scratch, const Attention *attention, const Group *group,
                                   uintptr_t at)
{
    int queries = queries_of_group(attention, group), dim = attention->shape->head_dim;
    scratch->partial = (float *)at, at += partial_floats(queries, attention->shape->value_dim) * sizeof(float);
    scratch->weights = (weight *)at, at += (size_t)queries * BLOCK * sizeof(weight);
    scratch->queries = (prepared *)at, at += (size_t)queries * dim * sizeof(prepared);
    scratch->keys = (elem *)at, at += (size_t)BLOCK * dim * sizeof(elem);
    scratch->kept = (float **)at, at += (size_t)group->rows * sizeof(float *);
    return at;
}

/* The pair of numbers from `d` on that `dot` multiplies in lane `lane` of LANES packed keys. */
#ifdef HAS_DOT
static inline __m512i load_column(const elem *panel, int d, int lane)
{
    return _mm512_loadu_si512(panel + (d + lane * PAIR) * PANEL);
}

static inline vf add_column(vf sum, const prepared *query, int lane, __m512i column)
{
    int32_t pair;
    memcpy(&pair, query + lane * PAIR, sizeof pair);
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)column);
}
#else
static inline Two load_column(const elem *panel, int d, int lane)
{
#ifdef RAYDIX_BF16
    return load_two(panel + (d + lane * PAIR) * PANEL);
#else
    return (Two){vload(panel + (d + lane) * PANEL), vload(panel + (d + LANES + lane) * PANEL)};
#endif
}

static inline vf add_column(vf sum, const prepared *query, int lane, Two column)
{
    sum += column.a * query[lane];
    return sum + column.b * query[LANES + lane];
}
#endif

/* Compute the products of a compile-time number of queries with a block's packed keys, with a key in each lane.
 * Sums have the order of `score`, which adds up within each lane and then adds the lanes in the order of `vsums`. */
static inline __attribute__((always_inline)) void score_together(const int queries, const prepared *query,
                                                                 const elem *panel, int dim, float *scores)
{
    enum { QUARTER = LANES / 4 };
    for (int first = 0; first < BLOCK; first += LANES, panel += LANES * PAIR) {
        vf totals[QUARTER][SCORED];
        for (int lane = 0; lane < QUARTER; lane++) {
            vf sums[4][SCORED];
#pragma GCC unroll 4
            for (int part = 0; part < 4; part++)
#pragma GCC unroll 4
                for (int q = 0; q < queries; q++)
                    sums[part][q] = vset(0);
            for (int d = 0; d < dim; d += 2 * LANES)
#pragma GCC unroll 4
                for (int part = 0; part < 4; part++) {
                    int at = lane + part * QUARTER;
                    __typeof__(load_column(panel, d, at)) column = load_column(panel, d, at);
#pragma GCC unroll 4
                    for (int q = 0; q < queries; q++)
                        sums[part][q] = add_column(sums[part][q], query + q * dim + d, at, column);
                }
#pragma GCC unroll 4
            for (int q = 0; q < queries; q++)
                totals[lane][q] = (sums[0][q] + sums[2][q]) + (sums[1][q] + sums[3][q]);
        }
        for (int h = QUARTER / 2; h > 0; h /= 2)
            for (int lane = 0; lane < h; lane++)
                for (int q = 0; q < queries; q++)
                    totals[lane][q] += totals[lane + h][q];
        for (int q = 0; q < queries; q++)
            vstore(scores + q * BLOCK + first, totals[0][q]);
    }
}

/* Attend to the blocks of positions first .. end, which all rows of a group see whole. */
static void attend_together(const Attention *attention, const Row *any, int kv_head, int first, int end,
                            int num_queries, const Partial *partial, const GroupScratch *scratch)
{
    int dim = attention->shape->head_dim, value_dim = attention->shape->value_dim;
    const elem *keys = attention->pages->keys + kv_head * attention->pages->head_stride;
    const elem *values = attention->pages->values + kv_head * attention->pages->head_stride;
    _Alignas(64) float scores[SCORED * BLOCK];
    int64_t offsets[PIECE + 2 * BLOCK];
    locate_blocks(attention, any, first, end, offsets);
    for (const int64_t *at = offsets; first < end; first += BLOCK, at += BLOCK) {
        pack_keys(keys, at, BLOCK, dim, scratch->keys);
        for (int q = 0, some; q < num_queries; q += some) {
            const prepared *queries = scratch->queries + (size_t)q * dim;
            some = num_queries - q < SCORED ? 1 : SCORED;
            if (some == SCORED)
                score_together(SCORED, queries, scratch->keys, dim, scores);
            else
                score_together(1, queries, scratch->keys, dim, scores);
            for (int i = 0; i < some; i++) {
                Partial query = partial_from(partial, q + i, value_dim);
                weigh(attention->shape, scores + i * BLOCK, 0, BLOCK, &query, value_dim,
                      scratch->weights + (q + i) * BLOCK);
            }
        }
        add_all_values(num_queries, scratch->weights, values, at, 0, BLOCK, partial->sums, value_dim);
    }
}

/* Attend to a row's part of a piece, after the shared positions. */
static void attend_rest(const Attention *attention, const Row *row, int kv_head, int first, int end,
                        const prepared *queries, const Partial *partial)
{
    int64_t offsets[PIECE + 2 * BLOCK];
    if (first >= end)
        return;
    locate_blocks(attention, row, first, end, offsets);
    for (const int64_t *at = offsets; first < end; first += BLOCK, at += BLOCK) {
        int last = first + BLOCK < end ? first + BLOCK : end;
        attend_block(attention, row, kv_head, queries, first, last, at, partial);
    }
}

/* Attend to a piece that begins in the shared positions. */
static void attend_shared_piece(const Attention *attention, const Group *group, int piece, int kv_head,
                                const GroupScratch *scratch)
{
    int dim = attention->shape->head_dim, value_dim = attention->shape->value_dim;
    int num_queries = queries_of_group(attention, group);
    int first = piece * PIECE, end = first + PIECE;
    int together = group->positions < end ? group->positions : end;
    Partial all = partial_at(scratch->partial, num_queries);
    clear(&all, num_queries, value_dim);
    for (int member = 0, at = 0; member < group->rows; member++) {
        Row row = member_of(attention->batch, group, member);
        prepare_queries(attention, &row, kv_head, scratch->queries + (size_t)at * dim);
        at += row.num_tokens * attention->group;
    }
    Row any = member_of(attention->batch, group, 0);
    attend_together(attention, &any, kv_head, first, together, num_queries, &all, scratch);
    for (int member = 0, at = 0; member < group->rows; member++) {
        Row row = member_of(attention->batch, group, member);
        int count = row.num_tokens * attention->group, queries = queries_of(attention, &row);
        Partial own = partial_from(&all, at, value_dim);
        attend_rest(attention, &row, kv_head, together, row.kv_len < end ? row.kv_len : end,
                    scratch->queries + (size_t)at * dim, &own);
        Partial kept = partial_at(scratch->kept[member] + piece * partial_floats(queries, value_dim), queries);
        kept = partial_from(&kept, kv_head * count, value_dim);
        memcpy(kept.best, own.best, sizeof(float) * count);
        memcpy(kept.total, own.total, sizeof(float) * count);
        memcpy(kept.sums, own.sums, sizeof(float) * count * value_dim);
        at += count;
    }
}

/* ---- the phase ---- */

/* A window may hide positions from some rows that other rows see. */
static int num_groups(const Attention *attention)
{
    return attention->shape->window ? 0 : attention->batch->num_groups;
}

/* Return the pieces that begin in a group's shared positions. */
static int pieces_of_group(const Group *group) { return round_up(group->positions, PIECE) / PIECE; }

/* Find the places where a group's rows keep the partial results of their pieces. */
static void find_kept(const Attention *attention, const Group *group, float *partials, float **kept)
{
    int before = 0;
    for (int member = 0; member < group->rows; member++) { /* in ascending order */
        for (; before < attention->batch->members[group->first + member]; before++) {
            Row row = row_of(attention->batch, before);
            partials += kept_floats(attention, &row);
        }
        kept[member] = partials;
    }
}

int NAME(cascade_items)(const Attention *attention)
{
    int items = 0;
    for (int index = 0; index < num_groups(attention); index++)
        items += pieces_of_group(&attention->batch->groups[index]) * attention->shape->num_kv_heads;
    return items;
}

void NAME(cascade)(const Attention *attention, Walk *walk, char *shared, char *own)
{
    int kv_heads = attention->shape->num_kv_heads;
    for (int index = 0; index < num_groups(attention); index++) {
        const Group *group = &attention->batch->groups[index];
        int items = pieces_of_group(group) * kv_heads;
        if (walk->next - walk->done < items) {
            GroupScratch scratch;
            lay_group_scratch(&scratch, attention, group, (uintptr_t)own);
            find_kept(attention, group, (float *)shared, scratch.kept);
            for (int item; (item = walk->next - walk->done) < items; walk_on(walk))
                attend_shared_piece(attention, group, item / kv_heads, item % kv_heads, &scratch);
        }
        walk->done += items;
    }
}

size_t NAME(cascade_own_bytes)(const Attention *attention)
{
    size_t most = 0;
    for (int index = 0; index < num_groups(attention); index++) {
        GroupScratch scratch;
        size_t bytes = lay_group_scratch(&scratch, attention, &attention->batch->groups[index], 0);
        most = bytes > most ? bytes : most;
    }
    return most;
}
