/* Attention of rows with few queries, which are bound by reading keys and values. Items of work are pieces of
 * PIECE positions at multiples of PIECE, so that a row's result depends only on the row:
 *
 *     row 0   [ piece 0 | piece 1 | pie ]     each for all KV heads, or for some of them if there are few items:
 *     row 1   [ pie ]                         pages are read about in the order in which they lie in memory
 *
 * attention_cascade.c computes the pieces that begin in a prefix which rows share. A second phase adds up the partial
 * results of a row's pieces; the result of a single piece is written immediately.
 */
#include "attention_piece.h"

/* Attend to a piece's positions for the KV heads first_head .. last_head. */
static void attend_piece(const Attention *attention, const Row *row, int piece, int first_head, int last_head,
                         prepared *queries, const Partial *partial)
{
    int dim = attention->shape->head_dim, value_dim = attention->shape->value_dim;
    int count = row->num_tokens * attention->group;
    for (int head = first_head; head < last_head; head++) {
        Partial of_head = partial_from(partial, head * count, value_dim);
        prepare_queries(attention, row, head, queries + (size_t)head * count * dim);
        clear(&of_head, count, value_dim);
    }
    int start = first_seen(position_of(row, 0), attention->shape->window);
    int end = row->kv_len < (piece + 1) * PIECE ? row->kv_len : (piece + 1) * PIECE;
    int first = start / BLOCK * BLOCK > piece * PIECE ? start / BLOCK * BLOCK : piece * PIECE;
    int64_t offsets[PIECE + 2 * BLOCK];
    locate_blocks(attention, row, first, end, offsets);
    for (const int64_t *at = offsets; first < end; first += BLOCK, at += BLOCK) {
        int last = first + BLOCK < end ? first + BLOCK : end;
        for (int head = first_head; head < last_head; head++) {
            Partial of_head = partial_from(partial, head * count, value_dim);
            attend_block(attention, row, head, queries + (size_t)head * count * dim, first, last, at, &of_head);
        }
    }
}

/* Add up a KV head's pieces, `stride` floats apart, and the sinks, and write its queries' results. Overwrites the
 * first piece. */
static void combine(const Attention *attention, const Row *row, int kv_head, float *pieces, int num,
                    size_t stride)
{
    int queries = queries_of(attention, row), dim = attention->shape->value_dim;
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
        store_result(sums, total, dim, out_of(attention, row, kv_head, q % count));
    }
}

/* ---- phases ---- */

/* Return the number of a row's first pieces, those that begin in a prefix which it shares. */
static int num_shared(const Attention *attention, const Row *row)
{
    return round_up(shared_positions(attention, row), PIECE) / PIECE;
}

int NAME(decode_pieces)(const Attention *attention)
{
    int pieces = 0;
    for (int index = 0; index < attention->batch->num_rows; index++) {
        Row row = row_of(attention->batch, index);
        pieces += num_pieces(attention, &row) - num_shared(attention, &row);
    }
    return pieces;
}

void NAME(decode)(const Attention *attention, Walk *walk, char *shared, char *own)
{
    int kv_heads = attention->shape->num_kv_heads, parts = attention->parts;
    float *partials = (float *)shared, *local = (float *)own;
    for (int index = 0; index < attention->batch->num_rows; index++) {
        Row row = row_of(attention->batch, index);
        int num = num_pieces(attention, &row), before = num_shared(attention, &row);
        int queries = queries_of(attention, &row);
        size_t stride = partial_floats(queries, attention->shape->value_dim);
        for (int item; (item = walk->next - walk->done) < (num - before) * parts; walk_on(walk)) {
            int piece = before + item / parts, part = item % parts;
            int first_head = part * kv_heads / parts, last_head = (part + 1) * kv_heads / parts;
            Partial partial = partial_at(num > 1 ? partials + piece * stride : local, queries);
            attend_piece(attention, &row, first_piece(attention, &row) + piece, first_head, last_head,
                         (prepared *)(local + stride), &partial);
            for (int head = first_head; num == 1 && head < last_head; head++)
                combine(attention, &row, head, local, 1, stride);
        }
        partials += kept_floats(attention, &row);
        walk->done += (num - before) * parts;
    }
}

int NAME(decode_added)(const Attention *attention)
{
    int split = 0;
    for (int index = 0; index < attention->batch->num_rows; index++) {
        Row row = row_of(attention->batch, index);
        split += num_pieces(attention, &row) > 1;
    }
    return split * attention->shape->num_kv_heads;
}

void NAME(decode_combine)(const Attention *attention, Walk *walk, char *shared)
{
    int kv_heads = attention->shape->num_kv_heads;
    float *partials = (float *)shared;
    for (int index = 0; index < attention->batch->num_rows; index++) {
        Row row = row_of(attention->batch, index);
        int num = num_pieces(attention, &row);
        if (num <= 1)
            continue;
        size_t stride = partial_floats(queries_of(attention, &row), attention->shape->value_dim);
        for (int head; (head = walk->next - walk->done) < kv_heads; walk_on(walk))
            combine(attention, &row, head, partials, num, stride);
        partials += num * stride;
        walk->done += kv_heads;
    }
}

size_t NAME(decode_shared_bytes)(const Attention *attention)
{
    size_t floats = 0;
    for (int index = 0; index < attention->batch->num_rows; index++) {
        Row row = row_of(attention->batch, index);
        floats += kept_floats(attention, &row);
    }
    return floats * sizeof(float);
}

size_t NAME(decode_own_bytes)(const Attention *attention)
{
    int queries = attention->shape->num_kv_heads * FEW_QUERIES;
    return partial_floats(queries, attention->shape->value_dim) * sizeof(float) +
           (size_t)queries * attention->shape->head_dim * sizeof(prepared);
}
