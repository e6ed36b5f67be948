/* The next token of each row of logits, as engine/sampler.py says: what is reported of the row, what changes it, the
 * choice. A row is one thread's, and nothing of its size is allocated but that thread's scratch.
 *
 * Weights and their sums are float64, and a token is drawn in vocabulary order: how sums are rounded then hardly ever
 * decides, and the draw is that of the torch implementation. Nothing is sorted: what top-k and top-p keep is a cut in
 * the order of logits, found by histograms of ever narrower ranges, first among the few tokens above a bound.
 */
#include "transpose.h"
#include "vec.h"

#include <float.h>
#include <math.h>
#include <omp.h>

#define BLOCK 256     /* tokens that share a maximum and a sum */
#define BUCKETS 1024  /* of a histogram */
#define COST_OF_DRAWING 8     /* of a logit, beside finding the largest */
#define WORTH_A_THREAD 262144 /* logits among which the largest is found: some 30 us */

typedef double vd __attribute__((vector_size(VECTOR_BYTES)));
typedef int64_t vl __attribute__((vector_size(VECTOR_BYTES)));
typedef uint64_t vul __attribute__((vector_size(VECTOR_BYTES)));
typedef float vf_half __attribute__((vector_size(VECTOR_BYTES / 2), aligned(4), may_alias));
typedef double vd_anywhere __attribute__((vector_size(VECTOR_BYTES), aligned(8), may_alias));

/* Tokens in vocabulary order. */
typedef struct {
    int32_t *ids;
    float *logits;
    double *weights;
} List;

typedef struct {
    List list;        /* [vocabulary], and a vector's width more */
    int32_t *indices; /* the same: of find_cut */
    int32_t *counts;  /* [vocabulary]: zeros between rows */
    float *maxima;    /* of each block */
    double *sums;     /* the same */
    float *original;  /* [vocabulary]: a row before it was changed */
} SampleScratch;

/* The likeliest tokens: all above `value`, and the first `ties` that equal it. */
typedef struct {
    float value;
    int ties;
} Cut;

static int vocabulary_blocks(int vocabulary) { return (vocabulary + BLOCK - 1) / BLOCK; }

static char *carve_scratch(SampleScratch *scratch, int vocabulary, char *at)
{
    size_t blocks = vocabulary_blocks(vocabulary), wide = blocks * BLOCK + LANES;
    scratch->list.weights = (double *)at, at += wide * 8;
    scratch->sums = (double *)at, at += (blocks + 8) / 8 * 64;
    scratch->list.ids = (int32_t *)at, at += wide * 4;
    scratch->list.logits = (float *)at, at += wide * 4;
    scratch->indices = (int32_t *)at, at += wide * 4;
    scratch->counts = (int32_t *)at, at += wide * 4;
    scratch->original = (float *)at, at += wide * 4;
    scratch->maxima = (float *)at, at += (blocks + 16) / 16 * 64;
    return at;
}

/* Bytes of workspace that raydix_sample needs, aligned to 64. */
EXPORT int64_t NAME(raydix_sample_bytes)(int vocabulary, int threads)
{
    SampleScratch scratch;
    return (int64_t)(uintptr_t)carve_scratch(&scratch, vocabulary, NULL) * threads;
}

/* e^y to about a rounding error, for y <= 0; 0 below -708. The exponent's bits of y / ln 2 are added to a polynomial's. */
static inline vd exp_below(vd y)
{
    static const double factors[] = {1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320,
                                     1.0 / 5040,      1.0 / 720,      1.0 / 120,     1.0 / 24,     1.0 / 6,
                                     0.5,             1.0,            1.0};
    vl tiny = y < -708.0;
    vd shifted = y * 1.4426950408889634 + 6755399441055744.0; /* 1.5 * 2^52: rounds to an integer, in the low bits */
    vd n = shifted - 6755399441055744.0;
    vd r = y - n * 6.93147180369123816490e-01;
    r = r - n * 1.90821492927058770002e-10;
    vd p = r * (1.0 / 6227020800.0) + factors[0];
    for (int i = 1; i < 13; i++)
        p = p * r + factors[i];
    return (vd)((vul)~tiny & ((vul)p + ((vul)shifted << 52)));
}

