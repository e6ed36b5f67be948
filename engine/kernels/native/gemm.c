/* A linear layer as a phase of a team. An item of work is a few panels times a block of rows:
 *
 *                    panels
 *                 0  1 │ 2  3 │ 4
 *     a    0..    item │ item │ item     a block of rows stays in the L2 cache for all panels,
 *          512..  item │ item │ item     a slice of a panel in the L1 cache for all rows of the block
 */
#include "gemm.h"

#define BLOCK_BYTES (1 << 20) /* bytes of a block of rows: half of today's L2 caches */
#ifdef WIDENS
#define MOST_ROWS_OF_ITEM WIDE_MOST_ROWS
#else
#define MOST_ROWS_OF_ITEM 512
#endif
#define LEAST_ROWS_OF_ITEM 128 /* With fewer rows, panels would be read too often. */
#define PRODUCTS (1024 * PANEL) /* products of an item: 128 KB on the stack */
#define MOST_PANELS_OF_ITEM 8
#define STREAMED_BYTES (1 << 20) /* Results of at least this size bypass the caches. */

typedef struct {
    int rows, panels; /* of one item */
    int row_blocks, panel_groups;
} Items;

static Items items_of(const Linear *linear, int rows, int threads)
{
    int panels = round_up(linear->outputs, PANEL) / PANEL;
    int most = BLOCK_BYTES / (linear->inputs * (int)sizeof(elem)) / 32 * 32;
    Items items = {.rows = most > MOST_ROWS_OF_ITEM    ? MOST_ROWS_OF_ITEM
                           : most < LEAST_ROWS_OF_ITEM ? LEAST_ROWS_OF_ITEM
                                                       : most};
    items.rows = rows < items.rows ? round_up(rows, BLOCK_ROWS) : items.rows;
    items.row_blocks = (rows + items.rows - 1) / items.rows;
    /* Make several items per thread, because threads seldom end at the same time. Panels in a run are prefetched. */
    int share = panels * items.row_blocks / (8 * threads), fit = PRODUCTS / PANEL / items.rows;
    items.panels = share < fit ? share : fit;
    items.panels = items.panels > MOST_PANELS_OF_ITEM ? MOST_PANELS_OF_ITEM : items.panels < 1 ? 1 : items.panels;
    items.panel_groups = (panels + items.panels - 1) / items.panels;
    return items;
}

/* Scales and biases applied to sums: each NULL, or starting at the item's first output. */
typedef struct {
    const float *scales, *bias;
} Finish;

static Finish finish_of(const Linear *linear, int output)
{
    return (Finish){linear->scales ? linear->scales + output : NULL, linear->bias ? linear->bias + output : NULL};
}

static inline vf finished(const Finish *finish, vf sum, int output)
{
    if (finish->scales)
        sum *= vload(finish->scales + output);
    return finish->bias ? sum + vload(finish->bias + output) : sum;
}

/* Finish the `width` outputs of an item: c[rows][ldc] to out[rows][ldo]. */
static void finish_floats(const float *c, ptrdiff_t ldc, int rows, int width, Finish finish, bool adds, bool streams,
                          float *out, ptrdiff_t ldo)
{
    for (int r = 0; r < rows; r++, c += ldc, out += ldo) {
        int i = 0;
        if (adds)
            for (; i + LANES <= width; i += LANES)
                vstore(out + i, vload(out + i) + finished(&finish, vload(c + i), i));
        else if (streams)
            for (; i + LANES <= width; i += LANES)
                vstream(out + i, finished(&finish, vload(c + i), i));
        else
            for (; i + LANES <= width; i += LANES)
                vstore(out + i, finished(&finish, vload(c + i), i));
        for (; i < width; i++) {
            float sum = finish.scales ? c[i] * finish.scales[i] : c[i];
            sum = finish.bias ? sum + finish.bias[i] : sum;
            out[i] = adds ? out[i] + sum : sum;
        }
    }
}

/* Return a gate's activation times its up. GELU's tanh form is x / (1 + exp(-2 u)) with u as below. */
static inline vf gated(Product product, const Linear *linear, vf gate, vf up)
{
    if (product == CLAMPED_SWIGLU) {
        vf limit = vset(linear->limit);
        gate = vselect(gate > limit, limit, gate);
        up = vmax(vselect(up > limit, limit, up), -limit);
        return (up + 1.0f) * gate / (1.0f + vexp(gate * -linear->alpha));
    }
    vf power = product == GEGLU ? (gate + gate * gate * gate * 0.044715f) * -1.5957691216057308f : -gate;
    return gate / (1.0f + vexp(power)) * up;
}

/* Finish the panel whose first gate is `output`. */
static void finish_gated(const Linear *linear, const float *c, ptrdiff_t ldc, int rows, int output, Product product,
                         elem *out, ptrdiff_t ldo)
{
    Finish gates = finish_of(linear, output), ups = finish_of(linear, linear->outputs / 2 + output);
    for (int r = 0; r < rows; r++, c += ldc, out += ldo)
        for (int i = 0; i < PANEL / 2; i += LANES) {
            vf gate = finished(&gates, vload(c + i), i), up = finished(&ups, vload(c + PANEL / 2 + i), i);
            vstore_elem(out + i, gated(product, linear, gate, up));
        }
}

static bool is_gated(Product product) { return product >= SWIGLU; }

