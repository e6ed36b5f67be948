/* What the attention kernels share: a call's arguments, the places of a row's positions, and the items of work.
 *
 *     row's positions   0 ........... first ......... p ... kv_len     p: a token's position; it sees first .. p
 *     block table       [ page 7 ][ page 2 ][ page 9 ][ page 4 |  ]    (first > 0 where there is a window)
 *     element (position, kv_head, d) at  offset(position) + kv_head * head_stride + d  of keys and values
 *
 * Queries of a KV head are numbered token by token:  query = token in row * group + head in group.
 */
#ifndef ATTENTION_ROWS_H
#define ATTENTION_ROWS_H

#include "attention.h"
#include "attention_sizes.h"

#define NO_SCORE (-1e30f) /* below any score; finite, so that NO_SCORE - NO_SCORE is 0 */

typedef struct {
    const Batch *batch;
    const AttentionShape *shape;
    const Pages *pages;
    const elem *query;
    elem *out;
    ptrdiff_t query_stride, out_stride;
    int group; /* queries that share a KV head */
    int parts;   /* into which decode's items divide the KV heads if there are few pieces; changes no result */
    bool splits; /* whether pieces of extend's rows with a single block are items; changes no result */
} Attention;

typedef struct {
    const int32_t *table;
    int first_token; /* in the batch */
    int num_tokens, kv_len;
    int shared; /* positions that its group shares; 0 without a group */
} Row;

static inline Row row_of(const Batch *batch, int row)
{
    int first = batch->qo_indptr[row];
    return (Row){batch->block_table + (size_t)row * batch->table_width, first,
                 batch->qo_indptr[row + 1] - first, batch->kv_lens[row], batch->shared ? batch->shared[row] : 0};
}

/* Return the row whose number in its group is `member`. */
static inline Row member_of(const Batch *batch, const Group *group, int member)
{
    return row_of(batch, batch->members[group->first + member]);
}

static inline int position_of(const Row *row, int token) { return row->kv_len - row->num_tokens + token; }

/* Return the first position that a query at `position` sees. */
static inline int first_seen(int position, int window)
{
    return window > 0 && position >= window ? position - window + 1 : 0;
}

/* Compute the offsets of the positions first .. first + count. */
static inline void locate(const Pages *pages, const int32_t *table, int first, int count, int64_t *offsets)
{
    int page = first / pages->page_size, slot = first % pages->page_size;
    for (int i = 0; i < count; page++, slot = 0) {
        int64_t start = table[page] * pages->page_stride;
        for (; slot < pages->page_size && i < count; slot++, i++)
            offsets[i] = start + slot * pages->slot_stride;
    }
}

/* Return the query with the number `query` of a KV head. */
static inline const elem *query_of(const Attention *attention, const Row *row, int kv_head, int query)
{
    return attention->query + (row->first_token + query / attention->group) * attention->query_stride +
           (kv_head * attention->group + query % attention->group) * attention->shape->head_dim;
}

static inline elem *out_of(const Attention *attention, const Row *row, int kv_head, int query)
{
    return attention->out + (row->first_token + query / attention->group) * attention->out_stride +
           (kv_head * attention->group + query % attention->group) * attention->shape->value_dim;
}

/* Return the sink of a query, which has the number `query` of a KV head. */
static inline float sink_of(const Attention *attention, int kv_head, int query)
{
    return attention->shape->sinks[kv_head * attention->group + query % attention->group];
}

/* Return cap * tanh(x / cap): by tanh |t| = (1 - e) / (1 + e) with e = exp(-2 |t|), or near 0, where 1 - e loses
 * digits, by tanh's series. */
static inline vf soft_capped(vf x, float cap)
{
    vf t = x * (1 / cap), size = vmax(t, -t), square = t * t;
    vf e = vexp(size * -2.0f);
    vf far = (1.0f - e) / (1.0f + e);
    vf near = square * (-17.0f / 315) + 2.0f / 15;
    near = (near * square - 1.0f / 3) * square * t + t;
    return vselect(size < 0.25f, near, vselect(t < 0.0f, -far, far)) * cap;
}

/* Return the positions that a row attends to together with its group: none if a window hides some of them. */
static inline int shared_positions(const Attention *attention, const Row *row)
{
    return attention->shape->window ? 0 : row->shared;
}

/* A row with few queries per KV head is bound by memory and computed by attention_decode.c: a request's next token,
 * or a few draft tokens. attention_cascade.c computes their shared prefixes, attention_extend.c the other rows. */
static inline bool has_few(const Attention *attention, const Row *row)
{
    return row->num_tokens * attention->group <= FEW_QUERIES;
}

/* A thread's walk through a phase's items in their order; it computes those that it takes. */
typedef struct {
    ThreadTeam *team;
    int count;
    int next; /* this thread's next item */
    int done; /* items of earlier rows */
} Walk;

static inline Walk walk_begin(ThreadTeam *team, int count)
{
    return (Walk){team, count, team_take(team, count), 0};
}
static inline void walk_on(Walk *walk) { walk->next = team_take(walk->team, walk->count); }

/* Number of items, and the functions that walk through them. */
int NAME(extend_items)(const Attention *attention);
int NAME(decode_pieces)(const Attention *attention); /* an item for each piece and part */
int NAME(cascade_items)(const Attention *attention);
void NAME(extend)(const Attention *attention, Walk *walk, char *shared, char *own);
void NAME(cascade)(const Attention *attention, Walk *walk, char *shared, char *own);
void NAME(decode)(const Attention *attention, Walk *walk, char *shared, char *own);

/* Add up the pieces, in a separate phase if there are shared bytes: its items, and the functions. */
int NAME(extend_added)(const Attention *attention);
int NAME(decode_added)(const Attention *attention);
void NAME(extend_combine)(const Attention *attention, Walk *walk, char *shared);
void NAME(decode_combine)(const Attention *attention, Walk *walk, char *shared);

/* Bytes that these functions need: shared by all threads, and for each thread. */
size_t NAME(extend_shared_bytes)(const Attention *attention, int threads);
size_t NAME(decode_shared_bytes)(const Attention *attention);
size_t NAME(decode_own_bytes)(const Attention *attention);
size_t NAME(extend_own_bytes)(const Attention *attention);
size_t NAME(cascade_own_bytes)(const Attention *attention);

#endif
