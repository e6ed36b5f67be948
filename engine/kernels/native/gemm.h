/* Matrices packed for multiplication, and their products.
 *
 * Outputs are cut into panels of 32; inputs are padded with zeros to a multiple of 32:
 *
 *     elem panel[ outputs / 32 ][ inputs / PAIR ][ 32 ][ PAIR ]        PAIR: 2 in bf16, 1 in float32
 *
 * AVX512_BF16's dot product takes a row of pairs, an AMX tile is sixteen such rows, and other instruction sets widen
 * them. Every output is the sum over its inputs in one order for any number of rows, so a request's result does
 * not depend on its batch.
 */
#ifndef GEMM_H
#define GEMM_H

#include "thread_team.h"
#include "vec.h"

#define PANEL 32
#define BLOCK_ROWS 16 /* Rows of inputs and products must be readable and writable up to a multiple of this. */
#ifdef RAYDIX_BF16
#define PAIR 2
#else
#define PAIR 1
#endif

static inline int round_up(int n, int step) { return (n + step - 1) / step * step; }

/* c[rows][32] = (add ? c : 0) + a[rows][inputs] * panel. inputs: a multiple of 32. lda, ldc count elements. */
void NAME(panel_multiply)(const elem *a, ptrdiff_t lda, int rows, const elem *panel, int inputs, float *c,
                          ptrdiff_t ldc, bool add);

/* Multiply with a panel of bytes, into c: the sums before their scales are applied. */
void NAME(panel_multiply_int8)(const elem *a, ptrdiff_t lda, int rows, const int8_t *panel, int inputs, float *c,
                               ptrdiff_t ldc);

/* Return the bytes of 32 inputs of a panel whose inputs have scales in groups. */
static inline int block_bytes(const Grouping *groups)
{
    return 32 / groups->inputs * PANEL * groups->scale_bytes * (groups->has_leasts ? 2 : 1) + 128 * groups->bits;
}

/* Return the function that widens one block of 32 inputs of such a panel (blocks.c), and prefetches the next one. */
typedef void WidenBlock(const Grouping *groups, const char *block, elem *to);
WidenBlock *NAME(widener)(const Grouping *groups);

/* Widen inputs, a multiple of 32, of such a panel. */
void NAME(widen_blocks)(const Grouping *groups, const char *blocks, int inputs, elem *to);

/* Write one output of such a matrix, times `factor`, to[inputs], rounded like numbers of `elem` and their products. */
void NAME(widen_output)(const Linear *linear, int output, float factor, float *to);

/* Multiply with such a panel, into c. */
void NAME(panel_multiply_blocks)(const elem *a, ptrdiff_t lda, int rows, const char *panel, const Grouping *groups,
                                 int inputs, float *c, ptrdiff_t ldc);

#if defined(RAYDIX_BF16) && defined(__AMX_BF16__)
#define HAS_TILES
/* The same for at most 16 rows (panel_amx.c). */
void NAME(panel_multiply_few_blocks)(const elem *a, ptrdiff_t lda, int rows, const char *panel,
                                     const Grouping *groups, int inputs, float *c, ptrdiff_t ldc);
#endif

/* Return the bytes of 32 inputs of any panel. */
static inline int panel_bytes(const Linear *linear)
{
    if (linear->groups.bits)
        return block_bytes(&linear->groups);
    return 32 * PANEL * (linear->scales ? 1 : (int)sizeof(elem));
}

/* Where bfloat16 has no dot products, many rows and their panels are widened to float32 first, a slice at a time. */
#if defined(RAYDIX_BF16) && !defined(__AVX512BF16__)
#define WIDENS
#define WIDE_ROWS 16     /* With so many rows or more, that costs less than widening in each product. */
#define WIDE_ROWS_QUANTIZED 8 /* The same for quantized panels, which are always widened. */
#define WIDE_MOST_ROWS 256

/* c[rows][panels * 32] = a[rows][inputs] * packed, consecutive panels of `linear`: the same sums as those of the
 * functions above. rows: at most WIDE_MOST_ROWS. */
void NAME(panels_multiply_widened)(const elem *a, ptrdiff_t lda, int rows, const Linear *linear, const char *packed,
                                   int panels, int inputs, float *c, ptrdiff_t ldc);
#endif

/* Pack rows (outputs) of `inputs` elements each, `stride` apart, into one panel; missing rows are zeros. */
void NAME(pack_rows)(const elem *rows, ptrdiff_t stride, int num_rows, int inputs, elem *panel);

typedef enum {
    TO_FLOATS,  /* float out[rows][ldo] = product + bias */
    ADD_FLOATS, /* float out[rows][ldo] += product + bias */
    SWIGLU,     /* elem out[rows][ldo] = silu(gate) * up */
    GEGLU,      /* elem out[rows][ldo] = gelu(gate) * up, by its tanh form (arXiv:1606.08415) */
    CLAMPED_SWIGLU, /* elem out[rows][ldo] = (up + 1) * gate * sigmoid(alpha * gate), gate <= limit, |up| <= limit */
} Product;

/* Multiply a[rows][lda] with a matrix, as one phase of a team. Ends without a barrier. */
void NAME(linear)(ThreadTeam *team, const Linear *linear, const elem *a, ptrdiff_t lda, int rows, Product product,
                  void *out, ptrdiff_t ldo);

/* Rows that are sorted by the matrix with which each is multiplied: matrix which[i] has rows first[i] .. first[i + 1]. */
typedef struct {
    const int32_t *which, *first;
    int count;
} Sorted;

/* Multiply rows a[..][lda] with their matrices, which have one shape, as one phase of a team. Ends without a barrier. */
void NAME(sorted_linears)(ThreadTeam *team, const Linear *linears, const Sorted *sorted, const elem *a, ptrdiff_t lda,
                          Product product, void *out, ptrdiff_t ldo);

/* Every thread calls these before and after it multiplies. */
void NAME(gemm_begin)(void);
void NAME(gemm_end)(void);

#endif
