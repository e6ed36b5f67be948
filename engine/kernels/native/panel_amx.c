/* panel_multiply in bfloat16 with AMX: tiles have 16 rows of 64 bytes; a product of two takes 16 cycles.
 *
 *             panel: 16 pairs of inputs x 16 outputs
 *                   ┌───────┬───────┐
 *                   │   6   │   7   │
 *     a: 16 rows    ├───────┼───────┤
 *     x 32 inputs 4 │   0   │   1   │  products
 *                 5 │   2   │   3   │
 *                   └───────┴───────┘
 *
 * Tiles always have all their rows: memory beyond the last row is multiplied too, and affects no other row.
 */
#include "gemm.h"

#ifdef HAS_TILES

#define SLICE 256                  /* inputs: a panel's slice, 16 KB, stays in the L1 cache for all rows */
#define STEP_INPUTS 32             /* of a row of a tile */
#define STEP (STEP_INPUTS * PANEL) /* elements of a panel that one step takes: two tiles */
#define LINE (64 / (int)sizeof(elem))
#define AHEAD (4 * STEP) /* prefetch distance in elements */

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} TileConfig;

void NAME(gemm_begin)(void)
{
    /* Not on the stack, because GCC does not see that all of it is read, and may not write most of it. */
    static const TileConfig config = {.palette = 1,
                                      .row_bytes = {64, 64, 64, 64, 64, 64, 64, 64},
                                      .rows = {16, 16, 16, 16, 16, 16, 16, 16}};
    _tile_loadconfig(&config);
}

void NAME(gemm_end)(void) { _tile_release(); }

/* Prefetch the next lines into the L1 cache, or lines that are needed only after more rows into the L2 cache. */
static inline __attribute__((always_inline)) void fetch(const elem *from, int lines, const bool is_next)
{
    for (int line = 0; line < lines; line++)
        __builtin_prefetch(from + line * LINE, 0, is_next ? 3 : 2);
}

/* Multiply 16 rows with 32 inputs of a panel, into tiles 0 and 1. */
static inline void multiply_step(const elem *a, ptrdiff_t lda, const elem *panel)
{
    atomic_signal_fence(memory_order_seq_cst); /* GCC does not see that tiles are loaded from memory. */
    _tile_loadd(4, a, lda * sizeof(elem));
    _tile_loadd(6, panel, PANEL * PAIR * sizeof(elem));
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, panel + 16 * PAIR, PANEL * PAIR * sizeof(elem));
    _tile_dpbf16ps(1, 4, 7);
}

/* Tile numbers are constants in instructions, so there are two functions, for one and for two tiles of rows. */
static inline void multiply_16(const elem *a, ptrdiff_t lda, const elem *panel, int inputs, float *c, ptrdiff_t ldc,
                               bool add)
{
    if (add) {
        _tile_loadd(0, c, ldc * sizeof(float));
        _tile_loadd(1, c + 16, ldc * sizeof(float));
    } else {
        _tile_zero(0);
        _tile_zero(1);
    }
    for (int i = 0; i < inputs; i += STEP_INPUTS, panel += STEP) {
        fetch(panel + AHEAD, STEP / LINE, true);
        multiply_step(a + i, lda, panel);
    }
    _tile_stored(0, c, ldc * sizeof(float));
    _tile_stored(1, c + 16, ldc * sizeof(float));
}

static inline void multiply_32(const elem *a, ptrdiff_t lda, const elem *panel, int inputs, float *c, ptrdiff_t ldc,
                               bool add, const elem *next, int lines)
{
    if (add) {
        _tile_loadd(0, c, ldc * sizeof(float));
        _tile_loadd(1, c + 16, ldc * sizeof(float));
        _tile_loadd(2, c + 16 * ldc, ldc * sizeof(float));
        _tile_loadd(3, c + 16 * ldc + 16, ldc * sizeof(float));
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int i = 0; i < inputs; i += STEP_INPUTS, panel += STEP) {
        fetch(next + i / STEP_INPUTS * lines * LINE, lines, false);
        _tile_loadd(4, a + i, lda * sizeof(elem));
        _tile_loadd(6, panel, PANEL * PAIR * sizeof(elem));
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, panel + 16 * PAIR, PANEL * PAIR * sizeof(elem));
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, a + 16 * lda + i, lda * sizeof(elem));
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, ldc * sizeof(float));
    _tile_stored(1, c + 16, ldc * sizeof(float));
    _tile_stored(2, c + 16 * ldc, ldc * sizeof(float));
    _tile_stored(3, c + 16 * ldc + 16, ldc * sizeof(float));
}

void NAME(panel_multiply)(const elem *a, ptrdiff_t lda, int rows, const elem *panel, int inputs, float *c,
                          ptrdiff_t ldc, bool add)
{
    if (rows <= 16) {
        multiply_16(a, lda, panel, inputs, c, ldc, add);
        return;
    }
    int lines = (STEP / LINE * 32 - 1 + rows) / rows; /* lines of the next slice that each step prefetches */
    for (int first = 0; first < inputs; first += SLICE, panel += SLICE * PANEL, a += SLICE, add = true) {
        int count = inputs - first < SLICE ? inputs - first : SLICE, row = 0;
        const elem *next = panel + (rows > 32 ? SLICE * PANEL : AHEAD);
        for (; row + 16 < rows; row += 32, next += lines * LINE * (count / STEP_INPUTS))
            multiply_32(a + row * lda, lda, panel, count, c + row * ldc, ldc, add, next, lines);
        if (row < rows)
            multiply_16(a + row * lda, lda, panel, count, c + row * ldc, ldc, add);
    }
}

/* A block is widened while tiles multiply the last one: only reading a product's result waits for it. */
void NAME(panel_multiply_few_blocks)(const elem *a, ptrdiff_t lda, int rows, const char *panel,
                                     const Grouping *groups, int inputs, float *c, ptrdiff_t ldc)
{
    _Alignas(64) elem widened[2][STEP];
    WidenBlock *widen = NAME(widener)(groups);
    int size = block_bytes(groups);
    if (rows == 1)
        lda = 0; /* Read the row sixteen times: it is in the L1 cache, unlike the memory after it. */
    _tile_zero(0);
    _tile_zero(1);
    widen(groups, panel, widened[0]);
    for (int block = 1; block < inputs / STEP_INPUTS; block++, a += STEP_INPUTS) {
        widen(groups, panel + block * size, widened[block % 2]);
        multiply_step(a, lda, widened[(block - 1) % 2]);
    }
    multiply_step(a, lda, widened[(inputs / STEP_INPUTS - 1) % 2]);
    _tile_stored(0, c, ldc * sizeof(float));
    _tile_stored(1, c + 16, ldc * sizeof(float));
}

#undef SLICE
#undef STEP_INPUTS
#undef STEP
#undef LINE
#undef AHEAD
#endif
