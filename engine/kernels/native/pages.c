/* Copies the beginnings of KV pages in all layers. Compiled once, because it computes no elements. */
#include <string.h>

#include "raydix.h"

/* The same struct as in cache/lease.py. */
typedef struct {
    int64_t source, target, num_tokens;
} PageCopy;

/* Copy in turn, so no source may also be a target. data: [num_planes][pages]; a plane has one layer's keys or values.
 * Sizes count bytes. */
EXPORT void raydix_copy_pages(char *data, int64_t num_planes, int64_t plane_bytes, int64_t page_bytes,
                              int64_t slot_bytes, const PageCopy *copies, int64_t num_copies)
{
    for (int64_t plane = 0; plane < num_planes; plane++, data += plane_bytes)
        for (const PageCopy *copy = copies; copy < copies + num_copies; copy++)
            memcpy(data + copy->target * page_bytes, data + copy->source * page_bytes,
                   copy->num_tokens * slot_bytes);
}
