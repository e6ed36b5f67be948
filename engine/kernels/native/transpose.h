/* What needs lanes to change places: sums of many vectors at once, and transposition. */
#ifndef TRANSPOSE_H
#define TRANSPOSE_H

#include "vec.h"

/* Each lane's own number. */
static inline vi vlanes(void)
{
#if LANES == 16
    return (vi){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#elif LANES == 8
    return (vi){0, 1, 2, 3, 4, 5, 6, 7};
#else
    return (vi){0, 1, 2, 3};
#endif
}

/* Lane i is lane from[i] of a, then b. Inlined with constants, it is one instruction. */
static inline __attribute__((always_inline)) vf vshuffle(vf a, vf b, vi from)
{
#if defined(__clang__)
    vf out;
    for (int i = 0; i < LANES; i++)
        out[i] = from[i] < LANES ? a[from[i]] : b[from[i] - LANES];
    return out;
#else
    return __builtin_shuffle(a, b, from);
#endif
}

/* Blocks of h lanes, h a power of two:  a = a0 a1 a2 a3, b = b0 b1 b2 b3:  low is a0 b0 a2 b2, high is a1 b1 a3 b3. */
static inline __attribute__((always_inline)) vf vlow(vf a, vf b, const int h)
{
    return vshuffle(a, b, (vlanes() & ~h) | (vlanes() & h) * (LANES / h));
}

static inline __attribute__((always_inline)) vf vhigh(vf a, vf b, const int h)
{
    return vshuffle(a, b, vlanes() | h | (vlanes() & h) * (LANES / h));
}

/* Lane i of the result is the sum of x[i]; overwrites x. */
static inline __attribute__((always_inline)) vf vsums(vf x[LANES])
{
#pragma GCC unroll 4
    for (int h = LANES / 2; h > 0; h /= 2)
#pragma GCC unroll 8
        for (int i = 0; i < h; i++)
            x[i] = vlow(x[i], x[i + h], h) + vhigh(x[i], x[i + h], h);
    return x[0];
}

/* Lane i of x[j] goes to lane j of x[i]. */
static inline __attribute__((always_inline)) void vtranspose(vf x[LANES])
{
#pragma GCC unroll 4
    for (int h = LANES / 2; h > 0; h /= 2)
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
            if (!(i & h)) {
                vf low = vlow(x[i], x[i + h], h);
                x[i + h] = vhigh(x[i], x[i + h], h);
                x[i] = low;
            }
}

#endif
