/* Samples the next token of each row of logits, as engine/sampling/sampler.py does: reports log-probabilities, adjusts
 * the logits, chooses a token. One thread computes a row; only its scratch has the size of a row.
 *
 * Weights and their sums are float64, and tokens are drawn in vocabulary order, so rounding hardly ever changes
 * the draw, which is that of the torch implementation.
 */
#include "top_tokens.h"

#include <omp.h>

#define COST_OF_DRAWING 8     /* cost of drawing, relative to finding the largest logit */
#define WORTH_A_THREAD 262144 /* logits whose search for the largest justifies a thread: some 30 us */

/* Return the bytes of workspace, aligned to 64, that raydix_sample needs. */
EXPORT int64_t NAME(raydix_sample_bytes)(int vocabulary, int threads)
{
    SampleScratch scratch;
    return (int64_t)(uintptr_t)carve_scratch(&scratch, vocabulary, NULL) * threads;
}

static uint64_t mix(uint64_t x)
{
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

/* The same function as in engine/sampling/noise.py. */
static double uniform(uint64_t seed, uint64_t position)
{
    const uint64_t gamma = 0x9E3779B97F4A7C15u;
    return (double)(mix(mix(seed + gamma) + (position + 1) * gamma) >> 11) * 0x1p-53;
}

/* Return a share of the total that is less than the total even when rounded. */
static double share(double noise, double total) { return fmin(noise * total, nextafter(total, 0)); }

/* Return the first token whose cumulated weight, plus `before`, exceeds `wanted`; if none does, the last with a
 * weight. */
static int walk(const double *weights, int n, double before, double wanted)
{
    int last = 0;
    for (int i = 0; i < n; i++) {
        before += weights[i];
        if (before > wanted)
            return i;
        last = weights[i] > 0 ? i : last;
    }
    return last;
}

static double sum_of(const double *weights, int n)
{
    double sum = 0;
    for (int i = 0; i < n; i++)
        sum += weights[i];
    return sum;
}

static int draw_from_all(const float *row, int vocabulary, float best, double inverse, double noise, double *sums)
{
    float padded[ROW_BLOCK];
    double weights[ROW_BLOCK], before = 0;
    double wanted = share(noise, find_sums(row, vocabulary, best, inverse, sums));
    int block = 0, last = vocabulary_blocks(vocabulary) - 1;
    while (block < last && !(before + sums[block] > wanted))
        before += sums[block++];
    weigh_tokens(block_of(row, vocabulary, block, padded), ROW_BLOCK, best, inverse, weights);
    return block * ROW_BLOCK + walk(weights, ROW_BLOCK, before, wanted);
}

static int draw_from_top(const SampledRow *asked, const float *row, int vocabulary, float best, double inverse,
                               double noise, SampleScratch *scratch)
{
    List *list = &scratch->list;
    int count;
    double total = 0;
    if (asked->top_k && asked->top_k < vocabulary) {
        count = find_largest(row, vocabulary, asked->top_k, scratch);
        weigh_tokens(list->logits, count, best, inverse, list->weights);
        total = sum_of(list->weights, count);
    } else {
        double least = asked->min_p; /* a weight; the best token has 1 */
        if (asked->top_p < 1) {
            total = find_sums(row, vocabulary, best, inverse, scratch->sums);
            /* Tokens below this weight add up to less than 1 - top_p. */
            least = fmax(least, (1 - asked->top_p) * total / vocabulary);
        }
        double bound = best + log(0.999 * least) / inverse;
        count = collect(row, vocabulary, fmaxf(nextafterf((float)bound, -INFINITY), -FLT_MAX), list);
        weigh_tokens(list->logits, count, best, inverse, list->weights);
    }
    if (asked->top_p < 1) {
        Cut cut = find_cut(list->logits, list->weights, count, asked->top_p * total, scratch->indices);
        count = keep(list, count, cut);
    }
    int kept = 0;
    for (int i = 0; i < count; i++) {
        list->ids[kept] = list->ids[i];
        list->weights[kept] = list->weights[i];
        kept += list->weights[i] >= asked->min_p;
    }
    return list->ids[walk(list->weights, kept, 0, share(noise, sum_of(list->weights, kept)))];
}

/* Choose a token; -1 when no choice is valid. */
static int choose(const SampledRow *asked, const float *row, int vocabulary, SampleScratch *scratch)
{
    float best = find_maxima(row, vocabulary, scratch->maxima);
    if (!isfinite(best))
        return -1;
    if (asked->temperature == 0) {
        int block = 0, token;
        while (scratch->maxima[block] != best)
            block++;
        for (token = block * ROW_BLOCK; row[token] != best;)
            token++;
        return token;
    }
    double inverse = fmin(1 / asked->temperature, DBL_MAX), noise = uniform(asked->seed, asked->position);
    if (!asked->top_k && asked->top_p >= 1 && asked->min_p == 0)
        return draw_from_all(row, vocabulary, best, inverse, noise, scratch->sums);
    return draw_from_top(asked, row, vocabulary, best, inverse, noise, scratch);
}

static bool is_known(int64_t token, int vocabulary) { return token >= 0 && token < vocabulary; }

typedef double vd_of_vf __attribute__((vector_size(2 * VECTOR_BYTES)));
typedef int32_t vi_anywhere __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));

