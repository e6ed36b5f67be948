/* Vectors of floats, as wide as the instruction set supports, in GCC's portable notation. */
#ifndef VEC_H
#define VEC_H

#include "raydix.h"

#include <string.h>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX2__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif
#define LANES (VECTOR_BYTES / 4)

typedef float vf __attribute__((vector_size(VECTOR_BYTES)));
typedef int32_t vi __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t vu __attribute__((vector_size(VECTOR_BYTES)));
typedef uint16_t vh __attribute__((vector_size(VECTOR_BYTES / 2)));
typedef float vf_anywhere __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
typedef uint16_t vh_anywhere __attribute__((vector_size(VECTOR_BYTES / 2), aligned(2), may_alias));

static inline vf vset(float x) { return x - (vf){0}; }
static inline vf vload(const float *p) { return *(const vf_anywhere *)p; }
static inline void vstore(float *p, vf x) { *(vf_anywhere *)p = x; }

/* Store past the caches, to an address aligned to a vector; call vstream_end before other threads read it. */
static inline void vstream(float *p, vf x)
{
#if defined(__AVX512F__)
    _mm512_stream_ps(p, (__m512)x);
#elif defined(__AVX2__)
    _mm256_stream_ps(p, (__m256)x);
#elif defined(__SSE2__)
    _mm_stream_ps(p, (__m128)x);
#else
    vstore(p, x);
#endif
}

static inline void vstream_end(void)
{
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

/* Select lane by lane: a where all bits of the mask are set, b where no bit is set. */
static inline vf vselect(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }

/* Return the larger lanes; b where either is NaN. */
static inline vf vmax(vf a, vf b)
{
#if defined(__AVX512F__)
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return vselect(a > b, a, b);
#endif
}

static inline vf vload_bf16(const uint16_t *p)
{
    return (vf)(__builtin_convertvector(*(const vh_anywhere *)p, vu) << 16);
}

/* Widen finite float16. */
static inline vf vload_half(const uint16_t *p)
{
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const void *)p));
#else
    vu bits = __builtin_convertvector(*(const vh_anywhere *)p, vu);
    vf size = (vf)((bits & 0x7fff) << 13) * 0x1p112f; /* from float16's exponents to float32's */
    return (vf)((vu)size | (bits & 0x8000) << 16);
#endif
}

static inline vf vload_bytes(const int8_t *p)
{
#if defined(__AVX512F__) /* GCC 12 converts vectors of bytes one element at a time. */
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)p)));
#elif defined(__AVX2__)
    return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)p)));
#else
    vf floats;
    for (int lane = 0; lane < LANES; lane++)
        floats[lane] = p[lane];
    return floats;
#endif
}

/* Round to the nearest, ties to even; NaN stays NaN. */
static inline void vstore_bf16(uint16_t *p, vf x)
{
    vu bits = (vu)x;
    vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    vu is_nan = (vu)((bits & 0x7fffffff) > 0x7f800000);
    *(vh_anywhere *)p = __builtin_convertvector((is_nan & 0x7fc0) | (~is_nan & rounded), vh);
}

static inline float float_of_bf16(uint16_t x)
{
    uint32_t bits = (uint32_t)x << 16;
    float out;
    memcpy(&out, &bits, 4);
    return out;
}

static inline uint16_t bf16_of_float(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000)
        return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

#ifdef RAYDIX_BF16
#define vload_elem vload_bf16
#define vstore_elem vstore_bf16
#define float_of float_of_bf16
#define elem_of bf16_of_float
#else
#define vload_elem vload
#define vstore_elem vstore
static inline float float_of(float x) { return x; }
static inline float elem_of(float x) { return x; }
#endif

/* Return e^x to a relative error of about 1e-7; 0 far below zero. As Cephes: x = n ln 2 + r, a polynomial in r. */
static inline vf vexp(vf x)
{
    vi tiny = x < -87.0f;
    x = vmax(x, vset(-87.0f));
    x = vselect(x > 88.0f, vset(88.0f), x);
    vf shifted = x * 1.44269504088896341f + 12582912.0f; /* 1.5 * 2^23: rounds to an integer */
    vf n = shifted - 12582912.0f;
    vf r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    vf p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    vi exponent = (__builtin_convertvector(n, vi) + 127) << 23;
    vf scaled = p * (vf)exponent;
    return vselect(tiny, vset(0.0f), scaled);
}

#endif
