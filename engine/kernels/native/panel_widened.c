/* Products of many rows in bfloat16 for processors without its dot products. Both factors are widened, which is exact,
 * and multiplied by float32's kernel: no instruction between multiply-adds converts bfloat16.
 *
 *     for each slice of inputs        rows widened once for all panels, in the L2 cache
 *         for each panel              its slice widened once for all rows, in the L1 cache
 *             c += rows * panel       c stays in the L2 cache
 */
#include "gemm.h"

#ifdef WIDENS

#define SLICE 128 /* inputs: of a panel in float32 16 KB, half of the L1 cache */
#define FETCHED_ROWS 12  /* rows between prefetches: a multiple of the rows that float32's kernel holds in registers */

typedef uint32_t vu_anywhere __attribute__((vector_size(VECTOR_BYTES), aligned(2), may_alias));
typedef int16_t vs_anywhere __attribute__((vector_size(VECTOR_BYTES / 2), aligned(1), may_alias));

void JOIN(panel_multiply, f32, ISA)(const float *a, ptrdiff_t lda, int rows, const float *panel, int inputs, float *c,
                                    ptrdiff_t ldc, bool add);

/* Widen a panel's inputs from pairs to float32's layout, one row of outputs for each input. */
static void widen_elems(const elem *panel, int inputs, float *to)
{
    for (int i = 0; i < inputs; i += PAIR, panel += PAIR * PANEL, to += PAIR * PANEL)
        for (int output = 0; output < PANEL; output += LANES) {
            vu pairs = *(const vu_anywhere *)(panel + output * PAIR);
            vstore(to + output, (vf)(pairs << 16));
            vstore(to + PANEL + output, (vf)(pairs & 0xffff0000u));
        }
}

static void widen_bytes(const int8_t *panel, int inputs, float *to)
{
    for (int i = 0; i < inputs; i += PAIR, panel += PAIR * PANEL, to += PAIR * PANEL)
        for (int output = 0; output < PANEL; output += LANES) {
            vi pairs = __builtin_convertvector(*(const vs_anywhere *)(panel + output * PAIR), vi);
            vstore(to + output, __builtin_convertvector((vi)((vu)pairs << 24) >> 24, vf));
            vstore(to + PANEL + output, __builtin_convertvector(pairs >> 8, vf));
        }
}

/* Multiply with a widened panel, and fetch the next one's slice meanwhile. */
static void multiply_fetching(const float *a, int rows, const float *panel, int inputs, float *c, ptrdiff_t ldc,
                              bool add, const char *next, int num_bytes)
{
    int lines = num_bytes / 64, strips = (rows + FETCHED_ROWS - 1) / FETCHED_ROWS, fetched = 0;
    for (int strip = 0; strip < strips; strip++) {
        int row = strip * FETCHED_ROWS, count = rows - row < FETCHED_ROWS ? rows - row : FETCHED_ROWS;
        for (; fetched < lines * (strip + 1) / strips; fetched++)
            __builtin_prefetch(next + fetched * 64, 0, 2);
        JOIN(panel_multiply, f32, ISA)(a + row * SLICE, SLICE, count, panel, inputs, c + row * ldc, ldc, add);
    }
}

/* Widen a slice of a panel of `linear`. */
static void widen_slice(const Linear *linear, const char *slice, int inputs, float *to)
{
    if (linear->groups.bits) { /* Rounded as for few rows. */
        _Alignas(64) elem rounded[SLICE * PANEL];
        NAME(widen_blocks)(&linear->groups, slice, inputs, rounded);
        widen_elems(rounded, inputs, to);
    } else if (linear->scales) {
        widen_bytes((const int8_t *)slice, inputs, to);
    } else {
        widen_elems((const elem *)slice, inputs, to);
    }
}

void NAME(panels_multiply_widened)(const elem *a, ptrdiff_t lda, int rows, const Linear *linear, const char *packed,
                                   int panels, int inputs, float *c, ptrdiff_t ldc)
{
    _Alignas(64) float wide_rows[WIDE_MOST_ROWS * SLICE], wide_panel[SLICE * PANEL];
    size_t step = panel_bytes(linear), size = inputs / 32 * step; /* bytes of 32 inputs, and of a panel */
    for (int first = 0; first < inputs; first += SLICE) {
        int count = inputs - first < SLICE ? inputs - first : SLICE;
        for (int r = 0; r < rows; r++)
            for (int i = 0; i < count; i += LANES)
                vstore(wide_rows + r * SLICE + i, vload_elem(a + r * lda + first + i));
        for (int p = 0; p < panels; p++) {
            const char *slice = packed + p * size + first / 32 * step;
            widen_slice(linear, slice, count, wide_panel);
            const char *next = p + 1 < panels ? slice + size : packed + (first + SLICE) / 32 * step;
            multiply_fetching(wide_rows, rows, wide_panel, count, c + p * PANEL, ldc, first > 0, next,
                              count / 32 * (int)step);
        }
    }
}

#undef SLICE
#undef FETCHED_ROWS
#endif