typedef struct {
    float repetition;
    double presence, frequency;
} Penalties;

/* Return a logit after the penalties; `count` is as in engine/sampling/token_counts.py. */
static inline float penalized(Penalties by, float x, int32_t count)
{
    float changed = x > 0 ? x / by.repetition : x * by.repetition;
    float penalty = (float)(by.presence + by.frequency * (count >> 1));
    changed -= count > 1 ? penalty : 0;
    return count ? changed : x;
}

/* The same for a vector of logits, lane by lane with the same roundings, and at the same cost for any counts:
 * a branch would be mispredicted more often the more tokens have occurred. */
static inline vf penalized_vector(Penalties by, vf x, vi count)
{
    vf changed = vselect(x > 0, x / by.repetition, x * by.repetition);
    vd_of_vf penalty = by.presence + by.frequency * __builtin_convertvector(count >> 1, vd_of_vf);
    changed -= vselect(count > 1, __builtin_convertvector(penalty, vf), vset(0));
    return vselect(count == 0, x, changed);
}

/* Apply the penalties to all counted tokens, then again to those of the tail, which occur more often. */
static void penalize(const SampledRow *asked, float *row, int vocabulary, float *before)
{
    const Penalties by = {asked->repetition, asked->presence, asked->frequency};
    const int32_t *counts = asked->counts;
    for (int i = 0; i < asked->num_tail; i++)
        before[i] = is_known(asked->tail[i], vocabulary) ? row[asked->tail[i]] : 0;
    int token = 0;
    for (; token + LANES <= vocabulary; token += LANES)
        vstore(row + token, penalized_vector(by, vload(row + token), *(const vi_anywhere *)(counts + token)));
    for (; token < vocabulary; token++)
        row[token] = penalized(by, row[token], counts[token]);
    for (int i = 0; i < asked->num_tail; i++) {
        int64_t token = asked->tail[i];
        if (!is_known(token, vocabulary))
            continue;
        int32_t count = counts[token];
        for (int j = 0; j < asked->num_tail; j++)
            count += asked->tail[j] == token ? 2 : 0;
        row[token] = penalized(by, before[i], count);
    }
}

/* Adjust a row as engine/sampling/adjust.py does, then apply the grammar's mask. */
static void adjust(const SampledRow *asked, float *row, int vocabulary, SampleScratch *scratch)
{
    if (asked->counts)
        penalize(asked, row, vocabulary, scratch->list.logits);
    for (int i = 0; i < asked->num_edits; i++)
        if (is_known(asked->edited[i], vocabulary)) {
            float *logit = row + asked->edited[i];
            *logit = isinf(asked->edits[i]) ? asked->edits[i] : *logit + asked->edits[i];
        }
    if (asked->mask)
        for (int token = 0; token < vocabulary; token++)
            if (token / 32 >= asked->mask_words || !(asked->mask[token / 32] >> token % 32 & 1))
                row[token] = -INFINITY;
}

