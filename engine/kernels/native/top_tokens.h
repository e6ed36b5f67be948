/* A row of logits and its tokens' weights: their sums, and the top tokens.
 *
 * Weights are e^((logit - best) / temperature) in float64. A row is processed in blocks of ROW_BLOCK tokens; each block
 * has its largest logit and the sum of its weights. Nothing is sorted: top-k and top-p keep the tokens above a cut in
 * the order of logits, which is found by histograms of ever narrower ranges, first among the few tokens above a bound.
 */
#ifndef TOP_TOKENS_H
#define TOP_TOKENS_H

#include "transpose.h"
#include "vec.h"

#include <float.h>
#include <math.h>

#define ROW_BLOCK 256 /* tokens that share a maximum and a sum */
#define BUCKETS 1024  /* of a histogram */

typedef double vd __attribute__((vector_size(VECTOR_BYTES)));
typedef int64_t vl __attribute__((vector_size(VECTOR_BYTES)));
typedef uint64_t vul __attribute__((vector_size(VECTOR_BYTES)));
typedef float vf_half __attribute__((vector_size(VECTOR_BYTES / 2), aligned(4), may_alias));
typedef double vd_anywhere __attribute__((vector_size(VECTOR_BYTES), aligned(8), may_alias));

/* A list of tokens in vocabulary order. */
typedef struct {
    int32_t *ids;
    float *logits;
    double *weights;
} List;

typedef struct {
    List list;        /* [vocabulary + a vector's width] */
    int32_t *indices; /* the same, for find_cut */
    float *maxima;    /* of each block */
    double *sums;     /* the same */
    float *original;  /* [vocabulary]: a row before it was adjusted */
} SampleScratch;

/* A cut: the top tokens are all above `value`, and the first `ties` that equal it. */
typedef struct {
    float value;
    int ties;
} Cut;

static int vocabulary_blocks(int vocabulary) { return (vocabulary + ROW_BLOCK - 1) / ROW_BLOCK; }

static char *carve_scratch(SampleScratch *scratch, int vocabulary, char *at)
{
    size_t blocks = vocabulary_blocks(vocabulary), wide = blocks * ROW_BLOCK + LANES;
    scratch->list.weights = (double *)at, at += wide * 8;
    scratch->sums = (double *)at, at += (blocks + 8) / 8 * 64;
    scratch->list.ids = (int32_t *)at, at += wide * 4;
    scratch->list.logits = (float *)at, at += wide * 4;
    scratch->indices = (int32_t *)at, at += wide * 4;
    scratch->original = (float *)at, at += wide * 4;
    scratch->maxima = (float *)at, at += (blocks + 16) / 16 * 64;
    return at;
}

/* Return e^y for y <= 0, to about a rounding error; 0 below -708. The exponent bits of y / ln 2 are added to those of
 * a polynomial. */
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

/* Compute the weights of n logits; n is rounded up to whole vectors. */
static void weigh_tokens(const float *logits, int n, float best, double inverse, double *weights)
{
    for (int i = 0; i < n; i += LANES / 2)
        *(vd_anywhere *)(weights + i) = weights_at(logits + i, best, inverse);
}

/* Return a block of a row; the last one is padded with logits of no weight. */
static const float *block_of(const float *row, int vocabulary, int block, float *padded)
{
    int count = vocabulary - block * ROW_BLOCK;
    if (count >= ROW_BLOCK)
        return row + block * ROW_BLOCK;
    memcpy(padded, row + block * ROW_BLOCK, sizeof(float) * count);
    for (int i = count; i < ROW_BLOCK; i++)
        padded[i] = -INFINITY;
    return padded;
}

/* Return the largest logit, and store each block's; NaN if there is one. */
static float find_maxima(const float *row, int vocabulary, float *maxima)
{
    float padded[ROW_BLOCK], best = -INFINITY;
    vi odd = {0};
    for (int b = 0; b < vocabulary_blocks(vocabulary); b++) {
        const float *block = block_of(row, vocabulary, b, padded);
        vf first = vload(block), second = vload(block + LANES);
        odd |= (first != first) | (second != second);
        for (int i = 2 * LANES; i < ROW_BLOCK; i += 2 * LANES) {
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

/* Return the weight of all tokens, and store each block's. */
static double find_sums(const float *row, int vocabulary, float best, double inverse, double *sums)
{
    float padded[ROW_BLOCK];
    double total = 0;
    for (int b = 0; b < vocabulary_blocks(vocabulary); b++) {
        const float *block = block_of(row, vocabulary, b, padded);
        vd sum = {0};
        for (int i = 0; i < ROW_BLOCK; i += LANES / 2)
            sum += weights_at(block + i, best, inverse);
        sums[b] = 0;
        for (int i = 0; i < LANES / 2; i++)
            sums[b] += sum[i];
        total += sums[b];
    }
    return total;
}

/* List the tokens with logits of at least `least`; return how many there are. */
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

/* Find the cut that takes the top tokens of n > 0, at least the first, while those taken before weigh less than
 * `wanted`. If weights is NULL, each token weighs 1. All logits must be finite.
 *
 *     hi ┌─────┬─────┬─ ... ─┐ lo      buckets before the one that reaches `wanted` are taken; that one becomes the
 *        └─────┴──┬──┴─ ... ─┘         range, until it holds a single value
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

/* Keep the tokens that a cut takes; return how many there are. */
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

/* List the n > 0 largest of a row's finite logits, or all if there are fewer; return how many. Sets no weights. */
static int find_largest(const float *row, int vocabulary, int n, SampleScratch *scratch)
{
    List *list = &scratch->list;
    int blocks = collect(scratch->maxima, vocabulary_blocks(vocabulary), -FLT_MAX, list);
    /* The n-th largest maximum is no larger than the n-th largest logit. */
    float least = n < blocks ? find_cut(list->logits, NULL, blocks, n, scratch->indices).value : -FLT_MAX;
    int count = collect(row, vocabulary, least, list);
    return count > n ? keep(list, count, find_cut(list->logits, NULL, count, n, scratch->indices)) : count;
}

#endif
