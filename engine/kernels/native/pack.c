/* Packs matrices into panels. */
#include "gemm.h"

/* Pack the rows at `rows` as a panel's outputs first .. first + num_rows. */
static void pack_outputs(const elem *rows, ptrdiff_t stride, int num_rows, int inputs, elem *panel, int first)
{
    /* Pairs move as units, sixteen at a time: a line is read once, and the written lines stay in the cache. */
    typedef struct {
        elem inputs[PAIR];
    } Pair;
    Pair *pairs = (Pair *)panel + first;
    for (int from = 0; from < inputs; from += 16 * PAIR) {
        int count = (inputs - from < 16 * PAIR ? inputs - from : 16 * PAIR) / PAIR;
        for (int r = 0; r < num_rows; r++) {
            const elem *row = rows + r * stride + from;
            for (int i = 0; i < count; i++)
                memcpy(pairs + (from / PAIR + i) * PANEL + r, row + i * PAIR, sizeof(Pair));
        }
    }
    if (inputs % PAIR) /* The last input is paired with a zero. */
        for (int r = 0; r < num_rows; r++)
            pairs[inputs / PAIR * PANEL + r].inputs[0] = rows[r * stride + inputs - 1];
}

void NAME(pack_rows)(const elem *rows, ptrdiff_t stride, int num_rows, int inputs, elem *panel)
{
    if (num_rows < PANEL || inputs % 32)
        memset(panel, 0, sizeof(elem) * PANEL * (size_t)round_up(inputs, 32));
    pack_outputs(rows, stride, num_rows, inputs, panel, 0);
}

/* Pack a matrix [outputs][inputs]. If is_swiglu, outputs are all gates, then all ups; a panel gets 16 of each. */
EXPORT void NAME(raydix_pack)(const elem *matrix, int outputs, int inputs, bool is_swiglu, elem *packed)
{
    size_t size = (size_t)PANEL * round_up(inputs, 32);
    int width = is_swiglu ? PANEL / 2 : PANEL, half = outputs / 2, most = is_swiglu ? half : outputs;
#pragma omp parallel for
    for (int p = 0; p < (most + width - 1) / width; p++) {
        const elem *rows = matrix + (size_t)p * width * inputs;
        int count = most - p * width < width ? most - p * width : width;
        NAME(pack_rows)(rows, inputs, count, inputs, packed + p * size);
        if (is_swiglu)
            pack_outputs(rows + (size_t)half * inputs, inputs, count, inputs, packed + p * size, width);
    }
}
