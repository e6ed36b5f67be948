/* A decoder's step, as defined by engine/models/decoder.py, in one parallel region.
 *
 *     embed ─▶ x ─┬─ norm ─ qkv ─ (q/k norm) ─ rotate, store ─ attend ─ output ─ + ─┬─ norm ─ gate, up ─ down ─ + ─▶
 *                 └─────────────────────────────────────────────────────────────────┘  └─────────────────────────┘
 *
 * A layer may have experts instead of gate, up and down. There may be another norm before each +, and the first two
 * norms may be absent. x stays in float32; inputs of products with weights are `elem`.
 */
#include "attention.h"
#include "experts.h"
#include "transpose.h"

#include <math.h>

/* A step's intermediate results, for all rows of a layer together. */
typedef struct {
    float *x;         /* [N][hidden]: the caller's memory, because it is also the result */
    elem *normed;     /* [N][hidden] */
    float *qkv;       /* [N][(num_heads + 2 * num_kv_heads) * head_dim] */
    elem *query;      /* [N][num_heads * head_dim] */
    elem *attended;   /* the same */
    elem *inner;      /* [N][intermediate] */
    float *branch;    /* [N][hidden]: a branch that is normed before it is added, or NULL */
    float *cosines;   /* [N][num_ropes][head_dim / 2] */
    float *sines;     /* the same */
    char *scratch;    /* for attention */
    ExpertBuffers experts;
} Buffers;

static AttentionShape shape_of(const Model *model, const Layer *layer)
{
    return (AttentionShape){.num_heads = model->num_heads, .num_kv_heads = model->num_kv_heads,
                            .window = layer->window, .head_dim = model->head_dim, .value_dim = model->head_dim,
                            .scale = model->attention_scale, .soft_cap = model->soft_cap, .sinks = layer->sinks};
}

/* Lay out the buffers of layers with experts; all of these have the same shape. */
static void lay_out_experts(ExpertBuffers *buffers, const Experts *experts, int hidden, size_t rows, char **at)
{
    size_t pairs = rows * experts->per_token;
    buffers->logits = (float *)carve(at, rows, experts->num_experts * sizeof(float));
    buffers->chosen = (int32_t *)carve(at, pairs, sizeof(int32_t));
    buffers->weights = (float *)carve(at, pairs, sizeof(float));
    buffers->places = (int32_t *)carve(at, pairs, sizeof(int32_t));
    buffers->which = (int32_t *)carve(at, experts->num_experts, sizeof(int32_t));
    buffers->first = (int32_t *)carve(at, experts->num_experts + 1, sizeof(int32_t));
    buffers->next = (int32_t *)carve(at, experts->num_experts, sizeof(int32_t));
    buffers->num_used = (int32_t *)carve(at, 1, sizeof(int32_t));
    buffers->gathered = (elem *)carve(at, pairs, hidden * sizeof(elem));
    buffers->inner = (elem *)carve(at, pairs, experts->intermediate * sizeof(elem));
    buffers->outputs = (float *)carve(at, pairs, hidden * sizeof(float));
    buffers->shared_inner = (elem *)carve(at, rows, experts->shared_intermediate * sizeof(elem));
    buffers->sum = (float *)carve(at, rows, hidden * sizeof(float));
}

static const Experts *experts_of(const Model *model)
{
    for (int layer = 0; layer < model->num_layers; layer++)
        if (model->layers[layer].experts)
            return model->layers[layer].experts;
    return NULL;
}

/* Return the bytes that attention needs in the layer that needs most, which depends on their windows. */
static size_t attention_scratch(const Model *model, const Batch *batches, int threads)
{
    size_t most = 0;
    for (int index = 0; index < model->num_layers; index++) {
        const Layer *layer = &model->layers[index];
        if (index && layer->window == layer[-1].window && layer->table == layer[-1].table)
            continue;
        AttentionShape shape = shape_of(model, layer);
        size_t bytes = NAME(attention_bytes)(batches + layer->table, &shape, threads);
        most = bytes > most ? bytes : most;
    }
    return most;
}