static inline vd weights_at(const float *logits, float best, double inverse)
{
    return exp_below((__builtin_convertvector(*(const vf_half *)logits, vd) - (double)best) * inverse);
}

/* n is rounded up to whole vectors. */
static void weigh_tokens(const float *logits, int n, float best, double inverse, double *weights)
{
    for (int i = 0; i < n; i += LANES / 2)
        *(vd_anywhere *)(weights + i) = weights_at(logits + i, best, inverse);
}

/* A block of a row; the last one is filled up with what has no weight. */
static const float *block_of(const float *row, int vocabulary, int block, float *padded)
{
    int count = vocabulary - block * BLOCK;
    if (count >= BLOCK)
        return row + block * BLOCK;
    memcpy(padded, row + block * BLOCK, sizeof(float) * count);
    for (int i = count; i < BLOCK; i++)
        padded[i] = -INFINITY;
    return padded;
}

/* The largest logit, and each block's; NaN where there is one. */
static float find_maxima(const float *row, int vocabulary, float *maxima)
{
    float padded[BLOCK], best = -INFINITY;
    vi odd = {0};
    for (int b = 0; b < vocabulary_blocks(vocabulary); b++) {
        const float *block = block_of(row, vocabulary, b, padded);
        vf first = vload(block), second = vload(block + LANES);
        odd |= (first != first) | (second != second);
        for (int i = 2 * LANES; i < BLOCK; i += 2 * LANES) {
            vf x = vload(block + i), y = vload(block + i + LANES);
            odd |= (x != x) | (y != y);
            first = vmax(first, x);
            second = vmax(second, y);
        }
        maxima[b] = vlargest(vmax(first, second));
        best = maxima[b] > best ? maxima[b] : best;
    }
    int any = 0;
    for (int i = 0; i < LANES; i++)
        any |= odd[i];
    return any ? NAN : best;
}

/* The weight of all tokens, and of each block. */
static double find_sums(const float *row, int vocabulary, float best, double inverse, double *sums)
{
    float padded[BLOCK];
    double total = 0;
    for (int b = 0; b < vocabulary_blocks(vocabulary); b++) {
        const float *block = block_of(row, vocabulary, b, padded);
        vd sum = {0};
        for (int i = 0; i < BLOCK; i += LANES / 2)
            sum += weights_at(block + i, best, inverse);
        sums[b] = 0;
        for (int i = 0; i < LANES / 2; i++)
            sums[b] += sum[i];
        total += sums[b];
    }
    return total;
}

/* The tokens of at least `least`; how many they are. */
static int collect(const float *row, int n, float least, List *list)
{
    int count = 0, i = 0;
#if defined(__AVX512F__)
    __m512i ids = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (; i + 16 <= n; i += 16, ids = _mm512_add_epi32(ids, _mm512_set1_epi32(16))) {
        __m512 x = _mm512_loadu_ps(row + i);
        __mmask16 mask = _mm512_cmp_ps_mask(x, _mm512_set1_ps(least), _CMP_GE_OQ);
        if (!mask)
            continue;
        _mm512_storeu_ps(list->logits + count, _mm512_maskz_compress_ps(mask, x));
        _mm512_storeu_si512(list->ids + count, _mm512_maskz_compress_epi32(mask, ids));
        count += __builtin_popcount(mask);
    }
#endif
    for (; i < n; i++) {
        list->ids[count] = i;
        list->logits[count] = row[i];
        count += row[i] >= least;
    }
    return count;
}

/* The cut that takes the likeliest of n > 0 tokens, the first included, while what was taken before weighs less than
 * `wanted`. weights: NULL: 1 each. All logits are finite.
 *
 *     hi ┌─────┬─────┬─ ... ─┐ lo      what lies before the bucket that reaches `wanted` is taken; it becomes the range
 *        └─────┴──┬──┴─ ... ─┘         until it holds a single value
 */
