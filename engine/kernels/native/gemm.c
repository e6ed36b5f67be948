#include "gemm.h"

#include <stdlib.h>

#define ROWS_AT_ONCE 256 /* rows of a work item: their products stay in the cache */

void NAME(pack_rows)(const elem *rows, ptrdiff_t stride, int num_rows, int inputs, elem *panel)
{
    memset(panel, 0, sizeof(elem) * PANEL * (size_t)round_up(inputs, 32));
    for (int r = 0; r < num_rows; r++)
        for (int i = 0; i < inputs; i++)
            panel[(i / PAIR * PANEL + r) * PAIR + i % PAIR] = rows[r * stride + i];
}

/* Pack a matrix [outputs][inputs]. is_swiglu: outputs are all gates, then all ups; a panel gets 16 of each. */
EXPORT void NAME(raydix_pack)(const elem *matrix, int outputs, int inputs, bool is_swiglu, elem *packed)
{
    size_t size = (size_t)PANEL * round_up(inputs, 32);
    int half = outputs / 2;
#pragma omp parallel for
    for (int p = 0; p < round_up(outputs, PANEL) / PANEL; p++) {
        elem *panel = packed + p * size;
        int first = p * PANEL;
        if (!is_swiglu) {
            int rows = outputs - first < PANEL ? outputs - first : PANEL;
            NAME(pack_rows)(matrix + (size_t)first * inputs, inputs, rows, inputs, panel);
            continue;
        }
        memset(panel, 0, sizeof(elem) * size);
        for (int r = 0; r < PANEL; r++) {
            int output = p * 16 + r % 16;
            const elem *row = matrix + (size_t)(output + (r < 16 ? 0 : half)) * inputs;
            for (int i = 0; i < inputs && output < half; i++)
                panel[(i / PAIR * PANEL + r) * PAIR + i % PAIR] = row[i];
        }
    }
}

static void finish(const Linear *linear, int p, int rows, const float *c, Product product, char *out, ptrdiff_t ldo)
{
    int width = linear->outputs - p * PANEL < PANEL ? linear->outputs - p * PANEL : PANEL;
    for (int r = 0; r < rows; r++, c += PANEL) {
        if (product == SWIGLU) {
            elem *to = (elem *)out + r * ldo + p * 16;
            for (int v = 0; v < 16; v += LANES) {
                vf gate = vload(c + v), up = vload(c + 16 + v);
                if (linear->bias) {
                    gate += vload(linear->bias + p * 16 + v);
                    up += vload(linear->bias + linear->outputs / 2 + p * 16 + v);
                }
                vstore_elem(to + v, gate / (1.0f + vexp(-gate)) * up);
            }
            continue;
        }
        float *to = (float *)out + r * ldo + p * PANEL;
        for (int i = 0; i < width; i++) {
            float x = c[i] + (linear->bias ? linear->bias[p * PANEL + i] : 0);
            to[i] = product == ADD_FLOATS ? to[i] + x : x;
        }
    }
}

void NAME(linear)(Team *team, const Linear *linear, const elem *a, ptrdiff_t lda, int rows, Product product,
                  void *out, ptrdiff_t ldo)
{
    int inputs = round_up(linear->inputs, 32);
    int panels = round_up(linear->outputs, PANEL) / PANEL;
    int blocks = round_up(rows, ROWS_AT_ONCE) / ROWS_AT_ONCE;
    size_t width = product == SWIGLU ? sizeof(elem) : sizeof(float);
    _Alignas(64) float c[ROWS_AT_ONCE * PANEL];
    for (int item; (item = team_take(team, panels * blocks)) < panels * blocks;) {
        int p = item % panels, first = item / panels * ROWS_AT_ONCE;
        int count = rows - first < ROWS_AT_ONCE ? rows - first : ROWS_AT_ONCE;
        const elem *panel = (const elem *)linear->packed + (size_t)p * PANEL * inputs;
        NAME(panel_multiply)(a + first * lda, lda, count, panel, inputs, c, PANEL, false);
        finish(linear, p, count, c, product, (char *)out + (size_t)first * ldo * width, ldo);
    }
}

/* One linear alone. `product` is a Product; a and, where floats are not added, out are as `linear` says. */
EXPORT void NAME(raydix_linear)(const Linear *linear, const elem *a, int64_t lda, int rows, int product, void *out,
                                int64_t ldo, int threads)
{
    Work work;
    work_begin(&work);
#pragma omp parallel num_threads(threads)
    {
        Team team = team_join(&work);
        NAME(gemm_begin)();
        NAME(linear)(&team, linear, a, lda, rows, (Product)product, out, ldo);
        NAME(gemm_end)();
    }
}