static void sort_by_logit(List *list, int n)
{
    for (int i = 1; i < n; i++) {
        float x = list->logits[i];
        int32_t id = list->ids[i], at = i;
        for (; at > 0 && list->logits[at - 1] < x; at--) {
            list->logits[at] = list->logits[at - 1];
            list->ids[at] = list->ids[at - 1];
        }
        list->logits[at] = x;
        list->ids[at] = id;
    }
}

/* Report the top tokens, best first and lower ids first among equals; -1 after the last. Returns the normaliser. */
static double report_top(const SampledRow *asked, const float *row, int vocabulary, int32_t *tokens, float *logprobs,
                         SampleScratch *scratch)
{
    List *list = &scratch->list;
    float best = find_maxima(row, vocabulary, scratch->maxima);
    int count = 0;
    double normaliser = NAN;
    if (isfinite(best)) {
        normaliser = best + log(find_sums(row, vocabulary, best, 1, scratch->sums));
        count = asked->num_top ? find_largest(row, vocabulary, asked->num_top, scratch) : 0;
    }
    sort_by_logit(list, count);
    for (int i = 0; i < asked->num_top; i++) {
        tokens[i] = i < count ? list->ids[i] : -1;
        logprobs[i] = i < count ? (float)(list->logits[i] - normaliser) : -INFINITY;
    }
    return normaliser;
}

/* Return how many threads to use: waiting for one may take longer than its work. */
static int worthwhile(const SampledRow *rows, int num_rows, int vocabulary, int threads)
{
    int64_t cost = 0;
    for (int r = 0; r < num_rows; r++)
        cost += rows[r].temperature > 0 || rows[r].num_top >= 0 ? COST_OF_DRAWING : 1;
    int64_t worth = 1 + cost * vocabulary / WORTH_A_THREAD;
    threads = threads < num_rows ? threads : num_rows;
    return threads < worth ? threads : (int)worth;
}

/* Sample a token for each row. logits: float32 [num_rows][vocabulary], rows `stride` apart; adjusted as the rows
 * request. tokens: [num_rows], -1 where no choice is valid. Rows with num_top >= 0 report their token's log-probability
 * to logprobs [num_rows], and the top tokens to top_tokens and top_logprobs, [num_rows][top_width]. */
EXPORT void NAME(raydix_sample)(const SampledRow *rows, int num_rows, float *logits, int64_t stride, int vocabulary,
                                int64_t *tokens, float *logprobs, int32_t *top_tokens, float *top_logprobs,
                                int top_width, char *workspace, int threads)
{
    threads = worthwhile(rows, num_rows, vocabulary, threads);
    size_t size = (size_t)NAME(raydix_sample_bytes)(vocabulary, 1);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        SampleScratch scratch;
        carve_scratch(&scratch, vocabulary, workspace + size * omp_get_thread_num());
#pragma omp for schedule(dynamic)
        for (int r = 0; r < num_rows; r++) {
            const SampledRow *asked = &rows[r];
            float *row = logits + r * stride;
            const float *original = row;
            double normaliser = 0;
            if (asked->num_top >= 0) {
                normaliser = report_top(asked, row, vocabulary, top_tokens + (size_t)r * top_width,
                                        top_logprobs + (size_t)r * top_width, &scratch);
                if (asked->counts || asked->num_edits || asked->mask)
                    original = memcpy(scratch.original, row, sizeof(float) * vocabulary);
            }
            adjust(asked, row, vocabulary, &scratch);
            tokens[r] = choose(asked, row, vocabulary, &scratch);
            if (asked->num_top >= 0)
                logprobs[r] = tokens[r] < 0 ? 0 : (float)(original[tokens[r]] - normaliser);
        }
    }
}