/* Lay the buffers out from `at`, and return their end. */
static char *lay_out(Buffers *buffers, const Model *model, const Batch *batch, int threads, char *at)
{
    size_t rows = round_up(batch->num_tokens, BLOCK_ROWS), dim = model->head_dim;
    buffers->normed = (elem *)carve(&at, rows, model->hidden * sizeof(elem));
    buffers->qkv = (float *)carve(&at, rows, (model->num_heads + 2 * model->num_kv_heads) * dim * sizeof(float));
    buffers->query = (elem *)carve(&at, rows, model->num_heads * dim * sizeof(elem));
    buffers->attended = (elem *)carve(&at, rows, model->num_heads * dim * sizeof(elem));
    buffers->inner = (elem *)carve(&at, rows, model->intermediate * sizeof(elem));
    bool norms_after = model->layers[0].attended_norm != NULL;
    buffers->branch = norms_after ? (float *)carve(&at, rows, model->hidden * sizeof(float)) : NULL;
    buffers->cosines = (float *)carve(&at, rows, model->num_ropes * dim / 2 * sizeof(float));
    buffers->sines = (float *)carve(&at, rows, model->num_ropes * dim / 2 * sizeof(float));
    buffers->scratch = carve(&at, 1, attention_scratch(model, batch, threads));
    const Experts *experts = experts_of(model);
    if (experts)
        lay_out_experts(&buffers->experts, experts, model->hidden, rows, &at);
    return at;
}

/* Return the bytes of workspace, aligned to 64, that raydix_forward needs. */
EXPORT int64_t NAME(raydix_forward_bytes)(const Model *model, const Batch *batch, int threads)
{
    Buffers buffers;
    return (int64_t)(uintptr_t)lay_out(&buffers, model, batch, threads, NULL);
}

/* Return the factor by which an RMS norm multiplies x, besides its weights. */
static float norm_factor(const float *x, int n, float eps)
{
    vf squares = vset(0);
    for (int i = 0; i < n; i += LANES)
        squares += vload(x + i) * vload(x + i);
    return 1.0f / sqrtf(vtotal(squares) / n + eps);
}

static void store_elems(const float *from, int n, elem *to)
{
    for (int i = 0; i < n; i += LANES)
        vstore_elem(to + i, vload(from + i));
}

/* Norm rows of the stream; without a weight they stay as they are. */
static void norm_phase(ThreadTeam *team, const Model *model, const float *x, const float *weight, int rows, elem *out)
{
    int hidden = model->hidden;
    for (int row; (row = team_take(team, rows)) < rows;) {
        const float *from = x + (size_t)row * hidden;
        elem *to = out + (size_t)row * hidden;
        if (!weight) {
            store_elems(from, hidden, to);
            continue;
        }
        float factor = norm_factor(from, hidden, model->norm_eps);
        for (int i = 0; i < hidden; i += LANES)
            vstore_elem(to + i, vload(from + i) * factor * vload(weight + i));
    }
    team_barrier(team);
}

/* Add `branch` to the stream, normed if there is a weight for that. */
static void add_rows(ThreadTeam *team, const Model *model, const float *branch, const float *weight, int rows,
                     Buffers *buffers)
{
    int hidden = model->hidden;
    for (int row; (row = team_take(team, rows)) < rows;) {
        const float *from = branch + (size_t)row * hidden;
        float *to = buffers->x + (size_t)row * hidden;
        float factor = weight ? norm_factor(from, hidden, model->own_eps) : 1;
        for (int i = 0; i < hidden; i += LANES) {
            vf add = vload(from + i) * factor;
            vstore(to + i, vload(to + i) + (weight ? add * vload(weight + i) : add));
        }
    }
    team_barrier(team);
}

/* Add the output of attention or the MLP: the product of `linear` and a[rows][lda]. */
static void add_phase(ThreadTeam *team, const Model *model, const Linear *linear, const elem *a, ptrdiff_t lda,
                      const float *weight, int rows, Buffers *buffers)
{
    int hidden = model->hidden;
    NAME(linear)(team, linear, a, lda, rows, weight ? TO_FLOATS : ADD_FLOATS, weight ? buffers->branch : buffers->x,
                 hidden);
    team_barrier(team);
    if (weight)
        add_rows(team, model, buffers->branch, weight, rows, buffers);
}

