/* 8-bit weights: symmetric, with a scale per output. Panels are like those of `elem`, but of bytes.
 *
 * A slice of a panel is widened in the L1 cache and multiplied like any other: integers up to 127 are exact in
 * bfloat16. The scale is applied to the sum at the end.
 */
#include "gemm.h"

#include <math.h>

#define SLICE (512 / (int)sizeof(elem)) /* inputs: 16 KB of `elem` */

static float largest(const elem *row, int inputs)
{
    float most = 0;
    for (int i = 0; i < inputs; i++)
        most = fmaxf(most, fabsf(float_of(row[i])));
    return most;
}

/* Round a matrix [outputs][inputs] to 8 bits with scales [outputs], and pack it as raydix_pack does. */
EXPORT void NAME(raydix_pack_int8)(const elem *matrix, int outputs, int inputs, bool is_swiglu, int8_t *packed,
                                   float *scales)
{
    size_t size = (size_t)PANEL * round_up(inputs, 32);
    int panels = round_up(outputs, PANEL) / PANEL, width = is_swiglu ? PANEL / 2 : PANEL;
#pragma omp parallel for
    for (int p = 0; p < panels; p++) {
        int8_t *panel = packed + p * size;
        memset(panel, 0, size);
        for (int r = 0; r < PANEL; r++) {
            int output = r < width ? p * width + r : outputs / 2 + p * width + r - width;
            if (output >= outputs)
                break;
            const elem *row = matrix + (size_t)output * inputs;
            float most = largest(row, inputs), factor = most > 0 ? 127 / most : 0;
            scales[output] = most / 127;
            for (int i = 0; i < inputs; i++)
                panel[(i / PAIR * PANEL + r) * PAIR + i % PAIR] = (int8_t)rintf(float_of(row[i]) * factor);
        }
    }
}

/* Widen bytes to a vector of `to`, in the same order. */
#ifdef RAYDIX_BF16
static inline void widen_vector(const int8_t *from, elem *to)
{
    typedef int16_t vs_anywhere __attribute__((vector_size(VECTOR_BYTES / 2), aligned(1), may_alias));
    typedef uint32_t vu_anywhere __attribute__((vector_size(VECTOR_BYTES), aligned(2), may_alias));
    vi pairs = __builtin_convertvector(*(const vs_anywhere *)from, vi);
    vf even = __builtin_convertvector((vi)((vu)pairs << 24) >> 24, vf);
    vf odd = __builtin_convertvector(pairs >> 8, vf);
    *(vu_anywhere *)to = ((vu)even >> 16) | ((vu)odd & 0xffff0000u);
}
#else
static inline void widen_vector(const int8_t *from, elem *to) { vstore(to, vload_bytes(from)); }
#endif

static void widen(const int8_t *from, int n, elem *to)
{
    for (int i = 0; i < n; i += 64) {
        __builtin_prefetch(from + i + 4096);
        for (int j = i; j < i + 64; j += LANES * PAIR)
            widen_vector(from + j, to + j);
    }
}

void NAME(panel_multiply_int8)(const elem *a, ptrdiff_t lda, int rows, const int8_t *panel, int inputs, float *c,
                               ptrdiff_t ldc)
{
    _Alignas(64) elem slice[SLICE * PANEL];
    for (int first = 0; first < inputs; first += SLICE, panel += SLICE * PANEL) {
        int count = inputs - first < SLICE ? inputs - first : SLICE;
        widen(panel, count * PANEL, slice);
        NAME(panel_multiply)(a + first, lda, rows, slice, count, c, ldc, first > 0);
    }
}

#undef SLICE