static Cut find_cut(const float *logits, const double *weights, int n, double wanted, int32_t *indices)
{
    double sums[BUCKETS], taken = 0;
    for (int i = 0; i < n; i++)
        indices[i] = i;
    for (;;) {
        float lo = logits[indices[0]], hi = lo;
        for (int i = 1; i < n; i++) {
            float x = logits[indices[i]];
            lo = x < lo ? x : lo;
            hi = x > hi ? x : hi;
        }
        if (lo == hi) {
            int ties = 0;
            do
                taken += weights ? weights[indices[0]] : 1;
            while (++ties < n && taken < wanted);
            return (Cut){lo, ties};
        }
        double scale = (BUCKETS - 1) / ((double)hi - lo);
        memset(sums, 0, sizeof sums);
        for (int i = 0; i < n; i++)
            sums[(int)(((double)hi - logits[indices[i]]) * scale)] += weights ? weights[indices[i]] : 1;
        int bucket = 0, left = 0;
        while (bucket < BUCKETS && taken + sums[bucket] < wanted)
            taken += sums[bucket++];
        if (bucket == BUCKETS)
            return (Cut){lo, n};
        for (int i = 0; i < n; i++) {
            int32_t index = indices[i];
            indices[left] = index;
            left += (int)(((double)hi - logits[index]) * scale) == bucket;
        }
        n = left;
    }
}

/* Leave what a cut takes; how many that is. */
static int keep(List *list, int n, Cut cut)
{
    int kept = 0;
    for (int i = 0; i < n; i++) {
        list->ids[kept] = list->ids[i];
        float x = list->logits[kept] = list->logits[i];
        list->weights[kept] = list->weights[i];
        bool is_tie = x == cut.value && cut.ties > 0;
        cut.ties -= is_tie;
        kept += x > cut.value || is_tie;
    }
    return kept;
}

/* The n > 0 largest of a row's finite logits, or all of them, as a list; how many. Its weights are not set. */
static int find_largest(const float *row, int vocabulary, int n, SampleScratch *scratch)
{
    List *list = &scratch->list;
    int blocks = collect(scratch->maxima, vocabulary_blocks(vocabulary), -FLT_MAX, list);
    /* The n-th largest maximum is no larger than the n-th largest logit. */
    float least = n < blocks ? find_cut(list->logits, NULL, blocks, n, scratch->indices).value : -FLT_MAX;
    int count = collect(row, vocabulary, least, list);
    return count > n ? keep(list, count, find_cut(list->logits, NULL, count, n, scratch->indices)) : count;
}

static uint64_t mix(uint64_t x)
{
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

/* As engine/sampling/noise.py. */
static double uniform(uint64_t seed, uint64_t position)
{
    const uint64_t gamma = 0x9E3779B97F4A7C15u;
    return (double)(mix(mix(seed + gamma) + (position + 1) * gamma) >> 11) * 0x1p-53;
}

/* A share of the total which is less than the total even when rounded. */
static double share(double noise, double total) { return fmin(noise * total, nextafter(total, 0)); }

/* The first whose cumulated weight, on top of `before`, exceeds `wanted`; the last that weighs anything if none does. */
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
    float padded[BLOCK];
    double weights[BLOCK], before = 0;
    double wanted = share(noise, find_sums(row, vocabulary, best, inverse, sums));
    int block = 0, last = vocabulary_blocks(vocabulary) - 1;
    while (block < last && !(before + sums[block] > wanted))
        before += sums[block++];
    weigh_tokens(block_of(row, vocabulary, block, padded), BLOCK, best, inverse, weights);
    return block * BLOCK + walk(weights, BLOCK, before, wanted);
}

