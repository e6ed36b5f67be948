/* Keys, packed for many queries. */
#ifndef ATTENTION_PACK_H
#define ATTENTION_PACK_H

#include "gemm.h"
#include "transpose.h"

/* Pack 32 keys, those at `offsets`, into a panel (gemm.h); missing ones are zeros. */
static inline void pack_keys(const elem *keys, const int64_t *offsets, int count, int dim, elem *panel)
{
    enum { PAIRS = LANES * PAIR }; /* elements of a vector of pairs */
    for (int d = 0; d < dim; d += PAIRS)
        for (int first = 0; first < PANEL; first += LANES) {
            vf x[LANES];
            for (int k = 0; k < LANES; k++)
                x[k] = first + k < count ? vload((const float *)(keys + offsets[first + k] + d)) : vset(0);
            vtranspose(x);
            for (int i = 0; i < LANES; i++)
                vstore((float *)(panel + (d / PAIR + i) * PANEL * PAIR + first * PAIR), x[i]);
        }
}

#endif
