/* Attention, both as a phase of a step and as a separate call. */
#include "attention_rows.h"
#include "gemm.h"

static Attention describe(const Batch *batch, const AttentionShape *shape, const Pages *pages)
{
    int group = shape->num_heads / shape->num_kv_heads;
    return (Attention){.batch = batch, .shape = shape, .pages = pages, .group = group};
}

static size_t whole_lines(size_t bytes) { return (bytes + 63) & ~(size_t)63; }

static size_t own_bytes(const Attention *attention)
{
    size_t decode = NAME(decode_own_bytes)(attention), extend = NAME(extend_own_bytes)(attention);
    size_t cascade = NAME(cascade_own_bytes)(attention), most = decode > extend ? decode : extend;
    return whole_lines(most > cascade ? most : cascade);
}

size_t NAME(attention_bytes)(const Batch *batch, const AttentionShape *shape, int threads)
{
    Attention attention = describe(batch, shape, NULL);
    return whole_lines(NAME(decode_shared_bytes)(&attention)) +
           whole_lines(NAME(extend_shared_bytes)(&attention, threads)) + threads * own_bytes(&attention);
}

void NAME(attend)(ThreadTeam *team, const Batch *batch, const AttentionShape *shape, const Pages *pages,
                  const elem *query, ptrdiff_t query_stride, elem *out, ptrdiff_t out_stride, char *scratch)
{
    Attention attention = describe(batch, shape, pages);
    attention.query = query, attention.query_stride = query_stride;
    attention.out = out, attention.out_stride = out_stride;
    int pieces = NAME(decode_pieces)(&attention), most = shape->num_kv_heads;
    size_t of_decode = whole_lines(NAME(decode_shared_bytes)(&attention));
    size_t of_extend = whole_lines(NAME(extend_shared_bytes)(&attention, team->size));
    attention.splits = of_extend > 0;
    int large = NAME(extend_items)(&attention) + NAME(cascade_items)(&attention);
    attention.parts = pieces ? (4 * team->size + pieces - 1) / pieces : 1;
    attention.parts = attention.parts < most ? attention.parts : most;
    char *kept = scratch + of_decode, *own = kept + of_extend + team->thread * own_bytes(&attention);
    Walk walk = walk_begin(team, large + pieces * attention.parts);
    NAME(extend)(&attention, &walk, kept, own); /* Large items first. */
    NAME(cascade)(&attention, &walk, scratch, own);
    NAME(decode)(&attention, &walk, scratch, own);
    if (of_decode + of_extend) {
        team_barrier(team);
        walk = walk_begin(team, NAME(extend_added)(&attention) + NAME(decode_added)(&attention));
        NAME(extend_combine)(&attention, &walk, kept);
        NAME(decode_combine)(&attention, &walk, scratch);
    }
}

/* Compute `AttentionStep.attend`: query [num_tokens][num_heads][head_dim], tokens query_stride apart. */
EXPORT void NAME(raydix_attention)(const Batch *batch, const AttentionShape *shape, const Pages *pages,
                                   const elem *query, int64_t query_stride, elem *out, char *scratch, int threads)
{
    SharedWork work;
    work_begin(&work);
#pragma omp parallel num_threads(threads)
    {
        ThreadTeam team = team_join(&work);
        NAME(gemm_begin)();
        NAME(attend)(&team, batch, shape, pages, query, query_stride, out, shape->num_heads * shape->value_dim,
                     scratch);
        NAME(gemm_end)();
    }
}

/* Return the bytes of scratch that raydix_attention needs. */
EXPORT int64_t NAME(raydix_attention_bytes)(const Batch *batch, const AttentionShape *shape, int threads)
{
    return (int64_t)NAME(attention_bytes)(batch, shape, threads);
}