/* Copy the stream to `to`, float32 [rows][hidden]. */
static void copy_phase(ThreadTeam *team, const Model *model, const float *x, int rows, float *to)
{
    size_t hidden = model->hidden;
    for (int row; (row = team_take(team, rows)) < rows;)
        memcpy(to + row * hidden, x + row * hidden, hidden * sizeof(float));
    team_barrier(team);
}

static void embed_token(const Model *model, int64_t id, float *x)
{
    if (!model->embed) {
        NAME(widen_output)(&model->table, (int)id, model->embedding_scale, x);
        return;
    }
    const elem *row = model->embed + (size_t)id * model->hidden;
    for (int i = 0; i < model->hidden; i += LANES)
        vstore(x + i, vload_elem(row + i));
}

static void embed_phase(ThreadTeam *team, const Model *model, const Batch *batch, Buffers *buffers)
{
    int angles = model->num_ropes * model->head_dim / 2;
    for (int token; (token = team_take(team, batch->num_tokens)) < batch->num_tokens;) {
        float *x = buffers->x + (size_t)token * model->hidden;
        if (batch->token_ids) /* otherwise the stage before has computed x */
            embed_token(model, batch->token_ids[token], x);
        for (int i = 0; i < angles; i++) {
            float angle = (float)batch->positions[token] * model->inv_freq[i];
            buffers->cosines[(size_t)token * angles + i] = cosf(angle) * model->rope_factors[i];
            buffers->sines[(size_t)token * angles + i] = sinf(angle) * model->rope_factors[i];
        }
    }
    team_barrier(team);
}

/* Multiply one head, float32 [head_dim], by its norm's factor and weights, if it has any, and rotate it, in place.
 * Pairs are (i, i + head_dim / 2). */
static void norm_and_rotate(float *head, float factor, const float *weight, const float *cosines, const float *sines,
                            int dim)
{
    for (int i = 0; i < dim / 2; i += LANES) {
        vf first = vload(head + i) * factor, second = vload(head + dim / 2 + i) * factor;
        if (weight) {
            first *= vload(weight + i);
            second *= vload(weight + dim / 2 + i);
        }
        vf cosine = vload(cosines + i), sine = vload(sines + i);
        vstore(head + i, first * cosine - second * sine);
        vstore(head + dim / 2 + i, second * cosine + first * sine);
    }
}

/* Write queries to their buffer, keys and values to their pages. */
static void rotate_phase(ThreadTeam *team, const Model *model, const Layer *layer, const Batch *batch, const Pages *pages,
                         Buffers *buffers)
{
    int dim = model->head_dim, heads = model->num_heads, kv_heads = model->num_kv_heads;
    int angles = model->num_ropes * dim / 2, first_angle = layer->rope * dim / 2;
    for (int token; (token = team_take(team, batch->num_tokens)) < batch->num_tokens;) {
        float *qkv = buffers->qkv + (size_t)token * (heads + 2 * kv_heads) * dim;
        const float *cosines = buffers->cosines + (size_t)token * angles + first_angle;
        const float *sines = buffers->sines + (size_t)token * angles + first_angle;
        float factor = 1;
        for (int head = 0; head < heads + kv_heads; head++) {
            float *at = qkv + head * dim;
            if (layer->qk_norm && !model->norms_all_heads)
                factor = norm_factor(at, dim, model->own_eps);
            else if (layer->qk_norm && (head == 0 || head == heads))
                factor = norm_factor(at, (head ? kv_heads : heads) * dim, model->own_eps);
            norm_and_rotate(at, factor, layer->qk_norm ? layer->qk_norm + head * dim : NULL, cosines, sines, dim);
        }
        store_elems(qkv, heads * dim, buffers->query + (size_t)token * heads * dim);
        int64_t slot = batch->slot_mapping[token];
        for (int head = 0; head < kv_heads; head++) {
            int64_t to = slot / pages->page_size * pages->page_stride + slot % pages->page_size * pages->slot_stride +
                         head * pages->head_stride;
            store_elems(qkv + (heads + head) * dim, dim, pages->keys + to);
            store_elems(qkv + (heads + kv_heads + head) * dim, dim, pages->values + to);
        }
    }
    team_barrier(team);
}

