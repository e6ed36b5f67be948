/* panel_multiply with vectors: AVX512_BF16's dot products of pairs, or multiply-add in float32. */
#include "gemm.h"

#if !(defined(RAYDIX_BF16) && defined(__AMX_BF16__))

/* Registers hold rows x vectors of products, and either the panel's vectors or the rows' inputs. */
#if VECTOR_BYTES == 64
#define MOST_ROWS 12
#define VECTORS 2
#elif defined(__aarch64__)
#define MOST_ROWS 3
#define VECTORS 8
#else
#define MOST_ROWS 3
#define VECTORS 4
#endif
#define SLICE (512 / (int)sizeof(elem)) /* inputs: a panel's slice, 16 KB, stays in the L1 cache for all rows */
#define AHEAD 2048 /* prefetch distance in bytes */

void NAME(gemm_begin)(void) {}
void NAME(gemm_end)(void) {}

/* add_product adds the product of a panel's vector and the pair of inputs at `a` to `sum`. */
#if defined(RAYDIX_BF16) && defined(__AVX512BF16__)
typedef __m512i Pairs;
static inline Pairs load_pairs(const elem *p) { return _mm512_loadu_si512(p); }
static inline vf add_product(vf sum, Pairs column, const elem *a)
{
    int32_t pair;
    memcpy(&pair, a, sizeof pair);
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)column, (__m512bh)_mm512_set1_epi32(pair));
}
#elif defined(RAYDIX_BF16)
typedef uint32_t vu_anywhere __attribute__((vector_size(VECTOR_BYTES), aligned(2), may_alias));
typedef struct {
    vf even, odd;
} Pairs;
static inline Pairs split(vu pairs) { return (Pairs){(vf)(pairs << 16), (vf)(pairs & 0xffff0000u)}; }
static inline Pairs load_pairs(const elem *p) { return split(*(const vu_anywhere *)p); }
static inline vf add_product(vf sum, Pairs column, const elem *a)
{
    uint32_t pair;
    memcpy(&pair, a, sizeof pair);
    Pairs inputs = split(pair - (vu){0});
    sum += column.even * inputs.even;
    return sum + column.odd * inputs.odd;
}
#else
typedef vf Pairs;
static inline Pairs load_pairs(const elem *p) { return vload(p); }
static inline vf add_product(vf sum, Pairs column, const elem *a) { return sum + column * vset(*a); }
#endif

/* Multiply a compile-time number of rows with `VECTORS` vectors' outputs of a panel's slice. */
static inline __attribute__((always_inline)) void multiply_rows(const elem *a, ptrdiff_t lda, const int rows,
                                                                const elem *panel, int inputs, float *c,
                                                                ptrdiff_t ldc, bool add)
{
    vf sums[MOST_ROWS][VECTORS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < VECTORS; v++)
            sums[r][v] = add ? vload(c + r * ldc + v * LANES) : vset(0);
    for (int i = 0; i < inputs; i += PAIR, panel += PANEL * PAIR) {
        for (int line = 0; line < VECTORS * VECTOR_BYTES; line += 64)
            __builtin_prefetch((const char *)panel + AHEAD + line);
#if MOST_ROWS > VECTORS
        Pairs columns[VECTORS];
        for (int v = 0; v < VECTORS; v++)
            columns[v] = load_pairs(panel + v * LANES * PAIR);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < VECTORS; v++)
                sums[r][v] = add_product(sums[r][v], columns[v], a + r * lda + i);
#else
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) {
            Pairs column = load_pairs(panel + v * LANES * PAIR);
            for (int r = 0; r < rows; r++)
                sums[r][v] = add_product(sums[r][v], column, a + r * lda + i);
        }
#endif
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < VECTORS; v++)
            vstore(c + r * ldc + v * LANES, sums[r][v]);
}

static void multiply_slice(const elem *a, ptrdiff_t lda, int rows, const elem *panel, int inputs, float *c,
                           ptrdiff_t ldc, bool add)
{
    switch (rows) {
#define CASE(n)                                                                                                      \
    case n:                                                                                                          \
        multiply_rows(a, lda, n, panel, inputs, c, ldc, add);                                                        \
        return;
        CASE(1) CASE(2) CASE(3)
#if MOST_ROWS == 12
        CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
#undef CASE
    }
}

void NAME(panel_multiply)(const elem *a, ptrdiff_t lda, int rows, const elem *panel, int inputs, float *c,
                          ptrdiff_t ldc, bool add)
{
    for (int first = 0; first < inputs; first += SLICE, panel += SLICE * PANEL, a += SLICE) {
        int count = inputs - first < SLICE ? inputs - first : SLICE;
        /* Parts are as equal as possible, because a pass over the panel costs the same for few rows as for many. */
        int parts = (rows + MOST_ROWS - 1) / MOST_ROWS;
        for (int part = 0; part < parts; part++) {
            int row = rows * part / parts, end = rows * (part + 1) / parts;
            for (int output = 0; output < PANEL; output += VECTORS * LANES)
                multiply_slice(a + row * lda, lda, end - row, panel + output * PAIR, count, c + row * ldc + output, ldc,
                               add || first);
        }
    }
}

#undef SLICE
#undef AHEAD
#undef VECTORS
#undef MOST_ROWS
#endif