static int draw_from_likeliest(const SampledRow *asked, const float *row, int vocabulary, float best, double inverse,
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
        double least = asked->min_p; /* weight; the best's is 1 */
        if (asked->top_p < 1) {
            total = find_sums(row, vocabulary, best, inverse, scratch->sums);
            /* Tokens below it weigh_tokens less than 1 - top_p together. */
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

/* A token; -1 when no choice is valid. */
static int choose(const SampledRow *asked, const float *row, int vocabulary, SampleScratch *scratch)
{
    float best = find_maxima(row, vocabulary, scratch->maxima);
    if (!isfinite(best))
        return -1;
    if (asked->temperature == 0) {
        int block = 0, token;
        while (scratch->maxima[block] != best)
            block++;
        for (token = block * BLOCK; row[token] != best;)
            token++;
        return token;
    }
    double inverse = fmin(1 / asked->temperature, DBL_MAX), noise = uniform(asked->seed, asked->position);
    if (!asked->top_k && asked->top_p >= 1 && asked->min_p == 0)
        return draw_from_all(row, vocabulary, best, inverse, noise, scratch->sums);
    return draw_from_likeliest(asked, row, vocabulary, best, inverse, noise, scratch);
}

static bool is_known(int64_t token, int vocabulary) { return token >= 0 && token < vocabulary; }

static void penalize(const SampledRow *asked, float *row, int vocabulary, int32_t *counts)
{
    if (asked->repetition != 1) {
        for (int i = 0; i < asked->num_history; i++) {
            int64_t token = asked->history[i];
            if (is_known(token, vocabulary) && !counts[token]++)
                row[token] = row[token] > 0 ? row[token] / asked->repetition : row[token] * asked->repetition;
        }
        for (int i = 0; i < asked->num_history; i++)
            if (is_known(asked->history[i], vocabulary))
                counts[asked->history[i]] = 0;
    }
    if (asked->presence == 0 && asked->frequency == 0)
        return;
    for (int i = asked->num_prompt; i < asked->num_history; i++)
        if (is_known(asked->history[i], vocabulary))
            counts[asked->history[i]]++;
    for (int i = asked->num_prompt; i < asked->num_history; i++) {
        int64_t token = asked->history[i];
        if (!is_known(token, vocabulary) || !counts[token])
            continue;
        row[token] -= (float)(asked->presence + asked->frequency * counts[token]);
        counts[token] = 0;
    }
}

/* As engine/sampling/adjust.py, then the grammar's mask. */
static void change(const SampledRow *asked, float *row, int vocabulary, int32_t *counts)
{
    penalize(asked, row, vocabulary, counts);
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

/* The likeliest tokens, best first and the lower id among equals; -1 after the last. Returns the row's normaliser. */
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

/* Waiting for a thread may take longer than the work. */
static int worthwhile(const SampledRow *rows, int num_rows, int vocabulary, int threads)
{
    int64_t cost = 0;
    for (int r = 0; r < num_rows; r++)
        cost += rows[r].temperature > 0 || rows[r].num_top >= 0 ? COST_OF_DRAWING : 1;
    int64_t worth = 1 + cost * vocabulary / WORTH_A_THREAD;
    threads = threads < num_rows ? threads : num_rows;
    return threads < worth ? threads : (int)worth;
}

/* logits: float32 [num_rows][vocabulary], rows `stride` apart; changed as the rows ask for. tokens: [num_rows], -1
 * where no choice is valid. What rows with num_top >= 0 report goes to logprobs [num_rows], of the token, and to
 * top_tokens and top_logprobs, [num_rows][top_width]. */
EXPORT void NAME(raydix_sample)(const SampledRow *rows, int num_rows, float *logits, int64_t stride, int vocabulary,
                                int64_t *tokens, float *logprobs, int32_t *top_tokens, float *top_logprobs,
                                int top_width, char *workspace, int threads)
{
    threads = worthwhile(rows, num_rows, vocabulary, threads);
    size_t size = (size_t)NAME(raydix_sample_bytes)(vocabulary, 1);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        SampleScratch scratch;
        bool has_counts = false;
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
                if (asked->num_history || asked->num_edits || asked->mask)
                    original = memcpy(scratch.original, row, sizeof(float) * vocabulary);
            }
            if (asked->num_history && !has_counts) {
                memset(scratch.counts, 0, sizeof(int32_t) * vocabulary);
                has_counts = true;
            }
            change(asked, row, vocabulary, scratch.counts);
            tokens[r] = choose(asked, row, vocabulary, &scratch);
            if (asked->num_top >= 0)
                logprobs[r] = tokens[r] < 0 ? 0 : (float)(original[tokens[r]] - normaliser);
        }
    }
}