static void run_layer(ThreadTeam *team, const Model *model, const Layer *layer, const Batch *batch,
                      const Pages *pages, Buffers *buffers)
{
    int rows = batch->num_tokens, hidden = model->hidden, attended = model->num_heads * model->head_dim;
    AttentionShape shape = shape_of(model, layer);
    if (layer->before)
        copy_phase(team, model, buffers->x, rows, layer->before);
    norm_phase(team, model, buffers->x, layer->input_norm, rows, buffers->normed);
    NAME(linear)(team, &layer->qkv, buffers->normed, hidden, rows, TO_FLOATS, buffers->qkv, layer->qkv.outputs);
    team_barrier(team);
    rotate_phase(team, model, layer, batch, pages, buffers);
    NAME(attend)(team, batch, &shape, pages, buffers->query, attended, buffers->attended, attended,
                 buffers->scratch);
    team_barrier(team);
    add_phase(team, model, &layer->output, buffers->attended, attended, layer->attended_norm, rows, buffers);
    norm_phase(team, model, buffers->x, layer->post_norm, rows, buffers->normed);
    if (layer->experts) {
        NAME(experts)(team, layer->experts, buffers->normed, hidden, rows, &buffers->experts);
        add_rows(team, model, buffers->experts.sum, layer->output_norm, rows, buffers);
        return;
    }
    NAME(linear)(team, &layer->gate_up, buffers->normed, hidden, rows,
                 model->is_gelu ? GEGLU : SWIGLU, buffers->inner, model->intermediate);
    team_barrier(team);
    add_phase(team, model, &layer->down, buffers->inner, model->intermediate, layer->output_norm, rows, buffers);
}

/* Map token ids to hidden states, float32 [num_tokens][hidden]; writes KV. Without token ids, `hidden` has the hidden
 * states of the stage before. `pages` are the first layer's. There are
 * num_tables batches, which differ only in their block tables and slots; the first one has the token ids. */
EXPORT void NAME(raydix_forward)(const Model *model, const Batch *batch, const Pages *pages, char *workspace,
                                 float *hidden, int threads)
{
    Buffers buffers;
    SharedWork work;
    work_begin(&work);
    lay_out(&buffers, model, batch, threads, workspace);
    buffers.x = hidden;
#pragma omp parallel num_threads(threads)
    {
        Pages own = *pages;
        ThreadTeam team = team_join(&work);
        NAME(gemm_begin)();
        embed_phase(&team, model, batch, &buffers);
        for (int layer = 0; layer < model->num_layers; layer++) {
            const Layer *at = &model->layers[layer];
            own.keys = pages->keys + at->number * pages->layer_stride;
            own.values = pages->values + at->number * pages->layer_stride;
            run_layer(&team, model, at, batch + at->table, &own, &buffers);
        }
        NAME(gemm_end)();
    }
}

/* Compute the logits of the first `rows` hidden states: float32 [rows][vocabulary].
 * workspace: elem [rows rounded up to 16][hidden], aligned to 64 bytes. */
EXPORT void NAME(raydix_logits)(const Model *model, const float *hidden, int rows, elem *workspace, float *logits,
                                int threads)
{
    SharedWork work;
    work_begin(&work);
#pragma omp parallel num_threads(threads)
    {
        ThreadTeam team = team_join(&work);
        NAME(gemm_begin)();
        norm_phase(&team, model, hidden, model->norm, rows, workspace);
        NAME(linear)(&team, &model->head, workspace, model->hidden, rows, TO_FLOATS, logits, model->head.outputs);
        NAME(gemm_end)();
    }
}
