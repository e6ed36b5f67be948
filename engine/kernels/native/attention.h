/* Attention over paged KV. */
#ifndef ATTENTION_H
#define ATTENTION_H

#include "thread_team.h"
#include "vec.h"

/* Bytes that `attend` needs beside its arguments, for a batch like this and so many threads. */
size_t NAME(attention_bytes)(const Batch *batch, const AttentionShape *shape, int threads);

/* Two phases of a team and the barrier between them; ends without one. The batch's KV is in its pages.
 * query [num_tokens][num_heads][head_dim], tokens query_stride apart; out [num_tokens][num_heads * head_dim].
 * What a row gets does not depend on the other rows, nor on the number of threads. */
void NAME(attend)(ThreadTeam *team, const Batch *batch, const AttentionShape *shape, const Pages *pages,
                  const elem *query, ptrdiff_t query_stride, elem *out, ptrdiff_t out_stride, char *scratch);

#endif
