/* Operations across lanes: sums of vectors, and transposition. The order of elements in `Two` avoids them. */
#ifndef TRANSPOSE_H
#define TRANSPOSE_H

#include "vec.h"

/* Return each lane's own number. */
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

/* Return lane from[i] of a, then b, as lane i. Inlined with constants, it is one instruction. */
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

/* Interleave blocks of h lanes, a power of two:  a0 a1 a2 a3, b0 b1 b2 b3  ->  low a0 b0 a2 b2, high a1 b1 a3 b3. */
static inline __attribute__((always_inline)) vf vlow(vf a, vf b, const int h)
{
    return vshuffle(a, b, (vlanes() & ~h) | (vlanes() & h) * (LANES / h));
}

static inline __attribute__((always_inline)) vf vhigh(vf a, vf b, const int h)
{
    return vshuffle(a, b, vlanes() | h | (vlanes() & h) * (LANES / h));
}

/* Return the sum of x[i] as lane i; overwrites x. */
static inline __attribute__((always_inline)) vf vsums(vf x[LANES])
{
#pragma GCC unroll 4
    for (int h = LANES / 2; h > 0; h /= 2)
#pragma GCC unroll 8
        for (int i = 0; i < h; i++)
            x[i] = vlow(x[i], x[i + h], h) + vhigh(x[i], x[i + h], h);
    return x[0];
}

/* Return the sum of all lanes. */
static inline float vtotal(vf x)
{
#pragma GCC unroll 4
    for (int h = LANES / 2; h > 0; h /= 2)
        x += vshuffle(x, x, vlanes() ^ h);
    return x[0];
}

/* Return the largest lane. */
static inline float vlargest(vf x)
{
#pragma GCC unroll 4
    for (int h = LANES / 2; h > 0; h /= 2)
        x = vmax(x, vshuffle(x, x, vlanes() ^ h));
    return x[0];
}

/* Move lane i of x[j] to lane j of x[i]. */
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

/* 2 * LANES elements: in bf16 the even ones and the odd ones, otherwise the first half and the second. */
typedef struct {
    vf a, b;
} Two;

static inline Two load_two(const elem *p)
{
#ifdef RAYDIX_BF16
    typedef uint32_t vu_pairs __attribute__((vector_size(VECTOR_BYTES), aligned(2), may_alias));
    vu pairs = *(const vu_pairs *)p;
    return (Two){(vf)(pairs << 16), (vf)(pairs & 0xffff0000u)};
#else
    return (Two){vload(p), vload(p + LANES)};
#endif
}

#ifdef RAYDIX_BF16
/* The upper half of each lane is the bfloat16 nearest to x. */
static inline vu round_to_bf16(vf x)
{
    vu bits = (vu)x, is_nan = (vu)((bits & 0x7fffffff) > 0x7f800000);
    return (is_nan & 0x7fc00000) | (~is_nan & (bits + 0x7fff + ((bits >> 16) & 1)));
}
#endif

static inline void store_two(elem *p, Two x)
{
#ifdef RAYDIX_BF16
    typedef uint32_t vu_pairs __attribute__((vector_size(VECTOR_BYTES), aligned(2), may_alias));
    *(vu_pairs *)p = (round_to_bf16(x.a) >> 16) | (round_to_bf16(x.b) & 0xffff0000u);
#else
    vstore(p, x.a);
    vstore(p + LANES, x.b);
#endif
}

/* Store a, then b, as 2 * LANES elements. */
static inline void store_both(elem *p, vf a, vf b)
{
#if defined(RAYDIX_BF16) && defined(__AVX512BF16__)
    _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a));
#else
    vstore_elem(p, a);
    vstore_elem(p + LANES, b);
#endif
}

#ifdef RAYDIX_BF16
/* Interleave 2 * LANES elements of a and b. */
static inline void interleave(const elem *a, const elem *b, elem *to)
{
#if defined(__AVX512F__)
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38,
                                         6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    __m512i x = _mm512_loadu_si512(a), y = _mm512_loadu_si512(b);
    _mm512_storeu_si512(to, _mm512_permutex2var_epi16(x, low, y));
    _mm512_storeu_si512(to + 2 * LANES, _mm512_permutex2var_epi16(x, high, y));
#else
    for (int i = 0; i < 2 * LANES; i++) {
        to[2 * i] = a[i];
        to[2 * i + 1] = b[i];
    }
#endif
}
#endif

#if defined(RAYDIX_BF16) && defined(__AVX512BF16__)
/* 2 * LANES pairs of an element of x and one of y. Because instructions interleave within quarters of a register, the
 * first half has the elements 0-3, 8-11, 16-19 and 24-27, the second one the others. */
typedef struct {
    __m512i a, b;
} Halves;

static inline Halves load_halves(const elem *x, const elem *y)
{
    __m512i even = _mm512_loadu_si512(x), odd = _mm512_loadu_si512(y);
    return (Halves){_mm512_unpacklo_epi16(even, odd), _mm512_unpackhi_epi16(even, odd)};
}

/* Store one number for each pair, in the elements' order. */
static inline void store_halves(elem *p, Two x)
{
    const __m512i order = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0);
    __m512i halves = (__m512i)_mm512_cvtne2ps_pbh((__m512)x.b, (__m512)x.a);
    _mm512_storeu_si512(p, _mm512_permutexvar_epi64(order, halves));
}
#endif

#endif