/* Finish an item; `out` is its first row. */
static void finish_item(const Linear *linear, const float *c, ptrdiff_t ldc, int rows, int panel, int panels,
                        Product product, bool streams, void *out, ptrdiff_t ldo)
{
    if (is_gated(product)) {
        for (int p = panel; p < panel + panels; p++, c += PANEL) {
            int output = p * PANEL / 2;
            finish_gated(linear, c, ldc, rows, output, product, (elem *)out + output, ldo);
        }
        return;
    }
    int output = panel * PANEL, width = linear->outputs - output;
    finish_floats(c, ldc, rows, width < panels * PANEL ? width : panels * PANEL, finish_of(linear, output),
                  product == ADD_FLOATS, streams, (float *)out + output, ldo);
}

static bool is_streamed(const Linear *linear, int rows, Product product, const void *out, ptrdiff_t ldo)
{
    return product == TO_FLOATS && (size_t)rows * linear->outputs * sizeof(float) >= STREAMED_BYTES &&
           ((uintptr_t)out | ldo * sizeof(float)) % VECTOR_BYTES == 0;
}

/* Multiply the rows of an item with its panels, the first of which is number `panel`. */
static void multiply_panels(const Linear *linear, const elem *a, ptrdiff_t lda, int rows, int panel, int panels,
                            float *c, ptrdiff_t ldc)
{
    int inputs = round_up(linear->inputs, 32);
    size_t size = (size_t)inputs / 32 * panel_bytes(linear);
    const char *packed = (const char *)linear->packed + panel * size;
#ifdef WIDENS
    if (rows >= (linear->scales || linear->groups.bits ? WIDE_ROWS_QUANTIZED : WIDE_ROWS)) {
        NAME(panels_multiply_widened)(a, lda, rows, linear, packed, panels, inputs, c, ldc);
        return;
    }
#endif
    for (int p = 0; p < panels; p++, packed += size, c += PANEL)
        if (linear->groups.bits)
            NAME(panel_multiply_blocks)(a, lda, rows, packed, &linear->groups, inputs, c, ldc);
        else if (linear->scales)
            NAME(panel_multiply_int8)(a, lda, rows, (const int8_t *)packed, inputs, c, ldc);
        else
            NAME(panel_multiply)(a, lda, rows, (const elem *)packed, inputs, c, ldc, false);
}

/* Compute one item of the product of a[rows][lda] and a matrix; `c` has room for PRODUCTS. */
static void run_item(const Linear *linear, const Items *items, int item, const elem *a, ptrdiff_t lda, int rows,
                     Product product, bool streams, void *out, ptrdiff_t ldo, float *c)
{
    int all_panels = round_up(linear->outputs, PANEL) / PANEL;
    int panel = item % items->panel_groups * items->panels, row = item / items->panel_groups * items->rows;
    int panels = all_panels - panel < items->panels ? all_panels - panel : items->panels;
    int count = rows - row < items->rows ? rows - row : items->rows;
    size_t width = is_gated(product) ? sizeof(elem) : sizeof(float);
    ptrdiff_t ldc = items->panels * PANEL;
    multiply_panels(linear, a + row * lda, lda, count, panel, panels, c, ldc);
    finish_item(linear, c, ldc, count, panel, panels, product, streams, (char *)out + row * ldo * width, ldo);
}

void NAME(linear)(ThreadTeam *team, const Linear *linear, const elem *a, ptrdiff_t lda, int rows, Product product,
                  void *out, ptrdiff_t ldo)
{
    Items items = items_of(linear, rows, team->size);
    bool streams = is_streamed(linear, rows, product, out, ldo);
    _Alignas(64) float c[PRODUCTS];
    int all_items = items.panel_groups * items.row_blocks;
    for (int item; (item = team_take(team, all_items)) < all_items;) {
        run_item(linear, &items, item, a, lda, rows, product, streams, out, ldo, c);
        if (streams)
            vstream_end();
    }
}

void NAME(sorted_linears)(ThreadTeam *team, const Linear *linears, const Sorted *sorted, const elem *a, ptrdiff_t lda,
                          Product product, void *out, ptrdiff_t ldo)
{
    size_t width = is_gated(product) ? sizeof(elem) : sizeof(float);
    _Alignas(64) float c[PRODUCTS];
    int all_items = 0;
    for (int i = 0; i < sorted->count; i++) {
        /* Matrices in use have rows. A thread that is late may read places that a later layer is sorting: it finds less
         * than one row, and has no item left. */
        int rows = sorted->first[i + 1] - sorted->first[i];
        Items items = items_of(linears, rows > 0 ? rows : 1, team->size);
        all_items += items.panel_groups * items.row_blocks;
    }
    /* A thread's items ascend, so it searches for the next item's matrix from that of the last item. */
    int at = -1, begin = 0, end = 0, row = 0, rows = 0;
    Items items = {0};
    for (int item; (item = team_take(team, all_items)) < all_items;) {
        while (item >= end) {
            at++;
            row = sorted->first[at];
            rows = sorted->first[at + 1] - row;
            items = items_of(linears, rows, team->size);
            begin = end;
            end += items.panel_groups * items.row_blocks;
        }
        run_item(&linears[sorted->which[at]], &items, item - begin, a + row * lda, lda, rows, product, false,
                 (char *)out + row * ldo * width, ldo, c);
    }
}

/* Compute one linear layer by itself. `product` is a Product; for a and out see `linear`. */
EXPORT void NAME(raydix_linear)(const Linear *linear, const elem *a, int64_t lda, int rows, int product, void *out,
                                int64_t ldo, int threads)
{
    SharedWork work;
    work_begin(&work);
#pragma omp parallel num_threads(threads)
    {
        ThreadTeam team = team_join(&work);
        NAME(gemm_begin)();
        NAME(linear)(&team, linear, a, lda, rows, (Product)product, out, ldo);
        NAME(gemm_end)();
    }
}
