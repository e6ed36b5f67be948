/* panel_multiply in bfloat16 with AMX: tiles of 16 rows of 64 bytes; a product of two takes 16 cycles.
 *
 *             panel: 16 pairs of inputs x 16 outputs
 *                   ┌───────┬───────┐
 *                   │   6   │   7   │
 *     a: 16 rows    ├───────┼───────┤
 *     x 32 inputs 4 │   0   │   1   │  products
 *                 5 │   2   │   3   │
 *                   └───────┴───────┘
 *
 * Tiles always have all their rows: what lies beyond the last row is multiplied too, and changes no other row.
 */
#include "gemm.h"

#if defined(RAYDIX_BF16) && defined(__AMX_BF16__)

#define SLICE 256            /* inputs: a panel's slice, 16 KB, stays in the L1 cache while rows go by */
#define TILE (16 * PANEL * PAIR) /* elements of a panel that one step, of 32 inputs, takes */
#define AHEAD (4 * TILE)     /* elements from what is multiplied to what is fetched */

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} TileConfig;

void NAME(gemm_begin)(void)
{
    TileConfig config = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        config.row_bytes[tile] = 64;
        config.rows[tile] = 16;
    }
    _tile_loadconfig(&config);
}

void NAME(gemm_end)(void) { _tile_release(); }

static inline void fetch(const elem *panel)
{
    for (int line = 0; line < TILE; line += 64 / (int)sizeof(elem))
        _mm_prefetch((const char *)(panel + line), _MM_HINT_T0);
}

/* Tile numbers are constants of the instructions, hence two functions for one or two tiles of rows. */
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
    for (int i = 0; i < inputs; i += 32, panel += TILE) {
        fetch(panel + AHEAD);
        _tile_loadd(4, a + i, lda * sizeof(elem));
        _tile_loadd(6, panel, PANEL * PAIR * sizeof(elem));
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, panel + 16 * PAIR, PANEL * PAIR * sizeof(elem));
        _tile_dpbf16ps(1, 4, 7);
    }
    _tile_stored(0, c, ldc * sizeof(float));
    _tile_stored(1, c + 16, ldc * sizeof(float));
}

static inline void multiply_32(const elem *a, ptrdiff_t lda, const elem *panel, int inputs, float *c, ptrdiff_t ldc,
                               bool add, bool fetches)
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
    for (int i = 0; i < inputs; i += 32, panel += TILE) {
        if (fetches)
            fetch(panel + AHEAD);
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
    for (int first = 0; first < inputs; first += SLICE, panel += SLICE * PANEL) {
        int count = inputs - first < SLICE ? inputs - first : SLICE, row = 0;
        for (; row + 16 < rows; row += 32)
            multiply_32(a + row * lda + first, lda, panel, count, c + row * ldc, ldc, add || first, row == 0);
        if (row < rows)
            multiply_16(a + row * lda + first, lda, panel, count, c + row * ldc, ldc, add || first);
    }
}

#endif
