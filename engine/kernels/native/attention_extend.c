#include "attention_rows.h"

#include <math.h>

size_t NAME(extend_own_bytes)(const Attention *attention)
{
    int longest = 0;
    for (int row = 0; row < attention->batch->num_rows; row++)
        longest = attention->batch->kv_lens[row] > longest ? attention->batch->kv_lens[row] : longest;
    return ((size_t)longest + attention->shape->head_dim) * sizeof(float);
}

static void attend_one(const AttentionShape *shape, const Pages *pages, const int32_t *table, int position,
                       int kv_head, const elem *query, elem *out, float *scores)
{
    int dim = shape->head_dim, first = first_seen(position, shape->window);
    float best = -INFINITY, total = 0, *sums = scores + position + 1;
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

int NAME(extend_items)(const Attention *attention)
{
    int items = 0;
    for (int index = 0; index < attention->batch->num_rows; index++) {
        Row row = row_of(attention->batch, index);
        items += has_few(attention, &row) ? 0 : row.num_tokens * attention->shape->num_heads;
    }
    return items;
}

void NAME(extend)(const Attention *attention, Walk *walk, char *own)
{
    for (int index = 0; index < attention->batch->num_rows; index++) {
        Row row = row_of(attention->batch, index);
        int items = has_few(attention, &row) ? 0 : row.num_tokens * attention->shape->num_heads;
        for (int item; (item = walk->next - walk->done) < items; walk_on(walk)) {
            int query = item % (row.num_tokens * attention->group), head = item / (row.num_tokens * attention->group);
            attend_one(attention->shape, attention->pages, row.table, position_of(&row, query / attention->group), head,
                       query_of(attention, &row, head, query), out_of(attention, &row, head, query), (float *)own);
        }
        walk->done += items;
    }
}
