/* Attention over paged KV. */
#ifndef ATTENTION_H
#define ATTENTION_H

#include "thread_team.h"
#include "vec.h"

/* Return the bytes of scratch that `attend` needs for such a batch and so many threads. */
size_t NAME(attention_bytes)(const Batch *batch, const AttentionShape *shape, int threads);

/* Attend for all rows, in two phases of a team with a barrier between them but none at the end. The batch's KV must
 * be in its pages. query [num_tokens][num_heads][head_dim], tokens query_stride apart;
 * out [num_tokens][num_heads * value_dim]. A row's result depends neither on other rows nor on the number of threads. */
void NAME(attend)(ThreadTeam *team, const Batch *batch, const AttentionShape *shape, const Pages *pages,
                  const elem *query, ptrdiff_t query_stride, elem *out, ptrdiff_t out_stride, char *scratch);

#endif
