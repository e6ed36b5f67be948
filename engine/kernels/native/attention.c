#include "attention.h"

#include "gemm.h"

#include <math.h>

size_t NAME(attention_bytes)(const Batch *batch, const AttentionShape *shape, int page_size, int threads)
{
    int longest = 0;
    for (int row = 0; row < batch->num_rows; row++)
        longest = batch->kv_lens[row] > longest ? batch->kv_lens[row] : longest;
    return (size_t)threads * ((size_t)longest + shape->head_dim) * sizeof(float);
}

static void attend_one(const AttentionShape *shape, const Pages *pages, const int32_t *table, int position,
                       int kv_head, const elem *query, elem *out, float *scores)
{
    int dim = shape->head_dim, first = shape->window ? position - shape->window + 1 : 0;
    float best = -INFINITY, total = 0, *sums = scores + position + 1;
    first = first < 0 ? 0 : first;
    for (int p = first; p <= position; p++) {
        const elem *key = pages->keys + table[p / pages->page_size] * pages->page_stride +
                          p % pages->page_size * pages->slot_stride + kv_head * pages->head_stride;
        vf products = vset(0);
        for (int d = 0; d < dim; d += LANES)
            products += vload_elem(query + d) * vload_elem(key + d);
        scores[p] = vsum(products) * shape->scale;
        best = scores[p] > best ? scores[p] : best;
    }
    memset(sums, 0, sizeof(float) * dim);
    for (int p = first; p <= position; p++) {
        const elem *value = pages->values + table[p / pages->page_size] * pages->page_stride +
                            p % pages->page_size * pages->slot_stride + kv_head * pages->head_stride;
        float weight = expf(scores[p] - best);
        total += weight;
        for (int d = 0; d < dim; d += LANES)
            vstore(sums + d, vload(sums + d) + weight * vload_elem(value + d));
    }
    for (int d = 0; d < dim; d += LANES)
        vstore_elem(out + d, vload(sums + d) / total);
}

void NAME(attend)(Team *team, const Batch *batch, const AttentionShape *shape, const Pages *pages,
                  const elem *query, ptrdiff_t query_stride, elem *out, ptrdiff_t out_stride, char *scratch)
{
    int group = shape->num_heads / shape->num_kv_heads;
    float *scores = (float *)(scratch + NAME(attention_bytes)(batch, shape, pages->page_size, 1) * team->thread);
    for (int item; (item = team_take(team, batch->num_tokens * shape->num_heads)) < batch->num_tokens * shape->num_heads;) {
        int token = item / shape->num_heads, head = item % shape->num_heads, row = 0;
        while (batch->qo_indptr[row + 1] <= token)
            row++;
        attend_one(shape, pages, batch->block_table + (size_t)row * batch->table_width,
                   (int)batch->positions[token], head / group, query + token * query_stride + head * shape->head_dim,
                   out + token * out_stride + head * shape->head_dim, scores);
    }
}

/* Write a step's keys and values, [num_tokens][num_kv_heads][head_dim], tokens kv_stride apart, into one layer's
 * pages; then attend. As `AttentionStep.forward` says. */
EXPORT void NAME(raydix_attention)(const Batch *batch, const AttentionShape *shape, const Pages *pages,
                                   const elem *query, int64_t query_stride, const elem *key, int64_t key_stride,
                                   const elem *value, int64_t value_stride, elem *out, char *scratch, int threads)
{
    Work work;
    work_begin(&work);
#pragma omp parallel num_threads(threads)
    {
        Team team = team_join(&work);
        NAME(gemm_begin)();
        for (int token; (token = team_take(&team, batch->num_tokens)) < batch->num_tokens;) {
            int64_t page = batch->slot_mapping[token] / pages->page_size, slot = batch->slot_mapping[token] % pages->page_size;
            for (int head = 0; head < shape->num_kv_heads; head++) {
                int64_t to = page * pages->page_stride + slot * pages->slot_stride + head * pages->head_stride;
                memcpy(pages->keys + to, key + token * key_stride + head * shape->head_dim, sizeof(elem) * shape->head_dim);
                memcpy(pages->values + to, value + token * value_stride + head * shape->head_dim, sizeof(elem) * shape->head_dim);
            }
        }
        team_barrier(&team);
        NAME(attend)(&team, batch, shape, pages, query, query_stride, out,
                     shape->num_heads * shape->head_dim, scratch);
        NAME(gemm_end)();
    }
}

/* Bytes of scratch that raydix_attention needs. */
EXPORT int64_t NAME(raydix_attention_bytes)(const Batch *batch, const AttentionShape *shape, int page_size, int threads)
{
    return (int64_t)NAME(attention_bytes)(batch, shape, page_size, threads);
}
